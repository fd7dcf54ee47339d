"""tools/check_tables.py fails on any digit that is changed, in a cell, in a key or in both together."""

from dataclasses import replace

import pytest

from modeling import gpt2
from modeling.layer_list import LayerDefinition
from modeling.transformer import LayerNorm
from recipes.problems import ProblemsError
from recipes.tables import FOLDER
from tools.tables import quantities, verification

LINKED = (
    "a100_blog_table1",
    "a100_blog_table2",
    "a100_blog_table3",
)  # one is like another, or has its ensembles

# Table -> the quantity that then disagrees, and what is replaced by what.
CHANGED = {
    "jeanzay_megatron_max_size_32gb": [
        ("TFLOPS", ("26.693", "26.683")),
        ("TFLOPS", ("1.618", "1.718")),
        ("size label", ("18B", "19B")),
        ("size label", ("61B", "62B")),
        ("layers per stage", ("layers: 40", "layers: 42")),
        ("heads per rank", ("{layers: 40, hidden: 6144, heads: 32}", "{layers: 40, hidden: 6144, heads: 6}")),
        ('cell "DP"', ('row: "16 | 18B | 1 |', 'row: "16 | 18B | 2 |')),
        ('cell "GPUs"', ("hardware: {gpus: 32}", "hardware: {gpus: 16}")),
    ],
    "jeanzay_megatron_max_size_16gb": [
        ("published.printed batch.global", ("printed: {batch.global: 4}", "printed: {batch.global: 16}")),
        ('cell "Glob-BS"', ("printed: {batch.global: 4}", "printed: {}")),
        ("inferred parallel.pp", ('parallel.tp: "', 'parallel.pp: "')),
    ],
    "dgx2_gpt2_data_parallel": [
        ("source of sequence_length", ('sequence_length: "the document\'s text"', "parallel.dp: x")),
        ("parameters", ("354871296", "354871297")),
        ("samples/s", ("67.47", "67.57")),
        ("published.oom", ('"16 | 2 | OOM | | |"', '"16 | 2 | | | |"')),
        ('cell "time/iteration (ms)"', ('"16 | 2 | OOM | | |"', '"16 | 2 | 900 | | |"')),
        ("out of memory", ("24, global: 384", "4, global: 64")),
    ],
    "dgx2_gpt2_model_parallel": [("parameters per rank", ("1043549184", "1043549185"))],
    "dgx2_bert_model_parallel": [("parameters", ("2466520324", "2466520325"))],
    "a100_blog_table4": [("weak scaling", ("86.5", "80.5")), ("share of peak", ("35.7", "36.7"))],
    "a100_blog_figure2": [
        ("speed over gpt2-8.3b-v100", ("peak_tflops: 312", "peak_tflops: 330")),
        ('cell "Speedup over V100 (text)"', ("A100 | 2.5x", "A100 | 2.6x")),
    ],
    "a100_blog_table2": [
        ('cell "RACE m/h accuracy (test set)"', ("89.5 (91.8", "89.9 (91.8")),
        ('cell "QQP accuracy (dev set)"', ("accuracy: 92.7", "accuracy: 92.5")),
        ('cell "MNLI m/mm accuracy (dev set)"', ("90.8 | 92.2", "90.9 | 92.2")),
        ('cell "Trained tokens (ratio)"', ("ALBERT | 3 |", "ALBERT | 2 |")),
        ("trained tokens", ("steps: 1500000", "steps: 1000000")),
    ],
    "a100_blog_table3": [
        ("setting published.previous.race.accuracy", ("race: {accuracy: 89.4}", "race: {accuracy: 89.3}"))
    ],
}
# Cell and key together, or what no cell prints: the document's text, public scripts, other scores and physics
# contradict.
CONTRADICTED = {
    "jeanzay_megatron_max_size_16gb": [
        ("setting published.time_per_iteration_s", ("0.661", "0.616")),
        ("share of peak, exact count", ("0.661", "661")),
        ("share of peak, exact count", ("0.661", "0.00661")),
    ],
    "jeanzay_megatron_max_size_32gb": [("parameters, middle stages", ("hidden: 6144", "hidden: 6080"))],
    "a100_blog_table4": [
        ("parameters, each once", ("hidden: 2304, heads: 18", "hidden: 2320, heads: 20")),
        ("TFLOPS, batch 16 in 1162 ms on 4 GPUs", ("layers: 36", "layers: 37")),
        ("setting model.heads", ("heads: 15", "heads: 16")),
        ("setting model.hidden", ("hidden: 2304, heads: 18", "hidden: 2320, heads: 20")),
        ("setting published.tflops_by", ("tflops_by: exact", "tflops_by: formula")),
    ],
    "megatron_paper_table1": [
        ("setting model.heads", ("hidden: 2304, heads: 24", "hidden: 2304, heads: 16")),
        ("setting schedule.min_lr", ("min_lr: 1e-5", "min_lr: 1e-6")),
        ("setting optimizer.clip", ("clip: 1.0", "clip: 0.5")),
        ("setting optimizer.weight_decay", ("weight_decay: 0.01", "weight_decay: 0.1")),
        ("model states", ("gpu_memory_gb: 32", "gpu_memory_gb: 16")),
    ],
    "dgx2_bert_data_parallel": [
        ("setting published.samples_per_s", ("414.05", "441.05")),
        ("cached", ("1 | 30 |", "1 | 3.0 |"), ("cached_gb: 30.0", "cached_gb: 3.0")),
    ],
    "sber_path_to_13b": [
        ("setting steps", ("steps: 143000", "steps: 134000")),
        ("setting optimizer.betas", ("lr: 1e-4, betas: [0.9, 0.95]", "lr: 1e-4, betas: [0.9, 0.99]")),
    ],
    "dgx2_gpt2_model_parallel": [("cached", ("27.2", "17.2")), ("cached", ("31.2", "33.2"))],
    "dgx2_bert_activation_checkpointing": [
        ("cached", ("27.2", "17.2")),
        ("cached, over micro-batches", ("27.2", "22.7")),
    ],
    "a100_blog_table1": [
        ("setting published.validation_loss", ("validation_loss: 1.16", "validation_loss: 1.61")),
        ("setting optimizer.lr", ("lr: 1e-4", "lr: 1e-3")),
        ("setting schedule.warmup_steps", ("warmup_steps: 10000", "warmup_steps: 1000")),
        (
            "setting batch.global",
            ("micro: 4", "micro: 2"),
            ("micro: 8", "micro: 4"),
            ("global: 1024", "global: 512"),
        ),
        ("setting model.layer_norm", ("layer_norm: pre", "layer_norm: post")),
        ("setting model.sentence_head", ("sentence_head: sop", "sentence_head: nsp")),
        ("setting data.masking.max_ngram", ("max_ngram: 3", "max_ngram: 1")),
        ("setting steps", ("steps: 1500000", "steps: 2000000")),
    ],
    "hpe1270_v100_pcie": [
        (
            "setting activation_checkpointing",
            ("| yes", "| no"),
            ("checkpointing: full", "checkpointing: none"),
        ),
        ("setting hardware.gpus_per_node", ("gpus: 8, gpus_per_node: 8", "gpus: 8, gpus_per_node: 4")),
    ],
    "dgx2_gpt2_data_parallel": [
        ("setting optimizer.lr", ("lr: 1.5e-4", "lr: 1.5e-3")),
        ("setting model.layers", ("layers: 54, hidden: 1920", "layers: 5, hidden: 1920")),
    ],
    "dgx2_bert_model_parallel": [
        ("setting optimizer.lr", ("lr: 1e-4", "lr: 1e-3")),
        ("setting model.layer_norm", ("layer_norm: post", "layer_norm: pre")),
        ("setting hardware.gpus_per_node", ("gpus_per_node: 16", "gpus_per_node: 8")),
    ],
    "jeanzay_megatron_performance": [
        ("setting optimizer.lr", ("lr: 1.5e-4", "lr: 1e-4")),
        ("setting schedule.warmup_steps", ("warmup_steps: 8,", "warmup_steps: 80,")),
        ("setting hardware.peak_tflops", ("peak_tflops: 125", "peak_tflops: 312")),
        ("setting hardware.gpus_per_node", ("gpus_per_node: 4", "gpus_per_node: 8")),
        ("model states", ("gpu_memory_gb: 32", "gpu_memory_gb: 16")),
        ("setting model.hidden", ("hidden: 6144", "hidden: 6080")),
    ],
    "jeanzay_megatron_deepspeed_3d": [
        ("TFLOPS", ("framework: Megatron", "tflops_by: exact\n    framework: Megatron"))
    ],
    "jeanzay_hf_deepspeed_max_size": [
        ("model states", ("ds_config: zero3_offload_optimizer", "ds_config: zero0")),
        ("setting ds_config", ("ds_config: zero3_offload_optimizer", "ds_config: zero3_offload")),
    ],
    "a100_blog_table2": [
        ("RACE, of middle and high", ("86.9 / 81.5", "86.9 / 83.5"), ("high: 81.5", "high: 83.5")),
        ("SQuAD 1.1, exact matches", ("94.9 / 89.1", "94.9 / 99.1"), ("em: 89.1", "em: 99.1")),
        ("size, qqp.accuracy", ("| 92.7 |", "| 92.4 |"), ("accuracy: 92.7", "accuracy: 92.4")),
        (
            "trained tokens",
            ("Megatron-3.9B | 1 |", "Megatron-3.9B | 2 |"),
            ('88.6)"\n      trained_tokens: 1', '88.6)"\n      trained_tokens: 2'),
        ),
    ],
    "a100_blog_table3": [("ensemble, squad1.f1", ("95.8 / 90.5", "95.1 / 90.5"), ("f1: 95.8", "f1: 95.1"))],
}


@pytest.fixture
def copied(tmp_path):
    """Verify one table with a text replaced in its rows or, where they lack it, in its evidence."""

    def verify(table: str, *changes: tuple[str, str]):
        for name in {table, *(LINKED if table in LINKED else ())}:
            rows, evidence = (FOLDER / f"{name}.yaml").read_text().split("\nevidence:\n")
            for old, new in changes if name == table else ():
                assert old in rows + evidence
                rows, evidence = (
                    (rows.replace(old, new), evidence) if old in rows else (rows, evidence.replace(old, new))
                )
            (tmp_path / f"{name}.yaml").write_text(f"{rows}\nevidence:\n{evidence}")
        return verification.verify([table], folder=tmp_path)

    return verify


def lines(report) -> str:
    stale = [f"stale: {line}" for line in report.stale]
    return "\n".join([*(f"{check.subject} {check.difference}" for check in report.unexplained), *stale])


@pytest.mark.parametrize("table", CHANGED)
def test_a_table_is_explained_before_it_is_changed(copied, table):
    assert copied(table).passed


@pytest.mark.parametrize(
    ("table", "quantity", "changes"),
    [
        (table, quantity, changes)
        for rows in (CHANGED, CONTRADICTED)
        for table, cases in rows.items()
        for quantity, *changes in cases
    ],
)
def test_a_changed_digit_is_unexplained(copied, table, quantity, changes):
    changed = copied(table, *changes)
    assert not changed.passed
    assert quantity in {check.quantity for check in changed.unexplained}, lines(changed)


REFUSED = {
    "has 8 cells for 9 columns": ("jeanzay_megatron_max_size_32gb", " | 26.693", ""),
    "a100_blog_table3/albert: published.row has 5 cells, the table 4 columns: separate the cells by":
        ("a100_blog_table3", "ALBERT ensemble", "ALBERT ensemble | "),
    "= 16 is not batch.global=32": ("jeanzay_megatron_max_size_16gb", "4, global: 16", "4, global: 32"),
    "a100_blog_tabel2: no such published table; did you mean a100_blog_table2": (
        "a100_blog_table3", "single_models: a100_blog_table2", "single_models: a100_blog_tabel2"),
    "3.9b: is a recipe of the table; leave it out": ("a100_blog_table3", "    albert:\n", "    3.9b:\n"),
}  # fmt: skip


@pytest.mark.parametrize("said", REFUSED)
def test_what_is_no_recipe_and_no_evidence_is_refused(copied, said):
    table, *change = REFUSED[said]
    with pytest.raises(ProblemsError, match=said):
        copied(table, change)


def test_a_changed_digit_of_an_explained_disagreement_leaves_the_explanation_stale(copied):
    changed = copied("jeanzay_hf_deepspeed_max_size", ("25.66", "25.76"))
    assert [check.quantity for check in changed.unexplained] == ["TFLOPS"]
    assert len(changed.stale) == 1 and "25.66" in changed.stale[0]


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
    family = quantities.FAMILIES["gpt2"]()
    monkeypatch.setitem(quantities.FAMILIES, "gpt2", lambda: replace(family, layer_list=wrong))
    changed = copied("jeanzay_megatron_deepspeed_3d")
    modules = [check.computed for check in changed.unexplained if check.quantity == "modules against cost.py"]
    assert len(modules) == 1 and found in modules[0], lines(changed)
