"""The one error for what a person got wrong: sentences, all of them at once, no traceback."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong. option is the flat name of the field it stands at, or "" for the whole configuration."""

    option: str
    message: str

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
