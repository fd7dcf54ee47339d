"""The JSONs of ds_configs/ under Hugging Face's Trainer: it fills every "auto", and trains."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from launching import WORKERS, run_ranks
from resolved import shipped
from transformers import GPT2Config
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

from ds_configs.findings import FOLDER, available
from launch.machine import description

# what needs tensor or pipeline parallelism, which Trainer has not
OURS_ALONE = {"3d", "pipeline"}
NAMES = [name for name in available() if name not in OURS_ALONE]
LOSS_OF_FIRST_STEP = 3.8714540004730225


def precision_of(name: str) -> str:
    """The precision that the JSON demands; fp32 where the script decides."""
    return next((half for half in ("fp16", "bf16") if shipped(name)[half]["enabled"] is True), "fp32")


def test_what_trainer_is_not_given_needs_more_than_data_parallelism():
    assert {name for name in available() if "parallel" in shipped(name)} == OURS_ALONE


@pytest.mark.parametrize("name", NAMES)
def test_trainer_fills_every_auto(name):
    precision = precision_of(name)
    arguments = SimpleNamespace(
        world_size=1, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=1.0,
        learning_rate=1e-2, adam_beta1=0.9, adam_beta2=0.999, adam_epsilon=1e-8, weight_decay=0.1,
        save_on_each_node=False, fp16=precision == "fp16", fp16_full_eval=False, bf16=precision == "bf16",
        bf16_full_eval=False, get_warmup_steps=lambda steps: 0,
    )  # fmt: skip
    filled = HfTrainerDeepSpeedConfig(str(FOLDER / f"{name}.json"))
    filled.trainer_config_process(arguments)
    filled.trainer_config_finalize(arguments, SimpleNamespace(config=GPT2Config()), 10)
    assert '"auto"' not in json.dumps(filled.config)
    assert DeepSpeedConfig(filled.config).zero_config.stage == shipped(name)["zero_optimization"]["stage"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The reports of two steps under each JSON that can run here, by name."""
    out = tmp_path_factory.mktemp("trainer")
    cases = [
        {"name": name, "file": str(FOLDER / f"{name}.json"), "precision": precision_of(name)}
        for name in NAMES if not missing(name)
    ]  # fmt: skip
    for case in cases:
        if case["name"] == "zero_infinity":  # the one thing that it leaves to be written
            case["file"] = str(out / "zero_infinity.json")
            document = shipped("zero_infinity")
            for section in ("offload_optimizer", "offload_param"):
                document["zero_optimization"][section]["nvme_path"] = str(out)
            (out / "zero_infinity.json").write_text(json.dumps(document))
    (out / "cases.json").write_text(json.dumps(cases))
    done = run_ranks(2, WORKERS / "plain_trainer.py", out, out / "cases.json", timeout=900)
    assert done.returncode == 0, done.stdout[-5000:]
    return json.loads((out / "reports.json").read_text())


def missing(name: str) -> str:
    """What this machine lacks for the ops that DeepSpeed compiles, or "": its CPU Adam, its NVMe op."""
    machine = description.detect_machine()
    if "offload" in name and not machine.compiler:
        return "no compiler"
    return "no libaio" if name == "zero_infinity" and not (machine.compiler and machine.libaio) else ""


@pytest.mark.ci
@pytest.mark.parametrize("name", NAMES)
def test_a_plain_trainer_script_trains_a_gpt2(name, trained):
    if missing(name):
        pytest.skip(missing(name))
    report = trained[name]
    first, second = report["losses"]
    assert first == pytest.approx(LOSS_OF_FIRST_STEP, abs=1e-3) and second < first - 0.3
    assert report["stage"] == shipped(name)["zero_optimization"]["stage"]
    offloads = "offload_optimizer" in shipped(name)["zero_optimization"]
    assert report["optimizer"] == ("DeepSpeedCPUAdam" if offloads else "AdamW")
    assert '"auto"' not in json.dumps(report["given"])
