"""What the tensors of one adapter layer mean: updates of a weight, by kind of adapter. Knows neither names nor peft.

Shapes: W (o, i) of a linear layer or (o, i, kh, kw) of a convolution; r rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Kind = Literal["lora", "dora", "loha", "lokr", "oft"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# The factor that takes up a change of scale, so that the product stays what it was.
_SCALED = {"lora": ("lora_B.weight",), "dora": ("lora_B.weight",), "loha": ("hada_w1_b",), "lokr": ("lokr_w1", "lokr_w1_a"), "oft": ()}


@dataclass(frozen=True)
class AdapterLayer:
    """The adapter of one layer: its tensors by peft's name, and the factor on their product (alpha / rank)."""

    kind: Kind
    tensors: Mapping[str, Tensor]
    scale: float = 1.0

    @property
    def rank(self) -> int | None:
        """Rank of the factors; None where there are none (full lokr, oft)."""
        for name, dim in (("lora_A.weight", 0), ("hada_w1_b", 0), ("lokr_w1_b", 0), ("lokr_w2_b", 0)):
            if name in self.tensors:
                return self.tensors[name].shape[dim]
        return None

    def rescaled(self, scale: float) -> AdapterLayer:
        """The same update written with another factor: the difference goes into one of the matrices."""
        if scale == self.scale or self.kind == "oft":
            return self
        target = next(name for name in _SCALED[self.kind] if name in self.tensors)
        held = self.tensors[target]
        tensors = {**self.tensors, target: held.to(torch.promote_types(held.dtype, torch.float32)) * (self.scale / scale)}
        return AdapterLayer(self.kind, tensors, scale)

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> AdapterLayer:
        return AdapterLayer(self.kind, {name: tensor.to(device=device, dtype=dtype) for name, tensor in self.tensors.items()}, self.scale)


def low_rank_update(layer: AdapterLayer, shape: torch.Size) -> Tensor:
    """The additive update of a weight of this shape: scale times the product; for dora the part before the normalisation."""
    t = layer.tensors
    if layer.kind in ("lora", "dora"):
        product = t["lora_B.weight"].flatten(1) @ t["lora_A.weight"].flatten(1)
    elif layer.kind == "loha":
        # FedPara, Hyeon-Woo et al. 2022 (arXiv 2108.06098): the Hadamard product of two low-rank matrices.
        product = (t["hada_w1_a"] @ t["hada_w1_b"]) * (t["hada_w2_a"] @ t["hada_w2_b"])
    elif layer.kind == "lokr":
        # LoKr, Yeh et al. 2024 (arXiv 2309.14859): a Kronecker product. A convolution's second factor carries the kernel.
        w1 = t["lokr_w1"] if "lokr_w1" in t else t["lokr_w1_a"] @ t["lokr_w1_b"]
        w2 = t["lokr_w2"] if "lokr_w2" in t else t["lokr_w2_a"] @ t["lokr_w2_b"]
        product = torch.kron(w1, w2.flatten(1).contiguous())
    else:
        raise ValueError("oft multiplies a weight and adds nothing; see merged_weight")
    return product.reshape(shape) * layer.scale


def rotation(vectors: Tensor) -> Tensor:
    """Orthogonal blocks (n, b, b) of oft from their upper triangles (n, b (b - 1) / 2), by the Cayley transform (I - Q)(I + Q)^-1.

    Qiu et al. 2023 (arXiv 2306.07280).
    """
    n, elements = vectors.shape
    side = int((1 + (1 + 8 * elements) ** 0.5) / 2 + 0.5)
    rows, columns = torch.triu_indices(side, side, 1, device=vectors.device)
    skew = vectors.new_zeros(n, side, side)
    skew[:, rows, columns] = vectors
    skew = skew - skew.transpose(1, 2)
    eye = torch.eye(side, dtype=vectors.dtype, device=vectors.device).expand(n, side, side)
    return torch.linalg.solve(eye + skew, eye - skew, left=False)


def merged_weight(weight: Tensor, layer: AdapterLayer, multiplier: float = 1.0) -> Tensor:
    """The weight that a layer without adapter needs to do the same, in weight's dtype (give float32 or float64).

    multiplier scales the update: the sum for lora, loha and lokr, W' - W for dora, and only 0 or 1 for oft.
    """
    layer = layer.to(weight.dtype, weight.device)
    if layer.kind == "oft":
        if multiplier not in (0.0, 1.0):
            raise ValueError(f"an oft adapter rotates the weight and has no strength other than 0 or 1, not {multiplier:g}")
        blocks = rotation(layer.tensors["oft_R.weight"])
        # peft rotates the input, y = (x R) W^T, so the weight becomes W R^T, block by block.
        rotated = torch.einsum("onc,nkc->onk", weight.reshape(weight.shape[0], blocks.shape[0], -1), blocks)
        return rotated.reshape(weight.shape) if multiplier else weight
    merged = weight + low_rank_update(layer, weight.shape) * (multiplier if layer.kind != "dora" else 1.0)
    if layer.kind == "dora":
        # DoRA, Liu et al. 2024 (arXiv 2402.09353): the updated direction with a learned length for each output (or input) channel.
        magnitude = layer.tensors["lora_magnitude_vector.weight"]
        merged = merged * (magnitude_like(magnitude, weight) / _norm(merged, magnitude))
        merged = weight + multiplier * (merged - weight)
    return merged


def magnitude_like(magnitude: Tensor, weight: Tensor) -> Tensor:
    """A dora magnitude, broadcastable over the weight: (o,) is a length for each output, (1, i) or (1, i, 1, 1) one for each input."""
    if magnitude.dim() == 1:
        return magnitude.reshape(-1, *[1] * (weight.dim() - 1))
    return magnitude.reshape(1, -1, *[1] * (weight.dim() - 2))


def output_norm(weight: Tensor) -> Tensor:
    """Length of the weights of each output, (o,)."""
    return torch.linalg.vector_norm(weight.flatten(1), dim=1)


def _norm(weight: Tensor, magnitude: Tensor) -> Tensor:
    keep = 0 if magnitude.dim() == 1 else 1
    return torch.linalg.vector_norm(weight, dim=[dim for dim in range(weight.dim()) if dim != keep], keepdim=True)


def product_distance(a: AdapterLayer, b: AdapterLayer) -> float:
    """Frobenius norm of the difference of two lora updates.

    Written with the small Gram matrices of the stacked factors in float64, so the full weight is never formed:
    [Ba, -Bb][Aa; Ab] has the squared norm sum(B^T B * A A^T).
    """
    ups = torch.cat(
        [a.tensors["lora_B.weight"].flatten(1).double() * a.scale, b.tensors["lora_B.weight"].flatten(1).double() * -b.scale], dim=1
    )
    downs = torch.cat([a.tensors["lora_A.weight"].flatten(1).double(), b.tensors["lora_A.weight"].flatten(1).double()])
    return float(((ups.T @ ups) * (downs @ downs.T)).sum().clamp(min=0).sqrt())
