"""Prove that a training loop computes under its layouts what it computes in one process.

python launch/prove.py launch/experiments/adapters/deepspeed_loop.py --layouts dp2-zero1 dp2-zero3
"""

from __future__ import annotations

import argparse
import ast
import tempfile
from pathlib import Path

if not __package__:
    import _clone_first  # noqa: F401

from launch.console import arguments, ends, new_output, terminal
from launch.experiments.proving.layout import SAME, layout_of
from recipes.files import path_of
from recipes.problems import ProblemsError

EXAMPLES = """\
examples:
  python launch/prove.py launch/experiments/adapters/deepspeed_loop.py \\
      --layouts dp2-zero1 dp2-zero3
      a plain DeepSpeed loop under two layouts
  python launch/prove.py mine.py --layouts tp2 pp2 --accumulation 2 --steps 5
      your own adapter (docs/proving.md), accumulating two micro-batches
  python launch/prove.py mine.py --layouts dp2-zero3 --resume
      the same, saved after the first step and resumed in new processes
  python launch/prove.py mine.py --layouts dp2-zero1 \\
      --versions deepspeed=0.17.6,0.19.8
      under releases of a package, each installed in a folder of its own

A layout is words joined by "-": tp, pp, dp, cp with a degree, whose product
is the number of ranks, and any other word that the adapter asks for.
The same weights and global batches are given to one process and to every
layout. After each step each rank compares its gradients, its optimizer's
moments and its weights with those of one process. How far these may be apart
is what rounding does: 10 times the largest difference that the one process
has from weights which are rounded otherwise.
exit codes: 0 all agree, 1 some do not or failed, 2 refused."""


def main() -> int:
    args = build_parser().parse_args()
    terminal.quiet_libraries()
    adapter = path_of(args.adapter, "ADAPTER")
    check_adapter(adapter)
    # refused before anything is trained
    for name in (*args.layouts, args.resume or SAME):
        layout_of(name)
    if args.resume and args.steps < 2:
        raise ProblemsError.of(
            "--resume",
            f"--steps {args.steps}",
            "the first step is made before the resume, and others are compared after it",
            "ask for --steps 2 or more",
        )
    if layout_of(args.reference).ranks > 1:
        raise ProblemsError.of(
            "--reference",
            args.reference,
            "layouts are compared with one process",
            "leave the degrees out",
        )
    out = new_output.new_directory("--out", args.out) if args.out else None
    # with torch, which no --help should wait for
    from launch.experiments.proving.proving import prove
    from launch.experiments.proving.task import Task
    from launch.experiments.proving.versions import environments

    agree = []
    with tempfile.TemporaryDirectory() as temporary:
        root = out or Path(temporary)
        for name in environments(args.versions, root):
            task = Task(
                str(adapter.resolve()),
                args.reference,
                str(root / name),
                args.steps,
                accumulation=args.accumulation,
                precision=args.precision,
                timeout=args.timeout,
            )
            proven = prove(task, args.layouts, args.resume or "", args.together)
            print(f"\n{name}\n{proven.told(terminal.columns())}".rstrip())
            agree.append(proven.agrees)
    return 0 if all(agree) else 1


def check_adapter(adapter: Path) -> None:
    """Refuse what is no adapter, without running it. Raises ProblemsError."""
    came = ""
    defined = set[str]()
    try:
        for node in ast.parse(adapter.read_bytes(), str(adapter)).body:
            names = getattr(node, "names", [node])
            defined |= {getattr(each, "name", "") for each in names}
    except (OSError, SyntaxError, ValueError) as error:
        came = f"{adapter}: {error}"
    lacking = [f"{name}()" for name in ("train", "batch") if name not in defined]
    if came or lacking:
        raise ProblemsError.of(
            "ADAPTER",
            came or f"{adapter} has no {' and no '.join(lacking)}",
            "an adapter is a Python file with train() and batch()",
            "name one, as those of launch/experiments/adapters",
        )


def build_parser() -> argparse.ArgumentParser:
    parser = arguments.command(__doc__, EXAMPLES)
    add = parser.add_argument
    add("adapter", metavar="ADAPTER", help="Python file with train() and batch()")
    add(
        "--layouts",
        nargs="+",
        required=True,
        metavar="LAYOUT",
        help="such as tp2 dp2-zero3",
    )
    add("--steps", type=arguments.whole(), default=3, metavar="N", help="default: 3")
    add(
        "--accumulation",
        type=arguments.whole(),
        default=1,
        metavar="N",
        help="micro-batches of a rank in a step (default: 1)",
    )
    add(
        "--precision",
        choices=("fp32", "bf16"),
        default="fp32",
        help="that the adapter is asked for (default: fp32)",
    )
    add(
        "--resume",
        nargs="?",
        const=SAME,
        metavar="LAYOUT",
        help="save after a step, and go on in new processes, under LAYOUT (default: the same)",
    )
    add(
        "--together",
        action="store_true",
        help="layouts of as many ranks share a launch: faster, if the loop leaves nothing in its process",
    )
    add(
        "--versions",
        nargs="+",
        default=[],
        metavar="PACKAGE=V,V",
        help="prove under each of these releases",
    )
    add(
        "--timeout",
        type=arguments.number(0),
        default=300.0,
        metavar="SECONDS",
        help="that a step may take (default: 300)",
    )
    add(
        "--reference",
        default="dp1",
        metavar="LAYOUT",
        help="words of the one process that all are compared with, such as zero1 (default: dp1)",
    )
    add(
        "--out",
        metavar="DIR",
        help="keep the tensors there (default: removed at the end)",
    )
    return parser


if __name__ == "__main__":
    ends.run(main)
