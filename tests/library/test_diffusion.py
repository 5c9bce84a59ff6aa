"""The noising mathematics against float64 closed forms and against diffusers' schedulers, on fresh random numbers."""

import random

import pytest
import torch
from diffusers import DDIMScheduler, DDPMScheduler, FlowMatchEulerDiscreteScheduler
from torch.testing import assert_close

from sd_scripts.library.core import diffusion
from sd_scripts.library.core.diffusion import KINDS, FlowPath, NoiseSchedulePath
from sd_scripts.schema.errors import OptionError

SCHEDULES = {
    "scaled_linear": {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
    "linear": {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
    "trained": {"trained_betas": torch.linspace(0.001, 0.03, 50).tolist(), "num_train_timesteps": 50},
}
ZERO_SNR = {**SCHEDULES["scaled_linear"], "rescale_betas_zero_snr": True}


GENERATOR = torch.Generator()
GENERATOR.manual_seed(random.getrandbits(32))


def fresh(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


def fresh_times(count: int) -> torch.Tensor:
    return torch.rand(count, generator=GENERATOR)


def all_paths() -> dict[str, diffusion.Path]:
    paths = {name: diffusion.path_of(config) for name, config in SCHEDULES.items()}
    return {**paths, "zero_snr": diffusion.path_of(ZERO_SNR), "flow": FlowPath()}


@pytest.mark.parametrize("name", SCHEDULES)
def test_noise_is_added_as_diffusers_adds_it(name):
    config = SCHEDULES[name]
    scheduler, path = DDPMScheduler(**config), diffusion.path_of(config)
    k = torch.randint(0, path.num_steps, (6,), generator=GENERATOR)
    x0, noise = fresh(6, 4, 5, 7), fresh(6, 4, 5, 7)
    t = path.times(k)
    assert_close(diffusion.add_noise(path, x0, noise, t), scheduler.add_noise(x0, noise, k), atol=2e-5, rtol=1e-5)
    assert_close(diffusion.target("v_prediction", path, x0, noise, t), scheduler.get_velocity(x0, noise, k), atol=2e-5, rtol=1e-5)


def test_zero_terminal_snr_rescales_as_diffusers_does_and_ends_in_pure_noise():
    path, scheduler = diffusion.path_of(ZERO_SNR), DDIMScheduler(**ZERO_SNR)
    assert_close(path.alphas_cumprod.float(), scheduler.alphas_cumprod, atol=1e-5, rtol=0)
    a, s = path.coefficients(torch.ones(3))
    assert a.eq(0).all() and s.eq(1).all()
    plain, _ = diffusion.path_of(SCHEDULES["scaled_linear"]).coefficients(torch.tensor([0.001]))
    kept, _ = path.coefficients(torch.tensor([0.001]))
    assert_close(kept, plain, atol=1e-7, rtol=0)


def test_zero_terminal_snr_twice_is_the_same_as_once():
    once = diffusion.path_of(ZERO_SNR).alphas_cumprod
    assert torch.equal(diffusion.zero_terminal_snr(once), once)


def test_zero_terminal_snr_can_be_forced_on_a_configuration_without_it():
    forced = diffusion.path_of(SCHEDULES["scaled_linear"], rescale=True)
    assert torch.equal(forced.alphas_cumprod, diffusion.path_of(ZERO_SNR).alphas_cumprod)


def test_every_step_of_the_schedule_has_its_own_time_and_back():
    for path in (p for p in all_paths().values() if isinstance(p, NoiseSchedulePath)):
        k = torch.arange(path.num_steps)
        t = path.times(k)
        assert torch.equal(path.steps(t), k)
        assert torch.equal(path.model_times(t), k.float())
        assert t[-1] == 1


def test_times_between_steps_are_looked_up_at_the_nearest_and_none_is_out_of_range():
    path = diffusion.path_of(SCHEDULES["scaled_linear"])
    t = torch.tensor([0.0, 0.0004, 0.0014, 0.0016, 0.4996, 0.99951, 1.0])
    assert path.steps(t).tolist() == [0, 0, 0, 1, 499, 999, 999]


def test_coefficients_are_the_closed_form_in_double_precision():
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    abar = torch.cumprod(1 - betas, dim=0)
    path = diffusion.path_of(SCHEDULES["scaled_linear"])
    a, s = path.coefficients(torch.arange(1, 1001) / 1000)
    assert a.dtype == s.dtype == torch.float32
    assert_close(a.double(), abar.sqrt(), atol=1e-7, rtol=0)
    assert_close(s.double(), (1 - abar).sqrt(), atol=1e-7, rtol=0)
    assert_close(diffusion.snr(path, torch.arange(1, 1001) / 1000).double(), abar / (1 - abar), atol=0, rtol=1e-6)


def test_the_flow_path_is_straight():
    t = fresh_times(5)
    x0, noise = fresh(5, 2, 3), fresh(5, 2, 3)
    x_t = diffusion.add_noise(FlowPath(), x0, noise, t)
    assert_close(x_t, x0 + t.view(-1, 1, 1) * diffusion.target("velocity", FlowPath(), x0, noise, t), atol=1e-6, rtol=1e-6)
    assert_close(FlowPath().model_times(t), 1000 * t)
    assert diffusion.snr(FlowPath(), torch.tensor([0.0, 0.5, 1.0])).tolist() == [float("inf"), 1.0, 0.0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", all_paths())
def test_the_perfect_prediction_gives_back_the_image(name, kind):
    path = all_paths()[name]
    # At the noisy end a is small, and an epsilon prediction is divided by it.
    t = fresh_times(8) * 0.6 if kind == "epsilon" else fresh_times(8)
    x0, noise = fresh(8, 3, 4, 4), fresh(8, 3, 4, 4)
    x_t, prediction = diffusion.add_noise(path, x0, noise, t), diffusion.target(kind, path, x0, noise, t)
    assert_close(diffusion.to_x0(kind, path, x_t, prediction, t), x0, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["linear", "cosine", "zero_snr"])
def test_v_noise_and_image_follow_from_one_another_to_a_millionth(name):
    path = all_paths()[name]
    k = torch.randint(50, path.num_steps // 2, (64,), generator=GENERATOR)
    t = path.times(k)
    x0, noise = (torch.rand((64, 3, 4), generator=GENERATOR) * 2 - 1 for _ in range(2))
    x_t = diffusion.add_noise(path, x0, noise, t)
    kinds = ("epsilon", "v_prediction", "sample")
    true = {kind: diffusion.target(kind, path, x0, noise, t) for kind in kinds}
    a, s = (part.view(-1, 1, 1) for part in path.coefficients(t))
    for kind in kinds:
        image = diffusion.to_x0(kind, path, x_t, true[kind], t)
        eps = (x_t - a * image) / s
        for found, wanted in ((image, x0), (eps, noise), (a * eps - s * image, true["v_prediction"])):
            # What a or s divides loses as many digits.
            assert (found - wanted).mul(torch.minimum(a, s)).abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["v_prediction", "velocity", "sample"])
def test_at_pure_noise_a_prediction_still_gives_the_image(kind):
    path, t = diffusion.path_of(ZERO_SNR), torch.ones(4)
    x0, noise = fresh(4, 2, 2), fresh(4, 2, 2)
    x_t, prediction = diffusion.add_noise(path, x0, noise, t), diffusion.target(kind, path, x0, noise, t)
    assert torch.equal(x_t, noise)
    assert_close(diffusion.to_x0(kind, path, x_t, prediction, t), x0, atol=1e-6, rtol=1e-6)


def test_half_precision_latents_are_noised_in_single_precision():
    path, t = diffusion.path_of(SCHEDULES["linear"]), fresh_times(3)
    x0, noise = fresh(3, 4, 2, 2).half(), fresh(3, 4, 2, 2).half()
    assert diffusion.add_noise(path, x0, noise, t).dtype == torch.float32
    for kind in KINDS:
        assert diffusion.target(kind, path, x0, noise, t).dtype == torch.float32


def test_a_scheduler_configuration_says_what_the_network_predicts():
    assert diffusion.kind_of({}) == "epsilon"
    assert diffusion.kind_of({"prediction_type": "v_prediction"}) == "v_prediction"
    assert diffusion.kind_of({"_class_name": "FlowMatchEulerDiscreteScheduler"}) == "velocity"
    assert isinstance(diffusion.path_of({"_class_name": "FlowMatchEulerDiscreteScheduler"}), FlowPath)
    assert diffusion.kind_of({"prediction_type": "sample"}) == "sample"
    with pytest.raises(OptionError, match=r"prediction_type = noise.*epsilon, v_prediction, sample"):
        diffusion.kind_of({"prediction_type": "noise"})
    with pytest.raises(OptionError, match="EDMEulerScheduler"):
        diffusion.kind_of({"_class_name": "EDMEulerScheduler"})


def test_an_unknown_noise_schedule_is_named():
    with pytest.raises(OptionError, match=r"beta_schedule = sigmoid.*scaled_linear"):
        diffusion.path_of({"beta_schedule": "sigmoid"})


def test_anchors_of_eight_steps_are_those_that_are_known():
    known = [1, 21 / 22, 9 / 10, 5 / 6, 3 / 4, 9 / 14, 1 / 2, 3 / 10]
    assert diffusion.anchor_sigmas(8, 3.0) == pytest.approx(known, abs=1e-15)
    assert [round(sigma, 4) for sigma in known] == [1, 0.9545, 0.9, 0.8333, 0.75, 0.6429, 0.5, 0.3]
    assert diffusion.anchor_sigmas(1, 6.0) == [1.0] and diffusion.anchor_sigmas(4, 1.0) == [1.0, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("shift", [1.0, 3.0, 6.0])
@pytest.mark.parametrize("num_steps", [1, 8, 9, 50])
def test_anchors_are_the_noise_levels_of_diffusers_scheduler(num_steps, shift):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=diffusion.even_sigmas(num_steps))
    assert_close(torch.tensor(diffusion.anchor_sigmas(num_steps, shift)), scheduler.sigmas[:-1], atol=1e-6, rtol=0)
    assert scheduler.sigmas[-1] == 0
