"""Check that the compiler rejects misuse with one clear error each.

usage: refused_code_test.py SOURCE compile_commands.json

Compiles SOURCE once, with the flags of the build. Each line that ends in "// refused: TEXT" must cause one error that
contains TEXT; there must be no other errors.
"""

import json
import os
import pathlib
import re
import shlex
import subprocess
import sys


def main():
    source, commands = sys.argv[1:]
    entry = next(e for e in json.loads(pathlib.Path(commands).read_text()) if os.path.samefile(e["file"], source))
    # The test parses the diagnostics: in English, without colours and carets.
    plain = ["-fsyntax-only", "-fno-diagnostics-show-caret", "-fdiagnostics-color=never", "-ftemplate-backtrace-limit=0"]
    result = subprocess.run(shlex.split(entry["command"]) + plain, cwd=entry["directory"], capture_output=True,
                            text=True, env={**os.environ, "LC_ALL": "C"})
    expected = {}
    for number, line in enumerate(pathlib.Path(source).read_text().splitlines(), 1):
        if match := re.search(r"// refused: (.*)$", line):
            expected[number] = match[1]

    # Before an error the compiler lists the lines that led to it. Without such a list, the error's own line
    # counts.
    name = re.escape(os.path.basename(source))
    found, cause = [], None
    for line in result.stderr.splitlines():
        if match := re.search(name + r":(\d+):\d+:\s+required from here", line):
            cause = int(match[1])
        if match := re.match(r"(.*?):(\d+):\d+: error: (.*)", line):
            own = os.path.basename(match[1]) == os.path.basename(source)
            found.append((int(match[2]) if own else cause, match[3]))
            cause = None
    wrong = [f"line {line}: {text}" for line, text in found if line not in expected or expected[line] not in text]
    missing = [f"line {line}: {text}" for line, text in expected.items() if line not in [each for each, _ in found]]
    if wrong or missing or len(found) != len(expected):
        print(result.stderr)
        sys.exit(f"failed: not expected: {wrong}; missing: {missing}; {len(found)} errors, expected {len(expected)}")
    print(f"{len(found)} lines were refused, each in one sentence")


if __name__ == "__main__":
    main()
