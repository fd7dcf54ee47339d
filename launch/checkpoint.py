"""Look into the checkpoints of a run: what there is, whether it is whole, how two differ.

python launch/checkpoint.py show runs/default-sotu-zero3_offload
python launch/checkpoint.py verify runs/default-sotu-zero3_offload
python launch/checkpoint.py diff runs/a runs/b
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.console import arguments, ends, quiet, terminal
from launch.console.numbers import NOTHING
from launch.console.text_table import aligned, table
from recipes.files import path_of
from recipes.plural import counted
from recipes.problems import some

if TYPE_CHECKING:
    from launch.checkpoints.inspection import Difference
    from launch.checkpoints.manifest import Manifest
    from launch.checkpoints.run_checkpoints import Checkpoint, Damaged

Types = dict[str, dict[str, str]]  # tensor -> kind -> the type of its numbers

EXAMPLES = """\
examples:
  python launch/checkpoint.py show runs/default-sotu-zero3_offload
      every checkpoint of the run: step, size, the layout that saved it,
      whether its files are there
  python launch/checkpoint.py show runs/default-sotu-zero3_offload --step 200
      one of them, with its tensors
  python launch/checkpoint.py verify runs/default-sotu-zero3_offload
      read every byte: checksums, tensors and shapes of the recipe's model,
      NaN and infinity
  python launch/checkpoint.py diff runs/a/checkpoints/step-000100 runs/b \\
      --step 100
      the largest difference of each tensor, whatever layouts saved the two

RUN is a run directory, its checkpoints/, or one step-NNNNNN of them. No GPU
is needed, and the memory of one tensor. Any layout reads any checkpoint:
`pretrain.py --resume` goes on from it, `--init_from` takes its weights, and
`export_hf.py` writes them for transformers.
exit codes: 0 shown, whole, or equal; 1 damaged, or different; 2 refused."""
SHOW = "exit codes: 0 shown, 2 refused."
VERIFY = """\
exit codes: 0 all whole; 1 damaged: each file is named, with the tensors it
holds; 2 refused."""
DIFF = """\
Of a run the newest whole checkpoint is taken. "absolute" is the largest
difference of two elements, "relative" the same by the largest magnitude of an
element of that tensor. NaN differs from everything.
exit codes: 0 equal to the bit, 1 different, 2 refused: not two checkpoints of
one model."""


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(str(__doc__).split("\n\n")[0], EXAMPLES)
    commands = parser.add_subparsers(required=True, metavar="{show,verify,diff}")
    for work, runs, what, description, epilog in (
        (show, ["run"], "what there is", "Show a run's checkpoints, or what is in one.", SHOW),
        (verify, ["run"], "whether it is whole", "Read checkpoints and say what is damaged.", VERIFY),
        (diff, ["a", "b"], "how two differ", "Show how far each tensor of two checkpoints differs.", DIFF),
    ):
        command = commands.add_parser(
            work.__name__, help=what, description=description, epilog=epilog, allow_abbrev=False,
            formatter_class=arguments.HELP,
        )  # fmt: skip
        command.set_defaults(work=work)
        add = command.add_argument
        for name in runs:
            add(
                name, metavar=name.upper(), help="run directory, its checkpoints/, or one step-NNNNNN of them"
            )
        add("--step", type=arguments.whole(0), metavar="N", help="the checkpoint after N optimizer steps")
        add("--json", action="store_true", help="print JSON, for programs")
        if work is diff:
            most = "show the N tensors that differ most, 0: all (default: %(default)s)"
            add("--most", type=arguments.whole(0), default=20, metavar="N", help=most)
    return parser


def main() -> int:
    args = build_parser().parse_args()
    quiet.quiet_libraries()
    code: int = args.work(args)
    return code


# --- show


def show(args: argparse.Namespace) -> int:
    """Print the list of checkpoints, or one with its tensors."""
    from launch.checkpoints import run_checkpoints as checkpoint

    path = path_of(args.run, "RUN")
    every = checkpoint.below(path, args.step)
    alone = args.step is not None or every[0].directory == path
    types = _types(every[0]) if alone else None
    if args.json:
        print(json.dumps([_facts(each, types) for each in every], indent=2))
    elif alone:
        print(_one(every[0], types))
    else:
        rows = [_row(each) for each in every]
        headings = ("step", "saved", "size", "saved under", "state")
        print(f"{every[0].directory.parent}\n{table(rows, headings, 'rlrll', terminal.columns())}")
        terminal.say("whole: by its manifest and the sizes of its files; `verify` reads them")
    return 0


def _types(each: Checkpoint | Damaged) -> Types:
    """The types of each tensor's kinds; none where the files cannot tell."""
    from launch.checkpoints import inspection
    from launch.checkpoints.run_checkpoints import Damaged

    return {} if isinstance(each, Damaged) else inspection.dtypes(each)


def _facts(each: Checkpoint | Damaged, types: Types | None) -> dict[str, Any]:
    """What is known of a checkpoint, for programs."""
    from launch.checkpoints.run_checkpoints import Damaged

    facts: dict[str, Any] = {"directory": str(each.directory), "step": each.step}
    if isinstance(each, Damaged):
        return {**facts, "damaged": each.why}
    held = each.manifest
    facts |= {"damaged": None, "saved": held.saved, "bytes": held.bytes, **asdict(held.progress)}
    facts |= {"kinds": held.kinds, "plan": held.plan, "versions": held.versions}
    facts["files"] = {name: asdict(file) for name, file in held.files.items()}
    if types is not None:
        facts["tensors"] = [
            {"name": name, "shape": t.shape, "form": t.form, "pieces": len(t.pieces), "types": types[name]}
            for name, t in held.tensors.items()
        ]
    return facts


def _row(each: Checkpoint | Damaged) -> tuple[str, ...]:
    from launch.checkpoints.run_checkpoints import Damaged

    if isinstance(each, Damaged):
        return f"{each.step}", NOTHING, NOTHING, NOTHING, f"damaged: {each.why}"
    held = each.manifest
    return f"{each.step}", held.saved[:16].replace("T", " "), _size(held.bytes), _saved_under(held), "whole"


def _one(each: Checkpoint | Damaged, types: Types | None) -> str:
    from launch.checkpoints.run_checkpoints import Damaged

    width = terminal.columns()
    if isinstance(each, Damaged):
        return terminal.wrapped(str(each), width)
    held, types = each.manifest, types or {}
    progress, plan = held.progress, held.plan
    skipped = f", {counted(progress.skipped, 'step')} skipped by the loss scaler" if progress.skipped else ""
    versions = (f"{name} {version}" for name, version in held.versions.items() if version)
    facts = [
        ("checkpoint", each.directory),
        ("recipe", held.recipe.get("title", NOTHING)),
        ("step", f"{each.step}{skipped}"),
        ("saved", held.saved or NOTHING),
        ("saved under", ": ".join(filter(None, (plan.get("ds_name"), _saved_under(held))))),
        ("by", ", ".join(versions) or NOTHING),
        ("size", f"{_size(held.bytes)} in {counted(len(held.files), 'file')}"),
        ("holds", f"{', '.join(held.kinds)} of {counted(len(held.tensors), 'tensor')}"),
        ("state", "whole by its manifest and the sizes of its files; `verify` reads them"),
    ]
    rows = [
        (name, " x ".join(map(str, t.shape)), len(t.pieces), _type(types[name]) + _form(t.form))
        for name, t in held.tensors.items()
    ]
    shown = table(rows, ("tensor", "shape", "pieces", "type"), "llrl", width)
    return f"{aligned(facts, width=width)}\n\n{shown}"


def _type(types: dict[str, str]) -> str:
    """One type where all kinds have it, else each."""
    if len(set(types.values())) == 1:
        return next(iter(types.values()))
    return ", ".join(f"{kind} {type_}" for kind, type_ in types.items())


def _form(form: str) -> str:
    return "" if form == "canonical" else f", as {form} has it"


def _size(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def _saved_under(held: Manifest) -> str:
    """Layout, ZeRO stage, offload and precision."""
    plan, layout = held.plan, held.plan.get("layout") or {}
    degrees = " x ".join(f"{kind} {layout[kind]}" for kind in ("tp", "pp", "dp") if kind in layout)
    stage = f"ZeRO-{plan['zero_stage']}" if "zero_stage" in plan else ""
    offload = f"offload {plan['offload']}" if plan.get("offload", "none") != "none" else ""
    return ", ".join(filter(None, (degrees, stage, offload, plan.get("precision")))) or NOTHING


# --- verify


def verify(args: argparse.Namespace) -> int:
    """Read checkpoints and print what is damaged."""
    from launch.checkpoints import inspection
    from launch.checkpoints import run_checkpoints as checkpoint
    from launch.console.progress import bar

    every = [each.directory for each in checkpoint.below(path_of(args.run, "RUN"), args.step)]
    total = sum(file.stat().st_size for directory in every for file in directory.glob("*.safetensors"))
    found: dict[Path, list[inspection.Fault]] = {}
    with bar(sys.stderr, total=total, unit="B", unit_scale=True) as shown:
        for directory in every:
            shown.set_description_str(directory.name)
            found[directory] = list(inspection.faults(directory, shown.update))
    if args.json:
        values = [{"directory": str(d), "faults": [asdict(f) for f in faults]} for d, faults in found.items()]
        print(json.dumps(values, indent=2))
    else:
        for directory, faults in found.items():
            terminal.say(f"{directory}: {'damaged' if faults else 'whole'}")
            for fault in faults:
                terminal.say(f"  {fault}")
    return int(any(found.values()))


# --- diff


def diff(args: argparse.Namespace) -> int:
    """Print how far the tensors of two checkpoints differ."""
    from launch.checkpoints import inspection
    from launch.checkpoints import run_checkpoints as checkpoint
    from launch.console.progress import bar

    found = [checkpoint.newest_whole(path_of(text, "RUN"), args.step) for text in (args.a, args.b)]
    for _, passed_over in found:
        for damaged in passed_over:
            terminal.say(f"WARNING: {damaged}; an older one is compared", sys.stderr)
    a, b = (chosen for chosen, _ in found)
    kinds = [kind for kind in a.manifest.kinds if kind in b.manifest.kinds]
    with bar(sys.stderr, total=len(kinds) * len(a.manifest.tensors), unit="tensor") as shown:
        different: list[Difference] = []
        for each in inspection.differences(a, b):
            different += [] if each.equal else [each]
            shown.update()
    different.sort(key=lambda each: each.relative if each.relative == each.relative else float("inf"))
    different.reverse()
    alone = {str(c.directory): [k for k in c.manifest.kinds if k not in kinds] for c in (a, b)}
    alone = {directory: more for directory, more in alone.items() if more}
    if args.json:
        values = {"a": str(a.directory), "b": str(b.directory), "kinds": kinds, "only_in": alone}
        print(json.dumps({**values, "different": [_numbers(each) for each in different]}, indent=2))
    else:
        _say_differences(a, b, kinds, different, alone, args.most)
    return int(bool(different or alone))


def _numbers(each: Difference) -> dict[str, Any]:
    """For programs; null where a difference is not finite, for which JSON has no number."""
    values = asdict(each).items()
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values
    }


def _say_differences(
    a: Checkpoint,
    b: Checkpoint,
    kinds: Sequence[str],
    different: Sequence[Difference],
    alone: dict[str, list[str]],
    most: int,
) -> None:
    for letter, each in (("A", a), ("B", b)):
        terminal.say(f"{letter}  {each.directory}: step {each.step}, {_saved_under(each.manifest)}")
    for directory, more in alone.items():
        terminal.say(f"only {directory} has {some(more)}")
    of = counted(len(a.manifest.tensors), "tensor")
    for kind in kinds:
        count = sum(each.kind == kind for each in different)
        terminal.say(f"{kind}: {f'{count:,} of {of} differ' if count else f'all {of} are equal to the bit'}")
    if different:
        shown = different[: most or None]
        rows = [(e.tensor, e.kind, f"{e.absolute:.3g}", f"{e.relative:.3g}") for e in shown]
        print(f"\n{table(rows, ('tensor', 'kind', 'absolute', 'relative'), 'llrr', terminal.columns())}")
        if left := len(different) - len(shown):
            terminal.say(f"and {left:,} more (--most 0 shows all)")


if __name__ == "__main__":
    ends.run(main)
