"""`pretrain.py --epochs`: steps from the samples of the text; streams and blends have no epochs."""

from __future__ import annotations

import pytest
from launching import ROOT
from texted import jsonl

from data.corpus import build
from launch import pretrain
from launch.training.job import Job
from recipes.problems import ProblemsError


def planned(*words: object) -> Job:
    return pretrain.checked_job(pretrain.build_parser().parse_args(["--plan", *map(str, words)]))


@pytest.mark.parametrize("ramp", [(), ("--set", "batch.rampup={start: 2, increment: 2, samples: 60}")])
def test_epochs_are_the_fewest_steps_that_read_them(ramp, tmp_path, capsys):
    paragraphs = (ROOT / "docs" / "design.md").read_text().split("\n\n")
    text = jsonl(tmp_path / "text.jsonl", paragraphs)
    recipe = planned("--tiny", "--text", text, "--epochs", 1.5, *ramp).plan.recipe
    samples = build(recipe).summary["samples_per_epoch"]
    assert recipe.sizes.samples(recipe.steps - 1) < 1.5 * samples <= recipe.sizes.samples(recipe.steps)
    assert recipe.decay_steps == recipe.steps, "the schedule ends with the epochs"
    assert f"--epochs 1.5: {recipe.steps} steps for {samples:,} samples an epoch" in capsys.readouterr().out
    cut = planned("--tiny", "--text", text, "--epochs", 1.5, "--steps", 3, *ramp).plan.recipe
    assert (cut.steps, cut.decay_steps) == (3, recipe.steps)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recipe", "openwebtext/gpt2-124m"], "--epochs 2 of a stream: only one text .* --set steps=N"),
        (
            ["--set", "data.blend=[{source: packaged, weight: 1}, {source: packaged, weight: 2}]"],
            "--epochs 2 of a blend",
        ),
        (["--set", "steps=4"], "--epochs with --set steps: both say how long"),
        (["--branch", "RUN", "--out", "x"], "--epochs with --branch"),
    ],
)
def test_what_has_no_epochs_is_refused(words, said, monkeypatch):
    monkeypatch.setattr("data.corpus.build", lambda *_, **__: pytest.fail("nothing is read for a refusal"))
    with pytest.raises(ProblemsError, match=said):
        planned("--epochs", 2, *words)
