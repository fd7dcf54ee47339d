"""How fast a preparation is next to raw `tokenizers`, and what the loader takes of a training step."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.records.metrics import read_metrics
from launch.records.throughput import steady_seconds
from recipes import catalog
from recipes.layout import Layout

if TYPE_CHECKING:
    from data.prepare.settings import Settings

LEAST_MB = 10  # of text; with less, the start of the workers is most of what is measured
ROOT = Path(__file__).resolve().parents[2]


class _NoScreen:
    def say(self, text: str) -> None: ...

    def phase(self, name: str, total: float | None, unit: str) -> None: ...

    def at(self, value: float, note: str = "") -> None: ...


def measure_preparation(settings: Settings) -> dict[str, Any]:
    """Prepare once, then give the kept texts to `tokenizers` alone, with threads on all cores.

    Returns:
        steps: MB of text per second of processor time, by step; mb_per_second: of the whole, by wall time
            from the first record to the finished store; raw_mb_per_second: of `tokenizers`; share: the one of
            the other, None below LEAST_MB of text; processor_share: the same by processor time, which other
            programs on the machine change less.
    """
    import torch.utils.benchmark as timing
    from tokenizers import Tokenizer

    from data.prepare import fork_server, pipeline
    from data.text.vocabularies.encoder import use_all_cores

    fork_server.start("launch.benchmark")  # as prepare_data.py does it, while libraries are imported
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        out = Path(folder) / "store"
        report = pipeline.prepare(dataclasses.replace(settings, write_articles=True), out, _NoScreen())
        assert report is not None
        texts = [json.loads(line)["text"] for line in (out / "articles.jsonl").open(encoding="utf-8")]
        backend = Tokenizer.from_file(str(out / "tokenizer" / "tokenizer.json"))
    use_all_cores()
    tokenize = "backend.encode_batch_fast(texts, add_special_tokens=False)"
    timer = timing.Timer(tokenize, globals={"backend": backend, "texts": texts})
    text_mb, speed = report["store"]["text_bytes"] / 1e6, report["run"]["mb_per_second"]
    raw_speed = text_mb / timer.blocked_autorange(min_run_time=2.0).median
    started = time.process_time()
    backend.encode_batch_fast(texts, add_special_tokens=False)
    raw_spent, spent = time.process_time() - started, report["run"]["processor_seconds"]
    comparable = text_mb >= LEAST_MB and spent > 0
    return {
        "documents": report["store"]["documents"],
        "text_mb": text_mb,
        "steps": report["mb_per_second_and_core"],
        **{"mb_per_second": speed, "raw_mb_per_second": raw_speed},
        "share": speed / raw_speed if comparable else None,
        "processor_share": raw_spent / spent if comparable else None,
        "peak_mb": report["run"]["peak_mb"],
    }


def measure_loader(name: str, overrides: list[str], train_steps: int) -> dict[str, Any]:
    """Batches asked for one after the other by a rank that takes all, and what real training waits for them.

    Returns:
        microseconds: per step, by number of loader threads; step_seconds, data_seconds: medians of training,
            None without it.
    """
    import torch.utils.benchmark as timing

    from data import corpus
    from data.loader import StepBatches

    recipe = catalog.load(name, overrides)
    samples = corpus.build(recipe, say=lambda line: print(line, flush=True)).train
    size = recipe.batch.global_
    microseconds = {}
    for threads in (0, 1):
        layout = Layout(1, 1, 1, size, 1, size)
        with closing(StepBatches(samples, recipe.seed, layout, 0, workers=threads)) as batches:
            measured = timing.Timer("next(batches)", globals={"batches": batches}).timeit(100)
        microseconds[threads] = measured.mean * 1e6
    untrained = {"step_seconds": None, "data_seconds": None}
    trained = train(name, overrides, train_steps) if train_steps else untrained
    return {"tokens_per_step": size * recipe.sequence_length, "microseconds": microseconds, **trained}


def train(name: str, overrides: list[str], steps: int) -> dict[str, float]:
    """Medians of a training's seconds per step and of those of them that it waited for the batch.

    Raises:
        ValueError: training failed.
    """
    settings = ("run.validate_every=0", "run.save_every=0", "run.prompt=null", *overrides)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        command = [sys.executable, str(ROOT / "launch/pretrain.py"), "--recipe", name, "--steps", str(steps)]
        command += ["--out", f"{folder}/run", *(part for setting in settings for part in ("--set", setting))]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            said = f"training of {name} ended with code {done.returncode}\n{done.stderr[-2000:]}"
            raise ValueError(f"--train_steps {steps}: {said}")
        steps_made = read_metrics(Path(folder) / "run/metrics.jsonl").steps
    steady = steady_seconds(steps_made)
    assert steady is not None, "there was at least one step"
    waits = [record.data_seconds for record in steps_made if record.launch_step > 1]
    return {"step_seconds": steady.seconds, "data_seconds": statistics.median(waits) if waits else 0.0}
