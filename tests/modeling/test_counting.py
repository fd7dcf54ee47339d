"""Parameters counted at every rank, against DeepSpeed's real PipelineModule in a process group whose other ranks do not exist."""

from types import SimpleNamespace

import deepspeed
import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from modeling import bert, counting, gpt2
from modeling.initialization import Init

GPT2_SHAPE = gpt2.GPT2Shape(layers=5, hidden=32, heads=4, vocab=70, padded_vocab=256, positions=16)
BERT_SHAPES = [
    bert.BertShape(
        layers=5,
        hidden=32,
        heads=4,
        vocab=70,
        padded_vocab=256,
        positions=16,
        post_norm=post,
        sentence_head=head,
    )
    for post, head in ((True, "nsp"), (False, "none"))
]
LAYOUTS = [(2, 2), (1, 3), (2, 1)]
PIPELINES = {gpt2.layer_list: gpt2.gpt2_pipeline, bert.layer_list: bert.bert_pipeline}
PLAIN = {gpt2.layer_list: gpt2.GPT2, bert.layer_list: bert.Bert}


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
@pytest.mark.parametrize(
    ("layer_list", "shape"),
    [(gpt2.layer_list, GPT2_SHAPE), *((bert.layer_list, shape) for shape in BERT_SHAPES)],
)
def test_ranks_hold_what_the_real_modules_hold(alone, capsys, layer_list, shape, tp, pp):
    counted = counting.count(layer_list, shape, tp, pp)
    init, once, real = Init(1, 0.02, shape.layers), {}, []
    for rank in range(tp * pp):
        group = alone(rank, tp, tp * pp)
        if pp > 1:
            module = PIPELINES[layer_list](
                shape, grid=SimpleNamespace(tp=tp, pp=pp, dp=1), group=group, init=init
            )
            assert module.parts == counting.bounds(layer_list(shape, group=group, init=init), pp)
        else:
            module = PLAIN[layer_list](shape, group=group, init=init)
        dist.destroy_process_group()
        real.append(sum(p.numel() for p in module.parameters()))
        once |= {p.canonical_name: counting.whole_size(p) for p in module.parameters()}
    assert real == [held for stage in counted.held for held in stage]
    assert sum(once.values()) == counted.once and sum(counted.layers) == shape.layers


def test_counting_needs_no_process_group_and_refuses_a_real_one(alone):
    alone(0, 1, 2)
    with pytest.raises(RuntimeError, match="process group"), counting.tensor_rank(0, 2):
        pass
