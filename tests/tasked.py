"""A tiny BERT with its vocabulary as `transformers` saves them, and files of tasks in the hub's schema."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

WORDS = (
    "the", "a", "good", "bad", "film", "was", "is", "not", "very", "plot", "dull", "great", "story", "one",
    "two",
    "three", "of", "in", "it", "and",
)  # fmt: skip
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *"bcdefgh", ".", ",", "?"]


def save_bert(folder: Path, kind: str = "BertModel", positions: int = 64, **config: object) -> Path:
    """A BERT of two layers whose weights are far from their initial values, and its vocabulary."""
    shape = dict(vocab_size=len(VOCABULARY), hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    settings = transformers.BertConfig(
        **shape, intermediate_size=128, max_position_embeddings=positions, **config
    )
    torch.manual_seed(3)
    model = getattr(transformers, kind)(settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n")
    return folder


def write_lines(path: Path, records: Iterable[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def sentences(count: int, seed: int = 0, two: bool = False) -> list[dict]:
    """SST-2's records, or RTE's with `two`, whose label the text decides: whether "good" is in it."""
    drawn, records = random.Random(seed), []
    for index in range(count):
        texts = [" ".join(drawn.choices(WORDS, k=drawn.randint(3, 14))) for _ in range(2)]
        names = ("sentence1", "sentence2") if two else ("sentence",)
        label = int(any("good" in text.split() for text in texts[: len(names)]))
        records.append({**dict(zip(names, texts, strict=False)), "label": label, "idx": index})
    return records


def questions(count: int, seed: int = 0) -> list[dict]:
    """SQuAD's records, whose answer is the word after "good"; texts are longer than a window."""
    drawn, records = random.Random(seed), []
    for index in range(count):
        words = drawn.choices([word for word in WORDS if word != "good"], k=drawn.randint(10, 45))
        at = drawn.randrange(len(words) - 1)
        words[at] = "good"
        context, start = " ".join(words), len(" ".join(words[: at + 1])) + 1
        answers = {"text": [words[at + 1]], "answer_start": [start]}
        records.append(
            {"id": f"q{index}", "question": "what is good ?", "context": context, "answers": answers}
        )
    return records


def choices(count: int, seed: int = 0) -> list[dict]:
    """RACE's records, whose answer is the option that the article says."""
    drawn, records = random.Random(seed), []
    for index in range(count):
        options = drawn.sample(WORDS, 4)
        article = " ".join([*drawn.choices("bcdefgh", k=drawn.randint(3, 30)), options[index % 4]])
        given = {
            "article": article,
            "question": "it was _ .",
            "options": options,
            "answer": "ABCD"[index % 4],
        }
        records.append({"example_id": f"high{index}.txt", **given})
    return records
