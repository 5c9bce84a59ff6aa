"""Frozen linear layers whose weights are held in 8 or 4 bits, in plain PyTorch on any device.

    fp8   float8_e4m3fn without a scale, as the fp8_base of other trainers: numbers beyond 448 become 448, 1 byte a weight
    nf4   4-bit NormalFloat of QLoRA (Dettmers et al. 2023, arXiv 2305.14314): one of 16 levels, the quantiles of a normal distribution,
          times the largest magnitude of each 64 weights in a row, float32: 0.5625 bytes a weight

What is kept is tensors of integers, so nothing that changes the precision of a network touches it. Weights are made anew from them in each
forward and each backward pass, in the precision of the input (that of autocast, where it is on), and nothing of them stays in memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

Packing = Literal["fp8", "nf4"]
LARGEST_FP8 = 448.0
"""Of float8_e4m3fn."""
BLOCK = 64
"""Weights of nf4 that share a scale, side by side in memory."""


@functools.cache
def nf4_levels() -> tuple[float, ...]:
    """The 16 levels of 4-bit NormalFloat, rising from -1 to 1 with a 0 among them.

    Quantiles of the normal distribution at equal distances, eight on the side of 0 and below, nine on that of 0 and above, with one 0 left
    out, divided by the largest (arXiv 2305.14314, section 3 and appendix E). The outermost is in the middle of 1 - 1/30 and 1 - 1/32.
    """
    quantile = NormalDist().inv_cdf
    outermost = 1 - (1 / 30 + 1 / 32) / 2

    def side(count: int) -> list[float]:
        """Quantiles from 0 (left out) to the outermost."""
        return [quantile(0.5 + (outermost - 0.5) * index / count) for index in range(1, count + 1)]

    largest = quantile(outermost)
    return tuple(value / largest for value in (*(-one for one in reversed(side(7))), 0.0, *side(8)))


def pack(weight: Tensor, packing: Packing) -> list[Tensor]:
    """A weight (out, in) as tensors of integers; see unpack."""
    weight = weight.detach().float()
    if packing == "fp8":
        return [weight.clamp(-LARGEST_FP8, LARGEST_FP8).to(torch.float8_e4m3fn).view(torch.uint8)]
    levels = torch.tensor(nf4_levels(), dtype=torch.float64)
    rows = F.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    largest = rows.abs().amax(1)
    scaled = rows / torch.where(largest > 0, largest, 1.0)[:, None]
    codes = torch.bucketize(scaled, ((levels[1:] + levels[:-1]) / 2).to(scaled), out_int32=True).to(torch.uint8)
    # The table gives both weights of a byte at once. Bits of float32 numbers as integers: no change of precision touches those.
    pairs = torch.cartesian_prod(levels.float(), levels.float()).to(weight.device)
    return [codes[:, ::2] * 16 + codes[:, 1::2], largest.view(torch.int32), pairs.view(torch.int32)]


def unpack(held: Sequence[Tensor], packing: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The weight of this shape that `held` stands for, in dtype.

    fp8: (out, in) uint8, the bits of float8_e4m3fn. nf4: (N, 32) uint8 with two codes a byte for each N blocks of the flattened weight, the
    last one filled up; (N,) int32, the bits of their largest magnitudes in float32; (256, 2) int32, those of the levels of each byte.
    """
    if packing == "fp8":
        return held[0].view(torch.float8_e4m3fn).to(dtype)
    codes, largest, pairs = held
    levels = F.embedding(codes.int(), pairs.view(torch.float32)).flatten(1)
    numbers = (levels * largest.view(torch.float32)[:, None]).to(dtype).flatten()
    return numbers[: math.prod(shape)].view(shape)


class _Product(torch.autograd.Function):
    """x W' + b with the gradient to x alone; it keeps what is packed and no weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, packing: str, shape: tuple[int, int], *held: Tensor) -> Tensor:
        ctx.packing, ctx.shape = packing, shape
        ctx.save_for_backward(*held)
        return F.linear(x, unpack(held, packing, shape, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        held = ctx.saved_tensors
        found = gradient @ unpack(held, ctx.packing, ctx.shape, gradient.dtype) if ctx.needs_input_grad[0] else None
        return (found, None, None, None, *(None for _ in held))


class PackedLinear(nn.Linear):
    """A frozen linear layer in fp8 or nf4; made by `of`."""

    def __init__(self, in_features: int, out_features: int, packing: Packing, dtype: torch.dtype, held: Sequence[Tensor]) -> None:
        # Not that of nn.Linear, which makes a weight.
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self.packing: Packing = packing
        self.dtype = dtype
        """Precision of the weight that was packed."""
        self.num_held = len(held)
        for number, tensor in enumerate(held):
            self.register_parameter(f"held_{number}", nn.Parameter(tensor, requires_grad=False))
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None)

    @classmethod
    def of(cls, layer: nn.Linear, packing: Packing) -> Self:
        """Holds what a linear layer holds, on the same device, the meta device among them."""
        made = cls(layer.in_features, layer.out_features, packing, layer.weight.dtype, pack(layer.weight, packing))
        made.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach(), requires_grad=False)
        return made.train(layer.training)

    @property
    def held(self) -> list[Tensor]:
        """See unpack."""
        return [getattr(self, f"held_{number}") for number in range(self.num_held)]

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return self.out_features, self.in_features

    def unpacked(self) -> Tensor:
        """The weight, in the precision that it was packed from."""
        return unpack(self.held, self.packing, self.shape, self.dtype)

    @property
    def weight(self) -> Tensor:
        """What acts as the weight wherever one is read; it cannot be changed."""
        # A compiler leaves out what is computed for its shape alone, and could not look into the other.
        return self.unpacked() if torch.compiler.is_compiling() else ReadOnlyWeight(self)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        x = x.to(torch.get_autocast_dtype(kind)) if kind != "meta" and torch.is_autocast_enabled(kind) else x
        bias = None if self.bias is None else self.bias.to(x.dtype)
        product: Tensor = _Product.apply(x, bias, self.packing, self.shape, *self.held)
        return product

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, packing={self.packing}"


class ReadOnlyWeight(Tensor):
    """Shape, precision and device of a packed weight at no cost, and its numbers whenever one computes with it.

    Raises RuntimeError for whoever would change it, because the change would be lost.
    """

    layer: PackedLinear

    @staticmethod
    def __new__(cls, layer: PackedLinear) -> ReadOnlyWeight:
        device = layer.held[0].device
        made = Tensor._make_wrapper_subclass(cls, layer.shape, dtype=layer.dtype, device=device)
        assert isinstance(made, ReadOnlyWeight)
        made.layer = layer
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].layer)
        if func._schema.is_mutable and isinstance(args[0], cls):
            raise args[0]._refusal()

        def plain(value: Any) -> Any:
            return value.layer.unpacked() if isinstance(value, cls) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    @property
    def data(self) -> Tensor:
        """The same, without a history."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        raise self._refusal()

    def _refusal(self) -> RuntimeError:
        return RuntimeError(f"a weight held as {self.layer.packing} cannot be changed: the change would be lost")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"ReadOnlyWeight({self.layer.packing}, {tuple(self.shape)}, {self.dtype})"


@torch.no_grad()
def pack_layers(block: nn.Module, packing: Packing) -> dict[str, float]:
    """Replaces the linear layers inside a block, in place, and gives the relative error of the weight of each, by its name in the block.

    The errors of layers on the meta device are not known: nan.
    """
    errors = {}
    for name, layer in list(block.named_modules()):
        if type(layer) is not nn.Linear:
            continue
        made = PackedLinear.of(layer, packing)
        weight = layer.weight.float()
        error = float("nan") if weight.is_meta else float((made.unpacked().float() - weight).norm() / weight.norm())
        block.set_submodule(name, made)
        errors[name] = error
    return errors
