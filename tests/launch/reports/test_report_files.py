"""What a report is asked of, and where it may be written."""

from __future__ import annotations

from pathlib import Path

from reported import make_run

from launch import report
from launch.reports import csvfile, runs, writing


def test_what_cannot_be_reported_is_refused_at_once(tables, tmp_path, capsys):
    (tmp_path / "holiday").mkdir()
    (tmp_path / "holiday" / "photo.jpg").write_text("")
    (tmp_path / "file").write_text("")
    out = tmp_path / "out"
    asked = [str(tmp_path / name) for name in ("holiday", "file", "holidey", "none*")]
    assert report.main([*asked, "--table", "widgts", "--out", str(out)], tables) == 2
    error = capsys.readouterr().err
    for said in (
        "did you mean widgets?",
        "it holds photo.jpg",
        "is a file",
        "did you mean holiday?",
        "no run directory matches",
    ):
        assert said in error, said
    assert not out.exists()
    assert report.main([], tables) == 2 and "--all" in capsys.readouterr().err


def test_only_former_reports_are_replaced(tables, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert report.main(["--table", "quiet", "--out", str(tmp_path)], tables) == 0
    assert "replaced" not in capsys.readouterr().out
    assert report.main(["--table", "quiet", "--out", str(tmp_path)], tables) == 0
    assert "replaced" in capsys.readouterr().out
    (tmp_path / "report.csv").write_text("my own notes")
    before = (tmp_path / "report.html").read_bytes()
    assert report.main(["--table", "quiet", "--out", str(tmp_path)], tables) == 2
    assert "report.csv" in capsys.readouterr().err
    assert (tmp_path / "report.csv").read_text() == "my own notes" and (
        tmp_path / "report.html"
    ).read_bytes() == before
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_directory_is_made_only_for_a_report(tables, tmp_path, capsys, monkeypatch):
    def refuse(*_, **__):
        raise ValueError("refused late")

    out = tmp_path / "deep" / "out"
    monkeypatch.setattr("launch.reports.document.assemble", refuse)
    assert report.main(["--table", "quiet", "--out", str(out)], tables) == 2
    assert "refused late" in capsys.readouterr().err and not (tmp_path / "deep").exists()
    (tmp_path / "file").write_text("")
    assert report.main(["--table", "quiet", "--out", str(tmp_path / "file" / "out")], tables) == 2
    assert "is a file" in capsys.readouterr().err
    (tmp_path / "theirs").mkdir()

    def denied(dir):
        raise PermissionError(13, "Permission denied", str(dir))

    monkeypatch.setattr("launch.console.arguments.tempfile.TemporaryFile", denied)
    assert report.main(["--table", "quiet", "--out", str(tmp_path / "theirs" / "out")], tables) == 2
    said = capsys.readouterr().err
    assert f"--out {tmp_path / 'theirs' / 'out'} cannot be made (Permission denied)" in said
    assert not any((tmp_path / "theirs").iterdir())


def test_a_report_is_not_put_into_a_run(tables, tmp_path, capsys):
    run = make_run(tmp_path / "r", tables, "widgets/fast")
    before = sorted(path.name for path in run.iterdir())
    assert report.main([str(run), "--out", str(run)], tables) == 2
    assert (
        "is a run directory" in capsys.readouterr().err
        and sorted(path.name for path in run.iterdir()) == before
    )


def test_default_places():
    assert str(writing.default_directory(["widgets"], [], False)) == "reports/widgets"
    assert str(writing.default_directory([], ["a/zero1", "b/zero1"], False)) == "reports/a-zero1-and-b-zero1"
    assert str(writing.default_directory([], ["a", "b"], True)) == "reports/all-tables"
    assert str(writing.default_directory([], [str(n) for n in range(9)], False)) == "reports/runs"
    assert str(writing.default_directory([], [".."], False)) == "reports/runs"


def test_finding_runs(tmp_path, monkeypatch):
    for name in ("a/x", "b/x", "c"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text("")
    (tmp_path / "c" / "checkpoints").mkdir()
    (tmp_path / "c" / "checkpoints" / "recipe.yaml").write_text("")
    (tmp_path / "b" / "up").symlink_to(tmp_path)
    found = runs.find([str(tmp_path), str(tmp_path / "a" / "x"), str(tmp_path / "*")])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["a/x", "b/x", "c"]
    assert runs.labels(found) == ["a/x", "b/x", "c"]
    monkeypatch.chdir(tmp_path)
    assert runs.find(["[ab]/x"]) == [Path("a/x"), Path("b/x")]


def test_no_cell_of_the_csv_is_computed_by_a_spreadsheet():
    cells = {"run": Path("=1+2"), "status": "@x", "loss": -1.5, "empty": "", "note": "a=b", "none": None}
    inert = {**cells, "run": "'=1+2", "status": "'@x"}
    assert csvfile._inert(cells) == inert
