"""The findings of checks of a machine or a launch, and the loop over the checks."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from recipes.problems import Problem, ProblemsError, pieces

Verdict = Literal["ok", "warning", "failed", "not checked"]


@dataclass(frozen=True)
class Check:
    """The finding of a check, one line.

    Attributes:
        key: subject of the check, e.g. "port"; "" until `run` sets it.
        verdict: `failed` will break a run; `warning` may, or costs speed or results; `not checked`: the
            reason is in `found`.
        found: the state found, and the rule that it breaks.
        fix: the way to mend it, or "".
    """

    key: str
    verdict: Verdict
    found: str
    fix: str = ""


Function = Callable[[], "Check | Iterable[Check]"]


def ok(found: str) -> Check:
    return Check("", "ok", found)


def warning(found: str, fix: str = "") -> Check:
    return Check("", "warning", found, fix)


def failed(found: str, fix: str = "") -> Check:
    return Check("", "failed", found, fix)


def unchecked(why: str) -> Check:
    return Check("", "not checked", why)


def run(functions: Mapping[str, Function]) -> list[Check]:
    """Return the findings of all functions in their order; an exception becomes a failed finding."""
    found = list[Check]()
    for key, function in functions.items():
        found += (dataclasses.replace(check, key=key) for check in _findings(function))
    return found


def _findings(function: Function) -> Iterable[Check]:
    try:
        found = function()
        return [found] if isinstance(found, Check) else list(found)
    except ProblemsError as error:
        return refused(error.problems)
    except OSError as error:
        told = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return [failed(f"the system refuses it ({told[:200]})")]
    except Exception as error:  # a broken check must not end the others
        at = traceback.extract_tb(error.__traceback__)[-1]
        told = " ".join(str(error).split())[:200]
        came = f"the check itself broke: {type(error).__name__}: {told} ({at.name}, line {at.lineno})"
        return [failed(came, "report this line; the other checks hold without it")]


def refused(problems: Iterable[Problem]) -> list[Check]:
    """Turn each problem into a failed check."""
    bare = ((dataclasses.replace(problem, fix=""), problem.fix) for problem in problems)
    return [failed(str(found), "".join(map(str, pieces(fix)))) for found, fix in bare]


def refuse(checks: Sequence[Check]) -> None:
    """Check that no check failed. Raises ProblemsError with all that did."""
    broken = [check for check in checks if check.verdict == "failed"]
    if broken:
        raise ProblemsError(
            Problem(check.key, check.found, "", check.fix) for check in broken
        )
