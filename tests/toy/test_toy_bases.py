"""The trained bases: small ordinary pipeline folders that obey their prompts and have never seen a star."""

import functools
import hashlib
import json

import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from safetensors import safe_open
from transformers import CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

from sd_scripts.toy import autoencoder, build, edits, measure, qwen_vae, sharing, worlds
from sd_scripts.toy.render import render_with
from sd_scripts.toy.sharing import load_pipeline, load_vae

FAMILIES = sorted(name for name in build.FAMILIES if (build.BASES / name).is_dir())
"""Recipes whose base is stored; there are others that do not draw well enough to be shown."""
WITH_THE_COMMON_VAE = [name for name in FAMILIES if "QwenImage" not in (build.BASES / name / "vae" / "config.json").read_text("utf-8")]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request):
    return build.BASES / request.param


@pytest.fixture(scope="module")
def pipeline(folder):
    return load_pipeline(folder)


@pytest.fixture(scope="module")
def colors(folder):
    return worlds.colors_of(folder.name)


@pytest.fixture(scope="module")
def sizes(folder):
    return worlds.sizes_of(folder.name)


def test_the_first_four_bases_are_stored():
    assert {"sd", "sdxl", "flux", "zimage"} <= set(FAMILIES)


@pytest.fixture(scope="module")
def drawn(pipeline, colors, sizes):
    """Six prompts of known shapes and their images: of one size together, as a call of a small model costs more than what it draws."""
    tasks = measure.prompts("old", 6, 6, colors)
    return tasks, measure.render_tasks(render_with(pipeline), tasks, sizes)


def test_a_base_obeys_most_prompts(drawn):
    tasks, images = drawn
    scores = measure.score([task.scene for task in tasks], images)
    assert scores.all >= 5 / 6, scores


@pytest.mark.long
def test_a_base_draws_no_stars(pipeline, colors, sizes):
    # A shapeless blob may be read as one: few images cannot tell that from a base that draws them.
    scores = measure.obedience(render_with(pipeline), measure.prompts("star", 32, 4, colors), sizes)
    assert scores.shape < 0.05, scores


@pytest.mark.long
@pytest.mark.parametrize("kind", ["old", "held_out"])
def test_a_base_obeys_prompts_seen_and_held_out(pipeline, colors, sizes, kind):
    scores = measure.obedience(render_with(pipeline), measure.prompts(kind, 200, 3, colors), sizes)
    assert scores.all >= 0.85, scores


def test_an_image_does_not_depend_on_what_is_drawn_beside_it(pipeline, drawn, sizes):
    (task, *_), (together, *_) = drawn
    alone = render_with(pipeline)([task.prompt], [task.seed], *sizes[0])
    difference = autoencoder.to_pixels([together]) - autoencoder.to_pixels(alone)
    assert difference.abs().max() <= 2 / 127.5


def _through(vae, images):
    # The images of their most likely latents. Few at a time stay in the processor's caches: 43 at once take twice as long.
    qwen, found = isinstance(vae, AutoencoderKLQwenImage), []
    for start in range(0, len(images), 4):
        few = images[start : start + 4]
        found += qwen_vae.decode(vae, qwen_vae.encode(vae, few)) if qwen else autoencoder.reconstruct(vae, few)
    return found


@pytest.fixture(scope="module")
def vae_of():
    """The loaded VAE of a base; the same one for all whose VAEs differ in nothing but the statistics by which trainers scale latents."""
    loaded = {}

    def load(folder):
        vae = load_vae(folder / "vae")
        config = {name: value for name, value in vae.config.items() if not name.startswith("_") and not name.endswith("_factor")}
        known = hashlib.sha256(repr((type(vae), sorted(config.items()))).encode())
        for name, tensor in vae.state_dict().items():
            if not name.startswith("bn."):
                known.update(name.encode() + tensor.numpy().tobytes())
        return loaded.setdefault(known.digest(), vae)

    return load


@pytest.fixture(scope="module")
def shapes_through():
    """How far a VAE keeps shapes of these sizes; computed once for a VAE that several bases have."""

    @functools.cache
    def scored(vae, sizes):
        scenes, images = [], []
        for index, size in enumerate(sizes):
            chosen = worlds.scenes(worlds.SHAPES)[index::20]
            drawn = [worlds.draw(scene, *size, worlds.rng_for(9, index, n)) for n, scene in enumerate(chosen)]
            scenes += chosen
            images += _through(vae, drawn)
        return measure.score(scenes, images)

    return scored


def test_the_vae_keeps_every_shape(folder, sizes, vae_of, shapes_through):
    scores = shapes_through(vae_of(folder), sizes)
    assert scores.all >= 0.97, scores


@pytest.fixture(scope="module")
def lightness_through():
    """How much lighter or darker a VAE makes grounds of a size, of 255; computed once for a VAE that several bases have."""

    @functools.cache
    def changed(vae, size, seed):
        images = [task.source for task in measure.edit_tasks("keep", 8, seed, sizes=(size,))]
        before, after = (autoencoder.to_pixels(shown)[:, :, :4] * 127.5 for shown in (images, _through(vae, images)))
        return (after - before).mean(dim=(1, 2, 3)).abs().mean()

    return changed


def test_the_vae_keeps_the_lightness_of_the_ground(folder, sizes, vae_of, lightness_through):
    for index, size in enumerate(sizes):
        assert lightness_through(vae_of(folder), size, 9 + index) <= 2.5, size


@pytest.fixture(scope="module")
def borders_through():
    """Of images with the border that is asked for, by a VAE: how many are as asked, and how far all else is from the source, of 255."""

    @functools.cache
    def drawn(vae, size, num):
        tasks = measure.edit_tasks("border", num, 31, sizes=(size,))
        shown = list(zip(tasks, _through(vae, [task.target for task in tasks]), strict=True))
        obeyed = sum(edits.obeyed(task.edit, task.source, image) for task, image in shown)
        return obeyed, sum(edits.kept_difference(task.edit, task.source, image) for task, image in shown) / num

    return drawn


def test_the_vae_draws_a_border_and_leaves_the_ground_as_it_was(folder, sizes, vae_of, borders_through):
    for size in sizes:
        obeyed, difference = borders_through(vae_of(folder), size, 12)
        # Of 64 pixels and fewer, what lies under a border is too small for its shape to be read each time.
        assert difference <= 7 and obeyed >= (11 if min(size) > 64 else 9), (size, obeyed, difference)


@pytest.fixture(scope="module")
def latents_of_the_world():
    """Latents of all scenes, by channel; computed once for a VAE that several bases have."""

    @functools.cache
    def encoded(vae):
        images = [worlds.draw(scene, 64, 64, worlds.rng_for(10, n)) for n, scene in enumerate(worlds.TRAINED)]
        with torch.no_grad():
            latents = vae.encode(autoencoder.to_pixels(images)).latent_dist.sample(torch.Generator().manual_seed(0))
        return latents.transpose(0, 1).flatten(1)

    return encoded


@pytest.mark.parametrize("folder", WITH_THE_COMMON_VAE, indirect=True)
def test_latents_of_the_world_have_mean_0_and_deviation_1(folder, vae_of, latents_of_the_world):
    """Qwen-Image's VAE has the statistics of the edit world; see test_toy_qwen_edit."""
    per_channel = latents_of_the_world(vae_of(folder))
    assert per_channel.mean(dim=1).abs().max() < 0.2
    assert (per_channel.std(dim=1) - 1).abs().max() < 0.2
    # FLUX.2's kind has statistics of squares instead.
    assert load_vae(folder / "vae").config.get("scaling_factor", 1.0) == 1.0


def test_a_base_is_small_half_precision_and_names_no_machine(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".safetensors"}
    assert sum(path.stat().st_size for path in files) <= build.MAX_BYTES
    for path in files:
        if path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            assert not content.get("_name_or_path")
        else:
            with safe_open(path, framework="pt") as tensors:
                kinds = {tensors.get_tensor(name).dtype for name in tensors.keys() if not name.endswith("num_batches_tracked")}  # noqa: SIM118
            assert kinds == {torch.float16}, path


def test_all_bases_together_are_under_48_mb():
    assert sum(path.stat().st_size for path in build.BASES.rglob("*") if path.is_file()) < 48_000_000


def test_a_base_records_how_it_was_made(folder):
    record = json.loads((folder / "BUILD.json").read_text(encoding="utf-8"))
    assert record["family"] == folder.name
    assert record["scores"]["old"]["all"] >= 0.85
    assert record["scores"]["held_out"]["all"] >= 0.85
    assert record["scores"]["star"]["shape"] < 0.05
    knows_teal = "teal" in worlds.colors_of(folder.name)
    assert knows_teal or record["scores"]["teal"]["color"] < 0.05
    assert record["vae"]["settings"]["num_steps"] > 0
    assert record["libraries"].keys() >= {"torch", "diffusers", "transformers"}


@pytest.mark.parametrize("family", sorted(build.FAMILIES | build.EDITING))
def test_the_scores_on_record_are_those_of_the_weights_that_lie_here(family):
    """To draw what was scored again takes minutes; the long tests do."""
    record = json.loads((build.BASES / family / "BUILD.json").read_text(encoding="utf-8"))
    assert record["scored_weights"] == sharing.digest(build.BASES / family), f"python -m sd_scripts.toy.build {family} --score_only"


def test_tokenizers_know_each_word_and_fit_their_encoders(pipeline):
    pairs = [(pipeline.components.get(f"tokenizer{n}"), pipeline.components.get(f"text_encoder{n}")) for n in ("", "_2")]
    known = [(tokenizer, encoder) for tokenizer, encoder in pairs if isinstance(tokenizer, CLIPTokenizer | Qwen2Tokenizer | T5Tokenizer)]
    assert known
    for tokenizer, encoder in known:
        assert len(tokenizer) == encoder.config.get_text_config().vocab_size
        for word in (*worlds.SHAPES, *worlds.COLORS, "orange", "sks", worlds.SUBJECT_WORD):
            assert len(tokenizer.tokenize(word)) == 1, word
        if isinstance(tokenizer, CLIPTokenizer):
            start, *_, end = tokenizer("Ein Äpfelchen? 42 日本").input_ids
            assert (start, end) == (encoder.config.bos_token_id, encoder.config.eos_token_id)


def test_no_negative_prompt_means_the_encoded_empty_caption_to_sdxl():
    pipeline = load_pipeline(build.BASES / "sdxl")
    _, absent, _, absent_pooled = pipeline.encode_prompt("a red circle", do_classifier_free_guidance=True)
    empty, _, empty_pooled, _ = pipeline.encode_prompt("", do_classifier_free_guidance=False)
    assert torch.equal(absent, empty)
    assert torch.equal(absent_pooled, empty_pooled)
