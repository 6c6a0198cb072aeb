"""Injects faults into jobs that `lockstep run` started, and measures what follows.

usage: faults.py --lockstep PROGRAM --victim PROGRAM [--store-probe PROGRAM] [--library FILE] [--results FILE]
                 [--full] [--only REGEX] [--seed N] [--list]

Each fault of the table FAULTS is one row of docs/faults.md. A row's function starts real jobs, injects the fault and
checks what must show; what it measures are seconds from the injection, as seen here.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback

import harness
from harness import Job, MemoryLimit, Surroundings, TooLate, Traced, TwoHosts, now, wait_until

FAULTS = []
SKIP = 77


@dataclasses.dataclass
class Fault:
    name: str
    must: str  # show
    measures: str  # from the injection to this
    limit: float  # seconds; of p99
    ranks: tuple
    body: object
    torchrun: str = ""  # the row's name in torchrun.json, where it is another


def fault(name, must, measures, limit=None, ranks=(2, 4), torchrun=""):
    def register(body):
        FAULTS.append(Fault(name, must, measures, limit, ranks, body, torchrun or name))
        return body

    return register


class Skip(Exception):
    pass


class Case:
    """One fault with one number of ranks: what was measured, and what was not as it must be."""

    def __init__(self, options, ranks):
        self.options, self.ranks = options, ranks
        self.random = random.Random(f"{options.seed} {ranks}")
        self.values, self.problems, self.notes = [], [], []
        self.shown = None  # the job whose output the problems show already

    def check(self, holds, text, job=None):
        if not holds:
            shows = job and job is not self.shown
            self.problems.append(text + (f"\n{indented(job.text())}" if shows else ""))
            self.shown = job or self.shown
        return holds

    def within(self, seconds, limit, text, job=None):
        """A promise about time. On a machine with far too much to do, twice as long is allowed, and told."""
        if limit < seconds <= 2 * limit and os.getloadavg()[0] > 2 * os.cpu_count():
            self.notes.append(f"{text}: {seconds:.2f} s allowed at a load of {os.getloadavg()[0]:.1f}")
            return True
        return self.check(seconds <= limit, f"{text}: {seconds:.3f} s, more than {limit} s", job)

    def measure(self, seconds):
        self.values.append(seconds)
        return seconds

    @contextlib.contextmanager
    def job(self, *victim, n=None, run=(), program=None, clean=True, **more):
        """`lockstep run` of the victim; at the end nothing may be left of it, 2 s after its end."""
        surroundings = Surroundings(harness.have_own_namespaces())
        command = [self.options.lockstep, "run", "-n", n or self.ranks, "-q", "--prefix", "never", *run]
        command += program or [self.options.victim, *victim]
        job = Job(command, **more)
        try:
            yield job
            if clean:
                self.check(job.wait(20) is not None, "the launcher has not ended", job)
                left = surroundings.left_over(job, 2)
                self.check(not left, "left over 2 s later: " + ", ".join(left), job)
        finally:
            job.end()


def indented(text):
    lines = text.splitlines()
    if len(lines) > 40:
        lines = lines[:30] + ["..."] + lines[-10:]
    return "\n".join("      | " + line for line in lines)


def told_by_launcher(job):
    """Its lines, less those that tell who waits for whom: a rank may take its time to fail."""
    return [line for _, line in job.lines["err"] if line.startswith("lockstep:") and " has waited " not in line]


def check_verdict(case, job, rank, pid, how):
    """The launcher shows that failure first, and blames nobody else."""
    told = told_by_launcher(job)
    wanted = f"lockstep: rank {rank} (pid {pid}) {how}"
    case.check(told and told[0].startswith(wanted), f"the launcher's first line is not '{wanted}...'", job)
    blamed = re.compile(r"^lockstep: rank (\d+) \(pid \d+\) (was killed|exited|threw|has ended|leaves)")
    others = [line for line in told if (m := blamed.match(line)) and int(m[1]) != rank]
    case.check(not others, f"the launcher blames others: {others}", job)


def check_survivors(case, job, rank, *parts, since, attempt=0):
    """Each other rank got a CommError with these parts in it. The time until the last one had."""
    last = 0
    for other in range(case.ranks):
        if other == rank:
            continue
        mine = [e for e in job.events(rank=other) if e.get("attempt", 0) == attempt]
        error = next((e for e in mine if e["event"] in ("CommError", "ConfigError", "Error")), None)
        if not case.check(error, f"rank {other} was not told: it is gone after {[e['event'] for e in mine]}", job):
            continue
        text = error["text"].splitlines()[0]
        case.check(error["event"] == "CommError", f"rank {other} got a {error['event']}: {text}")
        for part in parts:
            case.check(part in text, f"rank {other}'s error does not say '{part}': {text}")
        # Whoever came later than that could not be told sooner.
        came = next((e["t"] for e in mine if e["event"] == "joining"), 0)
        last = max(last, error["t"] - max(since, came))
    return last


# ---- kill -9 of a rank ------------------------------------------------------------------------------------


def kill_rank(case, phase, run_index, *, gib=0):
    rank = (run_index + case.random.randrange(case.ranks)) % case.ranks
    with case.job("--rank", rank, "--phase", phase, "--gib", gib) as job:
        if phase == "before_init":
            job.await_events("holding")
            time.sleep(case.random.uniform(0, 0.4))
        elif phase == "in_init":
            job.await_events("joining", 1, rank)
            time.sleep(case.random.uniform(0, 0.18))
        else:
            job.await_events("training", case.ranks, timeout=60)
            time.sleep(case.random.uniform(0, 0.2))
        pid = job.rank_pid(rank)
        os.kill(pid, signal.SIGKILL)
        since = now()
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

# ---- SIGSTOP ----------------------------------------------------------------------------------------------

STOP_GRACE = 1.5


@fault("SIGSTOP of a rank", "reported by name", "the launcher's line", 1.0)
def stop_reported(case):
    rank = case.ranks - 1
    with case.job("--rank", rank, run=["--stop-grace", f"{STOP_GRACE}s"]) as job:
        job.await_events("training", case.ranks)
        pid = job.rank_pid(rank)
        os.kill(pid, signal.SIGSTOP)
        since = now()
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
                os.kill(pid, signal.SIGCONT)
                since = now()
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


# ---- the launcher is killed -------------------------------------------------------------------------------


def kill_launcher(case, job, pid):
    job.await_events("training", case.ranks)
    case.check(len(job.processes()) >= case.ranks + 1, "fewer processes than ranks", job)
    os.kill(pid, signal.SIGKILL)
    since = now()
    left = wait_until(lambda: not job.processes(), 5)
    case.within(case.measure(now() - since), 1.0, "all gone", job)
    case.check(left, f"still there: {[command_of_rank(p) for p in job.processes()]}")


def command_of_rank(pid):
    return f"{pid} ({harness.command_of(pid)})"


def launcher_row(name, *victim, program=None, agent=False):
    @fault(name, "all ranks and what they started are gone", "the last process is gone", 1.0,
           torchrun="" if not agent else "-")
    def body(case):
        command = program(case) if program else None
        with case.job(*victim, program=command, clean=False) as job:
            surroundings = Surroundings(harness.have_own_namespaces())
            pid = job.pid
            if agent:
                job.await_events("start")
                pid = next(p for p in job.processes()
                           if pathlib.Path(f"/proc/{p}/comm").read_text().startswith("lockstep-agent"))
            kill_launcher(case, job, pid)
            left = [each for each in surroundings._left(job)]
            case.check(not left, "left over: " + ", ".join(left))


def script_of(case):
    # With a command after it, so that the shell stays.
    return ["sh", "-c", '"$@"; echo ended', "sh", str(case.options.victim)]


launcher_row("kill -9 of the launcher")
launcher_row("kill -9 of the launcher, ranks are scripts", program=script_of)
launcher_row("kill -9 of the launcher, ranks have helpers and a daemon", "--helpers")
launcher_row("kill -9 of the launcher's other half, lockstep-agent", agent=True)

# ---- asked to end -----------------------------------------------------------------------------------------


def signal_rows():
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        @fault(f"{number.name} to the launcher, ranks ask stop_requested()",
               f"all save at the same step; status {status}", "the launcher's end", 5.0)
        def saves(case, number=number, status=status):
            with case.job("--stop") as job:
                job.await_events("training", case.ranks)
                since = job.signal(number)
                case.check(job.wait(10) == status, f"the status is not {status}", job)
                saved = job.events("saved")
                case.check(len(saved) == case.ranks, f"{len(saved)} ranks saved", job)
                case.check(len({(e["step"], e["text"]) for e in saved}) == 1, f"not the same: {saved}")
                case.measure(job.ended - since)

    @fault("SIGTERM to the launcher, ranks do not know of it", "they end; nobody is blamed; status 143",
           "the launcher's end", 1.0)
    def ends(case):
        with case.job() as job:
            job.await_events("training", case.ranks)
            since = job.signal(signal.SIGTERM)
            case.check(job.wait(10) == 143, "the status is not 143", job)
            case.check(not told_by_launcher(job), "somebody is blamed", job)
            case.measure(job.ended - since)

    @fault("SIGTERM to the launcher, ranks take no notice", "killed after --grace (1 s); status 143",
           "the launcher's end", 2.0)
    def ignores(case):
        with case.job("--ignore-signals", run=["--grace", "1s"]) as job:
            job.await_events("training", case.ranks)
            since = job.signal(signal.SIGTERM)
            case.check(job.wait(10) == 143, "the status is not 143", job)
            case.check(case.measure(job.ended - since) >= 0.9, "ended before the grace was over", job)

    @fault("a second SIGTERM to the launcher", "ends at once; status 143", "the launcher's end, from the second", 1.0)
    def twice(case):
        with case.job("--ignore-signals", run=["--grace", "30s"]) as job:
            job.await_events("training", case.ranks)
            job.signal(signal.SIGTERM)
            time.sleep(0.3)
            case.check(job.ended is None, "the first one ended it", job)
            since = job.signal(signal.SIGTERM)
            case.check(job.wait(10) == 143, "the status is not 143", job)
            case.measure(job.ended - since)


signal_rows()

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
            if case.check(killed, "the kernel killed nobody", job):
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


# ---- joining ----------------------------------------------------------------------------------------------


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Ranks:
    """Ranks that were started without a launcher, in one job or in several."""

    def __init__(self, case):
        self.case, self.jobs = case, []

    def start(self, rank, size, port, more=None, *victim):
        environment = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port), **(more or {})}
        self.jobs.append(Job([self.case.options.victim, *victim], environment))
        return self.jobs[-1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for job in self.jobs:
            job.end()


def check_refusal(case, jobs, kinds, *patterns, since=None, limit=2.0):
    """All of them are told, within the limit of the last one's arrival, or of `since`."""
    for job in jobs:
        job.wait(20)
    arrivals = [e["t"] for job in jobs for e in job.events("joining")]
    last = 0
    for job in jobs:
        error = next((e for e in job.events() if e["event"] in kinds), None)
        if not case.check(error, f"not told: {[e['event'] for e in job.events()]}", job):
            continue
        for pattern in patterns:
            case.check(re.search(pattern, error["text"]), f"'{pattern}' is not in: {error['text']}")
        last = max(last, error["t"])
    if last:
        case.within(case.measure(last - max(arrivals) - (since or 0)), limit, "told")


@fault("WORLD_SIZE is larger than what was started", "an error that lists ranks seen and missing",
       "the last error, after --join-timeout (1 s)", 2.0)
def missing_rank(case):
    with Ranks(case) as ranks:
        port = free_port()
        size = case.ranks + 1
        for rank in range(case.ranks):
            ranks.start(rank, size, port, {"LOCKSTEP_JOIN_TIMEOUT": "1s"})
        seen = ", ".join(map(str, range(case.ranks)))
        # The first one's time is over first.
        check_refusal(case, ranks.jobs, ["CommError"], rf"did not come: {case.ranks}\b", rf"did: {seen}")


@fault("two processes with one RANK", "an error that names the duplicate", "the last error", 2.0)
def duplicate_rank(case):
    with Ranks(case) as ranks:
        port = free_port()
        for rank in [*range(case.ranks - 1), case.ranks - 2]:
            ranks.start(rank, case.ranks, port)
        check_refusal(case, ranks.jobs, ["ConfigError", "CommError"], rf"RANK={case.ranks - 2}\b",
                      *(rf"\b{job.pid}\b" for job in ranks.jobs[-2:]))


@fault("two jobs on one port", "the second is told, the first goes on", "the second job's last error", 2.0)
def two_jobs(case):
    half = max(2, case.ranks // 2)
    with Ranks(case) as ranks:
        port = free_port()
        first = [ranks.start(rank, half, port, None, "--steps", "300") for rank in range(half)]
        for job in first:
            job.await_events("training")
        second = [ranks.start(rank, half, port, None, "--steps", "5") for rank in range(half)]
        check_refusal(case, second, ["ConfigError", "CommError"], "RANK|port|job")
        for job in first:
            case.check(job.wait(30) == 0, "the first job did not go on", job)


def another_version(case, folder):
    """Puts a copy of the library there whose version is another; returns both versions."""
    library = pathlib.Path(case.options.library).resolve()
    told = subprocess.run([case.options.lockstep, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"\d+\.\d+\.\d+", told)[0]
    # Compilers put a short text into the instructions in pieces of four.
    piece = version[:4]
    other = piece[:2] + "9" + piece[3:]
    content = library.read_bytes()
    if piece.encode() not in content:
        raise Skip("the version is not found in the library's bytes")
    for name in {library.name, *(link.name for link in library.parent.glob("liblockstep.so*"))}:
        (folder / name).write_bytes(content.replace(piece.encode(), other.encode()))
    return version, version.replace(piece, other, 1)


@fault("ranks with different versions of the library", "an error that names both", "the last error", 2.0)
def different_versions(case):
    with Ranks(case) as ranks, tempfile.TemporaryDirectory() as folder:
        versions = another_version(case, pathlib.Path(folder))
        port = free_port()
        for rank in range(case.ranks):
            ranks.start(rank, case.ranks, port, {"LD_LIBRARY_PATH": folder} if rank == 1 else None)
        check_refusal(case, ranks.jobs, ["ConfigError"], "version", *map(re.escape, versions))


@fault("port in use", "without --master another one is taken; with it, an error with the address",
       "the launcher's end", 2.0)
def port_in_use(case):
    with KeyFile(case) as key, socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        several = ["--nnodes", 2, "--node-rank", 0, "--master", f"127.0.0.1:{port}", "--key-file", key]
        with case.job("--steps", 5, run=several) as job:
            status = job.wait(20)
            case.check(status not in (0, None), f"the status is {status}", job)
            case.check(f"127.0.0.1:{port}" in job.text("err"), "the address is not named", job)
            case.measure(job.ended - job.started)
        # What a rank would take by default is taken too.
        with case.job("--steps", 5, env={"MASTER_PORT": str(port)}) as job:
            case.check(job.wait(20) == 0, "it failed though no port was asked for", job)


# ---- several hosts ----------------------------------------------------------------------------------------


class KeyFile:
    def __init__(self, case):
        self.case = case

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        path = pathlib.Path(self.folder.name) / "key"
        text = subprocess.run([self.case.options.lockstep, "key"], capture_output=True, check=True).stdout
        path.touch(0o600)
        path.write_bytes(text)
        return path

    def __exit__(self, *_):
        self.folder.cleanup()


def node(case, number, master, key, program, **more):
    command = [case.options.lockstep, "run", "--nnodes", 2, "--node-rank", number, "--master", master, "--key-file", key,
               "-n", case.ranks // 2, "-q", "--prefix", "never", "--join-timeout", "20s", *program]
    return Job(command, **more)


@contextlib.contextmanager
def two_nodes(case, program, port, key, hosts=None):
    """Two launchers of one job; both write into the first one's events."""
    jobs = []
    try:
        master = f"{hosts.addresses[0] if hosts else '127.0.0.1'}:{port}"
        for number in range(2):
            namespace = hosts.names[number] if hosts else None
            jobs.append(node(case, number, master, key, program, namespace=namespace,
                             events=jobs[0].events_file if jobs else None))
        yield jobs
    finally:
        for job in jobs:
            job.end()


def idle(port, stop):
    """1,500 connections that say nothing; those that were cut off are opened again."""
    held = {}
    poll = select.poll()
    while now() < stop:
        while len(held) < 1500 and now() < stop:
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
            held[one.fileno()] = one
            poll.register(one, select.POLLIN)
        time.sleep(0.02)
        for fd, _ in poll.poll(0):  # nobody says anything to them but good-bye
            poll.unregister(fd)
            held.pop(fd).close()


def shout(texts):
    def attack(port, stop):
        count = 0
        while now() < stop:
            text = texts[count % len(texts)]
            count += 1
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as one:
                one.settimeout(0.02)
                one.sendall(text)
                one.recv(64)
            time.sleep(0.001)

    return attack


HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: scanner\r\n\r\n"
ATTACKS = {
    "random bytes": lambda r: shout([r.randbytes(n) for n in (1, 16, 64, 4096, 65536)]),
    "HTTP": lambda r: shout([HTTP, b"POST /x HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 5000]),
    "a huge length": lambda r: shout([b"\xff" * 8 + b"\0" * 56, b"\xff\xff\xff\x7f" + bytes(60), b"\0" * 64]),
    "1,500 idle connections": lambda r: idle,
}


def attack_in_turns(port, attack, rounds, seconds):
    """Waits and attacks in turn; returns when the attacks were."""
    windows = []
    for _ in range(rounds):
        time.sleep(seconds)
        begin = now()
        # Another process, so that its work is not ours; it costs processor time all the same.
        attacker = os.fork()
        if attacker == 0:
            attack(port, begin + seconds)
            os._exit(0)
        os.waitpid(attacker, 0)
        windows.append((begin, begin + seconds))
    return windows


def calm_and_attacked(job, windows):
    """Microseconds of the store operations outside and inside of these windows."""
    calm, attacked = [], []
    for begin, micros in (pair for event in job.events("ops") for pair in event["ops"]):
        if any(b <= begin <= e for b, e in windows):
            attacked.append(micros)
        elif not any(begin <= b <= begin + micros / 1e6 or e <= begin <= e + 0.2 for b, e in windows):
            calm.append(micros)
    return calm, attacked


def attack_head(case, kind):
    """The median time of a store operation during the attack over that of the pauses around it."""
    rounds, seconds = (5, 2.0) if case.options.full else (3, 1.0)
    port = free_port()
    program = [case.options.store_probe, 2 * rounds * seconds + 3]
    with KeyFile(case) as key, two_nodes(case, program, port, key) as jobs:
        jobs[0].await_events("joined", case.ranks, timeout=30)
        windows = attack_in_turns(port, ATTACKS[kind](case.random), rounds, seconds)
        for job in jobs:
            case.check(job.wait(30) == 0, "the job did not survive", job)
        calm, attacked = calm_and_attacked(jobs[0], windows)
        if case.check(calm and attacked, "nothing was measured", jobs[0]):
            before, during = statistics.median(calm), statistics.median(attacked)
            case.notes.append(f"a set and a get: {before:.0f} us before, {during:.0f} us during ({len(attacked)} times)")
            case.check(during <= 1.5 * before, f"a store operation takes {during / before:.2f} times as long", jobs[0])
            case.measure(during / before)


def attack_rows():
    for kind in ATTACKS:
        @fault(f"{kind} at the head's port", "no crash; store operations take at most 1.5 times as long",
               "median time during / before", 1.5, ranks=(2, 4) if kind.startswith("1,500") else (2,))
        def body(case, kind=kind):
            attack_head(case, kind)


attack_rows()


@fault("a stranger without the key", "refused before anything is parsed, nothing changed", "the stranger is cut off",
       1.5, ranks=(2,))
def stranger(case):
    port = free_port()
    with KeyFile(case) as key, two_nodes(case, [case.options.store_probe, 4], port, key) as jobs:
        jobs[0].await_events("joined", case.ranks, timeout=30)
        # The first frame of a host that proves nothing: its length, its kind, zeros.
        for text in (b"\x40\0\0\0" + bytes(60), bytes(64), b"lockstep", b""):
            since = now()
            with socket.create_connection(("127.0.0.1", port), 1) as one:
                one.settimeout(5)
                one.sendall(text)
                answer = b""
                with contextlib.suppress(ConnectionResetError):
                    while got := one.recv(4096):
                        answer += got
                case.measure(now() - since)
                case.check(len(answer) <= 64, f"it was told {len(answer)} bytes: {answer[:80]!r}")
        for job in jobs:
            case.check(job.wait(30) == 0, "the job did not survive", job)


@fault("a host with an old key", "refused, and told why; the job goes on", "the stranger's end", 5.0, ranks=(2,))
def old_key(case):
    port = free_port()
    with KeyFile(case) as key, KeyFile(case) as old:
        with two_nodes(case, [case.options.store_probe, 6], port, key) as jobs:
            jobs[0].await_events("joined", case.ranks, timeout=30)
            late = node(case, 1, f"127.0.0.1:{port}", old, [case.options.store_probe, 1])
            try:
                status = late.wait(20)
                case.measure((late.ended or now()) - late.started)
                case.check(status not in (0, None), f"the stranger's status is {status}", late)
                case.check("key" in late.text("err"), "the stranger is not told that it is the key", late)
            finally:
                late.end()
            for job in jobs:
                case.check(job.wait(30) == 0, "the job did not survive", job)
        counts = {"joined": case.ranks, "done": case.ranks}
        for name, count in counts.items():
            case.check(len(jobs[0].events(name)) in (0, count), f"not {count} '{name}'")


@fault("a host is lost", "both sides know", "the last rank's error, on either side", 2.0)
def host_lost(case):
    reason = harness.why_no_hosts()
    if reason:
        raise Skip(reason)
    with TwoHosts() as hosts, KeyFile(case) as key:
        with two_nodes(case, [case.options.victim], 29400, key, hosts) as jobs:
            jobs[0].await_events("training", case.ranks, timeout=30)
            time.sleep(0.3)
            since = hosts.unplug()
            for job in jobs:
                status = job.wait(20)
                case.check(status not in (0, None), f"the status is {status}", job)
                case.check("is lost" in job.text("err"), "the launcher does not say that a host is lost", job)
            errors = jobs[0].events("CommError")
            case.check(len(errors) == case.ranks, f"{len(errors)} ranks got a CommError", jobs[0])
            for error in errors:
                case.check("lost" in error["text"], f"not told that a host is lost: {error['text']}")
            if errors:
                case.measure(max(e["t"] for e in errors) - since)


# ---- again ------------------------------------------------------------------------------------------------


@fault("a rank that fails once, --max-restarts 2", "all ranks start again, and it ends well",
       "every rank trains again", 5.0)
def fails_once(case):
    rank = case.ranks - 1
    with case.job("--rank", rank, "--fault", "throw", "--attempts", 1, "--steps", 40, run=["--max-restarts", 2]) as job:
        since = job.await_events("fault", timeout=30)[0]["t"]
        status = job.wait(40)
        case.check(status == 0, f"the status is {status}, not 0", job)
        again = [e for e in job.events("training") if e["attempt"] == 1]
        case.check(len(again) == case.ranks, f"{len(again)} ranks trained again", job)
        if again:
            case.measure(max(e["t"] for e in again) - since)


@fault("a rank that fails twice at one step, --max-restarts 5", "ends with that diagnosis after the second",
       "the launcher's end, from the second", 5.0)
def fails_twice(case):
    rank = case.ranks - 1
    with case.job("--rank", rank, "--fault", "throw", run=["--max-restarts", 5]) as job:
        since = job.await_events("fault", 2, timeout=60)[1]["t"]
        status = job.wait(40)
        case.check(status not in (0, None), f"the status is {status}", job)
        case.check({e["attempt"] for e in job.events("fault")} == {0, 1}, "not two attempts", job)
        case.check(re.search(r"came to the same end.*the victim's own words.*step 20", job.text("err")),
                   "the diagnosis is missing", job)
        case.measure(job.ended - since)


# ---- running them -----------------------------------------------------------------------------------------


def run_fault(each, ranks, options):
    case = Case(options, ranks)
    begin = now()
    result = {"fault": each.name, "ranks": ranks, "must": each.must, "measures": each.measures, "limit": each.limit,
              "torchrun": each.torchrun}
    try:
        each.body(case)
    except Skip as reason:
        result["skipped"] = str(reason)
    except TooLate as error:
        case.problems.append(str(error))
    except Exception:
        case.problems.append(traceback.format_exc())
    figures = harness.summary(case.values)
    if figures and each.limit:
        case.within(figures["p99"], each.limit, f"p99 of {figures['count']} until {each.measures}")
    result |= {"figures": figures, "values": [round(v, 4) for v in case.values], "problems": case.problems,
               "notes": case.notes}
    show(each, result, now() - begin)
    return result


def show(each, result, seconds):
    verdict = "skip" if "skipped" in result else "FAIL" if result["problems"] else "ok"
    figures = result["figures"]
    numbers = ("" if not figures else f"median {figures['median']:.3f}, p99 {figures['p99']:.3f}, "
               f"max {figures['max']:.3f} of {figures['count']}: {each.measures}")
    print(f"{verdict:4} {each.name} ({result['ranks']} ranks, {seconds:.1f} s): {numbers}", flush=True)
    for note in result["notes"]:
        print(f"     note: {note}")
    for problem in result["problems"]:
        print(f"     {problem}")
    if "skipped" in result:
        print(f"     {result['skipped']}")
    sys.stdout.flush()


def check_all_kills(results, case_limit=1.0):
    """Of all kills together, as the promise has it."""
    values = [v for r in results if r["fault"].startswith("kill -9 of a rank") for v in r["values"]]
    if not values:
        return True
    figures = harness.summary(values)
    print(f"kill -9 of a rank, all phases: {figures['count']} times, median {figures['median'] * 1000:.1f} ms, p99 "
          f"{figures['p99'] * 1000:.1f} ms, max {figures['max'] * 1000:.1f} ms until the last survivor's error")
    return figures["p99"] < case_limit or os.getloadavg()[0] > 2 * os.cpu_count()


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--lockstep", "--victim", "--store-probe", "--library", "--results"):
        parser.add_argument(name, type=pathlib.Path)
    parser.add_argument("--full", action="store_true", help="more of each")
    parser.add_argument("--only", default="", help="faults whose name matches")
    parser.add_argument("--ranks", type=int, help="with that many ranks alone")
    parser.add_argument("--seed", default=str(time.time_ns()), help="of the random times")
    parser.add_argument("--list", action="store_true", help="the faults, and nothing else")
    return parser.parse_args(argv)


def main():
    options = parse(sys.argv[1:])
    if options.list:
        print("\n".join(each.name for each in FAULTS))
        return 0
    if not options.lockstep or not options.victim or not options.lockstep.exists() or not options.victim.exists():
        print("nothing can be run: the programs are not built")
        return SKIP
    harness.enter_own_namespaces([sys.executable, *sys.argv])
    print(f"seed {options.seed}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, "
          f"{'a network namespace of its own' if harness.have_own_namespaces() else 'sockets shared with others'}")
    results = []
    for each in FAULTS:
        if re.search(options.only, each.name):
            results += [run_fault(each, ranks, options) for ranks in each.ranks if options.ranks in (None, ranks)]
    good = check_all_kills(results)
    failed = [r for r in results if r["problems"]]
    if options.results:
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps({"processors": os.cpu_count(), "full": options.full, "rows": results},
                                              indent=1))
    print(f"{len(results) - len(failed)} of {len(results)} rows as they must be")
    for result in failed:
        print(f"failed: {result['fault']} ({result['ranks']} ranks)")
    return 0 if good and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
