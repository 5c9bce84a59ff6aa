"""Integration of a velocity field along canonical time, with gradient: dx = velocity(x, t) dt from t to 0, the image, or back to 1.

Shapes: B samples, x (B, C, h, w); times (B,).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Method = Literal["euler", "midpoint", "heun"]
Field = Callable[[Tensor, Tensor], Tensor]
"""(x, times (B,)) -> velocity, noise - x0, same shape as x."""
Step = Callable[[Field, Tensor, Tensor, Tensor], Tensor]
"""(field, x, times (B,), step (B,), negative towards the image) -> x at times + step."""

ORDERS: dict[Method, int] = {"euler": 1, "midpoint": 2, "heun": 2}
"""The error falls with this power of the step; a step has as many calls of the field."""


def integrate(field: Field, x: Tensor, start: Tensor, end: Tensor, num_steps: int, method: Method, recompute: bool = False) -> Tensor:
    """x at times `end` (B,) from x at times `start` (B,), in num_steps steps of equal length.

    All the way: a constant field moves x by exactly field * (end - start). recompute keeps the states between the steps alone for the
    backward pass and computes the rest again, so that memory hardly grows with num_steps.
    """
    step = STEPS[method]
    length = (end - start) / num_steps
    for number in range(num_steps):
        t = start + number * length
        x = (
            checkpoint(step, field, x, t, length, use_reentrant=False)
            if recompute and torch.is_grad_enabled()
            else step(field, x, t, length)
        )
    return x


def _along(x: Tensor, velocity: Tensor, step: Tensor) -> Tensor:
    return x + step.view(-1, *[1] * (x.ndim - 1)) * velocity


def euler(field: Field, x: Tensor, t: Tensor, step: Tensor) -> Tensor:
    """The velocity at the beginning, all the way."""
    return _along(x, field(x, t), step)


def midpoint(field: Field, x: Tensor, t: Tensor, step: Tensor) -> Tensor:
    """The velocity in the middle, found by half a step of Euler's."""
    middle = _along(x, field(x, t), step / 2)
    return _along(x, field(middle, t + step / 2), step)


def heun(field: Field, x: Tensor, t: Tensor, step: Tensor) -> Tensor:
    """The mean of the velocities at the beginning and at the end of Euler's step."""
    first = field(x, t)
    second = field(_along(x, first, step), t + step)
    return _along(x, (first + second) / 2, step)


STEPS: dict[Method, Step] = {"euler": euler, "midpoint": midpoint, "heun": heun}
