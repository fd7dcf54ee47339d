"""Weights out to transformers and in again, from runs that were really trained under several layouts."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hub_server import OF_THE_HUB, TOKEN, Hub, Repository
from huggingface_hub import constants
from launching import ROOT, run, run_ranks
from safetensors.torch import load_file
from stored import load_weights
from torch.nn.functional import cross_entropy
from transformers import (
    AutoModelForPreTraining,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

from data.corpus import build
from data.text.trained_vocabulary import train_bpe
from data.text.vocabulary import vocabulary_digest
from launch import export_hf
from launch.checkpoints import run_checkpoints
from launch.ranks import ending
from launch.records import vocabulary
from launch.records.metrics import read_metrics
from launch.weights import export as exporting
from launch.weights.export import ExportMismatch
from modeling.families import conversion_of
from modeling.formats.huggingface import bert, gpt2
from modeling.formats.huggingface.conversion import Form
from modeling.formats.huggingface.weight_files import read_state_dict
from recipes import catalog
from recipes.problems import ProblemsError
from recipes.schema import Recipe

STEPS = 4


def pretrain(directory: Path, processes: int, *flags: str, stage: int = 0) -> Path:
    """A real launch of a tiny recipe with torch's AdamW, which needs no compilation."""
    config = {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
    }
    directory.parent.mkdir(exist_ok=True, parents=True)
    ds_config = directory.with_suffix(".json")
    ds_config.write_text(json.dumps(config))
    arguments = ["--tiny", "--steps", STEPS, "--ds_config", ds_config, "--out", directory, *flags]
    done = run_ranks(processes, ROOT / "launch/pretrain.py", *arguments)
    assert done.returncode == 0, done.stdout[-4000:]
    return directory


FP32 = ("--set", "precision=fp32")
BERT = (*FP32, "--recipe", "bert/sotu")


def sets(*settings: str) -> tuple[str, ...]:
    return tuple(word for setting in settings for word in ("--set", setting))


LAYOUTS = {  # processes, ZeRO stage, flags
    "one process": (1, 0, FP32),
    "dp2 zero3 bf16": (2, 3, sets("precision=bf16")),
    "tp2 zero3": (2, 3, (*FP32, *sets("parallel.tp=2"))),
    "pp2": (2, 1, (*FP32, *sets("parallel.pp=2"))),
    "bert": (1, 0, BERT),
    "post-LN bert nsp tp2 zero3": (
        2,
        3,
        (*BERT, *sets("model.layer_norm=post", "model.sentence_head=nsp", "parallel.tp=2")),
    ),
}
QUICK_LAYOUTS = ("one process", "tp2 zero3", "bert")
MORE_LAYOUTS = {
    "dp2 zero3": (2, 3, FP32),
    "dp2 zero1 bf16": (2, 1, sets("precision=bf16")),
    "tp2 pp2": (4, 1, (*FP32, *sets("parallel.tp=2", "parallel.pp=2"))),
    "bert pp2": (2, 1, (*BERT, *sets("parallel.pp=2"))),
    "post-LN bert tp2 pp2": (4, 1, (*BERT, *sets("model.layer_norm=post", "parallel.tp=2", "parallel.pp=2"))),
    "bert without a sentence head": (1, 0, (*BERT, *sets("model.sentence_head=none"))),
    "post-LN bert without a sentence head": (
        1,
        0,
        (*BERT, *sets("model.layer_norm=post", "model.sentence_head=none")),
    ),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """name of a layout -> the directory of its run, trained at first use."""
    root, made = tmp_path_factory.mktemp("runs"), {}

    def get(name: str) -> Path:
        if name not in made:
            processes, stage, flags = (LAYOUTS | MORE_LAYOUTS)[name]
            made[name] = pretrain(root / name.replace(" ", "-"), processes, *flags, stage=stage)
        return made[name]

    return get


def validation_losses(run_directory: Path) -> dict[int, float]:
    records = read_metrics(run_directory / "metrics.jsonl")
    return {r.step: r.loss for r in records.validations}


def transformers_loss(directory: Path, recipe: Recipe) -> float:
    """The recipe's loss over its validation samples in nats, by what transformers makes of `directory`."""
    samples = build(recipe, say=lambda text: None).validation
    fields = {name: torch.from_numpy(values) for name, values in samples.fields.items()}
    model = conversion_of(recipe.model).model_class(recipe.model).from_pretrained(directory).float().eval()
    with torch.no_grad():
        if recipe.model.family == "bert":
            return bert_loss(model, fields, recipe)
        windows = fields["window"]  # (samples, S + 1)
        return float(cross_entropy(model(windows[:, :-1]).logits.flatten(0, 1), windows[:, 1:].flatten()))


def bert_loss(model: torch.nn.Module, fields: dict[str, torch.Tensor], recipe: Recipe) -> float:
    """Mean over the predicted tokens, and that over samples of the sentence objective."""
    real = torch.arange(fields["tokens"].shape[1]) < fields["lengths"][:, None]
    done = model(fields["tokens"], attention_mask=real.long(), token_type_ids=fields["token_types"])
    logits = done.logits if recipe.model.sentence_head == "none" else done.prediction_logits
    chosen = logits.gather(1, fields["positions"][..., None].expand(-1, -1, logits.shape[-1]))
    predicted = torch.arange(chosen.shape[1]) < fields["predicted"][:, None]
    loss = cross_entropy(chosen[predicted], fields["labels"][predicted])
    if recipe.model.sentence_head != "none":
        loss = loss + cross_entropy(done.seq_relationship_logits, fields["sentence_labels"])
    return float(loss)


@pytest.mark.parametrize(
    "layout",
    [
        *QUICK_LAYOUTS,
        *(
            pytest.param(name, marks=pytest.mark.long)
            for name in {**LAYOUTS, **MORE_LAYOUTS}
            if name not in QUICK_LAYOUTS
        ),
    ],
)
def test_transformers_computes_the_validation_loss_that_the_run_measured(layout, trained, tmp_path):
    directory = trained(layout)
    done, _ = export_hf.export(directory, tmp_path / "out")
    assert done.step == STEPS and done.difference < 1e-4 and done.rounding == 0
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float32}
    recipe = catalog.load_resolved(directory / "recipe.yaml")
    # A bf16 run validates in bf16, with 8 bits of mantissa.
    expected, tolerance = validation_losses(directory)[STEPS], 1e-2 if "bf16" in layout else 1e-5
    assert transformers_loss(tmp_path / "out", recipe) == pytest.approx(expected, abs=tolerance)
    assert expected < validation_losses(directory)[0] - 0.05, (
        "the run has learned, so these are not the initial weights"
    )


@pytest.mark.long
def test_a_second_phase_starts_from_the_weights_of_the_first(tmp_path):
    """They have one table of positions, of which the first reaches half.

    The second, on two tensor ranks, begins with the loss that transformers computes of the first one's export
    on samples as long.
    """

    def phase(name: str, processes: int, *flags: object) -> tuple[Path, Recipe]:
        recipe = ("--recipe", f"bert_two_phases/{name}")
        directory = pretrain(tmp_path / name, processes, *FP32, *recipe, *map(str, flags))
        return directory, catalog.load_resolved(directory / "recipe.yaml")

    first, short = phase("phase1", 1)
    second, long = phase("phase2", 2, "--init_from", first, *sets("parallel.tp=2"))
    assert (short.sequence_length, long.sequence_length, short.positions, long.positions) == (32, 64, 64, 64)
    done, _ = export_hf.export(first, tmp_path / "out")
    assert done.difference < 1e-4
    assert json.loads((tmp_path / "out" / "config.json").read_text())["max_position_embeddings"] == 64
    start, learnt = validation_losses(second)[0], validation_losses(first)
    assert transformers_loss(tmp_path / "out", long) == pytest.approx(start, abs=1e-5)
    assert learnt[STEPS] < learnt[0] - 0.05, "the first phase has learned, so these are not initial weights"
    newest, _ = run_checkpoints.newest_whole(second)
    saved, later = load_weights(done.checkpoint), load_weights(newest.directory)
    back = conversion_of(short.model).to_canonical(read_state_dict(tmp_path / "out"), short.model)
    assert back.keys() == saved.keys() and all(torch.equal(back[name], saved[name]) for name in saved)
    moved = (later["embedding.position"] - saved["embedding.position"]).abs().amax(1)
    assert moved.shape == (64,) and moved.min() > 1e-5, "the second phase trains all positions"


def test_the_export_holds_the_runs_weights_bit_for_bit_and_its_vocabulary(trained, tmp_path):
    directory = trained("dp2 zero3 bf16")
    done, _ = export_hf.export(directory, tmp_path / "out")
    recipe = catalog.load_resolved(directory / "recipe.yaml")
    back = conversion_of(recipe.model).to_canonical(read_state_dict(tmp_path / "out"), recipe.model)
    saved = load_weights(done.checkpoint)
    assert back.keys() == saved.keys() and all(torch.equal(back[name], saved[name]) for name in saved)
    # Master weights, not the bf16 ones that the run computes with.
    assert any(not torch.equal(t, t.bfloat16().float()) for t in saved.values())
    # A class that transformers 4 and 5 know, and inputs of which GPT-2 takes none for a token.
    said = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert said["tokenizer_class"] == "PreTrainedTokenizerFast" and "local_files_only" not in said
    assert said["model_input_names"] == ["input_ids", "attention_mask"]
    tokenizer, trained_with = (
        AutoTokenizer.from_pretrained(tmp_path / "out"),
        build(recipe, say=lambda text: None).tokenizer,
    )
    text = "My fellow citizens, 1865 — naïve <|endoftext|>"
    assert (
        tokenizer.encode(text) == trained_with.encode(text)
        and tokenizer.eos_token_id == trained_with.eos_token_id
    )
    config = GPT2Config.from_pretrained(tmp_path / "out")
    assert (config.eos_token_id, config.n_positions, config.vocab_size) == (tokenizer.eos_token_id, 64, 509)


def test_the_exported_tokenizer_adds_no_token_that_training_never_saw(trained, tmp_path):
    run = shutil.copytree(trained("one process"), tmp_path / "run")
    place = run / "tokenizer" / "tokenizer.json"
    content = json.loads(place.read_text())
    end = "<|endoftext|>"
    special = {end: {"id": end, "ids": [0], "tokens": [end]}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    first = {"SpecialToken": {"id": end, "type_id": 0}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        **{"single": [first, text], "pair": [first, text, text], "special_tokens": special},
    }
    place.write_text(json.dumps(content))
    assert AutoTokenizer.from_pretrained(place.parent).encode("a")[0] == 0
    done, recipe = export_hf.export(run, tmp_path / "out")
    assert 0 not in AutoTokenizer.from_pretrained(tmp_path / "out").encode("My fellow citizens")
    assert "adds no <|endoftext|> to a text" in export_hf.describe(done, recipe)
    plain, recipe = export_hf.export(trained("one process"), tmp_path / "plain")
    assert "adds no" not in export_hf.describe(plain, recipe)


def test_half_precision_exports_are_rounded_and_still_checked(trained, tmp_path):
    done, _ = export_hf.export(trained("one process"), tmp_path / "out", dtype="bfloat16")
    assert {t.dtype for t in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.bfloat16}
    assert done.difference < 1e-4 < done.rounding < 0.1
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_the_command_pushes_what_it_exports_and_prints_lines_that_work(trained, tmp_path):
    """In a process of its own: huggingface_hub reads HF_ENDPOINT when it is imported."""
    out = tmp_path / "out"
    with Hub() as hub:
        environment = hub.environment(tmp_path / "home")
        flags = [str(trained("one process")), "--out", str(out), "--push", "me/mine"]
        done = run([sys.executable, "-m", "launch.export_hf", *flags], env=environment)
        assert done.returncode == 0, done.stdout
        pushed = hub.models["me/mine"]
    assert pushed.private and pushed.commits == 2
    written = {file.name: file.read_bytes() for file in out.iterdir()}
    assert pushed.files == {**OF_THE_HUB, **written}
    said = done.stdout.strip().splitlines()[-1]
    assert f"-> {out}: float32, step {STEPS}; pushed to {hub.url}/me/mine (private)" in said
    lines = [line.strip() for line in done.stdout.split("use it\n")[1].split("\n\n")[0].splitlines()]
    used = run([sys.executable, "-c", "\n".join(lines)], cwd=tmp_path)
    assert used.returncode == 0 and "My fellow citizens" in used.stdout, used.stdout


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub for this process, and `me/full`, which has weights."""
    with Hub() as found:
        for name, value in found.environment(tmp_path / "home").items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        found.models["me/full"] = Repository({**OF_THE_HUB, "model.safetensors": b"trained for months"})
        found.models["me/empty"] = Repository()
        yield found


# USER/NAME, the token -> what is said
REFUSED_PUSHES = {
    "no name": ("mine", TOKEN, "--push mine: a repository is called USER/NAME"),
    "a bad name, no token": ("me/ my", "", "(?s)called USER/NAME.*no token .* set HF_TOKEN"),
    "a wrong token": ("me/mine", "hf_wrong", "--push me/mine: .*Invalid user token; check the name"),
    "no right": ("you/mine", TOKEN, "--push you/mine: .*don't have the rights"),
    "weights in it": ("me/full", TOKEN, "--push me/full: holds model.safetensors: nothing is overwritten"),
}


@pytest.mark.parametrize("case", REFUSED_PUSHES)
def test_a_push_that_cannot_work_is_refused_before_the_export(case, trained, tmp_path, hub, monkeypatch):
    name, token, said = REFUSED_PUSHES[case]
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(exporting, "export", None)
    with pytest.raises(ProblemsError, match=said):
        export_hf.export(trained("one process"), tmp_path / "out", push=name)
    assert hub.models.keys() == {"me/full", "me/empty"} and not (tmp_path / "out").exists()
    assert hub.models["me/full"].commits == 1


def test_a_hub_that_does_not_answer_is_named(trained, tmp_path, hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ProblemsError, match="--push me/mine: ConnectError.* the network"):
        export_hf.export(trained("one process"), tmp_path / "out", push="me/mine")


def test_an_export_stays_where_somebody_else_filled_the_repository_meanwhile(
    trained, tmp_path, hub, monkeypatch
):
    exported = exporting.export

    def meanwhile(*args, **how):
        hub.models["me/empty"].commits += 1
        return exported(*args, **how)

    monkeypatch.setattr(exporting, "export", meanwhile)
    out = tmp_path / "out"
    with pytest.raises(ending.Failed, match=f"not pushed to .*me/empty .public.: .*hf upload me/empty {out}"):
        export_hf.export(trained("one process"), out, push="me/empty")
    assert hub.models["me/empty"].files == OF_THE_HUB and (out / "model.safetensors").exists()


@pytest.mark.long
def test_the_lines_for_a_bert_fill_in_its_masks(trained, tmp_path):
    directory = trained("bert")
    done, recipe = export_hf.export(directory, tmp_path / "out")
    text = export_hf.describe(done, recipe)
    lines = [line.strip() for line in text.split("use it\n")[1].split("\n\n")[0].splitlines()]
    used = run([sys.executable, "-c", "\n".join(lines)], cwd=tmp_path)
    assert used.returncode == 0, used.stdout
    answer = used.stdout.strip().splitlines()[-1]
    assert recipe.run.prompt and "[MASK]" in recipe.run.prompt
    assert (
        answer.startswith("the ")
        and "united states" in answer
        and "mask" not in answer.lower()
        and "[CLS]" not in answer
    )


def test_an_exported_bert_is_complete(trained, tmp_path):
    directory = trained("bert")
    done, _ = export_hf.export(directory, tmp_path / "out", dtype="bfloat16")
    assert done.difference < 1e-4 < done.rounding < 0.1
    assert (
        type(AutoModelForPreTraining.from_pretrained(tmp_path / "out")).__name__
        == "MegatronBertForPreTraining"
    )
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert list(tokenizer("a", "b")) == ["input_ids", "token_type_ids", "attention_mask"]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["pad_token_id"] == tokenizer.pad_token_id == 0
    assert (config["vocab_size"], config["max_position_embeddings"], tokenizer.model_max_length) == (
        len(tokenizer),
        64,
        64,
    )
    export_hf.export(directory, tmp_path / "float32")
    recipe, saved = catalog.load_resolved(directory / "recipe.yaml"), load_weights(done.checkpoint)
    back = conversion_of(recipe.model).to_canonical(read_state_dict(tmp_path / "float32"), recipe.model)
    assert back.keys() == saved.keys() and all(torch.equal(back[name], saved[name]) for name in saved)


@pytest.fixture
def break_conversion(monkeypatch):
    """Change the form of the parameters that have a string in their canonical name."""

    def break_it(family: str, part: str, change) -> None:
        module = {"gpt2": gpt2, "bert": bert}[family]
        right = module.CONVERSION

        def name_map(model):
            for entry in right.name_map(model):
                yield entry._replace(form=change(entry.form)) if part in entry.ours else entry

        monkeypatch.setattr(module, "CONVERSION", replace(right, name_map=name_map))

    return break_it


@pytest.mark.parametrize(
    "layout, family, broken",
    [
        ("bert", "bert", "attention.qkv.weight"),
        pytest.param("post-LN bert nsp tp2 zero3", "bert", "head.sentence.weight", marks=pytest.mark.long),
        ("one process", "gpt2", "attention.qkv.weight"),
    ],
)
def test_a_wrong_conversion_is_noticed_and_leaves_nothing(
    layout, family, broken, trained, tmp_path, break_conversion
):
    def flipped(form: Form) -> Form:
        return form._replace(to_theirs=lambda ours, heads: [x.flip(0) for x in form.to_theirs(ours, heads)])

    break_conversion(family, broken, flipped)
    with pytest.raises(ExportMismatch, match="differ from ours"):
        export_hf.export(trained(layout), tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_refusals_say_what_is_there(trained, tmp_path):
    directory = trained("one process")
    with pytest.raises(ValueError, match="nowhere: holds no run; give the directory of a run"):
        export_hf.export(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(ValueError, match="holds no run"):
        export_hf.export(tmp_path, tmp_path / "out")
    with pytest.raises(ValueError, match=f"no checkpoint of step 3: only of {STEPS}"):
        export_hf.export(directory, tmp_path / "out", step=3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="not empty"):
        export_hf.export(directory, tmp_path / "full")
    assert not (tmp_path / "out").exists()


def flip_a_bit(run: Path) -> None:
    file = next((run / "checkpoints").rglob("rank-*.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


# What is done to a run -> what is said. Faults of a checkpoint and of a tokenizer have tables of their own,
# tests/launch/checkpoints/test_inspection.py and tests/data/text/test_vocabularies.py.
BROKEN_RUNS = {
    "a flipped bit": (
        flip_a_bit,
        "rank-00000.safetensors has checksum .* instead of .*; it holds word.weight, .* and 49 more",
    ),
    "an odd tokenizer": (
        lambda run: (run / "tokenizer/tokenizer.json").write_text("{}"),
        "tokenizer: cannot be read",
    ),
    "a deep tokenizer": (
        lambda run: (run / "tokenizer/tokenizer.json").write_text("[" * 10**5),
        "nested too deeply",
    ),
    "a tokenizer of lists": (
        lambda run: (run / "tokenizer/tokenizer_config.json").write_text("[]"),
        "tokenizer: cannot be read",
    ),
    "no recipe": (lambda run: (run / "recipe.yaml").write_text("[]"), "recipe.yaml: holds"),
}


@pytest.mark.parametrize("case", BROKEN_RUNS)
def test_a_broken_run_is_refused(case, trained, tmp_path):
    damage, said = BROKEN_RUNS[case]
    run = shutil.copytree(trained("one process"), tmp_path / "run")
    damage(run)
    with pytest.raises(ProblemsError, match=said):
        export_hf.export(run, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def test_a_tokenizer_of_more_tokens_than_the_model_is_refused(trained, tmp_path):
    run = shutil.copytree(trained("one process"), tmp_path / "run")
    text = (run / "tokenizer" / "tokenizer.json").read_text()
    read = json.loads(text)
    read["model"]["vocab"]["zzz"] = 5000
    (run / "tokenizer" / "tokenizer.json").write_text(json.dumps(read))
    with pytest.raises(ProblemsError, match="has 5001 tokens, and model.vocab_size=509"):
        export_hf.export(run, tmp_path / "out")


def test_where_an_export_may_go(trained, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "file").touch()
    for name in ("file", "file/below", "x" * 300):
        with pytest.raises(ProblemsError, match="--out"):
            export_hf.export(trained("one process"), tmp_path / name)
    with pytest.raises(ProblemsError, match="--out /proc/x cannot be made|--out /proc/x: cannot be made"):
        export_hf.export(trained("one process"), "/proc/x")
    export_hf.export(trained("one process"), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "empty" / "config.json").is_file()


def test_a_run_keeps_its_vocabulary_and_refuses_another(tmp_path):
    def tokenizer(text):
        return PreTrainedTokenizerFast(tokenizer_object=train_bpe([text] * 3, 262), eos_token="<|endoftext|>")

    first = tokenizer("the thin thing this there")
    vocabulary.keep(tmp_path, first)
    vocabulary.keep(tmp_path, first)
    assert vocabulary_digest(vocabulary.load(tmp_path)) == vocabulary_digest(first)
    with pytest.raises(ValueError, match="is not the vocabulary"):
        vocabulary.keep(tmp_path, tokenizer("on and on and on anon"))
    with pytest.raises(ValueError, match="holds no tokenizer"):
        vocabulary.load(tmp_path / "elsewhere")


# --init_from

NEW = "--new_vocabulary"  # these weights have no tokenizer


@pytest.fixture(scope="module")
def foreign(tmp_path_factory) -> Path:
    """A transformers GPT-2 of the tiny recipe's shape with every weight far from its initial value."""
    torch.manual_seed(7)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=509, n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    directory = tmp_path_factory.mktemp("foreign")
    model.save_pretrained(directory)
    return directory


@pytest.mark.long
def test_a_run_from_given_weights_starts_at_the_loss_that_transformers_computes(foreign, tmp_path):
    directory = pretrain(
        tmp_path / "run", 2, *FP32, "--set", "parallel.tp=2", "--init_from", str(foreign), NEW, stage=1
    )
    recipe = catalog.load_resolved(directory / "recipe.yaml")
    expected = transformers_loss(foreign, recipe)
    assert expected > 7, "far from the loss of the recipe's own initial weights"
    assert validation_losses(directory)[0] == pytest.approx(expected, abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("before", ["one process", "bert"])
@pytest.mark.parametrize(
    "stage, flags",
    [(3, ("parallel.tp=2",)), (1, ("parallel.pp=2",)), (3, ())],
    ids=["tp2 zero3", "pp2", "dp2 zero3"],
)
def test_a_run_goes_on_from_an_export_where_the_other_ended(stage, flags, before, trained, tmp_path):
    export_hf.export(trained(before), tmp_path / "out")
    family = BERT if before == "bert" else FP32
    directory = pretrain(
        tmp_path / "run", 2, *family, *sets(*flags), "--init_from", str(tmp_path / "out"), stage=stage
    )
    assert validation_losses(directory)[0] == pytest.approx(
        validation_losses(trained(before))[STEPS], abs=1e-5
    )
