"""bench_gpt2 on a model that a CPU can do: both sides begin with the same weights and learn the same.

usage: gpt2_test.py BENCH_GPT2
"""

import json
import os
import subprocess
import sys
import tempfile


def check(condition, what):
    if not condition:
        raise SystemExit(f"failed: {what}")


with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "rows.json")
    done = subprocess.run([sys.argv[1], "--tiny", "--batch", "2", "--seconds", "0.5", "--contestant", "lockstep,lockstep_graph,eager", "--json", path],
                          capture_output=True, text=True, timeout=500, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    print(done.stdout, done.stderr)
    check(done.returncode == 0, "it ends with 0")
    with open(path, encoding="utf-8") as file:
        rows = {row["contestant"]: row for row in json.load(file)}
check(set(rows) == {"lockstep", "lockstep_graph", "eager"}, "a row for each")
check(rows["lockstep"]["loss"] < 4.1, "it learns: the loss of guessing is log(64) = 4.16")
for name in ("lockstep", "lockstep_graph"):
    check(abs(rows[name]["loss"] - rows["eager"]["loss"]) < 1e-3, f"{name} has PyTorch's loss: {rows[name]['loss']} and {rows['eager']['loss']}")
    ratio = rows["eager"]["ms"] / rows[name]["ms"]
    # It is the median of ratios, not the ratio of medians: on a busy machine these differ.
    check(ratio / 5 < rows[name]["ratios"]["eager"][0] < ratio * 5, "the ratio is that of the times")
