"""Text fits the terminal's width between words, commands can still be pasted, and counts read as English."""

from __future__ import annotations

import ast
import io
import os
import pty
import shlex
import struct
import subprocess
import sys
from collections import Counter
from fcntl import ioctl
from termios import TIOCSWINSZ

import pytest
from launching import ROOT

from launch.console import progress, terminal
from launch.console.arguments import HELP_WIDTH, command
from launch.console.progress import fitting
from launch.console.text_table import aligned, table
from recipes.problems import counted

WORDS = "the quick brown fox jumps over the lazy dog " * 5
FIELDS = {
    "skipped": "SKIPPED (overflow)",
    "loss": "loss 6.4574",
    "lr": "lr 9.6e-04",
    "norm": "grad norm 0.909",
    "samples": "16.1 samples/s",
    "tokens": "4,120 tokens/s",
    "tflops": "0.369 TFLOPS",
}


@pytest.fixture
def wide():
    """A stream that is a terminal of 50 columns."""
    master, slave = pty.openpty()
    ioctl(slave, TIOCSWINSZ, struct.pack("HHHH", 24, 50, 0, 0))
    with os.fdopen(slave, "w") as stream:
        yield stream
    os.close(master)


def test_a_terminal_has_its_columns_and_a_log_has_none(wide):
    assert terminal.columns(wide) == 50
    assert terminal.columns(io.StringIO()) is None
    ioctl(wide.fileno(), TIOCSWINSZ, struct.pack("HHHH", 24, 0, 0, 0))
    assert terminal.columns(wide) is None


def test_long_lines_are_broken_between_words():
    text = f"short\n  {WORDS}\n/a/path/that/is/longer/than/the/terminal/is/wide"
    assert terminal.wrapped(text, None) == text
    first, *lines, last = terminal.wrapped(text, 40).split("\n")
    assert first == "short" and last == text.split("\n")[-1]
    assert all(len(line) <= 40 for line in lines) and " ".join(lines).split() == WORDS.split()
    assert [len(line) - len(line.lstrip()) for line in lines] == [2, *[4] * (len(lines) - 1)]


def test_a_command_of_several_lines_is_the_same_command():
    line = "  deepspeed --num_gpus 2 launch/pretrain.py --ds_config zero3 --set 'data.name=a b' --tiny"
    shown = terminal.command(line, 40)
    assert shown.count("\\\n") >= 2 and all(len(each) <= 42 for each in shown.split("\n"))
    assert shlex.split(shown.replace("\\\n", "")) == shlex.split(line)
    assert "--num_gpus 2" in shown and "\u00a0" not in shown


def test_values_are_wrapped_in_their_column():
    lines = aligned([("a", "short"), ("label", WORDS)], indent=2, width=40).split("\n")
    assert lines[0] == "  a      short" and all(line.startswith(" " * 9) for line in lines[2:])
    assert max(map(len, lines)) <= 40


@pytest.mark.parametrize("width", (None, 200, 90, 50))
def test_a_table_keeps_all_cells_at_every_width(width):
    headings = ("row", "a long heading of it", "count", "published")
    rows = [[f"a-name-{n}", "4 x 16 x 1", n, "48B: 129 s, 48.7 TFLOPS and much more"] for n in (1, 22)]
    shown = table(rows, headings, "llrl", width)
    assert max(map(len, shown.split("\n"))) <= (width or 200)
    cells = " ".join([*headings[1:], *(str(cell) for row in rows for cell in row)]).split()
    assert not Counter(cells) - Counter(shown.split())


def test_the_numbers_of_a_step_fit_without_the_least_important():
    assert fitting(FIELDS, None) == " ".join(FIELDS.values())
    for width in (120, 80, 60, 40):
        shown = fitting(FIELDS, width)
        assert len(shown) < width and shown.startswith("SKIPPED (overflow) loss 6.4574")
    assert "samples/s" in fitting(FIELDS, 60) and "TFLOPS" not in fitting(FIELDS, 80)


def test_help_fits_80_columns():
    """Descriptions and examples keep their lines, which argparse indents by nothing."""
    seen = 0
    for file in (ROOT / "launch").rglob("*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("EXAMPLES"):
                text, seen = ast.literal_eval(node.value), seen + 1
                assert not [line for line in text.split("\n") if len(line) > 80], file
    assert seen > 12
    shown = command("words " * 30, "examples:\n  python a --flag 1").format_help()
    assert shown.endswith("\n\nexamples:\n  python a --flag 1\n")
    assert max(map(len, shown.split("\n"))) <= HELP_WIDTH


def test_one_thing_is_singular():
    assert [counted(n, "process") for n in (0, 1, 2)] == ["0 processes", "1 process", "2 processes"]
    assert counted(1024, "warm-up step") == "1,024 warm-up steps" and counted(2, "batch") == "2 batches"


def test_deepspeed_says_nothing_when_it_finds_no_gpu():
    program = """
from launch.console.terminal import quiet_libraries
quiet_libraries()
import deepspeed
deepspeed.utils.logger.warning("chatter")
deepspeed.utils.logger.error("what matters")
"""
    environment = {key: value for key, value in os.environ.items() if key != "DS_ACCELERATOR"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "what matters" in done.stdout, done.stderr
    assert done.stdout.count("\n") == 1, done.stdout


def test_the_time_that_is_left_counts_the_larger_steps_of_a_ramp(monkeypatch):
    """Of 20 steps ten have one sample and ten have 10."""
    samples = lambda step: step + 9 * max(0, step - 10)  # noqa: E731
    log, clock = io.StringIO(), iter(range(100))
    monkeypatch.setattr("launch.console.progress.time.monotonic", lambda: next(clock))
    lines = progress.Lines(log, 0, 20, samples)
    for step in range(1, 12):
        lines.step(step, {"loss": "loss 1"})
    assert log.getvalue().splitlines()[9].endswith("01:40 left")  # 9 samples in 9 s, 100 to come
    assert log.getvalue().splitlines()[10].endswith("00:47 left")  # 19 in 10 s, 90 to come


def test_a_bar_counts_samples_and_shows_steps(wide):
    bar = progress.Bar(wide, 1, 3, lambda step: 10**step)
    for step in (2, 3):
        bar.step(step, {})
        assert (bar._bar.n, bar._bar.total) == (10**step, 1000)
        assert bar._bar.desc == f"step {step}/3"
    bar.close()


PROGRAM = """
import sys, warnings
from tqdm import tqdm
from launch.console import terminal
from launch.console.progress import screen
terminal.outlast_readers()
shown = screen(sys.stdout, 0, 10**4, int)
for step in range(1, 10**4):
    shown.step(step, {"loss": "loss 1"})
    shown.line("a line that fills the pipe " * 9)
    tqdm([1], file=sys.stderr).update()
    warnings.warn(f"{step}")
shown.close()
sys.stdout.flush()
raise SystemExit(7)
"""


@pytest.mark.parametrize("sink", ["| head -1", "2>&1 | head -1", "> /dev/full 2>&1"])
def test_who_prints_goes_on_when_nobody_reads(sink):
    line = f'{sys.executable} -c "$PROGRAM" {sink}; exit ${{PIPESTATUS[0]}}'
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PROGRAM": PROGRAM}
    done = subprocess.run(["bash", "-c", line], env=env, stdout=-1, stderr=subprocess.DEVNULL, timeout=60)
    assert done.returncode == 7


def test_control_characters_are_shown_and_not_obeyed():
    text = "one\ntwo\x1b[31m \x07 \u202e \ttab \N{NO-BREAK SPACE}\u00e4\ufffd"
    assert terminal.visible(text) == "one\ntwo\\x1b[31m \\x07 \\u202e \\ttab \N{NO-BREAK SPACE}\u00e4\ufffd"


def test_cells_of_a_table_show_what_a_screen_would_obey():
    shown = table([["a\x1b[2J", 1]], ["x", "y"]) + aligned([("title", "\x07b")])
    assert r"a\x1b[2J" in shown and r"\x07b" in shown


def test_a_terminal_shows_warnings_and_losses_in_colour_and_no_other_place_does(monkeypatch, capsys):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal.warn("slow")
    assert capsys.readouterr().out == "WARNING: slow\n", "a pipe"
    monkeypatch.setattr(terminal, "columns", lambda stream=None: 40)
    terminal.warn("slow")
    progress.Lines(sys.stdout, 0, 1, int).line("step 1: validation loss 5.0", terminal.BOLD)
    terminal.say("plain")
    coloured = "\033[33mWARNING: slow\033[0m\n\033[1mstep 1: validation loss 5.0\033[0m\nplain\n"
    assert capsys.readouterr().out == coloured
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            terminal.warn("slow")
            assert capsys.readouterr().out == "WARNING: slow\n", name
