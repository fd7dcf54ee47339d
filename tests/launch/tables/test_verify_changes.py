"""`recipe.py verify` fails on any digit that is changed, in a cell, in a key or in both together."""

import pytest

from launch.tables.verifying import counts, verification
from modeling import gpt2
from modeling.layer_list import LayerDefinition
from modeling.transformer import LayerNorm
from recipes.problems import RecipeError
from recipes.tables import FOLDER


def lines(report) -> str:
    stale = [f"stale: {line}" for line in report.stale]
    return "\n".join([*(f"{check.subject} {check.difference}" for check in report.unexplained), *stale])


CHANGED = [
    ("jeanzay_megatron_max_size_32gb", "26.693", "26.683", "TFLOPS"),
    ("jeanzay_megatron_max_size_32gb", "1.618", "1.718", "TFLOPS"),
    ("jeanzay_megatron_max_size_32gb", "18B", "19B", "size label"),
    ("jeanzay_megatron_max_size_32gb", "61B", "62B", "size label"),
    ("jeanzay_megatron_max_size_32gb", "layers: 40", "layers: 42", "layers per stage"),
    (
        "jeanzay_megatron_max_size_32gb",
        "{layers: 40, hidden: 6144, heads: 32}",
        "{layers: 40, hidden: 6144, heads: 6}",
        "heads per rank",
    ),
    ("jeanzay_megatron_max_size_32gb", 'row: "16 | 18B | 1 |', 'row: "16 | 18B | 2 |', 'cell "DP"'),
    ("jeanzay_megatron_max_size_32gb", "hardware: {gpus: 32}", "hardware: {gpus: 16}", 'cell "GPUs"'),
    (
        "jeanzay_megatron_max_size_16gb",
        "printed: {batch.global: 4}",
        "printed: {batch.global: 16}",
        "published.printed batch.global",
    ),
    ("jeanzay_megatron_max_size_16gb", "printed: {batch.global: 4}", "printed: {}", 'cell "Glob-BS"'),
    ("jeanzay_megatron_max_size_16gb", 'parallel.tp: "', 'parallel.pp: "', "inferred parallel.pp"),
    (
        "dgx2_gpt2_data_parallel",
        'sequence_length: "the document\'s text"',
        "parallel.dp: x",
        "source of sequence_length",
    ),
    ("dgx2_gpt2_data_parallel", "354871296", "354871297", "parameters"),
    ("dgx2_gpt2_data_parallel", "67.47", "67.57", "samples/s"),
    ("dgx2_gpt2_data_parallel", '"16 | 2 | OOM | | |"', '"16 | 2 | | | |"', "published.oom"),
    ("dgx2_gpt2_data_parallel", '"16 | 2 | OOM | | |"', '"16 | 2 | 900 | | |"', 'cell "time/iteration (ms)"'),
    ("dgx2_gpt2_data_parallel", "24, global: 384", "4, global: 64", "out of memory"),
    ("dgx2_gpt2_model_parallel", "1043549184", "1043549185", "parameters per rank"),
    ("dgx2_bert_model_parallel", "2466520324", "2466520325", "parameters"),
    ("a100_blog_table4", "86.5", "80.5", "weak scaling"),
    ("a100_blog_table4", "35.7", "36.7", "share of peak"),
]


@pytest.fixture
def copied(tmp_path):
    """Verify one table after a replacement in its rows; its evidence stays."""

    def verify(table: str, *changes: tuple[str, str]):
        rows, evidence = (FOLDER / f"{table}.yaml").read_text().split("\nevidence:\n")
        for old, new in changes:
            assert old in rows
            rows = rows.replace(old, new)
        (tmp_path / f"{table}.yaml").write_text(f"{rows}\nevidence:\n{evidence}")
        return verification.verify([table], folder=tmp_path)

    return verify


@pytest.mark.parametrize("table", sorted({table for table, *_ in CHANGED}))
def test_a_table_is_explained_before_it_is_changed(copied, table):
    assert copied(table).passed


@pytest.mark.parametrize(("table", "old", "new", "quantity"), CHANGED)
def test_a_changed_digit_is_unexplained(copied, table, old, new, quantity):
    changed = copied(table, (old, new))
    assert not changed.passed
    assert quantity in {check.quantity for check in changed.unexplained}, lines(changed)


@pytest.mark.parametrize(
    ("table", "old", "new"),
    [
        ("jeanzay_megatron_max_size_32gb", " | 26.693", ""),
        ("jeanzay_megatron_max_size_16gb", "accumulation: 4, global: 16", "accumulation: 4, global: 32"),
    ],
)
def test_what_is_no_recipe_is_refused(copied, table, old, new):
    with pytest.raises(RecipeError):
        copied(table, (old, new))


def test_a_changed_digit_of_an_explained_disagreement_is_unexplained_and_leaves_the_explanation_stale(copied):
    changed = copied("jeanzay_hf_deepspeed_max_size", ("25.66", "25.76"))
    assert [check.quantity for check in changed.unexplained] == ["TFLOPS"]
    assert len(changed.stale) == 1 and "25.66" in changed.stale[0]


# Cell and key together, or what no cell prints: the document's text, public scripts and physics contradict.

CONTRADICTED = [
    ("jeanzay_megatron_max_size_16gb", [("0.661", "0.616")], "setting published.time_per_iteration_s"),
    ("jeanzay_megatron_max_size_32gb", [("hidden: 6144", "hidden: 6080")], "parameters, middle stages"),
    ("a100_blog_table4", [("hidden: 2304, heads: 18", "hidden: 2320, heads: 20")], "parameters, each once"),
    ("a100_blog_table4", [("layers: 36", "layers: 37")], "TFLOPS, batch 16 in 1162 ms on 4 GPUs"),
    (
        "megatron_paper_table1",
        [("hidden: 2304, heads: 24", "hidden: 2304, heads: 16")],
        "setting model.heads",
    ),
    ("dgx2_bert_data_parallel", [("414.05", "441.05")], "setting published.samples_per_s"),
    ("sber_path_to_13b", [("steps: 143000", "steps: 134000")], "setting steps"),
    ("jeanzay_megatron_max_size_16gb", [("0.661", "661")], "share of peak, exact count"),
    ("jeanzay_megatron_max_size_16gb", [("0.661", "0.00661")], "share of peak, exact count"),
    ("dgx2_bert_data_parallel", [("1 | 30 |", "1 | 3.0 |"), ("cached_gb: 30.0", "cached_gb: 3.0")], "cached"),
    ("dgx2_gpt2_model_parallel", [("27.2", "17.2")], "cached"),
    ("dgx2_gpt2_model_parallel", [("31.2", "33.2")], "cached"),
    ("dgx2_bert_activation_checkpointing", [("27.2", "17.2")], "cached"),
    ("dgx2_bert_activation_checkpointing", [("27.2", "22.7")], "cached, over micro-batches"),
    (
        "a100_blog_table1",
        [("validation_loss: 1.16", "validation_loss: 1.61")],
        "setting published.validation_loss",
    ),
    (
        "hpe1270_v100_pcie",
        [("| yes", "| no"), ("checkpointing: full", "checkpointing: none")],
        "setting activation_checkpointing",
    ),
    (
        "hpe1270_v100_pcie",
        [("gpus: 8, gpus_per_node: 8", "gpus: 8, gpus_per_node: 4")],
        "setting hardware.gpus_per_node",
    ),
    ("a100_blog_table1", [("lr: 1e-4", "lr: 1e-3")], "setting optimizer.lr"),
    ("a100_blog_table1", [("warmup_steps: 10000", "warmup_steps: 1000")], "setting schedule.warmup_steps"),
    (
        "a100_blog_table1",
        [("micro: 4", "micro: 2"), ("micro: 8", "micro: 4"), ("global: 1024", "global: 512")],
        "setting batch.global",
    ),
    ("a100_blog_table1", [("layer_norm: pre", "layer_norm: post")], "setting model.layer_norm"),
    ("a100_blog_table1", [("sentence_head: sop", "sentence_head: nsp")], "setting model.sentence_head"),
    ("a100_blog_table1", [("max_ngram: 3", "max_ngram: 1")], "setting data.masking.max_ngram"),
    ("a100_blog_table1", [("steps: 1500000", "steps: 2000000")], "setting steps"),
    ("megatron_paper_table1", [("min_lr: 1e-5", "min_lr: 1e-6")], "setting schedule.min_lr"),
    ("megatron_paper_table1", [("clip: 1.0", "clip: 0.5")], "setting optimizer.clip"),
    (
        "megatron_paper_table1",
        [("weight_decay: 0.01", "weight_decay: 0.1")],
        "setting optimizer.weight_decay",
    ),
    ("megatron_paper_table1", [("gpu_memory_gb: 32", "gpu_memory_gb: 16")], "model states"),
    ("dgx2_gpt2_data_parallel", [("lr: 1.5e-4", "lr: 1.5e-3")], "setting optimizer.lr"),
    ("dgx2_bert_model_parallel", [("lr: 1e-4", "lr: 1e-3")], "setting optimizer.lr"),
    ("dgx2_bert_model_parallel", [("layer_norm: post", "layer_norm: pre")], "setting model.layer_norm"),
    (
        "dgx2_bert_model_parallel",
        [("gpus_per_node: 16", "gpus_per_node: 8")],
        "setting hardware.gpus_per_node",
    ),
    ("jeanzay_megatron_performance", [("lr: 1.5e-4", "lr: 1e-4")], "setting optimizer.lr"),
    (
        "jeanzay_megatron_performance",
        [("warmup_steps: 8,", "warmup_steps: 80,")],
        "setting schedule.warmup_steps",
    ),
    (
        "jeanzay_megatron_performance",
        [("peak_tflops: 125", "peak_tflops: 312")],
        "setting hardware.peak_tflops",
    ),
    (
        "jeanzay_megatron_performance",
        [("gpus_per_node: 4", "gpus_per_node: 8")],
        "setting hardware.gpus_per_node",
    ),
    ("jeanzay_megatron_performance", [("gpu_memory_gb: 32", "gpu_memory_gb: 16")], "model states"),
    ("jeanzay_megatron_performance", [("hidden: 6144", "hidden: 6080")], "setting model.hidden"),
    (
        "jeanzay_megatron_deepspeed_3d",
        [("framework: Megatron", "tflops_by: exact\n    framework: Megatron")],
        "TFLOPS",
    ),
    (
        "jeanzay_hf_deepspeed_max_size",
        [("ds_config: zero3_offload_optimizer", "ds_config: zero0")],
        "model states",
    ),
    (
        "jeanzay_hf_deepspeed_max_size",
        [("ds_config: zero3_offload_optimizer", "ds_config: zero3_offload")],
        "setting ds_config",
    ),
    ("a100_blog_table4", [("heads: 15", "heads: 16")], "setting model.heads"),
    ("a100_blog_table4", [("hidden: 2304, heads: 18", "hidden: 2320, heads: 20")], "setting model.hidden"),
    ("a100_blog_table4", [("tflops_by: exact", "tflops_by: formula")], "setting published.tflops_by"),
    (
        "dgx2_gpt2_data_parallel",
        [("layers: 54, hidden: 1920", "layers: 5, hidden: 1920")],
        "setting model.layers",
    ),
    (
        "sber_path_to_13b",
        [("lr: 1e-4, betas: [0.9, 0.95]", "lr: 1e-4, betas: [0.9, 0.99]")],
        "setting optimizer.betas",
    ),
]


@pytest.mark.parametrize(("table", "changes", "quantity"), CONTRADICTED)
def test_a_change_of_cell_and_key_together_is_contradicted(copied, table, changes, quantity):
    changed = copied(table, *changes)
    assert not changed.passed
    assert quantity in {check.quantity for check in changed.unexplained}, lines(changed)


# Modules that hold something else.


def first_norm(shape, *, group, init):
    """Wrong on purpose: the final LayerNorm on the first stage."""
    layers = gpt2.layer_list(shape, group=group, init=init)
    return [layers[-2], *layers[:-2], layers[-1]]


def second_norm(shape, *, group, init):
    """Wrong on purpose: a LayerNorm too many."""
    layers = gpt2.layer_list(shape, group=group, init=init)
    extra = LayerDefinition("other_norm", LayerNorm, dict(hidden=shape.hidden, init=init.child("other_norm")))
    return [*layers[:-1], extra, layers[-1]]


def untied(shape, *, group, init):
    """Wrong on purpose: an output layer of its own."""
    *layers, last = gpt2.layer_list(shape, group=group, init=init)
    return [
        *layers,
        LayerDefinition("output", last.kind, {**last.arguments, "init": init.child("output")}, last.apply),
    ]


@pytest.mark.parametrize(
    ("wrong", "found"), [(first_norm, "stage 0"), (second_norm, "stage 15"), (untied, "once")]
)
def test_wrong_modules_disagree_with_the_arithmetic(monkeypatch, copied, wrong, found):
    monkeypatch.setitem(counts.LAYER_LISTS, "gpt2", wrong)
    changed = copied("jeanzay_megatron_deepspeed_3d")
    modules = [check.computed for check in changed.unexplained if check.quantity == "modules against cost.py"]
    assert len(modules) == 1 and found in modules[0], lines(changed)
