"""Sweeps: points resolved, run once each, failures recorded; lines beside the published ones."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
from launching import ROOT, run
from second_device.running import needed, on_board

from ds_configs.plan import ANY_GPU
from launch import sweep
from launch.console import ends
from launch.experiments.sweeps import lines, points
from launch.experiments.sweeps.points import Sweep, swept_keys
from launch.records.result import Result, Speed, write_result
from launch.reports.tables import load
from recipes import catalog
from recipes.problems import ProblemsError

HEADS = "dgx2_gpt2_model_parallel/72x3072-h32-tp8"


def sweep_of(recipe: str, out: Path, *texts: str, settings: tuple[str, ...] = (), world=None) -> Sweep:
    base = catalog.load(recipe, settings)
    return Sweep(recipe, base, swept_keys(texts, settings), settings, False, 20, world, ANY_GPU, out)


@pytest.fixture
def no_limit(monkeypatch):
    monkeypatch.setattr(points, "device_limit", lambda: None)


@pytest.mark.parametrize(
    ("text", "said"),
    {
        "batch.mikro=1": "did you mean batch.micro?",
        "batch.micro": "it takes values",
        "batch.micro=1,,2": "it takes values",
        "batch.micro=1,1": "each once",
        "model.hidden=largest": "it stands alone, for batch.micro or model.layers",
        "batch.micro=largest,2": "it stands alone",
        "seed=1": "seed is given twice",
    }.items(),
)
def test_a_bad_sweep_is_refused(text, said):
    with pytest.raises(ProblemsError, match="--sweep") as refused:
        swept_keys([text], ["seed=7"])
    assert said in str(refused.value).replace("\n", " ")


def test_the_rest_of_a_layout_follows_from_swept_values(tmp_path, no_limit):
    """The batch study keeps accumulation, the rank study the number of processes, as in the document."""
    batches = sweep_of(HEADS, tmp_path, "batch.micro=8,16,x")
    own, wide, refused = (batches.point(values) for values in batches.combinations())
    assert (own.processes, own.settings[-2:]) == (16, ("batch.micro=8", "batch.global=16"))
    assert wide.settings[-1] == "batch.global=32" and wide.name == "batch.micro=16"
    assert not own.refused and "batch.micro" in str(refused.refused[0])
    ranks = sweep_of(HEADS, tmp_path, "parallel.tp=2,8")
    assert [ranks.point(values).processes for values in ranks.combinations()] == [16, 16]
    free = sweep_of("default/sotu", tmp_path, "parallel.tp=1,2", "ds_config=zero1,/x.json")
    found = [free.point(values) for values in free.combinations()]
    assert [(each.processes, bool(each.refused)) for each in found] == [
        (1, False),
        (1, True),
        (2, False),
        (1, True),
    ]
    assert found[1].name == "parallel.tp=1-ds_config=%2fx.json"
    held = sweep_of("default/sotu", tmp_path, "batch.micro=3", settings=("batch.global=8",))
    assert "micro x accumulation x dp = global" in str(held.point(("3",)).refused[0])


def test_published_rows_beside_a_sweep_differ_in_the_swept_fields_alone():
    def study(recipe: str, *keys: str) -> list[tuple[object, ...]]:
        table, _ = catalog.find(recipe)
        found = lines.published_lines(load(table), catalog.load(recipe), keys)
        return [(*line.values, line.samples_per_s or line.status) for line in found]

    assert study(HEADS, "model.heads") == [(32, 5.99), (24, 6.15), (16, 6.3), (8, 6.63)]
    oom = "dgx2_gpt2_data_parallel/40x1536-b8"
    assert study(oom, "batch.micro") == [(24, "OOM"), (8, 50.53), (2, "OOM")]
    ranks = "dgx2_bert_model_parallel/64x2304-tp4-b2"
    assert study(ranks, "parallel.tp", "batch.micro") == [(4, 2, 12.8), (8, 8, 18.37)]
    assert study(ranks, "parallel.tp") == [(4, 12.8)]


def write_run(command: list[str], log: Path, largest: int = 5) -> int:
    """Stand in for a run: more samples than `largest` find no memory, 7 crash."""
    micro = int(next(word for word in command if word.startswith("batch.micro=")).partition("=")[2])
    directory = Path(command[command.index("--out") + 1])
    log.write_text(f"\nbroken {micro}\n\n")
    if micro == 7:
        return 1
    directory.mkdir(exist_ok=True)
    (directory / "recipe.yaml").write_text("{}")
    if micro > largest:
        (directory / "error-rank-0.txt").write_text("Traceback\ntorch.OutOfMemoryError: no room\n")
        return 1
    write_result(directory / "result.json", Result("a/b", "ok", speed=Speed(1.0, samples_per_s=float(micro))))
    return 0


def test_each_point_is_run_once_and_a_failing_one_is_a_line(tmp_path, monkeypatch, no_limit):
    started = []

    def started_run(command: list[str], log: Path) -> int:
        started.append(log.stem)
        return write_run(command, log)

    monkeypatch.setattr(points, "run_and_wait", started_run)
    swept = sweep_of(HEADS, tmp_path, "batch.micro=2,7,8,4,x")
    found = list(swept.run())
    assert [line.status for line in found] == ["ok", "failed", "OOM", "ok", "refused"]
    assert "exit code 1: broken 7" in found[1].note and "OutOfMemoryError: no room" in found[2].note
    assert len(started) == 4
    assert list(swept.run()) == found and started[4:] == ["batch.micro=7"]  # a crash is tried again
    rows = lines.published_lines(load(catalog.find(HEADS)[0]), swept.base, ("batch.micro",))
    lines.write([*found, *rows], ("batch.micro",), "$5 study", tmp_path)
    with (tmp_path / "sweep.csv").open() as file:
        sheet = list(csv.DictReader(file))
    assert [row["samples_per_s"] for row in sheet] == ["2.0", "", "", "4.0", "", "5.99"]
    assert "| 8 | OOM |" in (tmp_path / "sweep.md").read_text()
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    text = lines.as_text([*found, *rows], ("batch.micro",), None)
    assert "published" in text and "no room" in text


def test_the_largest_value_is_bisected(tmp_path, monkeypatch, no_limit):
    monkeypatch.setattr(points, "run_and_wait", write_run)
    swept = sweep_of(HEADS, tmp_path, "batch.micro=largest", "model.heads=32,16")
    tried = [(int(line.values[0]), line.status) for line in swept.run()]
    assert tried == 2 * [(1, "ok"), (2, "ok"), (4, "ok"), (8, "OOM"), (6, "OOM"), (5, "ok")]


@pytest.mark.parametrize(
    ("flags", "said"),
    {
        "--sweep model.heads=7,9": "not divisible by model.heads=9",
        "--sweep batch.micro=largest": "largest on a CPU",
        "--sweep steps=2 --recipe nosuch/row": "nosuch",
        "--sweep steps=2 --out full": "full is not empty",
    }.items(),
)
def test_refusals_start_nothing(tmp_path, monkeypatch, capsys, flags, said):
    monkeypatch.chdir(tmp_path)
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "full" / "mine").mkdir(parents=True)
    monkeypatch.setattr("sys.argv", [sweep.__file__, "--tiny", *flags.split()])
    monkeypatch.setattr(points, "run_and_wait", lambda *_: pytest.fail("started"))
    with pytest.raises(SystemExit) as ended:
        ends.run(sweep.main)
    assert ended.value.code == 2 and said in capsys.readouterr().err.replace("\n", " ")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@needed
@pytest.mark.long
def test_a_sweep_meets_the_end_of_memory(tmp_path):
    flags = ["--tiny", "--steps", "6", "--ds_config", "zero1", "--out", str(tmp_path / "out")]
    command = [str(ROOT / "launch/sweep.py"), *flags, "--sweep", "batch.micro=2,64"]
    done = run([sys.executable, *command], env=on_board(BOARD_MEMORY_MB=12), timeout=400)
    assert done.returncode == 0, done.stdout
    with (tmp_path / "out" / "sweep.csv").open() as file:
        assert [row["status"] for row in csv.DictReader(file)] == ["ok", "OOM"]
    started = (tmp_path / "out" / "runs.json").read_text()
    other = run([sys.executable, *command, "--set", "seed=3"], env=on_board(BOARD_MEMORY_MB=12))
    assert other.returncode == 2 and "runs of other arguments" in other.stdout
    assert (tmp_path / "out" / "runs.json").read_text() == started
