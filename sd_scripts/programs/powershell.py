"""The commands of a PowerShell script: variables, lists, conditions on constants and lines that go on are followed; nothing is run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

Variables = dict[str, "str | list[str]"]
_SETTING = re.compile(r"^\$(?:env:)?(\w+)\s*(\+?)=\s*(.*)$", re.IGNORECASE | re.DOTALL)
_LISTS = r"[\w.]*(?:ArrayList|List\[\w+\])"
_LIST = re.compile(rf"^(?:@\(\s*\)|\[{_LISTS}\]::new\(\)|New-Object\s+{_LISTS})$", re.IGNORECASE)
_ADDED = re.compile(r"^(?:\[void\])?\s*\(?\$(\w+)\.Add\((.*?)\)\)?(?:\s*\|\s*Out-Null)?$", re.IGNORECASE | re.DOTALL)
_CONDITION = re.compile(r"^(if|elseif)\s*\((.*)\)$", re.IGNORECASE | re.DOTALL)
_COMPARED = re.compile(r"^(\S+|\"[^\"]*\"|'[^']*')\s+-(eq|ne)\s+(\S+|\"[^\"]*\"|'[^']*')$", re.IGNORECASE)
_PIECE = re.compile(r"'((?:[^']|'')*)'?|\"((?:[^\"`]|`.)*)\"?|(#.*)|(\s+)|((?:`.|[^\s'\"])+)", re.DOTALL)
_NAME = re.compile(r"\$(?:\{)?(?:env:)?(\w+)\}?", re.IGNORECASE)


def commands(text: str) -> Iterator[list[str]]:
    """Each command as its words. Of conditions on constants the branch is taken that holds; of others each."""
    variables: Variables = {}
    frames: list[tuple[bool, bool]] = []
    """For each open brace whether what it holds counts, and whether a branch of its condition has been chosen."""
    opens, chosen, ended = True, True, (True, False)
    for statement in _statements(text):
        if statement == "{":
            frames.append((opens, chosen))
            opens, chosen = True, True
        elif statement == "}":
            ended = frames.pop() if frames else (True, False)
        elif found := _CONDITION.match(statement):
            before = found[1].lower() == "elseif" and ended[1]
            holds = _holds(found[2].strip(), variables)
            opens, chosen = holds is not False and not before, before or holds is True
        elif statement.lower() == "else":
            opens, chosen = not ended[1], True
        elif all(live for live, _ in frames) and (words := _kept(statement, variables)):
            yield words


def _statements(text: str) -> Iterator[str]:
    """Pieces between line ends, semicolons and braces, and the braces; none of which count in quotes and in brackets."""
    text = re.sub(r"<#.*?#>", "", text, flags=re.DOTALL)
    # A backtick goes on in the next line; and no command begins with two dashes, so a line that does goes on as well.
    text = re.sub(r"\n\s*(?=--[A-Za-z])", " ", re.sub(r"`[ \t]*(?:#[^\n]*)?\n", " ", text))
    piece, depth, at = "", 0, 0
    while at < len(text):
        character = text[at]
        if character in "'\"":
            quoted = re.compile(r"'(?:[^']|'')*'?" if character == "'" else r"\"(?:[^\"`]|`.)*\"?", re.DOTALL).match(text, at)
            assert quoted is not None
            piece, at = piece + quoted[0], quoted.end()
            continue
        if character == "`":
            piece, at = piece + text[at : at + 2], at + 2
            continue
        if character == "#" and (not piece or piece[-1].isspace() or depth):
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
            continue
        braced = character in "{}" and not re.search(r"[$@]\{?[\w:]*$", piece)
        depth = max(depth + {"(": 1, ")": -1}.get(character, 0), 0)
        if depth == 0 and (character in "\n;" or braced):
            yield from (one for one in (piece.strip(), character if braced else "") if one)
            piece = ""
        else:
            piece += character
        at += 1
    if piece.strip():
        yield piece.strip()


def _kept(statement: str, variables: Variables) -> list[str]:
    """The words of a command; none for what only sets a variable, which is kept."""
    if found := _SETTING.match(statement):
        name, value = found[1].lower(), found[3].strip()
        before = variables.get(name)
        if _LIST.match(value):
            variables[name] = []
        elif value.startswith("@("):
            items = _items(value[2:].removesuffix(")"), variables)
            variables[name] = [*before, *items] if found[2] and isinstance(before, list) else items
        elif found[2] and isinstance(before, list):
            variables[name] = [*before, *_items(value, variables)]
        else:
            words = _words(value, variables)
            if len(words) == 1 and not re.match(r"[@(\[{]|Get-|New-|Read-|Join-", value):
                variables[name] = f"{before}{words[0]}" if found[2] and isinstance(before, str) else words[0]
        return []
    if found := _ADDED.match(statement):
        if isinstance(added := variables.get(found[1].lower()), list):
            added += _items(found[2], variables)
        return []
    return [word for word in _words(statement, variables) if word not in ("&", "|", ".")]


def _items(text: str, variables: Variables) -> list[str]:
    """The elements of a list: texts with commas or line ends between them."""
    return [word.strip(",") for word in _words(re.sub(r"(['\"])\s*,", r"\1 ", text), variables) if word.strip(",")]


def _holds(text: str, variables: Variables) -> bool | None:
    """Whether a condition holds; None for one that says more than constants do. A variable that nothing sets is nothing."""
    negated = re.match(r"^(?:-not\s+|!)\(?(.*?)\)?$", text, re.IGNORECASE)
    if negated:
        inner = _holds(negated[1], variables)
        return None if inner is None else not inner
    if found := _COMPARED.match(text):
        one, other = _constant(found[1], variables), _constant(found[3], variables)
        return None if one is None or other is None else (one.lower() == other.lower()) == (found[2].lower() == "eq")
    value = _constant(text, variables) if not re.search(r"\s", text) or text[:1] in "'\"" else None
    return None if value is None else value.lower() not in ("", "0", "$false", "$null")


def _constant(text: str, variables: Variables) -> str | None:
    name = re.fullmatch(r"\$(?:env:)?(\w+)", text, re.IGNORECASE)
    if name and name[1].lower() not in ("true", "false", "null"):
        value = variables.get(name[1].lower(), "")
        return value if isinstance(value, str) else None
    words = _words(text, variables)
    return None if len(words) > 1 or "(" in text else words[0] if words else ""


def _words(line: str, variables: Mapping[str, str | list[str]]) -> list[str]:
    def put(text: str) -> str:
        def known(found: re.Match[str]) -> str:
            value = variables.get(found[1].lower())
            return value if isinstance(value, str) else found[0]

        return re.sub(r"`(.)", r"\1", _NAME.sub(known, text))

    words: list[str] = []
    piece, given = "", False
    for found in _PIECE.finditer(line):
        whole = re.fullmatch(r"[$@](\w+)", found[0])
        if found[3] is not None and not given:
            break
        if found[4] is not None:
            words += [piece] if given else []
            piece, given = "", False
        elif whole and not given and isinstance(several := variables.get(whole[1].lower()), list):
            words += several
        else:
            free = found[2] if found[2] is not None else found[5] or found[3] or ""
            text = found[1].replace("''", "'") if found[1] is not None else put(free)
            piece, given = piece + text, True
    return [*words, piece] if given else words
