"""Recipes and runs of models by their config (model.config), for tests without an engine."""

import json

from launching import ROOT
from stored import model_tensors, write_checkpoint

from data.text.trained_vocabulary import train_bpe, train_wordpiece, wrap_tokenizer
from launch.checkpoints.manifest import MOMENTS, WEIGHT
from launch.records import vocabulary
from recipes import catalog

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 66,
}
CONFIGS = {
    "llama": {"num_key_value_heads": 2, "intermediate_size": 64},
    "gpt2": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32},
    "modernbert": {"intermediate_size": 48},
    "roberta": {"intermediate_size": 64},
    "deberta-v2": {"intermediate_size": 64},
    "bert": {"intermediate_size": 128},
}
TOKENS = 300
MASKED = ("modernbert", "roberta", "deberta-v2", "bert")


def recipe_of(kind, *settings, **keys):
    """A recipe of that type, trained on samples of 64 tokens; `keys`: others of its config."""
    head = "ForMaskedLM" if kind in MASKED else "ForCausalLM"
    config = {"model_type": kind, "architectures": [head], **SIZES, **CONFIGS.get(kind, {}), **keys}
    model = json.dumps({"implementation": "transformers", "config": config})
    trained = "trained_wordpiece" if kind in MASKED else "trained_bpe"
    own = (
        f"model={model}",
        f"data.tokenizer.kind={trained}",
        "sequence_length=64",
        "steps=7",
        "schedule.warmup_steps=0",
    )
    return catalog.load("default/sotu", [*own, "precision=fp32", "ds_config=zero1", *settings])


def write_run(path, kind, *settings):
    """A run directory with a checkpoint of step 7 of weights that are far from uniform; the weights."""
    recipe = recipe_of(kind, *settings)
    path.mkdir()
    (path / "recipe.yaml").write_text(catalog.dump(recipe))
    weights = {name: tensor * 10 for name, tensor in model_tensors(recipe).items()}
    for tensor in weights.values():
        if len(tensor) == SIZES["vocab_size"]:
            tensor[TOKENS:] *= 20  # rows that pad would be written first
    write_checkpoint(path / "checkpoints", 7, weights, recipe, kinds=(WEIGHT, *MOMENTS), ranks=2)
    train = train_wordpiece if kind in MASKED else train_bpe
    tokenizer = wrap_tokenizer(recipe.data.tokenizer.kind, train([(ROOT / "README.md").read_text()], TOKENS))
    vocabulary.keep(path, tokenizer)
    return weights
