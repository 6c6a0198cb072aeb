// Lockstep: parallel and distributed training for LibTorch. The public headers.
#pragma once

#include <lockstep/base/error.h>
#include <lockstep/base/log.h>
#include <lockstep/checkpoint/checkpoint.h>
#include <lockstep/comm/call.h>
#include <lockstep/comm/group.h>
#include <lockstep/comm/observer.h>
#include <lockstep/comm/work.h>
#include <lockstep/comm/world.h>
#include <lockstep/mesh/device_mesh.h>
#include <lockstep/train/adam.h>
#include <lockstep/train/autocast.h>
#include <lockstep/train/clip_grad.h>
#include <lockstep/train/grad_scaler.h>
#include <lockstep/train/lr_scheduler.h>
#include <lockstep/train/sgd.h>
#include <lockstep/version.h>
