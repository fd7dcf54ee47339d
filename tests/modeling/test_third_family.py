"""A family that the packages do not know trains under every kind of layout once it is registered."""

import json

import pytest
from launching import WORKERS, run_ranks

LAYOUTS = {
    "whole": (1, {"ds_config": "zero0"}),
    "tensor": (2, {"ds_config": "zero1", "tp": 2}),
    "pipeline": (2, {"ds_config": "pipeline", "pp": 2}),
}


@pytest.mark.ci
def test_it_learns_as_in_one_process(tmp_path):
    def job(name, case, *settings):
        return {
            "out": str(tmp_path / name),
            "case": {**case, "settings": settings},
            "steps": 2,
            "source": None,
        }

    # Weights so large that the two forms of GELU differ.
    settings = ("model.family=exact_gpt2", "dropout.hidden=0.1", "init_std=0.1")
    for processes in (1, 2):
        jobs = [job(name, case, *settings) for name, (n, case) in LAYOUTS.items() if n == processes]
        jobs += [job("gpt2", LAYOUTS["whole"][1], *settings[1:])] if processes == 1 else []
        file = tmp_path / "jobs.json"
        file.write_text(json.dumps(jobs))
        launched = run_ranks(processes, WORKERS / "third_family.py", file)
        assert launched.returncode == 0, launched.stdout[-4000:]
    losses = {
        name: list(json.loads((tmp_path / name / "losses.json").read_text()).values())
        for name in (*LAYOUTS, "gpt2")
    }
    whole = losses.pop("whole")
    assert len(whole) == 2 and whole[1] != losses.pop("gpt2")[1], "the activation is its own"
    for name, found in losses.items():
        assert max(abs(a - b) for a, b in zip(found, whole, strict=True)) < 2e-6, (name, found, whole)
