"""tests/faults/victim.cpp for torchrun: the same loop on torch.distributed with gloo, the same options and events."""

import argparse
import ctypes
import datetime
import hashlib
import json
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
EVENTS = os.open(os.environ["FAULTS_EVENTS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def tell(event, text="", step=-1, **more):
    line = {"t": time.monotonic(), "rank": RANK, "pid": os.getpid(), "attempt": ATTEMPT, "event": event, "step": step,
            "text": text, **more}
    os.write(EVENTS, (json.dumps(line) + "\n").encode())


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--phase", default="between")
    parser.add_argument("--gib", type=int, default=0)
    parser.add_argument("--fault", default="")
    parser.add_argument("--at", type=int, default=20)
    parser.add_argument("--ms", type=int, default=1000)
    parser.add_argument("--attempts", type=int, default=1_000_000)
    parser.add_argument("--ignore-signals", action="store_true")
    parser.add_argument("--helpers", action="store_true")
    parser.add_argument("--store-probe", type=float, default=0)
    return parser.parse_args()


def start_helpers():
    if os.fork() == 0:
        signal.pause()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.closerange(0, 3)
            signal.pause()
        os._exit(0)


def use_memory(gib):
    length = gib << 30
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    memory = libc.mmap(None, length, 3, 0x22, -1, 0)
    libc.madvise(ctypes.c_void_p(memory), ctypes.c_size_t(length), 15)  # MADV_NOHUGEPAGE
    ctypes.memset(memory, 1, length)


def commit(options):
    tell("fault", options.fault, options.at)
    if options.fault == "throw":
        raise RuntimeError("the victim's own words")
    if options.fault == "abort":
        os.abort()
    if options.fault == "segv":
        ctypes.string_at(0)
    if options.fault == "exit0":
        os._exit(0)
    if options.fault == "sleep":
        time.sleep(options.ms / 1000)
    while options.fault == "oom":
        use_memory(1)


def probe_store(seconds):
    """The duration of a set and a get in torchrun's own store."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    store.set("mine", "true")
    tell("joined")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        operations = []
        for _ in range(10):
            begin = time.monotonic()
            store.set(f"probe/{RANK}", "value")
            store.get(f"probe/{RANK}")
            operations.append([begin, (time.monotonic() - begin) * 1e6])
            time.sleep(0.002)
        tell("ops", ops=operations)
    tell("done", store.get("mine").decode())


def train(options):
    target = RANK == options.rank
    values = torch.arange(1 << 20 if options.phase == "in_collective" else 1 << 10, dtype=torch.float) / (RANK + 3)
    for step in range(options.steps):
        if step == 1:
            tell("training", step=step)
        if target and options.fault and step == options.at and ATTEMPT < options.attempts:
            commit(options)
        if options.phase == "between":
            time.sleep(0.01)
        values = values * 0.999 + 0.001 * (RANK + step)
        dist.all_reduce(values)
        values /= dist.get_world_size()
    tell("done", hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16], options.steps)


def main():
    options = parse()
    size = int(os.environ["WORLD_SIZE"])
    target = RANK == options.rank
    if options.ignore_signals:
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_IGN)
    tell("start")
    if options.store_probe:
        return probe_store(options.store_probe)
    if options.helpers and target:
        start_helpers()
    if options.gib and target:
        use_memory(options.gib)
    if options.phase == "before_init" and target:
        tell("holding")
        signal.pause()
    if options.phase == "in_init" and not target and RANK >= size - 2:
        time.sleep(0.15)
    tell("joining")
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=30))
    tell("joined")
    return train(options)


try:
    main()
except BaseException as error:
    tell("error", f"{type(error).__name__}: {error}")
    raise
sys.exit(0)
