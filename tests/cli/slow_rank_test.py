"""A rank that is slowed to a fifth is named within three steps, and its recovery is reported.

Slowed by its cgroup's share of processor time where cgroups can be made here, else by SIGSTOP and SIGCONT.
slow_rank_test.py LOCKSTEP STEPS_PROBE [HEALTHY_STEPS]
"""
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import threading
import time

LOCKSTEP, PROBE = (os.path.abspath(each) for each in sys.argv[1:3])
BUSY_MS = 25
PERIOD_US = 100_000


class Cgroup:
    """At most a fifth of a processor for a process: version 2, or the cpu controller of version 1."""

    def __init__(self):
        root = pathlib.Path("/sys/fs/cgroup")
        if (root / "cgroup.controllers").exists():
            self.folder = root / f"lockstep-slow-{os.getpid()}"
            self.limit, self.fifth, self.all = "cpu.max", f"{PERIOD_US // 5} {PERIOD_US}", f"max {PERIOD_US}"
        else:
            self.folder = root / "cpu" / f"lockstep-slow-{os.getpid()}"
            self.limit, self.fifth, self.all = "cpu.cfs_quota_us", str(PERIOD_US // 5), "-1"
        self.folder.mkdir()
        try:
            (self.folder / self.limit).write_text(self.all)
        except OSError:
            self.folder.rmdir()
            raise

    def begin(self, pid):
        (self.folder / "cgroup.procs").write_text(str(pid))
        (self.folder / self.limit).write_text(self.fifth)

    def end(self):
        (self.folder / self.limit).write_text(self.all)

    def remove(self):
        for _ in range(50):
            try:
                return self.folder.rmdir()
            except OSError:
                time.sleep(0.1)


class Stops:
    """The same with signals: the process runs for 10 ms of every 50."""

    def begin(self, pid):
        self.over = threading.Event()

        def work():
            while not self.over.is_set():
                os.kill(pid, signal.SIGSTOP)
                time.sleep(0.04)
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.01)

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def end(self):
        self.over.set()
        self.thread.join()

    def remove(self):
        pass


def pid_of_rank(launcher, rank):
    """Among the launcher's descendants."""
    parents = {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    for pid in parents:
        above = pid
        while above in parents and above != launcher:
            above = parents[above]
        try:
            if above == launcher and f"RANK={rank}".encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
        except OSError:
            continue
    raise AssertionError(f"rank {rank} is not there")


class Busy(Exception):
    """Other processes are busy here: nothing can be measured."""


NAMED = re.compile(r"rank (\d+) is slow: its steps take ([\d.]+) times as long as the other ranks' \(busy .*, others .*, steps (\d+) to (\d+)\)")


def step_times(text):
    """In ms, as rank 0 measured them."""
    return [float(each) for each in re.search(r"took (.*)", text)[1].split()]


def slow_one_down(how, ranks=2, slow=1):
    command = [LOCKSTEP, "run", "-q", "-n", str(ranks), "--bind", "none", PROBE, "110", str(BUSY_MS), "line", "times"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                           env={**os.environ, "OMP_NUM_THREADS": "1"})
    lines, begun, named_at = [], None, None
    try:
        for line in job.stdout:
            lines.append(line)
            if f"line 49 of {slow}" in line:
                how.begin(pid_of_rank(job.pid, slow))
                begun = time.monotonic()
            if "is slow" in line and begun and named_at is None:
                named_at = time.monotonic() - begun
            if f"line 59 of {slow}" in line:
                how.end()
        status = job.wait(timeout=300)
    finally:
        job.kill()
    text = "".join(lines)
    assert status == 0, text
    took = step_times(text)
    # Before the slowdown and after it: the control for the load of other processes.
    healthy = sorted(took[10:48] + took[75:])
    usual, long = statistics.median(healthy), healthy[len(healthy) * 9 // 10]
    if long > 1.6 * BUSY_MS:
        raise Busy(f"steps of {BUSY_MS} ms take up to {long:.0f} ms while no rank is slowed: this machine is too busy to slow one rank to a fifth")
    found = NAMED.findall(text)
    assert len(found) == 1 and found[0][0] == str(slow), text
    first, last, ratio = int(found[0][2]), int(found[0][3]), float(found[0][1])
    long_from = next(step for step in range(49, len(took)) if took[step] > 2 * usual)
    print(f"{type(how).__name__}, {ranks} ranks: steps of {usual:.0f} ms; slow from step {long_from} on ({took[long_from]:.0f} ms); "
          f"named for steps {first} to {last}, {ratio} times, {named_at:.2f} s after it was slowed")
    assert last - first + 1 == 3, "three steps in a row"
    assert first <= long_from + 1, (first, long_from)
    assert 2 < ratio < 12, ratio
    assert len(re.findall(rf"rank {slow} is no longer slow", text)) == 1, text


def healthy(steps):
    """No false alarm, with steps of a few ms."""
    busy_ms = 3
    begin = time.monotonic()
    done = subprocess.run([LOCKSTEP, "run", "-q", "-n", "2", "--bind", "none", PROBE, str(steps), str(busy_ms), "times"],
                          capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=500)
    assert done.returncode == 0, done.stderr
    took = step_times(done.stdout)
    for rank, _, first, last in NAMED.findall(done.stderr):
        # Steps that took longer than their processor time: other processes kept the rank from its core, so it
        # really was slow.
        assert min(took[max(0, int(first) - 1):int(last)]) > 1.5 * busy_ms, f"a false alarm: {done.stderr}"
        print(f"rank {rank} was slow in steps {first} to {last}, because of others")
    assert "slow" not in re.sub(r".* is (no longer )?slow: .*", "", done.stderr), done.stderr
    print(f"{steps} healthy steps of {statistics.median(took):.1f} ms: {time.monotonic() - begin:.1f} s")


def main():
    ways = [Stops()]
    try:
        ways.insert(0, Cgroup())
    except OSError as error:
        print(f"no cgroup can be made here ({error}): SIGSTOP instead")
    if len(os.sched_getaffinity(0)) < 2:
        print("skipped: two ranks that compute need two processors")
        return 77
    for how in ways:
        try:
            for left in (2, 1, 0):
                try:
                    slow_one_down(how)
                    break
                except Busy as error:
                    print(error, flush=True)
                    if left == 0:
                        print("skipped: the machine is busy")
                        return 77
        finally:
            how.remove()
    healthy(int(sys.argv[3]) if len(sys.argv) > 3 else 1500)
    return 0


sys.exit(main())
