"""Qwen-Image-2.1 beside diffusers: the texts, the network's call, the pipeline with and without reference images, mixed batches, the shift,
the VAE."""

import math

import pytest
import torch
from diffusers import QwenImage21Pipeline, QwenImage21Transformer2DModel
from PIL import Image

from sd_scripts.families import family as family_of
from sd_scripts.families.common.samplers import scheduler_for
from sd_scripts.families.qwen_image21.model import AFTER, BEFORE, SYSTEM
from sd_scripts.families.qwen_image21.options import QwenImage21FlowObjectiveOptions
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.library.objectives.times import resolution_shift
from tests.small_models import Words

QWEN = family_of("qwen_image21")
CAPTIONS = ["a cat", "a far longer caption", ""]


@pytest.fixture(scope="module")
def parts() -> Parts:
    return QWEN.tiny()


def pipeline_of(parts: Parts) -> QwenImage21Pipeline:
    """With diffusers' own network, of the same weights."""
    network = QwenImage21Transformer2DModel.from_config(parts.backbone.config)
    network.load_state_dict(parts.backbone.state_dict())
    made = QwenImage21Pipeline(
        scheduler_for("auto", parts.scheduler_config),
        parts.vae,
        parts.text_encoders["te1"],
        Words(parts.tokenizers["te1"]),
        network.eval(),
    )
    made.set_progress_bar_config(disable=True)
    return made


def test_captions_are_read_as_diffusers_reads_them(parts):
    pipeline = pipeline_of(parts)
    assert pipeline.prompt_template_t2i == SYSTEM + BEFORE + "{}" + AFTER
    with torch.no_grad():
        for caption, found in zip(CAPTIONS, QWEN.encode_prompts(parts, CAPTIONS), strict=True):
            wanted, mask, places = pipeline.encode_prompt(caption)
            assert mask is None and not places.any()
            assert torch.allclose(found["text"], wanted[0], atol=1e-6)


def test_the_network_is_called_as_diffusers_calls_it(parts):
    x, t = torch.randn(1, 64, 4, 6), torch.rand(1)
    (condition,) = QWEN.encode_prompts(parts, CAPTIONS[:1])
    text = condition["text"][None]
    with torch.no_grad():
        wanted = QwenImage21Transformer2DModel.forward(
            parts.backbone,
            hidden_states=QwenImage21Pipeline._pack_latents(x[:, :, None], 1, 64, 4, 6),
            encoder_hidden_states=text,
            timestep=t,
            img_shapes=[[(1, 4, 6)]],
            img_mask=torch.cat([torch.zeros(1, text.shape[1], dtype=torch.bool), torch.ones(1, 6, dtype=torch.bool)], dim=1),
        ).sample[:, -24:]
        found = QWEN.denoise(parts, x, t, [condition])
    assert torch.allclose(found.flatten(2).transpose(1, 2), wanted, atol=1e-5)


def image(width: int, height: int, seed: int, mode: str = "RGB") -> Image.Image:
    channels = len(mode)
    numbers = torch.randint(0, 256, (height, width, channels), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(numbers.numpy(), mode)


def small_references() -> Parts:
    parts = QWEN.tiny()
    parts.settings["control_area"] = 128 * 128
    return parts


@pytest.mark.parametrize("count", [1, 2, 3])
def test_instructions_are_read_and_the_network_is_called_as_diffusers_does_it(count):
    parts, x, t = small_references(), torch.randn(1, 64, 4, 6), torch.rand(1)
    pipeline = pipeline_of(parts)
    controls = [QWEN.control_pixels(parts, image(90 + 60 * number, 100, number)) for number in range(count)]
    with torch.no_grad():
        shown = [
            pipeline.image_processor.resize(image(90 + 60 * n, 100, n), control.shape[1], control.shape[2])
            for n, control in enumerate(controls)
        ]
        text, _, slots = pipeline.encode_prompt(CAPTIONS[1], image=shown)
        latents = [QWEN.encode_images(parts, control[None]) for control in controls]
        sides = [(1, *latent.shape[-2:]) for latent in (*latents, x)]
        wanted = QwenImage21Transformer2DModel.forward(
            parts.backbone,
            hidden_states=torch.cat([latent.flatten(2).transpose(1, 2) for latent in (*latents, x)], dim=1),
            encoder_hidden_states=text,
            timestep=t,
            img_shapes=[sides],
            img_mask=torch.cat([slots, torch.ones(1, 6, dtype=torch.bool)], dim=1),
        ).sample[:, -24:]
        shared, (rows,) = QWEN.encode_instructions(parts, controls, CAPTIONS[1:2])
        named = {f"control_{number}": latent[0] for number, latent in enumerate(latents)}
        found = QWEN.denoise(parts, x, t, [{"text": torch.cat([shared, rows]), **named}])
    assert torch.allclose(rows, text[0][~slots[0]], atol=1e-5)
    assert torch.allclose(found.flatten(2).transpose(1, 2), wanted, atol=1e-5)


def test_samples_with_other_reference_images_in_a_batch_are_as_each_alone():
    parts, x, t = small_references(), torch.randn(4, 64, 4, 6), torch.rand(4)
    controls = [QWEN.control_pixels(parts, image(*size, 5)) for size in ((64, 64), (150, 100))]
    conditions = []
    with torch.no_grad():
        for seen in ([], controls[:1], controls[1:], controls):
            _, (rows,) = QWEN.encode_instructions(parts, seen, CAPTIONS[:1])
            latents = {f"control_{number}": QWEN.encode_images(parts, one[None])[0] for number, one in enumerate(seen)}
            conditions.append({"text": rows, **latents})
        together = QWEN.denoise(parts, x, t, conditions)
        alone = torch.cat([QWEN.denoise(parts, x[row : row + 1], t[row : row + 1], conditions[row : row + 1]) for row in range(4)])
        without = QWEN.denoise(parts, x, t, conditions[:1] * 4)
    assert torch.allclose(together, alone, atol=1e-5)
    assert [torch.allclose(a, b, atol=1e-3) for a, b in zip(together, without)] == [True, False, False, False]


@pytest.mark.parametrize("cfg_scale", [1.0, 3.0])
def test_a_preview_with_reference_images_is_what_the_pipeline_draws(cfg_scale):
    parts, given = small_references(), (image(150, 100, 1), image(40, 90, 2))
    request = Preview(CAPTIONS[1], "blur", 96, 64, seed=3, steps=3, cfg_scale=cfg_scale, controls=given)
    with torch.no_grad():
        wanted = pipeline_of(parts)(
            image=list(given),
            prompt=request.prompt,
            negative_prompt=request.negative_prompt if cfg_scale > 1 else None,
            true_cfg_scale=cfg_scale,
            width=96,
            height=64,
            num_inference_steps=3,
            generator=[torch.Generator().manual_seed(3)],
            output_type="pt",
            output_resolution=128,
        ).images
        found = QWEN.render(parts, [request])
    on_white = 1 - (1 - wanted[:, :3]) * wanted[:, 3:]
    assert torch.allclose(found, 2 * on_white - 1, atol=1e-4)


def test_what_is_transparent_in_a_reference_image_stands_on_white():
    parts, drawn = small_references(), image(128, 128, 4, "RGBA")
    white = Image.new("RGBA", drawn.size, "white")
    white.alpha_composite(drawn)
    assert (QWEN.control_pixels(parts, drawn) - QWEN.control_pixels(parts, white)).abs().max() <= 2 / 127.5


def test_texts_of_different_lengths_in_a_batch_are_as_each_alone(parts):
    x, t = torch.randn(3, 64, 4, 6), torch.rand(3)
    conditions = QWEN.encode_prompts(parts, CAPTIONS)
    assert len({len(condition["text"]) for condition in conditions}) == 3
    with torch.no_grad():
        together = QWEN.denoise(parts, x, t, conditions)
        alone = torch.cat([QWEN.denoise(parts, x[row : row + 1], t[row : row + 1], conditions[row : row + 1]) for row in range(3)])
    assert torch.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("cfg_scale", [1.0, 3.0])
def test_a_preview_is_what_the_pipeline_draws(parts, cfg_scale, steps):
    request = Preview(CAPTIONS[1], "blur", 96, 64, seed=3, steps=steps, cfg_scale=cfg_scale)
    pipeline = pipeline_of(parts)
    if steps == 1:
        # The stretch to shift_terminal divides by zero there.
        pipeline.scheduler.register_to_config(shift_terminal=None)
    with torch.no_grad():
        wanted = pipeline(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt if cfg_scale > 1 else None,
            true_cfg_scale=cfg_scale,
            width=96,
            height=64,
            num_inference_steps=steps,
            generator=[torch.Generator().manual_seed(3)],
            output_type="pt",
        ).images
        found = QWEN.render(parts, [request])
    on_white = 1 - (1 - wanted[:, :3]) * wanted[:, 3:]
    assert torch.allclose(found, 2 * on_white - 1, atol=1e-4)


def test_images_are_encoded_as_the_pipeline_encodes_opaque_ones(parts):
    image = Image.fromarray(torch.randint(0, 256, (64, 96, 3), dtype=torch.uint8).numpy())
    pipeline = pipeline_of(parts)
    pixels = pipeline.image_processor.preprocess(image.convert("RGBA"), width=96, height=64)
    with torch.no_grad():
        wanted = pipeline._encode_vae_image(pixels[:, :, None], None)[:, :, 0]
        assert torch.allclose(QWEN.encode_images(parts, pixels[:, :3]), wanted, atol=1e-5)


@pytest.mark.parametrize("sides", [(16, 16), (64, 64), (96, 128)])
def test_training_times_are_shifted_as_sampling(parts, sides):
    tokens = sides[0] * sides[1]
    mu = 0.5 + (tokens - 256) * (0.9 - 0.5) / (8192 - 256)
    assert resolution_shift(sides, QwenImage21FlowObjectiveOptions.size_shifts["qwen_shift"]) == pytest.approx(math.exp(mu), rel=1e-6)


def test_times_reach_their_embedding_in_full_precision():
    parts, seen, t = QWEN.tiny(), [], torch.rand(2)
    parts.backbone.time_text_embed.time_proj.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    conditions = QWEN.encode_prompts(parts, CAPTIONS[:1] * 2)
    parts.backbone.to(torch.bfloat16)
    with torch.no_grad():
        found = QWEN.denoise(parts, torch.randn(2, 64, 4, 4), t, conditions)
    # Text is as if at time 0.
    assert torch.equal(torch.cat(seen), torch.cat([t, torch.zeros(1)])) and found.dtype == torch.float32 and torch.isfinite(found).all()
