"""The injections of faults.py against torchrun, for the last column of docs/evidence/faults.md.

usage: PYTHON-WITH-TORCH torchrun_faults.py TORCHRUN RESULTS [--only REGEX]

Writes RESULTS (tests/faults/torchrun.json), or the rows that match into it. Each wait is at most 30 s.
"""

import json
import os
import pathlib
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time

import harness
import host_faults
from harness import Job, MemoryLimit, TooLate, TwoHosts, now, wait_until

LIMIT = 30
START = 90  # Python and torch take their time to start
VICTIM = pathlib.Path(__file__).with_name("torchrun_victim.py")
ROWS = {}


def row(name, ranks=(2, 4)):
    def register(body):
        ROWS[name] = (ranks, body)
        return body

    return register


class Torchrun:
    """A job of torchrun, ended with all its descendants."""

    def __init__(self, ranks, *victim, options=(), program=None, port=None, **more):
        self.ranks = ranks
        port = port or harness.free_port()
        command = [PROGRAM, "--nproc-per-node", ranks, "--master-port", port, *options]
        self.job = Job([*command, *(program or [VICTIM, *victim])], **more)
        self.port = port

    def __enter__(self):
        return self.job

    def __exit__(self, *_):
        self.job.end()


def told(job, ranks, rank, since):
    """When the last survivor raised an exception, and whether that names the dead rank."""
    others = [other for other in range(ranks) if other != rank]

    def errors():
        found = [e for e in job.events("error") if e["rank"] in others]
        return found if len({e["rank"] for e in found}) == len(others) else None

    found = wait_until(lambda: errors() or job.ended, LIMIT)
    found = [e for e in job.events("error") if e["rank"] in others]
    if len({e["rank"] for e in found}) < len(others):
        if job.ended:
            return job.ended - since, "ended by the launcher; no error in the rank"
        return None, "no error"
    named = all(re.search(rf"\brank {rank}\b", e["text"]) for e in found)
    return max(e["t"] for e in found) - since, "" if named else "the error names no rank"


def kill_row(phase, words, gib=0):
    @row(words)
    def body(ranks):
        with Torchrun(ranks, "--phase", phase, "--gib", gib) as job:
            if phase == "before_init":
                job.await_events("holding", timeout=START)
                job.await_events("joining", ranks - 1, timeout=START)
            elif phase == "in_init":
                job.await_events("joining", 1, 1, timeout=START)
                time.sleep(random.uniform(0, 0.15))
            else:
                job.await_events("training", ranks, timeout=START)
                time.sleep(random.uniform(0, 0.2))
            os.kill(job.rank_pid(1), signal.SIGKILL)
            return told(job, ranks, 1, now())


kill_row("before_init", "kill -9 of a rank, before init")
kill_row("in_init", "kill -9 of a rank, in init")
kill_row("in_collective", "kill -9 of a rank, in a collective")
kill_row("between", "kill -9 of a rank, between collectives")
kill_row("in_collective", "kill -9 of a rank that holds 4 GiB", gib=4)


@row("SIGSTOP of a rank")
def stopped(ranks):
    with Torchrun(ranks) as job:
        job.await_events("training", ranks, timeout=START)
        pid = job.rank_pid(1)
        since = now()
        os.kill(pid, signal.SIGSTOP)
        before = len(job.lines["err"])
        if wait_until(lambda: len(job.lines["err"]) > before or job.ended, LIMIT, 0.01):
            return now() - since, ""
        return None, "not reported"


@row("SIGSTOP, then SIGCONT within the grace period")
def stop_and_go_on(ranks):
    hashes = []
    for disturbed in (False, True):
        with Torchrun(ranks, "--steps", 60) as job:
            job.await_events("training", ranks, timeout=START)
            if disturbed:
                os.kill(job.rank_pid(1), signal.SIGSTOP)
                time.sleep(1.2)
                since = now()
                os.kill(job.rank_pid(1), signal.SIGCONT)
            job.wait(LIMIT)
            hashes.append({e["text"] for e in job.events("done")})
    return job.ended - since, "the same bits" if hashes[0] == hashes[1] else "other bits"


def launcher_row(words, *victim, script=False):
    @row(words)
    def body(ranks):
        program = ["--no-python", "sh", "-c", '"$@"; echo ended', "sh", sys.executable, VICTIM] if script else None
        with Torchrun(ranks, *victim, program=program) as job:
            job.await_events("training", ranks, timeout=START)
            since = now()
            os.kill(job.pid, signal.SIGKILL)
            gone = wait_until(lambda: not job.processes(), LIMIT, 0.02)
            return (now() - since, "") if gone else (None, f"{len(job.processes())} processes still running")


launcher_row("kill -9 of the launcher")
launcher_row("kill -9 of the launcher, ranks are scripts", script=True)
launcher_row("kill -9 of the launcher, ranks have helpers and a daemon", "--helpers")


def ended(job, since):
    status = job.wait(LIMIT)
    return (None, "still running") if status is None else (job.ended - since, f"status {status}")


def signal_row(words, number, *victim, again=False):
    @row(words)
    def body(ranks):
        with Torchrun(ranks, *victim) as job:
            job.await_events("training", ranks, timeout=START)
            since = job.signal(number)
            if again:
                time.sleep(0.3)
                since = job.signal(number)
            seconds, remark = ended(job, since)
            return seconds, remark + ("" if victim else "; nothing saved")


signal_row("SIGTERM to the launcher, ranks ask stop_requested()", signal.SIGTERM)
signal_row("SIGINT to the launcher, ranks ask stop_requested()", signal.SIGINT)
signal_row("SIGTERM to the launcher, ranks do not handle it", signal.SIGTERM)
signal_row("SIGTERM to the launcher, ranks ignore it", signal.SIGTERM, "--ignore-signals")
signal_row("a second SIGTERM to the launcher", signal.SIGTERM, "--ignore-signals", again=True)


def own_end(words, kind):
    @row(words)
    def body(ranks):
        rank = ranks - 1
        with Torchrun(ranks, "--rank", rank, "--fault", kind) as job:
            since = job.await_events("fault", timeout=START)[0]["t"]
            return told(job, ranks, rank, since)


own_end("an exception in a rank", "throw")
own_end("abort() in a rank", "abort")
own_end("a segmentation fault in a rank", "segv")
own_end("a rank exits 0 while others wait", "exit0")


@row("out of memory (cgroup limit)")
def out_of_memory(ranks):
    with MemoryLimit(3 << 30) as limit:
        rank = ranks - 1
        with Torchrun(ranks, "--rank", rank, "--fault", "oom", cgroup=limit.folder) as job:
            job.await_events("fault", timeout=START)
            wait_until(limit.kills, LIMIT, 0.001)
            seconds, remark = told(job, ranks, rank, now())
            job.wait(LIMIT)
            says = "memory" in job.text("err").lower()
            return seconds, remark if says else (remark + "; memory not mentioned").strip("; ")


@row("a rank that is 5 s late")
def late(ranks):
    with Torchrun(ranks, "--rank", ranks - 1, "--fault", "sleep", "--ms", 5000, "--steps", 60) as job:
        since = job.await_events("fault", timeout=START)[0]["t"]
        before = len(job.lines["err"])
        job.wait(LIMIT)
        lines = [t for t, _ in job.lines["err"][before:]]
        return (lines[0] - since, "") if lines else (None, "no line")


def without_launcher(ranks, size, port, *victim):
    return [Job([sys.executable, VICTIM, *victim],
                {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
            for rank in ranks]


def all_told(jobs, since):
    """When the last of them ended, or how many never did."""
    for job in jobs:
        job.await_events("joining", timeout=START)
    since = since or now()
    wait_until(lambda: all(job.ended for job in jobs), LIMIT, 0.01)
    waiting = sum(job.ended is None for job in jobs)
    if waiting:
        return None, f"{waiting} of {len(jobs)} still waiting"
    return max(job.ended for job in jobs) - since, ""


def end_all(jobs):
    for job in jobs:
        job.end()


def joining_row(words, make):
    @row(words)
    def body(ranks):
        jobs = make(ranks, harness.free_port())
        try:
            return all_told(jobs, None)
        finally:
            end_all(jobs)


joining_row("WORLD_SIZE is larger than the number of ranks started",
            lambda n, port: without_launcher(range(n), n + 1, port))
joining_row("two processes with the same RANK",
            lambda n, port: without_launcher([*range(n - 1), n - 2], n, port))


@row("two jobs on one port")
def two_jobs(ranks):
    half = max(2, ranks // 2)
    port = harness.free_port()
    first = without_launcher(range(half), half, port)
    second = []
    try:
        for job in first:
            job.await_events("training", timeout=START)
        second = without_launcher(range(half), half, port)
        seconds, remark = all_told(second, None)
        return seconds, (remark + ("; the first job failed" if any(job.ended for job in first) else "")).strip("; ")
    finally:
        end_all(first + second)


@row("port in use")
def port_in_use(ranks):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with Torchrun(ranks, "--steps", 5, port=port) as job:
            seconds, remark = ended(job, job.started)
            named = str(port) in job.text("err")
            return seconds, remark + ("" if named else "; the port is not named")


def attack_row(kind, ranks):
    @row(f"{kind} at the coordinator's port", ranks)
    def body(count):
        run = Torchrun(count, "--store-probe", 9)
        with run as job:
            job.await_events("joined", count, timeout=START)
            windows = host_faults.attack_in_turns(run.port, host_faults.ATTACKS[kind](random.Random(1)), 3, 1.0)
            job.wait(LIMIT + 20)
            calm, attacked = host_faults.calm_and_attacked(job, windows)
            if not calm or not attacked:
                return None, "the store did not answer"
            return statistics.median(attacked) / statistics.median(calm), ""


for each in host_faults.ATTACKS:
    attack_row(each, (2, 4) if each.startswith("1,500") else (2,))


@row("a client without the key", (2,))
def stranger(ranks):
    run = Torchrun(ranks, "--store-probe", 25)
    with run as job:
        job.await_events("joined", ranks, timeout=START)
        code = ("import torch.distributed as d; "
                f"d.TCPStore('127.0.0.1', {run.port}, is_master=False).set('mine', 'overwritten')")
        subprocess.run([sys.executable, "-c", code], timeout=20, capture_output=True, check=True)
        job.wait(LIMIT + 20)
        changed = any(e["text"] == "overwritten" for e in job.events("done"))
        return None, "accepted: it overwrote a value" if changed else "changed nothing"


@row("a host is lost")
def host_lost(ranks):
    with TwoHosts() as hosts:
        jobs = []
        try:
            for number in range(2):
                options = ["--nnodes", 2, "--node-rank", number, "--master-addr", hosts.addresses[0]]
                environment = {"GLOO_SOCKET_IFNAME": f"{hosts.names[number]}0"}
                jobs.append(Torchrun(ranks // 2, options=options, port=29400, env=environment,
                                     namespace=hosts.names[number],
                                     events=jobs[0].events_file if jobs else None).job)
            jobs[0].await_events("training", ranks, timeout=START)
            since = hosts.unplug()
            wait_until(lambda: len(jobs[0].events("error")) >= ranks, LIMIT, 0.02)
            errors = jobs[0].events("error")
            if len(errors) < ranks:
                return None, f"{ranks - len(errors)} of {ranks} ranks got no error"
            return max(e["t"] for e in errors) - since, ""
        finally:
            end_all(jobs)


NOT_MET = "the ranks of the second attempt do not connect"


@row("a rank that fails once, --max-restarts 2")
def fails_once(ranks):
    with Torchrun(ranks, "--rank", ranks - 1, "--fault", "throw", "--attempts", 1, "--steps", 40,
                  options=["--max-restarts", 2]) as job:
        since = job.await_events("fault", timeout=START)[0]["t"]
        again = wait_until(lambda: len([e for e in job.events("training") if e["attempt"] == 1]) >= ranks, LIMIT, 0.01)
        return (now() - since, "") if again else (None, NOT_MET)


@row("a rank that fails twice at the same step, --max-restarts 5")
def fails_twice(ranks):
    with Torchrun(ranks, "--rank", ranks - 1, "--fault", "throw", options=["--max-restarts", 5]) as job:
        try:
            since = job.await_events("fault", 2, timeout=LIMIT)[1]["t"]
        except TooLate:
            return None, NOT_MET
        seconds, _ = ended(job, since)
        return seconds, f"{len(job.events('fault'))} attempts by then"


def run_row(name):
    ranks, body = ROWS[name]
    results = {}
    for count in ranks:
        try:
            seconds, remark = body(count)
        except TooLate as error:
            seconds, remark = None, f"could not be measured: {error}".splitlines()[0]
        results[str(count)] = {"value": None if seconds is None else round(seconds, 3), "remark": remark}
        print(f"{name} ({count} ranks): {'> 30' if seconds is None else f'{seconds:.3f}'} {remark}", flush=True)
    return results


def main():
    global PROGRAM
    harness.enter_own_namespaces([sys.executable, *sys.argv])
    PROGRAM, results = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    only = sys.argv[4] if len(sys.argv) > 4 and sys.argv[3] == "--only" else ""
    version = subprocess.run([sys.executable, "-c", "import torch; print(torch.__version__)"], capture_output=True,
                             text=True).stdout.strip()
    known = json.loads(results.read_text()) if results.exists() else {}
    rows = known.get("rows", {})
    for name in ROWS:
        if re.search(only, name):
            rows[name] = run_row(name)
            ordered = {each: rows[each] for each in ROWS if each in rows}
            results.write_text(json.dumps({"torch": version, "limit": LIMIT, "rows": ordered}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
