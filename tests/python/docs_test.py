"""The Python of a page of docs/ runs: each block by torchrun, with 2 ranks.

usage: PYTHONPATH=build/python python tests/python/docs_test.py PAGE
"""

import pathlib
import re
import subprocess
import sys
import tempfile

page = pathlib.Path(sys.argv[1])
blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
if not blocks:
    raise SystemExit(f"{page} has no Python: what is this test for?")
with tempfile.TemporaryDirectory() as folder:
    for number, block in enumerate(blocks, 1):
        program = pathlib.Path(folder) / f"block_{number}.py"
        program.write_text(block, encoding="utf-8")
        subprocess.run([sys.executable, "-B", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", program],
                       check=True, timeout=300)
        print(f"block {number} of {page.name} ran")
