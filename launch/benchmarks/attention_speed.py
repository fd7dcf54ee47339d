"""How fast a banded layer's attention is beside a dense one, forward and backward. For `launch/benchmark.py`."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

EXAMPLES = """\
examples:
  python launch/benchmark.py attention
      512 to 8192 positions, windows of 64 and 256, on the accelerator or else the CPU; some minutes on two cores
  python launch/benchmark.py attention --positions 2048 --windows 128 256 512 --heads 32 --head_size 96 --dtypes bf16 --out speeds.json
      your own shape, and the numbers as JSON

What is measured: attention alone (scores, softmax, values) of one layer, forward and backward, without the projections around it.
  dense       causal attention over all positions, as the dense layers of a GPT-2 run it
  banded      the kernel that training takes for this case, named in the table; it depends on --dropout: give the recipe's
              dropout.attention, with which flex_attention is never taken
  masked      all scores, those outside of the band masked: what a band costs without a kernel for it
Dense, banded and masked take turns, --rounds times; times are medians of wall time. "faster" is the median over the turns of dense /
banded, and "by CPU" the same of processor time: on a machine that others use it is the steady one, with --threads 1. "scores" is the
share of the dense triangle that lies in the band: its inverse bounds what can be gained.
exit codes: 0 measured, 1 failed, 2 refused."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
POSITIVE = ("batch", "heads", "head_size", "rounds", "threads", "seconds")
WARM_UP = 1  # turns that are not counted: compiling, allocating

Pass = Callable[[], None]


@dataclass(frozen=True)
class Case:
    dtype: str
    positions: int
    window: int


class Taken(NamedTuple):
    """Seconds of one pass, of wall time and of processor time of all threads."""

    wall: float
    processor: float


@dataclass(frozen=True)
class Row(Case):
    """Seconds are medians of wall time; None: not measured, `status` says why."""

    kernel: str
    why: str
    scores: float
    dense_s: float | None = None
    banded_s: float | None = None
    masked_s: float | None = None
    faster: float | None = None
    faster_by_processor_time: float | None = None
    status: str = "measured"


def add_parser(benchmarks: Any) -> None:
    parser = benchmarks.add_parser("attention", help="dense against locally banded attention (sparse layers)", epilog=EXAMPLES,
                                   formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)  # fmt: skip
    group = parser.add_argument_group("what is measured")
    group.add_argument("--positions", nargs="+", type=int, default=[512, 1024, 2048, 4096, 8192], metavar="S", help="sequence lengths "
                       "(default: 512 1024 2048 4096 8192)")  # fmt: skip
    group.add_argument("--windows", nargs="+", type=int, default=[64, 256], metavar="W", help="positions that each one sees "
                       "(default: 64 256)")  # fmt: skip
    group.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=["fp32", "bf16"], help="default: fp32 bf16"
    )
    group.add_argument("--heads", type=int, default=12, metavar="N", help="default: %(default)s")
    group.add_argument("--head_size", type=int, default=64, metavar="D", help="default: %(default)s")
    group.add_argument("--batch", type=int, default=1, metavar="B", help="samples (default: %(default)s)")
    group.add_argument(
        "--dropout", type=float, default=0.0, metavar="P", help="on attention weights (default: %(default)s)"
    )
    group.add_argument(
        "--rounds", type=int, default=5, metavar="N", help="turns that are counted (default: %(default)s)"
    )
    group.add_argument("--threads", type=int, metavar="N", help="of torch on a CPU (default: cores)")
    group.add_argument("--seconds", type=float, default=2.0, metavar="S", help="longer sequences are left out, and listed, once one pass "
                       "takes longer than this (default: %(default)s)")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", help="write all numbers as JSON")
    parser.set_defaults(run=run)


def check(args: argparse.Namespace) -> None:
    """Raises ValueError with all that is wrong with the flags."""
    problems = [f"--{flag} {value}: give a number above 0" for flag in POSITIVE
                if (value := getattr(args, flag)) is not None and value <= 0]  # fmt: skip
    problems += [
        f"--{flag} {value}: give 1 or more"
        for flag in ("positions", "windows")
        for value in getattr(args, flag)
        if value < 1
    ]
    if not 0 <= args.dropout < 1:
        problems.append(f"--dropout {args.dropout}: give a probability from 0 to below 1")
    if not problems and min(args.windows) >= max(args.positions):
        problems.append(f"--windows {min(args.windows)} and more with --positions up to {max(args.positions)}: such a band is the whole "
                        f"triangle; give a window below {max(args.positions)}")  # fmt: skip
    if args.out and not Path(args.out).resolve().parent.is_dir():
        problems.append(f"--out {args.out}: the directory is not there")
    if problems:
        raise ValueError("\n".join(problems))


def run(args: argparse.Namespace) -> None:
    """Raises ValueError where flags forbid it."""
    check(args)
    import torch

    from launch.machine import description

    if args.threads:
        torch.set_num_threads(args.threads)

    machine = description.describe()
    device = "cuda" if machine["accelerators"] else "cpu"
    print(f"{description.summary(machine)}; load average at the start {os.getloadavg()[0]:.1f}", flush=True)
    print(f"batch {args.batch}, {args.heads} heads of {args.head_size}, dropout {args.dropout:g}; forward + backward; "
          f"{torch.get_num_threads()} threads\n", flush=True)  # fmt: skip
    started_at = os.getloadavg()[0]
    rows: list[Row] = []
    print(format_line(HEADER), flush=True)
    for dtype in args.dtypes:
        measure_dtype(args, dtype, device, rows)
    left_out = not_measured(args, device, rows)
    print("\n" + "\n".join(f"not measured: {line}" for line in left_out))
    result = {
        "command": sys.argv, "hardware": machine, "device": device, "load_average": started_at,
        "threads": torch.get_num_threads(),
        "settings": {key: getattr(args, key) for key in ("batch", "heads", "head_size", "dropout", "rounds", "seconds")},
        "rows": [asdict(row) for row in rows], "not_measured": left_out,
    }  # fmt: skip
    if args.out:
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measure_dtype(args: argparse.Namespace, dtype: str, device: str, rows: list[Row]) -> None:
    """Appends and prints the rows of one dtype, until a sequence takes too long."""
    for positions in sorted(args.positions):
        slowest = 0.0
        for window in (w for w in args.windows if w < positions):
            row = measure(Case(dtype, positions, window), args, device)
            rows.append(row)
            print(format_line(cells(row)), flush=True)
            slowest = max(slowest, row.dense_s or 0.0, row.banded_s or 0.0, row.masked_s or 0.0)
        if slowest > args.seconds:
            return


def measure(case: Case, args: argparse.Namespace, device: str) -> Row:
    """Dense, banded and masked attention by turns."""
    import torch

    from modeling import banded_attention as band
    from modeling.cost import band as pairs

    dtype = getattr(torch, DTYPES[case.dtype])
    compiler = device == "cuda" and band.has_gpu_compiler()
    kernel, why = band.choose(
        device, dtype, args.dropout, case.positions, case.window, args.head_size, compiler=compiler
    )
    known = dict(
        asdict(case),
        kernel=kernel,
        why=why,
        scores=pairs(case.positions, case.window) / pairs(case.positions, case.positions),
    )
    try:
        turns = by_turns(passes(case, args, device, dtype), args.rounds, device)
    except torch.OutOfMemoryError:
        return Row(**known, status="out of memory")
    return row_of(known, turns, device)


def row_of(known: dict[str, Any], turns: Sequence[Sequence[Taken]], device: str) -> Row:
    """`turns`: of dense, banded and masked. Processor time says nothing about a GPU."""
    dense, banded, masked = (
        statistics.median(taken.wall for taken in of_one) for of_one in zip(*turns, strict=True)
    )
    faster, by_processor = (statistics.median(turn[0][i] / turn[1][i] for turn in turns) for i in (0, 1))
    return Row(**known, dense_s=dense, banded_s=banded, masked_s=masked, faster=faster,
               faster_by_processor_time=by_processor if device == "cpu" else None)  # fmt: skip


def passes(case: Case, args: argparse.Namespace, device: str, dtype: torch.dtype) -> list[Pass]:
    """Forward and backward of dense, banded and masked attention, on the same random tensors, laid out as a layer's QKV."""
    import torch
    import torch.nn.functional as F

    from modeling import banded_attention as band

    shape = (args.batch, case.positions, args.heads, 3, args.head_size)
    qkv = torch.randn(shape, dtype=dtype, device=device, requires_grad=True)
    gradient = torch.randn(args.batch, args.heads, case.positions, args.head_size, dtype=dtype, device=device)

    def one(attention: Callable[..., torch.Tensor]) -> Pass:
        def both() -> None:
            torch.autograd.grad(attention(*qkv.permute(3, 0, 2, 1, 4).unbind(0)), qkv, gradient)

        return both

    dropout = args.dropout
    return [
        one(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)),
        one(lambda q, k, v: band.banded_attention(q, k, v, case.window, dropout)),
        one(lambda q, k, v: band.by_dense_mask(q, k, v, case.window, dropout)),
    ]


def by_turns(passes: Sequence[Pass], rounds: int, device: str) -> list[list[Taken]]:
    """What each pass took, by round."""
    import torch

    turns = []
    for _ in range(WARM_UP + rounds):
        taken = []
        for both in passes:
            wall, processor = time.perf_counter(), time.process_time()
            both()
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append(Taken(time.perf_counter() - wall, time.process_time() - processor))
        turns.append(taken)
    return turns[WARM_UP:]


def not_measured(args: argparse.Namespace, device: str, rows: Sequence[Row]) -> list[str]:
    """What a reader could take for measured."""
    found = []
    if device != "cuda":
        found.append("flex_attention and GPUs: this machine has no CUDA device")
    elif not any(row.kernel == "flex_attention" for row in rows):
        found.append(f"flex_attention: {rows[-1].why}" if rows else "flex_attention: no case ran")
    done = {(row.dtype, row.positions, row.window) for row in rows}
    for dtype in args.dtypes:
        for positions in sorted(args.positions):
            if whole := [str(w) for w in args.windows if w >= positions]:
                found.append(
                    f"{dtype}, {positions} positions with windows of {', '.join(whole)}: such a band is the whole triangle"
                )
            if left := [str(w) for w in args.windows if w < positions and (dtype, positions, w) not in done]:
                found.append(f"{dtype}, {positions} positions with windows of {', '.join(left)}: a pass at fewer positions took longer "
                             f"than --seconds {args.seconds:g}")  # fmt: skip
    return found


HEADER = (
    "dtype",
    "positions",
    "window",
    "kernel",
    "dense ms",
    "banded ms",
    "masked ms",
    "faster",
    "by CPU",
    "scores",
)
WIDTHS = (5, 9, 6, 14, 9, 9, 9, 7, 7, 7)


def cells(row: Row) -> tuple[str, ...]:
    times = [row.status if t is None else f"{1e3 * t:.1f}" for t in (row.dense_s, row.banded_s, row.masked_s)]
    ratios = [
        "-" if ratio is None else f"{ratio:.2f}x" for ratio in (row.faster, row.faster_by_processor_time)
    ]
    return (row.dtype, str(row.positions), str(row.window), row.kernel, *times, *ratios, f"{row.scores:.1%}")


def format_line(texts: Sequence[str]) -> str:
    return "  ".join(text.rjust(width) for text, width in zip(texts, WIDTHS, strict=True))
