"""launch/finetune.py: scores, submissions and losses of a run, resumed; seeds, ensemble; and refusals."""

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
from launching import ROOT, environment, run, run_ranks
from tasked import VOCABULARY, choices, questions, save_bert, sentences, write_lines

from data.tasks.corpus import build
from launch import finetune as finetune_command
from launch.console import ends
from launch.evaluation import finetuning, pretrained
from launch.evaluation.finetuning import STATE, example_order
from launch.ranks import joining
from launch.records.metrics import read_metrics
from launch.training.engine import parameter_groups
from launch.training.schedule import learning_rate
from modeling.initialization import Init
from recipes import catalog

COMMAND = ROOT / "launch" / "finetune.py"
EXACT = [f"--set={key}" for key in ("dropout.hidden=0", "dropout.attention=0", "precision=fp32")]
EXACT += ["--lr", "1e-3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finetune")
    save_bert(folder / "bert")
    write_lines(folder / "train.jsonl", [*sentences(40), {"sentence": "", "label": 1}])
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
        folder, "--test", folder / "test.jsonl", "--out", folder / "run", "--epochs", 2, "--steps", 4, *EXACT
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return folder / "run", done.stdout


def test_a_run_scores_and_predicts(trained):
    run, said = trained
    assert "train: 1 record without a text or a label left out" in said
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
    again = ("--test", folder / "test.jsonl", "--out", run, "--epochs", 2, "--resume", *EXACT)
    done = finetune(folder, *again, "--steps", 4)
    assert done.returncode == 0, done.stdout[-3000:]
    assert json.loads((run / "result.json").read_text())["task_scores"] == before
    done = finetune(folder, *again)
    assert done.returncode == 0 and "resumed from" in done.stdout, done.stdout[-3000:]
    assert json.loads((run / "result.json").read_text())["steps"] == 10


def test_its_checkpoint_predicts_the_same_in_transformers(trained):
    run, _ = trained
    (saved,) = (run / "checkpoints").iterdir()
    model = transformers.AutoModelForSequenceClassification.from_pretrained(saved).eval()
    texts = [record["sentence"] for record in sentences(21, seed=1)]
    given = transformers.AutoTokenizer.from_pretrained(saved)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**given).logits.numpy()
    np.testing.assert_allclose(np.load(run / "predictions" / "dev" / "logits.npy"), logits, atol=1e-5)


def losses_of(run):
    return [step.loss for step in read_metrics(run / "metrics.jsonl").steps]


def test_losses_are_those_of_a_plain_loop(trained):
    """Of BertForSequenceClassification, torch's AdamW and the schedule in a loop of its own."""
    run, _ = trained
    recipe = catalog.load_resolved(run / "recipe.yaml")
    corpus = build(recipe, say=lambda text: None)
    model = transformers.BertForSequenceClassification.from_pretrained(run.parent / "bert").train()
    draw_as_ours(model, recipe)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    groups = parameter_groups(model, recipe.optimizer.weight_decay)
    optimizer = torch.optim.AdamW(groups, betas=recipe.optimizer.betas, eps=recipe.optimizer.eps)
    order = example_order(recipe, len(corpus.train))
    assert len(order) == 8 * recipe.steps and sorted(order[:40]) == sorted(order[40:]) == [*range(40)]
    assert order[:40] != order[40:] and order[:40] != [*range(40)]
    pad = transformers.DataCollatorWithPadding(corpus.tokenizer)
    losses = []
    for step in range(4):
        batch = pad([corpus.train[i] for i in order[8 * step : 8 * step + 8]])
        loss = model(**batch).loss
        losses.append(loss.item())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.optimizer.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        optimizer.step()
        optimizer.zero_grad()
    assert losses_of(run)[:4] == pytest.approx(losses, rel=1e-5) and len({*losses}) == 4


def draw_as_ours(model, recipe):
    """The classifier, which the weights lack: drawn from the seed and its name."""
    init = Init(recipe.seed, recipe.init_std, recipe.model.layers).child("head").child("classifier")
    with torch.no_grad():
        model.classifier.weight.copy_(init.normal("weight", tuple(model.classifier.weight.shape), init.std))
        model.classifier.bias.zero_()


def test_the_loss_of_half_precision_is_not_one_of_half_precision():
    """Of a bf16 loss near 1.4 the next one is 0.008 away."""
    torch.manual_seed(1)
    logits, labels = torch.randn(9, 4).bfloat16(), torch.arange(9) % 4
    loss = finetuning._loss([logits, logits], [labels, labels])
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(logits.float(), labels).item())


@pytest.mark.ci
def test_two_ranks_stages_and_accumulation_have_the_losses_of_one_process(trained, folder):
    run, _ = trained
    cases = {"zero3": (2, []), "zero0": (2, []), "zero2": (1, ["--set=batch.micro=4"])}
    for config, (ranks, more) in cases.items():
        out = folder / f"{config}-{ranks}"
        flags = ["--out", out, "--epochs", 2, "--steps", 4, "--ds_config", config, *EXACT, *more]
        done = run_ranks(ranks, COMMAND, *given(folder, "sst2", *flags), timeout=200)
        assert done.returncode == 0, done.stdout[-5000:]
        assert losses_of(out) == pytest.approx(losses_of(run)[:4], abs=1e-6)
        found, wanted = (read_metrics(each / "metrics.jsonl").validations for each in (out, run))
        assert found[1].loss == pytest.approx(wanted[1].loss, abs=1e-6), config
        logits = np.load(out / "predictions" / "dev" / "logits.npy")
        assert logits.shape == (21, 2)
    flags = ["--out", out, "--epochs", 2, "--ds_config", "zero1", "--resume", *EXACT, *more]
    done = run_ranks(1, COMMAND, *given(folder, "sst2", *flags))
    assert done.returncode == 2 and "zero_stage 2, and now it is 1" in done.stdout


@pytest.mark.ci
def test_races_directory_seeds_and_ensemble(folder):
    for split, seed in (("train", 0), ("dev", 1)):
        (folder / "RACE" / split / "high").mkdir(parents=True)
        for number, record in enumerate(choices(12, seed)):
            answers = {"questions": [record["question"]], "options": [record["options"]]}
            article = {"article": record["article"], "answers": [record["answer"]], **answers}
            place = folder / "RACE" / split / "high" / f"{number}.txt"
            place.write_text(json.dumps(article | {"id": f"high{number}.txt"}))
    files = [f"--{split}={folder / 'RACE' / split}" for split in ("train", "dev")]
    out = folder / "race"
    words = [
        "--task",
        "race",
        "--init",
        folder / "bert",
        "--batch",
        4,
        "--sequence_length",
        48,
        *files,
        "--set=precision=fp32",
    ]
    done = run_ranks(1, COMMAND, *words, "--out", out, "--seeds", 2, "--ensemble", "--steps", 2, timeout=300)
    assert done.returncode == 0, done.stdout[-5000:]
    summary = json.loads((out / "summary.json").read_text())
    found = [row["scores"][0]["metrics"]["accuracy"] for row in summary["seeds"]]
    assert summary["median"]["dev"]["accuracy"] == statistics.median(found)
    logits = [np.load(out / f"seed{seed}" / "predictions" / "dev" / "logits.npy") for seed in (1234, 1235)]
    assert logits[0].shape == (12, 4) and not np.allclose(*logits)
    shares = np.mean([np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in logits], 0)
    right = np.mean(shares.argmax(1) == np.arange(12) % 4)
    assert summary["ensemble"][0]["metrics"]["accuracy"] == right


@pytest.mark.ci
def test_a_fine_tuned_model_starts_another_task_and_the_control_takes_none_of_its_weights(trained, folder):
    run, _ = trained
    (saved,) = (run / "checkpoints").iterdir()
    short = ["--set", "task.doc_stride=8", "--set", "task.max_query=6", "--steps", 2]
    for more in (["--from_scratch"], []):
        out = folder / f"squad{len(more)}"
        words = given(folder, "squad2", "--init", saved, *short, "--out", out, *more, prefix="squad-")
        done = run_ranks(1, COMMAND, *words, timeout=200)
        assert done.returncode == 0, done.stdout[-3000:]
        assert ("initial weights" in done.stdout) != bool(more)
        (score,) = json.loads((out / "result.json").read_text())["task_scores"]
        assert {"exact", "f1", "no_answer_threshold"} == set(score["metrics"]) and score["examples"] == 20
        assert len(json.loads((out / "predictions" / "dev" / "predictions.json").read_text())) == 20
        logits = np.load(out / "predictions" / "dev" / "logits.npy")
        assert len(logits) > 20 and logits.shape[2] == 2 and np.isneginf(logits).any()


def test_what_decides_the_weights_of_a_pretraining_is_compared_with_its_row(tmp_path):
    changes = ["optimizer.lr=1e-5", "batch.micro=1", "run.save_every=7", "data.masking.max_ngram=2"]
    changed = pretrained.changed_from_row("bert/sotu", catalog.load("bert/sotu", changes))
    assert changed == ("optimizer.lr", "data.masking.max_ngram")
    assert pretrained.changed_from_row("bert/gone", catalog.load("bert/sotu")) is None


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
        "3 wrong records: record 1: label '5' is out of range": ["--train", broken],
        f"--dev: {tmp_path / 'no.jsonl'}: cannot be read": [
            "--train",
            broken,
            "--dev",
            tmp_path / "no.jsonl",
        ],
        "only MNLI has examples of other genres": ["--dev_mismatched", folder / "dev.jsonl"],
        "sequence_length": ["--sequence_length", 128],
        "its BERT is cut by ZeRO alone; set parallel.tp to 1": ["--set", "parallel.tp=2"],
        "its modules are cut by ZeRO alone; set parallel.pp to 1": ["--ds_config", "pipeline", "--plan"],
        "heads of tasks are those of transformers": ["--set", "model.implementation=megarecipes"],
        "Trainer's own loop takes the steps": ["--set", "run.check_every=2"],
        "modules run uncompiled": ["--compile", "on"],
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
    assert "of question, context, label it lacks question, context" in refusal(*short, task="squad1")


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
        while not any(tmp_path.glob(f"out/{killed}/checkpoints/*/{STATE}")):
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
