"""What is private in texts about a run, and is taken out of what is shared: folders of this computer and access tokens."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.runs import RunOptions

from .console import plain
from .supervisor import Job

_PLACES = ("folder", "file", "start")
_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_PATH = re.compile(r"(?<![\w:/\\.])(?:~|[A-Za-z]:)?(?:[/\\][^\s/\\\"'<>|,;:()]+)+")
_SECRET = re.compile(r"(?i)(key|token|password|secret)$")


class Hidden:
    """Takes what is private out of texts: folders of this computer, of which the last name is left, and access tokens."""

    def __init__(self, job: Job, texts_of: frozenset[str] = frozenset()) -> None:
        """texts_of: options whose texts, line by line, are taken out as well."""
        try:
            self.options: RunOptions | None = job.run.options()
        except OptionError:
            self.options = None
        values = flat.flatten(self.options).values() if self.options else ()
        texts = [each for value in values for each in (value if isinstance(value, tuple) else (value,)) if isinstance(each, str)]
        absolute = {text for text in texts if "\n" not in text and (Path(text).is_absolute() or re.match(r"[A-Za-z]:\\|\\\\|~", text))}
        # Of a folder around them nothing is left. A path with a space in it is known only from the options.
        known = {str(folder): "…" for text in {*absolute, str(job.path), str(Path.home())} for folder in (Path(text), *Path(text).parents)}
        known |= {text: _last(text) for text in absolute}
        said = flat.flatten(self.options) if self.options else {}
        known |= {line.strip(): "…" for name in texts_of for line in str(said.get(name) or "").splitlines()}
        self._known = sorted(((text, left) for text, left in known.items() if len(text) > 1), key=lambda item: -len(item[0]))

    def out_of(self, text: str) -> str:
        for path, left in self._known:
            text = text.replace(path, left)
        return plain(_PATH.sub(lambda found: _last(found[0]), text).replace("……", "…"))

    def of_option(self, name: str, value: Any, field: flat.FlatField) -> str:
        """The value of an option, in words."""
        if value is None or value == "" or value == ():
            return "none"
        if isinstance(value, bool):
            return "on" if value else "off"
        if _SECRET.search(name):
            return "***"
        if isinstance(value, tuple):
            return ", ".join(self.of_option(name, each, field) for each in value)
        text = str(value)
        is_model = name.endswith("name_or_path") and _HUB.fullmatch(text) and not Path(text).exists()
        if field.show.kind in _PLACES and "\n" not in text and not text.startswith("toy") and not is_model:
            return _last(text) if re.search(r"[/\\]", text) else text
        return self.out_of(text)


def _last(path: str) -> str:
    """What is shown of a path, of whichever system."""
    parts = [part for part in re.split(r"[/\\]", path) if part]
    return f"…/{parts[-1]}" if parts else "…"
