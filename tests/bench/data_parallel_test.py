"""bench_data_parallel on its quickest case: a row with the right keys and times that agree with their ratios.

usage: data_parallel_test.py BENCH_DATA_PARALLEL
"""

import json
import os
import subprocess
import sys
import tempfile

KEYS = {"case", "devices", "batch", "one_ms", "lockstep_ms", "torch_ms", "speedup", "speedup_p10", "speedup_p90", "over_torch",
        "one_cpu_ms", "lockstep_cpu_ms", "torch", "cores"}


def check(condition, what):
    if not condition:
        raise SystemExit(f"failed: {what}")


def run(*arguments):
    return subprocess.run([sys.argv[1], *arguments], capture_output=True, text=True, timeout=300)


with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "rows.json")
    done = run("--case", "seed", "--devices", "cpu,cpu,cpu", "--seconds", "0.2", "--json", path)
    print(done.stdout, done.stderr)
    check(done.returncode == 0, "it ends with 0")
    with open(path, encoding="utf-8") as file:
        (row,) = json.load(file)
    check(set(row) == KEYS, f"the keys of {row}")
    check(row["case"] == "seed" and row["devices"] == ["cpu"] * 3 and row["batch"] == 32, f"what was asked for: {row}")
    check(min(row["one_ms"], row["lockstep_ms"], row["torch_ms"]) > 0, f"times: {row}")
    check(row["speedup_p10"] <= row["speedup"] <= row["speedup_p90"], f"speedups in order: {row}")
    check(abs(row["over_torch"] - row["torch_ms"] / row["lockstep_ms"]) < 1e-6 * row["over_torch"], f"the ratio of {row}")
    check(run("--case", "nothing").returncode != 0, "a case that is not known is refused")
