"""Steps of `benchmark.py gpu`: commands of this repository, some minutes each, the most important first."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from ds_configs.jsonfile import available
from recipes import catalog

# A file of launch/ and its flags, for a folder of its own within its step's.
Command = tuple[str, ...]

TRAIN, MEASURE = "pretrain.py", "benchmark.py"
DEFAULT, GPT, BERT = catalog.DEFAULT_RECIPE, "openwebtext/gpt2-124m", "wikipedia/bert-336m"
LARGE, LARGEST = "a100_blog_table4/1.2b", "jeanzay_megatron_max_size_32gb/193b-g256"
MEDIUM = ("sber_path_to_13b/03-medium", "sber_path_to_13b/05-gpt3-medium")
SPARSE = "sber_path_to_13b/07-gpt3-large-sparse"
STAGES = ("zero1", "zero3", "zero2", "zero0", "zero3_offload")
UNUSABLE = {"pipeline", "3d", "zero_infinity"}  # they need several processes, or a disk
PRECISIONS, FORMS = ("bf16", "fp16"), ("eager", "compiled")
SHORT = ("--compile", "off", "--steps", "3")
PACE, WALK = ("--blocks=3", "--steps=5", "--warm_up=5"), ("--blocks=1", "--steps=1", "--warm_up=1")
ALONE = ("--apart", "--no_launch")
TRACED = ("--profile", "traces")

UNSAVED = ("run.save_every=0", "run.save_last=false")
DROPOUT = ("dropout.hidden=0.1", "dropout.attention=0.1")
SMALL = ("batch.global=64",)  # for GPT
FEW = ("batch.global=16", "batch.micro=16")  # for BERT
NO_ATTENTION_DROPOUT = ("precision=bf16", "dropout.attention=0")
NO_RECOMPUTATION = (*NO_ATTENTION_DROPOUT, "activation_checkpointing=none", "dropout.hidden=0")
WITHOUT_COLUMNS = (*NO_ATTENTION_DROPOUT, "model.attention_columns=null", "model.attention_patterns=1")
BANDS = (*WITHOUT_COLUMNS, "model.attention=[dense, banded]")
DENSE = (*WITHOUT_COLUMNS, "model.attention=[dense]", "model.attention_window=null")


class Step(NamedTuple):
    """Commands that answer one question. `goal`: what their numbers should reach."""

    name: str
    title: str
    commands: Sequence[Command]
    goal: str = ""


def train(
    recipe: str, ds_config: str, *flags: str, settings: Sequence[str] = (), out: str = "run"
) -> Command:
    """Train a recipe; checkpoints are saved if it is resumed."""
    own = ("run.prompt=null", *(() if "--resume" in flags else UNSAVED), *settings)
    chosen = ("--recipe", recipe, "--ds_config", ds_config, "--out", out, *flags)
    return (TRAIN, *chosen, *(f"--set={setting}" for setting in own))


def speed(
    recipe: str,
    settings: Sequence[str],
    *flags: str,
    systems: Sequence[str] = ("ours",),
    variants: Sequence[str] = ("eager",),
) -> Command:
    """Measure the steps of a row in one process."""
    chosen = ("--recipe", recipe, "--systems", *systems, "--variants", *variants, *flags, *ALONE, *PACE)
    own = (f"--set={setting}" for setting in alone(recipe, settings))
    return (MEASURE, "step", *chosen, "--out", "numbers.json", *own)


def report(*runs: str) -> Command:
    return ("report.py", *runs, "--out", "report")


def alone(recipe: str, settings: Sequence[str] = ()) -> list[str]:
    """Return settings for a row in one process on the packaged corpus, with its own micro-batch."""
    row = catalog.load(recipe)
    own = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=1"]
    if row.data.blend or row.data.source != "packaged":
        own += ["data.source=packaged", "data.name=null", "data.blend=[]", "data.validation_every=20"]
    if row.batch.micro:
        own += [f"batch.global={row.batch.micro}", "batch.accumulation=null"]
    changed = {setting.partition("=")[0] for setting in settings}
    return [*(each for each in own if each.partition("=")[0] not in changed), *settings]


def tiny(command: Command) -> Command:
    """Change a training or measurement to tiny shapes, in a precision that any machine has."""
    if command[0] not in (TRAIN, MEASURE):
        return command
    large = ("--set=batch.", "--set=model.heads", "--set=precision")
    kept = (word for word in command if not word.startswith(large) and word not in PACE)
    own: Sequence[str] = WALK
    if command[0] == TRAIN:
        own = ["--emulate_fp16"] if any("fp16" in word for word in command) else []
    return (*kept, *own, "--tiny", "--set=precision=auto", "--set=batch.accumulation=null")


FIRST = (
    *(
        train(DEFAULT, config, *SHORT, settings=(f"precision={precision}", *DROPOUT))
        for precision, config in product(PRECISIONS, STAGES)
    ),
    train("bert/sotu", "zero1", *SHORT, settings=("precision=bf16", *DROPOUT)),
    train("bert/sotu", "zero1", *SHORT, settings=("precision=bf16",)),  # without padding or dropout
    *(
        train(DEFAULT, config, *SHORT, settings=(*DROPOUT, "activation_checkpointing=full"))
        for config in ("zero3", "zero3_cpu_checkpointing")
    ),
)
RESUMED = tuple(
    train(DEFAULT, config, "--compile", "off", "--steps", steps, "--resume", out="../run")
    for config, steps in (("zero1", "2"), ("zero3_offload", "4"), ("zero2", "6"), ("zero0", "8"))
)
RUNS = (
    *(train(DEFAULT, config, "--steps", "30") for config in available() if config not in UNUSABLE),
    *(train("bert/sotu", config, "--steps", "30") for config in ("zero1", "zero3")),
    train(DEFAULT, "zero3", "--steps", "30", settings=("model.implementation=transformers",)),
)
ATTENTION = (
    speed(GPT, SMALL, *TRACED),
    speed(BERT, FEW, *TRACED),
    speed(GPT, (*SMALL, "dropout.attention=0.1"), *TRACED),
)
OF_1_2B = (
    speed(LARGE, NO_RECOMPUTATION, systems=("ours", "bare", "transformers"), variants=FORMS),
    speed(LARGE, (), systems=("ours", "transformers"), variants=("compiled",)),
)
GOAL_1_2B = (
    "goal: ours, compiled, has 55 % of the square rate (as the row stands with the recomputed forward "
    "counted, 4/3 of what is shown), and transformers takes 1.5 times as long"
)
PRECISE = tuple(
    speed(GPT, (*SMALL, f"precision={precision}"), "--ds_config", *STAGES, "zero2_offload")
    for precision in PRECISIONS
)
COMPILED = (
    speed(GPT, SMALL, "--ds_config", "zero1", "zero2", "zero3", variants=FORMS),
    speed(BERT, FEW, variants=FORMS),
)
OF_345M = tuple(
    speed(row, ("precision=bf16",), systems=("ours", "transformers"), variants=("compiled",))
    for row in MEDIUM
)
REPEATED = (
    *(
        train(DEFAULT, "zero1", "--steps", steps, "--resume", out=f"../{run}")
        for run, steps in (("first", "20"), ("second", "20"), ("resumed", "10"), ("resumed", "20"))
    ),
    report("../first", "../second", "../resumed"),
)
HOLDING = ("zero1", "zero3_offload", "zero0", "zero3")
MEMORY = (
    *(train(LARGE, each, "--steps", "5", settings=alone(LARGE), out=f"../{each}") for each in HOLDING),
    report(*(f"../{each}" for each in HOLDING)),
)
OF_193B = speed(LARGEST, ("model.layers=1", "batch.global=4", "precision=bf16"), *TRACED)
BANDED = (
    *(
        speed(SPARSE, (*BANDS, heads, f"activation_checkpointing={recomputed}"), *TRACED, variants=FORMS)
        for heads, recomputed in product(("model.heads=16", "model.heads=24"), ("none", "full"))
    ),
    speed(SPARSE, NO_ATTENTION_DROPOUT, *TRACED, variants=("compiled",)),
    speed(SPARSE, DENSE, *TRACED, variants=("compiled",)),
)
RATES = ("plan.py", "--recipe", LARGE, "--hardware", "this", "--remeasure")
LAYOUTS = ("compare_layouts.py", "--tiny", "--compile", "--processes", "1")

STEPS: Sequence[Step] = (
    Step("first", "a few steps of every ZeRO stage with dropout, bf16 and fp16, and recomputed", FIRST),
    Step("resumed", "a run that goes on under another stage", RESUMED),
    Step("runs", "does everything run: every configuration of one GPU, both families", RUNS),
    Step("attention", "kernels of attention in GPT-2 and in a padded BERT", ATTENTION),
    Step("rates", "matrix rate, memory bandwidth, and what they predict for the 1.2B row", (RATES,)),
    Step("1.2b", "the 1.2B row of the A100 document's table 4, and its goals", OF_1_2B, GOAL_1_2B),
    Step("precisions", "bf16 and fp16 under ZeRO 0-3 and offload", PRECISE),
    Step("compile", "eager against compiled, with the graphs", COMPILED),
    Step("345m", "the 345M rows", OF_345M),
    Step("repeat", "two equal runs and a resumed one, bit for bit", REPEATED),
    Step("memory", "peak memory of the 1.2B row, predicted and measured", MEMORY),
    Step("193b", "one layer of the 193B row", (OF_193B,)),
    Step("sparse", "flex_attention in the sparse rows", BANDED),
    Step("layouts", "compare_layouts, in one process", (LAYOUTS,)),
)
