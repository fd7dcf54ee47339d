"""Where a command may write: nothing is overwritten, and what cannot be made is refused before any work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import environment

from launch.console.arguments import check_outside
from launch.console.new_output import new_directory, new_file, own_files
from recipes.problems import ProblemsError


@pytest.fixture
def place(tmp_path) -> Path:
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file.png").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


@pytest.mark.parametrize("name", ["empty", "new", "new/below", "new.png"])
def test_a_new_or_empty_directory_is_taken(place, name):
    assert new_directory("--out", place / name) == place / name


DIRECTORIES = {
    "full": "is not empty: nothing is overwritten or mixed",
    "file.png": "is a file",
    "file.png/below": "file.png is a file",
    "x" * 300: "File name too long",
    "loop": "is a link to nothing",
}


@pytest.mark.parametrize("name", DIRECTORIES, ids=range(len(DIRECTORIES)))
def test_another_directory_is_refused(place, name):
    with pytest.raises(ProblemsError) as caught:
        new_directory("--out", place / name)
    assert str(caught.value).startswith("--out ") and DIRECTORIES[name] in str(caught.value)


def test_a_new_run_does_not_lie_in_the_one_it_comes_from(place):
    (place / "by_link").symlink_to(place / "full")
    for inside in ("full", "full/new", "by_link/new"):
        with pytest.raises(ProblemsError, match="lies in .*full"):
            check_outside("--out", place / inside, place / "full")
    check_outside("--out", place / "fuller", place / "full")


FILES = {
    "full": "is a directory",
    "file.png": "exists already: nothing is overwritten",
    "new/below.png": "lies in",
    "file.png/below.png": "file.png is a file",
    "new.txt": "has another ending",
    "x" * 300 + ".png": "File name too long",
}


@pytest.mark.parametrize("name", FILES, ids=range(len(FILES)))
def test_another_file_is_refused(place, name):
    endings = () if name == "full" else (".png", ".svg")
    with pytest.raises(ProblemsError) as caught:
        new_file("--plot", place / name, endings)
    assert str(caught.value).startswith("--plot ") and FILES[name] in str(caught.value)


def test_a_new_file_is_taken(place):
    assert new_file("--plot", place / "new.png", (".png",)) == place / "new.png"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_what_is_not_mine_to_write_is_refused():
    for check in (new_directory, new_file):
        with pytest.raises(ProblemsError, match="not yours to write"):
            check("--out", "/proc/new")


MAIN = """
import sys
from launch.console import ends
from recipes.files import refuse
def main():
    {body}
ends.run(main)
"""
ENDS = {
    "return 3": (3, ""),
    "raise SystemExit(3)": (3, ""),
    "refuse('a.json', 'came', 'rule')": (2, "a.json: came: rule"),
    "raise KeyboardInterrupt": (130, "interrupted"),
    "open('/nowhere/x')": (1, "/nowhere/x: No such file or directory"),
    "print('half of a pair: \\udc80')": (0, ""),
    "raise ValueError('a bug')": (1, "Traceback"),
}


@pytest.mark.parametrize("body", ENDS)
def test_a_command_ends_with_its_code(body):
    command = [sys.executable, "-c", MAIN.format(body=body)]
    done = subprocess.run(command, env=environment(None), capture_output=True, text=True, timeout=60)
    code, said = ENDS[body]
    assert done.returncode == code and said in done.stderr
    assert ("Traceback" in done.stderr) == (said == "Traceback")


def test_a_reader_that_has_seen_enough_is_no_error():
    program = MAIN.format(body="[print(n) for n in range(10**6)]")
    command = f'{sys.executable} -c "$PROGRAM" | head -1; exit ${{PIPESTATUS[0]}}'
    env = {**environment(None), "PROGRAM": program}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")


# What a shell does with an output, a command: its exit code, and what it says on the other output.
OUTPUTS = {
    ">/dev/full": ("print('x')", 1, "standard output cannot be written (No space left on device)"),
    "> /dev/full": (
        "from launch.console.arguments import command; command('about', '').parse_args(['--help'])",
        1,
        "standard output cannot be written (No space left on device)",
    ),
    "2>/dev/full": ("refuse('a.json', 'came', 'rule')", 2, "a.json: came: rule"),
    ">&-": ("print('x')", 2, "standard output is closed"),
    "2>&-": ("print('x')", 2, "standard error is closed"),
    ">&- 2>&-": ("print('x')", 2, ""),
}


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_an_output_that_takes_nothing_is_named_on_the_other_one(outputs, unbuffered):
    body, code, said = OUTPUTS[outputs]
    command = f'{sys.executable} -c "$PROGRAM" {outputs}'
    env = {**environment(None), "PROGRAM": MAIN.format(body=body), "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(["bash", "-c", command], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and "Traceback" not in done.stderr
    assert said in (done.stdout if outputs.startswith("2") else done.stderr)


@pytest.mark.parametrize("bad", ["argument", "working directory", "gone"])
def test_names_that_are_no_text_and_a_directory_that_is_gone_are_refused(tmp_path, bad):
    place = tmp_path / (b"no text \xff".decode(errors="surrogateescape") if bad != "argument" else "text")
    place.mkdir()
    gone = f'rmdir "{place}";' if bad == "gone" else ""
    word = "$'runs/\\xff'" if bad == "argument" else "x"
    command = f'{gone} {sys.executable} -c "$PROGRAM" {word}'
    body = "from launch.console.arguments import command; command('about', '').parse_args([])"
    env = {**environment(None), "PROGRAM": MAIN.format(body=body)}
    done = subprocess.run(["bash", "-c", command], env=env, cwd=place, capture_output=True, text=True)
    said = (
        "working directory was removed" if bad == "gone" else "is not UTF-8: records and reports keep names"
    )
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_own_files_are_told_by_their_beginning_and_every_other_is_named(tmp_path):
    beginnings = {"a": "# ours", "b": "# ours", "c": "# ours", "d": "# ours"}
    assert own_files("--out", tmp_path / "none", beginnings) == []
    (tmp_path / "a").write_text("# ours\nand more")
    assert own_files("--out", tmp_path, beginnings) == ["a"]
    (tmp_path / "b").write_text("theirs")
    (tmp_path / "d").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ProblemsError) as caught:
        own_files("--out", tmp_path, beginnings)
    first, second = str(caught.value).splitlines()
    assert first.startswith(
        f"--out {tmp_path / 'b'} exists already: only this command's own files are replaced"
    )
    assert second.startswith(f"--out {tmp_path / 'd'} is a link to nothing")
