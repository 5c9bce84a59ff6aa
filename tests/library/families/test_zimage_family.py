"""Z-Image against diffusers' own pipeline: captions, clock and sign, anchors, whole images."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from sd_scripts.families import family as family_of
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.diffusion import anchor_sigmas
from sd_scripts.library.core.protocols import Condition, Geometry, Parts, Preview
from sd_scripts.library.memory import quantize
from sd_scripts.schema.errors import OptionError
from tests.small_models import zimage_pipeline_of

ZIMAGE = family_of("zimage")
GENERATOR = torch.Generator()
GENERATOR.manual_seed(random.getrandbits(32))
CAPTIONS = ["a red star, very nice", "", "Ünïcode ☂ (brackets) [too] <|im_end|>", "a long caption " * 60]


@pytest.fixture
def parts() -> Parts:
    return ZIMAGE.tiny()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


def encoded(parts: Parts, captions: list[str]) -> list[Condition]:
    with torch.no_grad():
        return ZIMAGE.encode_prompts(parts, captions)


def raw(parts: Parts, x: torch.Tensor, clock: torch.Tensor, texts: list[torch.Tensor]) -> torch.Tensor:
    """What the transformer itself says."""
    with torch.no_grad():
        return torch.stack(parts.backbone(list(x.unsqueeze(2)), clock, texts).sample).squeeze(2)


@pytest.mark.parametrize("limit", [512, 40])
def test_captions_are_encoded_as_the_pipeline_encodes_them(parts, limit):
    parts.settings["max_token_length"] = limit
    with torch.no_grad():
        theirs, _ = zimage_pipeline_of(parts).encode_prompt(list(CAPTIONS), do_classifier_free_guidance=False, max_sequence_length=limit)
    ours = encoded(parts, CAPTIONS)
    assert [len(text["text"]) for text in ours] == [len(text) for text in theirs]
    assert max(len(text["text"]) for text in ours) == limit
    for own, other in zip(ours, theirs, strict=True):
        assert_close(own["text"], other, atol=1e-5, rtol=1e-5)


def test_a_caption_that_is_cut_is_told_of_once(parts, caplog):
    parts.settings["max_token_length"] = 20
    encoded(parts, ["a long caption " * 10, "another long caption " * 10])
    assert caplog.text.count("captions longer than 20 tokens are cut there") == 1


def test_the_clock_runs_backwards_and_the_sign_is_the_other_only_inside_denoise(parts):
    x, t, texts = normal(2, 16, 6, 8), torch.rand(2, generator=GENERATOR), encoded(parts, CAPTIONS[:2])
    expected = -raw(parts, x, 1 - t, [text["text"] for text in texts])
    with torch.no_grad():
        assert torch.equal(ZIMAGE.denoise(parts, x, t, texts), expected)


def test_captions_of_different_lengths_share_a_batch_without_a_trace(parts):
    x, t, texts = normal(4, 16, 6, 10), torch.rand(4, generator=GENERATOR), encoded(parts, CAPTIONS)
    with torch.no_grad():
        together = ZIMAGE.denoise(parts, x, t, texts)
        for index in range(4):
            alone = ZIMAGE.denoise(parts, x[index : index + 1], t[index : index + 1], texts[index : index + 1])
            assert (alone[0] - together[index]).abs().max() < 1e-6 * max(1.0, float(alone.abs().max())) * 4


def test_times_reach_the_embedding_in_float32_whatever_the_network_is(parts):
    seen = []
    parts.backbone.to(torch.bfloat16)
    embedding = parts.backbone.t_embedder.timestep_embedding
    t = torch.tensor([0.9545454, 0.00317])

    def watched(times, *more):
        seen.append(times)
        return embedding(times, *more)

    parts.backbone.t_embedder.timestep_embedding = watched
    with torch.no_grad():
        prediction = ZIMAGE.denoise(parts, normal(2, 16, 4, 4), t, encoded(parts, ["cat", "a dog"]))
    assert prediction.dtype == torch.float32 and prediction.isfinite().all()
    assert seen[0].dtype == torch.float32
    assert_close(seen[0], 1000 * (1 - t), atol=1e-4, rtol=0)


def test_gradient_checkpointing_changes_nothing(parts):
    parts.backbone.requires_grad_(True)
    x, t, texts = normal(2, 16, 4, 6), torch.tensor([0.2, 0.8]), encoded(parts, ["cat", "a longer caption"])
    gradients = []
    for switch in (parts.backbone.disable_gradient_checkpointing, parts.backbone.enable_gradient_checkpointing):
        switch()
        parts.backbone.train()
        parts.backbone.zero_grad()
        ZIMAGE.denoise(parts, x, t, texts).square().mean().backward()
        gradients.append({name: p.grad.clone() for name, p in parts.backbone.named_parameters()})
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_latents_are_shifted_and_scaled_as_the_pipeline_undoes_it(parts):
    pixels = torch.rand((1, 3, 32, 48), generator=GENERATOR) * 2 - 1
    with torch.no_grad():
        mean = parts.vae.encode(pixels).latent_dist.mean
    latents = ZIMAGE.encode_images(parts, pixels)
    assert latents.shape == (1, 16, 4, 6)
    assert_close(latents, (mean - 0.1159) * 0.3611)
    with torch.no_grad():
        assert_close(ZIMAGE.decode(parts, latents), parts.vae.decode(latents / 0.3611 + 0.1159).sample.clamp(-1, 1), atol=1e-5, rtol=0)
    assert ZIMAGE.size_condition(Geometry((100, 50), (3, 4), (64, 32))) == {}


@pytest.mark.parametrize("steps", [1, 4, 8, 9])
@pytest.mark.parametrize("shift", [3.0, 6.0])
def test_the_sampler_asks_the_network_at_the_anchors(parts, steps, shift, monkeypatch):
    parts = replace(parts, scheduler_config={**parts.scheduler_config, "shift": shift})
    clocks = []
    forward = parts.backbone.forward
    monkeypatch.setattr(
        parts.backbone, "forward", lambda x, clock, *rest, **named: clocks.append(clock) or forward(x, clock, *rest, **named)
    )
    ZIMAGE.preview(parts, [Preview("a star", width=64, height=64, steps=steps, cfg_scale=1.0)])
    assert_close(1 - torch.cat(clocks), torch.tensor(anchor_sigmas(steps, shift)), atol=1e-6, rtol=0)
    # The installed pipeline's own steps, when it is given none.
    pipeline = zimage_pipeline_of(parts)
    pipeline("a star", width=64, height=64, num_inference_steps=steps, guidance_scale=0.0, output_type="latent")
    assert_close(pipeline.scheduler.sigmas[:-1], torch.tensor(anchor_sigmas(steps, shift)), atol=1e-6, rtol=0)


def test_one_step_with_the_true_velocity_is_the_clean_image_and_the_pipelines_sign_is_ours(parts, monkeypatch):
    z, noise = normal(1, 16, 8, 8), torch.randn((1, 16, 8, 8), generator=torch.Generator().manual_seed(5))
    # A network that knows: Z-Image says x0 - noise.
    monkeypatch.setattr(parts.backbone, "forward", lambda x, clock, text, **named: ([(z - noise)[0].unsqueeze(1)] * len(x),))
    t = torch.ones(1)
    assert torch.equal(ZIMAGE.denoise(parts, noise, t, [{"text": normal(3, 32)}]), noise - z)
    pipeline = zimage_pipeline_of(parts)
    drawn = pipeline(
        prompt_embeds=[normal(3, 32)],
        width=64,
        height=64,
        num_inference_steps=1,
        sigmas=[1.0],
        guidance_scale=0.0,
        latents=noise,
        output_type="latent",
    ).images
    assert_close(drawn, z, atol=1e-5, rtol=0)
    x_t = diffusion.add_noise(parts.path, z, noise, torch.tensor([0.3]))
    assert_close(x_t - 0.3 * (noise - z), z, atol=1e-5, rtol=0)


def theirs(parts: Parts, request: Preview) -> torch.Tensor:
    """The request by diffusers' pipeline, given the caption's rows."""
    texts = [text["text"] for text in encoded(parts, [request.prompt, request.negative_prompt])]
    pixels = zimage_pipeline_of(parts)(
        prompt_embeds=texts[:1],
        negative_prompt_embeds=texts[1:],
        width=request.width,
        height=request.height,
        num_inference_steps=request.steps,
        guidance_scale=max(request.cfg_scale - 1, 0.0),
        generator=[torch.Generator().manual_seed(request.seed)],
        output_type="pt",
    ).images
    return pixels * 2 - 1


@pytest.mark.parametrize("cfg_scale", [0.0, 1.0, 3.5])
def test_previews_are_those_of_the_pipeline_to_the_last_bit(parts, cfg_scale):
    request = Preview("a red star", "blurry", width=96, height=64, seed=11, steps=3, cfg_scale=cfg_scale)
    assert_close(ZIMAGE.render(parts, [request]), theirs(parts, request), atol=1e-6, rtol=0)
    with torch.no_grad():
        images = ZIMAGE.preview(parts, [request])
    expected = (theirs(parts, request)[0] / 2 + 0.5).permute(1, 2, 0).numpy()
    assert np.array_equal(np.asarray(images[0]), (expected * 255).round().astype("uint8"))


def test_guidance_uses_the_negative_prompt_and_nothing_else_does(parts):
    request = Preview("a red star", "blurry", width=64, height=64, seed=11, steps=2, cfg_scale=3.0)
    other = replace(request, negative_prompt="dark")
    assert ZIMAGE.preview(parts, [request])[0].tobytes() != ZIMAGE.preview(parts, [other])[0].tobytes()
    request, other = replace(request, cfg_scale=1.0), replace(other, cfg_scale=1.0)
    assert ZIMAGE.preview(parts, [request])[0].tobytes() == ZIMAGE.preview(parts, [other])[0].tobytes()


def test_a_sampler_that_cannot_render_it_and_sides_off_the_grid_are_refused(parts):
    with pytest.raises(OptionError, match="sampler: ddim cannot render a flow-matching model"):
        ZIMAGE.preview(parts, [Preview("a", width=64, height=64, steps=2, sampler="ddim")])
    with pytest.raises(ValueError, match="not multiples of 16"):
        ZIMAGE.preview(parts, [Preview("a", width=72, height=64, steps=2)])


def test_a_model_in_8_bits_denoises_and_renders_nearly_the_same(parts):
    request = Preview("a red star", width=64, height=64, seed=3, steps=2, cfg_scale=1.0)
    before = ZIMAGE.render(parts, [request])
    for module in (parts.backbone, parts.text_encoders["te1"]):
        quantize.quantize_network(module, "qint8")
        assert quantize.is_quantized(module)
    assert len(quantize.blocks_of(parts.backbone)) == 4 and len(quantize.blocks_of(parts.text_encoders["te1"])) == 3
    assert 0 < (ZIMAGE.render(parts, [request]) - before).abs().max() < 0.1
