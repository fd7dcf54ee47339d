"""Weights & Biases: refused without a key or a server before the start, and one id over all launches."""

import os
import sys
from types import ModuleType, SimpleNamespace

import pytest
import requests

from launch.records import wandb_run
from recipes.problems import ProblemsError

SERVER = "https://api.wandb.ai"


@pytest.fixture
def account(monkeypatch):
    """The settings of a stand-in for wandb, without a key in the environment."""
    settings = SimpleNamespace(mode="online", base_url=SERVER, api_key=None)
    package = ModuleType("wandb")

    def setup():
        assert os.environ["WANDB_RUN_ID"], "it reads the variables once"
        return SimpleNamespace(settings=settings)

    package.setup = setup
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.setenv("NETRC", "/nowhere")
    for name in ("WANDB_IDENTITY_TOKEN_FILE", "WANDB_RUN_ID", "WANDB_RESUME"):
        monkeypatch.delenv(name, raising=False)
    return settings


def test_without_a_key_or_a_server_the_way_without_either_is_named(account, tmp_path, monkeypatch):
    def unreachable(server, timeout):
        raise requests.ConnectionError("no route")

    monkeypatch.setattr(requests, "get", unreachable)
    with pytest.raises(ProblemsError, match="there is no key for it .*set WANDB_MODE=offline"):
        wandb_run.check(tmp_path)
    account.api_key = "key"
    with pytest.raises(ProblemsError, match=r"and it does not answer \(Conn.*WANDB_MODE=offline"):
        wandb_run.check(tmp_path)
    account.mode = "offline"
    wandb_run.check(tmp_path)
    account.mode = "online"
    monkeypatch.setattr(requests, "get", lambda server, timeout: None)
    wandb_run.check(tmp_path)


def test_every_launch_of_a_run_has_its_id(account, tmp_path, monkeypatch):
    account.mode = "offline"

    def launched() -> str:
        wandb_run.check(tmp_path)
        wandb_run.keep_id(tmp_path)
        assert os.environ["WANDB_RESUME"] == "allow"
        return os.environ["WANDB_RUN_ID"]

    first = launched()
    monkeypatch.delenv("WANDB_RUN_ID")
    assert launched() == first
    for _ in range(2):
        monkeypatch.setenv("WANDB_RUN_ID", "mine")
        assert launched() == "mine"
    monkeypatch.delenv("WANDB_RUN_ID")
    assert launched() == "mine"
