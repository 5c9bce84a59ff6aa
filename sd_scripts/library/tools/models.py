"""A model on disk: which tensor of which file is the weight of which layer. Reads headers and configurations, no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_scripts.library.adapters.architectures import Architecture, architecture_of, architectures
from sd_scripts.library.adapters.layer_names import LayerNames, layers_in
from sd_scripts.library.adapters.names import networks_of
from sd_scripts.library.loading.common import (
    Config,
    FamilySpec,
    FoundNetwork,
    class_in,
    config_of,
    configs_for,
    network,
    network_in_folder,
    read_json,
)
from sd_scripts.library.loading.headers import read_header
from sd_scripts.library.loading.layouts import Stored, from_original
from sd_scripts.library.loading.source import find
from sd_scripts.library.loading.weights import TensorEntry, entries
from sd_scripts.runs.model_headers import LORA, Header, what_is
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import pipeline_file

from .tensor_files import Slot, TensorFile, open_file

TOY = "toy"


@dataclass(frozen=True)
class Place:
    """Where the weight of a layer stands: the tensor of a file, its form there, and how it is made where the file holds it in few bits."""

    slot: Slot
    stored: Stored
    unpacked: Callable[[], Tensor] | None = None

    def read(self) -> Tensor:
        """The layer's weight as the model uses it, float32."""
        if self.unpacked is not None:
            return from_original(self.stored, self.unpacked().float())
        if self.stored.form == "rows":
            return self.slot.rows(*self.stored.rows[:2]).float()
        return from_original(self.stored, self.slot.read().float())


@dataclass(frozen=True)
class Layers:
    """The layers of a model that can carry an adapter, by `<module>.<layer>`, without values."""

    architecture: Architecture
    names: LayerNames
    modules: Mapping[str, nn.Module]

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each layer's weight."""
        return {name: module.weight.shape for name, module in self.modules.items()}


@dataclass(frozen=True)
class ModelOnDisk:
    """A model on disk."""

    path: Path
    layers: Layers
    places: Mapping[str, Place]
    """Of every tensor of backbone and text encoders, by `<module>.<name>`."""
    files: tuple[TensorFile, ...]
    """The files that hold them."""
    without_text_encoders: bool = False
    """Adapters go into the backbone alone."""

    @property
    def label(self) -> str:
        return self.path.name

    def place(self, layer: str) -> Place:
        """Where a layer's weight stands."""
        return self.places[f"{layer}.weight"]


def open_model(value: str, option: str) -> ModelOnDisk:
    """The model in a file (original or diffusers layout, whole or the network alone) or diffusers folder. OptionError for anything else."""
    path = Path(value).expanduser()
    if path.is_dir():
        architecture, found = _in_folder(path, option)
    elif path.is_file():
        architecture, found = _in_file(path, option)
    else:
        raise OptionError(f"{option}: there is no file or folder {value}")
    paths = dict.fromkeys(entry.path for one in found.values() for entry, _ in one.tensors.values())
    files = {path: open_file(path, option) for path in paths}
    places = {f"{name}.{key}": _place(*pair, files) for name, one in found.items() for key, pair in one.tensors.items()}
    return ModelOnDisk(path, _layers(architecture, {name: one.module for name, one in found.items()}), places, tuple(files.values()))


def known(conjunction: str) -> str:
    """The labels of all architectures, for a sentence."""
    *labels, last = [one.label for one in architectures().values()]
    return f"{', '.join(labels)} {conjunction} {last}"


def built_in(architecture: Architecture, option: str) -> str:
    """The folder of a built-in model of the family, which `toy` stands for. Raises OptionError where it is not in this copy."""
    return str(find(option, TOY, architecture.spec.name).path)


def _place(entry: TensorEntry, stored: Stored, files: Mapping[Path, TensorFile]) -> Place:
    slots, packed = files[entry.path].slots, entry.packed
    return Place(slots[entry.name], stored, None if packed is None else lambda: packed.numbers(lambda name: slots[name].read()))


def _layers(architecture: Architecture, modules: Mapping[str, nn.Module]) -> Layers:
    layers = layers_in(modules)
    return Layers(architecture, architecture.layer_names(architecture, config_of(modules["backbone"]), layers), layers)


@cache
def published(architecture: str) -> Layers:
    """The layers of the published model of an architecture, by its name."""
    found = architectures()[architecture]
    return _layers(found, networks_of(found, found.spec.configs))


def _in_folder(path: Path, option: str) -> tuple[Architecture, dict[str, FoundNetwork]]:
    """A diffusers folder, or the folder of its UNet or transformer alone."""
    alone = class_in(path, option)
    if alone is not None:
        architecture = architecture_of([alone], read_json(path / "config.json", option))
        if architecture is None:
            raise OptionError(f"{option}: the folder {path.name} holds a {alone}; a UNet or a transformer of {known('or')} is needed")
        return architecture, {"backbone": _network_in(architecture.spec, "backbone", path, option, path.name)}
    index = pipeline_file(path)
    if index is None:
        raise OptionError(f"{option}: the folder {path.name} is not a diffusers folder: it has neither model_index.json nor config.json")
    pipeline = str(read_json(index, option).get("_class_name", "unknown"))
    candidates = [one for one in architectures().values() if pipeline.startswith(one.spec.pipelines)]
    architecture = next((one for one in candidates if one.spec.describes(path)), None)
    if architecture is None:
        raise OptionError(f"{option}: {path.name} is a {pipeline}; models of {known('and')} can be read")
    folders = {name: part.folder for name, part in architecture.spec.parts.items() if architecture.carries_adapters(name)}
    own = [name for name, folder in folders.items() if (path / folder / "config.json").is_file()]
    if "backbone" not in own:
        raise OptionError(f"{option}: the diffusers folder {path.name} has no {folders['backbone']}/config.json")
    return architecture, {
        name: _network_in(architecture.spec, name, path / folders[name], option, f"{path.name}/{folders[name]}") for name in own
    }


def _network_in(spec: FamilySpec, name: str, folder: Path, option: str, label: str) -> FoundNetwork:
    stem = spec.parts[name].stem
    plain = any((folder / f"{stem}.{ending}").is_file() for ending in ("safetensors", "safetensors.index.json"))
    variant = "fp16" if not plain and any(folder.glob(f"{stem}*fp16*")) else None
    return network_in_folder(spec, name, folder, variant, option, label)


def _in_file(path: Path, option: str) -> tuple[Architecture, dict[str, FoundNetwork]]:
    header = read_header(path, option)
    what = what_is(header)
    architecture = next((one for one in architectures().values() if what in one.files), None)
    if architecture is None:
        hint = "; LoRA files go into models" if what == LORA else ""
        raise OptionError(f"{option}: {path.name} is {what}; a model of {known('or')} is needed{hint}")
    found: dict[str, FoundNetwork] = {}
    for name, part in architecture.spec.parts.items():
        prefixes = [prefix for prefix in part.prefixes if header.starts(prefix)]
        if not architecture.carries_adapters(name) or (name != "backbone" and not prefixes):
            continue
        tensors = entries(header, option, prefixes[0] if prefixes else "")
        config = _config(architecture, name, header, {key: entry.shape for key, entry in tensors.items()}, option)
        found[name] = network(architecture.spec, name, config, tensors, option, f"{part.folder} of {path.name}")
    return architecture, found


def _config(architecture: Architecture, name: str, header: Header, shapes: Mapping[str, tuple[int, ...]], option: str) -> Config:
    """The configuration of a network in a file: from its own folder, from the folder of the model it lies in, or the published one."""
    part, beside = architecture.spec.parts[name], header.path.parent
    if name == "backbone" and architecture.config_of is not None:
        try:
            return architecture.config_of(header, shapes)
        except (KeyError, IndexError, ValueError, ZeroDivisionError) as err:
            raise OptionError(f"{option}: the transformer of {header.path.name} lacks the tensor {err.args[0]}") from err
    is_own = name == "backbone" and class_in(beside, option) == part.class_name
    return read_json((beside if is_own else configs_for(architecture.spec, header.path) / part.folder) / "config.json", option)


def without_text_encoders(model: ModelOnDisk) -> ModelOnDisk:
    """The same model, its backbone alone; the names of the text encoders' layers are still known."""
    modules = {name: module for name, module in model.layers.modules.items() if name.startswith("backbone.")}
    return replace(model, layers=replace(model.layers, modules=modules), without_text_encoders=True)
