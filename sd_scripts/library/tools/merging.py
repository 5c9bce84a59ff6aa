"""Merge adapter files into a model on disk, or into one another."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sd_scripts.dataset.progress import Bar
from sd_scripts.library.adapters.layer_names import Names
from sd_scripts.library.adapters.layouts import SaveModelAs, tensors_of
from sd_scripts.library.adapters.maths import AdapterLayer
from sd_scripts.schema.errors import OptionError, Problem, gathering, refuse
from sd_scripts.schema.tools import MergeSection

from .adapters import (
    DTYPES,
    AdapterFile,
    header_of_new,
    in_precision,
    is_wide,
    layers_for,
    network_texts,
    on_layers,
    open_adapter,
    with_alpha,
)
from .low_rank import Limit, of_product
from .merging_models import merge_into_model
from .report import Report, size_text
from .tensor_files import Spool, TensorFile


@torch.no_grad()
def merge(options: MergeSection) -> Report:
    """Merges the files. Raises OptionError, and writes nothing, when one of them does not fit."""
    return merge_into_model(options) if options.base_model is not None else merge_files(options)


def merge_files(options: MergeSection) -> Report:
    """One LoRA file that does what all of them do together: exactly, or of a wanted rank with the error in the report."""
    target = Path(options.save_to).expanduser()
    files = _opened(options, target)
    strengths = options.ratios or (1.0,) * len(files)
    names = files[0].layers.names
    dtype = DTYPES[options.save_precision]
    groups = list(dict.fromkeys(group for file in files for group in file.groups))
    alpha = float(options.new_rank or sum(_common_rank(file) for file in files))
    error = energy = 0.0
    ranks: Counter[int] = Counter()
    with Spool(target) as spool:
        for group in Bar(groups, desc="merging", unit="layer", delay=2, leave=False):
            members = _sum([file.read(group) for file in files], strengths)
            if options.new_rank is not None:
                members, lost, whole = _shrunk(members, group, options, names)
                error, energy = error + lost, energy + whole
            members = {name: with_alpha(adapter, alpha) for name, adapter in members.items()}
            tensors, texts = tensors_of(members, names, options.save_model_as, torch.float32)
            spool.add(in_precision(tensors, dtype))
            ranks.update(len(tensor) for name, tensor in tensors.items() if name.endswith(("lora_down.weight", "lora_A.weight")))
        sources = [file.file for file in files]
        spool.finish(_header(sources, files[0], texts, sorted(ranks.elements()), alpha))
    relative = math.sqrt(error / energy) if energy else 0.0
    label, size = files[0].layers.architecture.label, size_text(target.stat().st_size)
    lines = [f"merged {len(files)} LoRA files for {label}: {target.name}, {size}, {sum(ranks.values())} layers, rank {_range(ranks)}"]
    lines.append("the sum is exact" if options.new_rank is None else f"relative error {relative:.2g}")
    values = {"relative_error": relative, "ranks": {str(rank): count for rank, count in sorted(ranks.items())}, "alpha": alpha}
    return Report(lines, values)


def _opened(options: MergeSection, target: Path) -> list[AdapterFile]:
    """The files on the layers of the first one's model. Raises OptionError with every problem of every file."""
    problems: list[Problem] = []
    files: list[AdapterFile] = []
    if target.suffix != ".safetensors":
        problems.append(Problem("save_to", f"save_to: {target.name} has to end with .safetensors"))
    for value in options.models:
        with gathering(problems):
            opened = open_adapter(value, "models")
            layers, sized = layers_for(opened, None)
            file = on_layers(opened, layers, checks_shapes=sized)
            _check_kinds(file)
            files.append(file)
    if len({file.layers.architecture.name for file in files}) > 1:
        held = ", ".join(f"{file.label} is for {file.layers.architecture.label}" for file in files)
        problems.append(Problem("models", f"models: these files are for different models: {held}"))
    refuse(problems)
    return files


def _check_kinds(file: AdapterFile) -> None:
    """Reads everything once. Raises OptionError unless the file is whole and all its layers are lora, whose sums are lora again."""
    kinds = sorted(set(file.check()))
    if kinds != ["lora"]:
        raise OptionError(
            f"models: {file.label} holds {' and '.join(kinds)} layers, and the sum of such updates is none of that kind. Merge it into a "
            "model instead (base_model), or extract a LoRA from the merged model"
        )


def _sum(parts: Sequence[Mapping[str, AdapterLayer]], strengths: Sequence[float]) -> dict[str, AdapterLayer]:
    """For each layer one lora whose update is the weighted sum: downs on top of one another, ups side by side."""
    summed = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        held = [(part[name], strength) for part, strength in zip(parts, strengths) if name in part]
        ups = [adapter.tensors["lora_B.weight"] * (adapter.scale * strength) for adapter, strength in held]
        downs = [adapter.tensors["lora_A.weight"] for adapter, _ in held]
        summed[name] = AdapterLayer("lora", {"lora_A.weight": torch.cat(downs), "lora_B.weight": torch.cat(ups, dim=1)})
    return summed


def _shrunk(
    members: Mapping[str, AdapterLayer], group: Sequence[str], options: MergeSection, names: Names
) -> tuple[dict[str, AdapterLayer], float, float]:
    """The members with new_rank, the squared norm of what is lost, and of everything."""
    found: dict[str, AdapterLayer] = {}
    lost = whole = 0.0
    for layers in matrices([name for name in group if name in members], names, options.save_model_as):
        stacked = stack([members[name] for name in layers])
        down = stacked.tensors["lora_A.weight"]
        rank = options.new_conv_rank if is_wide(down) and options.new_conv_rank is not None else options.new_rank
        assert rank is not None
        parts = of_product(stacked.tensors["lora_B.weight"].flatten(1), down.flatten(1))
        rank = parts.rank(Limit(rank))
        new_up, new_down = parts.factors(rank)
        heights = [len(members[name].tensors["lora_B.weight"]) for name in layers]
        found |= divided(layers, heights, new_up, new_down, down.shape)
        lost, whole = lost + float(parts.s[rank:].square().sum()), whole + parts.energy
    return found, lost, whole


def matrices(layers: Sequence[str], names: Names, layout: SaveModelAs) -> list[list[str]]:
    """Which of these layers of one group have a low rank together: all of a fused matrix in the layouts that have it, else each alone."""
    fused = names.fused(layers[0]) if layers else None
    together = layout != "diffusers" and fused is not None and len(fused.layers) > 1
    return [list(layers)] if together else [[name] for name in layers]


def stack(members: Sequence[AdapterLayer]) -> AdapterLayer:
    """One lora whose rows are those of the members, of scale 1; members with the same down matrix keep their rank."""
    members = [member.rescaled(1.0) for member in members]
    downs = [member.tensors["lora_A.weight"] for member in members]
    ups = [member.tensors["lora_B.weight"].flatten(1) for member in members]
    if all(torch.equal(down, downs[0]) for down in downs[1:]):
        return AdapterLayer("lora", {"lora_A.weight": downs[0], "lora_B.weight": torch.cat(ups)})
    return AdapterLayer("lora", {"lora_A.weight": torch.cat(downs), "lora_B.weight": torch.block_diag(*ups)})


def divided(layers: Sequence[str], heights: Sequence[int], up: Tensor, down: Tensor, down_shape: Sequence[int]) -> dict[str, AdapterLayer]:
    """Adapters of scale 1 for layers whose rows stand one below the other in up. They share the down matrix, with down_shape's kernel."""
    down = down.reshape(len(down), *down_shape[1:])
    tail = (1,) * (len(down_shape) - 2)
    ups = up.split(list(heights))
    return {
        name: AdapterLayer("lora", {"lora_A.weight": down, "lora_B.weight": rows.reshape(*rows.shape, *tail)})
        for name, rows in zip(layers, ups)
    }


def _common_rank(file: AdapterFile) -> int:
    downs = [slot.shape[0] for slot in file.file.slots.values() if slot.name.endswith(("down.weight", "lora_A.weight", "lora_A"))]
    return Counter(downs).most_common(1)[0][0]


def _header(
    sources: Sequence[TensorFile], first: AdapterFile, texts: Mapping[str, str], ranks: Sequence[int], alpha: float
) -> dict[str, str]:
    version = first.layers.architecture.version
    changes = network_texts(ranks, [alpha]) | {"ss_v2": str(version.is_v2)} | dict(texts)
    changes["modelspec.sai_model_spec"] = "1.0.1"
    changes["modelspec.architecture"] = f"{version.modelspec}/lora"
    changes["modelspec.merged_from"] = ", ".join(source.path.stem for source in sources)
    return {key: text for key, text in header_of_new(sources, changes).items() if key != "ss_network_args"}


def _range(ranks: Mapping[int, int]) -> str:
    return f"{min(ranks)}" if len(ranks) == 1 else f"{min(ranks)} to {max(ranks)}"
