"""pip install --no-build-isolation ./python: builds the module with CMake for the installed torch."""

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# With --no-build-isolation pip does not check the requirements in pyproject.toml.
MISSING = [
    advice
    for found, advice in (
        (importlib.util.find_spec("torch"), "torch: pip install torch"),
        (importlib.util.find_spec("setuptools.command.bdist_wheel") or importlib.util.find_spec("wheel"),
         "setuptools 70.1 or newer: pip install 'setuptools>=70.1'"),
        (shutil.which("cmake"), "CMake 3.22 or newer: pip install 'cmake>=3.22'"),
    )
    if not found
]
if MISSING:
    sys.exit(f"cannot build torch_lockstep: {sys.prefix} lacks\n  " + "\n  ".join(MISSING))

import torch  # noqa: E402

HERE = pathlib.Path(__file__).resolve().parent
VERSION = re.search(r"^project\(lockstep VERSION ([\d.]+)", (HERE.parent / "CMakeLists.txt").read_text(), re.M)[1]


class CMakeBuild(build_ext):
    def build_extension(self, extension):
        build = pathlib.Path(self.build_temp).resolve()
        jobs = os.environ.get("LOCKSTEP_JOBS", str(os.cpu_count() or 1))
        subprocess.run(
            ["cmake", "-S", HERE, "-B", build, f"-DLOCKSTEP_TORCH={pathlib.Path(torch.__file__).parent}",
             f"-DLOCKSTEP_PYTHON={sys.executable}"], check=True)
        subprocess.run(["cmake", "--build", build, "-j", jobs], check=True)
        target = pathlib.Path(self.get_ext_fullpath(extension.name)).parent
        target.mkdir(parents=True, exist_ok=True)
        for built in [*(build / "torch_lockstep").glob("_C*.so"), build / "torch_lockstep" / "_built.py"]:
            shutil.copy2(built, target)


setup(
    name="torch-lockstep",
    version=VERSION,
    description="init_process_group('lockstep'): collectives between CPU ranks of one host, in shared memory",
    packages=["torch_lockstep"],
    ext_modules=[Extension("torch_lockstep._C", [])],
    cmdclass={"build_ext": CMakeBuild},
    # torch's C++ interface changes with every version.
    install_requires=[f"torch=={torch.__version__.split('+')[0]}"],
    entry_points={"torch.backends": ["lockstep = torch_lockstep:register"]},
    zip_safe=False,
)
