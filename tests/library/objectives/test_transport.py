"""The sliced Wasserstein distance of patches against closed forms and an independent computation."""

from __future__ import annotations

import math

import pytest
import torch

from sd_scripts.library.objectives.transport import directions, patches, sliced_wasserstein


def along(dimension: int, count: int) -> torch.Tensor:
    return directions(dimension, count, torch.Generator())


def independent(first: torch.Tensor, second: torch.Tensor, vectors: torch.Tensor) -> float:
    """Both sets repeated to a common length, in float64, direction by direction."""
    length = math.lcm(len(first), len(second))
    total = 0.0
    for vector in vectors.double().T:
        values = [sorted((points.double() @ vector).tolist()) for points in (first, second)]
        one, other = ([value for value in row for _ in range(length // len(row))] for row in values)
        total += sum((a - b) ** 2 for a, b in zip(one, other, strict=True)) / length
    return total / vectors.shape[1]


@pytest.mark.parametrize(("count", "other"), [(40, 40), (40, 24), (7, 33), (1, 5)])
def test_any_two_numbers_of_points_are_compared_exactly(count, other):
    first, second, vectors = torch.randn(count, 6), torch.randn(other, 6) * 2 + 1, along(6, 10)
    found = sliced_wasserstein(first, second, vectors).item()
    assert found == pytest.approx(independent(first, second, vectors), rel=1e-4)
    assert sliced_wasserstein(second, first, vectors).item() == pytest.approx(found, rel=1e-5)
    assert sliced_wasserstein(first[torch.randperm(count)], second, vectors).item() == pytest.approx(found, rel=1e-5)


def test_equal_sets_are_at_distance_nothing_in_any_order_and_number():
    points = torch.randn(20, 5)
    assert sliced_wasserstein(points, points[torch.randperm(20)], along(5, 8)).item() < 1e-12
    assert sliced_wasserstein(points, points.repeat(3, 1), along(5, 8)).item() < 1e-12


def test_a_gaussian_and_a_stretched_one_have_the_value_of_the_closed_form():
    """N(0, I) and N(0, diag(4, 1, 1, 1)): the mean over directions of (sqrt(1 + 3 u) - 1)^2 with u the square of one coordinate."""
    count = 50_000
    stretched = torch.randn(count, 4) * torch.tensor([2.0, 1, 1, 1])
    found = sliced_wasserstein(torch.randn(count, 4), stretched, along(4, 200)).item()
    assert found == pytest.approx(0.1591, rel=0.1)


def test_a_shift_is_the_mean_of_its_squared_parts():
    """A shift by one in 36 dimensions is 1/36; a whole block of orthogonal directions measures it without any error."""
    points, shift = torch.randn(500, 36), torch.zeros(36)
    shift[7] = 1.0
    assert sliced_wasserstein(points, points + shift, along(36, 72)).item() == pytest.approx(1 / 36, rel=1e-4)


def test_directions_have_length_one_and_no_preferred_sign():
    vectors = along(8, 20)
    assert torch.allclose(vectors.norm(dim=0), torch.ones(20), atol=1e-6)
    assert torch.allclose(vectors[:, :8].T @ vectors[:, :8], torch.eye(8), atol=1e-5)
    many = torch.stack([directions(4, 4, torch.Generator().manual_seed(seed)) for seed in range(4000)])
    assert many.mean(dim=0).abs().max() < 6 * 0.5 / 4000**0.5


def test_the_noise_floor_falls_with_the_number_of_points():
    """Two samples of one distribution are about 7/n apart in 36 dimensions: a loss below that is no information."""
    floors = {
        n: sum(sliced_wasserstein(torch.randn(n, 36), torch.randn(n, 36), along(36, 64)).item() for _ in range(6)) / 6 for n in (1024, 4096)
    }
    assert floors[1024] == pytest.approx(6.1e-3, rel=0.25)
    assert floors[4096] == pytest.approx(1.7e-3, rel=0.25)


def test_the_gradient_is_that_of_finite_differences():
    first, second, vectors = torch.randn(6, 4).double(), torch.randn(9, 4).double(), along(4, 5)

    def value(points: torch.Tensor) -> torch.Tensor:
        return sliced_wasserstein(points, second, vectors)

    points = first.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(value(points), points)
    step = torch.randn_like(first)
    # In float32 inside: a large step, and a piecewise quadratic, whose central difference is exact.
    numeric = (value(first + 1e-3 * step) - value(first - 1e-3 * step)) / 2e-3
    assert numeric.item() == pytest.approx((gradient * step).sum().item(), rel=2e-2, abs=1e-3)


def test_patches_are_the_windows_inside():
    latents = torch.randn(2, 3, 6, 5)
    found = patches(latents, 3)
    assert found.shape == (2, 4 * 3, 27)
    assert torch.equal(found[1, 4].view(3, 3, 3), latents[1, :, 1:4, 1:4])
