import ast
import importlib
import inspect
import json
from importlib import metadata
from pathlib import Path

import pytest
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from packaging.version import Version

from ds_configs.findings import ConfigError
from ds_configs.resolver import resolve
from launch.deepspeed_fixes import versions, zero0
from launch.deepspeed_fixes.zero0 import DataParallelEngine
from launch.machine import description
from launch.training import job
from launch.training.job import plan_job
from recipes import catalog
from recipes.problems import ProblemsError

ROOT = Path(__file__).resolve().parents[3]
PUBLIC = {"deepspeed", "deepspeed.accelerator"}


@pytest.fixture
def release(monkeypatch):
    """Have `versions` find another release."""

    def put(text):
        monkeypatch.setattr(metadata, "version", lambda name: text)
        versions.installed.cache_clear()

    yield put
    versions.installed.cache_clear()


def imported():
    """Return what the product imports from modules within DeepSpeed."""
    found = {}
    for room in ("data", "ds_configs", "launch", "modeling", "recipes"):
        for file in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                module = getattr(node, "module", None) or ""
                inside = module.startswith("deepspeed.") and module not in PUBLIC
                if isinstance(node, ast.ImportFrom) and inside:
                    names = {each.name for each in node.names}
                    found.setdefault(module.removeprefix("deepspeed."), set()).update(names)
    return found


@pytest.mark.parametrize("module", sorted(imported()))
def test_the_installed_deepspeed_has_what_is_imported_of_its_insides(module):
    loaded = importlib.import_module(f"deepspeed.{module}")
    for name in imported()[module]:
        assert hasattr(loaded, name) or importlib.import_module(f"deepspeed.{module}.{name}")


def test_deepspeeds_engine_has_the_methods_that_stage_0_overrides():
    """`test_short_steps.py` has the optimizers'."""
    ours = [name for name, method in vars(DataParallelEngine).items() if inspect.isfunction(method)]
    assert ours and [name for name in ours if not hasattr(DeepSpeedEngine, name)] == []


def test_the_newest_release_that_was_seen_is_the_pinned_one():
    for file in ("requirements.txt", "bounds.txt"):
        assert f"deepspeed=={versions.SEEN[-1]}" in (ROOT / file).read_text()
    assert str(versions.installed()) in versions.SEEN
    assert [*versions.SEEN] == sorted(versions.SEEN, key=Version)


@pytest.mark.parametrize("text", ["0.18.9", "0.19.7+4c1a2b3", "0.19.8", "0.19.9", "1.0"])
def test_seen_and_newer_releases_may_train(release, text):
    release(text)
    versions.refuse_others()
    assert versions.is_newer_than_seen() == (text in ("0.19.9", "1.0"))


def test_an_older_release_is_refused_by_name(release):
    release("0.18.3")
    with pytest.raises(ProblemsError) as refused:
        description.detect_machine()
    wanted = (
        "DeepSpeed 0.18.3 is installed: 0.18.9 to 0.19.8 were seen to agree; pip install deepspeed==0.19.8"
    )
    assert str(refused.value) == wanted
    description.detect_machine(on_paper=True)


def test_methods_are_overridden_where_they_are_the_ones_that_were_compared(release):
    for text, stage_3 in (("0.19.7", False), ("0.19.8", True), ("0.20.0", True)):
        release(text)
        assert versions.is_as_overridden(DeepSpeedZeroOptimizer_Stage3) is stage_3
        assert versions.is_as_overridden(BF16_Optimizer)
        assert versions.is_as_overridden(zero0.MasterWeights)


def test_gradients_that_an_older_release_would_not_average_are_refused(release, tmp_path):
    given = json.loads((ROOT / "ds_configs" / "zero2.json").read_text())
    given["zero_optimization"]["contiguous_gradients"] = False
    (tmp_path / "mine.json").write_text(json.dumps(given))
    plan = resolve(catalog.load(), str(tmp_path / "mine.json"), 2, description.detect_machine())
    job.check_by_deepspeed(plan, "mine.json")
    release("0.19.7")
    with pytest.raises(ConfigError, match="DeepSpeed 0.19.7 then averages no gradient on a CPU"):
        job.check_by_deepspeed(plan, "mine.json")


def test_a_release_that_nobody_saw_is_kept_with_the_result(release):
    release("0.20.0")
    machine = description.detect_machine()
    plan = plan_job(catalog.load(tiny=True), "zero1", machine, compiled=False, initial_weights=None)
    kept = [str(notice) for notice in plan.notices if notice.key == "deepspeed"]
    assert kept == ["DeepSpeed 0.20.0: newer than 0.19.8, the newest seen to agree"]
