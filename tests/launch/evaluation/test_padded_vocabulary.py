"""Rows of an embedding that no token has are neither drawn nor counted, whoever added them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scored import PASSAGES, tokenizer_of, write_passages
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from data.text.trained_vocabulary import BERT_SPECIAL_TOKENS
from data.text.vocabulary import unused_numbers
from launch import score
from launch.evaluation import scoring
from launch.evaluation.trained_model import open_model
from launch.weights.initial_weights import InitialWeights
from modeling.families import with_vocabulary
from modeling.generation import Decoding, Sampling, continued, fill_masks
from recipes import catalog
from recipes.problems import ProblemsError

TOKENS, END, ROWS = 270, 319, 384


@pytest.fixture(scope="module")
def padded(tmp_path_factory) -> Path:
    """A GPT-2 of 384 rows, of which 0 to 269 and 319, the end of a document, are tokens."""
    folder = tmp_path_factory.mktemp("padded")
    content = json.loads(tokenizer_of(PASSAGES, TOKENS + 1).backend_tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    vocabulary |= {"<|endoftext|>": END, max(vocabulary, key=vocabulary.get): 0}
    content["added_tokens"] = [{**content["added_tokens"][0], "id": END}]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    torch.manual_seed(0)
    size = dict(n_embd=32, n_layer=1, n_head=4, n_positions=64, eos_token_id=END, bos_token_id=END)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=ROWS, **size))
    with torch.no_grad():
        model.transformer.wte.weight[TOKENS:END] *= 30
        model.transformer.wte.weight[END + 1 :] *= 30
    model.save_pretrained(folder)
    return folder


def opened(folder: Path):
    model = open_model(str(folder))
    return model, model.loaded(torch.float32), unused_numbers(model.tokenizer)


@pytest.mark.parametrize("sampling", [None, Sampling(temperature=20), Sampling(temperature=20, top_p=0.9)])
def test_only_tokens_are_drawn(padded, sampling, capsys):
    model, theirs, never = opened(padded)
    known = {*model.tokenizer.get_vocab().values()}
    assert model.recipe.model.vocab_size == END + 1 and len(known) == TOKENS + 1
    texts = continued(theirs, (5, 6), Decoding(40, END, never, sampling), samples=8)
    drawn = {token for text in texts for token in text.tokens}
    assert drawn <= known
    assert any(
        "384 rows of the vocabulary the first 320: the rest pads" in line
        for line in capsys.readouterr().err.splitlines()
    )


def test_only_tokens_are_counted(padded, tmp_path):
    data, out = write_passages(tmp_path / "texts.jsonl"), tmp_path / "score.json"
    job = score.checked(
        score.build_parser().parse_args([str(padded), "--text", str(data), "--out", str(out)])
    )
    scoring.run(job, scoring.load(job))
    model, tokenizer = GPT2LMHeadModel.from_pretrained(padded).eval(), open_model(str(padded)).tokenizer
    known, losses = torch.tensor(sorted(tokenizer.get_vocab().values())), []
    for text in PASSAGES:
        tokens = torch.tensor([END, *tokenizer.encode(text)])
        with torch.no_grad():
            logits = model(tokens[None, :-1]).logits[0].double()
        losses += (logits[:, known].logsumexp(-1) - logits[range(len(tokens) - 1), tokens[1:]]).tolist()
    found = json.loads(out.read_text())["figures"]["loss_per_token"]
    assert found == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    # nor written by tasks that write
    asked = dict(until=["zzz"], max_gen_toks=30)
    requests = [SimpleNamespace(args=(text[:9], asked)) for text in PASSAGES]
    _, theirs, never = opened(padded)
    texts = []
    for text in PASSAGES:
        (more,) = continued(theirs, tokenizer.encode(text[:9]), Decoding(30, END, never))
        texts.append(tokenizer.decode(more.tokens, skip_special_tokens=True))
    assert scoring.ScoredModel(job).generate_until(requests, disable_tqdm=True) == texts


def test_a_padded_bert_fills_masks_with_tokens(tmp_path):
    tokens = [*BERT_SPECIAL_TOKENS, *"abcdefgh"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    size = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128)
    model = BertForMaskedLM(BertConfig(vocab_size=64, max_position_embeddings=32, **size))
    with torch.no_grad():
        model.cls.predictions.bias[len(tokens) :] = 9
    model.save_pretrained(tmp_path)
    opened_model, theirs, never = opened(tmp_path)
    filled = fill_masks(theirs, opened_model.tokenizer.encode("a [MASK] b [MASK]"), 4, never)
    assert max(filled) < len(tokens)


def test_training_starts_from_padded_rows_and_not_from_another_vocabulary(padded, tmp_path):
    default = catalog.load("default/sotu", [], tiny=True)
    weights = InitialWeights(str(padded))
    recipe = with_vocabulary(weights.model(END + 1).as_recipe(default), END + 1)
    notices = weights.check(recipe)
    assert any("384 rows" in notice.text for notice in notices)
    assert weights.read(recipe)["word.weight"].shape == (END + 1, 32)
    with pytest.raises(ProblemsError, match="vocab_size=384, but the recipe's model.vocab_size is 5000"):
        weights.check(with_vocabulary(recipe, 5000))
    for name in ("config.json", "model.safetensors"):
        shutil.copy(padded / name, tmp_path)
    tokenizer_of(PASSAGES, 400).backend_tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ProblemsError, match="has 400 tokens: the model has 384"):
        open_model(str(tmp_path))
