"""Anima beside diffusers: the texts, the network's call, the modular pipeline, its folders, what does not fit together."""

import copy
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, ModularPipeline
from diffusers.modular_pipelines.anima.encoders import AnimaTextEncoderStep

from sd_scripts.families import family as family_of
from sd_scripts.families.anima.loading import LOADER
from sd_scripts.families.anima.options import AnimaModelOptions
from sd_scripts.families.common.qwen3 import tiny_qwen3
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import pipeline_file
from tests.anima_in_diffusers import drawn, pipeline_of, transformer_of, without_torchvision

ANIMA = family_of("anima")
CAPTIONS = ["a cat", "a far longer caption", ""]


@pytest.fixture(scope="module")
def parts() -> Parts:
    return ANIMA.tiny()


def test_captions_are_read_as_diffusers_reads_them(parts):
    """Which pads a batch and hides the padding; of an empty caption it hides all."""
    pipeline, conditioner = pipeline_of(parts), parts.text_encoders["te2"]
    with torch.no_grad():
        found = ANIMA.encode_prompts(parts, CAPTIONS)
        given = AnimaTextEncoderStep.encode_prompt(pipeline, CAPTIONS, prepare_unconditional_embeds=False, max_sequence_length=32)
        wanted = conditioner(
            given["qwen_prompt_embeds"],
            given["t5_input_ids"],
            target_attention_mask=given["t5_attention_mask"],
            source_attention_mask=given["qwen_attention_mask"],
        )
    texts = torch.stack([one["text"] for one in found])
    assert texts.shape == (3, 32, 24) and torch.allclose(texts, wanted, atol=1e-5)
    assert texts.any(dim=2).sum(dim=1).tolist() == [len(parts.tokenizers["te2"](caption).input_ids) for caption in CAPTIONS]


def test_a_caption_that_is_too_long_is_cut_where_diffusers_cuts_it(parts):
    """At its last token T5 has an end all the same."""
    caption = "a caption that is very much longer than what there is room for"
    with torch.no_grad():
        (found,) = ANIMA.encode_prompts(parts, [caption])
        given = AnimaTextEncoderStep.encode_prompt(pipeline_of(parts), caption, prepare_unconditional_embeds=False, max_sequence_length=32)
        wanted = parts.text_encoders["te2"](given["qwen_prompt_embeds"], given["t5_input_ids"])
    assert found["text"].shape == (32, 24) and torch.allclose(found["text"], wanted[0], atol=1e-5)


def test_the_network_is_called_as_diffusers_calls_it(parts):
    x, t = torch.randn(3, 16, 8, 12), torch.rand(3)
    conditions = ANIMA.encode_prompts(parts, CAPTIONS)
    texts = torch.stack([one["text"] for one in conditions])
    with torch.no_grad(), without_torchvision():
        wanted = transformer_of(parts)(x[:, :, None], t, texts, padding_mask=torch.zeros(1, 1, 64, 96), return_dict=False)[0]
        found = ANIMA.denoise(parts, x, t, conditions)
    assert found.std() > 0.1 and torch.allclose(found, wanted[:, :, 0], atol=1e-5)


@pytest.mark.parametrize("cfg_scale", [1.0, 4.0])
def test_a_preview_is_what_the_pipeline_draws(parts, cfg_scale):
    request = Preview(CAPTIONS[1], "", 96, 64, seed=3, steps=4, cfg_scale=cfg_scale)
    wanted = drawn(
        pipeline_of(parts, cfg_scale),
        prompt=request.prompt,
        width=96,
        height=64,
        num_inference_steps=4,
        generator=torch.Generator().manual_seed(3),
        max_sequence_length=32,
    )
    assert torch.allclose(ANIMA.render(parts, [request]), wanted, atol=1e-4)


def test_times_reach_their_embedding_in_full_precision():
    parts, seen, t = ANIMA.tiny(), [], torch.rand(2)
    parts.backbone.time_embed.time_proj.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    conditions = ANIMA.encode_prompts(parts, CAPTIONS[:1] * 2)
    parts.backbone.to(torch.bfloat16)
    with torch.no_grad():
        found = ANIMA.denoise(parts, torch.randn(2, 16, 8, 8), t, conditions)
    assert torch.equal(torch.cat(seen), t) and found.dtype == torch.float32 and torch.isfinite(found).all()


def test_an_image_may_be_wider_than_diffusers_counts_positions(tmp_path):
    parts = ANIMA.tiny()
    ANIMA.save(parts, tmp_path / "model", "diffusers", None, {})
    wide, conditions = torch.randn(1, 16, 4, 264), ANIMA.encode_prompts(parts, CAPTIONS[:1])
    with torch.no_grad():
        again = loaded(pretrained_model_name_or_path=str(tmp_path / "model"))
        found = ANIMA.denoise(again, wide, torch.tensor([0.5]), conditions)
        narrow = ANIMA.denoise(again, wide[..., :200], torch.tensor([0.5]), conditions)
        assert torch.equal(narrow, ANIMA.denoise(parts, wide[..., :200], torch.tensor([0.5]), conditions))
    assert found.shape == wide.shape and torch.isfinite(found).all()


def loaded(**given: str) -> Parts:
    return LOADER.load(AnimaModelOptions(**given), torch.device("cpu"), torch.float32)


def test_folders_of_blocks_go_both_ways(parts, tmp_path):
    """diffusers writes one without the file of a pipeline, and reads the one that is written here."""
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    pipeline = pipeline_of(parts)
    pipeline.save_pretrained(str(theirs), overwrite_modular_index=True)
    assert pipeline_file(theirs) == theirs / "modular_model_index.json"
    ANIMA.save(loaded(pretrained_model_name_or_path=str(theirs)), ours, "diffusers", None, {})
    again = ModularPipeline.from_pretrained(str(ours), local_files_only=True)
    again.load_components(dtype=torch.float32)
    again.set_progress_bar_config(disable=True)
    called = {"prompt": "a cat", "negative_prompt": "", "width": 64, "height": 64, "num_inference_steps": 2, "max_sequence_length": 32}
    request = Preview("a cat", "", 64, 64, seed=3, steps=2, cfg_scale=4.0)
    wanted = drawn(again, **called, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(ANIMA.render(parts, [request]), wanted, atol=1e-4)


def refused(folder: Path, parts: Parts) -> str:
    ANIMA.save(parts, folder, "diffusers", None, {})
    with pytest.raises(OptionError) as raised:
        loaded(pretrained_model_name_or_path=str(folder))
    return str(raised.value)


def test_what_does_not_fit_together_is_said_in_a_sentence(parts, tmp_path):
    odd = copy.copy(parts)
    odd.text_encoders = {**parts.text_encoders, "te1": tiny_qwen3(parts.tokenizers["te1"], width=48)}
    odd.vae = AutoencoderKLQwenImage(base_dim=8, z_dim=12, dim_mult=[1, 2, 4, 4], num_res_blocks=1, temperal_downsample=[False, True, True])
    said = refused(tmp_path / "model", odd)
    assert "the text encoder makes rows of 48 numbers, but the text conditioner takes 32; Anima reads with Qwen3-0.6B" in said
    assert "the transformer takes latents of 16 channels, but those of the VAE have 12" in said


def test_a_model_of_the_same_class_for_films_is_refused(parts, tmp_path):
    config = {**parts.backbone.config, "extra_pos_embed_type": "learnable", "max_size": (4, 8, 8)}
    odd = copy.copy(parts)
    odd.backbone = type(parts.backbone).from_config(config)
    assert "it is another model of the Cosmos family, for films" in refused(tmp_path / "model", odd)
