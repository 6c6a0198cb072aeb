"""What was measured by tests/faults/faults.py as a page, beside torchrun.

usage: faults_table.py check PAGE | write RESULTS PAGE

RESULTS is build/test-results/faults.json. `check` fails where PAGE lacks a row for a fault that is tested; it does not
look at numbers, which differ from run to run.
"""
import json
import pathlib
import sys

FAULTS = pathlib.Path(__file__).resolve().parent.parent / "faults"
sys.path.insert(0, str(FAULTS))
import faults  # noqa: E402
import harness  # noqa: E402

HEAD = """# Faults

What happens when something goes wrong, measured. `tests/faults/faults.py` starts real jobs with `lockstep run`, injects
each fault from outside (`kill -9`, `SIGSTOP`, a cable pulled between two network namespaces, ...) and checks what must
show; a test fails where it does not. The table is written from such a run by `./dev docs`.

How it was measured:

- Seconds, from the injection to what the column "until" says, on CLOCK_MONOTONIC, which the harness and the ranks
  share. Where a fault was injected several times: median / p99 / max. Ratios are marked with x.
- Kills come at random times. In all phases together: {kills}.
- Ranks are LibTorch processes that train in shared memory (between hosts on gloo), all on one machine with {processors}
  processors, so times include what it takes to get a processor. "A host" is a network namespace.
- After each job the harness looks for processes, sockets of the control plane, listening ports and entries of /dev/shm
  that are left; none may be there 2 s later.
- torchrun: the same injections (`tests/faults/torchrun_faults.py`) on the same machine, PyTorch {torch}, gloo, one run
  each, so they are orders of magnitude; each wait was ended after {limit} s. Where the survivors' errors count, so does
  the end of a rank that its launcher ended first.

| fault | ranks | must show | until | measured | torchrun |
|---|---|---|---|---|---|
"""


def number(value, ratio):
    if ratio:
        return f"{value:.2f}x"
    return f"{value:.3f}" if value < 1 else f"{value:.2f}"


def measured(result):
    if "skipped" in result:
        return "not run: " + result["skipped"]
    figures = result["figures"]
    if result["problems"]:
        return "**failed**"
    if not figures:
        return ""
    keys = ["median"] if figures["count"] == 1 else ["median", "p99", "max"]
    ratio = "during / before" in result["measures"]
    return " / ".join(number(figures[key], ratio) for key in keys)


def of_torchrun(result, torchrun):
    if result["torchrun"] == "-":
        return ""
    cell = torchrun["rows"].get(result["torchrun"], {}).get(str(result["ranks"]))
    if not cell:
        return ""
    ratio = "during / before" in result["measures"]
    value = number(cell["value"], ratio) if cell["value"] is not None else ""
    if cell["value"] is None and not cell["remark"].startswith(("let in", "no line", "changed")):
        value = f"> {torchrun['limit']} s"
    return ", ".join(part for part in (value, cell["remark"]) if part)


def write(results, page):
    data = json.loads(results.read_text())
    torchrun = json.loads((FAULTS / "torchrun.json").read_text())
    kills = [v for row in data["rows"] if row["fault"].startswith("kill -9 of a rank") for v in row["values"]]
    figures = harness.summary(kills)
    median, p99, most = (f"{figures[key]:.3f}" for key in ("median", "p99", "max"))
    all_kills = f"{figures['count']} kills, median {median}, p99 {p99}, max {most} s"
    text = HEAD.format(kills=all_kills, processors=data["processors"], torch=torchrun["torch"],
                       limit=torchrun["limit"])
    for row in data["rows"]:
        cells = [row["fault"], row["ranks"], row["must"], row["measures"], measured(row), of_torchrun(row, torchrun)]
        text += "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |\n"
    page.write_text(text)


def check(page):
    rows = [line.strip("|").split("|") for line in page.read_text().splitlines() if line.startswith("|")]
    present = {(cells[0].strip(), cells[1].strip()) for cells in rows}
    missing = [f"{fault.name} ({ranks} ranks)" for fault in faults.FAULTS for ranks in fault.ranks
               if (fault.name, str(ranks)) not in present]
    for each in missing:
        print(f"{page.name} has no row for: {each}")
    if missing:
        print("./dev docs writes the table anew, from a run of the test `faults`")
    return 1 if missing else 0


def main():
    if sys.argv[1] == "write":
        write(pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3]))
        return 0
    return check(pathlib.Path(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(main())
