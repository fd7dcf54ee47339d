"""Shuffled streams under several ranks: one per model copy reads; a broken record ends all or is left out."""

import json

import pytest
from launching import WORKERS, run_ranks

from data.loader import merge_states
from data.text.trained_vocabulary import train_bpe, wrap_tokenizer
from launch.checkpoints.run_checkpoints import newest
from launch.records.metrics import read_metrics

FILES, RECORDS, AT = 4, 60, 40


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """Where files lie, the third of which has a broken record, and the settings that read them."""
    folder = tmp_path_factory.mktemp("stream")
    words = "some words of a text, and more of them. "
    for file in range(FILES):
        texts = (f"{file} {record} {words * (1 + record % 3)}" for record in range(RECORDS))
        lines = [json.dumps({"text": text}) for text in texts]
        if file == 2:
            lines[AT] = '{"text": "cut o'
        (folder / f"{file}.jsonl").write_text("\n".join(lines) + "\n")
    wrap_tokenizer("trained_bpe", train_bpe([words], 264)).save_pretrained(folder / "vocabulary")
    data = f"data={{source: jsonl, name: {folder}/*.jsonl, streaming: true, validation_every: 5, "
    data += f"shuffle_buffer: 20, tokenizer: {{kind: file, path: {folder}/vocabulary}}}}"
    return folder, [data, "model.vocab_size=264", "precision=fp32", "steps=30", "run.prompt=null"]


def pretrain(ranks, out, settings, *more):
    flags = [flag for setting in settings for flag in ("--set", setting)]
    command = ("--tiny", "--ds_config", "zero1", "--out", out, *flags, *more)
    return run_ranks(ranks, WORKERS / "brief_head.py", *command)


def losses(out):
    return {record.step: record.loss for record in read_metrics(out / "metrics.jsonl").steps}


@pytest.mark.long
def test_a_broken_record_ends_the_run_saved_and_can_be_left_out(stream, tmp_path):
    folder, settings = stream
    skip = [*settings, "data.broken_records=skip"]
    ended = pretrain(2, tmp_path / "run", settings)
    place = f"{folder}/2.jsonl:{AT + 1}"
    assert ended.returncode == 1 and place in ended.stdout, ended.stdout[-3000:]
    assert "data.broken_records=skip" in ended.stdout and "Traceback" not in ended.stdout
    last = max(losses(tmp_path / "run"))
    assert 0 < last < 30 and newest(tmp_path / "run" / "checkpoints").step == last
    assert f"saved after step {last}" in ended.stdout
    again = pretrain(2, tmp_path / "run", settings, "--resume")
    # Documents are tokenized in groups, which end elsewhere now: so may the steps before the broken record.
    assert again.returncode == 1 and place in again.stdout and last <= max(losses(tmp_path / "run")) < 30
    done = pretrain(2, tmp_path / "run", skip, "--resume")
    assert done.returncode == 0 and "1 broken record left out" in done.stdout and place in done.stdout
    whole = pretrain(1, tmp_path / "whole", skip)
    assert whole.returncode == 0, whole.stdout[-3000:]
    one, two = losses(tmp_path / "whole"), losses(tmp_path / "run")
    assert len(one) == 30 and all(abs(one[step] - two[step]) < 2e-6 for step in one)


LAYOUTS = [{"tp": 4, "pp": 1, "dp": 1}, {"tp": 2, "pp": 1, "dp": 2}, {"tp": 1, "pp": 2, "dp": 2}]


def test_one_rank_of_a_model_copy_reads_and_the_others_have_its_batches(stream, tmp_path):
    settings = [*stream[1], "data.broken_records=skip", "batch.global=8", "run.loader_workers=1"]
    alone, together = tmp_path / "alone", tmp_path / "together"
    for out, ranks, layouts in (alone, 1, [{"tp": 1, "pp": 1, "dp": 1}]), (together, 4, LAYOUTS):
        out.mkdir()
        (out / "cases.json").write_text(json.dumps(layouts))
        done = run_ranks(ranks, WORKERS / "one_reader.py", out, out / "cases.json", *settings)
        assert done.returncode == 0, done.stdout[-3000:]
    (whole,) = json.loads((alone / "rank-0.json").read_text())
    found = [json.loads((together / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert [sum(rank[case]["read"]["heads"] for rank in found) for case in range(3)] == [1, 1, 1]
    for case, readers in enumerate(([0], [0, 2], [0, 1])):
        assert [r for r in range(4) if found[r][case]["read"]["samples"]] == readers
        assert all(rank[case]["step"] == whole["step"] for rank in found)
    assert all(rank[0]["digests"] == whole["digests"] for rank in found), "tp 4: all of the global batch"
    assert merge_states([rank[0]["state"] for rank in found]) == whole["state"]
    sums = {whole["next"], *(rank[case]["next"] for rank in found for case in range(3))}
    assert len(sums) == 1 and None not in sums, "the sum of a step is the same under every layout"
    for heard in (case["refused"] for rank in [[whole], *found] for case in rank):
        assert heard == ["RuntimeError: the loader is closed", None, "RuntimeError: the loader is closed"]
    for case, copies in (1, ([0, 1], [2, 3])), (2, ([0, 2], [1, 3])):
        assert len({str(found[rank][case]["digests"]) for rank in range(4)}) == 2
        for first, second in copies:
            assert found[first][case]["digests"] == found[second][case]["digests"]
        state = merge_states([rank[case]["state"] for rank in found])
        assert state["lanes"].keys() == whole["state"]["lanes"].keys()


def test_a_step_has_one_message_between_hosts_which_nobody_waits_for(stream, tmp_path):
    """Also while a checkpoint is written and with run.save_every_minutes; a copy has its batches, too."""
    settings = [*stream[1], "data.broken_records=skip", "batch.global=8", "run.loader_workers=1"]
    done = run_ranks(2, WORKERS / "host_messages.py", tmp_path / "found.json", *settings)
    assert done.returncode == 0, done.stdout[-3000:]
    alone, copy = json.loads((tmp_path / "found.json").read_text())
    for step in map(str, (2, 3, 4, 6, 7)):  # saved after 4; on the disk after 7
        assert alone[step] == [["all_gather", True]], step
        assert copy[step] == [["broadcast", True], ["all_gather", True]], step


def test_a_stream_that_holds_nothing_out_is_refused_once(stream, tmp_path):
    """By the rank that reads it; the others have its words, and all end alike."""
    settings = [*stream[1], "data.broken_records=skip", "data.validation_every=1000"]
    ended = pretrain(2, tmp_path / "run", settings)
    assert ended.returncode == 2 and "Traceback" not in ended.stdout, ended.stdout[-3000:]
    assert ended.stdout.count("data.validation_every=1000") == 1
