"""Ranks that measure on request, for benchmarks whose contestants take turns."""

import math
import os
import socket
import statistics
import subprocess
import sys

# glibc's malloc, tuned as PyTorch's documentation advises.
TUNED = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(4 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Team:
    """All ranks of one contestant. They receive the same requests and run together; the slowest rank's time counts."""

    def __init__(self, command, ranks, more={}):
        port = str(free_port())
        self.ranks = []
        for rank in range(ranks):
            env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks),
                                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"} | more
            self.ranks.append(subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for rank in self.ranks:
            self.read(rank, "ready")

    def read(self, rank, wanted=None):
        line = rank.stdout.readline().strip()
        if not line or (wanted and line != wanted):
            sys.exit(f"a rank of {rank.args} failed; its last output was {line!r}")
        return line

    def run(self, kind, steps):
        for rank in self.ranks:
            rank.stdin.write(f"{kind} {steps}\n")
            rank.stdin.flush()
        return max(float(self.read(rank)) for rank in self.ranks)

    def ask(self, what):
        for rank in self.ranks:
            rank.stdin.write(f"{what} 0\n")
            rank.stdin.flush()
        return [float(self.read(rank)) for rank in self.ranks]

    def close(self):
        for rank in self.ranks:
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait(60)


def interval(ratios):
    """Return the geometric mean of the ratios and half the relative width of its 95 percent interval."""
    logs = [math.log(r) for r in ratios]
    if len(logs) < 4:
        return math.exp(statistics.fmean(logs)), math.inf
    half = 2.1 * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(statistics.fmean(logs)), half
