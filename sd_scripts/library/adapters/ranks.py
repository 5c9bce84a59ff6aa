"""Rank and alpha of each layer, from the options that name blocks, kinds of layers or layers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import nn

from sd_scripts.schema.errors import Problem
from sd_scripts.schema.network import AdapterOptions, UNetNetworkOptions

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


def ranks_for(options: AdapterOptions, names: Names) -> Ranks:
    """The ranks of a model with these names."""
    return names.architecture.ranks(options, names)


def is_wide(layer: nn.Module) -> bool:
    """Whether this is a convolution with a kernel larger than 1x1: those have ranks of their own, as in kohya's networks."""
    return isinstance(layer, nn.Conv2d) and layer.kernel_size != (1, 1)


class ByName:
    """network_reg_dims, and layers whose rate is 0: those get no adapter, unless a file brings values that must stay in effect."""

    def __init__(self, options: AdapterOptions, names: Names) -> None:
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


class UNetRanks:
    """Ranks by block of the original layout, and of their own for wide convolutions."""

    def __init__(self, options: UNetNetworkOptions, names: Names) -> None:
        self._options, self._names, self._by_name = options, names, ByName(options, names)

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


class ChosenParts:
    """One rank for all, on the kinds of layers and the blocks that are asked for. Layers outside of numbered blocks go by their kind."""

    def __init__(
        self,
        options: AdapterOptions,
        names: Names,
        blocks: str,
        part_of: Callable[[str], str | None],
        choices: Mapping[str, tuple[str, ...]],
        choice: str,
    ) -> None:
        """blocks: train_block_indices; choices: kinds of layers that lora_targets may stand for, the last those of all; choice: it."""
        self._names, self._by_name, self._part_of = names, ByName(options, names), part_of
        self._wanted = blocks
        self._blocks = numbers_in(self._wanted, names.num_blocks)
        # Expressions choose among the layers of every kind.
        self._parts = list(choices.values())[-1] if options.target_modules else choices[choice]

    def further_targets(self) -> list[str]:
        return []

    def problems(self) -> list[Problem]:
        problems = beyond("train_block_indices", self._wanted, self._names.num_blocks)
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


def beyond(option: str, text: str, count: int) -> list[Problem]:
    """What is wrong with numbers of blocks in a model with this many."""
    numbers = [number for number in numbers_in(text, count) if number >= count]
    if not numbers:
        return []
    return [Problem(option, f"{option}: this model has {count} such blocks, numbered 0 to {count - 1}, so {min(numbers)} is none")]


def numbers_in(text: str, count: int) -> set[int]:
    """The numbers that kohya's spelling stands for: all, none, or such as 0-3,5."""
    if text in ("all", "none"):
        return set(range(count)) if text == "all" else set()
    ranges = [re.fullmatch(r"(\d+)(?:-(\d+))?", piece) for piece in text.split(",")]
    return {number for match in ranges if match for number in range(int(match[1]), int(match[2] or match[1]) + 1)}
