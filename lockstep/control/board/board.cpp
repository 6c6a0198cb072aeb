#include <lockstep/control/board/board.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <system_error>

namespace lockstep::control {
namespace {

constexpr std::int64_t kDay = 24 * 3600 * 1000;  // In ms; waits and ages are capped there.

// Coarse, to a few milliseconds: sufficient for waits, and several times cheaper than a finer clock.
std::int64_t now_ms() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1'000'000;
}

// Precise: for waits inside a step, which may last less than the coarse clock's resolution.
std::int64_t now_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::int64_t>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

std::int64_t time_since(std::int64_t then, std::int64_t now) {
  return then < 0 || then > now ? 0 : std::min(now - then, kDay);
}

// -1 means "none" everywhere.
template <typename T>
T number_or_none(T value) {
  return std::max<T>(value, -1);
}

template <std::size_t N>
std::string text(const char (&from)[N]) {
  return {from, ::strnlen(from, N)};
}

}  // namespace

// Not in the unnamed namespace: Board::Page, which has linkage, contains these.
namespace board {

// The part that every operation changes.
struct State {
  std::int64_t sequence, waits_for;
  std::int64_t changed_ms, waits_since_ms;
  std::int32_t peer;
  std::uint8_t used, retired, message, running;  // Not bool: the reader may find any value there.
};

struct Line {
  State state;
  std::int64_t key;
  char group[40], operation[sizeof CallTexts::operation], site[sizeof CallTexts::site];
};

// A seqlock written by the rank and read by the agent: the version is odd during a write. Every word is
// stored with release and loaded with acquire, so that a reader that sees a new word also sees the odd
// version.
class VersionedLine {
 public:
  template <typename T>  // Line, or the State at its beginning
  T get() const {        // For the only writer.
    static_assert(sizeof(T) % 8 == 0);
    T value;
    std::uint64_t words[sizeof(T) / 8];
    for (std::size_t i = 0; i < std::size(words); ++i) words[i] = words_[i].load(std::memory_order_relaxed);
    std::memcpy(&value, words, sizeof value);
    return value;
  }
  std::optional<Line> read() const {  // nullopt during a write
    const auto before = version_.load(std::memory_order_acquire);
    Line line;
    std::uint64_t words[kWords];
    for (std::size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_acquire);
    if (before % 2 != 0 || version_.load(std::memory_order_relaxed) != before) return std::nullopt;
    std::memcpy(&line, words, sizeof line);
    return line;
  }
  template <typename T>
  void set(const T& value) {
    std::uint64_t words[sizeof(T) / 8];
    std::memcpy(words, &value, sizeof value);
    const auto version = version_.load(std::memory_order_relaxed);
    version_.store(version + 1, std::memory_order_relaxed);
    // Most words are unchanged: a rank that repeats a call changes a number and a time.
    for (std::size_t i = 0; i < std::size(words); ++i)
      if (words_[i].load(std::memory_order_relaxed) != words[i])
        words_[i].store(words[i], std::memory_order_release);
    version_.store(version + 2, std::memory_order_release);
  }

 private:
  static constexpr std::size_t kWords = sizeof(Line) / 8;
  std::atomic<std::uint64_t> version_;
  std::atomic<std::uint64_t> words_[kWords];
};

}  // namespace board
using namespace board;

struct Board::Page {
  pthread_mutex_t alive;
  std::atomic<std::int64_t> step, committed;
  // Threads that issue operations, and how many of these are in a wait.
  std::atomic<std::int32_t> threads, blocked;
  StepRecord progress;
  VersionedLine lines[Board::kLines];
};

// Layout of each rank's part: its page, then its ring.
constexpr std::size_t kPage = 8192;
constexpr std::size_t kShare = kPage + (sizeof(FlightRing) + 4095) / 4096 * 4096;
static_assert(sizeof(Board::Page) <= kPage);

Board::Board(int num_ranks) : fd_(::memfd_create("lockstep board", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
  if (fd_ < 0) throw std::system_error(errno, std::generic_category(), "memfd_create");
  // Sparse: only pages used by ranks of this host are allocated.
  if (::ftruncate(fd_, static_cast<off_t>(kShare) * num_ranks) != 0 ||
      ::fcntl(fd_, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    const int error = errno;
    ::close(fd_);
    throw std::system_error(error, std::generic_category(), "cannot create the ranks' board");
  }
  map(num_ranks);
}

Board::Board(int fd, int num_ranks) : fd_(fd) { map(num_ranks); }

void Board::map(int num_ranks) {
  length_ = kShare * static_cast<std::size_t>(num_ranks);
  void* memory = ::mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
  if (memory == MAP_FAILED) {
    const int error = errno;
    ::close(fd_);
    throw std::system_error(error, std::generic_category(), "cannot map the ranks' board");
  }
  memory_ = static_cast<char*>(memory);
}

Board::~Board() {
  ::munmap(memory_, length_);
  ::close(fd_);
}

Board::Page& Board::page(int rank) const {
  return *reinterpret_cast<Page*>(memory_ + kShare * static_cast<std::size_t>(rank));
}

FlightRing& Board::ring(int rank) const {
  return *reinterpret_cast<FlightRing*>(memory_ + kShare * static_cast<std::size_t>(rank) + kPage);
}

void Board::prepare(int rank) {
  Page& page = this->page(rank);
  std::memset(static_cast<void*>(&page), 0, sizeof page);
  page.step.store(-1, std::memory_order_relaxed);
  page.committed.store(-1, std::memory_order_relaxed);
  ring(rank).clear();
  pthread_mutexattr_t shared;
  ::pthread_mutexattr_init(&shared);
  ::pthread_mutexattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
  ::pthread_mutexattr_setrobust(&shared, PTHREAD_MUTEX_ROBUST);
  ::pthread_mutex_init(&page.alive, &shared);
  ::pthread_mutexattr_destroy(&shared);
}

bool Board::hold(int rank) { return ::pthread_mutex_trylock(&page(rank).alive) == 0; }

void Board::let_go(int rank) { ::pthread_mutex_unlock(&page(rank).alive); }

std::optional<bool> Board::holder_died(int rank, std::chrono::milliseconds limit) {
  timespec until{};
  ::clock_gettime(CLOCK_MONOTONIC, &until);
  const auto nanoseconds = until.tv_nsec + limit.count() % 1000 * 1'000'000;
  until.tv_sec += limit.count() / 1000 + nanoseconds / 1'000'000'000;
  until.tv_nsec = nanoseconds % 1'000'000'000;
  pthread_mutex_t& alive = page(rank).alive;
  const int result = ::pthread_mutex_clocklock(&alive, CLOCK_MONOTONIC, &until);
  if (result == ETIMEDOUT) return std::nullopt;
  if (result == EOWNERDEAD) ::pthread_mutex_consistent(&alive);
  if (result == 0 || result == EOWNERDEAD) ::pthread_mutex_unlock(&alive);
  // Any other result means that the lock was overwritten; then the connection's end reports the rank's end.
  return result == EOWNERDEAD || result == ENOTRECOVERABLE;
}

// Any byte of a page may be wrong, through a stray write of the rank's program. The agent and the other ranks
// must tolerate that.
Rows Board::rows(int rank) const {
  const Page& page = this->page(rank);
  Rows rows;
  rows.step = number_or_none(page.step.load(std::memory_order_relaxed));
  rows.committed = number_or_none(page.committed.load(std::memory_order_relaxed));
  rows.threads = std::max(page.threads.load(std::memory_order_relaxed), 0);
  rows.blocked = std::max(page.blocked.load(std::memory_order_relaxed), 0);
  const auto now = now_ms();
  for (const auto& versioned : page.lines) {
    const auto found = versioned.read();
    if (!found || found->state.used == 0) continue;  // Being written; the next look will see it.
    const Line& line = *found;
    Row row;
    row.key = line.key;
    row.group = text(line.group);
    row.operation = text(line.operation);
    row.site = text(line.site);
    row.sequence = number_or_none(line.state.sequence);
    row.message = line.state.message != 0;
    row.peer = number_or_none(line.state.peer);
    row.running = line.state.running != 0;
    row.since_ms = time_since(line.state.changed_ms, now);
    if (line.state.waits_for >= 0) {
      row.waited_ms = time_since(line.state.waits_since_ms, now);
      row.waits_for = line.state.waits_for;
    }
    rows.rows.push_back(std::move(row));
  }
  return rows;
}

Rows Board::rows(int rank, std::uint64_t& seen) const {
  Rows rows = this->rows(rank);
  rows.times = page(rank).progress.times(seen);
  rows.metrics = page(rank).progress.metrics();
  return rows;
}

// Counts the calling thread among those that issue operations, until the thread ends.
class StatusWriter::ThreadMark {
 public:
  ~ThreadMark() { clear(); }
  bool is_of(const StatusWriter& writer) const { return writer_ == writer.number_; }
  void set(const StatusWriter& writer) {
    if (is_of(writer)) return;
    clear();
    writer_ = writer.number_;
    process_ = ::getpid();
    board_ = writer.board_;
    threads_ = &writer.page_.threads;
    threads_->fetch_add(1, std::memory_order_relaxed);
  }

 private:
  void clear() {
    // In a child of fork() the page belongs to the parent.
    const auto board = board_.lock();
    if (board && ::getpid() == process_) threads_->fetch_sub(1, std::memory_order_relaxed);
  }

  std::uint64_t writer_ = 0;
  int process_ = 0;
  std::weak_ptr<Board> board_;
  std::atomic<std::int32_t>* threads_ = nullptr;
};

StatusWriter::ThreadMark& StatusWriter::thread_mark() {
  thread_local ThreadMark mark;
  return mark;
}

StatusWriter::Blocked::Blocked(StatusWriter* writer)
    : writer_(writer && thread_mark().is_of(*writer) ? writer : nullptr) {
  if (writer_) writer_->page_.blocked.fetch_add(1, std::memory_order_relaxed);
}

StatusWriter::Blocked::~Blocked() {
  if (writer_) writer_->page_.blocked.fetch_sub(1, std::memory_order_relaxed);
}

namespace {

std::uint64_t next_pen_number() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}

}  // namespace

StatusWriter::StatusWriter(std::shared_ptr<Board> board, int rank)
    : number_(next_pen_number()),
      board_(std::move(board)),
      page_(board_->page(rank)),
      ring_(board_->ring(rank)) {}

void StatusWriter::step(std::int64_t step) {
  const auto now = now_ns();
  std::lock_guard lock(mutex_);
  page_.step.store(step, std::memory_order_relaxed);
  for (const auto& time : watch_.step(step, now))
    if (time) page_.progress.add(*time);
}

void StatusWriter::metric(std::string_view name, double value, std::int64_t step) {
  std::lock_guard lock(mutex_);
  page_.progress.metric(name, value, step);
}

void StatusWriter::committed() { page_.committed.store(step() + 1, std::memory_order_relaxed); }

std::int64_t StatusWriter::step() const { return page_.step.load(std::memory_order_relaxed); }

template <typename What, typename F>
void StatusWriter::write(int line, F change) {
  if (line < 0) return;
  auto& place = page_.lines[line];
  auto changed = place.template get<What>();
  change(changed);
  place.set(changed);
}

int StatusWriter::add_line(std::int64_t key, std::string_view group, bool messages) {
  std::lock_guard lock(mutex_);
  // A retired group's line stays readable until its place is needed: reuse the one unchanged for longest.
  int free = -1;
  std::int64_t oldest = std::numeric_limits<std::int64_t>::max();
  for (int i = 0; i < Board::kLines; ++i) {
    const Line line = page_.lines[i].get<Line>();
    const auto changed = line.state.used != 0 ? line.state.changed_ms : -1;
    if ((line.state.used != 0 && line.state.retired == 0) || changed >= oldest) continue;
    free = i;
    oldest = changed;
  }
  if (free < 0) return -1;
  Line line{};
  line.state.used = 1;
  line.key = key;
  line.state.message = messages ? 1 : 0;
  line.state.sequence = line.state.waits_for = -1;
  line.state.peer = -1;
  line.state.changed_ms = now_ms();
  CallTexts::set(line.group, group);
  page_.lines[free].set(line);
  return free;
}

void StatusWriter::drop_line(int line) {
  std::lock_guard lock(mutex_);
  write<State>(line, [](State& each) { each.retired = 1; });
}

FlightRing::Ticket StatusWriter::began(int line, const Begun& begun, const CallTexts& texts) {
  const auto now = in_ns(begun.at);
  thread_mark().set(*this);
  std::lock_guard lock(mutex_);
  write<Line>(line, [&](Line& each) {
    each.state.sequence = begun.sequence;
    each.state.peer = begun.message ? begun.peer : -1;
    each.state.running = 1;
    each.state.changed_ms = now / 1'000'000;
    std::memcpy(each.operation, texts.operation, sizeof each.operation);
    std::memcpy(each.site, texts.site, sizeof each.site);
  });
  return ring_.begin(begun, texts, step());
}

void StatusWriter::ended(int line, std::int64_t sequence, FlightRing::Ticket ticket, bool failed) {
  const auto now = in_ns(std::chrono::steady_clock::now());  // The same clock, finer.
  std::lock_guard lock(mutex_);
  if (watch_.is_of_this_thread() && watch_.is_waiting()) watch_.waited(now);
  write<State>(line, [&](State& each) {
    if (each.waits_for == sequence) each.waits_for = -1;
    if (each.sequence != sequence) return;
    each.running = 0;
    each.changed_ms = now / 1'000'000;
  });
  ring_.end(ticket, now, failed);
}

void StatusWriter::waits(int line, std::int64_t sequence) {
  const auto now = now_ms();
  std::lock_guard lock(mutex_);
  if (watch_.is_of_this_thread()) watch_.waits(now_ns());  // Also for a group without a line.
  write<State>(line, [&](State& each) {
    each.waits_for = sequence;
    each.waits_since_ms = now;
  });
}

void StatusWriter::waited(int line, std::int64_t sequence) {
  std::lock_guard lock(mutex_);
  if (watch_.is_of_this_thread() && watch_.is_waiting()) watch_.waited(now_ns());
  write<State>(line, [&](State& each) {
    if (each.waits_for == sequence) each.waits_for = -1;
  });
}

}  // namespace lockstep::control
