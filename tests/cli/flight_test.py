"""The flight record of real jobs that fail: what `lockstep run` saves and prints, and what `lockstep trace flight` prints.

usage: flight_test.py LOCKSTEP PROBE
"""

import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent / "support"))
from ports import free_port  # noqa: E402

LOCKSTEP, PROBE = sys.argv[1:3]
TEMPORARY = tempfile.TemporaryDirectory(prefix="flight-test-")
FOLDER = pathlib.Path(TEMPORARY.name)
SOURCE = (pathlib.Path(__file__).parent / "flight_probe.cpp").read_text().splitlines()


def site(text, nth=0):
    lines = [number for number, line in enumerate(SOURCE, 1) if text in line]
    return f"flight_probe.cpp:{lines[nth]}"


def lockstep(*arguments, status=0, environment=None):
    run = subprocess.run(
        [LOCKSTEP, *map(str, arguments)], capture_output=True, text=True, timeout=300, env={**os.environ, **(environment or {})}
    )
    assert status is None or (run.returncode != 0 if status == "some" else run.returncode == status), (arguments, run)
    return run.stdout + run.stderr


def fail(ranks, *what, options=(), backend="auto"):
    """Runs a job that ends that way; returns its record, after checking the line about it."""
    file = FOLDER / f"{'-'.join(map(str, what))}-{ranks}-{backend}.json"
    output = lockstep("run", "-q", "-n", ranks, "--flight-record", file, *options, PROBE, *what, backend, status="some")
    lines = [line for line in output.splitlines() if line.startswith("lockstep: flight record in ")]
    assert len(lines) == 1, output
    record = json.loads(file.read_text())
    assert lines[0] == f"lockstep: flight record in {file}: {record['verdict']['text']}", (lines, record["verdict"])
    assert lockstep("trace", "flight", file).splitlines()[0] == record["verdict"]["text"]
    assert [rank["rank"] for rank in record["ranks"]] == list(range(ranks))
    for rank in record["ranks"]:
        check_rank(record, rank)
    return record


def check_rank(record, rank):
    """Each group's operations are numbered consecutively, and times increase."""
    names = {group["key"]: group["name"] for group in record["groups"]}
    assert len(rank["operations"]) == min(1000, rank["operations_begun"]), rank["rank"]
    last = {}
    for operation in rank["operations"]:
        assert operation["group"] in names, operation
        assert operation["site"].startswith("flight_probe.cpp:"), operation
        assert operation["ended_ns"] is None or operation["ended_ns"] >= operation["began_ns"], operation
        kind = (operation["group"], "peer" in operation)
        assert last.setdefault(kind, operation["sequence"] - 1) == operation["sequence"] - 1, (rank["rank"], operation)
        last[kind] = operation["sequence"]


def a_killed_rank():
    for ranks in (2, 4):
        record = fail(ranks, "kill", 1, 700, options=["--timeout", "20s"])
        verdict, killed = record["verdict"], record["ranks"][1]
        assert verdict["ranks"] == [1] and verdict["kind"] in ("did_not_come", "ended"), verdict
        assert killed["ended"]["signal"] == 9 and record["failure"]["rank"] == 1, killed
        # 700 whole steps, each with a broadcast and an all_reduce of the world and one of the pair, after one for the split.
        last = killed["operations"][-1]
        assert killed["operations_begun"] == (2101 if ranks == 4 else 2100) and last["step"] == 699, last
        assert last["sequence"] == (1400 if ranks == 4 else 2099), last
        assert all(operation["ended_ns"] for operation in killed["operations"]), killed
        assert "signal 9 (SIGKILL)" in verdict["text"] and verdict["site"] == site("AVG", 1), verdict


def a_rank_killed_inside_an_operation():
    record = fail(4, "kill-inside", 2, 10)
    last = record["ranks"][2]["operations"][-1]
    assert last["ended_ns"] is None and last["site"] == site("auto work"), last
    assert record["verdict"]["ranks"] == [2] and record["ranks"][2]["ended"]["signal"] == 9, record["verdict"]


def a_rank_that_makes_another_call():
    # Gloo does not compare calls: only the record shows the difference.
    for backend in ("gloo", "shm"):
        record = fail(4, "other", 2, 20, options=["--timeout", "3s"], backend=backend)
        verdict = record["verdict"]
        assert verdict["kind"] == "differs" and verdict["ranks"] == [2], verdict
        assert verdict["operation"] == "all_reduce" and verdict["sequence"] == 41, verdict
        assert verdict["site"] == site("op = lockstep::ReduceOp::MAX", 0), verdict
        assert re.fullmatch(
            r"rank 2 diverged first: all_reduce #41 of group 'world' \(float32, 100 elements, max\) at "
            rf"{verdict['site']}, where all other ranks called broadcast \(float32, 100 elements, root 0\) at "
            + site("group.broadcast"),
            verdict["text"],
        ), verdict
    record = fail(2, "other", 1, 20, options=["--timeout", "3s"], backend="gloo")
    assert record["verdict"]["ranks"] == [0, 1] and record["verdict"]["kind"] == "differs", record["verdict"]


def a_rank_that_leaves_a_step_out():
    # All ranks make the same calls until the peers lack one step: then it is the one that has left.
    record = fail(4, "skip", 3, 20, options=["--timeout", "5s"], backend="gloo")
    verdict = record["verdict"]
    assert verdict["kind"] == "did_not_come" and verdict["ranks"] == [3], verdict
    assert record["ranks"][3]["ended"] == {"text": "exited with status 0", "status": 0}, record["ranks"][3]["ended"]
    assert "it exited with status 0" in verdict["text"], verdict
    assert re.search(r"or earlier it was at a different step: (\d+), while rank \d was at (\d+)$", verdict["text"]), verdict


def a_rank_that_leaves_early():
    record = fail(2, "leave", 1, 5)
    verdict = record["verdict"]
    assert verdict["kind"] == "did_not_come" and verdict["ranks"] == [1], verdict
    assert verdict["operation"] == "broadcast" or verdict["operation"] == "all_reduce", verdict
    assert "where rank 0 waited; its last operation was all_reduce #14" in verdict["text"], verdict


def an_exception():
    record = fail(4, "throw", 2, 5)
    assert record["verdict"]["ranks"] == [2] and "the probe's own words" in record["failure"]["text"], record["failure"]
    assert "the probe's own words" in record["ranks"][2]["error"], record["ranks"][2]


def a_deadline():
    record = fail(4, "sleep", 3, 5, options=["--timeout", "2s"])
    verdict = record["verdict"]
    assert verdict["ranks"] == [3] and verdict["kind"] == "did_not_come", verdict
    assert "SIGTERM" not in verdict["text"], verdict


def a_message_without_partner():
    record = fail(2, "recv", 0, 5, options=["--timeout", "2s"])
    text = record["verdict"]["text"]
    # Both are true, and rank 0 waits first.
    assert record["verdict"]["kind"] in ("no_partner", "did_not_come"), text
    waits = record["ranks"][0]["operations"][-1]
    assert waits["operation"] == "recv" and waits["peer"] == 1 and waits.get("failed"), waits


def several_hosts():
    port = free_port()
    key = FOLDER / "job.key"
    lockstep("key", "--output", key)
    files = [FOLDER / f"host-{node}.json" for node in (0, 1)]
    runs = [
        subprocess.Popen(
            [LOCKSTEP, "run", "-q", "-n", "2", "--nnodes", "2", "--node-rank", str(node), "--master", f"127.0.0.1:{port}"]
            + ["--key-file", key, "--flight-record", files[node], PROBE, "kill", "3", "20"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in (0, 1)
    ]
    try:
        outputs = [run.communicate(timeout=300)[0] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert "flight record" in outputs[0] and "flight record" not in outputs[1], outputs
    assert not files[1].exists()
    record = json.loads(files[0].read_text())
    assert record["verdict"]["ranks"] == [3] and len(record["ranks"]) == 4, record["verdict"]
    assert record["ranks"][3]["ended"]["signal"] == 9 and record["ranks"][3]["operations_begun"] == 61


def where_it_goes():
    good = lockstep("run", "-q", "-n", 2, "--flight-record", FOLDER / "good.json", PROBE, "nothing", 0, 0)
    assert "flight" not in good and not (FOLDER / "good.json").exists(), good
    logs = FOLDER / "logs"
    output = lockstep("run", "-q", "-n", 2, "--log-dir", logs, "--max-restarts", 1, PROBE, "leave", 1, 5, status="some")
    assert f"flight record in {logs}/flight.json: " in output, output
    assert (logs / "flight.restart-1.json").exists() and json.loads((logs / "flight.restart-1.json").read_text())["attempt"] == 1
    temporary = FOLDER / "temporary"
    temporary.mkdir()
    environment = {"TMPDIR": str(temporary)}
    output = lockstep("run", "-q", "-n", 2, PROBE, "leave", 1, 5, status="some", environment=environment)
    (file,) = temporary.iterdir()
    assert f"flight record in {file}: " in output and file.stat().st_mode & 0o777 == 0o600, output
    file.unlink()
    for off in ({"LOCKSTEP_FLIGHT_RECORD": "none"}, {"LOCKSTEP_FLIGHT_RECORD": str(FOLDER / "by-variable")}):
        output = lockstep("run", "-q", "-n", 2, PROBE, "leave", 1, 5, status="some", environment={**environment, **off})
        assert not list(temporary.iterdir()), output
    assert (FOLDER / "by-variable").exists()
    output = lockstep("run", "-n", 2, "--flight-record", "/no/such/folder/f", PROBE, "leave", 1, 5, status=2)
    assert "--flight-record: expected a file in an existing directory, got '/no/such/folder/f'" in output, output
    output = lockstep("run", "-q", "-n", 2, "sh", "-c", "exit 3", status=3, environment=environment)
    assert "flight" not in output and not list(temporary.iterdir()), "no rank has joined"


def what_is_printed():
    file = FOLDER / "leave-1-5-2-auto.json"
    lines = lockstep("trace", "flight", file, "--rank", 1, "--last", 3).splitlines()
    assert lines[1].startswith("the job's failure: rank 1 (pid "), lines
    assert re.match(r"rank 1 \(pid \d+\) exited with status 0, 15 operations", lines[3]), lines
    assert lines[4].split() == ["began", "took", "step", "operation", "group", "what", "where"], lines
    assert len(lines) == 8 and not any(line.startswith("rank 0") for line in lines[1:]), lines
    assert re.fullmatch(
        r"  \d\d:\d\d:\d\d\.\d{6} +[\d.]+ (?:us|ms|s) 4 +all_reduce #14 world +float32, 100 elements, avg +" + site("AVG", 1), lines[7]
    ), lines
    lines = lockstep("trace", "flight", file).splitlines()
    assert len([line for line in lines if re.match(r"  \d\d:\d\d:", line)]) == 10, lines
    assert [line for line in lines if line.startswith("  error: broadcast #15 on group 'world' failed on rank 0 of 2")], lines
    (FOLDER / "other.json").write_text('{"a": 1}')
    (FOLDER / "empty").write_text("")
    for arguments, words in (
        (["nowhere"], "cannot read 'nowhere': no such file"),
        ([FOLDER], "it is a directory"),
        ([FOLDER / "empty"], "is empty"),
        ([FOLDER / "other.json"], 'is not a flight record of lockstep run: missing "lockstep_flight_record"'),
        ([PROBE], ": not JSON"),
        ([file, "--rank", 7], f"--rank: expected one of the ranks in '{file}': 0, 1, got '7'"),
    ):
        assert words in lockstep("trace", "flight", *arguments, status=2), arguments
    assert "--last" in lockstep("trace", "flight", file, "--last", "-1", status=2)


def main():
    # Two at a time: tests that wait for a deadline leave the processors to others.
    tests = (
        a_rank_that_makes_another_call,
        where_it_goes,
        a_rank_that_leaves_a_step_out,
        a_rank_that_leaves_early,
        a_deadline,
        a_killed_rank,
        a_message_without_partner,
        a_rank_killed_inside_an_operation,
        an_exception,
        several_hosts,
    )
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for test, run in [(test, pool.submit(test)) for test in tests]:
            run.result()
            print(test.__name__, flush=True)
    what_is_printed()  # of the record of a_rank_that_leaves_early


if __name__ == "__main__":
    main()
