"""What the readers of sh, cmd.exe and PowerShell share: blocks of conditions, comparisons, values that only a running shell knows."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self, TypeVar

_Value = TypeVar("_Value")
NEXT_OPTION = re.compile(r"\n\s*(?=--[A-Za-z])")
"""No command begins with two dashes: a line that does goes on with the one before, also where its mark was lost on the way here."""
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
_UNRESOLVED = re.compile(
    r"\$[\w{(@*#?$!]|`|%[^\s%]+%|%~[a-zA-Z]*\d|%%\w|!\w+!|(?<![\w$}])\{[A-Za-z_]\w*\}"
    r"|<[^<>]*(?:\s|path|your|dir|name|file|model|number)[^<>]*>",
    re.IGNORECASE,
)
_START = r"^[ \t]*(?:\w+=\S+[ \t]+)*(?:python[\d.]*|accelerate|deepspeed|torchrun)[ \t]"
_SCRIPT = re.compile(rf"\w\.py\b|{_START}(?:.*[ \t])?-m[ \t]+\w", re.MULTILINE)
_OPTION = re.compile(r"(?:^|[\s\"'(])--[A-Za-z]")
_WITH_SETTINGS = re.compile(rf"{_START}.*\.(?:ya?ml|toml|json)\b", re.MULTILINE)


@dataclass
class Block:
    """One of the blocks of a condition."""

    counts: bool = True
    chosen: bool = True
    """Whether one of its blocks has been chosen."""
    certain: bool = True
    """Whether it is known that the script comes here."""

    @classmethod
    def asked(cls, holds: bool | None, former: Self | None = None) -> Self:
        """That of a condition which holds, does not, or asks for more (None), which is taken; former: the block before an `else if`."""
        before = former is not None and former.chosen
        certain = holds is not None and (former is None or former.certain)
        return cls(holds is not False and not before, before or holds is True, certain)

    def otherwise(self) -> Self:
        """That of its `else`."""
        return replace(self, counts=not self.chosen, chosen=True)


def keep(variables: dict[str, _Value], name: str, value: _Value, certain: bool) -> None:
    """Sets a variable. What may be set otherwise, in a block that nobody knows to be taken, is known no longer."""
    if certain or variables.get(name, value) == value:
        variables[name] = value
    else:
        del variables[name]


def both(decides: bool, one: bool | None, other: bool | None) -> bool | None:
    """Two conditions, of which one that is `decides` decides; None for one that only a running shell answers."""
    if decides in (one, other):
        return decides
    return None if one is None or other is None else not decides


def unresolved(value: object) -> str | None:
    """The part of a value that only a running shell knows; None when there is none."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and (found := _UNRESOLVED.search(text)):
            rest = text[found.start() :]
            alone = re.match(r"\$\w+|\$?\{[^{}]*\}|%[^\s%]+%|!\w+!|<[^<>]*>", rest)
            return (alone[0] if alone else rest)[:40]
    return None


def looks_like(text: str) -> bool:
    """Whether a text may hold a command line: a Python script or module and options with two dashes, or a start of Python with a file of
    settings. kohya_like/web/train/pasted.js asks the same of what is pasted."""
    has_options = _SCRIPT.search(text) is not None and _OPTION.search(text) is not None
    return has_options or _WITH_SETTINGS.search(text) is not None


def computed(text: str) -> str | None:
    """What whole numbers in a sum, a product or a quotient come to; None for anything else."""
    if not re.fullmatch(r"[\d\s()+*/%-]{1,200}", text):
        return None
    try:
        return str(_of_numbers(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _of_numbers(node: ast.AST) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        return -_of_numbers(node.operand) if isinstance(node.op, ast.USub) else _of_numbers(node.operand)
    if isinstance(node, ast.BinOp):
        one, other = _of_numbers(node.left), _of_numbers(node.right)
        if isinstance(node.op, ast.Div | ast.Mod):
            # The shell rounds towards zero.
            whole = abs(one) // abs(other) * (1 if (one < 0) == (other < 0) else -1)
            return whole if isinstance(node.op, ast.Div) else one - other * whole
        operators: dict[type[ast.operator], Callable[[int, int], int]] = {
            ast.Add: operator.add,
            ast.Sub: operator.sub,
            ast.Mult: operator.mul,
        }
        if type(node.op) in operators:
            return operators[type(node.op)](one, other)
    raise ValueError
