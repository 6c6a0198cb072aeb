"""Checks the links between the pages: each leads to a file of the tree and, after '#', to a heading of that page.

usage: links.py ROOT
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(sys.argv[1]).resolve()


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def anchors(page):
    """As GitHub makes them from headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.*)$", text, re.M)}


def problem_of(page, link):
    file, _, anchor = link.partition("#")
    target = (page.parent / file).resolve() if file else page
    if not target.exists():
        return "there is no such file"
    if anchor and anchor not in anchors(target):
        return "there is no such heading"
    return None


def main():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    wrong = 0
    for page in sorted(pages):
        for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
            problem = None if link.startswith("https://") else problem_of(page, link)
            if problem:
                wrong += 1
                print(f"{page.relative_to(ROOT)}: {link}: {problem}")
    if not wrong:
        print(f"the links of {len(pages)} pages lead somewhere")
    return 1 if wrong or not pages else 0


sys.exit(main())
