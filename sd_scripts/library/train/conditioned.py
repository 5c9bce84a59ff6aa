"""A family's network with the conditions of one batch bound to it: what stands between the loop and an objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sd_scripts.library.core.protocols import Denoiser, Kind, ModelFamily, Network, Parts
from sd_scripts.library.parallel.sharding import is_sharded


@dataclass(frozen=True)
class Conditioned:
    """A family's network with the conditions of one batch bound to it; what an objective calls."""

    family: ModelFamily
    parts: Parts
    network: Network
    conditions: list[dict[str, Tensor]]
    empty: Callable[[], dict[str, Tensor]]
    """Gives the text part of the empty caption's condition."""
    seen: list[Tensor] = field(default_factory=list)
    """The times that the network was called with, in order."""

    @property
    def kind(self) -> Kind:
        return self.parts.kind

    @property
    def in_step(self) -> bool:
        return is_sharded(self.parts.backbone)

    @property
    def takes_estimate(self) -> bool:
        return bool(self.parts.denoising.get("self_conditioning", False))

    @property
    def takes_edges(self) -> bool:
        return bool(self.parts.denoising.get("edge_conditioning", False))

    def only(self, rows: Sequence[int]) -> Denoiser:
        return replace(self, conditions=[self.conditions[row] for row in rows])

    def __call__(self, x_t: Tensor, t: Tensor) -> Tensor:
        self.seen.append(t)
        return self.family.denoise(self.parts, x_t, t, self.conditions)

    def without_text(self, x_t: Tensor, t: Tensor) -> Tensor:
        empty = self.empty()
        return self.family.denoise(self.parts, x_t, t, [{**condition, **empty} for condition in self.conditions])

    def told(self, entries: Sequence[dict[str, Tensor]]) -> Denoiser:
        return replace(self, conditions=[{**condition, **told} for condition, told in zip(self.conditions, entries, strict=True)])

    @torch.no_grad()
    def base(self, x_t: Tensor, t: Tensor) -> Tensor:
        with self.network.disabled():
            return self.family.denoise(self.parts, x_t, t, self.conditions)
