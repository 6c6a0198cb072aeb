"""Train the digits on 2 ranks and show it, then compare with one rank and with PyTorch.

usage: compare.py --bin DIR --data DIR [--epochs N]
"""

import argparse
import os
import pty
import re
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))


def show(command):
    """Run a command, showing its output, with progress on a terminal. Return the output."""
    kept = bytearray()
    if sys.stdout.isatty():
        def read(fd):
            data = os.read(fd, 1024)
            kept.extend(data)
            return data
        status = os.waitstatus_to_exitcode(pty.spawn(command, read))
    else:
        with subprocess.Popen(command, stdout=subprocess.PIPE) as job:
            for line in job.stdout:
                kept.extend(line)
                print(line.decode(), end="", flush=True)
        status = job.returncode
    if status:
        sys.exit(status)
    return kept.decode()


def quietly(command):
    # The output of torchrun's ranks goes to a file, because an unread pipe would block them.
    with tempfile.TemporaryFile("w+") as out:
        status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT).returncode
        out.seek(0)
        text = out.read()
    if status:
        sys.exit(f"{' '.join(command)} failed with status {status}:\n{text[-4000:]}")
    return text


def python_with_torch():
    for python in (sys.executable, os.path.join(HERE, "../../.venv/bin/python"), "python3"):
        try:
            if subprocess.run([python, "-c", "import torch.distributed"], capture_output=True).returncode == 0:
                return python
        except FileNotFoundError:
            pass
    return None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bin", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--epochs", default="10")
    options = parser.parse_args()
    arguments = ["--data", options.data, "--epochs", options.epochs]
    lockstep, digits = (os.path.join(options.bin, name) for name in ("lockstep", "04_digits"))
    ours = lambda ranks: [lockstep, "run", "--quiet", "--prefix", "never", "-n", str(ranks), digits, *arguments]
    rows = [("Lockstep, 2 ranks", show, ours(2)), ("Lockstep, 1 rank", quietly, ours(1))]
    python = python_with_torch()
    if python:
        script = [os.path.join(HERE, "digits.py"), *arguments]
        rows += [("PyTorch, 2 ranks", quietly, [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", *script]),
                 ("PyTorch, 1 process", quietly, [python, *script])]

    results = []
    for name, run, command in rows:
        begin = time.monotonic()
        text = run(command)
        took = time.monotonic() - begin
        loss, right, rate = re.findall(r"epoch .* loss ([0-9.]+)  test ([0-9.]+) %  ([0-9]+) samples/s", text)[-1]
        results.append((name, took, int(rate), loss, right))
    print(f"\n{'':20}{'start to end':>12}  samples/s    loss     test")
    for name, took, rate, loss, right in results:
        print(f"{name:20}{took:10.1f} s{rate:11}  {loss:>6}  {right:>6} %")
    if not python:
        print("PyTorch was not measured: no Python with torch found")


main()
