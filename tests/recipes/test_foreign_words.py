"""The words of other trainers are those of their parsers, and what is written for them works here."""

from __future__ import annotations

import importlib
from dataclasses import fields
from itertools import chain, pairwise

import pytest
import yaml
from launching import ROOT
from transformers import BertConfig, GPT2Config, TrainingArguments

from recipes import catalog, foreign_words, key_paths
from recipes.problems import ProblemsError

TABLE = yaml.safe_load((ROOT / "recipes" / "foreign" / "words.yaml").read_text())
# Names that stand in files of Megatron-LM at d98e8a64, gpt-neox at ea7aefd8, litgpt at 26857050 and nanoGPT at
# 3adf61e1, as options, annotated fields, parameters or variables.
NAMES = {
    "megatron": {
        "megatron/training/arguments.py": """
            adam_beta1 adam_beta2 adam_eps clip_grad data_path initial_loss_scale loss_scale lr
            make_vocab_size_divisible_by mask_prob max_position_embeddings min_lr num_workers optimizer
            recompute_activations seq_length short_seq_prob split train_data_path use_distributed_optimizer
            use_flash_attn weight_decay
        """,
        "megatron/training/config/training_config.py": """
            eval_interval eval_iters exit_duration_in_mins global_batch_size load log_interval
            lr_decay_iters lr_decay_style lr_warmup_fraction lr_warmup_iters micro_batch_size
            rampup_batch_size save save_interval tensorboard_dir tokenizer_model tokenizer_type train_iters
            train_samples vocab_file wandb_project
        """,
        "megatron/training/config/common_config.py": "profile_step_end profile_step_start seed",
        "megatron/core/model_parallel_config.py": """
            bf16 fp16 pipeline_model_parallel_size sequence_parallel tensor_model_parallel_size
        """,
        "megatron/core/transformer/transformer_config.py": """
            attention_dropout hidden_dropout hidden_size init_method_std num_attention_heads num_layers
            recompute_granularity
        """,
        "tools/preprocess_data.py": "input json_keys output_prefix",
    },
    "neox": {
        "megatron/neox_arguments/neox_args.py": """
            attention_dropout batch_size checkpoint_activations checkpoint_factor clip_grad data_path
            do_train do_valid eval_interval eval_iters hidden_dropout hidden_size init_method_std
            keep_last_n_checkpoints load log_interval loss_scale lr lr_decay_iters lr_decay_style
            make_vocab_size_divisible_by max_position_embeddings maximum_tokens min_lr model_parallel_size
            num_attention_heads num_layers num_samples num_workers optimizer_type pipe_parallel_size
            precision profile profile_step_start profile_step_stop save seed seq_length sequence_parallel
            short_seq_prob split tensorboard_dir tokenizer_type train_data_paths train_epochs train_iters
            use_wandb vocab_file wandb_project warmup weight_decay zero_stage
        """,
        "megatron/neox_arguments/deepspeed_args.py": """
            bf16 fp16 gradient_accumulation_steps gradient_clipping hostfile num_gpus steps_per_print
            tensorboard train_batch_size train_micro_batch_size_per_gpu wandb
        """,
    },
    "litgpt": {
        "litgpt/args.py": """
            epochs global_batch_size log_interval lr_warmup_fraction lr_warmup_steps max_new_tokens max_norm
            max_seq_length max_steps max_time max_tokens micro_batch_size min_lr project save_interval
        """,
        "litgpt/pretrain.py": """
            data devices initial_checkpoint_dir logger_name model_config model_name num_nodes out_dir
            precision seed tokenizer_dir
        """,
        "litgpt/config.py": "block_size n_embd n_head n_layer vocab_size",
        "litgpt/finetune/lora.py": "checkpoint_dir lora_alpha lora_r",
        "litgpt/generate/base.py": "num_samples",
    },
    "nanogpt": {
        "train.py": """
            batch_size beta1 beta2 block_size dataset device dropout dtype eval_interval eval_iters
            grad_clip gradient_accumulation_steps learning_rate log_interval lr_decay_iters max_iters min_lr
            n_embd n_head n_layer out_dir wandb_log wandb_project wandb_run_name warmup_iters weight_decay
        """,
        "sample.py": "max_new_tokens num_samples start",
    },
}
COMMANDS = ("pretrain", "finetune", "score", "generate", "prepare_data", "plan", "export_hf")


def words_of(other: str) -> set[str]:
    return {*chain.from_iterable(each["said"].get(other, ()) for each in TABLE)}


@pytest.mark.parametrize("other", NAMES)
def test_words_of_others_stand_in_their_sources(other):
    known = " ".join(NAMES[other].values()).split()
    assert words_of(other) == {*known}


def test_words_of_transformers_are_its_fields():
    assert words_of("trainer") <= {field.name for field in fields(TrainingArguments)}
    assert words_of("configs") <= GPT2Config().to_dict().keys() | BertConfig().to_dict().keys()


def test_a_word_has_one_meaning_and_there_are_enough():
    others = [word for each in TABLE for word in {*chain(*each["said"].values())}]
    assert len(others) == len({*others})
    assert len(words_of("trainer")) >= 30 and len(words_of("megatron")) >= 30 and len(words_of("neox")) >= 30


def test_what_is_written_for_a_word_is_there():
    parsers = [importlib.import_module(f"launch.{name}").build_parser() for name in COMMANDS]
    flags = {flag for parser in parsers for flag in parser._option_string_actions}
    keys = {*key_paths.paths()}
    for way in {*chain(*(each["write"] for each in TABLE))}:
        if not way.startswith("--"):
            assert way[0].islower() or way.split()[0] in ("MODEL", "RUN")
            continue
        words = way.partition(" (")[0].split()
        assert {word for word in words if word.startswith("--")} <= flags, way
        settings = [after for word, after in pairwise(words) if word == "--set"]
        for setting in settings:
            key, _, value = setting.partition("=")
            assert key in keys, way
            if value.islower() and len(settings) == 1:
                catalog.load(catalog.DEFAULT_RECIPE, [setting])
    for stage in "0123":
        assert (ROOT / "ds_configs" / f"zero{stage}.json").exists()


# a command line -> a line of its refusal
TYPED = {
    "pretrain --lr 3e-4": "--lr 3e-4: no such flag; write --set optimizer.lr=3e-4",
    "pretrain --learning-rate=3e-4": "--learning-rate 3e-4: no such flag; write --set optimizer.lr=3e-4",
    "pretrain --train.max_steps 9": "--train.max_steps 9: no such flag; write --set steps=9 (",
    "pretrain --per_device_train_batch_size 8": "write --set batch.micro=8 (",
    "pretrain --tensor-model-parallel-size 2 --plan": "write --set parallel.tp=2",
    "pretrain --fp16 --bf16 False": "--fp16: no such flag; write --set precision=fp16\n"
    "--bf16 False: no such flag; leave it out: --set precision=bf16 turns it on",
    "pretrain --deepspeed my.json": "write --ds_config my.json (--follow ",
    "pretrain --ds-config zero1": "--ds-config zero1: no such flag; did you mean --ds_config?",
    "pretrain --wandb_project x": "into the JSON of --ds_config",
    "pretrain --layers 4 --optimizer.eps 1": "write --set model.layers=4\n"
    "--optimizer.eps 1: no such flag; write --set optimizer.eps=1",
    "pretrain --init-from x --plam": "--plam: no such flag; did you mean --plan?",
    "pretrain --nosuch": "--nosuch: no such flag; see ",
    "pretrain --steps x --lr 1": "write --set optimizer.lr=1\n--steps: x: give a whole number",
    "pretrain here": "here belongs to no flag; see ",
    "finetune --learning_rate 1e-5": "write --lr 1e-5\nthe following arguments are required: --task",
    "generate --max_new_tokens 50 RUN": "--max_new_tokens 50: no such flag; write --tokens 50",
    "score --model RUN": "write MODEL as the first word without a flag",
    "recipe list --hardware t4": "write --fits t4",
    "pretrain --hardware t4": "--hardware t4: no such flag; launch/plan.py plans for it",
    "plan search --gpus 8": "--gpus 8: no such flag; write --hardware 8xGPU",
    "prepare_data --json-keys text": "write --text_column text",
}


@pytest.mark.parametrize("line", TYPED)
def test_a_flag_of_others_is_answered_with_what_to_write(line, capsys):
    name, *words = line.split()
    with pytest.raises(ProblemsError) as refused:
        importlib.import_module(f"launch.{name}").build_parser().parse_args(words)
    assert TYPED[line] in str(refused.value)
    assert not capsys.readouterr().err


def test_a_value_with_a_blank_is_quoted():
    assert foreign_words.in_command("train_file", "a b", ["--text"]) == "write --text 'a b'"


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("learning_rate", "did you mean optimizer.lr?"),
        ("data.dataset_name", "did you mean data.source=hub data.name?"),
        ("output-dir", "no key says it: write --out VALUE"),
        ("logging_steps", "every step is in RUN/metrics.jsonl"),
    ],
)
def test_a_key_of_others_is_answered_with_ours(key, said):
    with pytest.raises(ProblemsError, match="unknown key") as refused:
        catalog.load(catalog.DEFAULT_RECIPE, [f"{key}=1"])
    assert said in str(refused.value)
