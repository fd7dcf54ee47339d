"""The text of Wikipedia's templates that belong to a sentence.

Numbers with powers of ten and units, fractions, dates, foreign words, names: `{{val|3|e=8|u=m/s}}` is
"3×10⁸ m/s". `wiki_markup` drops all others (infoboxes, notes, navigation). The text of a template may contain
markup, such as <sup>, which is resolved later. Names are those of the English Wikipedia, without case.
"""

from __future__ import annotations

import calendar
import re
from collections.abc import Callable

_NESTED = 4  # templates within templates that are looked through
# Spaces are counted, or a page of nothing else would take time that grows with the square.
_TEMPLATE = re.compile(r"\{\{\s{0,9}([^{}|\n]{1,40}?)\s{0,9}(?:\|([^{}]*))?\}\}")
_PIPE = re.compile(r"\|(?![^\[\]|]*\]\])")  # not the one of a link
_NAMED = re.compile(r"([\w -]{1,30}?)\s{0,30}=(.*)", re.DOTALL)
_MOST_ARGUMENTS = 32

Named = dict[str, str]
Renderer = Callable[[list[str], Named], str]  # (unnamed arguments, named ones) -> text


def resolve(text: str) -> str:
    """Replace the known templates by their text; all others stay."""
    return until_stable(lambda found: _TEMPLATE.sub(_text_of, found), text, _NESTED)


def until_stable(replace: Callable[[str], str], text: str, most: int) -> str:
    """Replace in a text until nothing changes, at most `most` times."""
    for _ in range(most):
        text, before = replace(text), text
        if text == before:
            break
    return text


def _text_of(match: re.Match[str]) -> str:
    name = match[1].replace("_", " ").lower()
    if name.startswith("formatnum:"):
        return _group_digits(name.removeprefix("formatnum:").strip())
    if name.startswith("lang-"):
        name = "lang-"
    if (shows := _RENDERERS.get(name)) is None:
        return match[0]
    named: Named = {}
    unnamed: list[str] = []
    for part in _PIPE.split(match[2], maxsplit=_MOST_ARGUMENTS) if match[2] is not None else ():
        if found := _NAMED.match(part.strip()):
            named[found[1].lower()] = found[2].strip()
        else:
            unnamed.append(part.strip())
    # {{math|1=x = y}} numbers an argument that holds an equals sign.
    arguments = unnamed or [named[str(k)] for k in range(1, 10) if str(k) in named]
    if not isinstance(shows, str):
        return shows(arguments, named | {"name": match[1]})
    if not (wanted := re.search(r"\{(\d)\}", shows)):
        return shows
    instead = [named["text"]] if wanted[1] == "1" and "text" in named else []
    rest = (arguments or instead)[int(wanted[1]) - 1 :]
    return shows.replace(wanted[0], rest[0]) if rest else ""


def _sup(text: str) -> str:
    return f"<sup>{text}</sup>" if text else ""


def _group_digits(number: str) -> str:
    """Group the digits of a plain number, 1234567.25 -> 1,234,567.25; other text stays."""
    found = re.fullmatch(r"([-−+]?)(\d{5,}|[1-9]\d{3})((?:\.\d+)?(?:\(\d+\))?)", number)
    return f"{found[1]}{int(found[2]):,}{found[3]}" if found else number


def _with_minus(number: str) -> str:
    return number.replace("-", "−")


def _raise_exponents(unit: str) -> str:
    """Raise the exponents of a unit: m2, s-1."""
    return re.sub(r"(?<=[A-Za-z)])([-−+]?\d{1,2})\b", lambda m: _sup(_with_minus(m[1])), unit)


def _value(arguments: list[str], named: Named) -> str:
    """Write {{val|number|uncertainty|or less|e=exponent|u=unit|up=denominator|p=prefix|s=suffix}}."""
    number = _with_minus(_group_digits(arguments[0])) if arguments else ""
    errors = [_group_digits(error) for error in arguments[1:3]]
    if len(errors) == 2:
        number += f"+{errors[0].lstrip('+')}−{errors[1].lstrip('-−')}"
    elif errors and errors[0]:
        number += errors[0] if errors[0].endswith(("%", ")")) else f"±{errors[0]}"
    if power := named.get("e"):
        number = f"({number})" if "±" in number or len(errors) == 2 else number
        number += ("×" if number else "") + f"10{_sup(_with_minus(power))}"
    unit, below = (named.get(key) or named.get(f"{key}l") or "" for key in ("u", "up"))
    unit = _raise_exponents(unit) + (f"/{_raise_exponents(below)}" if below else "")
    close = not unit or (unit[0] in "°%" and unit not in ("°C", "°F"))
    return "".join((named.get("p", ""), number, named.get("s", ""), "" if close else " ", unit))


_RANGES = {word: f" {word} " for word in ("to", "and", "or", "by", "×", "±", "to about")}
_RANGES |= {"x": " × ", "xx": " × ", "*": " × ", "-": "–", "–": "–", "+/-": " ± "}
_RANGES |= {"to(-)": " to ", "and(-)": " and "}
_UNITS = {"c": "°C", "f": "°F", "foot": "feet", "floz": "fl oz", "kph": "km/h", "sqkm": "km2"}
_UNITS |= {f"{power}{unit}": f"{power} {unit}" for power in ("sq", "cu") for unit in ("mi", "ft", "yd", "in")}
_UNITS |= {"shortton": "short tons", "longton": "long tons"}
_PART_OF = {"ft": "in", "foot": "in", "yd": "ft", "mi": "yd", "lb": "oz", "st": "lb"}


def _first_measure(arguments: list[str], named: Named) -> str:
    """Write the measure of {{convert|5|to|10|km|mi}} in its first unit, without the conversion."""
    shown, left = "", list(arguments)
    while left:
        shown += _group_digits(left.pop(0))
        if not left or left[0].lower() not in _RANGES:
            break
        shown += _RANGES[left.pop(0).lower()]
    if not left:
        return shown
    unit = left.pop(0)
    written = _raise_exponents(_UNITS.get(unit.lower(), unit) if unit not in ("c", "f") else unit)
    if len(left) > 1 and left[1] == _PART_OF.get(unit):  # 5 ft 9 in
        return f"{shown} {written} {left[0]} {left[1]}"
    return f"{shown}{'-' if named.get('adj') == 'on' else ' '}{written}"


def _fraction(arguments: list[str], named: Named) -> str:
    """Write {{frac|whole|part|of}}, {{frac|part|of}} or {{frac|of}}."""
    if not arguments:
        return ""
    whole, part, of = (["", "1"] + arguments)[-3:] if len(arguments) == 1 else ([""] + arguments)[-3:]
    return f"{whole} {part}/{of}".strip()


def _formula(arguments: list[str], named: Named) -> str:
    """Write {{chem|SO|4|2-}} or {{chem2|SO4(2-)}}: numbers lowered, charges raised."""
    if len(arguments) == 1:  # of chem2: a charge is in brackets or ends it
        charges = r"\((\d*[+−-])\)|(?<=[\w\])])([+−-])$"
        text = re.sub(charges, lambda m: _sup(_with_minus(m[1] or m[2])), arguments[0])
        return re.sub(r"(?<=[A-Za-z)\]])(\d+)", r"<sub>\1</sub>", text)
    shown = ""
    for part in arguments:
        charge, number = re.fullmatch(r"\d*[+−-]", part), part.isdigit()
        shown += _sup(_with_minus(part)) if charge else f"<sub>{part}</sub>" if number else part
    return shown


def _date(arguments: list[str], named: Named) -> str:
    """Write a date of a year and perhaps month and day, as numbers: "May 5, 2010"; df=yes: "5 May 2010"."""
    parts = [part for part in arguments[:3] if part]
    if len(parts) > 1 and parts[1].isdigit() and 1 <= int(parts[1]) <= 12:
        parts[1] = calendar.month_name[int(parts[1])]
    if len(parts) < 3:
        return " ".join(reversed(parts))
    year, month, day = parts
    day = day.lstrip("0")
    return f"{day} {month} {year}" if named.get("df", "no").startswith("y") else f"{month} {day}, {year}"


def _as_of(arguments: list[str], named: Named) -> str:
    word = "since" if named.get("since") else "as of"
    small = named.get("lc") or named["name"][:1].islower()
    return f"{word if small else word.capitalize()} {_date(arguments, named)}" if arguments else ""


def _foreign_name(arguments: list[str], named: Named) -> str:
    """Write {{nihongo|Tokyo|東京|Tōkyō}}."""
    inside = ", ".join(filter(None, arguments[1:3]))
    first = arguments[0] if arguments else ""
    return f"{first} ({inside})" if first and inside else first or inside


def _ship(arguments: list[str], named: Named) -> str:
    """Write {{USS|Enterprise|CVN-65}}; {{ship|HMS|Hood}} brings its own prefix."""
    prefix = [] if named["name"].lower() == "ship" else [named["name"].upper()]
    start, name, number = (prefix + arguments + ["", "", ""])[:3]
    return f"{start} {name}".strip() + (f" ({number})" if number else "")


_PATTERNS = {  # text, with {1} for the first argument: templates
    "{1}": "nowrap|nobr|nobreak|nowr|nwr|awrap|small|smaller|big|larger|abbr|tooltip|abbrlink|mvar|math|var|"
    "em|strong|dfn|smallcaps|sc|sc2|underline|u|mono|code|tt|noitalic|not a typo|proper name|linktext|"
    "overline|nts|visible anchor|vanchor|ill|interlanguage link|lang-|sic|flag|flagu|flagcountry|angbr",
    "{2}": "langx",
    "<sup>{1}</sup>": "sup",
    "<sub>{1}</sub>": "sub",
    "&#124;{1}&#124;": "abs",
    "√{1}": "sqrt|radic",
    "fl. {1}": "floruit|fl.",
    "US${1}": "usd|us$",
    "£{1}": "gbp|£",
    "€{1}": "eur|€|euro",
    "₹{1}": "inr|₹",
    "¥{1}": "jpy|¥|yen",
    "No. {1}": "no.|numero",
    "lit. '{1}'": "lit|lit.|literal translation|literally",
    "'{1}'": "gloss",
    '"{1}"': '"',
    " – ": "snd|spaced ndash|spaced en dash|dash",
    "–": "ndash|en dash|–",
    " — ": "spaced mdash|smd",
    "—": "mdash|em dash|emdash|—",
    " ": "nbsp|spaces|space|thinsp|thin space|hair space|hairsp",
    "": "zwsp|shy|wbr",
    " · ": "·|middot|dot|bullet|bull|•",
    "π": "pi",
    "=": "=",
    "'": "'",
    "'s": "'s",
    "ʻ": "okina|ʻokina",
    "ʾ": "hamza",
    "ʿ": "ayin",
    "♯": "sharp",
    "♭": "flat",
    "♮": "natural",
    "×": "times",
    "−": "minus",
    "+": "plus",
    "†": "dagger|†",
    "°": "degree|deg|°",
}
_ACCIDENTALS = {"sharp": "♯", "#": "♯", "flat": "♭", "b": "♭", "natural": "♮"}
_FUNCTIONS: dict[str, Renderer] = {  # a: the unnamed arguments, n: the named ones
    # A code alone shows nothing.
    "lang|transl|transliteration|wikt-lang|color|font color|resize": lambda a, n: a[-1] if a[1:] else "",
    "quote|blockquote|bquote|cquote|quotation|bq|poemquote": lambda a, n: (
        n.get("text") or n.get("quote") or "".join(a[:1])
    ),
    "val": _value,
    "convert|cvt": _first_measure,
    "frac|fraction|sfrac|tfrac": _fraction,
    "e|x10^|xe|×10^": lambda a, n: f"×10{_sup(_with_minus(a[0]))}" if a else "",
    "10^": lambda a, n: f"10{_sup(_with_minus(a[0]))}" if a else "",
    "su": lambda a, n: f"<sub>{n.get('b', '')}</sub>{_sup(n.get('p', ''))}",  # {{su|p=above|b=below}}
    "chem|chem2": _formula,
    "gaps": lambda a, n: "".join(a),
    "hlist|unbulleted list|ubl|ublist": lambda a, n: ", ".join(filter(None, a)),
    "key press|keypress": lambda a, n: "+".join(filter(None, a)),
    "circa|c.|ca.": lambda a, n: " – ".join(f"c. {year}" for year in a[:2] if year),
    "reign|r.": lambda a, n: f"r. {'–'.join(filter(None, a[:2]))}" if a else "",
    "as of": _as_of,
    "start date|end date|birth date|death date|birth date and age|start date and age": _date,
    "nihongo|nihongo2|nihongo3|korean": _foreign_name,
    "ship|uss|hms|ss|rms|hmas|hmcs|mv|sms": _ship,
    "height": lambda a, n: " ".join(f"{n[unit]} {unit}" for unit in ("m", "cm", "ft", "in") if n.get(unit)),
    "±|+-|plus-minus": lambda a, n: "+{}−{}".format(*a[:2]) if a[1:] else "±" + "".join(a),
    "music": lambda a, n: _ACCIDENTALS.get(a[0].lower(), "") if a else "",
}
_RENDERERS: dict[str, str | Renderer] = {
    name: shown for shown, names in _PATTERNS.items() for name in names.split("|")
}
_RENDERERS |= {name: shows for names, shows in _FUNCTIONS.items() for name in names.split("|")}
