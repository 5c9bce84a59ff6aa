"""The sliced Wasserstein distance of patches against closed forms and an independent implementation, POT."""

from __future__ import annotations

import numpy as np
import ot
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from sd_scripts.families.lgt.transport import directions, projected, quantile_distance, sliced_wasserstein


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed))


def as_latents(points: Tensor) -> Tensor:
    """Points (n, d) as one image whose pixels they are."""
    return points.T.reshape(1, points.shape[1], -1, 1)


def distance(first: Tensor, second: Tensor, along: Tensor) -> Tensor:
    """Of two sets of points (n, d)."""
    return sliced_wasserstein([as_latents(first)], [[as_latents(second)]], [along], 1)[0]


def by_pot(first: Tensor, second: Tensor, along: Tensor) -> float:
    """The mean over directions of POT's exact one-dimensional distance."""
    first, second, along = first.double().numpy(), second.double().numpy(), along.double().numpy()
    return float(np.mean(ot.wasserstein_1d(first @ along, second @ along, p=2)))


# The value.


@pytest.mark.parametrize("dimension", [4, 36])
def test_equal_numbers_of_points_are_at_the_distance_that_pot_finds(dimension):
    first, second = normal(512, dimension, seed=1), 1.4 * normal(512, dimension, seed=2) + 0.3
    along = directions(dimension, 64, seeded())
    theirs = ot.sliced_wasserstein_distance(first.numpy(), second.numpy(), projections=along.numpy(), p=2)
    assert distance(first, second, along).item() == pytest.approx(float(theirs) ** 2, rel=1e-4)


@pytest.mark.parametrize(("count", "other"), [(40, 24), (24, 40), (7, 33), (1, 5), (5, 1), (64, 512), (512, 64), (97, 100)])
def test_any_two_numbers_of_points_are_at_the_distance_that_pot_finds(count, other):
    first, second, along = normal(count, 6, seed=1), 2 * normal(other, 6, seed=2) + 1, directions(6, 10, seeded())
    found = distance(first, second, along).item()
    assert found == pytest.approx(by_pot(first, second, along), rel=1e-4)
    assert distance(second, first, along).item() == pytest.approx(found, rel=1e-5)
    shuffled = first[torch.randperm(count, generator=seeded())]
    assert distance(shuffled, second, along).item() == pytest.approx(found, rel=1e-5)


def test_equal_sets_are_at_distance_nothing_in_any_order_and_number():
    points, along = normal(20, 5), directions(5, 8, seeded())
    shuffled = points[torch.randperm(20, generator=seeded())]
    assert distance(points, shuffled, along).item() < 1e-12
    assert distance(points, points.repeat(3, 1), along).item() < 1e-12
    assert distance(points.repeat(2, 1), points.repeat(3, 1), along).item() < 1e-12


def test_gaussians_have_the_value_of_the_closed_form():
    """The mean over directions of (theta (m1 - m2))^2 + (sqrt(theta S1 theta) - sqrt(theta S2 theta))^2."""
    along = directions(4, 256, seeded(3))
    deviations, shift = torch.tensor([2.0, 1, 0.5, 1]), torch.tensor([0.3, 0, 1, -0.4])
    second = normal(20_000, 4, seed=2) * deviations + shift
    deviation = (along.square() * deviations.square()[:, None]).sum(dim=0).sqrt()
    expected = ((shift @ along).square() + (1 - deviation).square()).mean().item()
    assert distance(normal(20_000, 4, seed=1), second, along).item() == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(("dimension", "published"), [(4, 0.1591), (36, 0.004213)])
def test_one_stretched_axis_has_the_published_value_over_all_directions(dimension, published):
    """N(0, I) against N(0, diag(4, 1, ...)): along a direction whose first coordinate is s these are normal numbers of deviation 1 and
    sqrt(1 + 3 s^2), and s has the density (1 - s^2)^((d - 3) / 2) times a constant."""
    nodes, weights = np.polynomial.legendre.leggauss(80)
    density = weights * (1 - nodes**2) ** ((dimension - 3) / 2)
    count = 20_000
    quantiles = torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)
    deviations = torch.from_numpy(np.sqrt(1 + 3 * nodes**2))
    found = quantile_distance(quantiles.expand(80, -1), deviations[:, None] * quantiles).numpy()
    assert (found * density).sum() / density.sum() == pytest.approx(published, rel=2e-3)


def test_one_stretched_axis_has_the_published_value_in_samples():
    along = directions(4, 400, seeded(1))
    stretched = normal(20_000, 4, seed=2) * torch.tensor([2.0, 1, 1, 1])
    assert distance(normal(20_000, 4, seed=1), stretched, along).item() == pytest.approx(0.1591, rel=0.05)


def test_a_shift_is_the_mean_of_its_squared_parts():
    """A shift by one in 36 dimensions is 1/36, a scale of 1.5 is 0.25; whole blocks of orthogonal directions measure the shift exactly."""
    points, shift, along = normal(500, 36), torch.zeros(36), directions(36, 72, seeded())
    shift[7] = 1.0
    assert distance(points, points + shift, along).item() == pytest.approx(1 / 36, rel=1e-4)
    many = normal(20_000, 36, seed=1)
    assert distance(many, 1.5 * many, along).item() == pytest.approx(0.25, rel=0.02)


def test_the_noise_floor_falls_with_the_number_of_points():
    """Two samples of one distribution are about 7/n apart in 36 dimensions: a loss below that is no information."""

    def floor(count: int) -> float:
        pairs = ((normal(count, 36, seed=2 * k), normal(count, 36, seed=2 * k + 1), directions(36, 64, seeded(k))) for k in range(6))
        return sum(distance(*pair).item() for pair in pairs) / 6

    assert floor(1024) == pytest.approx(6.1e-3, rel=0.1)
    assert floor(4096) == pytest.approx(1.7e-3, rel=0.1)


def test_numbers_are_at_the_distance_of_their_quantile_functions():
    found, wanted = normal(3, 2, 30, seed=1), normal(3, 2, 70, seed=2)
    theirs = [ot.wasserstein_1d(a, b, p=2) for a, b in zip(found.view(6, 30).double().numpy(), wanted.view(6, 70).double().numpy())]
    assert quantile_distance(found, wanted).flatten().tolist() == pytest.approx([float(value) for value in theirs], rel=1e-5)


@pytest.mark.parametrize(("count", "other"), [(8, 8), (8, 24), (9, 5), (5, 9)])
def test_the_gradient_is_that_of_finite_differences_to_both_sides(count, other):
    first, second = normal(2, count, seed=1).double().requires_grad_(), normal(2, other, seed=2).double().requires_grad_()
    assert torch.autograd.gradcheck(quantile_distance, (first, second))


# Directions.


@pytest.mark.parametrize(("dimension", "count"), [(8, 20), (8, 8), (8, 3), (400, 64)])
def test_directions_have_length_one_and_are_orthogonal_in_blocks(dimension, count):
    along = directions(dimension, count, seeded())
    assert along.shape == (dimension, count)
    for block in along.split(dimension, dim=1):
        assert torch.allclose(block.T @ block, torch.eye(block.shape[1]), atol=1e-5)


def test_directions_have_no_preferred_sign_or_axis():
    many = torch.stack([directions(4, 2, seeded(seed)) for seed in range(4000)])
    assert many.mean(dim=0).abs().max() < 5 * 0.5 / 4000**0.5
    # The square of a coordinate is Beta(1/2, 3/2), of mean 1/4 and deviation 1/4.
    assert (many.square().mean(dim=0) - 0.25).abs().max() < 5 * 0.25 / 4000**0.5


# Patches.


@pytest.mark.parametrize("size", [1, 3, 5])
def test_projections_are_those_of_the_windows_inside(size):
    latents = normal(2, 3, 4, 9, 7)
    along = torch.stack([directions(4 * size * size, 6, seeded(seed)) for seed in (1, 2)])
    found = projected(latents, along, size)
    assert found.shape == (2, 6, 3 * (9 - size + 1) * (7 - size + 1))
    for images, vectors, values in zip(latents, along, found, strict=True):
        windows = F.unfold(images, size).transpose(1, 2).flatten(0, 1)
        assert torch.allclose(values, (windows @ vectors).T, atol=1e-5)


def test_sets_of_equal_and_of_different_shapes_are_what_each_is_alone():
    """The first two are computed together, the third and fourth alone; references of two sizes are taken together."""
    found = [normal(2, 3, 8, 8, seed=seed) for seed in range(3)] + [normal(1, 3, 6, 9, seed=9)]
    wanted = [[normal(4, 3, 8, 8, seed=seed)] for seed in (11, 12)]
    wanted += [[normal(4, 3, 8, 8, seed=13), normal(2, 3, 7, 10, seed=14)], [normal(5, 3, 5, 5, seed=15)]]
    along = [directions(27, 7, seeded(seed)) for seed in range(4)]
    together = sliced_wasserstein(found, wanted, along, 3)

    def windows(images: list[Tensor]) -> Tensor:
        return torch.cat([F.unfold(one, 3).transpose(1, 2).flatten(0, 1) for one in images])

    expected = [by_pot(windows([one]), windows(others), vectors) for one, others, vectors in zip(found, wanted, along, strict=True)]
    assert together.tolist() == pytest.approx(expected, rel=1e-4)


def test_it_is_computed_in_32_bits_inside_autocast():
    found, wanted, along = [normal(1, 4, 8, 8, seed=1)], [[normal(1, 4, 8, 8, seed=2)]], [directions(36, 16, seeded())]
    plain = sliced_wasserstein(found, wanted, along, 3)
    with torch.autocast("cpu", torch.bfloat16):
        inside = sliced_wasserstein(found, wanted, along, 3)
    assert inside.dtype == torch.float32
    assert torch.equal(inside, plain)
