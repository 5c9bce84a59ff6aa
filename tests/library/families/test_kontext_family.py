"""FLUX.1 Kontext beside diffusers: the network's call, the pipeline with and without a reference image, batches of mixed sizes."""

from dataclasses import replace

import pytest
import torch
from diffusers import FluxKontextPipeline
from PIL import Image

from sd_scripts.families import family as family_of
from sd_scripts.families.common.samplers import scheduler_for
from sd_scripts.library.core.protocols import Parts, Preview

KONTEXT = family_of("kontext")
CAPTION = "make it a far longer caption"


@pytest.fixture(scope="module")
def parts() -> Parts:
    return KONTEXT.tiny()


def image(width: int, height: int, seed: int) -> Image.Image:
    numbers = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(numbers.numpy())


def pipeline_of(parts: Parts) -> FluxKontextPipeline:
    made = FluxKontextPipeline(
        scheduler=scheduler_for("auto", parts.scheduler_config),
        vae=parts.vae,
        text_encoder=parts.text_encoders["te1"],
        tokenizer=parts.tokenizers["te1"],
        text_encoder_2=parts.text_encoders["te3"],
        tokenizer_2=parts.tokenizers["te3"],
        transformer=parts.backbone,
    )
    made.set_progress_bar_config(disable=True)
    return made


def drawn(parts: Parts, request: Preview) -> torch.Tensor:
    """What diffusers draws of a request, in [-1, 1]."""
    found = pipeline_of(parts)(
        image=list(request.controls) or None,
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        true_cfg_scale=request.cfg_scale,
        guidance_scale=request.guidance,
        width=request.width,
        height=request.height,
        max_area=request.width * request.height,
        num_inference_steps=request.steps,
        generator=torch.Generator().manual_seed(request.seed),
        max_sequence_length=parts.settings["t5xxl_max_token_length"],
        output_type="pt",
    ).images
    return 2 * found - 1


@pytest.mark.parametrize("sides", [None, (4, 6), (8, 2)])
def test_the_network_is_called_as_diffusers_calls_it(parts, sides):
    pipeline, x, t = pipeline_of(parts), torch.randn(1, 16, 6, 10), torch.rand(1)
    control = None if sides is None else torch.randn(1, 16, *sides)
    with torch.no_grad():
        text, pooled, text_ids = pipeline.encode_prompt(CAPTION, max_sequence_length=32)
        tokens, seen, places, more = pipeline.prepare_latents(control, 1, 16, 48, 80, torch.float32, torch.device("cpu"), latents=None)
        tokens = pipeline._pack_latents(x, 1, 16, 6, 10)
        wanted = parts.backbone(
            tokens if seen is None else torch.cat([tokens, seen], dim=1),
            encoder_hidden_states=text,
            pooled_projections=pooled,
            timestep=t,
            guidance=torch.ones(1),
            txt_ids=text_ids,
            img_ids=places if more is None else torch.cat([places, more]),
            return_dict=False,
        )[0][:, :15]
        (condition,) = KONTEXT.encode_prompts(parts, [CAPTION])
        found = KONTEXT.denoise(parts, x, t, [condition if control is None else condition | {"control_0": control[0]}])
    assert torch.allclose(condition["text"][1:], text[0], atol=1e-6)
    assert torch.allclose(condition["text"][0, :16], pooled[0], atol=1e-6) and not condition["text"][0, 16:].any()
    assert torch.allclose(pipeline._pack_latents(found, 1, 16, 6, 10), wanted, atol=1e-5)


def test_samples_with_other_reference_images_in_a_batch_are_as_each_alone(parts):
    x, t = torch.randn(4, 16, 6, 10), torch.rand(4)
    texts = KONTEXT.encode_prompts(parts, [CAPTION, "", "cat", CAPTION])
    first, second = torch.randn(16, 4, 8), torch.randn(16, 6, 4)
    conditions = [texts[0], texts[1] | {"control_0": first}, texts[2] | {"control_0": second}, texts[3] | {"control_0": first}]
    with torch.no_grad():
        together = KONTEXT.denoise(parts, x, t, conditions)
        alone = torch.cat([KONTEXT.denoise(parts, x[row : row + 1], t[row : row + 1], conditions[row : row + 1]) for row in range(4)])
        without = KONTEXT.denoise(parts, x, t, texts)
    assert torch.allclose(together, alone, atol=1e-5)
    assert [torch.allclose(a, b, atol=1e-3) for a, b in zip(together, without)] == [True, False, False, False]


@pytest.mark.parametrize(
    ("cfg_scale", "steps", "size", "reference"),
    [
        (1.0, 4, (96, 64), (150, 100)),
        (3.0, 1, (64, 96), (60, 90)),
        (1.0, 2, (64, 64), None),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((3.0, 4, (96, 64), (3000, 700)), (1.0, 28, (64, 64), (64, 64)))),
    ],
)
def test_a_preview_is_what_the_pipeline_draws(parts, monkeypatch, cfg_scale, steps, size, reference):
    # At their full size, a million pixels, a test would take a minute.
    small = [(width // 16 // 16 * 16, height // 16 // 16 * 16) for width, height in ((1024, 1024), (1248, 832), (832, 1248), (1568, 672))]
    for place in ("sd_scripts.families.kontext.model", "diffusers.pipelines.flux.pipeline_flux_kontext"):
        monkeypatch.setattr(f"{place}.PREFERRED_KONTEXT_RESOLUTIONS", small)
    controls = () if reference is None else (image(*reference, seed=1),)
    request = Preview(CAPTION, "blurred", *size, seed=3, steps=steps, cfg_scale=cfg_scale, guidance=2.5, controls=controls)
    with torch.no_grad():
        assert torch.allclose(KONTEXT.render(parts, [request]), drawn(parts, request), atol=1e-4)


@pytest.mark.parametrize(("size", "wanted"), [((1000, 1000), (1024, 1024)), ((300, 200), (1248, 832)), ((5000, 100), (1568, 672))])
def test_a_reference_image_is_given_in_the_size_that_the_pipeline_chooses(parts, size, wanted, monkeypatch):
    shapes = []
    pipeline = pipeline_of(parts)
    monkeypatch.setattr(pipeline, "prepare_latents", lambda image, *rest: shapes.append(image) or (_ for _ in ()).throw(InterruptedError))
    with pytest.raises(InterruptedError):
        pipeline(image=image(*size, seed=2), prompt="x", max_sequence_length=32)
    ours = KONTEXT.control_pixels(parts, image(*size, seed=2))
    assert KONTEXT.control_size(parts, size) == wanted == (shapes[0].shape[-1], shapes[0].shape[-2])
    assert torch.equal(ours, shapes[0][0])


def test_less_resolution_keeps_the_aspect_ratio(parts):
    smaller = replace(parts, settings={**parts.settings, "control_area": 512 * 512})
    assert KONTEXT.control_size(smaller, (1000, 1000)) == (512, 512)
    assert KONTEXT.control_size(smaller, (300, 200)) == (624, 416)


def test_guidance_of_training_is_not_that_of_a_preview(parts):
    request = Preview(CAPTION, "", 64, 64, seed=3, steps=1, cfg_scale=1.0, guidance=2.5)
    told = replace(parts, denoising={"guidance_scale": 9.0})
    with torch.no_grad():
        same, other = KONTEXT.render(told, [request]), KONTEXT.render(parts, [replace(request, guidance=9.0)])
        assert torch.equal(KONTEXT.render(parts, [request]), same) and not torch.equal(other, same)


def test_images_are_encoded_as_the_pipeline_encodes_references(parts):
    pixels = torch.rand(1, 3, 64, 96) * 2 - 1
    with torch.no_grad():
        assert torch.allclose(KONTEXT.encode_images(parts, pixels), pipeline_of(parts)._encode_vae_image(pixels, None), atol=1e-5)


def test_times_and_guidance_reach_their_embedding_in_full_precision():
    parts, seen, t = KONTEXT.tiny(), [], torch.rand(2)
    parts.backbone.time_text_embed.time_proj.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    conditions = [one | {"control_0": torch.randn(16, 4, 4)} for one in KONTEXT.encode_prompts(parts, [CAPTION] * 2)]
    parts.backbone.to(torch.bfloat16)
    with torch.no_grad():
        found = KONTEXT.denoise(parts, torch.randn(2, 16, 4, 4), t, conditions)
    assert torch.equal(seen[0], 1000 * t) and torch.equal(seen[1], torch.full((2,), 1000.0))
    assert found.dtype == torch.float32 and torch.isfinite(found).all()
