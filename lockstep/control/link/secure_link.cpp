#include <lockstep/control/link/secure_link.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <utility>

#include <fmt/format.h>
#include <sodium.h>

#include <lockstep/control/link/key.h>

namespace lockstep::control {
namespace {

using Bytes = std::array<unsigned char, 32>;
using StreamHeader = std::array<unsigned char, crypto_secretstream_xchacha20poly1305_HEADERBYTES>;
using Length = std::uint32_t;

// The last digit is the version of the protocol in the header.
constexpr std::string_view kMagic = "lockstp1";
constexpr std::size_t kGreetingSize = kMagic.size() + sizeof(Bytes);
constexpr std::size_t kProofSize = sizeof(StreamHeader) + sizeof(Bytes);
constexpr std::size_t kSealSize = crypto_secretstream_xchacha20poly1305_ABYTES;
static_assert(kGreetingSize <= SecureLink::kMostBeforeProof && kProofSize <= SecureLink::kMostBeforeProof);
static_assert(sizeof(Bytes) == kKeySize && kKeySize == crypto_secretstream_xchacha20poly1305_KEYBYTES);

const unsigned char* raw(std::string_view bytes) {
  return reinterpret_cast<const unsigned char*>(bytes.data());
}

template <typename T>
std::string_view view(const T& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

template <typename T>
void assign(T& bytes, std::string_view from) {
  std::copy_n(from.begin(), bytes.size(), bytes.begin());
}

}  // namespace

struct SecureLink::Secrets {
  Bytes key{}, context{}, caller{}, listener{};  // The last two are the random bytes of either side.
  crypto_secretstream_xchacha20poly1305_state out{}, in{};

  Secrets(std::string_view job_key, std::string_view text) {
    assign(key, job_key);
    ::crypto_generichash(context.data(), context.size(), raw(text), text.size(), nullptr, 0);
  }
  ~Secrets() { ::sodium_memzero(this, sizeof *this); }

  // Includes the purpose's final 0, so that no purpose is a prefix of another.
  Bytes derive(const char* purpose, std::string_view extra = {}) const {
    Bytes result{};
    crypto_generichash_state state;
    ::crypto_generichash_init(&state, key.data(), key.size(), result.size());
    ::crypto_generichash_update(&state, reinterpret_cast<const unsigned char*>(purpose),
                                std::strlen(purpose) + 1);
    for (const auto& part : {view(caller), view(listener), view(context), extra})
      ::crypto_generichash_update(&state, raw(part), part.size());
    ::crypto_generichash_final(&state, result.data(), result.size());
    ::sodium_memzero(&state, sizeof state);
    return result;
  }

  static const char* proof_of(Side side) {
    return side == Side::caller ? "lockstep: the caller's proof" : "lockstep: the listener's proof";
  }
  static const char* stream_of(Side side) {
    return side == Side::caller ? "lockstep: what the caller says" : "lockstep: what the listener says";
  }
};

SecureLink::SecureLink(Side side, std::string_view key, std::string_view context)
    : side_(side), stage_(side == Side::caller ? Stage::challenge : Stage::hello) {
  LOCKSTEP_ASSERT(key.size() == kKeySize, "a job's key has 32 bytes");
  use_sodium();
  secrets_ = std::make_unique<Secrets>(key, context);
  if (side == Side::caller) greet();
}

SecureLink::SecureLink(SecureLink&&) noexcept = default;
SecureLink& SecureLink::operator=(SecureLink&&) noexcept = default;
SecureLink::~SecureLink() = default;

void SecureLink::greet() {
  Bytes& own = side_ == Side::caller ? secrets_->caller : secrets_->listener;
  ::randombytes_buf(own.data(), own.size());
  output_ += kMagic;
  output_ += view(own);
}

void SecureLink::prove() {
  StreamHeader header{};
  Bytes key = secrets_->derive(Secrets::stream_of(side_));
  ::crypto_secretstream_xchacha20poly1305_init_push(&secrets_->out, header.data(), key.data());
  ::sodium_memzero(key.data(), key.size());
  output_ += view(header);
  output_ += view(secrets_->derive(Secrets::proof_of(side_), view(header)));
}

void SecureLink::check_proof(std::string_view proof) {
  const Side other = side_ == Side::caller ? Side::listener : Side::caller;
  const auto header = proof.substr(0, sizeof(StreamHeader));
  const Bytes expected = secrets_->derive(Secrets::proof_of(other), header);
  if (::sodium_memcmp(expected.data(), raw(proof.substr(header.size())), expected.size()) != 0)
    fail("it did not prove the key");
  Bytes key = secrets_->derive(Secrets::stream_of(other));
  ::crypto_secretstream_xchacha20poly1305_init_pull(&secrets_->in, raw(header), key.data());
  ::sodium_memzero(key.data(), key.size());
}

void SecureLink::fail(const std::string& why) {
  stage_ = Stage::failed;
  secrets_.reset();
  input_.clear();
  output_.clear();
  messages_.clear();
  throw FrameError(why);
}

void SecureLink::receive(std::span<const char> bytes) {
  if (stage_ == Stage::failed) throw FrameError("the connection has failed before");
  input_.append(bytes.data(), bytes.size());
  std::string_view input = input_;
  while (advance(input)) {
  }
  input_.erase(0, input_.size() - input.size());
}

// Takes one complete message from the front of the input, if there is one.
bool SecureLink::advance(std::string_view& input) {
  if (stage_ == Stage::open) {
    Length length = 0;
    if (input.size() < sizeof length) return false;
    std::memcpy(&length, input.data(), sizeof length);
    if (length < kSealSize || length > kMostMessage + kSealSize)
      fail(fmt::format("it announced a message of {} bytes", length));
    if (input.size() < sizeof length + length) return false;
    const auto sealed = input.substr(sizeof length, length);
    std::string message(length - kSealSize, '\0');
    unsigned char tag = 0;
    if (::crypto_secretstream_xchacha20poly1305_pull(
            &secrets_->in, reinterpret_cast<unsigned char*>(message.data()), nullptr, &tag, raw(sealed),
            sealed.size(), raw(input), sizeof length) != 0 ||
        tag != crypto_secretstream_xchacha20poly1305_TAG_MESSAGE)
      fail("a message was modified in transit");
    input.remove_prefix(sizeof length + length);
    messages_.push_back(std::move(message));
    return true;
  }

  const bool greeting = stage_ == Stage::hello || stage_ == Stage::challenge;
  const auto size = greeting ? kGreetingSize : kProofSize;
  if (greeting && !input.starts_with(kMagic.substr(0, input.size()))) fail("it speaks another protocol");
  if (input.size() < size) return false;
  const auto message = input.substr(0, size);
  input.remove_prefix(size);
  // Data may follow only the listener's proof, the last one: before it each side waits for the other.
  if (!input.empty() && stage_ != Stage::listener_proof) fail("it sent data out of turn");
  switch (stage_) {
    case Stage::hello:
      assign(secrets_->caller, message.substr(kMagic.size()));
      greet();
      stage_ = Stage::caller_proof;
      break;
    case Stage::challenge:
      assign(secrets_->listener, message.substr(kMagic.size()));
      if (secrets_->listener == secrets_->caller) fail("it reflected our own greeting");
      prove();
      stage_ = Stage::listener_proof;
      break;
    default:
      check_proof(message);
      if (stage_ == Stage::caller_proof) prove();
      ::sodium_memzero(secrets_->key.data(), secrets_->key.size());
      stage_ = Stage::open;
  }
  return true;
}

std::string SecureLink::take_output() { return std::exchange(output_, {}); }

bool SecureLink::proven() const { return stage_ == Stage::open; }

void SecureLink::send(std::string_view message) {
  LOCKSTEP_ASSERT(proven(), "nothing is sent before the key is proven");
  if (message.size() > kMostMessage)
    throw FrameError(
        fmt::format("expected a message of at most {} bytes, got {}", kMostMessage, message.size()));
  const auto length = static_cast<Length>(message.size() + kSealSize);
  const auto begin = output_.size();
  output_.resize(begin + sizeof length + length);
  auto* out = reinterpret_cast<unsigned char*>(output_.data() + begin);
  std::memcpy(out, &length, sizeof length);
  ::crypto_secretstream_xchacha20poly1305_push(&secrets_->out, out + sizeof length, nullptr, raw(message),
                                               message.size(), out, sizeof length,
                                               crypto_secretstream_xchacha20poly1305_TAG_MESSAGE);
}

std::optional<std::string> SecureLink::next() {
  if (messages_.empty()) return std::nullopt;
  std::optional<std::string> message(std::move(messages_.front()));
  messages_.pop_front();
  return message;
}

}  // namespace lockstep::control
