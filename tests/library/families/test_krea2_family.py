"""Krea 2 beside diffusers: the texts, the network's call, the pipeline, batches of mixed texts, the shift, Turbo."""

import math

import pytest
import torch
from diffusers import Krea2Pipeline, Krea2Transformer2DModel

from sd_scripts.families import family as family_of
from sd_scripts.families.common.samplers import scheduler_for
from sd_scripts.families.krea2.loading import TAPS
from sd_scripts.families.krea2.model import AFTER, BEFORE
from sd_scripts.families.krea2.options import Krea2FlowObjectiveOptions
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.library.objectives.times import resolution_shift

KREA = family_of("krea2")
CAPTIONS = ["a cat", "a far longer caption", ""]


@pytest.fixture(scope="module")
def parts() -> Parts:
    """Tables and gates of modulation are zero as they are made, and hide what the blocks do."""
    made = KREA.tiny()
    rng = torch.Generator().manual_seed(1)
    for name, tensor in made.backbone.named_parameters():
        if "scale_shift_table" in name or "norm" in name:
            tensor.data.normal_(0, 0.3, generator=rng)
    return made


def pipeline_of(parts: Parts, is_distilled: bool = False) -> Krea2Pipeline:
    """With diffusers' own network, of the same weights: ours has other norms."""
    network = Krea2Transformer2DModel.from_config(parts.backbone.config)
    network.load_state_dict(parts.backbone.state_dict())
    made = Krea2Pipeline(
        scheduler_for("auto", parts.scheduler_config),
        parts.vae,
        parts.text_encoders["te1"],
        parts.tokenizers["te1"],
        network.eval(),
        is_distilled=is_distilled,
    )
    made.set_progress_bar_config(disable=True)
    return made


def test_captions_are_read_as_diffusers_reads_them(parts):
    """Whose padding is hidden, and stands between a caption and the end of the template."""
    pipeline = pipeline_of(parts)
    assert (pipeline.prompt_template_encode_prefix, pipeline.prompt_template_encode_suffix) == (BEFORE, AFTER)
    assert len(parts.tokenizers["te1"](BEFORE).input_ids) == pipeline.prompt_template_encode_start_idx
    assert len(parts.tokenizers["te1"](AFTER).input_ids) == pipeline.prompt_template_encode_num_suffix_tokens
    assert pipeline.text_encoder_select_layers == TAPS
    with torch.no_grad():
        for caption, found in zip(CAPTIONS, KREA.encode_prompts(parts, CAPTIONS), strict=True):
            wanted, seen = pipeline.encode_prompt(caption, max_sequence_length=48)
            assert torch.allclose(found["text"].unflatten(-1, (12, -1)), wanted[0][seen[0]], atol=1e-5)


def test_a_caption_that_is_too_long_is_cut_where_diffusers_cuts_it(parts):
    pipeline, limit = pipeline_of(parts), parts.settings["max_token_length"]
    try:
        parts.settings["max_token_length"] = 16
        with torch.no_grad():
            (found,) = KREA.encode_prompts(parts, ["a caption that is very much longer than what there is room for"])
            wanted, seen = pipeline.encode_prompt("a caption that is very much longer than what there is room for", max_sequence_length=16)
    finally:
        parts.settings["max_token_length"] = limit
    assert seen.all() and torch.allclose(found["text"].unflatten(-1, (12, -1)), wanted[0], atol=1e-5)


def test_the_network_is_called_as_diffusers_calls_it(parts):
    x, t = torch.randn(1, 16, 8, 12), torch.rand(1)
    (condition,) = KREA.encode_prompts(parts, CAPTIONS[:1])
    pipeline = pipeline_of(parts)
    with torch.no_grad():
        texts, seen = pipeline.encode_prompt(CAPTIONS[0], max_sequence_length=48)
        wanted = pipeline.transformer(
            hidden_states=pipeline._pack_latents(x, 1, 16, 8, 12),
            encoder_hidden_states=texts,
            timestep=t,
            position_ids=pipeline.prepare_position_ids(48, 4, 6, x.device),
            encoder_attention_mask=seen,
        ).sample
        found = KREA.denoise(parts, x, t, [condition])
    assert torch.allclose(found, pipeline._unpack_latents(wanted, 64, 96)[:, :, 0], atol=1e-5)


def test_texts_of_different_lengths_in_a_batch_are_as_each_alone(parts):
    x, t = torch.randn(3, 16, 8, 12), torch.rand(3)
    conditions = KREA.encode_prompts(parts, CAPTIONS)
    assert len({len(condition["text"]) for condition in conditions}) == 3
    with torch.no_grad():
        together = KREA.denoise(parts, x, t, conditions)
        alone = torch.cat([KREA.denoise(parts, x[row : row + 1], t[row : row + 1], conditions[row : row + 1]) for row in range(3)])
    assert torch.allclose(together, alone, atol=1e-5)


@pytest.mark.parametrize(("cfg_scale", "is_distilled"), [(1.0, False), (4.0, False), (4.0, True)])
def test_a_preview_is_what_the_pipeline_draws(parts, cfg_scale, is_distilled):
    """Krea's guidance is one less than ours; a distilled model has none, and one shift."""
    request = Preview(CAPTIONS[1], "blur", 96, 64, seed=3, steps=4, cfg_scale=cfg_scale)
    try:
        parts.denoising["is_distilled"] = is_distilled
        with torch.no_grad():
            wanted = pipeline_of(parts, is_distilled)(
                prompt=request.prompt,
                negative_prompt=request.negative_prompt,
                guidance_scale=0.0 if is_distilled else cfg_scale - 1,
                width=96,
                height=64,
                num_inference_steps=4,
                generator=torch.Generator().manual_seed(3),
                output_type="pt",
                max_sequence_length=48,
            ).images
            found = KREA.render(parts, [request])
    finally:
        parts.denoising["is_distilled"] = False
    assert torch.allclose(found, 2 * wanted - 1, atol=1e-4)


@pytest.mark.parametrize("sides", [(32, 32), (128, 128), (96, 160)])
def test_training_times_are_shifted_as_sampling(parts, sides):
    tokens = sides[0] * sides[1] // 4
    mu = 0.5 + (tokens - 256) * (1.15 - 0.5) / (6400 - 256)
    assert resolution_shift(sides, Krea2FlowObjectiveOptions.size_shifts["krea2_shift"]) == pytest.approx(math.exp(mu), rel=1e-6)


def test_times_reach_their_embedding_in_full_precision():
    parts, seen, t = KREA.tiny(), [], torch.rand(2)
    parts.backbone.time_embed.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    conditions = KREA.encode_prompts(parts, CAPTIONS[:1] * 2)
    parts.backbone.to(torch.bfloat16)
    with torch.no_grad():
        found = KREA.denoise(parts, torch.randn(2, 16, 8, 8), t, conditions)
    assert torch.equal(torch.cat(seen), t) and found.dtype == torch.float32 and torch.isfinite(found).all()
