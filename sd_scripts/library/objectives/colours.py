"""A linear map from latents to luminance and two colours, fitted to what the run's own VAE makes of its own images.

A latent pixel says little more than the colour of the square it stands for, and it says that almost linearly; so a least-squares fit on a
few thousand of them is enough, for any VAE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

NUM_IMAGES = 8
"""Images of the run that the map is fitted to."""
LARGEST_SIDE = 32
"""Their middle, at most this many latent pixels wide and high, is decoded."""
RED, GREEN, BLUE = 0.299, 0.587, 0.114
"""Luminance Y of red, green and blue (ITU-R BT.601); the colours are (B - Y) / 1.772 and (R - Y) / 1.402."""


@torch.no_grad()
def fit_colours(latents: Iterable[Tensor], decode: Callable[[Tensor], Tensor]) -> Tensor:
    """The map (3, C), float32 on the CPU, of latents (C, h, w) and decode: (1, C, h, w) -> (1, 3, H, W) in [-1, 1].

    What is constant is left out: everything that the map is used for compares two images, or looks at differences from a mean.
    """
    inputs, wanted = [], []
    for latent in latents:
        middle = _middle(latent).float()
        image = decode(middle[None]).float().cpu()
        squares = F.adaptive_avg_pool2d(image, (middle.shape[1], middle.shape[2]))[0]
        inputs.append(middle.cpu().flatten(1).T.double())
        wanted.append(squares.flatten(1).T.double())
    known, rgb = torch.cat(inputs), torch.cat(wanted)
    # gelsd finds the shortest answer where the latents do not span all channels.
    fitted = torch.linalg.lstsq(known - known.mean(dim=0), rgb - rgb.mean(dim=0), driver="gelsd").solution.T
    luminance = torch.tensor([RED, GREEN, BLUE], dtype=torch.float64) @ fitted
    return torch.stack([luminance, (fitted[2] - luminance) / 1.772, (fitted[0] - luminance) / 1.402]).float()


def _middle(latent: Tensor) -> Tensor:
    height, width = (min(side, LARGEST_SIDE) for side in latent.shape[1:])
    top, left = (latent.shape[1] - height) // 2, (latent.shape[2] - width) // 2
    return latent[:, top : top + height, left : left + width]
