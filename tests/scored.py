"""A tiny run with a checkpoint and a vocabulary, for the tests of scores."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from stored import model_tensors, write_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from launch.records import vocabulary
from modeling.families import family_of, model_shape
from modeling.initialization import Init
from recipes import catalog

PASSAGES = [
    "The senate has asked the president to sign the treaty, and he will sign the treaty",
    "Our union is strong, said the president, and it will remain strong",
    "I thank the congress for the laws of this year, and I ask more of the congress",
    "It is a long way from the harbour to the town, and nobody walks it any more in the evening",
    "He gave her the letter; she read the letter",
]


def tokenizer_of(texts: list[str], size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly `size` tokens, the rest of which are filling."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    backend.train_from_iterator(texts, trainer)
    missing = size - backend.get_vocab_size()
    backend.add_tokens([f"<filling-{i}>" for i in range(missing)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


def make_run(
    run: Path, *settings: str, scale: float = 8.0, family: str = "default/sotu", untrained: bool = False
) -> Path:
    """A run of a tiny model with random weights, large enough that tokens differ in their likelihood.

    `untrained`: with those that its training began with.
    """
    recipe = catalog.load(family, [*settings, "precision=fp32"], tiny=True)
    run.mkdir()
    (run / "recipe.yaml").write_text(catalog.dump(recipe))
    tensors = {name: scale * tensor for name, tensor in model_tensors(recipe).items()}
    for name in tensors:
        if "norm" in name and name.endswith("weight"):
            tensors[name] = torch.ones_like(tensors[name])
    if untrained:
        init = Init(recipe.seed, recipe.init_std, recipe.model.layers)
        shape = model_shape(recipe, recipe.model.vocab_size)
        plain = family_of(recipe.model).plain(shape, group=None, init=init)
        tensors = {p.canonical_name: p.detach() for p in plain.parameters()}
    write_checkpoint(run / "checkpoints", 4, tensors, recipe, ranks=2)
    vocabulary.keep(run, tokenizer_of(PASSAGES, recipe.model.vocab_size))
    return run


def write_long_text(path: Path) -> Path:
    """One document of more than 64 tokens: windows of 64 overlap."""
    path.write_text(" ".join([*PASSAGES, *PASSAGES]))
    return path


def write_passages(path: Path) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in PASSAGES))
    return path
