"""Something happens to a rank."""

import contextlib
import os
import pathlib
import re
import signal
import time

import harness
from case import Ranks, Skip, check_survivors, check_verdict, fault, told_by_launcher
from harness import MemoryLimit, Traced, free_port, now, wait_until

# ---- kill -9 of a rank ------------------------------------------------------------------------------------


def kill_rank(case, phase, run_index, *, gib=0):
    rank = (run_index + case.random.randrange(case.ranks)) % case.ranks
    with case.job("--rank", rank, "--phase", phase, "--gib", gib) as job:
        if phase == "before_init":
            job.await_events("holding")
            time.sleep(case.random.uniform(0, 0.4))
        elif phase == "in_init":
            # Every other time when all have come, and make the connections.
            together = run_index % 2 == 0
            job.await_events("joining", case.ranks if together else 1, None if together else rank)
            time.sleep(case.random.uniform(0, 0.025 if together else 0.15))
        else:
            job.await_events("training", case.ranks, timeout=60)
            time.sleep(case.random.uniform(0, 0.2))
        pid = job.rank_pid(rank)
        since = now()
        os.kill(pid, signal.SIGKILL)
        status = job.wait(15)
        case.check(status == 137, f"the status is {status}, not 137", job)
        how = "was killed by signal 9 (SIGKILL)"
        check_verdict(case, job, rank, pid, how)
        case.measure(check_survivors(case, job, rank, f"rank {rank} (pid {pid})", how, since=since))


def kill_rows():
    must = "CommError on every other rank that names the dead rank, its pid and signal; nothing left 2 s later"
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


# ---- without a launcher: the agent is in a rank, the first that came ---------------------------------------


@contextlib.contextmanager
def without_launcher(case, first, *victim):
    """All ranks train; the events of all are the first job's."""
    with Ranks(case) as ranks:
        port = free_port()
        jobs = {first: ranks.start(first, case.ranks, port, {"LOCKSTEP_STOP_GRACE": "1s"}, *victim)}
        jobs[first].await_events("joining")
        time.sleep(0.2)
        for rank in range(case.ranks):
            if rank != first:
                jobs[rank] = ranks.start(rank, case.ranks, port, {"LOCKSTEP_STOP_GRACE": "1s"}, *victim,
                                         events=jobs[first].events_file)
        jobs[first].await_events("training", case.ranks, timeout=60)
        yield jobs


def hurt_without_launcher(case, first, rank, number):
    with without_launcher(case, first) as jobs:
        time.sleep(case.random.uniform(0, 0.2))
        pid = jobs[rank].pid
        since = now()
        os.kill(pid, number)
        for other in jobs:
            if other != rank:
                case.check(jobs[other].wait(15) == 4, f"rank {other} did not end because of an error", jobs[other])
        case.measure(check_survivors(case, jobs[first], rank, f"rank {rank} (pid {pid})", since=since))
        return "".join(job.text("err") for job in jobs.values()), rank, pid


@fault("kill -9 of a rank, no launcher", "CommError on every other rank that names the dead rank and its pid",
       "the last survivor's error", 1.0)
def kill_without_launcher(case):
    for first, rank in ((0, 1), (0, 0), (1, 1)):
        hurt_without_launcher(case, first, rank, signal.SIGKILL)


@fault("SIGSTOP of a rank, no launcher", "reported by name; the others end after LOCKSTEP_STOP_GRACE (1 s)",
       "the last survivor's error", 2.0)
def stop_without_launcher(case):
    for first, rank in ((0, 1), (0, 0)):
        told, _, pid = hurt_without_launcher(case, first, rank, signal.SIGSTOP)
        case.check(f"rank {rank} (pid {pid}) is stopped" in told, f"nobody says that it is stopped: {told}")


# ---- SIGSTOP ----------------------------------------------------------------------------------------------

STOP_GRACE = 1.5


@fault("SIGSTOP of a rank", "reported by name", "the launcher's line", 1.0)
def stop_reported(case):
    rank = case.ranks - 1
    with case.job("--rank", rank, run=["--stop-grace", f"{STOP_GRACE}s"]) as job:
        job.await_events("training", case.ranks)
        pid = job.rank_pid(rank)
        since = now()
        os.kill(pid, signal.SIGSTOP)
        line = job.await_line("err", rf"rank {rank} \(pid {pid}\) is stopped")
        if case.check(line, "the launcher does not say that the rank is stopped", job):
            case.within(case.measure(line[0] - since), 1.0, "reported")
        status = job.wait(STOP_GRACE + 10)
        case.check(status == 137, f"the status is {status}, not 137", job)
        after = check_survivors(case, job, rank, f"rank {rank} (pid {pid})", "stopped", since=since)
        case.check(after >= STOP_GRACE - 0.1, f"ended after {after:.2f} s, before the grace was over", job)
        case.within(after, STOP_GRACE + 1, "ended after the grace")


@fault("SIGSTOP, then SIGCONT within the grace", "goes on with the same bits", "the end of the job")
def stop_and_go_on(case):
    hashes = []
    for disturbed in (False, True):
        with case.job("--rank", 1, "--steps", 60) as job:
            job.await_events("training", case.ranks)
            if disturbed:
                pid = job.rank_pid(1)
                os.kill(pid, signal.SIGSTOP)
                time.sleep(1.2)
                since = now()
                os.kill(pid, signal.SIGCONT)
            status = job.wait(30)
            case.check(status == 0, f"the status is {status}, not 0", job)
            hashes.append({e["text"] for e in job.events("done")})
            if disturbed:
                case.measure(job.ended - since)
                case.check(re.search(rf"rank 1 \(pid {pid}\) goes on", job.text("err")), "not told to go on", job)
    case.check(len(hashes[0]) == 1 and hashes[0] == hashes[1], f"the bits differ: {hashes}")


@fault("a rank held by a debugger", "reported, and never ended", "the launcher's line", 1.0)
def held_by_debugger(case):
    with case.job("--rank", 1, "--steps", 40, run=["--stop-grace", "0.5s"]) as job:
        job.await_events("training", case.ranks)
        pid = job.rank_pid(1)
        since = now()
        with Traced(pid):
            line = job.await_line("err", rf"rank 1 \(pid {pid}\) is held by a debugger \(pid {os.getpid()}\)", 3)
            if case.check(line, "the launcher does not say that a debugger holds the rank", job):
                case.within(case.measure(line[0] - since), 1.0, "reported")
            time.sleep(1.5)
            case.check(harness.is_alive(pid), "the rank was ended", job)
        status = job.wait(30)
        case.check(status == 0, f"the status is {status}, not 0", job)


# ---- a rank ends by itself --------------------------------------------------------------------------------


def own_end(case, kind, how, status, *, uncaught):
    rank = case.ranks - 1
    with case.job("--rank", rank, "--fault", kind, *(["--uncaught"] if uncaught else [])) as job:
        since = job.await_events("fault", timeout=30)[0]["t"]
        pid = job.rank_pid(rank)
        got = job.wait(15)
        case.check(got == status, f"the status is {got}, not {status}", job)
        check_verdict(case, job, rank, pid, how)
        case.measure(check_survivors(case, job, rank, f"rank {rank} (pid {pid})", how, since=since))
        told = job.text("err")
        after = told[max(0, told.find("lockstep:")):]
        words = [line for line in after.splitlines() if f"rank {rank} says" in line]
        case.check(any("says 30 of 30" in line for line in words), "its last lines are not below the summary", job)
        case.check(not any("says 5 of 30" in line for line in words), "more than the last 20 lines are shown", job)


def ends_by_itself():
    for kind, words, how, status in (("throw", "an exception", "threw: the victim's own words", 134),
                                     ("abort", "abort()", "was killed by signal 6 (SIGABRT)", 134),
                                     ("segv", "a segmentation fault", "was killed by signal 11 (SIGSEGV)", 139)):
        @fault(f"{words} in a rank", f"'{how}' and its last 20 lines; innocents not blamed",
               "the last survivor's error", 1.0)
        def body(case, kind=kind, how=how, status=status):
            own_end(case, kind, how, status, uncaught=case.ranks > 2)


ends_by_itself()


@fault("out of memory (cgroup limit)", "the summary says so, with usage and limit", "the last survivor's error", 1.0)
def out_of_memory(case):
    try:
        limit = MemoryLimit(1536 << 20)
        limit.__enter__()
    except PermissionError as error:
        raise Skip(str(error)) from None
    with contextlib.ExitStack() as stack:
        stack.push(limit)
        rank = case.ranks - 1
        with case.job("--rank", rank, "--fault", "oom", cgroup=limit.folder) as job:
            job.await_events("fault", timeout=30)
            pid = job.rank_pid(rank)
            killed = wait_until(lambda: limit.kills() and now(), 30, 0.001)  # when the kernel did
            job.wait(15)
            check_verdict(case, job, rank, pid, "was killed by signal 9 (SIGKILL): out of memory")
            told = (told_by_launcher(job) or [""])[0]
            case.check(re.search(r"limit is 1\.5 GiB.*usage was \d", told), f"no usage and limit: {told}", job)
            if limit.kills() > 1:
                case.notes.append(f"the kernel killed {limit.kills()} processes, so that survivors are not asked")
            elif case.check(killed, "the kernel killed nobody", job):
                who = f"rank {rank} (pid {pid})"
                case.measure(max(0, check_survivors(case, job, rank, who, "out of memory", since=killed)))


def leaves(case, kind):
    rank = case.ranks - 1
    with case.job("--rank", rank, "--fault", kind) as job:
        since = job.await_events("fault", timeout=30)[0]["t"]
        pid = job.rank_pid(rank)
        status = job.wait(15)
        case.check(status not in (0, None), f"the status is {status}", job)
        how = "exited with status 0" if kind == "exit0" else ""
        case.measure(check_survivors(case, job, rank, f"rank {rank} (pid {pid}) {how}".strip(), since=since))


@fault("a rank exits 0 while others wait", "CommError that names it", "the last survivor's error", 1.0)
def exits_0(case):
    leaves(case, "exit0")


@fault("a rank leaves its World while others wait", "CommError that names it", "the last survivor's error", 1.0,
       torchrun="a rank exits 0 while others wait")
def exits_0_early(case):
    leaves(case, "exit0-early")


# ---- slow -------------------------------------------------------------------------------------------------


@fault("8 ranks on few cores, several hundred steps", "no alarm, no failure", "the end of the job", ranks=(8,),
       torchrun="-")
def slow_but_well(case):
    with case.job("--steps", 1000 if case.options.full else 300, "--phase", "compute") as job:
        since = job.await_events("training", case.ranks)[-1]["t"]
        case.check(job.wait(120) == 0, "it failed", job)
        case.measure(job.ended - since)
        case.check("lockstep:" not in job.text("err"), "a false alarm", job)


@fault("a rank that is 5 s late", "a line after 1, 2 and 4 s: who, where it was last, for how long",
       "the first line", 1.5)
def slow_rank(case):
    rank = case.ranks - 1
    with case.job("--rank", rank, "--fault", "sleep", "--ms", 5000, "--steps", 60) as job:
        since = job.await_events("fault", timeout=30)[0]["t"]
        pid = job.rank_pid(rank)
        case.check(job.wait(30) == 0, "it failed", job)
        told = [(t - since, line) for t, line in job.lines["err"] if line.startswith("lockstep:")]
        case.check([round(t) for t, _ in told] == [1, 2, 4], "not a line after 1, 2 and 4 s", job)
        for _, line in told:
            case.check(re.search(rf"rank {rank} \(pid {pid}\), last after all_reduce #\d+ .* ago", line),
                       f"it does not say who and where: {line}")
        if told:
            case.measure(told[0][0])
