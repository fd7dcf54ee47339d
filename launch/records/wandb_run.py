"""A run's account at Weights & Biases, and its id there, which stays the same over all its launches.

DeepSpeed calls wandb.init on rank 0 with project, group and entity; wandb reads variables for the rest.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from data.durable_files import write_atomically
from recipes import files
from recipes.problems import ProblemsError

RUN_ID = "wandb-run-id.txt"  # in the directory of a run
# the longest wait for the server; wandb.init would wait for 90 s in the middle of the start
ANSWER_S = 10.0


def check(directory: Path) -> None:
    """Have wandb go on with the run of `directory`, and check that it can, unless nothing is sent.

    A variable WANDB_RUN_ID goes before. Raises ProblemsError without a key or an answer of the server.
    """
    place = directory / RUN_ID
    kept = files.read_text(place).strip() if place.exists() else secrets.token_hex(4)
    # Before the first setup, which reads the variables for good.
    os.environ.setdefault("WANDB_RUN_ID", kept)
    os.environ.setdefault("WANDB_RESUME", "allow")
    import requests
    import wandb

    wanted = wandb.setup().settings
    if wanted.mode in ("offline", "disabled", "dryrun"):
        return
    server = wanted.base_url
    came = ""
    named = wanted.api_key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE")
    if not named and not requests.utils.get_netrc_auth(server):
        came = "there is no key for it (WANDB_API_KEY, or what wandb login writes)"
    else:
        try:
            requests.get(server, timeout=ANSWER_S)
        except requests.RequestException as error:
            came = f"it does not answer ({type(error).__name__})"
    if came:
        raise ProblemsError.of(
            "wandb.enabled",
            "wandb.enabled=true",
            f"what is logged goes to {server}, and {came}",
            "mend that, or set WANDB_MODE=offline and send it later with wandb sync",
        )


def keep_id(directory: Path) -> None:
    """Keep the id for later launches."""
    write_atomically(directory / RUN_ID, os.environ["WANDB_RUN_ID"])
