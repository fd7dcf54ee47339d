"""tools/check_tables.py: exit codes, files, what it refuses."""

import re
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


TABLE = "a100_blog_table4"
EXPLAINED = '    - {quantity: weak scaling, printed: "79.6%", computed: "85 / 111 = 76.6 %", rows: [8.7b]}\n'


def test_command_exits_0_and_writes_every_check(capsys):
    assert command(TABLE, "sber_path_to_13b", "--verbose") == 0
    shown = capsys.readouterr().out
    assert "weak scaling: printed 90.7%, computed 103 / 111 = 92.8 %" in shown
    assert shown.count("\n  erratum ") == 6 and "UNEXPLAINED:" not in shown
    in_order = ("Every check", "Errata:", "Not checkable:", "Every disagreement is explained.")
    assert sorted(in_order, key=shown.index) == list(in_order)
    assert len(re.findall(r"\n  (ok|open|erratum|   ) ", shown)) > 400


def test_a_missing_explanation_exits_1_and_stands_last(changed, capsys):
    changed(EXPLAINED, "")
    assert command(TABLE) == 1
    last = capsys.readouterr().out.split("!!! UNEXPLAINED: 1")[1]
    assert "a100_blog_table4/8.7b weak scaling: printed 79.6%" in last
    assert "1 are UNEXPLAINED, 0 explanations are stale" in last


def test_a_stale_explanation_exits_1(changed, capsys):
    changed(EXPLAINED, EXPLAINED + '    - {quantity: TFLOPS, printed: "1", computed: "2", rows: [2b]}\n')
    assert command(TABLE) == 1
    stale = capsys.readouterr().out.split("!!! STALE: 1")[1]
    assert "a100_blog_table4/2b TFLOPS: printed 1, computed 2" in stale


def test_an_unknown_table_is_refused():
    with pytest.raises(ValueError, match="did you mean a100_blog_table4"):
        command("a100_blog_table5")


def test_errata_of_a_row_need_no_torch():
    program = """
import sys
from launch.tables import evidence
from recipes.catalog import find
for row in ("18b-pp4-ga128-mb4", "18b-pp8-ga128-mb4"):
    print(*evidence.read(find("jeanzay_megatron_performance/" + row).table).errata_of(row), sep="\\n")
sys.exit("torch" in sys.modules)
"""
    done = run([sys.executable, "-c", program], timeout=60)
    assert done.returncode == 0, done.stdout
    nothing, gpus, tflops = done.stdout.splitlines()
    assert nothing == ""
    assert gpus.startswith("GPUs: printed 16, computed 4 x 8 x 1 = 32. Impossible as printed")
    assert "Later: 26.7" in tflops
