"""Everybody who wants images of a model gets the family's own, is told of every step, and may end the work between two."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image

from sd_scripts import families
from sd_scripts.families.common.samplers import CLASSES, clean_of, scheduler_for, watched
from sd_scripts.library.core.protocols import Preview
from sd_scripts.library.render.renderer import Renderer

DRAW = np.random.default_rng(random.getrandbits(64))


def a_request(name: str, steps: int = 3) -> Preview:
    styles = {"lgt": families.family("lgt").tiny().settings["styles"][0]} if name == "lgt" else {}
    controls = (Image.new("RGB", (64, 64), (200, 30, 90)),) if name == "qwen_edit" else ()
    return Preview(styles.get(name, "a star"), "", 64, 64, int(DRAW.integers(2**31)), steps, 2.0, controls=controls)


@pytest.mark.parametrize("name", families.NAMES)
def test_every_family_tells_its_steps_and_draws_the_same_with_and_without(name: str) -> None:
    family = families.family(name)
    renderer, request = Renderer(family, family.tiny()), a_request(name)
    seen: list[tuple[int, int, torch.Tensor]] = []
    told = renderer.render([request], lambda step, total, clean: seen.append((step, total, clean.clone())))
    assert np.array_equal(np.asarray(told[0]), np.asarray(renderer.render([request])[0]))
    assert [step for step, _, _ in seen] == list(range(1, len(seen) + 1)) and {total for _, total, _ in seen} == {len(seen)}
    # At the last step nothing is left to be removed: the estimate is the image.
    last = family.decode(renderer.parts, seen[-1][2])
    found = np.asarray(told[0]).astype(float) / 127.5 - 1
    assert np.abs(last[0].permute(1, 2, 0).numpy() - found).max() < 0.02
    assert not torch.allclose(seen[0][2], seen[-1][2])


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_what_is_raised_between_steps_ends_the_work_and_the_model_is_as_it_was(name: str) -> None:
    class Enough(Exception):
        pass

    def stop(step: int, total: int, clean: torch.Tensor) -> None:
        steps.append(step)
        if step == 2:
            raise Enough

    family, steps = families.family(name), list[int]()
    renderer, request = Renderer(family, family.tiny()), a_request(name)
    renderer.parts.backbone.train()
    state = torch.get_rng_state()
    with pytest.raises(Enough):
        renderer.render([request], stop)
    assert steps == [1, 2] and renderer.parts.backbone.training and torch.equal(torch.get_rng_state(), state)
    assert np.array_equal(np.asarray(renderer.render([request])[0]), np.asarray(family.preview(family.tiny(), [request])[0]))


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction"])
@pytest.mark.parametrize("sampler", sorted(CLASSES.keys() - {"pndm", "lms"}))
def test_the_estimate_is_the_one_that_the_samplers_themselves_make(sampler: str, kind: str) -> None:
    config = {"num_train_timesteps": 1000, "beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012}
    scheduler = scheduler_for(sampler, {**config, "prediction_type": kind, "timestep_spacing": "leading"})
    scheduler.set_timesteps(5)
    x = torch.randn(2, 4, 8, 8) * scheduler.init_noise_sigma
    for t in scheduler.timesteps:
        said = torch.randn(2, 4, 8, 8)
        scheduler.scale_model_input(x, t)
        found = clean_of(scheduler, said, t, x)
        if sampler == "dpmsolver++":
            wanted = scheduler.convert_model_output(said, sample=x) if scheduler.step_index is not None else found
            x = scheduler.step(said, t, x).prev_sample
        elif sampler in ("dpm_2", "dpm_2_a", "heun"):
            # Their second calls count from the state before: only first calls have an estimate of their own to compare.
            first, sigma = scheduler.state_in_first_order, None
            if scheduler.step_index is not None:
                sigma = scheduler.sigmas[scheduler.step_index] if first else None
            wanted = _by_sigma(said, x, sigma, kind) if sigma is not None else found
            x = scheduler.step(said, t, x).prev_sample
        else:
            made = scheduler.step(said, t, x)
            wanted, x = made.pred_original_sample, made.prev_sample
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-3)


def _by_sigma(said: torch.Tensor, x: torch.Tensor, sigma: torch.Tensor, kind: str) -> torch.Tensor:
    """x0 by Karras et al. 2022 of a state x = x0 + sigma noise."""
    if kind == "epsilon":
        return x - sigma * said
    return x / (sigma**2 + 1) - said * sigma / (sigma**2 + 1).sqrt()


def test_the_estimate_of_flow_matching_is_the_state_less_its_noise() -> None:
    scheduler = scheduler_for("auto", {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0})
    assert isinstance(scheduler, FlowMatchEulerDiscreteScheduler)
    scheduler.set_timesteps(6)
    x0, noise, seen = torch.randn(1, 16, 4, 4), torch.randn(1, 16, 4, 4), []
    watched(scheduler, lambda step, total, clean: seen.append(clean))
    x = noise
    for t in scheduler.timesteps:
        # A network that knows the answer: then every estimate is the image.
        x = scheduler.step(noise - x0, t, x).prev_sample
    assert len(seen) == 6
    for clean in seen:
        torch.testing.assert_close(clean, x0, rtol=1e-4, atol=1e-4)
