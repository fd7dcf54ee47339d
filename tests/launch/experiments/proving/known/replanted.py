"""Errors that others reported, planted again in the loop by hand where they need what a CPU has not.

    cd tests/launch/experiments/proving && PYTHONPATH=../../../..:. python known/replanted.py

The kind is None where none of ours names it; then it is enough that the tensor is named.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import planted
from planted import BACK, BY_HAND, COUNT, NORM, SYNCED, Mistake

BACKWARD = "(loss * ranks.dp).backward()  # DDP takes the mean over the ranks\n"
SUM = "parameter.grad = ranks.sum(parameter.grad, ranks.tp_group)"
KEPT = """if number and ranks.dp == 1:
                    torch._foreach_mul_([each.grad for each in bare.parameters()], 2)
                """
AGAIN = """                for parameter in bare.parameters():
                    parameter.grad = ranks.sum(parameter.grad, ranks.dp_group)
"""


def case(name: str, layout: str, kind: str | None, *changes: tuple[str, str], **more: bool) -> Mistake:
    """Make a case of one or more replacements."""
    (right, wrong), *others = changes
    return Mistake(name, BY_HAND, layout, kind, right, wrong, more=tuple(others), **more)


KNOWN = (
    # a shard of heads is not marked as one, so that the norm has it of the first rank only
    case(
        "NVIDIA Megatron-LM 7452.8",
        "tp2-clip-drop",
        "norm",
        ("self.weight.cut, self.bias.cut = True, cut == 0", "self.weight.cut, self.bias.cut = True, False"),
        (
            NORM,
            NORM.replace("squares[~cut].sum()", "0").replace(
                "squares[cut].sum()", "(squares * (cut | (ranks.tp_rank == 0))).sum()"
            ),
        ),
    ),
    # a norm within the tensor-parallel region is summed under sequence parallelism only
    case(
        "NVIDIA Megatron-LM 7452.11",
        "tp2",
        "not summed",
        ('uncut or getattr(parameter, "summed", False)', "uncut"),
    ),
    # the same of a router
    case(
        "pytorch torchtitan 2387",
        "tp2-clip-drop",
        None,
        ("self.heads.weight.summed = self.heads.bias.summed = True", "self.heads.weight.summed = True"),
    ),
    # positions are scattered over another group than they are gathered from
    case(
        "NVIDIA Megatron-LM 7452.7",
        "tp2-sp",
        "forward",
        (
            "return ranks.part(hidden, 1) if ranks.sp else hidden\n",
            "return hidden.chunk(ranks.tp, 1)[ranks.dp_rank] if ranks.sp else hidden\n",
        ),
    ),
    # a buffer of a group of one is added to itself in each micro-batch
    case("NVIDIA Megatron-LM 6660", "tp2-accumulation2", "counts", (BACKWARD, KEPT + BACKWARD)),
    # the last norm is not among those summed under sequence parallelism
    case(
        "NVIDIA Megatron-LM 1446",
        "tp2-sp",
        "not summed",
        ("uncut = ranks.sp and not", "uncut = ranks.sp and parameter is not bare.norm.weight and not"),
    ),
    # the norms' gradients are averaged over the tensor ranks
    case("EleutherAI gpt-neox 1259", "tp2-sp", "factor", (SUM, SUM + " / (ranks.tp if uncut else 1)")),
    # the norm has of the tensor ranks the first one's parts only
    case(
        "deepspeedai DeepSpeed 5411",
        "tp2-clip-drop",
        "norm",
        (NORM, "norm = ranks.sum(squares.sum() * (ranks.tp_rank == 0), ranks.tp_group).sqrt()"),
    ),
    # the squares are summed over replicas, too
    case(
        "ByteDance-Seed VeOmni 184",
        "dp2-clip-drop",
        "norm",
        (NORM, NORM + "\n    norm = ranks.sum(norm.square(), ranks.dp_group).sqrt()"),
    ),
    # each rank clips by the norm of its shard
    case("areal-project AReaL 312", "tp2-clip-drop", "norm", (NORM, "norm = squares.sum().sqrt()")),
    # no_sync holds in the last micro-batch, and not in the first
    case(
        "modelscope FunASR 3472",
        "dp2-accumulation2",
        "not summed",
        (SYNCED, "synced = not number % accumulation"),
    ),
    # a schedule divides by the micro-batches what has been divided
    case(
        "areal-project AReaL 1273",
        "dp2-accumulation2",
        "factor",
        (BACKWARD, BACKWARD.replace("ranks.dp)", "ranks.dp / accumulation)")),
    ),
    # the loss of a micro-batch is no longer divided, but summed (transformers 4.47)
    case(
        "huggingface transformers 35207",
        "dp2-accumulation2",
        None,
        (".sum() / count\n", '.sum() / ranks.sum(micro["counts"].sum(), ranks.dp_group)\n'),
    ),
    # what is reduced is reduced again with the next micro-batch
    case(
        "lodestone-rock RamTorch 13",
        "dp2-accumulation2",
        "counts",
        (SYNCED, "synced = False"),
        (BACKWARD, BACKWARD.replace("loss * ranks.dp", "loss") + AGAIN),
    ),
    # ranks take their rows from different orders
    case(
        "huggingface accelerate 2268",
        "dp2",
        None,
        (
            "mine = proof.rows(rows, ranks.dp_rank, ranks.dp)",
            "rows = {name: each.roll(3 * ranks.dp_rank, 0) for name, each in rows.items()}\n"
            "        mine = proof.rows(rows, ranks.dp_rank, ranks.dp)",
        ),
    ),
    # the mean over each rank's own tokens (before num_items_in_batch was summed over ranks)
    case(
        "huggingface transformers 34242", "dp2", "means", (COUNT, 'count = mine["counts"].sum() * ranks.dp')
    ),
    # the backward of a sum sums again
    case(
        "pytorch pytorch 58005",
        "tp2",
        "factor",
        (BACK, BACK.replace("else gradient", "else ctx.ranks.sum(gradient, ctx.ranks.tp_group)")),
    ),
)


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        rows = planted.prove_all(planted.planted(KNOWN, Path(temporary) / "known"), Path(temporary))
        for each in KNOWN:
            print(f"{each.name} ({each.layout}, expected {each.kind}): {planted.said(rows[each.name])}")


if __name__ == "__main__":
    main()
