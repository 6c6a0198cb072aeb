"""Programs under a real SLURM: as steps, as batch scripts, with other launchers inside, cancelled and killed."""

import os
import re
import shutil
import time

import cluster
import support
from support import Programs, content

slurm = cluster.Cluster()


def setUpModule():
    slurm.__enter__()
    slurm.environment["PATH"] = Programs.folder + ":" + slurm.environment["PATH"]


def tearDownModule():
    slurm.expect_nothing_left()
    slurm.__exit__()


def script(*lines):
    return "\n".join(("#!/bin/sh", *lines, ""))


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


class Identity(support.LauncherTest):
    """Identities of processes."""

    def test_tasks_of_a_step_are_ranks(self):
        found = self.expect_ranks(slurm.call("srun", "-n", "4", "identity_probe"), "SLURM", 4)
        self.assertRegex(found[0]["job"], rf"^SLURM lockstep{os.getpid()} \d+\.0 restart 0$")
        host, first, last = re.fullmatch(r"(\w+):(\d+)-(\d+)", found[0]["master"]).groups()
        self.assertEqual(host, "node1")
        self.assertEqual(int(last) - int(first), 15)
        self.assertTrue(20000 <= int(first) and int(last) < 32000)

    def test_steps_of_a_job_are_jobs_of_their_own(self):
        output = slurm.batch(script("srun -n 2 --overlap identity_probe > first.$SLURM_JOB_ID &",
                                    "srun -n 2 --overlap identity_probe; wait; echo; cat first.$SLURM_JOB_ID"),
                             "-n", "2", "--chdir", slurm.folder)
        second, first = output.split("\n\n")
        jobs = [self.expect_ranks(text, "SLURM", 2)[0] for text in (first, second)]
        self.assertNotEqual(jobs[0]["job"], jobs[1]["job"])
        self.assertNotEqual(jobs[0]["master"], jobs[1]["master"])

    def test_what_srun_does_for_mpi_changes_nothing(self):
        plugins = slurm.call("srun", "--mpi=list")
        for plugin in ("pmi2", "pmix"):
            if re.search(rf"\b{plugin}\b", plugins):
                self.expect_ranks(slurm.call("srun", f"--mpi={plugin}", "-n", "2", "identity_probe"), "SLURM", 2)

    def test_scripts_and_shells_are_alone(self):
        self.expect_ranks(slurm.batch(script("identity_probe"), "-n", "4"), "none", 1)
        self.expect_ranks(slurm.call("salloc", "--quiet", "-n", "4", "identity_probe"), "none", 1)
        interactive = "srun --interactive --preserve-env identity_probe"
        self.expect_ranks(slurm.call("salloc", "--quiet", "-n", "4", "sh", "-c", interactive), "SLURM", 1)

    def test_scripts_and_shells_inherit_a_step_and_are_alone(self):
        inner = os.path.join(slurm.folder, "inner")
        with open(inner, "w", encoding="utf-8") as file:
            file.write(script("env | grep SLURM_STEP_NUM_TASKS", "identity_probe"))
        output = os.path.join(slurm.folder, "inner.out")
        for mpi in ("none", "pmi2"):
            outer = f'[ $SLURM_PROCID = 1 ] || sbatch --wait --output={output} -n 2 {inner}'
            slurm.call("srun", f"--mpi={mpi}", "-n", "2", "sh", "-c", outer)
            text = content(output)
            self.assertIn("SLURM_STEP_NUM_TASKS=2", text)
            self.expect_ranks(text, "none", 1)
        outer = "[ $SLURM_PROCID = 1 ] || salloc --quiet -n 2 identity_probe"
        self.expect_ranks(slurm.call("srun", "-n", "2", "sh", "-c", outer), "none", 1)

    def test_a_shell_between_changes_nothing(self):
        self.expect_ranks(slurm.call("srun", "-n", "2", "sh", "-c", "identity_probe; true"), "SLURM", 2)

    def test_a_step_inside_a_step_counts(self):
        inner = "srun --overlap --overcommit -n 3 identity_probe"
        self.expect_ranks(slurm.call("srun", "-n", "1", "sh", "-c", inner), "SLURM", 3)

    def test_mpirun_inside(self):
        # Within a step mpirun must not request another step, which would wait for this one's processors.
        kinds = {"Open MPI": ("mpirun.openmpi --allow-run-as-root --oversubscribe", "--mca plm isolated --mca ras ^slurm"),
                 "MPICH": ("mpirun.mpich", "-launcher fork -rmk user -hosts localhost")}
        for launcher, (mpirun, alone) in kinds.items():
            if not shutil.which(mpirun.split()[0]):
                continue
            with self.subTest(launcher):
                silent = f"0<>{support.silent_input()}" if launcher == "MPICH" else ""
                self.expect_ranks(slurm.batch(script(f"{mpirun} -n 2 identity_probe {silent}"), "-n", "2"), launcher, 2)
                inner = f"{mpirun} {alone} -n 2 sh -c 'identity_probe; true' {silent}"
                # MPICH's mpiexec sometimes fails at its own end, when its ranks have long ended well
                # ("HYDU_sock_write: Bad file descriptor"), so only their output counts.
                self.expect_ranks(slurm.call("srun", "-n", "1", "sh", "-c", inner + "; true"), launcher, 2)
                # And the reverse: mpirun's variables enclose the step.
                outer = ["sh", "-c", f"exec {mpirun} -n 1 srun -n 2 identity_probe {silent}"]
                self.expect_ranks(slurm.call(*outer), "SLURM", 2)

    def test_torchrun_inside(self):
        if not Programs.torchrun:
            self.skipTest("there is no torchrun")
        output = slurm.call("srun", "-n", "1", Programs.torchrun, "--standalone", "--nproc-per-node", "2",
                            "--no-python", Programs.path("identity_probe"))
        self.assertEqual(self.expect_ranks(output, "torchrun", 2)[0]["served"], "true")

    def test_lockstep_run_inside(self):
        for output in (slurm.batch(script("lockstep run -n 2 identity_probe"), "-n", "4"),
                       slurm.call("srun", "-n", "1", "lockstep", "run", "-n", "2", "identity_probe")):
            self.expect_ranks(output, "lockstep run", 2)

    def test_a_job_that_was_requeued_says_so(self):
        job, output = slurm.submit(script("srun -n 2 identity_probe",
                                          "[ -n \"$SLURM_RESTART_COUNT\" ] || sleep 600"), "--requeue",
                                   "--open-mode=append", "-n", "2")
        text = lambda: content(output)
        cluster.wait_until("the first run has not said anything", lambda: text().count("launcher=") == 2)
        slurm.call("scontrol", "requeue", job)
        # SLURM lets a requeued job wait for some minutes, unless configured.
        cluster.wait_until("the job is not queued again", lambda: slurm.state(job) == "PENDING")
        slurm.call("scontrol", "update", f"jobid={job}", "StartTime=now")
        cluster.wait_until("the second run has not said anything", lambda: text().count("launcher=") == 4)
        self.assertEqual([each["restart"] for each in support.identities(text())], ["0", "1"] * 2)


class Training(support.LauncherTest):
    """Programs that join and compute."""

    def test_hello_as_a_step(self):
        self.expect_hello(slurm.call("srun", "-n", "4", "00_hello"), 4)

    def test_hello_with_pmi2(self):
        if "pmi2" not in slurm.call("srun", "--mpi=list"):
            self.skipTest("SLURM has no pmi2 here")
        self.expect_hello(slurm.call("srun", "--mpi=pmi2", "-n", "2", "00_hello"), 2)

    def test_hello_as_a_batch_script_is_a_world_of_one(self):
        self.assertRegex(slurm.batch(script("00_hello"), "-n", "4"), r"rank 0 of 1 \(local 0, cpu, \w+\)")

    def test_lockstep_run_in_a_batch_script(self):
        self.expect_hello(slurm.batch(script("lockstep run -n 2 00_hello"), "-n", "2"), 2)

    def test_the_example(self):
        os.symlink(Programs.path("00_hello"), os.path.join(slurm.folder, "train"))
        output = slurm.batch(os.path.join(Programs.source, "examples/slurm/train.sbatch"), "--chdir", slurm.folder,
                             "--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=1")
        self.expect_hello(output, 2)


class Ends(cluster.KillTest):
    def test_scancel_ends_ranks_that_wait(self):
        job, output = slurm.submit(script("srun -n 3 patient wait"), "-n", "3")
        pids = lambda: re.findall(r"rank \d+ pid (\d+)", content(output))
        cluster.wait_until("not every rank came", lambda: len(pids()) == 3)
        begin = time.monotonic()
        slurm.call("scancel", job)
        cluster.wait_until("ranks are left", lambda: not any(alive(pid) for pid in pids()))
        print(f"gone {time.monotonic() - begin:.1f} s after scancel ... ", end="", flush=True)
        cluster.wait_until("the job has not ended", lambda: slurm.state(job) == "CANCELLED")

    def test_a_killed_rank_is_named_to_the_others(self):
        self.expect_named(slurm, 2)

    def test_so_is_one_that_the_others_wait_for(self):
        self.expect_named(slurm, 3, "wait")

    def test_so_is_the_one_that_holds_the_agent(self):
        self.expect_named(slurm, 0)


if __name__ == "__main__":
    missing = cluster.missing_program()
    support.main(missing and "SLURM is not installed (slurm-wlm, munge)")
