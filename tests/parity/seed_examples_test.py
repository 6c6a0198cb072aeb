"""Check that the examples print the same lines as their Python originals, for the same seed.

usage: seed_examples_test.py 01_DATA_PARALLEL EXPECTED.txt 02_MODEL_PARALLEL 03_DISTRIBUTED LOCKSTEP

Runs in the Python that has torch.
"""

import io
import contextlib
import os
import re
import subprocess
import sys

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

from ranks import free_port


# The program of examples/01_data_parallel/README.md.
def data_parallel(seed):
    torch.manual_seed(seed)

    class SimpleModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(10, 1)

        def forward(self, x):
            return self.linear(x)

    X = torch.randn(1000, 10)
    y = torch.randn(1000, 1)
    dataset = TensorDataset(X, y)
    dataloader = DataLoader(dataset, batch_size=32)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = SimpleModel().to(device)
    if torch.cuda.device_count() > 1:
        model = nn.DataParallel(model)

    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    for epoch in range(10):
        for i, (inputs, labels) in enumerate(dataloader):
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            print(f"Epoch [{epoch+1}/10], Step [{i+1}/{len(dataloader)}], Loss: {loss.item():.4f}")


# The program of examples/02_model_parallel/README.md, on the CPU if there are fewer than two GPUs. Prints one
# value per line.
def model_parallel(seed):
    torch.manual_seed(seed)

    class ModelPart1(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear1 = nn.Linear(10, 5)

        def forward(self, x):
            return self.linear1(x)

    class ModelPart2(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear2 = nn.Linear(5, 1)

        def forward(self, x):
            return self.linear2(x)

    gpus = torch.cuda.device_count()
    device0 = torch.device("cuda:0" if gpus else "cpu")
    device1 = torch.device("cuda:1" if gpus > 1 else device0)

    model_part1 = ModelPart1().to(device0)
    model_part2 = ModelPart2().to(device1)
    inputs = torch.randn(100, 10).to(device0)

    output_part1 = model_part1(inputs)
    output_part1 = output_part1.to(device1)
    output = model_part2(output_part1)
    for value in output.flatten().tolist():
        print(f"{value:.4f}")


# The program of examples/03_distributed/README.md; rank 0 of 2 prints.
THIRD = """
import os
import sys
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
torch.manual_seed(int(sys.argv[1]))
dataset = TensorDataset(torch.randn(1000, 10), torch.randn(1000, 1))
sampler = DistributedSampler(dataset)
dataloader = DataLoader(dataset, batch_size=32, sampler=sampler)
class SimpleModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 1)
    def forward(self, x):
        return self.linear(x)
model = nn.parallel.DistributedDataParallel(SimpleModel())
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
criterion = nn.MSELoss()
for epoch in range(10):
    sampler.set_epoch(epoch)
    for i, (inputs, labels) in enumerate(dataloader):
        optimizer.zero_grad()
        loss = criterion(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"Epoch [{epoch+1}/10], Step [{i+1}/{len(dataloader)}], Loss: {loss.item():.4f}")
sys.stdout.flush()
dist.barrier()
os._exit(0)  # PyTorch sometimes aborts at exit
"""


def distributed(seed):
    port = free_port()
    ranks = [subprocess.Popen([sys.executable, "-c", THIRD, str(seed)], stdout=subprocess.PIPE, text=True,
                              env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
             for rank in range(2)]
    lines = [rank.communicate(timeout=300)[0].splitlines() for rank in ranks]
    check(all(rank.returncode == 0 for rank in ranks), "PyTorch's ranks exit with status 0")
    return lines[0]


def printed_by(function, *arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        function(*arguments)
    return out.getvalue().splitlines()


def run(program, *arguments):
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=200)


def lines_of(program, *arguments):
    done = run(program, *arguments)
    check(done.returncode == 0, f"{arguments} exits with status 0: {done.stderr}")
    return done.stdout.splitlines()


def check(condition, what):
    if not condition:
        raise SystemExit(f"failed: {what}")


def close(ours, theirs, tolerance, what):
    check(len(ours) == len(theirs), f"{what}: {len(ours)} lines, and {len(theirs)} of the original")
    for a, b in zip(ours, theirs):
        (text_a, loss_a), (text_b, loss_b) = (re.fullmatch(r"(.*Loss: )(\S+)", line).groups() for line in (a, b))
        # The programs print four digits, so a tiny difference may round to neighbouring values.
        check(text_a == text_b and abs(float(loss_a) - float(loss_b)) <= tolerance + 1.001e-4, f"{what}: {a} and {b}")


program, expected, second, third, lockstep = sys.argv[1:]
for seed in (0, 1, 2, 3, 7, 42, 1234, 2**31, 2**63 - 1):
    original = printed_by(data_parallel, seed)
    check(len(original) == 320, f"the original prints 320 lines, not {len(original)}")
    ours = lines_of(program, "--seed", seed)
    check(ours == original, f"seed {seed}: {[pair for pair in zip(ours, original) if pair[0] != pair[1]][:3]}")
    for devices in ("cpu", "cpu,cpu", "cpu,cpu,cpu"):
        close(lines_of(program, "--seed", seed, "--devices", devices), original, 1e-5, f"seed {seed} on {devices}")
with open(expected, encoding="utf-8") as file:
    close(lines_of(program, "--seed", 0), file.read().splitlines(), 0, expected)
for wrong in (["--seed"], ["--seed", "x"], ["--devices", "banana"], ["--sede", "1"]):
    done = run(program, *wrong)
    check(done.returncode == 2 and "usage" in done.stderr and not done.stdout, f"{wrong} is rejected: {done}")
for seed in (0, 1, 2, 3, 7, 42, 1234, 2**31, 2**63 - 1):
    original = printed_by(model_parallel, seed)
    ours = lines_of(second, "--seed", seed)
    check(len(original) == 100 and ours == original, f"the second, seed {seed}: {[p for p in zip(ours, original) if p[0] != p[1]][:3]}")
    check(lines_of(second, "--seed", seed, "--devices", "cpu,cpu:0") == ours, f"the second, seed {seed}, on cpu,cpu:0")
for wrong in (["--seed"], ["--seed", "x"], ["--devices", "cpu"], ["--devices", "cpu,banana"], ["--devices", "cpu,cuda:99"], ["--sede", "1"]):
    done = run(second, *wrong)
    check(done.returncode == 2 and "usage" in done.stderr and not done.stdout, f"{wrong} is rejected: {done}")
check("no device cuda:99 for ModelPart2Impl" in run(second, "--devices", "cpu,cuda:99").stderr, "the error names the device")
for seed in (0, 5):
    original = distributed(seed)
    ours = lines_of(lockstep, "run", "-q", "--prefix", "never", "-n", 2, third, "--seed", seed)
    check(len(original) == 160 and ours == original, f"the third, seed {seed}: {[p for p in zip(ours, original) if p[0] != p[1]][:3]}")
forgotten = run(lockstep, "run", "-q", "--prefix", "never", "-n", 2, third, "--forget-ddp")
check(forgotten.returncode == 1 and "replicas differ: 'linear.weight' on rank 1" in forgotten.stdout, f"--forget-ddp: {forgotten}")
print("the lines equal those of the originals")
