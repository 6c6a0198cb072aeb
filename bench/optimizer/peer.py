"""Python's side of bench_optimizer: answers each line "MODEL OPTIMIZER STEPS" with the nanoseconds per step."""

import sys
import time

import torch

SIZES = {"seed": (10, 1), "mlp": (1024, 2048, 2048, 2048, 10)}
made = {}


def optimizer(model, kind):
    if (model, kind) not in made:
        sizes = SIZES[model]
        net = torch.nn.Sequential(*[torch.nn.Linear(a, b) for a, b in zip(sizes, sizes[1:])])
        for p in net.parameters():
            p.grad = torch.randn_like(p) * 0.01
        name, _, fused = kind.partition("-")
        made[model, kind] = (net, getattr(torch.optim, name)(net.parameters(), lr=1e-4, fused=bool(fused) or None))
    return made[model, kind][1]


torch.set_num_threads(1)
torch.set_flush_denormal(True)
for line in sys.stdin:
    model, kind, steps = line.split()
    each = optimizer(model, kind)
    begin = time.perf_counter_ns()
    for _ in range(int(steps)):
        each.step()
    print((time.perf_counter_ns() - begin) / int(steps), flush=True)
