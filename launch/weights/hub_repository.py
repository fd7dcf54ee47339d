"""A model's repository on the Hugging Face hub, for an export."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token

from launch.ranks import ending
from recipes.problems import Problem, ProblemsError, some

FLAG = "--push"
# files that the hub itself puts into a new repository
OF_THE_HUB = {".gitattributes"}
MESSAGE = "Export of megarecipes"


@dataclass(frozen=True)
class Repository:
    """An empty repository.

    Attributes:
        name: USER/NAME.
        address: its page, and who sees it.
        head: its newest commit; the hub takes a push only onto this one.
    """

    name: str
    address: str
    head: str | None

    def push(self, directory: Path) -> None:
        """Push every file of the directory in one commit. Raises Failed."""
        files = sorted(directory.iterdir())
        added = [CommitOperationAdd(file.name, file) for file in files]
        try:
            HfApi().create_commit(
                self.name, added, commit_message=MESSAGE, parent_commit=self.head
            )
        # huggingface_hub and its HTTP library each raise their own
        except Exception as error:
            came = (
                f"{directory} is exported and checked, and not pushed to {self.address}"
            )
            fix = f"push it with: hf upload {self.name} {directory}"
            raise ending.Failed(f"{came}: {_said(error)}; {fix}") from error


def opened(name: str) -> Repository:
    """Make a private repository, or take one that is there and empty.

    Raises ProblemsError: a name that the hub does not take, no token, files in the repository, or a refusal
    of the hub, such as that of a token without the right to write.
    """
    came = f"{FLAG} {name}"
    problems = []
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name, re.ASCII):
        rule = "a repository is called USER/NAME, of letters, digits, -, _ and ."
        problems.append(Problem(FLAG, came, rule, f"give {FLAG} USER/NAME"))
    if not get_token():
        fix = "set HF_TOKEN to one that may write, or log in with: hf auth login"
        problems.append(Problem(FLAG, came, "no token of the hub is there", fix))
    if problems:
        raise ProblemsError(problems)
    hub = HfApi()
    try:
        page = hub.create_repo(name, private=True, exist_ok=True)
        found = hub.model_info(name)
    except Exception as error:
        fix = "check the name, the token's right to write, and the network"
        raise ProblemsError.of(FLAG, came, _said(error), fix) from error
    files = {each.rfilename for each in found.siblings or ()}
    held = sorted(files - OF_THE_HUB)
    if held:
        rule = f"holds {some(held)}: nothing is overwritten or mixed"
        raise ProblemsError.of(FLAG, came, rule, "name a new repository")
    seen_by = "private" if found.private else "public"
    return Repository(name, f"{page} ({seen_by})", found.sha)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}"
