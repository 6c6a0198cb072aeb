"""A rank is killed, at random times of its life."""

import os
import pathlib
import re
import signal
import time

from case import Skip, check_survivors, check_verdict, fault
from harness import now


def kill_rank(case, phase, run_index, *, gib=0):
    rank = (run_index + case.random.randrange(case.ranks)) % case.ranks
    with case.job("--rank", rank, "--phase", phase, "--gib", gib) as job:
        # The launcher terminates the others a second after the failure. A rank that still loads its libraries
        # would not learn it.
        job.await_events("start", case.ranks)
        if phase == "before_init":
            job.await_events("holding")
            time.sleep(case.random.uniform(0, 0.1))
        elif phase == "in_init":
            # Every other time once all have joined, while they connect.
            together = run_index % 2 == 0
            job.await_events("joining", case.ranks if together else 1, None if together else rank)
            time.sleep(case.random.uniform(0, 0.025 if together else 0.15))
        else:
            job.await_events("training", case.ranks)
            time.sleep(case.random.uniform(0, 0.2))
        pid = job.rank_pid(rank)
        since = now()
        os.kill(pid, signal.SIGKILL)
        status = job.wait()
        case.check(status == 137, f"the status is {status}, not 137", job)
        how = "was killed by signal 9 (SIGKILL)"
        check_verdict(case, job, rank, pid, how)
        case.measure(check_survivors(case, job, rank, f"rank {rank} (pid {pid})", how, since=since))


def kill_rows():
    must = "CommError on every other rank that names the dead rank, its pid and signal; nothing is left"
    measures = "the last survivor's error"
    phases = {"before_init": ("before init", 5, 20), "in_init": ("in init", 7, 50),
              "in_collective": ("in a collective", 8, 100), "between": ("between collectives", 8, 100)}

    def make(phase, few, many):
        def body(case):
            for index in range(many if case.options.full else few):
                kill_rank(case, phase, index)

        return body

    for phase, (words, few, many) in phases.items():
        fault(f"kill -9 of a rank, {words}", must, measures, 1.0)(make(phase, few, many))

    @fault("kill -9 of a rank that holds 4 GiB", must, measures, 1.0)
    def big(case):
        available = int(re.search(r"MemAvailable: +(\d+)", pathlib.Path("/proc/meminfo").read_text())[1]) >> 20
        if available < 7:
            raise Skip(f"{available} GiB of memory are free, 7 are needed")
        for index in range(5 if case.options.full else 1):
            kill_rank(case, "in_collective", index, gib=4)


kill_rows()
