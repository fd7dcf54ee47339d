"""Text that is named by a path alone: kind, column, and what is refused."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.text.given_text import text_settings
from data.text.held_out import cut_end
from launch import prepare_data, pretrain
from recipes import catalog
from recipes.problems import ProblemsError


def lines(*records: dict) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def found(path, column=None) -> tuple:
    settings = text_settings(str(path), column)
    return settings["data.source"], settings["data.text_column"]


def refused(path) -> str:
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
        ("t.jsonl", lines({"a": "x", "b": "y", "c": 3}), ("the columns a, b, c", "data.text_column=a")),
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


def test_it_takes_the_place_of_a_recipes_own_text(tmp_path):
    path = tmp_path / "my text.txt"
    path.write_text("some words")
    for name in ("default/sotu", "openwebtext/gpt2-124m"):
        data = catalog.load(name, laid=text_settings(str(path))).data
        assert (data.source, data.name, data.blend, data.config) == ("text", str(path), (), None)
    args = ["--text", str(path), "--tokenizer", "gpt2", "--out", "x"]
    (origin,) = prepare_data.settings_of(prepare_data.build_parser().parse_args(args)).origins
    assert (origin.source, origin.name) == ("text", str(path))


def planned(*words: str):
    return pretrain.training_of(
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
    job = planned("--recipe", "bert/sotu", "--text", str(path), "--set", f"model.vocab_size={size}").job
    assert "State of the Union" not in job.plan.recipe.title and job.plan.recipe.title.endswith(f"on {path}")
    assert job.directory.name == "bert-sotu-mine-zero0"
    shrunk = planned("--tiny").job.plan.recipe.title
    assert shrunk == "GPT-2 of 237k parameters on the State of the Union addresses"
    from launch.training.start import show_plan

    show_plan(job)
    said = " ".join(capsys.readouterr().out.split())
    assert f"1 file of plain text, {path.stat().st_size:,} bytes; the end of the text is held out" in said
    assert f"vocabulary trained_wordpiece of {size} tokens, trained on it" in said


def test_an_end_is_cut_at_a_blank():
    texts = ["one two three", "four five"]
    assert cut_end(texts, 12) == ["three", "four five"] and texts == ["one two "]
    assert cut_end(texts, 99) == ["one two "] and not texts
    assert cut_end(["abcdef"], 2) == ["ef"]
