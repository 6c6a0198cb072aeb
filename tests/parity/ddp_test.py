"""Compare PyTorch's DistributedDataParallel (the wheel, with gloo) and Lockstep's from the same seeds: the same bits with 2 ranks; within
1e-6 of the largest weight after 100 steps with 4, because gloo adds four numbers in another order.

usage: ddp_test.py --lockstep PROGRAM --probe PROGRAM
"""

import argparse
import os
import struct
import subprocess
import sys
import tempfile

from ranks import start_ranks


def rank_main(kind, seed, steps, path):
    import torch
    import torch.distributed as dist
    from torch import nn

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9) if kind == "sgd" else torch.optim.Adam(model.parameters(), 0.01)
    torch.manual_seed(1000 * seed + dist.get_rank())
    for _ in range(steps):
        x, y = torch.randn(16, 12), torch.randn(16, 4)
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(x), y).backward()
        optimizer.step()
    if dist.get_rank() == 0:
        with open(path, "wb") as file:
            for parameter in model.parameters():
                values = parameter.detach().flatten().tolist()
                file.write(struct.pack(f"{len(values)}f", *values))
    dist.barrier()
    os._exit(0)  # PyTorch sometimes aborts at exit ("terminate called without an active exception").


def torch_run(ranks, *arguments):
    if any(process.wait(300) for process in start_ranks(__file__, ranks, *arguments)):
        sys.exit("PyTorch's ranks failed")


def read(path):
    with open(path, "rb") as file:
        data = file.read()
    return struct.unpack(f"{len(data) // 4}f", data)


def main():
    if sys.argv[1:2] == ["--rank"]:
        kind, seed, steps, path = sys.argv[2:]
        return rank_main(kind, int(seed), int(steps), path)
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--probe", required=True)
    options = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for ranks, kind, seed in [(2, "sgd", 1), (2, "adam", 2), (4, "sgd", 3), (4, "adam", 4)]:
            theirs, ours = os.path.join(folder, "theirs"), os.path.join(folder, "ours")
            torch_run(ranks, kind, seed, 100, theirs)
            subprocess.run([options.lockstep, "run", "-q", "-n", str(ranks), "--threads", "1", options.probe, kind, str(seed), "100", ours],
                           check=True, timeout=300)
            a, b = read(theirs), read(ours)
            differing = sum(x != y for x, y in zip(a, b)) if len(a) == len(b) else len(a)
            largest = max(abs(x) for x in a)
            apart = max(abs(x - y) for x, y in zip(a, b)) / largest
            good = differing == 0 if ranks == 2 else apart <= 1e-6
            failures += not good
            print(f"{ranks} ranks, {kind}: {differing} of {len(a)} weights differ, by at most {apart:.1e} of the largest{'' if good else ': FAILED'}")
    sys.exit(failures)


if __name__ == "__main__":
    main()
