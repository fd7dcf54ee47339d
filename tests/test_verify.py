"""`recipes.py verify`: it finds what is known to be wrong with the sources, and any digit that is changed.

The parameter counts are held against DeepSpeed's real PipelineModule, built in a process group whose other ranks do not exist.
"""

import argparse
import csv
import json
import sys
from types import SimpleNamespace

import deepspeed
import pytest
import torch.distributed as dist
from launching import run
from torch.testing._internal.distributed.fake_pg import FakeStore

from launch import verification, verify_command
from launch.verifying import claims, counts, errata
from launch.verifying.expressions import evaluate
from launch.verifying.printed import Printed, agreement, spread
from modeling import bert, gpt2, rank_modules
from modeling.initialization import Init
from modeling.layer_list import LayerDefinition
from modeling.transformer import LayerNorm
from recipes.tables import FOLDER


@pytest.fixture(scope="module")
def report():
    """Of every published table and claim of this repository."""
    return verification.verify()


def lines(report) -> str:
    return "\n".join([*(check.line for check in report.sorted.unexplained), *(f"stale: {line}" for line in report.sorted.stale)])


def test_every_disagreement_is_explained_and_no_explanation_is_stale(report):
    assert report.passed, lines(report)


KNOWN = [
    ("dgx2_gpt2_model_parallel/54x1920-h20-tp2", "parameters", "2491526400"),
    ("dgx2_gpt2_model_parallel/54x1920-h20-tp2", "parameters per rank", "1245763200"),
    ("dgx2_gpt2_normalized/dgx2_gpt2_model_parallel/54x1920-h20-tp2", "model size", "2491526400"),
    ("dgx2_gpt2_data_parallel/40x1536-b2-oom", "out of memory", "micro-batch 8"),
    ("jeanzay_hf_deepspeed_max_size/23b-g16", "TFLOPS", "twice"),
    *((f"jeanzay_megatron_performance/{row}", "GPUs", "= 32") for row in (
        "18b-pp8-ga64-mb4", "18b-pp8-ga128-mb4", "18b-pp8-ga256-mb4", "18b-pp8-ga128-mb6", "18b-pp8-ga32-mb8",
    )),
    ("jeanzay_megatron_performance/48b-pp32-ga256-mb4", "GPUs", "= 128"),
    ("jeanzay_megatron_performance/18b-pp8-ga128-mb4", "TFLOPS", "-0.6 %"),
    ("jeanzay_megatron_deepspeed_zero_tp_sweep/48b-tp1-mb16", "TFLOPS", "+2.3 %"),
    ("jeanzay_megatron_deepspeed_zero_cpu_offload/48b-tp4-mb64", "TFLOPS", "+7.9 %"),
    ("jeanzay_megatron_max_size_16gb/22b-g256", "global batch", "= 16"),
    ("jeanzay_megatron_max_size_16gb/22b-g256", "size label", "26.19B"),
    ("jeanzay_megatron_max_size_16gb/50b-g128", "size label", "of all ranks in 2^20 x 1000"),
    ("jeanzay_megatron_performance/48b-pp16-ga256-mb4-0525", "size label", "48.40 in 2^30"),
    ("jeanzay_hf_deepspeed_performance/48b-mb4-0527", "time", "139.52"),
    ("a100_blog_table4/2b", "weak scaling", "92.8"),
    ("a100_blog_table4/8.7b", "weak scaling", "76.6"),
    ("dgx2_text/normalized-near-1", "largest", "1.295"),
    ("dgx2_text/gpt2-340m", "GPT-2", "354.8"),
    ("scaling_on_512_gpus/contributions", "scaling", "74"),
    ("sber_path_to_13b/01-small", "size label", "124.4M"),
    ("sber_path_to_13b/06-gpt3-large-deepspeed", "size label", "760.3M"),
]  # fmt: skip


@pytest.mark.parametrize(("subject", "quantity", "computed"), KNOWN)
def test_what_is_known_to_be_wrong_is_found(report, subject, quantity, computed):
    found = [check for check in report.checks if check.status == "disagrees" and check.subject == subject and quantity in check.quantity]
    assert [computed in check.computed for check in found] in ([True], [True, False]), found
    assert any(check in checks for _, checks in report.sorted.explained for check in found)


def test_what_cannot_be_checked_says_why(report):
    reasons = {check.subject: check.how for check in report.checks if check.status == "not checkable" and check.quantity != "parameters"}
    assert "no public script" in reasons["jeanzay_megatron_deepspeed_zero_tp_sweep/24b-tp1-mb16"]
    assert "no time" in reasons["hpe1270_v100_pcie/tf-bert-b10"]
    assert "activations decide" in reasons["dgx2_gpt2_data_parallel/40x1536-b24-oom"]
    assert any("129 / 217 / 125 s, 74 % apart" in remark for remark in report.remarks)


def test_every_row_is_checked_on_its_modules(report):
    modules = [check for check in report.checks if check.quantity == "modules against cost.py"]
    rows = {check.subject for check in report.checks if check.transcribed}
    assert {check.subject for check in modules} == rows and len(rows) >= 98
    assert {check.status for check in modules} == {"agrees"}
    largest = next(check for check in modules if check.subject.endswith("193b-g256"))
    assert largest.computed == "207012282368 on 256 ranks"


# A changed digit, in one copy of a table.

CHANGED = [
    ("jeanzay_megatron_max_size_32gb", "26.693", "26.683", "TFLOPS"),
    ("jeanzay_megatron_max_size_32gb", "1.618", "1.718", "TFLOPS"),
    ("jeanzay_megatron_max_size_32gb", "18B", "19B", "size label"),
    ("jeanzay_megatron_max_size_32gb", "61B", "62B", "size label"),
    ("jeanzay_megatron_max_size_32gb", "layers: 40", "layers: 42", "layers per stage"),
    ("jeanzay_megatron_max_size_32gb", "{layers: 40, hidden: 6144, heads: 32}", "{layers: 40, hidden: 6144, heads: 6}", "heads per rank"),
    ("jeanzay_megatron_max_size_32gb", 'row: "16 | 18B | 1 |', 'row: "16 | 18B | 2 |', 'cell "DP"'),
    ("jeanzay_megatron_max_size_32gb", "hardware: {gpus: 32}", "hardware: {gpus: 16}", 'cell "GPUs"'),
    ("jeanzay_megatron_max_size_32gb", " | 26.693", "", "cells"),
    ("jeanzay_megatron_max_size_16gb", "printed: {batch.global: 4}", "printed: {batch.global: 16}", "published.printed batch.global"),
    ("jeanzay_megatron_max_size_16gb", "printed: {batch.global: 4}", "printed: {}", 'cell "Glob-BS"'),
    ("jeanzay_megatron_max_size_16gb", 'parallel.tp: "', 'parallel.pp: "', "inferred parallel.pp"),
    ("jeanzay_megatron_max_size_16gb", "accumulation: 4, global: 16", "accumulation: 4, global: 32", "global batch of the run"),
    ("dgx2_gpt2_data_parallel", "sequence_length: \"the document's text\"", "parallel.dp: x", "source of sequence_length"),
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
    """Verify one table after a replacement in its text, by the repository's errata and without claims."""

    def verify(table: str, old: str = "", new: str = ""):
        text = (FOLDER / f"{table}.yaml").read_text()
        assert old in text
        (tmp_path / f"{table}.yaml").write_text(text.replace(old, new))
        (tmp_path / "claims.yml").write_text("{}")
        return verification.verify([table], folder=tmp_path, claims=tmp_path / "claims.yml")

    return verify


@pytest.mark.parametrize("table", sorted({table for table, *_ in CHANGED}))
def test_a_table_is_explained_before_it_is_changed(report, copied, table):
    assert copied(table).passed


@pytest.mark.parametrize(("table", "old", "new", "quantity"), CHANGED)
def test_a_changed_digit_is_unexplained(report, copied, table, old, new, quantity):
    changed = copied(table, old, new)
    assert not changed.passed
    assert quantity in {check.quantity for check in changed.sorted.unexplained}, lines(changed)


def test_a_changed_digit_of_an_explained_disagreement_is_unexplained_and_leaves_the_explanation_stale(copied):
    changed = copied("jeanzay_hf_deepspeed_max_size", "25.66", "25.76")
    assert [check.quantity for check in changed.sorted.unexplained] == ["TFLOPS"]
    assert len(changed.sorted.stale) == 1 and "25.66" in changed.sorted.stale[0]


# The command.


def command(*flags: str) -> int:
    parser = argparse.ArgumentParser()
    verify_command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["verify", *flags])
    return args.run(args)


def errata_without(tmp_path, monkeypatch, drop: str = "", add: str = "") -> None:
    """An errata.yaml with lines left out or one added."""
    kept = [line for line in errata.ERRATA.read_text().splitlines() if not (drop and drop in line and line.startswith("    - "))]
    changed = tmp_path / "errata.yaml"
    changed.write_text("\n".join([*kept, *([add] if add else [])]) + "\n")
    monkeypatch.setattr(errata, "ERRATA", changed)


TABLE = ("--table", "a100_blog_table4")


def test_command_exits_0_and_writes_every_check(tmp_path, capsys):
    out = tmp_path / "checks"
    assert command(*TABLE, "--table", "sber_text", "--verbose", "--json", f"{out}.json", "--csv", f"{out}.csv") == 0
    shown = capsys.readouterr().out
    assert "weak scaling: printed 90.7%, computed 103 / 111 = 92.8 %" in shown and "erratum" in shown and "UNEXPLAINED:" not in shown
    assert shown.index("Errata:") < shown.index("Not checkable:") < shown.index("Every disagreement is explained.")
    values = json.loads((tmp_path / "checks.json").read_text())
    with open(f"{out}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(values["checks"]) == len(rows) > 80 and values["passed"] is True
    explained = [row for row in rows if row["explanation"]]
    assert len(explained) == sum(len(erratum["disagreements"]) for erratum in values["errata"]) == 4


def test_a_missing_explanation_exits_1_and_stands_last(tmp_path, monkeypatch, capsys):
    errata_without(tmp_path, monkeypatch, drop="a100_blog_table4/8.7b")
    assert command(*TABLE) == 1
    last = capsys.readouterr().out.split("!!! UNEXPLAINED: 1")[1]
    assert "a100_blog_table4/8.7b weak scaling: printed 79.6%" in last and "1 are UNEXPLAINED, 0 explanations are stale" in last


def test_a_stale_explanation_exits_1(tmp_path, monkeypatch, capsys):
    errata_without(
        tmp_path, monkeypatch, add="- {disagreements: ['a100_blog_table4/2b TFLOPS: printed 1, computed 2'], explanation: once}"
    )
    assert command(*TABLE) == 1
    assert "a100_blog_table4/2b TFLOPS: printed 1, computed 2" in capsys.readouterr().out.split("!!! STALE: 1")[1]


def test_a_stale_explanation_of_no_known_row_is_found_by_a_full_run():
    known = errata.Erratum(("nobody/knows TFLOPS: printed 1, computed 2",), "once")
    assert errata.sort([], [known]).stale == known.lines
    assert errata.sort([], [known], {"a100_blog_table4/2b"}).stale == ()


@pytest.mark.parametrize(
    ("flags", "said"),
    [(("--table", "a100_blog_table5"), "did you mean a100_blog_table4"), (("--json", "nowhere/at/all.json"), "no directory nowhere/at")],
)
def test_bad_flags_exit_2(flags, said, capsys):
    assert command(*flags) == 2
    assert said in capsys.readouterr().err


def test_errata_of_a_row_needs_no_torch():
    program = """
import sys
from launch.verification import errata_of
assert errata_of("jeanzay_megatron_performance/18b-pp4-ga128-mb4") == []
print(*errata_of("jeanzay_megatron_performance/18b-pp8-ga128-mb4"), sep="\\n")
sys.exit("torch" in sys.modules)
"""
    done = run([sys.executable, "-c", program], timeout=60)
    assert done.returncode == 0, done.stdout
    gpus, tflops = done.stdout.splitlines()
    assert gpus.startswith("GPUs: printed 16, computed 4 x 8 x 1 = 32. Impossible as printed")
    assert "Later: 26.7" in tflops


# Numbers and formulas.


@pytest.mark.parametrize(
    ("printed", "computed", "how"),
    [
        ("27.3", 27.32, "rounded"), ("26.1", 26.07, "rounded"), ("28.6", 28.68, "truncated"), ("26.5", 26.66, None),
        ("43", 43.06, "rounded"), ("51,200", 51200, "exact"), ("90.5s", 90.5, "exact"),
        ("8.50", 8.503, "rounded"), ("8.50", 8.507, "truncated"), ("8.50", 8.52, None),
    ],
)  # fmt: skip
def test_agreement(printed, computed, how):
    assert agreement(Printed.read(printed), computed) == how


def test_agreement_within_the_rounding_of_an_input():
    time = Printed.read("1.618s")
    assert (time.value, time.half) == (1.618, 0.0005)
    limits = spread(lambda s: 28 * 8 * 1024 * 4 / (s * 32 * 1e3), time)
    assert agreement(Printed.read("17.720"), 17.7196, limits, "the time") == "rounded"
    assert agreement(Printed.read("17.725"), 17.7196, limits, "the time") == "within the rounding of the time"
    assert agreement(Printed.read("17.730"), 17.7196, limits, "the time") is None


@pytest.mark.parametrize("formula", ["__import__('os')", "row.real", "value('a')[0]", "(lambda: 1)()", "1+", "other(1)", "2 if 1 else 3"])
def test_formulas_are_arithmetic_alone(formula):
    with pytest.raises(ValueError, match="formula"):
        evaluate(formula, {"value": lambda *_: 1.0}, {"row": "a/b"})
    assert evaluate("-value(row) * (2 + 3) ** 2 / 4", {"value": lambda _: 2.0}, {"row": "a/b"}) == -12.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("g: {source: s, claims: {c: {says: x, printed: 1, fromula: 2}}}", "fromula"),
        ("g: {source: s, claims: {c: {says: x, printed: 1}}}", "why there is none"),
        ("g: {source: s, claims: {c: {says: x, printed: 1, formula: '1', compare: near}}}", "within 10 %"),
        ("g: {source: s, columns: [a], formulas: ['1'], rows: {r: 1 | 2}}", "2 cells for 1 columns"),
    ],
)
def test_a_wrong_claim_is_named(tmp_path, text, said):
    (tmp_path / "claims.yml").write_text(text)
    with pytest.raises(ValueError, match=f"claims.yaml: g.*{said}"):
        claims.load(tmp_path / "claims.yml")


# Parameters at every rank.

GPT2_SHAPE = gpt2.GPT2Shape(layers=5, hidden=32, heads=4, vocab=70, padded_vocab=256, positions=16)
BERT_SHAPES = [
    bert.BertShape(layers=5, hidden=32, heads=4, vocab=70, padded_vocab=256, positions=16, post_norm=post, sentence_head=head)
    for post, head in ((True, "nsp"), (False, "none"))
]
LAYOUTS = [(2, 2), (1, 3), (2, 1)]
PIPELINES = {gpt2.layer_list: gpt2.gpt2_pipeline, bert.layer_list: bert.bert_pipeline}
PLAIN = {gpt2.layer_list: gpt2.GPT2, bert.layer_list: bert.Bert}


@pytest.fixture
def alone(monkeypatch):
    """Be rank r of a world whose other ranks do not exist; collectives return at once and change nothing."""
    from deepspeed.comm import comm

    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)  # it would be compiled
    monkeypatch.setattr(comm, "cdb", None)

    def start(rank: int, tp: int, world: int):
        """The tensor-parallel group of the rank; None for tp 1."""
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        if comm.cdb is None:
            deepspeed.init_distributed(dist_backend="fake", auto_mpi_discovery=False, verbose=False)
        return dist.new_group(list(range(rank // tp * tp, (rank // tp + 1) * tp))) if tp > 1 else None

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(("tp", "pp"), LAYOUTS)
@pytest.mark.parametrize(("layer_list", "shape"), [(gpt2.layer_list, GPT2_SHAPE), *((bert.layer_list, shape) for shape in BERT_SHAPES)])
def test_ranks_hold_what_the_real_modules_hold(alone, capsys, layer_list, shape, tp, pp):
    counted = rank_modules.count(layer_list, shape, tp, pp)
    init, once, real = Init(1, 0.02, shape.layers), {}, []
    for rank in range(tp * pp):
        group = alone(rank, tp, tp * pp)
        if pp > 1:
            module = PIPELINES[layer_list](shape, grid=SimpleNamespace(tp=tp, pp=pp, dp=1), group=group, init=init)
            assert module.parts == rank_modules.bounds(layer_list(shape, group=group, init=init), pp)
        else:
            module = PLAIN[layer_list](shape, group=group, init=init)
        dist.destroy_process_group()
        real.append(sum(p.numel() for p in module.parameters()))
        once |= {p.canonical_name: rank_modules.whole_size(p) for p in module.parameters()}
    assert real == [held for stage in counted.held for held in stage]
    assert sum(once.values()) == counted.once and sum(counted.layers) == shape.layers


def test_counting_needs_no_process_group_and_refuses_a_real_one(alone):
    alone(0, 1, 2)
    with pytest.raises(RuntimeError, match="process group"), rank_modules.tensor_rank(0, 2):
        pass


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
    return [*layers, LayerDefinition("output", last.kind, {**last.arguments, "init": init.child("output")}, last.apply)]


@pytest.mark.parametrize(("wrong", "found"), [(first_norm, "stage 0"), (second_norm, "stage 15"), (untied, "once")])
def test_wrong_modules_disagree_with_the_arithmetic(monkeypatch, copied, wrong, found):
    monkeypatch.setitem(counts.LAYER_LISTS, "gpt2", wrong)
    changed = copied("jeanzay_megatron_deepspeed_3d")
    modules = [check.computed for check in changed.sorted.unexplained if check.quantity == "modules against cost.py"]
    assert len(modules) == 1 and found in modules[0], lines(changed)
