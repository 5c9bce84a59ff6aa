"""Adapter files of any trainer, read a few layers at a time, and the files that tools write."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sd_scripts.dataset.progress import Bar
from sd_scripts.families import RUNS
from sd_scripts.library.adapters.architectures import architectures
from sd_scripts.library.adapters.layer_names import Names, Target
from sd_scripts.library.adapters.layers import examples
from sd_scripts.library.adapters.layouts import LAYOUT, PEFT_CONFIG
from sd_scripts.library.adapters.maths import AdapterLayer, Kind
from sd_scripts.library.adapters.reading import adapters_of, place_of, refusal, split_key
from sd_scripts.library.adapters.recognising import architecture_in_header
from sd_scripts.library.core.protocols import StateDict
from sd_scripts.library.loading.headers import read_header
from sd_scripts.library.loading.source import find, toy_of
from sd_scripts.library.train.metadata import CONFIG
from sd_scripts.runs.model_headers import LORA, what_is
from sd_scripts.schema.errors import OptionError, Problem, gathering, refuse
from sd_scripts.schema.outside import json_of

from .models import TOY, Layers, built_in, known, open_model, published
from .tensor_files import HASHES, Slot, TensorFile, open_file, rounded

DTYPES: dict[str, torch.dtype] = {
    "float": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8_e4m3fn": torch.float8_e4m3fn,
}


@dataclass(frozen=True)
class AdapterFile:
    """An adapter file whose keys all belong to a model's layers; its tensors are read when they are asked for."""

    file: TensorFile
    layers: Layers
    groups: Mapping[tuple[str, ...], tuple[Slot, ...]]
    """The tensors of every layer, or of all layers that are one matrix in the original layout."""
    checks_shapes: bool

    @property
    def label(self) -> str:
        return self.file.path.name

    def read(self, group: tuple[str, ...]) -> dict[str, AdapterLayer]:
        """The adapters of a group, float32, by `<module>.<layer>`; empty for a group that the file does not have."""
        slots = self.groups.get(group)
        if slots is None:
            return {}
        tensors = {slot.name: slot.read() for slot in slots}
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor.float()).all():
                raise OptionError(f"{self.label}: {name} has values that are not finite numbers, so the file is broken")
        shapes = self.layers.shapes if self.checks_shapes else None
        return adapters_of(tensors, self.file.metadata, self.layers.names, self.label, shapes)

    def group_with(self, layer: str) -> tuple[str, ...] | None:
        """The group that a layer belongs to; None where the file has none."""
        group = self.layers.names.together(layer)
        return group if group in self.groups else None

    def check(self) -> Counter[Kind]:
        """Reads every group once and counts the layers of each kind. OptionError with every group that is not whole or does not fit."""
        problems: list[Problem] = []
        kinds: Counter[Kind] = Counter()
        for group in Bar(self.groups, desc=f"checking {self.label}", unit="layer", delay=2, leave=False):
            with gathering(problems):
                kinds.update(adapter.kind for adapter in self.read(group).values())
        refuse(problems)
        return kinds


def open_adapter(value: str, option: str) -> TensorFile:
    """An adapter file's header. Raises OptionError for a file of another kind."""
    path = Path(value).expanduser()
    if not path.is_file():
        raise OptionError(f"{option}: there is no file {value}")
    what = what_is(read_header(path, option))
    if what != LORA:
        raise OptionError(f"{option}: {path.name} is {what}; a LoRA file is needed")
    return open_file(path, option)


def by_layer(file: TensorFile) -> tuple[dict[str, dict[str, Slot]], list[str]]:
    """The tensors of each layer as the file names it, by peft's words, and the names of those that belong to no adapter.

    A tensor that stands there once more, as a dora's lengths do for two programs, keeps its whole name.
    """
    stems: dict[str, dict[str, Slot]] = {}
    others = []
    for name, slot in file.slots.items():
        parts = split_key(name)
        if parts is None:
            others.append(name)
            continue
        held = stems.setdefault(parts[0], {})
        held[name if parts[1] in held else parts[1]] = slot
    return stems, others


def is_of_encoder(key: str, names: Names) -> bool:
    """Whether a key is for a layer of a text encoder."""
    place = place_of(key, names)
    return place is not None and not place[0].layers[0].startswith("backbone.")


def on_layers(file: TensorFile, layers: Layers, *, checks_shapes: bool = True) -> AdapterFile:
    """The file on these layers. Raises OptionError for keys that fit no layer."""
    groups: dict[tuple[str, ...], list[Slot]] = {}
    unknown = []
    for name, slot in file.slots.items():
        place = place_of(name, layers.names)
        if place is None:
            unknown.append(name)
        else:
            groups.setdefault(group_of(place[0], layers.names), []).append(slot)
    if unknown or not groups:
        raise OptionError(refusal(file.path.name, unknown, len(file.slots)))
    return AdapterFile(file, layers, {group: tuple(slots) for group, slots in groups.items()}, checks_shapes)


def group_of(target: Target, names: Names) -> tuple[str, ...]:
    """The layers that are one matrix of the original layout with those of the target."""
    return names.together(target.layers[0])


def layers_for(file: TensorFile, base_model: str | None) -> tuple[Layers, bool]:
    """The layers a file is for, and whether their sizes are known to be the file's own.

    From base_model, or the published model of the architecture that the names in the file fit best, which is told by the shapes where names
    do not tell it. Raises OptionError for a file with names that it does not have.
    """
    layers, sized = nearest_layers(file, base_model)
    if any(place_of(name, layers.names) is None for name in file.slots):
        raise OptionError(_unknown_family(file, layers, base_model))
    return layers, sized


def nearest_layers(file: TensorFile, base_model: str | None) -> tuple[Layers, bool]:
    """As layers_for, for a file that may have names of its own."""
    base = base_of(file, base_model) or _built_in_base(file)
    if base is not None:
        return open_model(base, "base_model").layers, True
    fits = {name: _fit(file, published(name)) for name in architectures()}
    told = architecture_in_header(file.metadata)
    best = max(fits, key=lambda name: (fits[name], told is not None and name == told.name))
    return published(best), fits[best][1] > 0


def base_of(file: TensorFile, base_model: str | None) -> str | None:
    """The model that base_model names; for `toy` the built-in one that the names in the file fit best."""
    if base_model != TOY:
        return base_model
    known = [one for one in architectures().values() if toy_of(one.spec.name).is_dir()]
    folders = dict.fromkeys(built_in(one, "base_model") for one in known or architectures().values())
    return max(folders, key=lambda folder: _fit(file, open_model(folder, "base_model").layers))


def _built_in_base(file: TensorFile) -> str | None:
    """The folder of the built-in model that a file was trained on, as its header says; None for any other."""
    try:
        settings = json_of(file.metadata.get(CONFIG, "{}"))
        is_toy, script = settings.get("pretrained_model_name_or_path") == TOY, settings.get("script")
    except (ValueError, AttributeError):
        return None
    family = next((run.family for run in RUNS.values() if run.script == script), None)
    folder = find("base_model", TOY, family).path if is_toy and family is not None else None
    return None if folder is None else str(folder)


def _fit(file: TensorFile, layers: Layers) -> tuple[int, int]:
    """How many keys have a place in a model, and how many matrices have the width of their layer."""
    placed = sized = 0
    for name, slot in file.slots.items():
        place = place_of(name, layers.names)
        if place is None:
            continue
        placed += 1
        if place[1] in ("lora_A.weight", "hada_w1_b") and slot.shape[1:] == layers.modules[place[0].layers[0]].weight.shape[1:]:
            sized += 1
    return placed, sized


def _unknown_family(file: TensorFile, layers: Layers, base_model: str | None) -> str:
    unknown = [name for name in file.slots if place_of(name, layers.names) is None]
    if len(unknown) == len(file.slots):
        return f"{file.path.name}: its names, such as {examples(unknown, 3)}, are those of no model known here ({known('and')})"
    text = refusal(file.path.name, unknown, len(file.slots))
    hint = (
        ""
        if base_model is not None
        else f" The nearest is {layers.architecture.label}; give base_model if it is for a model of another size"
    )
    return f"{text}.{hint}"


def header_of_new(sources: Sequence[TensorFile], changes: Mapping[str, str]) -> dict[str, str]:
    """Header texts of a file made from others: those that they agree on, without hashes and names of layouts, and the changes."""
    kept = dict(sources[0].metadata) if sources else {}
    for source in sources[1:]:
        kept = {key: text for key, text in kept.items() if source.metadata.get(key) == text}
    stale = (*HASHES, LAYOUT, PEFT_CONFIG, "lora_adapter_metadata")
    return {**{key: text for key, text in kept.items() if key not in stale}, **changes}


def network_texts(ranks: Sequence[int], alphas: Sequence[float], conv_ranks: Sequence[int] = ()) -> dict[str, str]:
    """kohya's texts about a network whose layers have these ranks and alphas; `Dynamic` where they differ, as kohya's resize writes."""
    common = Counter(alphas).most_common(1)[0][0]
    texts = {
        "ss_network_module": "networks.lora",
        "ss_network_dim": str(ranks[0]) if len(set(ranks)) == 1 else "Dynamic",
        "ss_network_alpha": str(float(common)) if len(set(alphas)) == 1 else "Dynamic",
    }
    if conv_ranks:
        dim = str(conv_ranks[0]) if len(set(conv_ranks)) == 1 else "Dynamic"
        texts["ss_network_args"] = json.dumps({"conv_dim": dim, "conv_alpha": str(float(common))})
    return texts


def is_wide(down: Tensor) -> bool:
    """Whether a down matrix is that of a convolution with a kernel larger than 1x1."""
    return down.dim() == 4 and tuple(down.shape[2:]) != (1, 1)


def with_alpha(adapter: AdapterLayer, alpha: float) -> AdapterLayer:
    """The same update with this alpha. diffusers loses alphas that differ between layers, so tools write one for all."""
    return adapter if adapter.rank is None else adapter.rescaled(alpha / adapter.rank)


def in_precision(tensors: StateDict, dtype: torch.dtype) -> StateDict:
    """The tensors of a file, made in float32, in its precision; alphas stay as they are where it does not have them exactly."""
    found = {}
    for name, tensor in tensors.items():
        found[name] = tensor if _must_stay(name, tensor, dtype) else rounded(tensor, dtype, name, "save_precision")
    return found


def _must_stay(name: str, tensor: Tensor, dtype: torch.dtype) -> bool:
    return name.endswith(".alpha") and bool(tensor.to(dtype).float() != tensor)
