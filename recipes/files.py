"""Readers of all files of users and runs: of bounded size, UTF-8, and checked in their form.

Every fault of a file is a `FileError` with its name, and the line if there is one. The file cannot be read,
is no ordinary file (a pipe would hang), is too large, not UTF-8, not JSON, or nested too deeply for later
libraries. Or it holds values that only Python accepts: NaN, integers of thousands of digits, halves of a
surrogate pair.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

from pydantic import TypeAdapter, ValidationError

from recipes.problems import Problem, ProblemsError, uncapitalised

T = TypeVar("T")

MIB = 2**20
MOST_TEXT = 16 * MIB  # bytes of a file that people write, or of a run's facts
MOST_VALUES = 100_000  # of a file that people write; the largest table here has 3000
MOST_DEPTH = 50  # objects and lists within each other
MOST_BITS = 1024  # of an integer; Python itself refuses texts of much longer ones
MOST_HEADER = 100_000_000  # bytes of a safetensors header, by its format
# Bits of an element, by the names of safetensors.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip


class FileError(ProblemsError):
    """An unusable file. The message has its name, the line if there is one, the rule and the fix."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor's entry in the header of a safetensors file; `start` and `end` are bytes within the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def refuse(
    where: str | Path, came: str, rule: str = "", fix: str = "", line: int | None = None
) -> NoReturn:
    """Raise a FileError about the file `where`, at `line` from 1."""
    place = str(where) if line is None else f"{where}:{line}"
    raise FileError.of(str(where), came, rule, fix, where=place)


def path_of(text: str | Path, where: str) -> Path:
    """Return a user's path with "~" spelt out. Raises FileError for the home of an unknown user."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        refuse(where, str(text)[:100], str(error), "write the path out")


def check_names(what: str, names: Iterable[str | Path]) -> None:
    """Check that names are UTF-8, as records and reports keep them. Raises ProblemsError with all others."""
    problems = []
    for name in map(str, names):
        try:
            name.encode()
        except UnicodeEncodeError:
            problems.append(
                Problem(
                    what,
                    f"{what} {ascii(name)} is not UTF-8",
                    "records and reports keep names as text",
                    "rename it",
                )
            )
    if problems:
        raise ProblemsError(problems)


def is_file(path: Path) -> bool:
    """Check that there is a file; also True where only reading it can tell the fault."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # no permission, a name too long, a NUL
        return True


def read_text(path: Path, most: int = MOST_TEXT) -> str:
    """Read a text file of at most `most` bytes, without its byte-order mark. Raises FileError."""
    content = read_part(path, 0, most + 1)
    if len(content) > most:
        refuse(
            path,
            f"has more than {most / MIB:.0f} MiB",
            "no such file is that large",
            "is it the right one?",
        )
    return decode(content, path)


def read_part(path: Path, start: int, length: int) -> bytes:
    """Read at most `length` bytes of an ordinary file from byte `start` on. Raises FileError."""
    with _opened(path) as file:
        file.seek(start)
        left = os.fstat(file.fileno()).st_size - start
        # which takes memory for all that it is asked for
        return file.read(min(length, max(0, left)))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open an ordinary file; errors of the system become a FileError."""
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            refuse(path, "is a directory", "a file is needed here", "name the file")
        if not stat.S_ISREG(kind):
            refuse(
                path,
                "is no ordinary file",
                "pipes and devices are not read",
                "save it as a file",
            )
        with path.open("rb") as file:
            yield file
    except FileNotFoundError:
        refuse(path, "no such file")
    except ProblemsError:
        raise
    except OSError as error:
        refuse(path, "cannot be read", error.strerror or str(error))
    except ValueError as error:  # a NUL in its name
        refuse(repr(str(path)), "cannot be read", str(error))


def decode(content: bytes, where: str | Path, line: int | None = None) -> str:
    """Decode UTF-8. Raises FileError."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = line or content.count(b"\n", 0, error.start) + 1
        refuse(
            where,
            f"not UTF-8 at byte {error.start}",
            fix="save the file as UTF-8",
            line=line,
        )


def read_json(path: Path, most: int = MOST_TEXT) -> Any:
    """Read the value in a JSON file. Raises FileError."""
    return parse_json(read_text(path, most), path)


def read_settings(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file that people write. Raises FileError."""
    value = read_json_object(path)
    for number, _ in enumerate(nested(value)):
        if number >= MOST_VALUES:
            refuse(
                path,
                f"holds more than {MOST_VALUES} values",
                "no such file has more",
                "is it the right one?",
            )
    return value


def nested(value: Any) -> Iterator[Any]:
    """Yield a value and all that lie in it, but for keys."""
    waiting = [value]
    for each in waiting:  # which grows
        yield each
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each


def read_json_object(path: Path, most: int = MOST_TEXT) -> dict[str, Any]:
    """Read the object in a JSON file. Raises FileError."""
    value = read_json(path, most)
    if not isinstance(value, dict):
        refuse(path, f"holds {named_kind(value)}", "an object, {...}, is needed here")
    return value


def lines_of(path: Path, most: int) -> Iterator[tuple[int, bytes]]:
    """Yield the number, from 1, and the bytes of every line, with its end. Raises FileError."""
    with _opened(path) as file:
        for number in itertools.count(1):
            line = file.readline(most + 1)
            if len(line) > most:
                refuse(
                    path,
                    f"a line of more than {most / MIB:.0f} MiB",
                    "no line of such a file is that long",
                    line=number,
                )
            if not line:
                return
            yield number, line


def parse_json(text: str, where: str | Path, line: int | None = None) -> Any:
    """Parse a JSON text and refuse a key that stands twice. `line`: of the text in the file.

    Raises FileError with line and column.
    """
    if not text.strip():
        refuse(where, "is empty", "JSON holds a value", line=line)
    try:
        value = json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_no_constant, parse_int=_integer,
            parse_float=_finite,
        )  # fmt: skip
    except json.JSONDecodeError as error:
        _refuse_malformed(text, where, line, error)
    except KeyError as error:
        written = json.dumps(error.args[0])
        at = [
            number for number, each in enumerate(text.split("\n"), 1) if written in each
        ]
        came = f"key {written} stands twice in one object"
        if line is None and len(at) > 1:
            came += f" (lines {', '.join(map(str, at))})"
        refuse(
            where,
            came,
            "JSON readers keep one of them silently",
            "remove the other",
            line or (at[-1] if at else None),
        )
    except RecursionError:
        _refuse_depth(where, line)
    except ValueError as error:  # of the hooks
        refuse(where, str(error), "JSON has finite numbers", "write one", line)
    check_value(value, where, line)
    return value


def checked(
    form: TypeAdapter[T], value: Any, where: str | Path, line: int | None = None
) -> T:
    """Check a value against its form and return it. Raises FileError: missing keys, or the first fault."""
    try:
        return form.validate_python(value)
    except ValidationError as error:
        wrong = error.errors()
    keys = []
    missing = []
    for each in wrong:
        key = ascii(".".join(map(str, each["loc"])))[1:-1]
        keys.append(key[:100])
        if each["type"] == "missing":
            missing.append(key[:100])
    if missing:
        refuse(where, f"has no {', '.join(missing)}", line=line)
    said = repr(wrong[0]["input"])
    refuse(
        where,
        f"{keys[0]}={said if len(said) <= 60 else said[:60] + '...'}",
        uncapitalised(wrong[0]["msg"]),
        line=line,
    )


def check_value(value: Any, where: str | Path, line: int | None = None) -> None:
    """Refuse values nested too deeply, huge integers, and texts that are no Unicode."""
    waiting = [(value, 1)]
    while waiting:
        each, depth = waiting.pop()
        if isinstance(each, (dict, list)):
            if depth > MOST_DEPTH:
                _refuse_depth(where, line)
            below = [*each, *each.values()] if isinstance(each, dict) else each
            waiting += [
                (child, depth + 1)
                for child in below
                if isinstance(child, dict | list | str | int)
            ]
        elif isinstance(each, int) and each.bit_length() > MOST_BITS:
            refuse(
                where,
                f"an integer of {each.bit_length()} bits",
                f"none has more than {MOST_BITS}",
                line=line,
            )
        elif isinstance(each, str) and not each.isascii():
            try:
                each.encode()
            except UnicodeEncodeError:
                refuse(
                    where,
                    f"a text with half of a surrogate pair, {ascii(each)[:60]}",
                    "it stands for no character",
                    "remove it",
                    line,
                )


def named_kind(value: Any) -> str:
    """Return the name of a JSON or YAML value's kind: a list, an object, a text, ..."""
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a truth value",
        type(None): "nothing",
    }
    return kinds.get(
        type(value), "a number" if isinstance(value, (int, float)) else "a value"
    )


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """Read the entries of a safetensors file's tensors by their names, without their numbers.

    Checks the format's rules (https://github.com/huggingface/safetensors, "Format"): the tensors fill the
    rest of the file without a gap, each with the bytes of its shape and type.

    Raises FileError.
    """
    first = read_part(path, 0, 8)
    size = path.stat().st_size
    length = int.from_bytes(first, "little")
    data = 8 + length  # where the numbers begin
    fix = "copy or download the file again"
    if len(first) < 8 or not 2 <= length <= MOST_HEADER or data > size:
        refuse(
            path,
            f"is no safetensors file, or a damaged one ({size} bytes)",
            "a safetensors file begins with the length of its header, then the header",
            fix,
        )
    header = parse_json(decode(read_part(path, 8, length), path), path, 1)
    if not isinstance(header, dict):
        refuse(
            path, f"its header is {named_kind(header)}", "it maps names to tensors", fix
        )
    header.pop("__metadata__", None)
    tensors = {
        name: _stored_tensor(path, name, entry, data) for name, entry in header.items()
    }
    position = data
    for name, tensor in sorted(
        tensors.items(), key=lambda item: (item[1].start, item[1].end)
    ):
        if tensor.start != position:
            refuse(
                path,
                f"tensor {name} begins at byte {tensor.start}",
                f"it has to at {position}",
                fix,
            )
        position = tensor.end
    if position != size:
        refuse(
            path,
            f"has {size} bytes, and its header tells of {position}",
            "it is cut off or damaged",
            fix,
        )
    return tensors


def _stored_tensor(path: Path, name: str, entry: Any, data: int) -> StoredTensor:
    """Check a tensor's entry in the header; `data`: byte at which the numbers begin."""
    try:
        dtype = entry["dtype"]
        shape = entry["shape"]
        start, end = entry["data_offsets"]
        whole = all(type(n) is int and 0 <= n < 2**63 for n in (*shape, start, end))
        if whole and end - start == math.prod(shape) * DTYPE_BITS[dtype] // 8:
            return StoredTensor(dtype, tuple(shape), data + start, data + end)
    except (KeyError, TypeError, ValueError):
        pass
    refuse(
        path,
        f"tensor {name} is described by {json.dumps(entry)[:100]}",
        "type, shape and place of a tensor agree",
        "copy or download the file again",
    )


def _refuse_depth(where: str | Path, line: int | None) -> NoReturn:
    refuse(
        where,
        "is nested too deeply",
        f"objects and lists lie within at most {MOST_DEPTH} others",
        "is it the right file?",
        line,
    )


def _refuse_malformed(
    text: str, where: str | Path, line: int | None, error: json.JSONDecodeError
) -> NoReturn:
    lines = text.split("\n")
    shown = lines[error.lineno - 1].strip() if error.lineno <= len(lines) else ""
    shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
    reason = uncapitalised(error.msg)
    hint = _foreign_word(text, error.pos)
    if not hint and ("property name" in reason or "expecting value" in reason):
        hint = "is there a comma too many?"
    refuse(
        f"{where}:{line or error.lineno}:{error.colno}",
        "not JSON",
        f"{reason}: {shown!r}",
        hint,
    )


def _foreign_word(text: str, place: int) -> str:
    """Tell what stands at a place where JSON has no such thing; "" if that is unknown."""
    rest = text[place:].lstrip()
    if rest.startswith(("//", "#", "/*")):
        return "JSON has no comments"
    if rest.startswith("'"):
        return 'JSON writes texts in "double quotation marks"'
    if not text.lstrip().startswith(("{", "[")) and re.match(
        r"(---|[\w.\-]+:(\s|$))", text.lstrip()
    ):
        return 'is it YAML? JSON writes {"key": value}'
    python = re.match("True|False|None", rest)
    if python:
        own = {"True": "true", "False": "false", "None": "null"}[python[0]]
        return f"{python[0]} is Python's word: JSON writes {own}"
    word = re.match(r"[$<{%@]*[A-Za-z_][\w.\-]*[>%@]*", rest)
    if not word:
        return ""
    if re.match(r"\s*:", rest[word.end() :]):
        return f'JSON writes keys in "double quotation marks": "{word[0]}"'
    return f"{word[0]} is a placeholder that a script has to fill: write its value"


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object. Raises KeyError: a key stands in it twice."""
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise KeyError(key)
        values[key] = value
    return values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _integer(digits: str) -> int:
    if len(digits) > MOST_BITS:
        raise ValueError(f"an integer of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"{digits[:40]} is beyond all floating-point numbers")
    return value
