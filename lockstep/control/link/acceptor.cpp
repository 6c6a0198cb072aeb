#include <lockstep/control/link/acceptor.h>

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include <lockstep/control/link/key.h>

namespace lockstep::control {
namespace {

using std::chrono::milliseconds;

// Per call of serve(), whose thread has other work too.
constexpr int kAcceptedAtOnce = 16;

Fd open_spare() { return Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC)); }

}  // namespace

Acceptor::Acceptor(TcpListener listener, std::string key, std::string context,
                   std::function<void(const std::string&)> say)
    : listener_(std::move(listener)),
      key_(std::move(key)),
      context_(std::move(context)),
      say_(std::move(say)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      timer_(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)),
      spare_(open_spare()) {
  LOCKSTEP_ASSERT(key_.size() == kKeySize, "a job's key has 32 bytes");
  if (!epoll_ || !timer_) throw Error(fmt::format("cannot wait for connections: {}", std::strerror(errno)));
  watch(listener_.fd.get(), EPOLL_CTL_ADD);
  watch(timer_.get(), EPOLL_CTL_ADD);
}

Acceptor::~Acceptor() { forget(key_); }

void Acceptor::watch(int fd, int operation, bool wanted) {
  epoll_event event{};
  if (wanted) event.events = EPOLLIN;
  event.data.fd = fd;
  if (::epoll_ctl(epoll_.get(), operation, fd, &event) != 0)
    throw Error(fmt::format("cannot watch a connection: {}", std::strerror(errno)));
}

std::vector<Acceptor::Guest> Acceptor::serve() {
  std::array<epoll_event, kMostStrangers + 2> events{};
  const int ready = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), 0);
  std::vector<Guest> guests;
  bool knock = !awaits_knocks_;  // The listener is not watched then, so epoll would not report it.
  // Existing connections first: new ones may displace them.
  for (int i = 0; i < ready; ++i) {
    const int fd = events[static_cast<std::size_t>(i)].data.fd;
    if (fd == listener_.fd.get()) {
      knock = true;
      continue;
    }
    const auto stranger = std::find_if(strangers_.begin(), strangers_.end(),
                                       [&](const Stranger& one) { return one.guest.fd.get() == fd; });
    if (stranger == strangers_.end()) continue;
    if (const auto problem = hear(stranger->guest)) {
      refuse(stranger, *problem);
    } else if (stranger->guest.link.proven()) {
      ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
      guests.push_back(std::move(stranger->guest));
      strangers_.erase(stranger);
    }
  }
  if (knock) accept_some();
  while (!strangers_.empty() && strangers_.front().came + kPatience <= Clock::now())
    refuse(strangers_.begin(), fmt::format("it did not prove the key within {} ms", kPatience.count()));
  report();
  set_timer();
  return guests;
}

// Setting the timer also makes it unreadable.
void Acceptor::set_timer() {
  itimerspec when{};
  if (!strangers_.empty() || refused_ > 0) {
    const auto left = std::max(next_deadline(), milliseconds(1));  // 0 would be never
    when.it_value = {left.count() / 1000, left.count() % 1000 * 1'000'000};
  }
  ::timerfd_settime(timer_.get(), 0, &when, nullptr);
}

// Reads from the guest. Returns what is wrong with its input, or nothing if it may continue.
std::optional<std::string> Acceptor::hear(Guest& guest) {
  std::array<char, SecureLink::kMostBeforeProof> bytes;
  const auto size = ::recv(guest.fd.get(), bytes.data(), bytes.size(), 0);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  if (size <= 0) return "it disconnected before proving the key";
  try {
    guest.link.receive({bytes.data(), static_cast<std::size_t>(size)});
  } catch (const FrameError& error) {
    return error.what();
  }
  // So few bytes always fit into a new connection's buffer.
  const auto answer = guest.link.take_output();
  if (::send(guest.fd.get(), answer.data(), answer.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(answer.size()))
    return "it does not read the answer";
  return std::nullopt;
}

bool Acceptor::full_of_newcomers() const {
  return strangers_.size() == kMostStrangers && Clock::now() < strangers_.front().came + kStay;
}

// While there is no room the listener would be readable all the time.
void Acceptor::await_knocks(bool wanted) {
  if (std::exchange(awaits_knocks_, wanted) != wanted) watch(listener_.fd.get(), EPOLL_CTL_MOD, wanted);
}

void Acceptor::accept_some() {
  for (int i = 0; i < kAcceptedAtOnce && !full_of_newcomers(); ++i) {
    auto fd = accept_tcp(listener_.fd.get());
    if (!fd) {
      if (errno == EMFILE || errno == ENFILE) turn_one_away();
      break;
    }
    if (strangers_.size() == kMostStrangers)
      refuse(strangers_.begin(),
             fmt::format("it was the oldest of {} connections that had not proven the key", kMostStrangers));
    std::string from = remote_address_of(fd->get());
    try {
      watch(fd->get(), EPOLL_CTL_ADD);
    } catch (const Error& error) {
      count_refusal(std::move(from), error.what());
      continue;
    }
    strangers_.push_back(
        {{std::move(*fd), SecureLink(SecureLink::Side::listener, key_, context_), std::move(from)},
         Clock::now()});
  }
  await_knocks(!full_of_newcomers());
}

// Accepts one connection and closes it: otherwise the listener would stay readable and keep its thread busy.
void Acceptor::turn_one_away() {
  spare_.reset();
  if (const auto fd = accept_tcp(listener_.fd.get()))
    count_refusal(remote_address_of(fd->get()), "this process has too many open files");
  spare_ = open_spare();
}

void Acceptor::refuse(Place stranger, const std::string& why) {
  count_refusal(std::move(stranger->guest.from), why);
  strangers_.erase(stranger);  // Closing the descriptor removes it from epoll.
}

void Acceptor::count_refusal(std::string from, std::string why) {
  ++refused_;
  last_from_ = from.empty() ? "an unknown address" : std::move(from);
  last_why_ = std::move(why);
}

void Acceptor::report() {
  const auto now = Clock::now();
  if (refused_ == 0 || now < next_report_) return;
  const auto count = std::exchange(refused_, 0);
  next_report_ = now + kBetweenReports;
  if (!say_) return;
  say_(count == 1
           ? fmt::format("refused a connection at {} from {}: {}", listener_.text(), last_from_, last_why_)
           : fmt::format("refused {} connections at {}; the last from {}: {}", count, listener_.text(),
                         last_from_, last_why_));
}

milliseconds Acceptor::next_deadline() const {
  const auto now = Clock::now();
  auto next = now + std::chrono::minutes(1);
  if (!strangers_.empty())
    next = std::min(next, strangers_.front().came + (awaits_knocks_ ? kPatience : kStay));
  if (refused_ > 0) next = std::min(next, next_report_);
  return std::max(std::chrono::ceil<milliseconds>(next - now), milliseconds(0));
}

void Acceptor::change_context(std::string context) {
  context_ = std::move(context);
  while (!strangers_.empty()) refuse(strangers_.begin(), "its attempt is over");
  set_timer();
}

}  // namespace lockstep::control
