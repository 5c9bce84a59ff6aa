"""Small images of what is being made, cheap enough to show after every step.

A linear map from latent channels to colours is always there, at the price of a product of small matrices; where decoding a shrunken latent
is quick against a step, as on a GPU or with a small model, that is shown instead. Which one is decided by measured times.
"""

from __future__ import annotations

import base64
import io
import time

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from sd_scripts.families.common.images import as_images, evaluating
from sd_scripts.library.core.protocols import ModelFamily, Parts
from sd_scripts.library.core.rng import rng_for

SIDE = 256
"""Longest side of a thumbnail, px."""
LATENT_SIDE = SIDE // 8
WORTH = 0.1
"""Decoding is worth it when it takes at most this part of a step."""
RIDGE = 1e-4
"""Weight of the squares of the linear map against the mean squared error: channels that the fit's image does not move stay near 0."""
_PALETTE_SIDE = 128


class Thumbnails:
    """Thumbnails of clean latents of one model."""

    def __init__(self, family: ModelFamily, parts: Parts) -> None:
        self._family, self._parts = family, parts
        self._map: Tensor | None = None
        self._decode_seconds: float | None = None

    @torch.no_grad()
    def of(self, clean: Tensor, step_seconds: float) -> Image.Image:
        """A thumbnail of scaled latents (C, h, w), whose last step took this long."""
        latents = shrunken(clean)
        if self._decode_seconds is None or self._decode_seconds <= WORTH * step_seconds:
            started = time.perf_counter()
            with evaluating(self._parts):
                image = as_images(self._family.decode(self._parts, latents[None]))[0]
            took = time.perf_counter() - started
            # The first call warms up kernels and is not typical.
            self._decode_seconds = took if self._decode_seconds is None else min(self._decode_seconds, took)
            return image
        return as_images(self._coloured(latents)[None])[0].resize((8 * latents.shape[-1], 8 * latents.shape[-2]), Image.Resampling.BICUBIC)

    def _coloured(self, latents: Tensor) -> Tensor:
        """(3, h, w) in [-1, 1] by the linear map."""
        if self._map is None:
            with evaluating(self._parts):
                self._map = colour_map(self._family, self._parts)
        ones = torch.ones_like(latents[:1])
        return torch.einsum("kc,khw->chw", self._map, torch.cat([latents, ones]).float()).clamp(-1, 1)


def shrunken(latents: Tensor) -> Tensor:
    """Latents (C, h, w) of at most LATENT_SIDE, by averaging; even sides."""
    height, width = latents.shape[-2:]
    scale = min(1.0, LATENT_SIDE / max(height, width))
    size = [max(2, round(side * scale / 2) * 2) for side in (height, width)]
    return latents if size == [height, width] else F.adaptive_avg_pool2d(latents[None].float(), size)[0]


def colour_map(family: ModelFamily, parts: Parts) -> Tensor:
    """(C + 1, 3): the least-squares map from latents and a 1 to the mean colour of the pixels that each is of, fitted on an image of all
    colours."""
    image = palette()
    latents = family.encode_images(parts, image[None])[0].cpu().double()
    colours = F.avg_pool2d(image[None], image.shape[-1] // latents.shape[-1])[0].double()
    points = torch.cat([latents, torch.ones_like(latents[:1])]).flatten(1).T
    gram = points.T @ points + RIDGE * len(points) * torch.eye(points.shape[1], dtype=torch.float64)
    return torch.linalg.solve(gram, points.T @ colours.flatten(1).T).float()


def palette() -> Tensor:
    """An image (3, H, W) in [-1, 1] of squares of all colours, large and small."""
    rng = rng_for(0, 0, "palette")
    image = torch.zeros(3, _PALETTE_SIDE, _PALETTE_SIDE)
    for squares, share in ((4, 0.5), (16, 0.5)):
        colours = torch.rand(1, 3, squares, squares, generator=rng) * 2 - 1
        image += share * F.interpolate(colours, size=(_PALETTE_SIDE, _PALETTE_SIDE), mode="nearest")[0]
    return image.clamp(-1, 1)


def data_url(image: Image.Image) -> str:
    """The image as a JPEG inside a URL."""
    data = io.BytesIO()
    image.save(data, format="JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode()
