"""The status line of `lockstep run`, on a real terminal, with real ranks.

status_test.py LOCKSTEP STEPS_PROBE
"""
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

LOCKSTEP, PROBE = (os.path.abspath(each) for each in sys.argv[1:3])
STATUS = re.compile(r"step \d+")
# On a busy machine a rank may really be slow; slow_rank_test.py covers that.
SLOW = re.compile(r"lockstep: rank \d+ is (?:no longer )?slow: [^\r\n]*\r?\n")


class Terminal:
    """Runs a command on a terminal of that width; keeps its output, and the resulting screen."""

    def __init__(self, command, columns=100, stdout=None, stderr=None, **variables):
        own, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

        def lead():
            os.setsid()
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

        environment = {**os.environ, "TERM": "xterm", "NO_COLOR": "1", "OMP_NUM_THREADS": "1", **variables}
        begin = time.monotonic()
        process = subprocess.Popen(command, stdin=theirs, stdout=stdout or theirs, stderr=stderr or theirs, env=environment,
                                   preexec_fn=lead)
        os.close(theirs)
        self.bytes = b""
        self.columns = columns
        while True:
            ready, _, _ = select.select([own], [], [], 0.2)
            if ready:
                try:
                    piece = os.read(own, 65536)
                except OSError:
                    piece = b""
                if not piece:
                    break
                self.bytes += piece
            elif process.poll() is not None:
                break
        self.status = process.wait(timeout=300)
        self.seconds = time.monotonic() - begin
        os.close(own)
        self.text = SLOW.sub("", self.bytes.decode())

    def screen(self):
        """The final lines; fails if one exceeded the width."""
        lines, column = [""], 0
        for token in re.findall(r"\x1b\[K|\x1b\[[0-9;]*m|\r|\n|[^\x1b\r\n]+", self.text):
            if token == "\r":
                column = 0
            elif token == "\n":
                lines.append("")
                column = 0
            elif token == "\x1b[K":
                lines[-1] = lines[-1][:column]
            elif not token.startswith("\x1b"):
                lines[-1] = lines[-1][:column] + token + lines[-1][column + len(token):]
                column += len(token)
                assert column < self.columns, (column, token)
        return lines


def ranks(*arguments, options=()):
    return [LOCKSTEP, "run", "-q", "-n", "2", *options, PROBE, *arguments]


def draws(text):
    return re.findall(r"\r(step [^\r\x1b]*)\x1b\[K", text)


def test_it_is_below_the_lines_and_gone_at_the_end():
    terminal = Terminal(ranks("150", "15", "line", "metrics"), columns=140)
    assert terminal.status == 0, terminal.text
    shown = draws(terminal.text)
    assert len(shown) >= 4, terminal.text
    assert len(shown) <= 5 * terminal.seconds + 1, (len(shown), terminal.seconds)
    last = shown[-1]
    pattern = r"step \d+ \| [\d.]+ steps/s \| loss [\d.e-]+ \| [\d.]+ samples/s \| .*waiting \d+% \| slowest rank [01] \([\d.]+x\)"
    assert re.match(pattern, last), last
    assert any('rate, "of" rank 0.25' in each for each in shown), shown
    lines = [line for line in terminal.screen() if line]
    expected = {f"[{rank}] line {step} of {rank}" for rank in (0, 1) for step in range(9, 150, 10)} | {"[0] ended"}
    assert set(lines) == expected and len(lines) == len(expected), lines
    speed = float(re.search(r"([\d.]+) steps/s", last)[1])
    # A step takes at least 15 ms. How much longer depends on the machine, so the whole run decides what is
    # too slow.
    assert 150 / terminal.seconds / 10 < speed < 70, (last, terminal.seconds)
    assert abs(float(re.search(r"([\d.]+) samples/s", last)[1]) / speed / 64 - 1) < 0.02, last


def test_it_fits_a_narrow_terminal():
    terminal = Terminal(ranks("60", "15", "line", "metrics"), columns=30)
    assert draws(terminal.text) and all(len(each) <= 29 for each in draws(terminal.text)), terminal.text
    assert [line for line in terminal.screen() if STATUS.match(line)] == []


def test_progress_that_ranks_draw_is_shown_as_before():
    terminal = Terminal(ranks("150", "15", "bar"))
    lines = [line for line in terminal.screen() if line]
    assert "[0] ended" in lines, lines
    assert all(re.fullmatch(r"\[[01]\] (bar \d+|ended)", line) for line in lines), lines
    assert len(lines) >= 4 and draws(terminal.text), terminal.text


def test_one_rank_alone_has_the_terminal_to_itself():
    terminal = Terminal([LOCKSTEP, "run", "-q", "-n", "1", PROBE, "40", "15", "bar"])
    assert terminal.text.replace("\r\n", "\n").startswith("\rbar 0\rbar 1\rbar 2"), terminal.text
    assert "\x1b" not in terminal.text


def test_only_where_it_is_wanted():
    for options, variables in ((("--status", "never"), {}), ((), {"TERM": "dumb"})):
        terminal = Terminal(ranks("40", "15", "line", options=options), **variables)
        assert terminal.status == 0 and "\x1b" not in terminal.text and "steps/s" not in terminal.text, terminal.text


def test_no_terminal_no_codes():
    for options, shown in (((), False), (("--status", "always"), True)):
        done = subprocess.run(ranks("60", "15", "line", "metrics", options=options), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and "\x1b" not in done.stdout + done.stderr and "\r" not in done.stdout + done.stderr
        assert (re.search(r"^lockstep: step \d+", done.stderr, re.M) is not None) == shown, done.stderr
        assert "steps/s" not in done.stdout


def test_where_only_one_of_the_two_is_a_terminal():
    for stream in ("stdout", "stderr"):
        read, write = os.pipe()
        terminal = Terminal(ranks("60", "15", "line"), **{stream: write})
        os.close(write)
        with os.fdopen(read) as file:
            elsewhere = file.read()
        assert draws(terminal.text), (stream, terminal.text)
        assert "\x1b" not in elsewhere and "steps/s" not in elsewhere, elsewhere
        assert ("line 59 of 0" in elsewhere) == (stream == "stdout"), elsewhere


def test_a_failure_is_told_on_lines_of_its_own():
    program = f"{PROBE} 60 15; [ $RANK = 0 ] || exit 3; sleep 1"
    terminal = Terminal([LOCKSTEP, "run", "-q", "-n", "2", "sh", "-c", program], columns=400)
    assert terminal.status == 3
    lines = terminal.screen()
    assert any(line.startswith("lockstep: rank 1") for line in lines), lines
    assert not any(STATUS.match(line) for line in lines), lines


def main():
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print(f"{name}: passed", flush=True)


main()
