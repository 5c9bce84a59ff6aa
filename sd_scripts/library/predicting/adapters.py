"""The adapter files on a model that predicts: put on with their strengths, taken off, told apart by content."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from sd_scripts.library.loading.common import tried
from sd_scripts.library.networks.files import read
from sd_scripts.library.networks.merge import apply
from sd_scripts.library.networks.network import Network
from sd_scripts.library.protocols import Parts
from sd_scripts.schema.errors import OptionError, Problem


@dataclass(frozen=True)
class AdapterFile:
    """An adapter file as it is now, and its strength."""

    path: Path
    weight: float
    num_bytes: int
    mtime_ns: int


class Adapters:
    """The adapter files on a model; only what changes is put on or taken off."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._on: list[tuple[AdapterFile, Network]] = []

    def problems(self, files: Sequence[str], weights: Sequence[float]) -> list[Problem]:
        """What is wrong with these files for this model."""
        problems: list[Problem] = []
        if len(files) != len(weights):
            problems.append(
                Problem("lora_weight", f"lora_weight has {len(weights)} numbers for {len(files)} files in lora; give one for each")
            )
        on = {one.path for one, _ in self._on}
        for name in files:
            found = tried(problems, lambda name=name: adapter_file(name, 1.0))
            if found is not None and found.path not in on:
                tried(problems, lambda path=found.path: read(path, self._parts))
        return [Problem(problem.option or "lora", problem.message) for problem in problems]

    def put_on(self, files: Sequence[str], weights: Sequence[float]) -> None:
        """These files with these strengths are on the model, and no others; a strength of 0 leaves a file out.

        Raises OptionError with a sentence for each that does not fit; the model is then without adapters.
        """
        wanted = [adapter_file(name, weight) for name, weight in zip(files, weights, strict=True) if weight != 0]
        if [one for one, _ in self._on] == wanted:
            return
        self.take_off()
        try:
            for one in wanted:
                self._on.append((one, apply(self._parts, one.path, one.weight)))
        except OptionError:
            self.take_off()
            raise

    def take_off(self) -> None:
        """The model is what it was before."""
        for _, network in reversed(self._on):
            network.detach()
        self._on = []

    @property
    def on_text_encoder(self) -> tuple[AdapterFile, ...]:
        """Files that change a text encoder; what it encodes is of these files."""
        return tuple(file for file, network in self._on if any(plan.module != "backbone" for plan in network.plans))


def adapter_file(name: str, weight: float) -> AdapterFile:
    """The file of that name. Raises OptionError when it is not there, or of a kind that is not opened."""
    path = Path(name).expanduser()
    if not path.is_file():
        raise OptionError(Problem("lora", f"lora: there is no file {name}"))
    if path.suffix != ".safetensors":
        raise OptionError(
            Problem("lora", f"lora: {path.name} is not a .safetensors file; files of other kinds can run code when they are read")
        )
    stat = path.stat()
    return AdapterFile(path, weight, stat.st_size, stat.st_mtime_ns)


def content_hash(name: str) -> str:
    """SHA-256 of a file, as it is now."""
    path = Path(name).expanduser()
    stat = path.stat()
    return _content_hash(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=256)
def _content_hash(path: Path, num_bytes: int, mtime_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
