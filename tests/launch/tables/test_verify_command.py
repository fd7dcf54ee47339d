"""The command `recipes.py verify`: exit codes, files, what it refuses."""

import argparse
import csv
import json
import sys

import pytest
from launching import run

from launch.tables import verification_command
from launch.tables.verifying import errata, verification


def command(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    verification_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["verify", *flags])
    return args.run(args)


def errata_without(tmp_path, monkeypatch, drop: str = "", add: str = "") -> None:
    """An errata.yaml with lines left out or one added."""
    kept = [
        line
        for line in errata.ERRATA.read_text().splitlines()
        if not (drop and drop in line and line.startswith("    - "))
    ]
    changed = tmp_path / "errata.yaml"
    changed.write_text("\n".join([*kept, *([add] if add else [])]) + "\n")
    monkeypatch.setattr(errata, "ERRATA", changed)


TABLE = ("--table", "a100_blog_table4")


def test_command_exits_0_and_writes_every_check(tmp_path, capsys):
    out = tmp_path / "checks"
    assert (
        command(*TABLE, "--table", "sber_text", "--verbose", "--json", f"{out}.json", "--csv", f"{out}.csv")
        == 0
    )
    shown = capsys.readouterr().out
    assert (
        "weak scaling: printed 90.7%, computed 103 / 111 = 92.8 %" in shown
        and "erratum" in shown
        and "UNEXPLAINED:" not in shown
    )
    assert (
        shown.index("Errata:")
        < shown.index("Not checkable:")
        < shown.index("Every disagreement is explained.")
    )
    values = json.loads((tmp_path / "checks.json").read_text())
    with open(f"{out}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(values["checks"]) == len(rows) > 80 and values["passed"] is True
    explained = [row for row in rows if row["explanation"]]
    assert len(explained) == sum(len(erratum["disagreements"]) for erratum in values["errata"]) == 4


def test_a_missing_explanation_exits_1_and_stands_last(tmp_path, monkeypatch, capsys):
    errata_without(tmp_path, monkeypatch, drop="a100_blog_table4/8.7b")
    assert command(*TABLE) == 1
    last = capsys.readouterr().out.split("!!! UNEXPLAINED: 1")[1]
    assert (
        "a100_blog_table4/8.7b weak scaling: printed 79.6%" in last
        and "1 are UNEXPLAINED, 0 explanations are stale" in last
    )


def test_a_stale_explanation_exits_1(tmp_path, monkeypatch, capsys):
    errata_without(
        tmp_path,
        monkeypatch,
        add="- {disagreements: ['a100_blog_table4/2b TFLOPS: printed 1, computed 2'], explanation: once}",
    )
    assert command(*TABLE) == 1
    assert (
        "a100_blog_table4/2b TFLOPS: printed 1, computed 2"
        in capsys.readouterr().out.split("!!! STALE: 1")[1]
    )


def test_files_that_verify_wrote_are_replaced_and_others_are_not(tmp_path, monkeypatch, capsys):
    json_file, csv_file = tmp_path / "checks.json", tmp_path / "checks.csv"
    flags = (*TABLE, "--json", str(json_file), "--csv", str(csv_file))
    assert command(*flags) == 0
    first = json_file.read_text(), csv_file.read_bytes()
    assert command(*flags) == 0 and (json_file.read_text(), csv_file.read_bytes()) == first
    monkeypatch.setattr(verification, "verify", None)  # refused before anything is computed
    for flag, path, text in (
        ("--json", json_file, '{"passed": true}'),
        ("--csv", csv_file, "table,row\n"),
        ("--csv", csv_file, ""),
    ):
        path.write_text(text)
        capsys.readouterr()
        assert command(*TABLE, flag, str(path)) == 2 and path.read_text() == text
        said = capsys.readouterr().err
        assert (
            f"{flag} {path}" in said
            and "did not write" in said
            and f"name another file with {flag}, or move this one" in said
        )
    assert command(*TABLE, "--json", str(tmp_path / "new"), "--csv", str(tmp_path / "." / "new")) == 2
    assert "name two files" in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--table", "a100_blog_table5"), "did you mean a100_blog_table4"),
        (("--json", "nowhere/at/all.json"), "no directory nowhere/at"),
    ],
)
def test_bad_flags_exit_2(flags, said, capsys):
    assert command(*flags) == 2
    assert said in capsys.readouterr().err


def test_errata_of_a_row_needs_no_torch():
    program = """
import sys
from launch.tables.verifying.verification import errata_of
assert errata_of("jeanzay_megatron_performance/18b-pp4-ga128-mb4") == []
print(*errata_of("jeanzay_megatron_performance/18b-pp8-ga128-mb4"), sep="\\n")
sys.exit("torch" in sys.modules)
"""
    done = run([sys.executable, "-c", program], timeout=60)
    assert done.returncode == 0, done.stdout
    gpus, tflops = done.stdout.splitlines()
    assert gpus.startswith("GPUs: printed 16, computed 4 x 8 x 1 = 32. Impossible as printed")
    assert "Later: 26.7" in tflops
