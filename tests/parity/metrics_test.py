"""Check that files written by World::log_metric can be read by Python's json and csv and by TensorBoard.

metrics_test.py LOCKSTEP STEPS_PROBE
"""
import csv
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile

LOCKSTEP, PROBE = (os.path.abspath(each) for each in sys.argv[1:3])
STEPS = 6


def run(command, status=0, cwd=None, **variables):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, timeout=200)
    assert (done.returncode == 0) == (status == 0), (command, done.returncode, done.stdout, done.stderr)
    return done.stdout + done.stderr


def ranks(count, *options):
    return [LOCKSTEP, "run", "-q", "-n", str(count), *options]


def check(rows, rank):
    losses = [row for row in rows if row["name"] == "loss"]
    assert [row["step"] for row in losses] == list(range(STEPS)), losses
    for row in losses:
        if row["step"] == 3:
            assert row["value"] is None or math.isnan(row["value"]), row
        else:
            assert row["value"] == 1 / (1 + row["step"]), row
        assert row["rank"] == rank and row["time"] > 1.7e9, row
    other = [row for row in rows if row["name"] == 'rate, "of" rank']
    assert [row["step"] for row in other] == [1000 + step for step in range(STEPS)], other
    assert all(row["value"] == rank + 0.25 for row in other), other
    assert len(rows) == STEPS * (3 if rank == 0 else 2), len(rows)


def from_csv(path):
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            yield {"time": float(row["time"]), "rank": int(row["rank"]), "step": int(row["step"]), "name": row["name"],
                   "value": float(row["value"])}


def strict(text):  # NaN is not valid JSON.
    def refuse(constant):
        raise ValueError(constant)
    return json.loads(text, parse_constant=refuse)


def test_json_of_three_ranks(folder):
    run(ranks(3, "--metrics", str(folder / "m"), PROBE, str(STEPS), "2", "metrics", "nan"))
    for rank in range(3):
        name = "metrics.jsonl" if rank == 0 else f"metrics.rank-{rank}.jsonl"
        check([strict(line) for line in (folder / "m" / name).read_text().splitlines()], rank)
    assert not list((folder / "m").glob("*.csv"))


def test_csv_and_a_folder_as_seen_from_the_launcher(folder):
    (folder / "elsewhere").mkdir()
    run(ranks(2, "--chdir", "elsewhere", "--metrics", "m", "--metrics-format", "csv", PROBE, str(STEPS), "2", "metrics", "nan"),
        cwd=folder)
    for rank in range(2):
        check(list(from_csv(folder / "m" / ("metrics.csv" if rank == 0 else f"metrics.rank-{rank}.csv"))), rank)


def test_alone_and_again(folder):
    for _ in range(2):  # The second run appends to the file.
        run([PROBE, str(STEPS), "1", "metrics", "nan"], LOCKSTEP_METRICS=str(folder), LOCKSTEP_METRICS_FORMAT="csv")
    rows = list(from_csv(folder / "metrics.csv"))
    check(rows[:len(rows) // 2], 0)
    check(rows[len(rows) // 2:], 0)
    assert len(list(folder.glob("events.out.tfevents.*"))) == 2


def test_nothing_is_written_unless_asked_for(folder):
    run(ranks(2, PROBE, str(STEPS), "1", "metrics"), cwd=folder)
    assert not list(folder.iterdir())


def test_refusals(folder):
    (folder / "file").write_text("")
    said = run(ranks(2, "--metrics", str(folder / "file" / "m"), PROBE, "1", "1"), status=1)
    assert "--metrics: cannot create directory" in said and "Not a directory" in said, said
    said = run([PROBE, "1", "1"], status=1, LOCKSTEP_METRICS=str(folder / "file"))
    assert "metrics: cannot create directory" in said, said
    said = run(ranks(2, "--metrics-format", "xml", PROBE, "1", "1"), status=1)
    assert "--metrics-format: expected jsonl or csv, got 'xml'" in said, said
    said = run(ranks(2, PROBE, "1", "1"), status=1, LOCKSTEP_METRICS="/proc/none")
    assert "cannot create directory '/proc/none'" in said, said


def test_tensorboard_reads_it(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    run(ranks(2, "--metrics", str(folder), PROBE, str(STEPS), "2", "metrics", "nan"))
    for rank in range(2):
        run_folder = folder if rank == 0 else folder / f"rank-{rank}"
        (file,) = run_folder.glob("events.out.tfevents.*")
        accumulator = EventAccumulator(str(file))
        accumulator.Reload()
        tags = accumulator.Tags()["scalars"] + accumulator.Tags()["tensors"]
        assert set(tags) == {"loss", 'rate, "of" rank'} | ({"samples"} if rank == 0 else set()), accumulator.Tags()
        losses = accumulator.Scalars("loss")
        assert [event.step for event in losses] == list(range(STEPS)), losses
        for event in losses:
            expected = 1 / (1 + event.step)
            assert math.isnan(event.value) if event.step == 3 else abs(event.value - expected) < 1e-7, event
            assert event.wall_time > 1.7e9
        assert [event.step for event in accumulator.Scalars('rate, "of" rank')] == [1000 + s for s in range(STEPS)]
        assert accumulator.file_version == 2.0, accumulator.file_version

    # Like the TensorBoard program: all runs below a folder, by name.
    from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    assert set(multiplexer.Runs()) == {".", "rank-1"}, multiplexer.Runs()


def main():
    skipped = False
    for name, test in list(globals().items()):
        if not name.startswith("test_"):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                test(pathlib.Path(folder))
            except ModuleNotFoundError as error:
                if error.name != "tensorboard":
                    raise
                print(f"skipped {name}: tensorboard is not installed")
                skipped = True
                continue
        print(f"{name}: passed")
    return 77 if skipped else 0


sys.exit(main())
