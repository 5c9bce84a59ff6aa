"""Sliced Wasserstein distance between the patches of latents: how far the look of pictures is from that of a style, wherever things stand.

Shapes: B pictures, C channels, h w sides, P patches, D = C * size * size values of a patch, L directions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def patches(latents: Tensor, size: int) -> Tensor:
    """All windows of latents (B, C, h, w) that lie inside, with stride 1: (B, P, D), P = (h - size + 1)(w - size + 1), float32.

    Windows that stick out would have to be filled with something, and that something would be learned as a part of every style.
    """
    return F.unfold(latents.float(), size).transpose(1, 2)


def directions(dimension: int, count: int, generator: torch.Generator) -> Tensor:
    """Unit vectors (dimension, count), float32, on the CPU: blocks of orthogonal ones, each block turned at random.

    Orthogonal directions spread better than independent ones: the same count estimates the mean over all directions with less variance
    (Rowland et al. 2019, arXiv 1903.10298).
    """
    blocks = []
    for _ in range(-(-count // dimension)):
        drawn = torch.randn(dimension, dimension, generator=generator, dtype=torch.float64)
        orthogonal, triangle = torch.linalg.qr(drawn)
        # Uniform over all rotations only with these signs (Mezzadri 2007, arXiv math-ph/0609050).
        blocks.append(orthogonal * torch.sign(torch.diagonal(triangle)))
    return torch.cat(blocks, dim=1)[:, :count].float()


def sliced_wasserstein(found: Tensor, wanted: Tensor, along: Tensor) -> Tensor:
    """Squared sliced 2-Wasserstein distance of two sets of points, (P, D) and (Q, D), along unit vectors (D, L); a number.

    The mean over directions of the squared distance of the projections' quantile functions, which for P = Q is that of their sorted values
    (Bonneel et al. 2015). Between other counts it is exact as well: both functions are constant between the multiples of 1/P and 1/Q.
    """
    with torch.autocast(found.device.type, enabled=False):
        first = (found.float() @ along).sort(dim=0).values
        second = (wanted.float() @ along).sort(dim=0).values
        if len(first) == len(second):
            return (first - second).square().mean()
        rows, columns, widths = _common_steps(len(first), len(second), first.device)
        return ((first[rows] - second[columns]).square() * widths[:, None]).sum(dim=0).mean()


def _common_steps(count: int, other: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The pieces on which two quantile functions of so many values are constant: index in each, and length, which add up to 1."""
    # In units of 1 / (count * other) everything is a whole number.
    ends = torch.cat([torch.arange(1, count + 1, device=device) * other, torch.arange(1, other + 1, device=device) * count]).unique()
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    return begins // other, begins // count, (ends - begins).double().div(count * other).float()
