"""Test the example 04_digits: it learns on 1, 2 and 4 ranks, and a run killed with SIGKILL resumes after the launcher's restart and
ends with the weights of an undisturbed run.

usage: digits_test.py LOCKSTEP 04_DIGITS DATA
"""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

lockstep, digits, data = sys.argv[1:]
if not os.path.exists(os.path.join(data, "labels.npy")):
    print("skipped: the digits were not fetched; run ./dev build")
    sys.exit(77)


def command(ranks, *arguments, options=()):
    return [lockstep, "run", "-q", "--prefix", "never", "--threads", "1", "-n", str(ranks), *options, digits, "--data", data, *arguments]


def run(ranks, *arguments):
    done = subprocess.run(command(ranks, *arguments), capture_output=True, text=True, timeout=500)
    if done.returncode != 0:
        sys.exit(f"failed: {ranks} ranks exited with status {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


for ranks in (1, 2, 4):
    text = run(ranks, "--epochs", "12")
    accuracy = float(re.findall(r"epoch 12/12 .* test +([0-9.]+) %", text)[0])
    print(f"{ranks} ranks: {accuracy} %")
    if accuracy < 98:
        sys.exit(f"failed: {ranks} ranks reach {accuracy} %, not 98")



def steps_in(path):
    """Return the number of steps in the checkpoint."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return next(json.loads(value)["values"]["step"] for value in header["__metadata__"].values() if '"values"' in value)


undisturbed = re.findall(r"weights (\w+)", run(2, "--epochs", "3"))[0]
with tempfile.TemporaryDirectory() as folder:
    for attempt in range(2):
        path = os.path.join(folder, f"{attempt}.safetensors")
        job = subprocess.Popen(command(2, "--epochs", "3", "--save", path, "--save-every", "3", options=("--max-restarts", "1")),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not os.path.exists(path) and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(random.random() * 0.3)
        ranks = [int(pid) for pid in subprocess.run(["pgrep", "-f", f"^{digits} .*{path}"], capture_output=True, text=True).stdout.split()]
        if ranks:
            with contextlib.suppress(ProcessLookupError):  # It has exited in the meantime.
                os.kill(random.choice(ranks), signal.SIGKILL)
        out, error = job.communicate(timeout=500)
        found = re.findall(r"weights (\w+)", out)
        print(f"killed {'one of ' + str(len(ranks)) if ranks else 'none: the run had finished'}: {found}")
        if job.returncode != 0 or not found or found[-1] != undisturbed:
            sys.exit(f"failed: {found} after a kill, {undisturbed} undisturbed, status {job.returncode}: {error[-2000:]}")
        # 24 batches in each of 3 epochs: the count must not restart after a failure.
        if (steps := steps_in(path)) != 72:
            sys.exit(f"failed: the last checkpoint is of step {steps}, not 72")
