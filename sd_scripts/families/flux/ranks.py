"""Ranks of FLUX's adapters by kind of layer, as in kohya's networks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from sd_scripts.families.common.double_stream_names import BLOCK
from sd_scripts.families.common.plain_names import ranks_of_plain
from sd_scripts.library.adapters.ranks import ByName, Ranks, beyond, numbers_in
from sd_scripts.schema.errors import Problem
from sd_scripts.schema.network import BlocksNetworkOptions

from .options import FluxNetworkOptions

if TYPE_CHECKING:
    from .names import FluxNames

_DOUBLE_PARTS: tuple[tuple[str, str], ...] = (
    ("norm1.", "img_mod"),
    ("norm1_context.", "txt_mod"),
    ("attn.add_", "txt_attn"),
    ("attn.to_add_out", "txt_attn"),
    ("attn.", "img_attn"),
    ("ff.", "img_mlp"),
    ("ff_context.", "txt_mlp"),
)
INPUTS = ("img", "time", "vector", "guidance", "txt")
"""The layers before the blocks, in the order of in_dims."""
_INPUT_LAYERS = {
    "x_embedder": "img",
    "time_text_embed.timestep_embedder": "time",
    "time_text_embed.text_embedder": "vector",
    "time_text_embed.guidance_embedder": "guidance",
    "context_embedder": "txt",
}


def part_of(name: str) -> str | None:
    """Which of kohya's groups of ranks `backbone.<layer>` belongs to; None where it has no rank of its own."""
    match = BLOCK.fullmatch(name)
    if match is None:
        layer = name.removeprefix("backbone.")
        return next((part for start, part in _INPUT_LAYERS.items() if layer == start or layer.startswith(f"{start}.")), None)
    if match[1]:
        return "single_mod" if match[3].startswith("norm.") else "single"
    return next(part for start, part in _DOUBLE_PARTS if match[3].startswith(start))


class FluxRanks:
    """Ranks by kind of layer, and blocks by number."""

    def __init__(self, options: FluxNetworkOptions, names: FluxNames) -> None:
        self._names, self._by_name = names, ByName(options, names)
        self._trains_backbone = options.train_unet
        self._wanted = {
            "train_double_block_indices": options.train_double_block_indices if options.train_blocks != "single" else "none",
            "train_single_block_indices": options.train_single_block_indices if options.train_blocks != "double" else "none",
        }
        self._counts = {"train_double_block_indices": names.num_double, "train_single_block_indices": names.num_blocks - names.num_double}
        double, single = (numbers_in(text, self._counts[option]) for option, text in self._wanted.items())
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
        return [name for name in self._names.layers if (part := part_of(name)) in INPUTS and self._dims[part]]

    def problems(self) -> list[Problem]:
        problems = []
        for option, text in self._wanted.items():
            problems += beyond(option, text, self._counts[option])
        if not self._trains_backbone and any(rank for part, rank in self._dims.items() if part in INPUTS):
            problems.append(Problem("in_dims", "in_dims is for the transformer, but train_unet is off; turn it on or remove in_dims"))
        return problems

    def includes(self, name: str) -> bool:
        block = self._names.block(name)
        return block is None or block in self._blocks

    def of(self, name: str, base: nn.Module) -> tuple[int, float | None]:
        return self._by_name.usual(name, self._dims.get(part_of(name)))


def ranks_of(options: FluxNetworkOptions | BlocksNetworkOptions, names: FluxNames) -> Ranks:
    """Ranks of an adapter on this transformer, by the options of the family that has it: another one's adapters may be on whole blocks."""
    return FluxRanks(options, names) if isinstance(options, FluxNetworkOptions) else ranks_of_plain(options, names)
