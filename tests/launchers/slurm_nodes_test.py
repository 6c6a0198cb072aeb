"""Programs on two nodes of a real SLURM, which share neither network nor name."""

import os
import re

import cluster
import support
from support import Programs

slurm = cluster.Cluster(two_hosts=True)


def setUpModule():
    slurm.__enter__()
    slurm.environment["PATH"] = Programs.folder + ":" + slurm.environment["PATH"]
    slurm.environment["LOCKSTEP_KEY"] = support.succeed(Programs.path("lockstep"), "key").strip()


def tearDownModule():
    slurm.expect_nothing_left()
    slurm.__exit__()


class Nodes(cluster.KillTest):
    def test_who_is_where(self):
        found = support.identities(slurm.call("srun", "-N", "2", "-n", "3", "identity_probe"))
        self.assertEqual([(each["rank"], each["size"], each["local"]) for each in found],
                         [("0", "3", "0/2"), ("1", "3", "1/2"), ("2", "3", "0/1")])
        self.assertEqual(len({each["job"] for each in found}), 1)
        self.assertEqual(len({each["master"] for each in found}), 1)
        self.assertTrue(re.fullmatch(r"node1:\d+-\d+", found[0]["master"]))

    def test_hello(self):
        self.expect_hello(slurm.call("srun", "-N", "2", "--ntasks-per-node=2", "00_hello"), 4, per_host=2)

    def test_a_port_that_was_given(self):
        output = slurm.call("srun", "-N", "2", "-n", "2", "env", "MASTER_PORT=29512", "00_hello")
        self.expect_hello(output, 2, per_host=1)

    def test_two_steps_at_once(self):
        script = "#!/bin/sh\nfor i in 1 2; do srun --overlap -N 2 -n 2 00_hello & done; wait\n"
        output = slurm.batch(script, "-N", "2", "-n", "2")
        self.assertEqual(output.count("rank 1 of 2 (local 0"), 2, output)

    def test_without_a_key_it_is_refused(self):
        status, output = slurm.run("srun", "-N", "2", "-n", "2", "env", "-u", "LOCKSTEP_KEY",
                                   "LOCKSTEP_JOIN_TIMEOUT=5s", "join_probe")
        self.assertNotEqual(status, 0)
        self.assertIn("lockstep key", output)

    def test_the_example(self):
        os.symlink(Programs.path("00_hello"), os.path.join(slurm.folder, "train"))
        output = slurm.batch(os.path.join(Programs.source, "examples/slurm/train.sbatch"), "--chdir", slurm.folder,
                             "--ntasks-per-node=2", "--cpus-per-task=1")
        self.expect_hello(output, 4, per_host=2)

    def test_a_killed_rank_is_named_on_both_nodes(self):
        for rank in (1, 3):
            self.expect_named(slurm, rank, nodes=2)

    def test_so_is_one_that_holds_an_agent(self):
        for rank in (0, 2):
            self.expect_named(slurm, rank, nodes=2)


if __name__ == "__main__":
    skip = None
    if cluster.missing_program():
        skip = "SLURM is not installed (slurm-wlm, munge)"
    elif not cluster.namespaces_are_allowed():
        skip = "this user may not make namespaces (unshare --net --uts --mount)"
    support.main(skip)
