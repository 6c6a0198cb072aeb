"""A real SLURM for the length of a test: munged, slurmctld and slurmd with a folder, a key and ports of their own, so
that neither a SLURM of this host nor another test is in the way. On one node, which is this host, or on two that have
networks and names of their own."""

import atexit
import ctypes
import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import support

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
from ports import free_port  # noqa: E402

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo", "scontrol")
# More than there are, because the tests are about ranks, not scheduling.
CPUS = 8


def missing_program():
    """The first program that is not installed, or None."""
    os.environ["PATH"] += ":/usr/local/sbin:/usr/sbin:/sbin"  # where daemons are, and not every user looks
    return next((program for program in PROGRAMS if not shutil.which(program)), None)


def wait_until(what, condition, seconds=120):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise TimeoutError(f"after {seconds} s: {what}")


PR_SET_PDEATHSIG = 1


def die_with_us():
    """Makes a started process end even if this test is killed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def processes_of(folder):
    """Daemons, their helpers and running jobs: all have the cluster's configuration in their environment."""
    mine = f"SLURM_CONF={folder}/slurm.conf".encode()
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if mine in file.read().split(b"\0"):
                    found.add(int(entry))
        except OSError:
            pass  # it has ended, or is another user's
    return found - {os.getpid()}


def guard(folder):
    """Waits for the end of the test, even by SIGKILL, and removes what it left behind."""
    sys.stdin.read()
    deadline = time.monotonic() + 60
    while (left := processes_of(folder)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)
    shutil.rmtree(folder, ignore_errors=True)


class Host:
    """Namespaces for network, host name and mounts, which two hosts do not share. They end with their last process."""

    def __init__(self, name, hosts_file):
        self.name = name
        prepare = f"hostname {name} && mount --bind {hosts_file} /etc/hosts && ip link set lo up && echo ready"
        self.holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-c", f"{prepare} && exec sleep infinity"],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=die_with_us)
        answer = self.holder.stdout.readline()
        if answer != b"ready\n":
            self.close()
            raise OSError(f"no namespaces: {answer.decode()}")

    def inside(self, *command):
        return ("nsenter", f"--target={self.holder.pid}", "--net", "--uts", "--mount", "--", *command)

    def connect(self, other, own_address, other_address):
        support.succeed(*self.inside("ip", "link", "add", "link0", "type", "veth", "peer", "name", "link0", "netns",
                                     str(other.holder.pid)))
        for host, address in ((self, own_address), (other, other_address)):
            support.succeed(*host.inside("ip", "address", "add", f"{address}/24", "dev", "link0"))
            support.succeed(*host.inside("ip", "link", "set", "link0", "up"))

    def close(self):
        self.holder.kill()
        self.holder.wait()
        self.holder.stdout.close()


def namespaces_are_allowed():
    return support.run("unshare", "--net", "--uts", "--mount", "ip", "link", "set", "lo", "up")[0] == 0


class Cluster:
    """Started by `with`, stopped at its end with all processes of its jobs."""

    def __init__(self, two_hosts=False):
        self.two_hosts = two_hosts
        self.daemons, self.hosts, self.guard = [], [], None

    def __enter__(self):
        atexit.register(self.__exit__)  # unittest skips its tear-down when it is interrupted
        self.folder = tempfile.mkdtemp(prefix="lockstep-slurm-")
        os.chmod(self.folder, 0o755)  # munged refuses a socket that others could not reach
        self.guard = subprocess.Popen([sys.executable, "-B", __file__, self.folder], stdin=subprocess.PIPE,
                                      start_new_session=True)
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        # Running jobs end with slurmd's help, while it is there.
        if self.daemons and all(daemon.poll() is None for daemon in self.daemons):
            self.run("scancel", "--full", "--signal=KILL", "--user", getpass.getuser(), seconds=60)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.daemons = []
        if self.guard:
            self.guard.communicate()
            self.guard = None
        for host in self.hosts:
            host.close()
        self.hosts = []

    def _start(self):
        path = lambda name: os.path.join(self.folder, name)
        self.environment = support.clean_environment(SLURM_CONF=path("slurm.conf"))
        os.mkdir(path("state"), 0o755)
        with open(os.open(path("munge.key"), os.O_CREAT | os.O_WRONLY, 0o400), "wb") as file:
            file.write(secrets.token_bytes(128))
        with open(path("cgroup.conf"), "w", encoding="utf-8") as file:
            file.write("IgnoreSystemd=yes\n")
        if self.two_hosts:
            self._make_hosts(path("hosts"))
        with open(path("slurm.conf"), "w", encoding="utf-8") as file:
            file.write(self._configuration())
        self._daemon("munged", "--foreground", "--force", f"--key-file={path('munge.key')}",
                     f"--socket={path('munge.socket')}", f"--pid-file={path('munge.pid')}",
                     f"--log-file={path('munge.log')}", f"--seed-file={path('munge.seed')}", "--num-threads=2")
        wait_until("munged has not opened its socket", lambda: os.path.exists(path("munge.socket")))
        self._daemon("slurmctld", "-D", "-i", "-f", path("slurm.conf"))
        for number, _ in enumerate(self.hosts or [None], 1):
            os.mkdir(path(f"spool.node{number}"), 0o755)
            self._daemon("slurmd", "-D", "-f", path("slurm.conf"), "-N", f"node{number}", host=number - 1)
        try:
            wait_until("nodes are not idle",
                       lambda: set(self.run("sinfo", "-N", "-h", "-o", "%T")[1].split()) == {"idle"})
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.logs()}") from None
        self.own_processes = processes_of(self.folder)

    def _make_hosts(self, file):
        with open(file, "w", encoding="utf-8") as out:
            out.write("127.0.0.1 localhost\n10.87.0.1 node1\n10.87.0.2 node2\n")
        for name in ("node1", "node2"):
            self.hosts.append(Host(name, file))
        self.hosts[0].connect(self.hosts[1], "10.87.0.1", "10.87.0.2")

    def _configuration(self):
        controller, node = free_port(), free_port()
        while node == controller:
            node = free_port()
        user, host = getpass.getuser(), socket.gethostname()
        nodes = [("node1", "node1", "10.87.0.1"), ("node2", "node2", "10.87.0.2")] if self.two_hosts else \
                [("node1", host, "127.0.0.1")]
        return f"""
ClusterName=lockstep{os.getpid()}
SlurmctldHost={nodes[0][1]}({nodes[0][2]})
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge.socket
CredType=cred/munge
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool.%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd.%n.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd.%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
KillWait=2
MinJobAge=10
PrologFlags=NoHold
""" + "".join(f"NodeName={name} NodeHostname={host} NodeAddr={address} Port={node} CPUs={CPUS} State=UNKNOWN\n"
              for name, host, address in nodes) + """
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""

    def _daemon(self, *command, host=0):
        with open(os.path.join(self.folder, f"{command[0]}.out"), "ab") as log:
            self.daemons.append(subprocess.Popen(self._inside(command, host), env=self.environment,
                                                 stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                                 start_new_session=True, preexec_fn=die_with_us))

    def _inside(self, command, host=0):
        return self.hosts[host].inside(*command) if self.hosts else command

    def call(self, *command, **options):
        """Its output, on the first node; raises an error with the output if the status is not 0."""
        return support.succeed(*self._inside(command), environment=self.environment, **options)

    def run(self, *command, **options):
        return support.run(*self._inside(command), environment=self.environment, **options)

    def popen(self, *command):
        return subprocess.Popen(self._inside(command), env=self.environment, stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)

    def submit(self, script, *options):
        """Submits a batch script, as text or as the path of a file; returns its number and its output file."""
        output = tempfile.mktemp(dir=self.folder, prefix="batch-")
        if script.startswith("#!"):
            with open(output + ".sh", "w", encoding="utf-8") as file:
                file.write(script)
            script = output + ".sh"
        job = self.call("sbatch", "--parsable", "--output", output, *options, script).strip()
        return job, output

    def state(self, job):
        return re.search(r"JobState=(\w+)", self.call("scontrol", "show", "job", job))[1]

    def batch(self, script, *options, seconds=300):
        """The output of a batch script that must succeed."""
        job, output = self.submit(script, *options)
        try:
            state = wait_until("it has not ended", lambda: self._final_state(job), seconds)
        except TimeoutError as error:
            state = f"{self.state(job)}, {error}"
        text = support.content(output)
        if state != "COMPLETED":
            raise AssertionError(f"job {job} is {state}:\n{text}")
        return text

    def _final_state(self, job):
        state = self.state(job)
        return state if state not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING") else None

    def logs(self):
        text = ""
        for name in sorted(os.listdir(self.folder)):
            if name.endswith((".out", ".log")):
                with open(os.path.join(self.folder, name), encoding="utf-8", errors="replace") as file:
                    text += f"---- {name}\n" + "".join(file.readlines()[-30:])
        return text

    def expect_nothing_left(self):
        """Of jobs; the daemons exist."""
        left = lambda: processes_of(self.folder) - self.own_processes
        wait_until(f"these are left of jobs: {left()}", lambda: not left())


class KillTest(support.LauncherTest):
    def ranks_of(self, lines, count):
        """Reads until every rank has printed its process."""
        pids, text = {}, ""
        for line in lines:
            text += line
            if found := re.search(r"rank (\d+) pid (\d+)", line):
                pids[int(found[1])] = int(found[2])
            if len(pids) == count:
                return pids
        self.fail(f"not every rank came:\n{text}")

    def expect_named(self, slurm, rank, *arguments, nodes=1):
        """The survivors of 4 ranks learn that this one was killed."""
        with slurm.popen("srun", "-N", str(nodes), f"--ntasks-per-node={4 // nodes}", "--kill-on-bad-exit=0",
                         "patient", *arguments) as srun:
            try:
                pids = self.ranks_of(srun.stdout, 4)
                begin = time.monotonic()
                os.kill(pids[rank], signal.SIGKILL)
                # Less than patient's own timeout, after which the survivors learn it in any case.
                output, _ = srun.communicate(timeout=50)
                print(f"told after {time.monotonic() - begin:.1f} s ... ", end="", flush=True)
            except BaseException:
                os.killpg(srun.pid, signal.SIGKILL)
                raise
        self.assertNotEqual(srun.returncode, 0)
        told = [line for line in output.splitlines() if "told:" in line]
        self.assertEqual(len(told), 3, output)
        for line in told:
            self.assertRegex(line, rf"\brank {rank}\b")
            self.assertRegex(line, rf"\b{pids[rank]}\b")


if __name__ == "__main__":
    guard(sys.argv[1])
