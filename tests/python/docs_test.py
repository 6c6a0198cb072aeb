"""The Python of a page of docs/ runs: each block by torchrun, with 2 ranks.

usage: PYTHONPATH=build/python python tests/python/docs_test.py PAGE [--frameworks [--install FOLDER]]

Blocks that import a framework run only with --frameworks, if it is installed. --install creates a virtual environment
with all frameworks in FOLDER, which requires access to pip's index, and runs the blocks there.
"""

import argparse
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

FRAMEWORKS = ("accelerate", "transformers", "lightning")
SKIPPED = 77


def framework_of(block):
    found = re.search(rf"^(?:from|import) ({'|'.join(FRAMEWORKS)})\b", block, re.M)
    return found[1] if found else None


def environment(folder):
    """The Python of an environment with the frameworks. It sees this one's packages, because they bring no torch."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        packages = next(folder.glob("lib/python*/site-packages"))
        (packages / "beside.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *FRAMEWORKS], check=True)
    return python


def run(python, block, title):
    with tempfile.TemporaryDirectory() as folder:
        program = pathlib.Path(folder) / "program.py"
        program.write_text(block, encoding="utf-8")
        paths = [os.path.abspath(path) for path in os.environ.get("PYTHONPATH", "").split(":") if path]
        subprocess.run([python, "-B", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program],
                       check=True, timeout=300, cwd=folder, env={**os.environ, "PYTHONPATH": ":".join(paths)})
    print(title, "ran", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=pathlib.Path)
    parser.add_argument("--frameworks", action="store_true")
    parser.add_argument("--install", type=pathlib.Path)
    arguments = parser.parse_args()
    blocks = re.findall(r"^```python\n(.*?)^```", arguments.page.read_text(encoding="utf-8"), re.M | re.S)
    python = environment(arguments.install.absolute()) if arguments.install else sys.executable
    ran, missing = 0, []
    for number, block in enumerate(blocks, 1):
        framework = framework_of(block)
        if bool(framework) != arguments.frameworks:
            continue
        if framework and not arguments.install and importlib.util.find_spec(framework) is None:
            missing.append(framework)
            continue
        run(python, block, f"block {number} of {arguments.page.name}")
        ran += 1
    if missing:
        print(f"skipped: {sys.prefix} lacks {', '.join(dict.fromkeys(missing))}; `{sys.executable} {' '.join(sys.argv)} --install "
              "build/frameworks` installs and runs them")
    if ran == 0:
        raise SystemExit(SKIPPED if missing else f"{arguments.page} has no such Python: what is this test for?")


main()
