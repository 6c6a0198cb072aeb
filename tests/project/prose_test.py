"""Searches the pages, the help and the strings of the code for phrases that the style sheet in HACKING.md bans.
prose_test.py ROOT LOCKSTEP"""

import pathlib
import re
import subprocess
import sys

root, lockstep = pathlib.Path(sys.argv[1]), sys.argv[2]
BANNED = [
    r"who(ever|m)\b", r"(no|some|every)body('s)?\b", r"(is|are|was|were|been|be) told\b", r"tells? the (others|rest)\b",
    r"go(es)? on with\b", r"gone on with\b", r"comes? to (nothing|the same)\b", r"(has|have|had) come\b", r"goes by\b", r"mend(s|ed|ing)?\b",
    r"made up\b", r"round (its|the|their|a)\b", r"anew\b", r"of no use\b", r"of (its|their) own accord\b",
    r"in (its|their) turn\b", r"not allowed: ", r"lets? go of\b", r"under way\b", r"has no part in\b", r"what there is\b",
]
pattern = re.compile(r"\b(?:" + "|".join(BANNED) + ")", re.IGNORECASE)
# In the program's own texts "who" is always a process.
IN_CODE = re.compile(pattern.pattern + r"|\bwho\b", re.IGNORECASE)
# Quotations and proper uses, as "file: text".
ALLOWED = [("HACKING.md", 'not "whoever"'), ("lockstep/control/link/key.cpp", "user"), ("cli/key.cpp", "Anyone who"),
           ("lockstep key --help", "Anyone who")]
literal = re.compile(r'R"(\w*)\((.*?)\)\1"|"((?:\\.|[^"\\\n])*)"', re.S)
found = []


def search(where, text, pattern=pattern):
    for number, line in enumerate(text.split("\n"), 1):
        for match in pattern.finditer(line):
            row = f"{where}:{number}: '{match.group(0)}' in: {line.strip()[:160]}"
            if not any(row.startswith(file) and words in line for file, words in ALLOWED):
                found.append(row)


def strings_of(source):
    """The string literals of C++ code, each on its own line; comments and #include directives are left out."""
    source = re.sub(r'^\s*#include.*$', "", source, flags=re.M)
    pieces = re.compile(r'//[^\n]*|/\*.*?\*/|' + literal.pattern, re.S)
    kept, position = [], 0
    for match in pieces.finditer(source):
        kept.append("\n" * source.count("\n", position, match.start()))
        position = match.start()
        text = match.group(2) if match.group(2) is not None else match.group(3)
        if text is not None:
            kept.append(" " + text.replace("\\n", " "))
    return "".join(kept)


def outside_code(page):
    return re.sub(r"^```.*?^```", lambda block: "\n" * block.group(0).count("\n"), page, flags=re.M | re.S)


pages = [root / "README.md", root / "HACKING.md", root / "ARCHITECTURE.md", root / "SECURITY.md", root / "CHANGELOG.md"]
pages += sorted((root / "docs").rglob("*.md")) + sorted((root / "examples").rglob("*.md"))
for page in pages:
    search(page.relative_to(root), outside_code(page.read_text()))

sources = [path for folder in ("lockstep", "cli", "python") for suffix in ("*.cpp", "*.h", "*.cu")
           for path in sorted((root / folder).rglob(suffix))]
for path in sources:
    search(path.relative_to(root), strings_of(path.read_text()), IN_CODE)

verbs = [[]] + [[verb] for verb in ("run", "doctor", "key", "schedule", "trace")]
for verb in verbs:
    help_text = subprocess.run([lockstep, *verb, "--help"], capture_output=True, text=True)
    if help_text.returncode != 0 or len(help_text.stdout) < 100:
        found.append(f"lockstep {' '.join(verb)} --help failed: {help_text.stderr[:200]}")
    search("lockstep " + " ".join([*verb, "--help"]), help_text.stdout, IN_CODE)

print(f"searched {len(pages)} pages, {len(sources)} sources and {len(verbs)} help texts for {len(BANNED)} phrases")
if len(pages) < 10 or len(sources) < 200:
    found.append("too few files were searched")
print("\n".join(found))
sys.exit(1 if found else 0)
