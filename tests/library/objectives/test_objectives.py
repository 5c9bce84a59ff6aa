"""Times, noise, distances and weights against closed forms in float64, on fresh random inputs."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import get_args

import numpy as np
import pytest
import torch
from scipy import stats

from sd_scripts.families.common.clip_t5_options import ClipT5ObjectiveOptions
from sd_scripts.families.qwen_edit.options import QwenFlowObjectiveOptions
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import Batch
from sd_scripts.library.objectives.make import density_of, make, times_of
from sd_scripts.library.objectives.noise import draws, multires, offset
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.objective import FlowObjectiveOptions, ObjectiveOptions

DDPM = diffusion.path_of({"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012})
ZERO_SNR = diffusion.path_of({"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}, rescale=True)
FLOW = diffusion.FlowPath()
KINDS = [("epsilon", DDPM), ("v_prediction", DDPM), ("v_prediction", ZERO_SNR), ("velocity", FLOW), ("sample", DDPM), ("sample", ZERO_SNR)]
SIDES = (96, 170)
"""Latent sides that no density but flux_shift and qwen_shift looks at."""
DENSITIES = [
    ObjectiveOptions(),
    ObjectiveOptions(timestep_sampling="sigmoid", sigmoid_scale=1.3),
    ObjectiveOptions(timestep_sampling="logit_normal", logit_mean=-0.4, logit_std=0.8),
    ObjectiveOptions(timestep_sampling="shift", discrete_flow_shift=2.2, sigmoid_scale=0.9),
]


def fresh() -> torch.Generator:
    return torch.Generator().manual_seed(torch.randint(2**31, ()).item())


def batch_of(x0: torch.Tensor, first: int = 0, **kwargs: torch.Tensor) -> Batch:
    n = len(x0)
    return Batch(x0, [{}] * n, torch.arange(first, first + n), torch.ones(n), [f"{i}.png" for i in range(n)], **kwargs)


class Perfect:
    """Knows the clean latents and answers with the true target, plus a constant error."""

    def __init__(self, kind: str, path: diffusion.Path, x0: torch.Tensor, error: float) -> None:
        self.kind, self.path, self.x0, self.error = kind, path, x0, error
        self.seen: list[torch.Tensor] = []

    def __call__(self, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        self.seen.append(t)
        a, s = (c.view(-1, 1, 1, 1) for c in self.path.coefficients(t))
        noise = (x_t - a * self.x0) / s
        return diffusion.target(self.kind, self.path, self.x0, noise, t) + self.error

    base = __call__


@pytest.mark.parametrize("options", DENSITIES, ids=lambda o: o.timestep_sampling)
def test_quantile_and_cdf_of_a_density_are_inverse(options: ObjectiveOptions) -> None:
    density = density_of(options, SIDES)
    u = torch.rand(1000, generator=fresh(), dtype=torch.float64)
    assert torch.allclose(density.cdf(density.quantile(u)), u, atol=1e-9)


def test_sampled_densities_have_the_moments_of_their_definitions() -> None:
    rng = fresh()
    u, n = torch.rand(200_000, generator=rng, dtype=torch.float64), torch.randn(200_000, generator=rng, dtype=torch.float64)
    definitions = [torch.rand(200_000, generator=rng, dtype=torch.float64), torch.sigmoid(1.3 * n), torch.sigmoid(-0.4 + 0.8 * n)]
    v = torch.sigmoid(0.9 * n)
    definitions.append(2.2 * v / (1 + 1.2 * v))
    for options, reference in zip(DENSITIES, definitions, strict=True):
        ours = times_of(options, FLOW)(u, SIDES).double()
        assert abs(ours.mean() - reference.mean()) < 0.005, options.timestep_sampling
        assert abs(ours.std() - reference.std()) < 0.005, options.timestep_sampling


def normal_cdf_of_logit(t: np.ndarray, mean: float, std: float) -> np.ndarray:
    return stats.norm.cdf((np.log(t) - np.log1p(-t) - mean) / std)


def unshifted(t: np.ndarray, shift: float) -> np.ndarray:
    """The time v with shift v / (1 + (shift - 1) v) = t."""
    return t / (shift - (shift - 1) * t)


def mode_cdf(t: np.ndarray, scale: float) -> np.ndarray:
    """By a table of the definition of Esser et al. 2024: t = 1 - u - scale (cos^2(pi u / 2) - 1 + u) with u uniform."""
    u = np.linspace(1, 0, 2_000_001)
    times = 1 - u - scale * (np.cos(np.pi * u / 2) ** 2 - 1 + u)
    return np.interp(t, times, 1 - u)


def flux_mu(tokens: float) -> float:
    slope = (1.15 - 0.5) / (4096 - 256)
    return slope * tokens + 0.5 - slope * 256


def qwen_mu(tokens: float) -> float:
    return 0.5 + (tokens - 256) * (0.9 - 0.5) / (8192 - 256)


CLOSED_FORMS = {
    "uniform": (FlowObjectiveOptions(timestep_sampling="uniform"), lambda t: t),
    "sigmoid": (FlowObjectiveOptions(timestep_sampling="sigmoid", sigmoid_scale=1.3), lambda t: normal_cdf_of_logit(t, 0, 1.3)),
    "logit_normal": (
        FlowObjectiveOptions(timestep_sampling="logit_normal", logit_mean=0.7, logit_std=0.6),
        lambda t: normal_cdf_of_logit(t, 0.7, 0.6),
    ),
    "shift": (
        FlowObjectiveOptions(timestep_sampling="shift", discrete_flow_shift=3.1582, sigmoid_scale=0.8),
        lambda t: normal_cdf_of_logit(unshifted(t, 3.1582), 0, 0.8),
    ),
    "flux_shift": (
        ClipT5ObjectiveOptions(timestep_sampling="flux_shift", sigmoid_scale=1.2),
        lambda t: normal_cdf_of_logit(unshifted(t, math.exp(flux_mu(48 * 85))), 0, 1.2),
    ),
    "qwen_shift": (
        QwenFlowObjectiveOptions(timestep_sampling="qwen_shift", sigmoid_scale=0.9),
        lambda t: normal_cdf_of_logit(unshifted(t, math.exp(qwen_mu(48 * 85))), 0, 0.9),
    ),
    "mode": (FlowObjectiveOptions(timestep_sampling="mode", mode_scale=1.29), lambda t: mode_cdf(t, 1.29)),
    "mode below 0": (FlowObjectiveOptions(timestep_sampling="mode", mode_scale=-0.8), lambda t: mode_cdf(t, -0.8)),
    "sigma": (FlowObjectiveOptions(timestep_sampling="sigma", discrete_flow_shift=3.0), lambda t: unshifted(t, 3.0)),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_a_hundred_thousand_times_follow_the_closed_form_of_their_density(name: str) -> None:
    """Kolmogorov-Smirnov; a right density fails once in a million fresh draws."""
    options, cdf = CLOSED_FORMS[name]
    u = torch.rand(100_000, generator=fresh(), dtype=torch.float64)
    times = times_of(options, FLOW)(u, SIDES).double().numpy()
    assert stats.kstest(times, cdf).pvalue > 1e-6


def test_the_times_of_every_sampling_that_a_flow_model_offers_are_tested() -> None:
    offered = [
        options.model_fields["timestep_sampling"].annotation.__args__ for options in (ClipT5ObjectiveOptions, QwenFlowObjectiveOptions)
    ]
    assert {name for names in offered for name in names} == {name.split()[0] for name in CLOSED_FORMS}


def test_larger_images_are_trained_at_noisier_times_with_flux_shift() -> None:
    times = times_of(ClipT5ObjectiveOptions(timestep_sampling="flux_shift"), FLOW)
    u = torch.rand(1000, generator=fresh(), dtype=torch.float64)
    assert (times(u, (128, 128)) > times(u, (64, 64))).all()
    # 256 and 4096 tokens are the two points of the line.
    v = torch.special.ndtri(u).sigmoid()
    for side, mu in ((32, 0.5), (128, 1.15)):
        assert torch.allclose(times(u, (side, side)).double(), math.exp(mu) / (math.exp(mu) + 1 / v - 1), atol=1e-5)


@pytest.mark.parametrize(
    ("width", "height", "mu", "shift"),
    [(512, 512, 0.539, 1.71), (832, 576, 0.582, 1.79), (1024, 1024, 0.694, 2.00), (1328, 1328, 0.834, 2.30), (1664, 928, 0.791, 2.21)],
)
def test_qwen_shift_has_the_published_figures(width: int, height: int, mu: float, shift: float) -> None:
    density = density_of(QwenFlowObjectiveOptions(timestep_sampling="qwen_shift"), (height // 8, width // 8))
    middle = float(density.quantile(torch.tensor([0.5], dtype=torch.float64)))
    # The middle of the sigmoid is 1/2, which the shift k takes to k / (1 + k).
    assert abs(middle / (1 - middle) - shift) < 0.006 and abs(math.log(middle / (1 - middle)) - mu) < 0.0006


@pytest.mark.parametrize("kind", ["raw", "additive", "sigma_scaled"])
@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "cosmap"])
def test_flow_losses_equal_their_formulas_in_float64(kind: str, scheme: str) -> None:
    x0 = torch.randn(4, 16, 6, 10, generator=fresh())
    output = torch.randn(4, 16, 6, 10, generator=fresh())
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Fixed:
        kind = "velocity"

        def __call__(self, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            seen.append((x_t, t))
            return output

        base = __call__

    options = FlowObjectiveOptions(model_prediction_type=kind, weighting_scheme=scheme)
    batch = batch_of(x0, first=7)
    losses = make(options, FLOW, "velocity")(Fixed(), batch, 5).loss
    (x_t, t), clean, out = seen[0], x0.double(), output.double()
    sigma = t.double().view(-1, 1, 1, 1)
    noise = (x_t.double() - (1 - sigma) * clean) / sigma
    compared = {"raw": out, "additive": out + x_t.double(), "sigma_scaled": -sigma * out + x_t.double()}[kind]
    s = sigma.flatten()
    weight = {"none": torch.ones_like(s), "sigma_sqrt": s**-2, "cosmap": 2 / (math.pi * (1 - 2 * s + 2 * s**2))}[scheme]
    expected = (compared - (noise - clean)).square().mean(dim=(1, 2, 3)) * weight
    assert torch.allclose(losses.double(), expected, rtol=2e-4)


@pytest.mark.parametrize("options", DENSITIES, ids=lambda o: o.timestep_sampling)
@pytest.mark.parametrize("path", [DDPM, FLOW], ids=["ddpm", "flow"])
def test_min_and_max_timestep_cut_the_density_and_keep_its_shape(options: ObjectiveOptions, path: diffusion.Path) -> None:
    cut = options.model_copy(update={"min_timestep": 300, "max_timestep": 700})
    u = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    t = times_of(cut, path)(u, SIDES)
    assert t.min() >= 0.3 and t.max() <= 0.7
    if path is DDPM:
        assert path.steps(t).min() == 300 and path.steps(t).max() == 699
    free = times_of(options, path)(u, SIDES)
    kept = free[(free > 0.3005) & (free < 0.6995)]
    assert abs(kept.mean() - t.mean()) < 0.01


def test_uniform_times_hit_every_step_of_a_schedule_equally_often() -> None:
    u = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    counts = torch.bincount(DDPM.steps(times_of(ObjectiveOptions(), DDPM)(u, SIDES)), minlength=1000)
    assert (counts == 10).all()


@pytest.mark.parametrize(("low", "high"), [(0, 1000), (2, 1000), (0, 998), (500, 1000), (999, 1000), (0, 1)])
def test_every_density_stays_between_its_ends(low: int, high: int) -> None:
    u = torch.tensor([0.0, random.random(), 1 - 2**-53], dtype=torch.float64)
    named = get_args(FlowObjectiveOptions.model_fields["timestep_sampling"].annotation)
    flows = [FlowObjectiveOptions(timestep_sampling=name) for name in named]
    for options, path in [*product(DENSITIES, (DDPM, ZERO_SNR, FLOW)), *product(flows, (FLOW,))]:
        for shift in (1.0, 3.0, math.exp(random.uniform(-3, 3))):
            cut = options.model_copy(update={"min_timestep": low, "max_timestep": high, "discrete_flow_shift": shift})
            t = times_of(cut, path)(u, SIDES)
            least, most = (max(low / 1000, 1e-5), high / 1000) if path is FLOW else (0.0, 1.0)
            assert ((t >= least - 1e-6) & (t <= most + 1e-6)).all(), f"{options.timestep_sampling} shifted by {shift}: {t}"


@pytest.mark.parametrize(("kind", "path"), KINDS)
def test_a_perfect_prediction_has_no_loss_and_a_constant_error_its_square(kind: str, path: diffusion.Path) -> None:
    x0 = torch.randn(6, 4, 8, 8, generator=fresh())
    objective = make(ObjectiveOptions(), path, kind)
    assert objective(Perfect(kind, path, x0, 0.0), batch_of(x0), 3).loss.abs().max() < 1e-4
    losses = objective(Perfect(kind, path, x0, 0.5), batch_of(x0), 3)
    assert torch.allclose(losses.loss, torch.full((6,), 0.25), atol=1e-2)


def test_draws_depend_on_the_sample_number_and_not_on_the_batch() -> None:
    x0 = torch.randn(5, 4, 8, 8, generator=fresh())
    options = ObjectiveOptions(multires_noise_iterations=6, ip_noise_gamma=0.1)
    objective = make(options, DDPM, "epsilon")
    state = torch.get_rng_state()
    whole = objective.draw(batch_of(x0, first=10), 7)
    single = [objective.draw(batch_of(x0[i : i + 1], first=10 + i), 7) for i in range(5)]
    for part in range(3):
        assert torch.equal(whole[part], torch.cat([one[part] for one in single]))
    assert torch.equal(state, torch.get_rng_state())
    other = objective.draw(batch_of(x0, first=10), 8)
    assert not torch.equal(whole[1], other[1])


def test_turning_an_addition_on_leaves_time_and_base_noise_alone() -> None:
    x0 = torch.randn(3, 4, 8, 8, generator=fresh())
    t0, _, plain = make(ObjectiveOptions(), DDPM, "epsilon").draw(batch_of(x0), 1)
    t1, noisy, target = make(ObjectiveOptions(ip_noise_gamma=0.2), DDPM, "epsilon").draw(batch_of(x0), 1)
    assert torch.equal(t0, t1) and torch.equal(plain, target)
    assert 0.1 < (noisy - target).std() < 0.3


@pytest.mark.parametrize("is_random", [False, True])
def test_flow_matching_sees_perturbed_noise_and_answers_with_the_plain_one(is_random: bool) -> None:
    """x = (1 - t) x0 + t (noise + gamma xi) with the target noise - x0, as sd-scripts has it; xi is drawn by itself."""
    x0 = torch.randn(4, 16, 32, 32, generator=fresh())
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Silent(Perfect):
        def __call__(self, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            seen.append((x_t, t))
            return torch.zeros_like(x_t)

    plain, perturbed = (
        make(FlowObjectiveOptions(ip_noise_gamma=gamma, ip_noise_gamma_random_strength=is_random), FLOW, "velocity") for gamma in (0.0, 0.3)
    )
    losses = [objective(Silent("velocity", FLOW, x0, 1.0), batch_of(x0), 5).loss for objective in (plain, perturbed)]
    assert torch.equal(*losses), "the target is that of the noise alone"
    (one, t), (other, same) = seen
    assert torch.equal(t, same)
    added = (other - one) / t.view(-1, 1, 1, 1)
    noise = (one - (1 - t.view(-1, 1, 1, 1)) * x0) / t.view(-1, 1, 1, 1)
    strengths = added.flatten(1).std(dim=1)
    assert (strengths < 0.31).all() and (is_random or (strengths > 0.29).all()) and len(set(strengths.tolist())) == 4
    for mine, theirs in zip(added, noise, strict=True):
        assert abs(torch.corrcoef(torch.stack([mine.flatten(), theirs.flatten()]))[0, 1]) < 0.05


def test_masks_weigh_elements_and_sample_weights_weigh_samples() -> None:
    x0 = torch.randn(2, 4, 8, 8, generator=fresh())
    masks = torch.zeros(2, 1, 8, 8)
    masks[:, :, :4] = 1
    batch = batch_of(x0, masks=masks)
    batch = Batch(batch.x0, batch.conditions, batch.numbers, torch.tensor([1.0, 0.25]), batch.names, masks=masks)
    loss = make(ObjectiveOptions(), FLOW, "velocity")(Perfect("velocity", FLOW, x0, 1.0), batch, 0).loss
    assert torch.allclose(loss, torch.tensor([0.5, 0.125]), atol=1e-2)


@pytest.mark.parametrize("schedule", ["constant", "exponential", "snr"])
@pytest.mark.parametrize("loss_type", ["huber", "smooth_l1"])
def test_huber_losses_equal_their_closed_form(loss_type: str, schedule: str) -> None:
    options = ObjectiveOptions(loss_type=loss_type, huber_schedule=schedule, huber_c=0.15, huber_scale=1.7)
    objective = make(options, DDPM, "epsilon")
    difference, t = torch.randn(7, 4, 8, 8, generator=fresh()), torch.rand(7, generator=fresh())
    k = DDPM.steps(t)
    abar = DDPM.alphas_cumprod[k]
    c = {
        "constant": torch.full((7,), 0.15 * 1.7, dtype=torch.float64),
        "exponential": 0.15 ** (k.double() / 1000) * 1.7,
        "snr": (1 - 0.15) / (1 + ((1 - abar) / abar).sqrt()) ** 2 + 0.15,
    }[schedule].view(-1, 1, 1, 1)
    d = difference.double()
    reference = 2 * (c if loss_type == "huber" else 1) * ((d**2 + c**2).sqrt() - c)
    assert torch.allclose(objective.distance(difference, t).double(), reference, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "path"), KINDS)
def test_min_snr_weighs_the_loss_in_x0_by_the_smaller_of_snr_and_gamma(kind: str, path: diffusion.Path) -> None:
    weight = make(ObjectiveOptions(min_snr_gamma=5.0), path, kind).weight
    t = torch.rand(200, generator=fresh()) * 0.98 + 0.01
    x0, noise = torch.randn(200, 1, 1, 1, generator=fresh()).double(), torch.randn(200, 1, 1, 1, generator=fresh()).double()
    x_t = diffusion.add_noise(path, x0.float(), noise.float(), t)
    truth = diffusion.target(kind, path, x0.float(), noise.float(), t)
    error = 0.1
    x0_error = diffusion.to_x0(kind, path, x_t, truth + error, t) - diffusion.to_x0(kind, path, x_t, truth, t)
    wanted = diffusion.snr(path, t).clamp(max=5) * x0_error.flatten() ** 2
    assert torch.allclose(weight(t) * error**2, wanted, rtol=2e-2, atol=1e-5)
    assert weight(torch.tensor([1.0])).isfinite().all()


def test_the_other_weights_equal_their_formulas() -> None:
    t = torch.rand(50, generator=fresh())
    abar = DDPM.alphas_cumprod[DDPM.steps(t)]
    snr = (abar / (1 - abar)).clamp(max=1000)
    close = {"rtol": 1e-3, "atol": 1e-5}
    assert torch.allclose(make(ObjectiveOptions(debiased_estimation_loss=True), DDPM, "epsilon").weight(t).double(), snr**-0.5, **close)
    assert torch.allclose(
        make(ObjectiveOptions(debiased_estimation_loss=True), DDPM, "v_prediction").weight(t).double(), 1 / (snr + 1), **close
    )
    # The same loss, told of the image instead of the noise.
    of_image = make(ObjectiveOptions(debiased_estimation_loss=True), ZERO_SNR, "sample").weight
    zero_snr = ZERO_SNR.alphas_cumprod[ZERO_SNR.steps(t)]
    assert torch.allclose(of_image(t).double(), (zero_snr / (1 - zero_snr)).clamp(max=1000).sqrt(), **close)
    assert of_image(torch.ones(1)).item() == 0
    like = make(ObjectiveOptions(scale_v_pred_loss_like_noise_pred=True), DDPM, "v_prediction").weight(t).double()
    assert torch.allclose(like, snr / (snr + 1), **close)
    added = make(ObjectiveOptions(v_pred_like_loss=0.5), DDPM, "epsilon").weight(t).double()
    assert torch.allclose(added, 1 + 0.5 * (snr + 1) / snr, **close)


@pytest.mark.parametrize(
    ("options", "kind", "path", "named"),
    [
        (ObjectiveOptions(debiased_estimation_loss=True), "velocity", FLOW, "debiased_estimation_loss"),
        (ObjectiveOptions(debiased_estimation_loss=True), "epsilon", ZERO_SNR, "debiased_estimation_loss"),
        (ObjectiveOptions(scale_v_pred_loss_like_noise_pred=True), "epsilon", DDPM, "scale_v_pred_loss_like_noise_pred"),
        (ObjectiveOptions(v_pred_like_loss=0.3), "v_prediction", DDPM, "v_pred_like_loss"),
        (ObjectiveOptions(scale_v_pred_loss_like_noise_pred=True), "sample", DDPM, "scale_v_pred_loss_like_noise_pred"),
        (ObjectiveOptions(v_pred_like_loss=0.3), "sample", DDPM, "v_pred_like_loss"),
    ],
)
def test_weights_that_a_model_cannot_have_are_refused_in_a_sentence(
    options: ObjectiveOptions, kind: str, path: diffusion.Path, named: str
) -> None:
    with pytest.raises(OptionError) as caught:
        make(options, path, kind)
    assert [problem.option for problem in caught.value.problems] == [named]


def test_noise_offset_moves_whole_channels_by_its_strength() -> None:
    options = ObjectiveOptions(noise_offset=0.1)
    x0 = torch.zeros(4, 8, 8)
    moves = torch.stack([offset(x0, draws(0, n), options) for n in range(3000)])
    assert moves.shape == (3000, 4, 1, 1)
    assert abs(moves.std() - 0.1) < 0.005 and abs(moves.mean()) < 0.005
    adaptive = options.model_copy(update={"adaptive_noise_scale": -0.05})
    moved = torch.stack([offset(torch.ones(4, 8, 8), draws(0, n), adaptive) for n in range(3000)])
    assert abs(moved.std() - 0.05) < 0.005
    random = options.model_copy(update={"noise_offset_random_strength": True})
    drawn = torch.stack([offset(x0, draws(0, n), random) for n in range(3000)])
    assert abs(drawn.std() - 0.1 / 3**0.5) < 0.005


def test_pyramid_noise_has_unit_deviation_and_more_low_frequencies() -> None:
    plain = torch.stack([torch.randn(4, 32, 32, generator=draws(5, n)("noise")) for n in range(64)])
    pyramid = torch.stack([multires(plain[n], draws(5, n), 8, 0.6) for n in range(64)])
    assert torch.allclose(pyramid.flatten(1).std(dim=1), torch.ones(64), atol=1e-4)
    block = torch.nn.functional.avg_pool2d
    assert block(pyramid, 8).std() > 2 * block(plain, 8).std()


def test_losses_differentiate_through_the_prediction() -> None:
    x0 = torch.randn(2, 4, 8, 8, generator=fresh())
    scale = torch.ones((), requires_grad=True)

    class Scaled(Perfect):
        def __call__(self, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return super().__call__(x_t, t) * scale

    for loss_type in ("l2", "l1", "huber", "smooth_l1"):
        scale.grad = None
        objective = make(ObjectiveOptions(loss_type=loss_type, min_snr_gamma=5), ZERO_SNR, "v_prediction")
        objective(Scaled("v_prediction", ZERO_SNR, x0, 0.1), batch_of(x0), 0).loss.mean().backward()
        assert scale.grad is not None and scale.grad.isfinite() and scale.grad != 0
