"""Ranks train on the same thing, or none does; where each offloads to is its own affair."""

import runpy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ds_configs.plan import ANY_GPU
from ds_configs.resolver import resolve
from launch.machine import description
from launch.training import agreement
from launch.training.agreement import StepReport
from launch.training.early_ends import REASONS
from recipes import catalog

GPU = ANY_GPU
CORPUS = SimpleNamespace(summary={})


def plan(scratch):
    recipe = catalog.load(catalog.DEFAULT_RECIPE)
    return resolve(recipe, "zero_infinity", 2, GPU, {"MEGARECIPES_NVME": str(scratch)})


def test_reports_are_exchanged_by_the_name_of_torch_before_2_13(monkeypatch):
    monkeypatch.delattr(dist, "all_gather_single", raising=False)
    module = runpy.run_path(agreement.__file__)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        own = module["StepReport"](1, 0.5, written=True)
        assert module["send_report"](own, dist.group.WORLD)().table.tolist() == [[*own]]
    finally:
        dist.destroy_process_group()


def test_the_news_of_a_step_are_read_from_its_table():
    reports = [StepReport(own_seconds=s, written=True) for s in (4.0, 1.0, 2.0, 9.0)]
    reports[2] = StepReport(REASONS.index("SIGTERM"), 2.0, unreadable=True, overdue=True)
    news = agreement.RankReports(torch.tensor(reports, dtype=torch.float64))
    assert list(news.rank_seconds.values()) == [1.0, 3.0, 9.0, 3]
    assert news.stopped == "SIGTERM" and news.unreadable and not news.written and not news.overdue
    alone = agreement.RankReports(torch.tensor([reports[0]], dtype=torch.float64))
    assert not alone.rank_seconds and alone.stopped is None and alone.written and not alone.unreadable


def test_the_news_of_4096_ranks_are_no_list_of_reports(monkeypatch):
    """Objects of all rows were 7 ms a step on every rank."""
    made = []
    monkeypatch.setattr(StepReport, "__new__", lambda cls, *of: made.append(of))
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: made.append(x))
    news = agreement.RankReports(torch.zeros(4096, len(StepReport._fields), dtype=torch.float64))
    news.rank_seconds, news.stopped, news.unreadable, news.written, news.overdue  # noqa: B018
    assert not made


@pytest.fixture
def ranks():
    """Checks a rank after the ranks that were checked before."""
    facts = []

    def check(plan, compiled=False):
        facts.append(agreement.facts(plan, CORPUS, None, compiled))
        agreement.check(facts)

    return check


def test_each_machine_has_its_own_scratch_disk(ranks, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        resolved = plan(tmp_path / name)
        assert str(tmp_path / name) in str(resolved.ds)
        ranks(resolved)


def test_another_configuration_is_refused(ranks, tmp_path):
    ranks(plan(tmp_path))
    other = plan(tmp_path)
    zero = {**other.ds["zero_optimization"], "sub_group_size": 1}
    with pytest.raises(ValueError, match="resolved DeepSpeed configuration"):
        ranks(replace(other, ds={**other.ds, "zero_optimization": zero}))


def test_another_version_of_a_package_is_refused(ranks, tmp_path, monkeypatch):
    ranks(plan(tmp_path))
    found = description.versions()
    monkeypatch.setattr(description, "versions", lambda: {**found, "python": "3.1"})
    with pytest.raises(ValueError, match="version of python"):
        ranks(plan(tmp_path))


def test_compiled_and_eager_ranks_are_refused(ranks, tmp_path):
    ranks(plan(tmp_path), compiled=True)
    with pytest.raises(ValueError, match="compiled layers: False on .*, True on"):
        ranks(plan(tmp_path))
