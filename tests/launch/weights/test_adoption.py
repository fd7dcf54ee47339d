"""DeepSpeed runs of `transformers` models are adopted: weights, moments, counters, settings, next losses."""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler
from launching import ROOT, WORKERS, run, run_ranks
from stored import load_weights
from transformers import BertConfig, BertForMaskedLM

from ds_configs.plan import ANY_GPU
from ds_configs.resolver import resolve
from launch import pretrain
from launch.checkpoints import run_checkpoints
from launch.checkpoints.manifest import Progress, ScalerState
from launch.records.metrics import read_metrics
from launch.training.schedule import learning_rate
from launch.weights import adopted_checkpoint
from launch.weights.adoption import Adoption
from launch.weights.deepspeed_weights import open_run
from launch.weights.initial_weights import InitialWeights
from launch.weights.their_settings import TheirSettings
from modeling.families import conversion_of
from modeling.formats import pickles
from modeling.formats.deepspeed import states
from recipes import catalog
from recipes.problems import ProblemsError

AUTO = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto", "gradient_clipping": "auto", "zero_allow_untested_optimizer": True,
}  # fmt: skip
ADAM = {
    "type": "AdamW",
    "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
}
LOOP = {"optimizer": ADAM, "gradient_clipping": 0.5}
SAID = ["--data_from", "next", "--recipe"]
BF16 = {"bf16": {"enabled": True}}


def zero(stage, **more):
    return {"zero_optimization": {"stage": stage, **more}}


def train(out, ranks, cases):
    out.mkdir(exist_ok=True)
    (out / "cases.json").write_text(json.dumps([{"micro": 3, **case} for case in cases]))
    done = run_ranks(ranks, WORKERS / "their_runs.py", out, out / "cases.json", timeout=900)
    assert done.returncode == 0, done.stdout[-5000:]


@pytest.fixture(scope="session")
def theirs(tmp_path_factory):
    """Loops of two ranks: GPT-2 under stages 2 and 3 with a config.json."""
    out = tmp_path_factory.mktemp("theirs")
    stages = {"loop": 2, "loop3": 3}
    cases = [{"name": n, "model": "gpt2", "loop": True, "ds": {**LOOP, **zero(s)}} for n, s in stages.items()]
    train(out, 2, cases)
    return out


@pytest.fixture
def copied(theirs, tmp_path):
    """A copy of the loop's directory, to be damaged."""
    return Path(shutil.copytree(theirs / "loop", tmp_path / "copy"))


def opened(directory, *settings, stated=(), data_from="next", **how):
    """The adoption and its recipe."""
    config = directory / "config.json"
    bert = config.exists() and "bert" in config.read_text()
    named = "bert/sotu" if bert else "default/sotu"
    found = Adoption(str(directory), stated=stated, named=named, data_from=data_from, **how)
    said = [*settings]
    if not (directory / "training_args.bin").exists():
        said += ["steps=12", "schedule.kind=constant", "schedule.warmup_steps=0", "schedule.min_lr=0"]
    return found, found.begun(said, {}, None)


def adopt(directory, out, *arguments, recipe=catalog.DEFAULT_RECIPE, script=("launch/checkpoint.py",)):
    command = [*map(str, script), "adopt", str(directory), "--out", str(out), *SAID, recipe]
    return run([sys.executable, *command, *arguments], timeout=400)


def written(directory, root, *settings, **how):
    """Write the checkpoint of an adopted run; return its directory."""
    found, recipe = opened(directory, *settings, **how)
    plan = found.with_remarks(resolve(recipe, "zero1", 1, ANY_GPU), ["schedule.kind"], learning_rate)
    root.mkdir(parents=True, exist_ok=True)
    found.write(plan, root, "0")
    (root / "recipe.yaml").write_text(catalog.dump(recipe))
    return run_checkpoints.directory_of(root, 6)


def converted(loop):
    """What DeepSpeed's own tool makes of a loop."""
    out = loop.with_name(f"{loop.name}-universal")
    ds_to_universal.main(argparse.Namespace(
        input_folder=str(loop / "global_step6"), output_folder=str(out), num_extract_workers=1,
        num_merge_workers=1, keep_temp_folder=False, strict=True, inject_missing_state=True,
    ))  # fmt: skip
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(loop / name, out)
    return out


@pytest.fixture(scope="session")
def universal(theirs):
    return converted(theirs / "loop")


def test_weights_and_moments_are_those_of_deepspeeds_own_tool(theirs, universal, tmp_path):
    directory = written(theirs / "loop", tmp_path)
    _, recipe = opened(theirs / "loop")
    for kind, named in {"weight": "fp32", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}.items():
        own = {each.parent.name: torch.load(each)["param"] for each in universal.glob(f"zero/*/{named}.pt")}
        expected = dict(conversion_of(recipe.model).to_canonical(own, recipe.model))
        found = load_weights(directory, kind)
        assert found.keys() == expected.keys() and len(found) > 40
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    held = run_checkpoints.read(directory).manifest
    assert (held.progress.step, held.progress.adam_steps, held.data) == (6, 6, {"position": 72})
    assert all(len(tensor.sums) == 3 for tensor in held.tensors.values())


def test_a_universal_checkpoint_gives_the_same(theirs, universal, tmp_path):
    """Of stage 3 its tensors are flat."""
    pairs = {"loop": universal, "loop3": converted(theirs / "loop3")}
    for name, other in pairs.items():
        held = run_checkpoints.read(written(theirs / name, tmp_path / name)).manifest
        same = run_checkpoints.read(written(other, tmp_path / other.name)).manifest
        assert held.progress == same.progress and held.files == same.files and held.tensors == same.tensors


def test_what_files_state_is_taken_and_the_rest_is_asked_for_at_once(theirs):
    with pytest.raises(ProblemsError) as refused:
        Adoption(str(theirs / "loop")).begun([], {}, None)
    said = str(refused.value)
    for wanted in (
        "ZeRO-2 of 2 ranks after step 6", "optimizer.betas=[0.9, 0.95]", "optimizer.clip=0.5",
        "batch.global=12", "--text PATH", "--data_from first", "--set steps=", "--set schedule.kind=",
    ):  # fmt: skip
        assert wanted in said, said
    assert "such as: python launch/pretrain.py" in said
    _, recipe = opened(theirs / "loop")
    assert (recipe.batch.global_, recipe.optimizer.lr, recipe.precision) == (12, 1e-3, "fp32")
    assert recipe.branch.data_from == 0 and recipe.sizes_in_data.samples(6) == 72
    assert recipe.branch.changed == (), "it decays matrices alone, as we do"
    _, anew = opened(theirs / "loop", data_from="first")
    assert anew.sizes_in_data.samples(6) == 0


def test_an_adopted_run_of_no_step_or_of_no_decay_is_refused_with_a_line_that_works(theirs):
    found, _ = opened(theirs / "loop")
    ended = ["schedule={kind: linear, decay_steps: 5}"]
    for settings, steps, line in (
        (["schedule={kind: constant}", "steps=6"], None, "--set steps=7"),
        (["schedule={kind: constant, warmup_steps: 20}", "steps=99"], 6, "--steps=20"),
        ([*ended, "steps=12"], None, "--set schedule.decay_steps=12"),
        (["schedule={kind: constant, warmup_steps: 20}", "steps=12"], None, "--set steps=20"),
    ):
        with pytest.raises(ProblemsError, match=f"^--adopt .*; give {line}$"):
            found.begun(settings, {}, steps)
        if line.startswith("--set"):
            settings = [*settings, line.removeprefix("--set ")]
        assert found.begun(settings, {}, steps and 20).steps > 6


def test_what_its_optimizer_does_otherwise_is_a_change_of_the_recipe():
    """Trainer has one group of all parameters where the JSON has an optimizer."""
    shapes = {"wte.weight": (9, 4), "ln.weight": (4,), "ln.bias": (4,)}
    adam = {"lr": 1e-3, "betas": (0.9, 0.95)}

    def changes(*groups):
        numbered = {name: number for number, (group, _) in enumerate(groups) for name in group}
        parameters = {name: torch.empty(shape) for name, shape in shapes.items()}
        own = [{**adam, **own} for _, own in groups]
        state = SimpleNamespace(numbered=numbered, parameters=parameters, groups=own, config={})
        found = TheirSettings(Path("nowhere"), state, {}).changes()
        return {change.key: (change.was, change.now) for change in found}

    decayed = {"weight_decay": 0.1}
    key = "optimizer.weight_decay of ln.weight, ln.bias"
    assert changes((shapes, decayed)) == {key: ([0.1], "0.1 of matrices, none of vectors")}
    matrices = {"wte.weight": (9, 4)}
    vectors = {"ln.weight": (4,), "ln.bias": (4,)}
    assert changes((matrices, decayed), (vectors, {"weight_decay": 0.0})) == {}
    slower = {"weight_decay": 0.0, "lr": 1e-4}
    assert changes((matrices, decayed), (vectors, slower)) == {"optimizer.lr": ([1e-3, 1e-4], 1e-3)}


TORCH = {"amsgrad": False, "decoupled_weight_decay": True}


def other_optimizer(copy, json=None, drop=(), second=None, **groups):
    """Change the JSON's optimizer (False: there is none) and the groups of a save; `second`: of its second."""

    def in_json(values):
        del values["ds_config"]["optimizer"]
        if json is not False:
            values["ds_config"]["optimizer"] = json or ADAM

    def in_groups(values):
        for number, group in enumerate(
            values["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
        ):
            for key in drop:
                group.pop(key, None)
            group.update(groups, **(second or {}) if number else {})

    changed(in_json, "mp_rank_00_model_states.pt")(copy)
    for rank in (0, 1):
        changed(in_groups, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")(copy)


BARE = {"drop": ["amsgrad", "decoupled_weight_decay", "fused"]}
L2 = {**ADAM, "type": "Adam", "params": {**ADAM["params"], "adam_w_mode": False}}
OTHER_BETAS = {**ADAM, "params": {**ADAM["params"], "betas": [0.9, 0.99]}}
OTHERS = {
    "L2": (dict(json=L2, **BARE, bias_correction=True), "adds weight decay to gradients"),
    "RAdam": (dict(json=False, drop=["amsgrad"], decoupled_weight_decay=False), "RAdam and NAdam of torch"),
    "RAdam instead of the JSON's": (dict(drop=["amsgrad"]), "RAdam and NAdam of torch"),
    "other betas": (dict(json=OTHER_BETAS), r"states betas=\[0.9, 0.99\], and its groups have"),
    "a client's": (dict(json=False), "that its optimizer is AdamW; --adopt_optimizer adamw"),
    "a client's with settings like Adam's": (BARE, "that its optimizer is AdamW; --adopt_optimizer adamw"),
    "another rate": (dict(second={"lr": 1e-4}), r"differ in optimizer.lr: \[0.001, 0.0001\].*with --regroup"),
    "other eps": (dict(second={"eps": 1e-6}), "differ in optimizer.eps"),
    "decay of vectors": (dict(second={"weight_decay": 0.1}), "differ in optimizer.weight_decay of"),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_another_optimizer_is_refused_or_asked_for(case, copied):
    how, said = OTHERS[case]
    other_optimizer(copied, **how)
    with pytest.raises(ProblemsError, match=said):
        opened(copied)
    if "--" in said or "differ" in said:
        assert opened(copied, adamw=True, regroups=True)[1].optimizer.name == "adamw"


def test_the_line_of_the_refusal_trains_at_the_adopted_rate(copied, tmp_path, monkeypatch):
    """Also where the rate had begun to fall by a schedule that no file states."""
    other_optimizer(copied, json=False, lr=7.5e-4, initial_lr=1e-3)
    (copied / "config.json").unlink()
    (tmp_path / "mine.txt").write_text("words " * 99)
    words = ["launch/pretrain.py", "--plan", "--adopt", str(copied), "--out", str(tmp_path / "run")]
    words += ["--text", str(tmp_path / "mine.txt"), "--set", "run.seed=3", "--steps", "9"]
    monkeypatch.setattr(sys, "argv", words[:-4] + words[-2:])

    def plan(line):
        return pretrain.checked_job(pretrain.build_parser().parse_args(line)).plan

    with pytest.raises(ProblemsError) as refused:
        plan(sys.argv[1:])
    line = shlex.split(str(refused.value).split("such as: python ")[1])
    assert line[: len(sys.argv)] == sys.argv
    for flag in ("n_head=1", "dropout.hidden=0.1", "--adopt_optimizer", "--data_from"):
        assert flag in line, line
    recipe = plan(line[1:]).recipe
    assert learning_rate(recipe, 6) == learning_rate(recipe, 8) == 7.5e-4
    assert (recipe.steps, recipe.batch.global_) == (9, 12)


def test_a_save_without_deepspeed_is_read_by_the_models_own_order(tmp_path):
    """BERT's query, key and value are three tensors, which ours joins."""
    config = BertConfig(
        num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=32, vocab_size=99,
        max_position_embeddings=8,
    )  # fmt: skip
    model = BertForMaskedLM(config)
    model.save_pretrained(tmp_path)
    named = dict(model.named_parameters())
    groups = [[p for p in named.values() if (p.dim() > 1) == decayed] for decayed in (True, False)]
    adam = torch.optim.AdamW([{"params": group} for group in groups])
    for _ in range(3):
        model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        adam.step()
    model.save_pretrained(tmp_path)
    torch.save(adam.state_dict(), tmp_path / "optimizer.bin")
    scaler = {"scale": 1024.0, "growth_factor": 2.0, "growth_interval": 50, "_growth_tracker": 2}
    torch.save(scaler, tmp_path / "scaler.pt")
    state = open_run(tmp_path).state
    assert state.parameters.keys() == named.keys() and (state.steps, state.updates) == (3, 3)
    for name, parameter in named.items():
        held = {"fp32": parameter, **adam.state[parameter]}
        assert all(torch.equal(state.parameters[name].read(kind), held[kind]) for kind in states.KINDS)
    half = SimpleNamespace(precision="fp16")
    assert adopted_checkpoint._scaler(half, state) == ScalerState(1024.0, 3, -1, 1)
    assert Adoption(str(tmp_path)).scaling["loss_scale_window"] == 50
    assert InitialWeights(str(tmp_path)).model().shape["model.vocab_size"] == 99, "its weights are there, too"
    (tmp_path / "optimizer.bin").unlink()
    with pytest.raises(ProblemsError, match="weights alone.*--init_from"):
        open_run(tmp_path)


def test_directories_lead_to_the_flag_that_reads_them(theirs, tmp_path):
    for number in (6, 12):
        (tmp_path / f"checkpoint-{number}").mkdir()
    named = "holds .*/checkpoint-6, .*/checkpoint-12: .*give one of them, such as .*/checkpoint-12"
    for openly in (open_run, lambda path: InitialWeights(str(path)).saved()):
        with pytest.raises(ProblemsError, match=named):
            openly(tmp_path)
    with pytest.raises(ProblemsError, match=r"pretrain\.py --adopt .*/loop"):
        InitialWeights(str(theirs / "loop")).saved()
    for stage in ("loop", "loop3"):
        weights = InitialWeights(str(theirs / stage / "global_step6"))
        with pytest.raises(ProblemsError, match=r"pretrain\.py --adopt .*/global_step6"):
            weights.model()


def test_heads_and_dropout_are_asked_for_where_no_config_states_them(copied):
    (copied / "config.json").unlink()
    with pytest.raises(ProblemsError, match=r"heads; --weights_args n_head=1(.|\n)*dropout\.hidden"):
        opened(copied)
    with pytest.raises(ProblemsError, match=r"dropout\.hidden"):
        opened(copied, stated=["n_head=4"])
    _, recipe = opened(copied, "dropout.hidden=0", "dropout.attention=0", stated=["n_head=4"])
    assert (recipe.model.layers, recipe.model.hidden, recipe.model.heads) == (4, 64, 4)


class Runs:
    """What a hostile pickle would have run."""

    def __reduce__(self):
        return os.system, ("true",)


def changed(change, name="zero_pp_rank_0_mp_rank_00_optim_states.pt"):
    """Change a file of the save: `change` is given its values."""

    def damage(copy):
        file = copy / "global_step6" / name
        values = torch.load(file, weights_only=False)
        change(values)
        torch.save(values, file)

    return damage


def optimizer(values):
    return values["optimizer_state_dict"]["base_optimizer_state"]["state"]


def pieces(values, kind, name, other):
    """Flat numbers of two parameters in a rank's partition."""
    addresses = values["optimizer_state_dict"]["param_slice_mappings"][0]
    flat = optimizer(values)[0][kind]
    spans = [slice(a.start, a.start + a.numel) for a in (addresses[name], addresses[other])]
    return [flat[span] for span in spans]


def moment_of_another(values):
    one, other = pieces(
        values, "exp_avg", "transformer.h.0.attn.c_attn.weight", "transformer.h.1.attn.c_attn.weight"
    )
    one.copy_(other.clone())


def transposed(values):
    one, _ = pieces(values, "exp_avg", "transformer.h.0.attn.c_proj.weight", "transformer.wpe.weight")
    one.copy_(one.clone().view(64, 64).t().reshape(-1))


def weights_swapped(values):
    flat = values["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
    flat.data.copy_(flat.data.roll(64))


def other_step(values):
    for held in optimizer(values).values():
        held["step"] = held["step"] - 1


def hostile(values):
    values["client"] = Runs()


def truncated(copy):
    file = copy / "global_step6" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:-1000])


def without(pattern):
    def damage(copy):
        for path in copy.glob(pattern):
            path.unlink()

    return damage


def half_written(copy):
    shutil.copytree(copy / "global_step6", copy / "global_step12")
    (copy / "global_step12" / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    (copy / "latest").write_text("global_step12")


def more_ranks(values):
    values["optimizer_state_dict"]["partition_count"] = [4, 4]


def no_number(values):
    optimizer(values)[0]["exp_avg"][3] = float("nan")


FAULTS = {
    "moment of another tensor": (changed(moment_of_another), "moments that no gradients give"),
    "transposed moment": (changed(transposed), "moments that no gradients give"),
    "weights of another place": (changed(weights_swapped), "differs between the optimizer's and the model's"),
    "another step": (changed(other_step), "Adam has counted"),
    "a missing rank": (without("*/zero_pp_rank_1*"), "lacks the optimizer's file of rank 1"),
    "more ranks": (changed(more_ranks), "lacks the optimizer's file of rank 2, 3"),
    "no model": (without("*/mp_rank_00*"), "lacks mp_rank_00_model_states.pt"),
    "truncated": (truncated, "cut off"),
    "os.system": (changed(hostile), r"names (posix|os)\.system"),
    "half-written": (half_written, "lacks the optimizer's file of rank 1"),
    "no latest": (without("latest"), "latest"),
    "NaN": (changed(no_number), "NaN"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_refused(fault, copied, tmp_path):
    damage, said = FAULTS[fault]
    damage(copied)
    with pytest.raises(ProblemsError, match=said):
        written(copied, tmp_path / "new")
    assert not [*(tmp_path / "new").glob("step-*")]


def test_the_bound_of_the_moments_holds_for_any_gradients_and_is_reached():
    torch.manual_seed(0)
    for betas, updates in (((0.9, 0.999), 1), ((0.9, 0.999), 50), ((0.9, 0.95), 6), ((0.0, 0.5), 9)):
        bound = adopted_checkpoint.moment_bound(betas, updates)
        first = second = torch.zeros(2000, dtype=torch.float64)
        for step in range(updates):
            gradients = torch.randn(2000, dtype=torch.float64) * 10.0 ** torch.randint(-4, 4, (2000,))
            gradients[0] = (betas[0] / betas[1]) ** (
                updates - 1 - step
            )  # parallel: Cauchy and Schwarz are equal
            first = betas[0] * first + (1 - betas[0]) * gradients
            second = betas[1] * second + (1 - betas[1]) * gradients**2
        ratio = first.abs() / second.sqrt()
        assert ratio.max() <= bound * (1 + 1e-9)
        assert ratio[0] == pytest.approx(bound, rel=1e-9)


def flipped(file, record, bit):
    """Change a bit of a record of a file of torch.save."""
    found = zipfile.ZipFile(file).getinfo(f"{file.stem}/{record}")
    whole = bytearray(file.read_bytes())
    lengths = whole[found.header_offset + 26 : found.header_offset + 30]
    start = (
        found.header_offset
        + 30
        + int.from_bytes(lengths[:2], "little")
        + int.from_bytes(lengths[2:], "little")
    )
    whole[start + bit // 8 % found.file_size] ^= 1 << bit % 8
    file.write_bytes(whole)


def test_every_flipped_bit_of_a_record_is_named(tmp_path):
    tensors = {"a": torch.arange(999.0), "b": torch.ones(7)}
    for number in range(60):
        file = tmp_path / f"weights-{number}.pt"
        torch.save(tensors, file)
        record = ("data/0", "data/1", "data.pkl")[number % 3]
        flipped(file, record, random.Random(number).randrange(99_999))
        with pytest.raises(
            ProblemsError, match=f"{file}: is damaged in its record 'weights-{number}/{record}'"
        ):
            pickles.load(file)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(tensors, file)
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(pickles.load(file)["a"], tensors["a"]), "it has no sums"


def test_damage_is_named_at_every_door(copied, tmp_path):
    file = copied / "global_step6" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    flipped(file, "data/2", 1234)
    with pytest.raises(ProblemsError, match=f"{file}: is damaged in its record '.*/data/2'"):
        open_run(copied)
    arguments = tmp_path / "training_args.bin"
    torch.save({"a": 1}, arguments)
    flipped(arguments, "data.pkl", 9)
    with pytest.raises(ProblemsError, match=f"{arguments}: is damaged in its record"):
        _ = TheirSettings(tmp_path, SimpleNamespace(config={}), {}).arguments


@pytest.mark.parametrize("bomb", ["deflated", "of a false size"])
def test_a_record_takes_no_more_memory_than_its_file(bomb, tmp_path):
    file = tmp_path / "bomb.pt"
    torch.save({"a": torch.zeros(9)}, tmp_path / "sound.pt")
    with zipfile.ZipFile(tmp_path / "sound.pt") as sound, zipfile.ZipFile(file, "w") as records:
        for name in sound.namelist():
            how = zipfile.ZIP_DEFLATED if bomb == "deflated" else zipfile.ZIP_STORED
            records.writestr(name, sound.read(name), how)
        if how == zipfile.ZIP_STORED:
            records.filelist[0].file_size = 6 * 10**9
    with pytest.raises(ProblemsError, match="bomb.pt: holds compressed records: torch.save stores them"):
        pickles.load(file)


def test_a_pickle_is_read_without_its_classes(theirs):
    file = theirs / "loop" / "global_step6" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    found = pickles.load(file)["optimizer_state_dict"]
    address = found["param_slice_mappings"][0]["transformer.wte.weight"]
    assert isinstance(address, pickles.StandIn) and address.start == 0
    assert type(found["zero_stage"]).__module__ != "deepspeed.runtime.zero.config"


def test_a_loss_scaler_goes_on_in_fp16(copied):
    scaler = DynamicLossScaler(2.0**24, 1000, 1, 2, False)
    scaler.cur_scale, scaler.cur_iter, scaler.last_overflow_iter = 2.0**20, 6, 3
    changed(lambda values: values["optimizer_state_dict"].update(loss_scaler=scaler))(copied)
    state = states.read(copied)
    found = [adopted_checkpoint._scaler(SimpleNamespace(precision=half), state) for half in ("fp16", "bf16")]
    assert found == [ScalerState(2.0**20, 6, 3, 2), None]


def test_steps_that_fp16_skipped_are_steps_without_updates(copied, tmp_path):
    counts = {"global_steps": 8, "skipped_steps": 2, "global_samples": 96}
    changed(lambda values: values.update(counts), "mp_rank_00_model_states.pt")(copied)
    written(copied, tmp_path / "new")
    held = run_checkpoints.newest(tmp_path / "new").manifest
    assert held.progress == Progress(step=8, adam_steps=6, schedule=6, skipped=2)
    assert held.data == {"position": 96}
    found, recipe = opened(copied)
    asked = []
    found.with_remarks(resolve(recipe, "zero1", 1, ANY_GPU), [], lambda _, done: asked.append(done) or 1e-3)
    assert asked == [6], "the next rate is that of the updates"


def test_its_rules_come_along(copied, tmp_path):
    """In a copy of the JSON, unless that is the user's own and says otherwise."""
    scaler = DynamicLossScaler(2.0**24, 7, 1, 1, False)
    changed(lambda values: values["optimizer_state_dict"].update(loss_scaler=scaler))(copied)
    adoption = Adoption(str(copied))
    config = json.loads(Path(adoption.with_scaling("zero1")).read_text())
    ours = json.loads((ROOT / "ds_configs/zero1.json").read_text())
    assert config == {**ours, "fp16": {**ours["fp16"], "loss_scale_window": 7, "hysteresis": 1}}
    own = tmp_path / "mine.json"
    own.write_text(json.dumps({**ours, "fp16": {"loss_scale_window": 500}}))
    with pytest.raises(ProblemsError, match="has fp16.loss_scale_window=500.*scaler has loss_scale_window=7"):
        adoption.with_scaling(str(own))
    own.write_text(json.dumps(config))
    assert adoption.with_scaling(str(own)) == str(own)


CONSTANT = ["--set", "steps=8", "--set", "schedule.kind=constant", "--set", "schedule.warmup_steps=0"]


def test_an_adoption_that_was_killed_begins_again_by_the_same_command(theirs, tmp_path):
    """Before recipe.yaml is there, and with a checkpoint half written; --resume alone names the command."""
    loop = theirs / "loop"
    for number, name in enumerate(("recipe.yaml", "manifest.json")):
        out = tmp_path / str(number)
        killed = adopt(loop, out, *CONSTANT, script=(WORKERS / "killed_adoption.py", name))
        assert killed.returncode == -9, killed.stdout
        flags = ["--resume", "--out", str(out)]
        if name == "manifest.json":
            assert (out / "checkpoints" / "step-000006.writing").is_dir()
            again = f"adopt it again: python .*adopt {loop} --out {out} .* {' '.join(CONSTANT)}$"
            with pytest.raises(ProblemsError, match=again):
                pretrain.resumed_run(pretrain.build_parser().parse_args(flags))
        more = pretrain.build_parser().parse_args([*flags, "--adopt", str(loop)])
        assert pretrain.resumed_run(more) is None, "it begins again, too"
        done = adopt(loop, out, *CONSTANT)
        assert done.returncode == 0, done.stdout
        assert run_checkpoints.newest(out / "checkpoints").step == 6
        assert pretrain.resumed_run(more).recipe.branch.step == 6
    again = adopt(loop, out, *CONSTANT)
    assert again.returncode == 2 and "already holds steps" in again.stdout


def test_a_directory_that_is_not_there_is_said_to_be_that(tmp_path):
    with pytest.raises(ProblemsError, match=f"{tmp_path}/none: no such directory"):
        Adoption.of(str(tmp_path / "none"), SimpleNamespace(out="o", weights_args=[], given=()))


# --- the next losses


LAYOUTS = {
    "1": (1, {"ds_config": "zero1"}),
    "tp2": (2, {"ds_config": "zero1", "tp": 2}),
    "pp2": (2, {"ds_config": "pipeline", "pp": 2}),
    "dp3": (3, {"ds_config": "zero3", "dp": 3}),
}
TRAINERS = {
    f"zero{stage}{'-bf16' * bf16}": {"model": "gpt2", "ds": {**AUTO, **zero(stage), **(BF16 if bf16 else {})}}
    for stage in (1, 2, 3) for bf16 in (False, True)
}  # fmt: skip
WINDOW = {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 2, "hysteresis": 1}
LOOPS = {
    "offloaded": {**zero(2, offload_optimizer={"device": "cpu"}), "zero_force_ds_cpu_optimizer": False},
    "sub-groups": zero(3, sub_group_size=50_000),
    "stage 0": zero(0),
    "stage 0 in bf16": {**zero(0), **BF16},
    "fp16": {**zero(2), "fp16": {"enabled": True, "initial_scale_power": 20}},
    "fp16 of another window": {**zero(2), "fp16": WINDOW, "gradient_clipping": 0.05},
    "torch's AdamW, by no JSON": {**zero(1), "zero_allow_untested_optimizer": True},
    "BF16_Optimizer": {**zero(1), **BF16, "data_types": {"grad_accum_dtype": "fp32"}},
}
FP32, ROUNDED = 2e-6, 2e-3


def go_on(runs, layouts, out):
    """Train runs, by name, from their adopted checkpoints to step 12; differences from their own losses."""
    apart = {}
    for layout in layouts:
        ranks, case = LAYOUTS[layout]
        jobs = []
        for name, (_, directory, *settings) in runs.items():
            adopted = out / name / "adopted"
            how = settings.pop() if settings and isinstance(settings[-1], dict) else {}
            if not adopted.is_dir():
                written(directory, adopted, *settings, **how)
            config = opened(directory, *settings, **how)[0].with_scaling(case["ds_config"])
            resolved = {**case, "resolved": str(adopted / "recipe.yaml"), "ds_config": config}
            source = str(run_checkpoints.directory_of(adopted, 6))
            jobs.append({"out": str(out / name / layout), "steps": 12, "source": source, "case": resolved})
        (out / "jobs.json").write_text(json.dumps(jobs))
        done = run_ranks(ranks, WORKERS / "any_layout.py", out / "jobs.json", timeout=900)
        assert done.returncode == 0, done.stdout[-5000:]
        for name, (losses, *_) in runs.items():
            found = json.loads((out / name / layout / "losses.json").read_text())
            expected = json.loads((losses / "losses.json").read_text())
            assert [*found] == [str(step) for step in range(7, 13)]
            apart[name, layout] = max(abs(found[str(n)] - expected[n - 1]) for n in range(7, 13))
    return apart


def within(apart):
    return {
        key: value for key, value in apart.items() if value > (ROUNDED if "16" in key[0].lower() else FP32)
    }


def plain_cases():
    """Runs without DeepSpeed: a Trainer's in two precisions, and accelerate's of GPT-2 and BERT."""
    cases = [{"name": "Trainer", "model": "gpt2", "ds": None}]
    cases += [{"name": "Trainer in bf16", "model": "gpt2", "ds": None, "half": BF16}]
    for model in ("gpt2", "bert"):
        loop = {"loop": True, "accelerate": True, "client": "adamw"}
        cases.append({"name": f"accelerate {model}", "model": model, "ds": None, **loop})
    return cases


@pytest.mark.ci
def test_runs_without_deepspeed_go_on(tmp_path):
    """Of two ranks. accelerate states neither batch nor clipping nor precision, nor which optimizer it was.

    Besides, a loop that DeepSpeed clips by its own default.
    """
    settings = ["sequence_length=4"]  # whose gradients' norms are above 1
    unclipped = {"name": "no clipping stated", "model": "gpt2", "loop": True, "settings": settings}
    train(tmp_path, 2, [*plain_cases(), {**unclipped, "ds": {"optimizer": ADAM, **zero(2)}}])
    told = ["batch.global=12", "optimizer.clip=0.5", "precision=fp32", {"adamw": True}]
    runs = {}
    for case in plain_cases():
        name = case["name"]
        runs[name] = (tmp_path / name, tmp_path / name, *told)
        if "Trainer" in name:
            runs[name] = (tmp_path / name, tmp_path / name / "checkpoint-6")
    runs[unclipped["name"]] = (tmp_path / unclipped["name"],) * 2 + (*settings,)
    apart = go_on(runs, ["1", "tp2"], tmp_path / "ours")
    print(apart)
    assert not within(apart)


@pytest.mark.long
def test_trainers_of_four_ranks_go_on_under_every_layout(tmp_path):
    train(tmp_path, 4, [{"name": name, **case} for name, case in TRAINERS.items()])
    runs = {name: (tmp_path / name, tmp_path / name / "checkpoint-6") for name in TRAINERS}
    apart = go_on(runs, LAYOUTS, tmp_path / "ours")
    print(apart)
    assert not within(apart)


@pytest.mark.long
def test_loops_go_on_with_every_form_of_the_optimizer_and_every_model(tmp_path):
    cases = [
        {"name": name, "model": "gpt2", "loop": True, "ds": {**LOOP, **ds}} for name, ds in LOOPS.items()
    ]
    cases[-1]["client"] = "adamw"
    del cases[-1]["ds"]["optimizer"]
    for model in ("bert", "megatron-bert"):
        cases.append({"name": model, "model": model, "loop": True, "ds": {**LOOP, **zero(3)}})
    train(tmp_path, 2, cases)
    runs = {case["name"]: (tmp_path / case["name"],) * 2 for case in cases}
    runs[cases[-3]["name"]] += ({"adamw": True},)
    apart = go_on(runs, ["1", "tp2"], tmp_path / "ours")
    print(apart)
    assert not within(apart)
    theirs = states.read(tmp_path / "fp16").scaler
    adopted = run_checkpoints.read(run_checkpoints.directory_of(tmp_path / "ours/fp16/adopted", 6))
    scaler = adopted.manifest.progress.loss_scaler
    assert scaler.cur_scale == theirs["cur_scale"] != 2.0**20
    assert scaler.cur_iter == theirs["cur_iter"] == 6


@pytest.mark.long
def test_the_commands_adopt_and_go_on(theirs, tmp_path):
    said = CONSTANT
    asked = run(
        [sys.executable, "launch/checkpoint.py", "adopt", str(theirs / "loop"), "--out", str(tmp_path / "a")]
    )
    assert asked.returncode == 2 and "--data_from first" in asked.stdout, asked.stdout
    command = [
        "launch/pretrain.py",
        "--adopt",
        str(theirs / "loop"),
        "--out",
        str(tmp_path / "c"),
        "--recipe",
    ]
    command += [catalog.DEFAULT_RECIPE, "--data_from", "next", "--steps", "8", "--compile", "off"]
    asked = run([sys.executable, *command])
    line = shlex.split(asked.stdout.split("such as: python ")[1])
    assert line[: len(command)] == command and len(line) > len(command), line
    done = run([sys.executable, *line], timeout=400)
    assert done.returncode == 0, done.stdout
    done = adopt(theirs / "loop", tmp_path / "a", *said)
    assert done.returncode == 0, done.stdout
    more = ["--resume", "--out", tmp_path / "a", "--set", "parallel.tp=2", "--compile", "off"]
    done = run_ranks(2, ROOT / "launch/pretrain.py", *more, timeout=400)
    assert done.returncode == 0 and "has no record of" not in done.stdout, done.stdout
    command = [
        "launch/pretrain.py",
        "--adopt",
        str(theirs / "loop"),
        "--out",
        str(tmp_path / "b"),
        "--compile",
        "off",
    ]
    done = run([sys.executable, *command, *SAID, catalog.DEFAULT_RECIPE, *said], timeout=400)
    assert done.returncode == 0 and "has no record of" not in done.stdout, done.stdout
    expected = json.loads((theirs / "loop" / "losses.json").read_text())
    for name in ("a", "b", "c"):
        losses = {step.step: step.loss for step in read_metrics(tmp_path / name / "metrics.jsonl").steps}
        assert [*losses] == [7, 8]
        assert all(abs(loss - expected[step - 1]) < FP32 for step, loss in losses.items())


# --- what files state, without a save


def their_settings(config=None, arguments=None, steps=None, groups=({},), skipped=0, ds=None, **stated):
    """Of a run of six steps whose groups, arguments and scheduler are these."""
    groups = [{"lr": 1e-3, "betas": (0.9, 0.95), **each} for each in groups]
    module = {"wte.weight": torch.zeros(1)}
    state = SimpleNamespace(
        stated=stated, groups=groups, config=ds or {}, steps=6, skipped=skipped, samples=72, module=module
    )
    found = TheirSettings(Path("nowhere"), state, config or {})
    vars(found).update(arguments=arguments or {}, trainer={"max_steps": steps} if steps else {})
    return found.settings(catalog.load("default/sotu", tiny=True))


def test_the_decay_is_that_of_the_decayed_parameters_in_whatever_group():
    decayed, others = {"weight_decay": 0.1, "eps": 1e-6}, {"weight_decay": 0.0, "eps": 1e-6}
    for groups in ((decayed, others), (others, decayed)):
        assert their_settings(groups=groups)["optimizer.weight_decay"] == 0.1


def test_clipping_that_no_file_states_is_that_of_the_release_that_trained():
    json = {"train_batch_size": 12}
    for release, clip in {"0.18.9": 0.0, "0.19.2": 0.0, "0.19.3": 1.0, "0.19.8+cu128": 1.0}.items():
        assert their_settings(ds=json, ds_version=release)["optimizer.clip"] == clip
        assert (
            their_settings(ds={**json, "gradient_clipping": 0.5}, ds_version=release)["optimizer.clip"] == 0.5
        )
    for stated in ({}, {"ds_version": None}, {"ds_version": "a build"}):
        assert "optimizer.clip" not in their_settings(ds=json, **stated), "it is asked for"
        assert "optimizer.clip" not in their_settings(**stated)
    without = {"max_grad_norm": 0.0, "optim": "adamw_torch"}
    for norm in (0.0, None):
        told = TheirSettings(Path("nowhere"), SimpleNamespace(config={}), {})
        vars(told).update(arguments={**without, "max_grad_norm": norm})
        assert told.config["gradient_clipping"] == 0.0, "Trainer does not clip"


def test_a_share_of_warm_up_is_rounded_up_as_by_trainer():
    arguments = {"lr_scheduler_type": "linear", "warmup_ratio": 0.1, "adam_beta1": 0.9, "adam_beta2": 0.95}
    found = their_settings(arguments=arguments, steps=15)
    assert (found["schedule.kind"], found["schedule.warmup_steps"], found["schedule.decay_steps"]) == (
        "linear", 2, 15,
    )  # fmt: skip
    assert their_settings(arguments={**arguments, "warmup_steps": 4}, steps=15)["schedule.warmup_steps"] == 4


def test_dropout_of_attention_is_stated_apart():
    found = their_settings({"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.2})
    assert (found["dropout.hidden"], found["dropout.attention"]) == (0.1, 0.2)
    assert "dropout.hidden" not in their_settings({"resid_pdrop": 0.1, "embd_pdrop": 0.3, "attn_pdrop": 0.2})


def test_megatrons_scheduler_counts_the_steps_that_were_made():
    schedule = {"lr_decay_style": "cosine", "max_lr": 1e-3, "min_lr": 0.0}
    schedule |= {"num_steps": 48, "lr_warmup_steps": 36, "lr_decay_steps": 144}
    found = their_settings(skipped=2, lr_scheduler=schedule)
    assert (found["schedule.warmup_steps"], found["schedule.decay_steps"]) == (3, 12)
