"""The catalogues of the page's languages: what translators write in languages/*.po, as the page fetches it. See docs/languages.md."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).resolve().parent / "languages"
"""One .po for each language."""

_WORD = re.compile(r"(msgid_plural|msgid|msgstr)(?:\[\d+\])? (.*)")


@cache
def catalogues() -> dict[str, Path]:
    """What the page asks for -> the file with the translations. It is read when somebody asks."""
    return {f"languages/{path.stem}.json": path for path in sorted(SOURCES.glob("*.po"))}


def compiled(path: Path) -> bytes:
    """A JSON text {"page": {English: translation}, "said": {...}} of what is translated. page: texts of modules, for a number with its word
    one for each plural form; said: whole sentences of Python, of which the page knows nothing else."""
    texts: dict[str, dict[str, Any]] = {"page": {}, "said": {}}
    for entry in path.read_text(encoding="utf-8").split("\n\n"):
        places, words = _entry(entry)
        own = words.get("msgstr", [""])
        if not all(own) or words["msgid"] == [""]:
            continue
        for kind in {"page" if place.endswith(".js") else "said" for place in places or ["schema"]}:
            texts[kind][words["msgid"][0]] = own if "msgid_plural" in words else own[0]
    return json.dumps(texts, ensure_ascii=False, separators=(",", ":"), sort_keys=True).encode()


@cache
def words(language: str) -> dict[str, str]:
    """English -> its translation, of single texts; of a language that the page has not, nothing."""
    path = catalogues().get(f"languages/{language}.json")
    found = json.loads(compiled(path)) if path else {}
    return {text: own for texts in found.values() for text, own in texts.items() if isinstance(own, str)}


def _entry(text: str) -> tuple[list[str], dict[str, list[str]]]:
    # The places of one entry of a .po (none: of the schema alone), and its texts by what they are. A text may go over lines, each a quoted
    # piece of it.
    places: list[str] = []
    words: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("#:"):
            places += line[2:].split()
        elif found := _WORD.match(line):
            name = found[1]
            words.setdefault(name, []).append(json.loads(found[2]))
        elif line.startswith('"'):
            words[name][-1] += json.loads(line)
    return places, words
