"""Several adapter files on one model at once, for making images: on with weights, changed, off. The model's own weights never change."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from sd_scripts.dataset.progress import Bar
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.common import tried
from sd_scripts.runs.states import sha256
from sd_scripts.schema.errors import OptionError, Problem, refuse

from .files import read
from .maths import AdapterLayer, Kind
from .merge import apply, put_on
from .network import AdapterNetwork


@dataclass(frozen=True)
class _File:
    """One file on the model: a network for each kind of adapter that it holds."""

    path: Path
    networks: tuple[AdapterNetwork, ...]


class AppliedAdapters:
    """The adapter files that `apply_adapters` has put on a model, in its order."""

    def __init__(self, files: Sequence[_File], weights: Sequence[float]) -> None:
        self._files = tuple(files)
        self._weights = tuple(weights)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files; none after `remove`."""
        return tuple(file.path for file in self._files)

    @property
    def weights(self) -> tuple[float, ...]:
        """Their strengths."""
        return self._weights

    def set_weights(self, weights: Sequence[float]) -> None:
        """New strengths, one for each file; the next image is made with them. 0 leaves a file out and costs no time.

        Raises OptionError for another number of weights than files, or an oft file with a weight other than 0 or 1; nothing has changed
        then.
        """
        if len(weights) != len(self._files):
            raise OptionError(f"there are {len(weights)} weights for {len(self._files)} adapter files; give one for each")
        problems: list[Problem] = []
        for file, weight in zip(self._files, weights):
            tried(problems, partial(_check_weight, file.path, (one.kind for one in file.networks), weight))
        refuse(problems)
        for file, weight, before in zip(self._files, weights, self._weights):
            for network in file.networks if weight != before else ():
                network.set_strength(weight)
        self._weights = tuple(weights)

    def remove(self) -> None:
        """Takes all files off; the model is then what it was before them. Once they are off, nothing happens."""
        for file in reversed(self._files):
            _take_off(file.networks)
        self._files, self._weights = (), ()


def apply_adapters(parts: Parts, files: Sequence[tuple[Path, float]], *, dtype: torch.dtype | None = None) -> AppliedAdapters:
    """Puts adapter files on a loaded model with these weights, each as a branch of its own beside the frozen layers.

    Nothing is merged, so it is exact for quantised layers too, and comes off without a trace. A weight of 1 is as trained, 0 leaves the
    file out for now; alphas in the files are respected. Files of any trainer and of all kinds are taken; files whose layers are lora or
    dora may share layers, else all files on one layer are of one kind. An adapter stands on the device of its layers and moves with them.

    dtype: precision that lora values are held in, such as that of the model; None is float32. Takes a few seconds for a file on a model
    of 60 blocks and shows progress. Raises OptionError with the problems of all files (not readable, of another model family, oft with a
    weight other than 0 or 1); the model is then as it was.
    """
    applied: list[_File] = []
    problems: list[Problem] = []
    for path, weight in Bar(files, desc="applying LoRA files", unit="file", delay=2, leave=False):
        file = tried(problems, partial(_put_on, parts, path, weight, dtype))
        if file is not None:
            applied.append(file)
    handle = AppliedAdapters(applied, [weight for _, weight in files][: len(applied)])
    if problems:
        handle.remove()
        raise OptionError(problems)
    return handle


@dataclass(frozen=True)
class AdapterForTraining:
    """See protocols.TrainingAdapter."""

    name: str
    sha256: str
    strength: float
    network: AdapterNetwork

    def disabled(self) -> AbstractContextManager[None]:
        """Inside, the model is what it was without this adapter; others stay."""
        return self.network.disabled()


def put_on_for_training(parts: Parts, path: Path, strength: float) -> AdapterForTraining:
    """Puts a file on a frozen model as a branch beside its layers, in the model's precision; no weight of the model changes.

    Raises OptionError, naming the option, for a file of another model, of several kinds.
    """
    try:
        network = apply(parts, path, strength)
    except OptionError as err:
        raise OptionError([Problem("training_adapter", f"training_adapter: {problem}") for problem in err.problems]) from err
    if network.kind == "lora":
        network.hold_in(next(parameter.dtype for parameter in parts.backbone.parameters() if parameter.is_floating_point()))
    return AdapterForTraining(path.name, sha256(path), strength, network)


def _put_on(parts: Parts, path: Path, weight: float, dtype: torch.dtype | None) -> _File:
    by_kind: dict[Kind, dict[str, AdapterLayer]] = {}
    for name, adapter in read(path, parts).items():
        by_kind.setdefault(adapter.kind, {})[name] = adapter
    _check_weight(path, by_kind, weight)
    networks: list[AdapterNetwork] = []
    try:
        for adapters in by_kind.values():
            networks.append(put_on(parts, adapters, path.name, weight))
    except OptionError:
        _take_off(networks)
        raise
    for network in networks:
        if dtype is not None and network.kind == "lora":
            network.hold_in(dtype)
    return _File(path, tuple(networks))


def _check_weight(path: Path, kinds: Iterable[Kind], weight: float) -> None:
    if weight not in (0, 1) and "oft" in set(kinds):
        raise OptionError(f"{path.name} is an oft adapter: it rotates weights and has no strength other than 0 or 1, not {weight:g}")


def _take_off(networks: Sequence[AdapterNetwork]) -> None:
    for network in reversed(networks):
        network.detach()
