"""What a step with borders of documents waits for: no more than one without, in each stage of a pipeline."""

from __future__ import annotations

import json

import pytest
from launching import ROOT, run_ranks
from second_device.running import needed, on_board

pytestmark = needed
PIPELINE = {"parallel.pp": 2, "batch.micro": 1, "batch.global": 2, "activation_checkpointing": "full"}


@pytest.mark.ci
def test_no_layer_of_a_stage_waits_for_borders(tmp_path):
    """One step is what four have more than three. Two micro-batches of four layers, each computed twice."""
    settings = {**PIPELINE, "data.attend": "document", "run.check_every": 0, "run.prompt": "null"}
    found = []
    for steps in (3, 4):
        file = tmp_path / f"{steps}.json"
        flags = ["--tiny", "--ds_config", "pipeline", "--steps", steps, "--out", tmp_path / str(steps)]
        for key, value in settings.items():
            flags += ["--set", f"{key}={value}"]
        done = run_ranks(2, ROOT / "launch/pretrain.py", *flags, env=on_board(BOARD_COUNTS=file))
        assert done.returncode == 0, done.stdout[-3000:]
        counts = [json.loads(file.with_suffix(f".{rank}.json").read_text()) for rank in range(2)]
        found.append([sum(each["waits"].values()) for each in counts])
    waits = [after - before for before, after in zip(*found, strict=True)]
    assert waits[0] <= 3 and waits[1] <= 2, f"{waits}: a read norm, a learning rate, an event"
