"""The sample at the end of a run: the final weights continue its prompt, or fill its masks."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast

from data.text.vocabulary import unused_numbers
from launch.checkpoints import run_checkpoints
from launch.checkpoints.stored import StoredTensors
from modeling import cost
from modeling.formats.families import conversion_of
from modeling.generation import continue_prompt, fill_prompt, in_transformers
from recipes.schema import Recipe

# parameters; rank 0 assembles no larger model for a sample
LARGEST_SAMPLED = 2_000_000_000


def sample(
    recipe: Recipe, checkpoints: Path, tokenizer: PreTrainedTokenizerFast
) -> str | None:
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
    answer = fill_prompt if recipe.model.facts.masked else continue_prompt
    try:
        conversion_of(recipe.model)
    except ValueError as error:
        return f"not sampled: {error}"
    model = in_transformers(recipe, StoredTensors(saved.directory, saved.manifest))
    try:
        return answer(
            model, tokenizer, recipe.run.prompt, recipe.seed, unused_numbers(tokenizer)
        )
    except FloatingPointError as error:
        return f"not sampled: {error}"
