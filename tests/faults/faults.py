"""Injects faults into jobs started by `lockstep run`, and measures the consequences.

usage: faults.py --lockstep PROGRAM --victim PROGRAM [--store-probe PROGRAM] [--library FILE] [--results FILE]
                 [--part kill|rank|launcher|joining|host] [--full] [--only REGEX] [--ranks N] [--seed N] [--list]

Each fault of the table FAULTS is one row of docs/evidence/faults.md. A row's function starts real jobs, injects the fault and
checks what must show. What it measures are seconds from the injection, as seen here; they are shown, and a row fails only
if they are far from what they are on a quiet machine.

Parts may run at the same time, each with results of its own: tests/docs/faults_table.py puts them together.
"""

import argparse
import json
import os
import pathlib
import re
import sys
import time
import traceback

import harness
from case import FAULTS, Case, Skip
from harness import TooLate, now

# Each module fills the table, in the order of the page.
import kill_faults  # noqa: F401
import rank_faults  # noqa: F401
import launcher_faults  # noqa: F401
import joining_faults  # noqa: F401
import host_faults  # noqa: F401

SKIP = 77


def run_fault(each, ranks, options):
    with harness.Lateness() as lateness:
        return run_case(Case(options, ranks, lateness), each, ranks, options)


def run_case(case, each, ranks, options):
    begin = now()
    result = {"fault": each.name, "ranks": ranks, "must": each.must, "measures": each.measures, "limit": each.limit,
              "torchrun": each.torchrun}
    try:
        each.body(case)
    except Skip as reason:
        result["skipped"] = str(reason)
    except TooLate as error:
        case.problems.append(str(error))
    except Exception:
        case.problems.append(traceback.format_exc())
    figures = harness.summary(case.values)
    if figures and each.limit:
        case.within(figures["p99"], each.limit, f"p99 of {figures['count']} until {each.measures}")
    result |= {"allowed": case.allowed(1.0), "figures": figures, "values": [round(v, 4) for v in case.values], "problems": case.problems,
               "notes": case.notes}
    show(each, result, now() - begin)
    return result


def show(each, result, seconds):
    verdict = "skip" if "skipped" in result else "FAIL" if result["problems"] else "ok"
    figures = result["figures"]
    numbers = ("" if not figures else f"median {figures['median']:.3f}, p99 {figures['p99']:.3f}, "
               f"max {figures['max']:.3f} of {figures['count']}: {each.measures}")
    print(f"{verdict:4} {each.name} ({result['ranks']} ranks, {seconds:.1f} s): {numbers}", flush=True)
    for note in result["notes"]:
        print(f"     note: {note}")
    for problem in result["problems"]:
        print(f"     {problem}")
    if "skipped" in result:
        print(f"     {result['skipped']}")
    sys.stdout.flush()


def check_all_kills(results, case_limit=1.0):
    """Of all kills together, as promised."""
    values = [v for r in results if r["fault"].startswith("kill -9 of a rank") for v in r["values"]]
    if not values:
        return True
    figures = harness.summary(values)
    print(f"kill -9 of a rank, all phases: {figures['count']} times, median {figures['median'] * 1000:.1f} ms, p99 "
          f"{figures['p99'] * 1000:.1f} ms, max {figures['max'] * 1000:.1f} ms until the last survivor's error")
    allowed = [r["allowed"] for r in results if r["fault"].startswith("kill -9 of a rank")]
    return figures["p99"] < max([case_limit, *allowed])


def store(results, options):
    """Keeps the rows of the file that were not measured this time."""
    key = {(each.name, ranks): (number, ranks) for number, each in enumerate(FAULTS) for ranks in each.ranks}
    rows = {}
    if options.results.exists():
        rows = {(row["fault"], row["ranks"]): row for row in json.loads(options.results.read_text())["rows"]}
    rows |= {(row["fault"], row["ranks"]): row for row in results}
    ordered = [rows[each] for each in sorted(rows.keys() & key.keys(), key=key.get)]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text(json.dumps({"processors": os.cpu_count(), "rows": ordered}, indent=1))


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("--lockstep", "--victim", "--store-probe", "--library", "--results"):
        parser.add_argument(name, type=pathlib.Path)
    parser.add_argument("--part", choices=list(dict.fromkeys(each.part for each in FAULTS)),
                        help="only the faults of that module")
    parser.add_argument("--full", action="store_true", help="inject each fault more often")
    parser.add_argument("--only", default="", metavar="REGEX", help="only faults whose names match")
    parser.add_argument("--ranks", type=int, help="only with that many ranks")
    parser.add_argument("--seed", default=str(time.time_ns()), help="of the random times")
    parser.add_argument("--list", action="store_true", help="list the faults and exit")
    options = parser.parse_args(argv)
    options.faults = [each for each in FAULTS if options.part in (None, each.part) and re.search(options.only, each.name)]
    return options


def main():
    options = parse(sys.argv[1:])
    if options.list:
        print("\n".join(f"{each.part}: {each.name}" for each in options.faults))
        return 0
    if not options.lockstep or not options.victim or not options.lockstep.exists() or not options.victim.exists():
        print("nothing can be run: the programs are not built")
        return SKIP
    harness.enter_own_namespaces([sys.executable, "-B", *sys.argv])
    print(f"seed {options.seed}, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors, "
          f"{'a network namespace of its own' if harness.have_own_namespaces() else 'sockets shared with others'}")
    results = []
    for each in options.faults:
        results += [run_fault(each, ranks, options) for ranks in each.ranks if options.ranks in (None, ranks)]
    good = check_all_kills(results)
    failed = [r for r in results if r["problems"]]
    if options.results:
        store(results, options)
    print(f"{len(results) - len(failed)} of {len(results)} rows as they must be")
    for result in failed:
        print(f"failed: {result['fault']} ({result['ranks']} ranks)")
    return 0 if good and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
