"""Where and along which line something changes in latents, whatever the change looks like: what images of a scene share in every style.

It is read off the structure tensor (Foerstner and Guelch 1987), the sum over channels of the products of the gradient's components: two
numbers that are the same for a negative, for other brightness and contrast, and for channels that are turned into each other.

Shapes: B samples, C latent channels, h w latent sides.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CHANNELS = 3
"""Of a map of edges."""
TINY = 1e-12
"""Below this the square of a length, and a variance, count as 0 and get no gradient."""
BLUR = 3
"""Side of the square, in latent pixels, that lengths are averaged over to be compared: styles draw the same border a little thicker or
further inside."""


def edge_map(latents: Tensor) -> Tensor:
    """Edges of latents (B, C, h, w) as (B, 3, h, w), float32: the length l of the gradient over all channels, l cos 2a and l sin 2a with a
    its angle, where channels agree on one.

    Divided by the deviation of l in each sample, l has mean 0 as well; all is 0 where nothing changes anywhere. Beyond the border latents
    go on as they end.
    """
    with torch.autocast(latents.device.type, enabled=False):
        across, down, both = _tensor(latents)
        lengths = _lengths(across, down)
        centred = lengths - lengths.mean(dim=(1, 2), keepdim=True)
        turns = [(across - down) / lengths, 2 * both / lengths]
        return torch.stack([centred, *turns], dim=1) / _deviation(centred)[:, None]


def fine_edge_map(picture: Tensor, scale: int) -> Tensor:
    """The same of a picture (B, 3, scale h, scale w), as (B, 3 scale^2, h, w): a latent has the edges of the scale x scale pixels over it.

    Gradients are those between the four pixels around each corner, and a pixel's tensor is the mean over its four corners.
    """
    with torch.autocast(picture.device.type, enabled=False):
        around = F.pad(picture if picture.dtype == torch.float64 else picture.float(), (1, 1, 1, 1), mode="replicate")
        across, down = around.diff(dim=-1), around.diff(dim=-2)
        across = (across[..., 1:, :] + across[..., :-1, :]) / 2
        down = (down[..., 1:] + down[..., :-1]) / 2
        corners = torch.stack([across.square().sum(dim=1), down.square().sum(dim=1), (across * down).sum(dim=1)], dim=1)
        across, down, both = F.avg_pool2d(corners, 2, stride=1).unbind(dim=1)
        lengths = _lengths(across, down)
        centred = lengths - lengths.mean(dim=(1, 2), keepdim=True)
        turns = [(across - down) / lengths, 2 * both / lengths]
        return F.pixel_unshuffle(torch.stack([centred, *turns], dim=1) / _deviation(centred)[:, None], scale)


def edge_difference(found: Tensor, source: Tensor) -> Tensor:
    """1 - the correlation of the blurred lengths of gradients of latents found and source (B, C, h, w): (B,); 0 is the same edges, about 1
    unrelated ones."""

    def compared(latents: Tensor) -> Tensor:
        across, down, _ = _tensor(latents)
        lengths = F.avg_pool2d(_lengths(across, down), BLUR, stride=1, padding=BLUR // 2, count_include_pad=False)
        centred = lengths - lengths.mean(dim=(1, 2), keepdim=True)
        return centred / _deviation(centred)

    with torch.autocast(found.device.type, enabled=False):
        return 1 - (compared(found) * compared(source)).mean(dim=(1, 2))


def _tensor(latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The structure tensor's entries (B, h, w): squares across, squares down, products."""
    around = F.pad(latents if latents.dtype == torch.float64 else latents.float(), (1, 1, 1, 1), mode="replicate")
    across = (around[..., 1:-1, 2:] - around[..., 1:-1, :-2]) / 2
    down = (around[..., 2:, 1:-1] - around[..., :-2, 1:-1]) / 2
    return across.square().sum(dim=1), down.square().sum(dim=1), (across * down).sum(dim=1)


def _lengths(across: Tensor, down: Tensor) -> Tensor:
    return (across + down).clamp(min=TINY).sqrt()


def _deviation(centred: Tensor) -> Tensor:
    return centred.square().mean(dim=(1, 2), keepdim=True).clamp(min=TINY).sqrt()
