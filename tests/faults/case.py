"""One fault with one number of ranks: the table of faults, and the checks for their functions."""

import contextlib
import dataclasses
import random
import re

import harness
from harness import Job, Surroundings

FAULTS = []


@dataclasses.dataclass
class Fault:
    name: str
    must: str  # show
    measures: str  # from the injection to this
    limit: float  # seconds, of p99 on a quiet machine
    ranks: tuple
    body: object
    torchrun: str  # the row's name in torchrun.json
    part: str  # the module's name, without _faults


def fault(name, must, measures, limit=None, ranks=(2, 4), torchrun=""):
    def register(body):
        part = body.__module__.removesuffix("_faults")
        FAULTS.append(Fault(name, must, measures, limit, ranks, body, torchrun or name, part))
        return body

    return register


class Skip(Exception):
    pass


class Case:
    """One fault with one number of ranks: its measurements and its failed checks."""

    def __init__(self, options, ranks, lateness):
        self.options, self.ranks, self.lateness = options, ranks, lateness
        self.random = random.Random(f"{options.seed} {ranks}")
        self.values, self.problems, self.notes = [], [], []
        self.shown = None  # the job whose output the problems show already

    def check(self, holds, text, job=None):
        if not holds:
            shows = job and job is not self.shown
            self.problems.append(text + (f"\n{indented(job.text())}" if shows else ""))
            self.shown = job or self.shown
        return holds

    def allowed(self, limit):
        """The limit, or more where this machine was busy since the case began."""
        return self.lateness.allowed(limit)

    def within(self, seconds, limit, text, job=None):
        """A promise about time. A note reports if it is kept only because the machine was busy."""
        allowed = self.allowed(limit)
        if limit < seconds <= allowed:
            self.notes.append(f"{text}: {seconds:.2f} s, more than the {limit} s of a quiet machine; processes were up to "
                              f"{self.lateness.most:.2f} s late")
        return self.check(seconds <= allowed, f"{text}: {seconds:.3f} s, more than {allowed:.3f} s", job)

    def check_nothing_left(self, surroundings, job):
        allowed = self.allowed(2)
        left = surroundings.left_over(job, allowed)
        self.check(not left, f"left over {allowed:.1f} s later: " + ", ".join(left), job)

    def measure(self, seconds):
        self.values.append(seconds)
        return seconds

    @contextlib.contextmanager
    def job(self, *victim, n=None, run=(), program=None, clean=True, **more):
        """`lockstep run` of the victim; in the end no process or file of it may be left."""
        surroundings = Surroundings(harness.have_own_namespaces())
        command = [self.options.lockstep, "run", "-n", n or self.ranks, "-q", "--prefix", "never", *run]
        command += program or [self.options.victim, *victim]
        job = Job(command, **more)
        try:
            yield job
            if clean:
                self.check(job.wait() is not None, "the launcher has not ended", job)
                self.check_nothing_left(surroundings, job)
        finally:
            job.end()


def indented(text):
    lines = text.splitlines()
    if len(lines) > 40:
        lines = lines[:30] + ["..."] + lines[-10:]
    return "\n".join("      | " + line for line in lines)


def told_by_launcher(job):
    """Its lines, without those about waiting or slow ranks, which are normal on a busy machine."""
    slow = re.compile(r" has waited | is slow: | is no longer slow: ")
    return [line for _, line in job.lines["err"] if line.startswith("lockstep:") and not slow.search(line)]


def check_verdict(case, job, rank, pid, how):
    """The launcher shows that failure first, and blames no other rank."""
    told = told_by_launcher(job)
    wanted = f"lockstep: rank {rank} (pid {pid}) {how}"
    case.check(told and told[0].startswith(wanted), f"the launcher's first line is not '{wanted}...'", job)
    blamed = re.compile(r"^lockstep: rank (\d+) \(pid \d+\) (was killed|exited|threw|has ended|leaves)")
    others = [line for line in told if (m := blamed.match(line)) and int(m[1]) != rank]
    case.check(not others, f"the launcher blames others: {others}", job)


def check_saved(case, jobs, status, ranks=None):
    """All ranks of these jobs save at the same step and end. Returns their events."""
    for job in jobs:
        got = job.wait()
        case.check(got == status, f"the status is {got}, not {status}", job)
    saved = [event for job in jobs for event in job.events("saved")]
    case.check(sorted(e["rank"] for e in saved) == list(range(ranks or case.ranks)), f"not every rank saved: {saved}", jobs[0])
    case.check(len({(e["step"], e["text"]) for e in saved}) == 1, f"not the same: {saved}")
    return saved


def check_survivors(case, job, rank, *parts, since):
    """Each other rank got a CommError with these parts in it. Returns the time until the last one."""
    last = 0
    for other in range(case.ranks):
        if other == rank:
            continue
        mine = job.events(rank=other)
        error = next((e for e in mine if e["event"] in ("CommError", "ConfigError", "Error")), None)
        if not case.check(error, f"rank {other} was not told: it is gone after {[e['event'] for e in mine]}", job):
            continue
        text = error["text"].splitlines()[0]
        case.check(error["event"] == "CommError", f"rank {other} got a {error['event']}: {text}")
        for part in parts:
            case.check(part in text, f"rank {other}'s error does not say '{part}': {text}")
        # A rank that joined later could not be notified sooner.
        came = next((e["t"] for e in mine if e["event"] == "joining"), 0)
        last = max(last, error["t"] - max(since, came))
    return last


class Ranks:
    """Ranks that were started without a launcher, in one job or in several."""

    def __init__(self, case):
        self.case, self.jobs = case, []

    def start(self, rank, size, port, more=None, *victim, events=None):
        environment = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port), **(more or {})}
        self.jobs.append(Job([self.case.options.victim, *victim], environment, events=events))
        return self.jobs[-1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for job in self.jobs:
            job.end()
