"""Check an adapter file: whether its layers are whole and finite, which family they are for, and which programs read them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sd_scripts.dataset.progress import Bar
from sd_scripts.library.adapters.architectures import Architecture
from sd_scripts.library.adapters.layer_names import LayerNames
from sd_scripts.library.adapters.layers import examples
from sd_scripts.library.adapters.layouts import PEFT_CONFIG
from sd_scripts.library.adapters.maths import AdapterLayer, Kind, low_rank_update
from sd_scripts.library.adapters.readers import StoredAdapter, layers_read
from sd_scripts.library.adapters.reading import place_of
from sd_scripts.library.adapters.recognising import other_architecture
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.tools import VerifySection

from .adapters import by_layer, nearest_layers, on_layers, open_adapter
from .low_rank import product_norm
from .models import Layers, known
from .report import Report, size_text, table
from .tensor_files import Slot, TensorFile

_STYLES = (
    (("lora_unet_", "lora_te"), "kohya"),
    (("lycoris_",), "lycoris"),
    (("lora_transformer_",), "onetrainer"),
    (("base_model.model.",), "peft"),
    (("diffusion_model.", "model.diffusion_model.", "text_encoders."), "comfyui"),
    (("unet.", "transformer.", "text_encoder.", "text_encoder_2."), "diffusers"),
)
_MARKS: tuple[tuple[str, Kind], ...] = (
    ("hada_", "loha"),
    ("lokr_", "lokr"),
    ("oft_", "oft"),
    ("lora_magnitude", "dora"),
    ("lora_", "lora"),
)


@dataclass
class Findings:
    """What is wrong, what is worth knowing, and the layers by name."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kinds: dict[str, Kind] = field(default_factory=dict)
    """Of each layer."""
    ranks: Counter[int] = field(default_factory=Counter)
    scales: Counter[float] = field(default_factory=Counter)
    norms: dict[str, float] = field(default_factory=dict)
    """Frobenius norm of each layer's update."""


@torch.no_grad()
def verify(options: VerifySection) -> Report:
    """Reads the file once, a layer at a time. The report is broken when the file has problems."""
    file = open_adapter(options.model, "model")
    found = Findings()
    stems, others = by_layer(file)
    if others:
        found.problems.append(f"{len(others)} keys belong to no kind of adapter that is known here: {examples(others, 3)}")
    for stem, slots in Bar(stems.items(), desc="checking", unit="layer", delay=2, leave=False):
        _check_layer(stem, slots, found)
    architecture, names = _check_architecture(file, options, found)
    _check_zeros(found)
    style = next((name for starts, name in _STYLES if any(key.startswith(starts) for key in file.slots)), "other")
    if PEFT_CONFIG in file.metadata:
        style = "peft"
    largest = sorted(found.norms.items(), key=lambda item: -item[1])[: options.num_largest]
    readers = {} if names is None else _readers(stems, found, names)
    label = "unknown" if architecture is None else architecture.label
    lines = _lines(file, found, label, style, readers, largest)
    values = {
        "problems": found.problems,
        "notes": found.notes,
        "family": None if architecture is None else architecture.name,
        "names": style,
        "kinds": dict(Counter(found.kinds.values())),
        "ranks": {str(rank): count for rank, count in sorted(found.ranks.items())},
        "dtypes": {_dtype(dtype): count for dtype, count in file.dtypes.items()},
        "layers": len(found.kinds),
        "read_by": readers,
        "largest_updates": dict(largest),
    }
    return Report(lines, values, broken=bool(found.problems))


def _check_layer(stem: str, slots: Mapping[str, Slot], found: Findings) -> None:
    """Values, completeness and the norm of one layer."""
    tensors = {rest: slot.read().float() for rest, slot in slots.items()}
    broken = [slots[rest].name for rest, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        found.problems.append(f"{examples(broken, 3)}: values are not finite numbers (NaN or infinite)")
        return
    kind = next((kind for mark, kind in _MARKS if any(rest.startswith(mark) for rest in slots)), None)
    if kind is None:
        found.problems.append(f"{stem} has nothing but {', '.join(slots)}; its matrices are missing")
        return
    found.kinds[stem] = kind
    alpha = tensors.pop("alpha", None)
    adapter = AdapterLayer(kind, tensors)
    if adapter.rank is not None:
        found.ranks[adapter.rank] += 1
        scale = 1.0 if alpha is None else float(alpha) / adapter.rank
        adapter = replace(adapter, scale=scale)
        found.scales[round(scale, 6)] += 1
    try:
        norm = update_norm(adapter)
        found.norms |= {} if math.isnan(norm) else {stem: norm}
    except (KeyError, RuntimeError):
        sizes = ", ".join(f"{rest} {tuple(tensor.shape)}" for rest, tensor in sorted(tensors.items()))
        found.problems.append(f"{stem} is not whole or its matrices do not fit together: {sizes}")


def update_norm(adapter: AdapterLayer) -> float:
    """Frobenius norm of a layer's update, nan for oft, which adds nothing. KeyError or RuntimeError for a layer that is not whole."""
    t = adapter.tensors
    if adapter.kind == "oft":
        return math.nan if t["oft_R.weight"].any() else 0.0
    if adapter.kind in ("lora", "dora"):
        up, down = t["lora_B.weight"].flatten(1), t["lora_A.weight"].flatten(1)
        if up.shape[1] != len(down):
            raise RuntimeError(f"{up.shape[1]} columns against {len(down)} rows")
        return abs(adapter.scale) * product_norm(up, down)
    if adapter.kind == "lokr":
        # The norm of a Kronecker product is the product of the norms.
        return abs(adapter.scale) * _factor_norm(t, "lokr_w1") * _factor_norm(t, "lokr_w2")
    shape = torch.Size((len(t["hada_w1_a"]), t["hada_w1_b"].flatten(1).shape[1]))
    return float(low_rank_update(adapter, shape).norm())


def _factor_norm(tensors: Mapping[str, Tensor], name: str) -> float:
    if name in tensors:
        return float(tensors[name].double().norm())
    return product_norm(tensors[f"{name}_a"], tensors[f"{name}_b"].flatten(1))


def _check_architecture(file: TensorFile, options: VerifySection, found: Findings) -> tuple[Architecture | None, LayerNames | None]:
    """What the file is for, and the names of the model's layers when the model is of that architecture; finds what does not fit."""
    layers, sized = nearest_layers(file, options.base_model)
    architecture = layers.architecture
    unknown = [name for name in file.slots if place_of(name, layers.names) is None]
    other = other_architecture(file.slots, file.metadata, layers.names)
    if other is not None and unknown:
        # By the widths as well, since some names are those of several families.
        other = nearest_layers(file, None)[0].architecture
    if other is not None:
        found.problems.append(f"it is a LoRA for {other.label}, but the model is {architecture.label}; give a base_model of that family")
        return other, None
    if len(unknown) == len(file.slots):
        models = architecture.label if options.base_model is not None else f"any model known here ({known('and')})"
        found.problems.append(f"none of its {len(unknown)} keys belongs to a layer of {models}, such as {examples(unknown, 3)}")
        return None, None
    if unknown:
        found.problems.append(f"{len(unknown)} of {len(file.slots)} keys fit no layer of {architecture.label}: {examples(unknown, 3)}")
    if not sized:
        found.notes.append(f"no layer has the size of the published {architecture.label}; give base_model to check the sizes")
    _check_fit(file, layers, sized, unknown, found)
    return architecture, layers.names


def _readers(stems: Mapping[str, Mapping[str, Slot]], found: Findings, names: LayerNames) -> dict[str, int]:
    """How many of the file's layers each program reads whole, largest number first; see adapters.readers."""
    layers = {}
    for stem, kind in found.kinds.items():
        keys = [slot.name for slot in stems[stem].values()]
        place = place_of(keys[0], names)
        if place is not None:
            layers[stem] = StoredAdapter(place[0].layers[0], kind, [key.removeprefix(f"{stem}.") for key in keys])
    counts = {program: len(read) for program, read in layers_read(layers, names).items()}
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def _check_fit(file: TensorFile, layers: Layers, sized: bool, unknown: Sequence[str], found: Findings) -> None:
    """Layers that are not whole as the family has them, or have other sizes."""
    if found.problems and not unknown:
        return
    known = TensorFile(file.path, {name: slot for name, slot in file.slots.items() if name not in unknown}, file.metadata, file.data_start)
    try:
        on_layers(known, layers, checks_shapes=sized).check()
    except OptionError as err:
        found.problems += [problem.message for problem in err.problems]


def _check_zeros(found: Findings) -> None:
    zero = [name for name, norm in found.norms.items() if norm == 0]
    if zero and len(zero) == len(found.norms):
        found.problems.append("every layer's update is zero: the file changes nothing")
    elif zero:
        found.notes.append(f"{len(zero)} of {len(found.norms)} layers change nothing (their update is zero): {examples(zero, 3)}")
    if large := [scale for scale in found.scales if scale > 1]:
        found.notes.append(f"alpha is larger than the rank in some layers (factor up to {max(large):g})")


def _lines(
    file: TensorFile,
    found: Findings,
    label: str,
    style: str,
    readers: Mapping[str, int],
    largest: Sequence[tuple[str, float]],
) -> list[str]:
    ranks = ", ".join(f"{rank} ({count})" for rank, count in sorted(found.ranks.items())) or "none"
    scales = ", ".join(f"{scale:g} ({count})" for scale, count in sorted(found.scales.items())) or "none"
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(found.kinds.values()).items()) or "none"
    whole = [program for program, count in readers.items() if count == len(found.kinds)]
    part = [f"{program} ({count} of {len(found.kinds)} layers)" for program, count in readers.items() if 0 < count < len(found.kinds)]
    lines = [
        f"{file.path.name}: {size_text(file.path.stat().st_size)}, {len(file.slots)} tensors, "
        f"{', '.join(_dtype(dtype) for dtype in file.dtypes)}",
        f"family: {label}; names: {style}; layers: {kinds}",
        f"ranks: {ranks}; alpha / rank: {scales}",
    ]
    if readers:
        lines.append(f"read whole by: {', '.join([*whole, 'kohya_like'])}")
        lines += [f"read in part, so with another effect, by: {', '.join(part)}; convert_lora.py writes other names"] if part else []
        nobody = [program for program, count in readers.items() if not count]
        lines += [f"not read by: {', '.join(nobody)}"] if nobody else []
    if "dora" in found.kinds.values() and readers.get("ComfyUI"):
        lines.append("ComfyUI divides a dora by the length of the base weight, so its effect is a little different there")
    if largest:
        lines += ["largest updates (Frobenius norm):", *table([(name, f"{norm:.4g}") for name, norm in largest])]
    lines += [f"note: {note}" for note in found.notes]
    lines += [f"BROKEN: {problem}" for problem in found.problems] or ["no problems found"]
    return lines


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
