"""Opens a report in headless Chromium and checks that it shows its data.

report_test.py REPORT.html [EXPECTED TEXT...] [--shots DIR]

Exits with 0 on success, 1 on failure, 77 without chromium. Uses the DevTools protocol over a pipe, which needs no port
and can set prefers-color-scheme. --shots saves screenshots.
"""
import argparse
import base64
import decimal
import json
import os
import pathlib
import select
import shutil
import subprocess
import sys
import tempfile
import time


class Browser:
    def __init__(self, program, profile):
        down, self.up = os.pipe()
        self.down, up = os.pipe()

        def pipes():  # chromium reads from 3 and writes to 4
            a, b = os.dup(down), os.dup(up)
            os.dup2(a, 3)
            os.dup2(b, 4)
            os.set_inheritable(3, True)
            os.set_inheritable(4, True)

        self.log = open(os.path.join(profile, "log"), "w+")
        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
             "--disable-background-networking", "--hide-scrollbars", "--remote-debugging-pipe", "--user-data-dir=" + profile, "about:blank"],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, close_fds=False, preexec_fn=pipes)
        os.close(down)
        os.close(up)
        self.rest, self.number, self.session, self.events = b"", 0, None, []

    def read(self, seconds):
        end = time.monotonic() + seconds
        while b"\0" not in self.rest:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self.down], [], [], left)[0]:
                return None
            chunk = os.read(self.down, 1 << 20)
            if not chunk:
                self.log.seek(0)
                raise SystemExit("chromium ended:\n" + self.log.read()[-2000:])
            self.rest += chunk
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def call(self, method, seconds=200, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.up, data):]
        while True:
            answer = self.read(seconds)
            if answer is None:
                raise SystemExit(f"chromium did not answer {method} in {seconds} s")
            if answer.get("id") == self.number:
                if "error" in answer:
                    raise SystemExit(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self.events.append(answer)

    def attach(self):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in "Page", "Network", "Runtime", "Log":
            self.call(domain + ".enable")

    def js(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise SystemExit(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def frames(self):  # after two frames everything requested is painted
        self.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def open(self, url, width, scheme):
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url=url)
        end = time.monotonic() + 200
        while not self.js("location.href != 'about:blank' && document.readyState == 'complete'"):
            if time.monotonic() > end:
                raise SystemExit("the page did not load in 200 s")
            time.sleep(0.05)
        self.frames()

    def shot(self, path):
        height = self.js("document.documentElement.scrollHeight")
        width = self.js("innerWidth")
        png = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip={"x": 0, "y": 0, "width": width, "height": height, "scale": 1})
        path.write_bytes(base64.b64decode(png["data"]))

    def close(self):
        self.session = None
        try:
            self.call("Browser.close", seconds=30)
        except (SystemExit, OSError):
            pass
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


# Contents of each drawing: for an SVG its shapes with an extent, for a canvas the fraction in colours of the legend.
DRAWN = """
[...document.querySelectorAll('main section')].map(s => ({id: s.id, empty: 'empty' in s.dataset, text: s.innerText,
  svg: [...s.querySelectorAll('.plot svg')].map(v => ({label: v.getAttribute('aria-label'), texts: v.querySelectorAll('text').length,
    shapes: [...v.querySelectorAll('path:not(.grid), rect, circle')].filter(p => { const b = p.getBBox(); return b.width > 0 || b.height > 0; }).length,
    wide: v.getBoundingClientRect().right > innerWidth})),
  canvas: [...s.querySelectorAll('canvas')].map(c => {
    const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data, wanted = new Set([...s.querySelectorAll('.swatch')].map(i => getComputedStyle(i).backgroundColor));
    let n = 0;
    for (let i = 0; i < d.length; i += 4) n += wanted.has(`rgb(${d[i]}, ${d[i + 1]}, ${d[i + 2]})`);
    return 4 * n / d.length; })}))
"""

failures = []


def check(holds, text):
    if not holds:
        failures.append(text)
        print("FAILED:", text)


def number(x):  # formatted like the page
    if abs(x) >= 1000:
        return f"{int(x + 0.5):,}"
    return f"{decimal.Decimal(f'{x:.4g}'):f}"


def duration(ms):
    return number(ms / 1000) + " s" if ms >= 10000 else number(ms) + " ms" if ms >= 1 or ms == 0 else number(ms * 1000) + " \u00b5s"


def expected(data):  # (section, text) pairs that must be shown; None: anywhere
    job, overall = data.get("job", {}), data.get("overall", {})
    if "program" in job:
        yield None, job["program"]
    if job.get("ranks"):
        yield None, f"{job['ranks']:,} rank"
    for host in job.get("hosts", [])[:5]:
        yield None, host
    for hint in data.get("hints", [])[:3]:
        yield "summary", hint
    if "median" in overall.get("step_ms", {}):
        yield "summary", duration(overall["step_ms"]["median"])
        yield None, "median step " + duration(overall["step_ms"]["median"])
    if "exposed_ms" in overall.get("communication", {}):
        yield "summary", duration(overall["communication"]["exposed_ms"])
    if "rank" in overall.get("slowest", {}):
        yield "summary", f"rank {overall['slowest']['rank']}"
    for part in overall.get("parts_ms", {}):
        yield "summary", part
    for row in data.get("collectives", []):
        yield "collectives", row["operation"]
        yield "collectives", row.get("tag", "")
        yield "collectives", number(row["ms_median"])
    if data.get("pipeline", {}).get("measured"):
        yield "pipeline", data["pipeline"].get("schedule", "")
        yield "pipeline", "Measured"


def sections(data):  # id -> minimum number of drawings
    steps = [s for s in data.get("steps", []) if s.get("ranks")]
    ranks, pipeline = data.get("ranks", []), data.get("pipeline", {})
    sized = [o for o in data.get("operations", []) if o[1] > 0] or [c for c in data.get("collectives", []) if c.get("bytes")]
    return {"steps": bool(steps), "ranks": bool(ranks), "timeline": any(r["events"] for r in data.get("timeline", {}).get("ranks", [])),
            "pipeline": sum(any(r["actions"] for r in pipeline.get(k, [])) for k in ("planned", "measured")), "collectives": 2 * bool(sized),
            "memory": bool(data.get("memory")) + any(r.get("memory_peak") for r in ranks), "stragglers": any("late_ms" in r for s in steps for r in s["ranks"] if len(s["ranks"]) > 1)}


def look(browser, data, texts, scheme, width):
    at = f"{scheme}, {width} px"
    errors = browser.js("document.body.dataset.errors || ''")
    check(not errors, f"{at}: script errors: {errors}")
    check(browser.js("'ready' in document.body.dataset"), f"{at}: the page did not finish")
    check(browser.js(f"matchMedia('(prefers-color-scheme: {scheme})').matches"), f"{at}: the scheme was not set")
    wide = browser.js("document.documentElement.scrollWidth")
    check(wide <= width, f"{at}: the page is {wide} px wide")
    drawn = {s["id"]: s for s in browser.js(DRAWN)}
    for name, least in sections(data).items():
        section = drawn.get(name)
        if not least:
            check(section is None or (section["empty"] and len(section["text"]) > 20), f"{at}: {name} does not report that it has no data")
            continue
        check(section and not section["empty"], f"{at}: section {name} is missing")
        if not section:
            continue
        check(len(section["svg"]) + len(section["canvas"]) >= least, f"{at}: {name} has too few drawings")
        for svg in section["svg"]:
            least = 2 if name in ("pipeline", "stragglers") else 1  # these also have a background or a margin
            check(svg["shapes"] >= least and svg["texts"] > 3 and not svg["wide"], f"{at}: {name}: {svg} is empty, without axes or too wide")
        for part in section["canvas"]:
            check(part > 0.001, f"{at}: {name}: only {100 * part:.2f} % of the canvas is drawn")
    everything = browser.js("document.body.innerText")
    for section, text in [*expected(data), *((None, t) for t in texts)]:
        where = drawn.get(section, {"text": ""})["text"] if section else everything
        check(" ".join(text.split()) in " ".join(where.split()), f"{at}: {section or 'the page'} does not show {text!r}")
    for name in "ranks", "collectives":
        rows = browser.js(f"document.querySelectorAll('#{name} tbody tr').length")
        check(rows == len(data.get(name, [])), f"{at}: {rows} rows for {len(data.get(name, []))} {name}")
    for event in browser.events:
        if event.get("method") == "Network.requestWillBeSent":
            url = event["params"]["request"]["url"]
            check(url.startswith("file:") and url.endswith(".html"), f"{at}: a request to {url}")
        if event.get("method") == "Runtime.exceptionThrown" or (event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error"):
            check(False, f"{at}: {json.dumps(event['params'])[:400]}")


def play(browser):
    """Zooms and moves the timeline with the wheel, the keys and the mouse; hovers; sorts; selects a rank."""
    browser.js("document.querySelector('#timeline canvas').scrollIntoView({block: 'center'})")
    x, y, w, h = browser.js("(r => [r.x, r.y, r.width, r.height])(document.querySelector('#timeline canvas').getBoundingClientRect())")

    def view():
        browser.frames()
        return [float(v) for v in browser.js("document.querySelector('#timeline canvas').dataset.view").split()]

    def mouse(kind, mx, my, **more):
        browser.call("Input.dispatchMouseEvent", type=kind, x=mx, y=my, **more)

    def key(name):
        for kind in "keyDown", "keyUp":
            browser.call("Input.dispatchKeyEvent", type=kind, key=name, **({"text": name} if len(name) == 1 and kind == "keyDown" else {}))

    whole = view()
    mouse("mouseWheel", x + w / 2, y + h / 2, deltaX=0, deltaY=-100)
    check(view() == whole, "the wheel zooms the timeline before a click")
    browser.js("document.querySelector('#timeline canvas').scrollIntoView({block: 'center'})")
    y = browser.js("document.querySelector('#timeline canvas').getBoundingClientRect().y")
    mouse("mousePressed", x + w / 2, y + h / 2, button="left", clickCount=1)
    mouse("mouseReleased", x + w / 2, y + h / 2, button="left", clickCount=1)
    for _ in range(8):
        mouse("mouseWheel", x + w / 2, y + h / 2, deltaX=0, deltaY=-120)
    near = view()
    check(near[1] - near[0] < 0.2 * (whole[1] - whole[0]), f"the wheel does not zoom: {whole} {near}")
    mouse("mousePressed", x + w / 2, y + h / 2, button="left", clickCount=1)
    mouse("mouseMoved", x + w / 2 - 150, y + h / 2, button="left", buttons=1)
    mouse("mouseReleased", x + w / 2 - 150, y + h / 2, button="left", clickCount=1)
    moved = view()
    check(moved[0] > near[0] and abs((moved[1] - moved[0]) / (near[1] - near[0]) - 1) < 1e-6, f"a drag does not move: {near} {moved}")
    key("ArrowLeft")
    check(view()[0] < moved[0], "the left arrow does not move")
    tip = ""
    for place in ((part, row) for part in (0.5, 0.3, 0.7, 0.2, 0.9) for row in range(4, int(h) - 44, 4)):  # until an event is under the pointer
        mouse("mouseMoved", x + w * place[0], y + place[1])
        tip = browser.js("document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent")
        if tip:
            break
    check("rank" in tip and "thread" in tip, f"hovering shows {tip!r}")
    yield "zoomed"
    key("0")
    check(view() == whole, "0 does not show all")
    cost = browser.js("""(async () => { const c = document.querySelector('#timeline canvas'), all = [];
        for (let i = 0; i < 20; ++i) { c.dispatchEvent(new KeyboardEvent('keydown', {key: '0'})); await new Promise(requestAnimationFrame); all.push(+c.dataset.paint); }
        return Math.min(...all); })()""")  # other load only makes it longer
    print(f"painting the whole timeline takes {cost} ms")
    check(cost < 200, f"painting the timeline takes {cost} ms")
    if browser.js("document.querySelectorAll('#ranks th button').length > 1"):
        order = browser.js("document.querySelectorAll('#ranks th button')[1].click(); document.querySelector('#ranks th[aria-sort]')?.getAttribute('aria-sort')")
        check(order in ("ascending", "descending"), "the table of ranks does not sort")
    if browser.js("document.querySelectorAll('#steps select option').length > 2"):
        before = browser.js("document.querySelector('#steps .plot svg').innerHTML")
        browser.js("(s => { s.selectedIndex = 1; s.onchange(); })(document.querySelector('#steps select'))")
        check(before != browser.js("document.querySelector('#steps .plot svg').innerHTML"), "choosing a rank changes nothing")
    errors = browser.js("document.body.dataset.errors || ''")
    check(not errors, f"script errors while in use: {errors}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("report", type=pathlib.Path)
    parser.add_argument("texts", nargs="*")
    parser.add_argument("--shots", type=pathlib.Path)
    arguments = parser.parse_args()
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not program:
        print("skipped: chromium is missing")
        return 77
    page = arguments.report.read_text(encoding="utf-8")
    text = page.split('<script id="data" type="application/json">', 1)[1].split("</script>", 1)[0]
    check("<" not in text, "the data contain a '<', which could end their element")
    data = json.loads(text)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        browser = Browser(program, profile)
        try:
            browser.attach()
            backgrounds = set()
            for scheme in "light", "dark":
                browser.open(arguments.report.resolve().as_uri(), 1280, scheme)
                backgrounds.add(browser.js("getComputedStyle(document.body).backgroundColor"))
                for width in 1280, 900:
                    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
                    browser.frames()
                    look(browser, data, arguments.texts, scheme, width)
                    if arguments.shots:
                        arguments.shots.mkdir(parents=True, exist_ok=True)
                        browser.shot(arguments.shots / f"{arguments.report.stem}-{scheme}-{width}.png")
            check(len(backgrounds) == 2, "light and dark look the same")
            if sections(data)["timeline"]:
                browser.open(arguments.report.resolve().as_uri(), 1280, "light")
                for name in play(browser):
                    if arguments.shots:
                        browser.shot(arguments.shots / f"{arguments.report.stem}-{name}.png")
        finally:
            browser.close()
    print("failed" if failures else "passed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
