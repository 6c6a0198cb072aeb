"""All collectives between two hosts with two ranks each: two network namespaces joined by a veth.

usage: two_hosts.py --lockstep PROGRAM --conformance PROGRAM

The conformance suite runs on gloo under `lockstep run --nnodes 2`, started once in each namespace.
"""

import argparse
import pathlib
import sys

import harness
from harness import Job, KeyFile, TwoHosts

SKIP = 77
LIMIT = 240


def start(options, hosts, number, key):
    command = [options.lockstep, "run", "--nnodes", 2, "--node-rank", number, "--master", f"{hosts.addresses[0]}:29400",
               "-n", 2, "--key-file", key, options.conformance, "--transport=gloo", "--gtest_filter=Conformance.*"]
    # Results are written by rank 0 alone.
    environment = None if number == 0 else {"GTEST_OUTPUT": None}
    return Job(command, environment, namespace=hosts.names[number])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lockstep", type=pathlib.Path, required=True)
    parser.add_argument("--conformance", type=pathlib.Path, required=True)
    options = parser.parse_args()
    reason = harness.why_no_hosts()
    if reason:
        print(reason)
        return SKIP
    with TwoHosts() as hosts, KeyFile(options.lockstep) as key:
        jobs = [start(options, hosts, number, key) for number in range(2)]
        try:
            statuses = [job.wait(LIMIT) for job in jobs]
            for number, job in enumerate(jobs):
                print(f"---- host {number}, status {statuses[number]}")
                print(job.text())
        finally:
            for job in jobs:
                job.end()
    passed = "[  PASSED  ]" in jobs[0].text() and "[  FAILED  ]" not in jobs[0].text() + jobs[1].text()
    return 0 if statuses == [0, 0] and passed else 1


if __name__ == "__main__":
    sys.exit(main())
