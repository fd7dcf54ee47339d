"""Training from a hub that fails now and then: a server of the test's own, behind `datasets`' own streaming."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter

import pytest
from hub_server import DROP, Hub, Repository
from launching import run

from data.text.trained_vocabulary import train_bpe, wrap_tokenizer
from launch.records.metrics import read_metrics

FILES, STEPS = 2, 6
# A record has a text of some forty tokens. Its other letters make a file too long for a single request.
RECORDS, WORDS, OTHER = 40, 5, 400_000


def pages(seed: int) -> bytes:
    draw = random.Random(seed)
    texts = (" ".join(f"word{draw.randrange(300)}" for _ in range(WORDS)) for _ in range(RECORDS))
    return "".join(
        json.dumps({"text": t, "page": draw.randbytes(OTHER).hex()}) + "\n" for t in texts
    ).encode()


class Faults:
    """Every other request for a part of a file fails, from the first one on.

    The libraries try again themselves after 503, and after a connection that breaks off. They give up at 522:
    then our reader opens the file anew, behind the last record that it has read.
    """

    def __init__(self) -> None:
        self.asked: Counter[tuple[str, int]] = Counter()
        self.met: Counter[int | str] = Counter()

    def __call__(self, number: int, path: str, first: int) -> int | str | None:
        self.asked[path, first] += 1
        if self.asked[path, first] % 2 == 0:
            return None
        kind = 522 if first else (DROP, 503)[number % 2]
        self.met[kind] += 1
        return kind


@pytest.mark.ci
def test_errors_of_the_hub_change_no_digit_of_the_losses(tmp_path):
    files = {f"data/train-{each:05d}-of-{FILES:05d}.jsonl": pages(each) for each in range(FILES)}
    vocabulary = wrap_tokenizer("trained_bpe", train_bpe(["word after word"], 260))
    vocabulary.save_pretrained(tmp_path / "vocabulary")
    data = "data={source: hub, name: me/pages, validation_every: 20, shuffle_buffer: 20, "
    data += f"tokenizer: {{kind: file, path: {tmp_path}/vocabulary}}}}"
    sets = ["--set", data, "--set", "model.vocab_size=260", "--set", "precision=fp32"]

    def losses(name: str, hub: Hub) -> list[float]:
        hub.datasets["me/pages"] = Repository(files)
        out = tmp_path / name
        flags = ["--tiny", "--steps", str(STEPS), "--ds_config", "zero1", *sets, "--out", str(out)]
        with hub:
            environment = hub.environment(tmp_path / f"home of {name}", token=None)
            done = run([sys.executable, "-m", "launch.pretrain", *flags], env=environment)
        assert done.returncode == 0, done.stdout[-3000:]
        return [step.loss for step in read_metrics(out / "metrics.jsonl").steps]

    faults = Faults()
    smooth = losses("smooth", Hub())
    assert losses("rough", Hub(faults)) == smooth and len(smooth) == STEPS
    assert faults.met.keys() == {DROP, 503, 522}
