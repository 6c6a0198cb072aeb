"""Ranks and hosts that contradict each other, and ports that are in use."""

import os
import pathlib
import re
import signal
import socket
import subprocess
import tempfile

from case import Ranks, Skip, check_saved, fault
from harness import KeyFile, free_port


def check_refusal(case, jobs, kinds, *patterns, since=None, limit=2.0):
    """All of them learn it within the limit after the last one's arrival, or after `since`."""
    for job in jobs:
        job.wait()
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


@fault("WORLD_SIZE is larger than the number of ranks started", "an error that lists present and missing ranks",
       "the last error, after --join-timeout (1 s)", 2.0)
def missing_rank(case):
    with Ranks(case) as ranks:
        port = free_port()
        size = case.ranks + 1
        for rank in range(case.ranks - 1):
            ranks.start(rank, size, port)
        for job in ranks.jobs:
            job.await_events("joining")
        # The others have joined when its time is over.
        ranks.start(case.ranks - 1, size, port, {"LOCKSTEP_JOIN_TIMEOUT": "1s"})
        seen = ", ".join(map(str, range(case.ranks)))
        check_refusal(case, ranks.jobs, ["CommError"], rf"did not join: {case.ranks}\b", rf"did: {seen}")


@fault("two processes with the same RANK", "an error that names the duplicate", "the last error", 2.0)
def duplicate_rank(case):
    with Ranks(case) as ranks:
        port = free_port()
        for rank in [*range(case.ranks - 1), case.ranks - 2]:
            ranks.start(rank, case.ranks, port)
        check_refusal(case, ranks.jobs, ["ConfigError", "CommError"], rf"RANK={case.ranks - 2}\b",
                      *(rf"\b{job.pid}\b" for job in ranks.jobs[-2:]))


@fault("two jobs on one port", "the second gets an error, the first continues", "the second job's last error", 2.0)
def two_jobs(case):
    half = max(2, case.ranks // 2)
    with Ranks(case) as ranks:
        port = free_port()
        first = [ranks.start(rank, half, port, None, "--stop") for rank in range(half)]
        for job in first:
            job.await_events("training")
        second = [ranks.start(rank, half, port, None, "--steps", "5") for rank in range(half)]
        check_refusal(case, second, ["ConfigError", "CommError"], "RANK|port|job")
        # Its ranks agree on a step, so they continue.
        case.check(not any(job.ended for job in first), "the first job did not go on")
        os.kill(first[0].pid, signal.SIGTERM)
        check_saved(case, first, 0, half)


def another_version(case, folder):
    """Creates a copy of the library with another version there; returns both versions."""
    library = pathlib.Path(case.options.library).resolve()
    told = subprocess.run([case.options.lockstep, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"\d+\.\d+\.\d+", told)[0]
    # Compilers embed a short text in the instructions in pieces of four.
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


@fault("port in use", "without --master another port is used; with it, an error with the address",
       "the launcher's end", 2.0)
def port_in_use(case):
    with KeyFile(case.options.lockstep) as key, socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        several = ["--nnodes", 2, "--node-rank", 0, "--master", f"127.0.0.1:{port}", "--key-file", key]
        with case.job("--steps", 5, run=several) as job:
            status = job.wait()
            case.check(status not in (0, None), f"the status is {status}", job)
            case.check(f"127.0.0.1:{port}" in job.text("err"), "the address is not named", job)
            case.measure(job.ended - job.started)
        # The port that a rank would use by default is in use too.
        with case.job("--steps", 5, env={"MASTER_PORT": str(port)}) as job:
            case.check(job.wait() == 0, "it failed though no port was asked for", job)
