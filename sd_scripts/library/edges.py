"""Where something changes in latents, whatever the change looks like: what pictures of the same scene share in every style.

Shapes: B samples, C latent channels, h w latent sides.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

TINY = 1e-12
"""Below this the square of a length, and a variance, count as 0 and get no gradient."""
BLUR = 3
"""Side of the square, in latent pixels, that edges are averaged over: styles draw the same border a little thicker or further inside."""


def edge_map(latents: Tensor) -> Tensor:
    """The length of the gradient over all channels of latents (B, C, h, w), a little blurred, as (B, 1, h, w), float32, of mean 0 and
    variance 1 in each sample; 0 where nothing changes anywhere. Beyond the border latents go on as they end."""
    with torch.autocast(latents.device.type, enabled=False):
        around = F.pad(latents if latents.dtype == torch.float64 else latents.float(), (1, 1, 1, 1), mode="replicate")
        across = (around[..., 1:-1, 2:] - around[..., 1:-1, :-2]) / 2
        down = (around[..., 2:, 1:-1] - around[..., :-2, 1:-1]) / 2
        squares = (across.square() + down.square()).sum(dim=1, keepdim=True)
        lengths = F.avg_pool2d(squares.clamp(min=TINY).sqrt(), BLUR, stride=1, padding=BLUR // 2, count_include_pad=False)
        centred = lengths - lengths.mean(dim=(2, 3), keepdim=True)
        return centred / centred.square().mean(dim=(2, 3), keepdim=True).clamp(min=TINY).sqrt()


def edge_difference(found: Tensor, source: Tensor) -> Tensor:
    """1 - the correlation of the edge maps of latents found and source (B, C, h, w): (B,); 0 is the same edges, about 1 unrelated ones."""
    return 1 - (edge_map(found) * edge_map(source)).mean(dim=(1, 2, 3))
