"""The command on runs and transformers' weights; what it refuses."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from launching import ROOT, run, run_ranks
from megatron_writer import Form, write
from stored import model_tensors, rewrite_manifest, write_checkpoint
from transformers import BertForMaskedLM, GPT2LMHeadModel

from data.text.trained_vocabulary import train_bpe, train_wordpiece, wrap_tokenizer
from launch import generate, pretrain, score
from launch.checkpoints import manifest
from launch.console import ends
from launch.console.terminal import visible
from launch.evaluation import writing
from launch.records import vocabulary
from modeling.families import conversion_of
from recipes import catalog

COMMAND = ROOT / "launch/generate.py"
PROMPTS = ["My fellow citizens", "The", "A recipe says what to train, a JSON", "Ä 3%", "The"]
MASKED = ["The [MASK] of a recipe.", "a [MASK] run [MASK] the [MASK]"]
SIZE = 509


def tokenizer_of(kind: str):
    train = {"trained_bpe": train_bpe, "trained_wordpiece": train_wordpiece}[kind]
    return wrap_tokenizer(kind, train([(ROOT / "README.md").read_text()], SIZE))


def make_run(path: Path, name: str, *settings: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """A run with a checkpoint of weights that are far from uniform."""
    recipe = catalog.load(name, [*settings, "precision=fp32"], tiny=True)
    path.mkdir()
    (path / "recipe.yaml").write_text(catalog.dump(recipe))
    weights = {name: tensor * 10 for name, tensor in model_tensors(recipe).items()}
    write_checkpoint(path / "checkpoints", 7, weights, recipe, ranks=2)
    vocabulary.keep(path, tokenizer_of(recipe.data.tokenizer.kind))
    return path, weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Runs, what transformers saved of the same weights, and files of prompts."""
    folder = tmp_path_factory.mktemp("generate")
    for name, row, classes in (
        ("gpt", "default/sotu", GPT2LMHeadModel),
        ("bert", "bert/sotu", BertForMaskedLM),
    ):
        plain = ("model.sentence_head=none", "model.layer_norm=post") if name == "bert" else ()
        directory, weights = make_run(folder / name, row, *plain)
        recipe = catalog.load_resolved(directory / "recipe.yaml")
        conversion = conversion_of(recipe.model)
        theirs = classes(conversion.config(recipe.model, recipe.sequence_length))
        theirs.load_state_dict(conversion.to_transformers(weights, recipe.model), strict=False)
        theirs.save_pretrained(folder / f"{name}-hf")
        vocabulary.load(directory).save_pretrained(folder / f"{name}-hf")
    make_run(folder / "short", "default/sotu", "sequence_length=20", "model.positions=64")
    make_run(folder / "banded", "default/sotu", "model.attention=[dense,banded]", "model.attention_window=8")
    (folder / "prompts.txt").write_text("\n\n".join(PROMPTS))
    (folder / "masked.txt").write_text("\n".join(MASKED))
    return folder


def typed(monkeypatch, *words: object) -> int | None:
    """The exit code of the command in this process."""
    monkeypatch.setattr(sys, "argv", [str(COMMAND), *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        ends.run(generate.main)
    return ended.value.code


def records(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture
def written(monkeypatch, tmp_path):
    """What the command writes for these words."""
    count = iter(range(99))

    def write(*words: object) -> list[dict]:
        out = tmp_path / f"{next(count)}.jsonl"
        assert typed(monkeypatch, *words, "--out", out) in (None, 0)
        return records(out)

    return write


def test_texts_of_a_file_are_those_of_single_prompts(folder, written):
    sampled = ("--samples", 2, "--tokens", 20, "--seed", 3)
    found = written(folder / "gpt", "--file", folder / "prompts.txt", *sampled)
    assert [(each["prompt"], each["sample"]) for each in found] == [(p, n) for p in PROMPTS for n in (0, 1)]
    for at, prompt in ((0, PROMPTS[0]), (6, PROMPTS[3])):
        assert found[at : at + 2] == written(folder / "gpt", "--prompt", prompt, *sampled)
    assert found[2] == found[8] and found[0]["text"] != found[1]["text"]
    alone = written(folder / "gpt", "--prompt", PROMPTS[0], "--tokens", 20, "--seed", 3)
    assert alone == found[:1], "whatever is written beside it"
    assert all(each["text"] == each["prompt"] + each["new"] for each in found if "�" not in each["new"])
    other = written(folder / "gpt", "--prompt", PROMPTS[0], *sampled[:-1], 4)
    assert other[0]["text"] != found[0]["text"]


def test_a_text_ends_at_the_last_position(folder, written):
    (found,) = written(folder / "gpt", "--prompt", "The", "--tokens", 500)
    prompt = vocabulary.load(folder / "gpt").encode("The")
    assert found["ended"] == "positions" and found["tokens"] == 64 - len(prompt) + 1


def test_a_text_may_be_longer_than_the_samples_of_the_training(folder, written):
    """It ends at the last position, as if the same weights had been trained up to there."""
    prompt = ("--prompt", "We the people " * 6, "--tokens", 500)
    (found,) = written(folder / "short", *prompt)
    assert found["ended"] == "positions" and [found] == written(folder / "gpt", *prompt)


def test_several_processes_are_refused(folder):
    done = run_ranks(2, COMMAND, folder / "gpt", "--prompt", "The")
    assert done.returncode != 0 and "2 processes" in done.stdout and "start it with python" in done.stdout


def test_greedy_texts_are_those_of_transformers(folder, written):
    tokenizer = vocabulary.load(folder / "gpt")
    model = GPT2LMHeadModel.from_pretrained(folder / "gpt-hf")
    found = written(folder / "gpt-hf", "--file", folder / "prompts.txt", "--greedy", "--tokens", 20)
    for prompt, each in zip(PROMPTS, found, strict=True):
        tokens = torch.tensor([tokenizer.encode(prompt)])
        made = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=20, do_sample=False,
            pad_token_id=0, eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        assert each["text"] == tokenizer.decode(made[0], skip_special_tokens=True)
    assert found == written(folder / "gpt", "--file", folder / "prompts.txt", "--greedy", "--tokens", 20)


def test_a_bert_fills_its_masks_as_transformers(folder, written):
    tokenizer, model = vocabulary.load(folder / "bert"), BertForMaskedLM.from_pretrained(folder / "bert-hf")
    (found,) = written(folder / "bert-hf", "--prompt", MASKED[0])
    tokens = tokenizer(MASKED[0], return_tensors="pt")
    with torch.no_grad():
        logits = model(**tokens).logits[tokens["input_ids"] == tokenizer.mask_token_id][0]
    logits[tokenizer.mask_token_id] = -torch.inf
    assert found["new"] == tokenizer.convert_ids_to_tokens(int(logits.argmax()))
    assert written(folder / "bert", "--file", folder / "masked.txt")[0] == found


def test_a_lone_text_is_streamed(folder, monkeypatch, capsys):
    """Word by word, the same text in the end, and nothing in it acts on the terminal."""
    pieces = []
    kept = writing.ScreenStream.on_finalized_text

    def noted(stream, text, stream_end=False):
        pieces.append(text)
        kept(stream, text, stream_end)

    monkeypatch.setattr(writing.ScreenStream, "on_finalized_text", noted)
    (plain,) = texts_of(folder, monkeypatch, "--prompt", "The", "--tokens", 30)
    said = capsys.readouterr()
    assert said.out == f"{visible(''.join(pieces))}\n" and len({*pieces}) > 3
    assert said.out.strip() == visible(plain).strip()
    assert "step 7" in said.err and "1 text, 30 tokens" in said.err


def texts_of(folder, monkeypatch, *words) -> list[str]:
    """The texts of the run `gpt`, as a file has them, and then the same in the terminal."""
    out = folder / "lone.jsonl"
    assert not typed(monkeypatch, folder / "gpt", *words, "--out", out)
    assert not typed(monkeypatch, folder / "gpt", *words)
    return [each["text"] for each in records(out)]


def test_several_texts_have_a_line_that_says_whose_they_are(folder, monkeypatch, capsys):
    words = (folder / "gpt", "--prompt", "The", "--prompt", "A", "--samples", 2, "--tokens", 3)
    assert not typed(monkeypatch, *words)
    said = capsys.readouterr().out
    assert [line for line in said.split("\n") if line.startswith("---")] == [
        f"--- {prompt}, sample {s}, ended by length" for prompt in ("The", "A") for s in (1, 2)
    ]


REFUSED = {
    "no prompt": (["gpt"], "neither --prompt nor --file", "add --prompt TEXT"),
    "two kinds": (["gpt", "--prompt", "a", "--file", "x"], "--prompt with --file", "leave one"),
    "empty": (["gpt", "--prompt", " "], "is empty", "give some text"),
    "too long": (["gpt", "--prompt", "z " * 99], "has 198 tokens", "64 positions"),
    "no unicode": (["gpt", "--prompt", "\udc80"], "is not UTF-8", ""),
    "top_p": (["gpt", "--prompt", "a", "--top_p", "1.5"], "1.5: give a number above 0, at most 1", ""),
    "no top_p": (["gpt", "--prompt", "a", "--top_p", "0"], "0: give a number above 0, at most 1", ""),
    "cold": (["gpt", "--prompt", "a", "--temperature", "0"], "0: give a number above 0", ""),
    "nan": (["gpt", "--prompt", "a", "--temperature", "nan"], "nan: give a number above 0", ""),
    "greedy": (
        ["gpt", "--prompt", "a", "--greedy", "--top_k", "3"],
        "--greedy with --top_k",
        "leave one out",
    ),
    "equal samples": (["gpt", "--prompt", "a", "--greedy", "--samples", "3"], "--samples 3", "the same"),
    "no model": (["nothing", "--prompt", "a"], "does not exist", "give a directory"),
    "no checkpoint": (["untrained", "--prompt", "a"], "holds no", "checkpoint"),
    "no vocabulary": (["bare", "--prompt", "a"], "holds no vocabulary", "--tokenizer DIR"),
    "another vocabulary": (["bare", "--prompt", "a", "--tokenizer", "large"], "has 600 tokens", "509"),
    "no mask": (["bert", "--prompt", "The"], "has no [MASK]", "write [MASK]"),
    "bert draws": (
        ["bert", "--prompt", "[MASK]", "--top_k", "3", "--samples", "2"],
        "--samples, --top_k",
        "BERT",
    ),
    "no file": (["gpt", "--file", "nothing.txt"], "nothing.txt: no such file", ""),
    "no prompts": (["gpt", "--file", "blank.txt"], "holds no prompt", "a prompt in each line"),
    "JSON lines": (["gpt", "--file", "bad.jsonl"], "has an ending of JSON", "jq -r .prompt"),
    "too long a line": (["gpt", "--file", "long.txt"], "long.txt:2: has 198 tokens", "shorten it"),
    "out": (["gpt", "--prompt", "a", "--out", "prompts.txt"], "another ending", ".jsonl"),
    "damaged": (["damaged", "--prompt", "a"], "n_layer=null: it is a whole number", "give a directory"),
    "out exists": (["gpt", "--prompt", "a", "--out", "bad.jsonl"], "exists already", "name another file"),
}


@pytest.fixture(scope="module")
def odd(folder) -> Path:
    """Models and files that are refused."""
    recipe = catalog.load("default/sotu", ["precision=fp32"], tiny=True)
    (folder / "untrained").mkdir()
    (folder / "untrained" / "recipe.yaml").write_text(catalog.dump(recipe))
    (folder / "bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / "bare" / name).symlink_to(folder / "gpt-hf" / name)
    wrap_tokenizer("trained_bpe", train_bpe([(ROOT / "README.md").read_text()], 600)).save_pretrained(
        folder / "large"
    )
    config = json.loads((folder / "gpt-hf" / "config.json").read_text())
    (folder / "damaged").mkdir()
    (folder / "damaged" / "config.json").write_text(json.dumps(config | {"n_layer": None, "n_embd": 40}))
    (folder / "blank.txt").write_text("\n  \n")
    (folder / "bad.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "long.txt").write_text("a\n" + "z " * 99)
    return folder


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused(name, odd, monkeypatch, capsys):
    """Before any weight is read."""
    words, came, fix = REFUSED[name]
    monkeypatch.chdir(odd)
    monkeypatch.setattr(writing, "run", None)
    assert typed(monkeypatch, *words) == 2
    said = capsys.readouterr().err
    assert came in said and fix in said, said
    assert "--init_from" not in said and "the recipe's" not in said, said
    assert "Traceback" not in said, said


def test_what_weights_do_not_say_is_said_by_one_flag_of_all_commands(folder, tmp_path, monkeypatch, capsys):
    """Whatever recipe is the default, texts are those of the weights."""
    recipe = catalog.load("default/sotu", ["precision=fp32", "model.heads=2"], tiny=True)
    weights = {name: tensor * 10 for name, tensor in model_tensors(recipe).items()}
    given = write(tmp_path / "given", recipe, weights, Form(arguments=None))
    asked = (given, "--tokenizer", folder / "gpt" / "tokenizer", "--prompt", "My", "--greedy", "--tokens", 9)
    heads, fix = "num_attention_heads=2", "--weights_args num_attention_heads=N"
    assert typed(monkeypatch, *asked) == 2 and fix in capsys.readouterr().err
    assert typed(monkeypatch, *asked, "--weights_args", heads) in (None, 0)
    said = capsys.readouterr().out
    stated = write(tmp_path / "stated", recipe, weights, Form())
    assert typed(monkeypatch, stated, *asked[1:]) in (None, 0)
    assert capsys.readouterr().out == said
    (text := tmp_path / "text.txt").write_text("My fellow citizens")
    task = ("--text", str(text))
    scored = score.build_parser().parse_args([*map(str, asked[:3]), *task, "--weights_args", heads])
    assert score.checked(scored).model.recipe.model.heads == 2
    started = ("--tiny", "--set", "model.heads=2", "--init_from", str(given), "--weights_args", heads)
    started += ("--new_vocabulary",)
    assert pretrain.checked_job(pretrain.build_parser().parse_args([*started, "--plan"])).initial_weights


def test_everything_is_refused_at_once(odd):
    parsed = generate.build_parser().parse_args([str(odd / "bert"), "--prompt", "The", "--top_k", "3"])
    with pytest.raises(ValueError) as refused:
        generate.checked_job(parsed)
    for part in ("has no [MASK]", "--top_k with a BERT"):
        assert part in str(refused.value)


def test_a_damaged_checkpoint_is_refused(folder, tmp_path):
    directory, _ = make_run(tmp_path / "run", "default/sotu")
    newest = directory / "checkpoints" / "step-000007"
    file = newest / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 8
    file.write_bytes(content)
    done = run([sys.executable, str(COMMAND), str(directory), "--prompt", "The", "--tokens", "2"])
    assert done.returncode == 2 and "checksum" in done.stdout, done.stdout


@pytest.mark.parametrize("place", ["run", "run/checkpoints", "run/checkpoints/step-000007", "."])
def test_a_checkpoint_of_another_recipe_than_its_run_is_refused(place, tmp_path, monkeypatch, capsys):
    """Its own checksum is right, and the shapes of all tensors are those of this recipe, too."""
    directory, _ = make_run(tmp_path / "run", "default/sotu")
    newest = directory / "checkpoints" / "step-000007"
    forged = {"model": {**manifest.read(newest).recipe["model"], "heads": 2}}
    rewrite_manifest(newest, lambda held: replace(held, recipe=held.recipe | forged))
    monkeypatch.chdir(newest if place == "." else tmp_path)
    assert typed(monkeypatch, place, "--prompt", "The") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "has another recipe than its run" in said and "model.heads is 2 instead of 4" in said
    alone = newest.rename(tmp_path / "step-000007")
    assert typed(monkeypatch, alone, "--tokenizer", directory / "tokenizer", "--prompt", "The") in (None, 0)
    assert "whether its recipe was changed cannot be known" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            FloatingPointError("not finite in torch.float16"),
            "float16: its weights are too .* --dtype float32",
        ),
        (MemoryError("no room"), "out of memory: MemoryError: no room\n.*lower --samples"),
    ],
)
def test_what_fails_while_texts_are_written_says_what_to_change(error, said, folder, monkeypatch):
    monkeypatch.setattr(writing, "continued", mock.Mock(side_effect=error))
    assert re.search(said, str(typed(monkeypatch, folder / "gpt", "--prompt", "My")))
