"""Text that is named by a path alone: kind, column, and what is refused."""

import gzip
import json
import os
import random
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import corpus, durable_files
from data.text import listing
from data.text.given_text import text_settings
from data.text.held_out import cut_end, describe_text
from data.text.listing import splits_of
from data.text.local_files import files_of
from data.text.sources import open_source
from launch import prepare_data, pretrain
from recipes import catalog
from recipes.problems import ProblemsError
from recipes.schema import Origin


def lines(*records: dict) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def found(path, column=None) -> tuple:
    listing.FOUND.clear()
    settings = text_settings(str(path), column)
    return settings["data.source"], settings["data.text_column"]


def refused(path) -> str:
    listing.FOUND.clear()
    with pytest.raises(ProblemsError) as error:
        text_settings(str(path))
    return str(error.value)


def test_the_kind_is_told_by_first_bytes_and_suffix_and_the_column_by_its_name(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "one.txt").write_text("some words")
    (tmp_path / "a" / "b" / "two.md").write_text("# more words")
    assert found(tmp_path / "a") == ("text", "text")
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(lines({"content": "a", "url": "b"})))
    assert found(tmp_path / "x.jsonl.gz") == found(tmp_path / "*.gz") == ("jsonl", "content")
    (tmp_path / "y.txt").write_bytes(lines({"body": "a", "n": 1}))  # its first bytes tell, not its name
    assert found(tmp_path / "y.txt") == ("jsonl", "body")
    pq.write_table(pa.table({"id": [1], "text": ["a"], "title": ["b"]}), tmp_path / "z")
    assert found(tmp_path / "z") == ("parquet", "text")
    assert found(tmp_path / "z", "title") == ("parquet", "title")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.csv", b"id,text\n1,a\n", ("a table", "pandas.read_csv('{}'")),
        ("t.jsonl", b'"a"\n"b"\n', ("not JSON lines, as its name says",)),
        (
            "t.jsonl",
            lines({"a": "x", "b": "y", "c": 3}),
            ("the columns a (a text), b (a text), c (a number)", "data.text_column"),
        ),
        ("t.json", b'[{"text": "a"}]', ("one JSON list", "jq -c '.[]' {}")),
        ("t.json", b'{\n  "text": "a"\n}', ("t.json:1: not a JSON object",)),
        ("t.parquet", b"words", ("not a parquet file, as its name says",)),
        ("t.txt", b"", ("an empty file", "remove it")),
        ("t.txt", b"caf\xe9 au lait", ("not UTF-8", "iconv")),
        ("t.txt", b"a\0b", ("NUL bytes",)),
        ("t.gz", gzip.compress(b"words" * 999, mtime=0)[:30], ("damaged",)),
        ("t.pdf", b"%PDF-1.7", ("a PDF",)),
    ],
)
def test_what_is_no_text_is_refused_with_the_way_to_it(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    message = refused(path)
    assert message.startswith(f"--text {path}: ")
    assert all(part.format(path) in message for part in said), message


def test_folders_without_files_or_with_files_of_several_kinds_are_refused(tmp_path):
    assert "the directory holds no file" in refused(tmp_path)
    assert "no such file" in refused(tmp_path / "absent")
    (tmp_path / "README.md").write_text("words")
    (tmp_path / "x.jsonl").write_bytes(lines({"text": "a"}))
    assert f"'{tmp_path}/**/*.jsonl'" in refused(tmp_path)
    assert found(f"{tmp_path}/**/*.jsonl") == ("jsonl", "text")
    (tmp_path / "x.idx").write_bytes(b"MMIDIDX\0\0")
    assert f"data.source=store --set data.name={tmp_path}" in refused(tmp_path)


LONG = "a sentence of a document, as long as such sentences are, which is not very long, but long enough"


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([{"id": "conv-1", "messages": [{"role": "user", "content": LONG}]}], "messages (a list)"),
        ([{"id": "1", "data": {"text": LONG}}], "data (an object)"),
        ([{"id": "1", "text": [LONG, LONG]}], "text (a list)"),
        ([{"system": LONG, "conversations": [{"value": LONG * 2}]}], "conversations (a list)"),
        ([{"url": f"https://example.org/{'a' * 200}", "n": 1}], "url (a text)"),
        ([{"title": "A short title", "n": 1}], "title (a text)"),
        ([{"n": 1}], "n (a number)"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_what_is_no_text_by_its_name_and_its_values_is_refused_with_what_there_is(
    tmp_path, kind, records, said
):
    path = tmp_path / f"a.{kind}"
    path.write_bytes(lines(*records))
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    assert said in refused(path) and "jq -c '{text: ...}'" in refused(path)


def test_a_column_is_known_by_its_values_in_several_records(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(lines({"id": "1", "text": None}, {"id": "2", "text": "b"}))
    assert "'text' is NoneType" in refused(tmp_path / "a.jsonl")
    for name in ("raw_content", "lyrics", "歌"):
        (tmp_path / f"{name}.jsonl").write_bytes(lines({name: LONG, "n": 1}, {name: LONG, "n": 2}))
        assert found(tmp_path / f"{name}.jsonl") == ("jsonl", name)
    (tmp_path / "b.jsonl").write_bytes(lines({"歌词": "床前明月光疑是地上霜举头望明月" * 2}))
    assert found(tmp_path / "b.jsonl") == ("jsonl", "歌词")
    (tmp_path / "c.jsonl").write_bytes(lines({"id": "1", "raw": LONG}))
    assert "set data.text_column=raw if" in refused(tmp_path / "c.jsonl")


def test_every_folder_has_to_hold_the_text(tmp_path):
    """As dolma's attributes/ beside documents/."""
    for folder in ("attributes", "documents", "more"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_bytes(lines({"id": "1", "text": "words"}))
    assert found(tmp_path) == ("jsonl", "text")
    (tmp_path / "attributes" / "a.jsonl").write_bytes(lines({"id": "1", "attributes": {"x": [[0, 5, 0.5]]}}))
    assert "attributes/a.jsonl has the columns id (a text), attributes (an object)" in refused(tmp_path)
    (tmp_path / "attributes" / "a.jsonl").write_bytes(lines({"content": "words"}))
    assert "documents/a.jsonl:1: no field 'content'" in refused(tmp_path)


def test_splits_are_refused_together_and_can_be_chosen(tmp_path):
    for layout in ("{}-00000-of-00001.jsonl", "{}/part.jsonl", "wiki.{}.jsonl"):
        top = tmp_path / layout.replace("{}", "S").replace("/", "_")
        for split in ("train", "dev", "Test"):
            path = top / layout.format(split)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(lines({"text": split}))
        message = refused(top)
        assert "files named" in message and all(name in message for name in ("train", "dev", "Test"))
        one, every = re.findall(r"'(/.*?)'", message)
        for pattern, count in ((one, 1), (every, 3)):
            listing.FOUND.clear()
            settings = text_settings(pattern)
            source = open_source(Origin(source="jsonl", name=settings["data.name"]))
            texts = [document.text for document in source.documents()]
            assert len(texts) == count and "train" in texts
        assert splits_of(files_of(Origin(source="text", name=every))).keys() == {"train", "dev", "Test"}
    held_out = tmp_path / "held_out"
    held_out.mkdir()
    for name in ("dev.txt", "test.txt"):
        (held_out / name).write_text("words")
    assert found(held_out) == ("text", "text")
    code = tmp_path / "code"
    code.mkdir()
    for name in ("train.py", "test.py", "a.py", "latest.py", "trainer.py"):
        (code / name).write_text("x = 1")
    assert found(code) == ("text", "text")


def test_it_takes_the_place_of_a_recipes_own_text(tmp_path):
    path = tmp_path / "my text.txt"
    path.write_text("some words")
    for name in ("default/sotu", "openwebtext/gpt2-124m"):
        data = catalog.load(name, settings=text_settings(str(path))).data
        assert (data.source, data.name, data.blend, data.config) == ("text", str(path), (), None)
    args = ["--text", str(path), "--tokenizer", "gpt2", "--out", "x"]
    (origin,) = prepare_data.settings_of(prepare_data.build_parser().parse_args(args)).origins
    assert (origin.source, origin.name) == ("text", str(path))


def planned(*words: str):
    return pretrain.checked_job(
        pretrain.build_parser().parse_args(["--plan", "--ds_config", "zero0", *words])
    )


def test_a_plan_says_what_is_trained_and_refuses_a_vocabulary_that_the_text_cannot_give(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("MEGARECIPES_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "mine.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, and so on; " * 40)
    for recipe in ("default/sotu", "bert/sotu"):
        with pytest.raises(
            ProblemsError, match="only (\\d+) tokens; set model.vocab_size=\\1 or less"
        ) as error:
            planned("--recipe", recipe, "--text", str(path))
    size = str(error.value).partition("set model.vocab_size=")[2].split()[0]
    job = planned("--recipe", "bert/sotu", "--text", str(path), "--set", f"model.vocab_size={size}")
    assert re.fullmatch(r"BERT of 1\.\d+M parameters on mine\.txt", job.plan.recipe.title)
    assert job.directory.name == "bert-sotu-mine-zero0"
    shrunk = planned("--tiny").plan.recipe.title
    assert shrunk == "GPT-2 of 237k parameters on the State of the Union addresses"
    from launch.training.start import show_plan

    show_plan(job, [])
    said = " ".join(capsys.readouterr().out.split())
    assert f"1 file of plain text, {path.stat().st_size:,} bytes; the end of the text is held out" in said
    assert f"vocabulary trained_wordpiece of {size} tokens, trained on it" in said


def test_the_sample_of_own_text_begins_with_words_of_its_held_out_text(tmp_path, monkeypatch):
    """Of a BERT with a mask behind them; a prompt that somebody states stays."""
    monkeypatch.setenv("MEGARECIPES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(pretrain, "sample", lambda recipe, *_: recipe.run.prompt)
    drawn = random.Random(1)
    words = [f"word{drawn.getrandbits(40):x}" for _ in range(80 * 99)]
    texts = [" ".join(words[at : at + 99]) for at in range(0, len(words), 99)]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"{text}."}) for text in texts))
    prompts = []
    own = ("--text", str(path))
    for words in (own, (*own, "--recipe", "bert/sotu"), (*own, "--set", "run.prompt=My fellow citizens")):
        job = planned("--tiny", *words)
        prompts.append(job.outcome(job, corpus.build(job.plan.recipe)).sample)
    gpt, bert, stated = prompts
    words = gpt.split()
    assert words and words in [text.split()[: len(words)] for text in texts], "whole words"
    *words, mask = bert.split()
    assert mask == "[MASK]" and words and any(" ".join(words) in text for text in texts), bert
    assert stated == "My fellow citizens"


def test_a_folder_is_walked_once_and_counted_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setenv("MEGARECIPES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(durable_files, "SAY_EVERY_S", -1.0)
    for folder in ("train", "validation"):
        (tmp_path / "text" / folder).mkdir(parents=True)
        for n in range(30):
            words = " ".join(f"word{i * n}" for i in range(99))
            (tmp_path / "text" / folder / f"{n}.txt").write_text(words)
    listed, said = [], []
    walk = os.walk
    monkeypatch.setattr(listing.os, "walk", lambda *a, **b: listed.append(a) or walk(*a, **b))
    pattern = f"{tmp_path}/text/**/*.txt"
    text = text_settings(pattern, say=said.append)
    recipe = catalog.load("default/sotu", ["model.vocab_size=300"], tiny=True, settings=text)
    corpus.check_sources(recipe)
    plan = describe_text(recipe)
    assert "60 files of plain text, named train and validation," in plan
    corpus.build(recipe, tmp_path, lambda line: None)
    assert len(listed) == 1
    assert f"{pattern}: 60 files so far" in said and f"{pattern}: looked into 60 of 60 files" in said


def test_an_end_is_cut_at_a_blank():
    texts = ["one two three", "four five"]
    assert cut_end(texts, 12) == ["three", "four five"] and texts == ["one two "]
    assert cut_end(texts, 99) == ["one two "] and not texts
    assert cut_end(["abcdef"], 2) == ["ef"]
