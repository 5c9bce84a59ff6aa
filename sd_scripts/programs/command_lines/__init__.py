"""Command lines out of shell scripts, batch files, PowerShell and pasted text: read as the shells would read them, never run.

Variables, arrays, quotes, comments and line continuations are followed. What only a running shell knows (an unset variable, the output of a
program) stays in the words as it is written, and `unresolved` finds it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from sd_scripts.schema.errors import OptionError

from . import bash, cmd, powershell
from .common import looks_like, unresolved

__all__ = ["Command", "clear", "commands", "looks_like", "options_of", "shell_of", "unresolved"]

Shell = Literal["sh", "cmd", "powershell"]
_READERS: dict[Shell, Callable[[str], Iterator[list[str]]]] = {"sh": bash.commands, "cmd": cmd.commands, "powershell": powershell.commands}
SETTINGS = (".toml", ".yaml", ".yml", ".json")
"""Endings of files of settings."""
_LAUNCHERS = ("accelerate", "accelerate.exe", "accelerate.commands.launch", "torchrun", "torch.distributed.run", "deepspeed")
_MARKS = ("\\", "^", "`", "...", "\N{HORIZONTAL ELLIPSIS}")
"""What stands where a line goes on, in another shell or in a page for readers: no value."""
_WINDOWS_PATH = re.compile(r"(?:^|[\s=\"'&])(?:[A-Za-z]:|\.{1,2}|[\w.-]+)\\[\w.-]")
_POWERSHELL = re.compile(r"^\s*(?:&\s|\$\w+\s*=)|\$env:", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Command:
    """One start of a Python script."""

    script: str
    """Its path, as it is written; of a module (-m) that of its file."""
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
    script = words[place] if words[place].endswith(".py") else f"{words[place].replace('.', '/')}.py"
    command = Command(script, options, launcher, loose)
    return command if options or command.settings else None
