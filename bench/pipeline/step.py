"""One rank of bench_pipeline in PyTorch: the same as step.cpp, with torch.distributed.pipelining on gloo."""

import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "ddp"))
from step import TOKENS, WIDTH, Block  # noqa: E402

BLOCKS, MICROBATCHES = 8, 8
SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "zbv": "ScheduleZBVZeroBubble"}


class Contestant:
    def __init__(self, name):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        stages = 2 * ranks if name == "zbv" else ranks
        each = BLOCKS // stages
        torch.manual_seed(1)
        models = [nn.Sequential(*[Block() for _ in range(each)]) for _ in range(stages)]
        mine = [rank, stages - 1 - rank] if name == "zbv" else [rank]
        placed = [pipelining.PipelineStage(models[i], i, stages, torch.device("cpu")) for i in mine]
        kind = getattr(pipelining, SCHEDULES[name])
        self.schedule = kind(placed if name == "zbv" else placed[0], MICROBATCHES, loss_fn=F.mse_loss)
        self.first, self.last = 0 in mine, stages - 1 in mine
        self.optimizer = torch.optim.SGD([p for i in mine for p in models[i].parameters()], 1e-3)

    def step(self):
        inputs, targets = torch.randn(MICROBATCHES, TOKENS, WIDTH), torch.randn(MICROBATCHES, TOKENS, WIDTH)
        self.optimizer.zero_grad()
        self.schedule.step(*([inputs] if self.first else []), **({"target": targets, "losses": []} if self.last else {}))
        self.optimizer.step()


def main():
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    dist.init_process_group("gloo")
    contestants = {name: Contestant(name) for name in sys.argv[1:]}
    torch.manual_seed(2 + dist.get_rank())
    print("ready", flush=True)
    for line in sys.stdin:
        kind, steps = line.split()
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(int(steps)):
            contestants[kind].step()
        print((time.perf_counter() - begin) / int(steps) * 1e3, flush=True)


if __name__ == "__main__":
    main()
