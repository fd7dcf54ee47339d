"""The command: figures next to those of transformers, what is kept, and what is refused before a start."""

from __future__ import annotations

import json
import math
import shutil
import sys

import pytest
import torch
from launching import ROOT, run
from scored import PASSAGES, make_run, tokenizer_of, write_passages
from transformers import GPT2LMHeadModel

from data.tasks.scored_text import TaskData, Window
from ds_configs.plan import HOST, Machine
from launch import export_hf, report
from launch.evaluation.scores import Score, describe, read_scores, to_json
from launch.evaluation.scoring import Step, WindowScore, figures, steps_of
from launch.evaluation.scoring_job import Wishes, checked_job
from launch.ranks.ending import Failed, explain_out_of_memory
from launch.score import LESS_MEMORY, build_parser, checked
from recipes.problems import ProblemsError


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
    asked = ("--task", "perplexity", "--data", data, "--stride", 5, "--window", length)
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
    task = ("--task", "perplexity", "--data", made / "texts.jsonl")
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
    said = refusal(tmp_path / "short", "perplexity", data=str(task[-1]), window=65)
    assert "--window 65: the model has 64 positions; give 64 or less" in said


@pytest.mark.long
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
        said = score(directory, "--task", "lambada", "--variant", "openai", "--data", texts, "--out", out)
        assert "66.5 %" in said and "lambada (openai)" in said
        assert "other data than the published scores'" in " ".join(said.split())
        kept = json.loads(out.read_text())["figures"]
        assert kept["perplexity_of_last_word"] == pytest.approx(math.exp(math.fsum(nll) / len(nll)), rel=1e-6)
        assert kept["accuracy"] == sum(bool(hits.all()) for _, hits in found) / len(found)
        assert kept["accuracy_of_last_token"] == sum(bool(hits[-1]) for _, hits in found) / len(found)


@pytest.mark.long
def test_scores_are_kept_with_the_run_and_stand_in_its_report(made, tmp_path):
    run_directory = tmp_path / "run"
    shutil.copytree(made / "run", run_directory)
    (run_directory / "scores.json").unlink(missing_ok=True)
    text = tmp_path / "wiki.raw"
    text.write_text("".join(f" {each} . \n" for each in PASSAGES))
    wiki = (run_directory, "--task", "wikitext103", "--data", text)
    (run_directory / "checkpoints" / "step-000009").mkdir()
    said = " ".join(score(*wiki).split())
    assert "tokens per original token" in said
    assert f"weights: WARNING: {run_directory}/checkpoints/step-000009 is damaged" in said
    assert "an older checkpoint is taken" in said
    score(*wiki, "--batch", 3)  # the same score once more
    score(*wiki, "--limit", 1)
    kept = read_scores(run_directory)
    assert [(each.limited, each.stride, each.batch) for each in kept] == [(False, 32, 3), (True, 32, 8)]
    assert report.main([str(run_directory), "--out", str(tmp_path / "report")]) in (0, 1)
    for name in ("report.md", "report.html"):
        page = (tmp_path / "report" / name).read_text()
        assert "10.8" in page and "15.8" in page and "wikitext103" in page, name
    (run_directory / "scores.json").write_text('{"scores": [{}]}')
    assert report.main([str(run_directory), "--out", str(tmp_path / "report")]) == 1


@pytest.mark.long
def test_from_scratch_scores_the_weights_that_the_run_began_with(made, tmp_path):
    began = make_run(tmp_path / "began", untrained=True)
    asked, figures = ("--task", "lambada", "--variant", "openai", "--data", made / "texts.jsonl"), []
    for model, more in ((began, ()), (made / "run", ("--from_scratch",))):
        out = tmp_path / f"{len(figures)}.json"
        said = score(model, *asked, *more, "--out", out)
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
        assert score.on_other_data == json.loads(to_json(score))["published_on_other_data"] == other
        assert ("other data" in describe(score)) == other and "66.5 %" in describe(score)
    made = dict(task="wikitext103", variant="", figures={"perplexity": 20.0}, examples=1, broken=())
    assert not Score(**of, **made, words=245_569).on_other_data and Score(**of, **made, words=9).on_other_data


def test_a_right_word_counts_whole():
    """A word of two tokens is right where both are; its last token alone counts apart."""
    windows = tuple(Window(torch.arange(5).numpy(), counted) for counted in (2, 2, 1, 1))
    data = TaskData("lambada", "openai", "x", windows, None, 4)
    scores = [WindowScore(2.0, 2, True), WindowScore(3.0, 1, True), WindowScore(0.5, 0, False)]
    found = figures(data, [*scores, WindowScore(0.5, 1, True)])
    assert found["accuracy"] == 0.5 and found["accuracy_of_last_token"] == 0.75
    assert found["perplexity_of_last_word"] == pytest.approx(math.exp(1.5))
    assert found["perplexity_per_token"] == pytest.approx(math.e)


CPU = Machine(HOST, fp16=False, bf16=True, compiler=True, libaio=False)


def refusal(model, task, variant=None, data=None, **more):
    with pytest.raises(ProblemsError) as refused:
        checked_job(Wishes(str(model), task, variant, data, **more), 1, CPU)
    return str(refused.value)


def test_what_cannot_be_scored_is_refused_before_a_start(made, tmp_path):
    texts, run_directory = str(made / "texts.jsonl"), made / "run"
    asked = ("lambada", "openai", texts)
    make_run(tmp_path / "bert", family="bert/sotu")
    assert "is a BERT" in refusal(tmp_path / "bert", *asked)
    shutil.copytree(run_directory, tmp_path / "unsaved", ignore=shutil.ignore_patterns("checkpoints"))
    assert "holds no checkpoint" in refusal(tmp_path / "unsaved", *asked)
    said = refusal(tmp_path / "missing", *asked)
    assert said.startswith(str(tmp_path / "missing")) and "--init_from" not in said
    tokenizer_of(PASSAGES, 300).save_pretrained(tmp_path / "small")
    said = refusal(run_directory, *asked, tokenizer=str(tmp_path / "small"))
    assert "is not the vocabulary" in said or "300 tokens" in said
    both = refusal(run_directory, "perplexity", data=texts, window=4096, stride=5000)
    assert "--window 4096" in both and "--stride 5000" in both
    assert "no such file" in refusal(run_directory, "lambada", "openai", str(tmp_path / "none"))
    assert "--stride with --task lambada" in refusal(run_directory, *asked, stride=3)
    assert "hidden" in refusal(run_directory, *asked, settings=["model.hidden=32"])
    (tmp_path / "text.txt").write_text("some words\n")
    said = refusal(run_directory, "perplexity", "openai", str(tmp_path / "text.txt"), column="body")
    assert "--variant openai with --task perplexity" in said and "--column body" in said
    assert "data.column" in refusal(run_directory, "perplexity", column="body")


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
    asked = [str(run_directory), "--task", "lambada", "--data", str(made / "texts.jsonl")]
    with pytest.raises(ProblemsError, match=f"scores.json.*: .*{said}"):
        checked(build_parser().parse_args(asked))
    assert checked(build_parser().parse_args([*asked, "--from_scratch"]))[0].wishes.from_scratch


def test_a_run_that_is_not_mine_is_scored_into_a_file_or_refused_before_a_start(made, tmp_path, monkeypatch):
    monkeypatch.setattr("launch.score.place_problem", lambda path: ("cannot be made (Permission denied)", ""))
    asked = [str(made / "run"), "--task", "lambada", "--data", str(made / "texts.jsonl")]
    with pytest.raises(ProblemsError, match=r"scores.json cannot be made \(Permission.*: .*add --out FILE"):
        checked(build_parser().parse_args(asked))
    file = tmp_path / "scores.json"
    assert checked(build_parser().parse_args([*asked, "--out", str(file)]))[1] == file


def test_what_flags_and_weights_decide_is_no_setting(made):
    settings = ("precision=bf16", "optimizer.lr=1", "model.implementation=transformers", "data.name=x")
    chosen = [part for setting in settings for part in ("--set", setting)]
    said = score(made / "run", "--task", "perplexity", "--data", made / "texts.jsonl", *chosen, code=2)
    assert "--set data.name=x: --data decides what is read" in said
    assert "--precision decides it" in said and "the weights decide it" in said
    assert "nothing is trained here" in said


@pytest.mark.parametrize("sequence", [False, True])
def test_logits_are_computed_where_targets_count(made, sequence):
    """Of 64 positions; all of them where positions are cut over tensor-parallel ranks."""
    settings = ("parallel.tp=2", "parallel.sequence=true") if sequence else ()
    wishes = Wishes(str(made / "run"), "perplexity", batch=2, settings=settings)
    plan = checked_job(wishes, 1 + sequence, CPU).plan
    lengths = ((64, 64), (64, 24), (64, 32), (64, 33), (40, 8), (40, 9), (40, 24), (3, 1))
    windows = [Window(torch.arange(length + 1).numpy(), counted) for length, counted in lengths]
    found = list(steps_of(windows, 2, plan))
    if sequence:
        shorter = [Step([4, 5], 64, 64), Step([6, 6], 64, 64)]
        assert found == [Step([0, 1], 64, 64), Step([2, 3], 64, 64), *shorter, Step([7, 7], 32, 32)]
    else:
        whole = [Step([0, 3], 64, 64), Step([5, 6], 64, 64)]
        cut = [Step([1, 2], 64, 32), Step([4, 4], 64, 32)]
        assert found == [*whole, *cut, Step([7, 7], 32, 32)]


def test_running_out_of_memory_is_explained():
    """Any other failure keeps its own traceback."""
    said = r"(?s)out of memory: OutOfMemoryError: .*20 GiB.*lower --batch.*zero3"
    with pytest.raises(Failed, match=said), explain_out_of_memory(LESS_MEMORY):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    with pytest.raises(RuntimeError, match="^shapes differ$"), explain_out_of_memory(LESS_MEMORY):
        raise RuntimeError("shapes differ")
