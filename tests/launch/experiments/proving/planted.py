"""Mistakes planted in loops of strangers, and a proof of each.

    PYTHONPATH=. python tests/launch/experiments/proving/planted.py        what is said of each
    PYTHONPATH=. python tests/launch/experiments/proving/planted.py "own mean" --keep DIR

A mistake is none in one process, so the sound loop's run there is the reference of all.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from launch.experiments.proving.layout import Layout, layout_of
from launch.experiments.proving.proving import Reference
from launch.experiments.proving.runs import launch
from launch.experiments.proving.task import Task
from launch.experiments.proving.text import of_first
from launch.experiments.proving.verdict import Row, row_of

ROOT = Path(__file__).resolve().parents[4]
BY_HAND = Path(__file__).parent / "loops" / "by_hand.py"
DEEPSPEED = ROOT / "launch/experiments/adapters/deepspeed_loop.py"
STEPS = 3


@dataclass(frozen=True)
class Mistake:
    """Text of a loop, what it is replaced by, the layout under which it shows, and the kind to be said.

    `more`: other replacements of the same mistake.
    """

    name: str
    loop: Path
    layout: str
    kind: str
    right: str
    wrong: str
    more: tuple[tuple[str, str], ...] = ()
    resumed: bool = False

    def plant(self, folder: Path) -> Path:
        """Write the loop with the mistake; return its file."""
        text = self.loop.read_text()
        for right, wrong in ((self.right, self.wrong), *self.more):
            assert text.count(right) == 1, f"{self.name}: {right!r} stands {text.count(right)} times"
            text = text.replace(right, wrong)
        file = folder / f"{self.name.replace(' ', '_')}.py"
        file.write_text(text)
        return file


COUNT = 'count = ranks.sum(mine["counts"].sum(), ranks.dp_group)'
EVERY = "proof.rows(mine, number, accumulation)\n"
HEAD = "F.linear(Enter.apply(self.norm(hidden), ranks), self.embedding)"
NORM = "norm = (ranks.sum(squares[cut].sum(), ranks.tp_group) + squares[~cut].sum()).sqrt()"
ROW = "Leave.apply(F.linear(hidden, self.weight), self.ranks) + self.bias"
SYNCED = "synced = number == accumulation - 1"
BACK = "return ctx.ranks.whole(gradient, 1) if ctx.ranks.sp else gradient, None"
CLIPPED_FIRST = """for parameter in bare.parameters():
            parameter.grad = ranks.sum(parameter.grad, ranks.dp_group) / ranks.dp
        optimizer.step()
        schedule"""
HAND, DS = BY_HAND, DEEPSPEED
MISTAKES = (
    Mistake("own mean", HAND, "dp2", "means", COUNT, 'count = mine["counts"].sum() * ranks.dp'),
    Mistake(
        "mean of means",
        HAND,
        "dp2-accumulation2",
        "means",
        ".sum() / count\n",
        '.sum() / micro["counts"].sum() / accumulation / ranks.dp\n',
    ),
    Mistake(
        "padding counted",
        HAND,
        "dp2",
        "counts",
        COUNT,
        'longest = mine["counts"].sum(1).max()\n'
        '        count = mine["counts"].sum() * ranks.sum(longest, ranks.dp_group) / longest',
    ),
    Mistake("no last sync", HAND, "dp2-accumulation2", "not summed", SYNCED, "synced = number == 0"),
    Mistake(
        "zeroed each time",
        HAND,
        "dp2-accumulation2",
        "missing",
        EVERY,
        EVERY + "            optimizer.zero_grad()\n",
    ),
    Mistake("head outside", HAND, "tp2", "not summed", HEAD, "F.linear(self.norm(hidden), self.embedding)"),
    Mistake(
        "norms not summed",
        HAND,
        "tp2-sp",
        "not summed",
        "uncut = ranks.sp and not",
        "uncut = ranks.sp and parameter.dim() > 1 and not",
    ),
    Mistake(
        "summed twice",
        HAND,
        "tp2",
        "factor",
        BACK,
        BACK.replace("else gradient", "else ctx.ranks.sum(gradient, ctx.ranks.tp_group)"),
    ),
    Mistake("norm of a rank", HAND, "tp2-clip-drop", "norm", NORM, "norm = squares.sum().sqrt()"),
    Mistake(
        "norm counts copies",
        HAND,
        "tp2-clip-drop",
        "norm",
        NORM,
        "norm = ranks.sum(squares.sum(), ranks.tp_group).sqrt()",
    ),
    Mistake(
        "clipped first",
        HAND,
        "dp2-clip-drop",
        "clipped",
        SYNCED,
        "synced = False",
        more=(("optimizer.step()\n        schedule", CLIPPED_FIRST),),
    ),
    Mistake(
        "masks of a rank",
        HAND,
        "tp2-clip-drop",
        "random",
        "torch.initial_seed() + numbers",
        "torch.initial_seed() + numbers + 100 * self.ranks.tp_rank",
    ),
    Mistake(
        "masks alike",
        HAND,
        "dp2-clip-drop",
        "random",
        'model(micro["tokens"][:, :-1], micro["numbers"])',
        'model(micro["tokens"][:, :-1], micro["numbers"] - ranks.dp_rank * len(mine["numbers"]))',
    ),
    Mistake(
        "bias on every rank",
        HAND,
        "tp2",
        "forward",
        ROW,
        "Leave.apply(F.linear(hidden, self.weight, self.bias), self.ranks)",
    ),
    Mistake(
        "positions shifted",
        HAND,
        "tp2-sp",
        "forward",
        "ranks.part(self.positions, 0) if",
        "self.positions[: hidden.shape[1]] if",
    ),
    Mistake(
        "vocabulary padded",
        HAND,
        "tp2",
        "forward",
        "return Gather.apply(logits, ranks) + 0.1 * self.seen.log1p()",
        "return F.pad(Gather.apply(logits, ranks) + 0.1 * self.seen.log1p(), (0, 8 * ranks.tp - 8))",
    ),
    Mistake(
        "buffer of a rank",
        HAND,
        "dp2",
        "not summed",
        "bare.seen += ranks.sum(tokens.float(), ranks.dp_group)",
        "bare.seen += tokens",
    ),
    Mistake(
        "decay on one rank",
        HAND,
        "dp2",
        "decay",
        '"weight_decay": 0.1',
        '"weight_decay": 0.1 * (ranks.dp_rank == 0)',
    ),
    Mistake(
        "schedule twice",
        HAND,
        "dp2",
        "rate",
        "schedule.step()\n",
        "[schedule.step() for _ in range(ranks.dp)]\n",
    ),
    Mistake(
        "stale after load",
        HAND,
        "dp2",
        "still",
        'load_state_dict(saved["model"])',
        'load_state_dict(saved["model"], assign=True)',
        resumed=True,
    ),
    Mistake("sent over all", HAND, "tp2", "initial", "process_group=ranks.dp_group", "process_group=None"),
    Mistake("same rows", DS, "dp2-zero1", "missing", "(rows, proof.rank)", "(rows, 0)"),
    Mistake("rate times ranks", DS, "dp2-zero3", "rate", '"lr": 1e-3', '"lr": 1e-3 * proof.layout["dp"]'),
    Mistake(
        "moments not loaded",
        HAND,
        "dp2",
        "history",
        'optimizer.load_state_dict(saved["optimizer"])',
        "pass",
        resumed=True,
    ),
    Mistake(
        "moments left out",
        DS,
        "dp2-zero1",
        "history",
        "str(proof.resumed)",
        "str(proof.resumed), load_optimizer_states=False",
        resumed=True,
    ),
)
SOUND = (
    (BY_HAND, "dp2-accumulation2", False),
    (BY_HAND, "tp2", False),
    (BY_HAND, "tp2-sp-clip-drop", False),
    (BY_HAND, "dp2-clip-drop", False),
    (BY_HAND, "dp2", True),
    (DEEPSPEED, "dp2-zero1", True),
    (DEEPSPEED, "dp2-zero3", False),
)


@dataclass(frozen=True)
class Case:
    """A loop under a layout, and what it is called."""

    name: str
    loop: Path
    file: Path
    layout: Layout
    resumed: bool

    @property
    def words(self) -> str:
        """The layout of the one process that it is compared with."""
        words = [word for word in ("clip", "drop") if self.layout[word]]
        return "-".join(words) or "dp1"


def prove_all(cases: Iterable[Case], out: Path) -> dict[str, Row]:
    """Return what is found of each: a launch for each loop and words in one process, one for all layouts."""
    cases = [*cases]
    references = {}
    for loop, words in sorted({(each.loop, each.words) for each in cases}):
        numbers = {each.layout.shares for each in cases if (each.loop, each.words) == (loop, words)}
        task = Task(str(loop), words, str(out / f"{loop.stem}-{words}"), STEPS)
        references[loop, words] = Reference(task, numbers)
    tasks = {}
    for case in cases:
        reference = references[case.loop, case.words]
        under = {"adapter": str(case.file), "layout": case.layout.name, "out": str(out / case.name)}
        task = reference.compared(replace(reference.task, **under))
        tasks[case.name] = [task]
        if case.resumed:
            saved = f"{task.out}/checkpoint"
            first = replace(task, out=f"{task.out}-first", steps=1, checkpoint=saved)
            tasks[case.name] = [first, replace(task, done=1, steps=STEPS - 1, resumed=saved)]
    for ranks in sorted({each.layout.ranks for each in cases}):
        of_ranks = [tasks[each.name] for each in cases if each.layout.ranks == ranks]
        failure = launch([*itertools.chain(*of_ranks)], ranks)
        assert not failure, failure
    rows = {}
    for case in cases:
        reference = references[case.loop, case.words]
        task = tasks[case.name][-1]
        rows[case.name] = row_of(case.layout, task, reference.found, reference.bounds, reference.shares)
    return rows


def alone(cases: Iterable[Case]) -> list[Case]:
    """Return the loops in one process, where a mistake is none."""
    return [
        replace(each, name=f"{each.name} alone", layout=layout_of(each.words), resumed=False)
        for each in cases
    ]


def planted(mistakes: Iterable[Mistake], folder: Path) -> list[Case]:
    """Write the loops with the mistakes."""
    folder.mkdir(parents=True)
    return [
        Case(each.name, each.loop, each.plant(folder), layout_of(each.layout), each.resumed)
        for each in mistakes
    ]


def sound() -> list[Case]:
    """Return the loops as they are."""
    return [
        Case(f"{loop.stem} {layout}", loop, loop, layout_of(layout), resumed)
        for loop, layout, resumed in SOUND
    ]


def said(row: Row) -> str:
    """Say what was found."""
    if row.first:
        return f"{row.first.mistake.kind}: {of_first(row.first)}"
    if row.agrees:
        return "agrees"
    return f"{row.failure or row.lost} loss {row.loss:.1e} norm {row.norm:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="words of the mistakes' names (default: all)")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="new directory of the tensors")
    args = parser.parse_args()
    chosen = [each for each in MISTAKES if not args.names or any(name in each.name for name in args.names)]
    with tempfile.TemporaryDirectory() as temporary:
        out = args.keep or Path(temporary)
        cases = planted(chosen, out / "planted")
        if not args.names:
            cases += sound()
        rows = prove_all(cases, out)
        right = 0
        for mistake in chosen:
            row = rows.pop(mistake.name)
            kind = row.first.mistake.kind if row.first else ""
            right += kind == mistake.kind
            print(f"{mistake.name} ({mistake.layout}, expected {mistake.kind}): {said(row)}")
        for name, row in rows.items():
            print(f"sound {name}: {said(row)}")
        print(f"{right} kinds of {len(chosen)} right")


if __name__ == "__main__":
    main()
