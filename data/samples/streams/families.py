"""The families: what each makes of documents. A third one is one more file, and one line here."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast

from data.samples.streams.bert import BertFamily
from data.samples.streams.gpt import GptFamily
from recipes.schema import Recipe

Family = GptFamily | BertFamily
FAMILIES: dict[str, type[GptFamily] | type[BertFamily]] = {"gpt2": GptFamily, "bert": BertFamily}


def family_of(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> Family:
    """The recipe's family, which is asked once per corpus.

    Raises:
        ProblemsError: the vocabulary does not fit it.
    """
    return FAMILIES[recipe.model.family].of(recipe, tokenizer)
