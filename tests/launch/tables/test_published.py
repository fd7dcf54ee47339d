"""The recipes of published tables: all rows, as printed, with a source for the rest; list and show."""

import json
import re
import sys
from dataclasses import replace

import pytest
from launching import ROOT, run

from launch import recipe as command
from launch.console import ends
from launch.machine import memory
from launch.planning import memory_fit, resolved_plans
from launch.planning.prediction import hardware
from launch.tables import listing, showing
from recipes import catalog
from recipes.problems import ProblemsError, RecipeError

# Rows that describe a run, counted in the documents. The Megatron paper's four lines are two runs each.
ROWS = {
    "hpe1270_v100_pcie": 6, "dgx2_gpt2_data_parallel": 6, "dgx2_gpt2_model_parallel": 7,
    "dgx2_gpt2_torch_ddp": 4,
    "dgx2_bert_data_parallel": 2, "dgx2_bert_model_parallel": 7, "dgx2_bert_activation_checkpointing": 3,
    "a100_blog_bert_base": 1, "a100_blog_table1": 3, "a100_blog_table2": 3, "a100_blog_table3": 1,
    "a100_blog_table4": 4, "a100_blog_figure2": 4, "megatron_paper_table1": 8, "megatron_paper_results": 3,
    "jeanzay_megatron_max_size_16gb": 5, "jeanzay_megatron_max_size_32gb": 5,
    "jeanzay_megatron_performance": 19, "jeanzay_megatron_deepspeed_3d": 1,
    "jeanzay_megatron_deepspeed_zero": 2,
    "jeanzay_megatron_deepspeed_zero_tp_sweep": 5, "jeanzay_megatron_deepspeed_zero_cpu_offload": 1,
    "jeanzay_hf_deepspeed_max_size": 3, "jeanzay_hf_deepspeed_performance": 3, "sber_path_to_13b": 10,
}  # fmt: skip
PUBLISHED = [(table, row) for table in catalog.tables() if table.published for row in table.rows]
NAMES = [f"{table.name}/{row}" for table, row in PUBLISHED]
# No table prints these: they come from somewhere, or stand in.
NEVER_PRINTED = ("optimizer", "schedule", "dropout", "precision", "data")


def test_every_row_of_every_table_is_a_recipe():
    assert {table.name: len(table.rows) for table in catalog.tables() if table.published} == ROWS


@pytest.mark.parametrize(("table", "row"), PUBLISHED, ids=NAMES)
def test_a_row_says_what_is_printed_and_where_the_rest_is_from(table, row):
    recipe = catalog.load(f"{table.name}/{row}")
    published = recipe.published
    assert published and recipe.hardware and recipe.hardware.gpus
    assert len(published.row.split("|")) == len(table.columns)
    assert ("OOM" in published.row) == published.oom
    explained = {key.split(".")[0] for key in (*recipe.inferred, *recipe.unknown)}
    from_text = {"optimizer", "schedule", "dropout"} if table.name == "megatron_paper_table1" else set()
    assert explained >= set(NEVER_PRINTED) - from_text, "the paper has a section of its own"
    assert resolved_plans.published_plan(recipe).notices == (), "as published on GPUs that can do everything"


@pytest.mark.parametrize("name", NAMES)
def test_tiny_keeps_the_kind_of_run(name):
    full, tiny = catalog.load(name), catalog.load(name, tiny=True)
    for key in ("family", "layer_norm", "sentence_head", "implementation", "attention"):
        assert getattr(tiny.model, key) == getattr(full.model, key)
    shared = [[getattr(recipe.parallel, key) > 1 for key in ("tp", "pp", "dp")] for recipe in (full, tiny)]
    assert shared[0] == shared[1]
    assert resolved_plans.processes(tiny) <= 8
    plans = [resolved_plans.published_plan(recipe) for recipe in (full, tiny)]
    for key in ("zero_stage", "offload", "precision", "ds_name"):
        assert getattr(plans[0], key) == getattr(plans[1], key)
    assert len({plan.layout.accumulation > 1 for plan in plans}) == 1
    assert tiny.activation_checkpointing == full.activation_checkpointing
    assert (tiny.data.masking, tiny.dropout) == (full.data.masking, full.dropout)
    warmup = tiny.schedule.warmup_steps
    assert warmup <= tiny.steps // 4, "the rate is not still warming up when the run ends"


def test_training_is_as_the_megatron_paper_says():
    gpt2, bert = catalog.load("megatron_paper_table1/8.3b-mp-dp"), catalog.load("a100_blog_table1/336m")
    for recipe, lr, batch in ((gpt2, 1.5e-4, 512), (bert, 1e-4, 1024)):
        assert (recipe.optimizer.lr, recipe.optimizer.weight_decay, recipe.optimizer.clip) == (lr, 0.01, 1.0)
        assert (recipe.dropout.hidden, recipe.dropout.attention, recipe.batch.global_) == (0.1, 0.1, batch)
    assert (gpt2.steps, gpt2.schedule.kind, gpt2.schedule.warmup_steps) == (300_000, "cosine", 3000)
    assert (bert.steps, bert.schedule.kind, bert.schedule.warmup_steps) == (2_000_000, "linear", 10_000)
    assert gpt2.schedule.min_lr == 1e-5 and bert.decay_steps == 2_000_000
    assert bert.model.sentence_head == "sop"
    assert bert.data.masking.whole_words and bert.data.masking.max_ngram > 1
    assert resolved_plans.published_plan(gpt2).padded_vocab == 51200


def test_a_run_says_what_no_source_gives():
    assert "24B" in catalog.load("jeanzay_megatron_deepspeed_zero_tp_sweep/24b-tp1-mb16").unknown["model"]


def test_a_key_has_one_explanation():
    with pytest.raises(RecipeError, match="unknown: optimizer: is in inferred as well"):
        catalog.load(NAMES[0], ["unknown={optimizer: twice}"])


# --- recipe.py list and show


def output(capsys, *arguments: str) -> str:
    sys.argv = ["recipe.py", *arguments]
    assert command.main() == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["recipe.py"])


def listed(*tables: str) -> dict[str, listing.ListedRecipe]:
    return {f"{row.table.name}/{row.name}": row for row in listing.catalog_rows(tables)}


def test_a_table_is_listed(capsys):
    text = output(capsys, "list", "jeanzay_megatron_performance")
    assert re.search(r" 4x8x1 +16 ", text) and "parameters, each once" in text
    text = output(capsys, "list", "jeanzay_megatron_deepspeed_3d")
    assert "48B: 146 s, 43 TFLOPS" in text and "4x16x1" in text


def test_the_list_begins_with_what_runs_at_once_and_folds_the_published_tables(capsys):
    folded = output(capsys, "list")
    first, *_ = [line for line in folded.splitlines() if line.startswith("  ") and "sotu" in line]
    assert folded.startswith("default: ") and first.split()[0] == "sotu"
    published = [name for name in ROWS if f"  {name} " in folded]
    assert len(published) == len(ROWS) and "18b-pp8-ga64-mb4" not in folded
    (line,) = [line for line in folded.splitlines() if line.startswith("  jeanzay_megatron_performance ")]
    assert line.split()[1] == str(len(listed("jeanzay_megatron_performance")))
    for opened in (["--all"], ["jeanzay_megatron_performance"]):
        assert "18b-pp8-ga64-mb4" in output(capsys, "list", *opened), "unfolded"
    rows = listing.catalog_rows(["parallel_kinds", "default"])
    narrow = listing.as_text([replace(row, fits="on 1 process") for row in rows], width=100)
    heading, *lines = [line.strip() for line in narrow.splitlines() if line.startswith("  ")]
    assert heading.split()[:2] == ["row", "fits"] and max(map(len, narrow.splitlines())) <= 100
    assert len(listing.as_text(rows, width=80).splitlines()) < 30, "tables, and no paragraphs"


PP8 = "jeanzay_megatron_performance/18b-pp8-ga64-mb4"
SHOWN = {  # arguments of show -> parts of what it prints
    PP8: [
        "18,437,670,912",
        "tp 4 x pp 8 x dp 1 = 32 processes",
        "Throughput  90.5s",
        "TFlops      26.1",
        "parallel.tp = 4: 'TP=4 in all of entries'",
        "Impossible as printed",
        "deepspeed --hostfile hosts --num_nodes 8 --num_gpus 4 launch/pretrain.py --ds_config ds_configs/3d",
        "deepspeed --num_gpus 4 launch/pretrain.py",
        "not as the source ran it\n",
        "\n  ds_config = 3d: DeepSpeed's pipeline, with ZeRO-1",
        "\n  data: all of OpenWebText",
    ],
    "jeanzay_megatron_deepspeed_zero_tp_sweep/24b-tp1-mb16": ["given by no source"],
    "sber_path_to_13b/07-gpt3-large-sparse": ["attention   layers dense, fixed, repeated"],
    "megatron_paper_results/8.3b": ["WikiText-103 perplexity  10.8, 15.8 before", "66.5, 63.2 before"],
    "a100_blog_table3/3.9b": ["5 fine-tuned models together", "90.9 (93.1/90), 89.4 before"],
}


@pytest.mark.parametrize("arguments", SHOWN)
def test_show_tells_all_of_a_row(arguments, capsys):
    text = output(capsys, "show", *arguments.split())
    assert [part for part in SHOWN[arguments] if part not in text] == []
    if "sparse" in arguments:  # of the row's machine, not of this one
        assert "sparse by" not in text and "CPU" not in text


def test_show_writes_the_recipe_and_the_json(capsys, tmp_path):
    name, path = "dgx2_bert_model_parallel/64x2304-tp8-b8", tmp_path / "recipe.yaml"
    path.write_text(output(capsys, "show", name, "--yaml"))
    assert catalog.load(name).model_dump() == catalog.load_resolved(path).model_dump()
    assert json.loads(output(capsys, "show", name, "--ds_json"))["train_micro_batch_size_per_gpu"] == 8


def test_show_of_a_users_row(capsys, tmp_path):
    (tmp_path / "own.json").write_text(ROOT.joinpath("ds_configs/zero2.json").read_text())
    (tmp_path / "odd.json").write_text('{"train_batch_size": 64, "zero_optimization": {"stage": 1}}')
    table = tmp_path / "my table.yaml"
    table.write_text(
        "title: mine\ndefaults:\n  model: {layers: 4, hidden: 64, heads: 4, vocab_size: 512}\n"
        "  sequence_length: 64\n  batch: {global: 8}\n"
        "  steps: 10\n  optimizer: {lr: 1.0e-3}\nrows:\n"
        f"  small: {{title: small}}\n  own: {{title: own, ds_config: {tmp_path}/own.json}}\n"
        "  two: {title: on two, hardware: {name: two, gpus: 2}}\n"
        "  three: {title: on three, hardware: {name: three, gpus: 3}}\n"
        f"  odd: {{title: odd, ds_config: {tmp_path}/odd.json, batch: {{global: 64}}}}\n"
    )
    shown = output(capsys, "show", f"{table}/two")
    assert "4 micro x 1 accumulation x 2 dp = 8 global" in shown
    sys.argv = ["recipe.py", "show", f"{table}/three"]
    assert command.main() == 2
    refused = "cannot be run as it is: batch.global=8 is not divisible by dp=3"
    assert refused in capsys.readouterr().out
    sys.argv = ["recipe.py", "show", f"{table}/small", "--yaml", "--ds_json"]
    with pytest.raises(ProblemsError, match="not allowed with"):
        command.main()
    text = output(capsys, "show", f"{table}/small")
    assert "hardware    any" in text and "\npublished" not in text and f"--recipe '{table}/small'" in text
    assert f"--ds_config {tmp_path}/own.json --recipe" in output(capsys, "show", f"{table}/own")
    text = output(capsys, "show", f"{table}/odd")
    assert "deepspeed launch/pretrain.py" in text and "cannot be shrunk:\n" in text and "--tiny" not in text


@pytest.mark.parametrize("flags", [["default"], ["--all"]], ids=["fits the buffer", "does not"])
def test_a_full_disk_is_told_in_one_line(flags, monkeypatch, capsys):
    with open("/dev/full", "w") as full:  # whose closing would raise, if something were left to write
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "argv", ["recipe.py", "list", *flags])
        with pytest.raises(SystemExit) as ended:
            ends.run(command.main)
        assert ended.value.code == 1
    said = capsys.readouterr().err
    assert said.startswith("\nstandard output cannot be written (No space left on device)"), said
    assert said.count("\n") == 3


def test_fits_says_as_published_only_of_what_is():
    many = hardware.of_memory(memory.Memory(16, 80e9, 2e12))
    for name, how in {
        "dgx2_bert_data_parallel/24x1024-b14": "as published",
        "parallel_kinds/3d": "as it is, on 8 processes",
        "sber_path_to_13b/02-small-data-parallel": "as it is, on 16 processes",
    }.items():
        found = memory_fit.fit(catalog.load(name), many)
        assert found.fits and memory_fit.how(found) == how


def test_bad_input_is_refused_at_once(tmp_path):
    table = tmp_path / "mine.yaml"
    table.write_text(
        "title: mine\ndefaults:\n  model: {layers: 4, hidden: 100, heads: 3, vocab_size: 512}\n"
        "  sequence_length: 64\n  batch: {globl: 8}\n"
        "  steps: 10\n  optimizer: {lr: fast}\nrows:\n  small: {title: small}\n"
    )
    done = run([sys.executable, "launch/recipe.py", "show", f"{table}/small"])
    assert done.returncode == 2 and "Traceback" not in done.stdout
    for part in (
        "model.hidden=100 is not divisible by model.heads=3",
        "did you mean batch.global?",
        "optimizer.lr='fast'",
    ):
        assert part in done.stdout


def test_a_name_in_the_list_can_be_copied(capsys):
    block = output(capsys, "list", "a100_blog_table4").split("\n\n")[0].splitlines()[2:]
    names = [line.split()[0] for line in block]
    assert names == ["1.2b", "2b", "4.2b", "8.7b"] and all(line.split()[1] == "?" for line in block)


REFUSED = {
    "list jeanzay_megatron_perf": "did you mean jeanzay_megatron_performance",
    "show jeanzay_megatron_performance/18b-pp8-ga64-mb5": f"did you mean {PP8}",
}


@pytest.mark.parametrize("arguments", REFUSED, ids=REFUSED.values())
def test_what_is_not_there_is_named(arguments, capsys):
    sys.argv = ["recipe.py", *arguments.split()]
    with pytest.raises(SystemExit) as ended:
        ends.run(command.main)
    assert ended.value.code == 2 and REFUSED[arguments] in capsys.readouterr().err


def test_the_launch_line_fits_the_machine():
    def line(name: str) -> str:
        return showing.launch_lines_of(name, catalog.find(name))[1]

    assert "--num_nodes 32 --num_gpus 16" in line("a100_blog_table1/3.9b")
    assert line("a100_blog_table4/8.7b").startswith("deepspeed --num_gpus 8 ")
    started = "launch/pretrain.py --ds_config ds_configs/zero3_offload.json --recipe default/sotu"
    assert line("default/sotu") == f"deepspeed {started}" and ROOT.joinpath(started.split()[0]).is_file()
    assert listing.short_count(8_348_393_472) == "8.35B"
