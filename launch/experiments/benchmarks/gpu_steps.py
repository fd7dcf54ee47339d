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
TRACED = ("--profile", "traces")

ON_THE_HUB = ("bert_uncased", "bert_cased")  # vocabularies
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
    chosen = ["--recipe", recipe, "--systems", *systems, "--variants", *variants, *flags, "--apart", *PACE]
    if "ours" in systems:
        chosen.append("--no_launch")
    own = (f"--set={setting}" for setting in alone(recipe, settings))
    return (MEASURE, "step", *chosen, "--out", "numbers.json", *own)


def report(*runs: str) -> Command:
    return ("report.py", *runs, "--out", "report")


def alone(recipe: str, settings: Sequence[str] = ()) -> list[str]:
    """Return settings for a row in one process, with its own micro-batch and without the hub."""
    row = catalog.load(recipe)
    own = ["parallel.tp=1", "parallel.pp=1", "parallel.dp=1"]
    if row.data.blend or row.data.source != "packaged":
        own += ["data.source=packaged", "data.name=null", "data.blend=[]", "data.validation_every=20"]
    if row.data.tokenizer.kind in ON_THE_HUB:
        own.append("data.tokenizer.kind=trained_wordpiece")
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
OF_124M = tuple(
    speed(GPT, SMALL, systems=(each,), variants=FORMS) for each in ("ours", "nano", "transformers")
)
ATTENTION = (
    speed(GPT, SMALL, *TRACED),
    speed(BERT, FEW, *TRACED),
    speed(GPT, (*SMALL, "dropout.attention=0.1"), *TRACED),
)
OF_1_2B = (
    *(speed(LARGE, NO_RECOMPUTATION, variants=(form,)) for form in reversed(FORMS)),
    speed(LARGE, (), variants=("compiled",)),
    speed(LARGE, NO_RECOMPUTATION, systems=("transformers",)),
    speed(LARGE, NO_RECOMPUTATION, systems=("bare",), variants=("compiled",)),
)
GOAL_1_2B = (
    "goal: ours, compiled, has 55 % of the square rate (as the row stands with the recomputed forward "
    "counted, 4/3 of what is shown), and transformers, eager, takes 1.5 times as long"
)
PRECISE = tuple(
    speed(GPT, (*SMALL, f"precision={precision}"), "--ds_config", config)
    for precision, config in product(PRECISIONS, (*STAGES, "zero2_offload"))
)
COMPILED = (
    *(speed(GPT, SMALL, "--ds_config", config, variants=FORMS) for config in ("zero3", "zero2")),
    speed(BERT, FEW, variants=FORMS),
)
OF_345M = tuple(
    speed(row, ("precision=bf16",), systems=(system,), variants=("compiled",))
    for row, system in product(MEDIUM, ("ours", "transformers"))
)
REPEATED = (
    *(
        train(recipe, "zero1", "--deterministic", "--steps", steps, "--resume", out=f"../{run}")
        for recipe, run, steps in (
            (DEFAULT, "first", "20"),
            (DEFAULT, "second", "20"),
            (DEFAULT, "resumed", "10"),
            (DEFAULT, "resumed", "20"),
            ("bert/sotu", "bert-first", "5"),
            ("bert/sotu", "bert-second", "5"),
        )
    ),
    report("../first", "../second", "../resumed"),
    report("../bert-first", "../bert-second"),
)
HOLDING = ("zero1", "zero3_offload", "zero0", "zero3")
MEMORY = (
    *(train(LARGE, each, "--steps", "5", settings=alone(LARGE), out=f"../{each}") for each in HOLDING),
    report(*(f"../{each}" for each in HOLDING)),
)
OF_193B = speed(LARGEST, ("model.layers=1", "batch.global=1", "precision=bf16"), *TRACED)
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
    Step(
        "machine",
        "the doctor's checks, with a kernel that is compiled",
        (("doctor.py", "--recipe", DEFAULT),),
    ),
    Step("first", "a few steps of every ZeRO stage with dropout, bf16 and fp16, and recomputed", FIRST),
    Step("124m", "tokens/s at 124M: ours, a plain GPT-2 and transformers, eager and compiled", OF_124M),
    Step("1.2b", "the 1.2B row of the A100 document's table 4, and its goals", OF_1_2B, GOAL_1_2B),
    Step("attention", "kernels of attention in GPT-2 and in a padded BERT", ATTENTION),
    Step("repeat", "two equal runs and a resumed one by deterministic kernels, bit for bit", REPEATED),
    Step("resumed", "a run that goes on under another stage", RESUMED),
    Step("rates", "matrix rate, memory bandwidth, and what they predict for the 1.2B row", (RATES,)),
    Step("memory", "peak memory of the 1.2B row, predicted and measured", MEMORY),
    Step("compile", "eager against compiled, with the graphs", COMPILED),
    Step("runs", "does everything run: every configuration of one GPU, both families", RUNS),
    Step("precisions", "bf16 and fp16 under ZeRO 0-3 and offload", PRECISE),
    Step("345m", "the 345M rows", OF_345M),
    Step("sparse", "flex_attention in the sparse rows", BANDED),
    Step("193b", "one layer of the 193B row (a GPU of more than 80 GB)", (OF_193B,)),
    Step("layouts", "compare_layouts, in one process", (LAYOUTS,)),
)
