"""Sliced Wasserstein distance between the patches of latents: how far the look of images is from that of a style, wherever things stand.

Shapes: G sets of images, N M images of a set, C channels, h w sides, P Q patches of a set, D = C * size * size values of a patch,
L directions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


def directions(dimension: int, count: int, generator: torch.Generator) -> Tensor:
    """Unit vectors (dimension, count), float32, on the CPU: blocks of orthogonal ones, each block turned at random.

    Orthogonal directions spread better than independent ones: the same count estimates the mean over all directions with less variance
    (Rowland et al. 2019, arXiv 1903.10298).
    """
    blocks = []
    for begin in range(0, count, dimension):
        drawn = torch.randn(dimension, min(dimension, count - begin), generator=generator, dtype=torch.float64)
        orthogonal, triangle = torch.linalg.qr(drawn)
        # Uniform over all rotations only with these signs (Mezzadri 2007, arXiv math-ph/0609050).
        blocks.append(orthogonal * torch.sign(torch.diagonal(triangle)))
    return torch.cat(blocks, dim=1).float()


def sliced_wasserstein(found: Sequence[Tensor], wanted: Sequence[Sequence[Tensor]], along: Sequence[Tensor], size: int) -> Tensor:
    """Squared sliced 2-Wasserstein distance of the patches of each of G sets of images to those that are wanted of it: (G,).

    found[g] are images (N, C, h, w); wanted[g] are tensors (M, C, h, w) that may differ in M, h and w, whose patches are taken together;
    along[g] are unit vectors (D, L), with the values of a patch in the order of F.unfold. Patches are all windows of size x size that lie
    inside, with stride 1: windows that stick out would have to be filled with something, which would be learned as a part of every style.

    The distance is the mean over directions of the squared distance of the projections' quantile functions, which for P = Q is that of
    their sorted values (Bonneel et al. 2015). Sets of equal shapes are computed together.
    """
    together: dict[tuple[torch.Size, ...], list[int]] = {}
    for place, (images, others) in enumerate(zip(found, wanted, strict=True)):
        together.setdefault((images.shape, *(other.shape for other in others)), []).append(place)
    distances: dict[int, Tensor] = {}
    # Convolutions would be done in 16 bits otherwise.
    with torch.autocast(found[0].device.type, enabled=False):
        for places in together.values():
            vectors = torch.stack([along[place] for place in places])
            first = projected(torch.stack([found[place] for place in places]), vectors, size)
            others = [torch.stack(column) for column in zip(*(wanted[place] for place in places), strict=True)]
            second = torch.cat([projected(other, vectors, size) for other in others], dim=-1)
            distances |= zip(places, quantile_distance(first, second).mean(dim=-1), strict=True)
    return torch.stack([distances[place] for place in range(len(found))])


def projected(latents: Tensor, along: Tensor, size: int) -> Tensor:
    """All patches of G sets of images (G, N, C, h, w) along the G sets of unit vectors (G, D, L): (G, L, P), P = N (h - size + 1)
    (w - size + 1). As a convolution, by which no patch is ever written out."""
    sets, images, channels, height, width = latents.shape
    filters = along.to(latents).transpose(1, 2).reshape(-1, channels, size, size)
    maps = F.conv2d(latents.transpose(0, 1).reshape(images, sets * channels, height, width), filters, groups=sets)
    return maps.reshape(images, sets, along.shape[-1], -1).permute(1, 2, 0, 3).flatten(2)


def quantile_distance(found: Tensor, wanted: Tensor) -> Tensor:
    """Squared 2-Wasserstein distance of numbers found (..., P) and numbers wanted (..., Q), along the last dimension: (...).

    Exact for any P and Q: both quantile functions are constant between the multiples of 1/P and 1/Q. Over the step of a found value x the
    mean of (x - y)^2 is (x - m)^2 + the variance of y, with m the mean of y there; so all that the gradient needs has P values.
    """
    first, second = _in_order(found), _in_order(wanted)
    columns, shares = _overlaps(first.shape[-1], second.shape[-1])
    shares = shares.to(second)
    near = second.index_select(-1, columns.flatten().to(second.device)).unflatten(-1, columns.shape)
    means = (near * shares).sum(dim=-1)
    variances = ((near - means[..., None]).square() * shares).sum(dim=-1)
    return ((first - means).square() + variances).mean(dim=-1)


def _overlaps(count: int, other: int) -> tuple[Tensor, Tensor]:
    """For each of `count` equal steps the steps of `other` equal ones that lie over it: their numbers and shares of it, (count, K) each.

    Shares are float64 and add up to 1; where fewer than K lie over a step, the rest have share 0.
    """
    # In units of 1 / (count * other) everything is a whole number.
    most = -(-(count + other - math.gcd(count, other)) // count)
    begins = torch.arange(count)[:, None] * other
    columns = begins // count + torch.arange(most)
    overlaps = torch.minimum(begins + other, (columns + 1) * count) - torch.maximum(begins, columns * count)
    return columns.clamp(max=other - 1), overlaps.clamp(min=0).double() / other


def _in_order(values: Tensor) -> Tensor:
    """The values of the last dimension, rising; each gets its own gradient."""
    if values.device.type != "cpu":
        return values.sort(dim=-1).values
    # On a CPU numpy sorts the same numbers 6 times faster than torch with their places, 25 times faster without.
    raw = values.detach().numpy()
    if not values.requires_grad:
        return torch.from_numpy(np.sort(raw, axis=-1))
    return values.gather(-1, torch.from_numpy(np.argsort(raw, axis=-1)))
