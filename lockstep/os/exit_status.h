// The status of a process that would end as if all were well.
#pragma once

namespace lockstep::detail {

// True: a process that exits with status 0, by exit() or by returning from main(), exits with 1 instead.
// Calls are counted: false takes one true back. Any thread.
void fail_at_exit(bool fails) noexcept;

}  // namespace lockstep::detail
