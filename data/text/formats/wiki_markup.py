"""Wikitext as plain text: what a reader sees, without tables, infoboxes, notes, long formulas and pictures.

Every step takes time linear in the text, whatever the text is. (mwparserfromhell 0.7.2 needs 7 s for 60 KB of
"<b>" and 10 s for 60 KB of "{|", growing with the square; one such page would hold up a whole run.) Patterns
therefore never scan past the next bracket or line end, and what nests is matched with a stack.
"""

from __future__ import annotations

import html
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from data.text.formats import wiki_scripts as wikitext_scripts
from data.text.formats import wiki_templates as wikitext_templates

# Of the text that comes out. Raise it with every change of that, so that nothing cached before is taken.
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
    """Markup that no article has."""


def plain_text(wikitext: str) -> str:
    """The text of an article: paragraphs and headings between blank lines, an item of a list per line.

    "" for a redirect.

    Raises:
        Pathological: links are nested more than `MAX_DEPTH` deep.
    """
    if _REDIRECT.match(wikitext):
        return ""
    text = _COMMENT.sub("", wikitext)
    literal = _elements(text, _NOWIKI_TAG)
    text = _replace_spans(text, literal, lambda inside: _NOWIKI_TAG.sub("", inside).translate(_MARKUP))
    text = _replace_spans(text, _elements(text, _DROPPED_TAG))
    text = _replace_spans(text, _elements(text, _MATH_TAG), wikitext_scripts.formula)
    text = wikitext_templates.resolve(text)
    text = _replace_spans(text, _outermost(_brace_spans(text)))
    text = _resolve_links(text)
    text = _EXTERNAL_LINK.sub(lambda match: "".join(match[1].split(None, 1)[1:]), text)
    text = _KEPT_TAG.sub("", _LINE_TAG.sub("\n", text))
    text = _MAGIC_WORD.sub("", _QUOTES.sub(_apostrophes, text))
    text = wikitext_scripts.raised_and_lowered(text)
    return _paragraphs(text.split("\n"))


def _elements(text: str, tag: re.Pattern[str]) -> Iterator[tuple[int, int]]:
    """Spans of whole elements <x>...</x> and <x/>; a tag without its partner is left."""
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
    """The text with ordered, disjoint spans replaced."""
    parts, at = [], 0
    for start, end in spans:
        parts += [text[at:start], replace(text[start:end])]
        at = end
    return "".join([*parts, text[at:]])


def _brace_spans(text: str) -> Iterator[tuple[int, int]]:
    """Spans of {{templates}}, {{{parameters}}} and {| tables |}; what is not closed is left."""
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
    """The spans that lie in no other one, in order. Of nested spans the inner one comes first."""
    kept: list[tuple[int, int]] = []
    for start, end in spans:
        while kept and kept[-1][0] >= start:
            kept.pop()
        kept.append((start, end))
    return kept


def _resolve_links(text: str) -> str:
    """The text with every [[link]] replaced by what it shows. Only pictures outlast their paragraph."""
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
                shown = _shown("".join(frames.pop()))
                frames[-1].append(shown)
        else:
            if len(frames) > 1 and _namespace(frames[1][0]) not in _DROPPED_LINKS:
                _give_up(frames)
            frames[-1].append(match[0])
    frames[-1].append(text[at:])
    _give_up(frames)
    return "".join(frames[0])


def _give_up(frames: list[list[str]]) -> None:
    """Makes text of links that nothing closes; of a picture only what follows its first line."""
    for frame in frames[1:]:
        link = "".join(frame)
        frames[0].append(link.partition("\n")[2] if _namespace(link) in _DROPPED_LINKS else link)
    del frames[1:]


def _namespace(link: str) -> str:
    """ "file" of "File:x.svg|thumb"; "" where there is none."""
    name, colon, _ = link[:40].partition(":")
    return name.strip().lower() if colon else ""


def _shown(link: str) -> str:
    """What [[link]] shows in running text."""
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
    """What is left of a run of apostrophes: 2 are italic, 3 bold, 5 both, more are apostrophes."""
    return "'" * {2: 0, 3: 0, 4: 1, 5: 0}.get(len(match[0]), len(match[0]) - 5)


def _paragraphs(lines: list[str]) -> str:
    """The lines without list markers, remains of tables, dropped sections and empty headings."""
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
    """(level, title) of "== title =="."""
    if len(line) < 3 or line[0] != "=" or line[-1] != "=":
        return None
    title = line.strip("=")
    level = min(len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("=")), 6)
    return (level, _clean(title)) if title.strip() else None


def _clean(line: str) -> str:
    """A line with entities resolved, without empty brackets and spaces before commas."""
    for bracket in ("{{", "}}", "[[", "]]"):  # without a partner; those of <nowiki> are entities still
        line = line.replace(bracket, "")
    line = _SPACES.sub(" ", html.unescape(line).replace("\n", " "))
    for pattern, replacement in _REMAINS:
        line = pattern.sub(replacement, line)
    return line.strip()
