"""Kill a rank in the middle of a schedule: every other rank of the pipeline must immediately get an error that names it.

usage: pipeline_death_test.py LOCKSTEP PIPELINE_VICTIM
"""

import pathlib
import subprocess
import sys
import tempfile

lockstep, victim = sys.argv[1:]
for schedule in ("gpipe", "1f1b", "zbh1"):
    for where in ("forward", "backward"):
        with tempfile.TemporaryDirectory() as folder:
            # A rank that is not notified waits for its deadline, which is 30 minutes.
            done = subprocess.run([lockstep, "run", "-n", "3", "--prefix", "never", victim, folder, schedule, where], capture_output=True,
                                  text=True, timeout=200)
            told = {path.name: path.read_text() for path in pathlib.Path(folder).iterdir()}
        if done.returncode != 137 or set(told) != {"0", "2"}:
            sys.exit(f"{schedule}, {where}: status {done.returncode}, errors: {told}\n{done.stderr}")
        for rank, text in told.items():
            if "rank 1 (pid" not in text or "SIGKILL" not in text:
                sys.exit(f"{schedule}, {where}: rank {rank} got: {text}")
        print(f"{schedule}, {where}: {told['0']}")
