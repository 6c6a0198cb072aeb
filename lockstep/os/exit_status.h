// Makes a process fail that would otherwise exit with status 0.
#pragma once

namespace lockstep::detail {

// After fail_at_exit(true), a process that exits with status 0, by exit() or by returning from main(), exits
// with 1 instead. Calls are counted: each false cancels one true. Thread-safe.
void fail_at_exit(bool fails) noexcept;

}  // namespace lockstep::detail
