"""Whatever is typed, a command begins its work or refuses with exit code 2 and a sentence.

Inputs are drawn by hypothesis from flags, recipe fields and files. Where real work would begin, `Started`
ends the command instead. TRIALS=500 tries more; -rP and `--hypothesis-show-statistics` count how they ended.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from recorded import facts, outcome, plan, recorder
from stored import write_checkpoint
from transformers import GPT2Config, GPT2LMHeadModel

from data.text.trained_vocabulary import train_bpe, wrap_tokenizer
from ds_configs.findings import ConfigError, available, find
from ds_configs.plan import HOST, Machine
from ds_configs.resolver import resolve
from launch.checkpoints import manifest, run_checkpoints, showing
from launch.checkpoints.inspection import faults
from launch.console import ends
from launch.records.directory import RunDirectory
from launch.records.plan_text import Surroundings, describe_plan
from launch.records.result import read_result
from launch.reports.runs import read_run
from recipes import catalog, key_paths
from recipes.files import FileError
from recipes.problems import ProblemsError, RecipeError

TRIALS = int(os.environ.get("TRIALS", "60"))  # of each test below
generated = settings(
    max_examples=TRIALS,
    deadline=None,  # no timing decides
    derandomize="TRIALS" not in os.environ,  # the same inputs in every run, unless more are asked for
    suppress_health_check=list(HealthCheck),
)


class Started(BaseException):
    """The command has accepted its input."""


# Command -> where its work begins, as module:attribute.
WORK = {
    "pretrain": ["launch.ranks.ending:clean_exit"],
    "finetune": ["launch.ranks.ending:clean_exit", "launch.evaluation.finetuning_seeds:keep_arguments"],
    "score": ["launch.evaluation.scoring:load"],
    "compare_layouts": ["launch.experiments.parity.layout_runs:Layouts"],
    "plan": [  # where the search is done
        "launch.planning.search.search_text:page",
        "launch.planning.search.search_text:largest_page",
    ],
    "report": ["launch.reports.document:assemble"],
    "export_hf": ["launch.checkpoints.run_checkpoints:newest_whole"],
    "checkpoint": [
        "launch.checkpoints.inspection:faults",
        "launch.checkpoints.showing:_saved_under",
        "launch.weights.universal:write",
        "data.corpus:build",
    ],
    "prepare_data": ["data.prepare.pipeline:ChunkWork"],
    "show_data": ["data.corpus:build"],
    "generate": ["launch.evaluation.writing:run"],
}

NUMBERS = ["0", "1", "2", "3", "7", "-1", "1.5", "1e30", "nan", "inf", "9" * 30, "0x10", "1_0", "٣", "²", ""]
TEXTS = [
    "x",
    "ä",
    "\udc80",
    "a b",
    "a=b",
    "=",
    ".",
    "..",
    "-",
    "--",
    "~nobody/x",
    "none",
    "null",
    "[",
    "{a: }",
    "\n",
]
NAMES = [
    "default/sotu",
    "bert/sotu",
    "bert",
    "default",
    "1.2b?",
    "zero1",
    "zero3_offload",
    "pipeline",
    "3d",
    "tp2",
]
PATHS = ["/", "/dev/null", "/dev/zero", "/proc/self/mem", "new", "new/below/it", "x" * 300, "loop"]
SETS = [
    "steps=3", "steps=0", "batch.global=7", "model.hidden=6", "model.family=bert", "data.source=jsonl",
    "a.b=1", "run.profile=1:2", "run.profile=3:2",
    "seed=18446744073709551616", "run.loader_workers=1000000", "parallel={tp: 3}", "data.blend=[{weight: 1}]",
    "model={attention: [fixed], attention_window: 9, attention_columns: 3}", "model.attention_columns=3",
    "model.shared_layers=true", "model={shared_layers: true, attention: [dense, fixed]}",
    "batch.rampup={start: 4, increment: 2, samples: 9}", "batch.rampup={start: 9}", "schedule.counts=samples",
    "precision=fp16", "data={}", "model=3", "title=", "ds_config=/dev/zero", "data.name=/dev/zero",
]  # fmt: skip
FILES = {
    "empty.yaml": b"", "list.yaml": b"[1]", "bomb.yaml": b"a: &a [x, x]\nb: &b [*a, *a]\nrows: [*b, *b]\n",
    "self.yaml": b"title: &a [*a]\n", "deep.yaml": b"[" * 9999, "noise.yaml": bytes(range(256)),
    "good.yaml": b"title: t\nrows:\n  one: {title: x, steps: 1}\n",
    "deep.json": b"[" * 99999, "list.json": b"[1]", "empty.json": b"", "noise.json": bytes(range(256)),
    "odd.json": b'{"zero_optimization": 3, "fp16": [], "train_batch_size": NaN}',
    "nul.json": b'{"zero_optimization": {"stage": 0, "offload_optimizer": {"nvme_path": "\\u0000"}}}',
    "mine.json": b'{"optimizer": {"type": "Adam", "params": {"lr": 3e-5}}, "train_batch_size": 4}',
    "text.jsonl": b'{"text": "some words"}\n{"text": 3}\n{"tex\n', "some.parquet": b"PAR1 no parquet PAR1",
    "text.txt": b"some words\n", "table.csv": b"id,text\n1,a\n", "own.jsonl": b'{"body": "a", "n": 1}\n' * 9,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """Odd files and directories, from which commands are started."""
    folder = tmp_path_factory.mktemp("typed")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("mine")
    (folder / "run.d").mkdir()
    for name in ("recipe.yaml", "metrics.jsonl", "result.json", "config.json", "model.safetensors"):
        (folder / "run.d" / name).write_text("{")
    save_gpt2(folder / "gpt2.d")
    save_run(folder / "own.d")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def save_gpt2(directory: Path) -> None:
    """A model of transformers, with a vocabulary."""
    text = (catalog.FOLDER / "default.yaml").read_text()
    wrap_tokenizer("trained_bpe", train_bpe([text], 280)).save_pretrained(directory)
    shape = dict(
        n_layer=1, n_embd=8, n_head=2, n_positions=16, vocab_size=280, bos_token_id=0, eos_token_id=0
    )
    GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(directory)


ANY = [*FILES, "full", "run.d", "pipe", *PATHS, *NUMBERS, *TEXTS, *NAMES]
WRITTEN = [*FILES, "full", "run.d", "own.d", "pipe", *PATHS, "new.png", "new.json", "new.jsonl"]
TOKENIZERS = ["text.txt", "deep.json", "noise.json", "odd.json", "run.d", "full", "pipe", "/dev/zero", ""]
BRANCHES = ["own.d", "own.d@3", "own.d@3", "own.d@2", "own.d@", "@3", "run.d@3", "full", "gpt2.d@0"]
# By the name of a flag's value; some of each are fit.
VALUES_OF = {
    "tokenizer": ["gpt2", "trained_bpe", "x", *(f"file:{name}" for name in TOKENIZERS)],
    "tasks": ["perplexity", "perplexity", "lambada,perplexity", "wikitext103", ",", *TEXTS],
    "include_path": ["full", "run.d", *FILES, *PATHS, *TEXTS],
    "init_from": ["gpt2.d", "gpt2.d", "run.d", "full", *FILES, *PATHS, *TEXTS],
    "follow": ["mine.json", "mine.json", "zero2", "nul.json", "odd.json", *PATHS, *TEXTS],
    "branch": [*BRANCHES, *FILES, *PATHS, *TEXTS],
    "recipe": [*ANY, "own.d", "own.d"],
    "model": ["gpt2.d", "gpt2.d", "gpt2.d", "run.d", "full", "good.yaml", *PATHS, *TEXTS],
    **dict.fromkeys(("out", "plot", "json", "csv"), WRITTEN),
}


def typed(action: argparse.Action) -> st.SearchStrategy[list[str]]:
    """The flag with values of which some are fit for it."""
    values = st.sampled_from(VALUES_OF.get(action.dest, [*ANY]))
    if action.choices:
        values = st.sampled_from([*map(str, action.choices), "x"])
    elif action.dest == "set":
        keys = st.sampled_from([*key_paths.paths()])
        values = st.sampled_from(SETS) | st.builds("{}={}".format, keys, values)
    elif action.dest == "model" and action.option_strings:
        values = st.sampled_from(ANY)
    flag = action.option_strings[:1]
    if action.nargs == 0:
        return st.just(flag)
    most = 1 if action.nargs in (None, "?") else 3
    return st.lists(values, min_size=min(1, most), max_size=most).map(lambda chosen: [*flag, *chosen])


@st.composite
def command_lines(draw: st.DrawFn, parser: argparse.ArgumentParser) -> list[str]:
    """Some of the parser's flags, and those that it requires nearly always."""
    line, optional = [], []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and not (action.required or draw(st.booleans())):
            continue
        if isinstance(action, argparse._SubParsersAction):
            name = draw(st.sampled_from([*action.choices]))
            return [name, *draw(command_lines(action.choices[name]))]
        if action.required or action.dest in ("tiny", "out", "prompt"):
            line += draw(typed(action)) if draw(st.integers(0, 9)) else []
        elif action.dest not in ("help", "local_rank"):
            optional.append(action)
    for action in draw(st.lists(st.sampled_from(optional), max_size=3)) if optional else ():
        line += draw(typed(action))
    return line


def run_command(name: str, line: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """The exit code of the command, or "started"."""
    module = importlib.import_module(f"launch.{name}")
    monkeypatch.setattr(sys, "argv", [module.__file__, *line])
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ends.run(module.main)
    except SystemExit as ended:
        return ended.code
    except Started:
        return "started"
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("name", WORK)
def test_a_command_begins_or_refuses(name, folder, capfd):
    parser = importlib.import_module(f"launch.{name}").build_parser()
    counts = Counter[str]()

    @generated
    @given(line=command_lines(parser))
    def check(line: list[str]) -> None:
        kept = (folder / "full" / "mine.txt").read_text(), {n: (folder / n).read_bytes() for n in FILES}
        with pytest.MonkeyPatch.context() as monkeypatch:
            for target in WORK[name]:
                module, attribute = target.split(":")
                monkeypatch.setattr(importlib.import_module(module), attribute, start)
            monkeypatch.setattr("data.prepare.fork_server.start", lambda *modules: None)
            for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                monkeypatch.delenv(variable, raising=False)
            code = run_command(name, line, monkeypatch)
        said = capfd.readouterr()
        counts[str(code)] += 1
        assert code in (0, None, 2, "started"), f"{line}: {code}\n{said.err[-2000:]}"
        assert "Traceback" not in said.err + said.out, f"{line}\n{said.err[-2000:]}"
        assert code != 2 or said.err.strip(), f"{line}: refused without a word"
        assert kept == (
            (folder / "full" / "mine.txt").read_text(), {n: (folder / n).read_bytes() for n in FILES},
        ), f"{line}: overwrote a file"  # fmt: skip

    check()
    print(f"{name}: {counts.total()} lines, {dict(counts)}")


def start(*_: object, **__: object) -> None:
    raise Started


def with_subcommands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


@pytest.mark.parametrize("name", WORK)
def test_an_empty_value_and_a_second_one_are_refused(name):
    """A repeatable flag has rules of its own for what is empty."""
    for parser in with_subcommands(importlib.import_module(f"launch.{name}").build_parser()):
        for action in parser._actions:
            repeatable = isinstance(action, argparse._AppendAction)
            if action.nargs == 0 or repeatable or not action.option_strings:
                continue
            flag, value = action.option_strings[0], [*(action.choices or ["1"])][0]
            for line in ([flag, ""], [flag, " "], [flag, value, flag, value]):
                with pytest.raises(ProblemsError) as refused:
                    parser.parse_args(line)
                said = str(refused.value)
                assert f"{'/'.join(action.option_strings)}: " in said and "usage" not in said, (
                    f"{line}: {said}"
                )


# Command lines of which one flag would be ignored -> what is said of it.
APART = {
    "pretrain --list --tiny": "--list with --tiny",
    "pretrain --plan --deterministic": "--plan with --deterministic",
    "pretrain --processes 2": "--processes without --plan",
    "pretrain --plan --ds_config zero1 --set ds_config=zero2": "--ds_config with --set ds_config",
    "pretrain --plan --set steps=5 --set steps=7": "--set steps twice",
    "finetune --task sst2 --init x --seeds 2 --plan": "--plan with --seeds",
    "finetune --task sst2 --init x --ranks 2": "--ranks without --seeds or --ensemble",
    "finetune --task sst2 --init x --lr 1 --set optimizer.lr=2": "--lr with --set optimizer.lr",
    "finetune --task rte --init x --train a --set task.train=b": "--train with --set task.train",
    "plan --tokens 9 --steps 3": "--tokens with --steps",
    "plan --fits default/sotu --recipe bert/sotu": "--fits with --recipe",
    "plan --fits default/sotu --json": "--fits with --json",
    "plan search --model 13b --recipe bert/sotu": "--model with --recipe",
    "plan search --largest --model 13b": "--largest with --model",
    "plan search --largest --top 3": "--largest with --top",
    "plan search --largest --set model.hidden=64": "--largest with --set model.hidden",
    "compare_layouts --list --tiny": "--list with --tiny",
    "show_data --hashes 1 --samples 3": "--hashes with --samples",
    "show_data --summary --split test": "--summary with --split",
    "show_data --summary 9 --hashes 1": "--summary with --hashes",
    "show_data --step 2 --split test": "--step with --split test",
    "generate x --prompt a --file b": "--prompt with --file",
    "generate x --prompt a --greedy --seed 4": "--greedy with --seed",
    "prepare_data --out o --tokenizer gpt2 --revision x": "--revision without --source hub",
    "prepare_data --out o --tokenizer gpt2 --documents file": "--documents without --source text",
    "prepare_data --out o --tokenizer gpt2 --text t --name n": "--text with --name",
    "pretrain --text t --set data.name=n": "--text with --set data.name",
    "pretrain --new_vocabulary": "--new_vocabulary without --init_from",
    "pretrain --follow zero1 --ds_config zero2": "--follow with --ds_config",
    "pretrain --follow zero1 --set ds_config=zero2": "--follow with --set ds_config",
    "show_data --text t --set data.source=text": "--text with --set data.source",
    "prepare_data --out o --tokenizer gpt2 --dedup none --shingle 3": "--shingle with --dedup none",
    "prepare_data --out o --tokenizer gpt2 --ngram 3": "--ngram without --decontaminate",
}


@pytest.mark.parametrize("line", APART)
def test_a_flag_that_would_be_ignored_is_refused(line):
    name, *words = line.split()
    parser = importlib.import_module(f"launch.{name}").build_parser()
    with pytest.raises(ProblemsError) as refused:
        parser.parse_args(words)
    assert APART[line] in str(refused.value)


def test_the_rank_is_taken_as_torchs_launcher_passes_it():
    assert (
        importlib.import_module("launch.pretrain").build_parser().parse_args(["--local-rank=3"]).local_rank
        == 3
    )


@pytest.mark.parametrize("name", WORK)
def test_rules_name_flags_that_there_are(name):
    for parser in with_subcommands(importlib.import_module(f"launch.{name}").build_parser()):
        for flag, others, reason in parser.rules:
            words = [flag, *(word for word in others.lstrip("+").split(", ") if word != "*")]
            assert {word.split()[0] for word in words} <= {*parser._option_string_actions} and reason
            keys = {word.removeprefix("--set ") for word in words if word.startswith("--set ")}
            assert keys <= {*KEYS}, keys


PLAIN = (
    st.none() | st.booleans() | st.integers() | st.integers(2**62, 2**70) | st.floats() | st.text(max_size=8)
)
VALUES = st.recursive(
    PLAIN
    | st.sampled_from([0, 1, 2, 3, -1, 10**9, "x" * 300, "~nobody", "none", "auto", "bert", "store", "full"]),
    lambda below: st.lists(below, max_size=3) | st.dictionaries(st.text(max_size=5), below, max_size=3),
    max_leaves=10,
)
MACHINE = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)
KEYS = [*key_paths.paths()]


ROWS = {name: catalog.load(name).model_dump(by_alias=True) for name in ("default/sotu", "bert/sotu")}


def near(value: object) -> st.SearchStrategy[object]:
    """Values like this one, of which many are accepted."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.sampled_from([value, value + 1, 2 * value, value // 2, 1, 4 * value, 10**6])
    if isinstance(value, float):
        return st.sampled_from([value, 2 * value, value / 3, 0.0, 0.5, 1e-12, 1e6])
    words = ["none", "full", "bert", "gpt2", "pre", "post", "nsp", "fp32", "bf16", "fp16", "linear", "store"]
    words += ["wsd", "polynomial", "inverse_sqrt", "lamb", "muon"]
    return st.sampled_from([value, 1, 2, 8, 0.1, *words])


@st.composite
def field_settings(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A recipe, and what --set changes of it."""
    name, texts = draw(st.sampled_from([*ROWS])), []
    for key in draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3)):
        value: object = ROWS[name]
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        written = yaml.safe_dump(
            draw(VALUES if draw(st.integers(0, 3)) == 0 else near(value)), default_flow_style=True
        )
        texts.append(f"{key}={written.removesuffix('...' + chr(10)).strip()}")
    return name, texts


@settings(generated, max_examples=4 * TRIALS)
@given(field_settings(), st.sampled_from(available()), st.booleans(), st.sampled_from([1, 1, 2, 8, 64]))
def test_any_value_of_any_field_is_planned_or_refused(chosen, config, tiny, world):
    name, texts = chosen
    try:
        made = resolve(catalog.load(name, texts, tiny=tiny), config, world, MACHINE, {})
    except (RecipeError, ConfigError) as error:
        event("refused")
        assert str(error).strip()
        return
    event("planned")
    describe_plan(made, name, Surroundings("a CPU", run_directory=Path("runs/x")))
    assert yaml.safe_load(catalog.dump(made.recipe))["title"] == made.recipe.title


TABLE = (catalog.FOLDER / "default.yaml").read_text()


@generated
@given(
    st.integers(0, len(TABLE)),
    st.integers(0, 40),
    st.text(max_size=12) | st.sampled_from(["*a", "&a ", "? ", "[", "- "]),
)
def test_a_damaged_table_is_read_or_refused(tmp_path_factory, at, cut, put):
    path = tmp_path_factory.getbasetemp() / "damaged.yaml"
    path.write_text(TABLE[:at] + put + TABLE[at + cut :], encoding="utf-8", errors="surrogatepass")
    try:
        catalog.load(f"{path}:sotu")
        event("read")
    except RecipeError as error:
        event("refused")
        assert str(error).strip()


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("run")
    save_run(path)
    return path


def save_run(path: Path) -> None:
    """A run of three steps that nothing has trained."""
    from launch.records.admission import admit
    from launch.records.facts import Ending

    known = facts(plan(), tiny=True, original=plan().recipe, ds_config=find("zero1"))
    admit(path, known, ["x"]).close()
    with recorder(path, plan()) as records:
        for step in (1, 2, 3):
            records.step(outcome(5.0 - step / 10, step=step, seconds=0.5, data_seconds=0.1))
        records.finish(Ending())
    write_checkpoint(path / "checkpoints", 3, {"word.weight": torch.ones(4, 2)}, plan().recipe)


RUN_FILES = [
    "plan.json",
    "original.yaml",
    "ds_config_given/zero1.json",
    "environment.json",
    "result.json",
    "metrics.jsonl",
    "recipe.yaml",
    f"checkpoints/step-000003/{manifest.NAME}",
]


def replaced(value: object, at: list[int], put: object) -> object:
    """A copy of nested JSON in which what the numbers lead to is `put`."""
    if not at or not isinstance(value, dict | list) or not value:
        return put
    keys = [*value] if isinstance(value, dict) else [*range(len(value))]
    key, copied = keys[at[0] % len(keys)], value.copy()
    copied[key] = replaced(value[key], at[1:], put)
    return copied


@settings(generated, max_examples=2 * TRIALS)
@given(
    name=st.sampled_from(RUN_FILES),
    at=st.lists(st.integers(0, 30), max_size=5),
    put=VALUES,
    text=st.none() | st.text(max_size=9) | st.sampled_from(["[" * 9999, "\0", '{"step": 1}\n', "NaN"]),
    kind=st.sampled_from([None] * 9 + [Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.name)]),
)
def test_a_damaged_run_is_read_or_named(made, name, at, put, text, kind):
    path = made / name
    whole = path.read_text()
    lines = whole.splitlines() if name.endswith("l") and "yaml" not in name else [whole]
    if text is None:
        read = yaml.safe_load if name.endswith("yaml") else json.loads
        line = at[-1] % len(lines) if at else 0
        changed = replaced(read(lines[line]), at, put)
        if name.endswith(manifest.NAME) and isinstance(changed, dict):
            changed.pop("sha256", None)
            changed["sha256"] = manifest.digest(changed)  # or nothing else of it is looked at
        lines[line] = json.dumps(changed)
        text = "\n".join(lines) + "\n"
    path.write_text(text, encoding="utf-8", errors="surrogatepass")
    if kind is not None:
        path.unlink()
        kind(path)
    run = RunDirectory(made)
    try:
        for read in (
            run.plan,
            run.launches,
            lambda: read_result(run.result_json),
            lambda: manifest.read(run.checkpoints / "step-000003"),
            lambda: list(faults(run.checkpoints / "step-000003")),
            lambda: showing.show(made, 3),
            lambda: run_checkpoints.newest_whole(made),
        ):
            try:
                read()
                event("read")
            except FileError as error:
                event("refused")
                assert name in str(error), error
        shown = read_run(made, "it", lambda name: None)
        assert shown.problems or shown.result
    finally:
        path.rmdir() if path.is_dir() else path.unlink()
        path.write_text(whole)
