#include <lockstep/modules/detail/unready_gradient.h>

#include <limits>
#include <utility>

#include <ATen/ATen.h>
#include <lockstep/base/error.h>

namespace lockstep::detail {
namespace {

struct UnreadyStorage final : c10::StorageImpl {
  UnreadyStorage(at::Device device, std::string its_text)
      // Large enough for a view of any parameter. Nothing is allocated.
      : c10::StorageImpl(use_byte_size_t(), std::size_t(std::numeric_limits<std::int64_t>::max()),
                         c10::DataPtr(nullptr, device), nullptr, false),
        text(std::move(its_text)) {
    release_data_and_set_meta_custom_data_ptr_error_msg_(text);
  }
  const std::string text;
};

}  // namespace

c10::Storage unready_storage(at::Device device, std::string text) {
  return c10::Storage(c10::make_intrusive<UnreadyStorage>(device, std::move(text)));
}

at::Tensor unready_gradient(const at::Tensor& parameter, const c10::Storage& storage) {
  auto gradient = at::empty({0}, parameter.options().requires_grad(false));
  auto* impl = gradient.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_sizes_and_strides(parameter.sizes(), parameter.strides());
  return gradient;
}

const std::string* unready_text(const at::Tensor& gradient) {
  if (!gradient.defined() || !gradient.has_storage()) return nullptr;
  const auto* storage = dynamic_cast<UnreadyStorage*>(gradient.storage().unsafeGetStorageImpl());
  return storage == nullptr ? nullptr : &storage->text;
}

void require_ready(const at::Tensor& gradient) {
  if (const auto* text = unready_text(gradient)) throw ConfigError(*text);
}

at::Tensor take_gradient(const at::Tensor& parameter) {
  auto gradient = std::exchange(parameter.mutable_grad(), {});
  return unready_text(gradient) ? at::Tensor() : gradient;
}

}  // namespace lockstep::detail
