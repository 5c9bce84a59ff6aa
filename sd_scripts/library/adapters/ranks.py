"""Rank and alpha of each layer, from the options that name blocks, kinds of layers or layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import nn

from sd_scripts.families.flux.names import INPUTS, FluxNames, part_of
from sd_scripts.families.flux.options import FluxNetworkOptions
from sd_scripts.families.qwen_edit.names import QwenImageNames
from sd_scripts.families.qwen_edit.names import part_of as part_of_qwen
from sd_scripts.families.qwen_edit.options import QwenImageNetworkOptions
from sd_scripts.families.zimage.names import ZImageNames
from sd_scripts.families.zimage.names import part_of as part_of_zimage
from sd_scripts.families.zimage.options import ZImageNetworkOptions
from sd_scripts.schema.errors import Problem
from sd_scripts.schema.network import NetworkOptions, UNetNetworkOptions

from .layer_names import Names
from .rates import Numbered, block_factor


class Ranks(Protocol):
    """What the options say about ranks."""

    def problems(self) -> list[Problem]:
        """What does not fit this model."""
        ...

    def further_targets(self) -> list[str]:
        """Layers `<module>.<layer>` that the options add to the default ones."""
        ...

    def includes(self, name: str) -> bool:
        """Whether the options that choose blocks and kinds of layers leave this one in."""
        ...

    def of(self, name: str, base: nn.Module) -> tuple[int, float | None]:
        """Rank of a layer, 0 for one that gets no adapter, and its alpha; None means alpha = rank."""
        ...


def ranks_for(options: NetworkOptions, names: Names) -> Ranks:
    """The ranks of a model with these names. Raises TypeError for options of another family."""
    if isinstance(options, UNetNetworkOptions):
        return _UNetRanks(options, names)
    if isinstance(options, FluxNetworkOptions) and isinstance(names, FluxNames):
        return _FluxRanks(options, names)
    if isinstance(options, QwenImageNetworkOptions) and isinstance(names, QwenImageNames):
        return _ChosenParts(options, names, part_of_qwen, _QWEN_PARTS)
    if isinstance(options, ZImageNetworkOptions) and isinstance(names, ZImageNames):
        return _ChosenParts(options, names, part_of_zimage, _ZIMAGE_PARTS)
    raise TypeError(f"{type(options).__name__} are not for a model of family {names.family}")


def is_wide(layer: nn.Module) -> bool:
    """Whether this is a convolution with a kernel larger than 1x1: those have ranks of their own, as in kohya's networks."""
    return isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1)


class _ByName:
    """network_reg_dims, and layers whose rate is 0: those get no adapter, unless a file brings values that must stay in effect."""

    def __init__(self, options: NetworkOptions, names: Names) -> None:
        self._dims, self._rates = Numbered(options.network_reg_dims, names), Numbered(options.network_reg_lrs, names)
        self._keeps_values = options.network_weights is not None
        self._dim, self._alpha = options.network_dim, options.network_alpha

    def of(self, name: str, rank: int | None, alpha: float | None, factor: float = 1.0) -> tuple[int, float | None]:
        """rank, alpha, factor on the rate: as all other options have it; None takes network_dim."""
        own = self._dims.get(name)
        rank = self._dim if rank is None else rank
        rate = self._rates.get(name)
        off = (factor if rate is None else rate) == 0 and not self._keeps_values
        return 0 if off else rank if own is None else int(own), alpha

    def usual(self, name: str, rank: int | None = None) -> tuple[int, float | None]:
        return self.of(name, rank, self._alpha)


class _UNetRanks:
    """Ranks by block of the original layout, and of their own for wide convolutions."""

    def __init__(self, options: UNetNetworkOptions, names: Names) -> None:
        self._options, self._names, self._by_name = options, names, _ByName(options, names)

    def further_targets(self) -> list[str]:
        return []

    def includes(self, name: str) -> bool:
        return True

    def problems(self) -> list[Problem]:
        options, count = self._options, self._names.num_blocks
        lists: dict[str, Sequence[float]] = {
            "block_dims": options.block_dims,
            "block_alphas": options.block_alphas,
            "conv_block_dims": options.conv_block_dims,
            "block_lr_weight": options.block_lr_weight,
        }
        problems = []
        for option, values in lists.items():
            if values and not options.train_unet:
                problems.append(Problem(option, f"{option} is for the UNet, but train_unet is off; turn it on or remove {option}"))
            elif values and len(values) != count:
                problems.append(
                    Problem(
                        option,
                        f"{option} has {len(values)} numbers, but this UNet has {count} blocks "
                        f"({count // 2} input blocks, the middle, {count // 2} output blocks); give {count} numbers, or none",
                    )
                )
        return problems

    def of(self, name: str, base: nn.Module) -> tuple[int, float | None]:
        options, block = self._options, self._names.block(name)
        factor = block_factor(options, block)
        if is_wide(base):
            rank = options.conv_block_dims[block] if options.conv_block_dims and block is not None else options.conv_dim
            return self._by_name.of(name, rank or 0, options.conv_alpha, factor)
        rank = options.block_dims[block] if options.block_dims and block is not None else None
        alpha = options.block_alphas[block] if options.block_alphas and block is not None else options.network_alpha
        return self._by_name.of(name, rank, alpha, factor)


class _FluxRanks:
    """Ranks by kind of layer, and blocks by number."""

    def __init__(self, options: FluxNetworkOptions, names: FluxNames) -> None:
        self._names, self._by_name = names, _ByName(options, names)
        self._trains_backbone = options.train_unet
        self._wanted = {
            "train_double_block_indices": options.train_double_block_indices if options.train_blocks != "single" else "none",
            "train_single_block_indices": options.train_single_block_indices if options.train_blocks != "double" else "none",
        }
        self._counts = {"train_double_block_indices": names.num_double, "train_single_block_indices": names.num_blocks - names.num_double}
        double, single = (_numbers(text, self._counts[option]) for option, text in self._wanted.items())
        self._blocks = double | {number + names.num_double for number in single}
        self._dims: dict[str | None, int | None] = {
            "img_attn": options.img_attn_dim,
            "txt_attn": options.txt_attn_dim,
            "img_mlp": options.img_mlp_dim,
            "txt_mlp": options.txt_mlp_dim,
            "img_mod": options.img_mod_dim,
            "txt_mod": options.txt_mod_dim,
            "single": options.single_dim,
            "single_mod": options.single_mod_dim,
            **dict(zip(INPUTS, options.in_dims or [0] * len(INPUTS))),
        }

    def further_targets(self) -> list[str]:
        """The input layers that in_dims gives a rank."""
        return [name for name in self._names.layers if name.startswith("backbone.") and _part(name) in INPUTS and self._dims[_part(name)]]

    def problems(self) -> list[Problem]:
        problems = []
        for option, text in self._wanted.items():
            problems += _beyond(option, text, self._counts[option])
        if not self._trains_backbone and any(rank for part, rank in self._dims.items() if part in INPUTS):
            problems.append(Problem("in_dims", "in_dims is for the transformer, but train_unet is off; turn it on or remove in_dims"))
        return problems

    def includes(self, name: str) -> bool:
        block = self._names.block(name)
        return block is None or block in self._blocks

    def of(self, name: str, base: nn.Module) -> tuple[int, float | None]:
        if not name.startswith("backbone."):
            return self._by_name.usual(name)
        return self._by_name.usual(name, self._dims.get(_part(name)))


# The parts of each choice of lora_targets; the last holds those of all others.
_QWEN_PARTS: dict[str, tuple[str, ...]] = {
    "image_attention": ("image_attention",),
    "attention": ("image_attention", "text_attention"),
    "all": ("image_attention", "text_attention", "mlp"),
    "all_with_modulation": ("image_attention", "text_attention", "mlp", "modulation"),
}
_ZIMAGE_PARTS: dict[str, tuple[str, ...]] = {
    "attention": ("attention",),
    "attention_and_mlp": ("attention", "mlp"),
    "all": ("attention", "mlp", "modulation", "refiner"),
}


class _ChosenParts:
    """One rank for all, on the kinds of layers and the blocks that are asked for. Layers outside of numbered blocks go by their kind."""

    def __init__(
        self,
        options: QwenImageNetworkOptions | ZImageNetworkOptions,
        names: QwenImageNames | ZImageNames,
        part_of: Callable[[str], str | None],
        choices: Mapping[str, tuple[str, ...]],
    ) -> None:
        self._names, self._by_name, self._part_of = names, _ByName(options, names), part_of
        self._wanted = options.train_block_indices
        self._blocks = _numbers(self._wanted, names.num_blocks)
        # Expressions choose among the layers of every kind.
        self._parts = list(choices.values())[-1] if options.target_modules else choices[options.lora_targets]

    def further_targets(self) -> list[str]:
        return []

    def problems(self) -> list[Problem]:
        problems = _beyond("train_block_indices", self._wanted, self._names.num_blocks)
        if not self._blocks:
            problems.append(
                Problem("train_block_indices", "train_block_indices = none leaves nothing to train; name blocks, such as 0-29, or all")
            )
        return problems

    def includes(self, name: str) -> bool:
        block = self._names.block(name)
        return name not in self._names.idle and (block is None or block in self._blocks) and self._part_of(name) in self._parts

    def of(self, name: str, base: nn.Module) -> tuple[int, float | None]:
        return self._by_name.usual(name)


def _part(name: str) -> str | None:
    return part_of(name.partition(".")[2])


def _beyond(option: str, text: str, count: int) -> list[Problem]:
    """What is wrong with numbers of blocks in a model with this many."""
    beyond = [number for number in _numbers(text, count) if number >= count]
    if not beyond:
        return []
    return [Problem(option, f"{option}: this model has {count} such blocks, numbered 0 to {count - 1}, so {min(beyond)} is none")]


def _numbers(text: str, count: int) -> set[int]:
    """The numbers that kohya's spelling stands for: all, none, or such as 0-3,5."""
    if text in ("all", "none"):
        return set(range(count)) if text == "all" else set()
    ranges = [re.fullmatch(r"(\d+)(?:-(\d+))?", piece) for piece in text.split(",")]
    return {number for match in ranges if match for number in range(int(match[1]), int(match[2] or match[1]) + 1)}
