"""Shared by the launchers' tests: paths of programs, a clean environment, and parsing of output."""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import unittest

# Variables by which a launcher identifies its ranks; these tests may themselves run under one.
LAUNCHERS = re.compile(r"^(SLURM|SBATCH|SALLOC|SRUN|OMPI_COMM|OMPI_MCA_ess|PMIX|PMI|MPI|HYD|PRTE|TORCHELASTIC|LOCKSTEP)_|"
                       r"^(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|^MASTER_(ADDR|PORT)$")


class Programs:
    """Filled by main()."""
    folder = source = torchrun = ""

    @classmethod
    def path(cls, name):
        return os.path.join(cls.folder, name)


def clean_environment(**more):
    kept = {name: value for name, value in os.environ.items() if not LAUNCHERS.match(name)}
    return dict(kept, OMP_NUM_THREADS="1", LOCKSTEP_BACKEND="cpu:auto", LOCKSTEP_JOIN_TIMEOUT="120s", **more)


def silent_input():
    """A path from which reading blocks forever, without data and without an end.

    MPICH's mpiexec forwards its standard input to the proxy that holds rank 0. If that has ended before data or the end
    of the file come, mpiexec dies of SIGPIPE or says "HYDU_sock_write: Bad file descriptor". A FIFO that is open for
    reading and writing (`0<>`) stays silent, so that there is nothing to forward.
    """
    if not hasattr(silent_input, "folder"):
        silent_input.folder = tempfile.TemporaryDirectory(prefix="lockstep-input-")
        os.mkfifo(os.path.join(silent_input.folder.name, "fifo"))
    return os.path.join(silent_input.folder.name, "fifo")


def with_silent_input(*command):
    """The command with such an input, whichever program starts it."""
    return ["sh", "-c", 'exec "$@" 0<>"$0"', silent_input(), *command]


def run(*command, environment=None, seconds=300):
    """Status and output. No process is left when the time is up, or when the test ends."""
    with subprocess.Popen(command, env=environment or clean_environment(), stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          start_new_session=True) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
            return process.returncode, output
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise AssertionError(f"not done after {seconds} s: {' '.join(command)}\n{output}") from None
            raise


def succeed(*command, **options):
    status, output = run(*command, **options)
    if status != 0:
        raise AssertionError(f"status {status}: {' '.join(command)}\n{output}")
    return output


def content(path):
    """Empty while the file does not exist."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return ""


def identities(output):
    """The output of identity_probe, by rank."""
    found = []
    for line in output.splitlines():
        # Launchers may prefix lines with labels.
        if start := re.search(r"launcher=", line):
            found.append(dict(part.split("=", 1) for part in line[start.start():].split(";")))
    return sorted(found, key=lambda each: int(each["rank"]))


class LauncherTest(unittest.TestCase):
    def expect_ranks(self, output, launcher, count):
        """Runs all ranks of one job on one host; returns their output."""
        found = identities(output)
        self.assertEqual([(each["launcher"], each["rank"], each["size"]) for each in found],
                         [(launcher, str(rank), str(count)) for rank in range(count)], output)
        self.assertEqual(sorted(each["local"] for each in found), [f"{rank}/{count}" for rank in range(count)], output)
        self.assertEqual(len({each["job"] for each in found}), 1, output)
        return found

    def expect_hello(self, output, count, per_host=None):
        """The lines of 00_hello."""
        total = count * (count + 1) // 2
        for rank in range(count):
            local = rank % (per_host or count)
            self.assertRegex(output, rf"rank {rank} of {count} \(local {local}, cpu, [\w+]+\): "
                                     rf"mine {rank + 1}, the sum of all {total}\b")


def main(skip_reason=None):
    """Runs the tests of the main module; unknown options go to unittest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--programs", required=True, help="where 00_hello, lockstep, ... are")
    parser.add_argument("--source", required=True, help="this repository")
    parser.add_argument("--torchrun", default="")
    options, rest = parser.parse_known_args()
    if skip_reason:
        print(f"skipped: {skip_reason}")
        sys.exit(77)
    Programs.folder, Programs.source = os.path.abspath(options.programs), os.path.abspath(options.source)
    Programs.torchrun = options.torchrun

    def ended(*_):
        raise KeyboardInterrupt  # the one exception that unittest does not take for the end of a single test

    signal.signal(signal.SIGTERM, ended)
    signal.signal(signal.SIGHUP, ended)
    unittest.main(argv=[sys.argv[0], "--verbose", *rest])
