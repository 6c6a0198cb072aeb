"""Programs under mpirun of Open MPI and MPICH and under torchrun, without MASTER_ADDR and MASTER_PORT where these are not
needed, through wrappers, and one launcher inside another."""

import concurrent.futures
import shutil
import tempfile

import support
from support import Programs, clean_environment, succeed

OPEN_MPI = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
MPICH = support.with_silent_input("mpirun.mpich")
MPIRUNS = {"Open MPI": OPEN_MPI, "MPICH": MPICH}
INSTALLED = {"Open MPI": shutil.which("mpirun.openmpi"), "MPICH": shutil.which("mpirun.mpich")}


def with_own_folder(*command):
    """Open MPI creates a folder for all jobs of a user, and fails if another job creates it at the same time."""
    with tempfile.TemporaryDirectory(prefix="ls-") as folder:
        return succeed(*command, environment=clean_environment(TMPDIR=folder))


class LauncherTest(support.LauncherTest):
    def each_mpirun(self):
        found = [(launcher, command) for launcher, command in MPIRUNS.items() if INSTALLED[launcher]]
        if not found:
            self.skipTest("there is neither mpirun.openmpi nor mpirun.mpich")
        return found

    def torchrun(self, *options):
        if not Programs.torchrun:
            self.skipTest("there is no torchrun")
        return [Programs.torchrun, *options, "--no-python"]


class Identity(LauncherTest):
    """Identities of processes."""
    probe = property(lambda self: Programs.path("identity_probe"))

    def test_mpirun(self):
        for launcher, mpirun in self.each_mpirun():
            self.expect_ranks(succeed(*mpirun, "-n", "3", self.probe), launcher, 3)

    def test_a_wrapper_changes_nothing(self):
        for launcher, mpirun in self.each_mpirun():
            self.expect_ranks(succeed(*mpirun, "-n", "3", "sh", "-c", f"{self.probe}; true"), launcher, 3)

    def test_two_jobs_at_once_are_two(self):
        for launcher, mpirun in self.each_mpirun():
            with concurrent.futures.ThreadPoolExecutor() as pool:
                outputs = list(pool.map(lambda _: with_own_folder(*mpirun, "-n", "2", self.probe), range(2)))
            first, second = (self.expect_ranks(output, launcher, 2)[0]["job"] for output in outputs)
            self.assertNotEqual(first, second)

    def test_a_master_is_taken(self):
        for launcher, mpirun in self.each_mpirun():
            environment = clean_environment(MASTER_ADDR="127.0.0.1", MASTER_PORT="23398")
            output = succeed(*mpirun, "-n", "2", self.probe, environment=environment)
            self.assertEqual(self.expect_ranks(output, launcher, 2)[0]["master"], "127.0.0.1:23398-23398")

    def test_half_a_master_is_refused(self):
        for _, mpirun in self.each_mpirun():
            status, output = support.run(*mpirun, "-n", "2", self.probe, environment=clean_environment(MASTER_PORT="9"))
            self.assertNotEqual(status, 0)
            self.assertIn("MASTER_ADDR is not set but MASTER_PORT is", output)

    def test_torchrun(self):
        found = self.expect_ranks(succeed(*self.torchrun("--standalone", "--nproc-per-node", "2"), self.probe),
                                  "torchrun", 2)
        self.assertEqual(found[0]["served"], "true")

    def test_one_mpirun_inside_the_other(self):
        if not all(INSTALLED.values()):
            self.skipTest("there are not both mpirun.openmpi and mpirun.mpich")
        self.expect_ranks(succeed(*OPEN_MPI, "-n", "1", *MPICH, "-n", "2", self.probe), "MPICH", 2)
        # Each uses the ranks that it started, even if the outer one started several.
        found = support.identities(succeed(*OPEN_MPI, "-n", "2", *MPICH, "-n", "2", self.probe))
        self.assertEqual([each["launcher"] for each in found], ["MPICH"] * 4)
        self.assertEqual(sorted(each["rank"] for each in found), ["0", "0", "1", "1"])
        self.assertEqual(len({each["job"] for each in found}), 2)
        self.expect_ranks(succeed(*MPICH, "-n", "1", *OPEN_MPI, "-n", "2", self.probe), "Open MPI", 2)

    def test_torchrun_inside_mpirun(self):
        for _, mpirun in self.each_mpirun():
            inner = self.torchrun("--standalone", "--nproc-per-node", "2")
            self.expect_ranks(succeed(*mpirun, "-n", "1", *inner, self.probe), "torchrun", 2)

    def test_lockstep_run_inside_the_others(self):
        lockstep = [Programs.path("lockstep"), "run", "-n", "2", self.probe]
        for _, mpirun in self.each_mpirun():
            self.expect_ranks(succeed(*mpirun, "-n", "1", *lockstep), "lockstep run", 2)
        outer = self.torchrun("--standalone", "--nproc-per-node", "1")
        self.expect_ranks(succeed(*outer, *lockstep), "lockstep run", 2)

    def test_by_hand(self):
        environment = clean_environment(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="23398")
        found = support.identities(succeed(self.probe, environment=environment))
        self.assertEqual([(each["launcher"], each["rank"], each["local"]) for each in found],
                         [("environment", "1", "-1/-1")])

    def test_alone(self):
        self.expect_ranks(succeed(self.probe), "none", 1)


class Training(LauncherTest):
    """Programs that join and compute."""
    hello = property(lambda self: Programs.path("00_hello"))

    def test_mpirun(self):
        for _, mpirun in self.each_mpirun():
            self.expect_hello(succeed(*mpirun, "-n", "2", self.hello), 2)

    def test_mpirun_and_a_wrapper(self):
        for _, mpirun in self.each_mpirun():
            self.expect_hello(succeed(*mpirun, "-n", "2", "sh", "-c", f"{self.hello}; true"), 2)

    def test_two_jobs_at_once_do_not_meet(self):
        for _, mpirun in self.each_mpirun():
            with concurrent.futures.ThreadPoolExecutor() as pool:
                for output in pool.map(lambda _: with_own_folder(*mpirun, "-n", "2", self.hello), range(2)):
                    self.expect_hello(output, 2)

    def test_torchrun(self):
        self.expect_hello(succeed(*self.torchrun("--standalone", "--nproc-per-node", "2"), self.hello), 2)

    def test_lockstep_run_inside_mpirun(self):
        lockstep = [Programs.path("lockstep"), "run", "-n", "2"]
        for _, mpirun in self.each_mpirun():
            self.expect_hello(succeed(*mpirun, "-n", "1", *lockstep, self.hello), 2)

    def test_alone(self):
        self.assertRegex(succeed(self.hello), r"rank 0 of 1 \(local 0, cpu, \w+\)")


if __name__ == "__main__":
    support.main()
