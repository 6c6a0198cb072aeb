"""Check that `./dev demo` prints what README.md shows, except for numbers, and that PyTorch's DDP reaches the same losses.

usage: demo_test.py COMPARE.PY README.MD BIN DATA
"""

import os
import re
import subprocess
import sys

compare, readme, binaries, data = sys.argv[1:]
if not os.path.exists(os.path.join(data, "labels.npy")):
    print("skipped: the digits were not fetched; run ./dev build")
    sys.exit(77)


def form(text):
    """Strip what differs between runs: numbers and their widths."""
    text = re.sub(r"weights \w+", "weights #", text)
    return [line if line == "..." else re.sub(r" +", " ", re.sub(r"[0-9.]+", "#", line)).strip() for line in text.strip().splitlines()]


with open(readme, encoding="utf-8") as file:
    shown = re.search(r"^\$ ./dev demo\n(.*?)^(?:\$|```)", file.read(), re.M | re.S)[1]
done = subprocess.run([sys.executable, "-B", compare, "--bin", binaries, "--data", data], capture_output=True, text=True, timeout=500)
print(done.stdout, done.stderr)
if done.returncode != 0:
    sys.exit(f"failed: status {done.returncode}")
expected, printed = form(shown), form(done.stdout)
elided = expected.index("...")
if expected[:elided] != printed[:elided] or expected[elided + 1:] != printed[-(len(expected) - elided - 1):]:
    sys.exit(f"failed: the output differs from README.md, which shows\n{shown}")
losses = dict(re.findall(r"^(\w+, \S+ \w+) .* s +[0-9]+ +([0-9.]+) ", done.stdout, re.M))
apart = abs(float(losses["Lockstep, 2 ranks"]) - float(losses["PyTorch, 2 ranks"]))
if apart > 0.002:
    sys.exit(f"failed: after the last epoch the losses are {apart} apart")
