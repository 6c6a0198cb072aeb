"""The results of the conformance suite as a table: collective by transport by number of ranks.

usage: conformance_table.py check|write RESULTS PAGE

RESULTS is the folder of GoogleTest's JSON files (build/test-results). `write` writes the results to PAGE and keeps those
of tests that did not run. `check` fails if PAGE differs from this run.
"""
import json
import pathlib
import re
import sys

HEAD = """# Conformance

One suite, `tests/comm/conformance_test.cpp`, runs on every transport. It compares each collective with a reference
computed on one rank, for every dtype that LibTorch trains with, every reduction that the dtype supports, and
non-contiguous and empty tensors. A cell lists the numbers of ranks with which the test passed. `./dev docs` writes the
table from a test run, and a test compares it with each later run.

"""
FOOT = """
- `hierarchy` is shared memory inside hosts and gloo between them (`shm+gloo`), with each half of the ranks on a
  different simulated host (`LOCKSTEP_NODES`). tests/faults/two_hosts.py runs the same suite between network namespaces,
  with 2+2, 1+1, 2+2+2, 4+4, 2+2+2+2, 2+1 and 3+1 ranks; ctest also runs it with MPI instead of gloo.
- `mismatch` tests run with `LOCKSTEP_CHECK=1`, except on threads.
- `interrupt` tests have 2 ranks, one of which never makes the call or is stopped by a signal in it. They require that
  the waiting call and ~World return within 1 s after the failure is reported. A peer that is a thread cannot be stopped
  inside a call. On cuda_ipc the operation completes before a signal can stop a peer inside it.
- `large` tests use tensors above 2^31 bytes.
- nccl was tested with one GPU, and NCCL does not support two ranks on one GPU. All cuda_ipc ranks shared that GPU.
"""
ORDER = ["threads", "shm", "hierarchy", "gloo", "openmpi", "mpich", "nccl", "cuda_ipc"]


def read_results(folder):
    """{row: {transport: {ranks, ...}}}, rows in the order of the suite."""
    rows = {}
    for path in sorted(pathlib.Path(folder).glob("*.json")):
        match = re.fullmatch(r"(conformance|mismatch|interrupt|large)\.([a-z_]+)(?:\.(\w+))?\.json", path.name)
        if not match:
            continue
        kind, transport, detail = match.groups()
        ranks = int(detail) if detail and detail.isdigit() else 2
        for suite in json.loads(path.read_text()).get("testsuites", []):
            for case in suite["testsuite"]:
                if case.get("result") != "COMPLETED" or case.get("failures"):
                    continue
                row = case["name"] if kind == "conformance" else f"{kind}: {case['name']}"
                rows.setdefault(row.replace("_", " "), {}).setdefault(transport, set()).add(ranks)
    return rows


def read_page(path):
    rows = {}
    if not path.exists():
        return rows
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    transports = [cell.strip() for cell in lines[0].strip("|").split("|")][1:] if lines else []
    for line in lines[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        rows[cells[0]] = {t: set(map(int, c.split())) for t, c in zip(transports, cells[1:]) if c}
    return rows


def kind_of(row):
    return row.split(":")[0] if ":" in row else ""


def set_of(row):
    """The tests that run together: an interrupt test runs alone, the others in one program."""
    return row if kind_of(row) == "interrupt" else kind_of(row)


def sort_key(row):
    return (["", "large", "mismatch", "interrupt"].index(kind_of(row)), row)


def write_page(path, rows):
    transports = [t for t in ORDER if any(t in columns for columns in rows.values())]
    text = HEAD + "| | " + " | ".join(transports) + " |\n|---|" + "---|" * len(transports) + "\n"
    for row in sorted(rows, key=sort_key):
        cells = [" ".join(map(str, sorted(rows[row].get(t, ())))) for t in transports]
        text += f"| {row} | " + " | ".join(cells) + " |\n"
    path.write_text(text + FOOT)


def main():
    mode, results, page = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
    run, known = read_results(results), read_page(page)
    ran = {(set_of(row), t, n) for row, columns in run.items() for t, ranks in columns.items() for n in ranks}
    if mode == "write":
        for row, columns in known.items():
            for transport, ranks in columns.items():
                kept = {n for n in ranks if (set_of(row), transport, n) not in ran}
                if kept:
                    run.setdefault(row, {}).setdefault(transport, set()).update(kept)
        write_page(page, run)
        return 0
    if not run:
        print("no results: run the conformance tests first")
        return 1
    differences = 0
    for row in sorted(set(run) | set(known), key=sort_key):
        for transport in sorted({t for name, t, _ in ran if name == set_of(row)}):
            counts = {n for name, t, n in ran if (name, t) == (set_of(row), transport)}
            now = run.get(row, {}).get(transport, set())
            then = known.get(row, {}).get(transport, set()) & counts
            if now != then:
                differences += 1
                print(f"{page.name}: '{row}' on {transport}: expected {sorted(then)}, got {sorted(now)}")
    if differences:
        print("./dev docs writes the table")
    return 1 if differences else 0


sys.exit(main())
