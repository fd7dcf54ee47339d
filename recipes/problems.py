"""Problems of inputs, errors that list all of them at once, and near matches for misspelt words.

Refusals of the system (a full disk, a quota, rights, file handles) become problems with a fix, too.
"""

from __future__ import annotations

import difflib
import errno
import os
import resource
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MOST = 10  # options in a message
_SPACE = {errno.ENOSPC, errno.EDQUOT}
_HANDLES = {errno.EMFILE, errno.ENFILE}
_DEVICE = {errno.EIO, errno.ESTALE}
_MANY_FILES = 65536
_OBEYED = ("Cc", "Cf", "Cs")  # kinds of characters, by Unicode
# names of files in errors of writing there
OUTPUTS = ("standard output", "standard error")
_KNOWN = {
    *_SPACE, *_HANDLES, *_DEVICE, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM,
}  # fmt: skip


def visible(text: str) -> str:
    """Write characters that a screen would obey as escapes, such as \\x1b; line ends stay."""
    shown = []
    for character in text:
        if character != "\n" and unicodedata.category(character) in _OBEYED:
            character = character.encode("unicode_escape").decode()
        shown.append(character)
    return "".join(shown)


class Key(str):
    """A dotted key of the recipe inside a text; a command may show it as its own flag."""


@dataclass(frozen=True)
class Setting:
    """A key of the recipe with its value inside a text: `batch.micro=4`, or a command's own flag."""

    key: str
    value: object

    def __str__(self) -> str:
        return f"{self.key}={self.value}"


Words = str | Key | Setting


Text = Words | tuple[Words, ...]


@dataclass(frozen=True)
class Problem:
    """One fault of a user's input.

    Attributes:
        key: a dotted key of the recipe or of the JSON, a flag or a file, which has to change.
        came: the input.
        rule: the broken rule; "" if `came` says it all.
        fix: advice for the user.
        where: recipe, file or flag of the fault; "" if the other texts name it.
        place: file:line of the key, or its flag.
    """

    key: str
    came: Text
    rule: Text = ""
    fix: Text = ""
    where: str = ""
    place: str = ""

    def __str__(self) -> str:
        return self.render()

    def render(self, show: Callable[[Words], str] = str) -> str:
        """Write the sentence "where: came: rule; fix (place)".

        `show` turns each piece of the texts into the form that this command's user types.
        """
        came, rule, fix = (
            "".join(map(show, pieces(text)))
            for text in (self.came, self.rule, self.fix)
        )
        sentence = ": ".join(part for part in (self.where, came, rule) if part)
        sentence = "; ".join(part for part in (sentence, fix) if part)
        if self.place:
            sentence = f"{sentence} ({self.place})"
        return visible(sentence)

    @property
    def keys(self) -> tuple[str, ...]:
        """The problem's key, and the keys in `came`."""
        keys = [self.key]
        for piece in pieces(self.came):
            if isinstance(piece, Setting):
                keys.append(piece.key)
            elif isinstance(piece, Key):
                keys.append(piece)
        return tuple(keys)


def pieces(text: Text) -> tuple[Words, ...]:
    """Split a text into its pieces."""
    if isinstance(text, tuple):
        return text
    return (text,)


class ProblemsError(ValueError):
    """Several problems of one input, each once and in a line of its own."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        by_line = {str(problem): problem for problem in problems}
        assert by_line, "an error without a problem"
        self.problems = tuple(by_line.values())
        super().__init__("\n".join(by_line))

    @classmethod
    def of(
        cls, key: str, came: Text, rule: Text = "", fix: Text = "", where: str = ""
    ) -> ProblemsError:
        """Make the error of one `Problem`."""
        return cls([Problem(key, came, rule, fix, where)])


class RecipeError(ProblemsError):
    """An unknown or unusable recipe."""


def nearest(
    word: str, options: Iterable[str], count: int = 3, cutoff: float = 0.6
) -> list[str]:
    """Return the options spelt most like `word`, best first; empty if none is close."""
    return difflib.get_close_matches(word, list(options), n=count, cutoff=cutoff)


def did_you_mean(word: str, options: Iterable[str]) -> str:
    """Ask "did you mean heads?", or list at most `MOST` of the options."""
    options = sorted(options)
    near = nearest(word, options)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"there is: {some(options)}" if options else "there is none"


def some(options: Sequence[str], most: int = MOST) -> str:
    """List the first `most` options, and the number of the others."""
    more = len(options) - most
    return ", ".join(options[:most]) + (f" and {more} more" if more > 0 else "")


def uncapitalised(sentence: str) -> str:
    """Write the first letter small."""
    return sentence[:1].lower() + sentence[1:]


def either(words: Iterable[object]) -> str:
    """Join the words as "a, b or c"."""
    *first, last = [str(word) for word in words]
    return f"{', '.join(first)} or {last}" if first else last


ES = ("s", "x", "ch", "sh")


def counted(number: int, thing: str) -> str:
    """Write a count as "1 process", "2 processes", "1,024 warm-up steps"."""
    if number == 1:
        return f"{number:,} {thing}"
    plural = "es" if thing.endswith(ES) else "s"
    return f"{number:,} {thing}{plural}"


def amount(size: float) -> str:
    """Write bytes as "3.73 GB", fewer as "37.3 MB", and more as "1.54 TB"."""
    if size >= 9.995e11:
        terabytes = size / 1e12
        return f"{terabytes:,.0f} TB" if terabytes >= 999.5 else f"{terabytes:.3g} TB"
    if size >= 1e8:
        return f"{size / 1e9:.3g} GB"
    return f"{size / 1e6:.3g} MB"


def take_file_handles(least: int) -> None:
    """Raise this process's limit of open files. Raises ProblemsError if `least` is out of reach."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(least, _MANY_FILES)
    if most != resource.RLIM_INFINITY:
        wanted = min(most, wanted)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    if wanted < least:
        raise ProblemsError.of(
            "ulimit -n",
            f"a process may have {most} files open here",
            f"{least} are needed, for files, threads and connections to other processes",
            f"raise the hard limit: ulimit -Hn {least}",
        )


def system_error(error: BaseException) -> OSError | None:
    """Return the known refusal of the system in an error and its causes, or None."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _KNOWN:
            return cause
        cause = cause.__cause__
    return None


def system_problem(error: OSError, place: Path, elsewhere: str) -> Problem:
    """Turn a refusal of the system into a problem with the file, the free space and the fix.

    `place`: the file, if the error names none; `elsewhere`: advice to name another place.
    """
    path = (
        Path(os.fsdecode(error.filename))
        if isinstance(error.filename, str | bytes)
        else place
    )
    name = str(path)
    said = error.strerror or str(error)
    if error.filename in OUTPUTS:
        return Problem(
            name,
            f"{path} cannot be written ({said})",
            "the command writes there",
            "redirect it to a file on another disk, or to /dev/null",
        )
    if error.errno in _HANDLES:
        came = f"cannot be opened ({said})"
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return Problem(name, came, f"a process may have {most} files open", "raise it: ulimit -n 65536",
                       where=name)  # fmt: skip
    came = f"cannot be opened or written ({said})"
    fix = elsewhere
    if error.errno == errno.EFBIG:
        most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        rule = f"a file may have {most:,} bytes"
        fix = f"raise it (ulimit -f unlimited), or {elsewhere}"
    elif error.errno in _SPACE:
        rule = _free(path)
        fix = f"make room there, or {elsewhere}"
    elif error.errno in _DEVICE:
        rule = "the disk or its server does not answer"
        fix = f"look at dmesg and the mount, or {elsewhere}"
    else:
        rule = "it has to be written"
    return Problem(name, came, rule, fix, where=name)


def existing(path: Path) -> Path:
    """Return the path, or its nearest parent that exists."""
    whole = path.absolute()
    return next(each for each in (whole, *whole.parents) if each.exists())


def _free(path: Path) -> str:
    """Describe the room for this user on the file system of `path`."""
    try:
        facts = os.statvfs(existing(path))
    except OSError:
        return "how much is free is not known"
    free, total = (
        count * facts.f_frsize / 1e6 for count in (facts.f_bavail, facts.f_blocks)
    )
    room = f"{free:,.1f} MB of {total:,.0f} MB are free"
    return f"{room}, and {facts.f_favail:,} more files" if facts.f_files else room
