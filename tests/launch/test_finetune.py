"""launch/finetune.py: a run with scores and submissions, resumed; grid, seeds, ensemble; and refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import transformers
from launching import DEVICE, ROOT, environment, run, run_ranks
from tasked import VOCABULARY, questions, save_bert, sentences, write_lines

from launch import finetune as finetune_command
from launch.checkpoints import manifest
from launch.console import ends
from launch.evaluation import pretrained
from launch.ranks import joining
from recipes import catalog

COMMAND = ROOT / "launch" / "finetune.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    save_bert(folder / "bert")
    write_lines(folder / "train.jsonl", [*sentences(40), {"sentence": "a film", "label": 9}])
    write_lines(folder / "dev.jsonl", sentences(21, seed=1))
    hidden = [{**record, "label": -1} for record in sentences(9, seed=2)]
    write_lines(folder / "test.jsonl", hidden)
    for split, seed in (("train", 0), ("dev", 1)):
        write_lines(folder / f"squad-{split}.jsonl", questions(20, seed))
    return folder


def given(folder, task, *flags, prefix=""):
    """Words of the command; flags take the place of its own."""
    own = {"--task": task, "--init": folder / "bert", "--batch": 8, "--sequence_length": 32}
    own |= {f"--{split}": folder / f"{prefix}{split}.jsonl" for split in ("train", "dev")}
    words = [word for flag, value in own.items() if flag not in flags for word in (flag, value)]
    return list(map(str, [*words, *flags]))


def finetune(folder, *flags):
    return run_ranks(1, COMMAND, *given(folder, "sst2", *flags), timeout=200, cwd=folder)


@pytest.fixture(scope="module")
def trained(folder):
    done = finetune(
        folder, "--test", folder / "test.jsonl", "--out", folder / "run", "--epochs", 2, "--steps", 4
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return folder / "run", done.stdout


def test_a_run_scores_and_predicts(trained):
    run, said = trained
    assert "train.jsonl:41: label 9 is out of range" in said and "1 broken example left out" in said
    scores = json.loads((run / "result.json").read_text())["task_scores"]
    assert [(each["split"], each["examples"], list(each["metrics"])) for each in scores] == [
        ("dev", 21, ["accuracy"]), ("test", 9, []),
    ]  # fmt: skip
    assert (
        f"accuracy {scores[0]['metrics']['accuracy']:.4f} (21 examples)" in said
        and "labels are hidden" in said
    )
    assert "nats per example" in said and "nats per token" not in said
    assert len((run / "predictions" / "test" / "SST-2.tsv").read_text().splitlines()) == 10
    assert np.load(run / "predictions" / "dev" / "logits.npy").shape == (21, 2)


def test_a_finished_run_resumes_to_the_same_scores_and_goes_on(trained, folder):
    run, _ = trained
    before = json.loads((run / "result.json").read_text())["task_scores"]
    shutil.rmtree(run / "predictions")
    again = ("--test", folder / "test.jsonl", "--out", run, "--epochs", 2, "--resume")
    done = finetune(folder, *again, "--steps", 4)
    assert done.returncode == 0, done.stdout[-3000:]
    assert json.loads((run / "result.json").read_text())["task_scores"] == before
    done = finetune(folder, *again)
    assert done.returncode == 0 and "resumed from" in done.stdout, done.stdout[-3000:]
    assert json.loads((run / "result.json").read_text())["steps"] == 10


@pytest.mark.long
def test_a_fine_tuned_run_starts_another_task_and_the_control_takes_none_of_its_weights(trained, folder):
    run, _ = trained
    short = ["--set", "task.doc_stride=8", "--set", "task.max_query=6", "--steps", 2]
    for more in (["--from_scratch"], []):
        out = folder / f"squad{len(more)}"
        words = given(folder, "squad2", "--init", run, *short, "--out", out, *more, prefix="squad-")
        done = run_ranks(1, COMMAND, *words, timeout=200)
        assert done.returncode == 0, done.stdout[-3000:]
        assert ("initial weights" in done.stdout) != bool(more)
        of = pretrained.read(out)
        assert (of is None) if more else (of.recipe, of.changed) == ("finetune/sst2", None)
        (score,) = json.loads((out / "result.json").read_text())["task_scores"]
        assert {"exact", "f1", "no_answer_threshold"} == set(score["metrics"]) and score["examples"] == 20
        assert len(json.loads((out / "predictions" / "dev" / "predictions.json").read_text())) == 20


def test_what_decides_the_weights_of_a_pretraining_is_compared_with_its_row(tmp_path):
    changes = ["optimizer.lr=1e-5", "batch.micro=1", "run.save_every=7", "data.masking.max_ngram=2"]
    changed = pretrained.changed_from_row("bert/sotu", catalog.load("bert/sotu", changes))
    assert changed == ("optimizer.lr", "data.masking.max_ngram")
    assert pretrained.changed_from_row("bert/gone", catalog.load("bert/sotu")) is None


@pytest.mark.long
def test_an_exported_run_predicts_the_same(trained, folder):
    run, _ = trained
    done = run_ranks(
        1, ROOT / "launch" / "export_hf.py", run, "--out", folder / "exported", "--compare_logits"
    )
    assert done.returncode == 0, done.stdout[-3000:]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "exported").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "exported")
    texts = [record["sentence"] for record in sentences(21, seed=1)]
    given = tokenizer(texts, truncation=True, max_length=32, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**given).logits.numpy()
    close = 5e-3 if DEVICE == "board" else 1e-4  # it trains in bf16
    np.testing.assert_allclose(np.load(run / "predictions" / "dev" / "logits.npy"), logits, atol=close)


@pytest.mark.long
def test_seeds_median_and_ensemble(folder):
    out = folder / "several"
    flags = ["--out", out, "--seeds", 3, "--ensemble", "--steps", 2, "--lr", "1e-3"]
    done = finetune(folder, *flags)
    assert done.returncode == 0, done.stdout[-4000:]
    summary = json.loads((out / "summary.json").read_text())
    found = [row["scores"][0]["metrics"]["accuracy"] for row in summary["seeds"]]
    assert [row["seed"] for row in summary["seeds"]] == [1234, 1235, 1236]
    assert summary["median"]["dev"]["accuracy"] == statistics.median(found)
    logits = [np.load(path) for path in sorted(out.glob("batch8-*/predictions/dev/logits.npy"))]
    assert len(logits) == 3 and not np.allclose(logits[0], logits[1])
    shares = [np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in logits]
    labels = np.array([record["label"] for record in sentences(21, seed=1)])
    assert summary["ensemble"][0]["metrics"]["accuracy"] == np.mean(np.mean(shares, 0).argmax(1) == labels)
    times = {path: path.stat().st_mtime_ns for path in out.glob("*/result.json")}
    shutil.rmtree(out / "batch8-lr0.001-seed1235")
    done = finetune(folder, *flags)
    assert done.returncode == 0 and done.stdout.count("made before") == 2, done.stdout[-4000:]
    kept = {path: path.stat().st_mtime_ns for path in out.glob("*/result.json") if "1235" not in str(path)}
    assert kept.items() <= times.items()
    assert json.loads((out / "summary.json").read_text()) == summary
    done = finetune(folder, *flags, "--epochs", 2)
    assert done.returncode == 2 and "holds runs of other arguments" in done.stdout


@pytest.fixture
def refusal(folder, monkeypatch, capsys):
    """What the command refuses in this process."""
    monkeypatch.setattr(joining, "postpone_collections", lambda: None)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "never"))

    def refuse(*flags, task="sst2"):
        monkeypatch.setattr(
            sys, "argv", [str(COMMAND), *given(folder, task, "--out", folder / "never", *flags)]
        )
        with pytest.raises(SystemExit) as ended:
            ends.run(finetune_command.main)
        said = "".join(capsys.readouterr()).replace("\n", " ")
        assert ended.value.code == 2 and not (folder / "never").exists(), said
        return said

    return refuse


def test_what_cannot_work_is_refused_before_anything_starts(folder, tmp_path, refusal):
    for name, file, text in (
        ("gpt2", "config.json", '{"model_type": "gpt2"}'),
        ("run", "recipe.yaml", "title: x\n"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    other = save_bert(tmp_path / "other")
    (other / "vocab.txt").write_text("\n".join(VOCABULARY[:-2]) + "\n")
    broken = write_lines(tmp_path / "broken.jsonl", [{"sentence": "a film", "label": 5}] * 3)
    for said, flags in {
        "does not exist": ["--init", tmp_path / "gone"],
        'is a model of type "gpt2": heads for tasks stand on a BERT': ["--init", tmp_path / "gpt2"],
        "holds no checkpoint": ["--init", tmp_path / "run"],
        f"model.vocab_size={len(VOCABULARY)}, but the file vocabulary": ["--init", other],
        "all of its 3 examples are broken": ["--train", broken],
        "only MNLI has examples of other genres": ["--dev_mismatched", folder / "dev.jsonl"],
        "sequence_length": ["--sequence_length", 128],
        "unknown key": ["--set", "dropout.all=1"],
        "--ensemble without --seeds: the seeds' models answer together, 2 at least": ["--ensemble", "--plan"],
        "--ensemble with --seeds 1": ["--ensemble", "--seeds", 1],
        "--plan with --ensemble: a plan is that of one run": ["--ensemble", "--plan"],
        "--lr: 1e30: give a number above 0, at most 1,000,000": ["--lr", "1e30"],
        "--epochs: 1e15: give a number above 0, at most 1,000,000": ["--epochs", "1e15"],
        "--ranks without --seeds or --ensemble": ["--ranks", 2],
    }.items():
        assert said in refusal(*flags), said
    short = ("--set", "task.doc_stride=8", "--set", "task.max_query=6")
    assert "lack question, context" in refusal(*short, task="squad1")


@pytest.mark.long
def test_several_runs_are_refused_without_a_word_of_deepspeed(folder, tmp_path):
    """It says while it is imported that there is no GPU, where nothing names the accelerator."""
    words = given(folder, "sst2", "--train", tmp_path / "gone.jsonl", "--seeds", 2)
    done = run(["env", "-u", "DS_ACCELERATOR", sys.executable, str(COMMAND), *words], cwd=tmp_path)
    assert done.returncode == 2 and done.stdout.startswith("\n--train: "), done.stdout


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_whole_procedure_killed_and_started_again(folder, tmp_path):
    """Seeds, median, ensemble; the run that was killed resumes to the scores of one that was not."""
    flags = ["--epochs", 10, "--seeds", 5, "--ensemble", "--out", tmp_path / "out"]
    data = [f"--{split}={folder / f'{split}.jsonl'}" for split in ("train", "dev")]
    words = ["--task", "sst2", "--init", folder / "bert", *data, "--sequence_length", 32]
    command = [sys.executable, "-u", *map(str, (COMMAND, *words, *flags))]
    killed = "seed1236"
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen(
            command, env=environment(), stdout=said, stderr=said, start_new_session=True
        )
        while not any(tmp_path.glob(f"out/{killed}/checkpoints/step-*/{manifest.NAME}")):
            assert process.poll() is None, (tmp_path / "said").read_text()
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)  # the procedure and the run that it waits for
        process.wait()
    directory = tmp_path / "out" / killed
    assert not (directory / "result.json").exists() and not (tmp_path / "out" / "summary.json").exists()
    done = run(command, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "resumed from" in directory.with_suffix(".log").read_text()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    seeds = summary["seeds"]
    assert [(row["seed"], row["problem"]) for row in seeds] == [(1234 + number, "") for number in range(5)]
    found = [row["scores"][0]["metrics"]["accuracy"] for row in seeds]
    assert summary["median"]["dev"]["accuracy"] == statistics.median(found)
    assert summary["ensemble"][0]["examples"] == 21
    alone = [*words, "--epochs", 10, "--seed", 1236]
    again = run_ranks(1, COMMAND, *alone, "--out", tmp_path / "alone", timeout=200)
    assert again.returncode == 0, again.stdout[-3000:]
    scores = json.loads((tmp_path / "alone" / "result.json").read_text())["task_scores"]
    assert scores == seeds[2]["scores"]
    logits = [
        np.load(each / "predictions" / "dev" / "logits.npy") for each in (tmp_path / "alone", directory)
    ]
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-6)
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("out/*/*")}
    done = run(command, timeout=200)
    assert done.returncode == 0, done.stdout[-4000:]
    after = {
        path: path.stat().st_mtime_ns for path in tmp_path.glob("out/*/*") if "ensemble" not in str(path)
    }
    assert after.items() <= times.items()
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary
    print(done.stdout)
