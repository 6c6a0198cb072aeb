"""lockstep schedule show: its output, drawings and errors.

usage: schedule_test.py PROGRAM
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

PROGRAM = sys.argv[1]


def show(*arguments, status=0):
    run = subprocess.run([PROGRAM, "schedule", "show", *map(str, arguments)], capture_output=True, text=True)
    assert run.returncode == status, (arguments, run)
    return run.stdout if status == 0 else run.stderr


def main():
    for p, m in ((2, 4), (4, 8), (3, 9)):
        for name, idle in (("1f1b", (p - 1) / (m + p - 1)), ("zbh1", (p - 1) / (3 * m + p - 1)), ("zbv", (p - 1) / (6 * m + p - 1))):
            told = json.loads(show(name, "-p", p, "-m", m, "--json"))
            assert abs(told["bubble"] - idle) < 1e-12, told
            assert len(told["actions"]) == p and len(told["peak_activations"]) == len(told["rank_of_stage"]), told
    lines = show("1f1b", "-p", 2, "-m", 2).splitlines()
    assert lines[-2:] == ["rank 0  F0 F1       B0       B1", "rank 1     F0 B0    F1 B1"], lines
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        picture, own = folder / "a.svg", folder / "a<b&c.csv"
        show("zbv", "-p", 2, "-m", 4, "--svg", picture)
        drawn = xml.etree.ElementTree.parse(picture).getroot()
        assert len(drawn.findall("{http://www.w3.org/2000/svg}rect")) == 1 + 2 * 6 * 4
        # It reads its own output.
        own.write_text(show("zbh1", "-p", 3, "-m", 6, "--transfers", "--csv"))
        assert show("--file", own, "--csv", "--svg", picture) == own.read_text()
        assert "a<b&c.csv" in "".join(xml.etree.ElementTree.parse(picture).getroot().itertext())
        # The time of a transfer counts: there and back, across one boundary.
        free, dear = (json.loads(show("gpipe", "-p", 2, "-m", 1, "--json", "--times", f"1,1,1,{t}"))["makespan"] for t in (0, 5))
        assert dear - free == 10, (free, dear)
        own.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
        error = show("--file", own, status=2)
        assert "rank 0 waits in 0B0 for 1B0" in error and "rank 1 waits in 1F1 for 0F1" in error, error
        assert "cannot read" in show("--file", folder / "none.csv", status=2)
        assert "cannot write" in show("1f1b", "--svg", folder / "none" / "a.svg", status=2)
    assert "unknown schedule 'two'" in show("two", status=2)
    assert "missing schedule" in show(status=2)
    assert "expected at least 8 micro-batches" in show("dualpipev", "-p", 4, "-m", 7, status=2)
    print("passed")


if __name__ == "__main__":
    main()
