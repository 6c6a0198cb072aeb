"""Draw the results of bench_collectives: GB/s over bytes for each backend, one panel per operation and number of ranks.

usage: chart.py ROWS.json CHART.svg [--op all_reduce,...] [--dtype float32]
"""

import argparse
import json
import math

WIDTH, HEIGHT, LEFT, TOP, GAP_X, GAP_Y = 300, 210, 56, 64, 30, 58
# By backend and memory: the name in the legend, and a colour that is distinct on white and on black.
LINES = {("shm", "allocated"): ("shm, allocated", "#d55e00"), ("shm", "plain"): ("shm, plain", "#e69f00"),
         ("openmpi", "plain"): ("Open MPI", "#0a9e78"), ("gloo", "plain"): ("gloo", "#3a8fd0"),
         ("memcpy", "plain"): ("memcpy, the floor", "#8a8a8a"), ("lockstep-gloo", "plain"): ("gloo through Group", "#b07cc6"),
         ("lockstep-mpi", "plain"): ("MPI through Group", "#c65c8f")}
STYLE = """
  svg { background: #ffffff; font: 11px system-ui, sans-serif }
  text { fill: #24292f } .title { font-size: 13px; font-weight: 600 } .grid { stroke: #d8dee4; stroke-width: 1 }
  .frame { fill: none; stroke: #8c959f } .line { fill: none; stroke-width: 2 } .floor { stroke-dasharray: 5 4 }
  @media (prefers-color-scheme: dark) {
    svg { background: #0d1117 } text { fill: #e6edf3 } .grid { stroke: #30363d } .frame { stroke: #6e7681 }
  }
"""


def show_bytes(count):
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count} B"


class Scale:
    """Maps a number to a position on a logarithmic axis."""

    def __init__(self, values, begin, end):
        self.low, self.high = math.log10(min(values)), math.log10(max(values))
        if self.high - self.low < 0.1:
            self.low, self.high = self.low - 0.5, self.high + 0.5
        self.begin, self.end = begin, end

    def __call__(self, value):
        return self.begin + (math.log10(value) - self.low) / (self.high - self.low) * (self.end - self.begin)

    def powers(self, base):
        step = math.log10(base)
        return [base ** k for k in range(math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1)]


def panel(rows, title, x, y, widths, heights):
    across, up = Scale(widths, x, x + WIDTH), Scale(heights, y + HEIGHT, y)
    parts = [f'<text class="title" x="{x}" y="{y - 8}">{title}</text>']
    for value in up.powers(10):
        parts.append(f'<line class="grid" x1="{x}" x2="{x + WIDTH}" y1="{up(value):.1f}" y2="{up(value):.1f}"/>')
        parts.append(f'<text x="{x - 6}" y="{up(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in across.powers(32):
        parts.append(f'<line class="grid" x1="{across(value):.1f}" x2="{across(value):.1f}" y1="{y}" y2="{y + HEIGHT}"/>')
        parts.append(f'<text x="{across(value):.1f}" y="{y + HEIGHT + 15}" text-anchor="middle">{show_bytes(value)}</text>')
    parts.append(f'<rect class="frame" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}"/>')
    for key, (name, colour) in LINES.items():
        mine = sorted((r for r in rows if (r["backend"], r["memory"]) == key), key=lambda r: r["bytes"])
        if not mine:
            continue
        places = [(across(r["bytes"]), up(r["GBps"]), r) for r in mine]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b, _ in places)
        floor = " floor" if key[0] == "memcpy" else ""
        parts.append(f'<polyline class="line{floor}" stroke="{colour}" points="{path}"/>')
        for a, b, r in places:
            parts.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colour}"><title>{name}, {show_bytes(r["bytes"])}: '
                         f'{r["GBps"]:.3g} GB/s, {r["us_median"]:.4g} us</title></circle>')
    return parts


def chart(rows, dtype):
    ops = list(dict.fromkeys(r["op"] for r in rows))
    ranks = sorted({r["ranks"] for r in rows})
    widths, heights = [r["bytes"] for r in rows], [r["GBps"] for r in rows]
    names = [LINES[key] for key in LINES if any((r["backend"], r["memory"]) == key for r in rows)]
    width = max(LEFT + len(ranks) * (WIDTH + GAP_X), LEFT + 150 * len(names))
    parts = [f'<text class="title" x="{LEFT}" y="18">GB/s over the bytes of one rank\'s tensor, {dtype}</text>']
    for i, (name, colour) in enumerate(names):
        parts.append(f'<rect x="{LEFT + i * 145}" y="28" width="14" height="4" fill="{colour}"/>'
                     f'<text x="{LEFT + i * 145 + 20}" y="34">{name}</text>')
    for row, op in enumerate(ops):
        for column, count in enumerate(ranks):
            mine = [r for r in rows if r["op"] == op and r["ranks"] == count]
            parts += panel(mine, f"{op}, {count} ranks", LEFT + column * (WIDTH + GAP_X), TOP + row * (HEIGHT + GAP_Y),
                           widths, heights)
    height = TOP + len(ops) * (HEIGHT + GAP_Y) - 20
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
            f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows")
    parser.add_argument("svg")
    parser.add_argument("--op", help="Comma-separated list of operations (default: all)")
    parser.add_argument("--dtype", help="Data type to draw (default: float32 if present)")
    options = parser.parse_args()
    with open(options.rows, encoding="utf-8") as file:
        rows = [r for r in json.load(file) if r["bytes"] > 0 and (r["backend"], r["memory"]) in LINES]
    dtypes = {r["dtype"] for r in rows}
    dtype = options.dtype or ("float32" if "float32" in dtypes else min(dtypes, default=""))
    rows = [r for r in rows if r["dtype"] == dtype and (not options.op or r["op"] in options.op.split(","))]
    if not rows:
        raise SystemExit("nothing to draw: no row has bytes")
    with open(options.svg, "w", encoding="utf-8") as file:
        file.write(chart(rows, dtype))


if __name__ == "__main__":
    main()
