"""The recipe schema, the catalog and its errors, --set, --steps and --tiny."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from ds_configs.findings import ConfigError
from ds_configs.plan import GPU, Machine
from ds_configs.resolver import resolve
from recipes import catalog, key_paths
from recipes.catalog import digest, dump, load, load_resolved
from recipes.key_paths import KEPT_BY_RESUME, Keys, changes, paths
from recipes.problems import Key, Problem, ProblemsError, RecipeError, Setting
from recipes.schema import Recipe
from recipes.tables import read_table
from recipes.tiny import tiny as shrink

EVERY = [*catalog.titles()]
GOOD = """
title: a table
defaults:
  model: {layers: 2, hidden: 8, heads: 2, vocab_size: 300}
  sequence_length: 16
  batch: {micro: 1, global: 4}
  steps: 10
  optimizer: {lr: 1e-3}
rows:
  one: {title: first, optimizer: {weight_decay: 0.5}}
"""


@pytest.fixture
def table(tmp_path: Path):
    """Writes a table and returns its path."""

    def write(text: str = GOOD, name: str = "mine.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write


def problems(name: str, *overrides: str, **how) -> tuple[str, ...]:
    with pytest.raises(RecipeError) as error:
        load(name, overrides, **how)
    return tuple(map(str, error.value.problems))


# --- names


def test_there_are_recipes_and_the_default_comes_first():
    assert EVERY[0] == catalog.DEFAULT_RECIPE
    assert {name.split("/")[0] for name in EVERY} >= {"default", "openwebtext", "parallel_kinds"}
    assert all(catalog.titles().values())


def test_a_row_or_a_table_of_one_row_is_name_enough():
    assert load("3d") == load("parallel_kinds/3d")
    assert load("default") == load("default/sotu") == load()
    assert load("gpt2-124m") == load("openwebtext/gpt2-124m")
    assert catalog.find("a100_blog_bert_base").name == "a100_blog_bert_base/110m"


def test_the_recipe_for_gpus_reduces_gradients_once_a_step():
    """ZeRO-2 reduces those of every micro-batch, of which this batch has many."""
    recipe = load("openwebtext/gpt2-124m")
    assert recipe.ds_config == "zero1" and recipe.batch.global_ > 8 * recipe.batch.micro


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("parallel_kinds/pipelin", "did you mean parallel_kinds/pipeline"),
        ("nosuch/sotu", "did you mean bert/sotu or default/sotu"),
        ("72x3072-h32-tp", "did you mean "),  # a row of several tables
        ("dgx2_gpt2_torch_dd/72x3072-h32-tp8", "did you mean "),
        ("jeanzay_megatron_perf", "did you mean a row of jeanzay_megatron_performance or "),
        ("parallel_kinds", "parallel_kinds/zero1, parallel_kinds/zero2"),
        ("qqqqqq", "there are tables default, a100_blog_bert_base, "),
        ("qqqqqq", "recipe.py list shows all rows"),
        ("nosuch/row", "the nearest are "),
    ],
)
def test_a_name_that_is_none_gets_names_that_are(asked, said):
    (found,) = problems(asked)
    assert said in found and len(found) < 500
    meant = found.partition("did you mean ")[2].partition("?")[0].split(" or ")
    near = found.partition("the nearest are ")[2].partition(" (")[0].split(", ")
    assert all(load(name) for name in (*meant, *near) if "/" in name)


@pytest.mark.parametrize("form", ["{}/one", "{}:one", "{}"])
def test_a_file_of_ones_own(table, form):
    recipe = load(form.format(table()))
    # merged with the defaults, 1e-3 a number
    assert (recipe.optimizer.lr, recipe.optimizer.weight_decay) == (1e-3, 0.5)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("{0}/mine.yaml/onee", "did you mean {0}/mine.yaml/one"),
        ("{0}/mine.yaml", "can be {0}/mine.yaml/one, {0}/mine.yaml/two; "),
        ("{0}/mine.yaml/x", "did you mean"),
        ("{0}/no.yaml:one", "there is no file {0}/no.yaml"),
    ],
)
def test_a_file_or_row_that_is_not_there(asked, said, table, tmp_path):
    table(GOOD + "  two: {title: second}\n")
    assert said.format(tmp_path) in problems(asked.format(tmp_path))[0]


# --- bad files


def test_the_frame_of_a_table_is_checked_at_once(table):
    path = table("defauls: {}\nrows: {a: 3, 1: {}}\ncolumns: GPUs\n")
    rows = "should be at least one row, name: {keys of the recipe}, the name a text"
    assert problems(f"{path}:a") == (
        f"{path}: title is missing: a table has one line for recipe.py list",
        f"{path}:3: columns='GPUs': should be a list of the source's headings, in the order of the cells of "
        "each row's published.row",
        f"{path}:2: rows.a=3: {rows}",
        f"{path}:2: rows[1].[key]=1: {rows}",
        f"{path}:1: defauls: unknown key; did you mean defaults?",
    )
    assert problems(str(table("just text"))) == (f"{path}: the file='just text': should be a mapping",)
    own = table(GOOD + "  bare:\n")
    assert read_table(own).row("bare") == read_table(own).defaults
    assert problems(str(table("title: x"))) == (f"{path}: rows is missing: {rows}",)
    path.write_bytes("title: é".encode("latin-1"))
    assert "not UTF-8" in problems(str(path))[0]


def test_what_fields_and_layout_owe_each_other_comes_with_what_is_wrong_in_fields(table):
    text = GOOD.replace("title: a table", "title: a table\nsource: s\ncolumns: [GPUs, Size, Loss]")
    path = table(f"""{text}  two:
    title: x
    seed: high
    sped: 1
    precision: fp8
    optimizer: {{lr: 1e-5}}
    schedule: {{min_lr: 1e-3, warmup: 3, warmup_steps: 20}}
    parallel: {{dp: 4}}
    batch: {{accumulation: 2}}
    ds_config: zero4
    published: {{source: s, row: 4 | 8B}}
""")
    found = problems(f"{path}/two")
    expected = (
        f"sped: unknown key; did you mean seed? ({path}:16)",
        "schedule.warmup: unknown key; did you mean schedule.warmup_steps=N (in steps, not as a share of the "
        f"training)? ({path}:19)",
        f"seed='high': should be a valid integer ({path}:15)",
        f"precision='fp8': should be 'auto', 'fp32', 'bf16' or 'fp16' ({path}:17)",
        "schedule.min_lr=0.001 is above optimizer.lr=1e-05",
        "schedule.warmup_steps=20 is not below steps=10",
        "ds_config=zero4: no such file in ds_configs/; did you mean zero3 or zero2 or zero1?",
        "batch.micro=1 x batch.accumulation=2 x parallel.dp=4 = 8 is not batch.global=4: micro x "
        "accumulation x dp = global; "
        f"--set batch.global=8, or --set batch.accumulation=1, or --set parallel.dp=2 ({path}:21)",
        "published.row has 2 cells for 3 columns (GPUs: 4, Size: 8B, Loss: ?)",
    )
    assert len(found) == len(expected)
    for part in expected:
        assert any(line.startswith(f"mine/two: {part}") for line in found), part
    # Each is found without the others too, and a setting that mends it is enough.
    table(path.read_text().replace("    sped: 1\n", "").replace("warmup: 3, ", ""))
    right = ["seed=1", "precision=fp32", "schedule={}", "ds_config=zero1", "batch.accumulation=1"]
    right.append("published.row='4 | 8B | '")
    for i in range(len(right)):
        assert problems(f"{path}/two", *right[:i], *right[i + 1 :])
    assert load(f"{path}/two", right)
    (line,) = problems(f"{path}/two", *right, "batch.micro=3")
    assert line.endswith("--set batch.global=12, or --set batch.micro=1 (--set)")


def test_what_must_be_stated_is_missing(table):
    found = problems(f"{table(GOOD.replace('layers: 2', 'layer: 2'))}:one")
    assert [line.partition(" (")[0] for line in found] == [
        "mine/one: model.layers: is missing; the recipe must state it",
        "mine/one: model.layer: unknown key; did you mean model.layers or model.layer_norm?",
    ]


# Keys of a row -> the problems, one each, by what they begin with. A rule that asks for a field that is wrong
# is left for later; one that does not is not.
PARTLY_WRONG = {
    "sped: 1, schedule: {warmup_steps: 10}": ("sped:", "schedule.warmup_steps=10 is not below steps=10"),
    "sequence_length: short, model: {family: bert, layer_norm: post}": (
        "sequence_length='short':",
        "data.tokenizer.kind=trained_bpe with model.family=bert:",
    ),
    "model: 3": ("model=3:",),
    "model: {layers: x}": ("model.layers='x':",),
    "data: {blend: [3]}": ("data.blend",),
    "optimizer: {lr: fast}": ("optimizer.lr='fast':",),
    "published: {row: 3}": ("published.source:", "published.row=3:"),
    "parallel: 2": ("parallel=2:",),
    "batch: []": ("batch=",),
    # A cosine could not warm up so long; what is meant may.
    "schedule: {kind: consant, warmup_steps: 10}": ("schedule.kind='consant':",),
}


@pytest.mark.parametrize("keys", PARTLY_WRONG)
def test_a_rule_says_what_it_can_of_a_row_that_is_partly_wrong(keys, table):
    found = problems(f"{table(GOOD + f'  two: {{title: x, {keys}}}')}:two")
    expected = PARTLY_WRONG[keys]
    assert len(found) == len(expected), found
    for line, part in zip(found, expected, strict=True):
        assert line.startswith(f"mine/two: {part}")


def test_the_place_of_a_problem_is_where_one_of_its_values_was_given(table):
    path = table(GOOD + "  two:\n    title: x\n    schedule: {min_lr: 1e-5}\n")
    by_file = problems(f"{table(GOOD + '  two: {title: x, schedule: {min_lr: 1}}')}:two")
    assert by_file[0].endswith(f" ({path}:11)") and len(by_file) == 1
    table(GOOD + "  two:\n    title: x\n    schedule: {min_lr: 1e-5}\n")
    for override in ("optimizer.lr=1e-6", "optimizer={lr: 1e-6}"):
        (by_set,) = problems(f"{path}:two", override)
        assert by_set.startswith("mine/two: schedule.min_lr=1e-05 is above") and by_set.endswith(" (--set)")


# --- what the fields owe each other

WRONG = {
    "model.heads=5": "model.hidden=384 is not divisible by model.heads=5",
    "schedule.min_lr=1": "schedule.min_lr=1.0 is above optimizer.lr=0.001",
    "schedule.warmup_steps=300": "schedule.warmup_steps=300 is not below steps=300",
    "schedule.decay_steps=20": "schedule.warmup_steps=20 is not below schedule.decay_steps=20",
    "schedule.power=2": "schedule.power=2.0 with schedule.kind=cosine: only polynomial reads it",
    "schedule.wsd_decay_style=cosine": "schedule.wsd_decay_style=cosine with schedule.kind=cosine: only wsd",
    "schedule.wsd_decay_steps=9": "schedule.wsd_decay_steps=9 with schedule.kind=cosine: only wsd",
    "schedule.kind=wsd": "schedule.kind=wsd without schedule.wsd_decay_steps",
    "schedule={kind: wsd, warmup_steps: 20, wsd_decay_steps: 281}": "above the 280 steps after the warm-up",
    "schedule.kind=polynomial": "schedule.kind=polynomial without schedule.power",
    "schedule={kind: inverse_sqrt, decay_steps: 99}": "no last step; set it to null",
    "optimizer.name=lion": "should be 'adamw', 'lamb' or 'muon'",
    "optimizer.name=[lamb]": "should be 'adamw', 'lamb' or 'muon'",
    "optimizer.adam_lr=1e-3": "optimizer.adam_lr=0.001 with optimizer.name=adamw: only muon reads it",
    "optimizer={name: muon, lr: 1e-3, bias_correction: false}": "torch's AdamW steps what Muon does not",
    "optimizer.betas=[1.0, 0.9]": "optimizer.betas=1.0: should be less than 1",
    "data.tokenizer.kind=gpt2": "the published vocabulary has 50257 tokens",
    "model.vocab_size=256": "set model.vocab_size to 257 or more",
    "data={source: hub, name: x}": "a vocabulary cannot be trained on what is read once",
    "data.source=jsonl": "data.source=jsonl needs data.name",
    "data.name=mine.txt": "data.name=mine.txt with data.source=packaged: the packaged text has no other",
    "activation_checkpointing=7": "activation_checkpointing=7 is above model.layers=6",
    "activation_checkpointing=some": "should be 'none', 'selective' or 'full', or should be a valid integer",
    "steps=true": "steps=True: should be a valid integer",
    "steps=1.5": "steps=1.5: should be a valid integer",
    "steps='12'": "steps='12': should be a valid integer",
    "optimizer.lr=-1": "optimizer.lr=-1: should be greater than 0",
    "optimizer.lr=.nan": "optimizer.lr=nan",
    "dropout.hidden=1": "dropout.hidden=1: should be less than 1",
    "batch.global=0": "batch.global=0: should be greater than or equal to 1",
    "batch=null": "batch=None",
    "model.layer_norm=post": "GPT-2 normalises before attention and MLP",
    "model.sentence_head=nsp": "only a BERT has a sentence objective",
    "model.layers=100000": "model.layers=100000: should be less than or equal to 10000",
    "batch.global=9999999999999999": "should be less than or equal to 10000000",
    "data.validation_every=1": "data.validation_every=1 holds out every document",
    "data.test_every=1": "data.test_every=1 leaves no document to train on",
    "data={source: store, name: x, streaming: true, tokenizer: {kind: store}}": "stored tokens are never",
    "data.streaming=true": "stored tokens are never",
    "data={blend: [{weight: 1, streaming: true}]}": "stored tokens are never",
    "data={source: text, name: x, streaming: true}": "to false, or data.documents to blank_line",
    "data={revision: main, blend: [{weight: 1}]}": "data.blend together with data.revision",
    "data={source: store, name: x}": "its tokens are numbered already",
    "data={tokenizer: {kind: store}}": "there is no store to take it from",
    "data={tokenizer: {kind: file}}": "data.tokenizer.kind=file needs data.tokenizer.path",
    "data={source: jsonl, name: x, blend: [{weight: 1}]}": "data.blend together with data.name, data.source",
    "data.blend=[{weight: 0}]": "should be greater than 0",
    "model.attention=[banded]": "banded layers without model.attention_window",
    "model.attention_window=4": "model.attention_window=4 without a banded or fixed layer",
    "model={attention: [fixed], attention_window: 4}": "has fixed layers without model.attention_columns",
    "model={shared_layers: true, implementation: transformers}": "model.shared_layers=true with model.impl",
    "model={shared_layers: true, attention: [dense, banded], attention_window: 4}": "one layer cannot have",
    "model.attention_columns=4": "model.attention_patterns=1 without a fixed layer",
    "model.attention_patterns=2": "model.attention_patterns=2 without a fixed layer",
    "model={attention: [fixed], attention_window: 4, attention_columns: 4}": "not all of them; set "
    "model.attention_columns to 3 or less",
    "model={attention: [fixed], attention_window: 8, attention_columns: 3, attention_patterns: 3}": "to 2 or",
    "data.attend=documents": "should be 'window' or 'document'",
    "model.positions=255": "model.positions=255 is below sequence_length=256: every token of a sample has a "
    "position of its own; set sequence_length to 255 or less, or model.positions to 256 or more",
    "model.positions=0": "model.positions=0: should be greater than or equal to 1",
    f"seed={2**64}": "should be less than",
    "run.loader_workers=100000": "should be less than",
    "sequence_length=20000000": "should be less than",
    "data.masking.max_ngram=1000": "should be less than",
    "data.blend.weight=1": "unknown key; data.blend is a list of parts, each with weight: give it as a whole",
    "inferred={model.layer: a guess}": "inferred: model.layer: no such key of a recipe",
    "inferred={data.tokenizer.kind: a, data.blend: b, published.row: c, sped: d}": "inferred: sped: no such",
}
WRONG_FOR_BERT = {
    "data.tokenizer.kind=trained_bpe": "needs a vocabulary with [CLS], [SEP], [MASK] and [PAD]",
    "data.tokenizer.kind=bert_uncased": "the published vocabulary has 30522 tokens",
    "data={source: hub, name: x, tokenizer: {kind: trained_wordpiece}}": "and model.vocab_size to 30522",
    "model.implementation=transformers": "its BERT is only fine-tuned; set model.family to gpt2",
    "model.attention=[banded]": "banded layers and model.family=bert: sparse patterns look back only",
    "data.attend=document": "with model.family=bert: a BERT's samples are made of segments",
    "data.positions=document": "not cut out of joined documents; set it to window",
    "sequence_length=7": "a sample is [CLS] A [SEP] B [SEP]; set it to 8 or more",
    "data.masking.probability=0": "should be greater than 0",
}
EVERY_WRONG = [*(("default/sotu", *row) for row in WRONG.items())]
EVERY_WRONG += [("bert/sotu", *row) for row in WRONG_FOR_BERT.items()]


@pytest.mark.parametrize(("name", "override", "said"), EVERY_WRONG)
def test_inconsistent_values_are_refused(name, override, said):
    found = problems(name, override)
    assert any(said in line for line in found), found


@pytest.mark.parametrize("degree", ["tp", "pp"])
def test_gpt2_of_transformers_is_cut_by_zero_only(degree):
    (found,) = problems("default", "model.implementation=transformers", f"parallel.{degree}=2")
    assert f"its GPT-2 is cut by ZeRO alone; set parallel.{degree} to 1" in found


def test_borders_of_documents_are_refused_where_they_cannot_be():
    borders = "data.attend=document", "data.positions=document"
    patterns = "model.attention=[dense, banded]", "model.attention_window=4"
    (found,) = problems("default", *borders, *patterns)
    assert "data.attend=document with banded layers: sparse patterns have no borders" in found
    assert "set data.attend to window, or model.attention to [dense]" in found
    load(overrides=[*borders[1:], *patterns])
    found = problems("default", *borders, "model.implementation=transformers")
    assert [line.split(": ")[1].split(" with")[0] for line in found] == [*borders]
    assert all("its GPT-2 sees windows; set data." in line for line in found)


def test_tiny_keeps_the_borders_of_documents():
    for overrides in (["data.attend=document"], ["data.positions=document"], []):
        data = load(overrides=overrides).data
        small = shrink(load(overrides=overrides)).data
        assert (small.attend, small.positions) == (data.attend, data.positions)
        assert small.borders == bool(overrides)


def test_messages_name_the_keys_of_a_pattern_of_attention():
    banded = ["model.attention=[dense, banded]", "model.attention_window=4"]
    said = "model.attention=['dense', 'banded'], model.attention_window=4"
    assert load(overrides=banded).model.sparse_keys == said
    fixed = ["model.attention=[fixed]", "model.attention_window=4", "model.attention_columns=2"]
    said = "model.attention=['fixed'], model.attention_window=4, model.attention_columns=2"
    assert load(overrides=fixed).model.sparse_keys == f"{said}, model.attention_patterns=1"


def test_text_whose_files_hold_many_documents_may_be_streamed():
    how = "source: text, name: x, streaming: true, documents: blank_line, tokenizer: {kind: gpt2}"
    assert load("gpt2-124m", [f"data={{{how}}}"]).data.streamed
    assert load("gpt2-124m").data.revision == "refs/convert/parquet"


def test_a_constant_rate_may_warm_up_to_the_end():
    recipe = load("default", ["schedule.kind=constant", "schedule.warmup_steps=300"])
    assert recipe.schedule.warmup_steps == 300


def test_the_schema_is_frozen_and_every_number_says_what_it_is():
    recipe = load()
    with pytest.raises(ValidationError, match="frozen"):
        recipe.steps = 3
    assert "batch.global" in set(paths()) and "batch.global_" not in set(paths())


# --- problems


def test_a_problem_is_data_that_reads_as_a_sentence():
    came = Setting("batch.micro", [4]), " without ", Key("data.name")
    problem = Problem("batch", came, "the rule", ("set ", Key("seed")), where="mine/one", place="x.yaml:3")
    assert str(problem) == "mine/one: batch.micro=[4] without data.name: the rule; set seed (x.yaml:3)"
    flags = problem.render(lambda words: f"--{words.upper()}" if isinstance(words, Key) else str(words))
    assert flags == "mine/one: batch.micro=[4] without --DATA.NAME: the rule; set --SEED (x.yaml:3)"
    assert problem.keys == ("batch", "batch.micro", "data.name")
    assert (
        str(Problem("", "only this")) == "only this" and str(Problem("", "this", fix="that")) == "this; that"
    )


def test_an_error_names_a_problem_once():
    one, two = Problem("a", "x"), Problem("b", Setting("y", [1]))
    error = ProblemsError([one, two, Problem("a", "x"), two])
    assert error.problems == (one, two) and str(error) == "x\ny=[1]"


# --- overrides


def test_overrides_reach_every_depth_and_read_values_as_yaml():
    settings = """batch.global=16 data.tokenizer.kind=gpt2 model.vocab_size=50257 optimizer.lr=1e-4
        run.prompt=null schedule.min_lr=0.0 published.source=me schedule.min_lr=1e-5"""
    recipe = load("default", [*settings.split(), "optimizer.betas=[0.8, 0]"])
    assert (recipe.batch.global_, recipe.data.tokenizer.kind, recipe.optimizer.lr) == (16, "gpt2", 1e-4)
    assert (recipe.run.prompt, recipe.schedule.min_lr, recipe.optimizer.betas) == (None, 1e-5, (0.8, 0.0))
    assert recipe.published is not None and recipe.published.source == "me"
    assert load().batch.global_ == 8  # the catalog is not changed


def test_bad_overrides_are_all_reported_with_how_to_write_them():
    wrong = ("batch.micr=4", "lr=1", "steps", "=3", "model.layers=[", "steps=0", "foo.bar=1")
    found = problems("default", *wrong)
    assert found[:6] == (
        "--set batch.micr=4: batch.micr: unknown key; did you mean batch.micro?",
        "--set lr=1: lr: unknown key; did you mean optimizer.lr?",
        "--set steps: is not key=value; write --set key=value, as in --set batch.micro=4",
        "--set =3: is not key=value; write --set key=value, as in --set batch.micro=4",
        found[4],
        "--set foo.bar=1: foo.bar: unknown key; no such key",
    )
    assert found[4].startswith("--set model.layers=[:1:2: not YAML")
    assert found[6] == "default/sotu: steps=0: should be greater than or equal to 1 (--set)"


# --- steps, dump, digest


def test_steps_end_the_run_and_leave_the_schedule():
    full, short, longer = load(), load(steps=7), load(steps=1000)
    assert (short.steps, short.decay_steps, short.schedule.warmup_steps) == (7, full.decay_steps, 20)
    assert digest(short) == digest(full) == digest(longer)
    assert digest(load(overrides=["steps=301"])) != digest(full)
    assert "at least one optimizer step" in problems("default", steps=0)[0]


@pytest.mark.parametrize("tiny", [False, True])
def test_a_resolved_recipe_reads_back_equal(tiny, tmp_path):
    def again(recipe: Recipe) -> Recipe:
        (tmp_path / "recipe.yaml").write_text(dump(recipe), encoding="utf-8")
        return load_resolved(tmp_path / "recipe.yaml")

    recipes = {name: load(name, tiny=tiny) for name in EVERY}
    read = {name: again(recipe) for name, recipe in recipes.items()}
    wrong = [n for n in EVERY if read[n] != recipes[n] or digest(read[n]) != digest(recipes[n])]
    assert not wrong


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "no such file"), ("[1]", "holds list"), ("a: {", "not YAML"), ("title: x", "is missing")],
)
def test_resolved_recipes_that_cannot_be_read(text, said, tmp_path):
    path = tmp_path / "recipe.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(RecipeError, match=said):
        load_resolved(path)


def test_a_recipe_means_its_values_whether_stated_or_not():
    """Rebuilt from every value written out, it is shrunk, shortened and resolved alike."""

    def meaning(recipe: Recipe) -> list[object]:
        small = shrink(recipe)
        return [recipe, digest(recipe), dump(recipe), outcome(recipe), small, digest(small), outcome(small)]

    stated = {name: load(name) for name in EVERY}
    full = {name: Recipe.model_validate(each.model_dump(by_alias=True)) for name, each in stated.items()}
    assert not [name for name in EVERY if meaning(full[name]) != meaning(stated[name])]


def outcome(recipe: Recipe) -> object:
    """The plan on as many GPUs as the recipe states, or the reasons against it."""
    world = math.prod(recipe.parallel.model_parallel) * (recipe.parallel.dp or 1)
    machine = Machine(GPU, fp16=True, bf16=True, compiler=True, libaio=True)
    try:
        return resolve(recipe, recipe.ds_config, world, machine, {"MEGARECIPES_NVME": "/tmp"})
    except ConfigError as error:
        return error.problems


SAME = ("parallel.tp=2", "batch.micro=4", "batch.accumulation=2", "ds_config=zero1", "title=x", "note=x",
        "run.save_every=7", "run.save_every_minutes=0.5", "data.broken_records=skip", "run.save_last=false",
        "model.positions=256")  # fmt: skip
OTHER = ("batch.global=16", "optimizer.lr=2e-3", "seed=1", "model.layers=5", "precision=fp32",
         "dropout.hidden=0.1", "schedule.warmup_steps=21", "data.validation_every=7", "data.shuffle_buffer=7",
         "sequence_length=128", "init_std=0.01", "data.attend=document", "data.positions=document",
         "activation_checkpointing=full", "model.positions=257")  # fmt: skip


def test_the_digest_knows_what_decides_the_numbers():
    base = digest(load())
    assert {digest(load(overrides=[override])) for override in SAME} == {base}
    others = [digest(load(overrides=[override])) for override in OTHER]
    assert base not in others and len(set(others)) == len(OTHER)


# --- what a run keeps


def test_only_runs_that_time_iterations_leave_out_the_last_checkpoint():
    """Whole tables of them, and one row of two in the Megatron paper's."""
    timing = ("hpe1270_", "dgx2_", "a100_blog_table4/", "a100_blog_figure2/", "jeanzay_")
    for name in EVERY:
        only_timed = name.startswith(timing) or (
            name.startswith("megatron_paper_table1/") and name.endswith("-mp")
        )
        run = load(name).run
        assert run.save_last is not only_timed and not (only_timed and run.save_every), name
        assert load(name, tiny=True).run.save_last is run.save_last


# --- tiny


@pytest.mark.parametrize("name", EVERY)
def test_tiny_keeps_the_code_path(name):
    full, small = load(name), load(name, tiny=True)
    assert small.model.layers <= 4 and small.model.hidden == 64 and small.steps <= 20
    most = 64 if small.model.attention == ("dense",) else 256
    assert small.positions == most and (small.sequence_length < most) == (
        full.sequence_length < full.positions
    )
    assert small.model.vocab_size % 2 == 1, "tensor parallelism must have to pad"
    assert small.data.source == "packaged" and small.optimizer.lr >= 1e-3 and small.title.endswith(" (tiny)")
    for kept in ("dropout", "precision", "ds_config", "seed"):
        assert getattr(small, kept) == getattr(full, kept)
    assert small.schedule.kind == full.schedule.kind
    assert type(small.activation_checkpointing) is type(full.activation_checkpointing)
    for degree in ("tp", "pp", "dp"):
        before, after = getattr(full.parallel, degree), getattr(small.parallel, degree)
        assert after == (None if before is None else min(2, before))
    assert load(name, tiny=True) == small


def published(**batch) -> Recipe:
    """A row as the tables have them: many GPUs, everything stated."""
    values = load("openwebtext/gpt2-124m").model_dump(by_alias=True)
    values |= {"parallel": {"tp": 4, "pp": 8, "dp": 4}, "batch": batch, "activation_checkpointing": 4}
    values["schedule"] |= {"warmup_steps": 2000, "decay_steps": 320000, "min_lr": 1e-5}
    return Recipe.model_validate(values | {"steps": 400000})


def test_tiny_of_a_published_layout_keeps_the_batch_identity():
    small = shrink(published(micro=4, accumulation=16, **{"global": 256}))
    assert (small.parallel.tp, small.parallel.pp, small.parallel.dp) == (2, 2, 2)
    batch = small.batch
    assert (batch.micro, batch.accumulation, batch.global_, batch.rampup) == (2, 2, 8, None)
    assert small.activation_checkpointing == 2
    assert (small.schedule.warmup_steps, small.schedule.decay_steps) == (1, 16)
    for decay, last, expected in ((None, 40000, 2), (80000, 40000, 2), (4000, 2000, 1)):
        schedule = {"kind": "wsd", "warmup_steps": 2000, "decay_steps": decay, "wsd_decay_steps": last}
        values = published(micro=4, **{"global": 256}).model_dump(by_alias=True) | {"schedule": schedule}
        assert shrink(Recipe.model_validate(values)).schedule.wsd_decay_steps == expected
    once = shrink(published(micro=4, accumulation=None, **{"global": 16}))
    assert (once.batch.micro, once.batch.accumulation, once.batch.global_) == (2, 1, 4)
    assert shrink(small) == small


D, B, F = "dense", "banded", "fixed"
PATTERNS = {  # of a recipe -> shrunk
    (D, D, D, D, B): (D, D, D, B), (B, D, D, D, D, D): (B, D, D, D), (D, D, D, B, B, B): (D, D, B, B),
    (D, B) * 3: (D, B) * 2, (D, F, F, F, B): (D, F, F, B),
    (D, D, B, D, D, B): (D, B, D, B), (B,) * 6: (B,) * 4, (D, B): (D, B), (D, D, D, B): (D, D, D, B),
}  # fmt: skip


@pytest.mark.parametrize("kinds", PATTERNS)
def test_tiny_keeps_every_kind_of_layer(kinds, table):
    pattern = f"attention: [{', '.join(kinds)}], attention_window: 5"
    pattern += ", attention_columns: 1" if F in kinds else ""
    small = load(f"{table(GOOD.replace('layers: 2', 'layers: 6, ' + pattern))}:one", tiny=True)
    assert small.model.attention == PATTERNS[kinds]


@pytest.mark.parametrize(
    ("positions", "window"),
    [(2048, 128), (2048, 1000), (2048, 2047), (1024, 700), (300, 20), (100, 9), (16, 5)],
)
def test_tiny_takes_the_kernel_of_the_whole_recipe(positions, window, table):
    from modeling.sparse_attention import choose

    text = GOOD.replace("layers: 2", f"layers: 2, attention: [dense, banded], attention_window: {window}")
    path = table(text.replace("sequence_length: 16", f"sequence_length: {positions}"))
    small = load(f"{path}:one", tiny=True)

    def kernel(recipe: Recipe) -> str:
        model, length = recipe.model, recipe.sequence_length
        head_size = model.hidden // model.heads
        return choose("cpu", torch.float32, 0.0, length, model.attention_window, head_size).kernel

    assert small.sequence_length == min(256, positions) and shrink(small) == small
    assert kernel(small) == kernel(load(f"{path}:one"))


@pytest.mark.parametrize(
    ("positions", "length", "shrunk"),
    [(512, 512, (64, 64)), (512, 128, (64, 32)), (512, 511, (64, 62)), (4096, 64, (64, 32)),
     (512, 300, (64, 36)), (512, 20, (64, 20)), (60, 20, (60, 20)), (70, 64, (64, 58)), (64, 64, (64, 64))],
)  # fmt: skip
def test_tiny_keeps_phases_of_one_model_apart(positions, length, shrunk):
    """Whatever the length of samples, the positions are the same; where they are apart, they stay so."""
    recipe = load("default", [f"sequence_length={length}", f"model.positions={positions}"])
    small = shrink(recipe)
    assert (small.positions, small.sequence_length) == shrunk and shrink(small) == small


def test_tiny_leaves_a_band_within_short_samples(table):
    text = GOOD.replace("layers: 2", "layers: 2, attention: [banded], attention_window: 100, positions: 9000")
    small = load(f"{table(text.replace('sequence_length: 16', 'sequence_length: 300'))}:one", tiny=True)
    assert (small.positions, small.sequence_length, small.model.attention_window) == (256, 32, 16)


def test_a_run_may_not_resume_with_other_positions():
    base, long = load(), ["sequence_length=128", "model.positions=256"]
    assert not changes(base, load(overrides=["model.positions=256"]), Keys())
    more = load(overrides=["model.positions=300"])
    assert changes(base, more, KEPT_BY_RESUME) == [("model.positions", None, 300)]
    refused = changes(base, load(overrides=long), KEPT_BY_RESUME)
    assert {key for key, *_ in refused} == {"model.positions", "sequence_length"}


def test_set_has_the_last_word_over_tiny():
    assert load("default", ["model.layers=3", "batch.global=12"], tiny=True).model.layers == 3


@pytest.mark.parametrize(
    "written", ["2024", "7e12345", "yes", "2024-01-01", "*.jsonl", "[a].txt", "a: b", "1"]
)
def test_a_key_that_takes_a_text_takes_what_is_typed(written):
    keys = ("name", "revision", "text_column", "config", "tokenizer.path")
    data = load(overrides=["data.source=jsonl", *(f"data.{key}={written}" for key in keys)]).data
    assert {data.name, data.revision, data.text_column, data.config, data.tokenizer.path} == {written}


def test_a_text_may_be_quoted_or_nothing():
    data = load(overrides=["data.source=jsonl", "data.name='2024'", "data.config=null"]).data
    assert (data.name, data.config) == ("2024", None)
    with pytest.raises(RecipeError, match="data.source=2024: should be 'packaged'"):
        load(overrides=["data.source=2024"])


# --- the planning side is light


def test_reading_recipes_imports_neither_torch_nor_deepspeed():
    code = (
        "import sys, recipes.catalog, ds_configs.resolver; recipes.catalog.load(); "
        "sys.exit(bool({'torch', 'deepspeed', 'numpy'} & set(sys.modules)))"
    )
    root = Path(catalog.__file__).parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


# --- parts of a blend


def test_a_blend_that_is_set_takes_the_place_of_the_recipes_source():
    blend = "data.blend=[{source: jsonl, name: x, weight: 1.0}, {weight: 2.0}]"
    for tiny in (False, True):
        data = load("wikipedia/bert-336m", [blend], tiny=tiny).data
        assert (data.source, data.name, data.config) == ("packaged", None, None) and len(data.blend) == 2
    with pytest.raises(RecipeError, match="data.blend together with data.name"):
        load("wikipedia/bert-336m", [blend, "data.name=y"])


BLENDS = {
    "[{wieght: 1}]": (
        "[0].weight: is missing",
        "[0].wieght: unknown key; did you mean data.blend[0].weight?",
    ),
    "[{weight: 0}, {weight: -1}]": ("[0].weight=0: should be greater than 0", "[1].weight=-1: should be"),
    "{weight: 1}": ("={'weight': 1}: should be a list of parts, each with weight",),
    "[{weight: 1}, {weight: 1, source: jsonl}]": ("[1].source=jsonl needs data.blend[1].name: ",),
    "[{weight: 1, zzz: 1}]": ("[0].zzz: unknown key; data.blend[0] has source, name,",),
    "[{weight: 1, validation_every: 9}]": (
        "[0].validation_every: unknown key; did you mean data.validation",
    ),
}


@pytest.mark.parametrize("blend", BLENDS)
def test_problems_of_a_blend_say_which_part(blend, table):
    expected = BLENDS[blend]
    found = problems("default/sotu", f"data.blend={blend}")
    for line in expected:
        here = [problem for problem in found if f": data.blend{line}" in problem]
        assert len(here) == 1 and here[0].endswith(" (--set)"), line
    path = table(GOOD + f"  two:\n    title: x\n    data:\n      blend: {blend}\n")
    found = problems(f"{path}:two")
    assert len(found) == len(expected)
    assert all(problem.endswith(f" ({path}:14)") for problem in found), found  # the line of the list


# Question about two recipes -> keys that count, and keys that do not.
ASKED = {
    "BRANCHED": (
        "seed schedule.kind data.name precision",
        "data.tokenizer.kind optimizer.name model.layers title",
    ),
    "DEVIATING": ("optimizer.lr batch.global", "batch.micro batch.accumulation branch run.save_every"),
    "TEXT": ("data.name data.masking.probability model.vocab_size task.name", "data.streaming model.layers"),
    "CURVE": (
        "model.layers sequence_length batch.global batch.rampup.start optimizer.lr schedule.decay_steps "
        "dropout.hidden init_std data.masking.probability data.attend run.validation_samples",
        "seed precision parallel.tp batch.micro batch.accumulation activation_checkpointing curve steps branch "
        "model.implementation model.vocab_divisible_by run.validate_every run.check_every data.broken_records",
    ),
    "PLACES": ("data.name data.tokenizer.path data.source", "data.validation_every data.attend"),
    "WORK": ("model.layers sequence_length batch.global", "batch.micro seed"),
    "PRETRAINED": ("steps optimizer.lr data.name", "precision seed"),
    "NEXT_STEP": ("seed data.name batch.rampup.start", "batch.micro optimizer.lr"),
    "NOTED_BY_RESUME": ("steps run.save_every", "precision batch.micro title seed"),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_question_about_two_recipes_is_about_its_keys(name):
    counted, left = (keys.split() for keys in ASKED[name])
    asked = getattr(key_paths, name)
    assert [key for key in (*counted, *left) if key in asked] == counted


def test_files_of_a_task_are_checked_where_there_is_a_task():
    from recipes import consistency
    from recipes.schema import Task

    task = Task(name="rte", train="a.tsv", dev_mismatched="b.tsv")
    recipe = catalog.load("bert/sotu").model_copy(update={"task": task})
    found = [problem.key for problem in consistency.problems(recipe)]
    assert found == ["model.task_head", "task.dev_mismatched", "task.dev"]
