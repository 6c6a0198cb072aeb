"""The examples print the lines of their Python originals, for the same seed.

usage: seed_examples_test.py 01_DATA_PARALLEL EXPECTED.txt

Runs in the Python that has torch.
"""

import io
import contextlib
import re
import subprocess
import sys

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


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


def printed_by(function, *arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        function(*arguments)
    return out.getvalue().splitlines()


def run(program, *arguments):
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def lines_of(program, *arguments):
    done = run(program, *arguments)
    check(done.returncode == 0, f"{arguments} ends with 0: {done.stderr}")
    return done.stdout.splitlines()


def check(condition, what):
    if not condition:
        raise SystemExit(f"failed: {what}")


def close(ours, theirs, tolerance, what):
    check(len(ours) == len(theirs), f"{what}: {len(ours)} lines, and {len(theirs)} of the original")
    for a, b in zip(ours, theirs):
        (text_a, loss_a), (text_b, loss_b) = (re.fullmatch(r"(.*Loss: )(\S+)", line).groups() for line in (a, b))
        # Four digits are printed: a hair apart may round to neighbours.
        check(text_a == text_b and abs(float(loss_a) - float(loss_b)) <= tolerance + 1.001e-4, f"{what}: {a} and {b}")


program, expected = sys.argv[1:]
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
    check(done.returncode == 2 and "usage" in done.stderr and not done.stdout, f"{wrong} is refused: {done}")
print("the lines are those of the originals")
