"""Ranks of PyTorch, for tests that compare with them."""

import os
import socket
import subprocess
import sys


def start_ranks(script, ranks, *arguments, **options):
    """The script with --rank and the arguments, once for each; torch.distributed finds the others."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    return [subprocess.Popen([sys.executable, script, "--rank", *map(str, arguments)],
                             env=os.environ | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                                               "OMP_NUM_THREADS": "1"}, **options) for rank in range(ranks)]
