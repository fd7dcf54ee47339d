"""Plain text of Wikipedia's markup, without tables, infoboxes, notes and pictures.

Every step takes time linear in the text, whatever the text is. (mwparserfromhell 0.7.2 needs 7 s for 60 KB of
"<b>" and 10 s for 60 KB of "{|", growing with the square; one such page would hold up a whole run.) Patterns
therefore never scan past the next bracket or line end, and a stack matches nested brackets.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from data.text import wiki_templates

# Version of the text. Raise it with every change of the text, so that older cached text is not used.
VERSION = 2
MAX_DEPTH = 40  # links within links; MediaWiki's own limit for templates

_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
_DROPPED_ELEMENTS = (
    "ref|references|chem|ce|gallery|timeline|syntaxhighlight|source|pre|score|hiero|imagemap|inputbox|"
    "graph|mapframe|maplink|templatedata|templatestyles|table|style|indicator|categorytree"
)
_DROPPED_TAG = re.compile(rf"<(/?)({_DROPPED_ELEMENTS})\b[^<>]*>", re.IGNORECASE)
_MATH_TAG = re.compile(r"<(/?)(math)\b[^<>]*>", re.IGNORECASE)
_NOWIKI_TAG = re.compile(r"<(/?)(nowiki)\s*/?>", re.IGNORECASE)
_MARKUP = str.maketrans({c: f"&#{ord(c)};" for c in "[]{}|'<>=*#:;_-!&"})
_KEPT_TAG = re.compile(
    r"</?(?:abbr|b|bdi|bdo|big|blockquote|center|cite|code|data|dd|del|dfn|div|dl|dt|em|font|h[1-6]|i|"
    r"includeonly|ins|kbd|li|noinclude|nowiki|ol|onlyinclude|p|poem|q|rb|rp|rt|ruby|s|samp|section|small|"
    r"span|strike|strong|td|th|time|tr|tt|u|ul|var|wbr|references|ref)\b[^<>]*>",
    re.IGNORECASE,
)
_LINE_TAG = re.compile(r"<(?:br|hr)\b[^<>]*>", re.IGNORECASE)
_BRACES = re.compile(r"\{{2,}|\}{2,}|(?m:^[ \t:]*)\{\||(?m:^[ \t]*)\|\}")
_LINK_BRACKETS = re.compile(r"\[\[|\]\]|\n[ \t]*\n")
_LANGUAGE_LINK = re.compile(r"(?:[a-z]{2,3}|simple|[a-z]{2,3}-[a-z-]{2,10})\Z")
_PICTURES_AND_CATEGORIES = (
    "file image media category datei bild kategorie fichier catégorie archivo imagen categoría ficheiro "
    "imagem categoria immagine bestand afbeelding categorie plik grafika kategoria файл изображение категория"
)
_DROPPED_LINKS = frozenset(_PICTURES_AND_CATEGORIES.split())
_EXTERNAL_LINK = re.compile(r"\[(?:https?:|ftp:|mailto:|news:|//)([^\[\]\n]*)\]", re.IGNORECASE)
_QUOTES = re.compile(r"'{2,}")
_MAGIC_WORD = re.compile(r"__[A-Z]{3,40}__")
_REDIRECT = re.compile(r"\s*#redirect\b", re.IGNORECASE)
_SPACES = re.compile("[ \t\r\x0b\x0c\u00a0\u1680\u2000-\u200b\u2028\u2029\u202f\u205f\u3000\ufeff]+")
_REMAINS = (  # (what dropped markup leaves, what takes its place)
    (re.compile(r"([(\[]) ?(?:[;,:] ?)*"), r"\1"),
    (re.compile(r" ?\(\)| ?\[\]"), ""),
    (re.compile(r" ([,.;:)](?!\w))"), r"\1"),
)
_NO_PROSE = (
    "references|external links|external link|see also|further reading|further information|notes|"
    "notes and references|references and notes|references and sources|sources and references|bibliography|"
    "sources|footnotes|citations|works cited|general references|explanatory notes|gallery"
)
_DROPPED_SECTIONS = frozenset(_NO_PROSE.split("|"))


class Pathological(ValueError):
    """Markup nested deeper than in any article."""


def plain_text(wikitext: str) -> str:
    """Return the text of an article: blank lines around paragraphs and headings, one list item per line.

    "" for a redirect. Raises Pathological: links are nested more than `MAX_DEPTH` deep.
    """
    if _REDIRECT.match(wikitext):
        return ""
    text = _COMMENT.sub("", wikitext)
    literal = _elements(text, _NOWIKI_TAG)
    text = _replace_spans(text, literal, lambda inside: _NOWIKI_TAG.sub("", inside).translate(_MARKUP))
    text = _replace_spans(text, _elements(text, _DROPPED_TAG))
    text = _replace_spans(text, _elements(text, _MATH_TAG), formula_text)
    text = wiki_templates.resolve(text)
    text = _replace_spans(text, _outermost(_brace_spans(text)))
    text = _resolve_links(text)
    text = _EXTERNAL_LINK.sub(lambda match: "".join(match[1].split(None, 1)[1:]), text)
    text = _KEPT_TAG.sub("", _LINE_TAG.sub("\n", text))
    text = _MAGIC_WORD.sub("", _QUOTES.sub(_apostrophes, text))
    text = replace_scripts(text)
    return _paragraphs(text.split("\n"))


def _elements(text: str, tag: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Yield the spans of whole elements <x>...</x> and <x/>; pass over a tag without its partner."""
    opened, closed = [], defaultdict(list)
    for match in tag.finditer(text):
        if match[1]:
            closed[match[2].lower()].append(match.end())
        else:
            opened.append(match)
    end = 0
    for match in opened:
        if match.start() < end:
            continue
        ends = [match.end()] if match[0].endswith("/>") else closed[match[2].lower()]
        if (following := bisect_left(ends, match.end())) < len(ends):
            end = ends[following]
            yield match.start(), end


def _replace_spans(
    text: str, spans: Iterable[tuple[int, int]], replace: Callable[[str], str] = lambda inside: ""
) -> str:
    """Replace ordered, disjoint spans of a text."""
    parts, at = [], 0
    for start, end in spans:
        parts += [text[at:start], replace(text[start:end])]
        at = end
    return "".join([*parts, text[at:]])


def _brace_spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of {{templates}}, {{{parameters}}} and {| tables |}; pass over unclosed ones."""
    stack: list[list] = []  # [kind, position, braces]
    depth = {"{": 0, "|": 0}
    at = 0
    while match := _BRACES.search(text, at):
        at, token = match.end(), match[0]
        if token.endswith("{|"):
            stack.append(["|", match.start(), 2])
            depth["|"] += 1
        elif token[0] == "{":
            stack.append(["{", match.start(), len(token)])
            depth["{"] += 1
        elif token[0] == "}":
            count, end = len(token), match.start()
            while count >= 2 and depth["{"]:
                while stack[-1][0] != "{":
                    depth[stack.pop()[0]] -= 1
                taken = min(3, count, stack[-1][2])
                stack[-1][2] -= taken
                count, end = count - taken, end + taken
                yield stack[-1][1] + stack[-1][2], end
                if stack[-1][2] < 2:
                    depth[stack.pop()[0]] -= 1
        elif depth["|"] and stack[-1][0] == "|":
            yield stack[-1][1], match.end()
            depth[stack.pop()[0]] -= 1
        else:  # within a template "|}" is an empty argument and the first brace of its end
            at = match.end() - 1


def _outermost(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the outermost spans, in order. The input has inner spans before outer ones."""
    kept: list[tuple[int, int]] = []
    for start, end in spans:
        while kept and kept[-1][0] >= start:
            kept.pop()
        kept.append((start, end))
    return kept


def _resolve_links(text: str) -> str:
    """Replace every [[link]] by its visible text. Only links of pictures may span paragraphs."""
    frames: list[list[str]] = [[]]  # text of the open links, outermost first
    at = 0
    for match in _LINK_BRACKETS.finditer(text):
        frames[-1].append(text[at : match.start()])
        at = match.end()
        if match[0] == "[[":
            frames.append([])
            if len(frames) > MAX_DEPTH:
                raise Pathological(f"links nested more than {MAX_DEPTH} deep")
        elif match[0] == "]]":
            if len(frames) > 1:
                shown = _link_text("".join(frames.pop()))
                frames[-1].append(shown)
        else:
            if len(frames) > 1 and _namespace(frames[1][0]) not in _DROPPED_LINKS:
                _give_up(frames)
            frames[-1].append(match[0])
    frames[-1].append(text[at:])
    _give_up(frames)
    return "".join(frames[0])


def _give_up(frames: list[list[str]]) -> None:
    """Turn unclosed links into text; of a picture, keep only the lines after the first."""
    for frame in frames[1:]:
        link = "".join(frame)
        frames[0].append(link.partition("\n")[2] if _namespace(link) in _DROPPED_LINKS else link)
    del frames[1:]


def _namespace(link: str) -> str:
    """Return the namespace of a link: "file" of "File:x.svg|thumb"; "" without one."""
    name, colon, _ = link[:40].partition(":")
    return name.strip().lower() if colon else ""


def _link_text(link: str) -> str:
    """Return the visible text of a [[link]]."""
    target, piped, text = link.partition("|")
    if (namespace := _namespace(link)) in _DROPPED_LINKS:
        return ""
    if text.strip():
        return text
    if not piped and _LANGUAGE_LINK.match(namespace):  # the same article in another language
        return ""
    target = target.strip().removeprefix(":")
    return target.partition("(")[0].strip() if piped else target


def _apostrophes(match: re.Match[str]) -> str:
    """Return the apostrophes left of a run: 2 mean italic, 3 bold, 5 both, further ones are text."""
    return "'" * {2: 0, 3: 0, 4: 1, 5: 0}.get(len(match[0]), len(match[0]) - 5)


def _paragraphs(lines: list[str]) -> str:
    """Join the lines, without list markers, remains of tables, dropped sections and empty headings."""
    blocks: list[str] = []  # pieces of text and the newlines that follow them
    headings: list[tuple[int, str]] = []  # (level, title), with no text under them so far
    dropped = 0  # level of the section that is left out; 0: none
    after_item = False  # whether the last line was of a list
    for line in lines:
        line = line.strip()
        if heading := _heading(line):
            level, title = heading
            if dropped and level > dropped:
                continue
            dropped = level if title.lower() in _DROPPED_SECTIONS else 0
            headings = [above for above in headings if above[0] < level]
            if not dropped:
                headings.append(heading)
            continue
        if blocks and not line:
            blocks[-1] = "\n\n"
        if dropped or not line or line.startswith(("|", "!", "{|", "----")):
            continue
        item = line[0] in "*#:;"
        if not (text := _clean(line.lstrip("*#:; "))):
            continue
        if blocks and (headings or (after_item and not item)):
            blocks[-1] = "\n\n"
        after_item = item
        for _, title in headings:
            blocks += [title, "\n\n"]
        headings = []
        blocks += [text, "\n"]
    return "".join(blocks).strip()


def _heading(line: str) -> tuple[int, str] | None:
    """Return (level, title) of a line "== title =="; None for another line."""
    if len(line) < 3 or line[0] != "=" or line[-1] != "=":
        return None
    title = line.strip("=")
    level = min(len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("=")), 6)
    return (level, _clean(title)) if title.strip() else None


def _clean(line: str) -> str:
    """Resolve a line's entities; remove empty brackets and spaces before commas."""
    for bracket in ("{{", "}}", "[[", "]]"):  # without a partner; those of <nowiki> are entities still
        line = line.replace(bracket, "")
    line = _SPACES.sub(" ", html.unescape(line).replace("\n", " "))
    for pattern, replacement in _REMAINS:
        line = pattern.sub(replacement, line)
    return line.strip()


# Superscripts, subscripts and short formulas: 10<sup>7</sup> is 10⁷ and not 107.
_SCRIPT = re.compile(r"<(su[bp])\b[^<>]*>([^<>\n]*)</\1\s*>", re.IGNORECASE)
_LEFT_OVER = re.compile(r"</?su[bp]\b[^<>]*>", re.IGNORECASE)
_NESTED = 3
_HIGH = str.maketrans("0123456789+-−=()n", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁻⁼⁽⁾ⁿ")
_LOW = str.maketrans("0123456789+-−=()", "₀₁₂₃₄₅₆₇₈₉₊₋₋₌₍₎")
# Letters raised by custom alone, written on the line here: 20th, Mme, TM, 1o.
_CUSTOM = "st nd rd th er re e ème eme me mme lle le o a os as r s c ct m d tm sm"
_FOOTNOTE = re.compile(r"\[[^\]]*\]")

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


def replace_scripts(text: str) -> str:
    """Replace <sup> and <sub>: raised or lowered digits and signs, else x^(a+b) and v_max."""
    text = wiki_templates.until_stable(lambda found: _SCRIPT.sub(_script, found), text, _NESTED)
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


def formula_text(element: str) -> str:
    """Turn a short <math>...</math> into text; "" where plain text cannot express it."""
    shown = html.escape(html.unescape(_MATH_TAG.sub("", element)).strip(), quote=False)
    if len(shown) > _LONGEST_FORMULA or "\n" in shown or "\\\\" in shown:
        return ""

    def inner(shown: str) -> str:
        for pattern, replace in _STEPS:
            shown = pattern.sub(replace, shown)
        return _COMMAND.sub(lambda m: _WORDS.get(m[1], m[0]), shown)

    shown = wiki_templates.until_stable(inner, shown, 6)
    # With an unknown command left out, a formula would say something else.
    return "" if re.search(r"[\\{}\[\]|^_]", shown) else shown


def _whole(part: str) -> str:
    """Put a part of a fraction or root in brackets, unless it is a single word, number or power."""
    part = part.strip()
    return part if re.fullmatch(r"[\w.]+|<sup>.*</sup>", part) else f"({part})"
