// Prints its identity in one line, so that the lines of several ranks do not mix.
#include <unistd.h>

#include <exception>

#include <fmt/format.h>
#include <lockstep/launch/identity/identity.h>

int main() {
  std::string line;
  int status = 0;
  try {
    const auto me = lockstep::detail::identity_from_environment();
    line = fmt::format(
        "launcher={};rank={};size={};local={}/{};restart={};master={}:{}-{};served={};job={}\n", me.launcher,
        me.rank, me.size, me.local_rank.value_or(-1), me.local_size.value_or(-1), me.restart_count,
        me.master_address, me.master_port, me.last_master_port, me.store_is_served, me.job);
  } catch (const std::exception& error) {
    line = fmt::format("refused: {}\n", error.what());
    status = 3;
  }
  return ::write(STDOUT_FILENO, line.data(), line.size()) < 0 ? 1 : status;
}
