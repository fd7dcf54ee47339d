"""What a pretraining takes from given weights besides them: shape, positions and tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from stored import model_tensors, write_checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    MegatronBertConfig,
    MegatronBertForPreTraining,
)

from data.text.trained_vocabulary import train_bpe, train_wordpiece, wrap_tokenizer
from launch import pretrain
from launch.records.admission import admit
from launch.training.job import Job
from launch.weights.starting_model import StartingModel
from recipes import catalog
from recipes.problems import ProblemsError

SIZE, POSITIONS = 300, 48
GPT2 = dict(n_layer=1, n_embd=8, n_head=2, n_positions=POSITIONS, bos_token_id=0, eos_token_id=0)
BERT = dict(
    num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=32,
    max_position_embeddings=POSITIONS,
)  # fmt: skip
BERTS = {
    "bert": (BertConfig, BertForPreTraining),
    "masked": (BertConfig, BertForMaskedLM),
    "megatron": (MegatronBertConfig, MegatronBertForPreTraining),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Models of transformers with a vocabulary, one without, and one whose embedding has rows of padding."""
    folder = tmp_path_factory.mktemp("weights")
    words = (catalog.FOLDER / "default.yaml").read_text() + (catalog.FOLDER / "bert.yaml").read_text()
    (folder / "mine.txt").write_text(words)
    bpe = wrap_tokenizer("trained_bpe", train_bpe([words], SIZE))
    pieces = wrap_tokenizer("trained_wordpiece", train_wordpiece([words], SIZE))
    for name, rows in (("gpt2", SIZE), ("bare", SIZE), ("padded", SIZE + 20), ("other", SIZE + 2000)):
        GPT2LMHeadModel(GPT2Config(**GPT2, vocab_size=rows)).save_pretrained(folder / name)
        if name != "bare":
            bpe.save_pretrained(folder / name)
    for name, (config, kind) in BERTS.items():
        kind(config(**BERT, vocab_size=SIZE)).save_pretrained(folder / name)
        pieces.save_pretrained(folder / name)
    return folder


def planned(folder: Path, name: str, *more: str) -> Job:
    words = ["--plan", "--ds_config", "zero0", "--init_from", str(folder / name)]
    words += ["--text", str(folder / "mine.txt"), *more]
    return pretrain.checked_job(pretrain.build_parser().parse_args(words))


def refused(folder: Path, name: str, *more: str) -> str:
    with pytest.raises(ProblemsError) as error:
        planned(folder, name, *more)
    return str(error.value)


@pytest.mark.parametrize("name", ["gpt2", "padded", *BERTS])
def test_shape_positions_and_tokenizer_are_theirs_and_all_else_the_recipes(folder, name):
    job = planned(folder, name)
    masked = name in BERTS
    recipe, model = job.plan.recipe, job.plan.recipe.model
    assert (model.layers, model.hidden, model.heads, model.vocab_size) == (1, 8, 2, SIZE)
    assert recipe.positions == recipe.sequence_length == POSITIONS
    assert recipe.data.tokenizer.kind == "file" and recipe.data.tokenizer.path == str(folder / name)
    assert job.facts.name == ("bert/sotu" if masked else "default/sotu")
    own = catalog.load(job.facts.name)
    given_rate = own.optimizer.model_copy(update={"lr": 5e-5})
    to_zero = own.schedule.model_copy(update={"min_lr": 0.0})
    assert (recipe.optimizer, recipe.schedule, recipe.batch) == (given_rate, to_zero, own.batch)
    assert model.layer_norm == ("post" if name in ("bert", "masked") else "pre")
    assert model.sentence_head == {"bert": "sop", "megatron": "sop"}.get(name, "none")
    said = str([notice for notice in job.plan.notices if notice.key == "init_from"][-1])
    assert f"theirs are weights, shape, positions, tokenizer; all else is of {job.facts.name}" in said


@pytest.mark.parametrize(
    ("words", "rate", "least", "said"),
    [
        ("", 5e-5, 0.0, "optimizer.lr=5e-05, the default for given weights, falls to 0"),
        (
            "--set optimizer.lr=2e-4",
            2e-4,
            1e-4,
            "optimizer.lr=0.0002 is 4 times the default for given weights",
        ),
        ("--set schedule.min_lr=1e-5", 1e-3, 1e-5, "optimizer.lr=0.001 is of default/sotu, 20 times the"),
        ("--recipe mine.yaml/row", 2e-3, 1e-4, "row, 40 times the default for given weights"),
    ],
)
def test_given_weights_have_a_rate_of_their_own_and_what_is_said_of_it_stands(
    folder, words, rate, least, said
):
    shape = f"{{layers: 1, hidden: 8, heads: 2, vocab_size: {SIZE}, positions: {POSITIONS}}}"
    row = f"model: {shape}, sequence_length: 32, batch: {{global: 8}}, steps: 300, optimizer: {{lr: 2e-3}}"
    schedule = "schedule: {kind: cosine, warmup_steps: 20, min_lr: 1e-4}, ds_config: zero0"
    table = f"title: mine\nrows:\n  row: {{title: mine, {row}, {schedule}}}\n"
    (folder / "mine.yaml").write_text(table)
    words = words.replace("mine.yaml", str(folder / "mine.yaml"))
    plan = planned(folder, "gpt2", *words.split()).plan
    assert (plan.recipe.optimizer.lr, plan.recipe.schedule.min_lr) == (rate, least)
    assert said in str(plan.notices)


def test_a_published_vocabulary_is_known_by_its_rows_and_a_recipe_that_names_one_wins(folder):
    """Else theirs does: a recipe gives way where it would train a vocabulary."""
    given = StartingModel(str(folder / "gpt2"))
    named = replace(given, recipe="default/sotu")
    published = replace(given, recipe="openwebtext/gpt2-124m")
    theirs = {"data.tokenizer": {"kind": "file", "path": str(folder / "gpt2")}}
    assert given._tokenizer(SIZE, SIZE) == named._tokenizer(SIZE, SIZE) == theirs
    assert published._tokenizer(SIZE, SIZE) == {}
    assert given._tokenizer(None, 50257) == {"data.tokenizer": {"kind": "gpt2"}}
    assert given._tokenizer(None, SIZE) == named._tokenizer(None, 50257) == {}


def test_samples_may_be_shorter_than_their_positions(folder):
    recipe = planned(folder, "gpt2", "--set", "sequence_length=16").plan.recipe
    assert (recipe.sequence_length, recipe.positions) == (16, POSITIONS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("gpt2 --set model.layers=2", "leave out model.layers"),
        ("gpt2 --set model.family=bert", "is a model of type"),
        ("gpt2 --recipe default/sotu", "or leave --recipe out"),
        ("gpt2 --set data.tokenizer.kind=trained_bpe", "or insist with --new_vocabulary"),
        ("gpt2 --set data.tokenizer.kind=gpt2", "leave data.tokenizer out"),
        ("bare", "holds no tokenizer, and data.tokenizer.kind=trained_bpe trains a new vocabulary"),
        ("other", "its tokenizer has 300 tokens, and its embedding 2,300 rows"),
    ],
)
def test_what_contradicts_them_is_refused(folder, words, said):
    assert said in refused(folder, *words.split())


def test_another_vocabulary_is_refused_unless_the_user_insists(folder):
    """It has as many tokens, and numbers them otherwise."""
    path, backwards = folder / "another", (folder / "mine.txt").read_text()[::-1]
    wrap_tokenizer("trained_bpe", train_bpe([backwards], SIZE)).save_pretrained(path)
    rows = ("--set", "data.tokenizer.kind=file", "--set", f"data.tokenizer.path={path}")
    said = refused(folder, "gpt2", *rows)
    assert "data.tokenizer.kind=file differs from" in said and "insist with --new_vocabulary" in said
    insisted = planned(folder, "gpt2", "--new_vocabulary").plan
    assert insisted.recipe.data.tokenizer.kind == "trained_bpe"
    assert "the loss starts high" in str(insisted.notices[-1])
    given = ("--set", "data.tokenizer.kind=file", "--set", f"data.tokenizer.path={folder / 'gpt2'}")
    assert planned(folder, "bare", *given).initial_weights, "the user names theirs"


def test_a_run_without_a_checkpoint_is_resumed_from_the_weights_that_it_was_given(folder, tmp_path):
    job = planned(folder, "gpt2", "--out", str(tmp_path))
    admit(tmp_path, job.facts, ["pretrain.py"]).close()
    words = ["--resume", "--out", str(tmp_path)]
    resumed = pretrain.checked_job(pretrain.build_parser().parse_args(words))
    assert resumed.plan.recipe == job.plan.recipe and resumed.plan.ds_name == "zero0"
    assert resumed.initial_weights == replace(job.initial_weights, recipe=tmp_path, stated=[])
    recipe = resumed.plan.recipe
    write_checkpoint(tmp_path / "checkpoints", 3, model_tensors(recipe), recipe)
    kept = pretrain.checked_job(pretrain.build_parser().parse_args(words))
    assert kept.initial_weights is None, "a checkpoint has its own"
