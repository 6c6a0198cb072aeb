"""All collectives between hosts, which are network namespaces joined by cables.

usage: two_hosts.py --lockstep PROGRAM --conformance PROGRAM [--transport NAME] [--ranks 2,2] [--filter SUITE]

The conformance suite runs under `lockstep run --nnodes`, started once in each namespace, with as many ranks there as
--ranks says.
"""

import argparse
import pathlib
import sys

import harness
from harness import Job, KeyFile, SeveralHosts

SKIP = 77
LIMIT = 500


def start(options, hosts, number, key):
    command = [options.lockstep, "run", "--nnodes", len(hosts.names), "--node-rank", number, "--master",
               f"{hosts.addresses[0]}:29400", "-n", options.ranks[number], "--key-file", key, options.conformance,
               f"--transport={options.transport}", f"--gtest_filter={options.filter}"]
    # Results are written by rank 0 alone.
    environment = None if number == 0 else {"GTEST_OUTPUT": None}
    return Job(command, environment, namespace=hosts.names[number])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", type=pathlib.Path, required=True)
    parser.add_argument("--conformance", type=pathlib.Path, required=True)
    parser.add_argument("--transport", default="gloo")
    parser.add_argument("--ranks", type=lambda text: list(map(int, text.split(","))), default=[2, 2])
    parser.add_argument("--filter", default="Conformance.*")
    options = parser.parse_args()
    reason = harness.why_no_hosts()
    if reason:
        print(reason)
        return SKIP
    with SeveralHosts(len(options.ranks)) as hosts, KeyFile(options.lockstep) as key:
        jobs = [start(options, hosts, number, key) for number in range(len(options.ranks))]
        try:
            statuses = [job.wait(LIMIT) for job in jobs]
            for number, job in enumerate(jobs):
                print(f"---- host {number}, status {statuses[number]}")
                print(job.text())
        finally:
            for job in jobs:
                job.end()
    texts = "".join(job.text() for job in jobs)
    passed = "[  PASSED  ]" in jobs[0].text() and "[  FAILED  ]" not in texts
    return 0 if not any(statuses) and passed else 1


if __name__ == "__main__":
    sys.exit(main())
