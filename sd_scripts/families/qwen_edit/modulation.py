"""Qwen-Image's modulation layers as tables: they depend on the time alone, so their weights need not be on the device.

Each block of the transformer turns the embedded time into shifts, scales and gates with two linear layers, a third of all weights. At
the times k / 1000 the answers are read from a table in host RAM; at any other time they are computed there, from the weights kept.

Shapes: R rows of embedded times (B, or 2 B in models with zero_cond_t), D width, T = NUM_TIMES + 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sd_scripts.dataset.progress import Bar
from sd_scripts.library.core.diffusion import FlowPath
from sd_scripts.library.core.protocols import Parts

NUM_TIMES = 1000
_ROWS_AT_ONCE = 256


class ModulationTable(nn.Module):
    """One modulation layer: (R, D) embedded times to (R, 6 D). It has no parameters; the weights it was made from stay on the CPU."""

    def __init__(self, source: nn.Module, rows: Tensor) -> None:
        super().__init__()
        # In a tuple, so that neither counts as the transformer's own: nothing moves them, saves them or trains them.
        self._kept = (source, rows)

    @property
    def host_tensors(self) -> list[Tensor]:
        """What is in host RAM: the layer's weights, and the table."""
        source, rows = self._kept
        return [*source.parameters(), rows]

    def forward(self, embedded: Tensor) -> Tensor:
        source, rows = self._kept
        index = getattr(embedded, "time_index", None)
        if index is None:
            place = next(source.parameters())
            return source(embedded.detach().to(place.device, place.dtype)).to(embedded)
        return rows[index].to(embedded, non_blocking=True)


class _SecondTable(ModulationTable):
    """The text's modulation in models with zero_cond_t, which is given the first half of the rows that the image's was given."""

    def __init__(self, source: nn.Module, rows: Tensor, first: nn.Module) -> None:
        super().__init__(source, rows)
        self._given: Tensor | None = None
        first.register_forward_pre_hook(self._remember)

    def _remember(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        self._given = getattr(arguments[0], "time_index", None)

    def forward(self, embedded: Tensor) -> Tensor:
        if self._given is not None:
            embedded = embedded.detach()
            embedded.time_index = self._given[: len(embedded)]
        return super().forward(embedded)


@torch.no_grad()
def tabulate(parts: Parts, device: torch.device) -> Parts:
    """Replaces the modulation of all blocks by tables, computed on `device`; gives the parts with a path whose training times they hold.

    Works in place on parts.backbone, which is on the CPU and has no adapter on its modulation.
    """
    transformer = parts.backbone
    times = torch.arange(NUM_TIMES + 1) / NUM_TIMES
    embedded = _embedded(transformer, times)
    transformer.time_text_embed.register_forward_hook(_mark)
    for block in Bar(transformer.transformer_blocks, desc="modulation tables", unit="block", delay=2, leave=False):
        block.img_mod = ModulationTable(block.img_mod, _rows(block.img_mod, embedded, device))
        made = (block.txt_mod, _rows(block.txt_mod, embedded, device))
        block.txt_mod = _SecondTable(*made, block.img_mod) if transformer.config.zero_cond_t else ModulationTable(*made)
    assert isinstance(parts.path, FlowPath)
    return replace(parts, path=replace(parts.path, num_steps=NUM_TIMES, on_steps=True))


def _embedded(transformer: nn.Module, times: Tensor) -> Tensor:
    """Embedded times (T, D), in the precision of the transformer, from times in float32."""
    like = next(parameter for parameter in transformer.time_text_embed.parameters() if parameter.is_floating_point())
    found: Tensor = transformer.time_text_embed(times.to(like.device), torch.empty(0, device=like.device, dtype=like.dtype))
    return found


def _rows(layer: nn.Module, embedded: Tensor, device: torch.device) -> Tensor:
    """What the layer gives for each embedded time, (T, 6 D), on the CPU; pinned where a GPU will read it."""
    home = next(layer.parameters()).device
    layer.to(device)
    parts = [layer(some.to(device)).to(home) for some in embedded.split(_ROWS_AT_ONCE)]
    layer.to(home)
    rows = torch.cat(parts)
    return rows.pin_memory() if torch.cuda.is_available() and rows.is_cpu else rows


def _mark(module: nn.Module, arguments: tuple[Any, ...], embedded: Tensor) -> None:
    """Notes on the embedded times which entries of a table they are, if all of them are.

    The note travels with the tensor, so that blocks that are computed again in the backward pass find it, whatever ran in between. Times
    without values, on the meta device, are none.
    """
    if embedded.is_meta:
        return
    places = arguments[0].detach().double() * NUM_TIMES
    index = places.round()
    if bool((places - index).abs().max() < 1e-4):
        embedded.time_index = index.long().cpu()
