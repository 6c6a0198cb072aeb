"""Faults of a rank."""

import contextlib
import os
import re
import signal
import time

import harness
from case import Ranks, Skip, check_saved, check_survivors, check_verdict, fault, told_by_launcher
from harness import Lateness, MemoryLimit, Traced, free_port, now, wait_until

DEFAULT_GRACE = 5  # seconds, of --stop-grace and LOCKSTEP_STOP_GRACE


def check_grace(case, job, grace):
    """The errors report a stop as long as the requested grace, not the default one."""
    texts = [error["text"] for error in job.events("CommError")]
    found = [float(each) for each in re.findall(r"stopped for ([\d.]+) s", "\n".join(texts))]
    case.check(found and all(grace <= each < DEFAULT_GRACE for each in found), f"not stopped for {grace} s: {texts}")


# ---- without a launcher: the agent is in a rank, the first that came ---------------------------------------


@contextlib.contextmanager
def without_launcher(case, first, *victim):
    """All ranks train; the events of all are the first job's."""
    with Ranks(case) as ranks:
        port = free_port()
        jobs = {first: ranks.start(first, case.ranks, port, {"LOCKSTEP_STOP_GRACE": "1s"}, *victim)}
        wait_until(lambda: harness.has_agent(port) or jobs[first].ended)
        for rank in range(case.ranks):
            if rank != first:
                jobs[rank] = ranks.start(rank, case.ranks, port, {"LOCKSTEP_STOP_GRACE": "1s"}, *victim,
                                         events=jobs[first].events_file)
        jobs[first].await_events("training", case.ranks)
        yield jobs


def hurt_without_launcher(case, first, rank, number, check=lambda job: None):
    with without_launcher(case, first) as jobs:
        time.sleep(case.random.uniform(0, 0.2))
        pid = jobs[rank].pid
        since = now()
        os.kill(pid, number)
        for other in jobs:
            if other != rank:
                case.check(jobs[other].wait() == 4, f"rank {other} did not end because of an error", jobs[other])
        case.measure(check_survivors(case, jobs[first], rank, f"rank {rank} (pid {pid})", since=since))
        check(jobs[first])
        return "".join(job.text("err") for job in jobs.values()), rank, pid


@fault("kill -9 of a rank, no launcher", "CommError on every other rank that names the dead rank and its pid",
       "the last survivor's error", 1.0)
def kill_without_launcher(case):
    for first, rank in ((0, 1), (0, 0), (1, 1)):
        hurt_without_launcher(case, first, rank, signal.SIGKILL)


@fault("SIGSTOP of a rank, no launcher", "reported by name; the other ranks end after LOCKSTEP_STOP_GRACE (1 s)",
       "the last survivor's error", 2.0)
def stop_without_launcher(case):
    for first, rank in ((0, 1), (0, 0)):
        told, _, pid = hurt_without_launcher(case, first, rank, signal.SIGSTOP, lambda job: check_grace(case, job, 1))
        case.check(f"rank {rank} (pid {pid}) is stopped" in told, f"no rank says that it is stopped: {told}")


# ---- SIGSTOP ----------------------------------------------------------------------------------------------

STOP_GRACE = 0.8


@fault("SIGSTOP of a rank", "reported by name", "the launcher's line", 1.0)
def stop_reported(case):
    rank = case.ranks - 1
    with case.job("--rank", rank, run=["--stop-grace", f"{STOP_GRACE}s"]) as job:
        job.await_events("training", case.ranks)
        pid = job.rank_pid(rank)
        since = now()
        os.kill(pid, signal.SIGSTOP)
        line = job.await_line("err", rf"rank {rank} \(pid {pid}\) is stopped \(SIGSTOP\): it will be killed in {STOP_GRACE} s")
        if case.check(line, "the launcher does not say that the rank is stopped", job):
            case.within(case.measure(line[0] - since), 1.0, "reported")
        status = job.wait()
        case.check(status == 137, f"the status is {status}, not 137", job)
        after = check_survivors(case, job, rank, f"rank {rank} (pid {pid})", "stopped", since=since)
        case.check(after >= STOP_GRACE - 0.1, f"ended after {after:.2f} s, before the grace was over", job)
        case.within(after, STOP_GRACE + 1, "ended after the grace")
        check_grace(case, job, STOP_GRACE)


@fault("SIGSTOP, then SIGCONT within the grace period", "resumes with the same bits", "the end of the job")
def stop_and_go_on(case):
    with case.job("--stop", run=["--stop-grace", f"{harness.LONG}s"]) as job:
        job.await_events("training", case.ranks)
        pid = job.rank_pid(1)
        os.kill(pid, signal.SIGSTOP)
        case.check(job.await_line("err", rf"rank 1 \(pid {pid}\) is stopped"), "the launcher does not say that it is stopped", job)
        time.sleep(0.5)
        since = now()
        os.kill(pid, signal.SIGCONT)
        case.check(job.await_line("err", rf"rank 1 \(pid {pid}\) resumed"), "the launcher does not say that it resumed", job)
        job.signal(signal.SIGTERM)
        saved = check_saved(case, [job], 143)
        case.measure(job.ended - since)
    if saved:
        with case.job("--steps", saved[0]["step"]) as job:
            status = job.wait()
            case.check(status == 0, f"the status is {status}, not 0", job)
            hashes = {e["text"] for e in job.events("done")}
        case.check(hashes == {saved[0]["text"]}, f"the bits differ: {saved[0]}, undisturbed {hashes}")


@fault("a rank held by a debugger", "reported, never terminated", "the launcher's line", 1.0)
def held_by_debugger(case):
    with case.job("--stop", run=["--stop-grace", "0.5s"]) as job:
        job.await_events("training", case.ranks)
        pid = job.rank_pid(1)
        since = now()
        with Traced(pid):
            line = job.await_line("err", rf"rank 1 \(pid {pid}\) is held by a debugger \(pid {os.getpid()}\)")
            if case.check(line, "the launcher does not say that a debugger holds the rank", job):
                case.within(case.measure(line[0] - since), 1.0, "reported")
            time.sleep(1)  # the grace was over before
            case.check(harness.is_alive(pid), "the rank was ended", job)
        job.signal(signal.SIGTERM)
        check_saved(case, [job], 143)


# ---- a rank ends by itself --------------------------------------------------------------------------------


def own_end(case, kind, how, status, *, uncaught):
    rank = case.ranks - 1
    with case.job("--rank", rank, "--fault", kind, *(["--uncaught"] if uncaught else [])) as job:
        since = job.await_events("fault")[0]["t"]
        pid = job.rank_pid(rank)
        got = job.wait()
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
        @fault(f"{words} in a rank", f"'{how}' and its last 20 lines; other ranks not blamed",
               "the last survivor's error", 1.0)
        def body(case, kind=kind, how=how, status=status):
            own_end(case, kind, how, status, uncaught=case.ranks > 2)


ends_by_itself()


@fault("out of memory (cgroup limit)", "the summary reports it, with usage and limit", "the last survivor's error", 1.0)
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
            job.await_events("fault")
            pid = job.rank_pid(rank)
            killed = wait_until(lambda: limit.kills() and now(), pause=0.001)  # when the kernel did
            job.wait()
            check_verdict(case, job, rank, pid, "was killed by signal 9 (SIGKILL): out of memory")
            told = (told_by_launcher(job) or [""])[0]
            case.check(re.search(r"limit is 1\.5 GiB.*usage was \d", told), f"no usage and limit: {told}", job)
            if limit.kills() > 1:
                case.notes.append(f"the kernel killed {limit.kills()} processes, so that survivors are not asked")
            elif case.check(killed, "the kernel killed no process", job):
                who = f"rank {rank} (pid {pid})"
                case.measure(max(0, check_survivors(case, job, rank, who, "out of memory", since=killed)))


def leaves(case, kind):
    rank = case.ranks - 1
    with case.job("--rank", rank, "--fault", kind) as job:
        since = job.await_events("fault")[0]["t"]
        pid = job.rank_pid(rank)
        status = job.wait()
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


@fault("8 ranks on few cores, several hundred steps", "no warning, no failure", "the end of the job", ranks=(8,),
       torchrun="-")
def slow_but_well(case):
    few = sorted(os.sched_getaffinity(0))[:2]
    victim = ["--steps", 1000 if case.options.full else 300, "--phase", "compute"]
    with Lateness() as lateness, case.job(*victim, cores=few) as job:
        since = job.await_events("training", case.ranks)[-1]["t"]
        case.check(job.wait(300) == 0, "it failed", job)
        case.measure(job.ended - since)
    alarms = [line for _, line in job.lines["err"] if line.startswith("lockstep:")]
    # A wait includes the time each rank waited for a core: if other processes use the cores, one wait is
    # really long.
    if alarms and not told_by_launcher(job) and lateness.most > 0.1:
        case.notes.append(f"{len(alarms)} alarms, on a machine that kept this process waiting for {lateness.most:.2f} s")
    else:
        case.check(not alarms, "a false alarm", job)


@fault("a rank that is 5 s late", "a line after 1, 2 and 4 s: which rank, its last position, for how long",
       "the first line", 1.5)
def slow_rank(case):
    rank = case.ranks - 1
    with Lateness() as lateness, case.job("--rank", rank, "--fault", "sleep", "--ms", 5000, "--steps", 60) as job:
        since = job.await_events("fault")[0]["t"]
        pid = job.rank_pid(rank)
        case.check(job.wait() == 0, "it failed", job)
    told = [(t - since, line) for t, line in job.lines["err"] if t > since and line.startswith("lockstep:")]
    where = rf"has waited ([\d.]+) s in .*; missing: rank {rank} \(pid {pid}\), last after all_reduce #\d+ .* ago"
    found = [(t, float(match[1])) for t, line in told if (match := re.search(where, line))]
    # Each line appears when the wait is at least twice as long as at the previous one.
    waits = [int(waited).bit_length() for _, waited in found]
    busy = lateness.most > 0.1
    case.check(waits == [1, 2, 3] or busy and waits and waits == sorted(set(waits)), "not a line after 1, 2 and 4 s", job)
    case.check(len(found) == len(told) or busy, "a line does not say who and where", job)
    if found:
        case.measure(found[0][0])
