"""Turns the C++ of README.md and docs/ into programs that the tests compile and run.

usage: extract.py OUT PAGE.md...

A block with main() becomes OUT/program_N.cpp; all others become functions of OUT/snippets.cpp, each with a World, a
Group and a tensor at hand, as their text assumes.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PRELUDE = """#include <filesystem>
#include <iostream>
#include <lockstep/lockstep.h>
#include <torch/torch.h>
using namespace lockstep;
// A snippet shows how something begins, so it may leave names unused, and it may declare what the function has already.
#pragma GCC diagnostic ignored "-Wshadow"
#pragma GCC diagnostic ignored "-Wunused-variable"
"""

PARAMETERS = "[[maybe_unused]] World& world, [[maybe_unused]] Group group, [[maybe_unused]] torch::Tensor t"

MAIN = """
int main() {
  auto world = World::from_environment();
  const auto folder = "docs-" + std::to_string(world.size());  // for what they write
  std::filesystem::create_directories(folder);
  std::filesystem::current_path(folder);
  auto run = [&](const char* name, void (*snippet)(World&, Group, torch::Tensor)) {
    snippet(world, world.group(), torch::ones({4}));
    if (world.is_main()) std::cout << name << " ran" << std::endl;
  };
"""


def write_if_changed(path, text):
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def main():
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    programs, functions, calls = 0, "", ""
    for name in sys.argv[2:]:
        path = pathlib.Path(name).resolve()
        text = path.read_text()
        page = str(path.relative_to(ROOT))
        for match in re.finditer(r"^```cpp\n(.*?)^```", text, re.M | re.S):
            line = text[: match.start()].count("\n") + 2
            code = f'#line {line} "{page}"\n' + match[1]
            if "int main(" in match[1]:
                programs += 1
                write_if_changed(out / f"program_{programs}.cpp", code)
            else:
                function = f"snippet_{re.sub(r'[^a-z]+', '_', page.removesuffix('.md').lower())}_{line}"
                functions += f"void {function}({PARAMETERS}) {{ {{\n{code}}} }}\n"
                calls += f'  run("{page}:{line}", &{function});\n'
    write_if_changed(out / "snippets.cpp", PRELUDE + functions + MAIN + calls + "}\n")


main()
