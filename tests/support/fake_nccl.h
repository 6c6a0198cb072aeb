// NCCL's rules without GPUs: CPU tensors, ranks that are threads. It rejects what LibTorch's NCCL rejects and
// waits where it waits; a wait that never ends there does not end here:
// - a communicator, of all ranks or of two, is created inside the first call that needs it, which waits for
//   all of them, forever;
// - collectives and batches of a rank have one stream and run one after another;
// - messages between two ranks, in either direction, have one stream on each side and match in its order;
// - in a batch messages do not wait for each other, and the first one between two ranks waits for both of
//   them inside the call;
// - an abort ends only the side of the rank that calls it.
#pragma once

namespace lockstep::testing {

// Makes it the transport of all groups whose ranks are threads.
void use_fake_nccl();

}  // namespace lockstep::testing
