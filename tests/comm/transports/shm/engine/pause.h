// Forced into the transport's sources: a process may be held up between any two steps of the protocol.
#pragma once

namespace lockstep::shm {
void pause_sometimes();
}
#define LOCKSTEP_SHM_PAUSE() ::lockstep::shm::pause_sometimes()
