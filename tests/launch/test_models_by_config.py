"""Commands on runs of models by their config: they do what transformers does, or refuse by name."""

import json
import sys

import pytest
import torch
from configured import MASKED, recipe_of, write_run
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

from ds_configs.plan import ANY_GPU
from launch import checkpoint, export_hf, generate, plan, pretrain, score
from launch.console import ends
from launch.evaluation import pretrained, scoring
from launch.planning import memory_fit
from launch.planning.prediction import forecast_text, hardware
from launch.planning.resolved_plans import published_plan
from launch.records import vocabulary
from launch.records.directory import RunDirectory
from launch.training.job import eager_seconds
from launch.weights.starting_model import StartingModel
from modeling import cost
from modeling.formats.huggingface import auto_model
from recipes import catalog
from recipes.problems import ProblemsError

KINDS = ("llama", "opt", "modernbert", "roberta", "deberta-v2")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(run, weights, export, facts of the export) of a type, made at first use."""
    root, known = tmp_path_factory.mktemp("configured"), {}

    def get(kind):
        if kind not in known:
            weights = write_run(root / kind, kind)
            out = root / f"{kind}-exported"
            known[kind] = root / kind, weights, out, export_hf.export(root / kind, out)[0]
        return known[kind]

    return get


def loaded(kind, directory):
    classes = AutoModelForMaskedLM if kind in MASKED else AutoModelForCausalLM
    model, info = classes.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_a_model_of_transformers_with_its_tokenizer(made, kind):
    run, weights, out, done = made(kind)
    model = loaded(kind, out)
    held = dict(model.named_parameters())
    assert held.keys() == weights.keys()
    assert all(torch.equal(held[name], weights[name]) for name in weights)
    assert done.difference == 0
    given = AutoTokenizer.from_pretrained(out)("The recipe", return_tensors="pt")
    assert "token_type_ids" not in given
    assert model(**given).logits.shape[-1] == 320
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == kind and config["architectures"] == [type(model).__name__]
    assert config["use_cache"] == (kind not in MASKED)
    tokenizer = vocabulary.load(run)
    for role in auto_model.TOKENS:  # none of a class's defaults, which are of another vocabulary
        if role in config and (kind, role) != ("llama", "pad_token_id"):
            assert config[role] == getattr(tokenizer, role), role


def typed(monkeypatch, command, *words):
    monkeypatch.setattr(sys, "argv", [command.__file__, *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        ends.run(command.main)
    return ended.value.code


def test_a_causal_one_goes_on_and_a_masked_one_fills_in(made, monkeypatch, tmp_path, capsys):
    for kind, prompt, flags in (
        ("llama", "The recipe", ("--greedy", "--tokens", 9)),
        ("roberta", "The [MASK] recipe.", ()),
    ):
        run, _, out, _ = made(kind)
        file = tmp_path / f"{kind}.jsonl"
        assert typed(monkeypatch, generate, run, "--prompt", prompt, *flags, "--out", file) in (None, 0)
        model = loaded(kind, out)
        tokenizer = vocabulary.load(run)
        tokens = torch.tensor([tokenizer.encode(prompt, add_special_tokens=kind in MASKED)])
        banned = [*range(300, 320)]  # rows that pad
        with torch.no_grad():
            if kind in MASKED:
                at = tokens[0] == tokenizer.mask_token_id
                logits = model(tokens).logits[0, at][0]
                logits[[tokenizer.mask_token_id, *banned]] = -torch.inf
                expected = tokenizer.convert_ids_to_tokens([int(logits.argmax())])[0]
            else:
                how = {"suppress_tokens": banned, "do_sample": False, "max_new_tokens": 9, "pad_token_id": 0}
                expected = tokenizer.decode(model.generate(tokens, **how)[0, tokens.shape[1] :])
        (found,) = map(json.loads, file.read_text().splitlines())
        assert found["new"] == expected.removesuffix("<|endoftext|>")
    assert typed(monkeypatch, generate, made("roberta")[0], "--prompt", "The recipe") == 2
    assert "a masked LM fills in masks" in capsys.readouterr().err


def test_the_sample_at_the_end_is_written(made):
    for kind in ("llama", "modernbert"):
        run = made(kind)[0]
        recipe = RunDirectory(run).recipe()
        prompt = "The [MASK]" if kind in MASKED else "The"
        recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"prompt": prompt})})
        text = pretrain.sample(recipe, run / "checkpoints", vocabulary.load(run))
        assert text.lower().startswith("the") and len(text) > len(prompt) - 6


def test_text_is_scored_as_transformers_does(made, tmp_path):
    run, _, out, _ = made("llama")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "The recipe says what to train."}))
    words = [str(run), "--text", str(tmp_path / "text.jsonl"), "--out", str(tmp_path / "score.json")]
    job = score.checked(score.build_parser().parse_args(words))
    scoring.run(job, scoring.load(job))
    tokenizer = vocabulary.load(run)
    model = loaded("llama", out)
    tokens = [tokenizer.eos_token_id, *tokenizer.encode("The recipe says what to train.")]
    with torch.no_grad():
        logits = model(torch.tensor([tokens[:-1]])).logits[0]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[1:]))
    found = json.loads((tmp_path / "score.json").read_text())["figures"]
    assert found["loss_per_token"] == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(ProblemsError, match="is a masked LM: these tasks are about the next token"):
        score.checked(score.build_parser().parse_args([str(made("modernbert")[0])]))


def test_fine_tuning_refuses_it_and_names_the_export(made):
    with pytest.raises(ProblemsError, match=r"by its config .* export it with launch/export_hf.py"):
        pretrained.encoder_in(StartingModel(str(made("modernbert")[0]), "--init", ()))


def test_a_universal_checkpoint_has_the_names_of_transformers(made, tmp_path):
    run, weights, *_ = made("modernbert")
    checkpoint.export(str(run), str(tmp_path / "out"))
    folder = tmp_path / "out" / "global_step7_universal" / "zero"
    assert {each.parent.name for each in folder.glob("*/exp_avg.pt")} == weights.keys()
    for name in weights:
        found = torch.load(folder / name / "fp32.pt", weights_only=True)["param"]
        assert torch.equal(found, weights[name])


# --- counted, and not


def test_parameters_and_operations_are_those_of_our_own_models():
    """GPT-2 and BERT by a config, where our formulas hold, too."""
    for kind, own in (("gpt2", "gpt2"), ("bert", "bert")):
        model = recipe_of(kind).model
        values = {"layers": 2, "hidden": 32, "heads": 4, "vocab_size": 320, "family": own}
        ours = recipe_of(kind).model.model_validate(values | {"sentence_head": "none"})
        assert cost.parameters(model, 66) == cost.parameters(ours, 66)
        state = torch.get_rng_state()
        for again in (False, True):
            counts = [cost.exact_flops_per_step(m, 64, 8, checkpointing=again) for m in (model, ours)]
            assert counts[0] == counts[1] > 0
        assert torch.equal(state, torch.get_rng_state())


def test_published_models_have_their_published_sizes():
    for name, size in (("wikipedia/modernbert-base", 149_655_232), ("openwebtext/llama-160m", 162_417_408)):
        recipe = catalog.load(name)
        assert cost.parameters(recipe.model, recipe.positions) == size


def test_no_formula_of_gpt_2_is_applied():
    recipe = recipe_of("llama")
    formula, exact = cost.tflops(recipe, 320, 8, 1.0, 1)
    assert formula is None
    # 6 per weight and token but for looked-up words and norms; attention's two squares, forward and backward
    weights = cost.parameters(recipe.model, 66) - 320 * 32 - 5 * 32
    assert exact * 1e12 == pytest.approx(8 * (6 * 64 * weights + 2 * 12 * 64**2 * 32))
    experts = recipe_of("mixtral", num_key_value_heads=2, intermediate_size=64)
    assert cost.tflops(experts, 320, 8, 1.0, 1) == (None, None), "which experts run is not known"
    assert eager_seconds(published_plan(experts), ANY_GPU) is None
    assert eager_seconds(published_plan(recipe), ANY_GPU) > 0


def test_the_planner_says_that_activations_are_not_counted(monkeypatch, capsys):
    recipe = recipe_of("llama")
    made = published_plan(recipe)
    assert memory_fit.describe(made).endswith("activations of a model by its config are not counted")
    node = hardware.find("4xv100-32")
    assert memory_fit.fit(recipe, node).problems == (memory_fit.UNCOUNTED,)
    page = str(forecast_text.counted_page(made, "x/y", node, None))
    assert f"{cost.parameters(recipe.model, 66):,}" in page
    assert f"{cost.operations_of(recipe, 8, 320):,}" in page
    row = ("--recipe", "wikipedia/modernbert-base", "--hardware", "4xv100-32")
    for words in ((*row, "--json"), ("search", *row)):
        assert typed(monkeypatch, plan, *words) == 2
        assert "its activations are not counted" in capsys.readouterr().err
