"""A quick run of bench_loader: every contestant has a figure, and the ratios are those of the figures.

usage: loader_test.py BENCH_LOADER
"""
import json
import subprocess
import sys
import tempfile

with tempfile.NamedTemporaryFile(suffix=".json") as file:
    subprocess.run([sys.argv[1], "--rounds", "1", "--seconds", "0.01", "--case", "seed", "--json", file.name], check=True)
    report = json.load(file)
rows = report["rows"]
assert [row["workers"] for row in rows] == [0, 2], rows
for row in rows:
    assert row["case"] == "seed" and row["batch"] == 32
    for peer, ratio in row["ratios"].items():
        assert row[peer] > 0 and abs(row["lockstep"] / row[peer] - ratio) < 1e-6 * ratio, row
    assert "torch_data" in row["ratios"], row
print("bench_loader reports", ", ".join(rows[0]["ratios"]))
