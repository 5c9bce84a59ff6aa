"""Adapter files: written whole and proven, or read with every key accounted for. See `layouts` and `reading` for what is in them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from sd_scripts.dataset.progress import Bar
from sd_scripts.library.core.errors import TrainingError
from sd_scripts.library.core.protocols import Parts, StateDict
from sd_scripts.library.core.safetensors_file import read_file, serialise
from sd_scripts.library.train import metadata as metadata_texts
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import write_atomically

from .fusing import FACTORS, MAGNITUDE
from .layer_names import Names, layers_of
from .layers import examples
from .layouts import LAYOUT, SaveModelAs, layout_for, tensors_of
from .maths import AdapterLayer, low_rank_update, product_distance
from .names import names_of
from .network import AdapterNetwork
from .reading import adapters_of
from .recognising import check_architecture

log = logging.getLogger(__name__)

Precision = Literal["float", "fp16", "bf16"]

DTYPES: dict[str, torch.dtype] = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def export(
    network: AdapterNetwork,
    parts: Parts,
    path: Path,
    *,
    save_model_as: SaveModelAs = "kohya",
    precision: Precision = "fp16",
    metadata: Mapping[str, str] | None = None,
    state: StateDict | None = None,
) -> None:
    """Writes the adapter whole or not at all, then reads the file back and compares every layer with the trained one.

    metadata: header texts as `metadata.build` makes them; hashes of the tensors are added. state: values to write instead of the live
    ones, such as a moving average, named as `network.state` names them. Raises TrainingError naming the layer when a value does not
    survive the precision, and OSError when the file cannot be written.
    """
    adapters = {name: adapter.to(torch.float32, torch.device("cpu")) for name, adapter in network.adapters(state).items()}
    layout = layout_for(network.kind, save_model_as)
    tensors, texts = tensors_of(adapters, network.names, layout, DTYPES[precision])
    _check_finite(tensors, precision)
    header = metadata_texts.with_hashes({**(metadata or {}), **texts}, tensors)
    write_atomically(path, serialise(tensors, header))
    prove(path, adapters, parts, network.names, precision)


def _check_finite(tensors: StateDict, precision: Precision) -> None:
    broken = [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise TrainingError(
            f"values of {examples(broken)} do not fit into save_precision = {precision} or are not finite numbers; "
            "use save_precision = bf16 or float, and a lower learning rate if they are not finite in float either. No file was written"
        )


def read(path: Path, parts: Parts) -> dict[str, AdapterLayer]:
    """The adapter of each layer in a file of any known trainer, float32, by `<module>.<layer>`; see `reading`.

    Raises OptionError for a file for another model family, for one with values that are no finite numbers and, listing some, for keys that
    fit no layer of this model.
    """
    tensors, header = read_file(path)
    if broken := [name for name, tensor in tensors.items() if tensor.is_floating_point() and not tensor.float().isfinite().all()]:
        text = f"{path.name} holds values that are no finite numbers, in {examples(broken)}; it is damaged, or its training diverged"
        raise OptionError(f"{text}: take an earlier checkpoint, or download the file again")
    names = names_of(parts)
    check_architecture(tensors, header, names, path.name)
    found = adapters_of(tensors, header, names, path.name, _shapes(parts))
    if _is_silent_about_alpha(tensors, header):
        log.info("%s does not say its alpha; it is taken to be the rank of each layer, so the strength is 1", path.name)
    return found


def _is_silent_about_alpha(tensors: StateDict, header: Mapping[str, str]) -> bool:
    """Whether nothing in a lora's file says what its update is multiplied by. Our own layouts have it in the matrices."""
    is_lora = any("lora_A" in key or "lora_down" in key or "lora.down" in key for key in tensors)
    return is_lora and not any(key.endswith(".alpha") for key in tensors) and not header.keys() & {LAYOUT, "lora_adapter_metadata"}


def _shapes(parts: Parts) -> dict[str, torch.Size]:
    return {name: layer.weight.shape for name, layer in layers_of(parts).items()}


def prove(path: Path, trained: Mapping[str, AdapterLayer], parts: Parts, names: Names, precision: Precision) -> None:
    """Reads a written file back through its key map and compares every layer with the trained one, to the precision's rounding.

    Raises TrainingError naming the layer. Shows progress when it takes more than two seconds.
    """
    tensors, header = read_file(path)
    shapes = _shapes(parts)
    try:
        found = adapters_of(tensors, header, names, path.name, shapes)
    except OptionError as err:
        raise TrainingError(f"the saved file cannot be read back: {err}") from err
    # An adapter of nothing but zeros beside others of its fused target leaves no trace in a file.
    lacking = [name for name in trained.keys() - found.keys() if not _does_nothing(trained[name])]
    if lacking or found.keys() - trained.keys():
        raise TrainingError(f"the saved file {path.name} lacks layers: {examples(sorted(lacking))}; please report this")
    for name, adapter in Bar(trained.items(), desc="checking the saved file", unit="layer", delay=2, leave=False):
        if name in found and not _same(adapter, found[name], shapes[name], torch.finfo(DTYPES[precision])):
            raise TrainingError(
                f"the saved file {path.name} does not do what was trained at {names.to_diffusers(name)} (save_precision = {precision}); "
                "save_precision = float keeps every value"
            )


def _does_nothing(adapter: AdapterLayer) -> bool:
    return adapter.kind in ("lora", "loha") and not any(adapter.tensors[up].any() for up, _ in FACTORS[adapter.kind])


def _same(trained: AdapterLayer, found: AdapterLayer, shape: torch.Size, rounding: torch.finfo) -> bool:
    """Whether two adapters of a layer update it alike, up to the rounding of each factor."""
    if trained.kind != found.kind:
        return False
    lengths = [adapter.tensors.get(MAGNITUDE) for adapter in (trained, found)]
    if lengths[0] is not None and not _equal(lengths[0], lengths[1], rounding):
        return False
    if trained.kind == "oft":
        return _equal(trained.tensors["oft_R.weight"], found.tensors["oft_R.weight"], rounding)
    if trained.kind in ("lora", "dora"):
        distance = product_distance(trained, found)
    else:
        distance = float((low_rank_update(trained, shape).double() - low_rank_update(found, shape).double()).norm())
    return distance <= _product_error(trained, rounding)


def _rounding_error(tensor: Tensor, rounding: torch.finfo) -> float:
    """A bound of the norm of what rounding takes from a tensor.

    Numbers below the smallest normal one lose more digits than others: at most one smallest step each. A float32 product rounds
    too, so nothing is stricter than a few of its units.
    """
    relative = max(rounding.eps, 8 * torch.finfo(torch.float32).eps)
    return relative * float(tensor.double().norm()) + rounding.smallest_normal * rounding.eps * math.sqrt(tensor.numel())


def _product_error(adapter: AdapterLayer, rounding: torch.finfo) -> float:
    """A bound of the norm of what rounding each factor takes from their product; it holds for matrix, Hadamard and Kronecker products."""
    factors = [tensor for rest, tensor in adapter.tensors.items() if rest != MAGNITUDE]
    norms = [float(tensor.double().norm()) for tensor in factors]
    errors = [_rounding_error(tensor, rounding) for tensor in factors]
    # Product of (norm + error) minus product of norms: every way to take at least one error.
    return abs(adapter.scale) * (math.prod(norm + error for norm, error in zip(norms, errors)) - math.prod(norms))


def _equal(a: Tensor, b: Tensor | None, rounding: torch.finfo) -> bool:
    return b is not None and a.shape == b.shape and float((a.double() - b.double()).norm()) <= _rounding_error(a, rounding)
