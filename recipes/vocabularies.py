"""Published vocabularies and what a trained one needs: names and sizes."""

from __future__ import annotations

GPT2_VOCABULARY = 50257  # Radford et al. 2019, section 2.2
BERT_UNCASED_VOCABULARY = 30522  # of the published bert-base-uncased and bert-large-uncased
BERT_CASED_VOCABULARY = 28996
PUBLISHED_VOCABULARIES = {
    "gpt2": GPT2_VOCABULARY,
    "bert_uncased": BERT_UNCASED_VOCABULARY,
    "bert_cased": BERT_CASED_VOCABULARY,
}
TRAINED = ("trained_bpe", "trained_wordpiece")  # kinds of vocabulary that are learnt from the text
SMALLEST_BPE = 257  # the 256 bytes, and the end-of-document token
