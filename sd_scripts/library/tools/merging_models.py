"""Adapters merged into a model on disk: tensor by tensor, in the model's own layout; everything else is copied as it is."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sd_scripts.dataset.progress import Bar
from sd_scripts.library.adapters.layers import examples
from sd_scripts.library.adapters.maths import AdapterLayer, merged_weight
from sd_scripts.library.loading.layouts import Stored, assembled, from_original
from sd_scripts.schema.errors import OptionError, Problem, gathering, refuse
from sd_scripts.schema.files import folder_aside
from sd_scripts.schema.outside import json_of
from sd_scripts.schema.tools import MergeSection

from .adapters import DTYPES, AdapterFile, base_of, header_of_new, is_of_encoder, on_layers, open_adapter
from .low_rank import squared_distance
from .models import TOY, ModelOnDisk, open_model, published, without_text_encoders
from .report import Report, size_text
from .tensor_files import Planned, Slot, TensorFile, rounded, write

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16, *_FP8)
_WEIGHTS = (".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".msgpack", ".onnx", ".h5")
_SPARE_BYTES = 1 << 26


@dataclass
class Tally:
    """How large the updates are, and how much of them rounding takes: sums of squares."""

    update: float = 0.0
    error: float = 0.0
    layers: set[str] = field(default_factory=set)

    def add(self, old: Tensor, new: Tensor, layer: str) -> None:
        """Counts a layer's update."""
        self.update += squared_distance(old, new)
        self.layers.add(layer)

    def add_rounding(self, exact: Tensor, stored: Tensor) -> None:
        """Counts what rounding a tensor changes."""
        self.error += squared_distance(exact, stored)

    @property
    def relative(self) -> float:
        """Norm of the rounding by the norm of the update."""
        return math.sqrt(self.error / self.update) if self.update else 0.0


@dataclass(frozen=True)
class Merge:
    """Files with their strengths, on a model, and the precision of the result (None keeps that of each tensor)."""

    model: ModelOnDisk
    files: Sequence[tuple[AdapterFile, float]]
    dtype: torch.dtype | None
    tally: Tally = field(default_factory=Tally)

    def changes(self) -> dict[tuple[Path, str], list[tuple[str, Stored]]]:
        """The layers that change in each stored tensor."""
        wanted = {name for file, _ in self.files for group in file.groups for name in group}
        found: dict[tuple[Path, str], list[tuple[str, Stored]]] = {}
        for layer in sorted(wanted):
            place = self.model.place(layer)
            found.setdefault((place.slot.path, place.slot.name), []).append((layer, place.stored))
        return found

    def planned(self, file: TensorFile) -> dict[str, Planned]:
        """Every tensor of a file of the model, as it will be written."""
        changes = self.changes()
        own = {place.slot.name for place in self.model.places.values() if place.slot.path == file.path}
        found = {}
        for name, slot in file.slots.items():
            dtype = self._dtype(slot) if name in own else slot.dtype
            pieces = changes.get((file.path, name))
            make: Callable[[], Tensor] | Slot = slot
            if pieces is not None:
                make = lambda slot=slot, dtype=dtype, pieces=pieces: self._merged(slot, dtype, pieces)  # noqa: E731
            elif dtype != slot.dtype:
                make = lambda slot=slot, dtype=dtype: rounded(slot.read().float(), dtype, slot.name, "merge_precision")  # noqa: E731
            found[name] = Planned(dtype, slot.shape, make)
        return found

    def _dtype(self, slot: Slot) -> torch.dtype:
        """fp8 is for matrices: biases and norms are few, and lose more."""
        if self.dtype is None or slot.dtype not in _PLAIN or (self.dtype in _FP8 and len(slot.shape) < 2):
            return slot.dtype
        return self.dtype

    def _merged(self, slot: Slot, dtype: torch.dtype, pieces: Sequence[tuple[str, Stored]]) -> Tensor:
        """The new numbers of a stored tensor: added in float32, rounded once."""
        whole = slot.read().float()
        read: dict[tuple[int, tuple[str, ...]], Mapping[str, AdapterLayer]] = {}
        for layer, stored in pieces:
            old = from_original(stored, whole)
            new = old
            for number, (file, strength) in enumerate(self.files):
                group = file.group_with(layer)
                if group is None:
                    continue
                if (number, group) not in read:
                    read[number, group] = file.read(group)
                if layer in read[number, group]:
                    new = merged_weight(new, read[number, group][layer], strength)
            if new is old:
                continue
            self.tally.add(old, new, layer)
            if stored.form == "rows":
                whole[stored.rows[0] : stored.rows[1]] = new
            else:
                whole = assembled([(stored, new)])
        result = rounded(whole, dtype, slot.name, "merge_precision")
        self.tally.add_rounding(whole, result)
        return result


def merge_into_model(options: MergeSection) -> Report:
    """Writes the model with the adapters in its weights. Raises OptionError, and writes nothing, for whatever does not fit."""
    assert options.base_model is not None
    merge = _opened(options)
    target = Path(options.save_to).expanduser()
    plans = {file.path: merge.planned(file) for file in merge.model.files}
    size = sum(math.prod(one.shape) * one.dtype.itemsize for plan in plans.values() for one in plan.values())
    _check_space(target, size)
    sources = ", ".join(file.file.path.stem for file, _ in merge.files)
    texts = {file.path: _texts(file, {"modelspec.merged_from": sources}) for file in merge.model.files}
    if merge.model.path.is_dir():
        _write_folder(merge.model, target, plans, texts)
    else:
        write(target, plans[merge.model.path], texts[merge.model.path], hashed=False, label=f"merging into {merge.model.label}")
    return _report(merge, target, size)


def _texts(file: TensorFile, changes: Mapping[str, str]) -> dict[str, str]:
    return header_of_new([file], {"format": file.metadata.get("format", "pt"), **changes})


def _opened(options: MergeSection) -> Merge:
    """Everything that is merged, read once and found to fit. Raises OptionError with every problem."""
    assert options.base_model is not None
    problems: list[Problem] = []
    base: str | None = options.base_model
    if base == TOY:
        base = base_of(open_adapter(options.models[0], "models"), base)
    assert base is not None
    model = open_model(base, "base_model")
    if not options.merge_text_encoder:
        model = without_text_encoders(model)
    with gathering(problems):
        _check_target(model, Path(options.save_to).expanduser())
    files: list[tuple[AdapterFile, float]] = []
    for value, strength in zip(options.models, options.ratios or (1.0,) * len(options.models)):
        with gathering(problems):
            file = _on_model(value, model)
            kinds = set(file.check())
            if "oft" in kinds and strength != 1:
                raise OptionError(f"ratios: {file.label} is an oft adapter: it rotates weights and has no strength other than 1")
            files.append((file, strength))
    refuse(problems)
    merge = Merge(model, files, DTYPES.get(options.merge_precision))
    _check_base(merge)
    return merge


def _on_model(value: str, model: ModelOnDisk) -> AdapterFile:
    """A file on the layers of a model; what is for text encoders that the model does not have is left out only where that was asked for."""
    opened = open_adapter(value, "models")
    if model.without_text_encoders:
        # The text encoders' names, to know what is left out; the backbone's are the model's own.
        others = published(model.layers.architecture.name).names
        slots = {name: slot for name, slot in opened.slots.items() if not is_of_encoder(name, others)}
        opened = TensorFile(opened.path, slots, opened.metadata, opened.data_start)
    try:
        return on_layers(opened, model.layers)
    except OptionError as err:
        has = {name.partition(".")[0] for name in model.layers.modules}
        hint = "" if len(has) > 1 else f". {model.label} has no text encoders; merge_text_encoder = false leaves out what is for them"
        raise OptionError([Problem("models", f"{problem.message}{hint}") for problem in err.problems]) from err


def _check_base(merge: Merge) -> None:
    """Raises OptionError for layers that are stored in a form to which nothing can be added."""
    packed = []
    for pieces in merge.changes().values():
        for layer, _ in pieces:
            place = merge.model.place(layer)
            packed += [layer] if place.unpacked is not None or place.slot.dtype not in _PLAIN else []
    if packed:
        raise OptionError(
            f"base_model: {merge.model.label} is quantised ({examples(packed, 3)}), so the sum would be lost in rounding. Merge "
            "into the bf16 or fp16 version of the model and quantise afterwards"
        )


def _check_target(model: ModelOnDisk, target: Path) -> None:
    """Raises OptionError for a place where the result would destroy something or could not be found again."""
    if model.path.is_dir():
        if target.suffix == ".safetensors":
            name = f"{target.name} is the name of a file, but {model.label} is a folder"
            raise OptionError(f"save_to: {name}, and so is the result; leave out .safetensors")
        if target.resolve().is_relative_to(model.path.resolve()) or model.path.resolve().is_relative_to(target.resolve()):
            raise OptionError(f"save_to: {target.name} lies in {model.label} or around it; choose another folder")
        if target.is_file() or (target.is_dir() and any(target.iterdir())):
            raise OptionError(f"save_to: {target} is there already; choose a new folder")
    elif target.suffix != ".safetensors" or target.is_dir():
        raise OptionError(f"save_to: {target.name} has to be a file that ends with .safetensors, since {model.label} is one")


def _check_space(target: Path, size: int) -> None:
    """Raises OptionError when the disk has no room for the result."""
    there = next(folder for folder in target.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(there).free
    if free < size + _SPARE_BYTES:
        raise OptionError(f"save_to: the result takes {size_text(size)}, but only {size_text(free)} are free on the disk of {target.name}")


def _write_folder(
    model: ModelOnDisk, target: Path, plans: Mapping[Path, Mapping[str, Planned]], texts: Mapping[Path, Mapping[str, str]]
) -> None:
    """The folder with its merged weights; other files are copied, apart from further copies of the old weights."""
    rewritten = {path.parent for path in plans} | {model.path}
    files = sorted(path for path in model.path.rglob("*") if path.is_file())
    with folder_aside(target) as aside:
        for path in Bar(files, desc=f"merging into {model.label}", unit="file", delay=2, leave=False):
            new = aside / path.relative_to(model.path)
            new.parent.mkdir(parents=True, exist_ok=True)
            if path in plans:
                write(new, plans[path], texts[path], hashed=False, label=path.name)
            elif path.suffix not in _WEIGHTS or path.parent not in rewritten:
                shutil.copyfile(path, new)
                if path.name.endswith(".safetensors.index.json"):
                    _bring_weights(path, new)
        for path in {path.parent for path in plans}:
            _settle_folder(path, aside / path.relative_to(model.path), plans)


def _bring_weights(old: Path, new: Path) -> None:
    """Copies weights that an index names outside of its folder, as built-in models share them, beside the copied index."""
    content = json_of(old.read_text(encoding="utf-8"))
    outside = {name for name in content["weight_map"].values() if Path(name).name != name}
    for name in outside:
        shutil.copyfile(old.parent / name, new.parent / Path(name).name)
    if outside:
        content["weight_map"] = {tensor: Path(name).name for tensor, name in content["weight_map"].items()}
        new.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _settle_folder(old: Path, new: Path, plans: Mapping[Path, Mapping[str, Planned]]) -> None:
    """Size and precision, as index and configuration of a network's folder say them."""
    own = [one for path, plan in plans.items() if path.parent == old for one in plan.values()]
    for index in new.glob("*.safetensors.index*.json"):
        content = json_of(index.read_text(encoding="utf-8"))
        content.setdefault("metadata", {})["total_size"] = sum(math.prod(one.shape) * one.dtype.itemsize for one in own)
        index.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    config = new / "config.json"
    content = json_of(config.read_text(encoding="utf-8"))
    widest = max((one.dtype for one in own if one.dtype.is_floating_point), key=lambda dtype: dtype.itemsize)
    for key in ("dtype", "torch_dtype"):
        if key in content:
            config.write_text(
                json.dumps({**content, key: str(widest).removeprefix("torch.")}, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
            )


def _report(merge: Merge, target: Path, size: int) -> Report:
    tally = merge.tally
    names = ", ".join(f"{file.label} x {strength:g}" for file, strength in merge.files)
    lines = [
        f"merged {names} into {merge.model.label} ({merge.model.layers.architecture.label}): {len(tally.layers)} layers changed",
        f"written: {target.name}, {size_text(size)}; rounding changed the update by {100 * tally.relative:.2g} %",
    ]
    if tally.relative > 0.5:
        lines.append("more than half of the update is lost in rounding: choose a merge_precision with more digits")
    return Report(lines, {"layers": len(tally.layers), "rounding": tally.relative, "num_bytes": size})
