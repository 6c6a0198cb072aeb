"""The bits of sums over several hosts, which are network namespaces, beside those of one host.

usage: order_of_sums.py --lockstep PROGRAM --probe PROGRAM

Where every host has the same power of two of ranks, or fewer on the last, every result has the bits of as many ranks on
one host. In other layouts it has the same bits in every run, and is as close as docs/reference/shared-memory.md says.
"""

import argparse
import array
import math
import pathlib
import sys
import tempfile

import harness
from harness import Job, KeyFile, SeveralHosts

SKIP = 77
LIMIT = 300
EPSILON = {"Float": ("f", 2.0 ** -24), "Double": ("d", 2.0 ** -53)}


def run(options, layout, key):
    """Each rank's file and output."""
    with tempfile.TemporaryDirectory() as folder, SeveralHosts(len(layout)) as hosts:
        jobs = []
        try:
            for number, ranks in enumerate(layout):
                command = [options.lockstep, "run", "-n", ranks, "-q", "--prefix", "never"]
                if len(layout) > 1:
                    command += ["--nnodes", len(layout), "--node-rank", number, "--master",
                                f"{hosts.addresses[0]}:29400", "--key-file", key]
                jobs.append(Job([*command, options.probe, folder], namespace=hosts.names[number]))
            for job in jobs:
                status = job.wait(LIMIT)
                if status != 0:
                    sys.exit(f"layout {layout}: status {status}\n" + "\n".join(each.text() for each in jobs))
            said = sorted(line for job in jobs for line in job.text("out").splitlines() if line.startswith("rank "))
        finally:
            for job in jobs:
                job.end()
        return [(pathlib.Path(folder) / f"rank-{r}").read_bytes() for r in range(sum(layout))], said


def records(data):
    """(title, bytes) in the order of the calls."""
    at = 0
    while at < len(data):
        end = data.index(b"\n", at)
        length = data.index(b"\n", end + 1)
        size = int(data[end + 1:length])
        yield data[at:end].decode(), data[length + 1:length + 1 + size]
        at = length + 1 + size


def expect_same(name, ones, others):
    for rank, (one, other) in enumerate(zip(ones, others)):
        if one == other:
            continue
        different = [title for (title, a), (_, b) in zip(records(one), records(other)) if a != b]
        sys.exit(f"{name}: rank {rank} has other bits in {different[:10]} and {max(0, len(different) - 10)} more")


def expect_close(name, ones, others, ranks):
    """Numbers in these tests are below 2^14 in size, so that a sum's error is below that of the largest."""
    differing = 0
    for one, other in zip(ones, others):
        for (title, a), (_, b) in zip(records(one), records(other)):
            operation, kind, op, _ = title.split()
            if a == b:
                continue
            if op in ("min", "max"):
                sys.exit(f"{name}: {title} depends on the order")
            if kind not in EPSILON or op == "product":
                continue
            code, epsilon = EPSILON[kind]
            limit = 2 * (2 + math.ceil(math.log2(ranks))) * epsilon * ranks * 2.0 ** 14
            for x, y in zip(array.array(code, a), array.array(code, b)):
                differing += x != y and not (math.isnan(x) and math.isnan(y))
                if math.isfinite(x) != math.isfinite(y) or (math.isfinite(x) and abs(x - y) > limit):
                    sys.exit(f"{name}: {title} is {x} and {y}, further apart than {limit}")
    print(f"{name}: {differing} numbers differ from those of one host, none by more than is stated")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", type=pathlib.Path, required=True)
    parser.add_argument("--probe", type=pathlib.Path, required=True)
    options = parser.parse_args()
    reason = harness.why_no_hosts()
    if reason:
        print(reason)
        return SKIP
    with KeyFile(options.lockstep) as key:
        on_one = {}
        for layout in ([2, 2], [1, 1], [2, 2, 2], [4, 4], [2, 1], [1, 2], [3, 3]):
            ranks = sum(layout)
            name = "+".join(map(str, layout))
            if ranks not in on_one:
                on_one[ranks], said = run(options, [ranks], key)
                if not all("world shm, neighbours shm, across shm" in line for line in said):
                    sys.exit(f"{ranks} ranks on one host: {said}")
            results, said = run(options, layout, key)
            for line in said:
                if "world shm+gloo, neighbours shm," not in line:
                    sys.exit(f"{name}: not the transports that were expected: {said}")
            if not said[0].endswith("across shm+gloo"):
                sys.exit(f"{name}: not the transports that were expected: {said}")
            if layout[0].bit_count() == 1 and set(layout[:-1]) == {layout[0]} and layout[-1] <= layout[0]:
                expect_same(f"{name} beside {ranks} on one host", on_one[ranks], results)
                print(f"{name}: the bits of {ranks} ranks on one host, {len(list(records(results[0])))} results a rank")
            else:
                expect_same(f"{name}, a second run", results, run(options, layout, key)[0])
                expect_close(name, on_one[ranks], results, ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
