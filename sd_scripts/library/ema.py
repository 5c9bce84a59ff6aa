"""The exponential moving average of the trained weights, and showing it instead of them for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .protocols import StateDict


class MovingAverage:
    """average <- d average + (1 - d) weights after each step, with d = min(decay, (1 + step) / (10 + step))."""

    def __init__(self, weights: Mapping[str, nn.Parameter], decay: float) -> None:
        self._weights = dict(weights)
        self._decay = decay
        self._average = {name: weight.detach().clone() for name, weight in weights.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Takes the weights after optimizer step `step` (from 0) into the average."""
        decay = min(self._decay, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(self._average.values()), list(self._weights.values()), 1 - decay)

    def state_dict(self) -> StateDict:
        """The average of each weight by its name."""
        return dict(self._average)

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Puts a saved average back. Raises ValueError when names differ."""
        if state.keys() != self._average.keys():
            raise ValueError("the saved moving average belongs to other weights")
        for name, average in self._average.items():
            average.copy_(state[name])

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
            weight.copy_(values[name])
