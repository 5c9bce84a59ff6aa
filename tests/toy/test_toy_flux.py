"""The toy FLUX base: FLUX's own classes, words that T5 tells apart, a colour it has never seen."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel, T5Tokenizer

from sd_scripts.toy import autoencoder, build, flux, measure, pretraining, reading, worlds
from sd_scripts.toy.build import BuildPlan
from sd_scripts.toy.render import render_with
from sd_scripts.toy.sharing import load_pipeline, load_vae
from sd_scripts.toy.tokens import T5_MAX_TOKENS, WORDS, clip_tokenizer, t5_tokenizer, zimage_tokenizer
from tests.toy.stored import assert_stored

FOLDER = build.BASES / "flux"
COLORS, SIZES = worlds.colors_of("flux"), worlds.sizes_of("flux")


@pytest.fixture(scope="module")
def pipeline():
    return load_pipeline(FOLDER)


def _read(pipeline, captions, num_tokens):
    # Pooled text and text, as the recipe's reader makes them with the stored encoders.
    reader = flux.FluxReader(0)
    reader.clip, reader.t5 = pipeline.text_encoder, pipeline.text_encoder_2
    rows = reader.remembered(num_tokens)(captions)
    return rows[:, 0], rows[:, 1:]


def test_the_base_has_the_parts_of_flux_dev(pipeline):
    classes = {
        "transformer": FluxTransformer2DModel,
        "text_encoder": CLIPTextModel,
        "text_encoder_2": T5EncoderModel,
        "vae": AutoencoderKL,
        "scheduler": FlowMatchEulerDiscreteScheduler,
    }
    for name, expected in classes.items():
        assert type(getattr(pipeline, name)) is expected
    config = pipeline.transformer.config
    assert config.guidance_embeds
    assert config.in_channels == 4 * pipeline.vae.config.latent_channels
    assert sum(config.axes_dims_rope) == config.attention_head_dim
    assert config.joint_attention_dim == pipeline.text_encoder_2.config.d_model
    assert config.pooled_projection_dim == pipeline.text_encoder.config.hidden_size
    assert min(config.num_layers, config.num_single_layers) >= 2
    assert (pipeline.vae.config.shift_factor, pipeline.vae.config.scaling_factor) == (0.0, 1.0)
    assert pipeline.scheduler.config.use_dynamic_shifting


def test_the_base_is_under_8_mb():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 8_000_000


@pytest.mark.parametrize("num", [6, pytest.param(24, marks=pytest.mark.long)])
def test_the_base_draws_what_its_record_says(pipeline, num):
    """That it draws old prompts and no stars, test_toy_bases measures."""
    scores = json.loads((FOLDER / "BUILD.json").read_text(encoding="utf-8"))["scores"]
    assert scores["old"]["all"] >= 0.95
    assert scores["held_out"]["all"] >= 0.9
    assert scores["star"]["shape"] < 0.05
    assert scores["teal"]["color"] < 0.05
    render = render_with(pipeline)
    for kind, right, least, most in (("held_out", "all", 5 / 6, 1), ("teal", "color", 0, 1 / 24)):
        measured = measure.obedience(render, measure.prompts(kind, num, 6, COLORS), SIZES)
        assert least <= getattr(measured, right) <= most, (kind, measured)


def test_colour_and_place_are_obeyed_at_any_embedded_guidance_and_with_512_text_tokens(pipeline):
    scenes, images = [], []
    for number, task in enumerate(measure.prompts("old", 6, 7, COLORS)):
        rng = torch.Generator().manual_seed(task.seed)
        result = pipeline(task.prompt, width=128, height=128, num_inference_steps=12, guidance_scale=1.0 + number / 2, generator=rng)
        images += result.images
        scenes.append(task.scene)
    scores = measure.score(scenes, images)
    assert min(scores.color, scores.place) >= 5 / 6, scores


@torch.no_grad()
def test_training_feeds_the_transformer_as_the_pipeline_does(pipeline):
    captions = ["A red circle at the left", ""]
    for num_tokens in (T5_MAX_TOKENS, 70):
        theirs, their_pooled, _ = pipeline.encode_prompt(captions, None, max_sequence_length=num_tokens)
        our_pooled, ours = _read(pipeline, captions, num_tokens)
        assert torch.equal(ours, theirs)
        assert torch.equal(our_pooled, their_pooled)
    drawn = pipeline(
        captions[0], width=80, height=48, num_inference_steps=1, output_type="latent", generator=torch.Generator().manual_seed(1)
    )
    # One step of Euler's method from t = 1 to 0 shows the velocity that the pipeline got.
    noise = torch.randn((1, 16, 6, 10), generator=torch.Generator().manual_seed(1))
    pooled, text = _read(pipeline, captions[:1], 512)
    with torch.no_grad():
        v = pipeline.transformer(
            hidden_states=flux.packed(noise),
            timestep=torch.ones(1),
            guidance=torch.full((1,), 3.5),
            encoder_hidden_states=text,
            pooled_projections=pooled,
            txt_ids=torch.zeros(512, 3),
            img_ids=flux.positions(6, 10),
        ).sample
    torch.testing.assert_close(drawn.images, flux.packed(noise) - v, atol=1e-5, rtol=1e-5)


def test_t5_knows_each_word_as_one_token_small_and_capitalised():
    tokenizer = t5_tokenizer()
    for word in WORDS:
        for written in (word, word.capitalize()):
            assert tokenizer.tokenize(written) == [f"▁{written}"]
    assert tokenizer.tokenize("red circle, top") == ["▁red", "▁circle", ",", "▁top"]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2)


def test_words_that_t5_does_not_know_stay_apart():
    tokenizer = t5_tokenizer()
    unknown = ["zug", "guz", "Zug", "reddish", "starry", "Äpfel", "x1", "x2", "don't", "dont"]
    ids = [tuple(tokenizer(word).input_ids) for word in unknown]
    assert len(set(ids)) == len(unknown)
    for text, numbers in zip(unknown, ids, strict=True):
        assert tokenizer.unk_token_id not in numbers
        assert numbers[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(numbers, skip_special_tokens=True) == text
    assert tokenizer.unk_token_id in tokenizer("日本").input_ids


def test_the_stored_tokenizer_is_the_one_in_code(pipeline):
    text = "A teal hexagon zug at the top left"
    expected = t5_tokenizer()(text, padding="max_length", truncation=True).input_ids
    assert len(expected) == T5_MAX_TOKENS
    for kind in (T5Tokenizer, AutoTokenizer):
        stored = kind.from_pretrained(FOLDER / "tokenizer_2", local_files_only=True)
        assert isinstance(stored, T5Tokenizer)
        assert stored(text, padding="max_length", truncation=True).input_ids == expected
        assert len(stored) == pipeline.text_encoder_2.config.vocab_size


def test_tokenizers_are_the_same_in_every_process():
    """Those of all families: Qwen's is made by what makes Z-Image's."""
    code = "from sd_scripts.toy import tokens as t\nfor made in (t.t5_tokenizer(), t.clip_tokenizer(), t.zimage_tokenizer()):\n"
    code += "    print(sorted(made.get_vocab().items()))"
    environment = {"PYTHONHASHSEED": "8", "HF_HUB_OFFLINE": "1", "PYTHONIOENCODING": "utf-8"}
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, encoding="utf-8", env=environment)
    here = (t5_tokenizer(), clip_tokenizer(), zimage_tokenizer())
    assert result.stdout.splitlines() == [str(sorted(made.get_vocab().items())) for made in here]


def test_a_short_build_leaves_a_pipeline_that_flux_loads(tmp_path, monkeypatch):
    monkeypatch.setattr(flux, "ReadingSettings", lambda: reading.ReadingSettings(num_steps=2))
    monkeypatch.setattr(flux, "SETTINGS", replace(flux.SETTINGS, num_late_steps=1))
    plan = BuildPlan("flux", tmp_path / "flux", seed=3, num_steps=2, vae=FOLDER / "vae", num_prompts=1)
    record = build.build(plan)
    assert record["scores"].keys() == {"old", "held_out", "star", "teal"}
    assert record["settings"]["num_steps"] == 2
    built = FluxPipeline.from_pretrained(plan.out, local_files_only=True, dtype=torch.float32)
    text = ["a red circle at the left"]
    assert built(text, width=64, height=48, num_inference_steps=1, max_sequence_length=T5_MAX_TOKENS).images[0].size == (64, 48)
    again = flux.train_flux(load_vae(plan.vae), replace(flux.SETTINGS, num_steps=2), plan.seed)
    assert_stored(built.components, again.components)


def test_batches_have_capitals_long_texts_and_guidance_as_often_as_set():
    settings = replace(flux.SETTINGS, num_steps=60, batch_size=4)
    pools = pretraining.encode_world(pretraining.moments_of(autoencoder.new_vae(0).eval()), 8, 0, worlds.trained(COLORS))
    drawn = torch.cat([batch.conditions for batch in pretraining.batches(pools, settings, 0, flux.drawn_numbers(settings))])
    guidance, capital, num_tokens = drawn.unbind(dim=1)
    assert 1 <= guidance.min() < 1.2
    assert 3.8 < guidance.max() <= 4
    assert 0.04 < capital.mean() < 0.17
    assert 0.03 < (num_tokens > T5_MAX_TOKENS).float().mean() < 0.15
    assert num_tokens.min() == T5_MAX_TOKENS
    assert num_tokens.max() <= 8 * T5_MAX_TOKENS
