"""The self-similarity of latents against plain loops, what it sees and what it cannot see, and its level by chance."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from sd_scripts.families.lgt.energy import blurred
from sd_scripts.families.lgt.similarity import chosen_positions, descriptors, self_similarity


def chance_level(source: Tensor, size: int) -> Tensor:
    """The self-similarity that latents (B, C, h, w) have to images of the same descriptors at other places, on average: (B,).

    For a random rearrangement of the positions the two cosines of a pair of different places are independent, so that the expected
    squared difference is twice their variance. White latents have 2 (N - 1) / (D N) about, 0.498 at 4 channels, N = 256 and size 1.
    """
    with torch.autocast(source.device.type, enabled=False):
        unit = descriptors(source, size)
        count = unit.shape[1]
        cosines = (unit @ unit.transpose(1, 2)) * (1 - torch.eye(count, device=unit.device, dtype=unit.dtype))
        pairs = count * (count - 1)
        variance = cosines.square().sum(dim=(1, 2)) / pairs - (cosines.sum(dim=(1, 2)) / pairs).square()
        return 2 * variance * pairs / count**2


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def white(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed))


def like_images(*shape: int, seed: int = 0) -> Tensor:
    """White latents blurred and brought back to deviation 1, with a mean of their own, as those of images have."""
    latents = blurred(white(*shape, seed=seed), 3)
    return latents / latents.std() + 0.5


def reference(latents: NDArray[np.float64], size: int, positions: list[int]) -> NDArray[np.float64]:
    """The cosines between the descriptors of one latent (C, h, w), by loops."""
    border, (_, height, width) = size // 2, latents.shape
    padded = np.pad(latents, ((0, 0), (border, border), (border, border)), mode="reflect")
    found = np.stack([padded[:, i : i + size, j : j + size].ravel() for i in range(height) for j in range(width)])
    found = found - found.mean(axis=0)
    return np.array([[a @ b / np.sqrt((a @ a) * (b @ b)) for a in found[positions]] for b in found[positions]])


@pytest.mark.parametrize("size", [1, 3, 5])
def test_it_is_the_mean_squared_difference_of_the_cosines(size):
    found, source = like_images(2, 3, 6, 5, seed=1), like_images(2, 3, 6, 5, seed=2)
    positions = torch.stack([chosen_positions(30, 12, seeded(seed)) for seed in (1, 2)])
    for chosen in (None, positions):
        values = self_similarity(found, source, size, chosen)
        for row in range(2):
            places = list(range(30)) if chosen is None else chosen[row].tolist()
            first, second = (reference(latents[row].double().numpy(), size, places) for latents in (found, source))
            assert values[row].item() == pytest.approx(np.square(first - second).mean(), rel=1e-4)


def test_positions_are_drawn_without_repetition_and_are_all_where_there_are_few():
    assert sorted(chosen_positions(10, 64, seeded()).tolist()) == list(range(10))
    some = chosen_positions(100, 64, seeded(1))
    assert len(set(some.tolist())) == 64
    assert torch.equal(some, chosen_positions(100, 64, seeded(1)))
    assert not torch.equal(some, chosen_positions(100, 64, seeded(2)))


def test_descriptors_have_length_one_and_no_common_direction():
    found = descriptors(like_images(2, 4, 8, 8), 3)
    assert found.shape == (2, 64, 36)
    assert torch.allclose(found.norm(dim=-1), torch.ones(2, 64), atol=1e-6)
    # A constant image has none, and still a finite gradient.
    flat = torch.ones(1, 4, 8, 8, requires_grad=True)
    self_similarity(flat, like_images(1, 4, 8, 8), 3).sum().backward()
    assert torch.isfinite(flat.grad).all()


def test_the_same_image_is_at_nothing_and_a_little_noise_at_little():
    source = like_images(4, 4, 16, 16)
    assert self_similarity(source, source, 3).max().item() == 0
    levels = [self_similarity(source + noise * white(4, 4, 16, 16, seed=1), source, 3).mean().item() for noise in (0.1, 0.3, 1.0, 3.0)]
    assert levels == sorted(levels)
    assert levels[0] < 0.05 * levels[-1]


@pytest.mark.parametrize(("channels", "count", "published"), [(4, 16, 0.498), (16, 16, 0.125 * 255 / 256)])
def test_white_latents_compared_pixel_by_pixel_have_the_published_level(channels, count, published):
    first, second = white(8, channels, count, count, seed=1), white(8, channels, count, count, seed=2)
    assert self_similarity(first, second, 1).mean().item() == pytest.approx(published, rel=0.03)
    assert chance_level(first, 1).mean().item() == pytest.approx(published, rel=0.03)


@pytest.mark.parametrize("size", [1, 3])
def test_chance_is_the_mean_over_rearrangements_of_the_descriptors(size):
    source = like_images(1, 4, 8, 8)
    unit = descriptors(source, size)[0]
    cosines = unit @ unit.T
    orders = [torch.randperm(64, generator=seeded(seed)) for seed in range(400)]
    values = torch.stack([(cosines[order][:, order] - cosines).square().mean() for order in orders])
    assert chance_level(source, size).item() == pytest.approx(values.mean().item(), abs=4 * values.std().item() / 400**0.5)


def test_descriptors_of_white_latents_have_a_level_of_their_own():
    """Patches of 3 x 3 have 36 values in place of 4, so that chance is a tenth: 0.057 in place of 0.498, to be told beside a value."""
    levels = {size: chance_level(white(8, 4, 16, 16), size).mean().item() for size in (1, 3, 5)}
    assert levels[1] == pytest.approx(0.498, rel=0.02)
    assert levels[3] < 0.15 * levels[1]
    assert levels[5] < levels[3]


@pytest.mark.parametrize("size", [1, 3])
def test_a_negative_and_turned_channels_are_seen_by_the_blurred_difference_alone(size):
    """All angles between places stay as they are, so no descriptor can tell: neither patches nor centring. The anchor w_low can."""
    source = like_images(4, 4, 16, 16)
    rotation = torch.linalg.qr(white(4, 4, seed=3))[0]
    for changed in (-source, torch.einsum("kc,bchw->bkhw", rotation, source)):
        assert self_similarity(changed, source, size).max().item() < 1e-10
        assert blurred(changed - source, 5).square().mean().item() > 0.5
    # The same anchor is small for a change of what is fine.
    fine = white(4, 4, 16, 16, seed=4)
    assert blurred(fine - blurred(fine, 3), 5).square().mean().item() < 0.05


def test_patches_and_centring_see_other_brightness_at_single_places():
    """Uncentred single pixels do not: their angles stay when each is multiplied by a positive number of its own."""
    source = like_images(4, 4, 16, 16)
    gains = torch.exp(0.5 * white(4, 1, 16, 16, seed=5))
    unit, changed = ((x / x.norm(dim=1, keepdim=True)).flatten(2).transpose(1, 2) for x in (source, gains * source))
    assert (unit @ unit.transpose(1, 2) - changed @ changed.transpose(1, 2)).square().mean().item() < 1e-10
    for size in (1, 3):
        assert (self_similarity(gains * source, source, size) / chance_level(source, size)).min().item() > 0.05


def test_the_gradient_is_that_of_finite_differences():
    source = like_images(2, 2, 4, 4).double()
    positions = torch.stack([chosen_positions(16, 9, seeded(seed)) for seed in (1, 2)])
    found = white(2, 2, 4, 4, seed=1).double().requires_grad_()
    for size in (1, 3):
        assert torch.autograd.gradcheck(lambda x, size=size: self_similarity(x, source, size, positions), found)
        assert torch.autograd.gradcheck(lambda x, size=size: self_similarity(x, source, size), found)


def test_it_is_computed_in_32_bits_inside_autocast():
    found, source = like_images(2, 4, 8, 8, seed=1), like_images(2, 4, 8, 8, seed=2)
    with torch.autocast("cpu", torch.bfloat16):
        inside = self_similarity(found, source, 3)
    assert torch.equal(inside, self_similarity(found, source, 3))
