"""Command lines out of shell scripts, batch files, PowerShell and pasted text: read as the shells would read them, never run.

Variables, arrays, quotes, comments and line continuations are followed. What only a running shell knows (an unset variable, the output of a
program) stays in the words as it is written, and `unresolved` finds it.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from sd_scripts.schema.errors import OptionError

from . import powershell

Shell = Literal["sh", "cmd", "powershell"]
MOST_WORDS = 20_000
"""Words of a text that are read; a longer one is no command line."""
SETTINGS = (".toml", ".yaml", ".yml", ".json")
"""Endings of files of settings."""
_LAUNCHERS = ("accelerate", "accelerate.exe", "accelerate.commands.launch", "torchrun", "torch.distributed.run", "deepspeed")
_CONTROL = {
    "if",
    "then",
    "else",
    "elif",
    "fi",
    "do",
    "done",
    "for",
    "while",
    "until",
    "case",
    "esac",
    "{",
    "}",
    "!",
    "time",
    "exec",
    "function",
}
_DECLARE = {"export", "declare", "local", "readonly", "typeset"}
_UNRESOLVED = re.compile(
    r"\$[\w{(@*#?$!]|`|%[^\s%]+%|%~[a-zA-Z]*\d|%%\w|!\w+!|(?<![\w$}])\{[A-Za-z_]\w*\}"
    r"|<[^<>]*(?:\s|path|your|dir|name|file|model|number)[^<>]*>",
    re.IGNORECASE,
)
_WITH_SETTINGS = re.compile(
    r"^[ \t]*(?:\w+=\S+[ \t]+)*(?:python[\d.]*|accelerate|deepspeed|torchrun)[ \t].*\.(?:ya?ml|toml|json)\b", re.MULTILINE
)
_MARKS = ("\\", "^", "`", "...", "\N{HORIZONTAL ELLIPSIS}")
"""What stands where a line goes on, in another shell or in a page for readers: no value."""


_WINDOWS_PATH = re.compile(r"(?:^|[\s=\"'&])(?:[A-Za-z]:|\.{1,2}|[\w.-]+)\\[\w.-]")
_POWERSHELL = re.compile(r"^\s*(?:&\s|\$\w+\s*=)|\$env:", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Command:
    """One start of a Python script."""

    script: str
    """Its path, as it is written."""
    options: Mapping[str, object]
    """What follows it, by name without dashes: a text, a list of texts, or True for a flag alone."""
    launcher: Mapping[str, object] = field(default_factory=dict)
    """What stands between the launcher and the script."""
    loose: tuple[str, ...] = ()
    """Words that belong to no option."""
    file: Mapping[str, object] = field(default_factory=dict)
    """What stands in the file that --config_file names, where it was read; the line wins."""

    @property
    def name(self) -> str:
        """The script's file name."""
        return re.split(r"[/\\]", self.script)[-1]

    @property
    def settings(self) -> str:
        """The file of settings that it names: TOML, YAML or JSON; empty without one."""
        words = [word for value in self.options.values() for word in (value if isinstance(value, list) else [value])]
        named = [word for word in (*words, *self.loose) if isinstance(word, str) and word.lower().endswith(SETTINGS)]
        return next((word for word in named if unresolved(word) is None), "")

    @property
    def lacks_its_file(self) -> bool:
        """Whether it names a file of options that was not there to be read."""
        return "config_file" in self.options and not self.file


def unresolved(value: object) -> str | None:
    """The part of a value that only a running shell knows; None when there is none."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and (found := _UNRESOLVED.search(text)):
            rest = text[found.start() :]
            alone = re.match(r"\$\w+|\$?\{[^{}]*\}|%[^\s%]+%|!\w+!|<[^<>]*>", rest)
            return (alone[0] if alone else rest)[:40]
    return None


def clear(options: Mapping[str, object]) -> tuple[dict[str, object], dict[str, tuple[object, str]]]:
    """The options whose values are known; and the others as they are written, each with a sentence."""
    unclear = {
        key: (value, f"it holds {piece}, which only the shell knows that runs the line; give it in the form")
        for key, value in options.items()
        if (piece := unresolved(value)) is not None
    }
    return {key: value for key, value in options.items() if key not in unclear}, unclear


def shell_of(name: str, text: str) -> Shell:
    """The shell for which a text is written, by its file's ending, else by how its lines go on."""
    ending = name.lower().rpartition(".")[2]
    if ending in ("bat", "cmd"):
        return "cmd"
    if ending == "ps1":
        return "powershell"
    if ending == "sh":
        return "sh"
    counts: dict[Shell, int] = {
        "sh": len(re.findall(r"\\[ \t]*$", text, re.MULTILINE)),
        "cmd": len(re.findall(r"\^[ \t]*$", text, re.MULTILINE)),
        "powershell": len(re.findall(r"`[ \t]*$", text, re.MULTILINE)),
    }
    if not any(counts.values()) and _WINDOWS_PATH.search(text):
        return "powershell" if _POWERSHELL.search(text) else "cmd"
    return max(counts, key=lambda shell: counts[shell])


def commands(name: str, text: str) -> list[Command]:
    """Every start of a Python script with options, in their order. Raises OptionError for what is nested more deeply than any script is."""
    # Shells pass over zero bytes.
    read = _READERS[shell_of(name, text)](text.replace("\0", "").replace("\r\n", "\n").replace("\r", "\n"))
    try:
        return [command for words in read if (command := _command(words)) is not None]
    except RecursionError as err:
        raise OptionError(
            f"{name} has brackets or conditions inside one another, hundreds deep; paste the line that starts the training"
        ) from err


def looks_like(text: str) -> bool:
    """Whether a text may hold a command line: a Python script and options with two dashes, or a start of Python with a file of settings."""
    has_options = re.search(r"(^|\s|[\"'(])--[A-Za-z]\w*", text) is not None
    return (re.search(r"\b\w+\.py\b", text) is not None and has_options) or _WITH_SETTINGS.search(text) is not None


def options_of(words: list[str]) -> tuple[dict[str, object], tuple[str, ...]]:
    """Options by name with their values, and the words before the first of them."""
    found: dict[str, object] = {}
    loose: list[str] = []
    name = ""
    for word in words:
        if word in _MARKS:
            continue
        if re.match(r"--[A-Za-z]", word):
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = text if equals else True
        elif not name:
            loose.append(word)
        else:
            before = found[name]
            found[name] = word if before is True else [*before, word] if isinstance(before, list) else [str(before), word]
    return found, tuple(loose)


def _command(words: list[str]) -> Command | None:
    place = next((index for index, word in enumerate(words) if re.search(r"\w\.py$", word) and not word.startswith("-")), None)
    modules = (index for index in range(1, len(words)) if words[index - 1] == "-m" and words[index] not in _LAUNCHERS)
    place = next(modules, None) if place is None else place
    if place is None:
        return None
    options, loose = options_of(words[place + 1 :])
    before = words[:place]
    start = next((index for index, word in enumerate(before) if re.split(r"[/\\]", word)[-1].lower() in _LAUNCHERS), None)
    launcher = options_of(before[start + 1 :])[0] if start is not None else {}
    command = Command(words[place], options, launcher, loose)
    return command if options or command.settings else None


# --- POSIX shells ------------------------------------------------------------------------------------------------------


_NUMBERS: dict[str, Callable[[float, float], bool]] = {
    "-eq": operator.eq,
    "-ne": operator.ne,
    "-lt": operator.lt,
    "-le": operator.le,
    "-gt": operator.gt,
    "-ge": operator.ge,
}


def _holds(test: list[str]) -> bool | None:
    """Whether a condition on constants holds; None for one that asks for more. A variable that nothing sets is empty."""
    if test and test[0] == "!":
        inner = _holds(test[1:])
        return None if inner is None else not inner
    if test and test[0] in ("true", "false", ":") and len(test) == 1:
        return test[0] != "false"
    if len(test) < 2 or (test[0], test[-1]) not in (("[", "]"), ("[[", "]]")):
        return None
    words = ["" if re.fullmatch(r"\$(\w+|\{\w+\})", word) else word for word in test[1:-1]]
    for mark, decides in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if mark in words:
            at = words.index(mark)
            return _both(decides, _holds([test[0], *words[:at], test[-1]]), _holds([test[0], *words[at + 1 :], test[-1]]))
    if any(unresolved(word) for word in words):
        return None
    return _holds_alone(words, test[0] == "[[")


def _both(decides: bool, one: bool | None, other: bool | None) -> bool | None:
    """Two conditions, of which one that is `decides` decides."""
    if decides in (one, other):
        return decides
    return None if one is None or other is None else not decides


def _holds_alone(words: list[str], quoted: bool) -> bool | None:
    """Whether one condition holds; quoted: an empty variable in it is a word there."""
    if words and words[0] == "!":
        inner = _holds_alone(words[1:], quoted)
        return None if inner is None else not inner
    if quoted and words and (words[0] in ("=", "==", "!=", *_NUMBERS) or (words in (["-n"], ["-z"]))):
        words = ["", *words] if len(words) > 1 else [*words, ""]
    if not words:
        return False
    if len(words) == 1 or (len(words) == 2 and words[0] in ("-n", "-z")):
        return bool(words[-1]) == (words[0] != "-z" or len(words) == 1)
    if len(words) == 3 and words[1] in ("=", "==", "!=") and not re.search(r"[*?]", words[2]):
        return (words[0] == words[2]) == (words[1] != "!=")
    if len(words) == 3 and words[1] in _NUMBERS:
        try:
            return _NUMBERS[words[1]](float(words[0] or 0), float(words[2] or 0))
        except ValueError:
            return None
    return None


def _computed(text: str) -> str | None:
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


class _Text:
    """A text that is read character by character."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    @property
    def here(self) -> str:
        return self.text[self.at : self.at + 1]

    def starts(self, *pieces: str) -> bool:
        return self.text.startswith(pieces, self.at)

    def take(self, count: int = 1) -> str:
        piece = self.text[self.at : self.at + count]
        self.at += count
        return piece

    def until(self, end: str) -> str:
        """What stands before the next `end`, which is taken as well; everything without one."""
        place = self.text.find(end, self.at)
        place = len(self.text) if place < 0 else place
        piece = self.text[self.at : place]
        self.at = place + len(end)
        return piece

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
        return found


_NAME = re.compile(r"\w+")
_BRACED = re.compile(r"\{(\w+)(\[[@*]\])?(?:\}|(:?[-=+?]))")
_CASED = re.compile(r"\{(\w+)(,,|\^\^)\}")
_COUNTED = re.compile(r"\{#(\w+)\[[@*]\]\}")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NEXT_OPTION = re.compile(r"\n\s*(?=--[A-Za-z])")
"""No command begins with two dashes: a line that does goes on with the one before, also where its mark was lost on the way here."""
_REDIRECTION = re.compile(r"\d*(>>|>&|>|<<<|<)\s*|&>>?\s*")
_HERE_DOCUMENT = re.compile(r"\d*<<(-?)[ \t]*(['\"\\]?)([\w.-]+)['\"]?")
_PLACEHOLDER = re.compile(r"<[^\s<>|&;][^<>\n|&;]*>(?=[\s\"']|\.\.\.|$)")
"""What a page for readers has in the place of a value: <path to the model>."""


@dataclass
class _Branch:
    """One of the blocks of an `if`, or one of a `case`."""

    counts: bool
    chosen: bool
    """Whether one of its blocks has been chosen."""
    certain: bool = True
    """Whether it is known that the script comes here."""
    subject: str | None = None
    """What the patterns of a `case` are compared with."""


class _Sh:
    """Reads a script for sh or bash: simple commands as lists of words, with variables put in."""

    def __init__(self, text: str, variables: dict[str, list[str]] | None = None) -> None:
        self.source = _Text(text)
        self.variables: dict[str, list[str]] = {} if variables is None else variables
        self.words_read = 0
        self.ended = ""
        """What the last command ended with."""
        self.branches: list[_Branch] = []
        self.before: tuple[str, bool | None] | None = None
        """The && or || before a command, and whether what stands before it holds."""
        self.documents: list[tuple[str, bool, bool]] = []
        """The here-documents that begin after this line: how each ends, whether tabs before it count, whether it is taken at its word."""
        self.written: list[str] = []
        """Scripts in here-documents."""

    @property
    def counts(self) -> bool:
        held = self.before is None or self.before[1] is not (self.before[0] == "||")
        return held and all(branch.counts for branch in self.branches)

    @property
    def certain(self) -> bool:
        return (self.before is None or self.before[1] is not None) and all(branch.certain for branch in self.branches)

    def commands(self) -> Iterator[list[str]]:
        while self.source.here:
            if self.branches and self.branches[-1].subject is not None and self.ended == ";;":
                self._pattern()
                continue
            words = self._simple()
            asked = next((index for index, word in enumerate(words) if word in ("if", "elif")), None)
            if asked is not None and all(word in _CONTROL for word in words[:asked]):
                self._ask(words[asked], words[asked + 1 :])
                continue
            if words[:1] == ["case"] and "in" in words:
                self.branches.append(_Branch(False, False, True, " ".join(words[1 : words.index("in")])))
                self.ended = ";;"
                continue
            if words[:1] == ["for"] and words[2:3] == ["in"]:
                # Of several trainings the first counts.
                one = next(iter(words[3:4]), "$")
                self._set(words[1], [f"${words[1]}" if re.search(r"[*?{$]", one) else one])
            if words[:1] == ["read"] and self.counts:
                for name in words[1:]:
                    self.variables.pop(name, None)
            while words and (words[0] in _CONTROL):
                words = words[1:]
            if words and words[0] not in _DECLARE and self.counts:
                yield from self._opened(words)
            self._go_on(words)
        for text in self.written:
            yield from _Sh(text, self.variables).commands()

    def _opened(self, words: list[str]) -> Iterator[list[str]]:
        """A command; or those in a text that it gives to another shell."""
        script = next((word for word in words[1:] if re.search(r"\.py\s", word) and re.search(r"\s--\w", word)), None)
        if script is None or any(re.search(r"\w\.py$", word) for word in words):
            yield words
        else:
            yield from _Sh(script, self.variables).commands()

    def _go_on(self, words: list[str]) -> None:
        """What follows && or || depends on what stands before."""
        if self.ended not in ("&&", "||"):
            self.before = None
            return
        holds = _holds(words) if self.before is None or self.counts else False if self.before[0] == "&&" else None
        # A command that is no condition is expected to succeed; what stands after || is then for the day on which it does not.
        known = holds if words and words[0] in ("[", "[[", "!", "true", "false") else True if self.ended == "&&" else None
        self.before = (self.ended, known)

    def _ask(self, word: str, test: list[str]) -> None:
        """Begins a branch: one whose condition on constants does not hold is read over, one that asks for more is taken."""
        holds = _holds(test)
        while self.ended in ("&&", "||"):
            decides = self.ended == "||"
            holds = _both(decides, holds, _holds(self._simple()))
        former = self.branches.pop() if word == "elif" and self.branches else None
        before = former is not None and former.chosen
        certain = holds is not None and (former is None or former.certain)
        self.branches.append(_Branch(holds is not False and not before, before or holds is True, certain))
        self.before = None

    def _turn(self, word: str) -> None:
        """Another branch, or the end of all."""
        if word in ("else", "fi", "esac") and self.branches:
            former = self.branches.pop()
            self.branches += [_Branch(not former.chosen, True, former.certain)] if word == "else" else []

    def _pattern(self) -> None:
        """The patterns before one of the blocks of a `case`, or its end."""
        source, branch = self.source, self.branches[-1]
        patterns: list[str] = []
        self.ended = ""
        while source.here and source.here != ")":
            if source.here == "#":
                source.until("\n")
            elif source.here in " \t\n(|;":
                source.take()
            else:
                before = source.at
                patterns += self._word(split=False)
                source.at += source.at == before
                if patterns == ["esac"]:
                    self.branches.pop()
                    return
        source.take()
        subject = "" if re.fullmatch(r"\$(\w+|\{\w+\})", branch.subject or "") else branch.subject or ""
        holds: bool | None = None
        if unresolved(subject) is None:
            holds = any(fnmatch.fnmatchcase(subject, pattern) for pattern in patterns)
        branch.counts, branch.certain = holds is not False and not branch.chosen, holds is not None
        branch.chosen |= holds is True

    def _simple(self) -> list[str]:
        """The words of one command, up to the end of its line or an operator; assignments before it are kept."""
        words: list[str] = []
        source = self.source
        self.ended = ""
        while source.here and self.words_read < MOST_WORDS:
            tests = "[[" in words and "]]" not in words
            if source.starts("\\\n", "^\n"):
                source.take(2)
            elif source.here in " \t":
                source.take()
            elif source.here == "#":
                source.until("\n")
                self._pass_documents()
                self.ended = "\n"
                break
            elif tests and source.starts("&&", "||"):
                words.append(source.take(2))
            elif tests and source.here in "<>()":
                words.append(source.take())
            elif found := source.match(_HERE_DOCUMENT):
                self.documents.append((found[3], bool(found[1]), bool(found[2])))
            elif found := source.match(_PLACEHOLDER):
                words.append(found[0])
            elif source.match(_REDIRECTION):
                self._word()
            elif source.here == "\n" and words and not self.documents and source.match(_NEXT_OPTION):
                continue
            elif source.here in "\n;&|()":
                self.ended = source.take(2 if source.starts("&&", "||", ";;") else 1)
                if self.ended == "\n":
                    self._pass_documents()
                break
            elif (all(word in _CONTROL for word in words) or words[0] in _DECLARE) and (assigned := source.match(_ASSIGNMENT)):
                self._assign(assigned[1], bool(assigned[2]))
            else:
                before = all(word in _CONTROL for word in words)
                words += self._word()
                if before and len(words) and words[-1] in ("else", "fi", "esac"):
                    self._turn(words[-1])
                self.words_read += 1
        if self.words_read >= MOST_WORDS:
            source.at = len(source.text)
        return words

    def _pass_documents(self) -> None:
        """Reads over the here-documents of a line, which are no commands, and keeps those that hold a script."""
        for end, indented, as_written in self.documents:
            lines: list[str] = []
            while self.source.here:
                line = self.source.until("\n")
                if (line.lstrip("\t") if indented else line) == end:
                    break
                lines.append(line)
            text = "\n".join(lines) + "\n"
            if looks_like(text) and self.counts:
                self.written.append(text if as_written else re.sub(r"\\([\\$`])", r"\1", text))
        self.documents = []

    def _assign(self, name: str, more: bool) -> None:
        if self.source.here == "(":
            self.source.take()
            items: list[str] = []
            while self.source.here and self.source.here != ")":
                if self.source.starts("\\\n"):
                    self.source.take(2)
                elif self.source.here in " \t\n":
                    self.source.take()
                elif self.source.here == "#":
                    self.source.until("\n")
                else:
                    before = self.source.at
                    items += self._word()
                    if self.source.at == before:
                        self.source.take()
            self.source.take()
            if self.counts:
                self.variables[name] = self.variables.get(name, []) + items if more else items
            return
        value = " ".join(self._word(split=False)) if self.source.here and self.source.here not in " \t\n;&|" else ""
        self._set(name, ["".join(self.variables.get(name, [])) + value if more else value], more)

    def _set(self, name: str, value: list[str], more: bool = False) -> None:
        """Sets a variable. What may be set otherwise, in a branch that nobody knows to be taken, is known no longer."""
        if not self.counts:
            return
        if self.certain or more or self.variables.get(name, value) == value:
            self.variables[name] = value
        else:
            self.variables.pop(name)

    def _word(self, split: bool = True) -> list[str]:
        """One word, or several where an unquoted variable holds blanks or an array is opened."""
        source = self.source
        whole: list[str] = []
        piece, given = "", False
        while source.here and (source.here not in " \t\n;&|()<>"):
            character = source.here
            if character == "\\":
                source.take()
                if source.here == "\n":
                    source.take()
                    if not piece and not given:
                        return whole
                    break
                piece += source.take()
            elif character == "^" and source.starts("^\n"):
                break
            elif character == "'":
                source.take()
                piece, given = piece + source.until("'"), True
            elif character == '"':
                source.take()
                quoted, array = self._quoted()
                given = True
                if array is not None:
                    whole += [piece + array[0], *array[1:]][:-1] if array else []
                    piece = (array[-1] if len(array) > 1 else piece + array[0]) if array else piece
                    given = bool(array) or bool(piece)
                else:
                    piece += quoted
            elif character == "$":
                values, _ = self._variable()
                text = " ".join(values)
                if split and not text.startswith("$(") and re.search(r"\s", text.strip()):
                    items = text.split()
                    whole += [piece + items[0], *items[1:-1]]
                    piece, given = items[-1], True
                else:
                    piece += text.strip() if split else text
                    given = given or bool(text)
            elif character == "`":
                source.take()
                piece += f"`{source.until('`')}`"
            else:
                piece += source.take()
            given = given or bool(piece)
            if source.here == "<" and piece.endswith("=") and (found := source.match(_PLACEHOLDER)):
                piece += found[0]
        return [*whole, piece] if given else whole

    def _quoted(self) -> tuple[str, list[str] | None]:
        """What stands in double quotes, after the first of them; the elements when it is an array alone."""
        source, piece = self.source, ""
        while source.here:
            if source.here == '"':
                source.take()
                break
            if source.here == "\\":
                source.take()
                following = source.take()
                piece += "" if following == "\n" else following if following in '$`"\\' else "\\" + following
            elif source.here == "$":
                values, is_array = self._variable()
                if is_array and not piece and source.here == '"':
                    source.take()
                    return "", values
                piece += " ".join(values)
            else:
                piece += source.take()
        return piece, None

    def _variable(self) -> tuple[list[str], bool]:
        """The values of what begins with a dollar sign, and whether it is all of an array; as it is written where nobody knows it."""
        source = self.source
        start = source.at
        source.take()
        if source.here == "(":
            depth = 0
            while source.here:
                depth += {"(": 1, ")": -1}.get(source.here, 0)
                source.take()
                if depth == 0:
                    break
            return [self._sum(source.text[start : source.at])], False
        if found := source.match(_CASED):
            known = self.variables.get(found[1])
            return ([text.lower() if found[2] == ",," else text.upper() for text in known[:1]] if known else [f"${found[0]}"]), False
        if found := source.match(_BRACED):
            name, array, how = found.groups()
            default = self._default() if how else None
            known = self.variables.get(name)
            if how and "+" in how:
                unset = "" if known is not None else source.text[start : source.at]
                return [default or "" if known not in (None, [], [""]) else unset], False
            if known is not None and (known not in ([], [""]) or default is None):
                return (known if array else known[:1]), bool(array)
            asks = default is None or (how or "").endswith("?")
            return ([source.text[start : source.at]] if asks else [default or ""]), False
        if found := source.match(_COUNTED):
            known = self.variables.get(found[1])
            return [source.text[start : source.at] if known is None else str(len(known))], False
        if source.here == "{":
            source.until("}")
            return [source.text[start : source.at]], False
        if found := source.match(_NAME):
            return (self.variables[found[0]][:1], False) if found[0] in self.variables else ([f"${found[0]}"], False)
        return ["$" + (source.take() if source.here in "@*#?$!" and source.here else "")], False

    def _default(self) -> str:
        """The text before the brace that closes one, with variables put in."""
        source, piece = self.source, ""
        while source.here and source.here != "}":
            if source.here == '"':
                source.take()
                piece += self._quoted()[0]
            elif source.here == "'":
                source.take()
                piece += source.until("'")
            elif source.here == "$":
                piece += " ".join(self._variable()[0])
            else:
                piece += source.take()
        source.take()
        return piece

    def _sum(self, text: str) -> str:
        """What $((...)) comes to, where its variables are known; else the text."""
        if not text.startswith("$((") or not text.endswith("))"):
            return text

        def known(found: re.Match[str]) -> str:
            return next(iter(self.variables.get(found[1], [found[0]])), found[0])

        return _computed(re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", known, text[3:-2])) or text


def _of_sh(text: str) -> Iterator[list[str]]:
    return _Sh(text).commands()


# --- cmd.exe -----------------------------------------------------------------------------------------------------------

_SET = re.compile(r"set\s+(?:\"([^=\"]+)=(.*)\"\s*|([^=\"/]+?)=(.*))$", re.IGNORECASE)


def _of_cmd(text: str) -> Iterator[list[str]]:
    """The commands of a batch file. A caret goes on in the next line, or takes the meaning from a character."""
    variables: dict[str, str] = {}
    branches: list[tuple[bool, bool, bool]] = []
    joined = _NEXT_OPTION.sub(" ", re.sub(r"\^[ \t]*\n\s*", " ", text))

    def known(found: re.Match[str]) -> str:
        return variables.get(found[1].lower(), found[0])

    for line in joined.split("\n"):
        line = re.sub(r"^\s*@", "", line).strip()
        if not line or re.match(r"(rem\b|::|:\w)", line, re.IGNORECASE):
            continue
        for command in _branched(re.sub(r"!(\w+)!", known, re.sub(r"%([^\s%:]+)%", known, line)), branches, variables):
            for part in _parts_of_cmd(command):
                if found := _SET.match(part.strip()):
                    name, text = (found[1] or found[3]).strip().lower(), found[2] if found[1] else found[4].strip()
                    # What may be set otherwise, in a branch that nobody knows to be taken, is known no longer.
                    if all(certain for *_, certain in branches) or variables.get(name, text) == text:
                        variables[name] = text
                    else:
                        del variables[name]
                elif found := _SUM.match(part.strip()):
                    value = _computed(re.sub(r"\b([A-Za-z_]\w*)", known, found[2]))
                    variables.pop(found[1].lower(), None)
                    if value is not None:
                        variables[found[1].lower()] = value
                else:
                    yield _words_of_cmd(part)


_SUM = re.compile(r"set\s+/a\s+\"?(\w+)\s*=\s*([^\"]+)\"?$", re.IGNORECASE)
_IF = re.compile(
    r"(?:else\s+)?if\s+(?P<flags>(?:/i\s+|not\s+)*)"
    r"(?:(?P<asks>exist|defined|errorlevel|cmdextversion)\s+(?P<what>\"[^\"]*\"|\S+)"
    r"|(?P<left>\"[^\"]*\"|[^\s=]+)\s*(?P<how>==|\bequ\b|\bneq\b|\blss\b|\bleq\b|\bgtr\b|\bgeq\b)\s*(?P<right>\"[^\"]*\"|[^\s(]+))\s*",
    re.IGNORECASE,
)
_COMPARED: dict[str, Callable[[float, float], bool]] = {
    "equ": operator.eq,
    "neq": operator.ne,
    "lss": operator.lt,
    "leq": operator.le,
    "gtr": operator.gt,
    "geq": operator.ge,
}


def _branched(line: str, branches: list[tuple[bool, bool, bool]], variables: Mapping[str, str]) -> Iterator[str]:
    """The commands of a line that count; branches has for each open block whether it counts, whether one of its `if` was chosen, and
    whether that is known."""
    while line := line.strip():
        if branches and (found := re.match(r"\)\s*else\b(?!\s+if\b)\s*", line, re.IGNORECASE)):
            _, chosen, certain = branches.pop()
            branches.append((not chosen, True, certain))
            line = line[found.end() :]
        elif branches and (found := re.match(r"\)\s*(?=else\s+if\b)", line, re.IGNORECASE)):
            line = line[found.end() :]
            continue
        elif branches and line.startswith(")"):
            branches.pop()
            line = line[1:]
            continue
        elif found := _IF.match(line):
            before = found[0].lower().startswith("else") and bool(branches) and branches.pop()[1]
            holds = _holds_in_cmd(found, variables)
            branches.append((holds is not False and not before, before or holds is True, holds is not None))
            line = line[found.end() :]
        else:
            end = _end_of_block(line) if branches else len(line)
            command, line = line[:end], line[end:]
            opens = command.rstrip().endswith("(")
            if all(live for live, *_ in branches):
                yield command.rstrip().removesuffix("(") if opens else command
            if opens:
                branches.append((True, True, True))
            continue
        if line.startswith("("):
            line = line[1:]
        else:
            # One command, without a block.
            if all(live for live, *_ in branches):
                yield line
            branches.pop()
            return


def _end_of_block(line: str) -> int:
    """Where the bracket stands that ends the block around a command; the line's end without one."""
    quoted = False
    for at, character in enumerate(line):
        quoted ^= character == '"'
        if character == ")" and not quoted and line[at - 1 : at] != "^":
            return at
    return len(line)


def _holds_in_cmd(found: re.Match[str], variables: Mapping[str, str]) -> bool | None:
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


def _parts_of_cmd(line: str) -> list[str]:
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


def _words_of_cmd(text: str) -> list[str]:
    return [found[0].replace('"', "") for found in re.finditer(r'(?:"[^"]*"?|[^\s"])+', text)]


_READERS: dict[Shell, Callable[[str], Iterator[list[str]]]] = {"sh": _of_sh, "cmd": _of_cmd, "powershell": powershell.commands}
