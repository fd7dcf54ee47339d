"""Export a run's weights and vocabulary to a directory that `transformers` loads.

    python launch/export_hf.py runs/default-sotu-zero3_offload --out exported
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if __name__ == "__main__":  # replace launch/, which would shadow packages
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from launch import arguments, startup
from recipes import catalog
from recipes.schema import Recipe

if TYPE_CHECKING:
    import torch

    from launch.checkpoint import Checkpoint

EXAMPLES = """\
examples:
  python launch/export_hf.py runs/default-sotu-zero3_offload --out exported
      the newest complete checkpoint, float32, whatever layout the run had: tensor, pipeline, ZeRO or all of them
  python launch/export_hf.py runs/default-sotu-zero3_offload --out exported-200 --step 200 --dtype bfloat16
      an older checkpoint, in half the size

one process is enough, and no GPU. The export is loaded again with transformers and its logits are compared with those of
our own model before it appears under its name; `pretrain.py --init_from exported` starts another run from it.
exit codes: 0 exported and checked, 1 the logits differ, 2 refused."""

DTYPES = ("float32", "bfloat16", "float16")
TOLERANCE = 1e-4  # largest difference of a logit, relative to the largest logit where that is above 1
SAMPLES, POSITIONS = 2, 128  # random tokens that the comparison runs on


@dataclass(frozen=True)
class Export:
    """What was written. Differences are the largest absolute ones between logits on random tokens."""

    directory: Path
    checkpoint: Path
    step: int
    dtype: str
    difference: float  # transformers on the export against our model with the same, rounded, weights
    rounding: float  # our model with the rounded weights against the one with the run's float32 weights


class ExportMismatch(RuntimeError):
    """The exported model computes something else than ours."""


def build_parser():
    parser = arguments.command(__doc__.split("\n\n")[0], EXAMPLES)
    parser.add_argument("run", metavar="RUN", help="run directory, as pretrain.py printed it")
    parser.add_argument("--out", metavar="DIR", required=True, help="directory to make; refused if there is something in it")
    parser.add_argument("--step", type=int, metavar="N", help="the checkpoint after N optimizer steps (default: the newest complete one)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the exported weights (default: %(default)s, as the run "
                        "keeps them whatever it computes in)")  # fmt: skip
    return parser


def main() -> None:
    args = build_parser().parse_args()
    startup.quiet_libraries()
    _hide_progress_bars()
    try:
        done = export(args.run, args.out, step=args.step, dtype=args.dtype)
    except ValueError as e:
        startup.refuse(e)
    except ExportMismatch as e:
        startup.refuse(e, code=1)
    print(describe(done, catalog.load_resolved(Path(args.run) / "recipe.yaml")))


def export(run: str | Path, out: str | Path, *, step: int | None = None, dtype: str = "float32") -> Export:
    """Export one checkpoint of `run` to the new directory `out`, which appears whole and checked or not at all.

    Raises:
        ValueError: no run, no such complete checkpoint, or `out` is not empty.
        ExportMismatch: `transformers` computes other logits than our model from the same weights.
    """
    import torch

    from launch import run_vocabulary
    from launch.weights import load_tensors

    run, out = Path(run), Path(out)
    checkpoint = choose_checkpoint(run, step)
    recipe = catalog.load_resolved(run / "recipe.yaml")
    _refuse_occupied(out)
    tokenizer = run_vocabulary.load(run)
    master = load_tensors(checkpoint.directory)
    rounded = {name: tensor.to(getattr(torch, dtype)) for name, tensor in master.items()}

    tokens = _random_tokens(recipe)
    ours = our_logits(recipe, rounded, tokens)
    rounding = 0.0 if dtype == "float32" else _largest(ours, our_logits(recipe, master, tokens))
    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        write_model(recipe, rounded, tokenizer.eos_token_id, temporary)
        tokenizer.save_pretrained(temporary)
        facts = {"run": str(run), "step": checkpoint.step, "dtype": dtype, "recipe_digest": catalog.digest(recipe), "title": recipe.title}
        (temporary / "export.json").write_text(json.dumps(facts, indent=2) + "\n")
        difference = compare(ours, hf_logits(temporary, tokens), checkpoint.directory)
        os.replace(temporary, out)  # onto nothing, or onto an empty directory
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Export(out, checkpoint.directory, checkpoint.step, dtype, difference, rounding)


def choose_checkpoint(run: Path, step: int | None) -> Checkpoint:
    """The complete checkpoint after `step` optimizer steps, or the newest. Raises ValueError naming those that are there."""
    from launch.checkpoint import complete_checkpoints

    if not (run / "recipe.yaml").is_file():
        what = "is no run of this project (it holds no recipe.yaml)" if run.exists() else "does not exist"
        raise ValueError(f"{run} {what}: give a run directory, as pretrain.py printed it")
    found = {c.step: c for c in complete_checkpoints(run / "checkpoints")}
    if not found:
        raise ValueError(f"{run} holds no complete checkpoint: the run saves at its end and every run.save_every steps; let it go on")
    if step is not None and step not in found:
        steps = ", ".join(map(str, found))
        raise ValueError(f"--step {step}: {run} holds no complete checkpoint of that step, only of {steps}: give one of these")
    return found[max(found) if step is None else step]


def our_logits(recipe: Recipe, weights: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """(B, S, V) in float32, from our own model in one process."""
    import torch

    from ds_configs.resolver import padded_vocab
    from launch.engine import gpt2_shape
    from modeling.gpt2 import GPT2
    from modeling.initialization import Init

    init = Init(recipe.seed, recipe.init_std, recipe.model.layers, given=weights)
    model = GPT2(gpt2_shape(recipe, padded_vocab(recipe.model.vocab_size, 1)), group=None, init=init).eval()
    with torch.no_grad():
        return model(tokens)[..., : recipe.model.vocab_size]


def write_model(recipe: Recipe, weights: dict[str, torch.Tensor], end_token: int, directory: Path) -> None:
    """config.json, generation_config.json and model.safetensors."""
    import torch
    from transformers import GPT2LMHeadModel

    from modeling.convert_hf import hf_config, to_hf

    m = recipe.model
    config = hf_config(
        layers=m.layers, hidden=m.hidden, heads=m.heads, vocab=m.vocab_size, positions=recipe.sequence_length,
        dropout=recipe.dropout.hidden, end_token=end_token,
    )  # fmt: skip
    config.attn_pdrop = recipe.dropout.attention
    with torch.device("meta"):
        model = GPT2LMHeadModel(config)
    left = model.load_state_dict(to_hf(weights, m.layers, m.heads), strict=False, assign=True)
    assert set(left.missing_keys) <= {"lm_head.weight"} and not left.unexpected_keys, left
    model.tie_weights()
    model.save_pretrained(directory)


def hf_logits(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    """(B, S, V) from the exported directory as a user loads it, computed in float32."""
    import torch
    from transformers import GPT2LMHeadModel

    model = GPT2LMHeadModel.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    with torch.no_grad():
        return model(tokens).logits


def compare(ours: torch.Tensor, theirs: torch.Tensor, source: Path) -> float:
    """The largest difference. Raises ExportMismatch where it is more than rounding."""
    difference = _largest(ours, theirs)
    allowed = TOLERANCE * max(1.0, float(ours.abs().max()))
    if not difference <= allowed:  # NaN differs
        raise ExportMismatch(
            f"the logits of transformers differ from ours by {difference:.3g}, more than {allowed:.3g}: nothing was exported from "
            f"{source}; with the pinned version of transformers (requirements.txt) this is a bug of the conversion"
        )
    return difference


def describe(done: Export, recipe: Recipe) -> str:
    """What was exported and three lines of Python that use it."""
    rounding = f"; rounding to {done.dtype} changed them by {done.rounding:.1e}" if done.rounding else ""
    prompt = recipe.run.prompt or "The"
    return f"""{done.checkpoint} -> {done.directory}: {done.dtype}, step {done.step}
logits of transformers and of our model differ by at most {done.difference:.1e}{rounding}

use it
  from transformers import AutoModelForCausalLM, AutoTokenizer
  model, tokenizer = AutoModelForCausalLM.from_pretrained("{done.directory}"), AutoTokenizer.from_pretrained("{done.directory}")
  print(tokenizer.decode(model.generate(**tokenizer({prompt!r}, return_tensors="pt"), max_new_tokens=40, do_sample=True)[0]))"""


def _hide_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def _refuse_occupied(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty, and nothing is overwritten: name a new directory")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a new directory")


def _random_tokens(recipe: Recipe) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(recipe.seed)
    return torch.randint(recipe.model.vocab_size, (SAMPLES, min(POSITIONS, recipe.sequence_length)), generator=generator)


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


if __name__ == "__main__":
    main()
