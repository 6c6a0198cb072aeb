"""Writes the measurements of tests/faults/faults.py as a page, with torchrun for comparison.

usage: faults_table.py check PAGE | write RESULTS... PAGE

RESULTS are the files that faults.py wrote, for all parts or for each part: build/test-results/faults*.json. `write` keeps
the measurements of rows of PAGE that are not in them. `check` fails if PAGE lacks a row for a tested fault, or differs in
the columns "must be reported" and "until". It ignores the numbers, which differ from run to run.
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

`tests/faults/faults.py` starts real jobs with `lockstep run`, injects each fault from outside (`kill -9`, `SIGSTOP`, a
cable pulled between two network namespaces, ...) and checks what must be reported. A test fails if it is not. `./dev
docs` writes this table from such a run.

How it was measured:

- Seconds from the injection to the event in the column "until", on CLOCK_MONOTONIC, which the harness and the ranks
  share. For faults injected several times: median / p99 / max. Ratios are marked with x.
- Kills happen at random times. In all phases together: {kills}.
- Ranks are LibTorch processes that train over shared memory (over gloo between hosts), all on one machine with
  {processors} processors. Other tests may run at the same time, so times include waiting for a processor. "A host" is a
  network namespace.
- After each job the harness looks for remaining processes, control-plane sockets, listening ports and entries of
  /dev/shm; there must be none.
- torchrun: the same injections (`tests/faults/torchrun_faults.py`) on the same machine with PyTorch {torch} on gloo,
  one run each, so these are orders of magnitude. Each wait was limited to {limit} s. Where the time is that of the
  survivors' errors, the end of a rank that its launcher terminated first counts too.

| fault | ranks | must be reported | until | measured | torchrun |
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
    if cell["value"] is None and not cell["remark"].startswith(("accepted", "no line", "changed")):
        value = f"> {torchrun['limit']} s"
    return ", ".join(part for part in (value, cell["remark"]) if part)


def cells_of(page):
    """The cells of the page's row of each fault and number of ranks."""
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")] if page.exists() else []
    rows = [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {tuple(cells[:2]): cells for cells in rows}


def tested():
    """The first four cells of each row: the fault, its ranks, what must be reported, until when."""
    return [[fault.name, str(ranks), fault.must, fault.measures] for fault in faults.FAULTS for ranks in fault.ranks]


def rows_of(files):
    """The rows of all files, and the number of processors. If several files have a row, the newest counts."""
    rows, processors = {}, 0
    for path in sorted(files, key=lambda path: path.stat().st_mtime):
        data = json.loads(path.read_text())
        processors = data["processors"]
        rows |= {(row["fault"], str(row["ranks"])): row for row in data["rows"]}
    return rows, processors


def about_kills(rows, page):
    """A summary of all kills, or the one on the page if not all were run."""
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
        print("run the tests `faults.*`, then write the table with ./dev docs")
    return 1 if wrong else 0


def main():
    if sys.argv[1] == "write":
        *files, page = map(pathlib.Path, sys.argv[2:])
        write(files, page)
        return 0
    return check(pathlib.Path(sys.argv[2]))


if __name__ == "__main__":
    sys.exit(main())
