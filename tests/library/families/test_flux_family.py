"""FLUX against diffusers' own pipeline: packing, prompts, masks, clock and sign, whole images."""

import random
from dataclasses import replace

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from torch.testing import assert_close

from sd_scripts.families import family as family_of
from sd_scripts.families.common.double_stream import TEXT_STEP, batched_texts, positions
from sd_scripts.families.common.packing import packed, unpacked
from sd_scripts.families.flux import loading
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import Geometry, Parts, Preview
from sd_scripts.library.loading.common import read_json
from sd_scripts.schema.errors import OptionError
from tests.small_models import flux_pipeline_of

FLUX = family_of("flux")
GENERATOR = torch.Generator()
GENERATOR.manual_seed(random.getrandbits(32))
CAPTIONS = ["a red star, very nice", "", "Ünïcode ☂ (brackets) [too]", "a long caption " * 30]


@pytest.fixture
def parts() -> Parts:
    return FLUX.tiny()


def masked(parts: Parts) -> Parts:
    """The same networks, with T5's padding hidden."""
    return replace(parts, settings={**parts.settings, "apply_t5_attn_mask": True})


def schnell(parts: Parts) -> Parts:
    """A model without embedded guidance and dynamic shifting."""
    config = {**parts.backbone.config, "guidance_embeds": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        transformer = FluxTransformer2DModel.from_config(config).eval().requires_grad_(False)
    return replace(parts, backbone=transformer, scheduler_config=loading.published_scheduler(guidance_embeds=False))


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR)


def encoded(parts: Parts, captions: list[str]) -> list[dict[str, torch.Tensor]]:
    with torch.no_grad():
        return FLUX.encode_prompts(parts, captions)


@pytest.mark.parametrize("height, width", [(8, 8), (6, 14), (16, 2), (96, 168), (128, 90)])
def test_latents_are_packed_and_placed_as_the_pipeline_does(height, width):
    latents = normal(2, 16, height, width)
    assert torch.equal(packed(latents), FluxPipeline._pack_latents(latents, 2, 16, height, width))
    assert torch.equal(unpacked(packed(latents), height, width), latents)
    assert torch.equal(unpacked(packed(latents), height, width), FluxPipeline._unpack_latents(packed(latents), 8 * height, 8 * width, 8))
    theirs = FluxPipeline._prepare_latent_image_ids(2, height // 2, width // 2, torch.device("cpu"), torch.float32)
    assert torch.equal(positions(height, width), theirs)


def test_prompts_are_encoded_as_the_pipeline_encodes_them(parts):
    with torch.no_grad():
        texts, pooled, _ = flux_pipeline_of(parts).encode_prompt(CAPTIONS, max_sequence_length=32)
    conditions = encoded(parts, CAPTIONS)
    assert_close(torch.stack([c["t5"] for c in conditions]), texts, atol=1e-6, rtol=0)
    assert_close(torch.stack([c["pooled"] for c in conditions]), pooled, atol=1e-6, rtol=0)


def test_the_number_of_t5_tokens_is_an_option(parts):
    parts.settings["t5xxl_max_token_length"] = 48
    with torch.no_grad():
        texts, _, _ = flux_pipeline_of(parts).encode_prompt(CAPTIONS, max_sequence_length=48)
    assert_close(torch.stack([c["t5"] for c in encoded(parts, CAPTIONS)]), texts, atol=1e-6, rtol=0)


def test_with_the_mask_a_text_is_its_own_tokens_without_any_trace_of_padding(parts):
    for caption, condition in zip(CAPTIONS, encoded(masked(parts), CAPTIONS), strict=True):
        ids = parts.tokenizers["te3"](caption, truncation=True, max_length=32, return_tensors="pt").input_ids
        with torch.no_grad():
            alone = parts.text_encoders["te3"](ids).last_hidden_state[0]
        assert condition["t5"].shape == (ids.shape[1], 24)
        assert_close(condition["t5"], alone, atol=1e-6, rtol=0)


def test_texts_of_different_lengths_are_padded_and_hidden_in_one_batch(parts):
    parts = masked(parts)
    x_t, t = normal(3, 16, 6, 10), torch.tensor([0.2, 0.6, 0.9])
    conditions = encoded(parts, ["cat", "a red star at the top", ""])
    with torch.no_grad():
        together = FLUX.denoise(parts, x_t, t, conditions)
        for index in range(3):
            text, pooled = conditions[index]["t5"][None], conditions[index]["pooled"][None]
            alone = parts.backbone(
                hidden_states=packed(x_t[index : index + 1]),
                timestep=t[index : index + 1],
                guidance=torch.ones(1),
                encoder_hidden_states=text,
                pooled_projections=pooled,
                txt_ids=torch.zeros(text.shape[1], 3),
                img_ids=positions(6, 10),
            ).sample
            assert_close(together[index], unpacked(alone, 6, 10)[0], atol=1e-5, rtol=1e-4)


def test_what_stands_in_the_padding_makes_no_difference(parts, monkeypatch):
    parts = masked(parts)
    x_t, t, conditions = normal(2, 16, 4, 4), torch.tensor([0.3, 0.7]), encoded(parts, ["cat", "a longer text"])
    with torch.no_grad():
        before = FLUX.denoise(parts, x_t, t, conditions)
        forward = parts.backbone.forward

        def spoiled(**named):
            text = named["encoder_hidden_states"].clone()
            for index, condition in enumerate(conditions):
                text[index, len(condition["t5"]) :] = 5.0
            return forward(**{**named, "encoder_hidden_states": text})

        monkeypatch.setattr(parts.backbone, "forward", spoiled)
        after = FLUX.denoise(parts, x_t, t, conditions)
    assert_close(after, before, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("lengths, longest", [([5, 5], 5), ([3, 64], 64), ([1, 65, 20], 128)])
def test_a_batch_has_as_few_lengths_as_possible_and_a_mask_only_with_padding(lengths, longest):
    texts = [normal(length, 4) for length in lengths]
    joined, mask = batched_texts(texts, num_image_tokens=7)
    assert joined.shape == (len(lengths), longest, 4)
    for row, text in zip(joined, texts):
        assert torch.equal(row[: len(text)], text) and not row[len(text) :].any()
    if len(set(lengths)) == 1:
        assert mask is None
    else:
        assert longest % TEXT_STEP == 0 and mask is not None and mask.shape == (len(lengths), longest + 7)
        assert mask.sum(dim=-1).flatten().tolist() == [length + 7 for length in lengths]


def test_latents_are_shifted_and_scaled_as_the_pipeline_undoes_it(parts):
    pixels = torch.rand((1, 3, 32, 48), generator=GENERATOR) * 2 - 1
    with torch.no_grad():
        mean = parts.vae.encode(pixels).latent_dist.mean
    latents = FLUX.encode_images(parts, pixels)
    assert latents.shape == (1, 16, 4, 6)
    assert_close(latents, (mean - 0.1159) * 0.3611)
    # Undone as the pipeline does it; a last bit lost there and back is more than this in the image.
    undone = latents / 0.3611 + 0.1159
    assert_close(undone, mean)
    with torch.no_grad():
        decoded = parts.vae.decode(undone).sample.clamp(-1, 1)
    assert_close(FLUX.decode(parts, latents), decoded, atol=1e-5, rtol=0)


def test_the_sizes_of_an_image_are_no_condition():
    assert FLUX.size_condition(Geometry((100, 50), (3, 4), (64, 32))) == {}


def test_guidance_of_the_setting_is_embedded(parts):
    x_t, t, conditions = normal(1, 16, 4, 6), torch.tensor([0.4]), encoded(parts, ["cat"])
    for scale in (1.0, 3.5):
        parts.denoising["guidance_scale"] = scale
        with torch.no_grad():
            ours = FLUX.denoise(parts, x_t, t, conditions)
            theirs = parts.backbone(
                hidden_states=packed(x_t),
                timestep=t,
                guidance=torch.tensor([scale]),
                encoder_hidden_states=conditions[0]["t5"][None],
                pooled_projections=conditions[0]["pooled"][None],
                txt_ids=torch.zeros(32, 3),
                img_ids=positions(4, 6),
            ).sample
        assert torch.equal(ours, unpacked(theirs, 4, 6))


def test_times_are_not_rounded_to_the_precision_of_the_network(parts):
    seen = []
    parts.backbone.to(torch.bfloat16)
    parts.backbone.time_text_embed.time_proj.register_forward_hook(lambda module, arguments, output: seen.append(arguments[0]))
    t = torch.tensor([0.70112, 0.00317])
    parts.denoising["guidance_scale"] = 3.51
    with torch.no_grad():
        prediction = FLUX.denoise(parts, normal(2, 16, 4, 4), t, encoded(parts, ["cat", "dog"]))
    assert prediction.dtype == torch.float32
    assert_close(seen[0], 1000 * t, atol=0, rtol=1e-6)
    assert_close(seen[1], torch.full((2,), 3510.0), atol=0, rtol=1e-6)
    assert not parts.backbone.time_text_embed._forward_pre_hooks


def test_a_network_in_half_precision_denoises_float_latents(parts):
    x_t, conditions = normal(1, 16, 8, 8), encoded(parts, ["cat"])
    with torch.no_grad():
        exact = FLUX.denoise(parts, x_t, torch.tensor([0.5]), conditions)
        parts.backbone.to(torch.bfloat16)
        rounded = FLUX.denoise(parts, x_t, torch.tensor([0.5]), conditions)
    assert rounded.dtype == torch.float32
    assert_close(rounded, exact, atol=0.1, rtol=0.1)


def test_gradient_checkpointing_changes_nothing(parts):
    x_t, t, conditions = normal(2, 16, 4, 6), torch.tensor([0.3, 0.8]), encoded(masked(parts), ["cat", "a longer one"])
    parts.backbone.requires_grad_(True)

    def gradient() -> torch.Tensor:
        parts.backbone.zero_grad()
        FLUX.denoise(parts, x_t, t, conditions).square().mean().backward()
        return parts.backbone.single_transformer_blocks[0].proj_mlp.weight.grad.clone()

    plain = gradient()
    parts.backbone.train()
    parts.backbone.enable_gradient_checkpointing()
    assert_close(gradient(), plain, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("make", [lambda parts: parts, schnell])
def test_one_euler_step_through_denoise_is_one_step_of_the_pipeline(parts, make):
    parts = make(parts)
    assert parts.kind == "velocity" and isinstance(parts.path, diffusion.FlowPath)
    parts.denoising["guidance_scale"] = 2.5
    seen: list[torch.Tensor] = []
    pipe = flux_pipeline_of(parts)
    pipe(
        "a star",
        width=64,
        height=48,
        num_inference_steps=5,
        guidance_scale=2.5,
        max_sequence_length=32,
        output_type="latent",
        generator=torch.Generator().manual_seed(7),
        callback_on_step_end=lambda pipe, step, timestep, values: seen.append(values["latents"].clone()) or values,
    )
    sigmas = pipe.scheduler.sigmas
    assert sigmas[0] == 1 and sigmas[-1] == 0
    for step in range(1, 5):
        before, after = unpacked(seen[step - 1], 6, 8), unpacked(seen[step], 6, 8)
        with torch.no_grad():
            velocity = FLUX.denoise(parts, before, sigmas[step][None], encoded(parts, ["a star"]))
        assert_close(before + (sigmas[step + 1] - sigmas[step]) * velocity, after, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", [lambda parts: parts, schnell])
@pytest.mark.parametrize("cfg_scale", [1.0, 4.0])
def test_a_preview_is_the_pipelines_image(parts, make, cfg_scale):
    parts = make(parts)
    requests = [
        Preview("a red star", width=64, height=48, seed=11, steps=4, cfg_scale=cfg_scale, guidance=2.0),
        Preview("a blue ring", negative_prompt="ugly", width=64, height=48, seed=12, steps=4, cfg_scale=cfg_scale, guidance=2.0),
    ]
    ours = FLUX.render(parts, requests)
    for image, one in zip(ours, requests):
        theirs = flux_pipeline_of(parts)(
            one.prompt,
            negative_prompt=one.negative_prompt,
            true_cfg_scale=cfg_scale,
            guidance_scale=2.0,
            max_sequence_length=32,
            width=64,
            height=48,
            num_inference_steps=4,
            generator=torch.Generator().manual_seed(one.seed),
            output_type="pt",
        ).images[0]
        assert_close(FLUX.render(parts, [one])[0] / 2 + 0.5, theirs, atol=1e-5, rtol=0)
        assert_close(image / 2 + 0.5, theirs, atol=5e-5, rtol=0)


def test_a_preview_hides_the_padding_of_prompts_and_negative_prompts(parts):
    parts = masked(parts)
    requests = [
        Preview("a red star at the top", negative_prompt="ugly", width=64, height=48, seed=1, steps=3, cfg_scale=3.0),
        Preview("cat", width=64, height=48, seed=2, steps=3, cfg_scale=3.0),
    ]
    together = FLUX.render(parts, requests)
    for index, one in enumerate(requests):
        # The same by hand: two predictions a step, each with the caption's own tokens alone.
        pipe = flux_pipeline_of(parts)
        mu = 0.5 + (12 - 256) * (1.15 - 0.5) / (4096 - 256)
        pipe.scheduler.set_timesteps(sigmas=[1.0, 2 / 3, 1 / 3], mu=mu)
        parts.denoising["guidance_scale"] = one.guidance
        x = torch.randn((1, 16, 6, 8), generator=torch.Generator().manual_seed(one.seed))
        positive, negative = encoded(parts, [one.prompt, one.negative_prompt])
        for now, after in zip(pipe.scheduler.sigmas, pipe.scheduler.sigmas[1:]):
            with torch.no_grad():
                toward, away = (FLUX.denoise(parts, x, now[None], [text]) for text in (positive, negative))
            x = x + (after - now) * (away + 3.0 * (toward - away))
        assert_close(together[index], FLUX.decode(parts, x)[0], atol=1e-4, rtol=0)
    assert not parts.backbone._forward_pre_hooks


def test_guidance_of_a_preview_is_its_own(parts):
    one = Preview("cat", width=32, height=32, seed=5, steps=2, cfg_scale=1.0)
    assert not torch.equal(FLUX.render(parts, [one]), FLUX.render(parts, [replace(one, guidance=1.0)]))
    parts.denoising["guidance_scale"] = 9.0
    assert torch.equal(FLUX.render(parts, [one]), FLUX.render(FLUX.tiny(), [one]))


def test_samplers_of_noise_schedules_and_sides_off_the_grid_are_refused(parts):
    with pytest.raises(OptionError, match="ddim cannot render a flow-matching model; take auto, euler"):
        FLUX.preview(parts, [Preview("cat", width=32, height=32, steps=2, sampler="ddim")])
    with pytest.raises(ValueError, match="40 x 64 are not multiples of 16"):
        FLUX.preview(parts, [Preview("cat", width=40, height=64)])


def test_the_full_size_networks_get_adapters_on_kohyas_layers():
    with torch.device("meta"):
        made = {name: part.make(read_json(loading.DEV / part.folder / "config.json", "")) for name, part in loading.SPEC.parts.items()}
    full = replace(FLUX.tiny(), backbone=made["backbone"], text_encoders={"te1": made["te1"], "te3": made["te3"]})
    targets = FLUX.adapter_targets(full, conv=False)
    # 19 double blocks of 14 linear layers and 38 single blocks of 6; kohya counts packed q, k, v as one.
    assert {name: len(layers) for name, layers in targets.items()} == {"backbone": 19 * 14 + 38 * 6, "te1": 72, "te3": 168}
    assert {layer.rsplit(".", 1)[-1] for layer in targets["te3"]} == {"q", "k", "v", "o", "wi_0", "wi_1", "wo"}
    assert FLUX.adapter_targets(full, conv=True) == targets
