"""Superscripts, subscripts and short formulas as plain text: 10<sup>7</sup> is 10⁷ and not 107."""

from __future__ import annotations

import html
import re
from collections.abc import Callable

_SCRIPT = re.compile(r"<(su[bp])\b[^<>]*>([^<>\n]*)</\1\s*>", re.IGNORECASE)
_LEFT_OVER = re.compile(r"</?su[bp]\b[^<>]*>", re.IGNORECASE)
_NESTED = 3
_HIGH = str.maketrans("0123456789+-−=()n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ⁿ")
_LOW = str.maketrans("0123456789+-−=()", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎")
# Letters that are raised by custom and change nothing when they are not: 20th, Mme, TM, 1o.
_CUSTOM = "st nd rd th er re e ème eme me mme lle le o a os as r s c ct m d tm sm"
_FOOTNOTE = re.compile(r"\[[^\]]*\]")

_MATH_TAG = re.compile(r"</?math\b[^<>]*>", re.IGNORECASE)
_LONGEST_FORMULA = 80  # characters; longer ones stand apart from sentences, and are left out
_SIGNS = """
alpha α beta β gamma γ delta δ epsilon ε varepsilon ε zeta ζ eta η theta θ iota ι kappa κ lambda λ mu μ
nu ν xi ξ pi π rho ρ sigma σ tau τ upsilon υ phi φ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ
Lambda Λ Xi Ξ Pi Π Sigma Σ Phi Φ Psi Ψ Omega Ω times × cdot · pm ± mp ∓ le ≤ leq ≤ ge ≥ geq ≥ ne ≠ neq ≠
approx ≈ sim ~ equiv ≡ to → rightarrow → infty ∞ in ∈ notin ∉ subset ⊂ subseteq ⊆ cup ∪ cap ∩ ldots …
dots … cdots … partial ∂ nabla ∇ circ ∘ degree ° prime ′ ell ℓ hbar ℏ forall ∀ exists ∃ colon : div ÷ ll
≪ gg ≫ propto ∝ setminus ∖ log log ln ln exp exp sin sin cos cos tan tan min min max max gcd gcd lim lim
det det dim dim mod mod % % $ $ # # _ _
""".split()  # noqa: SIM905 - a table of commands and what they show
_WORDS = dict(zip(_SIGNS[::2], _SIGNS[1::2], strict=True))
_WORDS |= dict.fromkeys(("left", "right", "displaystyle", "textstyle", "big", "Big", "bigl", "bigr"), "")
_WORDS |= dict.fromkeys((",", ";", ":", "!", " ", "quad", "qquad"), " ")
_GROUP = r"(?:\{([^{}]*)\}|([0-9A-Za-z]))"
_FONTS = "text|textbf|textit|mathrm|mathbf|mathit|mathcal|mathbb|mathsf|operatorname|boldsymbol|bar|vec|hat"
_STEPS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (  # innermost braces first
    (re.compile(rf"\\(?:{_FONTS})\s*\{{([^{{}}]*)\}}"), lambda m: m[1]),
    (
        re.compile(rf"\\[dt]?frac\s*{_GROUP}\s*{_GROUP}"),
        lambda m: f"{_whole(m[1] or m[2])}/{_whole(m[3] or m[4])}",
    ),
    (re.compile(r"\\sqrt\s*\{([^{}]*)\}"), lambda m: f"√{_whole(m[1])}"),
    (re.compile(rf"\^\s*{_GROUP}"), lambda m: f"<sup>{m[1] or m[2]}</sup>"),
    (re.compile(rf"_\s*{_GROUP}"), lambda m: f"<sub>{m[1] or m[2]}</sub>"),
)
_COMMAND = re.compile(r"\\([A-Za-z]+|[^A-Za-z])")


def raised_and_lowered(text: str) -> str:
    """The text without <sup> and <sub>: digits and signs raised or lowered, else x^(a+b) and v_max."""
    for _ in range(_NESTED):
        text, before = _SCRIPT.sub(_script, text), text
        if text == before:
            break
    return _LEFT_OVER.sub("", text)


def _script(match: re.Match[str]) -> str:
    high = match[1].lower() == "sup"
    shown = html.unescape(match[2]).strip()
    if not shown or _FOOTNOTE.fullmatch(shown):
        return ""
    moved = shown.translate(_HIGH if high else _LOW)
    if not set(moved) & set(shown):  # every character has a form of its own
        return moved
    custom = high and shown.lower() in _CUSTOM.split()
    if custom or " " in shown or not any(c.isalnum() for c in shown):
        return match[2].strip()
    inside = shown if re.fullmatch(r"[-−+]?[\w.,′]+", shown) else f"({shown})"
    return ("^" if high else "_") + html.escape(inside, quote=False)


def formula(element: str) -> str:
    """What <math>...</math> of a few letters says as text; "" where more is needed to say it."""
    shown = html.escape(html.unescape(_MATH_TAG.sub("", element)).strip(), quote=False)
    if len(shown) > _LONGEST_FORMULA or "\n" in shown or "\\\\" in shown:
        return ""
    for _ in range(6):
        before = shown
        for pattern, replace in _STEPS:
            shown = pattern.sub(replace, shown)
        shown = _COMMAND.sub(lambda m: _WORDS.get(m[1], m[0]), shown)
        if shown == before:
            break
    # What is not known here: half a formula would say something else.
    return "" if re.search(r"[\\{}\[\]|^_]", shown) else shown


def _whole(part: str) -> str:
    """In brackets where it is more than one thing."""
    part = part.strip()
    return part if re.fullmatch(r"[\w.]+|<sup>.*</sup>", part) else f"({part})"
