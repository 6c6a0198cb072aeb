// Force-included into the transport's sources: may pause a process between any two steps of the protocol.
#pragma once

namespace lockstep::shm {
void pause_sometimes();
}
#define LOCKSTEP_SHM_PAUSE() ::lockstep::shm::pause_sometimes()
