"""The command: figures next to those of transformers, what is kept, and what is refused before a start."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from accelerate import infer_auto_device_map
from hypothesis import given
from hypothesis import strategies as st
from launching import ROOT, run
from scored import PASSAGES, make_run, tokenizer_of, write_passages
from transformers import GPT2LMHeadModel

from data import corpus
from data.samples.documents import places_in_documents
from launch import export_hf, report
from launch.evaluation import protocols, scoring, trained_model
from launch.evaluation.scores import Score, describe, keep, read_scores, to_json
from launch.evaluation.scoring import ScoredModel, windows_of
from launch.ranks.ending import Failed, explain_out_of_memory
from launch.score import LESS_MEMORY, build_parser, check_alone, checked
from launch.weights import foreign_weights
from modeling.documents import row_of_documents
from modeling.families import whole_model
from recipes.problems import ProblemsError


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run, its export, and passages, in one directory."""
    folder = tmp_path_factory.mktemp("score")
    make_run(folder / "run")
    export_hf.export(folder / "run", folder / "hf")
    write_passages(folder / "texts.jsonl")
    return folder


def job_of(*arguments):
    return checked(build_parser().parse_args([*map(str, arguments)]))


def score(*arguments):
    """The scores of a command line as --out has them."""
    job = job_of(*arguments)
    scoring.run(job, scoring.load(job))
    return json.loads(job.out.read_text()) if job.out else None


def command(*arguments, code=0):
    done = run([sys.executable, str(ROOT / "launch" / "score.py"), *map(str, arguments)], timeout=120)
    assert done.returncode == code, done.stdout
    return " ".join(done.stdout.split())


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
    kept = score(run_model, *asked, "--out", out)
    nll, tokens = [], 0
    for text in texts:
        whole = [tokenizer.eos_token_id, *tokenizer.encode(text)]
        ends = sorted({*range(length + 1, len(whole), 5), len(whole)})
        for first, last in zip([1, *ends], ends, strict=False):
            before = whole[max(0, last - length - 1) : first]
            nll += losses(model, tokenizer, before, whole[first:last])[0].tolist()
            tokens += last - first
    assert kept["tokens"] == tokens == len(nll)
    assert kept["figures"]["loss_per_token"] == pytest.approx(math.fsum(nll) / tokens, rel=1e-6)
    words, size = sum(len(t.split()) for t in texts), sum(len(t.encode()) for t in texts)
    assert kept["figures"]["perplexity_per_word"] == pytest.approx(math.exp(math.fsum(nll) / words), rel=1e-6)
    assert kept["figures"]["bits_per_byte"] == pytest.approx(math.fsum(nll) / size / math.log(2), rel=1e-6)


def test_a_window_is_a_sample_of_the_training_and_may_be_as_long_as_the_positions(made, tmp_path):
    short = make_run(tmp_path / "short", "sequence_length=16", "model.positions=64")
    task = ("--text", made / "texts.jsonl")
    cases = [(made / "run", ("--window", 16)), (made / "run", ()), (short, ()), (short, ("--window", 64))]
    found = []
    for number, (model, flags) in enumerate(cases):
        found.append(score(model, *task, *flags, "--out", tmp_path / f"{number}.json")["figures"])
    assert found[0] == found[2] != found[1] == found[3]
    said = refusal(short, *task, "--window", 65)
    assert "--window 65: the model has 64 positions; give 64 or less" in said


BORDERS = [("window", "window"), ("document", "document"), ("document", "window"), ("window", "document")]


@pytest.mark.parametrize(("attend", "positions"), BORDERS)
def test_held_out_samples_have_the_loss_of_the_validation(attend, positions, tmp_path):
    """Of our own model on the same windows, with borders of documents where its training has them."""
    texts = "".join(json.dumps({"text": text}) + "\n" for text in PASSAGES * 40)
    (tmp_path / "texts.jsonl").write_text(texts)
    text = ("data.source=jsonl", f"data.name={tmp_path}/texts.jsonl", "data.validation_every=3")
    borders = (f"data.attend={attend}", f"data.positions={positions}")
    directory = make_run(tmp_path / "run", *text, *borders, "run.validation_samples=6")
    found = score(directory, "--out", tmp_path / "out.json")
    job = job_of(directory)
    recipe = job.texts["recipe"]
    windows = torch.from_numpy(
        corpus.build(recipe, say=str).validation.take(range(6))["window"].astype("int64")
    )
    model = whole_model(recipe, foreign_weights.read(job.model.weights, recipe))
    places = torch.from_numpy(places_in_documents(windows[:, :-1].numpy(), job.model.tokenizer.eos_token_id))
    assert (places[:, 1:] == 0).any(), "a document ends within a window"
    weights = torch.ones(windows[:, 1:].shape)
    with torch.no_grad():
        row = row_of_documents(places, "cpu") if recipe.data.borders else None
        expected = float(model(windows[:, :-1], windows[:, 1:], weights, places=row)) / weights.sum()
    assert found["figures"]["loss_per_token"] == pytest.approx(float(expected), rel=1e-6)
    assert (found["examples"], found["tokens"], found["variant"]) == (6, 6 * 64, "held out")


def test_lambada_of_a_run_and_of_its_export_is_that_of_transformers(made, capsys):
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
        kept = score(directory, "--tasks", "lambada", "--variant", "openai", "--data", texts, "--out", out)
        said = " ".join(capsys.readouterr().out.split())
        assert "66.5 %" in said and "lambada (openai)" in said
        assert "other data than the published scores'" in said
        kept = kept["figures"]
        assert kept["perplexity_of_last_word"] == pytest.approx(math.exp(math.fsum(nll) / len(nll)), rel=1e-6)
        assert kept["accuracy"] == sum(bool(hits.all()) for _, hits in found) / len(found)


def test_wikitext103_is_that_of_transformers(made):
    """By windows of 64 every 24 tokens from the text's first token on, over original words."""
    text = made / "wiki.raw"
    text.write_text("".join(f" {each} , so . \n" for each in PASSAGES))
    asked = ("--tasks", "wikitext103", "--data", text, "--stride", 24)
    one = score(made / "run", *asked, "--out", made / "wiki.json")
    model = GPT2LMHeadModel.from_pretrained(made / "hf").eval()
    tokenizer = tokenizer_of(PASSAGES, model.config.vocab_size)
    data = protocols.wikitext103(file=str(text))
    words = data["facts"].words
    tokens = tokenizer.encode(data["test"][0]["text"])
    nll = losses(model, tokenizer, tokens[:1], tokens[1:65])[0].tolist()
    for first in range(65, len(tokens), 24):
        last = min(first + 24, len(tokens))
        start = 24 * ((first - 65) // 24 + 1)
        nll += losses(model, tokenizer, tokens[start:first], tokens[first:last])[0].tolist()
    assert one["tokens"] == len(nll) == len(tokens) - 1 and one["words"] == words
    assert one["figures"]["perplexity"] == pytest.approx(math.exp(math.fsum(nll) / words), rel=1e-6)


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


def test_any_task_of_lm_eval_is_scored_and_kept(made, tmp_path, capsys):
    """With its own metrics; next to a task of ours without them."""
    (tmp_path / "mine.yaml").write_text(OWN_TASK.replace("FILE", str(made / "texts.jsonl")))
    gone = OWN_TASK.replace("FILE", str(tmp_path / "none.jsonl")).replace("mine", "gone")
    (tmp_path / "gone.yaml").write_text(gone)
    out = tmp_path / "out.json"
    asked = ("--tasks", "mine,perplexity", "--text", made / "texts.jsonl", "--include_path", tmp_path)
    mine, own = score(made / "run", *asked, "--out", out)
    assert (mine["task"], mine["examples"], mine["windows"], own["task"]) == ("mine", 5, 20, "perplexity")
    assert mine["source"].startswith("lm-eval ") and "acc_stderr" in capsys.readouterr().out
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
    said = refusal(made / "run", "--tasks", "mein,lambada_openay", "--include_path", tmp_path)
    assert "lambada_openay: lm-eval " in said and "did you mean lambada_openai" in said and "mein" in said
    said = refusal(made / "run", "--tasks", "gone", "--include_path", tmp_path)
    assert "gone: its data cannot be read" in said and "HF_HOME" in said and "--include_path DIR" in said


@pytest.mark.ci
def test_scores_are_kept_with_the_run_and_stand_in_its_report(made, tmp_path):
    run_directory = tmp_path / "run"
    shutil.copytree(made / "run", run_directory)
    (run_directory / "scores.json").unlink(missing_ok=True)
    asked = (run_directory, "--text", made / "texts.jsonl")
    (run_directory / "checkpoints" / "step-000009").mkdir()
    said = command(*asked)
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


def test_from_scratch_scores_the_weights_that_the_run_began_with(made, tmp_path, capsys):
    began = make_run(tmp_path / "began", untrained=True)
    figures = []
    for model, more in ((began, ()), (made / "run", ("--from_scratch",))):
        out = tmp_path / f"{len(figures)}.json"
        figures.append(score(model, "--text", made / "texts.jsonl", *more, "--out", out)["figures"])
        assert ("weights drawn at random" in capsys.readouterr().out) == bool(more)
    assert figures[0] == pytest.approx(figures[1], rel=1e-6)
    kept = read_scores(made / "run")
    assert not any(each.from_scratch for each in kept), "they are none of the run's"


def test_published_scores_stand_beside_their_own_data_alone():
    of = dict(model="x", parameters=1, step=None, source="x", windows=1, tokens=1, limited=False, cut=0)
    of |= dict(window=1, stride=None, batch=1, precision="fp32", layout="", hardware="", seconds=1.0)
    cases = {("openai", 5153): False, ("openai", 5150): False, ("original", 5153): True}
    for (variant, examples), other in {**cases, ("openai", 44): True}.items():
        made = dict(task="lambada", variant=variant, figures={"accuracy": 0.5}, words=None)
        score = Score(**of, **made, examples=examples)
        assert score.on_other_data == json.loads(to_json([score]))["published_on_other_data"] == other
        assert ("other data" in describe(score)) == other and "66.5 %" in describe(score)
    made = dict(task="wikitext103", variant="", figures={"perplexity": 20.0}, examples=1)
    assert not Score(**of, **made, words=245_569).on_other_data and Score(**of, **made, words=9).on_other_data


def facts_of(texts, **more):
    return protocols.perplexity(str(texts), **more)["facts"]


def test_documents_are_read_whole(made, tmp_path):
    """Of a directory of JSON lines, and of a text file, which is one document."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, texts in enumerate((PASSAGES[:2], ["", PASSAGES[2]])):
        rows = "".join(json.dumps({"content": text, "n": 1}) + "\n" for text in texts)
        (folder / f"{number}.jsonl").write_text(rows)
    found = protocols.perplexity(str(folder))
    assert found["test"]["text"] == PASSAGES[:3]
    assert found["facts"].words == sum(len(text.split()) for text in PASSAGES[:3])
    (folder / "1.jsonl").write_text(rows + "{broken\n")
    with pytest.raises(ProblemsError, match="1.jsonl:3: not a JSON object"):
        protocols.perplexity(str(folder))
    assert len(protocols.perplexity(str(folder), limit=1)["test"]) == 1
    whole = tmp_path / "book.txt"
    whole.write_text("\n\n".join(PASSAGES))
    assert protocols.perplexity(str(whole))["test"]["text"] == ["\n\n".join(PASSAGES)]


def test_a_character_of_a_script_without_blanks_is_a_word(made, tmp_path):
    (tmp_path / "a.txt").write_text("今天 use GPT-2，ไทย\n한국어 text")
    assert facts_of(tmp_path / "a.txt").words == 2 + 1 + 1 + 3 + 2


def refusal(model, *arguments):
    with pytest.raises(ProblemsError) as refused:
        job = job_of(model, *arguments)
        scoring.load(job)
    return str(refused.value)


def test_what_cannot_be_scored_is_refused_before_a_start(made, tmp_path):
    texts, run_directory = str(made / "texts.jsonl"), made / "run"
    make_run(tmp_path / "bert", family="bert/sotu")
    text = ("--text", texts)
    assert "is a BERT" in refusal(tmp_path / "bert", *text)
    shutil.copytree(run_directory, tmp_path / "unsaved", ignore=shutil.ignore_patterns("checkpoints"))
    assert "holds no checkpoint" in refusal(tmp_path / "unsaved", *text)
    said = refusal(tmp_path / "missing", *text)
    assert said.startswith(f"MODEL {tmp_path}/missing: ") and "--init_from" not in said
    tokenizer_of(PASSAGES, 300).save_pretrained(tmp_path / "small")
    said = refusal(run_directory, *text, "--tokenizer", tmp_path / "small")
    assert "is not the vocabulary" in said or "300 tokens" in said
    both = refusal(run_directory, *text, "--window", 4096, "--stride", 5000)
    assert "--window 4096" in both and "--stride 5000" in both
    of_lambada = ("--tasks", "lambada", "--data")
    assert "--data " in refusal(run_directory, *of_lambada, tmp_path / "none")
    assert "--text " in refusal(run_directory, "--text", tmp_path / "none")
    assert "--stride 3 with --tasks lambada" in refusal(run_directory, *of_lambada, texts, "--stride", 3)
    assert "--stride 3 with --tasks perplexity" in refusal(run_directory, "--stride", 3)
    assert "held-out samples have 64 tokens" in refusal(run_directory, "--window", 32)
    plain = tmp_path / "text.txt"
    plain.write_text("some words\n")
    of_wiki = ("--tasks", "wikitext103", "--data", plain)
    assert "--variant openai with --tasks wikitext103" in refusal(
        run_directory, *of_wiki, "--variant", "openai"
    )
    assert "--column body: " in refusal(run_directory, *of_wiki, "--column", "body")
    assert "is plain text" in refusal(run_directory, "--text", plain, "--column", "body")
    assert "--column without --text or --data" in refusal(run_directory, "--column", "body")
    assert "--text" in refusal(run_directory, *of_lambada, plain, "--text", plain)
    assert "give your own text with --text PATH" in refusal(run_directory, "--data", plain)
    mine = ("--tasks", "mine", "--include_path")
    assert "no such directory" in refusal(run_directory, *mine, tmp_path / "none")
    assert "--include_path without --tasks" in refusal(run_directory, *text, "--include_path", tmp_path)
    assert "name one of them" in refusal(run_directory, "--tasks", "lambada,wikitext103", "--data", plain)
    (tmp_path / "other.jsonl").write_text(json.dumps({"id": 3, "n": 4}) + "\n")
    said = refusal(run_directory, "--text", tmp_path / "other.jsonl")
    assert "--column" in said and "data." not in said


def test_several_processes_and_a_missing_lm_eval_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ProblemsError, match=r"(?s)2 processes: one process scores.*pip install lm-eval=="):
        check_alone()


def test_a_setting_of_a_recipe_is_no_flag_any_more():
    with pytest.raises(
        ProblemsError, match=r"--set parallel.tp=2: no such flag; this command trains nothing"
    ):
        build_parser().parse_args(["run", "--set", "parallel.tp=2"])


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
    assert checked(build_parser().parse_args([*asked, "--from_scratch"])).from_scratch


def test_a_run_that_is_not_mine_is_scored_into_a_file_or_refused_before_a_start(made, tmp_path, monkeypatch):
    monkeypatch.setattr("launch.score.place_problem", lambda path: ("cannot be made (Permission denied)", ""))
    asked = [str(made / "run"), "--text", str(made / "texts.jsonl")]
    with pytest.raises(ProblemsError, match=r"scores.json cannot be made \(Permission.*: .*add --out FILE"):
        checked(build_parser().parse_args(asked))
    file = tmp_path / "scores.json"
    assert checked(build_parser().parse_args([*asked, "--out", str(file)])).out == file


@given(st.integers(1, 60), st.integers(1, 12), st.data())
def test_every_target_counts_once_and_in_order(count, length, data):
    stride = data.draw(st.integers(1, length))
    for last_whole in (True, False):
        windows = [*windows_of([*range(count)], length, stride, last_whole=last_whole)]
        assert [token for _before, after in windows for token in after] == [*range(1, count)]
        assert all(len(before) + len(after) <= length + 1 for before, after in windows)
        assert all(len(before) > length - stride for before, _after in windows[1:])
        if last_whole:
            assert all(len(before) + len(after) == length + 1 for before, after in windows[1:])


@pytest.mark.parametrize(("count", "length", "stride"), [(101, 16, 4), (98, 16, 4), (97, 16, 16), (9, 16, 4)])
def test_windows_of_wikitext103_are_those_of_megatron(count, length, stride):
    """`_LMDataset` of tasks/zeroshot_gpt/datasets.py, in a few lines, without empty windows."""
    tokens, expected = [*range(count)], []
    sequences = max(-(-max(count - 1 - stride, 0) // stride) + 1, 1)
    for index in range(sequences):
        taken = tokens[index * stride : index * stride + length + 1]
        first = length - stride if stride != length and index != 0 else 0
        if taken[first + 1 :]:
            expected.append((taken[: first + 1], taken[first + 1 :]))
    assert [*windows_of(tokens, length, stride, last_whole=False)] == expected


def test_what_has_no_likelihood_ends_the_command(made):
    job = job_of(made / "run", "--text", made / "texts.jsonl", "--window", 8)
    model = ScoredModel(job)
    for count in (0, 9):
        with pytest.raises(Failed, match=rf"has {count} tokens of its own: between 1 and 8 \(--window\)"):
            model._loglikelihood_tokens([(None, [5, 6], [7]), (None, [5], [7] * count)])
    (found,) = model._loglikelihood_tokens([(None, [*range(1, 12)], [3])], disable_tqdm=True)
    assert model.seen.cut == 1 and math.isfinite(found[0])
    end = model.tokenizer.eos_token
    assert model.tok_encode(f"a{end}b") != [
        *model.tok_encode("a"),
        model.eot_token_id,
        *model.tok_encode("b"),
    ]
    with torch.no_grad():
        model.model.transformer.ln_f.weight[0] = math.nan
    with pytest.raises(Failed, match="a loss is no number in fp32$"):
        model._loglikelihood_tokens([(None, [5, 6], [7])], disable_tqdm=True)


def test_layers_are_placed_by_the_room_of_the_devices(made, tmp_path, monkeypatch):
    """As `device_map="auto"` does; here every device is the host."""
    asked = (made / "run", "--text", made / "texts.jsonl", "--out")
    whole = score(*asked, tmp_path / "whole.json")["figures"]
    device = SimpleNamespace(own_memory=True)
    monkeypatch.setattr(trained_model, "processes", SimpleNamespace(device=lambda: device))
    found = []

    def halved(model, **how):
        """The second half of the layers elsewhere, which is the host, too."""
        found.append(infer_auto_device_map(model, max_memory={"cpu": "9GB"}, **how))
        layers = {f"transformer.h.{each}": "cpu" for each in range(len(model.transformer.h))}
        rest = dict.fromkeys(("transformer.wte", "transformer.wpe", "transformer.drop"), "cpu")
        rest |= dict.fromkeys(("transformer.ln_f", "lm_head"), torch.device("cpu"))
        return rest | layers

    monkeypatch.setattr("accelerate.infer_auto_device_map", halved)
    assert score(*asked, tmp_path / "placed.json")["figures"] == whole
    assert set(found[0].values()) == {"cpu"}


def test_running_out_of_memory_is_explained():
    """Any other failure keeps its own traceback."""
    said = r"(?s)out of memory: OutOfMemoryError: .*20 GiB.*lower --batch"
    with pytest.raises(Failed, match=said), explain_out_of_memory(LESS_MEMORY):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    with pytest.raises(RuntimeError, match="^shapes differ$"), explain_out_of_memory(LESS_MEMORY):
        raise RuntimeError("shapes differ")
