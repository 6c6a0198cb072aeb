// Lockstep: parallel and distributed training for LibTorch. The public headers.
#pragma once

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/group.h>
#include <lockstep/comm/observer.h>
#include <lockstep/comm/work.h>
#include <lockstep/comm/world.h>
#include <lockstep/data/dataset.h>
#include <lockstep/data/distributed_sampler.h>
#include <lockstep/data/files.h>
#include <lockstep/data/loader.h>
#include <lockstep/data/sampler.h>
#include <lockstep/data/subset.h>
#include <lockstep/mesh/device_mesh.h>
#include <lockstep/parallel/ddp.h>
#include <lockstep/parallel/ddp_hooks.h>
#include <lockstep/parallel/replicas.h>
#include <lockstep/parallel/sync_batch_norm.h>
#include <lockstep/parallel/unit.h>
#include <lockstep/parallel/data_parallel.h>
#include <lockstep/version.h>
