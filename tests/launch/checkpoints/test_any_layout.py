"""A checkpoint of any layout goes on under any other, along the curve of the run that was never stopped."""

import itertools
import json

import pytest
from launching import DEVICE, WORKERS, run_ranks
from stored import layers_of_files, load_weights

from launch.checkpoints import run_checkpoints

CASES = {  # name: processes, case
    "one": (1, {"ds_config": "zero1"}),
    "zero0": (1, {"ds_config": "zero0"}),
    "one zero3": (1, {"ds_config": "zero3"}),
    "tp2": (2, {"ds_config": "zero1", "tp": 2}),
    "pp2": (2, {"ds_config": "pipeline", "pp": 2, "settings": ["batch.accumulation=4"]}),
    "dp2 zero0": (2, {"ds_config": "zero0", "dp": 2}),
    "dp2 zero1": (2, {"ds_config": "zero1", "dp": 2}),
    "dp2 zero2": (2, {"ds_config": "zero2", "dp": 2, "settings": ["batch.accumulation=2"]}),
    "dp2 zero3": (2, {"ds_config": "zero3", "dp": 2, "settings": ["activation_checkpointing=full"]}),
    "transformers": (1, {"ds_config": "zero1", "settings": ["model.implementation=transformers"]}),
    "transformers zero0": (1, {"ds_config": "zero0", "settings": ["model.implementation=transformers"]}),
    "dp2 transformers zero3": (
        2,
        {"ds_config": "zero3", "dp": 2, "settings": ["model.implementation=transformers"]},
    ),
    "dp2 zero3 offload": (2, {"ds_config": "zero3_offload", "dp": 2}),
    "dp4 zero3": (4, {"ds_config": "zero3", "dp": 4}),
    "tp2 dp2 zero3": (4, {"ds_config": "zero3", "tp": 2, "dp": 2}),
    "tp2 pp2": (4, {"ds_config": "3d", "tp": 2, "pp": 2}),
    "tp2 pp2 dp2": (8, {"ds_config": "3d", "tp": 2, "pp": 2, "dp": 2}),
}
# Each way to lay out the state follows another and is followed by one.
RING = ["one", "tp2", "pp2", "dp2 zero2", "dp2 zero3", "dp2 transformers zero3", "zero0"]
LONG_RING = [
    "one", "dp2 zero1", "dp2 zero0", "dp2 zero3 offload", "tp2 dp2 zero3", "tp2 pp2", "transformers",
    "transformers zero0", "one zero3",
]  # fmt: skip
MATRIX = [
    "one", "tp2", "pp2", "dp2 zero1", "dp2 zero2", "dp2 zero3", "dp2 zero3 offload", "tp2 dp2 zero3",
    "tp2 pp2", "tp2 pp2 dp2",
]  # fmt: skip
LOSS, WEIGHTS = 2e-6, 2e-6  # nats; largest difference of an element
HEADS = 4  # of the tiny recipes


class Runs:
    """Runs below one directory, in the order in which they are asked for."""

    def __init__(self, out, recipe=None, settings=()):
        self.out, self.recipe, self.settings, self.jobs = out, recipe, settings, []

    def add(self, name, case, steps, source=None, **changed):
        processes, how = CASES[case]
        how = {**how, **changed} | ({"recipe": self.recipe} if self.recipe else {})
        how["settings"] = [*how.get("settings", ()), *self.settings]
        there = None
        if source:
            there = str(
                run_checkpoints.directory_of(
                    self.out / source / "checkpoints", source_steps(self.jobs, source)
                )
            )
        job = {"name": name, "out": str(self.out / name), "case": how, "steps": steps, "source": there}
        self.jobs.append((processes, job))

    def launch(self, env=None):
        """One launch for neighbours of as many processes."""
        for number, (processes, group) in enumerate(itertools.groupby(self.jobs, key=lambda each: each[0])):
            file = self.out / f"jobs-{number}.json"
            file.write_text(json.dumps([job for _, job in group]))
            launched = run_ranks(processes, WORKERS / "any_layout.py", file, env=env, timeout=900)
            assert launched.returncode == 0, launched.stdout[-4000:]

    def losses(self, name):
        return {
            int(step): loss
            for step, loss in json.loads((self.out / name / "losses.json").read_text()).items()
        }

    def weights(self, name):
        return load_weights(run_checkpoints.newest(self.out / name / "checkpoints").directory)

    def differences(self, name, whole):
        """Largest differences of losses and of weights from those of the run `whole`."""
        losses, reference = self.losses(name), self.losses(whole)
        loss = max(abs(losses[step] - reference[step]) for step in losses)
        return loss, largest(self.weights(name), self.weights(whole))


def source_steps(jobs, name):
    return next(job["steps"] for _, job in jobs if job["name"] == name)


def largest(a, b):
    """But for the biases of keys: their gradient is nothing but rounding, which Adam makes steps of."""
    assert a.keys() == b.keys()
    return max(float((but_keys(name, a[name]) - but_keys(name, b[name])).abs().max()) for name in a)


def but_keys(name, tensor):
    """Canonical QKV is ordered (head, q/k/v, D)."""
    return tensor.view(HEADS, 3, -1)[:, ::2] if name.endswith("qkv.bias") else tensor


def check_ring(tmp_path, names, recipe=None, settings=(), each=2):
    """Train `each` steps under every layout."""
    if DEVICE == "board":  # accelerate does not know it
        names = [name for name in names if "transformers" not in name]
    runs, steps = Runs(tmp_path, recipe, settings), each * len(names)
    runs.add("whole", names[0], steps)
    before = None
    for number, name in enumerate(names, 1):
        runs.add(f"{number} {name}", name, each * number, before)
        before = f"{number} {name}"
    runs.launch()
    whole = runs.losses("whole")
    for number, name in enumerate(names, 1):
        losses = runs.losses(f"{number} {name}")
        assert sorted(losses) == [*range(each * (number - 1) + 1, each * number + 1)]
        for step, loss in losses.items():
            assert loss == pytest.approx(whole[step], abs=LOSS), f"{name}, step {step}"
    assert largest(runs.weights(before), runs.weights("whole")) < WEIGHTS


def test_a_run_goes_on_under_other_layouts(tmp_path):
    check_ring(tmp_path, ["tp2", "dp2 zero3", "one"], each=1)


@pytest.mark.ci
def test_a_run_goes_on_under_one_layout_after_the_other(tmp_path):
    check_ring(tmp_path, RING, each=1)


BY_MUON = ["optimizer.name=muon", "optimizer.lr=0.004"]


def test_muon_goes_on_under_another_layout(tmp_path):
    """Its matrices have one moment."""
    check_ring(tmp_path, ["dp2 zero2", "tp2"], settings=BY_MUON)


@pytest.mark.long
@pytest.mark.parametrize("recipe", [None, "bert/sotu"])
def test_muon_goes_on_under_every_layout(tmp_path, recipe):
    ring = ["one", "dp2 zero1", "dp2 zero0", "tp2", "dp2 zero3", "pp2", "tp2 dp2 zero3", "tp2 pp2", "zero0"]
    check_ring(tmp_path, ring, recipe, BY_MUON)


@pytest.mark.long
def test_a_run_goes_on_under_unequal_stages_and_in_one_process_again(tmp_path):
    """A larger vocabulary takes layers from the last stage."""
    check_ring(tmp_path, ["one", "pp2", "one"], settings=["model.vocab_size=2048"])
    layers = layers_of_files(tmp_path / "2 pp2" / "checkpoints")
    assert [*layers.values()] == [[0, 1, 2], [3]]


@pytest.mark.long
def test_a_run_goes_on_under_rarer_layouts(tmp_path):
    check_ring(tmp_path, LONG_RING)


@pytest.mark.long
@pytest.mark.parametrize("counts", ["steps", "samples"])
def test_a_run_goes_on_in_during_and_after_a_ramp_up(tmp_path, counts):
    """Steps of 2, 4, 6 and 8 samples; the batch is full in the last two runs."""
    ramp = ["batch.rampup={start: 2, increment: 2, samples: 36}", f"schedule.counts={counts}"]
    ring = ["one", "dp2 zero2", "tp2", "pp2", "zero0", "dp2 zero3 offload", "tp2 dp2 zero3", "tp2 pp2", "one"]
    check_ring(tmp_path, ring, settings=[*ramp, "batch.accumulation=null"])


@pytest.mark.long
@pytest.mark.parametrize("shuffle_buffer", [0, 40])
def test_a_stream_goes_on_with_another_number_of_ranks(tmp_path, shuffle_buffer):
    """Each rank reads files of its own; the checkpoint has the places in all of them."""
    for file in range(4):
        lines = [json.dumps({"text": f"{file} {i} " + "some words, and more. " * (9 + i)}) for i in range(30)]
        (tmp_path / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    data = (
        f"data={{source: jsonl, name: {tmp_path}/*.jsonl, streaming: true, validation_every: 5, "
        f"shuffle_buffer: {shuffle_buffer}, tokenizer: {{kind: gpt2}}}}"
    )
    settings = [data, "model.vocab_size=50257", "batch.accumulation=null"]
    settings += ["batch.rampup={start: 2, increment: 2, samples: 9}"]  # 2, 2, 4, 4, 8 and 8 samples
    check_ring(tmp_path, ["one", "dp2 zero2", "one zero3"], settings=settings)


@pytest.mark.long
def test_a_run_goes_on_in_another_precision(tmp_path):
    """bf16 and fp16 round what they compute, and nothing of what is kept."""
    runs = Runs(tmp_path)
    runs.add("whole", "one", 8)
    runs.add("fp32", "one", 2)
    runs.add("bf16", "one", 4, "fp32", precision="bf16")
    runs.add("fp16", "one", 6, "bf16", precision="fp16", ds_config="fp16_dynamic")
    runs.add("back", "zero0", 8, "fp16")
    runs.launch()
    whole = runs.losses("whole")
    for name in ("bf16", "fp16", "back"):
        for step, loss in runs.losses(name).items():
            assert loss == pytest.approx(whole[step], abs=0.03), f"{name}, step {step}"


@pytest.mark.long
def test_a_run_goes_on_from_nvme_and_to_it(tmp_path, monkeypatch):
    """Of a model large enough for DeepSpeed to swap: 512 wide."""
    (tmp_path / "nvme").mkdir()
    wide = ["model.hidden=512", "model.layers=2", "model.heads=8"]
    runs = Runs(tmp_path, settings=wide)
    runs.add("whole", "one", 8)
    runs.add("1", "one", 2)
    runs.add("2", "one", 4, "1", ds_config="zero_infinity")
    runs.add("3", "one", 6, "2", ds_config="zero_infinity")
    runs.add("4", "one", 8, "3")
    try:
        runs.launch(env={"MEGARECIPES_NVME": str(tmp_path / "nvme")})
    except AssertionError as error:
        if "libaio is missing" in str(error):
            pytest.skip("no libaio")
        raise
    assert [*(tmp_path / "nvme").rglob("*.swp")], "something was swapped"
    whole = runs.losses("whole")
    for name in ("2", "3", "4"):
        for step, loss in runs.losses(name).items():
            assert loss == pytest.approx(whole[step], abs=LOSS), f"{name}, step {step}"


@pytest.mark.long
def test_a_bert_goes_on_under_one_layout_after_the_other(tmp_path):
    check_ring(tmp_path, ["pp2", "tp2", "dp2 zero3"], recipe="bert/sotu")


@pytest.mark.long
def test_a_bert_goes_on_where_ranks_hold_nothing_of_a_tensor(tmp_path):
    """The bias of its sentence head has two elements: under ZeRO-3 two of four ranks hold padding alone."""
    check_ring(tmp_path, ["one", "dp4 zero3", "one"], recipe="bert/sotu", each=1)


@pytest.mark.long
@pytest.mark.parametrize("recipe", [None, "bert/sotu"])
def test_every_layout_goes_on_under_every_other(tmp_path, recipe):
    """Each first 4 of 8 steps of one layout and then 4 of another, against 8 of the first."""
    runs = Runs(tmp_path, recipe)
    for name in MATRIX:
        runs.add(name, name, 8)
        runs.add(f"{name}, half", name, 4)
    pairs = sorted(itertools.product(MATRIX, MATRIX), key=lambda pair: CASES[pair[1]][0])
    for source, into in pairs:
        runs.add(f"{source} to {into}", into, 8, f"{source}, half")
    runs.launch()
    table = {pair: runs.differences(f"{pair[0]} to {pair[1]}", pair[0]) for pair in pairs}
    for (source, into), (loss, weights) in table.items():
        print(f"{source:20} {into:20} {loss:.1e} {weights:.1e}")
    assert all(loss < LOSS and weights < WEIGHTS for loss, weights in table.values())
    assert all(table[name, name] == (0, 0) for name in MATRIX), "the same layout goes on to the bit"
