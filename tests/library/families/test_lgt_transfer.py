"""Transfer between styles: on Gaussian styles, whose velocity is known in closed form, and on the tiny network.

A style with latents N(m, s^2) and independent noise n has the ideal velocity E[n - x0 | x_t], which is affine in x, and its flow maps
noise n to m + s n. So inversion is (x - m) / s, and transfer from style a to style b is m_b + s_b (x - m_a) / s_a.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from sd_scripts.families.lgt.edges import edge_map
from sd_scripts.families.lgt.model import STYLE, Lgt
from sd_scripts.families.lgt.options import LgtModelOptions
from sd_scripts.families.lgt.transfer import (
    Settings,
    begin,
    edges_of,
    generate,
    guess_source,
    invert,
    langevin_step,
    mixed,
    num_calls,
    sigma_of,
    transfer,
)
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.integrators import STEPS, Method
from sd_scripts.library.core.protocols import Beginning, Condition, Parts
from sd_scripts.library.core.rng import rng_for

DOUBLE = torch.float64
STYLES = {"flat": (0.7, 0.4), "line": (-0.5, 1.5), "night": (0.0, 1.0)}
"""Mean and deviation of each style's latents; the average is taken for another Gaussian."""
AVERAGE = (0.1, 1.1)


def gaussian(x: Tensor, t: Tensor, m: Tensor | float, s: Tensor | float) -> Tensor:
    """The ideal velocity of a style N(m, s^2) at x (B, ...) and times t (B,)."""
    t = t.view(-1, *[1] * (x.ndim - 1))
    a = 1 - t
    return (t - a * s**2) / (t**2 + a**2 * s**2) * (x - a * m) - m


class Gaussians(Lgt):
    """The family with the network replaced by closed forms, float64; counts how often it is asked, and with how many rows."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def denoise(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        self.rows.append(len(x_t))
        table = torch.tensor([*STYLES.values(), AVERAGE], dtype=DOUBLE)
        m, s = (torch.stack([table[condition[STYLE].argmax()] for condition in conditions]).view(-1, 2, 1, 1, 1)).unbind(1)
        return gaussian(x_t.double(), t.double(), m, s).to(x_t.dtype)


@pytest.fixture(scope="module")
def parts() -> Parts:
    return Lgt().tiny()


@pytest.fixture
def gaussians() -> Gaussians:
    return Gaussians()


def told_of_edges() -> Parts:
    """A model with edge conditioning whose velocity depends on everything that it is told."""
    small = {"base_channels": 16, "channel_multipliers": (1, 2), "layers_per_block": 1, "attention_head_dim": 8}
    options = LgtModelOptions(vae="toy", edge_conditioning=True, **small)
    edged = Lgt().build(options, Beginning(0, ((64, 64),), Lgt().files(options, tuple(STYLES))), torch.device("cpu"), torch.float32)
    last = edged.backbone.conv_out
    last.weight.copy_(torch.randn(last.weight.shape, generator=rng_for(0, 0, "tiny")) * last.weight[0].numel() ** -0.5)
    return edged


def latents(count: int = 2, side: int = 8) -> Tensor:
    return torch.randn(count, 16, side, side)


def rms(difference: Tensor) -> float:
    return difference.square().mean().sqrt().item()


# Gaussian styles.


def test_inversion_finds_the_noise_and_transfer_the_image(parts: Parts, gaussians: Gaussians) -> None:
    x = 0.7 + 0.4 * latents()
    settings = Settings(steps=400, sampler="midpoint")
    noise = invert(gaussians, parts, x, ["flat", "flat"], settings)
    # From 1 on float32 rounds the sum of 400 steps to a few 1e-5.
    assert_close(noise, (x - 0.7) / 0.4, atol=5e-4, rtol=0)
    moved = transfer(gaussians, parts, x, ["flat", "flat"], ["line", "night"], [1, 2], settings)
    assert_close(moved[0], -0.5 + 1.5 * (x[0] - 0.7) / 0.4, atol=2e-3, rtol=0)
    assert_close(moved[1], (x[1] - 0.7) / 0.4, atol=2e-3, rtol=0)


def test_a_part_of_the_way_stops_between(parts: Parts, gaussians: Gaussians) -> None:
    """At noise level s the flow of N(m, d^2) has mean (1 - s) m and deviation sqrt(s^2 + (1 - s)^2 d^2)."""
    x, level = 0.7 + 0.4 * latents(), 0.6
    state = invert(gaussians, parts, x, ["flat", "flat"], Settings(steps=200, strength=level))
    deviation = math.sqrt(level**2 + (1 - level) ** 2 * 0.4**2)
    assert_close(state, (1 - level) * 0.7 + deviation * (x - 0.7) / 0.4, atol=5e-4, rtol=0)
    assert_close(generate(gaussians, parts, state, ["flat"] * 2, [1, 2], Settings(steps=200, strength=level)), x, atol=5e-4, rtol=0)


def test_start_noise_makes_noise_of_areas_without_detail_and_starts_the_inversion_where_it_is(parts: Parts, gaussians: Gaussians) -> None:
    """An image that is its style's mean everywhere has no noise in it, and inverts to 0; from noise level f on it is noise of variance
    f^2 / (f^2 + (1 - f)^2 d^2)."""
    plain, level, seeds = torch.full((2, 16, 8, 8), 0.7), 0.5, [5, 6]
    settings = Settings(steps=200, sampler="midpoint", start_noise=level)
    assert rms(invert(gaussians, parts, plain, ["flat"] * 2, replace(settings, start_noise=0.0))) < 1e-3
    state = begin(gaussians, parts, plain, ["flat"] * 2, seeds, settings)
    deviation = math.sqrt(level**2 + (1 - level) ** 2 * 0.4**2)
    assert_close(state, (mixed(plain, seeds, level) - (1 - level) * 0.7) / deviation, atol=1e-3, rtol=0)
    assert state.var().item() == pytest.approx((level / deviation) ** 2, rel=0.1)
    assert torch.equal(state, begin(gaussians, parts, plain, ["flat"] * 2, seeds, settings))
    assert rms(state - begin(gaussians, parts, plain, ["flat"] * 2, [7, 8], settings)) > 0.5


@pytest.mark.parametrize(("sampler", "order"), [("euler", 1), ("midpoint", 2), ("heun", 2)])
def test_the_way_there_and_back_closes_with_the_order_of_the_solver(
    sampler: Method, order: int, parts: Parts, gaussians: Gaussians
) -> None:
    x = -0.5 + 1.5 * latents()

    def error(steps: int) -> float:
        return rms(transfer(gaussians, parts, x, ["line"] * 2, ["line"] * 2, [0, 0], Settings(steps, sampler)) - x)

    errors = [error(steps) for steps in (8, 16, 32)]
    assert all(math.log2(coarse / fine) > order - 0.15 for coarse, fine in pairwise(errors)), errors


def test_guidance_of_one_is_the_style_itself_and_equal_velocities_make_it_irrelevant(
    parts: Parts, gaussians: Gaussians, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = latents()
    plain = generate(gaussians, parts, state, ["flat", "line"], [1, 2], Settings(6))
    assert set(gaussians.rows) == {1}, "one row without guidance"
    one = generate(gaussians, parts, state, ["flat", "line"], [1, 2], Settings(6, cfg_scale=1.0 + 1e-9))
    assert_close(one, plain, atol=1e-5, rtol=0)
    assert set(gaussians.rows) == {1, 2}, "guidance is one forward of two rows an image"
    assert rms(generate(gaussians, parts, state, ["flat", "line"], [1, 2], Settings(6, cfg_scale=2.0)) - plain) > 0.1
    same = [generate(gaussians, parts, state, ["", ""], [1, 2], Settings(6, cfg_scale=scale)) for scale in (1.0, 3.0)]
    assert_close(*same, atol=1e-4, rtol=0)


def test_guidance_goes_on_along_the_difference_of_the_velocities(parts: Parts, gaussians: Gaussians) -> None:
    state, t = latents(1), torch.ones(1)
    wanted, average = (gaussian(state, t, *style) for style in (STYLES["line"], AVERAGE))
    drawn = generate(gaussians, parts, state, ["line"], [1], Settings(1, "euler", cfg_scale=2.5))
    assert_close(drawn, state - (average + 2.5 * (wanted - average)), atol=1e-5, rtol=0)


def test_a_start_from_noise_mixes_it_in_and_asks_no_network(parts: Parts, gaussians: Gaussians) -> None:
    x = latents()
    state = begin(gaussians, parts, x, ["flat", "line"], [5, 6], Settings(start="noise", strength=0.7))
    noise = torch.stack([torch.randn(x.shape[1:], generator=rng_for(seed, 0, "transfer")) for seed in (5, 6)])
    assert_close(state, 0.3 * x + 0.7 * noise, atol=1e-6, rtol=0)
    assert not gaussians.rows
    assert torch.equal(mixed(x, [5, 6], 1.0), noise)


# The corrected noise term.


def spread_after(steps: int, sigma: Any, corrected: bool, method: Method = "euler", last: bool = True) -> float:
    """Variance of what comes of N(0, 1) noise for the style N(0.7, 0.4^2), exactly: every step is affine in x and in its noise.

    last says whether there is noise in the last step too.
    """
    variance = 1.0
    x, noise = torch.tensor([[0.0], [1.0], [0.0]], dtype=DOUBLE), torch.tensor([[0.0], [0.0], [1.0]], dtype=DOUBLE)

    def field(x: Tensor, t: Tensor) -> Tensor:
        return gaussian(x, t, *STYLES["flat"])

    for number in range(steps):
        t, step = torch.full((3,), 1 - number / steps, dtype=DOUBLE), torch.full((3,), -1 / steps, dtype=DOUBLE)
        if not last and number == steps - 1:
            y = STEPS[method](field, x, t, step)
        elif corrected:
            y = langevin_step(field, x, t, step, method, sigma, noise)
        else:
            y = STEPS[method](field, x, t, step) + (sigma(t) * step.abs().sqrt())[:, None] * noise
        variance = (y[1] - y[0]).item() ** 2 * variance + (y[2] - y[0]).item() ** 2
    return variance


def test_the_score_term_takes_away_the_variance_that_the_noise_adds() -> None:
    """The figures of the specification: 0.3 of noise in the second half of the way, 200 steps of Euler; 0.16 is right."""

    def late(t: Tensor) -> Tensor:
        return torch.where(t <= 0.5 + 1e-9, 0.3, 0.0).to(t.dtype)

    assert spread_after(200, lambda t: 0 * t, corrected=False) == pytest.approx(0.1574, abs=5e-5)
    assert spread_after(200, late, corrected=False) == pytest.approx(0.2000, abs=5e-5)
    assert spread_after(200, late, corrected=True) == pytest.approx(0.1578, abs=5e-5)


@pytest.mark.parametrize("method", STEPS)
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_with_more_steps_the_variance_is_that_of_the_style_at_every_temperature(method: Method, temperature: float) -> None:
    errors = [abs(spread_after(steps, sigma_of(temperature), True, method, last=False) - 0.16) for steps in (100, 400)]
    assert errors[1] < errors[0] / 3.5 and errors[1] < 0.003
    uncorrected = spread_after(400, sigma_of(temperature), False, method, last=False)
    assert uncorrected - 0.16 > 0.1 * temperature**2


def test_the_noise_is_off_at_both_ends_and_the_score_term_stays_finite() -> None:
    sigma = sigma_of(0.7)
    assert sigma(torch.tensor([0.0, 0.5, 1.0])).tolist() == pytest.approx([0, 0.7, 0])
    x = torch.randn(2, 3)
    asked: list[float] = []

    def field(x: Tensor, t: Tensor) -> Tensor:
        asked.extend(t.tolist())
        return gaussian(x, t, *STYLES["flat"])

    for start in (1.0, 1e-6):
        moved = langevin_step(field, x, torch.full((2,), start), torch.full((2,), -start / 2), "heun", sigma, torch.zeros(2, 3))
        assert moved.isfinite().all() and (moved - x).abs().max() < 10


def test_temperature_keeps_the_style_in_a_whole_transfer(parts: Parts, gaussians: Gaussians) -> None:
    x = -0.5 + 1.5 * torch.randn(1, 16, 40, 40, generator=rng_for(0, 0, "test"))
    settings = Settings(steps=60, temperature=0.5)
    first, other, still = (
        transfer(gaussians, parts, x, ["line"], ["flat"], [seed], replace(settings, temperature=temperature))
        for seed, temperature in ((1, 0.5), (2, 0.5), (1, 0.0))
    )
    for result in (first, other, still):
        # 25600 values: their mean is known to 0.0025, their variance to 0.0014 (one standard error).
        assert result.mean().item() == pytest.approx(0.7, abs=0.012)
        assert result.var().item() == pytest.approx(0.16, abs=0.008)
    assert rms(first - other) > 0.2, "fresh noise is of the seed"
    assert torch.equal(first, transfer(gaussians, parts, x, ["line"], ["flat"], [1], settings))


# The network.


@pytest.mark.parametrize("start", ["inversion", "noise"])
@pytest.mark.parametrize("sampler", STEPS)
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_number_of_network_calls_is_what_is_told(start: Any, sampler: Method, scale: float, parts: Parts, gaussians: Gaussians) -> None:
    settings = Settings(5, sampler, 0.8, start, scale)
    told: list[tuple[int, int, int]] = []
    transfer(
        gaussians, parts, latents(), ["flat", "line"], ["night"] * 2, [1, 2], settings, lambda n, total, x: told.append((n, total, len(x)))
    )
    assert len(gaussians.rows) == 2 * num_calls(settings)
    phases = 2 if start == "inversion" else 1
    assert told == [(number, 5, 1) for _ in range(2 * phases) for number in range(1, 6)]


@pytest.mark.parametrize("options", [{}, {"start_noise": 0.4}, {"start": "noise", "strength": 0.6, "cfg_scale": 2.0, "temperature": 0.5}])
def test_an_image_is_the_same_to_the_bit_whatever_it_is_transferred_with(options: dict[str, Any], parts: Parts) -> None:
    x, settings = latents(3), Settings(3, **options)
    targets = ["line", "flat 0.5, night 0.5", ""]
    together = transfer(Lgt(), parts, x, ["flat", "line", "night"], targets, [7, 8, 9], settings)
    alone = transfer(Lgt(), parts, x[1:2], ["line"], targets[1:2], [8], settings)
    assert torch.equal(together[1:2], alone) and together.dtype == torch.float32
    assert len(transfer(Lgt(), parts, x[:0], [], [], [], settings)) == 0


def test_the_same_style_gives_the_image_back_and_another_does_not(parts: Parts) -> None:
    x = latents(1)

    def error(steps: int, target: str = "flat") -> float:
        return rms(transfer(Lgt(), parts, x, ["flat"], [target], [0], Settings(steps, "heun")) - x)

    assert error(24) < 0.002 and error(4) > 4 * error(24)
    assert error(24, "night") > 0.1


def test_a_model_with_edge_conditioning_is_told_the_edges_of_what_it_transfers_all_the_way() -> None:
    """The way there and back closes only where both are told the same, and another map leads elsewhere."""
    edged, family, x, settings = told_of_edges(), Lgt(), latents(2), Settings(24, "heun")
    seeds, styles = [1, 2], ["flat", "line"]
    assert rms(transfer(family, edged, x, styles, styles, seeds, settings) - x) < 0.002
    state, edges = invert(family, edged, x, styles, settings), edges_of(family, edged, x)
    assert edges is not None and torch.equal(edges, edge_map(x))
    assert rms(generate(family, edged, state, styles, seeds, settings, edges=edges) - x) < 0.002
    for other in (edges.flip(0), None):
        assert rms(generate(family, edged, state, styles, seeds, settings, edges=other) - x) > 0.02
    guided = replace(settings, steps=2, cfg_scale=2.0)
    both = [generate(family, edged, state, styles, seeds, guided, away=styles, edges=some) for some in (edges, edges.flip(0))]
    plain = generate(family, edged, state, styles, seeds, replace(guided, cfg_scale=1.0), edges=edges)
    assert torch.allclose(both[0], plain, atol=1e-4) and rms(both[1] - plain) > 0.01, "both sides of guidance are told"


def test_transfer_leaves_modes_gradients_and_the_global_generator_alone(parts: Parts) -> None:
    parts.backbone.train()
    parts.backbone.mid_block.eval()
    x, state = latents(1), torch.get_rng_state()
    try:
        result = transfer(Lgt(), parts, x, ["flat"], ["line"], [3], Settings(1, temperature=0.1, start="noise"))
        assert parts.backbone.training and not parts.backbone.mid_block.training and not result.requires_grad
        assert torch.equal(state, torch.get_rng_state()) and torch.is_grad_enabled()
    finally:
        parts.backbone.eval()


def test_an_untrained_model_gives_the_image_back_exactly(parts: Parts) -> None:
    zero = Lgt().tiny()
    zero.backbone.conv_out.weight.zero_()
    zero.backbone.conv_out.bias.zero_()
    x = latents()
    assert torch.equal(transfer(Lgt(), zero, x, ["flat"] * 2, ["line"] * 2, [1, 2], Settings(5)), x)


# The style that an image has.


def test_the_source_is_the_style_that_explains_the_image_best(parts: Parts, gaussians: Gaussians) -> None:
    names = list(STYLES) * 2
    x = torch.cat([m + s * torch.randn(1, 16, 8, 8) for m, s in (STYLES[name] for name in names)])
    assert guess_source(gaussians, parts, x) == names
    assert guess_source(gaussians, parts, x[4:5]) == names[4:5], "company does not matter"


def test_the_guess_is_the_least_error_of_the_velocity_over_the_styles(parts: Parts) -> None:
    """Against a loop that asks for one noise level at a time."""
    family, x = Lgt(), latents(3)
    wanted = []
    for image in x:
        errors = {}
        for style in parts.settings["styles"]:
            found = []
            for number, time in enumerate((0.2, 0.35, 0.5, 0.65, 0.8)):
                noise = torch.randn(image.shape, generator=rng_for(0, number, "guess"))
                noisy = (1 - time) * image + time * noise
                with torch.no_grad():
                    v = family.denoise(parts, noisy[None], torch.tensor([time]), family.encode_prompts(parts, [style]))[0]
                found.append((v - (noise - image)).square().mean().item())
            errors[style] = sum(found)
        wanted.append(min(errors, key=errors.__getitem__))
    assert guess_source(family, parts, x) == wanted


def test_the_closed_forms_are_those_of_the_straight_path() -> None:
    """The ideal velocity of these tests is the regression of noise - x0 on x_t, as the training target is made."""
    m, s = STYLES["line"]
    x0, noise = m + s * torch.randn(400_000, 1, dtype=DOUBLE), torch.randn(400_000, 1, dtype=DOUBLE)
    for time in (0.2, 0.7):
        t = torch.full((len(x0),), time)
        x_t = diffusion.add_noise(diffusion.FlowPath(), x0, noise, t).double()
        target = diffusion.target("velocity", diffusion.FlowPath(), x0, noise, t).double()
        slope = ((x_t - x_t.mean()) * (target - target.mean())).mean() / x_t.var()
        ends = gaussian(torch.tensor([[0.0], [1.0]], dtype=DOUBLE), torch.full((2,), time, dtype=DOUBLE), m, s)
        assert slope.item() == pytest.approx((ends[1] - ends[0]).item(), abs=0.02)
        assert (target.mean() - slope * x_t.mean()).item() == pytest.approx(ends[0].item(), abs=0.02)
