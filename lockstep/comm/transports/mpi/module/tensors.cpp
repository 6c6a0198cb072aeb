#include <lockstep/comm/transports/mpi/module/tensors.h>

namespace lockstep::detail::mpi {

void check_tensor(const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), "mpi: expected a tensor, got an undefined one");
  TORCH_CHECK(tensor.layout() == at::kStrided && !tensor.is_quantized(), "mpi: tensors must be dense");
  TORCH_CHECK(tensor.device().is_cpu(), "mpi: tensors must be on the CPU, not on ", tensor.device());
  TORCH_CHECK(tensor.is_contiguous(), "mpi: tensors must be contiguous");
}

const at::Tensor& one_of(const Tensors& tensors) {
  TORCH_CHECK(tensors.size() == 1, "mpi: expected one tensor, got ", tensors.size());
  check_tensor(tensors[0]);
  return tensors[0];
}

const Tensors& list_of(const std::vector<Tensors>& lists, int size, at::ScalarType type) {
  TORCH_CHECK(lists.size() == 1 && lists[0].size() == static_cast<std::size_t>(size),
              "mpi: expected one list of ", size, " tensors");
  for (const auto& tensor : lists[0]) {
    check_tensor(tensor);
    TORCH_CHECK(tensor.scalar_type() == type, "mpi: expected tensors of one dtype, got ",
                tensor.scalar_type(), " and ", type);
  }
  return lists[0];
}

void check_same_type(const at::Tensor& a, const at::Tensor& b) {
  check_tensor(a);
  check_tensor(b);
  TORCH_CHECK(a.scalar_type() == b.scalar_type(), "mpi: expected tensors of one dtype, got ", a.scalar_type(),
              " and ", b.scalar_type());
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return data_of(a) == data_of(b) && bytes_of(a) == bytes_of(b);
}

Tensors split_rows(const at::Tensor& tensor, const std::vector<std::int64_t>& splits, int size) {
  const auto flat = tensor.detach().view(-1);
  Tensors parts;
  const std::int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK(rows % size == 0 || tensor.numel() == 0, "mpi: ", rows, " rows cannot be split into ", size,
                " equal parts");
    return parts_of(tensor, size);
  }
  TORCH_CHECK(splits.size() == static_cast<std::size_t>(size), "mpi: expected ", size,
              " splits, one per rank, got ", splits.size());
  const std::int64_t row = rows == 0 ? 0 : tensor.numel() / rows;
  std::int64_t start = 0;
  for (const auto count : splits) {
    TORCH_CHECK(count >= 0 && start + count <= rows, "mpi: the splits exceed the ", rows,
                " rows of the tensor");
    parts.push_back(flat.narrow(0, start * row, count * row));
    start += count;
  }
  TORCH_CHECK(start == rows, "mpi: expected splits that add up to ", rows, " rows, got ", start);
  return parts;
}

Tensors parts_of(const at::Tensor& tensor, int size) {
  const auto flat = tensor.detach().view(-1);
  const auto each = flat.numel() / size;
  Tensors parts;
  for (int r = 0; r < size; ++r) parts.push_back(flat.narrow(0, r * each, each));
  return parts;
}

}  // namespace lockstep::detail::mpi
