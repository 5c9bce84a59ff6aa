"""The exponential moving average of the trained weights, and showing it instead of them for a while.

Of weights that are sharded over processes each keeps the average of its share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sd_scripts.library.core.protocols import StateDict
from sd_scripts.library.parallel.sharding import own, sharded


class MovingAverage:
    """average <- d average + (1 - d) weights after each step, with d = min(decay, (1 + step) / (10 + step))."""

    def __init__(self, weights: Mapping[str, nn.Parameter], decay: float) -> None:
        self._weights = dict(weights)
        self._decay = decay
        # In float32, whatever the weights are: what a step adds is less than bf16 can tell from nothing.
        self._average = {name: weight.detach().to(torch.float32, copy=True) for name, weight in weights.items()}

    def decay_at(self, step: int) -> float:
        """d of optimizer step `step` (from 0)."""
        return min(self._decay, (1 + step) / (10 + step))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes the weights after optimizer step `step` (from 0) into the average."""
        averages, weights = ([own(tensor) for tensor in group.values()] for group in (self._average, self._weights))
        if all(weight.dtype is torch.float32 for weight in weights):
            torch._foreach_lerp_(averages, weights, 1 - self.decay_at(step))
            return
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(weight.float(), 1 - self.decay_at(step))

    def state_dict(self) -> StateDict:
        """The average of each weight by its name, sharded as the weights are."""
        return dict(self._average)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Puts a saved average back, of a full fine-tune. Raises ValueError when names differ."""
        if state.keys() != self._average.keys():
            raise ValueError("the saved moving average belongs to other weights")
        for name, average in self._average.items():
            own(average).copy_(own(sharded(state[name], average)))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within the block the networks carry the average; afterwards their own weights again, to the bit."""
        kept = {name: weight.detach().clone() for name, weight in self._weights.items()}
        self._copy(self._average)
        try:
            yield
        finally:
            self._copy(kept)

    @torch.no_grad()
    def _copy(self, values: Mapping[str, Tensor]) -> None:
        for name, weight in self._weights.items():
            own(weight).copy_(own(values[name]))
