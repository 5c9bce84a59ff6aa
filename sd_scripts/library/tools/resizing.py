"""Change the rank of an adapter file. Works on the small matrices alone, names and layout stay as they are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sd_scripts.dataset.progress import Bar
from sd_scripts.library.adapters.layers import examples
from sd_scripts.library.adapters.layouts import PEFT_CONFIG
from sd_scripts.library.adapters.reading import diffusers_scale
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.tools import ResizeSection

from .adapters import DTYPES, by_layer, header_of_new, in_precision, is_wide, network_texts, open_adapter
from .low_rank import Limit, of_product
from .report import Report, size_text, table
from .tensor_files import Slot, Spool, TensorFile

DOWN, UP, ALPHA = "lora_A.weight", "lora_B.weight", "alpha"


@dataclass(frozen=True)
class Resized:
    """One layer: ranks before and after, and the share of the squared norm that is kept."""

    before: int
    after: int
    kept: float
    norm: float
    wide: bool


@dataclass
class Totals:
    """All layers by name."""

    layers: dict[str, Resized] = field(default_factory=dict)

    @property
    def kept(self) -> float:
        """Share of the squared norm of all updates that is kept."""
        energy = sum(one.norm**2 for one in self.layers.values())
        return sum(one.norm**2 * one.kept for one in self.layers.values()) / energy if energy else 1.0


@torch.no_grad()
def resize(options: ResizeSection) -> Report:
    """Writes the file of another rank. Raises OptionError, and writes nothing, for a file that holds more than lora and dora layers."""
    source = open_adapter(options.model, "model")
    target = Path(options.save_to).expanduser()
    stems, rest = by_layer(source)
    _check(source, target, stems, rest)
    dtype = DTYPES.get(options.save_precision) or max(source.dtypes, key=lambda dtype: source.dtypes[dtype])
    scales = {stem: _scale(source, stem, slots) for stem, slots in stems.items()}
    # One alpha for all layers, as diffusers' reader wants it: that of the usual scale at the new rank.
    common = Counter(scales.values()).most_common(1)[0][0] or 1.0
    alpha = common * options.new_rank
    totals = Totals()
    with Spool(target) as spool:
        for stem, slots in Bar(stems.items(), desc="resizing", unit="layer", delay=2, leave=False):
            tensors = _resized(stem, slots, scales[stem], alpha, options, totals)
            spool.add(in_precision(tensors, dtype))
        spool.finish(_header(source, totals, alpha, options))
    return _report(source, target, totals)


def _check(source: TensorFile, target: Path, stems: Mapping[str, Mapping[str, Slot]], rest: Sequence[str]) -> None:
    problems = []
    if target.suffix != ".safetensors":
        problems.append(Problem("save_to", f"save_to: {target.name} has to end with .safetensors"))
    others = [stem for stem, slots in stems.items() if not {DOWN, UP} <= slots.keys()] + [*rest]
    if others or not stems or PEFT_CONFIG in source.metadata:
        problems.append(
            Problem(
                "model",
                f"model: {source.path.name} holds more than whole lora and dora layers ({examples(others, 3) or 'in its own layout'}); "
                "the rank of other kinds cannot be changed. Merge it into a model and extract a LoRA from that",
            )
        )
    bad = [
        stem
        for stem, slots in stems.items()
        if {DOWN, UP} <= slots.keys() and (len(slots[UP].shape) < 2 or not slots[DOWN].shape or slots[UP].shape[1] != slots[DOWN].shape[0])
    ]
    if bad:
        problems.append(Problem("model", f"model: the matrices of {examples(bad, 3)} in {source.path.name} do not fit together"))
    refuse(problems)


def _scale(source: TensorFile, stem: str, slots: Mapping[str, Slot]) -> float:
    """alpha / rank of a layer, as the file or its header says it."""
    rank = slots[DOWN].shape[0]
    if ALPHA in slots:
        return float(slots[ALPHA].read()) / rank
    component, _, layer = stem.removeprefix("base_model.model.").partition(".")
    told = diffusers_scale(source.metadata, component, layer, rank)
    return 1.0 if told is None else told


def _resized(stem: str, slots: Mapping[str, Slot], scale: float, alpha: float, options: ResizeSection, totals: Totals) -> dict[str, Tensor]:
    """A layer's tensors with its new rank, float32."""
    down, up = slots[DOWN].read().float(), slots[UP].read().float()
    for one, slot in ((down, slots[DOWN]), (up, slots[UP])):
        if not torch.isfinite(one).all():
            raise OptionError(f"model: {slot.name} has values that are not finite numbers, so the file is broken. Nothing was written")
    wide = is_wide(down)
    limit = Limit(
        options.new_conv_rank if wide and options.new_conv_rank else options.new_rank, options.dynamic_method, options.dynamic_param
    )
    parts = of_product(up.flatten(1) * scale, down.flatten(1))
    rank = parts.rank(limit)
    new_up, new_down = parts.factors(rank)
    kept = float(parts.s[:rank].square().sum()) / parts.energy if parts.energy else 1.0
    totals.layers[stem] = Resized(len(down), rank, kept, math.sqrt(parts.energy), wide)
    tensors = {}
    if ALPHA in slots:
        # The readers' factor is alpha / rank, so the up matrix gets its inverse.
        new_up = new_up * (rank / alpha)
        value = torch.tensor(alpha, dtype=torch.float32)
        dtype = slots[ALPHA].dtype
        tensors[slots[ALPHA].name] = value.to(dtype) if value.to(dtype).float() == value else value
    tensors[slots[UP].name] = new_up.reshape(len(up), rank, *up.shape[2:])
    tensors[slots[DOWN].name] = new_down.reshape(rank, *down.shape[1:])
    others = {slot.name: slot.read().float() for rest, slot in slots.items() if rest not in (DOWN, UP, ALPHA)}
    return tensors | others


def _header(source: TensorFile, totals: Totals, alpha: float, options: ResizeSection) -> dict[str, str]:
    ranks = [one.after for one in totals.layers.values() if not one.wide]
    wide = [one.after for one in totals.layers.values() if one.wide]
    before = sorted({one.before for one in totals.layers.values()})
    how = "" if options.dynamic_method == "rank" else f" by {options.dynamic_method} {options.dynamic_param:g}"
    told = source.metadata.get("ss_training_comment", "")
    comment = f"dimension is resized from {'Dynamic' if len(before) > 1 else before[0]} to {options.new_rank}{how}"
    return header_of_new(
        [source],
        network_texts(ranks or wide, [alpha], wide if ranks else ())
        | {"ss_network_module": source.metadata.get("ss_network_module", "networks.lora")}
        | {"ss_training_comment": f"{comment}; {told}" if told not in ("", "None") else comment},
    )


def _report(source: TensorFile, target: Path, totals: Totals) -> Report:
    before = Counter(one.before for one in totals.layers.values())
    after = Counter(one.after for one in totals.layers.values())
    worst = sorted(totals.layers.items(), key=lambda item: -(1 - item[1].kept) * item[1].norm ** 2)[:5]
    lines = [
        f"resized {source.path.name}, {len(totals.layers)} layers, rank {_texts(before)} to {_texts(after)}: {target.name}, "
        f"{size_text(target.stat().st_size)}",
        f"kept {100 * totals.kept:.3f} % of the energy (the squared norm of all updates)",
        "largest losses (rank, energy kept):",
        *table([(name, f"{one.before} -> {one.after}", f"{100 * one.kept:.2f} %") for name, one in worst]),
    ]
    values = {
        "energy_kept": totals.kept,
        "layers": {name: {"rank_before": one.before, "rank": one.after, "energy_kept": one.kept} for name, one in totals.layers.items()},
    }
    return Report(lines, values)


def _texts(ranks: Mapping[int, int]) -> str:
    return str(next(iter(ranks))) if len(ranks) == 1 else f"{min(ranks)}..{max(ranks)}"
