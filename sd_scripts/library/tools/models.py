"""A model on disk: which tensor of which file is the weight of which layer. Reads headers and configurations, no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from sd_scripts.families.common.original_unet import Stored, from_original
from sd_scripts.families.common.unet_names import UNetNames
from sd_scripts.families.flux import loading as flux
from sd_scripts.families.flux import original as original_flux
from sd_scripts.families.flux.names import FluxNames
from sd_scripts.families.qwen_edit import loading as qwen
from sd_scripts.families.qwen_edit import original as original_qwen
from sd_scripts.families.qwen_edit.names import QwenImageNames
from sd_scripts.families.sd import loading as sd
from sd_scripts.families.sdxl import loading as sdxl
from sd_scripts.families.zimage import loading as zimage
from sd_scripts.families.zimage import original as original_zimage
from sd_scripts.families.zimage.names import ZImageNames
from sd_scripts.library.adapters.layer_names import LABELS, Family, LayerNames, adaptable_layers
from sd_scripts.library.loading.common import (
    Config,
    FamilySpec,
    Found,
    class_in,
    config_of,
    configs_for,
    network,
    network_in_folder,
    read_json,
    shipped_configs,
)
from sd_scripts.library.loading.headers import FLUX, LORA, QWEN, SD1, SD2, SDXL, ZIMAGE, Header, read_header, what_is
from sd_scripts.library.loading.source import find
from sd_scripts.library.loading.weights import Entry, entries
from sd_scripts.schema.errors import OptionError

from .tensor_files import Slot, TensorFile, open_file

SPECS: dict[Family, FamilySpec] = {
    "sdxl": sdxl.SPEC,
    "sd1": sd.SPEC1,
    "sd2": sd.SPEC2,
    "flux": flux.SPEC,
    "qwen_edit": qwen.SPEC,
    "zimage": zimage.SPEC,
}
TOY = "toy"
_KNOWN = f"{', '.join(list(LABELS.values())[:-1])} and {list(LABELS.values())[-1]}"
_FILES: dict[str, Family] = {
    SDXL: "sdxl",
    "the UNet of SDXL alone": "sdxl",
    SD1: "sd1",
    "the UNet of SD 1.x alone": "sd1",
    SD2: "sd2",
    "the UNet of SD 2.x alone": "sd2",
    FLUX: "flux",
    QWEN: "qwen_edit",
    ZIMAGE: "zimage",
}
"""The family of a file, by what what_is calls it."""


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

    family: Family
    names: LayerNames
    modules: Mapping[str, nn.Module]

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each layer's weight."""
        return {name: module.weight.shape for name, module in self.modules.items()}


@dataclass(frozen=True)
class Model:
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


def open_model(value: str, option: str) -> Model:
    """The model in a file (original or diffusers layout, whole or the network alone) or diffusers folder. OptionError for anything else."""
    path = Path(value).expanduser()
    if path.is_dir():
        family, found = _in_folder(path, option)
    elif path.is_file():
        family, found = _in_file(path, option)
    else:
        raise OptionError(f"{option}: there is no file or folder {value}")
    paths = dict.fromkeys(entry.path for one in found.values() for entry, _ in one.tensors.values())
    files = {path: open_file(path, option) for path in paths}
    places = {f"{name}.{key}": _place(*pair, files) for name, one in found.items() for key, pair in one.tensors.items()}
    return Model(path, _layers(family, {name: one.module for name, one in found.items()}), places, tuple(files.values()))


def built_in(family: Family, option: str) -> str:
    """The folder of a family's built-in model, which `toy` stands for. Raises OptionError where it is not in this copy."""
    return str(find(option, TOY, SPECS[family].name).path)


def _place(entry: Entry, stored: Stored, files: Mapping[Path, TensorFile]) -> Place:
    slots, packed = files[entry.path].slots, entry.packed
    return Place(slots[entry.name], stored, None if packed is None else lambda: packed.numbers(lambda name: slots[name].read()))


def _layers(family: Family, modules: Mapping[str, nn.Module]) -> Layers:
    layers = {f"{name}.{layer}": found for name, module in modules.items() for layer, found in adaptable_layers(module).items()}
    config = config_of(modules["backbone"])
    names: LayerNames
    if family in _READ_ALONE:
        names = QwenImageNames(layers) if family == "qwen_edit" else ZImageNames(layers)
    else:
        names = FluxNames(config, layers) if family == "flux" else UNetNames(family, config, layers)
    return Layers(family, names, layers)


_READ_ALONE: tuple[Family, ...] = ("qwen_edit", "zimage")
"""Families that read with a language model, which no adapter file is about."""


def _carries_adapters(family: Family, part: str) -> bool:
    """Whether a part of a model is one whose layers files are about: not a VAE, and not a language model that it reads with."""
    return part == "backbone" or (part != "vae" and family not in _READ_ALONE)


@lru_cache(maxsize=len(LABELS))
def published(family: Family) -> Layers:
    """The layers of the published model of a family."""
    spec = SPECS[family]
    with torch.device("meta"):
        modules = {name: spec.parts[name].make(config) for name, config in shipped_configs(spec) if _carries_adapters(family, name)}
    return _layers(family, modules)


def _in_folder(path: Path, option: str) -> tuple[Family, dict[str, Found]]:
    """A diffusers folder, or the folder of its UNet or transformer alone."""
    alone = class_in(path, option)
    if alone is not None:
        family = _family_of_class(alone, read_json(path / "config.json", option))
        if family is None:
            raise OptionError(
                f"{option}: the folder {path.name} holds a {alone}; a UNet or a transformer of FLUX, Qwen-Image or Z-Image is needed"
            )
        return family, {"backbone": _network_in(SPECS[family], "backbone", path, option, path.name)}
    if not (path / "model_index.json").is_file():
        raise OptionError(f"{option}: the folder {path.name} is not a diffusers folder: it has neither model_index.json nor config.json")
    pipeline = str(read_json(path / "model_index.json", option).get("_class_name", "unknown"))
    family = next((name for name, spec in SPECS.items() if pipeline.startswith(spec.pipelines) and spec.describes(path)), None)
    if family is None:
        raise OptionError(f"{option}: {path.name} is a {pipeline}; models of {_KNOWN} can be read")
    spec = SPECS[family]
    own = [name for name, part in spec.parts.items() if _carries_adapters(family, name) and (path / part.folder / "config.json").is_file()]
    if "backbone" not in own:
        raise OptionError(f"{option}: the diffusers folder {path.name} has no {spec.parts['backbone'].folder}/config.json")
    return family, {
        name: _network_in(spec, name, path / spec.parts[name].folder, option, f"{path.name}/{spec.parts[name].folder}") for name in own
    }


def _family_of_class(class_name: str, config: Config) -> Family | None:
    transformers: dict[str, Family] = {
        "FluxTransformer2DModel": "flux",
        "QwenImageTransformer2DModel": "qwen_edit",
        "ZImageTransformer2DModel": "zimage",
    }
    if class_name in transformers:
        return transformers[class_name]
    if class_name != UNet2DConditionModel.__name__:
        return None
    if config.get("addition_embed_type") == "text_time":
        return "sdxl"
    return "sd2" if config.get("use_linear_projection") else "sd1"


def _network_in(spec: FamilySpec, name: str, folder: Path, option: str, label: str) -> Found:
    stem = spec.parts[name].stem
    plain = any((folder / f"{stem}.{ending}").is_file() for ending in ("safetensors", "safetensors.index.json"))
    variant = "fp16" if not plain and any(folder.glob(f"{stem}*fp16*")) else None
    return network_in_folder(spec, name, folder, variant, option, label)


def _in_file(path: Path, option: str) -> tuple[Family, dict[str, Found]]:
    header = read_header(path, option)
    what = what_is(header)
    if what not in _FILES:
        hint = "; LoRA files go into models" if what == LORA else ""
        raise OptionError(f"{option}: {path.name} is {what}; a model of {_KNOWN.replace(' and ', ' or ')} is needed{hint}")
    family = _FILES[what]
    spec = SPECS[family]
    found: dict[str, Found] = {}
    for name, part in spec.parts.items():
        prefixes = [prefix for prefix in part.prefixes if header.starts(prefix)]
        if not _carries_adapters(family, name) or (name != "backbone" and not prefixes):
            continue
        tensors = entries(header, option, prefixes[0] if prefixes else "")
        config = _config(spec, name, header, {key: entry.shape for key, entry in tensors.items()}, option)
        found[name] = network(spec, name, config, tensors, option, f"{part.folder} of {path.name}")
    return family, found


def _config(spec: FamilySpec, name: str, header: Header, shapes: Mapping[str, tuple[int, ...]], option: str) -> Config:
    """The configuration of a network in a file: from its own folder, from the folder of the model it lies in, or the published one."""
    part, beside = spec.parts[name], header.path.parent
    if name == "backbone" and spec in (flux.SPEC, qwen.SPEC, zimage.SPEC):
        try:
            if spec is not qwen.SPEC:
                return (original_flux if spec is flux.SPEC else original_zimage).config_of(shapes)
            return original_qwen.config_of(shapes, header.has(original_qwen.CONTROLS_AT_ZERO))
        except (KeyError, IndexError, ValueError, ZeroDivisionError) as err:
            raise OptionError(f"{option}: the transformer of {header.path.name} lacks the tensor {err.args[0]}") from err
    folder = beside if name == "backbone" and class_in(beside, option) == part.class_name else configs_for(spec, header.path) / part.folder
    return read_json(folder / "config.json", option)


def without_text_encoders(model: Model) -> Model:
    """The same model, its backbone alone; the names of the text encoders' layers are still known."""
    modules = {name: module for name, module in model.layers.modules.items() if name.startswith("backbone.")}
    return replace(model, layers=replace(model.layers, modules=modules), without_text_encoders=True)
