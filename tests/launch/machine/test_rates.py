"""Rates of this machine are measured once, kept for this machine and this torch, and read without torch."""

from __future__ import annotations

import json
import sys

import pytest
from launching import run
from measured_machine import TWO_CORES

from ds_configs.plan import HOST
from launch.machine import measuring, rates
from launch.machine.rates import Rates


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("MEGARECIPES_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def keep(kept: Rates) -> None:
    rates.place().parent.mkdir(parents=True, exist_ok=True)
    rates.place().write_text(json.dumps({"machine": rates.machine(), "rates": vars(kept)}))


def test_kept_rates_are_those_of_this_machine_alone(monkeypatch):
    assert rates.cached() is None
    keep(TWO_CORES)
    assert rates.cached() == TWO_CORES
    monkeypatch.setattr(rates, "cpu_model", lambda: "another processor")
    assert rates.cached() is None


def test_what_a_launcher_starts_finds_what_a_command_kept(monkeypatch):
    keep(TWO_CORES)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # as the deepspeed launcher sets it, on CPUs too
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert rates.cached() == TWO_CORES


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rates": {"cores": 2}}', '{"rates": 3}'])
def test_a_broken_file_of_rates_is_as_good_as_none(text):
    keep(TWO_CORES)
    rates.place().write_text(text)
    assert rates.cached() is None


def test_measuring_finds_every_rate_and_keeps_them(cache):
    """In a process of its own, with small products: it forks, and sets torch's threads."""
    program = """
from launch.machine import measuring, rates
measuring.LARGE, measuring.LAYER, measuring.STREAM_BYTES = (256,), ((256, 64),), (2**22,)
measuring.REPEATS, measuring.REPEAT_S, measuring.LINK_ELEMENTS = 2, 0.0, 2**14
measuring.BEFORE = "print(1024)"
found = measuring.measured()
assert found == rates.cached()
assert {"fp32", "bf16"} <= found.tflops.keys() == found.layer_tflops.keys() == found.attention_tflops.keys()
assert all(found.tflops[name] >= rate > 0 for name, rate in found.layer_tflops.items())
assert min(found.memory_gb_s, found.layer_gb_s, found.copy_gb_s, found.start_us, found.memory_bytes) > 0
assert found.context_bytes == 2**20 and (found.link_gb_s is None or found.link_gb_s > 0)
"""
    environment = {"MEGARECIPES_CACHE": str(cache), "DS_ACCELERATOR": "cpu"}
    done = run([sys.executable, "-c", program], env=environment, timeout=100)
    assert done.returncode == 0, done.stdout


def test_a_cache_that_cannot_be_written_loses_nothing(monkeypatch, cache):
    cache.write_text("a file where the directory would be")
    monkeypatch.setattr(measuring.processes, "device", lambda: HOST)
    monkeypatch.setattr(measuring, "_of_cpu", lambda: TWO_CORES)
    assert measuring.measured() == TWO_CORES and rates.cached() is None
