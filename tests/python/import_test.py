"""How a program loads the backend "lockstep": imports, paths, names of devices, and the package that pip builds.

usage: PYTHONPATH=build/python python tests/python/import_test.py [unittest arguments]
"""

import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

BUILT = os.path.abspath(os.environ["PYTHONPATH"].split(":")[0])
SOURCES = str(pathlib.Path(__file__).resolve().parents[2] / "python")

ALONE = """
import torch.distributed as dist
def use(name="lockstep"):
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(x := torch.ones(3))
    dist.destroy_process_group()
"""
# Builds like setuptools before 70.1 in an environment without wheel.
OLD_SETUPTOOLS = """
import importlib.util, runpy, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name in ("setuptools.command.bdist_wheel", "wheel") else find(name)
sys.argv = ["setup.py", "--version"]
runpy.run_path("setup.py")
"""
METADATA = """
import pathlib, sys
from setuptools import build_meta
folder = pathlib.Path(sys.argv[1])
made = folder / build_meta.prepare_metadata_for_build_wheel(str(folder))
print((made / "METADATA").read_text(), (made / "entry_points.txt").read_text())
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
        """torch imports the package unless that is switched off."""
        self.check(python("import torch_lockstep, torch" + ALONE + "use()"))
        self.check(python("import torch_lockstep, torch" + ALONE + "use()", TORCH_DEVICE_BACKEND_AUTOLOAD="0"))

    def test_with_the_sources_on_the_path_too(self):
        for path in (f"{SOURCES}:{BUILT}", f"{BUILT}:{SOURCES}"):
            with self.subTest(path):
                self.check(python("import torch" + ALONE + "use()", path=path))

    def test_sources_alone_say_what_to_do(self):
        status, output = python("import torch_lockstep, torch" + ALONE + "use()", path=SOURCES)
        self.assertNotEqual(status, 0)
        self.assertRegex(output, r"torch_lockstep is not built: .*/python/torch_lockstep has only the sources\. Run `\./dev build`")

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

    def test_what_pip_builds_with(self):
        status, output = python(OLD_SETUPTOOLS, cwd=SOURCES)
        self.assertEqual(status, 1, output)
        self.assertRegex(output, r"lacks\n  setuptools 70\.1 or newer: pip install 'setuptools>=70\.1'\n$")
        with tempfile.TemporaryDirectory() as folder:
            status, output = python(METADATA, folder, cwd=SOURCES)
        self.assertEqual(status, 0, output)
        self.assertRegex(output, r"Requires-Dist: torch==\d")
        self.assertIn("[torch.backends]\nlockstep = torch_lockstep:register", output)


if __name__ == "__main__":
    unittest.main()
