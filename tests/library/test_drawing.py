"""Drawing with real small models: guidance, clamping, self-conditioning, and images that do not depend on their company."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import rescale_noise_cfg
from PIL import Image
from torch import Tensor, nn
from torch.testing import assert_close

from sd_scripts.families.common.made import size_multiple, state_shape, trained_size
from sd_scripts.families.ddpm.model import Ddpm
from sd_scripts.families.ddpm.options import DDPM_SAMPLERS, DdpmModelOptions
from sd_scripts.families.ddpm.rendering import Settings, clamped, draw, render, rescaled
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import Beginning, Parts, Preview
from sd_scripts.library.core.rng import rng_for
from sd_scripts.library.render.predicting.thumbnails import Thumbnails
from sd_scripts.library.render.sample import GAP, grid_of
from sd_scripts.schema.errors import OptionError
from tests.small_models import SMALL_DDPM

FAMILY = Ddpm()
SMALL = DdpmModelOptions(**SMALL_DDPM)


def model(size: tuple[int, int] = (24, 16), **options: Any) -> Parts:
    """A new small model in pixels, of other weights in every test; its last layer says enough to be heard."""
    chosen = SMALL.model_copy(update=options)
    beginning = Beginning(torch.randint(2**31, ()).item(), (size,), FAMILY.files(chosen, ["a red star", "a blue ring"]))
    parts = FAMILY.build(chosen, beginning, torch.device("cpu"), torch.float32)
    with torch.no_grad():
        parts.backbone.conv_out.weight.mul_(3)
    return parts


def request(**values: Any) -> Preview:
    return replace(Preview("a red star", width=24, height=16, seed=7, steps=3, cfg_scale=1.0, sampler="ddim"), **values)


class Watched:
    """Keeps what a network was given and has answered."""

    def __init__(self, network: nn.Module) -> None:
        self.inputs: list[Tensor] = []
        self.clocks: list[Tensor] = []
        self.outputs: list[Tensor] = []
        network.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, module: nn.Module, arguments: tuple[Tensor, Tensor], keywords: dict[str, object], output: tuple[Tensor]) -> None:
        self.inputs.append(arguments[0])
        self.clocks.append(arguments[1])
        self.outputs.append(output[0].float())


def estimate(parts: Parts, x: Tensor, output: Tensor, k: int) -> Tensor:
    return diffusion.to_x0(parts.kind, parts.path, x, output, parts.path.times(torch.full((len(x),), k)))


def test_images_have_the_bytes_of_their_seed_in_any_company() -> None:
    for parts, samplers in ((model(), DDPM_SAMPLERS), (FAMILY.tiny(), ("ddpm",))):
        width, height = trained_size(parts)
        for sampler in samplers:
            wanted = [request(seed=seed, sampler=sampler, cfg_scale=2.5, width=width, height=height, steps=2) for seed in (3, 4, 5)]
            together = render(FAMILY, parts, wanted)
            assert torch.equal(together, render(FAMILY, parts, wanted))
            for row, one in enumerate(wanted):
                assert torch.equal(render(FAMILY, parts, [one]), together[[row]])
            assert not torch.equal(together[0], together[1])


def test_samplers_begin_from_the_same_noise_of_the_images_own_generator() -> None:
    parts = model()
    watched = Watched(parts.backbone)
    for sampler in DDPM_SAMPLERS:
        watched.inputs.clear()
        render(FAMILY, parts, [request(sampler=sampler)])
        assert torch.equal(watched.inputs[0], torch.randn((1, 3, 16, 24), generator=rng_for(7, 0, "drawing")))


def test_the_network_is_asked_by_its_own_clock() -> None:
    parts = model()
    watched = Watched(parts.backbone)
    draw(FAMILY, parts, [request(steps=4, sampler="heun")], Settings())
    assert [clock.item() for clock in watched.clocks] == [999, 749, 749, 499, 499, 249, 249]
    watched.clocks.clear()
    assert draw(FAMILY, parts, [request(steps=4, sampler="dpm_solver")], Settings()).num_calls == 7
    asked = [clock.item() for clock in watched.clocks]
    assert asked[::2] == [999, 749, 499, 249]
    assert all(high > middle > low for middle, (high, low) in zip(asked[1::2], pairwise(asked[::2]), strict=True))


def test_guidance_of_one_runs_the_prompt_alone_and_more_one_batch_of_two() -> None:
    parts = model()
    watched = Watched(parts.backbone)
    plain = render(FAMILY, parts, [request()])
    assert [len(x) for x in watched.inputs] == [1, 1, 1]
    watched.inputs.clear()
    guided = render(FAMILY, parts, [request(cfg_scale=4.0)])
    assert [len(x) for x in watched.inputs] == [2, 2, 2] and not torch.equal(plain, guided)
    nearly = render(FAMILY, parts, [request(cfg_scale=1 + 1e-9)])
    assert_close(nearly, plain, atol=1e-4, rtol=0)


def test_equal_branches_make_guidance_irrelevant() -> None:
    parts = model()
    plain = render(FAMILY, parts, [request()])
    for scale in (0.0, 3.0, 7.5):
        assert_close(render(FAMILY, parts, [request(cfg_scale=scale, negative_prompt="a red star")]), plain, atol=1e-4, rtol=0)


def test_one_step_of_ddim_is_the_guided_estimate() -> None:
    parts = model()
    watched = Watched(parts.backbone)
    scale = 2.5
    drawn = draw(FAMILY, parts, [request(steps=1, cfg_scale=scale, negative_prompt="a blue ring")], Settings(clamp="none")).pixels
    positive, negative = watched.outputs[0].chunk(2)
    wanted = estimate(parts, watched.inputs[0][:1], negative + scale * (positive - negative), 999)
    assert_close(drawn, wanted.clamp(-1, 1), atol=1e-5, rtol=0)
    assert (positive - negative).abs().max() > 1e-4


def test_guidance_is_rescaled_as_in_diffusers() -> None:
    guided, positive = torch.randn(3, 4, 5, 6) * 3, torch.randn(3, 4, 5, 6)
    for share in (0.0, 0.7, 1.0):
        assert_close(rescaled(guided, positive, share), rescale_noise_cfg(guided, positive, share))
    parts = model()
    one = [request(cfg_scale=6.0)]
    assert not torch.equal(draw(FAMILY, parts, one, Settings(guidance_rescale=0.7)).pixels, draw(FAMILY, parts, one, Settings()).pixels)


def test_estimates_are_clamped_in_pixels_and_not_in_latents() -> None:
    values = torch.randn(2, 3, 20, 20) * torch.tensor([0.2, 4.0]).view(2, 1, 1, 1)
    assert torch.equal(clamped(values, "none"), values)
    assert torch.equal(clamped(values, "clamp"), values.clamp(-1, 1))
    dynamic = clamped(values, "dynamic")
    assert torch.equal(dynamic[0], values[0]) and dynamic.abs().max() == 1
    limit = values[1].abs().flatten().double().quantile(0.995).item()
    inside = values[1].abs() < limit * 0.99
    assert_close(dynamic[1][inside], values[1][inside] / limit, atol=0, rtol=0.02)
    pixels, latents = model(), FAMILY.tiny()
    assert torch.equal(*(draw(FAMILY, pixels, [request(cfg_scale=9.0)], Settings(clamp=clamp)).pixels for clamp in ("auto", "clamp")))
    assert not torch.equal(*(draw(FAMILY, pixels, [request(cfg_scale=9.0)], Settings(clamp=clamp)).pixels for clamp in ("auto", "none")))
    one = request(cfg_scale=9.0, width=64, height=64)
    assert torch.equal(*(draw(FAMILY, latents, [one], Settings(clamp=clamp)).pixels for clamp in ("auto", "none")))


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_a_self_conditioned_network_is_given_its_own_last_estimate(scale: float) -> None:
    parts = model(self_conditioning=True)
    watched = Watched(parts.backbone)
    render(FAMILY, parts, [request(steps=4, cfg_scale=scale)])
    assert len(watched.inputs) == 4 and watched.inputs[0][:, 3:].abs().max() == 0
    for step, k in enumerate((999, 749, 499)):
        own = estimate(parts, watched.inputs[step][:, :3], watched.outputs[step], k)
        assert_close(watched.inputs[step + 1][:, 3:], own, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("spacing", ["trailing", "lambda", "karras"])
@pytest.mark.parametrize(
    "schedule",
    [
        {"prediction_type": "epsilon"},
        {"prediction_type": "epsilon", "beta_schedule": "cosine"},
        {"prediction_type": "sample", "zero_terminal_snr": True},
        {"zero_terminal_snr": True},
    ],
    ids=["epsilon", "cosine", "sample", "zero_snr"],
)
def test_every_kind_of_network_draws_with_every_sampler_and_spacing(schedule: dict[str, Any], spacing: Any) -> None:
    parts = model(num_train_timesteps=50, **schedule)
    for sampler in DDPM_SAMPLERS:
        drawn = draw(FAMILY, parts, [request(sampler=sampler, steps=2)], Settings(spacing=spacing))
        assert drawn.pixels.shape == (1, 3, 16, 24) and drawn.pixels.isfinite().all() and drawn.pixels.abs().max() <= 1


def test_fresh_noise_is_the_images_own_and_eta_one_is_ddpm() -> None:
    parts = model()
    still, noisy = (draw(FAMILY, parts, [request()], Settings(eta=eta)).pixels for eta in (0.0, 1.0))
    assert not torch.equal(still, noisy)
    assert torch.equal(noisy, render(FAMILY, parts, [request(sampler="ddpm")]))


def test_drawing_leaves_modes_and_the_global_generator_alone_and_names_its_steps() -> None:
    parts = model(unet_dropout=0.5)
    parts.backbone.train()
    parts.backbone.mid_block.eval()
    state, told = torch.get_rng_state(), list[tuple[int, int, tuple[int, ...]]]()
    first = draw(FAMILY, parts, [request(), request(seed=8)], Settings(), lambda step, total, x: told.append((step, total, tuple(x.shape))))
    assert parts.backbone.training and not parts.backbone.mid_block.training and not parts.vae.training
    assert torch.equal(state, torch.get_rng_state())
    assert told == [(step, 3, (1, 3, 16, 24)) for _ in range(2) for step in (1, 2, 3)]
    parts.backbone.eval()
    assert torch.equal(first.pixels, render(FAMILY, parts, [request(), request(seed=8)]))


def test_sixteen_bit_networks_draw_from_a_state_in_single_precision() -> None:
    parts, states = model(), list[Tensor]()
    single = render(FAMILY, parts, [request(steps=5)])
    parts.backbone.to(torch.bfloat16)
    parts.text_encoders["te1"].to(torch.bfloat16)
    drawn = draw(FAMILY, parts, [request(steps=5)], Settings(), lambda step, total, x: states.append(x)).pixels
    assert {state.dtype for state in states} == {torch.float32} and drawn.dtype == torch.float32
    assert_close(drawn, single, atol=0.2, rtol=0)


def test_previews_take_the_samplers_name_and_auto_is_ddim() -> None:
    parts = model()
    assert torch.equal(render(FAMILY, parts, [request(sampler="auto")]), render(FAMILY, parts, [request()]))
    images = FAMILY.preview(parts, [request(), request(prompt="a blue ring")])
    assert [image.size for image in images] == [(24, 16)] * 2
    assert render(FAMILY, parts, []).shape == (0, 3, 0, 0)
    assert state_shape(parts, 24, 16) == (3, 16, 24) and trained_size(parts) == (24, 16)


def test_what_cannot_be_drawn_is_a_sentence() -> None:
    parts = model((32, 16), num_train_timesteps=20, channel_multipliers=(1, 1, 1, 1, 1))
    assert size_multiple(FAMILY, parts) == 16
    for values, option, text in (
        ({"sampler": "lms", "width": 32}, "sampler", "lms cannot draw.*ddpm, ddim"),
        ({"steps": 21, "width": 32}, "steps", "1 to 20"),
        ({"width": 24}, "size", "24 x 16 is not possible.* multiples of 16"),
    ):
        with pytest.raises(OptionError, match=text) as raised:
            render(FAMILY, parts, [request(**values)])
        assert raised.value.problems[0].option == option
    with pytest.raises(OptionError, match=r"20 x 16.*multiples of 8"):
        render(FAMILY, model(), [request(width=20)])


@pytest.mark.parametrize(("count", "columns", "rows"), [(1, 1, 1), (2, 1, 2), (5, 2, 3), (8, 2, 4), (9, 3, 3)])
def test_a_grid_has_the_root_of_the_number_of_columns(count: int, columns: int, rows: int) -> None:
    images = [Image.new("RGB", (6, 4), (number, 0, 0)) for number in range(count)]
    grid = grid_of(images)
    assert grid.size == (columns * (6 + GAP) - GAP, rows * (4 + GAP) - GAP)
    for number in range(count):
        assert grid.getpixel((number % columns * (6 + GAP), number // columns * (4 + GAP))) == (number, 0, 0)


def test_a_thumbnail_of_a_model_in_pixels_has_the_colours_of_its_image_however_it_is_made() -> None:
    thumbnails = Thumbnails(FAMILY, model())
    clean = torch.zeros(3, 16, 24) + torch.tensor([0.6, -0.2, 0.1]).view(3, 1, 1)
    decoded, mapped = thumbnails.of(clean, 1e9), thumbnails.of(clean, 0.0)
    assert decoded.size == (24, 16) and mapped.size == (192, 128)
    for channel in range(3):
        assert abs(decoded.getpixel((5, 5))[channel] - mapped.getpixel((40, 40))[channel]) <= 2
