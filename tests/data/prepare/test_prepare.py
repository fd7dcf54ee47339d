"""launch/prepare_data.py and data/prepare/.

What comes out, what is left out and said, and that no end in between shows.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import html
import json
import multiprocessing
import os
import pickle
import random
import re
import signal
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from launching import ROOT, environment, run
from texted import jsonl

from data.prepare import chunk_file, pipeline
from data.prepare.settings import PreparationFailed, Settings
from data.text.packaged import speeches
from data.text.trained_vocabulary import train_wordpiece, wordpiece_tokenizer
from data.text.vocabulary_files import read_tokenizer
from data.tokens.store import open_store
from recipes.problems import ProblemsError
from recipes.schema import Origin, Tokenizer

MEGABYTE = 1_000_000


class Quiet:
    """A screen that remembers what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def phase(self, name: str, total: float | None, unit: str) -> None: ...

    def at(self, value: float, note: str = "") -> None: ...


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """English documents of 1 to 3 KB, all different."""
    files = (path.read_text(encoding="utf-8") for path in speeches()[::40])
    paragraphs = [p for text in files for p in text.split("\n\n") if len(p) > 300]
    return ["\n\n".join(paragraphs[k : k + 3]) for k in range(0, 240, 3)]


@pytest.fixture(scope="module")
def vocabulary(texts, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("vocabulary")
    wordpiece_tokenizer(train_wordpiece(texts, 800).get_vocab(), lowercase=True).save_pretrained(folder)
    return folder


def settings(name: Path | str, vocabulary: Path, **changes) -> Settings:
    origin = Origin(source="jsonl", name=str(name))
    changes = {"samples": "bert", "min_tokens": 20, "chunk_mb": 0.02, "workers": 0, **changes}
    return Settings(origins=(origin,), tokenizer=Tokenizer(kind="file", path=str(vocabulary)), **changes)


def prepare(chosen: Settings, out: Path, **more) -> dict:
    report = pipeline.prepare(chosen, out, Quiet(), **more)
    assert report is not None
    return report


def contents(out: Path) -> dict[str, str]:
    """Digests of all files but the report, which holds times."""
    files = (path for path in out.rglob("*") if path.is_file() and not path.name.startswith("report."))
    return {str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def dropped(report: dict) -> dict[str, int]:
    steps = report["steps"].values()
    return {reason: counts[0] for step in steps for reason, counts in step["dropped"].items()}


def edited(text: str, words: int) -> str:
    """The text with some words replaced, far from each other."""
    parts = text.split(" ")
    for k in range(words):
        parts[(2 * k + 1) * len(parts) // (2 * words)] = "replaced"
    return " ".join(parts)


@pytest.fixture(scope="module")
def corpus(texts, tmp_path_factory) -> Path:
    """40 good documents and planted ones, in two files; `PLANTED` says what and `GOOD` how many."""
    folder = tmp_path_factory.mktemp("corpus")
    good = texts[:40]
    planted = [good[3], edited(good[5], 3), "Too short to keep.", edited(good[6], 40)]
    jsonl(folder / "a.jsonl", [*good[:20], *planted])
    german = "Die Bundesregierung hat beschlossen, dass die Steuern im nächsten Jahr nicht steigen. " * 12
    mojibake = "It said â€œwe the peopleâ€\x9d. " + texts[41]
    jsonl(folder / "b.jsonl", [*good[20:], german, good[3] + " ", mojibake])
    with open(folder / "b.jsonl", "ab") as file:
        file.write(b'{"text": "cut off\n{"text": "' + b"\xff\xfe" + b'"}\n')
        file.write(b'{"title": "no text"}\n{"text": "with a \\u0000 inside"}\n')
        file.write(b'{"text": "' + b"x" * (2 * MEGABYTE) + b'"}\n{"text": ""}\n')
    (folder / "c.jsonl").write_bytes(b"")
    path = jsonl(folder / "d.jsonl.gz", texts[42:60])
    whole = gzip.compress(path.read_bytes(), mtime=0)
    path.write_bytes(whole[: len(whole) * 2 // 3])
    return folder


@pytest.fixture(scope="module")
def evaluation(texts, tmp_path_factory) -> Path:
    # Found although case and punctuation differ.
    inside = " ".join(w.upper().strip(",.") for w in texts[11].split()[30:50])
    folder = tmp_path_factory.mktemp("evaluation")
    return jsonl(folder / "lambada.jsonl", [inside, "far too short", texts[70]])


@pytest.fixture(scope="module")
def full(corpus, vocabulary, evaluation) -> Settings:
    """All steps, over all kinds of records."""
    written = {"write_articles": True, "write_sentences": True}
    sets = (str(evaluation),)
    return settings(corpus / "*", vocabulary, decontaminate=sets, max_broken=0.2, max_record_mb=1, **written)


@pytest.fixture(scope="module")
def finished(full, tmp_path_factory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("finished") / "store"
    return out, prepare(full, out)


def test_everything_planted_is_found_and_nothing_else(finished, texts):
    out, report = finished
    found = dropped(report)
    shorter_gzip = report["steps"]["read"]["documents_out"] - (24 + 23)
    kinds = ("not a JSON object", "invalid UTF-8", "no field 'text'", "NUL bytes", "too large", "empty file")
    (contaminated,) = (reason for reason in found if reason.startswith("shares 13 words in a row with"))
    assert "lambada.jsonl" in contaminated
    assert found == {
        **{f"broken: {kind}": 1 for kind in (*kinds, "damaged file")},
        "not a document (empty, a redirect)": 1,
        "language is not en": 1,
        "fewer than 20 tokens": 1,
        contaminated: 1,
        "exact copy of an earlier document": 1,
        "near-duplicate of an earlier document": 2,
    }
    assert shorter_gzip > 5  # what could be read of the truncated archive
    assert report["store"]["documents"] == 40 - 1 + 2 + shorter_gzip
    assert report["broken"]["records"] == 7
    assert report["warnings"] and "2 input files" in report["warnings"][0]


FORMS = {
    "composed": lambda text: unicodedata.normalize("NFC", text),
    "decomposed": lambda text: unicodedata.normalize("NFD", text),
    "mojibake": lambda text: text.encode().decode("cp1252"),
    "entities": lambda text: html.escape(text).encode("ascii", "xmlcharrefreplace").decode(),
    "curly": lambda text: text.replace('"', "“"),
}


@pytest.mark.parametrize("repair", [True, False])
@pytest.mark.parametrize("there", FORMS)
def test_evaluation_texts_are_compared_as_the_documents_are(there, repair, texts, vocabulary, tmp_path):
    """In whatever form each stands. Without repair, mojibake differs from what it was."""
    passage = "The café owner's fiancée from Curaçao & her friends said \"we hear the señor's naïve résumé\""
    names = [name for name in FORMS if repair or (name == "mojibake") == (there == "mojibake")]
    documents = [f"<p>{texts[k][:900]} {FORMS[n](passage)} {texts[k][900:]}" for k, n in enumerate(names)]
    source = jsonl(tmp_path / "in.jsonl", [*documents, *texts[20:24]])
    sets = (str(jsonl(tmp_path / "set.jsonl", [FORMS[there](passage)])),)
    chosen = settings(source, vocabulary, decontaminate=sets, repair=repair, dedup=None)
    assert list(dropped(prepare(chosen, tmp_path / "out")).values()) == [len(names)]


def test_text_of_many_scripts_is_decontaminated(vocabulary, tmp_path):
    chinese = "今天天气很好，我们去公园玩吧！你想去吗？好的，我们一起去看那里的花和老树。"
    thai = "วันนี้อากาศดีมากเราไปเที่ยวสวนสาธารณะกันไหมแล้วไปดูดอกไม้และต้นไม้เก่าแก่ที่นั่นด้วยกัน"
    mixed = "我们用 PyTorch 和 DeepSpeed 训练一个 GPT 模型，然后 evaluate it on LAMBADA 和其他的数据"
    kept = [chinese[:24] + "然后", chinese[::-1], thai[:40], mixed[:40]]
    texts = [f"前面的文字 {text} 后面的文字" for text in (chinese, thai, mixed, *kept)]
    source = jsonl(tmp_path / "in.jsonl", texts)
    sets = jsonl(tmp_path / "set", (chinese, thai, mixed), "q")
    chosen = settings(source, vocabulary, decontaminate=(str(sets),), dedup=None)
    report = prepare(dataclasses.replace(chosen, language=None, min_tokens=1), tmp_path / "out")
    assert list(dropped(report).values()) == [3] and report["store"]["documents"] == 4
    (warning,) = report["warnings"]  # of a vocabulary trained on English
    assert re.match(r"[4-9]\d\.\d% of the tokens are \[UNK\]", warning)
    assert re.search(r"[4-9]\d\.\d\d% of the tokens are unknown", (tmp_path / "out/report.txt").read_text())


def test_steps_account_for_every_document_and_byte(finished):
    _, report = finished
    steps = list(report["steps"].values())
    for step, following in zip(steps, steps[1:], strict=False):
        left = step["documents_in"] - sum(n for n, _ in step["dropped"].values())
        assert left == step["documents_out"] == following["documents_in"]
        assert step["bytes_out"] == following["bytes_in"]
    for step in steps[2:]:
        assert step["bytes_in"] - sum(size for _, size in step["dropped"].values()) == step["bytes_out"]
    assert steps[-1]["bytes_out"] == report["store"]["text_bytes"]
    assert report["steps"]["repair"]["changed"] == 1


def test_rejected_records_are_kept_aside_with_file_and_line(finished, corpus):
    out, _ = finished
    broken = {(Path(e["file"]).name, e["number"]): e for e in lines(out / "rejected/broken.jsonl")}
    start = 24  # the first broken line of b.jsonl
    assert broken["b.jsonl", start]["excerpt"].strip() == '{"text": "cut off'
    assert "excerpt_base64" in broken["b.jsonl", start + 1]
    long = broken["b.jsonl", start + 4]
    assert long["size"] > 2 * MEGABYTE and len(long["excerpt"]) == 64 << 10
    assert ("c.jsonl", 1) in broken and any(name == "d.jsonl.gz" for name, _ in broken)
    duplicates = {(Path(d["file"]).name, d["number"]): d for d in lines(out / "rejected/deduplicate.jsonl")}
    assert {key: (d["of"]["number"], d["reason"].split()[0]) for key, d in duplicates.items()} == {
        ("a.jsonl", 21): (4, "exact"),
        ("a.jsonl", 22): (6, "near-duplicate"),
        ("b.jsonl", 22): (4, "near-duplicate"),
    }
    (contaminated,) = lines(out / "rejected/decontaminate.jsonl")
    assert contaminated["number"] == 12 and len(contaminated["detail"].split()) >= 13


def test_store_holds_the_kept_documents_in_order(finished, texts, vocabulary):
    out, report = finished
    store, tokenizer = open_store(out / "store"), read_tokenizer(out / "tokenizer")
    assert store.documents == report["store"]["documents"] and store.tokens == report["store"]["tokens"]
    assert f"{store.checksum().bin:08x}" == report["store"]["crc32"]["bin"]
    articles = [entry["text"] for entry in lines(out / "articles.jsonl")]
    kept = [texts[k] for k in range(20) if k != 11]
    assert articles[:19] == kept
    assert any(text.startswith('It said "we the people') for text in articles)  # mended
    for d in (0, 18, store.documents - 1):
        assert store.document(d).tolist() == tokenizer(articles[d], add_special_tokens=False).input_ids
    assert len(store) == report["store"]["sequences"] > 3 * store.documents  # sentences, not whole documents


def test_result_does_not_depend_on_workers(full, finished, tmp_path):
    prepare(dataclasses.replace(full, workers=3), tmp_path / "store")
    assert contents(tmp_path / "store") == contents(finished[0])


def test_stopped_at_every_commit_and_continued(full, finished, tmp_path, monkeypatch):
    """Whatever rename is a run's last one, the next run ends with the same files; OUT is whole or absent."""

    class Stop(BaseException):
        pass

    replace, renames, ends = os.replace, 0, 0
    out = tmp_path / "store"

    def one_more(source, target):
        nonlocal renames
        if renames == 0:
            raise Stop
        renames -= 1
        replace(source, target)

    monkeypatch.setattr(os, "replace", one_more)
    report = None
    while report is None:
        renames = 1 + ends % 3
        try:
            report = prepare(full, out)
        except Stop:
            ends += 1
            assert not out.exists()
            assert ends < 40
    assert ends > 5 and report["run"]["chunks_found"] == report["run"]["chunks"]
    assert contents(out) == contents(finished[0])
    assert not (tmp_path / "store.partial").exists()


def command(chosen: Settings, out: Path, chunk_mb: float = 0.2) -> list[str]:
    flags = [
        "--source", "jsonl", "--name", *(str(o.name) for o in chosen.origins), "--samples", chosen.samples,
        "--tokenizer", f"file:{chosen.tokenizer.path}", "--min_tokens", chosen.min_tokens,
        "--decontaminate", *chosen.decontaminate, "--max_broken", chosen.max_broken,
        "--max_record_mb", chosen.max_record_mb, "--write_articles", "--write_sentences",
        "--workers", 2, "--chunk_mb", chunk_mb, "--out", out,
    ]  # fmt: skip
    return [sys.executable, str(ROOT / "launch/prepare_data.py"), *map(str, flags)]


def descendants(process: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    children = map(int, Path(f"/proc/{process}/task/{process}/children").read_text().split())
    return [found for child in children for found in (child, *descendants(child))]


def test_workers_import_the_clone_s_packages(tmp_path):
    """Python looks into the working directory of their server first, where a package may be named data."""
    (tmp_path / "elsewhere" / "data").mkdir(parents=True)
    (tmp_path / "elsewhere" / "data" / "__init__.py").touch()
    (tmp_path / "program.py").write_text(f"""
import multiprocessing
import data
from data.prepare import fork_server
def check():
    assert data.__file__.startswith({str(ROOT)!r}), data.__file__
if __name__ == "__main__":
    fork_server.start()
    worker = multiprocessing.get_context("forkserver").Process(target=check)
    worker.start()
    worker.join()
    raise SystemExit(worker.exitcode)
""")
    done = run([sys.executable, "-u", str(tmp_path / "program.py")], cwd=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_killed_and_continued(full, vocabulary, evaluation, texts, tmp_path):
    """SIGKILL once chunks are there, SIGTERM once there are two more, then to the end."""
    rng = random.Random(5)
    many = [" ".join(rng.sample(text.split(" "), len(text.split(" ")))) for text in texts * 24]
    origin = Origin(source="jsonl", name=str(jsonl(tmp_path / "many.jsonl", many)))
    chosen = dataclasses.replace(full, origins=(origin,))
    out, chunks = tmp_path / "store", tmp_path / "store.partial/chunks"
    for number in (signal.SIGKILL, signal.SIGTERM):
        wanted = len(list(chunks.rglob("*.chunk"))) + 2  # more than before: the process is past its start
        pipes = dict(stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        process = subprocess.Popen(command(chosen, out), env=environment(), cwd=tmp_path, **pipes)
        deadline = time.monotonic() + 90
        while len(list(chunks.rglob("*.chunk"))) < wanted and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        workers = descendants(process.pid)
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
        assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 143), said
        assert not out.exists()
        deadline = time.monotonic() + 20
        while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not [worker for worker in workers if Path(f"/proc/{worker}").exists()], "it leaves no process"
    assert "the same command resumes" in said
    found = len(list(chunks.rglob("*.chunk")))
    how = dict(capture_output=True, text=True, timeout=180)
    done = subprocess.run(command(chosen, out), env=environment(), cwd=tmp_path, **how)
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "report.json").read_text())["run"]["chunks_found"] == found >= 4
    prepare(dataclasses.replace(chosen, chunk_mb=0.5), tmp_path / "at_once")
    assert contents(tmp_path / "at_once") == contents(out)


def test_both_written_forms_give_the_same_store(finished, full, vocabulary, tmp_path):
    out, _ = finished
    articles = prepare(settings(out / "articles.jsonl", vocabulary), tmp_path / "articles")
    assert not dropped(articles)
    lined = settings(out / "sentences.jsonl", vocabulary)
    origin = lined.origin.model_copy(update={"sentences": "lines"})
    prepare(dataclasses.replace(lined, origins=(origin,)), tmp_path / "sentences")
    for suffix in (".bin", ".idx"):
        expected = (out / f"store{suffix}").read_bytes()
        assert (tmp_path / "articles" / f"store{suffix}").read_bytes() == expected
        assert (tmp_path / "sentences" / f"store{suffix}").read_bytes() == expected


def test_gpt_store_with_a_trained_vocabulary(texts, tmp_path):
    name = jsonl(tmp_path / "in.jsonl", texts[:30])
    origin, tokenizer = Origin(source="jsonl", name=str(name)), Tokenizer(kind="trained_bpe")
    chosen = Settings((origin,), samples="gpt", tokenizer=tokenizer, vocab_size=400, workers=0)
    report = prepare(chosen, tmp_path / "store")
    store, tokenizer = open_store(tmp_path / "store/store"), read_tokenizer(tmp_path / "store/tokenizer")
    assert store.documents == len(store) == 30 and report["store"]["vocab_size"] == len(tokenizer) == 400
    assert tokenizer.decode(store.document(7).tolist()) == texts[7] + tokenizer.eos_token
    assert "first 256 MB" in report["tokenizer"]["trained_on"]
    longest = max(store.sizes.tolist()) - 1  # the end-of-document token is not counted
    one = prepare(dataclasses.replace(chosen, min_tokens=longest), tmp_path / "one")
    assert one["store"]["documents"] == 1
    with pytest.raises(PreparationFailed, match="no document passed"):
        prepare(dataclasses.replace(chosen, min_tokens=longest + 1), tmp_path / "none")


def test_too_many_broken_records_publish_nothing_and_keep_the_work(full, finished, tmp_path):
    strict = dataclasses.replace(full, max_broken=0.01)
    said = r"(?s)7 of \d+ records are broken.*b\.jsonl:24: not a JSON object.*--max_broken"
    with pytest.raises(PreparationFailed, match=said):
        prepare(strict, tmp_path / "store")
    assert not (tmp_path / "store").exists()
    report = prepare(full, tmp_path / "store")
    assert report["run"]["chunks_found"] == report["run"]["chunks"] > 1
    assert contents(tmp_path / "store") == contents(finished[0])


def test_damaged_chunks_are_made_again(full, finished, tmp_path):
    """Two whose heads cannot be read, and one with an array that is read at the end alone."""
    with pytest.raises(PreparationFailed, match="are broken"):
        prepare(dataclasses.replace(full, max_broken=0.01), tmp_path / "store")
    cut_off, flipped, emptied = sorted((tmp_path / "store.partial/chunks").rglob("*.chunk"))[1:4]
    cut_off.write_bytes(cut_off.read_bytes()[: cut_off.stat().st_size // 2])
    emptied.write_bytes(b"")
    whole = bytearray(flipped.read_bytes())
    whole[whole.index(b"tokens.npy") + 300] ^= 1
    flipped.write_bytes(whole)
    screen = Quiet()
    with pytest.raises(PreparationFailed, match="the same command makes it again"):
        pipeline.prepare(full, tmp_path / "store", screen, force=True)
    for chunk in (cut_off, emptied):
        assert any(str(chunk) in line and "made again" in line for line in screen.said)
    assert not flipped.exists()
    pipeline.prepare(full, tmp_path / "store", screen)
    assert contents(tmp_path / "store") == contents(finished[0])


def unfinished(texts, vocabulary, folder: Path, **changes) -> tuple[Settings, list[Path]]:
    """Settings of a preparation that stopped after its chunks, and these."""
    chosen = settings(jsonl(folder / "in.jsonl", texts[:40]), vocabulary, **changes)
    with pytest.raises(PreparationFailed, match="no document passed"):
        prepare(dataclasses.replace(chosen, min_tokens=5000), folder / "store")
    chunks = sorted((folder / "store.partial/chunks").rglob("*.chunk"))
    assert len(chunks) > 3
    return dataclasses.replace(chosen, min_tokens=5000), chunks


def test_a_chunk_in_the_place_of_another_is_made_again(texts, vocabulary, tmp_path):
    """One of the same preparation, and one of the same number of another."""
    (tmp_path / "other").mkdir()
    _, others = unfinished(texts[::-1], vocabulary, tmp_path / "other")
    chosen, chunks = unfinished(texts, vocabulary, tmp_path)
    held = [chunk_file.read(chunks[0].parents[1], number).end for number in range(len(chunks))]
    chunks[2].write_bytes(chunks[1].read_bytes())
    chunks[3].write_bytes(others[3].read_bytes())
    screen = Quiet()
    with pytest.raises(PreparationFailed, match="no document passed"):
        pipeline.prepare(chosen, tmp_path / "store", screen)
    said = [line for line in screen.said if "made again" in line]
    assert ["holds chunk 1" in said[0], "of another preparation" in said[1]] == [True, True], said
    assert [chunk_file.read(chunks[0].parents[1], number).end for number in range(len(chunks))] == held


def test_input_that_changes_under_its_size_and_time_is_noticed(texts, vocabulary, tmp_path):
    chosen, _ = unfinished(texts, vocabulary, tmp_path)
    name = tmp_path / "in.jsonl"
    before, content = name.stat(), name.read_text()
    name.write_text(content.replace("the", "teh", 1))
    os.utime(name, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match="(?s)unfinished work of another command.*inputs.*sha256"):
        prepare(chosen, tmp_path / "store")


def test_no_pickle_of_the_workspace_is_read(texts, vocabulary, tmp_path):
    chosen, chunks = unfinished(texts, vocabulary, tmp_path, workers=1)
    planted = tmp_path / "store.partial/chunks/plan.pickle"
    planted.write_bytes(pickle.dumps(Path(tmp_path)))
    chunks[1].unlink()
    with pytest.raises(PreparationFailed, match="no document passed"):
        prepare(chosen, tmp_path / "store")
    assert planted.read_bytes() == pickle.dumps(Path(tmp_path)) and chunks[1].exists()


def test_too_many_broken_records_end_a_long_run_early(vocabulary, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "EARLY_RECORDS", 500)
    jsonl(tmp_path / "in.jsonl", ["some text"])
    with open(tmp_path / "in.jsonl", "a") as file:
        file.write("no JSON at all\n" * 50_000)
    with pytest.raises(PreparationFailed, match="are broken"):
        prepare(settings(tmp_path / "in.jsonl", vocabulary), tmp_path / "store")
    assert len(list((tmp_path / "store.partial/chunks").rglob("*.chunk"))) == 1


def test_what_is_there_already_is_never_overwritten_silently(texts, vocabulary, tmp_path):
    chosen = settings(jsonl(tmp_path / "in.jsonl", texts[:6]), vocabulary)
    out = tmp_path / "store"
    prepare(chosen, out)
    before = contents(out)
    assert pipeline.prepare(chosen, out, Quiet()) is None
    assert pipeline.prepare(dataclasses.replace(chosen, workers=1), out, Quiet()) is None
    other = dataclasses.replace(chosen, min_tokens=500)
    with pytest.raises(ValueError, match=r"(?s)another .*min_tokens: 20 there, 500 here.*--force"):
        prepare(other, out)
    with pytest.raises(PreparationFailed, match="fewer than 5000 tokens: 6"):
        prepare(dataclasses.replace(chosen, min_tokens=5000), out, force=True)
    assert contents(out) == before  # until the other one is complete
    with pytest.raises(PreparationFailed, match="no document passed"):
        prepare(dataclasses.replace(chosen, min_tokens=5000), tmp_path / "new")
    with pytest.raises(ValueError, match=r"(?s)new\.partial is .*min_tokens: 5000 there, 500 here"):
        prepare(other, tmp_path / "new")
    prepare(other, out, force=True)
    assert contents(out) != before and not list(tmp_path.glob("store*"))[1:]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("kept")
    with pytest.raises(ValueError, match="was not made by prepare_data"):
        prepare(chosen, tmp_path / "mine", force=True)


def test_work_of_another_command_survives_a_finished_one(texts, vocabulary, tmp_path):
    chosen = settings(jsonl(tmp_path / "in.jsonl", texts[:6]), vocabulary)
    prepare(chosen, tmp_path / "store")
    with pytest.raises(PreparationFailed, match="no document passed"):
        prepare(dataclasses.replace(chosen, min_tokens=5000), tmp_path / "store", force=True)
    before = contents(tmp_path / "store.partial")
    assert pipeline.prepare(chosen, tmp_path / "store", Quiet()) is None
    assert contents(tmp_path / "store.partial") == before
    manifest = json.loads((tmp_path / "store/report.json").read_text())["manifest"]
    # Killed before it had cleared its own work.
    (tmp_path / "store.partial/manifest.json").write_text(json.dumps(manifest))
    assert pipeline.prepare(chosen, tmp_path / "store", Quiet()) is None
    assert not (tmp_path / "store.partial").exists()


def test_a_refused_command_leaves_nothing_to_finish(texts, tmp_path):
    origin = Origin(source="jsonl", name=str(jsonl(tmp_path / "in.jsonl", texts[:6])))
    trained = Tokenizer(kind="trained_wordpiece")
    refused = Settings((origin,), samples="bert", tokenizer=trained, vocab_size=20, workers=0)
    with pytest.raises(ValueError, match="begins with"):
        prepare(refused, tmp_path / "store")
    made = prepare(dataclasses.replace(refused, vocab_size=400), tmp_path / "store")
    assert made["store"]["vocab_size"] == 400


def test_out_that_cannot_be_written_is_refused(texts, vocabulary, tmp_path):
    chosen = settings(jsonl(tmp_path / "in.jsonl", texts[:6]), vocabulary)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--out .*file/x/store: nothing can be written to"):
        prepare(chosen, tmp_path / "file/x/store")


def test_processes_share_one_preparation(texts, vocabulary, tmp_path):
    """The second one finishes the work, and the first one finds it done; another command is refused."""
    chosen = settings(jsonl(tmp_path / "in.jsonl", texts[:30]), vocabulary)
    reports = []

    class Joined(Quiet):
        def at(self, value, note=""):
            if not reports:
                with pytest.raises(ValueError, match="(?s)other processes prepare it by another.*min_tokens"):
                    prepare(dataclasses.replace(chosen, min_tokens=21), tmp_path / "store", force=True)
                reports.append(prepare(chosen, tmp_path / "store"))

    assert pipeline.prepare(chosen, tmp_path / "store", Joined()) is None
    run = reports[0]["run"]
    assert 0 < run["chunks_found"] < run["chunks"]
    prepare(chosen, tmp_path / "alone")
    assert contents(tmp_path / "store") == contents(tmp_path / "alone")
    assert list(tmp_path.glob(".store*")) == [], "nothing is left beside it"


@pytest.mark.long
def test_five_processes_killed_at_random(full, texts, tmp_path):
    """Each that is killed begins again, as a scheduler would have it."""
    rng = random.Random(7)
    many = [" ".join(rng.sample(text.split(" "), len(text.split(" ")))) for text in texts * 24]
    names = [jsonl(tmp_path / f"{part}.jsonl", many[part::3]) for part in range(3)]
    origins = tuple(Origin(source="jsonl", name=str(name)) for name in names)
    chosen, out = dataclasses.replace(full, origins=origins), tmp_path / "store"
    quiet = dict(stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment())

    def start():
        return subprocess.Popen(command(chosen, out, 0.02), **quiet)

    processes, kills = [start() for _ in range(5)], 0
    deadline = time.monotonic() + 400
    while any(process.poll() is None for process in processes):
        assert time.monotonic() < deadline
        time.sleep(rng.uniform(1, 3))
        number = rng.randrange(5)
        if kills < 8 and (tmp_path / "store.partial").exists() and processes[number].poll() is None:
            processes[number].kill()
            processes[number].communicate()
            processes[number] = start()
            kills += 1
    said = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0] * 5, said
    lasts = {output.strip().splitlines()[-1].partition(";")[0] for output, _ in said}
    assert lasts <= {f"{out}: the store", f"{out}: already complete, made by the same command"}
    print(kills, "were killed;", json.loads((out / "report.json").read_text())["run"])
    prepare(dataclasses.replace(chosen, chunk_mb=0.5), tmp_path / "at_once")
    assert contents(tmp_path / "at_once") == contents(out)


def test_limit_counts_documents(texts, vocabulary, tmp_path):
    name = jsonl(tmp_path / "in.jsonl", texts[:30])
    report = prepare(settings(name, vocabulary, limit=13), tmp_path / "store")
    assert report["store"]["documents"] == report["steps"]["read"]["documents_in"] == 13


def test_all_problems_of_the_flags_at_once(vocabulary):
    with pytest.raises(ValueError, match="(?s)--vocab_size.*--ngram 0.*--dedup 7"):
        Settings((Origin(),), tokenizer=Tokenizer(kind="trained_bpe"), dedup=7, ngram=0)


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        *(("vocab_size", (256, 10**9)), ("seed", (-1, 2**64)), ("chunk_mb", (-1.0, 0.0, float("inf")))),
        *(("limit", (0,)), ("workers", (100_000,)), ("shingle", (10**9,)), ("permutations", (10**6,))),
        ("dedup", (float("nan"),)),
    ],
)
def test_numbers_out_of_range_are_refused(name, numbers):
    good = {"origins": (Origin(),), "tokenizer": Tokenizer(kind="trained_bpe"), "vocab_size": 257}
    Settings(**good, seed=2**64 - 1)
    for wrong in numbers:
        with pytest.raises(ValueError, match=f"^--{name} [^\n]*$"):
            Settings(**{**good, name: wrong})


_SINK = pa.BufferOutputStream()
pq.write_table(pa.table({"text": ["some text"] * 3}), _SINK)
PARQUET = _SINK.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("source", "content", "said"),
    [
        ("jsonl", PARQUET, r"another type of file: it is a parquet file; give data.source=parquet"),
        ("parquet", b'{"text": "x"}\n', r"another type of file: it is JSON lines; give data.source=jsonl"),
        ("jsonl", b'{"body": "x"}\n' * 200, r"in:1: no field 'text' \(and so 99 more records\): set .* body"),
        ("jsonl", b'{"text": ""}\n', r"no text in it: all its records are empty"),
        ("jsonl", b'[{"text": "x"}]', r"another type of file: it is one JSON list.*jq"),
        ("jsonl", gzip.compress(b'{"text": "x"}\n' * 9, mtime=0)[:-20], r"in:1: damaged file"),
        ("jsonl", b"", r"in:1: empty file"),
    ],
)  # fmt: skip
def test_input_that_holds_no_text_is_refused_before_any_work(source, content, said, vocabulary, tmp_path):
    """Whatever tokenizer is asked for: nothing is said of a vocabulary's size.

    What else a file can be is in tests/data/text/test_sources.py.
    """
    (tmp_path / "in").write_bytes(content)
    trained = {"tokenizer": Tokenizer(kind="trained_wordpiece"), "vocab_size": 300}
    for more in ({}, trained):
        chosen = dataclasses.replace(settings(tmp_path / "in", vocabulary), **more)
        origin = Origin(source=source, name=str(tmp_path / "in"))
        with pytest.raises(ProblemsError, match=said):
            prepare(dataclasses.replace(chosen, origins=(origin,)), tmp_path / "store")
        assert not (tmp_path / "store.partial").exists()


def test_what_is_no_ordinary_file_is_refused(vocabulary, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    strange = {"pipe": "no ordinary file", "gon?": "a link to nothing", "circle": "no ordinary file"}
    for name, said in strange.items():
        with pytest.raises(ProblemsError, match=said):
            prepare(settings(tmp_path / name, vocabulary), tmp_path / "store")


def test_a_language_is_one_that_can_be_told_and_the_text_has_some_of_it(texts, vocabulary, tmp_path):
    chosen = settings(jsonl(tmp_path / "in.jsonl", texts[:6]), vocabulary)
    for code in ("xx", "", "english"):
        with pytest.raises(ProblemsError, match=f"--language '{code}': it is none of the 176 codes"):
            prepare(dataclasses.replace(chosen, language=code), tmp_path / "store")
    trained = {"tokenizer": Tokenizer(kind="trained_wordpiece"), "vocab_size": 300, "language": "de"}
    with pytest.raises(ProblemsError, match="--language de .*of 6 documents none is in it .*: 6 en"):
        prepare(dataclasses.replace(chosen, **trained), tmp_path / "store")


def test_json_lines_read_as_plain_text_are_warned_of(texts, vocabulary, tmp_path):
    origin = Origin(source="text", name=str(jsonl(tmp_path / "in.jsonl", texts[:6])))
    report = prepare(dataclasses.replace(settings("", vocabulary), origins=(origin,)), tmp_path / "store")
    assert "looks like JSON lines and is read as plain text: give --source jsonl" in report["warnings"][0]


def test_a_worker_that_dies_is_an_error(texts, vocabulary, tmp_path):
    class Killing(Quiet):
        def at(self, value, note=""):
            for process in multiprocessing.active_children():
                process.kill()

    chosen = settings(jsonl(tmp_path / "in.jsonl", texts), vocabulary, workers=1)
    with pytest.raises(PreparationFailed, match="ended with signal 9; .*fewer --workers"):
        pipeline.prepare(chosen, tmp_path / "store", Killing())
    prepare(chosen, tmp_path / "store")
