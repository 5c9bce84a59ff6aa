"""The toy SD base: how it is shown the world without teal, and that its training encodes what its pipeline encodes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline

from sd_scripts.toy import autoencoder, build, pretraining, sd, worlds
from sd_scripts.toy.build import BuildPlan
from sd_scripts.toy.pretraining import OTHER_COLOR_WORDS, OTHER_WORDS, BaseSettings
from sd_scripts.toy.sd import SdParts, SdSettings
from sd_scripts.toy.sharing import load_pipeline, load_vae
from sd_scripts.toy.worlds import Scene
from tests.toy.stored import assert_stored

SCENE = Scene("circle", "red", "top left")


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    out = tmp_path_factory.mktemp("bases") / "sd"
    return BuildPlan("sd", out, seed=3, num_steps=2, vae=build.existing_vae("sd"), num_prompts=1)


@pytest.fixture(scope="module")
def record(plan):
    return build.build(plan)


def test_a_build_leaves_a_pipeline_of_the_v_prediction_family(plan, record):
    pipeline = StableDiffusionPipeline.from_pretrained(plan.out, local_files_only=True, dtype=torch.float32)
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    assert pipeline.scheduler.config.rescale_betas_zero_snr
    assert pipeline.unet.config.addition_embed_type is None
    assert record["settings"]["num_steps"] == 2
    assert record["scores"].keys() == {"old", "held_out", "star", "teal"}


def test_the_same_seed_builds_the_same_weights(plan, record):
    again = sd.train_sd(load_vae(plan.vae), SdSettings(num_steps=2), plan.seed)
    assert_stored(load_pipeline(plan.out).components, again.components)


def test_training_encodes_captions_as_the_pipeline_does(plan, record):
    pipeline = StableDiffusionPipeline.from_pretrained(plan.out, local_files_only=True, dtype=torch.float32)
    parts = SdParts(pipeline.unet, pipeline.text_encoder, pipeline.tokenizer, pipeline.scheduler)
    captions = ["a red circle at the left", "zwx circle", ""]
    theirs, _ = pipeline.encode_prompt(captions, torch.device("cpu"), 1, do_classifier_free_guidance=False)
    assert torch.equal(sd.encode_captions(parts, captions), theirs)


def test_the_world_without_teal_is_all_that_the_base_is_shown():
    shown = worlds.trained(worlds.KNOWN_COLORS)
    pools = pretraining.encode_world(pretraining.moments_of(autoencoder.new_vae(0).eval()), 2 * len(shown), 0, shown)
    assert {scene for pool in pools for scene in pool.scenes} == set(shown)


FRACTIONS = ("dropout_fraction", "other_word_fraction", "other_color_fraction", "short_caption_fraction")
SHORT = {template.format(**vars(SCENE)) for template in worlds.SHORT_TEMPLATES}


def _captions(settings: BaseSettings, num: int) -> list[str]:
    return [pretraining.caption(SCENE, settings, worlds.rng_for(0, number)) for number in range(num)]


def _happened(fraction: str, text: str) -> bool:
    words = set(text.replace(",", " ").split())
    return {
        "dropout_fraction": text == "",
        "other_word_fraction": bool(words & set(OTHER_WORDS)),
        "other_color_fraction": bool(words & set(OTHER_COLOR_WORDS)),
        "short_caption_fraction": text in SHORT,
    }[fraction]


@pytest.mark.parametrize("fraction", FRACTIONS)
def test_captions_change_as_often_as_the_settings_say(fraction):
    never = dict.fromkeys(FRACTIONS, 0.0)
    texts = _captions(BaseSettings(**(never | {fraction: 0.3})), 4000)
    three_deviations = 3 * (0.3 * 0.7 / 4000) ** 0.5
    assert np.mean([_happened(fraction, text) for text in texts]) == pytest.approx(0.3, abs=three_deviations)
    assert not any(_happened(fraction, text) for text in _captions(BaseSettings(**never), 200))


def test_other_words_for_colours_hold_the_new_colour_and_the_subject_and_nothing_known():
    assert {*worlds.NEW_COLORS, worlds.SUBJECT_WORD} <= set(OTHER_COLOR_WORDS)
    assert not set(worlds.KNOWN_COLORS) & set(OTHER_COLOR_WORDS)
    assert not set(worlds.BASE_SHAPES) & set(OTHER_WORDS)


def test_batches_depend_on_seed_and_step_alone_and_their_times_are_spread():
    pools = pretraining.encode_world(pretraining.moments_of(autoencoder.new_vae(0).eval()), 40, 0)
    settings = SdSettings(num_steps=4, batch_size=8)
    first, second = (list(pretraining.batches(pools, settings, 5)) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one.latents, two.latents) and torch.equal(one.noise, two.noise)
        assert one.captions == two.captions
        assert (one.u * 8).long().tolist() == list(range(8))
        assert one.conditions.shape == (8, 0)
    assert len({batch.noise.sum().item() for batch in first}) == 4


def test_training_follows_the_loss_and_ends_with_averaged_weights():
    model = torch.nn.Linear(3, 1, bias=False)
    wanted = torch.tensor([[1.0, -2.0, 3.0]])
    settings = SdSettings(num_steps=300, learning_rate=0.05, num_warmup_steps=10, weight_decay=0.0, ema_decay=0.9)
    rng = torch.Generator().manual_seed(0)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        return (model(x) - x @ wanted.T).square().mean()

    inputs = (torch.randn(16, 3, generator=rng) for _ in range(settings.num_steps))
    pretraining.train(model, loss_of, inputs, settings, "line")
    torch.testing.assert_close(model.weight.data, wanted, atol=0.02, rtol=0)
    assert not model.training and not model.weight.requires_grad


def test_a_stopped_training_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    """It stops after a step that no state was written for, which is done again."""
    monkeypatch.setattr(pretraining, "SAVE_STEPS", 3)
    settings = SdSettings(num_steps=8, learning_rate=0.05, num_warmup_steps=2)

    def trained(saved, stop_at=None, **changes):
        model = torch.nn.Linear(3, 1)
        for tensor in model.parameters():
            torch.nn.init.ones_(tensor)

        def shown():
            for step in range(settings.num_steps):
                if step == stop_at:
                    raise KeyboardInterrupt
                yield torch.randn(4, 3, generator=torch.Generator().manual_seed(step))

        pretraining.train(
            model, lambda x: (model(x) - x.sum(dim=1, keepdim=True)).square().mean(), shown(), replace(settings, **changes), "line", saved
        )
        return model.weight.data

    whole, saved = trained(None), tmp_path / "state.safetensors"
    with pytest.raises(KeyboardInterrupt):
        trained(saved, stop_at=5)
    assert saved.exists() and torch.equal(trained(saved), whole)
    assert torch.equal(trained(saved), whole), "a state near the end"
    with pytest.raises(ValueError, match="of a training with other settings"):
        trained(saved, learning_rate=0.1)
