"""Starts ranks of PyTorch, for tests that compare with them."""

import os
import pathlib
import subprocess
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "support"))
from ports import free_port  # noqa: E402


def start_ranks(script, ranks, *arguments, **options):
    """Start the script once per rank, with --rank and the arguments. The ranks find each other through torch.distributed."""
    port = free_port()
    return [subprocess.Popen([sys.executable, script, "--rank", *map(str, arguments)],
                             env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                                               "OMP_NUM_THREADS": "1"}, **options) for rank in range(ranks)]
