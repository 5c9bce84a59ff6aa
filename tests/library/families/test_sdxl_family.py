"""SDXL against diffusers' own pipeline: prompts, sizes, clock and sign, whole images."""

import random
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from sd_scripts.families import family as family_of
from sd_scripts.families.common.samplers import CLASSES, FlowEuler, scheduler_for
from sd_scripts.families.common.unet_loading import FLOW_SCHEDULER, scheduler_config
from sd_scripts.families.sdxl import loading
from sd_scripts.families.sdxl.options import SdxlModelOptions
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import Geometry, Parts, Preview
from sd_scripts.library.loading.common import make
from sd_scripts.schema.errors import OptionError
from tests.library.loading_in_small import shipped_configs
from tests.small_models import pipeline_of

SDXL = family_of("sdxl")
GENERATOR = torch.Generator()
GENERATOR.manual_seed(random.getrandbits(32))


@pytest.fixture
def parts() -> Parts:
    return SDXL.tiny()


def of_kind(parts: Parts, prediction_type: str, zero_terminal_snr: bool = False) -> Parts:
    """The same networks, said to be of another kind."""
    options = SdxlModelOptions(pretrained_model_name_or_path="tiny", prediction_type=prediction_type, zero_terminal_snr=zero_terminal_snr)
    config = scheduler_config(parts.scheduler_config, options, loading.SPEC.configs)
    return replace(parts, scheduler_config=config, path=diffusion.path_of(config), kind=diffusion.kind_of(config))


def text_condition(parts: Parts, prompt: str, width: int, height: int) -> list[dict[str, torch.Tensor]]:
    size = SDXL.size_condition(Geometry((width, height), (0, 0), (width, height)))
    with torch.no_grad():
        return [{**SDXL.encode_prompts(parts, [prompt])[0], **size}]


def test_prompts_are_encoded_as_the_pipeline_encodes_them(parts):
    captions = ["a red star, very nice", "", "Ünïcode ☂ (brackets) [too]", "a long caption " * 30]
    with torch.no_grad():
        expected, _, pooled, _ = pipeline_of(parts).encode_prompt(captions, do_classifier_free_guidance=False)
        got = SDXL.encode_prompts(parts, captions)
    assert_close(torch.stack([c["prompt_embeds"] for c in got]), expected, atol=1e-6, rtol=0)
    assert_close(torch.stack([c["pooled"] for c in got]), pooled, atol=1e-6, rtol=0)


def test_the_size_condition_is_the_pipelines(parts):
    ids = SDXL.size_condition(Geometry(original=(1200, 800), crop=(16, 32), target=(1024, 768)))["time_ids"]
    expected = pipeline_of(parts)._get_add_time_ids((800, 1200), (32, 16), (768, 1024), torch.float32, text_encoder_projection_dim=20)
    assert torch.equal(ids, expected[0])


def test_long_captions_are_read_in_chunks_and_the_first_is_pooled(parts):
    room = parts.tokenizers["te1"].model_max_length - 2
    long = replace(parts, settings={**parts.settings, "max_token_length": 225})
    caption = "x" * room + "y" * room + "z"
    with torch.no_grad():
        (one,) = SDXL.encode_prompts(long, [caption])
        chunks = SDXL.encode_prompts(parts, ["x" * room, "y" * room, "z"])
    # The tiny tokenizer joins nothing: a letter is a token, and only the last of a word is marked as its end.
    assert one["prompt_embeds"].shape == (3 * (room + 2), chunks[0]["prompt_embeds"].shape[1])
    assert_close(one["prompt_embeds"][2 * (room + 2) :], chunks[2]["prompt_embeds"], atol=1e-6, rtol=0)
    with torch.no_grad():
        (shorter,) = SDXL.encode_prompts(parts, [caption])
    assert_close(one["pooled"], shorter["pooled"], atol=1e-6, rtol=0)
    assert_close(one["prompt_embeds"][: room + 2], shorter["prompt_embeds"], atol=1e-6, rtol=0)


def test_weights_in_captions_scale_the_embeddings_of_their_words_only(parts):
    weighted = replace(parts, settings={**parts.settings, "weighted_captions": True})
    with torch.no_grad():
        (plain,), (same,) = SDXL.encode_prompts(parts, ["red cat"]), SDXL.encode_prompts(weighted, ["red cat"])
        (strong,) = SDXL.encode_prompts(weighted, ["(red:1.5) cat"])
    assert torch.equal(plain["prompt_embeds"], same["prompt_embeds"])
    factor = torch.ones(len(plain["prompt_embeds"]))
    factor[1:4] = 1.5  # start, r, e, d, c, a, t, end
    assert_close(strong["prompt_embeds"], plain["prompt_embeds"] * factor[:, None], atol=1e-6, rtol=1e-5)
    assert torch.equal(strong["pooled"], plain["pooled"])


def test_latents_are_scaled_and_shifted_as_the_vae_says(parts):
    pixels = torch.rand((1, 3, 32, 48), generator=GENERATOR) * 2 - 1
    with torch.no_grad():
        mean = parts.vae.encode(pixels).latent_dist.mean

    def check(shift: torch.Tensor, factor: torch.Tensor) -> None:
        scaled = (mean - shift) * factor
        assert_close(SDXL.encode_images(parts, pixels), scaled)
        # Undone in float32, as the pipeline does it: there and back a latent may move by its last bit, of which the decoder makes more
        # than the comparison allows. That the way back is right is the next line, that a wrong one would be seen the line after.
        latents = scaled / factor + shift
        assert_close(latents, mean)
        with torch.no_grad():
            decoded, wrong = (parts.vae.decode(given).sample.clamp(-1, 1) for given in (latents, latents * 1.001))
        assert (wrong - decoded).abs().max() > 1e-4
        assert_close(SDXL.decode(parts, scaled), decoded, atol=1e-5, rtol=0)

    def column(*values: float) -> torch.Tensor:
        return torch.tensor(values).view(1, -1, 1, 1)

    check(column(0.0), column(0.13025))
    parts.vae.register_to_config(shift_factor=0.25)
    check(column(0.25), column(0.13025))
    parts.vae.register_to_config(shift_factor=None, latents_mean=[0.1, 0.2, 0.3, 0.4], latents_std=[1.0, 2.0, 3.0, 4.0])
    check(column(0.1, 0.2, 0.3, 0.4), 0.13025 / column(1.0, 2.0, 3.0, 4.0))


def test_the_vae_keeps_its_precision_under_autocast(parts):
    pixels = torch.rand((1, 3, 32, 32), generator=GENERATOR)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = SDXL.encode_images(parts, pixels)
    assert torch.equal(inside, SDXL.encode_images(parts, pixels))


def test_a_network_in_half_precision_denoises_float_latents(parts):
    x_t = torch.randn((1, 4, 8, 8), generator=GENERATOR)
    condition = text_condition(parts, "cat", 64, 64)
    exact = SDXL.denoise(parts, x_t, torch.tensor([0.5]), condition)
    parts.backbone.to(torch.bfloat16)
    rounded = SDXL.denoise(parts, x_t, torch.tensor([0.5]), condition)
    assert rounded.dtype == torch.float32
    assert_close(rounded, exact, atol=0.1, rtol=0.1)


@pytest.mark.parametrize("kind, zero_snr", [("epsilon", False), ("v_prediction", False), ("v_prediction", True)])
def test_one_euler_step_through_denoise_is_one_step_of_the_pipeline(parts, kind, zero_snr):
    parts = of_kind(parts, kind, zero_snr)
    seen: list[torch.Tensor] = []
    pipe = pipeline_of(parts)
    pipe(
        "a star",
        width=64,
        height=48,
        num_inference_steps=5,
        guidance_scale=1.0,
        output_type="latent",
        generator=torch.Generator().manual_seed(7),
        callback_on_step_end=lambda pipe, step, timestep, values: seen.append(values["latents"].clone()) or values,
    )
    times, sigmas = pipe.scheduler.timesteps, pipe.scheduler.sigmas
    for step in range(1, 5):
        sigma, after = sigmas[step], sigmas[step + 1]
        # diffusers' Euler keeps x0 + sigma noise; ours is a x0 + s noise with sigma = s / a.
        t = parts.path.times(times[step : step + 1].long())
        a, s = parts.path.coefficients(t)
        assert_close(s / a, sigma[None], atol=1e-3, rtol=1e-3)
        x_t = seen[step - 1] * a
        with torch.no_grad():
            prediction = SDXL.denoise(parts, x_t, t, text_condition(parts, "a star", 64, 48))
        noise = (x_t - a * diffusion.to_x0(parts.kind, parts.path, x_t, prediction, t)) / s
        assert_close(seen[step - 1] + (after - sigma) * noise, seen[step], atol=2e-3, rtol=2e-3)


def test_one_euler_step_of_a_flow_model_through_denoise_is_one_step_of_the_pipeline(parts):
    parts = of_kind(parts, "flow")
    seen: list[torch.Tensor] = []
    pipe = pipeline_of(parts, FlowEuler.from_config(FLOW_SCHEDULER))
    pipe(
        "a star",
        width=64,
        height=48,
        num_inference_steps=5,
        guidance_scale=1.0,
        output_type="latent",
        generator=torch.Generator().manual_seed(7),
        callback_on_step_end=lambda pipe, step, timestep, values: seen.append(values["latents"].clone()) or values,
    )
    sigmas = pipe.scheduler.sigmas
    assert sigmas[0] == 1 and sigmas[-1] == 0
    for step in range(1, 5):
        with torch.no_grad():
            velocity = SDXL.denoise(parts, seen[step - 1], sigmas[step][None], text_condition(parts, "a star", 64, 48))
        assert_close(seen[step - 1] + (sigmas[step + 1] - sigmas[step]) * velocity, seen[step], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind, zero_snr", [("epsilon", False), ("v_prediction", True)])
@pytest.mark.parametrize("zeros", [True, False])
def test_a_preview_is_the_pipelines_image(parts, kind, zero_snr, zeros):
    parts = of_kind(parts, kind, zero_snr)
    parts.settings["force_zeros_for_empty_prompt"] = zeros
    requests = [
        Preview("a red star", width=64, height=48, seed=11, steps=4, cfg_scale=5.0),
        Preview("a blue ring", negative_prompt="ugly", width=64, height=48, seed=12, steps=4, cfg_scale=5.0),
    ]
    ours = SDXL.render(parts, requests)
    for image, one in zip(ours, requests):
        theirs = pipeline_of(parts)(
            one.prompt,
            negative_prompt=one.negative_prompt or None,
            width=64,
            height=48,
            num_inference_steps=4,
            guidance_scale=5.0,
            generator=torch.Generator().manual_seed(one.seed),
            output_type="pt",
        ).images[0]
        assert_close(SDXL.render(parts, [one])[0] / 2 + 0.5, theirs, atol=1e-5, rtol=0)
        # Convolutions of a batch round otherwise in the last bit, and 5 steps with guidance enlarge that.
        assert_close(image / 2 + 0.5, theirs, atol=5e-5, rtol=0)


@pytest.mark.parametrize("sampler", CLASSES)
def test_every_sampler_renders_as_the_pipeline_does_with_it(parts, sampler):
    one = Preview("a red star", width=32, height=32, seed=5, steps=3, cfg_scale=1.0, sampler=sampler)
    theirs = pipeline_of(parts, scheduler_for(sampler, parts.scheduler_config))(
        one.prompt,
        width=32,
        height=32,
        num_inference_steps=3,
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(5),
        output_type="pt",
    ).images[0]
    assert_close(SDXL.render(parts, [one])[0] / 2 + 0.5, theirs, atol=1e-5, rtol=0)


def test_a_sampler_that_cannot_render_a_model_is_refused_with_those_that_can(parts):
    one = Preview("cat", width=32, height=32, steps=2, sampler="heun")
    with pytest.raises(OptionError, match=r"heun cannot render a model with zero terminal SNR; take ddim, euler"):
        SDXL.preview(of_kind(parts, "v_prediction", True), [one])
    with pytest.raises(OptionError, match=r"lms cannot render a flow-matching model; take auto, euler"):
        SDXL.preview(of_kind(parts, "flow"), [replace(one, sampler="lms")])
    assert SDXL.preview(of_kind(parts, "flow"), [replace(one, scheduler="simple")])


def test_auto_takes_the_scheduler_of_the_model_and_an_unknown_one_is_named(parts):
    config = {**parts.scheduler_config, "_class_name": "UniPCMultistepScheduler"}
    assert type(scheduler_for("auto", config)).__name__ == "UniPCMultistepScheduler"
    assert type(scheduler_for("ddim", config)).__name__ == "DDIMScheduler"
    with pytest.raises(OptionError, match=r"StableDiffusionPipeline is not one of the installed diffusers; choose a sampler: ddim"):
        scheduler_for("auto", {**config, "_class_name": "StableDiffusionPipeline"})


def test_ddim_does_not_clip_latents(parts):
    assert scheduler_for("ddim", parts.scheduler_config).config.clip_sample is False


def test_zero_terminal_snr_models_are_sampled_from_pure_noise(parts):
    for sampler in ("auto", "ddim", "euler", "euler_a", "dpmsolver++"):
        scheduler = scheduler_for(sampler, of_kind(parts, "v_prediction", True).scheduler_config)
        scheduler.set_timesteps(4)
        assert scheduler.timesteps[0] == 999 and scheduler.config.rescale_betas_zero_snr


def test_samplers_of_one_equation_agree_on_a_trained_zero_terminal_snr_model():
    toy = SDXL.load(SdxlModelOptions(pretrained_model_name_or_path="toy"), torch.device("cpu"), torch.float32)
    one = Preview("a red circle at the top left", width=64, height=64, seed=3, steps=16, cfg_scale=3.0)
    images = {name: SDXL.render(toy, [replace(one, sampler=name)]) for name in ("ddim", "euler", "dpmsolver++")}
    # DDIM is Euler's method in another variable (Song et al. 2021); DPM-Solver++ is of second order.
    assert (images["ddim"] - images["euler"]).abs().mean() < 5e-3
    assert (images["ddim"] - images["dpmsolver++"]).abs().mean() < 3e-2


def test_preview_sides_off_the_grid_are_refused(parts):
    with pytest.raises(ValueError, match="60 x 64 are not multiples of 8"):
        SDXL.preview(parts, [Preview("cat", width=60, height=64)])


def test_the_full_size_networks_get_adapters_on_kohyas_layers():
    with torch.device("meta"):
        made = {name: make(loading.SPEC, name, config, "", name) for name, config in shipped_configs(loading.SPEC)}
    full = replace(SDXL.tiny(), backbone=made["backbone"], text_encoders={"te1": made["te1"], "te2": made["te2"]})
    assert {name: len(layers) for name, layers in SDXL.adapter_targets(full, conv=False).items()} == {
        "backbone": 722,
        "te1": 72,
        "te2": 192,
    }
    more = set(SDXL.adapter_targets(full, conv=True)["backbone"]) - set(SDXL.adapter_targets(full, conv=False)["backbone"])
    assert len(more) == 66 and {layer.rsplit(".", 1)[-1] for layer in more} == {"conv1", "conv2", "time_emb_proj", "conv_shortcut", "conv"}
