"""The rank map is that of the processes which train, and says where groups cross nodes."""

from types import SimpleNamespace

import pytest
from cluster_jobs import job

from launch.planning.clusters import cluster_text
from launch.planning.page import Page
from modeling.parallel import process_grid
from recipes.layout import Layout


def layout(tp: int, pp: int, dp: int) -> Layout:
    return Layout(tp=tp, pp=pp, dp=dp, micro=1, accumulation=1, global_batch=dp)


def shown(line: str, *, whole: bool) -> str:
    """The map, below the line that states the order of ranks."""
    page = Page(80)
    cluster_text.add_map(page, job(line), whole=whole)
    return str(page).partition("\n")[2]


class World(list):
    bound_device_id = None


@pytest.mark.parametrize("degrees", [(1, 1, 1), (4, 1, 1), (1, 3, 2), (2, 2, 2), (2, 3, 4), (8, 2, 3)])
def test_every_rank_is_where_training_puts_it(degrees, monkeypatch):
    tp, pp, dp = degrees
    world = tp * pp * dp
    for rank in range(world):
        alone = SimpleNamespace(
            get_world_size=lambda: world, get_rank=lambda rank=rank: rank,
            new_group=lambda ranks=None, *_, **__: ranks, ProcessGroup=object,
            group=SimpleNamespace(WORLD=World(range(world))),
        )  # fmt: skip
        monkeypatch.setattr(process_grid, "dist", alone)
        grid = process_grid.ProcessGrid(tp, pp, dp)
        place = cluster_text.place(rank, layout(*degrees), gpus=2)
        assert (place.at, place.host * 2 + place.gpu) == (grid.at, rank)
        of_kind = {"tensor": grid.tensor_group, "pipeline": grid.pipeline_group, "data": grid.data_group}
        for kind, ranks in of_kind.items():
            own = [group for group in cluster_text.GROUPS[kind](tp, pp, dp) if rank in group]
            assert own == [[rank] if ranks is None else ranks]


@pytest.mark.parametrize("gpus", [2, 3, 4, 8])
def test_stretches_hold_every_rank_once_and_one_stage_each(gpus):
    there = layout(2, 3, 4)
    for by_host in (False, True):
        parts = list(cluster_text.stretches(there, gpus, by_host=by_host))
        assert [rank for first, last in parts for rank in range(first.rank, last.rank + 1)] == list(range(24))
        assert all(first.at.pp == last.at.pp for first, last in parts)
        assert not by_host or all(first.host == last.host for first, last in parts)


def test_groups_that_cross_nodes_are_counted():
    tensor, pipeline, data = cluster_text.spreads(layout(4, 2, 2), gpus=4)
    assert (tensor.crossing, pipeline.hosts, data.crossing) == (0, 2, 8)
    tensor, *_ = cluster_text.spreads(layout(3, 1, 4), gpus=4)  # [0 1 2] [3|4 5] [6 7|8] [9 10 11]
    assert (tensor.groups, tensor.crossing, tensor.hosts) == (4, 2, 2)


def test_tensor_parallelism_across_nodes_is_remarked_with_a_cure():
    assert not any("tensor" in text for text in cluster_text.remarks(job("3d")))
    crossing = "--recipe parallel_kinds/3d --set parallel.tp=4 --set parallel.pp=1 --gpus-per-node 2"
    said, *_ = cluster_text.remarks(job(crossing))
    assert "2 of 2 groups of 4" in said and "parallel.tp=2" in said


def test_the_cure_is_a_degree_that_the_model_can_have():
    """Four heads on six GPUs: not 3, which would fill a node."""
    layout = "--set parallel.tp=4 --set parallel.pp=1 --set parallel.dp=3 --set batch.global=12"
    said, *_ = cluster_text.remarks(job(f"--recipe parallel_kinds/3d --gpus-per-node 6 {layout}"))
    assert "1 of 3 groups of 4" in said and "parallel.tp=2" in said


def test_part_of_a_node_is_remarked():
    said, *_ = cluster_text.remarks(job("part"))
    assert said.startswith("8 of the 16 GPUs of each node are not taken")


def test_the_map_of_a_thousand_ranks_is_short_unless_all_are_asked_for():
    large = "--recipe openwebtext/gpt2-124m --hardware a100-80x8 --nodes 128 --set batch.global=8192"
    short = shown(large, whole=False)
    line = short.splitlines()[1].split()
    assert line == ["0", "0-1023", "0-1023", "0", "node-0", "to", "node-127"]
    whole = shown(large, whole=True).splitlines()
    assert len(whole) == 1 + 1024 and whole[-1].split() == ["1023", "node-127", "7", "0", "1023", "0"]


def test_stages_are_elided_where_there_are_many():
    assert shown("3d", whole=False).count("\n") == 17
    many = "--recipe jeanzay_megatron_deepspeed_3d/48b-pp16-ga256-mb4 --gpus-per-node 2"
    lines = shown(many, whole=False).splitlines()
    assert len(lines) == 18 and lines[-2].split() == ["15", "60-63", "0", "0-3", "node-30", "to", "node-31"]
    deep = shown("--recipe jeanzay_megatron_performance/48b-pp32-ga256-mb4", whole=False).splitlines()
    assert len(deep) == 18 and deep[14].split()[4:] == ["17", "more", "stages"]


def test_every_rank_is_listed_with_its_host_and_its_place():
    lines = shown("--recipe parallel_kinds/3d --gpus-per-node 4 --hosts x y", whole=True).splitlines()
    assert len(lines) == 1 + 8 and lines[0].split() == ["rank", "host", "GPU", "tensor", "data", "stage"]
    assert lines[1 + 6].split() == ["6", "y", "2", "0", "1", "1"]
