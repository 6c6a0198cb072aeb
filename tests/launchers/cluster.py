"""A real SLURM of one node, for the length of a test: munged, slurmctld and slurmd with a folder, a key and ports of
their own, so that neither a SLURM of this host nor another test is in the way."""

import ctypes
import getpass
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time

import support

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo", "scontrol")
# More than there are: what is tested are ranks, not scheduling.
CPUS = 8


def missing_program():
    """The first that is not installed, or None."""
    os.environ["PATH"] += ":/usr/local/sbin:/usr/sbin:/sbin"  # where daemons are, and not every user looks
    return next((program for program in PROGRAMS if not shutil.which(program)), None)


def free_ports(count):
    """Told apart by being open all at once."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def wait_until(what, condition, seconds=30):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.05)
    raise TimeoutError(f"after {seconds} s: {what}")


class Cluster:
    """Started by `with`, stopped at its end with all that its jobs started."""

    def __enter__(self):
        self.daemons = []
        self.folder = tempfile.mkdtemp(prefix="lockstep-slurm-")
        os.chmod(self.folder, 0o755)  # munged refuses a socket that others could not reach
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        # What still runs of jobs ends with slurmd's help, while it is there.
        if any(daemon.args[0] == "slurmd" and daemon.poll() is None for daemon in self.daemons):
            subprocess.run(["scancel", "--full", "--signal=KILL", "--user", getpass.getuser()], env=self.environment,
                           timeout=20, check=False, capture_output=True)
        for daemon in reversed(self.daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.daemons = []
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self):
        path = lambda name: os.path.join(self.folder, name)
        self.environment = support.clean_environment(SLURM_CONF=path("slurm.conf"))
        for name in ("state", "spool"):
            os.mkdir(path(name), 0o755)
        with open(os.open(path("munge.key"), os.O_CREAT | os.O_WRONLY, 0o400), "wb") as file:
            file.write(secrets.token_bytes(128))
        with open(path("slurm.conf"), "w", encoding="utf-8") as file:
            file.write(self._configuration())
        with open(path("cgroup.conf"), "w", encoding="utf-8") as file:
            file.write("IgnoreSystemd=yes\n")
        self._daemon("munged", "--foreground", "--force", f"--key-file={path('munge.key')}",
                     f"--socket={path('munge.socket')}", f"--pid-file={path('munge.pid')}",
                     f"--log-file={path('munge.log')}", f"--seed-file={path('munge.seed')}", "--num-threads=2")
        wait_until("munged has not opened its socket", lambda: os.path.exists(path("munge.socket")))
        self._daemon("slurmctld", "-D", "-i", "-f", path("slurm.conf"))
        self._daemon("slurmd", "-D", "-f", path("slurm.conf"), "-N", "node1")
        try:
            wait_until("the node is not idle", lambda: self.run("sinfo", "-h", "-o", "%T")[1].strip() == "idle")
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.logs()}") from None
        self.own_processes = self.processes()

    def _configuration(self):
        controller, node = free_ports(2)
        user, host = getpass.getuser(), socket.gethostname()
        return f"""
ClusterName=lockstep{os.getpid()}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge.socket
CredType=cred/munge
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd.pid
SlurmctldLogFile={self.folder}/slurmctld.log
SlurmdLogFile={self.folder}/slurmd.log
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
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={node} CPUs={CPUS} State=UNKNOWN
PartitionName=test Nodes=node1 Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""

    def _daemon(self, *command):
        log = open(os.path.join(self.folder, f"{command[0]}.out"), "wb")
        # Should this test be killed, they end too: 1 is PR_SET_PDEATHSIG.
        die_with_us = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        self.daemons.append(subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                                             stderr=log, start_new_session=True, preexec_fn=die_with_us))
        log.close()

    def call(self, *command, **options):
        """Its output; an error that shows it, where the status is not 0."""
        return support.succeed(*command, environment=self.environment, **options)

    def run(self, *command, **options):
        return support.run(*command, environment=self.environment, **options)

    def popen(self, *command):
        return subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT, text=True, start_new_session=True)

    def submit(self, script, *options):
        """A batch script, as text or as the path of a file; returns its number and where its output goes."""
        output = tempfile.mktemp(dir=self.folder, prefix="batch-")
        if script.startswith("#!"):
            with open(output + ".sh", "w", encoding="utf-8") as file:
                file.write(script)
            script = output + ".sh"
        job = self.call("sbatch", "--parsable", "--output", output, *options, script).strip()
        return job, output

    def state(self, job):
        return re.search(r"JobState=(\w+)", self.call("scontrol", "show", "job", job))[1]

    def batch(self, script, *options, seconds=90):
        """The output of a batch script that is to succeed."""
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
        for name in ("munged.out", "munge.log", "slurmctld.out", "slurmctld.log", "slurmd.out", "slurmd.log"):
            try:
                with open(os.path.join(self.folder, name), encoding="utf-8", errors="replace") as file:
                    text += f"---- {name}\n" + "".join(file.readlines()[-30:])
            except FileNotFoundError:
                pass
        return text

    def processes(self):
        """Daemons, their helpers, and what runs of jobs: all of them have its configuration in their environment."""
        mine = f"SLURM_CONF={self.folder}/slurm.conf".encode()
        found = []
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    if mine in file.read().split(b"\0") and int(entry) != os.getpid():
                        found.append(int(entry))
            except OSError:
                pass  # it has ended, or is another user's
        return found
