"""Faults of the launcher, and restarts of the ranks."""

import os
import pathlib
import re
import signal
import time

import harness
from case import check_saved, fault, told_by_launcher
from harness import Surroundings, now, wait_until

# ---- the launcher is killed -------------------------------------------------------------------------------


def kill_launcher(case, job, pid):
    job.await_events("training", case.ranks)
    there = job.processes()
    case.check(len(there) >= case.ranks + 1, "fewer processes than ranks", job)
    since = now()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not any(map(harness.is_alive, there)))
    case.measure(now() - since)


def launcher_row(name, *victim, program=None, agent=False):
    @fault(name, "all ranks and their descendants are gone", "the last process is gone", 1.0,
           torchrun="" if not agent else "-")
    def body(case):
        command = program(case) if program else None
        surroundings = Surroundings(harness.have_own_namespaces())
        # With such a long grace, an end that waits for it takes too long.
        with case.job(*victim, program=command, clean=False, run=["--grace", "60s"]) as job:
            pid = job.pid
            if agent:
                job.await_events("start", case.ranks)
                pid = next(p for p in job.processes()
                           if pathlib.Path(f"/proc/{p}/comm").read_text().startswith("lockstep-agent"))
            kill_launcher(case, job, pid)
            case.check_nothing_left(surroundings, job)


def script_of(case):
    # With a command after it, so that the shell stays.
    return ["sh", "-c", '"$@"; echo ended', "sh", str(case.options.victim)]


launcher_row("kill -9 of the launcher")
launcher_row("kill -9 of the launcher, ranks are scripts", program=script_of)
launcher_row("kill -9 of the launcher, ranks have helpers and a daemon", "--helpers")
launcher_row("kill -9 of the agent process (lockstep-agent)", agent=True)


# ---- asked to end -----------------------------------------------------------------------------------------


def signal_rows():
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        @fault(f"{number.name} to the launcher, ranks ask stop_requested()",
               f"all save at the same step; status {status}", "the launcher's end", 5.0)
        def saves(case, number=number, status=status):
            with case.job("--stop") as job:
                job.await_events("training", case.ranks)
                since = job.signal(number)
                check_saved(case, [job], status)
                case.measure(job.ended - since)

    @fault("SIGTERM to one rank, ranks ask stop_requested()", "all save at the same step; status 143",
           "the launcher's end", 5.0, torchrun="-")
    def one_rank(case):
        with case.job("--stop") as job:
            job.await_events("training", case.ranks)
            since = now()
            os.kill(job.rank_pid(case.ranks - 1), signal.SIGTERM)
            check_saved(case, [job], 143)
            case.measure(job.ended - since)

    @fault("SIGTERM to the launcher, ranks do not handle it", "they end; no rank is blamed; status 143",
           "the launcher's end", 1.0)
    def ends(case):
        with case.job(env={"LOCKSTEP_FLIGHT_RECORD": None}) as job:  # a job that asks for a record gets it, and a line about it
            job.await_events("training", case.ranks)
            since = job.signal(signal.SIGTERM)
            case.check(job.wait() == 143, "the status is not 143", job)
            case.check(not told_by_launcher(job), "a process is blamed", job)
            case.measure(job.ended - since)

    @fault("SIGTERM to the launcher, ranks ignore it", "killed after --grace (1 s); status 143",
           "the launcher's end", 2.0)
    def ignores(case):
        with case.job("--ignore-signals", run=["--grace", "1s"]) as job:
            job.await_events("training", case.ranks)
            since = job.signal(signal.SIGTERM)
            case.check(job.wait() == 143, "the status is not 143", job)
            case.check(case.measure(job.ended - since) >= 0.9, "ended before the grace was over", job)
            killed = re.findall(r"did not end within 1(?:\.0)? s; killing it", job.text("err"))
            case.check(len(killed) == case.ranks, "the launcher does not say that it killed every rank after 1 s", job)

    @fault("a second SIGTERM to the launcher", "ends at once; status 143", "the launcher's end, from the second", 1.0)
    def twice(case):
        with case.job("--ignore-signals", run=["--grace", "30s"]) as job:
            job.await_events("training", case.ranks)
            job.signal(signal.SIGTERM)
            # Two signals that arrive before the first is handled count as one.
            wait_until(lambda: not harness.has_pending(job.pid, signal.SIGTERM))
            time.sleep(0.3)
            case.check(job.ended is None, "the first one ended it", job)
            since = job.signal(signal.SIGTERM)
            case.check(job.wait() == 143, "the status is not 143", job)
            case.measure(job.ended - since)


signal_rows()


# ---- again ------------------------------------------------------------------------------------------------


@fault("a rank that fails once, --max-restarts 2", "all ranks restart, and the job succeeds",
       "every rank trains again", 5.0)
def fails_once(case):
    rank = case.ranks - 1
    with case.job("--rank", rank, "--fault", "throw", "--attempts", 1, "--steps", 40, run=["--max-restarts", 2]) as job:
        since = job.await_events("fault")[0]["t"]
        status = job.wait()
        case.check(status == 0, f"the status is {status}, not 0", job)
        again = [e for e in job.events("training") if e["attempt"] == 1]
        case.check(len(again) == case.ranks, f"{len(again)} ranks trained again", job)
        if again:
            case.measure(max(e["t"] for e in again) - since)


@fault("a rank that fails twice at the same step, --max-restarts 5", "ends after the second failure, with that diagnosis",
       "the launcher's end, from the second", 5.0)
def fails_twice(case):
    rank = case.ranks - 1
    with case.job("--rank", rank, "--fault", "throw", run=["--max-restarts", 5]) as job:
        since = job.await_events("fault", 2)[1]["t"]
        status = job.wait()
        case.check(status not in (0, None), f"the status is {status}", job)
        case.check({e["attempt"] for e in job.events("fault")} == {0, 1}, "not two attempts", job)
        case.check(re.search(r"failed in the same way.*the victim's own words.*step 20", job.text("err")),
                   "the diagnosis is missing", job)
        case.measure(job.ended - since)
