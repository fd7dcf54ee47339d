"""Errors of releases of the past, found in these releases by the command as a user gives it.

    python tests/launch/experiments/proving/known/releases.py FOLDER          the verdict on each
    python tests/launch/experiments/proving/known/releases.py FOLDER 7837     on one

Each release is installed in a folder of FOLDER, without what it needs: that is our own environment's.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[5]
TRAINER = Path(__file__).with_name("trainer_loop.py")
DEEPSPEED = ROOT / "launch/experiments/adapters/deepspeed_loop.py"


@dataclass(frozen=True)
class Release:
    """An error of a release.

    Attributes:
        source: where it was reported.
        requirements: packages with their versions; none: it is in the one that is installed.
        words: of the command, behind the adapter.
        first: what is named; "": it is not found.
        changes: of the adapter's text.
    """

    source: str
    requirements: tuple[str, ...]
    words: str
    first: str
    changes: tuple[tuple[str, str], ...] = ()
    loop: Path = DEEPSPEED

    def install(self, folder: Path) -> str:
        """Install the packages, if they are not yet there; return the places of imports."""
        target = folder / "-".join(self.requirements)
        if self.requirements and not target.exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
            part = folder / f"{target.name}.part"
            subprocess.run([*pip, "--target", str(part), *self.requirements], check=True)
            part.rename(target)
        places = [str(target)] if self.requirements else []
        return os.pathsep.join([*places, str(ROOT)])

    def prove(self, folder: Path) -> str:
        """Return what the command prints."""
        folder.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "PYTHONPATH": self.install(folder)}
        text = self.loop.read_text()
        for right, wrong in self.changes:
            assert text.count(right) == 1, f"{right!r} stands {text.count(right)} times"
            text = text.replace(right, wrong)
        adapter = folder / f"{self.source.split()[-1]}.py"
        adapter.write_text(text)
        command = [sys.executable, str(ROOT / "launch/prove.py"), str(adapter), *self.words.split()]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True)
        return ran.stdout + ran.stderr


ACCUMULATED_IN_FP32 = ('"bf16": {', '"data_types": {"grad_accum_dtype": "fp32"},\n        "bf16": {')
TWICE = """        hidden = self.layers(hidden, mask.to(hidden.dtype), is_causal=True)
        return self.head(hidden)
"""
RELEASES = (
    # the gradients of all but the last micro-batch are lost
    Release(
        "deepspeedai DeepSpeed 7718",
        ("deepspeed==0.18.2",),
        "--layouts dp2-zero2 --accumulation 2",
        "gradient of head.bias",
    ),
    # a hook of a parameter fires as often as its module is used
    Release(
        "deepspeedai DeepSpeed 8224",
        ("deepspeed==0.18.3",),
        "--layouts dp2-zero2 --precision bf16 --reference zero1",
        "",
        (("        return self.head(hidden)\n", TWICE),),
    ),
    # gradients are not zeroed after a step, and divided by a loss scale that the loss has not
    Release(
        "deepspeedai DeepSpeed 7837",
        ("deepspeed==0.18.3",),
        "--layouts dp1-zero0 --precision bf16 --reference zero1",
        "weight of layers.layers.0.self_attn.out_proj.bias",
    ),
    # the last micro-batch is added after the gradients were reduced
    Release(
        "deepspeedai DeepSpeed 7985",
        ("deepspeed==0.18.9",),
        "--layouts dp2-zero1 --precision bf16 --reference zero1 --accumulation 2",
        "gradient of head.bias",
        (ACCUMULATED_IN_FP32,),
    ),
    # the mean over each micro-batch's own tokens
    Release(
        "huggingface transformers 34191",
        ("transformers==4.45.2", "tokenizers==0.20.3", "huggingface_hub==0.25.2", "accelerate==0.34.2"),
        "--layouts dp1-accumulation2",
        "gradient of transformer.ln_f.bias",
        loop=TRAINER,
    ),
    # the mean over each rank's own tokens, where average_tokens_across_devices is not set
    Release(
        "huggingface transformers 34242",
        ("transformers==4.46.3", "tokenizers==0.20.3", "huggingface_hub==0.25.2", "accelerate==0.34.2"),
        "--layouts dp2",
        "gradient of transformer.ln_f.bias",
        loop=TRAINER,
    ),
)


def main() -> None:
    folder, *names = sys.argv[1:]
    for each in RELEASES:
        if not names or each.source.split()[-1] in names:
            print(f"== {each.source}: {' '.join(each.requirements)} {each.words}")
            print(each.prove(Path(folder)), flush=True)


if __name__ == "__main__":
    main()
