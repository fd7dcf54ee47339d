"""WikiText-103, LAMBADA and documents, from files in the schema of the hub's data sets."""

from __future__ import annotations

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from scored import PASSAGES, tokenizer_of

from data.tasks.scored_text import detokenize, documents, lambada, original_tokens, wikitext103
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


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of([*PASSAGES, TEXT], 400)


def test_wikitext_becomes_text_again():
    assert detokenize(ORIGINAL.strip()) == TEXT
    # The words, punctuation and line breaks of the original.
    assert original_tokens(" = A = \n \n b c . \n") == 8


def rows_of(text):
    """As the hub has them: a blank line is an empty row."""
    return [line if line.strip() else "" for line in text.splitlines(keepends=True)]


@pytest.mark.parametrize("form", ["raw", "jsonl", "parquet"])
def test_wikitext_is_the_same_from_the_original_file_and_from_the_rows_of_the_hub(form, tokenizer, tmp_path):
    path = tmp_path / f"wiki.test.{form}"
    if form == "raw":
        path.write_text(ORIGINAL)
    elif form == "jsonl":
        path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows_of(ORIGINAL)))
    else:
        pq.write_table(pa.table({"text": rows_of(ORIGINAL)}), path)
    data = wikitext103(tokenizer, 32, 8, path)
    (tokens,) = [tokenizer.encode(TEXT)]
    assert data.words == len(ORIGINAL.strip().split(" ")) and not data.broken
    assert data.windows[0].tokens.tolist() == tokens[:33]
    assert data.tokens == len(tokens) - 1 and data.windows[-1].tokens[-1] == tokens[-1]
    limited = wikitext103(tokenizer, 32, 8, path, limit=2)
    assert len(limited.windows) == 2 and limited.tokens == 40
    assert limited.words == round(data.words * 40 / data.tokens)


def test_the_hub_is_asked_for_the_published_sets(tokenizer, monkeypatch):
    asked = []

    def load(name, config, *, split, revision, streaming):
        asked.append((name, config, split))
        rows = rows_of(ORIGINAL) if "wikitext" in name else PASSAGES
        rows = [row.lower() for row in rows] if name == "cimec/lambada" else rows
        return datasets.Dataset.from_dict({"text": rows}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert wikitext103(tokenizer, 32, 8).words == original_tokens(ORIGINAL)
    assert lambada(tokenizer, 64, "original").examples == lambada(tokenizer, 64, "openai").examples == 5
    assert asked == [
        ("Salesforce/wikitext", "wikitext-103-raw-v1", "test"),
        ("cimec/lambada", None, "test"),
        ("EleutherAI/lambada_openai", "default", "test"),
    ]


def test_without_the_hub_a_file_is_asked_for(tokenizer, monkeypatch):
    def load(*_, **__):
        raise FileNotFoundError("no such data set")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(ProblemsError, match=r"Salesforce/wikitext.*--data FILE"):
        wikitext103(tokenizer, 32, 8)


@pytest.mark.parametrize("form", ["txt", "jsonl", "parquet"])
def test_the_last_word_of_a_passage_counts(form, tokenizer, tmp_path):
    path = tmp_path / f"lambada.{form}"
    if form == "txt":
        path.write_text("".join(f"{text}\n" for text in PASSAGES))
    elif form == "jsonl":
        path.write_text("".join(json.dumps({"text": f"{text} "}) + "\n" for text in PASSAGES))
    else:
        pq.write_table(pa.table({"text": PASSAGES}), path)
    data = lambada(tokenizer, 200, "openai", path)
    assert data.examples == 5 and not data.cut
    for text, window in zip(PASSAGES, data.windows, strict=True):
        assert window.tokens.tolist() == tokenizer.encode(text)
        word = window.tokens[len(window.tokens) - window.counted :]
        assert tokenizer.decode(word) == " " + text.split(" ")[-1]


def test_of_a_long_passage_the_end_is_read(tokenizer, tmp_path):
    path = tmp_path / "lambada.jsonl"
    path.write_text(json.dumps({"text": PASSAGES[2]}))
    data = lambada(tokenizer, 10, "openai", path)
    (window,) = data.windows
    assert data.cut == 1 and window.tokens.tolist() == tokenizer.encode(PASSAGES[2])[-11:]


def test_broken_passages_are_counted_and_left_out(tokenizer, tmp_path):
    path = tmp_path / "lambada.jsonl"
    rows = [{"text": PASSAGES[0]}, {"txt": "A b"}, {"text": 5}, {"text": "Alone"}, {"text": PASSAGES[1]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    data = lambada(tokenizer, 200, "openai", path)
    assert data.examples == 2 and len(data.broken) == 4
    assert any("--column" in each for each in data.broken)
    assert any("one word" in each for each in data.broken)


def test_a_character_of_a_script_without_blanks_is_a_word(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("今天 use GPT-2，ไทย\n한국어 text")
    assert documents(tokenizer, 64, 8, tmp_path / "a.txt").words == 2 + 1 + 1 + 3 + 2


def test_the_two_forms_of_lambada_are_told_apart(tokenizer, tmp_path):
    path = tmp_path / "lambada.txt"
    path.write_text("".join(f"{text}\n" for text in PASSAGES))
    with pytest.raises(ProblemsError, match="--variant openai"):
        lambada(tokenizer, 64, "original", path)
    path.write_text(path.read_text().lower())
    assert lambada(tokenizer, 64, "original", path).examples == 5
    with pytest.raises(ProblemsError, match="--variant original"):
        lambada(tokenizer, 64, "openai", path)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"txt": "A b"}\n', r"no field 'text'.*--column"),
        ("a.jsonl", "", "empty file"),
        ("a.txt", " \n\n", "holds no text"),
        ("a.txt", b"\xff\xfe\x00", "UTF-16"),
        ("a.parquet", "no parquet", "a parquet file begins with PAR1"),
    ],
)
def test_a_file_without_its_fields_is_refused(name, content, said, tokenizer, tmp_path):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ProblemsError, match=said):
        lambada(tokenizer, 64, "openai", path)


def test_documents_are_predicted_from_their_first_token_on(tokenizer, tmp_path):
    path = tmp_path / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*PASSAGES[:2], ""]))
    data = documents(tokenizer, 8, 8, path)
    assert data.examples == 2 and data.words == sum(len(text.split()) for text in PASSAGES[:2])
    assert data.tokens == sum(len(tokenizer.encode(text)) for text in PASSAGES[:2])
    assert data.windows[0].tokens[0] == tokenizer.eos_token_id
    whole = tmp_path / "book.txt"
    whole.write_text("\n\n".join(PASSAGES))
    assert documents(tokenizer, 8, 4, whole).tokens == len(tokenizer.encode("\n\n".join(PASSAGES)))
