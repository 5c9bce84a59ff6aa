"""The toy Qwen-Image-2.1 base, which draws and edits: a VAE that begins with colours, a reader, a recipe that calls them as trainers do."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sd_scripts.families import family
from sd_scripts.toy import autoencoder, build, editing, edits, measure, pretraining, qwen21_vae, qwen_image21, reading, sharing, worlds
from sd_scripts.toy.build import BuildPlan
from sd_scripts.toy.by_family import FamilyModel
from sd_scripts.toy.pretraining import ToyBatch
from sd_scripts.toy.qwen21_vae import Qwen21VaeSettings
from sd_scripts.toy.qwen_image21 import QwenImage21Settings
from sd_scripts.toy.reading import ReadingSettings
from sd_scripts.toy.render import edit_with, render_with

FOLDER = build.BASES / "qwen_image21"
SIZES = worlds.sizes_of("qwen_image21")
FEW = QwenImage21Settings(num_steps=3, num_edit_steps=3, num_late_steps=1, num_warmup_steps=1, batch_size=2, num_images=8, num_pairs=6)


def test_an_untaught_vae_has_the_colours_of_small_squares_as_latents_and_shows_their_mean() -> None:
    """From a random beginning red and green became one brown."""
    rng = torch.Generator().manual_seed(0)
    colors = torch.rand(2, 3, 16, 24, generator=rng) * 2 - 1
    pixels = colors.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    vae = qwen21_vae.new_vae(0).eval()
    with torch.no_grad():
        latents = qwen21_vae.posterior_of(vae, torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1)).mode()
        shown = qwen21_vae.decoded(vae, latents)
    squares = latents[:, :48, 0].unflatten(1, (3, 2, 2, 2, 2)).permute(0, 1, 6, 4, 2, 7, 5, 3).reshape(colors.shape)
    assert torch.corrcoef(torch.stack([squares.flatten(), colors.flatten()]))[0, 1] > 0.99
    assert (squares - colors).abs().max() < 0.25
    means = torch.nn.functional.avg_pool2d(colors, 4).flatten(), torch.nn.functional.avg_pool2d(shown[:, :3], 16).flatten()
    assert torch.corrcoef(torch.stack(means))[0, 1] > 0.9


@pytest.fixture(scope="module")
def untaught() -> FamilyModel:
    """A model as it begins."""
    vae = qwen21_vae.new_vae(0).eval().requires_grad_(False)
    return qwen_image21.as_model(qwen_image21.new_transformer(0), qwen_image21.new_reader(0), vae)


def test_texts_are_read_as_the_family_reads_them_whatever_the_image_shows(untaught: FamilyModel) -> None:
    chosen: Any = family("qwen_image21")
    reader, rng = qwen_image21.new_reader(0), torch.Generator().manual_seed(0)
    texts = ["move it to the left", "", "a red circle"]
    for size in (None, (160, 96)):
        shown = [] if size is None else [torch.rand(3, *size[::-1], generator=rng) * 2 - 1]
        theirs = chosen.encode_instructions(untaught.parts, shown, texts)[1]
        for own, other in zip(reader.states(texts, size), theirs, strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["drawings", "edits"])
def test_the_loss_is_that_of_the_trainers_velocity(kind: str, untaught: FamilyModel) -> None:
    """Of texts of different lengths; heads add what they read wrongly."""
    chosen: Any = family("qwen_image21")
    settings, rng = QwenImage21Settings(), torch.Generator().manual_seed(0)
    reader, network = qwen_image21.new_reader(0), qwen_image21.new_transformer(0).eval()
    latents, sources, noise = torch.randn(3, 3, 64, 6, 10, generator=rng)
    texts, u = ["move it to the left", "", "remove it"], torch.tensor([0.2, 0.5, 0.7])
    t = pretraining.logit_normal(u, settings.time_mean, settings.time_deviation)
    x_t = torch.lerp(latents, noise, t[:, None, None, None])
    batch: editing.EditBatch | ToyBatch
    with torch.no_grad():
        if kind == "drawings":
            batch = ToyBatch(latents, noise, u, texts, torch.zeros(3, 1), list(latents[:, None]))
            conditions = chosen.encode_prompts(untaught.parts, texts)
        else:
            meant = ["a red circle at the left", "a blue square at the top", "a red circle at the left"]
            batch = editing.EditBatch((160, 96), latents, sources, noise, u, texts, torch.empty(3, 0, 0), torch.empty(3, 0), meant)
            rows = chosen.encode_instructions(untaught.parts, [torch.zeros(3, 96, 160)], texts)[1]
            conditions = [{"text": row, "control_0": source} for row, source in zip(rows, sources, strict=True)]
        v = chosen.denoise(untaught.parts, x_t, t, conditions)
        found = qwen_image21.loss_of(network, reader, batch, settings)
    torch.testing.assert_close(found, (v - (noise - latents)).square().mean(), rtol=1e-4, atol=0)
    heads = nn.ModuleList([nn.Linear(network.inner_dim, 1 + len(names)) for names in reading.NAMES])
    loss = qwen_image21.loss_of(network, reader, batch, settings, heads)
    loss.backward()
    if kind == "edits":
        assert loss > found and all(head.weight.grad.abs().sum() > 0 for head in heads)
    else:
        torch.testing.assert_close(loss, found)


def test_batches_have_texts_of_one_length_no_sample_is_lost_and_every_step_is_the_same_again(untaught: FamilyModel) -> None:
    settings = replace(FEW, num_steps=40, batch_size=4, num_pairs=30, num_images=40)
    pairs, drawings = qwen_image21.encode_worlds(untaught.vae, settings, 0)
    tokenizer = qwen_image21.new_reader(0).tokenizer
    length = functools.cache(lambda text: len(tokenizer(text).input_ids))

    def shown(sort: bool) -> list[Any]:
        of_steps = qwen_image21.batches(pairs, drawings, settings, 0, 0.3)
        return list(qwen_image21.by_length(of_steps, length, 0, at_once=20) if sort else of_steps)

    def texts(batch: Any) -> list[str]:
        return batch.captions if isinstance(batch, ToyBatch) else batch.instructions

    def lengths(batches: list[Any]) -> float:
        return sum(len({length(text) for text in texts(batch)}) for batch in batches) / len(batches)

    drawn, one, two = shown(False), shown(True), shown(True)
    assert len(one) == len(drawn) == 40 and lengths(one) < 0.7 * lengths(drawn)
    assert all(torch.equal(a.noise, b.noise) and texts(a) == texts(b) for a, b in zip(one, two, strict=True))

    def samples(batches: list[Any]) -> set[tuple[float, float, str]]:
        return {
            (float(noise.sum()), float(u), text)
            for batch in batches
            for noise, u, text in zip(batch.noise, batch.u, texts(batch), strict=True)
        }

    assert samples(one) == samples(drawn)
    asked = [batch for batch in one if isinstance(batch, editing.EditBatch)]
    assert 0.4 < len(asked) / len(one) < 0.95
    words = [(text, meaning) for batch in asked for text, meaning in zip(batch.instructions, batch.meant, strict=True)]
    told = [(text, meaning, place) for text, meaning in words for place in worlds.PLACES if text.endswith(f" the {place}")]
    assert told and all(meaning.endswith(f" at the {place}") for _, meaning, place in told)


def test_a_short_build_draws_and_edits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen_image21, "QwenImage21Settings", lambda: FEW)
    monkeypatch.setattr(qwen_image21, "ReadingSettings", lambda: ReadingSettings(num_steps=1, batch_size=4))
    monkeypatch.setattr(qwen21_vae, "Qwen21VaeSettings", lambda: Qwen21VaeSettings(num_steps=2, batch_size=2))
    record = build.build(BuildPlan("qwen_image21", tmp_path / "qwen_image21", num_prompts=2))
    assert record["scores"].keys() == {"old", "held_out", "star", "teal", *edits.KINDS}  # type: ignore[attr-defined]
    model = sharing.load_pipeline(tmp_path / "qwen_image21")
    assert isinstance(model, FamilyModel) and not list((tmp_path / "qwen_image21").rglob("*.index.json"))
    assert model.parts.scheduler_config["base_shift"] == model.parts.scheduler_config["max_shift"]
    source = measure.edit_tasks("remove", 2, 0, sizes=SIZES)[1].source
    assert edit_with(model, 1)(["remove it"], [source], [0])[0].size == source.size
    assert render_with(model, 1)(["a red circle"], [0], 96, 160)[0].size == (96, 160)


# The stored base.


@pytest.fixture(scope="module")
def model() -> FamilyModel:
    loaded = sharing.load_pipeline(FOLDER)
    assert isinstance(loaded, FamilyModel)
    return loaded


def test_the_stored_base_is_what_the_recipe_makes_and_small() -> None:
    record = json.loads((FOLDER / "BUILD.json").read_text(encoding="utf-8"))
    assert record["settings"] == asdict(QwenImage21Settings()) and record["vae"]["settings"] == asdict(Qwen21VaeSettings())
    scores = record["scores"]
    assert min(scores[kind]["all"] for kind in ("old", "held_out")) >= 0.95
    assert max(scores["star"]["shape"], scores["teal"]["color"], scores["border"]["obeyed"]) < 0.05
    assert sum(path.stat().st_size for path in FOLDER.rglob("*") if path.is_file()) < 2_500_000


def test_the_stored_vae_keeps_images_and_their_colours(model: FamilyModel) -> None:
    """Mean difference, of 255, of images and what the VAE makes of them: at all sizes, and of the shapes alone."""
    chosen: Any = family("qwen_image21")
    for size in SIZES:
        rngs = [worlds.rng_for(99, number) for number in range(6)]
        pixels = autoencoder.to_pixels([edits.draw(edits.edit_of("remove", rng), *size, rng)[0] for rng in rngs])
        errors = (chosen.decode(model.parts, chosen.encode_images(model.parts, pixels)) - pixels).abs().mean(dim=1) * 127.5
        assert errors.mean() < 4
        assert errors[pixels.min(dim=1).values < 0].mean() < 8


def test_the_base_draws_from_captions_and_knows_no_border(model: FamilyModel) -> None:
    assert measure.obedience(render_with(model), measure.prompts("old", 6, 6, worlds.KNOWN_COLORS), SIZES).all >= 5 / 6
    assert measure.edit_obedience(edit_with(model), measure.edit_tasks("border", 3, 2, sizes=SIZES)) == 0
