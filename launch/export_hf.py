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

from launch.console import arguments, quiet
from launch.machine import ending
from recipes import catalog
from recipes.schema import Recipe

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

    from launch.checkpoints.checkpoint import Checkpoint

EXAMPLES = """\
examples:
  python launch/export_hf.py runs/default-sotu-zero3_offload --out exported
      the newest complete checkpoint, float32, whatever layout the run had: tensor, pipeline, ZeRO or all of them
  python launch/export_hf.py runs/default-sotu-zero3_offload --out exported-200 --step 200 --dtype bfloat16
      an older checkpoint, in half the size

one process is enough, and no GPU. A GPT-2 becomes a GPT2LMHeadModel; a BERT a BertForPreTraining (post-LN) or
MegatronBertForPreTraining (pre-LN), or their ForMaskedLM without a sentence head; a model with banded layers
(model.attention) is none of these, and refused. The export is loaded again with transformers and
its logits are compared with those of our own model before it appears under its name; `pretrain.py --init_from exported` starts
another run from it.
exit codes: 0 exported and checked, 1 the logits differ, 2 refused."""

DTYPES = ("float32", "bfloat16", "float16")
TOLERANCE = 1e-4  # largest difference of a logit, relative to the largest logit where that is above 1
SAMPLES, POSITIONS = (
    2,
    128,
)  # random tokens that the comparison runs on; the second sample of a BERT is padded
TIED = {
    "lm_head.weight",
    "cls.predictions.decoder.weight",
    "cls.predictions.decoder.bias",
}  # copies that no export holds

USES = {
    "gpt2": """\
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = AutoModelForCausalLM.from_pretrained("{directory}"), AutoTokenizer.from_pretrained("{directory}")
print(tokenizer.decode(model.generate(**tokenizer({prompt}, return_tensors="pt"), max_new_tokens=40, do_sample=True)[0]))""",
    "bert": """\
from transformers import AutoModelForMaskedLM, AutoTokenizer
model, tokenizer = AutoModelForMaskedLM.from_pretrained("{directory}"), AutoTokenizer.from_pretrained("{directory}")
masked = tokenizer({prompt}, return_tensors="pt")
guesses = model(**masked).logits.argmax(-1)
print(tokenizer.decode(guesses.where(masked.input_ids == tokenizer.mask_token_id, masked.input_ids)[0], skip_special_tokens=True))""",
}


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
    parser.add_argument(
        "--out", metavar="DIR", required=True, help="directory to make; refused if there is something in it"
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="the checkpoint after N optimizer steps (default: the newest complete one)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the exported weights (default: %(default)s, as the run "
                        "keeps them whatever it computes in)")  # fmt: skip
    return parser


def main() -> None:
    args = build_parser().parse_args()
    quiet.quiet_libraries()
    _hide_progress_bars()
    try:
        done = export(args.run, args.out, step=args.step, dtype=args.dtype)
    except ValueError as e:
        ending.refuse(e)
    except ExportMismatch as e:
        ending.refuse(e, code=1)
    print(describe(done, catalog.load_resolved(Path(args.run) / "recipe.yaml")))


def export(run: str | Path, out: str | Path, *, step: int | None = None, dtype: str = "float32") -> Export:
    """Export one checkpoint of `run` to the new directory `out`, which appears whole and checked or not at all.

    Raises:
        ValueError: no run, no such complete checkpoint, a model that `transformers` does not have, or `out` is not empty.
        ExportMismatch: `transformers` computes other logits than our model from the same weights.
    """
    import torch

    from launch.checkpoints.weights import load_tensors
    from launch.runs import vocabulary
    from modeling.huggingface.gpt2 import check_convertible

    run, out = Path(run), Path(out)
    checkpoint = choose_checkpoint(run, step)
    recipe = catalog.load_resolved(run / "recipe.yaml")
    check_convertible(recipe.model)
    _refuse_occupied(out)
    tokenizer = vocabulary.load(run)
    master = load_tensors(checkpoint.directory)
    rounded = {name: tensor.to(getattr(torch, dtype)) for name, tensor in master.items()}

    batch = random_batch(recipe)
    ours = our_logits(recipe, rounded, batch)
    rounding = 0.0 if dtype == "float32" else _largest(ours, our_logits(recipe, master, batch))
    temporary = out.parent / f".{out.name}.{os.getpid()}.tmp"
    try:
        temporary.mkdir(parents=True)
        write_model(recipe, rounded, tokenizer, temporary)
        tokenizer.save_pretrained(temporary)
        facts = {
            "run": str(run),
            "step": checkpoint.step,
            "dtype": dtype,
            "recipe_digest": catalog.digest(recipe),
            "title": recipe.title,
        }
        (temporary / "export.json").write_text(json.dumps(facts, indent=2) + "\n")
        difference = compare(ours, hf_logits(recipe, temporary, batch), checkpoint.directory)
        os.replace(temporary, out)  # onto nothing, or onto an empty directory
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Export(out, checkpoint.directory, checkpoint.step, dtype, difference, rounding)


def choose_checkpoint(run: Path, step: int | None) -> Checkpoint:
    """The complete checkpoint after `step` optimizer steps, or the newest. Raises ValueError naming those that are there."""
    from launch.checkpoints.checkpoint import complete_checkpoints

    if not (run / "recipe.yaml").is_file():
        what = "is no run of this project (it holds no recipe.yaml)" if run.exists() else "does not exist"
        raise ValueError(f"{run} {what}: give a run directory, as pretrain.py printed it")
    found = {c.step: c for c in complete_checkpoints(run / "checkpoints")}
    if not found:
        raise ValueError(
            f"{run} holds no complete checkpoint: {_why_no_checkpoint(catalog.load_resolved(run / 'recipe.yaml'))}"
        )
    if step is not None and step not in found:
        steps = ", ".join(map(str, found))
        raise ValueError(
            f"--step {step}: {run} holds no complete checkpoint of that step, only of {steps}: give one of these"
        )
    return found[max(found) if step is None else step]


def _why_no_checkpoint(recipe: Recipe) -> str:
    if recipe.run.save_last:
        return "the run saves at its end and every run.save_every steps; let it go on"
    every = f"every run.save_every={recipe.run.save_every} steps and" if recipe.run.save_every else "only"
    return f"with run.save_last=false the run saves {every} when it is stopped; train it again with --set run.save_last=true"


@dataclass(frozen=True)
class Batch:
    """Random input: tokens (B, S); for a BERT token types (B, S) and lengths (B,) too."""

    tokens: torch.Tensor
    token_types: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    def mask(self) -> torch.Tensor:
        """(B, S), True for tokens that are not padding."""
        import torch

        assert self.lengths is not None
        return torch.arange(self.tokens.shape[1]) < self.lengths[:, None]


Logits = tuple[
    "torch.Tensor", ...
]  # float32: of tokens that are not padding (tokens, V); of a sentence head (B, 2)


def random_batch(recipe: Recipe) -> Batch:
    import torch

    generator = torch.Generator().manual_seed(recipe.seed)
    shape = (SAMPLES, min(POSITIONS, recipe.sequence_length))
    tokens = torch.randint(recipe.model.vocab_size, shape, generator=generator)
    if recipe.model.family == "gpt2":
        return Batch(tokens)
    return Batch(
        tokens, torch.randint(2, shape, generator=generator), torch.tensor([shape[1], shape[1] // 2 + 1])
    )


def our_logits(recipe: Recipe, weights: dict[str, torch.Tensor], batch: Batch) -> Logits:
    """From our own model in one process."""
    import torch

    from launch.training.build_model import whole_model

    model = whole_model(recipe, weights)
    with torch.no_grad():
        if recipe.model.family == "gpt2":
            return (model(batch.tokens)[..., : recipe.model.vocab_size].flatten(0, 1),)
        logits, sentence = model(batch.tokens, batch.token_types, batch.lengths)
    tokens = logits[..., : recipe.model.vocab_size][batch.mask()]
    return (tokens,) if sentence is None else (tokens, sentence)


def write_model(
    recipe: Recipe, weights: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerFast, directory: Path
) -> None:
    """config.json, generation_config.json (GPT-2) and model.safetensors."""
    import torch

    from modeling.huggingface.gpt2 import class_of, config_of, state_dict_of

    config = config_of(
        recipe.model, positions=recipe.sequence_length, hidden_dropout=recipe.dropout.hidden, attention_dropout=recipe.dropout.attention,
        end_token=tokenizer.eos_token_id, pad_token=tokenizer.pad_token_id or 0,
    )  # fmt: skip
    with torch.device("meta"):
        model = class_of(recipe.model)(config)
    left = model.load_state_dict(state_dict_of(weights, recipe.model), strict=False, assign=True)
    assert set(left.missing_keys) <= TIED and not left.unexpected_keys, left
    model.tie_weights()
    model.save_pretrained(directory)


def hf_logits(recipe: Recipe, directory: Path, batch: Batch) -> Logits:
    """From the exported directory as a user loads it, computed in float32."""
    import torch

    from modeling.huggingface.gpt2 import class_of

    model = (
        class_of(recipe.model).from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    )
    with torch.no_grad():
        if recipe.model.family == "gpt2":
            return (model(batch.tokens).logits.flatten(0, 1),)
        mask = batch.mask()
        done = model(batch.tokens, attention_mask=mask.long(), token_type_ids=batch.token_types)
    if recipe.model.sentence_head == "none":
        return (done.logits[mask],)
    return done.prediction_logits[mask], done.seq_relationship_logits


def compare(ours: Logits, theirs: Logits, source: Path) -> float:
    """The largest difference. Raises ExportMismatch where it is more than rounding."""
    for mine, other in zip(ours, theirs, strict=True):
        difference = _largest((mine,), (other,))
        allowed = TOLERANCE * max(1.0, float(mine.abs().max()))
        if not difference <= allowed:  # NaN differs
            raise ExportMismatch(
                f"the logits of transformers differ from ours by {difference:.3g}, more than {allowed:.3g}: nothing was exported from "
                f"{source}; with the pinned version of transformers (requirements.txt) this is a bug of the conversion"
            )
    return _largest(ours, theirs)


def describe(done: Export, recipe: Recipe) -> str:
    """What was exported and a few lines of Python that use it."""
    rounding = f"; rounding to {done.dtype} changed them by {done.rounding:.1e}" if done.rounding else ""
    family, prompt = (
        recipe.model.family,
        recipe.run.prompt or ("The [MASK]." if recipe.model.family == "bert" else "The"),
    )
    lines = "\n  ".join(USES[family].format(directory=done.directory, prompt=repr(prompt)).splitlines())
    return f"""{done.checkpoint} -> {done.directory}: {done.dtype}, step {done.step}
logits of transformers and of our model differ by at most {done.difference:.1e}{rounding}

use it
  {lines}"""


def _hide_progress_bars() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()


def _refuse_occupied(out: Path) -> None:
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"--out {out} is not empty, and nothing is overwritten: name a new directory")
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file: name a new directory")


def _largest(a: Logits, b: Logits) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


if __name__ == "__main__":
    main()
