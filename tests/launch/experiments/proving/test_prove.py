"""A proof says of an adapter what is wrong with it, and of a layout which tensor differs first."""

from __future__ import annotations

import pytest
from launching import run_ranks

from launch import prove as command
from launch.experiments.proving import runs
from launch.experiments.proving.layout import layout_of
from launch.experiments.proving.proving import prove
from launch.experiments.proving.task import Task
from recipes.problems import ProblemsError

LOOP = """
import torch
from torch import nn

def batch(step):
    generator = torch.Generator().manual_seed(step)
    return {"x": torch.randn(8, 4, generator=generator), "y": torch.randn(8, 2, generator=generator)}

def train(proof):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    proof.load(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    proof.watch(model, optimizer)
    dp = proof.layout["dp"]
    for rows in proof.batches():
        mine = proof.rows(rows, proof.rank, dp)
        loss = nn.functional.mse_loss(model(mine["x"]), mine["y"])
        loss.backward()
        for parameter in model.parameters():
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= dp
        norm = nn.utils.clip_grad_norm_(model.parameters(), 100.0)
        optimizer.step()
        optimizer.zero_grad()
        proof.step(loss.item(), norm)
"""


@pytest.fixture(autouse=True)
def quick_launches(monkeypatch):
    def start(ranks, file, log):
        done = run_ranks(ranks, runs.WORKER, file)
        log.write_text(done.stdout)

    monkeypatch.setattr(runs, "start", start)


def proven(tmp_path, layouts, *edits, resume="", **how):
    text = LOOP
    for right, wrong in edits:
        assert text.count(right) == 1
        text = text.replace(right, wrong)
    (tmp_path / "loop.py").write_text(text)
    task = Task(str(tmp_path / "loop.py"), "dp1", str(tmp_path / "out"), 2, **how)
    return prove(task, layouts, resume, say=lambda text: None)


def test_a_layout_is_words_with_numbers():
    layout = layout_of("tp2-dp3-zero1-offload", accumulation=4)
    assert (layout.ranks, layout["pp"], layout["zero"], layout["offload"], layout["other"]) == (6, 1, 1, 1, 0)
    assert layout.shares == 12
    for name in ("tp0", "", "tp2--dp2", "2"):
        with pytest.raises(ProblemsError, match="a layout is words with numbers"):
            layout_of(name)


UNUSED = "    model.unused = nn.Parameter(torch.ones(8))\n    proof.load(model)\n"
# a gradient that is nothing but rounding, and Adam's first step with its sign
SIGN = """loss.backward()
        model.unused.grad = torch.tensor([1.0] * 7 + [1e-7 - 2e-7 * proof.layout['sign']])
"""


def test_sound_and_wrong_layouts(tmp_path):
    half = ("parameter.grad /= dp", "parameter.grad /= 1 if proof.layout['sum'] else dp")
    unused = ("    proof.load(model)\n", UNUSED), ("loss.backward()\n", SIGN)
    found = proven(tmp_path, ["dp2", "dp2-sum", "dp1-sign-other"], half, *unused)
    sound, wrong, signed = found.rows
    assert sound.agrees and sound.loss < 1e-6 and sound.gradient < 1e-5
    assert signed.agrees and signed.unasked == ["other"] and "never asked for other" in found.told()
    first = wrong.first
    assert not wrong.agrees and (first.step, first.kind, first.name) == (1, "gradient", "2.bias")
    assert (first.ranks, first.alike, first.mistake.kind) == ([0, 1], (5, 5), "factor")
    assert first.mistake.factor == pytest.approx(2) and first.mistake.degrees == ["dp"]
    assert "it is 2 times as large, as data parallel degree" in " ".join(found.told().split())


DRAWS = "(loss * (2 + time.time_ns() % 1000)).backward()"
IGNORES = "model(torch.ones(8, 4)), torch.ones(8, 2)"
BAD = [
    ("a second run in one process has another gradient of 2.bias", "loss.backward()", DRAWS),
    ("half of the batch gives the loss", 'model(mine["x"]), mine["y"]', IGNORES),
    ("step.. came before watch", "proof.watch(model, optimizer)", "pass"),
]


@pytest.mark.parametrize(("why", "right", "wrong"), BAD)
def test_what_no_adapter_may_do_is_named(why, right, wrong, tmp_path):
    with pytest.raises(ProblemsError, match=why):
        proven(tmp_path, ["dp1"], ("import torch\n", "import time\nimport torch\n"), (right, wrong))


WATCH = "    proof.watch("
LOAD = "    proof.load(model)\n"
STEP = "        optimizer.step()"
TWICE = "    if proof.layout['own']:\n        model[0].weight.data.mul_(2)\n" + WATCH
NAMED = "    proof.load(model, names=lambda name: 'a' + name if proof.layout['names'] else name)\n"
COMPARED = "        proof.step(loss.item(), norm)\n"
EARLY = COMPARED + "        if proof.layout['early']:\n            break\n"
WAITS = "        while proof.layout['wait'] and proof.rank:\n            pass\n" + STEP


def test_weights_names_and_missing_steps_of_a_layout_are_named(tmp_path):
    edits = (WATCH, TWICE), (LOAD, NAMED), (COMPARED, EARLY)
    own, names, early = proven(tmp_path, ["dp1-own", "dp1-names", "dp1-early"], *edits).rows
    assert not early.agrees and not early.first and "weight of 0.bias after step 2" in early.lost
    assert (own.first.step, own.first.mistake.kind, own.first.name) == (0, "initial", "0.weight")
    assert "a0.weight is no tensor of the model in one process" in names.failure


def test_a_loop_that_saves_nothing_cannot_be_resumed(tmp_path):
    (row,) = proven(tmp_path, ["dp1"], resume="same").rows
    assert "nothing was saved to proof.checkpoint" in row.failure


@pytest.mark.ci  # half a minute, so that no slow start is taken for a rank that waits
def test_every_rank_says_where_it_is_when_one_waits(tmp_path):
    (wait,) = proven(tmp_path, ["dp2-wait"], (STEP, WAITS), timeout=30.0).rows
    assert "no step came to its end in 30 s" in wait.failure and wait.failure.count("loop.py") >= 2


REFUSED = {
    "--resume same --steps 1": "ask for --steps 2 or more",
    "--resume dp2-": "a layout is words with numbers",
    "--reference dp2": "layouts are compared with one process",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_compared_is_refused_before_anything_is_trained(words, tmp_path, monkeypatch):
    adapter = tmp_path / "loop.py"
    adapter.write_text(LOOP)
    monkeypatch.setattr("sys.argv", ["prove.py", str(adapter), "--layouts", "dp2", *words.split()])
    with pytest.raises(ProblemsError, match=REFUSED[words]):
        command.main()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def train(proof:", "was never closed"),
        ("def train(proof): ...", r"has no batch\(\)"),
        (None, "No such file"),
    ],
)
def test_what_is_no_adapter_is_refused_unrun(text, why, tmp_path):
    adapter = tmp_path / "loop.py"
    if text:
        adapter.write_text(text)
    with pytest.raises(ProblemsError, match=why):
        command.check_adapter(adapter)
