"""The data and results of WikiText-103 and LAMBADA, from files in the schema of the hub's data sets."""

from __future__ import annotations

import importlib
import json
import math

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from launching import ROOT
from scored import PASSAGES

from launch.evaluation import protocols
from launch.evaluation.protocols import lambada, original_tokens, wikitext103
from launch.evaluation.scoring import Seen, figures_of
from recipes.problems import ProblemsError

ORIGINAL = (
    ' \n = Robert <unk> = \n \n He \'s an actor ; he had a guest @-@ role in " The Bill " ( 2000 ) . \n'
    " The dogs ' house cost 1 @,@ 234 @.@ 5 pounds : cheap at 20 \N{DEGREE SIGN} C , they say ! \n"
    " = = Career = = \n \n"
)
TEXT = (
    '= Robert <unk> =\n\nHe\'s an actor; he had a guest-role in "The Bill" (2000).\n'
    "The dogs' house cost 1,234.5 pounds: cheap at 20\N{DEGREE SIGN}C, they say!\n== Career =="
)


def rows_of(text):
    """As the hub has them: a blank line is an empty row."""
    return [line if line.strip() else "" for line in text.splitlines(keepends=True)]


def write(path, rows, form):
    if form in ("raw", "txt"):
        path.write_text("".join(rows))
    elif form == "jsonl":
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    else:
        pq.write_table(pa.table({"text": rows}), path)
    return str(path)


@pytest.mark.parametrize("form", ["raw", "jsonl", "parquet"])
def test_wikitext_is_text_again_from_the_original_file_and_from_the_rows_of_the_hub(form, tmp_path):
    rows = [ORIGINAL] if form == "raw" else rows_of(ORIGINAL)
    data = wikitext103(file=write(tmp_path / f"wiki.test.{form}", rows, form))
    words = len(ORIGINAL.strip().split(" "))
    assert list(data["test"]) == [{"text": TEXT}]
    facts = data["facts"]
    assert facts.words == words and facts.source.endswith(form)
    limited = wikitext103(file=facts.source, limit=4)
    assert limited["test"][0]["text"].startswith(TEXT.partition(" (2000)")[0])
    assert "The dogs" not in limited["test"][0]["text"]
    assert limited["facts"].words == original_tokens(ORIGINAL.partition(" The dogs")[0])


def test_words_of_wikitext_are_the_original_ones_with_punctuation_and_line_breaks():
    assert original_tokens(" = A = \n \n b c . \n") == 8


def test_wikitext_is_asked_of_the_hub(monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", hub(asked, rows_of(ORIGINAL)))
    assert wikitext103()["facts"].words == original_tokens(ORIGINAL)
    assert asked == [("Salesforce/wikitext", "wikitext-103-raw-v1", "test")]


def hub(asked, rows):
    def load(name, config, *, split, revision, streaming):
        asked.append((name, config, split))
        return datasets.Dataset.from_dict({"text": rows}).to_iterable_dataset()

    return load


def test_lambada_is_asked_of_the_hub(monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", hub(asked, PASSAGES))
    assert len(lambada(variant="openai")["test"]) == 5
    monkeypatch.setattr(datasets, "load_dataset", hub(asked, [text.lower() for text in PASSAGES]))
    assert len(lambada()["test"]) == 5
    assert asked == [("EleutherAI/lambada_openai", "default", "test"), ("cimec/lambada", None, "test")]


def test_without_the_hub_a_file_is_asked_for(monkeypatch):
    def load(*_, **__):
        raise FileNotFoundError("no such data set")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ProblemsError, match=r"cimec/lambada.*--data FILE"):
        lambada()


@pytest.mark.parametrize("form", ["txt", "jsonl", "parquet"])
def test_the_last_word_of_a_passage_counts(form, tmp_path):
    rows = [f"{text}\n" for text in PASSAGES]
    data = lambada(file=write(tmp_path / f"lambada.{form}", rows, form), variant="openai", version=1.0)
    assert [each["before"] + each["last_word"] for each in data["test"]] == PASSAGES
    assert [each["last_word"] for each in data["test"]] == [" " + text.split(" ")[-1] for text in PASSAGES]
    limited = lambada(file=data["facts"].source, variant="openai", limit=2)
    assert len(limited["test"]) == 2


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"txt": "A b"}', r"lambada.jsonl:2: no field 'text': .*--column"),
        ('{"text": 5}', "lambada.jsonl:2: field 'text' is int"),
        ('{"text": "Alone"}', "passage 2 has one word.*remove it"),
        ("{broken", "lambada.jsonl:2: not a JSON object"),
    ],
)
def test_a_passage_that_cannot_be_read_is_refused_by_its_line(row, said, tmp_path):
    """Within the first ones that --limit names."""
    path = tmp_path / "lambada.jsonl"
    good = json.dumps({"text": PASSAGES[0]})
    path.write_text(f"{good}\n{row}\n")
    with pytest.raises(ProblemsError, match=said):
        lambada(file=str(path), variant="openai")
    assert len(lambada(file=str(path), variant="openai", limit=1)["test"]) == 1


def test_the_two_forms_of_lambada_are_told_apart(tmp_path):
    path = tmp_path / "lambada.txt"
    path.write_text("".join(f"{text}\n" for text in PASSAGES))
    with pytest.raises(ProblemsError, match="--variant openai"):
        lambada(file=str(path))
    path.write_text(path.read_text().lower())
    assert len(lambada(file=str(path))["test"]) == 5
    with pytest.raises(ProblemsError, match="--variant original"):
        lambada(file=str(path), variant="openai")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"txt": "A b"}\n', r"columns txt .*name the column with --column"),
        ("a.jsonl", "", "empty file"),
        ("a.txt", " \n\n", "holds no text"),
        ("a.txt", b"\xff\xfe\x00", "UTF-16"),
        ("a.parquet", "no parquet", "not a parquet file"),
    ],
)
def test_a_file_without_its_fields_is_refused(name, content, said, tmp_path):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ProblemsError, match=said):
        lambada(file=str(path), variant="openai")


def test_results_of_documents_make_the_published_figures():
    """Losses of a text are divided by original words."""
    found = figures_of("lambada", {"acc": 0.5, "acc_stderr": 0.1, "perplexity": 2.0}, Seen(), None)
    assert found == {"accuracy": 0.5, "perplexity_of_last_word": 2.0}
    assert figures_of("mine", {"acc": 0.5, "acc_stderr": 0.1}, Seen(), None) == {
        "acc": 0.5,
        "acc_stderr": 0.1,
    }
    text = protocols.TaskText("", "x", words=4, bytes=20)
    found = figures_of("wikitext103", {}, Seen(windows=1, tokens=5, log_likelihood=-10.0), text)
    assert found["perplexity"] == found["perplexity_per_word"] == pytest.approx(math.exp(2.5))
    assert found["perplexity_per_token"] == pytest.approx(math.exp(2)) and found["tokens_per_word"] == 1.25
    assert found["bits_per_byte"] == pytest.approx(0.5 / math.log(2))
    diverged = figures_of("perplexity", {}, Seen(tokens=1, log_likelihood=-1e9), text)
    assert diverged["perplexity"] == math.exp(700)


@pytest.mark.parametrize("name", protocols.TASKS)
def test_every_function_that_a_task_file_names_is_there(name):
    """And every task of ours has its file."""
    named = []
    loader = type("Loader", (yaml.SafeLoader,), {})
    loader.add_constructor("!function", lambda _, node: named.append(node.value) or node.value)
    file = ROOT / "launch" / "evaluation" / "tasks" / f"{name}.yaml"
    content = yaml.load(file.read_text(), loader)
    assert content["task"] == name
    assert named
    for place in named:
        module, _, function = place.rpartition(".")
        assert callable(getattr(importlib.import_module(module), function))
