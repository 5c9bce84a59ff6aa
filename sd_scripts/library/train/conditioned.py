"""A family's network with the conditions of one batch bound to it: what stands between the loop and an objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

import torch
from torch import Tensor

from sd_scripts.library.core.protocols import Batch, Denoiser, EdgeFamily, Kind, ModelFamily, Network, Parts
from sd_scripts.library.memory.compiling import Compilation
from sd_scripts.library.parallel.sharding import is_sharded


class BatchSource(Protocol):
    """Batches by number. trained_encoders: text encoders whose part the conditions lack, because it changes with every step."""

    @property
    def trained_encoders(self) -> Sequence[str]: ...

    def micro_batch(self, step: int, micro: int, rank: int) -> Batch: ...

    def validation_batches(self) -> Sequence[Callable[[], Batch]]: ...

    def empty_text(self) -> dict[str, Tensor]: ...


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """What is trained: a network on or in the parts of a family, and the batches that it is shown."""

    family: ModelFamily
    parts: Parts
    network: Network
    data: BatchSource
    compilation: Compilation | None = None
    """The code of the backbone, if it is made."""

    def denoiser(self, batch: Batch) -> Conditioned:
        """The network for a batch that is on its device."""
        if self.compilation is not None:
            self.compilation.begin_batch()
        conditions = batch.conditions
        if self.data.trained_encoders:
            conditions = [{**condition, **text} for condition, text in zip(conditions, self._live_texts(batch.captions), strict=True)]
        return Conditioned(self.family, self.parts, self.network, conditions, lambda: self._empty_text(batch.x0.device))

    def _live_texts(self, captions: Sequence[str]) -> list[dict[str, Tensor]]:
        """What the trained text encoders make of captions."""
        encoders = self.data.trained_encoders if self.family.separate_texts else None
        return self.family.encode_prompts(self.parts, captions, encoders)

    def _empty_text(self, device: torch.device) -> dict[str, Tensor]:
        """The text part of the empty caption's condition, on the device."""
        kept = {name: tensor.to(device) for name, tensor in self.data.empty_text().items()}
        return {**kept, **self._live_texts([""])[0]} if self.data.trained_encoders else kept


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

    def edges(self, latents: Tensor) -> Tensor:
        return cast("EdgeFamily", self.family).edge_map(self.parts, latents)

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
