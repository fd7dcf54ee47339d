"""Files of tasks: every form gives the same records; what is wrong is refused by its number."""

from __future__ import annotations

import gzip
import json

import datasets
import numpy as np
import pytest
from tasked import sentences, write_lines

from data.tasks.choices import encode, f1, score, with_option
from data.tasks.records import HIDDEN, read_split
from recipes.problems import ProblemsError
from recipes.schema import Recipe
from recipes.tasks import TASKS

SST2, RACE, SQUAD = TASKS["sst2"], TASKS["race"], TASKS["squad1"]
LINES = '{"sentence": "a film", "label": 1}\n' * 3


def read(path, split="dev", facts=SST2):
    return list(read_split(facts, split, str(path)).records)


def of_task(name):
    model = dict(family="bert", layers=2, hidden=32, heads=4, vocab_size=300, sentence_head="none")
    head = dict(task_head=TASKS[name].head, head_classes=TASKS[name].classes)
    own = dict(title="t", sequence_length=32, steps=10, batch={"global": 4}, optimizer={"lr": 1e-3})
    return Recipe.model_validate({**own, "model": model | head, "task": {"name": name}})


def test_every_form_gives_the_same_records(tmp_path):
    records = sentences(7)
    write_lines(tmp_path / "a.jsonl", records)
    (tmp_path / "a.json").write_text(json.dumps(records))
    (tmp_path / "wrapped.json").write_text(json.dumps({"data": records}))
    for name in ("a.jsonl", "a.json", "wrapped.json"):
        found = read(tmp_path / name)
        assert found == [{"id": str(r["idx"])} | {k: r[k] for k in ("sentence", "label")} for r in records]


def test_squads_own_json_is_the_hubs_schema(tmp_path):
    """A test that says no answers hides them."""
    asked = [{"id": "q1", "question": "what?", "answers": [{"text": "film", "answer_start": 2}]}]
    asked += [{"id": "q2", "question": "why?", "answers": []}, {"id": "q3", "question": "who?"}]
    article = {"title": "t", "paragraphs": [{"context": "a film", "qas": asked}]}
    (tmp_path / "own.json").write_text(json.dumps({"version": "v2.0", "data": [article]}))
    columns = [{"text": ["film"], "answer_start": [2]}, {"text": [], "answer_start": []}, None]
    assert read(tmp_path / "own.json", "test", TASKS["squad2"]) == [
        {"id": each["id"], "question": each["question"], "context": "a film", "label": own}
        for each, own in zip(asked, columns, strict=True)
    ]
    hub = [{key: each[key] for key in ("id", "question")} for each in asked]
    rows = [each | {"context": "a film", "answers": own} for each, own in zip(hub, columns, strict=True)]
    lines = write_lines(tmp_path / "own.jsonl", rows)
    assert read(lines, "test", TASKS["squad2"]) == read(tmp_path / "own.json", "test", TASKS["squad2"])


# Header and a row of each file as GLUE publishes it, and its fields on the hub; x stands for other columns.
GLUE = {
    ("sst2", "train"): ("sentence\tlabel", 'a "film \t1', {"sentence": 'a "film ', "label": 1}),
    ("sst2", "test"): ("index\tsentence", '7\t"a film', {"sentence": '"a film', "id": 7}),
    ("mrpc", "dev"): (
        "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", "1\tx\tx\tone\ttwo\r",
        {"label": 1, "sentence1": "one", "sentence2": "two"},
    ),
    ("mrpc", "test"): (
        "index\t#1 ID\t#2 ID\t#1 String\t#2 String", "3\tx\tx\tone\ttwo",
        {"id": 3, "sentence1": "one", "sentence2": "two"},
    ),
    ("qqp", "train"): (
        "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "5\tx\tx\tone\ttwo\t0",
        {"question1": "one", "question2": "two", "label": 0, "id": 5},
    ),
    ("qqp", "test"): (
        "id\tquestion1\tquestion2", "9\tone\ttwo", {"question1": "one", "question2": "two", "id": 9},
    ),
    ("mnli", "dev"): (
        "index\tpromptID\tsentence1_parse\tsentence1\tsentence2\tlabel1\tgold_label",
        "2\tx\tx\tone\ttwo\tneutral\tentailment",
        {"premise": "one", "hypothesis": "two", "label": "entailment", "id": 2},
    ),
    ("mnli", "test_mismatched"): (
        "index\tsentence1\tsentence2", "4\tone\ttwo", {"premise": "one", "hypothesis": "two", "id": 4},
    ),
    ("rte", "train"): (
        "index\tsentence1\tsentence2\tlabel", "0\tone\ttwo\tnot_entailment",
        {"sentence1": "one", "sentence2": "two", "label": "not_entailment", "id": 0},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("name", "split"), GLUE)
def test_glues_own_tables_are_the_hubs_schema(name, split, tmp_path):
    """A quotation mark is text."""
    (header, row, fields), facts = GLUE[name, split], TASKS[name]
    path = tmp_path / ("a.txt" if "\ufeff" in header else "a.tsv")
    path.write_text("\n".join([header, row, row, "torn", ""]), newline="")
    found = read_split(facts, split, str(path))
    test = split.startswith("test")
    assert (len(found.records), found.incomplete) == ((3, 0) if test else (2, 1))
    expected = {key: str(value) for key, value in fields.items()}
    if "label" in fields:
        label = fields["label"]
        expected["label"] = facts.labels.index(label) if label in facts.labels else int(label)
    assert expected.items() <= found.records[1].items()
    assert not test or found.records[1]["label"] == HIDDEN
    path.write_text(f"{header}\n{row.strip()}\tmore\n")
    with pytest.raises(ProblemsError, match="a line has more fields than the first one"):
        read_split(facts, split, str(path))


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
    hub = [own | {"example_id": f"{school}1.txt"} for school in ("high", "middle")]
    lines = write_lines(tmp_path / "hub.jsonl", hub)
    found = read(tmp_path / "train", "train", RACE)
    assert found[1::2] == read(lines, "train", RACE) and found[1]["label"] == 0
    assert read(tmp_path / "one.json", "train", RACE) == found[2:]
    (tmp_path / "train" / "middle" / "2.txt").write_text(json.dumps(article | {"options": []}))
    with pytest.raises(ProblemsError, match="cannot be read"):
        read(tmp_path / "train", "train", RACE)
    write_lines(lines, [own | {"options": ["c"]}])
    with pytest.raises(ProblemsError, match="cannot be read: Couldn.t cast .*length=4"):
        read(lines, "test", RACE)


def test_a_submission_has_a_row_for_every_example(tmp_path):
    """Of a text that is missing, too; metrics are those of the examples with a label."""
    texts = ["fine", "", None, "  ", "good", "odd"]
    records = [{"sentence": text, "label": 1, "idx": 9 - i} for i, text in enumerate(texts)]
    records[-1]["label"] = -1
    found = read_split(SST2, "test", str(write_lines(tmp_path / "test.jsonl", records)))
    assert found.incomplete == 0
    done = score(of_task("sst2"), found, None, np.eye(2)[[1, 0, 0, 1, 1, 0]], None)
    rows = done.files["SST-2.tsv"].splitlines()
    assert [row.split("\t")[0] for row in rows] == ["index", *map(str, (9, 8, 7, 6, 5, 4))]
    assert done.metrics == {"accuracy": 0.6}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.jsonl", "", "cannot be read"),
        ("fields.jsonl", '{"text": "x", "label": 1}\n', "of sentence, label it lacks sentence"),
        ("utf16.jsonl", LINES.encode("utf-16"), "cannot be read"),
        ("binary.jsonl", bytes(range(256)) * 9, "cannot be read"),
        ("packed.jsonl", gzip.compress(b"{" + LINES.encode(), mtime=0), "cannot be read"),
        ("torn.jsonl", LINES + "{\n", "cannot be read"),
        ("other.csv", "a,b\n", "is of no kind that is read here"),
        ("headless.tsv", "a film\t1\n" * 3, "of sentence, label it lacks sentence, label"),
        ("utf16.tsv", "sentence\tlabel\na film\t1\n".encode("utf-16"), "cannot be read"),
        ("no_table.txt", "a film", "of sentence, label it lacks sentence"),
        ("object.json", '{"a": 1}', "an article of SQuAD or RACE"),
        ("no_texts.jsonl", '{"sentence": " ", "label": 1}\n' * 3, "holds no complete record"),
    ],
)
def test_what_is_no_data_set_is_refused(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ProblemsError) as refused:
        read_split(SST2, "dev", str(tmp_path / name))
    assert said in str(refused.value)


def test_the_features_of_the_hub_are_cast(monkeypatch):
    """Labels of GLUE are numbers with names there, -1 of its tests; lists of RACE have no length."""
    text, number = datasets.Value("string"), datasets.Value("int32")
    names = datasets.ClassLabel(names=["negative", "positive"])
    answers = {"text": datasets.List(text), "answer_start": datasets.List(number)}
    hub = {
        "sst2": ({"sentence": text, "label": names, "idx": number}, ["a film", -1, 7], HIDDEN),
        "race": (
            {"article": text, "question": text, "options": datasets.List(text), "answer": text},
            ["a film", "two?", list("tuvw"), "C"],
            2,
        ),
        "squad2": (
            {"id": text, "context": text, "question": text, "answers": answers},
            ["q", "a film", "?", {"text": ["film"], "answer_start": [2]}],
            {"text": ["film"], "answer_start": [2]},
        ),
    }
    for task, (features, values, label) in hub.items():
        row = dict(zip(features, values, strict=True))
        made = datasets.Dataset.from_list([row], features=datasets.Features(features))
        monkeypatch.setattr(datasets, "load_dataset", lambda *_, made=made, **__: made)
        split = "test" if task == "sst2" else "dev"
        (found,) = read_split(TASKS[task], split, None).records
        assert found["label"] == label and found["id"] == {"sst2": "7", "race": "0", "squad2": "q"}[task]


def test_the_hub_out_of_reach_is_refused_with_the_fix(monkeypatch):
    def unreachable(*arguments, **named):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ProblemsError, match=r"glue train: cannot be read: no route; .*--train FILE"):
        read_split(SST2, "train", None)


WRONG = [
    ("sst2", "dev", {"label": 2}, r"label '2' is out of range: it is one of 0..1 \(negative, positive\)"),
    ("sst2", "dev", {"label": -1}, "label '-1' is out of range"),
    ("sst2", "test", {"label": 5}, "label '5' is out of range"),
    ("race", "dev", {"answer": "E"}, "label 'E' is out of range"),
    ("squad1", "dev", {"answers": {"text": ["x"], "answer_start": []}}, "no texts with an answer_start each"),
    ("squad1", "dev", {"answers": {"text": ["film"], "answer_start": [0]}}, "'film' is not at character 0"),
    ("squad1", "test", {"answers": {"text": ["film"], "answer_start": [-4]}}, "is not at character -4"),
    ("squad1", "dev", {"answers": {"text": [], "answer_start": []}}, "it has no answer"),
]


@pytest.mark.parametrize(("task", "split", "change", "said"), WRONG)
def test_wrong_records_are_refused_by_their_numbers_all_at_once(tmp_path, task, split, change, said):
    """Those without a text are left out, and are no less counted in the numbers of the others."""
    own = {
        "sst2": {"sentence": "a film", "label": 1},
        "race": {"article": "a film", "question": "two?", "options": list("tuvw"), "answer": "A"},
        "squad1": {"question": "?", "context": "a film", "answers": {"text": ["film"], "answer_start": [2]}},
    }[task]
    sound = write_lines(tmp_path / "sound.jsonl", [own, {**own, TASKS[task].texts[0]: None}])
    assert read_split(TASKS[task], "dev", str(sound)).incomplete == 1
    records = [own, {**own, TASKS[task].texts[0]: None}, {**own, **change}, own, {**own, **change}]
    wrong = write_lines(tmp_path / "wrong.jsonl", records)
    with pytest.raises(ProblemsError, match=f"2 wrong records: record 3: .*{said}.*; record 5: ") as refused:
        read_split(TASKS[task], split, str(wrong))
    assert f"--{split}" in str(refused.value) and "take them out of the file" in str(refused.value)


def test_f1_is_of_label_one():
    guesses, labels = np.array([1, 1, 0, 0, 1]), np.array([1, 0, 1, 0, 1])
    precision = recall = 2 / 3
    assert f1(guesses, labels) == pytest.approx(2 * precision * recall / (precision + recall))
    assert f1(np.zeros(5), np.zeros(5)) == 0


def test_race_fills_blanks_and_scores_schools(tmp_path):
    record = {"article": "a film", "question": "it is _ .", "answer": "B"}
    record["options"] = ["good", "bad", "one", "two"]
    names = ["high1.txt", "high1.txt", "middle2.txt"]
    lines = write_lines(tmp_path / "dev.jsonl", [{**record, "example_id": name} for name in names])
    assert with_option("what is it?", "bad") == "what is it? bad"
    split = read_split(RACE, "dev", str(lines))
    texts = []

    def tokenizer(*columns, **how):
        texts.extend(zip(*columns, strict=True))
        return {"input_ids": [*range(len(columns[0]))]}

    made = encode(of_task("race"), tokenizer, split.records[:], [0, 1, 2])
    assert texts[:3] == [("a film", f"it is {option} .") for option in ("good", "bad", "one")]
    assert made == {"input_ids": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], "labels": [1, 1, 1]}
    done = score(of_task("race"), split, None, np.eye(4)[[1, 0, 1]], None)
    assert done.metrics == {"accuracy": 2 / 3, "middle_accuracy": 1.0, "high_accuracy": 0.5}
    assert [json.loads(line)["answer"] for line in done.files["race.jsonl"].splitlines()] == ["B", "A", "B"]
