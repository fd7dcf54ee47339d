"""The command: figures next to those of transformers, what is kept, and what is refused before a start."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from launching import ROOT, run, run_ranks
from scored import PASSAGES, make_run, tokenizer_of, write_passages
from transformers import GPT2LMHeadModel

from data.samples.documents import places_in_documents
from data.tasks.windows import Window
from ds_configs.plan import HOST, Machine
from launch import export_hf, report
from launch.evaluation import protocols, scorer, scoring_plan
from launch.evaluation.scorer import Scorer, ScoringStep, _scores, steps_of
from launch.evaluation.scores import Score, describe, keep, read_scores, to_json
from launch.evaluation.scoring import own_text
from launch.evaluation.scoring_plan import ScoringWishes, checked_job
from launch.ranks.ending import Failed, explain_out_of_memory
from launch.ranks.watchdog import Watchdog
from launch.score import LESS_MEMORY, build_parser, checked
from modeling.documents import row_of_documents
from modeling.gpt2 import FAMILY, GPT2Shape
from modeling.initialization import Init
from recipes.problems import ProblemsError

needs_lm_eval = pytest.mark.skipif(
    not protocols.has_harness(), reason="lm-eval is not installed: pip install -e .[evaluate]"
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, its export, and passages, in one directory."""
    folder = tmp_path_factory.mktemp("score")
    make_run(folder / "run")
    export_hf.export(folder / "run", folder / "hf")
    write_passages(folder / "texts.jsonl")
    return folder


def score(*arguments, code=0):
    done = run([sys.executable, str(ROOT / "launch" / "score.py"), *map(str, arguments)], timeout=120)
    assert done.returncode == code, done.stdout
    return done.stdout


def losses(model, tokenizer, before, after):
    """Of the tokens of `after`, by transformers, and whether each is the likeliest."""
    tokens = torch.tensor([[*before, *after[:-1]]])
    with torch.no_grad():
        logits = model(tokens).logits[0, len(before) - 1 :].double()
    wanted = torch.tensor(after)
    return torch.log_softmax(logits, -1)[range(len(after)), wanted].neg(), logits.argmax(-1) == wanted


@pytest.mark.parametrize(("texts", "length"), [(PASSAGES, 16), ([" ".join([*PASSAGES, *PASSAGES])], 64)])
def test_scores_of_documents_are_those_of_transformers(made, texts, length):
    """Windows of 16 tokens, and as long as the positions: what follows sees what stands before it."""
    model, run_model = GPT2LMHeadModel.from_pretrained(made / "hf").eval(), made / "run"
    tokenizer = tokenizer_of(PASSAGES, model.config.vocab_size)
    out, data = made / f"documents-{length}.json", made / f"documents-{length}.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    asked = ("--text", data, "--stride", 5, "--window", length)
    score(run_model, *asked, "--out", out)
    nll, right, tokens = [], 0, 0
    for text in texts:
        whole = [tokenizer.eos_token_id, *tokenizer.encode(text)]
        ends = sorted({*range(length + 1, len(whole), 5), len(whole)})
        for first, last in zip([1, *ends], ends, strict=False):
            before = whole[max(0, last - length - 1) : first]
            found, hits = losses(model, tokenizer, before, whole[first:last])
            nll += found.tolist()
            right, tokens = right + int(hits.sum()), tokens + last - first
    kept = json.loads(out.read_text())
    assert kept["tokens"] == tokens == len(nll)
    assert kept["figures"]["loss_per_token"] == pytest.approx(math.fsum(nll) / tokens, rel=1e-6)
    assert kept["figures"]["accuracy_per_token"] == right / tokens
    words, size = sum(len(t.split()) for t in texts), sum(len(t.encode()) for t in texts)
    assert kept["figures"]["perplexity_per_word"] == pytest.approx(math.exp(math.fsum(nll) / words), rel=1e-6)
    assert kept["figures"]["bits_per_byte"] == pytest.approx(math.fsum(nll) / size / math.log(2), rel=1e-6)


@pytest.mark.long
def test_a_window_is_a_sample_of_the_training_and_may_be_as_long_as_the_positions(made, tmp_path):
    make_run(tmp_path / "short", "sequence_length=16", "model.positions=64")
    task = ("--text", made / "texts.jsonl")
    run_directory, short, found = made / "run", tmp_path / "short", []
    shorter = ("--set", "sequence_length=16")
    whole = [("--window", 16), shorter, (), (*shorter, "--window", 64)]
    for model, flags in (
        *((run_directory, flags) for flags in whole),
        (short, ()),
        (short, ("--window", 64)),
    ):
        score(model, *task, *flags, "--out", tmp_path / "out.json")
        found.append(json.loads((tmp_path / "out.json").read_text())["figures"])
        (tmp_path / "out.json").unlink()
    assert found[0] == found[1] == found[4] != found[2] == found[3] == found[5]
    said = refusal(tmp_path / "short", text=str(task[-1]), window=65)
    assert "--window 65: the model has 64 positions; give 64 or less" in said


@needs_lm_eval
def test_lambada_of_a_run_and_of_its_export_is_that_of_transformers(made):
    """Among the passages one that is padded, and whose logits are cut."""
    passages = [*PASSAGES, f"{PASSAGES[0]}, and {PASSAGES[3]}"]
    model = GPT2LMHeadModel.from_pretrained(made / "hf").eval()
    tokenizer = tokenizer_of(PASSAGES, model.config.vocab_size)
    found = []
    for text in passages:
        before, word = text.rsplit(" ", 1)
        found.append(losses(model, tokenizer, tokenizer.encode(before), tokenizer.encode(f" {word}")))
    nll = [math.fsum(each.tolist()) for each, _ in found]
    texts = made / "passages.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in passages))
    assert 32 < len(tokenizer.encode(passages[-1])) < 64
    for directory in (made / "run", made / "run" / "checkpoints" / "step-000004", made / "hf"):
        out = made / f"lambada-{directory.name}.json"
        said = score(directory, "--tasks", "lambada", "--variant", "openai", "--data", texts, "--out", out)
        assert "66.5 %" in said and "lambada (openai)" in said
        assert "other data than the published scores'" in " ".join(said.split())
        kept = json.loads(out.read_text())["figures"]
        assert kept["perplexity_of_last_word"] == pytest.approx(math.exp(math.fsum(nll) / len(nll)), rel=1e-6)
        assert kept["accuracy"] == sum(bool(hits.all()) for _, hits in found) / len(found)
        assert kept["accuracy_of_last_token"] == sum(bool(hits[-1]) for _, hits in found) / len(found)


@needs_lm_eval
def test_wikitext103_is_the_same_under_tensor_parallelism_and_from_transformers(made):
    """By windows of 64 every 24 tokens from the text's first token on, over original words."""
    text = made / "wiki.raw"
    text.write_text("".join(f" {each} , so . \n" for each in PASSAGES))
    asked = ("--tasks", "wikitext103", "--data", text, "--stride", 24)
    score(made / "run", *asked, "--out", made / "wiki.json")
    tp2 = ("--set", "parallel.tp=2", "--out", made / "wiki-tp2.json")
    done = run_ranks(2, ROOT / "launch" / "score.py", made / "run", *asked, *tp2, timeout=120)
    assert done.returncode == 0, done.stdout
    one, two = (json.loads((made / f"{name}.json").read_text()) for name in ("wiki", "wiki-tp2"))
    assert two["figures"] == pytest.approx(one["figures"], rel=1e-6)
    model = GPT2LMHeadModel.from_pretrained(made / "hf").eval()
    tokenizer = tokenizer_of(PASSAGES, model.config.vocab_size)
    document = protocols.wikitext103(file=str(text))["test"][0]
    tokens = tokenizer.encode(document["text"])
    nll = losses(model, tokenizer, tokens[:1], tokens[1:65])[0].tolist()
    for first in range(65, len(tokens), 24):
        last = min(first + 24, len(tokens))
        start = 24 * ((first - 65) // 24 + 1)
        nll += losses(model, tokenizer, tokens[start:first], tokens[first:last])[0].tolist()
    assert one["tokens"] == len(nll) == len(tokens) - 1 and one["words"] == document["words"]
    assert one["figures"]["perplexity"] == pytest.approx(
        math.exp(math.fsum(nll) / document["words"]), rel=1e-6
    )


OWN_TASK = """\
task: mine
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
doc_to_choice: ["harbour", "congress", "letter", "treaty"]
doc_to_target: 2
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""


@needs_lm_eval
def test_any_task_of_lm_eval_is_scored_and_kept(made, tmp_path):
    """With its own metrics; next to a task of ours without them."""
    (tmp_path / "mine.yaml").write_text(OWN_TASK.replace("FILE", str(made / "texts.jsonl")))
    out = tmp_path / "out.json"
    asked = ("--tasks", "mine,perplexity", "--text", made / "texts.jsonl", "--include_path", tmp_path)
    said = score(made / "run", *asked, "--out", out)
    mine, own = json.loads(out.read_text())
    assert (mine["task"], mine["examples"], mine["windows"], own["task"]) == ("mine", 5, 20, "perplexity")
    assert mine["source"].startswith("lm-eval ") and "acc_stderr" in said
    model = GPT2LMHeadModel.from_pretrained(made / "hf").eval()
    tokenizer = tokenizer_of(PASSAGES, model.config.vocab_size)
    right = 0
    for text in PASSAGES:
        before = tokenizer.encode(text.rsplit(" ", 1)[0])
        choices = [tokenizer.encode(f" {word}") for word in ("harbour", "congress", "letter", "treaty")]
        sums = [float(losses(model, tokenizer, before, choice)[0].sum()) for choice in choices]
        right += sums.index(min(sums)) == 2
    assert mine["figures"]["acc"] == right / len(PASSAGES)
    kept = [each for each in read_scores(made / "run") if each.task == "mine"]
    assert [dict(each.figures) for each in kept] == [mine["figures"]]
    said = score(made / "run", "--tasks", "mein,lambada_openay", "--include_path", tmp_path, code=2)
    assert "lambada_openay: lm-eval " in said and "did you mean lambada_openai" in said and "mein" in said
    (tmp_path / "mine.yaml").write_text(OWN_TASK.replace("FILE", str(tmp_path / "none.jsonl")))
    said = " ".join(score(made / "run", "--tasks", "mine", "--include_path", tmp_path, code=2).split())
    assert "mine: its data cannot be read" in said and "HF_HOME" in said and "--include_path DIR" in said


@pytest.mark.long
def test_scores_are_kept_with_the_run_and_stand_in_its_report(made, tmp_path):
    run_directory = tmp_path / "run"
    shutil.copytree(made / "run", run_directory)
    (run_directory / "scores.json").unlink(missing_ok=True)
    asked = (run_directory, "--text", made / "texts.jsonl")
    (run_directory / "checkpoints" / "step-000009").mkdir()
    said = " ".join(score(*asked).split())
    assert f"weights: WARNING: {run_directory}/checkpoints/step-000009 is damaged" in said
    assert "an older checkpoint is taken" in said
    score(*asked, "--batch", 3)  # the same score once more
    score(*asked, "--limit", 1)
    kept = read_scores(run_directory)
    assert [(each.limited, each.stride, each.batch) for each in kept] == [(False, 64, 3), (True, 64, 8)]
    figures = {"perplexity": 20.0}
    keep(run_directory, replace(kept[0], task="wikitext103", variant="", figures=figures))
    keep(run_directory, replace(kept[0], task="hellaswag", variant="", figures={"acc": 0.3125}))
    assert report.main([str(run_directory), "--out", str(tmp_path / "report")]) in (0, 1)
    page = (tmp_path / "report" / "report.html").read_text()
    assert "10.8" in page and "15.8" in page and "wikitext103" in page
    assert "hellaswag" in page and "acc" in page and "0.3125" in page
    (run_directory / "scores.json").write_text('{"scores": [{}]}')
    assert report.main([str(run_directory), "--out", str(tmp_path / "report")]) == 1


@pytest.mark.long
def test_from_scratch_scores_the_weights_that_the_run_began_with(made, tmp_path):
    began = make_run(tmp_path / "began", untrained=True)
    figures = []
    for model, more in ((began, ()), (made / "run", ("--from_scratch",))):
        out = tmp_path / f"{len(figures)}.json"
        said = score(model, "--text", made / "texts.jsonl", *more, "--out", out)
        assert ("weights drawn at random" in said) == bool(more)
        figures.append(json.loads(out.read_text())["figures"])
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)
    kept = read_scores(made / "run")
    assert not any(each.from_scratch for each in kept), "they are none of the run's"


def test_published_scores_stand_beside_their_own_data_alone():
    of = dict(model="x", parameters=1, step=None, source="x", windows=1, tokens=1, limited=False, cut=0)
    of |= dict(window=1, stride=None, batch=1, precision="fp32", layout="", hardware="", seconds=1.0)
    cases = {("openai", 5153, 0): False, ("openai", 5150, 3): False, ("original", 5153, 0): True}
    for (variant, examples, broken), other in {**cases, ("openai", 44, 0): True}.items():
        made = dict(task="lambada", variant=variant, figures={"accuracy": 0.5}, words=None)
        score = Score(**of, **made, examples=examples, broken=("x",) * broken)
        assert score.on_other_data == json.loads(to_json([score]))["published_on_other_data"] == other
        assert ("other data" in describe(score)) == other and "66.5 %" in describe(score)
    made = dict(task="wikitext103", variant="", figures={"perplexity": 20.0}, examples=1, broken=())
    assert not Score(**of, **made, words=245_569).on_other_data and Score(**of, **made, words=9).on_other_data


CPU = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)


def text_of(made, file, **more):
    job = checked_job(ScoringWishes(str(made / "run"), text=str(file), **more), 1, CPU)
    return own_text(job, print), job.model.tokenizer


def test_documents_are_predicted_from_their_first_token_on(made, tmp_path):
    """Of a directory of JSON lines, and of a text file, which is one document."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, texts in enumerate((PASSAGES[:2], ["", PASSAGES[2]])):
        rows = "".join(json.dumps({"content": text, "n": 1}) + "\n" for text in texts)
        (folder / f"{number}.jsonl").write_text(rows + "{broken\n")
    found, tokenizer = text_of(made, folder, window=8)
    assert found.examples == 3 and found.facts.words == sum(len(text.split()) for text in PASSAGES[:3])
    counted = sum(window.counted for window in found.windows)
    assert counted == sum(len(tokenizer.encode(text)) for text in PASSAGES[:3])
    assert found.windows[0].tokens[0] == tokenizer.eos_token_id and len(found.facts.broken) == 2
    assert text_of(made, folder, limit=1)[0].examples == 1
    whole = tmp_path / "book.txt"
    whole.write_text("\n\n".join(PASSAGES))
    found, _ = text_of(made, whole, window=8, stride=4)
    counted = sum(window.counted for window in found.windows)
    assert counted == len(tokenizer.encode("\n\n".join(PASSAGES))) and found.examples == 1


def test_a_character_of_a_script_without_blanks_is_a_word(made, tmp_path):
    (tmp_path / "a.txt").write_text("今天 use GPT-2，ไทย\n한국어 text")
    assert text_of(made, tmp_path / "a.txt")[0].facts.words == 2 + 1 + 1 + 3 + 2


def refusal(model, *tasks, **more):
    with pytest.raises(ProblemsError) as refused:
        checked_job(ScoringWishes(str(model), tasks or ("perplexity",), **more), 1, CPU)
    return str(refused.value)


def test_what_cannot_be_scored_is_refused_before_a_start(made, tmp_path, monkeypatch):
    texts, run_directory = str(made / "texts.jsonl"), made / "run"
    monkeypatch.setattr(scoring_plan, "has_harness", lambda: True)
    make_run(tmp_path / "bert", family="bert/sotu")
    assert "is a BERT" in refusal(tmp_path / "bert", text=texts)
    shutil.copytree(run_directory, tmp_path / "unsaved", ignore=shutil.ignore_patterns("checkpoints"))
    assert "holds no checkpoint" in refusal(tmp_path / "unsaved", text=texts)
    said = refusal(tmp_path / "missing", text=texts)
    assert said.startswith(str(tmp_path / "missing")) and "--init_from" not in said
    tokenizer_of(PASSAGES, 300).save_pretrained(tmp_path / "small")
    said = refusal(run_directory, text=texts, tokenizer=str(tmp_path / "small"))
    assert "is not the vocabulary" in said or "300 tokens" in said
    both = refusal(run_directory, text=texts, window=4096, stride=5000)
    assert "--window 4096" in both and "--stride 5000" in both
    assert "no such file" in refusal(run_directory, "lambada", data=str(tmp_path / "none"))
    assert "no such file" in refusal(run_directory, text=str(tmp_path / "none"))
    assert "--stride with --tasks lambada" in refusal(run_directory, "lambada", data=texts, stride=3)
    assert "--stride with --tasks perplexity" in refusal(run_directory, stride=3)
    assert "held-out samples have 64 tokens" in refusal(run_directory, window=32)
    assert "hidden" in refusal(run_directory, text=texts, settings=["model.hidden=32"])
    (tmp_path / "text.txt").write_text("some words\n")
    plain = str(tmp_path / "text.txt")
    said = refusal(run_directory, "wikitext103", variant="openai", data=plain, column="body")
    assert "--variant openai with --tasks wikitext103" in said and "--column body" in said
    assert "field of --text or --data" in refusal(run_directory, column="body")
    assert "--text" in refusal(run_directory, "lambada", text=plain)
    assert "give your own text with --text PATH" in refusal(run_directory, data=plain)
    assert "no such directory" in refusal(run_directory, "mine", include_path=str(tmp_path / "none"))
    assert "none of them is of its files" in refusal(run_directory, text=texts, include_path=str(tmp_path))
    assert "name one of them" in refusal(run_directory, "lambada", "wikitext103", data=plain)


def test_without_lm_eval_its_tasks_are_refused_with_the_way_to_it(made, monkeypatch):
    monkeypatch.setattr(scoring_plan, "has_harness", lambda: False)
    said = refusal(made / "run", "lambada", "hellaswag", "perplexity", text=str(made / "texts.jsonl"))
    assert "lambada, hellaswag: lm-evaluation-harness" in said and "pip install -e .[evaluate]" in said
    checked_job(ScoringWishes(str(made / "run"), text=str(made / "texts.jsonl")), 1, CPU)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is a directory"), (b"[1]", "holds a list"), (bytes(range(128, 256)), "not UTF-8"),
        (b'{"scores": 3}', "scores=3: input should be"), (b"{}", "scores=None"),
    ],
)  # fmt: skip
def test_scores_that_cannot_be_added_to_are_refused_before_a_start(
    content, said, made, tmp_path, monkeypatch
):
    run_directory = shutil.copytree(made / "run", tmp_path / "run")
    place = run_directory / "scores.json"
    place.unlink(missing_ok=True)
    place.mkdir() if content is None else place.write_bytes(content)
    asked = [str(run_directory), "--text", str(made / "texts.jsonl")]
    with pytest.raises(ProblemsError, match=f"scores.json.*: .*{said}"):
        checked(build_parser().parse_args(asked))
    assert checked(build_parser().parse_args([*asked, "--from_scratch"]))[0].wishes.from_scratch


def test_a_run_that_is_not_mine_is_scored_into_a_file_or_refused_before_a_start(made, tmp_path, monkeypatch):
    monkeypatch.setattr("launch.score.place_problem", lambda path: ("cannot be made (Permission denied)", ""))
    asked = [str(made / "run"), "--text", str(made / "texts.jsonl")]
    with pytest.raises(ProblemsError, match=r"scores.json cannot be made \(Permission.*: .*add --out FILE"):
        checked(build_parser().parse_args(asked))
    file = tmp_path / "scores.json"
    assert checked(build_parser().parse_args([*asked, "--out", str(file)]))[1] == file


def test_what_flags_and_weights_decide_is_no_setting(made):
    settings = ("precision=bf16", "optimizer.lr=1", "model.implementation=transformers", "data.name=x")
    settings = (*settings, "parallel.pp=2", "ds_config=zero3")
    chosen = [part for setting in settings for part in ("--set", setting)]
    said = score(made / "run", "--text", made / "texts.jsonl", *chosen, code=2)
    assert "--set data.name=x: --text decides what is read" in said
    assert "--set parallel.pp=2: every checkpoint is scored on one process" in said
    assert "--precision decides it" in said and "the weights decide it" in said
    assert "nothing is trained here" in said


def test_logits_are_computed_where_targets_count(made):
    plan = checked_job(ScoringWishes(str(made / "run"), batch=2), 1, CPU).plan
    lengths = ((64, 64), (64, 24), (64, 32), (64, 33), (40, 8), (40, 9), (40, 24), (3, 1))
    windows = [Window(np.arange(length + 1), counted) for length, counted in lengths]
    whole = [ScoringStep([0, 3], 64, 64), ScoringStep([5, 6], 64, 64)]
    cut = [ScoringStep([1, 2], 64, 32), ScoringStep([4, 4], 64, 32)]
    assert list(steps_of(windows, 2, plan)) == [*whole, *cut, ScoringStep([7, 7], 32, 32)]


def test_windows_of_a_model_with_borders_have_them(made, monkeypatch):
    """So that held-out samples have the losses of the training's validation."""
    plan = checked_job(ScoringWishes(str(made / "run"), batch=2), 1, CPU).plan
    shape = GPT2Shape(
        layers=1, hidden=16, heads=2, vocab=50, padded_vocab=64, positions=64,
        borders=True, within_documents=True, restarts_positions=True,
    )  # fmt: skip
    model = FAMILY.plain(shape, group=None, init=Init(seed=0, std=0.5, layers=1)).eval()
    tokens = torch.arange(1, 34)[None] % 50
    tokens[0, 12] = 0
    place = torch.from_numpy(places_in_documents(tokens[:, :-1].numpy(), 0))
    with torch.no_grad():
        expected = model(
            *(tokens[:, :-1], tokens[:, 1:], torch.ones(1, 32)), places=row_of_documents(place, "cpu")
        )
    model.loss = _scores
    monkeypatch.setattr(scorer, "gathered", lambda value, group, form=None: [value])
    monkeypatch.setattr(scorer.dist, "barrier", lambda group: None)
    grid = SimpleNamespace(at=SimpleNamespace(dp=0), dp=1, control_group=None)
    losses = {}
    for border in (0, None):
        used = Scorer(model, plan, grid, Watchdog(None, 0), border=border)
        (found,) = used.score([Window(tokens[0].numpy(), 32)])
        losses[border] = found.nll
    assert losses[0] == pytest.approx(float(expected), rel=1e-6) != pytest.approx(losses[None], rel=1e-3)


def test_running_out_of_memory_is_explained():
    """Any other failure keeps its own traceback."""
    said = r"(?s)out of memory: OutOfMemoryError: .*20 GiB.*lower --batch.*parallel.tp"
    with pytest.raises(Failed, match=said), explain_out_of_memory(LESS_MEMORY):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    with pytest.raises(RuntimeError, match="^shapes differ$"), explain_out_of_memory(LESS_MEMORY):
        raise RuntimeError("shapes differ")
