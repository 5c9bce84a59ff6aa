"""Levels of the loss that are known exactly, and training with the network's own estimate, on the real family."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from sd_scripts.families.ddpm.model import FAMILY, Ddpm
from sd_scripts.families.ddpm.options import DdpmModelOptions, DdpmObjectiveOptions
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.diffusion import NoiseSchedulePath
from sd_scripts.library.core.protocols import Batch, Beginning, Condition, Denoiser, Parts
from sd_scripts.library.core.rng import rng_for
from sd_scripts.library.objectives.regression import Regression
from sd_scripts.library.train.conditioned import Conditioned
from tests.small_models import SMALL_DDPM

LINEAR = {"beta_schedule": "linear", "beta_start": 1e-4, "beta_end": 0.02}
COSINE = {"beta_schedule": "squaredcos_cap_v2"}


class Linear:
    """A v prediction that is a multiple of x_t, the multiple a function of the coefficients."""

    kind = "v_prediction"
    takes_estimate = False

    def __init__(self, path: NoiseSchedulePath, variance: float, best: bool) -> None:
        self.path, self.variance, self.best = path, variance, best

    def __call__(self, x_t: Tensor, t: Tensor) -> Tensor:
        a, s = (part.view(-1, 1, 1, 1) for part in self.path.coefficients(t))
        # E[v | x_t] for independent data of this variance and mean zero.
        slope = a * s * (1 - self.variance) / (a**2 * self.variance + s**2)
        return slope * x_t if self.best else torch.zeros_like(x_t)


@pytest.mark.parametrize(
    ("config", "variance", "zero", "best"),
    [
        (LINEAR, 1.0, ("0.19186", "1.00000"), ("0.19186", "1.00000")),
        (LINEAR, 0.25, ("0.13260", "0.45663"), ("0.09694", "0.37979")),
        (COSINE, 1.0, ("0.32611", "1.00000"), ("0.32611", "1.00000")),
        (COSINE, 0.25, ("0.23617", "0.62168"), ("0.17320", "0.49574")),
    ],
)
def test_losses_of_a_zero_and_of_the_best_prediction_are_the_published_levels(
    config: dict[str, object], variance: float, zero: tuple[str, str], best: tuple[str, str]
) -> None:
    path = diffusion.path_of(config)
    assert isinstance(path, NoiseSchedulePath)
    made = FAMILY.objective(DdpmObjectiveOptions(min_snr_gamma=5.0), path, "v_prediction")
    assert isinstance(made, Regression)
    # Errors are squares of linear forms, so image and noise of one deviation up or down integrate them exactly; every step once.
    image, noise = torch.tensor([1.0, 1.0, -1.0, -1.0]) * variance**0.5, torch.tensor([1.0, -1.0, 1.0, -1.0])
    steps = path.times(torch.arange(path.num_steps))
    exact = replace(made, times=lambda u, sides: steps, noise=lambda x0, draw: (noise.view(1, 1, 4), noise.view(1, 1, 4)))
    count = path.num_steps
    batch = Batch(image.view(1, 1, 1, 4).expand(count, 1, 1, 4), [{}] * count, torch.arange(count), torch.ones(count), [""] * count)
    for is_best, wanted in ((False, zero), (True, best)):
        losses = exact(Linear(path, variance, is_best), batch, 0)
        assert (f"{losses.loss.double().mean():.5f}", f"{losses.parts['unweighted'].double().mean():.5f}") == wanted


# --- self-conditioning ------------------------------------------------------------------------------------------------


def model(self_conditioning: bool) -> Parts:
    options = DdpmModelOptions(**SMALL_DDPM, self_conditioning=self_conditioning)
    family = Ddpm()
    beginning = Beginning(torch.randint(2**31, ()).item(), ((16, 16),), family.files(options, ["a red star"]))
    return family.build(options, beginning, torch.device("cpu"), torch.float32)


class Watched(nn.Module):
    """Keeps what a backbone was given and has answered."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        backbone.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, module: nn.Module, arguments: tuple[Tensor, ...], keywords: dict[str, object], output: tuple[Tensor]) -> None:
        self.inputs.append(arguments[0])
        self.outputs.append(output[0])


def denoiser(parts: Parts, count: int) -> Denoiser:
    conditions: list[Condition] = Ddpm().encode_prompts(parts, [f"star {number}" for number in range(count)])
    return Conditioned(Ddpm(), parts, None, [{name: value.detach() for name, value in one.items()} for one in conditions], dict)


def batch_of(count: int, first: int = 0) -> Batch:
    x0 = torch.randn(count, 3, 16, 16)
    return Batch(x0, [{}] * count, torch.arange(first, first + count), torch.ones(count), [f"{i}.png" for i in range(count)])


def chosen(seed: int, batch: Batch, rate: float) -> list[int]:
    draws = [torch.rand((), generator=rng_for(seed, number, "self conditioning")).item() for number in batch.numbers.tolist()]
    return [row for row, draw in enumerate(draws) if draw < rate]


def test_some_samples_are_told_their_own_estimate_and_the_others_none() -> None:
    parts, seed = model(True), torch.randint(2**31, ()).item()
    parts.backbone.requires_grad_(True)
    watched, rate = Watched(parts.backbone), 0.5
    objective = FAMILY.objective(DdpmObjectiveOptions(self_conditioning_rate=rate), parts.path, parts.kind)
    assert isinstance(objective, Regression)
    first = next(number for number in range(100) if 0 < len(chosen(seed, batch_of(6, number), rate)) < 6)
    batch = batch_of(6, first)
    rows = chosen(seed, batch, rate)
    loss = objective(denoiser(parts, 6), batch, seed).loss
    before, told = watched.inputs
    assert len(before) == len(rows) and before[:, 3:].abs().max() == 0
    assert not watched.outputs[0].requires_grad and loss.requires_grad
    t, noise, _ = objective.draw(batch, seed)
    x_t = diffusion.add_noise(parts.path, batch.x0, noise, t)
    assert torch.equal(told[:, :3], x_t) and torch.equal(before[:, :3], x_t[rows])
    others = [row for row in range(6) if row not in rows]
    assert told[others, 3:].abs().max() == 0
    wanted = diffusion.to_x0(parts.kind, parts.path, x_t[rows], watched.outputs[0], t[rows])
    assert torch.equal(told[rows, 3:], wanted) and wanted.abs().max() > 0


def test_a_sample_is_told_the_same_in_any_batch() -> None:
    parts, seed = model(True), torch.randint(2**31, ()).item()
    objective = FAMILY.objective(DdpmObjectiveOptions(self_conditioning_rate=0.5), parts.path, parts.kind)
    batch, whole = batch_of(5, 30), denoiser(parts, 5)
    with torch.no_grad():
        together = objective(whole, batch, seed).loss
        for row in range(5):
            alone = replace(batch, x0=batch.x0[[row]], numbers=batch.numbers[[row]], weights=torch.ones(1), names=batch.names[:1])
            assert torch.allclose(objective(whole.only([row]), alone, seed).loss, together[[row]], rtol=1e-4)


@pytest.mark.parametrize(("takes_estimate", "rate", "calls"), [(True, 0.0, 1), (True, 1.0, 2), (False, 1.0, 1)])
def test_nothing_is_estimated_for_nobody(takes_estimate: bool, rate: float, calls: int) -> None:
    parts = model(takes_estimate)
    watched = Watched(parts.backbone)
    with torch.no_grad():
        loss = FAMILY.objective(DdpmObjectiveOptions(self_conditioning_rate=rate), parts.path, parts.kind)(
            denoiser(parts, 3), batch_of(3), 0
        ).loss
    assert len(watched.inputs) == calls and loss.isfinite().all()


def test_no_call_is_made_for_a_batch_in_which_nobody_is_chosen() -> None:
    parts, rate, seed = model(True), 0.5, torch.randint(2**31, ()).item()
    watched = Watched(parts.backbone)
    first = next(number for number in range(200) if not chosen(seed, batch_of(2, number), rate))
    with torch.no_grad():
        FAMILY.objective(DdpmObjectiveOptions(self_conditioning_rate=rate), parts.path, parts.kind)(
            denoiser(parts, 2), batch_of(2, first), seed
        )
    assert len(watched.inputs) == 1 and watched.inputs[0][:, 3:].abs().max() == 0
