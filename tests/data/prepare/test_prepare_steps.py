"""The steps of data/prepare/ alone, each against its definition in plain Python."""

from __future__ import annotations

import html
import random
import re
import unicodedata
from pathlib import Path

import ftfy
import numpy as np
import pytest

from data.prepare import cleaning, contamination
from data.prepare.cleaning import make_detector
from data.prepare.duplicates import Duplicates, ShingleSets, find_duplicates
from data.prepare.words import Bands, choose_bands, passages, shingles, signatures, words_of

BROKEN_PIECES = ("a", "b ", "&amp;", "&", "<", "\n", "\x1b[31m", "â€™", "é", "e\u0301", "\x7f", "\r\n",
                 "\x0c", "’“", "ﬁ\u2028\x85\ud800")  # fmt: skip
ENCODINGS = ("latin-1", "cp1252", "cp1251", "macroman", "cp1253", "cp1257")
MOJIBAKE = "âÂÃ€™œž¢£®°·»«–—´×²³ØÙà½√≈‚ÄвЂГСўβΒāŒ‘’“”„\xa0\xad\u0301é¡¿ñßŸŠŽ…†¼©§µ±∂abZ \n.,1"


def test_repair_is_ftfy():
    rng = random.Random(0)
    inert = [chr(c) for c in range(0x80, 0x2300) if not cleaning._ACTIVE.match(chr(c))]
    assert len(inert) > 500
    texts = [f"ab {c} cd{c}e\n" for c in inert]
    for _ in range(1500):
        texts.append("".join(rng.choices(BROKEN_PIECES, k=rng.randint(1, 20))))
        texts.append("".join(rng.choices(MOJIBAKE, k=rng.randint(1, 40))))
        texts.append("".join(rng.choices([*inert, *"abc D,.!?1\n"], k=20)))
        utf8 = ("hello “wörld” – naïve café’s " + "".join(rng.choices("éàüñ—’“”…€½ab ", k=6))).encode()
        texts.append(utf8.decode(rng.choice(ENCODINGS), "ignore"))
    different = [text for text in texts if cleaning.repair(text) != ftfy.fix_text(text)]
    assert not different, different[:3]


def test_most_lines_are_not_given_to_ftfy(monkeypatch):
    monkeypatch.setattr(ftfy, "fix_and_explain", lambda *_: pytest.fail("ftfy was called"))
    repaired = cleaning.repair("Plain text,\tand “quotes” – of a café.\n")
    assert repaired == 'Plain text,\tand "quotes" – of a café.\n'


def test_repair_leaves_the_punctuation_of_chinese_and_japanese():
    wide = "今天天气很好，“我们”去公园玩吧！你想去吗？（好的）ＡＢ１２　ｱｲ ‘是’…；：\n"
    assert cleaning.repair(wide) == wide
    assert cleaning.repair(wide + "“A” &amp; ＡＢ\x07 cafe\u0301") == wide + '"A" & ＡＢ café'
    assert cleaning.repair("今天&amp;\x07“很好”") == "今天&“很好”"


# One character of these scripts is a word.
ALONE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff"
WORD = re.compile(rf"[{ALONE}]|(?:(?![{ALONE}])[a-z0-9\u00c0-\u1fff\u2040-\u2fff\u3040-\U0010ffff])+")


def reference_words(text: str) -> list[str]:
    return WORD.findall(unicodedata.normalize("NFKC", html.unescape(text)).lower())


def test_words_are_those_of_a_regular_expression():
    rng = random.Random(1)
    pieces = ["Hello", "wörld", "don’t", "x2", "—", "«non»", " ", "\n", "日本。語", "\xa0", "İ", "ſ", "", "."]
    pieces += ["人々は", "我们use GPT的", "，！", "ＡＢ", "ｶﾞ", "สวัสดี", "ខ្មែរ", "မြန်မာ", "한국어"]
    pieces += ["&eacute;", "e\u0301"]
    texts = ["".join(rng.choices(pieces, k=rng.randint(0, 30))) for _ in range(300)]
    words = words_of(texts)
    known: dict[str, int] = {}
    for t, text in enumerate(texts):
        span = range(words.offsets[t], words.offsets[t + 1])
        assert [words.between(w, w + 1) for w in span] == reference_words(text)
        for w in span:
            assert known.setdefault(words.between(w, w + 1), int(words.hashes[w])) == int(words.hashes[w])
    assert len(set(known.values())) == len(known)


def test_shingles_stay_inside_their_text():
    texts = ["a b c d e", "a b", "", "c d e", "b c d"]
    hashes, offsets = shingles(words_of(texts), 3)
    words = [text.split() for text in texts]
    expected = [[tuple(w[k : k + 3]) for k in range(len(w) - 2)] or [tuple(w)] for w in words]
    assert np.diff(offsets).tolist() == [len(e) for e in expected]
    meaning: dict[int, tuple] = {}
    for value, gram in zip(hashes.tolist(), (gram for e in expected for gram in e), strict=True):
        assert meaning.setdefault(value, gram) == gram
    assert len(meaning) == len({gram for e in expected for gram in e})


def test_passages_have_as_many_characters_as_words_of_the_script():
    words = words_of(["a b c d", "甲乙丙丁戊己庚", "ab 甲乙丙 cd", "กขคงจฉชซฌญฎฏฐ", "a b", "甲乙丙丁戊"])
    _, first, last = passages(words, 3)
    shown = [words.between(*span) for span in zip(first.tolist(), last.tolist(), strict=True)]
    chinese = ["甲乙丙丁戊己", "乙丙丁戊己庚", "ab 甲乙丙 cd"]
    assert shown == ["a b c", "b c d", *chinese, "กขคงจฉชซฌญฎฏ", "ขคงจฉชซฌญฎฏฐ"]


SCRIPTS = {
    "Chinese": "\u4e00-\u51ff",
    "Japanese": "\u3042-\u3093",
    "Thai": "\u0e01-\u0e2e",
    "Lao": "\u0e81-\u0eae",
    "Khmer": "\u1780-\u17b3",
    "Burmese": "\u1000-\u102a",
    "English": "a-z",
}
BETWEEN = ["。", " and ", "GPT2 ", ", "]


def duplicates_of(texts: list[str], shingle: int = 5) -> Duplicates:
    marks, sets = signatures(words_of(texts), shingle, 128, seed=5)
    held = ShingleSets(np.concatenate(sets), np.cumsum([len(each) for each in sets]))
    digests = np.array([texts.index(text) for text in texts], dtype=np.uint64)
    return find_duplicates(digests, marks, held, choose_bands(128, 0.7), 0.7)


@pytest.mark.parametrize("script", SCRIPTS)
def test_near_duplicates_are_found_in_every_script(script):
    """100 of 100 copies with a character in 60 changed (English: a word), and nothing else."""
    rng = random.Random(script)
    letters = [c for c in map(chr, range(0x110000)) if re.match(f"[{SCRIPTS[script]}]", c)]

    def piece() -> str:
        return "".join(rng.choices(letters, k=7)) + " " if script == "English" else rng.choice(letters)

    documents = [[piece() for _ in range(600)] for _ in range(110)]
    for document in documents:
        document[rng.randrange(30) :: 30] = rng.choices(BETWEEN, k=20)
    copies = [list(document) for document in documents[:100]]
    for copy in copies:
        copy[::60] = [piece() for _ in copy[::60]]
    texts = ["".join(document) for document in [*documents, *copies]]
    found = duplicates_of(texts)
    assert found.of.tolist() == [*[-1] * 110, *range(100)]


def test_signatures_estimate_the_jaccard_similarity():
    rng = random.Random(2)
    base = [f"word{rng.randrange(10**6)}" for _ in range(2000)]
    for share in (0.5, 0.7, 0.9):
        # Two texts of n words that have the first part in common: J = common / (2 n - common) of their
        # shingles.
        n = round(2000 * (1 + share) / 2)
        other = base[: round(2000 * share)] + [f"other{k}" for k in range(n - round(2000 * share))]
        mine = base[: round(2000 * share)] + [f"mine{k}" for k in range(n - round(2000 * share))]
        marks, _ = signatures(words_of([" ".join(mine), " ".join(other)]), 5, 1024, seed=3)
        assert abs((marks[0] == marks[1]).mean() - share / (2 * (1 + share) / 2 - share)) < 0.06


def test_bands_find_the_threshold():
    bands = choose_bands(128, 0.7)
    assert bands.probability(0.7) > 0.99 and bands.count * bands.rows <= 128
    assert Bands(128 // (bands.rows + 1), bands.rows + 1).probability(0.7) <= 0.99
    with pytest.raises(ValueError, match="--permutations 3"):
        choose_bands(3, 0.7)


def test_duplicates_follow_the_definition():
    """Dropped are documents with this Jaccard similarity to an earlier kept one, counted pair by pair."""
    rng = random.Random(4)
    documents = [[f"word{rng.randrange(10**6)}" for _ in range(60)] for _ in range(100)]
    while len(documents) < 400:  # families of relatives of relatives, around the threshold
        child = list(rng.choice(documents))
        for k in rng.sample(range(60), rng.choice([0, 1, 5, 9, 10, 11, 12, 13, 14, 15])):
            child[k] = f"word{rng.randrange(10**6)}"
        documents.append(child)
    found = duplicates_of([" ".join(document) for document in documents], shingle=1)

    kept: list[int] = []
    missed = 0
    for k, document in enumerate(documents):
        near = {j: len({*document} & {*documents[j]}) / len({*document, *documents[j]}) for j in kept}
        if found.of[k] < 0:
            missed += max(near.values(), default=0) >= 0.7
            kept.append(k)
            continue
        assert found.exact[k] == (document in documents[:k])
        similarity = near[int(found.of[k])]
        assert found.exact[k] or (similarity >= 0.7 and found.jaccard[k] == pytest.approx(similarity)), k
    assert 150 < len(kept) < 350 and missed <= 2  # one pair in a hundred at the threshold meets in no band


def test_pages_of_one_template_stay_and_each_meets_a_bounded_number_of_them():
    rng = random.Random(1)
    template = [f"word{rng.randrange(10**6)}" for _ in range(230)]
    pages = [[*template, *(f"own{rng.randrange(10**9)}" for _ in range(60))] for _ in range(600)]
    pages.append(
        [*pages[100][:-9], *(f"own{rng.randrange(10**9)}" for _ in range(9))]
    )  # of Jaccard 0.93 to one of them; any two others have 0.65
    texts = [" ".join(page) for page in pages]
    found = duplicates_of(texts)
    assert np.flatnonzero(found.of >= 0).tolist() == [600] and found.of[600] == 100
    assert found.candidates < 2.5 * duplicates_of(texts[:300]).candidates


def test_contamination_names_file_and_words(tmp_path):
    a, b, c, short = (str(tmp_path / name) for name in ("a.json", "b.txt", "c.txt", "short.txt"))
    Path(a).write_text('{"data": [{"question": "one two three four five", "id": 7}, {"q": "six"}]}')
    Path(b).write_text("alpha beta gamma delta\nepsilon zeta\n")
    Path(short).write_text("too short\n")
    evaluation = contamination.read_evaluation([a, b], 4)
    texts = ["Zero, ONE two; three (four) six.", "one two three five", "beta gamma delta epsilon"]
    found = evaluation.matches(words_of([*texts, "x alpha Beta gamma-delta y"]))
    assert found == [(a, "one two; three (four"), None, None, (b, "alpha beta gamma-delta")]
    assert evaluation.texts == 4 and evaluation.too_short == 2
    with pytest.raises(ValueError, match=r"b\.txt: no text in it has 40 words"):
        contamination.read_evaluation([b], 40)
    with pytest.raises(ValueError, match="no such file"):
        contamination.read_evaluation([c], 4)
    with pytest.raises(ValueError, match=r"short\.txt: no text in it has 4 words") as error:
        contamination.read_evaluation([a, short, b], 4)
    assert "a.json" not in str(error.value), "one file that is not excluded is as bad as all"


def test_language():
    """Of a text of several lines."""
    found, score = make_detector()(
        "Le sénat s'est réuni dans l'après-midi\net a voté la loi que la chambre avait envoyée." * 4
    )
    assert found == "fr" and 0.5 < score <= 1
