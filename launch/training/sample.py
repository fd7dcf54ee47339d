"""The sample at the end of a run: the final weights continue its prompt, or fill its masks."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from data.text.vocabulary import unused_numbers
from launch.checkpoints import run_checkpoints
from launch.checkpoints.stored import StoredTensors
from modeling import cost
from modeling.families import whole_model
from modeling.generation import continue_prompt, fill_prompt
from modeling.parallel.layers import leave_out
from recipes.schema import Recipe

LARGEST_SAMPLED = 2_000_000_000  # parameters; rank 0 assembles no larger model for a sample


def sample(recipe: Recipe, checkpoints: Path, tokenizer: PreTrainedTokenizerFast) -> str | None:
    """Return the final model's answer to run.prompt, or the reason for none; None without a prompt."""
    if recipe.run.prompt is None:
        return None
    if cost.parameters(recipe.model, recipe.positions) > LARGEST_SAMPLED:
        return f"not sampled: more than {LARGEST_SAMPLED:,} parameters"
    saved = run_checkpoints.newest(checkpoints)
    if saved is None or saved.step < recipe.steps:
        return (
            "not sampled: there is no checkpoint of the last step (run.save_last=false); "
            "--set run.save_last=true keeps one"
        )
    model = whole_model(recipe, StoredTensors(saved.directory, saved.manifest))
    leave_out(model, unused_numbers(tokenizer))
    answer = fill_prompt if recipe.model.facts.masked else continue_prompt
    try:
        return answer(model, tokenizer, recipe.run.prompt, recipe.seed)
    except FloatingPointError as error:
        return f"not sampled: {error}"
