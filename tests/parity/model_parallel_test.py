"""Compare pipelines with torch.distributed.pipelining and split layers with torch.distributed.tensor (the wheel, with gloo), on the
same weights and batches in double: the same gradients, weights and losses within 1e-12.

usage: model_parallel_test.py --lockstep PROGRAM --probe PROGRAM
"""

import argparse
import importlib.metadata
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from ranks import start_ranks

SCHEDULES = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved1f1b": "ScheduleInterleaved1F1B", "loopedbfs": "ScheduleLoopedBFS",
             "zbv": "ScheduleZBVZeroBubble", "dualpipev": "ScheduleDualPipeV"}


TENSOR = ("plain", "sequence")


def show(path_lines, name, gradient):
    import torch

    values = gradient.double().flatten()
    weights = torch.arange(values.numel(), dtype=torch.double).remainder(7).add(1)
    path_lines.append(f"{name} {values.sum().item():.17g} {values.dot(weights).item():.17g}")


def pipeline(lines, name):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed import pipelining

    rank, kind = dist.get_rank(), getattr(pipelining, SCHEDULES[name])
    multi = name not in ("gpipe", "1f1b")
    torch.manual_seed(3)
    models = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 8)).double() for _ in range(4 if multi else 2)]
    torch.manual_seed(4)
    inputs, targets = torch.randn(16, 8, dtype=torch.double), torch.randn(16, 8, dtype=torch.double)
    if name in ("zbv", "dualpipev"):
        mine = (0, 3) if rank == 0 else (1, 2)
    else:
        mine = (rank, rank + 2) if multi else (rank,)
    stages = [pipelining.PipelineStage(models[i], i, len(models), torch.device("cpu")) for i in mine]
    schedule = kind(stages if multi else stages[0], 4, loss_fn=nn.functional.mse_loss)
    folder = os.environ["SCHEDULES"]
    if multi and rank == 0:
        for form in ("compute_only", "compute_comms"):
            schedule._dump_csv(f"{folder}/{name}.{form}.csv", **({"format": form} if hasattr(schedule, "pipeline_order_with_comms") else {}))
    losses = []
    last = len(models) - 1 in mine
    schedule.step(*([inputs] if 0 in mine else []), **({"target": targets, "losses": losses} if last else {}))
    for i in mine:
        for key, parameter in models[i].named_parameters():
            show(lines, f"{i}.{key}", parameter.grad)
    if last:
        lines.append(f"loss {torch.stack(losses).mean().item():.17g} 0")


def tensor(lines, name):
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import Replicate, Shard, init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.norm = nn.Embedding(16, 8), nn.LayerNorm(8)
            self.up, self.down, self.head = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 16)

        def forward(self, tokens):
            x = self.embed(tokens)
            return self.head(x + self.down(nn.functional.gelu(self.up(self.norm(x)))))

    torch.manual_seed(5)
    model = Net().double()
    mesh = init_device_mesh("cpu", (2,))
    if name == "plain":
        plan = {"embed": RowwiseParallel(input_layouts=Replicate()), "up": ColwiseParallel(), "down": RowwiseParallel(),
                "head": ColwiseParallel(output_layouts=Replicate())}
    else:
        plan = {"embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False), "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
                "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    model = parallelize_module(model, mesh, plan)
    optimizer = torch.optim.SGD(model.parameters(), 1.0, foreach=False)
    tokens = torch.arange(24).mul(5).remainder(16).view(3, 8)
    targets = tokens.roll(1, 1)
    main = dist.get_rank() == 0
    for step in range(2):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        if main:
            show(lines, f"loss{step}", loss.detach())
    for key, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        if main:
            show(lines, key, whole.detach())


def rank_main(names):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name in names:
        lines = []
        tensor(lines, name) if name in TENSOR else pipeline(lines, name)
        for line in lines:
            print(name, line)
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # PyTorch sometimes aborts at exit.


def torch_run(names):
    processes = start_ranks(__file__, 2, *names, stdout=subprocess.PIPE, text=True)
    outputs = [process.communicate(timeout=400)[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit("PyTorch's ranks failed")
    return parse("".join(outputs).splitlines())


def parse(lines):
    found = {}
    for line in lines:
        name, key, *numbers = line.split()
        found.setdefault(name, {})[key] = tuple(map(float, numbers))
    return found


def pipelines():
    """Return the schedules that this PyTorch supports: before 2.13 a rank with adjacent stages sends to itself, which gloo rejects."""
    version = importlib.metadata.version("torch")
    if tuple(map(int, version.split(".")[:2])) >= (2, 13):
        return list(SCHEDULES)
    print(f"skipping zbv and dualpipev: PyTorch {version} fails on them")
    return [name for name in SCHEDULES if name not in ("zbv", "dualpipev")]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", nargs="+")
    parser.add_argument("--lockstep")
    parser.add_argument("--probe")
    options = parser.parse_args()
    if options.rank:
        return rank_main(options.rank)
    schedules = pipelines()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SCHEDULES"] = folder
        expected = torch_run([*schedules, *TENSOR])
        # Files that PyTorch writes can be read and pass the check.
        files = sorted(pathlib.Path(folder).iterdir())
        for path in files:
            shown = json.loads(subprocess.run([options.lockstep, "schedule", "show", "--file", path, "--json"], check=True, stdout=subprocess.PIPE,
                                              timeout=200).stdout)
            if (shown["ranks"], len(shown["rank_of_stage"]), shown["microbatches"]) != (2, 4, 4):
                sys.exit(f"{path}: {shown}")
        if len(files) != 2 * len([name for name in schedules if name not in ("gpipe", "1f1b")]):
            sys.exit(f"PyTorch wrote {files}")
    for name in (*schedules, *TENSOR):
        kind = "tensor" if name in TENSOR else "pipeline"
        output = subprocess.run([options.lockstep, "run", "-n", "2", "--prefix", "never", options.probe, kind, name], check=True,
                                stdout=subprocess.PIPE, text=True, timeout=200).stdout
        ours = parse(f"{name} {line}" for line in output.splitlines())[name]
        theirs = expected[name]
        if ours.keys() != theirs.keys() or len(theirs) < 11:
            sys.exit(f"{name}: PyTorch has {sorted(theirs)}, we have {sorted(ours)}")
        for key, numbers in theirs.items():
            for a, b in zip(numbers, ours[key]):
                if abs(a - b) > 1e-12 * max(1, abs(a)):
                    sys.exit(f"{name}, {key}: PyTorch has {a!r}, we have {b!r}")
        print(f"{name}: {len(theirs)} numbers agree")


if __name__ == "__main__":
    sys.exit(main())
