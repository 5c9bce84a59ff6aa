"""Lion, the optimizer that keeps one moment and moves by its sign (Chen et al. 2023, arXiv 2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """m is the only state; the step is sign(b1 m + (1 - b1) g), decoupled weight decay as in AdamW.

    Usual rates are three to ten times lower than AdamW's. Raises ValueError for arguments out of range.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        if lr < 0 or weight_decay < 0 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"lr and weight_decay must not be negative and betas must be in [0, 1), not {lr}, {weight_decay}, {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Moves all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            gradients = [p.grad for p in parameters]
            for p in parameters:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
            moments = [self.state[p]["exp_avg"] for p in parameters]
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            update = torch._foreach_lerp(gradients, moments, beta1)
            torch._foreach_sign_(update)
            torch._foreach_add_(parameters, update, alpha=-group["lr"])
            torch._foreach_lerp_(moments, gradients, 1 - beta2)
        return loss
