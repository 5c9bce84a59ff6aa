"""The commands of a script for sh or bash: variables, arrays, quotes, conditions on constants and here-documents are followed; nothing is
run. What only a running shell knows stays in the words as it is written."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass

from .common import COMPARISONS, NEXT_OPTION, Block, both, computed, keep, looks_like, unresolved

MOST_WORDS = 20_000
"""Words of a text that are read; a longer one is no command line."""
_CONTROL = frozenset("if then else elif fi do done for while until case esac { } ! time exec function".split())
_DECLARE = {"export", "declare", "local", "readonly", "typeset"}


def commands(text: str) -> Iterator[list[str]]:
    """Each command as its words. Of conditions on constants the block is taken that holds; of others each."""
    return _Script(text).commands()


_NUMBERS = {f"-{name}": compare for name, compare in COMPARISONS.items()}


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
            return both(decides, _holds([test[0], *words[:at], test[-1]]), _holds([test[0], *words[at + 1 :], test[-1]]))
    if any(unresolved(word) for word in words):
        return None
    return _holds_alone(words, test[0] == "[[")


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
_REDIRECTION = re.compile(r"\d*(>>|>&|>|<<<|<)\s*|&>>?\s*")
_HERE_DOCUMENT = re.compile(r"\d*<<(-?)[ \t]*(['\"\\]?)([\w.-]+)['\"]?")
_PLACEHOLDER = re.compile(r"<[^\s<>|&;][^<>\n|&;]*>(?=[\s\"']|\.\.\.|$)")
"""What a page for readers has in the place of a value: <path to the model>."""


@dataclass
class _Block(Block):
    """One of the blocks of an `if`, or one of a `case`."""

    subject: str | None = None
    """What the patterns of a `case` are compared with."""


class _Script:
    """Reads a script for sh or bash: simple commands as lists of words, with variables put in."""

    def __init__(self, text: str, variables: dict[str, list[str]] | None = None) -> None:
        self.source = _Text(text)
        self.variables: dict[str, list[str]] = {} if variables is None else variables
        self.words_read = 0
        self.ended = ""
        """What the last command ended with."""
        self.blocks: list[_Block] = []
        self.before: tuple[str, bool | None] | None = None
        """The && or || before a command, and whether what stands before it holds."""
        self.documents: list[tuple[str, bool, bool]] = []
        """The here-documents that begin after this line: how each ends, whether tabs before it count, whether it is taken at its word."""
        self.written: list[str] = []
        """Scripts in here-documents."""

    @property
    def counts(self) -> bool:
        held = self.before is None or self.before[1] is not (self.before[0] == "||")
        return held and all(branch.counts for branch in self.blocks)

    @property
    def certain(self) -> bool:
        return (self.before is None or self.before[1] is not None) and all(branch.certain for branch in self.blocks)

    def commands(self) -> Iterator[list[str]]:
        while self.source.here:
            if self.blocks and self.blocks[-1].subject is not None and self.ended == ";;":
                self._pattern()
                continue
            words = self._simple()
            asked = next((index for index, word in enumerate(words) if word in ("if", "elif")), None)
            if asked is not None and all(word in _CONTROL for word in words[:asked]):
                self._ask(words[asked], words[asked + 1 :])
                continue
            if words[:1] == ["case"] and "in" in words:
                self.blocks.append(_Block(False, False, True, " ".join(words[1 : words.index("in")])))
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
            yield from _Script(text, self.variables).commands()

    def _opened(self, words: list[str]) -> Iterator[list[str]]:
        """A command; or those in a text that it gives to another shell."""
        script = next((word for word in words[1:] if re.search(r"\.py\s", word) and re.search(r"\s--\w", word)), None)
        if script is None or any(re.search(r"\w\.py$", word) for word in words):
            yield words
        else:
            yield from _Script(script, self.variables).commands()

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
            holds = both(decides, holds, _holds(self._simple()))
        former = self.blocks.pop() if word == "elif" and self.blocks else None
        self.blocks.append(_Block.asked(holds, former))
        self.before = None

    def _turn(self, word: str) -> None:
        """Another branch, or the end of all."""
        if word in ("else", "fi", "esac") and self.blocks:
            former = self.blocks.pop()
            self.blocks += [former.otherwise()] if word == "else" else []

    def _pattern(self) -> None:
        """The patterns before one of the blocks of a `case`, or its end."""
        source, branch = self.source, self.blocks[-1]
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
                    self.blocks.pop()
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
            elif source.here == "\n" and words and not self.documents and source.match(NEXT_OPTION):
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
        if self.counts:
            keep(self.variables, name, value, self.certain or more)

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

        return computed(re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", known, text[3:-2])) or text
