"""What two recipes differ in, and which keys each question about that is about."""

from __future__ import annotations

from recipes.key_paths import Difference, Keys, differences
from recipes.schema import Recipe

# These change reports or the sharing of the work, never a number of the training.
NO_NUMBER = frozenset({
    "title", "run", "ds_config", "parallel", "hardware", "published", "inferred", "differs", "unknown",
    "note",
})  # fmt: skip
# May change on resuming: those above, keys of layout, rounding and reading of the same numbers, and the end of
# the run. Every other key decides the numbers of the training.
RESUMABLE = frozenset({
    *NO_NUMBER, "activation_checkpointing", "batch.accumulation", "batch.micro", "data.broken_records",
    "model.implementation", "model.vocab_divisible_by", "precision", "steps",
})  # fmt: skip
# May change besides where a run branches off.
OF_BRANCHES = frozenset({
    *RESUMABLE, "batch", "data", "dropout", "model.positions", "optimizer", "schedule", "seed",
    "sequence_length",
})  # fmt: skip
KEPT_BY_RESUME = Keys(but=RESUMABLE)
# The plan's facts show the layout and the rounding; the others that are left out are remarks.
NOTED_BY_RESUME = Keys(RESUMABLE, but={*NO_NUMBER - {"run"}, "batch", "precision"})
DECISIVE = Keys(but={*NO_NUMBER, "branch"})
# What the weights and moments are made for stays.
BRANCHED = Keys(
    OF_BRANCHES, but={*NO_NUMBER, "branch", "data.tokenizer", "optimizer.name"}
)
# Of the data, these leave its order.
SAME_ORDER = ("data.broken_records", "data.attend", "data.positions")
OTHER_TEXT = Keys({"data"}, but=SAME_ORDER)
# A branch with other values of these reads its data from their beginning.
READ_ANEW = Keys(
    {"data", "seed", "sequence_length"}, but=(*SAME_ORDER, "data.tokenizer")
)
# Decide the samples of the next step.
NEXT_STEP = Keys({"data", "seed", "sequence_length", "batch.global", "batch.rampup"})
# No deviation from a published row: they change no number, or are stated in another way.
DEVIATING = Keys(but={*NO_NUMBER, "branch", "batch.micro", "batch.accumulation"})
# Change the amount of work: a ratio would compare two things.
WORK = Keys({"model", "sequence_length", "batch.global", "activation_checkpointing"})
# Decide the text, its tokens or the objective, and so whether two losses are comparable.
_TEXT = {
    "data", "model.vocab_size", "model.family", "model.sentence_head", "model.task_head", "task.name",
}  # fmt: skip
TEXT = Keys(_TEXT, but={"data.streaming"})
TEXT_OF_GPT = Keys(_TEXT, but={"data.streaming", "data.masking"})
# Decide the weights of a pretraining.
PRETRAINED = Keys({
    "model", "sequence_length", "batch.global", "batch.rampup", "steps", "optimizer", "schedule", "dropout",
    "init_std", "data",
})  # fmt: skip


def changes(
    there: Recipe, now: Recipe, asked: Keys, *, stated: bool = False
) -> list[Difference]:
    """List the differences of two recipes in the keys that are asked for.

    `stated`: of schedules as they are stated, and not by the step of the learning rate's decay.
    """
    return differences(there.compared(stated), now.compared(stated), asked)
