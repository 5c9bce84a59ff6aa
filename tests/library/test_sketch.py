"""The small picture of latents: fitted to a VAE whose latents are linear in the pixels it is exact, and it does not depend on luck."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sd_scripts.families.lgt.sketch import dead_leaves, fitted

FACTOR = 4
TURN = torch.linalg.qr(torch.randn(3 * FACTOR**2, 3 * FACTOR**2, generator=torch.Generator().manual_seed(3)))[0]


def encode(pictures: Tensor) -> Tensor:
    """Every pixel of a square of FACTOR, turned: nothing is lost."""
    return torch.einsum("dc,bchw->bdhw", TURN, F.pixel_unshuffle(pictures, FACTOR)) + 0.3


@pytest.mark.parametrize("scale", [2, 4])
def test_of_latents_that_lose_nothing_it_shows_the_picture(scale: int) -> None:
    weight, bias = fitted(encode, FACTOR, scale)
    assert weight.shape == (3 * scale**2, 3 * FACTOR**2, 3, 3) and bias.shape == (3 * scale**2,)
    pictures = torch.from_numpy(np.stack([dead_leaves(32, np.random.default_rng(9)) for _ in range(3)])).permute(0, 3, 1, 2) / 127.5 - 1
    seen = F.pixel_shuffle(F.conv2d(F.pad(encode(pictures), (1, 1, 1, 1), mode="replicate"), weight, bias), scale)
    assert (seen - F.avg_pool2d(pictures, FACTOR // scale)).square().mean().sqrt() < 0.02
    assert all(torch.equal(one, other) for one, other in zip(fitted(encode, FACTOR, scale), (weight, bias), strict=True))


def test_leaves_have_all_sizes_and_colours() -> None:
    pictures = np.stack([dead_leaves(64, np.random.default_rng(number)) for number in range(24)])
    assert pictures.shape == (24, 64, 64, 3) and pictures.min() == 0 <= pictures.max() <= 255
    assert pictures.std(axis=(0, 1, 2)).min() > 50 and len({picture.tobytes() for picture in pictures}) == 24
