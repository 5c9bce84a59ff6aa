"""Show and edit the texts in a safetensors file's header. The tensors are never read, only copied, byte by byte."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sd_scripts.dataset.progress import Bar
from sd_scripts.runs.safetensors_header import replace_texts
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.tools import MetadataSection

from .report import Report
from .tensor_files import open_file

_SHOWN = 500
"""Longer texts are cut where they are shown; the JSON report has them whole."""


def edit(options: MetadataSection) -> Report:
    """Shows the texts, after setting and removing what was asked for. Hashes of the tensors stay, since tensors do."""
    file = open_file(Path(options.model).expanduser(), "model")
    texts = dict(file.metadata)
    lines = []
    if options.set_keys or options.remove_keys:
        texts = _edited(texts, options)
        target = file.path if options.save_to is None else Path(options.save_to).expanduser()
        if target.suffix != ".safetensors":
            raise OptionError(f"save_to: {target.name} has to end with .safetensors")
        size = file.path.stat().st_size - file.data_start
        with Bar(total=size, desc=f"writing {target.name}", unit="B", unit_scale=True, delay=2, leave=False) as bar:
            replace_texts(file.path, target, texts, lambda block: bar.update(len(block)))
        lines.append(f"written: {target.name}; every tensor is byte for byte the same")
    return Report([*lines, *shown(texts)], {"metadata": {key: decoded(text) for key, text in sorted(texts.items())}})


def _edited(texts: Mapping[str, str], options: MetadataSection) -> dict[str, str]:
    """Raises OptionError for keys to remove that are not there."""
    problems = []
    kept = dict(texts)
    for pattern in options.remove_keys:
        found = [key for key in texts if fnmatchcase(key, pattern)]
        if not found:
            problems.append(
                Problem("remove_keys", f"remove_keys: the file has no key {pattern}; it has {', '.join(sorted(texts)) or 'none'}")
            )
        for key in found:
            kept.pop(key, None)
    refuse(problems)
    return kept | options.keys_to_set


def decoded(text: str) -> Any:
    """The value in a header text: what is JSON or one of Python's words becomes that, everything else stays a text."""
    words = {"None": None, "True": True, "False": False}
    if text in words:
        return words[text]
    if not text.strip().startswith(("{", "[")):
        return text
    try:
        return json.loads(text, parse_constant=str)
    except ValueError:
        return text


def shown(texts: Mapping[str, str]) -> list[str]:
    """The texts in groups: modelspec, kohya's, ours, others."""
    groups = {
        "modelspec.": "modelspec:",
        "ss_": "training (kohya's keys):",
        "sshs_": "hashes of the weights:",
        "kohya_like.": "kohya_like:",
    }
    lines = []
    left = dict(sorted(texts.items()))
    for start, title in [*groups.items(), ("", "other texts:")]:
        own = {key: left.pop(key) for key in list(left) if key.startswith(start)}
        if own:
            lines += [title, *(f"  {key.removeprefix(start)}: {_brief(text)}" for key, text in own.items())]
    return lines or ["the file has no metadata"]


def _brief(text: str) -> str:
    value = decoded(text)
    line = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else text
    line = " ".join(line.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]} ... ({len(text):,} characters)"
