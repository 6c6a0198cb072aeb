"""Counts the cases and skips of a test run, and compares each suite's time with its budget.

usage: summary.py RESULTS BUDGETS

RESULTS holds ctest.xml and GoogleTest's JSON. Each line of BUDGETS is a prefix of tests' names and seconds; a test
counts for the longest matching prefix.
"""

import glob
import json
import os
import re
import sys
import xml.etree.ElementTree as xml


def print_cases(results, programs):
    passed = sum(p.get("status") == "run" for p in programs)
    # ctest also reports programs that it could not start as skipped. The last line of a skipped program has the reason.
    skips = [(p.get("name"), (p.findtext("system-out") or "").strip().rpartition("\n")[2]) for p in programs
             if p.get("status") == "disabled" or any("SKIP_" in s.get("message", "") for s in p.findall("skipped"))]
    skipped = len(skips)

    # GoogleTest 1.12 leaves the reason for a skip out of its JSON, so it is read from what was printed.
    printed = re.compile(r"Skipped\n(.*?)\n?\[  SKIPPED \] (\S+)", re.S)
    reasons = {name: why for p in programs for why, name in printed.findall(p.findtext("system-out") or "")}

    cases = []
    for path in sorted(glob.glob(f"{results}/*.json")):
        try:
            with open(path, encoding="utf-8", errors="replace") as file:
                suites = json.load(file).get("testsuites", [])
        except ValueError:
            print(f"{path} is not readable: its test program died while writing it")
            continue
        cases += [case for suite in suites for case in suite.get("testsuite", []) if case.get("status") == "RUN"]
    bad = sum(bool(case.get("failures")) for case in cases)
    for case in cases:
        if case.get("result") == "SKIPPED":
            name = f"{case['classname']}.{case['name']}"
            noted = " ".join(s.get("message", "") for s in case.get("skipped", []))
            skips.append((name, noted or reasons.get(name, "")))

    def line(what, total, failed, skipped):
        print(f"{total - failed - skipped} {what} passed, {f'{failed} failed, ' if failed else ''}{skipped} skipped")

    for name, why in skips:
        print(f"skipped {name}: {' '.join(why.split()) or 'no reason given'}")
    line("test cases", len(cases), bad, len(skips) - skipped)
    line("test programs", len(programs), len(programs) - passed - skipped, skipped)


def print_budgets(path, programs):
    if not os.path.exists(path):
        return
    with open(path, encoding="utf-8") as file:
        budgets = {name: float(seconds) for name, seconds in (line.split() for line in file if line.strip())}
    suites = {}
    for program in programs:
        name = max((prefix for prefix in budgets if program.get("name").startswith(prefix)), key=len, default="others")
        count, seconds = suites.get(name, (0, 0.0))
        suites[name] = count + 1, seconds + float(program.get("time") or 0)
    width = max(map(len, ["suite", *suites]))
    print(f"\n{'suite':{width}}  tests  seconds  budget")
    for name, (count, seconds) in sorted(suites.items()):
        budget = budgets.get(name)
        over = "  over budget" if budget is not None and seconds > budget else ""
        print(f"{name:{width}}{count:7}{seconds:9.1f}{'-' if budget is None else f'{budget:.0f}':>8}{over}")


results, budgets = sys.argv[1:]
programs = xml.parse(f"{results}/ctest.xml").getroot().findall("testcase")
if programs:
    print_budgets(budgets, programs)
    print()
    print_cases(results, programs)
