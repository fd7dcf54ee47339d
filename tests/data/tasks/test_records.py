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
from data.tasks.squad import parse as parse_question
from recipes.problems import ProblemsError
from recipes.tasks import TASKS

SST2 = TASKS["sst2"]
LINES = '{"sentence": "a film", "label": 1}\n' * 3


def read(path, split="dev", facts=SST2):
    return list(read_split(facts, split, str(path)))


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
        {"id": each["id"], "question": each["question"], "context": "a film", "answers": own}
        for each, own in zip(asked, columns, strict=True)
    ]


# Header and a row of each file as GLUE publishes it, and its fields on the hub; x stands for other columns.
GLUE = {
    ("sst2", "train"): ("sentence\tlabel", 'a "film \t1', {"sentence": 'a "film ', "label": 1}),
    ("sst2", "test"): ("index\tsentence", '7\t"a film', {"sentence": '"a film', "idx": 7}),
    ("mrpc", "dev"): (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", "1\tx\tx\tone\ttwo\r",
        {"label": 1, "sentence1": "one", "sentence2": "two"},
    ),
    ("mrpc", "test"): (
        "index\t#1 ID\t#2 ID\t#1 String\t#2 String", "3\tx\tx\tone\ttwo",
        {"idx": 3, "sentence1": "one", "sentence2": "two"},
    ),
    ("qqp", "train"): (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "5\tx\tx\tone\ttwo\t0",
        {"question1": "one", "question2": "two", "label": 0, "idx": 5},
    ),
    ("qqp", "test"): (
        "id\tquestion1\tquestion2", "9\tone\ttwo", {"question1": "one", "question2": "two", "idx": 9},
    ),
    ("mnli", "dev"): (
        "index\tpromptID\tsentence1_parse\tsentence1\tsentence2\tlabel1\tgold_label",
        "2\tx\tx\tone\ttwo\tneutral\tentailment",
        {"premise": "one", "hypothesis": "two", "label": "entailment", "idx": 2},
    ),
    ("mnli", "test_mismatched"): (
        "index\tsentence1\tsentence2", "4\tone\ttwo", {"premise": "one", "hypothesis": "two", "idx": 4},
    ),
    ("rte", "train"): (
        "index\tsentence1\tsentence2\tlabel", "0\tone\ttwo\tnot_entailment",
        {"sentence1": "one", "sentence2": "two", "label": "not_entailment", "idx": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "split"), GLUE)
def test_glues_own_tables_are_the_hubs_schema(name, split, tmp_path):
    """A quotation mark is text."""
    (header, row, fields), facts = GLUE[name, split], TASKS[name]
    path = tmp_path / ("a.txt" if "\ufeff" in header else "a.tsv")
    path.write_text("\n".join([header, row, row, "torn", ""]), newline="")
    found = read_split(facts, split, str(path))
    fields = {name: str(value) for name, value in fields.items()}
    assert len(found) == 3 and all(fields.items() <= each.items() for each in list(found)[:2])
    examples = parse_examples(facts, split, found, choices.parse)
    torn = [] if split.startswith("test") else ["record 3"]  # of a test its empty text is predicted
    assert [each.partition(":")[0] for each in examples.broken] == torn
    assert examples.sound[0].choices == (tuple(fields[text] for text in facts.texts),)
    assert examples.sound[0].label in ((None,) if split.startswith("test") else (0, 1))


def test_races_own_articles_are_the_hubs_schema(tmp_path):
    """In a directory of one school or of both, or in one file."""
    article = {"article": "a film", "questions": ["one _ .", "two?"], "answers": ["B", "A"]}
    article |= {"options": [list("pqrs"), list("tuvw")]}
    for school in ("high", "middle"):
        (tmp_path / "train" / school).mkdir(parents=True)
        content = json.dumps(article | {"id": f"{school}1.txt"})
        (tmp_path / "train" / school / "1.txt").write_text(content)
    (tmp_path / "one.json").write_text(content)
    own = {"article": "a film", "question": "two?", "options": list("tuvw"), "answer": "A"}
    race = TASKS["race"]
    for place, schools in (("train", ("high", "middle")), ("one.json", ("middle",))):
        found = read(tmp_path / place, "train", race)
        assert found[1::2] == [own | {"example_id": f"{school}1.txt"} for school in schools]
    assert read(tmp_path / "train" / "middle" / "1.txt", "train", race) == read(
        tmp_path / "one.json", "train", race
    )
    (tmp_path / "train" / "middle" / "2.txt").write_text(json.dumps(article | {"options": []}))
    with pytest.raises(ProblemsError, match="datasets cannot read it"):
        read(tmp_path / "train", "train", race)


def test_a_submission_has_a_row_for_every_example(tmp_path):
    """Of what cannot be read, too; metrics are those of the others."""
    texts = ["fine", "", None, "  ", "good"]
    records = [{"sentence": text, "label": 1, "idx": 9 - i} for i, text in enumerate(texts)]
    path = write_lines(tmp_path / "test.jsonl", [*records, {"sentence": "odd", "label": 5, "idx": 4}])
    found = parse_examples(SST2, "test", read_split(SST2, "test", str(path)), choices.parse)
    assert [each.choices[0][0] for each in found.sound] == ["fine", "", "", "  ", "good", "odd"]
    assert "test: 2 broken examples predicted from what is readable" in str(found)
    done = choices.score(SST2, "test", found.sound, np.eye(2)[[1, 0, 0, 1, 1, 0]])
    rows = done.files["SST-2.tsv"].splitlines()
    assert [row.split("\t")[0] for row in rows] == ["index", *map(str, (9, 8, 7, 6, 5, 4))]
    assert done.metrics == {"accuracy": 0.75}
    race, options = (
        TASKS["race"],
        {"article": "a", "question": "b", "options": ["c"], "example_id": "high3.txt"},
    )
    write_lines(path, [options | {"options": list("abcd")}, options])
    found = parse_examples(race, "test", read_split(race, "test", str(path)), choices.parse)
    assert [each.choices for each in found.sound][1] == (("a", "b "),) * 4
    squad = TASKS["squad1"]
    write_lines(
        path, [{"id": "q1", "question": "", "context": "a"}, {"id": "q2", "question": None, "context": "b"}]
    )
    found = parse_examples(squad, "test", read_split(squad, "test", str(path)), parse_question)
    assert [each.id for each in found.sound] == ["q1", "q2"] and len(found.broken) == 1


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.jsonl", "", "cannot read it"),
        ("fields.jsonl", '{"text": "x", "label": 1}\n', "has the fields text, label, and lack sentence"),
        ("utf16.jsonl", LINES.encode("utf-16"), "cannot read it"),
        ("binary.jsonl", bytes(range(256)) * 9, "cannot read it"),
        ("packed.jsonl", gzip.compress(b"{" + LINES.encode(), mtime=0), "cannot read it"),
        ("torn.jsonl", LINES + "{\n", "cannot read it"),
        ("other.csv", "a,b\n", "is of no kind that is read here"),
        ("headless.tsv", "a film\t1\n" * 3, "has the fields a film, 1, and lack sentence"),
        ("no_article.txt", "a film", "not JSON"),
        ("object.json", '{"a": 1}', "an article of SQuAD or RACE"),
        ("broken.parquet", "x", "cannot read it"),
    ],
)
def test_what_is_no_data_set_is_refused(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ProblemsError) as refused:
        read_split(SST2, "dev", str(tmp_path / name))
    assert said in str(refused.value).replace("have the fields", "has the fields")


def test_the_hub_out_of_reach_is_refused_with_the_fix(monkeypatch):
    def unreachable(*arguments, **named):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ProblemsError, match=r"glue train: datasets cannot read it: no route; .*--train FILE"):
        read_split(SST2, "train", None)


def test_broken_examples_are_counted_and_named(tmp_path):
    sound = sentences(3)
    broken = [{"sentence": "a film", "label": 2}, {"sentence": None, "label": 1}]
    path = write_lines(tmp_path / "dev.jsonl", [*sound, *broken])
    found = parse_examples(SST2, "dev", read_split(SST2, "dev", str(path)), choices.parse)
    assert [example.choices[0][0] for example in found.sound] == [record["sentence"] for record in sound]
    assert "dev: 2 broken examples left out" in str(found)
    assert "record 4: label 2 is out of range: it is one of 0..1 (negative, positive)" in str(found)
    assert "record 5: sentence is missing" in str(found)


def test_a_file_of_broken_examples_alone_is_refused(tmp_path):
    path = write_lines(tmp_path / "dev.jsonl", [{"sentence": "a film", "label": 7}] * 5)
    with pytest.raises(ProblemsError, match="all of its 5 examples are broken: .*label 7 is out") as refused:
        parse_examples(SST2, "dev", read_split(SST2, "dev", str(path)), choices.parse)
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
