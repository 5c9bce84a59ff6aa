"""The one error for what a person got wrong: sentences, all of them at once, no traceback."""

import errno
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MOST_SHOWN = 200
"""Characters of a value that a sentence repeats."""


def shortened(text: str) -> str:
    """A value for a sentence: a very long one by its beginning and its length, and characters that nobody sees by their numbers."""
    seen = text if len(text) <= MOST_SHOWN else f"{text[:80]}… ({len(text):,} characters)"
    return seen if seen.isprintable() else "".join(part if part.isprintable() else ascii(part)[1:-1] for part in seen)


def first_line(err: Exception) -> str:
    """What an error of somebody else's says first, for a sentence."""
    return str(err).strip().split("\n", 1)[0] or type(err).__name__


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. option is the flat name of the field it stands at, or "" for the whole configuration."""

    option: str
    message: str

    def __post_init__(self) -> None:
        # Whatever a sentence repeats: nobody reads thousands of characters without a space.
        object.__setattr__(self, "message", re.sub(r"\S{600,}", lambda word: shortened(word[0]), self.message))

    def __str__(self) -> str:
        return self.message if self.option in self.message else f"{self.option}: {self.message}"


class OptionError(ValueError):
    """A person's mistake: what is wrong, the value, what is allowed, what to do."""

    def __init__(self, problems: str | Problem | list[Problem]) -> None:
        if isinstance(problems, str):
            problems = [Problem("", problems)]
        elif isinstance(problems, Problem):
            problems = [problems]
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))

    def at_options(self) -> list[dict[str, str]]:
        """What is wrong, each sentence with its option, for a page."""
        return [{"option": problem.option, "message": str(problem)} for problem in self.problems]


def refuse(problems: Iterable[Problem]) -> None:
    """Raises OptionError with all problems, each once, if there are any."""
    if each := list(dict.fromkeys(problems)):
        raise OptionError(each)


@contextmanager
def gathering(problems: list[Problem]) -> Iterator[None]:
    """Inside, what an OptionError says joins the other problems, so that all are told at once."""
    try:
        yield
    except OptionError as err:
        problems += err.problems


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def of_disk(err: OSError, place: object = "") -> OptionError:
    """What to say where something could not be read or written; place: where, if the error itself does not know."""
    where = err.filename or place or "the output folder"
    if err.errno in _FULL:
        return OptionError(f"the disk of {where} is full; free some space there, then try again")
    return OptionError(f"{where} cannot be read or written: {err.strerror or err}")
