"""A small picture of latents by one linear layer: where things are, finer than the latents are, at a fraction of a decoder's cost.

The layer is fitted to the VAE when a model is made, by least squares on dead leaves: shapes of all sizes and colours that lie over each
other, whose edges are as those of photographs (Lee, Mumford and Huang 2001, doi 10.1023/A:1011109015675). No image of the user's is in it.

Shapes: N pictures, C latent channels, h w latent sides, S = scale.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from torch.nn import functional as F

from sd_scripts.dataset.draws import numpy_for

SIDE, COUNT, TOGETHER = 128, 32, 8
"""Sides of the pictures in pixels, how many there are, and how many are encoded together."""
RIDGE = 1e-3
"""Weight of the squared coefficients beside the mean square error, in parts of the latents' mean square."""
WINDOW = 3
"""Side of the window of latents, in latent pixels, that a small picture is read from."""


def fitted(encode: Callable[[Tensor], Tensor], factor: int, scale: int) -> tuple[Tensor, Tensor]:
    """Weight (3 S^2, C, 3, 3) and bias (3 S^2,) of the convolution whose channels, shuffled into pixels, are the picture at S times the
    sides of its latents. encode: pictures (N, 3, H, W) in [-1, 1] to latents (N, C, H / factor, W / factor)."""
    drawn = np.stack([dead_leaves(SIDE, numpy_for(0, number, "dead leaves")) for number in range(COUNT)])
    pictures = torch.from_numpy(drawn).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        latents = torch.cat([encode(some).float().cpu() for some in pictures.split(TOGETHER)])
    # Without the border, where the VAE sees what is around the image.
    windows = F.unfold(latents.double(), WINDOW).transpose(1, 2).flatten(0, 1)
    cells = F.pixel_unshuffle(F.avg_pool2d(pictures.double(), factor // scale), scale)[..., 1:-1, 1:-1]
    wanted = cells.permute(0, 2, 3, 1).flatten(0, 2)
    known = torch.cat([windows, torch.ones(len(windows), 1, dtype=torch.float64)], dim=1)
    squares = known.T @ known
    penalty = RIDGE * len(known) * windows.square().mean()
    solved = torch.linalg.solve(squares + penalty * torch.eye(len(squares), dtype=torch.float64), known.T @ wanted).T.float()
    return solved[:, :-1].unflatten(1, (latents.shape[1], WINDOW, WINDOW)), solved[:, -1]


def dead_leaves(side: int, rng: np.random.Generator) -> np.ndarray:
    """A picture (side, side, 3) of 0 to 255, float32: up to 30 polygons and outlines of any colour, small ones more often."""

    def color() -> tuple[int, ...]:
        return tuple(int(part) for part in rng.integers(0, 256, 3))

    picture = Image.new("RGB", (side, side), color())
    draw = ImageDraw.Draw(picture)
    for _ in range(int(rng.integers(2, 31))):
        radius, squeezed, turn = 2 + side / 2 * rng.uniform(0.06, 1) ** 2, rng.uniform(0.3, 1), rng.uniform(0, 2 * np.pi)
        angles = np.linspace(0, 2 * np.pi, int(rng.integers(3, 25)), endpoint=False)
        along, across = radius * np.cos(angles), squeezed * radius * np.sin(angles)
        x, y = rng.uniform(0, side, 2)[:, None] + [
            along * np.cos(turn) - across * np.sin(turn),
            along * np.sin(turn) + across * np.cos(turn),
        ]
        corners = list(zip(x.tolist(), y.tolist(), strict=True))
        if rng.random() < 0.3:
            draw.line([*corners, corners[0]], color(), int(rng.integers(2, 9)))
        else:
            draw.polygon(corners, color())
    return np.asarray(picture, dtype=np.float32)
