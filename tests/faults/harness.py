"""Starts jobs, injects faults from outside, and checks what is left. Times are of CLOCK_MONOTONIC, in the ranks too."""

import contextlib
import ctypes
import itertools
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "support"))
from ports import free_port  # noqa: E402, F401

now = time.monotonic
MARK = "FAULTS_MARK"
BIND = ("OMP_NUM_THREADS", "1")
# Seconds until a wait is given up. They only end hanging tests, so they leave room for a busy machine.
LONG = 120


def wait_until(condition, timeout=LONG, pause=0.002):
    """The condition's result, or its last false one at the deadline."""
    end = now() + timeout
    while True:
        value = condition()
        if value or now() > end:
            return value
        time.sleep(pause)


class TooLate(Exception):
    pass


# ---- processes --------------------------------------------------------------------------------------------


def is_alive(pid):
    """Not for zombies: their parent may be a container's first process, which never reaps them."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def marked(mark):
    """Processes with this mark in their environment, at any depth."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError):
            if wanted in pathlib.Path(f"/proc/{entry}/environ").read_bytes().split(b"\0") and is_alive(entry):
                found.append(int(entry))
    return found


def has_pending(pid, number):
    """True if the signal is still pending for the process."""
    with contextlib.suppress(OSError):
        pending = re.search(r"^ShdPnd:\s*(\w+)", pathlib.Path(f"/proc/{pid}/status").read_text(), re.M)
        return bool(int(pending[1], 16) >> (number - 1) & 1)
    return False


def command_of(pid):
    with contextlib.suppress(OSError):
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:120]
    return "?"


# Limits are those of a quiet machine. On a busy one, something may take at most this many times as long, and
# no more than the lateness measured meanwhile explains: broken code takes minutes, or never ends.
PATIENCE = 10
QUIET = 0.02  # seconds that a process may get its processor late on a quiet machine
TURNS = 20  # processes take turns from an injection to what it shows


class Lateness:
    """How late this process gets a core meanwhile: a control for the load of other processes."""

    def __enter__(self):
        self.most, self.over = 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def allowed(self, limit):
        """The limit, or more where this machine was busy."""
        return limit if self.most < QUIET else min(PATIENCE * limit, 2 * limit + TURNS * self.most)

    def _watch(self):
        begin = now()
        while not self.over.wait(0.01):
            self.most = max(self.most, now() - begin - 0.01)
            begin = now()

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()


class Traced:
    """Holds a process as a debugger does: its main thread is stopped, and /proc says 't'."""

    ATTACH, DETACH = 16, 17

    def __init__(self, pid):
        self.pid = pid
        self.libc = ctypes.CDLL(None, use_errno=True)

    def _call(self, request):
        self.libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        if self.libc.ptrace(request, self.pid, None, None) != 0:
            raise OSError(ctypes.get_errno(), "ptrace")

    def __enter__(self):
        self._call(self.ATTACH)
        os.waitpid(self.pid, 0x40000000)  # __WALL
        return self

    def __exit__(self, *_):
        with contextlib.suppress(OSError):
            self._call(self.DETACH)


# ---- a job ------------------------------------------------------------------------------------------------


class Job:
    """A launcher, or a rank without one, and all its descendants."""

    def __init__(self, command, env=None, namespace=None, cgroup=None, events=None, mark=None, cores=None):
        self.mark = mark or uuid.uuid4().hex
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="faults-"))
        self.events_file = events or self.folder / "events"
        self.lines = {"out": [], "err": []}
        environment = {**os.environ, **dict([BIND]), MARK: self.mark, "FAULTS_EVENTS": str(self.events_file)}
        environment["LOCKSTEP_FLIGHT_RECORD"] = str(self.folder / "flight.json")
        for name, value in (env or {}).items():
            environment.pop(name, None)
            if value is not None:
                environment[name] = value
        if namespace:
            command = ["ip", "netns", "exec", namespace, *command]

        def enter():
            if cgroup:
                (cgroup / "cgroup.procs").write_text(str(os.getpid()))
            if cores:
                os.sched_setaffinity(0, cores)

        self.started = now()
        self.process = subprocess.Popen(
            [str(each) for each in command], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, start_new_session=True, preexec_fn=enter)
        self.ended = None
        self.threads = [threading.Thread(target=self._read, args=(kind,), daemon=True) for kind in self.lines]
        self.threads.append(threading.Thread(target=self._await, daemon=True))
        for thread in self.threads:
            thread.start()

    def _read(self, kind):
        pipe = self.process.stdout if kind == "out" else self.process.stderr
        for line in pipe:
            self.lines[kind].append((now(), line.decode(errors="replace").rstrip("\n")))

    def _await(self):
        self.process.wait()
        self.ended = now()

    @property
    def pid(self):
        return self.process.pid

    def events(self, name=None, rank=None):
        with contextlib.suppress(OSError):
            whole = self.events_file.read_text().rpartition("\n")[0]
            events = [json.loads(line) for line in whole.splitlines()]
            return [e for e in events if name in (None, e["event"]) and rank in (None, e["rank"])]
        return []

    def await_events(self, name, count=1, rank=None, timeout=LONG):
        """The first `count` of them."""

        def there():
            found = self.events(name, rank)
            if len(found) < count and self.ended:
                found = self.events(name, rank)  # it may have told just before its end
                if len(found) < count:
                    raise TooLate(f"the job ended before {count} '{name}' came: {self.text()}")
            return found if len(found) >= count else None

        found = wait_until(there, timeout)
        if not found:
            raise TooLate(f"after {timeout} s there were not {count} '{name}': {self.text()}")
        return found[:count]

    def await_line(self, kind, pattern, timeout=LONG):
        """When the first such line appeared, and the line; None if it did not."""
        expression = re.compile(pattern)

        def there():
            return next(((t, line) for t, line in list(self.lines[kind]) if expression.search(line)), None)

        return wait_until(there, timeout)

    def text(self, kind=None):
        kinds = [kind] if kind else ["err", "out"]
        return "\n".join(line for each in kinds for _, line in list(self.lines[each]))

    def rank_pid(self, rank):
        return self.await_events("start", 1, rank)[-1]["pid"]

    def signal(self, number):
        """Returns when it was sent, or a moment before: this process may lose the core in between."""
        since = now()
        os.kill(self.pid, number)
        return since

    def wait(self, timeout=LONG):
        """The exit status, as in a shell; None if it still runs."""
        *readers, waiter = self.threads
        waiter.join(timeout)
        if waiter.is_alive():
            return None
        for reader in readers:
            reader.join(10)
        return 128 - self.process.returncode if self.process.returncode < 0 else self.process.returncode

    def processes(self):
        return marked(self.mark)

    def end(self):
        def ended():
            left = self.processes()
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        wait_until(ended, 60, 0.02)
        self.threads[-1].join(60)
        shutil.rmtree(self.folder, ignore_errors=True)


# ---- what is left -----------------------------------------------------------------------------------------


def rows_of(path):
    with contextlib.suppress(OSError):
        return [line.split() for line in pathlib.Path(path).read_text().splitlines()[1:]]
    return []


def agents():
    """Names of the control plane's sockets in this network namespace."""
    return {row[-1] for row in rows_of("/proc/net/unix") if row[-1].startswith("@lockstep/")}


def has_agent(port):
    """True if a rank without a launcher runs the agent of the job with this MASTER_PORT."""
    with contextlib.suppress(OSError):
        return f" at 127.0.0.1:{port} " in pathlib.Path("/proc/net/unix").read_text()
    return False


def listening_ports():
    rows = rows_of("/proc/net/tcp") + rows_of("/proc/net/tcp6")
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}


def shared_memory():
    with contextlib.suppress(OSError):
        return set(os.listdir("/dev/shm"))
    return set()


class Surroundings:
    """The state before a job: anything new after its end is left over from it. If other programs use this
    network namespace too, only sockets that the job is known to have had count."""

    def __init__(self, alone):
        self.alone = alone
        self.before = (agents(), listening_ports(), shared_memory())

    def _left(self, job):
        known = {"@" + e["text"] for e in job.events("start") if e["text"]}
        sockets, ports, memory = agents() - self.before[0], listening_ports() - self.before[1], shared_memory()
        if not self.alone:
            sockets, ports, memory = sockets & known, set(), {m for m in memory if "lockstep" in m}
        left = [f"process {pid} ({command_of(pid)})" for pid in job.processes()]
        left += [f"socket {each}" for each in sorted(sockets)] + [f"port {each}" for each in sorted(ports)]
        return left + [f"/dev/shm/{each}" for each in sorted(memory - self.before[2])]

    def left_over(self, job, within):
        """Empty as soon as nothing is left."""
        left = self._left(job)
        end = now() + within
        while left and now() < end:
            time.sleep(0.02)
            left = self._left(job)
        return left


def have_own_namespaces():
    return os.environ.get("FAULTS_ALONE") == "1"


def enter_own_namespaces(argv):
    """Restarts this program with its own network and /dev/shm, if permitted."""
    if os.environ.get("FAULTS_ALONE") or os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("ip"):
        return
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True).returncode != 0:
        return
    os.environ["FAULTS_ALONE"] = "1"
    script = 'ip link set lo up && mount -t tmpfs none /dev/shm && exec "$@"'
    os.execvp("unshare", ["unshare", "--net", "--mount", "sh", "-c", script, "sh", *argv])


# ---- hosts ------------------------------------------------------------------------------------------------


count_of_networks = itertools.count()


def network_name():
    """A unique prefix for the names of namespaces and interfaces of this network.
    Interfaces have at most 15 characters, and two are added."""
    return f"ls{os.getpid()}n{next(count_of_networks)}"


class TwoHosts:
    """Two network namespaces joined by a cable."""

    def __init__(self):
        name = network_name()
        self.names = [name + "a", name + "b"]
        self.addresses = ["10.77.0.1", "10.77.0.2"]

    def _ip(self, *arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    def __enter__(self):
        try:
            for name in self.names:
                self._ip("netns", "add", name)
            ends = [f"{name}0" for name in self.names]
            self._ip("link", "add", ends[0], "netns", self.names[0], "type", "veth", "peer", "name", ends[1], "netns",
                     self.names[1])
            for name, address, end in zip(self.names, self.addresses, ends):
                self._ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
                self._ip("-n", name, "link", "set", end, "up")
                self._ip("-n", name, "link", "set", "lo", "up")
            wait_until(self._reachable, 60, 0.02)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _reachable(self):
        state = subprocess.run(["ip", "-n", self.names[0], "link", "show", f"{self.names[0]}0"], capture_output=True,
                               text=True)
        return "state UP" in state.stdout

    def unplug(self):
        """Returns the time."""
        since = now()
        self._ip("-n", self.names[0], "link", "set", f"{self.names[0]}0", "down")
        return since

    def __exit__(self, *_):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


class SeveralHosts:
    """That many network namespaces, each with a cable to a bridge in another one."""

    def __init__(self, count):
        name = network_name()
        self.switch = name + "s"
        self.names = [f"{name}h{i}" for i in range(count)]
        self.addresses = [f"10.77.1.{i + 1}" for i in range(count)]

    def _ip(self, *arguments):
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    def __enter__(self):
        try:
            for name in [self.switch, *self.names]:
                self._ip("netns", "add", name)
                self._ip("-n", name, "link", "set", "lo", "up")
            self._ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            self._ip("-n", self.switch, "link", "set", "bridge", "up")
            for number, (name, address) in enumerate(zip(self.names, self.addresses)):
                port = f"port{number}"
                self._ip("link", "add", "eth0", "netns", name, "type", "veth", "peer", "name", port, "netns", self.switch)
                self._ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
                self._ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                self._ip("-n", name, "link", "set", "eth0", "up")
                # Few ports: those of different hosts are often the same number, as on a large cluster.
                self._ip("netns", "exec", name, "sysctl", "-qw", "net.ipv4.ip_local_port_range=30000 30299")
            wait_until(self._reachable, 60, 0.02)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _reachable(self):
        ports = subprocess.run(["ip", "-n", self.switch, "link", "show", "master", "bridge"], capture_output=True,
                               text=True).stdout
        return ports.count("state UP") == len(self.names)

    def __exit__(self, *_):
        for name in [self.switch, *self.names]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def why_no_hosts():
    """Why two network namespaces cannot be created here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip"):
        return "there is no program ip (package iproute2)"
    try:
        with TwoHosts():
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", None) or b"").decode().strip()
        return f"network namespaces cannot be made here: {said or error}"


class KeyFile:
    """A new key in a file that only this user can read."""

    def __init__(self, lockstep):
        self.lockstep = lockstep

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory()
        path = pathlib.Path(self.folder.name) / "job.key"
        path.touch(0o600)
        path.write_bytes(subprocess.run([self.lockstep, "key"], capture_output=True, check=True).stdout)
        return path

    def __exit__(self, *_):
        self.folder.cleanup()


class MemoryLimit:
    """A cgroup with a limit, of version 1 or 2."""

    def __init__(self, limit):
        self.limit = limit
        self.folder = None

    def __enter__(self):
        for root, file in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
            folder = pathlib.Path(root) / f"faults-{os.getpid()}"
            try:
                folder.mkdir()
            except OSError:
                continue
            try:
                (folder / file).write_text(str(self.limit))
                self.folder = folder
                return self
            except OSError:
                folder.rmdir()
        raise PermissionError("no memory cgroup can be made here")

    def kills(self):
        """Number of processes that the kernel has killed because of the limit."""
        for file in ("memory.oom_control", "memory.events"):
            with contextlib.suppress(OSError):
                return int(re.search(r"oom_kill (\d+)", (self.folder / file).read_text())[1])
        return 0

    def __exit__(self, *_):
        if self.folder:
            wait_until(lambda: not (self.folder / "cgroup.procs").read_text().strip(), 60)
            with contextlib.suppress(OSError):
                self.folder.rmdir()


# ---- numbers ----------------------------------------------------------------------------------------------


def percentile(values, share):
    """The smallest of the values that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)]


def summary(values):
    if not values:
        return None
    return {"count": len(values), "median": round(statistics.median(values), 4),
            "p99": round(percentile(values, 99), 4), "max": round(max(values), 4)}
