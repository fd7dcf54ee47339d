"""Parameters counted at every rank, against DeepSpeed's real PipelineModule.

Its process group has ranks that do not exist.
"""

import contextlib
from math import prod
from types import SimpleNamespace

import deepspeed
import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from modeling import bert, gpt2
from modeling.cost.operation_count import balanced_stages
from modeling.initialization import Init, canonical_name
from tools.tables import counting
from tools.tables.counting import full_shape

SIZES = dict(layers=5, hidden=32, heads=4, vocab=70, padded_vocab=256, positions=16)
MODELS = [
    (gpt2.FAMILY, gpt2.GPT2Shape(**SIZES)),
    (bert.FAMILY, bert.BertShape(**SIZES, post_norm=True, sentence_head="nsp")),
    (bert.FAMILY, bert.BertShape(**SIZES)),
]
LAYOUTS = [(2, 2), (1, 3), (2, 1)]


@pytest.fixture
def alone(monkeypatch):
    """Be rank r of a world whose other ranks do not exist; collectives return at once and change nothing."""
    from deepspeed.comm import comm

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)  # it would be compiled
    monkeypatch.setattr(comm, "cdb", None)

    def start(rank: int, tp: int, world: int):
        """The tensor-parallel group of the rank; None for tp 1."""
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        if comm.cdb is None:
            deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
        return dist.new_group(list(range(rank // tp * tp, (rank // tp + 1) * tp))) if tp > 1 else None

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@pytest.mark.parametrize(("family", "shape"), MODELS)
def test_ranks_hold_what_the_real_modules_hold(alone, capsys, family, shape, tp, pp):
    stages = tuple(balanced_stages(shape.layers, pp, head=1.5)) if pp > 1 else (shape.layers,)
    counted = counting.count(family.layer_list, shape, tp, stages)
    init, once, real = Init(1, 0.02, shape.layers), {}, []
    for rank in range(tp * pp):
        group = alone(rank, tp, tp * pp)
        if pp > 1:
            grid = SimpleNamespace(tp=tp, pp=pp, dp=1, lend_groups=contextlib.nullcontext)
            module = family.pipeline(shape, grid=grid, group=group, init=init, stages=stages)
        else:
            module = family.plain(shape, group=group, init=init)
        dist.destroy_process_group()
        real.append(sum(p.numel() for p in module.parameters()))
        once |= {canonical_name(p): prod(full_shape(p)) for p in module.parameters()}
    assert real == [held for stage in counted.held for held in stage]
    assert sum(once.values()) == counted.once and sum(counted.layers) == shape.layers


def test_counting_needs_no_process_group_and_refuses_a_real_one(alone):
    alone(0, 1, 2)
    with pytest.raises(RuntimeError, match="process group"), counting.tensor_rank(0, 2):
        pass
