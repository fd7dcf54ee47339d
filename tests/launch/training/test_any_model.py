"""Models of transformers by their configs: losses of a plain loop, in every layout, resumed, on a stream."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from launching import ROOT, WORKERS, run_ranks
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from launch.training import model_trial, transformers_model
from launch.weights.starting_model import StartingModel
from recipes import catalog
from recipes.problems import ProblemsError

ROWS = 7  # of the embedding: losses below 2, which are rounded by 1e-7
SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": ROWS,
    "intermediate_size": 64, "max_position_embeddings": 64,
}  # fmt: skip
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS = {
    "modernbert": {"local_attention": 16, "bos_token_id": None, "eos_token_id": None},
    "roberta": {**UNDROPPED, "max_position_embeddings": 68},
    "deberta-v2": {**UNDROPPED, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "llama": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "gpt_neox": {},
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0},
}
MASKED = ("modernbert", "roberta", "deberta-v2")
BERT = {"cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "pad": "[PAD]", "unk": "[UNK]"}
ROBERTA = {"cls": "<s>", "pad": "<pad>", "sep": "</s>", "unk": "<unk>", "mask": "<mask>"}
GPT = {"eos": "<|endoftext|>", "unk": "<unk>"}
ROLES = {"modernbert": BERT, "deberta-v2": BERT, "roberta": ROBERTA, "opt": {**ROBERTA, "eos": "</s>"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a text lies, and for each model a vocabulary of its letters under its roles."""
    out = tmp_path_factory.mktemp("any")
    lines = []
    for record in range(120):
        letters = "".join("ab"[(record + i * i) % 7 % 2] for i in range(300 + record))
        lines.append(json.dumps({"text": letters}))
    (out / "text.jsonl").write_text("\n".join(lines) + "\n")
    for name in CONFIGS:
        roles = ROLES.get(name, GPT)
        known = [*dict.fromkeys(roles.values()), "a", "b"]
        letters = models.BPE({token: i for i, token in enumerate(known)}, [], unk_token=roles["unk"])
        named = {f"{role}_token": token for role, token in roles.items()}
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(letters), **named)
        tokenizer.save_pretrained(out / name)
    return out


def case(folder, name, ds_config, *settings, config=None, **more):
    family = "masked_lm" if name in MASKED else "causal_lm"
    stated = {"model_type": name, **SIZES, **CONFIGS[name], **(config or {})}
    model = json.dumps({"implementation": "transformers", "family": family, "config": stated})
    data = f"{{source: jsonl, name: {folder / 'text.jsonl'}, masking: {{whole_words: false}}, "
    data += f"tokenizer: {{kind: file, path: {folder / name}}}}}"
    own = [
        f"model={model}", f"data={data}", "sequence_length=64", "batch.global=8", "precision=fp32",
        "run.prompt=null", "schedule.warmup_steps=1", "schedule.decay_steps=8", "optimizer.lr=0.002",
        "run.validation_samples=8", *settings,
    ]  # fmt: skip
    label = "-".join([name, Path(ds_config).stem, *more.pop("label", ())])
    return {"name": label, "ds_config": ds_config, "settings": own, **{"plain": True, **more}}


@pytest.fixture(scope="module")
def trained(folder):
    twice = "batch.accumulation=2"
    dropped = {"config": {"attention_dropout": 0.1}, "plain": False, "steps": 5}
    zero2 = json.loads((ROOT / "ds_configs/zero2.json").read_text())
    zero2["fp16"]["initial_scale_power"] = 8  # no step is skipped
    (folder / "fp16.json").write_text(json.dumps(zero2))
    cases = [
        case(folder, "modernbert", "zero3"),
        case(folder, "roberta", "zero2", twice),
        case(folder, "deberta-v2", "zero1"),
        case(folder, "qwen3", "zero3_offload"),
        case(folder, "gpt_neox", "zero2_offload", twice),
        case(folder, "opt", "zero0", "activation_checkpointing=full"),
        *(case(folder, "llama", stage) for stage in ("zero0", "zero1", "zero2", "zero3", "zero3_offload")),
        case(folder, "modernbert", "zero1", "data.streaming=true", label=["stream"]),
        case(folder, "qwen3", "zero1", "precision=bf16", label=["bf16"]),
        case(folder, "gpt_neox", str(folder / "fp16.json"), "precision=fp16"),
        case(folder, "llama", "zero3", label=["whole"], **dropped),
        case(folder, "llama", "zero3", "run.save_every=2", label=["resumed"], fails_after=4, **dropped),
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    done = run_ranks(2, WORKERS / "any_model.py", folder / "runs", folder / "cases.json", timeout=400)
    assert done.returncode == 0, done.stdout[-5000:]
    names = [each["name"] for each in cases]
    return {name: json.loads((folder / "runs" / name / "reported.json").read_text()) for name in names}


@pytest.mark.ci
def test_losses_are_those_of_a_plain_loop(trained):
    apart = {name: report["apart"] for name, report in trained.items() if "apart" in report}
    print(*apart.items(), sep="\n")
    half = {name: apart.pop(name) for name in ("qwen3-zero1-bf16", "gpt_neox-fp16")}
    assert max(apart.values()) < 5e-7 < max(half.values()) < 0.02, (apart, half)
    for name in apart:
        losses = trained[name]["losses"]
        assert 2 > losses[0] > losses[-1] + 0.01, f"{name} learns nothing"


@pytest.mark.ci
def test_a_resumed_run_is_the_uninterrupted_one(trained):
    whole, resumed = trained["llama-zero3-whole"], trained["llama-zero3-resumed"]
    assert whole["steps"] == resumed["steps"] and len(whole["steps"]) == 5
    assert whole["losses"][0] != trained["llama-zero3"]["losses"][0], "nothing was dropped"


@pytest.mark.ci
def test_half_precision_rounds_no_rotary_frequencies(trained):
    assert trained["qwen3-zero1-bf16"]["buffers"] == ["torch.float32"]


# --- the trial before the training

USUAL = {**SIZES, "vocab_size": 509}


def recipe(kind, *settings, masked=None, **config):
    family = "masked_lm" if kind in MASKED or masked else "causal_lm"
    stated = {"model_type": kind, **USUAL, **config}
    model = json.dumps({"implementation": "transformers", "family": family, "config": stated})
    vocabulary = "trained_wordpiece" if family == "masked_lm" else "trained_bpe"
    own = [f"model={model}", "sequence_length=64", f"data.tokenizer.kind={vocabulary}", *settings]
    return catalog.load("default/sotu", own)


def refusal(*how, **config):
    with pytest.raises(ProblemsError) as refused:
        model_trial.check(recipe(*how, **config))
    return str(refused.value)


@pytest.mark.parametrize("kind", CONFIGS)
def test_sound_models_pass_and_their_dropout_is_said(kind):
    dropped = {"opt": {"dropout": 0.2}, "roberta": {"hidden_dropout_prob": 0.2}}.get(kind, {})
    said = str(model_trial.check(recipe(kind, **{**CONFIGS[kind], **dropped})))
    assert said.startswith(f"model.config: {kind} of transformers ") and "=0.02" in said
    for key, value in dropped.items():
        assert f"{key}={value}" in said


@pytest.mark.parametrize(
    "how, told",
    [
        (("bert", False, {}), "positions see later tokens"),
        (("fnet", True, {}), "its positions see padding"),
        (("longformer", True, {"attention_window": [4, 4]}), "nothing trains longformer.encoder.layer.0"),
        (
            ("mixtral", False, {"num_key_value_heads": 4, "output_router_logits": True}),
            "output_router_logits",
        ),
        (("deepseek_v3", False, {"first_k_dense_replace": 1}), "would lose its model.layers.1.mlp.gate."),
        (("opt", False, {**CONFIGS["opt"], "layerdrop": 0.1}), "would leave out other layers (layerdrop)"),
        (("roberta", False, {"max_position_embeddings": 64}), "sequence_length=64 is above its positions"),
        (("llama", False, {"num_key_value_heads": 16}), "transformers runs no small model of it ("),
        (("lama", False, {}), "runs no small model of it (Unrecognized model identifier: lama."),
        (("llama", True, {}), "runs no small model of it (Unrecognized configuration class"),
    ],
)
def test_what_would_silently_be_other_is_refused(how, told):
    kind, masked, config = how
    said = refusal(kind, masked=masked, **config)
    assert f"model.config: {told}" in said or told in said, said


def test_samples_that_mix_and_dropout_of_another_generator_are_refused(monkeypatch):
    right = LlamaForCausalLM.forward

    def mixing(self, *given, **named):
        outcome = right(self, *given, **named)
        outcome.logits = outcome.logits + outcome.logits.sum()
        return outcome

    def drawing(self, *given, **named):
        outcome = right(self, *given, **named)
        if outcome.loss is not None:
            outcome.loss = outcome.loss * random.random()
        return outcome

    for forward, told in (mixing, "a sample changes what it says of another"), (drawing, "torch's generator"):
        monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
        assert told in refusal("llama")


def test_the_random_state_stays(monkeypatch):
    torch.manual_seed(3)
    state = torch.get_rng_state()
    model_trial.check(recipe("llama", "activation_checkpointing=full"))
    assert torch.equal(state, torch.get_rng_state())


# --- given weights


def test_given_weights_set_the_model_its_tokenizer_and_its_weights(folder, tmp_path):
    theirs = AutoConfig.for_model("llama", **SIZES, **CONFIGS["llama"])
    saved = LlamaForCausalLM(theirs)
    saved.save_pretrained(tmp_path)
    for file in (folder / "llama").iterdir():
        shutil.copy(file, tmp_path)
    given = StartingModel(str(tmp_path))
    settings = given.settings([])
    own = catalog.load(given.recipe_name, ["sequence_length=64"], settings=settings)
    assert given.recipe_name == "default/sotu" and own.model.family == "causal_lm"
    assert own.data.tokenizer.path == str(tmp_path) and own.model.config["model_type"] == "llama"
    assert "theirs are weights, shape, positions, tokenizer" in str(given.check(own)[-1])
    held = dict(saved.named_parameters())
    for name, parameter in transformers_model.build(own, given).named_parameters():
        assert torch.equal(parameter, held[name])
    drawn = dict(transformers_model.build(own).named_parameters())
    assert not torch.equal(drawn["lm_head.weight"], held["lm_head.weight"])
    rounder = ["sequence_length=64", "model.config.rms_norm_eps=0.01"]
    told = [str(each) for each in given.check(catalog.load(given.recipe_name, rounder, settings=settings))]
    assert "initial weights: rms_norm_eps=1e-06 in theirs, and 0.01 in model.config" in told
    wider = ["sequence_length=64", "model.config.intermediate_size=24"]
    with pytest.raises(ProblemsError, match="holds besides or otherwise, model.layers.0.mlp.down_proj"):
        given.check(catalog.load(given.recipe_name, wider, settings=settings))
    one_layer = ["sequence_length=64", "model.config.num_hidden_layers=1"]
    other = catalog.load(given.recipe_name, one_layer, settings=settings)
    with pytest.raises(ProblemsError, match="holds besides or otherwise, model.layers.1.input_layernorm"):
        given.check(other)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ProblemsError, match="otherwise, model.norm.weight: weights are all of the model"):
        given.check(own)
