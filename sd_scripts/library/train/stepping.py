"""Moving trained weights one at a time, with the run's one optimizer: for weights that are held in bf16, and within the backward pass.

fused_backward_pass  each weight is moved as soon as its gradient is complete, and the gradient is let go of
full_bf16            a weight in bf16 is brought to float32, moved there, and rounded stochastically back, so that an update smaller than
                     the distance of two numbers counts on average; the optimizer's state is float32

The optimizer knows the same weights by the same numbers as ever, so states of runs with and without these memory options are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from sd_scripts.library.core.rng import seed_for
from sd_scripts.schema.memory import MemoryOptions

_CUT = -(1 << 16)
"""Leaves of the bits of a float32 number those that bf16 has."""


def trained_dtype(memory: MemoryOptions) -> torch.dtype:
    """Precision in which networks that are trained themselves are held."""
    return torch.bfloat16 if memory.weights_in_bf16 else torch.float32


def stepping_of(memory: MemoryOptions, optimizer: torch.optim.Optimizer, seed: int) -> Stepping | None:
    """What moves the weights of a run with these options; None where the optimizer moves all at once."""
    return Stepping(optimizer, seed, memory.steps_in_backward) if memory.steps_in_backward or memory.weights_in_bf16 else None


def round_stochastically(value: Tensor, generator: torch.Generator) -> Tensor:
    """value (float32) in bf16: one of the two neighbours, each the likelier the nearer it is, so that the mean is the value.

    A random number of 16 bits is added to the bits of the number, and the last 16 are cut off. generator: on the device of value.
    """
    noise = torch.randint(0, 1 << 16, value.shape, generator=generator, device=value.device, dtype=torch.int32)
    rounded = noise.add_(value.view(torch.int32)).bitwise_and_(_CUT).view(torch.float32)
    # The bits of a number that is none could run over.
    return torch.where(value.isfinite(), rounded, value).to(torch.bfloat16)


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


class Stepping:
    """Moves the weights of one optimizer, see the module."""

    def __init__(self, optimizer: torch.optim.Optimizer, seed: int, fused: bool) -> None:
        """seed: of the run; what is drawn for a rounding follows from it, the step and the number of the weight. fused: within the backward
        pass."""
        self.fused = fused
        self._optimizer, self._seed = optimizer, seed
        self._weights: list[nn.Parameter] = []
        self._groups: dict[nn.Parameter, int] = {}
        self._generators: dict[torch.device, torch.Generator] = {}
        self._norms: dict[int, Tensor] = {}
        """Of the gradients that this step's backward pass has completed, by the number of the weight."""
        self._step: int | None = None
        """The step whose backward pass is running."""
        self._drops = False
        # Gradients of weights in host RAM and on a GPU arrive in threads of their own.
        self._lock = threading.Lock()

    def watch(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Takes the trained weights, in an order that is the same in every run."""
        self._weights = list(weights.values())
        self._groups = {weight: index for index, group in enumerate(self._optimizer.param_groups) for weight in group["params"]}
        for index, weight in enumerate(self._weights if self.fused else ()):
            weight.register_post_accumulate_grad_hook(partial(self._complete, index))

    def begin(self, step: int) -> None:
        """The next backward pass moves the weights, at the rates that the optimizer's groups have now."""
        self._step, self._norms = step, {}

    def finish(self) -> Tensor:
        """The norm of all gradients, float32 or finer; fused, those are moved first that the last backward pass gave no gradient."""
        for index, weight in enumerate(self._weights):
            if not self.fused:
                self._norms[index] = _norm(weight.grad)
            elif index not in self._norms:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                self._complete(index, weight)
        self._step = None
        device = self._norms[0].device
        return _norm(torch.stack([self._norms[index].to(device) for index in range(len(self._weights))]))

    def move_all(self, step: int) -> None:
        """Moves all weights, whose gradients are complete."""
        for index, weight in enumerate(self._weights):
            self._move(step, index, weight)

    @contextmanager
    def dropping(self) -> Iterator[None]:
        """Within the block a backward pass moves nothing and lets go of each gradient as it would otherwise: to try a step out."""
        self._drops = True
        try:
            yield
        finally:
            self._drops = False

    def _complete(self, index: int, weight: nn.Parameter) -> None:
        """Moves a weight whose gradient is complete, in a backward pass that was begun."""
        if self._drops:
            weight.grad = None
        if self._step is None or weight.grad is None:
            return
        with self._lock:
            self._norms[index] = _norm(weight.grad)
            self._move(self._step, index, weight)

    @torch.no_grad()
    def _move(self, step: int, index: int, weight: nn.Parameter) -> None:
        if weight.dtype is torch.bfloat16:
            low, gradient = weight.data, weight.grad
            assert gradient is not None
            # The very parameter in another precision, because the optimizer knows its state by it.
            weight.data = low.float()
            weight.grad = gradient.float()
            self._step_alone(weight)
            high, weight.grad, weight.data = weight.data, None, low
            weight.copy_(round_stochastically(high, self._generator(step, index, weight.device)))
        else:
            self._step_alone(weight)
            weight.grad = None

    def _step_alone(self, weight: nn.Parameter) -> None:
        """One step of the optimizer for one weight."""
        groups = self._optimizer.param_groups
        self._optimizer.param_groups = [{**groups[self._groups[weight]], "params": [weight]}]
        try:
            self._optimizer.step()
        finally:
            self._optimizer.param_groups = groups

    def _generator(self, step: int, index: int, device: torch.device) -> torch.Generator:
        """What the rounding of a weight draws from."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        return self._generators[device].manual_seed(seed_for(self._seed, step, f"rounding/{index}"))
