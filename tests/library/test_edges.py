"""The map of edges of latents against plain loops, what it is blind to, and what it sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sd_scripts.library.edges import edge_difference, edge_map


def smooth(*shape: int, seed: int = 0) -> Tensor:
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.avg_pool2d(torch.nn.functional.pad(latents, (1,) * 4, mode="circular"), 3, stride=1)


def expected(latents: np.ndarray) -> np.ndarray:
    """The map of one latent (C, h, w), by loops."""
    _, height, width = latents.shape
    around = np.pad(latents, ((0, 0), (1, 1), (1, 1)), mode="edge")
    lengths = np.empty((height, width))
    for i in range(height):
        for j in range(width):
            across = (around[:, i + 1, j + 2] - around[:, i + 1, j]) / 2
            down = (around[:, i + 2, j + 1] - around[:, i, j + 1]) / 2
            lengths[i, j] = np.sqrt((across**2 + down**2).sum())
    blurred = np.array([[lengths[max(0, i - 1) : i + 2, max(0, j - 1) : j + 2].mean() for j in range(width)] for i in range(height)])
    return (blurred - blurred.mean()) / blurred.std()


def test_it_is_the_blurred_length_of_the_gradient_brought_to_mean_0_and_variance_1():
    latents = smooth(2, 3, 7, 5)
    found = edge_map(latents)
    assert found.shape == (2, 1, 7, 5) and found.dtype == torch.float32
    for one, source in zip(found, latents, strict=True):
        assert one[0].numpy() == pytest.approx(expected(source.double().numpy()), abs=1e-5)


def test_it_is_blind_to_brightness_contrast_negatives_and_turns_of_the_channels():
    latents = smooth(1, 4, 8, 8)
    turn = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1)))[0]
    for other in (latents + 3, 0.2 * latents, -latents, torch.einsum("dc,bchw->bdhw", turn, latents)):
        assert torch.allclose(edge_map(other), edge_map(latents), atol=1e-4)
        assert edge_difference(other, latents).item() == pytest.approx(0, abs=1e-5)


def test_unrelated_edges_differ_by_about_1_and_an_outline_little_from_the_area_inside():
    one, other = smooth(64, 4, 16, 16), smooth(64, 4, 16, 16, seed=1)
    assert edge_difference(one, other).mean().item() == pytest.approx(1, abs=0.12)
    area, outline = torch.zeros(1, 4, 16, 16), torch.zeros(1, 4, 16, 16)
    area[..., 4:12, 4:12] = 1
    outline[:, 1, 4:12, 4:12] = -2
    outline[:, 1, 5:11, 5:11] = 0
    assert edge_difference(outline, area).item() < 0.2
    assert edge_difference(outline.roll(5, dims=3), area).item() > 0.5


def test_latents_without_edges_have_a_map_of_zeros_and_a_finite_gradient():
    latents = torch.full((1, 4, 6, 6), 0.7, requires_grad=True)
    assert edge_map(latents).abs().max() == 0
    edge_difference(latents, smooth(1, 4, 6, 6)).sum().backward()
    assert latents.grad is not None and latents.grad.isfinite().all()


def test_its_gradient_is_that_of_finite_differences():
    latents, source = smooth(2, 3, 5, 6).double().requires_grad_(), smooth(2, 3, 5, 6, seed=2).double()
    assert torch.autograd.gradcheck(lambda found: edge_difference(found, source), latents)
