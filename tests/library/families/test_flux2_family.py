"""FLUX.2 Klein beside diffusers: the network's call, the pipeline with and without reference images, the shift, batches of mixed sizes."""

import math

import pytest
import torch
from diffusers import Flux2KleinPipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from PIL import Image

from sd_scripts.families import family as family_of
from sd_scripts.families.common.samplers import scheduler_for
from sd_scripts.families.flux2.options import Flux2FlowObjectiveOptions
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.library.objectives.times import resolution_shift

FLUX2 = family_of("flux2")
CAPTION = "a far longer caption"


@pytest.fixture(scope="module")
def parts() -> Parts:
    return FLUX2.tiny()


def image(width: int, height: int, seed: int) -> Image.Image:
    numbers = torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(numbers.numpy())


def pipeline_of(parts: Parts) -> Flux2KleinPipeline:
    """The pipeline reads with a language model with a head, of which it needs the states alone."""
    made = Flux2KleinPipeline(
        scheduler_for("auto", parts.scheduler_config), parts.vae, parts.text_encoders["te1"], parts.tokenizers["te1"], parts.backbone
    )
    made.set_progress_bar_config(disable=True)
    return made


def drawn(parts: Parts, request: Preview) -> torch.Tensor:
    """What diffusers draws of a request from its prompt alone, in [-1, 1]."""
    found = pipeline_of(parts)(
        image=list(request.controls) or None,
        prompt=request.prompt,
        guidance_scale=request.cfg_scale,
        width=request.width,
        height=request.height,
        num_inference_steps=request.steps,
        generator=[torch.Generator().manual_seed(request.seed)],
        max_sequence_length=parts.settings["max_token_length"],
        text_encoder_out_layers=(1, 2, 3),
        output_type="pt",
    ).images
    return 2 * found - 1


def test_the_network_is_called_as_diffusers_calls_it(parts):
    pipeline, x, t = pipeline_of(parts), torch.randn(1, 128, 3, 5), torch.rand(1)
    controls = [torch.randn(128, 2, 4), torch.randn(128, 3, 2)]
    with torch.no_grad():
        text, text_ids = pipeline.encode_prompt(
            CAPTION, max_sequence_length=parts.settings["max_token_length"], text_encoder_out_layers=(1, 2, 3)
        )
        tokens = torch.cat([pipeline._pack_latents(one) for one in (x, *(control[None] for control in controls))], dim=1)
        places = torch.cat([pipeline._prepare_latent_ids(x), pipeline._prepare_image_ids([one[None] for one in controls])], dim=1)
        wanted = parts.backbone(
            tokens, encoder_hidden_states=text, timestep=t, txt_ids=text_ids, img_ids=places, guidance=None, return_dict=False
        )[0][:, :15]
        (condition,) = FLUX2.encode_prompts(parts, [CAPTION])
        found = FLUX2.denoise(parts, x, t, [condition | {"control_0": controls[0], "control_1": controls[1]}])
    assert torch.allclose(condition["text"], text[0], atol=1e-6)
    assert torch.allclose(pipeline._pack_latents(found), wanted, atol=1e-5)


def test_samples_with_other_reference_images_in_a_batch_are_as_each_alone(parts):
    x, t = torch.randn(4, 128, 3, 5), torch.rand(4)
    (text,) = FLUX2.encode_prompts(parts, [CAPTION])
    first, second = torch.randn(128, 2, 4), torch.randn(128, 3, 2)
    conditions = [text, text | {"control_0": first}, text | {"control_0": second}, text | {"control_0": first, "control_1": second}]
    with torch.no_grad():
        together = FLUX2.denoise(parts, x, t, conditions)
        alone = torch.cat([FLUX2.denoise(parts, x[row : row + 1], t[row : row + 1], conditions[row : row + 1]) for row in range(4)])
        without = FLUX2.denoise(parts, x, t, [text] * 4)
    assert torch.allclose(together, alone, atol=1e-5)
    assert [torch.allclose(a, b, atol=1e-3) for a, b in zip(together, without)] == [True, False, False, False]


@pytest.mark.parametrize(
    ("cfg_scale", "steps"),
    [
        # Each number of steps, and both kinds of drawing.
        *((1.0, 1), (4.0, 4), (1.0, 28)),
        *(pytest.param(*case, marks=pytest.mark.long) for case in ((4.0, 1), (1.0, 4), (4.0, 28))),
    ],
)
def test_a_preview_is_what_the_pipeline_draws(parts, cfg_scale, steps):
    request = Preview(CAPTION, "", 96, 64, seed=3, steps=steps, cfg_scale=cfg_scale)
    with torch.no_grad():
        assert torch.allclose(FLUX2.render(parts, [request]), drawn(parts, request), atol=1e-4)


def test_a_preview_with_reference_images_is_what_the_pipeline_draws(parts):
    request = Preview(CAPTION, "", 96, 64, seed=3, steps=1, cfg_scale=3.0, controls=(image(150, 100, 1), image(1500, 900, 2)))
    with torch.no_grad():
        assert torch.allclose(FLUX2.render(parts, [request]), drawn(parts, request), atol=1e-4)


def test_a_distilled_model_is_drawn_without_guidance():
    parts = FLUX2.tiny()
    parts.denoising["is_distilled"] = True
    guided, plain = (Preview(CAPTION, "", 64, 64, seed=3, steps=2, cfg_scale=scale) for scale in (4.0, 1.0))
    with torch.no_grad():
        assert torch.equal(FLUX2.render(parts, [guided]), FLUX2.render(parts, [plain]))


def test_images_are_encoded_as_the_pipeline_encodes_references(parts):
    pixels = torch.rand(1, 3, 64, 96) * 2 - 1
    with torch.no_grad():
        assert torch.allclose(FLUX2.encode_images(parts, pixels), pipeline_of(parts)._encode_vae_image(pixels, None), atol=1e-5)


@pytest.mark.parametrize("sides", [(16, 16), (32, 48), (64, 64)])
def test_training_times_are_shifted_as_sampling_in_50_steps(sides):
    """Tokens are of 16 x 16 pixels, which latents already are here: halving their sides once more would count four times too few."""
    line = Flux2FlowObjectiveOptions.size_shifts["flux2_shift"]
    assert resolution_shift(sides, line) == pytest.approx(math.exp(compute_empirical_mu(sides[0] * sides[1], 50)), rel=1e-4)


@pytest.mark.parametrize("tokens", [64, 4096, 4300, 4301, 16384])
@pytest.mark.parametrize("steps", [1, 4, 50, 300])
def test_the_shift_of_previews_is_diffusers(tokens, steps):
    assert FLUX2.mu(FLUX2.tiny(), tokens, steps) == pytest.approx(compute_empirical_mu(tokens, steps), rel=1e-6)


def test_times_reach_their_embedding_in_full_precision():
    parts, seen, t = FLUX2.tiny(), [], torch.rand(2)
    parts.backbone.time_guidance_embed.time_proj.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    conditions = FLUX2.encode_prompts(parts, [CAPTION] * 2)
    parts.backbone.to(torch.bfloat16)
    with torch.no_grad():
        found = FLUX2.denoise(parts, torch.randn(2, 128, 4, 4), t, conditions)
    assert torch.equal(torch.cat(seen), 1000 * t) and found.dtype == torch.float32 and torch.isfinite(found).all()


def test_as_many_reference_images_as_a_sample_can_have_are_placed_as_the_pipeline_places_them(parts):
    pipeline, x, t = pipeline_of(parts), torch.randn(1, 128, 2, 3), torch.rand(1)
    controls = [torch.randn(128, 1 + number % 3, 2) for number in range(FLUX2.num_controls(parts)[1])]
    with torch.no_grad():
        (condition,) = FLUX2.encode_prompts(parts, [CAPTION])
        tokens = torch.cat([pipeline._pack_latents(one) for one in (x, *(control[None] for control in controls))], dim=1)
        places = torch.cat([pipeline._prepare_latent_ids(x), pipeline._prepare_image_ids([one[None] for one in controls])], dim=1)
        text_ids = pipeline._prepare_text_ids(condition["text"][None])
        wanted = parts.backbone(
            tokens, encoder_hidden_states=condition["text"][None], timestep=t, txt_ids=text_ids, img_ids=places, guidance=None
        ).sample[:, :6]
        found = FLUX2.denoise(parts, x, t, [condition | {f"control_{number}": control for number, control in enumerate(controls)}])
    assert len(controls) == 10
    assert torch.allclose(pipeline._pack_latents(found), wanted, atol=1e-5)
