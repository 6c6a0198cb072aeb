"""How a program comes to the backend "lockstep": imports, paths and names of devices.

usage: PYTHONPATH=build/python python tests/python/import_test.py [unittest arguments]
"""

import os
import pathlib
import subprocess
import sys
import unittest

BUILT = os.environ["PYTHONPATH"].split(":")[0]
SOURCES = str(pathlib.Path(__file__).resolve().parents[2] / "python")

ALONE = """
import torch.distributed as dist
def use(name="lockstep"):
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(x := torch.ones(3))
    dist.destroy_process_group()
"""


def python(program, *arguments, path=BUILT, cwd=None, **environment):
    done = subprocess.run([sys.executable, "-B", "-c", program, *arguments], cwd=cwd, text=True, timeout=200,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment})
    return done.returncode, done.stdout


class Import(unittest.TestCase):
    def check(self, outcome):
        self.assertEqual(outcome[0], 0, outcome[1])

    def test_before_torch(self):
        """Which imports it in turn, where that is not switched off."""
        self.check(python("import torch_lockstep, torch" + ALONE + "use()"))
        self.check(python("import torch_lockstep, torch" + ALONE + "use()", TORCH_DEVICE_BACKEND_AUTOLOAD="0"))

    def test_with_the_sources_on_the_path_too(self):
        for path in (f"{SOURCES}:{BUILT}", f"{BUILT}:{SOURCES}"):
            with self.subTest(path):
                self.check(python("import torch" + ALONE + "use()", path=path))

    def test_sources_alone_say_what_to_do(self):
        status, output = python("import torch_lockstep, torch" + ALONE + "use()", path=SOURCES)
        self.assertNotEqual(status, 0)
        self.assertRegex(output, r"torch_lockstep is not built: .*/python/torch_lockstep has the sources alone\. Run `\./dev build`")

    def test_devices_other_than_the_cpu_are_refused(self):
        self.check(python("import torch" + ALONE + """
for name in ("cuda:lockstep", "cpu:lockstep,cuda:lockstep", "cpu:gloo,cuda:lockstep"):
    try:
        use(name)
    except ValueError as error:
        assert str(error).startswith("lockstep: ") and "'cuda:lockstep'" in str(error), error
        assert "cpu:lockstep,cuda:nccl" in str(error), error
    else:
        raise AssertionError(name)
    assert not dist.is_initialized()
use()
use("cpu:lockstep")
"""))


if __name__ == "__main__":
    unittest.main()
