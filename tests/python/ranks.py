"""Runs functions on 2 ranks, as separate processes, for the tests of this folder."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest

import torch
import torch.distributed as dist

BODIES = {}  # functions that ranks run, by name
LIMIT = 200  # seconds for all ranks of a test; less than any timeout of lockstep


def body(function):
    BODIES[function.__name__] = function
    return function


def batch(rank, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + rank))


def await_rank_0(rank, what):
    """Rank 1 continues once rank 0 has reached this point."""
    path = os.environ["TEST_FOLDER"] + "/" + what
    if rank == 0:
        open(path, "w", encoding="utf-8").close()
    while not os.path.exists(path):
        time.sleep(0.002)


def expect_error(pattern, call):
    begin = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        assert re.search(pattern, str(error)), error
        return time.monotonic() - begin
    raise AssertionError("no error")


def rank_main():
    name, rank, size = os.environ["TEST_BODY"], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(os.environ["TEST_BACKEND"], init_method="file://" + os.environ["TEST_FOLDER"] + "/store",
                            rank=rank, world_size=size)
    BODIES[name](rank, size)
    if name != "no_farewell":
        dist.destroy_process_group()


SERVER = None  # a channel to the process that forks ranks


def start_server():
    """Forks the process that forks ranks. It has already imported torch, which would take each rank seconds. A rank then
    ends like any other Python process. Returns True in a rank, whose environment names the function to run."""
    global SERVER
    SERVER, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() != 0:
        channel.close()
        return False
    SERVER.close()
    while request := channel.recv(1 << 16):
        pids = []
        for environment, output in json.loads(request):
            pids.append(os.fork())
            if pids[-1] == 0:
                channel.close()
                with open(output, "wb") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                os.environ.update(environment)
                return True
        channel.send(json.dumps(statuses_of(pids, parent)).encode())
    os._exit(0)


def statuses_of(pids, parent):
    """Returns how they end, within the limit and while this process's parent lives."""
    statuses = {}
    deadline = time.monotonic() + LIMIT
    while len(statuses) < len(pids):
        over = time.monotonic() > deadline or os.getppid() != parent
        for pid in pids:
            if pid in statuses:
                continue
            if over:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, 0 if over else os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return [statuses[pid] for pid in pids]


def run_forked(environments, folder):
    outputs = [f"{folder}/output.{rank}" for rank in range(len(environments))]
    SERVER.send(json.dumps(list(zip(environments, outputs))).encode())
    statuses = json.loads(SERVER.recv(1 << 16))
    texts = []
    for output in outputs:
        with open(output, encoding="utf-8", errors="replace") as file:
            texts.append(file.read())
    return list(zip(statuses, texts))


def run_fresh(environments, prefix):
    processes = [subprocess.Popen([*prefix(rank), sys.executable, "-B", sys.argv[0]], env={**os.environ, **environment}, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                 for rank, environment in enumerate(environments)]
    try:
        outputs = [process.communicate(timeout=LIMIT)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs)]


def run(name, backend="lockstep", folder=None, prefix=None, **environment):
    """Returns [(exit status, output)] of 2 ranks. With a prefix for their commands they are new Python processes."""
    with contextlib.ExitStack() as stack:
        folder = folder or stack.enter_context(tempfile.TemporaryDirectory())
        environments = [{"TEST_BODY": name, "TEST_BACKEND": backend, "RANK": str(rank), "WORLD_SIZE": "2", "TEST_FOLDER": folder,
                         "OMP_NUM_THREADS": "1", **environment} for rank in range(2)]
        outcomes = run_fresh(environments, prefix) if prefix else run_forked(environments, folder)
        if os.path.exists(folder + "/store"):
            os.unlink(folder + "/store")
        return outcomes


def from_the_start(rank):
    """The prefix of a rank that imports torch itself."""
    return []


class TestCase(unittest.TestCase):
    def check(self, outcomes):
        for rank, (status, output) in enumerate(outcomes):
            self.assertEqual(status, 0, f"rank {rank}:\n{output}")


def main():
    """The main function of a file with tests: runs them, or runs as one of their ranks."""
    if "TEST_BODY" in os.environ or start_server():
        rank_main()
    else:
        unittest.main()
