"""The adapter files on a model that predicts: put on, given other strengths, taken off, told apart by content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import torch

from sd_scripts.library.adapters.applying import AppliedAdapters, apply_adapters
from sd_scripts.library.adapters.files import read
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.common import tried
from sd_scripts.runs.states import sha256
from sd_scripts.schema.errors import OptionError, Problem


@dataclass(frozen=True)
class AdapterSnapshot:
    """An adapter file as it is now: one that is written anew is another one."""

    path: Path
    num_bytes: int
    mtime_ns: int


class Adapters:
    """The adapter files on a model; only what changes is put on or taken off."""

    def __init__(self, parts: Parts, dtype: torch.dtype) -> None:
        """dtype is the precision that their values are held in."""
        self._parts, self._dtype = parts, dtype
        self._files: tuple[AdapterSnapshot, ...] = ()
        self._on: AppliedAdapters | None = None

    def problems(self, files: Sequence[str], weights: Sequence[float]) -> list[Problem]:
        """What is wrong with these files for this model."""
        problems: list[Problem] = []
        if len(files) != len(weights):
            text = f"lora_weight has {len(weights)} numbers for {len(files)} files in lora; give one for each"
            problems.append(Problem("lora_weight", text))
        for name in files:
            found = tried(problems, partial(adapter_file, name))
            if found is not None and found not in self._files:
                tried(problems, partial(read, found.path, self._parts))
        return [Problem(problem.option or "lora", problem.message) for problem in problems]

    def put_on(self, files: Sequence[str], weights: Sequence[float]) -> None:
        """These files with these strengths count, and no others; 0 leaves a file out. Raises OptionError with a sentence for each that
        does not fit; the model is then without adapters."""
        wanted = tuple(adapter_file(name) for name in files)
        if not wanted and self._on is not None:
            # They stay on the model, where they cost nothing, for the next request that wants them.
            self._on.set_weights((0.0,) * len(self._files))
        elif self._on is not None and wanted == self._files:
            self._on.set_weights(weights)
        else:
            self.take_off()
            if wanted:
                self._on = apply_adapters(self._parts, [(file.path, weight) for file, weight in zip(wanted, weights)], dtype=self._dtype)
                self._files = wanted

    def take_off(self) -> None:
        """The model is what it was before."""
        if self._on is not None:
            self._on.remove()
        self._on, self._files = None, ()

    @property
    def on_text_encoders(self) -> tuple[object, ...]:
        """What changes the text encoders, so that what they encode is of it: files and strengths, or nothing."""
        if self._on is None or not any(hasattr(encoder, "peft_config") for encoder in self._parts.text_encoders.values()):
            return ()
        return (*self._files, *self._on.weights) if any(self._on.weights) else ()


def adapter_file(name: str) -> AdapterSnapshot:
    """The file of that name. Raises OptionError when it is not there, or of a kind that is not opened."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise OptionError(Problem("lora", f"lora: there is no file {name}"))
    if path.suffix != ".safetensors":
        raise OptionError(
            Problem("lora", f"lora: {path.name} is not a .safetensors file; files of other kinds can run code when they are read")
        )
    stat = path.stat()
    return AdapterSnapshot(path, stat.st_size, stat.st_mtime_ns)


def content_hash(name: str) -> str:
    """SHA-256 of a file, as it is now."""
    path = Path(name).expanduser()
    stat = path.stat()
    return _content_hash(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _content_hash(path: Path, num_bytes: int, mtime_ns: int) -> str:
    return sha256(path)
