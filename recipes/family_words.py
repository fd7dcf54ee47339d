"""What people call a family of models (its modules are in `modeling/`), and what it predicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from recipes.schema import Model


@dataclass(frozen=True)
class FamilyWords:
    """Words for the screen."""

    title: str
    predicted: str  # what losses are means over
    prompt: str  # an example that every vocabulary can encode
    choices: Callable[[Model], str] = lambda model: ""  # what a model of the family chooses besides its size

    def describe(self, model: Model) -> str:
        """The title, with the choices in parentheses where the family has any."""
        choices = self.choices(model)
        return f"{self.title} ({choices})" if choices else self.title


def _bert_choices(model: Model) -> str:
    head = "no sentence head" if model.sentence_head == "none" else f"{model.sentence_head.upper()} head"
    if model.task_head != "none":
        classes = "" if model.task_head == "span" else f" of {model.head_classes}"
        head = f"{model.task_head} head{classes}"
    return f"{model.layer_norm}-LN, {head}"


WORDS: Mapping[str, FamilyWords] = {
    "gpt2": FamilyWords("GPT-2", predicted="token", prompt="The"),
    "bert": FamilyWords("BERT", predicted="masked token", prompt="The [MASK].", choices=_bert_choices),
}


def predicted_by(model: Model) -> str:
    """What its losses are means over."""
    return WORDS[model.family].predicted if model.task_head == "none" else "example"
