"""bench_collectives, on one quick row of each peer: rows with the right keys, a table, a chart, and nothing left behind.

usage: collectives_test.py BENCH_COLLECTIVES
"""

import glob
import json
import os
import subprocess
import sys
import tempfile

KEYS = {"op", "backend", "memory", "dtype", "ranks", "bytes", "us_median", "us_p10", "us_p90", "GBps"}


pids = []


def run(*arguments):
    process = subprocess.Popen([sys.argv[1], *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pids.append(process.pid)
    try:
        out, error = process.communicate(timeout=300)
    finally:
        process.kill()
    return subprocess.CompletedProcess(arguments, process.returncode, out, error)


def check(condition, what):
    if not condition:
        raise SystemExit(f"failed: {what}")


with tempfile.TemporaryDirectory() as folder:
    json_file, svg_file = os.path.join(folder, "rows.json"), os.path.join(folder, "chart.svg")
    done = run("--op", "all_reduce,all_gather", "--ranks", "2", "--bytes", "4KiB", "--seconds", "0.02", "--json", json_file,
               "--svg", svg_file)
    print(done.stdout, done.stderr)
    check(done.returncode == 0, "it ends with 0")
    check("Aims, on" in done.stdout, "it says what became of the aims")
    with open(json_file, encoding="utf-8") as file:
        rows = json.load(file)
    for row in rows:
        check(set(row) == KEYS, f"the keys of {row}")
        check(row["ranks"] == 2 and row["bytes"] == 4096 and row["dtype"] == "float32", f"only what was asked for: {row}")
        check(0 < row["us_p10"] <= row["us_median"] <= row["us_p90"], f"times in order: {row}")
        check(abs(row["GBps"] - row["bytes"] / row["us_median"] / 1e3) < 0.01 * row["GBps"] + 1e-5, f"GBps of {row}")
    for op in ("all_reduce", "all_gather"):
        check({"shm", "gloo", "memcpy"} <= {r["backend"] for r in rows if r["op"] == op}, f"shm, gloo and memcpy have a row of {op}")
    with open(svg_file, encoding="utf-8") as file:
        check("</svg>" in file.read(), "there is a chart")
    again = run("--from", json_file)
    check(again.returncode == 0 and again.stdout.count("4 KiB  ") == len(rows), "the rows can be printed again")
    check(run("--backend", "nobody").returncode != 0, "a backend that is not known is refused")
    check(not any(glob.glob(f"/dev/shm/bench_collectives.{pid}.*") for pid in pids), "nothing is left in /dev/shm")
