"""Plant mistakes that hurt a training silently, one by one in a copy of the tree, and see each noticed.

    python tests/planted_mistakes.py                        every mistake, by the test that is to notice it
    python tests/planted_mistakes.py --only warm-up "label shift"
    python tests/planted_mistakes.py --find --only warm-up  by which test of its room, at first
    python tests/planted_mistakes.py --list

A mistake is one replacement of code. Its test has to pass in the copy without it, and to fail with it; the
exit code is 1 if one is not noticed. To add one: an entry of `MISTAKES`, with code that stands once in its
file; `--find` tells the test, or that one has to be written. All of them take about half an hour on two
busy cores.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mistake(NamedTuple):
    """Code in a file, what it is replaced by, and the test that notices it."""

    name: str
    file: str
    right: str
    wrong: str
    test: str

    @property
    def room(self) -> str:
        """The nearest folder of tests/ that is named like the file's."""
        folder = ROOT / "tests" / Path(self.file).parent
        while not any(folder.glob("**/test_*.py")):
            folder = folder.parent
        return str(folder.relative_to(ROOT))

    def plant(self, tree: Path) -> str:
        """Replace the code in the copy; return the text of the file before."""
        path = tree / self.file
        text = path.read_text(encoding="utf-8")
        assert text.count(self.right) == 1, f"{self.file} has {self.right!r} {text.count(self.right)} times"
        path.write_text(text.replace(self.right, self.wrong), encoding="utf-8")
        return text


STEP = "tests/launch/training/test_whole_step.py"
MODELING, DATA, TRAINING = "tests/modeling/test_", "tests/data/test_", "tests/launch/training/test_"
CHECKPOINTS, NORMS = "tests/launch/checkpoints/test_", "tests/launch/deepspeed_fixes/test_norms.py"
UNIVERSAL = "tests/launch/weights/test_universal.py"
ADOPTION = "tests/launch/weights/test_adoption.py"
MEGATRON = "tests/launch/weights/test_adopted_megatron.py"
FOLLOWING = "tests/ds_configs/test_following.py"
RATIOS = "test_the_ratios_of_a_cosine_are_shares_of_the_rate_and_have_deepspeeds_defaults"
BRANCHES = "tests/launch/checkpoints/test_branch_points.py"
MEETING = "tests/launch/ranks/test_meeting.py"
TEXT = "tests/data/text/test_sources.py::test_"
MUON = "tests/launch/deepspeed_fixes/test_muon.py"
MISTAKES = (
    # modeling
    Mistake("position offset", "modeling/gpt2.py",
            "weight[None, :length]", "weight.roll(1, 0)[None, :length]",
            MODELING + "modeling.py::test_logits_of_imported_weights"),
    Mistake("token types dropped", "modeling/bert.py",
            "F.embedding(token_types, token_type)", "F.embedding(0 * token_types, token_type)",
            MODELING + "convert_bert.py"),
    Mistake("pooler cut off", "modeling/bert.py",
            "torch.tanh(self.pooler(of_sample))", "torch.tanh(self.pooler(of_sample.detach()))",
            MODELING + "convert_bert.py::test_gradients_of_both_losses_are_equal"),
    Mistake("one mask for all samples of a lane", "data/samples/bert.py",
            "generator(seed, self.reader.lane, item)", "generator(seed, self.reader.lane, 0)",
            DATA + "streams.py::test_items_of_a_lane_with_equal_text_mask_other_tokens"),
    Mistake("samples see their neighbours", "modeling/unpadding.py",
            "F.pad(lengths.cumsum(0), (1, 1))", "F.pad(lengths.cumsum(0) + 1, (1, 1))",
            MODELING + "unpadding.py"),
    Mistake("mask of padding", "modeling/unpadding.py",
            "device=lengths.device) < lengths", "device=lengths.device) <= lengths", MODELING + "bert.py"),
    Mistake("dropout not scaled", "modeling/hidden_dropout.py",
            "x * (1 / (1 - probability))", "x", MODELING + "hidden_dropout.py"),
    Mistake("attention dropout not scaled", "modeling/attention.py",
            "* (1 / (1 - p))", "* 1", MODELING + "attention.py"),
    Mistake("epsilon of BERT", "modeling/transformer.py",
            "BERT_NORM_EPS = 1e-12", "BERT_NORM_EPS = 1e-5", MODELING + "convert_bert.py"),
    Mistake("draws of projections", "modeling/initialization.py",
            "(2 * self.layers) ** 0.5", "self.layers**0.5", MODELING + "modeling.py::test_gpt2_statistics"),
    Mistake("decoder not tied", "modeling/layer_list.py",
            "self._in_order = [(d.apply, built[d.name]) for d in definitions]",
            "self._in_order = [(d.apply, built[d.name] if d is definitions[0] or d.name != 'word' else "
            "d.kind(**d.arguments)) for d in definitions]",
            MODELING + "modeling.py::test_gradients_of_imported_weights"),
    Mistake("exact GELU", "modeling/transformer.py",
            'F.gelu(x, approximate="tanh")', "F.gelu(x)",
            MODELING + "modeling.py::test_logits_of_imported_weights"),
    Mistake("padding of the vocabulary counts", "modeling/parallel/layers.py",
            "if self.valid < self.rows:", "if self.valid < 0:", STEP),
    Mistake("targets of other ranks count", "modeling/parallel/cross_entropy.py",
            "target.masked_fill(foreign, 0.0)]", "target]", MODELING + "modeling.py::test_on_ranks"),
    Mistake("norms of cut positions not summed", "modeling/parallel/collectives.py",
            "(first, second) if group is None else", "(first, second) if True else",
            MODELING + "modeling.py::test_on_ranks"),
    Mistake("documents see each other", "modeling/documents.py",
            "row if within else None", "None",
            MODELING + "documents.py::test_a_changed_token_changes_the_logits_of_its_document_alone"),
    Mistake("borders of another sample", "modeling/documents.py",
            "(places.flatten() == 0)", "(places.roll(1, 0).flatten() == 0)",
            MODELING + "documents.py::test_a_document_has_the_losses_and_gradients_of_itself_alone"),
    Mistake("borders of the first micro-batch in all of a pipeline", "modeling/layer_list.py",
            "next(self.rows), *dropout_seeds", "vars(self).setdefault('row', next(self.rows)), *dropout_seeds",
            MODELING + "documents.py::test_each_stage_of_a_pipeline_takes_the_rows_of_its_own_host"),
    Mistake("odd copies heard without those who outvote them", "launch/training/number_watch.py",
            "odd.union(others[: len(odd) + 1])", "odd",
            TRAINING + "number_watch.py::test_the_odd_one_of_three_copies_is_named"),
    Mistake("positions not begun anew", "modeling/documents.py",
            "if restarts and row is not None:", "if restarts and row is None:",
            MODELING + "documents.py::test_a_document_has_the_losses_and_gradients_of_itself_alone"),
    Mistake("no dropout within documents", "modeling/documents.py",
            "document[None], causal=True, dropout_p=dropout", "document[None], causal=True, dropout_p=0.0",
            MODELING + "documents.py::test_dropout_on_attention_weights_drops_some_within_documents"),
    Mistake("scores of later tokens in gradients", "modeling/documents.py",
            "of_document, logsumexp, 0.0, True)", "of_document, logsumexp, 0.0, False)",
            MODELING + "documents.py::test_the_gradient_is_exact"),
    # data
    Mistake("borders one token late", "data/samples/documents.py",
            "np.where(tokens == border, places, 0)", "np.where(np.roll(tokens, 1, 1) == border, places, 0)",
            DATA + "documents.py"),
    Mistake("places over samples", "data/samples/documents.py",
            "np.maximum.accumulate(begins, axis=1)", "np.maximum.accumulate(begins, axis=0)",
            DATA + "documents.py::test_places_begin_anew_at_the_token_between_documents_and_with_a_window"),
    Mistake("label shift", "data/samples/gpt.py",
            '"labels": windows[:, 1:], "weights"', '"labels": windows[:, :-1], "weights"',
            DATA + "loader.py::test_gpt_micro_batches_have_labels_one_token_on_and_the_documented_types"),
    Mistake("windows overlap", "data/samples/gpt.py",
            "self.stream.read(index * length, index * length + length + 1)",
            "self.stream.read(index * (length - 1), index * (length - 1) + length + 1)",
            "tests/data/tokens/test_stores.py"),
    Mistake("one order for every epoch", "data/samples/fields.py",
            "shuffled(self._samples, seed, epoch)", "shuffled(self._samples, seed, 0)",
            DATA + "loader.py::test_positions_are_looked_up_in_the_order_of_their_epoch"),
    Mistake("ranks read the same rows", "data/loader.py", "return rows[dp_rank, :]", "return rows[0, :]",
            DATA + "loader.py::test_a_rank_reads_consecutive_rows"),
    Mistake("data resumed a step back", "data/loader.py",
            "Prefetcher(self._produce, start_step,", "Prefetcher(self._produce, max(0, start_step - 1),",
            DATA + "loader.py::test_resuming_continues_with_the_same_batches_under_another_layout"),
    Mistake("validation is trained on", "data/text/held_out.py",
            "numbers == PARTS.index(part))", '(numbers == PARTS.index(part)) | (part == "train"))',
            DATA + "corpus.py::test_build_keeps_held_out_documents_out_of_training"),
    Mistake("damage behind a stream is the end of a file", "data/text/file_types.py",
            "io.BufferedReader(_Streams(file, bz2.BZ2Decompressor))", "bz2.BZ2File(file)",
            TEXT + "a_later_stream_that_cannot_be_read_is_damage_to_every_reader"),
    Mistake("an edit of the same size and time is not seen", "data/text/local_files.py",
            "*file.version[2:]", "*file.version[2:4]",
            TEXT + "a_source_reads_its_files_in_order_and_each_as_a_shard"),
    Mistake("a file is trained on under each of its names", "data/text/listing.py",
            "kept.setdefault(file.version, file)", "kept.setdefault(file.version + (len(kept),), file)",
            TEXT + "a_file_is_read_once_whatever_its_names"),
    Mistake("no chosen token stays", "data/samples/masking.py",
            "MASKED = 0.8", "MASKED = 0.9",
            DATA + "bert_samples.py::test_of_chosen_tokens_80_percent_are_masked_10_random_10_kept"),
    Mistake("filling of a validation counts", "data/loader.py",
            "real_weight, 0.0)", "real_weight, real_weight)",
            DATA + "loader.py::test_mean_of_validation_losses_is_the_mean_over_real_samples"),
    # training
    Mistake("decay of biases", "launch/training/engine.py",
            "groups[len(shape) <= 1]", "groups[len(shape) < 1]", STEP),
    Mistake("warm-up", "launch/training/schedule.py",
            "return peak * step / warmup", "return peak * (step + 1) / warmup", TRAINING + "schedule.py"),
    Mistake("divided twice", "launch/training/engine.py",
            "engine.backward(loss)", "engine.backward(loss / len(batches))", STEP),
    Mistake("tokens of one rank", "launch/training/micro_batches.py",
            "if grid.dp > 1:", "if grid.dp > 99:", STEP),
    Mistake("one dropout for all steps", "launch/training/micro_batches.py",
            "dropout_seeds_of(recipe.seed, step, samples,", "dropout_seeds_of(recipe.seed, 0, samples,",
            TRAINING + "micro_batches.py"),
    Mistake("dropout in validation", "launch/training/engine.py", "engine.eval()", "engine.train()",
            TRAINING + "engine.py"),
    Mistake("schedule begins anew", "launch/training/schedule.py",
            'self.completed = state["completed"]', "self.completed = 0", TRAINING + "schedule.py"),
    # what a JSON states
    Mistake("least rate of a cosine by default", "ds_configs/following.py",
            '("schedule.min_lr", 0.0001)', '("schedule.min_lr", 0.001)', f"{FOLLOWING}::{RATIOS}"),
    Mistake("ratios without the rate", "ds_configs/following.py",
            'value * peak if theirs.endswith("_ratio") else value', "value", f"{FOLLOWING}::{RATIOS}"),
    Mistake("precision of a JSON without halves", "ds_configs/following.py",
            'elif "auto" not in switches.values():', "elif False:",
            f"{FOLLOWING}::test_a_json_that_leaves_both_halves_out_trains_in_fp32"),
    Mistake("cool-down after the branch", "launch/checkpoints/branching.py",
            'if said & {"schedule", "schedule.wsd_decay_steps"}:', "if False:",
            CHECKPOINTS + "branched_schedules.py"),
    Mistake("branch of no steps", "recipes/consistency.py",
            "if recipe.steps <= after:", "if recipe.steps < after:", CHECKPOINTS + "branched_schedules.py"),
    Mistake("adopted run of no steps", "launch/weights/adoption.py",
            'schedule_problems(recipe, "", cut=steps is not None)', "()", ADOPTION),
    # checkpoints and optimizers
    Mistake("data of a branch's branch", "launch/checkpoints/branching.py",
            "data_from = there.branch.data_from if there.branch else 0", "data_from = 0",
            f"{BRANCHES}::test_a_branch_of_a_branch_keeps_its_place_in_the_data_and_the_updates_of_its_optimizer"),
    Mistake("batches before a branch", "launch/checkpoints/branching.py",
            "stretches=there.sizes.until(self.step)", "stretches=there.sizes.until(1)",
            f"{BRANCHES}::test_a_branch_of_a_branch_keeps_its_place_in_the_data_and_the_updates_of_its_optimizer"),
    Mistake("a branch trains on other tokens", "launch/checkpoints/branching.py",
            "if goes_on and trained_on != corpus:", "if False:",
            f"{BRANCHES}::test_a_branch_goes_on_with_the_tokens_of_its_run_or_reads_its_data_anew"),
    Mistake("a stream shared out by another batch", "launch/checkpoints/branching.py",
            "if streamed and not anew and", "if False and",
            f"{BRANCHES}::test_a_stream_keeps_its_batch_unless_it_is_read_anew"),
    Mistake("moments not loaded", "launch/checkpoints/reading.py",
            "for name in moments}", "for name in moments[1:]}", CHECKPOINTS + "any_layout.py"),
    Mistake("bias correction begins anew", "launch/checkpoints/engine_state.py",
            "step: int | torch.Tensor = steps", "step: int | torch.Tensor = steps = 0",
            CHECKPOINTS + "any_layout.py"),
    Mistake("moments are not compared", "launch/checkpoints/proof.py",
            "held.kinds[:1] if weights else held.kinds", "held.kinds[:1]", CHECKPOINTS + "proof.py"),
    Mistake("sums without places", "launch/checkpoints/sums.py",
            "return torch.stack([torch.ones_like(random), random])",
            "return torch.stack([torch.ones_like(random), torch.ones_like(random)])",
            CHECKPOINTS + "proof.py"),
    Mistake("copies are not compared", "launch/checkpoints/proof.py",
            "if not state.shared and grid.dp > 1:", "if grid.dp > 1:", CHECKPOINTS + "proof.py"),
    Mistake("known loss is not compared", "launch/checkpoints/proof.py",
            "if not abs(loss - known.loss) <= most:", "if False:", CHECKPOINTS + "proof.py"),
    Mistake("rounding allowed where none is", "launch/checkpoints/proof.py",
            "if torch.promote_types(was, dtype) == dtype:", "if dtype == torch.float32:",
            f"{CHECKPOINTS}proof.py::test_each_fault_is_noticed_in_every_precision"),
    Mistake("fp32 is not compared exactly", "launch/checkpoints/proof.py",
            "if torch.promote_types(was, dtype) == dtype:", "if False:",
            f"{CHECKPOINTS}proof.py::test_each_fault_is_noticed_in_every_precision"),
    Mistake("working weights are not compared", "launch/checkpoints/engine_state.py",
            "if len(weights) and not torch.equal(weights, master.to(weights)):", "if False:",
            f"{CHECKPOINTS}proof.py::test_each_fault_is_noticed_in_every_precision"),
    Mistake("next batch is not compared", "launch/checkpoints/proof.py",
            "if sample.next_step() not in (saved, None):", "if False:",
            f"{CHECKPOINTS}proof.py::test_each_fault_is_noticed_in_every_precision"),
    Mistake("other data are compared", "recipes/key_paths.py",
            'NEXT_STEP = Keys({"data", "seed", "sequence_length", ', "NEXT_STEP = Keys({",
            f"{CHECKPOINTS}proof.py::test_faults_are_refused_and_sound_readings_are_not"),
    Mistake("sum without places of samples", "data/loader.py",
            "total += factor * int(", "total += int(",
            f"{DATA}loader.py::test_the_sum_of_a_steps_samples_is_that_of_every_layout_and_of_no_other_step"),
    Mistake("a look moves the data on", "data/loader.py",
            "        if self._made is None:\n            self._made = self._take()",
            "        self._made = self._take()",
            f"{DATA}loader.py::test_to_peek_at_a_step_does_not_move_on"),
    Mistake("last sound step one late", "launch/training/number_watch.py",
            "self.sound = step\n        for", "self.sound = step + 1\n        for",
            f"{TRAINING}number_watch.py::test_the_last_sound_step_is_that_of_the_check_before"),
    Mistake("messages without direction", "launch/ranks/connection.py",
            'to_rank_0 = _counted(b"to rank 0")', 'to_rank_0 = _counted(b"from rank 0")',
            f"{MEETING}::test_a_message_that_comes_back_to_its_sender_is_refused"),
    Mistake("a rank is admitted twice", "launch/ranks/connection.py",
            "if 0 < rank < self._world and rank not in self.admitted:", "if 0 < rank < self._world:",
            f"{MEETING}::test_a_rank_that_is_admitted_keeps_its_connection"),
    Mistake("clipped at twice the norm", "launch/deepspeed_fixes/norms.py",
            "+ 1e-6) / largest)", "+ 1e-6) / (2 * largest))", NORMS),
    Mistake("clipped at twice the norm in fp32", "launch/deepspeed_fixes/zero0.py",
            "self.gradient_clipping() / (self._global_grad_norm",
            "2 * self.gradient_clipping() / (self._global_grad_norm", NORMS),
    Mistake("Muon's gradients not clipped", "launch/deepspeed_fixes/muon.py",
            'self.defaults["fused"] = False', 'self.defaults["fused"] = True', MUON),
    Mistake("Muon's momentum", "launch/deepspeed_fixes/muon.py",
            "lerp_(gradient, 1 - momentum)", "lerp_(gradient, momentum)", MUON),
    Mistake("Muon without Nesterov", "launch/deepspeed_fixes/muon.py",
            "gradient.lerp_(average, momentum)", "average", MUON),
    Mistake("Adam's share of Muon's rate", "launch/deepspeed_fixes/muon.py",
            'share = adam_lr / numbers["lr"]', 'share = numbers["lr"] / adam_lr', MUON),
    Mistake("QKV orthogonalised as one", "launch/deepspeed_fixes/muon.py",
            "if not self.heads:", "if self.heads >= 0:", MUON),
    Mistake("slices orthogonalised", "launch/deepspeed_fixes/muon.py",
            "update = matrix.orthogonalised(matrix.joined(parts))",
            "update = matrix.joined([orthogonalise(p.view(matrix.local_shape)).reshape(-1) for p in parts])",
            MUON),
    Mistake("sums in bf16", "launch/deepspeed_fixes/zero0.py",
            "super().get_data_types()[1] == torch.float32", "False", STEP),
    # weights of others
    Mistake("exported moments swapped", "launch/weights/universal.py",
            "in NAMES.items()", "in zip(NAMES, ('fp32', *MOMENTS[::-1]))", UNIVERSAL),
    Mistake("an exported update too few", "launch/weights/universal.py",
            "float(progress.adam_steps)", "float(progress.adam_steps - 1)", UNIVERSAL),
    Mistake("the exported schedule a step late", "launch/weights/universal.py",
            "scheduler_state(progress.schedule,", "scheduler_state(progress.schedule - 1,", UNIVERSAL),
    # adopted runs of DeepSpeed
    Mistake("places in a partition", "modeling/formats/deepspeed/states.py",
            "Piece(flat, address.start, address.numel)", "Piece(flat, address.start // 2, address.numel)",
            f"{ADOPTION}::test_weights_and_moments_are_those_of_deepspeeds_own_tool"),
    Mistake("moment of another kind", "launch/weights/deepspeed_weights.py",
            "lambda parameter: parameter.read(kind)",
            "lambda parameter: parameter.read('exp_avg' if kind == 'exp_avg_sq' else kind)",
            f"{ADOPTION}::test_weights_and_moments_are_those_of_deepspeeds_own_tool"),
    Mistake("order of new Megatron-DeepSpeed's QKV", "modeling/formats/megatron/checkpoint.py",
            'hasattr(stated.get("args"), FPDT)', "False",
            f"{MEGATRON}::test_every_program_and_split_is_read_to_the_bit"),
    Mistake("slices that gpt-neox does not describe", "modeling/formats/megatron/checkpoint.py",
            '"universal_checkpoint_info" not in stated', "False",
            f"{MEGATRON}::test_every_program_and_split_is_read_to_the_bit"),
    Mistake("skipped steps count as updates", "launch/weights/adopted_checkpoint.py",
            "made = state.steps - state.skipped", "made = state.steps",
            f"{ADOPTION}::test_steps_that_fp16_skipped_are_steps_without_updates"),
    Mistake("the adopted rate counts skipped steps", "launch/weights/adoption.py",
            "rate_after(recipe, self.state.steps - self.state.skipped)", "rate_after(recipe, self.state.steps)",
            f"{ADOPTION}::test_steps_that_fp16_skipped_are_steps_without_updates"),
    Mistake("decay of vectors for matrices", "launch/weights/their_settings.py",
            "own = max(groups, key", "own = min(groups, key",
            f"{ADOPTION}::test_the_decay_is_that_of_the_decayed_parameters_in_whatever_group"),
    Mistake("attention's dropout dropped", "launch/weights/their_settings.py",
            "self.model.get(attention, 0.0)", "0.0", f"{ADOPTION}::test_dropout_of_attention_is_stated_apart"),
    Mistake("warm-up's share rounded down", "launch/weights/their_settings.py",
            "math.ceil(warmup * (self.steps or 0))", "math.floor(warmup * (self.steps or 0))",
            f"{ADOPTION}::test_a_share_of_warm_up_is_rounded_up_as_by_trainer"),
    Mistake("skipped steps of Megatron's scheduler", "launch/weights/their_settings.py",
            "max(1, self.state.steps - self.state.skipped)", "max(1, self.state.steps)",
            f"{ADOPTION}::test_megatrons_scheduler_counts_the_steps_that_were_made"),
    Mistake("updates of theirs", "modeling/formats/deepspeed/states.py",
            "len(counted) == 1 and counted <= {made, made + optimizer.built}", "len(counted) > 0",
            f"{ADOPTION}::test_faults_are_refused"),
    Mistake("data of an adopted run", "launch/weights/adoption.py",
            "begins = each * state.steps", "begins = 0",
            f"{ADOPTION}::test_what_files_state_is_taken_and_the_rest_is_asked_for_at_once"),
    Mistake("decay that was added to gradients", "launch/weights/their_settings.py",
            'params.get("adam_w_mode") is False', "False",
            f"{ADOPTION}::test_another_optimizer_is_refused_or_asked_for"),
    Mistake("order of torch's Adam", "launch/weights/whole_saves.py",
            "[name for name, _ in model.named_parameters()]",
            "sorted(name for name, _ in model.named_parameters())",
            f"{ADOPTION}::test_a_save_without_deepspeed_is_read_by_the_models_own_order"),
    Mistake("a warm-up that no file states", "launch/weights/adoption.py",
            '"schedule.warmup_steps": ("its warm-up", "0"),', "",
            f"{ADOPTION}::test_the_line_of_the_refusal_trains_at_the_adopted_rate"),
    Mistake("slices of a last stage", "modeling/formats/deepspeed/states.py",
            "_whole(own[:slices])", "_whole(own[-slices:])",
            f"{MEGATRON}::test_slices_and_stages_are_read_without_a_conversion"),
)  # fmt: skip


def copy_of_tree(target: Path) -> None:
    """Copy what git knows or would add."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


def tested(tree: Path, *tests: str) -> tuple[str, float]:
    """Run the tests up to the first failure; return its name ("": all pass) and the seconds. None is long."""
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not long", "-p", "no:cacheprovider"]
    command += [f"--basetemp={tree.parent / 'temporary'}", *tests]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout[-3000:] + done.stderr[-1000:]
    failed = (line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR ")))
    name = next(failed, "").removeprefix("FAILED ").removeprefix("ERROR ").split(" - ")[0]
    return name, time.monotonic() - started


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these mistakes (default: all)")
    parser.add_argument("--find", action="store_true", help="run CI's tests of the mistake's room")
    parser.add_argument("--list", action="store_true", help="show the mistakes and their tests")
    args = parser.parse_args()
    names = [mistake.name for mistake in MISTAKES]
    if unknown := set(args.only or ()) - set(names):
        parser.error(f"--only: no mistake is called {', '.join(unknown)}; there are {', '.join(names)}")
    chosen = [mistake for mistake in MISTAKES if not args.only or mistake.name in args.only]
    if args.list:
        for mistake in chosen:
            print(f"{mistake.name:30} {mistake.file:38} {mistake.test}")
        return 0
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        copy_of_tree(tree)
        if not args.find:
            failed, _ = tested(tree, *{mistake.test for mistake in chosen})
            assert not failed, f"{failed} fails without any mistake"
        for mistake in chosen:
            text = mistake.plant(tree)
            failed, seconds = tested(tree, mistake.room if args.find else mistake.test)
            (tree / mistake.file).write_text(text, encoding="utf-8")
            unnoticed += not failed
            print(f"{mistake.name:30} {seconds:5.0f} s  {failed or 'NOT NOTICED'}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} mistakes were noticed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
