"""Building a base: from nothing, repeatable, complete or absent. Here with a handful of steps."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionXLPipeline

from sd_scripts.toy import autoencoder, build, edits, pretraining, sdxl, worlds
from sd_scripts.toy.build import BuildPlan


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    out = tmp_path_factory.mktemp("bases") / "sdxl"
    return BuildPlan("sdxl", out, seed=3, num_steps=2, num_vae_steps=2, num_prompts=1)


@pytest.fixture(scope="module")
def record(plan):
    return build.build(plan)


def test_a_build_leaves_a_loadable_pipeline_and_its_record(plan, record):
    pipeline = StableDiffusionXLPipeline.from_pretrained(plan.out, local_files_only=True, dtype=torch.float32)
    assert pipeline.scheduler.config.prediction_type == "v_prediction"
    assert json.loads((plan.out / "BUILD.json").read_text(encoding="utf-8")) == record
    assert record["settings"]["num_steps"] == 2
    assert record["vae"]["settings"]["num_steps"] == 2
    assert record["scores"].keys() == {"old", "held_out", "star"}
    assert [path.name for path in plan.out.parent.iterdir()] == ["sdxl"]


def test_the_same_seed_builds_the_same_weights_and_the_vae_can_be_reused(plan, record, tmp_path):
    again = replace(plan, out=tmp_path / "again")
    again_record = build.build(again)
    assert again_record["scores"] == record["scores"]
    for path in plan.out.rglob("*.safetensors"):
        assert path.read_bytes() == (again.out / path.relative_to(plan.out)).read_bytes(), path.name
    reused = replace(again, seed=4, num_vae_steps=None, vae=again.out / "vae")
    assert build.build(reused)["vae"] == again_record["vae"]
    stored = "vae/diffusion_pytorch_model.safetensors"
    assert (reused.out / stored).read_bytes() == (plan.out / stored).read_bytes()
    stored = "unet/diffusion_pytorch_model.safetensors"
    assert (reused.out / stored).read_bytes() != (plan.out / stored).read_bytes()


def test_a_stored_base_can_be_measured_again(plan, record):
    path = plan.out / "BUILD.json"
    path.write_text(json.dumps(record | {"scores": None}), encoding="utf-8")
    build.score_again(plan.out, plan.num_prompts)
    assert json.loads(path.read_text(encoding="utf-8")) == record


def test_a_base_that_is_too_large_does_not_replace_the_old_one(plan, record, tmp_path, monkeypatch):
    old = tmp_path / "sdxl"
    old.mkdir()
    (old / "BUILD.json").write_text("{}")
    monkeypatch.setattr(build, "MAX_BYTES", 1_000_000)
    with pytest.raises(ValueError, match=r"at most 1 MB"):
        build.build(BuildPlan("sdxl", old, num_steps=1, vae=plan.out / "vae", num_images=8, num_prompts=1))
    assert [path.name for path in tmp_path.rglob("*")] == ["sdxl", "BUILD.json"]


def test_building_draws_nothing_from_the_global_generator():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    sdxl.new_parts(0)
    autoencoder.train_vae(autoencoder.VaeSettings(num_steps=1, batch_size=2, num_decoder_steps=1), 0)
    assert torch.equal(before, torch.random.get_rng_state())


def test_folding_the_scale_changes_latents_as_told_and_images_not_at_all():
    # In float32 how far they are apart depends on the processor: it adds in another order.
    plain, folded = autoencoder.new_vae(1).eval().double(), autoencoder.new_vae(1).eval().double()
    rng = torch.Generator().manual_seed(0)
    mean, deviation = torch.randn(16, generator=rng).double(), 0.5 + torch.rand(16, generator=rng).double()
    autoencoder.fold_scale(folded, mean, deviation)
    pixels = torch.rand(2, 3, 64, 48, generator=rng).double() * 2 - 1
    with torch.no_grad():
        before, after = plain.encode(pixels).latent_dist, folded.encode(pixels).latent_dist
        m, d = mean[:, None, None], deviation[:, None, None]
        torch.testing.assert_close(after.mean, (before.mean - m) / d, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(after.std, before.std / d, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(folded.decode(after.mean).sample, plain.decode(before.mean).sample, atol=1e-9, rtol=1e-9)


def test_the_second_round_teaches_the_decoder_and_leaves_latents_as_the_stored_encoder_has_them():
    vae, settings = autoencoder.new_vae(1).eval().requires_grad_(False), autoencoder.VaeSettings(num_decoder_steps=2, decoder_batch_size=2)
    before = {name: tensor.half().float() for name, tensor in vae.state_dict().items()}
    autoencoder.teach_decoder(vae, settings, autoencoder.any_framed_image, 0)
    same = {name for name, tensor in vae.state_dict().items() if torch.equal(tensor, before[name])}
    assert same == {name for name in before if name.startswith(("encoder.", "quant_conv."))}


def test_half_of_the_images_of_the_last_round_have_a_border_and_are_otherwise_the_same():
    found = []
    for n in range(40):
        plain, shown = autoencoder.any_image(96, 64, worlds.rng_for(3, n))
        image, mask = autoencoder.any_framed_image(96, 64, worlds.rng_for(3, n))
        assert np.array_equal(mask, shown)
        found.append(image.tobytes() == edits.framed(plain).tobytes())
        assert found[-1] or image.tobytes() == plain.tobytes()
    assert 10 <= sum(found) <= 30


def test_images_go_to_pixels_and_back_unchanged():
    image = worlds.draw(worlds.TRAINED[0], 80, 48, worlds.rng_for(0))
    pixels = autoencoder.to_pixels([image])
    assert pixels.shape == (1, 3, 48, 80)
    assert autoencoder.to_images(pixels)[0].tobytes() == image.tobytes()


def test_training_encodes_captions_and_sizes_as_the_pipeline_does(plan, record):
    pipeline = StableDiffusionXLPipeline.from_pretrained(plan.out, local_files_only=True, dtype=torch.float32)
    encoders, tokenizers = (pipeline.text_encoder, pipeline.text_encoder_2), (pipeline.tokenizer, pipeline.tokenizer_2)
    parts = sdxl.SdxlParts(pipeline.unet, encoders, tokenizers, pipeline.scheduler)
    captions = ["a red circle at the left", ""]
    theirs, _, their_pooled, _ = pipeline.encode_prompt(captions, do_classifier_free_guidance=False)
    ours, our_pooled = sdxl.encode_captions(parts, captions)
    assert torch.equal(ours, theirs)
    assert torch.equal(our_pooled, their_pooled)


def test_the_base_is_never_shown_a_held_out_scene_or_a_star():
    pools = pretraining.encode_world(pretraining.moments_of(autoencoder.new_vae(0).eval()), 2 * len(worlds.TRAINED), 0)
    shown = {scene for pool in pools for scene in pool.scenes}
    assert shown == set(worlds.TRAINED)
    assert [(pool.width, pool.height) for pool in pools] == list(worlds.SIZES)
    assert [tuple(pool.moments.shape[1:]) for pool in pools] == [(32, 8, 8), (32, 6, 10), (32, 10, 6)]
