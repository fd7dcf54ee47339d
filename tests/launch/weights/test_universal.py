"""Universal checkpoints of DeepSpeed: their files, and DeepSpeed and Trainer that go on from them."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import transformers
from launching import ROOT, WORKERS, run, run_ranks
from stored import load_weights, model_tensors, write_run
from transformers import AutoConfig, AutoTokenizer, TrainerState

from ds_configs.plan import ANY_GPU
from ds_configs.resolver import resolve
from launch import checkpoint
from launch.checkpoints import run_checkpoints
from launch.checkpoints.manifest import MOMENTS, WEIGHT
from launch.records.metrics import read_metrics
from launch.training.schedule import learning_rate
from launch.weights import universal
from launch.weights.adoption import Adoption
from modeling.families import conversion_of
from recipes import catalog
from recipes.problems import ProblemsError

KINDS = (WEIGHT, *MOMENTS)
WARM = ["model.layers=2", "schedule.kind=linear", "schedule.warmup_steps=6"]
RECIPES = {
    "gpt2": catalog.load("default/sotu", WARM, tiny=True),
    "bert": catalog.load("bert/sotu", [*WARM, "model.layer_norm=post", "model.sentence_head=nsp"], tiny=True),
    "megatron-bert": catalog.load("bert/sotu", [*WARM, "model.layer_norm=pre"], tiny=True),
}
GPT2 = RECIPES["gpt2"]
STEP = 4


def read(path):
    return torch.load(path, weights_only=True)


# --- the files


@pytest.mark.parametrize(("name", "form"), [*((n, "canonical") for n in RECIPES), ("gpt2", "transformers")])
def test_every_parameter_of_the_transformers_model_has_its_numbers(name, form, tmp_path):
    recipe = RECIPES[name]
    own = write_run(tmp_path / "run", recipe, kinds=KINDS, form=form)
    checkpoint.export(f"{own}@{STEP}", str(tmp_path / "out"))
    config = AutoConfig.from_pretrained(tmp_path / "out")
    (kind,) = config.architectures
    model = getattr(transformers, kind)(config)
    folder = tmp_path / "out" / (tmp_path / "out" / "latest_universal").read_text()
    names = {entry.parent.name for entry in folder.glob("zero/*/fp32.pt")}
    assert names == {parameter for parameter, _ in model.named_parameters()}
    expected = conversion_of(recipe.model).to_transformers(model_tensors(recipe), recipe.model)
    kept = {"fp32": lambda x: x, "exp_avg": lambda x: x / 2, "exp_avg_sq": torch.abs}
    for parameter in names:
        files = {path.stem: read(path) for path in (folder / "zero" / parameter).iterdir()}
        count = files.pop("step")
        assert count.shape == () and count == STEP and files.keys() == kept.keys()
        for file, of in kept.items():
            assert torch.equal(files[file]["param"], of(expected[parameter])), (parameter, file)
            assert files[file]["param"].untyped_storage().nbytes() == expected[parameter].nbytes
    assert AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size > 250


def test_steps_schedule_and_rate_are_those_after_the_checkpoint(tmp_path):
    recipe = RECIPES["gpt2"]
    own = write_run(tmp_path / "run", recipe, kinds=KINDS)
    checkpoint.export(str(own), str(tmp_path / "out"))
    rate = learning_rate(recipe, STEP)
    assert 0 < rate < recipe.optimizer.lr
    folder = tmp_path / "out" / "global_step4_universal"
    for name in ("mp_rank_00", "zero_pp_rank_0_mp_rank_00"):
        engine = read(folder / f"{name}_model_states.pt")
        counts = {key: engine[key] for key in ("global_steps", "global_samples", "skipped_steps")}
        assert counts == {"global_steps": 4, "global_samples": 4 * recipe.batch.global_, "skipped_steps": 0}
        assert engine["lr_scheduler"] == read(tmp_path / "out" / "scheduler.pt")
    scheduler = engine["lr_scheduler"]
    assert (scheduler["last_epoch"], scheduler["last_batch_iteration"], scheduler["_step_count"]) == (4, 3, 5)
    optimizer = read(folder / "zero" / "optimizer_state.pt")
    groups = optimizer["param_groups"]
    assert len(groups) == len(list(folder.glob("zero/*/fp32.pt"))), "one for any target's groups"
    assert all(group == {"lr": rate} for group in groups)
    of_zero3 = optimizer["optimizer_state_dict"]
    assert of_zero3 == {"state": {0: {"step": 4}}, "param_groups": [{"lr": rate}]}
    state = TrainerState.load_from_json(tmp_path / "out" / "trainer_state.json")
    assert state.global_step == 4 and [*state.stateful_callbacks] == ["TrainerControl"], "it is saved with it"
    told = json.loads((tmp_path / "out" / "export.json").read_text())
    assert told["step"] == 4 and told["optimizer"]["betas"] == [*recipe.optimizer.betas]


# --- out and in again


def test_an_exported_run_is_adopted_with_its_recipe(tmp_path):
    """Rows beyond its tokenizer's are padding."""
    recipe = GPT2
    own = write_run(tmp_path / "run", recipe, kinds=KINDS)
    checkpoint.export(str(own), str(tmp_path / "out"))
    adopts = Adoption(str(tmp_path / "out"), named="default/sotu", data_from="next")
    again = adopts.begun([], {}, None)
    same = ("optimizer", "schedule", "batch", "steps", "seed", "precision", "dropout", "sequence_length")
    for section in same:
        assert getattr(again, section) == getattr(recipe, section), section
    assert again.sizes_in_data.samples(STEP) == recipe.sizes.samples(STEP)
    plan = adopts.with_remarks(resolve(again, "zero1", 1, ANY_GPU), [], learning_rate)
    (tmp_path / "again").mkdir()
    adopts.write(plan, tmp_path / "again", "0")
    tensors = model_tensors(recipe)
    kept = {WEIGHT: lambda x: x, MOMENTS[0]: lambda x: x / 2, MOMENTS[1]: torch.abs}
    for kind, of in kept.items():
        found = load_weights(run_checkpoints.directory_of(tmp_path / "again", STEP), kind)
        assert found.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert torch.equal(found[key], of(tensor[: len(found[key])])), (kind, key)


# --- refusals


def test_what_cannot_go_on_is_refused_with_every_reason(tmp_path, monkeypatch):
    own = write_run(tmp_path / "run", GPT2)
    (found,) = run_checkpoints.below(own)
    changed = {"optimizer": GPT2.optimizer.model_copy(update={"name": "lamb"})}
    changed["model"] = GPT2.model.model_copy(update={"shared_layers": True})
    monkeypatch.setattr(universal, "free_bytes", lambda place: 1e6)
    with pytest.raises(ProblemsError) as refused:
        universal.check_exportable(found.manifest, GPT2.model_copy(update=changed), tmp_path / "out")
    assert {problem.key for problem in refused.value.problems} == {
        "--universal", "optimizer.name", "model.shared_layers",
    }  # fmt: skip
    for said in ("holds weights only", "optimizer.name=lamb", "1 MB are free"):
        assert said in str(refused.value)


def test_nothing_is_overwritten_and_a_damaged_checkpoint_is_named(tmp_path):
    own = write_run(tmp_path / "run", GPT2, kinds=KINDS)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").touch()
    with pytest.raises(ProblemsError, match="--universal .*taken is not empty: nothing is overwritten"):
        checkpoint.export(str(own), str(taken))
    file = own / "checkpoints" / "step-000004" / "rank-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 8  # of a moment
    file.write_bytes(content)
    with pytest.raises(ProblemsError, match="rank-00001.safetensors has checksum"):
        checkpoint.export(str(own), str(tmp_path / "out"))
    assert {path.name for path in tmp_path.iterdir()} == {"run", "taken"}


def test_a_failure_half_way_leaves_nothing(tmp_path, monkeypatch):
    own = write_run(tmp_path / "run", GPT2, kinds=KINDS)
    save, left = torch.save, [30]

    def until_the_disk_is_full(value, file):
        left[0] -= 1
        if not left[0]:
            raise OSError(28, "No space left on device")
        save(value, file)

    monkeypatch.setattr(torch, "save", until_the_disk_is_full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.export(str(own), str(tmp_path / "out"))
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


# --- DeepSpeed and Trainer go on

RUN = [
    "precision=fp32", "run.save_every=6", "schedule.kind=linear", "schedule.warmup_steps=4",
    "schedule.decay_steps=12", "schedule.min_lr=0", "dropout.hidden=0", "dropout.attention=0",
]  # fmt: skip
TRAINED = {
    "gpt2": ("default/sotu", []),
    "bert": ("bert/sotu", ["model.layer_norm=post", "model.sentence_head=nsp"]),
    "megatron-bert": ("bert/sotu", ["model.layer_norm=pre", "model.sentence_head=none"]),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Family -> its run of 12 steps in fp32, and the export of step 6, made at first use."""
    root, made = tmp_path_factory.mktemp("universal"), {}

    def get(family):
        if family not in made:
            name, settings = TRAINED[family]
            out = root / family
            config = root / f"{family}.json"
            adam = {"type": "AdamW", "params": {"torch_adam": True}}
            config.write_text(json.dumps({"zero_optimization": {"stage": 1}, "optimizer": adam}))
            sets = [word for setting in [*RUN, *settings] for word in ("--set", setting)]
            flags = ["--tiny", "--steps", "12", "--recipe", name, "--ds_config", config, "--out", out, *sets]
            done = run_ranks(2, ROOT / "launch/pretrain.py", *flags)
            assert done.returncode == 0, done.stdout[-4000:]
            exported = root / f"{family}-universal"
            command = [sys.executable, "launch/checkpoint.py", "export", f"{out}@6", "--universal"]
            done = run([*command, str(exported)])
            assert done.returncode == 0 and f'engine.load_checkpoint("{exported}")' in done.stdout, (
                done.stdout
            )
            last = done.stdout.strip().splitlines()[-1]
            assert last.endswith(f"step-000006 -> {exported}: step 6, with both moments of Adam")
            made[family] = out, exported
        return made[family]

    return get


def go_on(root, ranks, own, cases):
    """Losses by step of each case: (export, trainer or own, ZeRO stage, precision, whose Adam)."""
    jobs = []
    for number, (exported, who, stage, precision, adam) in enumerate(cases):
        job = {"run": str(own), "export": str(exported), "out": str(root / f"{number}.json")}
        job |= {"trainer": who == "trainer", "stage": stage, "precision": precision, "adam": adam}
        jobs.append(job)
    (root / "jobs.json").write_text(json.dumps(jobs))
    done = run_ranks(ranks, WORKERS / "universal_runs.py", root / "jobs.json", timeout=900)
    assert done.returncode == 0, done.stdout[-4000:]
    return [json.loads(Path(job["out"]).read_text()) for job in jobs]


def apart(own, losses):
    """The largest difference from the run's own losses of steps 7 to 12."""
    ours = {record.step: record.loss for record in read_metrics(own / "metrics.jsonl").steps}
    assert [int(step) for step in losses] == [*range(7, 13)], losses
    return max(abs(loss - ours[int(step)]) for step, loss in losses.items())


OWN = [("own", stage, "fp32", "torch") for stage in (1, 2)]
COMPILED = [("own", 1, "fp32", "fused"), ("own", 2, "fp32", "cpu"), ("own", 3, "fp32", "fused")]
TRAINER = [
    ("trainer", 1, "fp32", "torch"),
    ("trainer", 2, "fp32", "trainer's"),
    ("trainer", 3, "fp32", "fused"),
]


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "cases"), [(1, [*OWN, *COMPILED]), (2, [*OWN, *COMPILED, *TRAINER])])
def test_deepspeed_and_trainer_have_the_next_losses_of_the_run(ranks, cases, trained, tmp_path):
    own, exported = trained("gpt2")
    found = go_on(tmp_path, ranks, own, [(exported, *case) for case in cases])
    differences = {case: apart(own, losses) for case, losses in zip(cases, found, strict=True)}
    assert max(differences.values()) < 2e-6, differences


@pytest.mark.long
@pytest.mark.parametrize("family", ["bert", "megatron-bert"])
def test_a_bert_goes_on(family, trained, tmp_path):
    own, exported = trained(family)
    (losses,) = go_on(tmp_path, 2, own, [(exported, *OWN[0])])
    assert apart(own, losses) < 2e-6, losses


@pytest.mark.long
def test_bf16_goes_on_from_fp32_with_its_own_rounding(trained, tmp_path):
    own, exported = trained("gpt2")
    cases = [(exported, "own", stage, "bf16", "torch") for stage in (1, 2)]
    found = go_on(tmp_path, 2, own, [*cases, (exported, "own", 3, "bf16", "fused")])
    differences = [apart(own, losses) for losses in found]
    assert max(differences) < 3e-3, differences


@pytest.mark.long
def test_what_deepspeed_cannot_load_ends_as_the_help_says(trained, tmp_path):
    own, exported = trained("gpt2")
    cases = [("own", 0, "fp32", "torch"), ("own", 3, "fp32", "torch"), ("trainer", 3, "fp32", "trainer's")]
    found = go_on(tmp_path, 1, own, [(exported, *case) for case in cases])
    said = [losses["refused"] for losses in found]
    assert said[0] == "KeyError: 'optimizer'"
    assert all("`state_steps` argument must contain a list of singleton tensors" in each for each in said[1:])
    told = " ".join(checkpoint.EXPORT.split())
    assert all(each.removeprefix("RuntimeError: API has changed, ") in told for each in said)


def scaled(factor):
    return lambda held: {"param": held["param"] * factor}


def late(engine):
    scheduler = engine["lr_scheduler"]
    return {**engine, "lr_scheduler": {**scheduler, "last_epoch": scheduler["last_epoch"] - 1}}


def slow(optimizer):
    groups = [{"lr": group["lr"] / 2} for group in optimizer["param_groups"]]
    return {**optimizer, "param_groups": groups}


BROKEN = {
    "weights": ("zero/*/fp32.pt", scaled(1.001)),
    "no moments": ("zero/*/exp_avg.pt", scaled(0)),
    "second moments halved": ("zero/*/exp_avg_sq.pt", scaled(0.5)),
    "one update too few": ("zero/*/step.pt", lambda count: count - 1),
    "the schedule a step late": ("mp_rank_00_model_states.pt", late),
    "another rate in the next step": ("zero/optimizer_state.pt", slow),
}


@pytest.mark.long
def test_a_broken_export_has_other_losses(trained, tmp_path):
    own, exported = trained("gpt2")
    for name, (file, change) in BROKEN.items():
        shutil.copytree(exported, tmp_path / name)
        for path in (tmp_path / name / "global_step6_universal").glob(file):
            torch.save(change(torch.load(path)), path)
    found = go_on(tmp_path, 1, own, [(tmp_path / name, *OWN[0]) for name in BROKEN])
    differences = {name: apart(own, losses) for name, losses in zip(BROKEN, found, strict=True)}
    assert min(differences.values()) > 1e-5, differences
