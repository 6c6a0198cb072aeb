// Lockstep: parallel and distributed training for LibTorch. The public headers.
#pragma once

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/group.h>
#include <lockstep/comm/observer.h>
#include <lockstep/comm/work.h>
#include <lockstep/comm/world.h>
#include <lockstep/mesh/device_mesh.h>
#include <lockstep/parallel/data_parallel.h>
#include <lockstep/version.h>
