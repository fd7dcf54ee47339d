"""DeepSpeed without our corrections shows every symptom; a test that fails says which correction can go."""

import json

import pytest
import torch
from deepspeed.runtime.fp16 import loss_scaler
from launching import WORKERS, run_ranks

from launch.deepspeed_fixes.loss_scale import is_at_floor

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    out = tmp_path_factory.mktemp("upstream") / "facts.json"
    launched = run_ranks(1, WORKERS / "upstream.py", out)
    assert launched.returncode == 0, launched.stdout[-4000:]
    return json.loads(out.read_text())


def test_a_growing_loss_scale_halves_the_norm_of_its_step(facts):
    """On unchanging weights and one batch."""
    *norms, scale = facts["growing"]
    true = norms[0]
    assert scale == 64.0, "the scale grows twice from 16"
    assert pytest.approx(true / 2, rel=1e-3) in norms, "postpone_growth of loss_scale can go"
    *norms, scale = facts["postponed"]
    assert scale == 64.0 and norms == pytest.approx([true] * 6, rel=1e-3)


def test_stage_0_steps_when_it_is_built(facts):
    assert facts["steps_when_built"] == [1, 1], "look at zero0 again"


def test_stage_0_does_not_scale_the_fp16_loss(facts):
    """It unscales nevertheless: the gradients are as many times too small."""
    at_1, at_256 = facts["plain_fp16_moments"]
    assert at_256 == pytest.approx(at_1 / 256, rel=0.05), "look at zero0 again"


def test_stage_0_adds_up_fp32_gradients_in_float32(facts):
    """The norm of a large embedding is off by more than rounding on a CPU; without clipping there is none."""
    alone, corrected = facts["plain_fp32_norms"]
    assert alone < 1 - 1e-5, "gradient_norm of zero0 can go"
    assert corrected == pytest.approx(1, abs=1e-7)
    assert facts["plain_fp32_norm_unclipped"] is None, "_take_model_step of zero0 can go"


def test_muon_under_zero_has_its_update_clipped_instead_of_the_gradient(facts):
    """An orthogonalised direction is the same for a smaller gradient: clipping must not change the first."""
    clipped, free = facts["muon"]
    assert clipped < free / 2, "look at muon again"


def overflow_at_the_floor():
    rules = {"init_scale": 4.0, "scale_window": 2, "min_scale": 4.0, "delayed_shift": 1}
    rules |= {"consecutive_hysteresis": False}
    how = {"static_loss_scale": 0, "dynamic_scaling": True, "dynamic_loss_args": rules}
    loss_scaler.CreateLossScaler(dtype=torch.float16, **how).update_scale(True)


def test_the_floor_of_the_loss_scale_is_a_bare_exception():
    with pytest.raises(Exception, match="already at minimum") as error:
        overflow_at_the_floor()
    assert type(error.value) is Exception, "is_at_floor of loss_scale can go"
    assert is_at_floor(error.value) and not is_at_floor(ZeroDivisionError("any other error"))
