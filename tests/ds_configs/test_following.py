"""DeepSpeed JSONs of one's own: what a recipe takes from them, what of them is off or spelt otherwise."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ds_configs import following
from ds_configs.findings import ConfigError, lookup
from ds_configs.plan import ANY_GPU, Plan
from ds_configs.resolver import followed, resolve
from launch.training.followed_json import FollowedJson
from recipes import catalog
from recipes.key_paths import flatten
from recipes.schema import Recipe


@pytest.fixture
def path(tmp_path: Path):
    """A JSON in a file, of a text or an object."""

    def write(config: Any) -> Path:
        place = tmp_path / "mine.json"
        place.write_text(config if isinstance(config, str) else json.dumps(config))
        return place

    return write


def follow(path: Path, *sets: str, world: int | None = 1, name: str = "default/sotu") -> Recipe:
    taken = followed(catalog.load(name), path, world)
    return catalog.load(name, sets, settings={each.key: each.value for each in taken})


def planned(path: Path, *sets: str, world: int | None = 1) -> Plan:
    """The plan under --follow."""
    return resolve(follow(path, *sets, world=world), path, world, ANY_GPU)


def told(path: Path, *sets: str) -> list[str]:
    """The notices of a plan under --follow."""
    taken = FollowedJson.read(str(path), catalog.load(), 1)
    return [notice.text for notice in taken.with_remarks(planned(path, *sets)).notices]


def adam(**params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "AdamW", "params": params}}


def schedule(kind: str, **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


# A JSON -> what its plan says in a notice ("" for nothing), as it stands and followed.
TAKEN: tuple[tuple[Any, str], ...] = (
    ({"zero_optimization": {"stage": 1, "cpu_offload": False}}, ""),
    ({"zero_optimization": {"stage": 0, "cpu_offload": False}}, ""),
    (adam(lr="auto", betas="auto", eps="auto", weight_decay="auto", bias_correction=True), ""),
    ({"data_efficiency": {"enabled": False, "seed": 3}}, ""),
    ({"amp": {"enabled": False, "opt_level": "O2"}}, ""),
    ({"fp16": {"enabled": False, "no_such_key": 1}}, ""),
    ({"compile": {"deepcompile": False}}, ""),
    ({"_comment": "for two nodes", "//": 1, "fp16": {"#": "off", "enabled": False}}, ""),
    ({"zero_optimization": {"stage": 3, "sub_group_size": 0}}, ""),
    ({"zero_optimization": {"stage": 3, "max_live_parameters": 0}}, "stage3_max_live_parameters"),
    ({"activation_checkpointing": {"partition_activations": False, "number_checkpoints": False}}, ""),
    ({"aio": {"thread_count": 1}}, "another name of intra_op_parallelism"),
    ({"fp32_allreduce": True}, "another name of communication_data_type"),
    ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, "another name of offload_optimizer"),
    ({"cuda_visible_devices": "0,1"}, "DeepSpeed reads no such key"),
    (
        {"activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": True}},
        "contiguous_memory_optimization of",
    ),
)


@pytest.mark.parametrize(("config", "said"), TAKEN)
def test_what_is_off_done_anyway_or_spelt_otherwise_is_taken(path, config, said):
    file = path(config)
    plan = resolve(catalog.load(), file, 1, ANY_GPU)
    notices = [notice.text for notice in plan.notices if notice.key != "precision"]
    assert not notices if not said else [text for text in notices if said in text], notices
    assert planned(file).layout.dp == 1


def test_an_older_name_does_what_todays_does(path):
    old = resolve(catalog.load(), path({"zero_optimization": {"stage": 2, "cpu_offload": True}}), 1, ANY_GPU)
    assert old.offload == "optimizer" and "cpu_offload" not in old.ds["zero_optimization"]
    both = path({"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {}}})
    with pytest.raises(ConfigError, match="another name of offload_optimizer, which stands there, too"):
        resolve(catalog.load(), both, 1, ANY_GPU)


# A JSON, or its text -> pieces of its refusal, as it stands and followed.
REFUSED: tuple[tuple[Any, str], ...] = (
    (adam(lr="0.001"), "write 0.001 without quotation marks"),
    (adam(betas="[0.9, 0.95]"), "write [0.9, 0.95] without quotation marks"),
    (adam(betas=[0.9, 1]), "two numbers from 0 to below 1"),
    ({"fp16": {"enabled": "True"}}, "write true without quotation marks"),
    ({"gradient_clipping": True}, "gradient_clipping=true: must be a number from 0"),
    ({"compile": {"deepcompile": True}}, "torch.compile is --compile"),
    ({"zero_optimization": {"cpu_offload": 1}}, "cpu_offload=1: must be true or false"),
    ({"scheduler": {"type": "OneCycle"}}, "a recipe has DeepSpeed's schedules WarmupLR"),
    (schedule("OneCycle", warmup_max_lr="auto"), "a recipe has DeepSpeed's schedules WarmupLR"),
    (
        schedule("WarmupCosineLR", total_num_steps=9, warmup_min_lr=0),
        "takes warmup_num_steps, warmup_type, total",
    ),
    (schedule("WarmupLR", total_num_steps=9), "DeepSpeed's WarmupLR takes warmup_min_lr, warmup_num_steps"),
    (schedule("WarmupDecayLR", warmup_num_steps=2), "total_num_steps=null: WarmupDecayLR fails without it"),
    (schedule("WarmupLR", warmup_num_steps=0), "must be a whole number from 1; write 1 or more"),
    (adam(lr=1e-3, amsgrad=True), "another rule of descent"),
    ('{"fp16": {"enabled": True}}', "True is Python's word: JSON writes true"),
    ('{"fp16": None}', "None is Python's word: JSON writes null"),
    ('{"train_batch_size": BATCH}', "BATCH is a placeholder that a script has to fill"),
    ('{"train_batch_size": ${BATCH}}', "${BATCH is a placeholder"),
    ("{'fp16': 1}", 'JSON writes texts in "double quotation marks"'),
    ('{fp16: {"enabled": true}}', '"double quotation marks": "fp16"'),
    ('{"fp16": 1, // half\n}', "JSON has no comments"),
    ("zero_optimization:\n  stage: 2\n", "is it YAML?"),
)


@pytest.mark.parametrize(("config", "said"), REFUSED)
def test_what_is_wrong_is_told_for_what_it_is(path, config, said):
    for plan in (lambda file: resolve(catalog.load(), file, 1, ANY_GPU), planned):
        with pytest.raises(ValueError) as refused:
            plan(path(config))
        assert said in str(refused.value) and "--set" not in str(refused.value)


# Parts of a JSON that disagree with default/sotu.
DISAGREE: tuple[dict[str, Any], ...] = (
    adam(lr=3e-5),  # below schedule.min_lr
    adam(lr=3e-3, weight_decay=0.0, bias_correction=False),
    {"train_batch_size": 16},
    {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4},
    {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 3e-5}}},
    {"scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 500, "warmup_num_steps": 5}}},
    {"optimizer": {"type": "Lamb"}},
    adam(lr=3e-5) | {"gradient_clipping": 0.0, "train_batch_size": 32},
)


@pytest.mark.parametrize("config", DISAGREE)
def test_the_settings_that_a_refusal_offers_lead_to_a_plan(path, config):
    file = path(config)
    with pytest.raises(ConfigError) as refused:
        resolve(catalog.load(), file, 1, ANY_GPU)
    sets = re.findall(r"--set ([a-z_.]+=\S+?)(?=,? |$|\n)", str(refused.value))
    assert resolve(catalog.load(overrides=dict.fromkeys(sets)), file, 1, ANY_GPU).layout.dp == 1
    assert planned(file).layout.dp == 1


def test_shares_that_the_json_states_are_mended_there(path):
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    with pytest.raises(ConfigError) as refused:
        resolve(catalog.load(), path(config), 1, ANY_GPU)
    said = str(refused.value)
    assert "set gradient_accumulation_steps to 8 in the JSON" in said and "--set" not in said
    mended = {**config, "gradient_accumulation_steps": 8}
    assert resolve(catalog.load(), path(mended), 1, ANY_GPU).layout.accumulation == 8
    assert resolve(catalog.load(), path(dict.fromkeys(config, "auto")), 1, ANY_GPU).layout.dp == 1
    assert resolve(catalog.load(), path(config), 8, ANY_GPU).layout.dp == 8
    # All three, on another number of ranks than theirs.
    odd = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 1}
    with pytest.raises(ConfigError) as refused:
        resolve(catalog.load(), path(odd), 2, ANY_GPU)
    assert '"auto" in the JSON' in str(refused.value) and "--set" not in str(refused.value)


TOTAL, MICRO, ACCUMULATION = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
)


@pytest.mark.parametrize(
    ("config", "world", "expected"),
    [
        ({TOTAL: 24}, 2, (12, 1, 2)),
        ({TOTAL: 24, ACCUMULATION: 4}, 2, (3, 4, 2)),
        ({TOTAL: 24, MICRO: 3}, 2, (3, 4, 2)),
        ({MICRO: 3}, 2, (3, 1, 2)),
        ({MICRO: 3, ACCUMULATION: 5}, 2, (3, 5, 2)),
        ({TOTAL: 64, MICRO: 4, ACCUMULATION: 2}, None, (4, 2, 8)),
        ({TOTAL: "auto", MICRO: 2, ACCUMULATION: "auto"}, 1, (2, 4, 1)),
        ({TOTAL: "auto", MICRO: 5, ACCUMULATION: "auto"}, 1, (5, 1, 1)),
        ({ACCUMULATION: 4}, 1, (8, 4, 1)),
        ({ACCUMULATION: 4}, 2, (4, 4, 2)),
        ({TOTAL: "auto", ACCUMULATION: 32}, None, (8, 32, 1)),
    ],
)
def test_a_batch_is_completed_as_by_deepspeed(path, config, world, expected):
    layout = planned(path(config), world=world).layout
    assert (layout.micro, layout.accumulation, layout.dp) == expected


def test_the_recipe_has_what_the_json_states(path):
    params = {"lr": 3e-5, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.2, "bias_correction": False}
    warmup = {"warmup_num_steps": 7, "warmup_min_lr": 1e-6, "warmup_max_lr": 2e-4}
    config = {
        **{"gradient_clipping": 0.5, "fp16": {"enabled": True}, "optimizer": {"type": "Adam"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {**warmup, "total_num_steps": 90}},
    }
    config["optimizer"]["params"] = params
    recipe = follow(path(config))
    assert recipe.optimizer.model_dump(include=params.keys() | {"clip"}) == {
        **params, "betas": (0.8, 0.99), "lr": 2e-4, "clip": 0.5,
    }  # fmt: skip
    schedule = {"kind": "WarmupDecayLR", "warmup_steps": 7, "decay_steps": 90, "min_lr": 1e-6}
    assert recipe.schedule.model_dump(include=schedule.keys()) == schedule
    assert recipe.precision == "fp16"
    plan = resolve(recipe, path(config), 1, ANY_GPU)
    assert "scheduler" not in plan.ds and plan.ds["optimizer"]["params"]["lr"] == 2e-4
    assert plan.ds["optimizer"]["params"]["bias_correction"] is False


def test_what_an_optimizer_leaves_out_is_deepspeeds_default_and_may_be_set(path):
    file = path(adam(lr=3e-5))
    recipe = follow(file)
    assert recipe.optimizer.model_dump(include={"weight_decay", "betas", "clip", "lr"}) == {
        **{"weight_decay": 0.0, "betas": (0.9, 0.999), "clip": 1.0, "lr": 3e-5}
    }
    assert (recipe.schedule.kind, recipe.schedule.warmup_steps) == ("constant", 0)
    assert planned(file, "schedule.kind=cosine", "optimizer.weight_decay=0.1").layout.dp == 1
    with pytest.raises(ConfigError, match="disagrees with the recipe's optimizer.lr=0.0001"):
        planned(file, "optimizer.lr=1e-4")
    assert follow(path(adam(lr=3e-5, torch_adam=True))).optimizer.weight_decay == 0.01, "torch's default"
    own = catalog.load()
    file = path({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    nothing = follow(file)
    assert nothing.optimizer.model_dump(include={"weight_decay", "betas", "clip", "lr"}) == {
        **{"weight_decay": 0.0, "betas": (0.9, 0.999), "clip": 1.0, "lr": own.optimizer.lr}
    }
    assert nothing.schedule == own.schedule
    assert "follow: schedule.kind=cosine (mine.json leaves scheduler to the recipe)" in told(file)
    assert (
        follow(path({"optimizer": {"type": "AdamW"}}), name="a100_blog_bert_base/110m").optimizer.lr == 1e-3
    )
    client = path({"train_batch_size": 16})
    assert follow(client).optimizer == own.optimizer and follow(client).schedule == own.schedule
    assert "follow: optimizer.clip=1.0 (mine.json leaves gradient_clipping to the recipe)" in told(client)


def test_lamb_has_its_bounds(path):
    params = {"lr": 11e-3, "bias_correction": False, "max_coeff": 0.3, "min_coeff": 0.02}
    plan = planned(path({"optimizer": {"type": "Lamb", "params": params}}))
    assert plan.recipe.optimizer.trust_ratios == (0.02, 0.3)
    assert params.items() <= plan.ds["optimizer"]["params"].items()
    with pytest.raises(ConfigError, match="is a key of Lamb's"):
        planned(path(adam(lr=1e-3, max_coeff=0.3)))


def test_every_value_that_changes_is_a_notice(path):
    file = path(adam(lr=3e-5) | {"train_batch_size": 16})
    before = catalog.load()
    now = follow(file, "schedule.kind=cosine")
    texts = told(file, "schedule.kind=cosine")
    assert "follow: optimizer.lr=3e-05, was 0.001 (mine.json: optimizer.params.lr)" in texts
    assert "follow: batch.global=16, was 8 (mine.json: train_batch_size)" in texts
    own, new = (recipe.model_dump(mode="json", by_alias=True) for recipe in (before, now))
    for text in texts:
        if ": " in text.removeprefix("follow: ").partition("(")[0] or not text.startswith("follow"):
            continue
        key, _, value = text.removeprefix("follow: ").partition(",")[0].partition("=")
        assert lookup(own, key) != lookup(new, key), text
    assert not any("schedule.kind" in text for text in texts), "--set has the last word over a default"


def test_the_ratios_of_a_cosine_are_shares_of_the_rate_and_have_deepspeeds_defaults(path):
    def schedule(**ratios):
        params = {"warmup_num_steps": 7, "total_num_steps": 90, **ratios}
        recipe = follow(path(adam(lr=2e-3) | {"scheduler": {"type": "WarmupCosineLR", "params": params}}))
        found = recipe.schedule
        assert (found.kind, found.warmup_steps, found.decay_steps) == ("WarmupCosineLR", 7, 90)
        assert recipe.optimizer.lr == 2e-3 and recipe.precision == "fp32"
        return found.warmup_min_lr, found.min_lr

    assert schedule() == pytest.approx((0.0, 0.0001 * 2e-3))
    assert schedule(warmup_min_ratio=0.2, cos_min_ratio=0.1) == pytest.approx((4e-4, 2e-4))


def test_a_json_that_leaves_both_halves_out_trains_in_fp32(path):
    file = path(adam(lr=3e-5))
    for before in ("bf16", "fp16"):
        recipe = catalog.load("default/sotu", [f"precision={before}"])
        (taken,) = [each for each in followed(recipe, file, 1) if each.key == "precision"]
        assert (taken.value, taken.by_default) == ("fp32", True)


OPEN = {
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps", "warmup_type"),
    "WarmupCosineLR": ("warmup_min_ratio", "cos_min_ratio", "warmup_num_steps", "total_num_steps"),
}


@pytest.mark.parametrize("kind", OPEN)
def test_a_schedule_of_nothing_but_auto_has_the_kind_of_the_json_and_the_numbers_of_the_recipe(path, kind):
    file = path(schedule(kind, **dict.fromkeys(OPEN[kind], "auto")))
    cosine = kind == "WarmupCosineLR"
    own = follow(file).schedule
    lowest = catalog.load().schedule.min_lr if cosine else 0.0
    assert (own.kind, own.warmup_steps, own.min_lr, own.decay_steps) == (kind, 20, lowest, None)
    texts = told(file)
    assert f"follow: schedule.kind={kind}, was cosine (mine.json: scheduler.type)" in texts
    for name in OPEN[kind]:
        assert any(f"mine.json leaves scheduler.params.{name} to the recipe" in text for text in texts), name
    plan = resolve(catalog.load(), file, 1, ANY_GPU)
    (notice,) = [notice.text for notice in plan.notices if notice.key == "scheduler"]
    assert f"the recipe's cosine is what trains, not {kind}" in notice
    assert not any(text.startswith("scheduler:") for text in texts)


def test_an_auto_beside_numbers_is_the_recipes_too(path):
    rates = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 7}
    recipe = follow(path(adam(lr=3e-5) | schedule("WarmupLR", **rates)))
    assert (recipe.optimizer.lr, recipe.schedule.min_lr, recipe.schedule.warmup_steps) == (3e-5, 0.0, 7)


def test_parameters_and_defaults_of_the_schedules_are_deepspeeds():
    from deepspeed.runtime import lr_schedules

    for kind, takes in following.SCHEDULES.items():
        theirs = inspect.signature(getattr(lr_schedules, kind)).parameters
        assert takes.keys() == theirs.keys() - {"optimizer", "last_batch_iteration"}, kind
        for name, (_, default) in takes.items():
            theirs_default = theirs[name].default
            assert default == (None if theirs_default is inspect.Parameter.empty else theirs_default), name


def test_defaults_of_the_optimizer_are_deepspeeds():
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.runtime import constants

    assert constants.GRADIENT_CLIPPING_DEFAULT == following.CLIP
    own = following.OPTIMIZER | {"betas": (0.9, 0.999), "lr": following.RATE}
    lamb = own | following.OF_LAMB
    for kind, defaults in ((FusedAdam, own), (DeepSpeedCPUAdam, own), (FusedLamb, lamb)):
        theirs = inspect.signature(kind).parameters
        assert {name: theirs[name].default for name in defaults} == defaults, kind


def test_a_warm_up_without_a_number_takes_a_thousand_steps(path):
    own = follow(path(schedule("WarmupLR", warmup_max_lr=1e-3)), "steps=2000").schedule
    assert (own.warmup_steps, own.warmup_type, own.min_lr) == (1000, "log", 0.0)


def test_every_value_of_a_json_is_in_a_line(path):
    config = {
        **{"train_batch_size": "auto", "steps_per_print": 7, "project": "mine", "_comment": "x"},
        **adam(lr=3e-5, betas=[0.9, 0.95], eps="auto", adam_w_mode=True),
        **schedule("WarmupLR", warmup_max_lr=2e-4, warmup_num_steps="auto", last_batch_iteration=-1),
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}, "reduce_bucket_size": 5e8},
        **{"bf16": {"enabled": True}, "fp16": {"enabled": False, "loss_scale": 0, "auto_cast": "auto"}},
        **{"checkpoint": {"tag_validation": "Warn"}, "offload_param": {"device": "cpu"}},
    }
    config["optimizer"]["eps"] = 1e-6
    texts = told(path(config))
    for key, _ in flatten(config):
        assert any(re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.]*\w)", text) for text in texts), key
    (passed,) = [text for text in texts if text.startswith("follow: passed on to DeepSpeed: ")]
    assert (
        "zero_optimization.reduce_bucket_size=500000000" in passed and "optimizer.params.eps=1e-08" in passed
    )
    (idle,) = [text for text in texts if text.startswith("follow: without effect: ")]
    # the schedule's rate is what trains
    assert "optimizer.params.lr," in idle and "zero_optimization.offload_param.device" in idle
    (same,) = [text for text in texts if text.startswith("follow: as the recipe has it: ")]
    assert "optimizer.params.betas=[0.9,0.95]" in same and "3e-05" not in passed + same


def test_a_plan_tells_what_a_start_refuses_for_want_of_steps(path):
    file = path(schedule("WarmupLR", warmup_max_lr=1e-3))
    taken = FollowedJson.read(str(file), catalog.load(), 1)
    plan = resolve(catalog.load(settings=taken.settings, trained=False), file, 1, ANY_GPU)
    asked = [
        notice.text for notice in taken.with_remarks(plan, on_paper=True).notices if notice.key == "steps"
    ]
    (text,) = asked
    assert text.startswith("a start is refused: steps=300") and "--set steps=1000" in text
    assert not [notice for notice in taken.with_remarks(plan).notices if notice.key == "steps"]
