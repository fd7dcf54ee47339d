"""Files of tasks: every form gives the same records; what is broken is counted and named, or refused."""

from __future__ import annotations

import gzip
import json

import datasets
import numpy as np
import pytest
from tasked import sentences, write_lines

from data.tasks import choices
from data.tasks.choices import accuracy, f1
from data.tasks.records import WrongRecord, parse_examples, read_split
from recipes.problems import ProblemsError
from recipes.tasks import TASKS

SST2 = TASKS["sst2"]
LINES = '{"sentence": "a film", "label": 1}\n' * 3


def read(path, split="dev", facts=SST2):
    return [each.value for each in read_split(facts, split, str(path))]


def test_every_form_gives_the_same_records(tmp_path):
    records = sentences(7)
    write_lines(tmp_path / "a.jsonl", records)
    (tmp_path / "a.json").write_text(json.dumps(records))
    (tmp_path / "wrapped.json").write_text(json.dumps({"data": records}))
    table = datasets.Dataset.from_list(records)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(str(tmp_path / "saved"))
    for name in ("a.jsonl", "a.json", "wrapped.json", "a.parquet", "saved"):
        assert read(tmp_path / name) == records, name


def test_squads_own_json_is_the_hubs_schema(tmp_path):
    answers = [{"text": "film", "answer_start": 2}]
    asked = [{"id": "q1", "question": "what?", "answers": answers}]
    asked.append({"id": "q2", "question": "why?", "answers": []})
    article = {"title": "t", "paragraphs": [{"context": "a film", "qas": asked}]}
    (tmp_path / "own.json").write_text(json.dumps({"version": "v2.0", "data": [article]}))
    columns = [{"text": ["film"], "answer_start": [2]}, {"text": [], "answer_start": []}]
    assert read(tmp_path / "own.json", facts=TASKS["squad2"]) == [
        {"id": each["id"], "question": each["question"], "title": "t", "context": "a film", "answers": own}
        for each, own in zip(asked, columns, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone.jsonl", None, "no such file"),
        ("empty.jsonl", "", "holds no records"),
        ("fields.jsonl", '{"text": "x", "label": 1}\n', "has the fields text, label, and lack sentence"),
        ("utf16.jsonl", LINES.encode("utf-16"), "it is UTF-16, and no record"),
        ("utf16be.jsonl", LINES.encode("utf-16-be"), "no record can be read"),
        ("binary.jsonl", bytes(range(256)) * 9, "no record can be read"),
        ("program.jsonl", b"\x7fELF" + bytes(range(256)), "it is a program, and no record"),
        ("packed.jsonl", gzip.compress(LINES.encode(), mtime=0), "not UTF-8 at byte 1; give JSON"),
        ("nul.jsonl", bytes(99), "no record can be read"),
        ("halves.jsonl", '{"sentence": "\\ud800", "label": 1}\n' * 2, "half of a surrogate pair"),
        ("other.csv", "a,b\n", "is of no kind that is read here"),
        ("object.json", '{"a": 1}', "holds"),
        ("broken.parquet", "x", "cannot be read as parquet"),
    ],
)
def test_what_is_no_data_set_is_refused(tmp_path, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ProblemsError) as refused:
        read_split(SST2, "dev", str(tmp_path / name))
    assert said in str(refused.value).replace("have the fields", "has the fields")


def test_the_hub_out_of_reach_is_refused_with_the_fix(monkeypatch):
    def unreachable(*arguments, **named):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ProblemsError, match=r"nyu-mll/glue cannot be had.*no route.*--train FILE"):
        read_split(SST2, "train", None)


def test_broken_examples_are_counted_and_named(tmp_path):
    sound = sentences(3)
    broken = [{"sentence": "a film", "label": 2}, {"sentence": 3, "label": 1}]
    path = write_lines(tmp_path / "dev.jsonl", [*sound, *broken])
    with path.open("a") as file:
        file.write("{\n")
    found = parse_examples("dev", read_split(SST2, "dev", str(path)), lambda *of: choices.parse(SST2, *of))
    assert [example.choices[0][0] for example in found.sound] == [record["sentence"] for record in sound]
    assert "dev: 3 broken examples left out" in str(found)
    assert f"{path}:4: label 2 is out of range: it is one of 0..1 (negative, positive)" in str(found)
    assert f"{path}:5: sentence is int" in str(found) and f"{path}:6: not JSON" in str(found)


def test_json_that_is_no_text_or_too_deep_is_a_broken_example(tmp_path):
    path = write_lines(tmp_path / "dev.jsonl", sentences(1))
    deep = '{"sentence": "a film", "label": 1, "x": %s}' % ("[" * 100_000 + "]" * 100_000)
    with path.open("a") as file:
        file.write(
            '{"sentence": "\\ud800 x", "label": 1}\n' + deep + "\n" + deep.replace("[" * 99_900, "") + "\n"
        )
    found = parse_examples("dev", read_split(SST2, "dev", str(path)), lambda *of: choices.parse(SST2, *of))
    assert len(found.sound) == 1 and "dev: 3 broken examples" in str(found)
    assert f"{path}:2: a text with half of a surrogate pair" in str(found)
    assert f"{path}:3: not JSON: maximum recursion depth" in str(found)


def test_a_file_of_broken_examples_alone_is_refused(tmp_path):
    path = write_lines(tmp_path / "dev.jsonl", [{"sentence": "a film", "label": 7}] * 5)
    with pytest.raises(ProblemsError, match="all of its 5 examples are broken: .*label 7 is out") as refused:
        parse_examples("dev", read_split(SST2, "dev", str(path)), lambda *of: choices.parse(SST2, *of))
    assert "--dev" in str(refused.value)


def test_labels_may_be_names_and_are_hidden_in_a_test_alone():
    of = {"sentence": "a film"}
    assert choices.parse(SST2, {**of, "label": "positive"}, 0, True).label == 1
    assert choices.parse(SST2, {**of, "label": -1}, 0, False).label is None
    with pytest.raises(WrongRecord, match="label -1 is out of range"):
        choices.parse(SST2, {**of, "label": -1}, 0, True)


def test_f1_is_of_label_one():
    guesses, labels = np.array([1, 1, 0, 0, 1]), np.array([1, 0, 1, 0, 1])
    assert accuracy(guesses, labels) == 0.6
    precision = recall = 2 / 3
    assert f1(guesses, labels) == pytest.approx(2 * precision * recall / (precision + recall))
    assert f1(np.zeros(5), np.zeros(5)) == 0


def test_race_fills_blanks_and_scores_schools():
    facts = TASKS["race"]
    record = {"article": "a film", "question": "it is _ .", "answer": "B"}
    record["options"] = ["good", "bad", "one", "two"]
    names = ["high1.txt", "high1.txt", "middle2.txt"]
    every = [choices.parse(facts, {**record, "example_id": name}, i, True) for i, name in enumerate(names)]
    assert choices.with_option(record["question"], "bad") == "it is bad ."
    assert choices.with_option("what is it?", "bad") == "what is it? bad"
    logits = np.eye(4)[[1, 0, 1]]
    done = choices.score(facts, "dev", every, logits)
    assert done.metrics == {"accuracy": 2 / 3, "middle_accuracy": 1.0, "high_accuracy": 0.5}
    assert [json.loads(line)["answer"] for line in done.files["race.jsonl"].splitlines()] == ["B", "A", "B"]
    with pytest.raises(WrongRecord, match="its options .* are no list of 4"):
        choices.parse(facts, {**record, "options": ["a", "b", "c"]}, 0, True)
