"""Chroma beside diffusers: the network's call, the pipeline, texts of different lengths, and where padding is hidden."""

import pytest
import torch
from diffusers import ChromaPipeline
from transformers import T5EncoderModel

from sd_scripts.families import family as family_of
from sd_scripts.families.common.double_stream import positions
from sd_scripts.families.common.packing import packed, unpacked
from sd_scripts.families.common.samplers import scheduler_for
from sd_scripts.library.core.protocols import Parts, Preview

CHROMA = family_of("chroma")
CAPTIONS = ["a cat", "a far longer caption"]


@pytest.fixture(scope="module")
def parts() -> Parts:
    return CHROMA.tiny()


@pytest.fixture()
def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 16, 8, 12), torch.rand(2)


def test_the_network_is_called_as_diffusers_calls_it(parts, inputs):
    x, t = inputs
    conditions = CHROMA.encode_prompts(parts, CAPTIONS)
    with torch.no_grad():
        for row, condition in enumerate(conditions):
            text = condition["t5"]
            direct = parts.backbone(
                hidden_states=packed(x[row : row + 1]),
                timestep=t[row : row + 1],
                encoder_hidden_states=text[None],
                txt_ids=torch.zeros(len(text), 3),
                img_ids=positions(8, 12),
                attention_mask=torch.ones(1, len(text) + 24, dtype=torch.bool),
                return_dict=False,
            )[0]
            found = CHROMA.denoise(parts, x[row : row + 1], t[row : row + 1], [condition])
            assert torch.allclose(found, unpacked(direct, 8, 12), atol=1e-5)


def test_texts_of_different_lengths_in_a_batch_are_as_each_alone(parts, inputs):
    x, t = inputs
    conditions = CHROMA.encode_prompts(parts, CAPTIONS)
    assert len(conditions[0]["t5"]) != len(conditions[1]["t5"])
    with torch.no_grad():
        together = CHROMA.denoise(parts, x, t, conditions)
        alone = torch.cat([CHROMA.denoise(parts, x[row : row + 1], t[row : row + 1], conditions[row : row + 1]) for row in (0, 1)])
    assert torch.isfinite(together).all() and torch.allclose(together, alone, atol=1e-5)


def test_a_text_has_the_captions_tokens_and_one_of_padding_that_saw_no_other(parts):
    tokenizer, encoder = parts.tokenizers["te3"], parts.text_encoders["te3"]
    assert isinstance(encoder, T5EncoderModel)
    tokens = tokenizer(CAPTIONS[0], padding="max_length", max_length=32, return_tensors="pt")
    own = int(tokens.attention_mask.sum())
    with torch.no_grad():
        wanted = encoder(tokens.input_ids, attention_mask=tokens.attention_mask).last_hidden_state[0, : own + 1]
        unmasked = encoder(tokens.input_ids).last_hidden_state[0, : own + 1]
        (found,) = CHROMA.encode_prompts(parts, CAPTIONS[:1])
    assert torch.allclose(found["t5"], wanted, atol=1e-6) and not torch.allclose(unmasked, wanted, atol=1e-3)


@pytest.mark.parametrize("cfg_scale", [1.0, 4.0])
def test_a_preview_is_what_the_pipeline_draws_from_the_same_texts(parts, cfg_scale):
    """diffusers' pipeline makes its mask of ones and zeros in the precision of the texts and adds it to attention, which hides nothing; a
    mask that hides nothing because there is nothing to hide is the same in both."""
    request = Preview(CAPTIONS[1], "blur", 96, 64, seed=3, steps=4, cfg_scale=cfg_scale)
    prompt, negative = (CHROMA.encode_prompts(parts, [text])[0]["t5"][None] for text in (request.prompt, request.negative_prompt))
    pipeline = ChromaPipeline(scheduler_for("auto", parts.scheduler_config), parts.vae, None, None, parts.backbone)
    pipeline.set_progress_bar_config(disable=True)
    with torch.no_grad():
        wanted = pipeline(
            prompt_embeds=prompt,
            prompt_attention_mask=torch.ones(prompt.shape[:2], dtype=torch.bool),
            negative_prompt_embeds=negative,
            negative_prompt_attention_mask=torch.ones(negative.shape[:2], dtype=torch.bool),
            guidance_scale=cfg_scale,
            width=96,
            height=64,
            num_inference_steps=4,
            generator=[torch.Generator().manual_seed(3)],
            output_type="pt",
        ).images
        found = CHROMA.render(parts, [request])
    assert torch.allclose(found, 2 * wanted - 1, atol=1e-4)


def test_times_reach_their_embedding_in_full_precision(inputs):
    x, t = inputs
    parts = CHROMA.tiny()
    seen = []
    parts.backbone.time_text_embed.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    parts.backbone.to(torch.bfloat16)
    with torch.no_grad():
        found = CHROMA.denoise(parts, x, t, CHROMA.encode_prompts(parts, CAPTIONS))
    assert torch.equal(torch.cat(seen), 1000 * t) and found.dtype == torch.float32 and torch.isfinite(found).all()
