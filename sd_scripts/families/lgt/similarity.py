"""Self-similarity of latents: what stands where, whatever it looks like; how alike two places of one image are, in one and the other.

Shapes: B images, C channels, h w sides, N = h w positions, M of them compared, D = C * size * size values of a descriptor.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

TINY = 1e-12
"""Below this the square of a length counts as 0 and gets no gradient."""


def descriptors(latents: Tensor, size: int) -> Tensor:
    """What stands at each position of latents (B, C, h, w): (B, N, D), of length 1.

    The patch of size x size around the position, less the mean of all patches of the image. At the borders the image goes on as its
    mirror image, for which both sides must be greater than size // 2.
    """
    border = size // 2
    patches = F.unfold(F.pad(latents, (border,) * 4, mode="reflect"), size).transpose(1, 2)
    patches = patches - patches.mean(dim=1, keepdim=True)
    return patches / patches.square().sum(dim=-1, keepdim=True).clamp(min=TINY).sqrt()


def self_similarity(found: Tensor, source: Tensor, size: int, positions: Tensor | None = None) -> Tensor:
    """Mean over all pairs of positions of (A - A')^2, for latents found and source (B, C, h, w): (B,).

    A holds the cosines between the descriptors of one image. positions (B, M) are those that are compared in each; None compares all.
    Blind to everything that leaves all angles alone, such as x -> -x and rotations of the channels.
    """
    with torch.autocast(found.device.type, enabled=False):
        first, second = descriptors(found, size), descriptors(source, size)
        if positions is not None:
            rows = positions.to(found.device)[..., None].expand(-1, -1, first.shape[-1])
            first, second = first.gather(1, rows), second.gather(1, rows)
        return (first @ first.transpose(1, 2) - second @ second.transpose(1, 2)).square().mean(dim=(1, 2))


def chosen_positions(count: int, most: int, generator: torch.Generator) -> Tensor:
    """At most `most` of `count` positions, (M,) int64, drawn without repetition."""
    return torch.randperm(count, generator=generator)[:most]
