"""The map of edges of latents against plain loops, what it is blind to, and what it sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from sd_scripts.families.lgt.edges import edge_difference, edge_map, fine_edge_map


def smooth(*shape: int, seed: int = 0) -> Tensor:
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.avg_pool2d(torch.nn.functional.pad(latents, (1,) * 4, mode="circular"), 3, stride=1)


def gradients(latents: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sums over the channels of one latent (C, h, w) of squares and products of the gradient's components, by loops: (h, w) each."""
    _, height, width = latents.shape
    around = np.pad(latents, ((0, 0), (1, 1), (1, 1)), mode="edge")
    found = np.empty((3, height, width))
    for i in range(height):
        for j in range(width):
            across = (around[:, i + 1, j + 2] - around[:, i + 1, j]) / 2
            down = (around[:, i + 2, j + 1] - around[:, i, j + 1]) / 2
            found[:, i, j] = (across**2).sum(), (down**2).sum(), (across * down).sum()
    return found[0], found[1], found[2]


def test_it_is_the_length_of_the_gradient_and_twice_its_angle():
    latents = smooth(2, 3, 7, 5)
    found = edge_map(latents)
    assert found.shape == (2, 3, 7, 5) and found.dtype == torch.float32
    for one, source in zip(found, latents, strict=True):
        across, down, both = gradients(source.double().numpy())
        lengths = np.sqrt(across + down)
        for channel, values in enumerate((lengths - lengths.mean(), (across - down) / lengths, 2 * both / lengths)):
            assert one[channel].numpy() == pytest.approx(values / lengths.std(), abs=1e-4)


def test_the_last_two_channels_turn_twice_as_fast_as_the_edge():
    rows, columns = torch.meshgrid(torch.arange(15.0), torch.arange(15.0), indexing="ij")
    for degrees in (0, 30, 90, 135):
        angle = torch.tensor(degrees * np.pi / 180)
        ramp = torch.tanh(((columns - 7) * angle.cos() + (rows - 7) * angle.sin()) / 4).float()
        turn = edge_map(ramp.expand(1, 2, -1, -1))[0, 1:, 7, 7]
        turn = turn / turn.norm()
        assert turn.tolist() == pytest.approx([(2 * angle).cos().item(), (2 * angle).sin().item()], abs=0.05)


def test_the_difference_is_1_less_the_correlation_of_blurred_lengths():
    one, other = smooth(3, 4, 6, 8), smooth(3, 4, 6, 8, seed=1)
    for value, *both in zip(edge_difference(one, other), one, other, strict=True):
        maps = []
        for latents in both:
            lengths = np.sqrt(sum(gradients(latents.double().numpy())[:2]))
            maps.append([lengths[max(0, i - 1) : i + 2, max(0, j - 1) : j + 2].mean() for i in range(6) for j in range(8)])
        assert value.item() == pytest.approx(1 - np.corrcoef(*maps)[0, 1], abs=1e-5)


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


@pytest.mark.parametrize("scale", [1, 2, 4])
def test_a_finer_map_is_that_of_a_picture_of_as_many_pixels_for_each_latent(scale: int):
    """By loops: a pixel's tensor is the mean over its corners, a corner's gradient that between the four pixels around it."""
    height, width = 5 * scale, 4 * scale
    pictures = smooth(2, 3, height, width)
    found = fine_edge_map(pictures, scale)
    assert found.shape == (2, 3 * scale**2, 5, 4) and found.dtype == torch.float32
    for one, picture in zip(torch.nn.functional.pixel_shuffle(found, scale), pictures, strict=True):
        around = np.pad(picture.double().numpy(), ((0, 0), (1, 1), (1, 1)), mode="edge")
        tensors = np.zeros((3, height, width))
        for i, j, below, right in np.ndindex(height, width, 2, 2):
            square = around[:, i + below : i + below + 2, j + right : j + right + 2]
            across = square[:, :, 1].mean(axis=1) - square[:, :, 0].mean(axis=1)
            down = square[:, 1].mean(axis=1) - square[:, 0].mean(axis=1)
            tensors[:, i, j] += np.array([(across**2).sum(), (down**2).sum(), (across * down).sum()]) / 4
        across, down, both = tensors
        lengths = np.sqrt(across + down)
        for channel, values in enumerate((lengths - lengths.mean(), (across - down) / lengths, 2 * both / lengths)):
            assert one[channel].numpy() == pytest.approx(values / lengths.std(), abs=1e-4)


def test_a_thin_line_is_as_long_an_edge_as_the_border_of_an_area():
    """Gradients between next neighbours see a line of one pixel; those across two see nothing on it."""
    line, area = torch.zeros(1, 3, 16, 16), torch.zeros(1, 3, 16, 16)
    line[..., 8], area[..., 8:] = 1, 1
    for picture in (line, area):
        assert fine_edge_map(picture, 1)[0, 0, 5].argmax().item() in (7, 8)
    assert fine_edge_map(line, 1)[0, 0, 5, 8] > 2 > 0.5 > edge_map(line)[0, 0, 5, 8]
