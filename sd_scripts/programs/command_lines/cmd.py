"""The commands of a batch file for cmd.exe: variables, conditions on constants and lines that go on are followed; nothing is run. What only
a running shell knows stays in the words as it is written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from .common import COMPARISONS, NEXT_OPTION, Block, computed, keep

_SET = re.compile(r"set\s+(?:\"([^=\"]+)=(.*)\"\s*|([^=\"/]+?)=(.*))$", re.IGNORECASE)
_SUM = re.compile(r"set\s+/a\s+\"?(\w+)\s*=\s*([^\"]+)\"?$", re.IGNORECASE)
_IF = re.compile(
    r"(?:else\s+)?if\s+(?P<flags>(?:/i\s+|not\s+)*)"
    r"(?:(?P<asks>exist|defined|errorlevel|cmdextversion)\s+(?P<what>\"[^\"]*\"|\S+)"
    r"|(?P<left>\"[^\"]*\"|[^\s=]+)\s*(?P<how>==|\bequ\b|\bneq\b|\blss\b|\bleq\b|\bgtr\b|\bgeq\b)\s*(?P<right>\"[^\"]*\"|[^\s(]+))\s*",
    re.IGNORECASE,
)
_COMPARED = dict(zip(("equ", "neq", "lss", "leq", "gtr", "geq"), COMPARISONS.values()))


def commands(text: str) -> Iterator[list[str]]:
    """Each command as its words. A caret goes on in the next line, or takes the meaning from a character."""
    variables: dict[str, str] = {}
    blocks: list[Block] = []
    joined = NEXT_OPTION.sub(" ", re.sub(r"\^[ \t]*\n\s*", " ", text))

    def known(found: re.Match[str]) -> str:
        return variables.get(found[1].lower(), found[0])

    for line in joined.split("\n"):
        line = re.sub(r"^\s*@", "", line).strip()
        if not line or re.match(r"(rem\b|::|:\w)", line, re.IGNORECASE):
            continue
        for command in _counting(re.sub(r"!(\w+)!", known, re.sub(r"%([^\s%:]+)%", known, line)), blocks, variables):
            for part in _parts(command):
                certain = all(block.certain for block in blocks)
                if found := _SET.match(part.strip()):
                    name, text = (found[1] or found[3]).strip().lower(), found[2] if found[1] else found[4].strip()
                    keep(variables, name, text, certain)
                elif found := _SUM.match(part.strip()):
                    value = computed(re.sub(r"\b([A-Za-z_]\w*)", known, found[2]))
                    if value is not None:
                        keep(variables, found[1].lower(), value, certain)
                    else:
                        variables.pop(found[1].lower(), None)
                else:
                    yield [word[0].replace('"', "") for word in re.finditer(r'(?:"[^"]*"?|[^\s"])+', part)]


def _counting(line: str, blocks: list[Block], variables: Mapping[str, str]) -> Iterator[str]:
    """The commands of a line that count; blocks has those that are open."""
    while line := line.strip():
        if blocks and (found := re.match(r"\)\s*else\b(?!\s+if\b)\s*", line, re.IGNORECASE)):
            blocks.append(blocks.pop().otherwise())
            line = line[found.end() :]
        elif blocks and (found := re.match(r"\)\s*(?=else\s+if\b)", line, re.IGNORECASE)):
            line = line[found.end() :]
            continue
        elif blocks and line.startswith(")"):
            blocks.pop()
            line = line[1:]
            continue
        elif found := _IF.match(line):
            former = blocks.pop() if found[0].lower().startswith("else") and blocks else None
            blocks.append(Block.asked(_holds(found, variables), former))
            line = line[found.end() :]
        else:
            end = _end_of_block(line) if blocks else len(line)
            command, line = line[:end], line[end:]
            opens = command.rstrip().endswith("(")
            if all(block.counts for block in blocks):
                yield command.rstrip().removesuffix("(") if opens else command
            if opens:
                blocks.append(Block())
            continue
        if line.startswith("("):
            line = line[1:]
        else:
            # One command, without a block.
            if all(block.counts for block in blocks):
                yield line
            blocks.pop()
            return


def _end_of_block(line: str) -> int:
    """Where the bracket stands that ends the block around a command; the line's end without one."""
    quoted = False
    for at, character in enumerate(line):
        quoted ^= character == '"'
        if character == ")" and not quoted and line[at - 1 : at] != "^":
            return at
    return len(line)


def _holds(found: re.Match[str], variables: Mapping[str, str]) -> bool | None:
    """Whether a condition on constants holds; None for one that only a running shell answers."""
    flags, holds = found["flags"].lower(), None
    if found["asks"]:
        name = found["what"].strip('"').lower()
        holds = (variables[name] != "") if found["asks"].lower() == "defined" and name in variables else None
    elif "%" not in found["left"] + found["right"] and "!" not in found["left"] + found["right"]:
        left, right, how = found["left"], found["right"], found["how"].lower()
        if "/i" in flags:
            left, right = left.lower(), right.lower()
        try:
            holds = left == right if how == "==" else _COMPARED[how](float(left.strip('"')), float(right.strip('"')))
        except ValueError:
            holds = {"equ": left == right, "neq": left != right}.get(how)
    return holds if holds is None or "not" not in flags else not holds


def _parts(line: str) -> list[str]:
    """The commands of a line: &, && and | stand between them, except in quotes."""
    parts, piece, quoted, at = [], "", False, 0
    while at < len(line):
        character = line[at]
        if character == '"':
            quoted = not quoted
        if character == "^" and not quoted and at + 1 < len(line):
            piece, at = piece + line[at + 1], at + 2
            continue
        if character in "&|" and not quoted:
            parts.append(piece)
            piece = ""
        else:
            piece += character
        at += 1
    return [part for part in [*parts, piece] if part.strip()]
