"""The commands of a PowerShell script: variables, lists, expressions of constants, conditions and lines that go on are followed; nothing is
run. What only a running shell knows stays in the words as it is written."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .common import COMPARISONS, NEXT_OPTION, Block, both


@dataclass(frozen=True)
class _Number:
    """A number as it is written."""

    text: str


@dataclass(frozen=True)
class _Unknown:
    """What only a running shell knows, with the parts of it that a script says put in."""

    text: str


@dataclass(frozen=True)
class _Unset(_Unknown):
    """A variable that nothing sets, which is nothing in a condition."""


_Constant = str | bool | _Number | _Unknown | None
_Value = _Constant | list[str]
_Variables = dict[str, _Value]


@dataclass
class _Block(Block):
    """What stands in braces."""

    target: str = ""
    """The variable that its value is for, as in `$x = if (...) { 1 }`."""
    switched: _Value = ""
    """What the labels in it are compared with."""
    is_switch: bool = False


_VARIABLE = r"\$(?:\{(?:\w+:)?\w+\}|(?:\w+:)?\w+)"
_NAME = re.compile(r"\$\{?(?:\w+:)?(\w+)\}?")
_SETTING = re.compile(rf"^(?:\[[\w.\[\]]+\]\s*)?({_VARIABLE})\s*(\+?)=\s*(.*)$", re.DOTALL)
_LISTS = r"[\w.]*(?:ArrayList|List\[\w+\])"
_LIST = re.compile(rf"^(?:\[{_LISTS}\]::new\(\)|New-Object\s+{_LISTS}(?:\(\))?)$", re.IGNORECASE)
_ADDED = re.compile(r"^(?:\[void\])?\s*\(?\$(\w+)\.Add(?=\()", re.IGNORECASE)
_CONDITION = re.compile(rf"^(?:({_VARIABLE})\s*=\s*)?(if|elseif)\s*\((.*)\)$", re.IGNORECASE | re.DOTALL)
_SWITCH = re.compile(r"^switch\s*(?:-\w+\s*)*\((.*)\)$", re.IGNORECASE | re.DOTALL)
_LOOP = re.compile(r"^foreach\s*\(\s*\$(\w+)\s+in\b", re.IGNORECASE)
_PARAMETERS = re.compile(r"^param\s*\((.*)\)$", re.IGNORECASE | re.DOTALL)
_GOES_ON = re.compile(r"(?:[+,|]|-(?:and|or))$", re.IGNORECASE)
_QUOTED = re.compile(r"'(?:[^']|'')*'?|\"(?:[^\"`]|`.|\"\")*\"?", re.DOTALL)


def commands(text: str) -> Iterator[list[str]]:
    """Each command as its words. Of conditions on constants the branch is taken that holds; of others each."""
    variables: _Variables = {}
    blocks: list[_Block] = []
    following, ended = _Block(), _Block(chosen=False)
    for statement in _statements(text):
        live = all(block.counts for block in blocks)
        if statement == "{":
            blocks.append(following)
            following = _Block()
        elif statement == "}":
            ended = blocks.pop() if blocks else _Block(chosen=False)
        elif blocks and blocks[-1].is_switch:
            following = _label(blocks[-1], statement, variables)
        elif found := _CONDITION.match(statement):
            former = ended if found[2].lower() == "elseif" else None
            following = _Block.asked(_truth(_value(found[3], variables)) if live else None, former)
            following.target = _NAME.sub(r"\1", found[1]).lower() if found[1] else former.target if former else ""
        elif statement.lower() == "else":
            following = ended.otherwise()
        elif found := _SWITCH.match(statement):
            following = _Block(switched=_value(found[1], variables), is_switch=True, chosen=False)
        elif statement.lower().startswith(("catch", "trap")):
            following = _Block(counts=False)
        elif found := _LOOP.match(statement):
            variables[found[1].lower()] = _Unknown(f"${found[1]}")
            following = _Block(certain=False)
        elif live and blocks and blocks[-1].target:
            variables[blocks[-1].target] = _value(statement, variables)
        elif live:
            yield from _kept(statement, variables, all(block.certain for block in blocks))


def _label(switch: _Block, statement: str, variables: _Variables) -> _Block:
    """The block of one of a switch's labels."""
    if statement.lower() == "default":
        return _Block(not switch.chosen)
    holds = _truth(_compared("eq", switch.switched, _value(statement, variables)))
    switch.chosen |= holds is True
    return _Block(holds is not False, certain=holds is not None)


def _statements(text: str) -> Iterator[str]:
    """Pieces between line ends, semicolons and braces, and the braces; none of which count in quotes and in brackets."""
    text = re.sub(r"<#.*?#>", "", text, flags=re.DOTALL)
    text = re.sub(r"@(['\"])[ \t]*\n.*?\n\1@", "''", text, flags=re.DOTALL)
    # A backtick goes on in the next line.
    text = NEXT_OPTION.sub(" ", re.sub(r"`(?:[ \t]+#[^\n]*|[ \t]*)\n", " ", text))
    piece, depth, at = "", 0, 0
    while at < len(text):
        character = text[at]
        if character in "'\"" and (quoted := _QUOTED.match(text, at)):
            piece, at = piece + quoted[0], quoted.end()
            continue
        if character == "`":
            piece, at = piece + text[at : at + 2], at + 2
            continue
        # In an expression a quote ends its word, in a command it does not.
        if character == "#" and (not piece or piece[-1].isspace() or depth or (piece[-1] in "'\")" and _SETTING.match(piece.lstrip()))):
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
            continue
        braced = character in "{}" and not re.search(r"[$@]\{?[\w:]*$", piece)
        depth = max(depth + {"(": 1, ")": -1}.get(character, 0), 0)
        if depth == 0 and (character in "\n;" or braced) and not (character == "\n" and _GOES_ON.search(piece.rstrip())):
            yield from (one for one in (piece.strip(), character if braced else "") if one)
            piece = ""
        else:
            piece += character
        at += 1
    if piece.strip():
        yield piece.strip()


def _kept(statement: str, variables: _Variables, certain: bool = True) -> Iterator[list[str]]:
    """The words of each command in a statement; none for what only sets variables, which are kept. What may be set otherwise, in a branch
    that nobody knows to be taken, is known no longer."""
    if found := _PARAMETERS.match(statement):
        for one in _split(found[1], ","):
            given = re.sub(r"^(?:\s*\[[^\]]*(?:\([^)]*\))?\])*\s*", "", one)
            if _SETTING.match(given):
                yield from _kept(given, variables)
    elif found := _SETTING.match(statement):
        name, value = _NAME.sub(r"\1", found[1]).lower(), found[3].strip()
        now: _Value = [] if _LIST.match(value) else _value(value, variables)
        after = _sum(variables.get(name), now) if found[2] else now
        before = variables.get(name, _Unset(""))
        if not certain and not found[2] and before != after and not isinstance(after, list):
            after = _Unknown(_text(after) if isinstance(before, _Unset) else f"${name}")
        variables[name] = after
    elif found := _ADDED.match(statement):
        if isinstance(added := variables.get(found[1].lower()), list):
            rest = statement[found.end() :]
            added += _texts(_value(rest[1 : _closed(rest) - 1], variables))
    else:
        for part in _split(statement, "|", "&&", "||"):
            words = _words(part, variables)
            if words and words[0].lower() in ("invoke-expression", "iex"):
                words = _words(" ".join(words[1:]), variables)
            yield [word for word in words if word not in ("&", ".")]


def _split(text: str, *marks: str) -> list[str]:
    """Pieces between marks that stand in no quotes and brackets."""
    pieces, piece, depth, at = [], "", 0, 0
    while at < len(text):
        quoted = _QUOTED.match(text, at)
        mark = next((mark for mark in sorted(marks, key=len, reverse=True) if text.startswith(mark, at)), "")
        if quoted or text[at] == "`":
            one = quoted[0] if quoted else text[at : at + 2]
            piece += one
        elif mark and depth == 0:
            one = mark
            pieces.append(piece)
            piece = ""
        else:
            one = text[at]
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(one, 0)
            piece += one
        at += len(one)
    return [one for one in [*pieces, piece] if one.strip()]


# --- words of a command ----------------------------------------------------------------------------------------------


def _words(line: str, variables: _Variables) -> list[str]:
    words: list[str] = []
    piece, given, at = "", False, 0
    while at < len(line):
        rest = line[at:]
        quoted, whole = _QUOTED.match(rest), re.match(r"[$@](?:\w+:)?(\w+)(?=\s|$)", rest)
        if rest[0].isspace():
            words += [piece] if given else []
            piece, given, at = "", False, at + 1
            continue
        if not given and (cut := re.match(r"#|\*?\d*>>?(?:&\d|\s*\S+)?", rest)):
            at = len(line) if cut[0] == "#" else at + cut.end()
            continue
        taken = 1
        if quoted:
            taken, text = quoted.end(), _text(_literal(quoted[0], variables))
        elif not given and whole and (several := _opened(variables.get(whole[1].lower()), variables)) is not None:
            at += whole.end()
            words += several
            continue
        elif rest[0] == "`":
            taken, text = 2, rest[1:2]
        elif rest.startswith("$(") or (rest[0] == "(" and not given):
            taken = _closed(rest)
            value = _value(rest[rest.index("(") + 1 : taken - 1], variables)
            text = rest[:taken] if isinstance(value, _Unknown) and rest[0] == "$" else _text(value)
        elif found := re.match(_VARIABLE, rest):
            taken, text = found.end(), _put(found[0], variables)
        else:
            text = rest[0]
        piece, given, at = piece + text, True, at + taken
    return [*words, piece] if given else words


def _opened(value: _Value, variables: _Variables) -> list[str] | None:
    """The words that a variable alone stands for: the elements of a list, or the options in a text, which another shell opens."""
    if isinstance(value, str | _Unknown) and re.match(r"\s*--\w.*\s", _text(value), re.DOTALL):
        return _words(_text(value), variables)
    return list(value) if isinstance(value, list) else None


def _closed(text: str) -> int:
    """Where the bracket ends that a text begins with."""
    depth, at = 0, text.index("(")
    while at < len(text):
        quoted = _QUOTED.match(text, at)
        depth += 0 if quoted else {"(": 1, ")": -1}.get(text[at], 0)
        at = quoted.end() if quoted else at + 1
        if depth == 0:
            break
    return at


def _put(name: str, variables: _Variables) -> str:
    """What stands in a text for a variable; its name where nobody knows it."""
    value = _named(name, variables)
    return name if isinstance(value, _Unknown) and "$" in value.text else _text(value)


def _literal(quoted: str, variables: _Variables) -> _Value:
    """The text in quotes; in double ones variables and $(...) are put in."""
    inner = quoted[1:-1] if len(quoted) > 1 and quoted[-1] == quoted[0] else quoted[1:]
    if quoted[0] == "'":
        return inner.replace("''", "'")
    text, at, known = "", 0, True
    while at < len(inner):
        if inner[at] == "`" or inner.startswith('""', at):
            text, at = text + inner[at + 1 : at + 2], at + 2
            continue
        found = re.compile(_VARIABLE).match(inner, at)
        taken = found.end() - at if found else _closed(inner[at:]) if inner.startswith("$(", at) else 1
        whole = inner[at : at + taken]
        value = _named(whole, variables) if found else _value(whole[2:-1], variables) if taken > 1 else whole
        known = known and not isinstance(value, _Unknown)
        text, at = text + (whole if isinstance(value, _Unknown) and "$" in value.text else _text(value)), at + taken
    return text if known else _Unknown(text)


# --- expressions -----------------------------------------------------------------------------------------------------

_TOKEN = re.compile(
    rf"\s*(?:(?P<quoted>{_QUOTED.pattern})|(?P<number>\d+(?:\.\d+)?(?:e[+-]?\d+)?(?![\w.:\\/]))|(?P<variable>{_VARIABLE})(?P<more>[.\[]?)"
    r"|(?P<opened>[$@]?\()|(?P<closed>\))|(?P<cast>\[[\w.]+(?:\[\])?\](?!::))|(?P<word>-[ic]?(?:eq|ne|gt|ge|lt|le|(?:not)?(?:like|match|in|contains)|replace|and|or|not)\b)"
    r"|(?P<sign>[-+*/!,]))",
    re.DOTALL | re.IGNORECASE,
)
_JOINED = re.compile(r"^Join-Path\s+(?:-Path\s+)?(\S+|'[^']*'|\"[^\"]*\")\s+(?:-ChildPath\s+)?(\S+|'[^']*'|\"[^\"]*\")$", re.IGNORECASE)


class _NoConstant(Exception):
    """Something that is no expression of constants and variables."""


def _value(text: str, variables: _Variables) -> _Value:
    """What an expression is, or that nobody knows it."""
    text = text.strip()
    if joined := _JOINED.match(text):
        folder, name = (_text(_value(part, variables)) for part in joined.groups())
        text_of = f"{folder.rstrip('/')}/{name}"
        return _Unknown(text_of) if "$" in text_of else text_of
    if re.fullmatch(r"[A-Za-z]:?[\w.:/\\]*", text):
        # Not in quotes, which PowerShell would not take, but clear.
        return text
    try:
        expression = _Expression(text, variables)
        value = expression.either()
        return value if expression.here is None else _Unknown(f"$({text})")
    except _NoConstant:
        return _Unknown(text if text.startswith("$") else f"$({text})")


class _Expression:
    """Reads an expression from the weakest operator to the strongest."""

    def __init__(self, text: str, variables: _Variables) -> None:
        self.text, self.at, self.variables = text, 0, variables

    @property
    def here(self) -> re.Match[str] | None:
        """The next token; None at the end."""
        found = _TOKEN.match(self.text, self.at)
        if found is None and self.text[self.at :].strip():
            raise _NoConstant
        return found

    def took(self, kind: str, *names: str) -> str:
        """The next token where it is one of these, which is taken; nothing otherwise."""
        found = self.here
        word = (found[kind] or "").lower() if found is not None else ""
        name = re.sub(r"^-[ic]?", "", word) if kind == "word" else word
        if found is None or name not in names:
            return ""
        self.at = found.end()
        return name

    def either(self) -> _Value:
        value = self.compared()
        while name := self.took("word", "and", "or"):
            one, other = _truth(value), _truth(self.compared())
            holds = both(name == "or", one, other)
            value = _Unknown("$(...)") if holds is None else holds
        return value

    def compared(self) -> _Value:
        value = self.several()
        while name := self.took("word", *_COMPARED, "replace"):
            other = self.several()
            value = _replaced(value, other) if name == "replace" else _compared(name, value, other)
        return value

    def several(self) -> _Value:
        value = self.added()
        while self.took("sign", ","):
            value = [*_texts(value), *_texts(self.added())]
        return value

    def added(self) -> _Value:
        value = self.one()
        while sign := self.took("sign", *"+-*/"):
            other = self.one()
            value = _sum(value, other) if sign == "+" else _computed(sign, value, other)
        return value

    def one(self) -> _Value:
        if self.took("sign", "!") or self.took("word", "not"):
            holds = _truth(self.one())
            return _Unknown("$(...)") if holds is None else not holds
        if self.took("sign", "-"):
            return _computed("-", _Number("0"), self.one())
        found = self.here
        if found is None or found["closed"] or found["word"] or found["sign"]:
            raise _NoConstant
        if found["opened"]:
            length = _closed(self.text[self.at :].lstrip())
            start = found.end()
            self.at += len(self.text[self.at :]) - len(self.text[self.at :].lstrip()) + length
            return _group(found["opened"], self.text[start : self.at - 1], self.variables)
        self.at = found.end()
        if found["cast"]:
            value = self.one()
            return _Number(value) if isinstance(value, str) and re.fullmatch(r"[\d.]+", value) and "str" not in found["cast"] else value
        if found["quoted"]:
            return _literal(found["quoted"], self.variables)
        if found["number"]:
            return _Number(found["number"])
        value = _named(found["variable"], self.variables)
        return self.member(found["variable"], value) if found["more"] else value

    def member(self, name: str, value: _Value) -> _Value:
        """What follows a variable's name: a property or a method, few of which are known."""
        self.at -= 1
        while found := _MEMBER.match(self.text, self.at):
            end = found.end()
            end += _closed(self.text[end:]) if self.text[end : end + 1] == "(" else 0
            method = _METHODS.get(self.text[self.at : end].lower())
            name += self.text[self.at : end]
            value = method(value) if method is not None and isinstance(value, str) else _Unknown(name)
            self.at = end
        return value


_MEMBER = re.compile(r"\.\w+|\[[^\]]*\]")
_METHODS: dict[str, Callable[[str], str]] = {
    ".tolower()": str.lower,
    ".toupper()": str.upper,
    ".trim()": str.strip,
    ".tostring()": str,
    ".tolowerinvariant()": str.lower,
}


def _group(opened: str, inner: str, variables: _Variables) -> _Value:
    """What stands in brackets: a list, whose elements may stand in lines of their own, or one value."""
    if opened != "@(":
        return _value(inner, variables)
    items = [_value(item, variables) for item in _split(inner, ",", "\n", ";")]
    return [text for item in items for text in _texts(item)]


def _named(name: str, variables: _Variables) -> _Value:
    short = _NAME.sub(r"\1", name).lower()
    constants: _Variables = {"true": True, "false": False, "null": None}
    return constants[short] if short in constants else variables.get(short, _Unset(name))


def _text(value: _Value) -> str:
    if isinstance(value, list):
        return " ".join(value)
    if isinstance(value, _Number | _Unknown):
        return value.text
    return "" if value is None else str(value)


def _texts(value: _Value) -> list[str]:
    return value if isinstance(value, list) else [] if value is None else [_text(value)]


def _truth(value: _Value) -> bool | None:
    """Whether a value holds as a condition; None where nobody knows."""
    if isinstance(value, _Unknown):
        return False if isinstance(value, _Unset) else None
    if isinstance(value, list):
        return bool(value)
    return float(value.text) != 0 if isinstance(value, _Number) else bool(value)


def _sum(one: _Value, other: _Value) -> _Value:
    if isinstance(one, list):
        return [*one, *_texts(other)]
    if isinstance(one, _Number) and isinstance(other, _Number):
        return _computed("+", one, other)
    if one is None or (isinstance(one, _Unset) and isinstance(other, list)):
        return other
    text = _text(one) + _text(other)
    return _Unknown(text) if isinstance(one, _Unknown) or isinstance(other, _Unknown) else text


def _replaced(one: _Value, other: _Value) -> _Value:
    old, *new = _texts(other)
    if not isinstance(one, str) or isinstance(other, _Unknown) or not _PLAIN.fullmatch(old) or "$" in "".join(new):
        return _Unknown("$(...)")
    return re.sub(old, lambda _: "".join(new), one, flags=re.IGNORECASE)


def _computed(sign: str, one: _Value, other: _Value) -> _Value:
    if not isinstance(one, _Number) or not isinstance(other, _Number):
        return _Unknown(f"$({_text(one)} {sign} {_text(other)})")
    compute = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}[sign]
    try:
        return _Number(f"{compute(float(one.text), float(other.text)):.12g}")
    except ZeroDivisionError:
        return _Unknown(f"$({_text(one)} {sign} {_text(other)})")


_COMPARED: dict[str, Callable[[Any, Any], bool]] = {
    **COMPARISONS,
    "like": lambda one, other: fnmatch.fnmatchcase(str(one), str(other)),
    "match": lambda one, other: re.search(str(other), str(one)) is not None,
    "in": lambda one, other: isinstance(other, list) and one in other,
    "contains": lambda one, other: isinstance(one, list) and other in one,
}


def _not(name: str) -> Callable[[Any, Any], bool]:
    return lambda one, other: not _COMPARED[name](one, other)


_COMPARED |= {f"not{name}": _not(name) for name in ("like", "match", "in", "contains")}
_PLAIN = re.compile(r"[\w\s/|^.-]*\$?")
"""Regular expressions that mean the same in PowerShell and here."""


def _compared(name: str, one: _Value, other: _Value) -> _Value:
    """A comparison as PowerShell makes it: the kind of the left side decides, capital letters are small ones."""
    one, other = (None if isinstance(side, _Unset) else side for side in (one, other))
    lists = isinstance(one, list) if name.endswith("contains") else name.endswith("in") and isinstance(other, list)
    if isinstance(one, _Unknown) or isinstance(other, _Unknown) or (not lists and (isinstance(one, list) or isinstance(other, list))):
        return _Unknown("$(...)")
    if name.endswith("match") and not _PLAIN.fullmatch(_text(other)):
        return _Unknown("$(...)")
    left: object = [text.lower() for text in one] if isinstance(one, list) else _text(one).lower()
    right: object = [text.lower() for text in other] if isinstance(other, list) else _text(other).lower()
    if lists or name.endswith(("like", "match")):
        return _COMPARED[name](left, right)
    if isinstance(one, bool):
        left, right = one, _truth(other)
    elif isinstance(one, _Number):
        try:
            left, right = float(one.text), float(_text(other) or 0)
        except ValueError:
            return name == "ne"
    elif one is None or other is None:
        left, right = (one, other) if name in ("eq", "ne") else (left, right)
    return _COMPARED[name](left, right)
