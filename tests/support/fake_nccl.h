// NCCL by its rules, where there are no GPUs: CPU tensors, ranks that are threads. What LibTorch's NCCL
// refuses is refused, what it waits for is waited for, and what would never end there does not end here:
// - a communicator, of all ranks or of two, is made inside the first call that needs it, and waits for them
//   all, for ever;
// - collectives and batches of a rank have one stream, and go one after another;
// - messages between two ranks, whichever way they go, have one stream on each side: they meet in its order;
// - in a batch messages do not wait for one another, and the first one between two ranks waits for both of
//   them inside the call;
// - who aborts ends its own side alone.
#pragma once

namespace lockstep::testing {

// From now on it is the transport of all groups whose ranks are threads.
void use_fake_nccl();

}  // namespace lockstep::testing
