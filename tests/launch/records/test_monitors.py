"""What Weights & Biases gets through DeepSpeed's monitor is what metrics.jsonl says.

The package is a stand-in that keeps the calls: an installed one takes seconds to import and starts a program
of its own. Run by hand with the package itself, offline: docs/running.md.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from launching import ROOT, WORKERS, run_ranks

from launch.records.metrics import read_metrics


def monitored_run(folder: Path, ds_config: str, ranks: int, launches: Sequence[int]):
    """Run to the steps of each launch; return the records and the calls, in order."""
    config = json.loads((ROOT / "ds_configs" / f"{ds_config}.json").read_text())
    config |= {"wandb": {"enabled": True, "project": "ours"}}
    (folder / "monitored.json").write_text(json.dumps(config))
    calls = folder / "calls.jsonl"
    for steps in launches:
        done = run_ranks(
            ranks, WORKERS / "monitored.py", calls, "--tiny", "--steps", steps, "--resume",
            *("--ds_config", folder / "monitored.json", "--out", folder / "run", "--set", "run.prompt=null"),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout
    return read_metrics(folder / "run" / "metrics.jsonl"), list(
        map(json.loads, calls.read_text().splitlines())
    )


@pytest.mark.parametrize(
    "how",
    [
        ("zero1", 1, (4,)),
        pytest.param(("zero1", 1, (2, 4)), marks=pytest.mark.ci),
        pytest.param(("pipeline", 2, (2, 4)), marks=pytest.mark.ci),
    ],
    ids=str,
)
def test_the_monitor_gets_what_metrics_jsonl_says(how, tmp_path):
    records, calls = monitored_run(tmp_path, *how)
    assert [step.step for step in records.steps] == [1, 2, 3, 4]
    assert len({call["run"] for call in calls if "run" in call}) == 1, "a resume goes on with the run there"
    assert [call["how"]["project"] for call in calls if "how" in call][:1] == ["ours"]
    assert calls[-1].get("end"), "what it holds is lost where a process just ends"
    found = {}
    for call in calls:
        for name, value in call.get("data", {}).items():
            found.setdefault(name, []).append((call["step"], value))
    for name in ("loss", "grad_norm", "lr", "seconds"):
        assert found[f"train/{name}"] == [(8 * step.step, getattr(step, name)) for step in records.steps], (
            name
        )
    held_out = {each.step: each.loss for each in records.validations}
    assert found["validation/loss"] == [(8 * step, held_out[step]) for step in how[2]]
    assert [step for step, _ in found["Train/Samples/lr"]] == [8, 16, 24, 32], "DeepSpeed's own"
