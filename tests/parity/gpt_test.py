"""Test the example 05_gpt: 50 steps have the losses of its PyTorch twin, on every layout of 1, 2, 4 and 8 ranks, and the loss
falls.

usage: gpt_test.py LOCKSTEP 05_GPT
"""

import os
import re
import subprocess
import sys
import tempfile

lockstep, gpt = sys.argv[1:]
TWIN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gpt_twin.py")
SMALL = ["--layers", "2", "--width", "32", "--heads", "4", "--context", "32", "--batch", "8"]


def check(condition, what):
    if not condition:
        raise SystemExit(f"failed: {what}")


def lines_of(*command):
    done = subprocess.run(list(command), capture_output=True, text=True, timeout=500, env=os.environ | {"OMP_NUM_THREADS": "1"})
    check(done.returncode == 0, f"{command} exits with status 0: {done.stderr[-2000:]}")
    return done.stdout.splitlines()


def run(ranks, *arguments):
    return lines_of(lockstep, "run", "-q", "--prefix", "never", "--threads", "1", "-n", str(ranks), gpt, *SMALL, *arguments)


def losses_in(lines):
    found = [re.fullmatch(r"step (\d+) loss (\d+\.\d+)", line) for line in lines]
    check(len(lines) == 50 and all(found), f"50 lines of losses, not {lines[:3]}")
    check([int(each[1]) for each in found] == list(range(1, 51)), "steps are counted from 1")
    return [float(each[2]) for each in found]


def apart(a, b):
    return max(abs(x - y) for x, y in zip(losses_in(a), losses_in(b)))


for dtype, tolerance in (("double", 1e-9), ("float", 1e-5)):
    for options in ([], ["--untied"]):
        with tempfile.TemporaryDirectory() as folder:
            ours = lines_of(gpt, *SMALL, "--dtype", dtype, *options, "--dump", folder)
            twin = lines_of(sys.executable, "-B", TWIN, folder)
        print(f"{dtype} {options}: {losses_in(ours)[0]} to {losses_in(ours)[-1]}, {apart(ours, twin):.2g} from PyTorch's")
        check(apart(ours, twin) <= tolerance, f"{dtype} {options}: {apart(ours, twin)} from the twin, expected at most {tolerance}")
        check(losses_in(ours)[-1] < losses_in(ours)[0] - 0.5, f"{dtype} {options}: the loss falls: {ours[0]}, {ours[-1]}")

# pp, dp, tp, schedule, micro-batches.
LAYOUTS = [(1, 1, 1, "gpipe", 4), (1, 2, 1, "1f1b", 1), (1, 1, 2, "1f1b", 1), (2, 1, 1, "1f1b", 4), (2, 1, 1, "zbv", 4), (1, 2, 2, "1f1b", 2),
           (2, 2, 1, "interleaved1f1b", 4), (2, 1, 2, "zbh1", 4), (4, 1, 1, "gpipe", 2), (1, 1, 4, "1f1b", 1), (2, 2, 2, "dualpipev", 4),
           (4, 1, 2, "1f1b", 8), (2, 4, 1, "loopedbfs", 2)]
for dtype, tolerance, layouts, options in (("double", 1e-9, LAYOUTS, ["--dropout", "0.1", "--lr", "1e-3"]), ("double", 1e-9, LAYOUTS[3::4], []),
                                           ("float", 1e-5, LAYOUTS[1::3], ["--dropout", "0.1"])):
    one = lines_of(gpt, *SMALL, "--dtype", dtype, *options)
    check(losses_in(one)[-1] < losses_in(one)[0] - 0.5, f"the loss falls: {one[0]}, {one[-1]}")
    for pp, dp, tp, schedule, microbatches in layouts:
        several = run(pp * dp * tp, "--dtype", dtype, *options, "--pp", str(pp), "--dp", str(dp), "--tp", str(tp), "--schedule", schedule,
                      "--microbatches", str(microbatches))
        layout = f"{dtype} {options}, pp {pp} dp {dp} tp {tp} {schedule} with {microbatches}"
        check(apart(several, one) <= tolerance, f"{layout}: {apart(several, one)} from one rank, expected at most {tolerance}")
        print(f"{layout}: {apart(several, one):.2g} from one rank")

for wrong, text in ((["--dp", "2"], "--pp 1 --dp 2 --tp 1: expected a product of 1, the number of ranks"), (["--schedule", "2f2b"], "2f2b"),
                    (["--tp", "65536", "--pp", "65536"], "expected a product of 1, the number of ranks"), (["--batch", "7", "--microbatches", "2"], "cannot be divided"),
                    (["--heads", "5"], "cannot be divided among 5 heads"), (["--data", "/nowhere"], "/nowhere: cannot be read")):
    done = subprocess.run([gpt, *wrong], capture_output=True, text=True, timeout=200)
    check(done.returncode == 2 and text in done.stderr and not done.stdout, f"{wrong} is rejected: {done}")
done = subprocess.run([lockstep, "run", "-n", "2", gpt, "--tp", "2", "--heads", "3", "--width", "36"], capture_output=True, text=True, timeout=200)
check(done.returncode == 2 and "3 heads cannot be divided among --tp 2 ranks" in done.stderr, f"heads that do not divide are rejected: {done}")
print("the losses equal those of PyTorch and of one rank")
