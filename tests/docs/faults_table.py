"""What was measured by tests/faults/faults.py as a page, beside torchrun.

usage: faults_table.py check PAGE | write RESULTS... PAGE

RESULTS are the files that faults.py wrote, of all parts or of each part: build/test-results/faults*.json. `write` keeps
what was measured for the rows of PAGE that are not in them. `check` fails where PAGE lacks a row for a fault that is
tested, or says something else of what must show and until when; it does not look at numbers, which differ from run to
run.
"""
import json
import pathlib
import re
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
  processors. Other tests may run beside them, so times include what it takes to get a processor. "A host" is a network
  namespace.
- After each job the harness looks for processes, sockets of the control plane, listening ports and entries of /dev/shm;
  none may be left.
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


def cells_of(page):
    """The cells of the page's row of each fault and number of ranks."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")] if page.exists() else []
    rows = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {tuple(cells[:2]): cells for cells in rows}


def tested():
    """The first four cells of each row: the fault, its ranks, what must show, until when."""
    return [[fault.name, str(ranks), fault.must, fault.measures] for fault in faults.FAULTS for ranks in fault.ranks]


def rows_of(files):
    """Those of all files, and how many processors there were. Of a row that several files have, the newest counts."""
    rows, processors = {}, 0
    for path in sorted(files, key=lambda path: path.stat().st_mtime):
        data = json.loads(path.read_text())
        processors = data["processors"]
        rows |= {(row["fault"], str(row["ranks"])): row for row in data["rows"]}
    return rows, processors


def about_kills(rows, page):
    """Of all kills together, or what the page says where not all were run."""
    keys = [(fault.name, str(ranks)) for fault in faults.FAULTS for ranks in fault.ranks
            if fault.name.startswith("kill -9 of a rank")]
    said = re.search(r"In all phases together: (.*)\.$", page.read_text(), re.M) if page.exists() else None
    if said and not all(key in rows for key in keys):
        return said[1]
    figures = harness.summary([value for key in keys if key in rows for value in rows[key]["values"]])
    if not figures:
        return "none"
    median, p99, most = (f"{figures[key]:.3f}" for key in ("median", "p99", "max"))
    return f"{figures['count']} kills, median {median}, p99 {p99}, max {most} s"


def write(files, page):
    rows, processors = rows_of(files)
    torchrun = json.loads((FAULTS / "torchrun.json").read_text())
    text = HEAD.format(kills=about_kills(rows, page), processors=processors, torch=torchrun["torch"],
                       limit=torchrun["limit"])
    before = cells_of(page)
    for cells in tested():
        key = tuple(cells[:2])
        if row := rows.get(key):
            cells += [measured(row), of_torchrun(row, torchrun)]
        elif key in before:
            cells += before[key][4:]
        else:
            continue
        text += "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
    page.write_text(text)


def check(page):
    present = cells_of(page)
    wrong = 0
    for cells in tested():
        row = present.get(tuple(cells[:2]))
        if row is None or row[2:4] != cells[2:4]:
            wrong += 1
            print(f"{page.name}: expected a row that begins with {cells}, got {row[:4] if row else 'none'}")
    if wrong:
        print("./dev docs writes the table anew, from a run of the tests `faults.*`")
    return 1 if wrong else 0


def main():
    if sys.argv[1] == "write":
        *files, page = map(pathlib.Path, sys.argv[2:])
        write(files, page)
        return 0
    return check(pathlib.Path(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(main())
