"""tools/check_tables.py: exit codes, files, what it refuses."""

import csv
import sys
from functools import partial

import pytest
from launching import run

from recipes.tables import FOLDER
from tools import check_tables
from tools.tables import verification


def command(*flags: str) -> int:
    return check_tables.main(flags)


@pytest.fixture
def changed(tmp_path, monkeypatch):
    """Let the command verify a copy of table 4 of the A100 blog with one piece of its evidence replaced."""

    def change(old: str, new: str) -> None:
        text = (FOLDER / "a100_blog_table4.yaml").read_text()
        assert text.count(old) == 1
        (tmp_path / "a100_blog_table4.yaml").write_text(text.replace(old, new))
        monkeypatch.setattr(verification, "verify", partial(verification.verify, folder=tmp_path))

    return change


TABLE = ("--table", "a100_blog_table4")
EXPLAINED = '    - {quantity: weak scaling, printed: "79.6%", computed: "85 / 111 = 76.6 %", rows: [8.7b]}\n'


def test_command_exits_0_and_writes_every_check(tmp_path, capsys):
    out = tmp_path / "checks.csv"
    assert command(*TABLE, "--table", "sber_path_to_13b", "--verbose", "--csv", str(out)) == 0
    shown = capsys.readouterr().out
    assert "weak scaling: printed 90.7%, computed 103 / 111 = 92.8 %" in shown
    assert "erratum" in shown and "UNEXPLAINED:" not in shown
    in_order = ("Errata:", "Not checkable:", "Every disagreement is explained.")
    assert sorted(in_order, key=shown.index) == list(in_order)
    rows = list(csv.DictReader(out.open(newline="")))
    assert len(rows) > 400 and sum(bool(row["explanation"]) for row in rows) == 6


def test_a_missing_explanation_exits_1_and_stands_last(changed, capsys):
    changed(EXPLAINED, "")
    assert command(*TABLE) == 1
    last = capsys.readouterr().out.split("!!! UNEXPLAINED: 1")[1]
    assert "a100_blog_table4/8.7b weak scaling: printed 79.6%" in last
    assert "1 are UNEXPLAINED, 0 explanations are stale" in last


def test_a_stale_explanation_exits_1(changed, capsys):
    changed(EXPLAINED, EXPLAINED + '    - {quantity: TFLOPS, printed: "1", computed: "2", rows: [2b]}\n')
    assert command(*TABLE) == 1
    stale = capsys.readouterr().out.split("!!! STALE: 1")[1]
    assert "a100_blog_table4/2b TFLOPS: printed 1, computed 2" in stale


def test_a_file_that_verify_wrote_is_replaced_and_another_is_not(tmp_path, monkeypatch):
    path = tmp_path / "checks.csv"
    flags = (*TABLE, "--csv", str(path))
    assert command(*flags) == 0
    first = path.read_bytes()
    assert command(*flags) == 0 and path.read_bytes() == first
    monkeypatch.setattr(verification, "verify", None)  # refused before anything is computed
    for text in ("table,row\n", ""):
        path.write_text(text)
        refused = f"--csv {path} exists already: only this command's own files are replaced"
        with pytest.raises(ValueError, match=refused):
            command(*flags)
        assert path.read_text() == text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--table", "a100_blog_table5"), "did you mean a100_blog_table4"),
        (("--csv", "nowhere/at/all.csv"), "lies in nowhere/at, which is not there"),
    ],
)
def test_bad_flags_are_refused(flags, said):
    with pytest.raises(ValueError, match=said):
        command(*flags)


def test_errata_of_a_row_need_no_torch():
    program = """
import sys
from launch.tables import evidence
from recipes.catalog import find
for row in ("18b-pp4-ga128-mb4", "18b-pp8-ga128-mb4"):
    print(*evidence.read(find("jeanzay_megatron_performance/" + row)[0]).errata_of(row), sep="\\n")
sys.exit("torch" in sys.modules)
"""
    done = run([sys.executable, "-c", program], timeout=60)
    assert done.returncode == 0, done.stdout
    nothing, gpus, tflops = done.stdout.splitlines()
    assert nothing == ""
    assert gpus.startswith("GPUs: printed 16, computed 4 x 8 x 1 = 32. Impossible as printed")
    assert "Later: 26.7" in tflops


def test_tables_are_named_with_and_without_their_flag(monkeypatch):
    asked: list[list[str]] = []

    def verify(tables, **_):
        asked.append(tables)
        raise KeyboardInterrupt

    monkeypatch.setattr(verification, "verify", verify)
    for flags in (["a", "b"], ["--table", "a", "b"], ["a", "--table", "b"]):
        with pytest.raises(KeyboardInterrupt):
            check_tables.main(flags)
    assert asked == [["a", "b"]] * 3
