"""Toy bases whose text encoder is taught to read first: their recipes call the networks as the trainers do."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from sd_scripts.families import family
from sd_scripts.library.core.protocols import Parts
from sd_scripts.toy import anima, autoencoder, chroma, flux, flux2, flux3, krea2, pretraining, qwen_vae, reading, worlds
from sd_scripts.toy.build import BASES
from sd_scripts.toy.pretraining import ToyBatch
from sd_scripts.toy.reading import FlowSettings, ReadingSettings
from sd_scripts.toy.render import render_with
from sd_scripts.toy.tokens import T5_MAX_TOKENS

CAPTIONS = ["a red circle at the top left", "", "Square"]


class Recipe(NamedTuple):
    """What a recipe trains, and its loss of a batch."""

    module: Any
    settings: Any
    networks: dict[str, nn.Module]
    tokenizers: dict[str, Any]
    loss_of: Callable[[ToyBatch], Tensor]
    latents: tuple[int, int, int]
    conditions: tuple[float, ...]
    new_vae: Callable[[int], nn.Module]


def _krea2() -> Recipe:
    reader, network, settings = krea2.new_reader(0), krea2.new_transformer(0), FlowSettings()
    networks = {"backbone": network, "te1": reader.encoder}
    return Recipe(
        krea2,
        settings,
        networks,
        {"te1": reader.tokenizer},
        lambda b: krea2.loss_of(network, reader, b, settings),
        (16, 8, 8),
        (0.0,),
        qwen_vae.new_vae,
    )


def _anima() -> Recipe:
    reader, network, settings = anima.new_reader(0), anima.new_transformer(0), anima.SETTINGS
    networks = {"backbone": network, "te1": reader.encoder, "te2": reader.conditioner}
    read = reading.remembered(reader.rows)
    return Recipe(
        anima,
        settings,
        networks,
        {"te1": reader.words, "te2": reader.pieces},
        lambda b: anima.loss_of(network, read, b, settings),
        (16, 8, 8),
        (0.0,),
        qwen_vae.new_vae,
    )


def _flux2() -> Recipe:
    tokenizer, network, settings = flux2.klein_tokenizer(), flux2.new_transformer(0), FlowSettings()
    encoder = flux2.new_encoder(0, tokenizer)
    read = reading.remembered(functools.partial(flux2.encode_captions, encoder, tokenizer))
    networks = {"backbone": network, "te1": encoder}
    return Recipe(
        flux2,
        settings,
        networks,
        {"te1": tokenizer},
        lambda b: flux2.loss_of(network, read, b, settings),
        (64, 4, 4),
        (0.0,),
        _common,
    )


def _flux3() -> Recipe:
    tokenizer, network, settings = flux3.qwen_tokenizer((flux3.BEFORE, flux3.AFTER)), flux3.new_transformer(0), flux3.SETTINGS
    encoder = flux3.new_encoder(0, tokenizer)
    read = reading.remembered(functools.partial(flux3.encode_captions, encoder, tokenizer))
    return Recipe(
        flux3,
        settings,
        {"backbone": network, "te1": encoder},
        {"te1": tokenizer},
        lambda b: flux3.loss_of(network, read, b, settings),
        (64, 4, 4),
        (0.0,),
        _common,
    )


def _chroma() -> Recipe:
    tokenizer, network, settings = chroma.t5_tokenizer(), chroma.new_transformer(0), chroma.SETTINGS
    encoder = chroma.new_encoder(0, tokenizer)
    read = reading.remembered(functools.partial(chroma.encode_captions, encoder, tokenizer))
    networks = {"backbone": network, "te3": encoder}
    return Recipe(
        chroma,
        settings,
        networks,
        {"te3": tokenizer},
        lambda b: chroma.loss_of(network, read, b, settings),
        (16, 8, 8),
        (0.0, 1.0),
        _common,
    )


def _flux() -> Recipe:
    reader, network, settings = flux.FluxReader(0), flux.new_transformer(0), flux.SETTINGS
    return Recipe(
        flux,
        settings,
        {"backbone": network, "te1": reader.clip, "te3": reader.t5},
        {"te1": reader.words, "te3": reader.pieces},
        lambda b: flux.loss_of(network, reader, b, settings),
        (16, 8, 8),
        (1.0, 0.0, float(T5_MAX_TOKENS)),
        _common,
    )


def _common(seed: int) -> AutoencoderKL:
    return autoencoder.new_vae(seed)


RECIPES = {"krea2": _krea2, "anima": _anima, "flux": _flux, "flux2": _flux2, "flux3": _flux3, "chroma": _chroma}


@pytest.mark.parametrize("name", RECIPES)
def test_the_loss_is_that_of_the_trainers_velocity(name: str) -> None:
    """Without neighbours the expected latents are the sample's own; padding changes what it changes for the trainer."""
    recipe, chosen, rng = RECIPES[name](), family(name), torch.Generator().manual_seed(0)
    for module in recipe.networks.values():
        module.eval()
    latents, noise = torch.randn(2, 3, *recipe.latents, generator=rng)
    conditions = torch.tensor([recipe.conditions] * 3)
    batch = ToyBatch(latents, noise, torch.tensor([0.2, 0.5, 0.7]), CAPTIONS, conditions, list(latents[:, None]))
    tiny = chosen.tiny()  # type: ignore[attr-defined]
    encoders = {part: module for part, module in recipe.networks.items() if part != "backbone"}
    own = {"backbone": recipe.networks["backbone"], "text_encoders": encoders, "tokenizers": recipe.tokenizers}
    length = list(recipe.tokenizers.values())[-1].model_max_length
    limits = {limit: length for limit in ("max_token_length", "t5xxl_max_token_length") if name not in ("flux3", "krea2")}
    parts = Parts(**{**vars(tiny), **own, "settings": {**tiny.settings, **limits}})
    t = pretraining.logit_normal(batch.u, recipe.settings.time_mean, recipe.settings.time_deviation)
    with torch.no_grad():
        v = chosen.denoise(parts, torch.lerp(latents, noise, t[:, None, None, None]), t, chosen.encode_prompts(parts, CAPTIONS))
        found = recipe.loss_of(batch)
    torch.testing.assert_close(found, (v - (noise - latents)).square().mean(), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "name", ["krea2", *(pytest.param(name, marks=pytest.mark.long) for name in ("anima", "flux", "flux2", "flux3", "chroma"))]
)
def test_a_recipe_goes_from_nothing_to_a_pipeline_that_draws(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = RECIPES[name]()
    monkeypatch.setattr(recipe.module, "ReadingSettings", lambda: ReadingSettings(num_steps=1, batch_size=2))
    vae = recipe.new_vae(0).eval().requires_grad_(False)
    settings = FlowSettings(num_steps=1, num_late_steps=1, batch_size=8, num_images=8)
    pipeline = getattr(recipe.module, f"train_{name}")(vae, settings, 0)
    drawn = render_with(pipeline, 1)(["a red circle"], [0], 64, 64)
    assert drawn[0].size == (64, 64)
    assert not any(weight.requires_grad for weight in pipeline.transformer.parameters())


@pytest.mark.parametrize("name", [name for name in RECIPES if (BASES / name).is_dir()])
def test_a_stored_base_is_what_the_recipe_makes_and_small(name: str) -> None:
    record = json.loads((BASES / name / "BUILD.json").read_text(encoding="utf-8"))
    assert record["settings"] == asdict(RECIPES[name]().settings)
    assert min(record["scores"][kind]["all"] for kind in ("old", "held_out")) >= 0.95
    num_bytes = sum(path.stat().st_size for path in (BASES / name).rglob("*") if path.is_file())
    assert num_bytes < (8_000_000 if name == "flux" else 2_500_000)


def test_expected_latents_are_the_mean_by_what_explains_the_noisy_ones() -> None:
    rng = torch.Generator().manual_seed(1)
    images, t = torch.randn(5, 2, 3, 3, generator=rng, dtype=torch.float64), torch.tensor([0.6, 0.99], dtype=torch.float64)
    noise = torch.randn(2, 2, 3, 3, generator=rng, dtype=torch.float64)
    x_t = (1 - t[:, None, None, None]) * images[:2] + t[:, None, None, None] * noise
    batch = ToyBatch(images[:2], noise, t, ["", ""], torch.zeros(2, 1), [images, images[1:]])
    for found, x, time, bank in zip(batch.expected_latents(x_t, t), x_t, t, batch.alike, strict=True):
        weights = torch.distributions.Normal((1 - time) * bank, time).log_prob(x).flatten(1).sum(dim=1).exp()
        wanted = (weights[:, None, None, None] * bank).sum(dim=0) / weights.sum()
        torch.testing.assert_close(found, wanted)


def test_batches_bring_the_images_of_their_scenes() -> None:
    scenes = worlds.trained(worlds.KNOWN_COLORS)[:3]
    settings = pretraining.BaseSettings(num_steps=2, batch_size=3, num_images=12)
    encode = pretraining.exactly(lambda pixels: pixels.mean(dim=(2, 3), keepdim=True))
    shown = pretraining.encoded_batches(encode, settings, 0, scenes, sizes=worlds.SIZES, alike=True)
    for batch in shown:
        for own, bank in zip(batch.latents, batch.alike, strict=True):
            assert any(torch.equal(own, image) for image in bank)
            assert len(bank) < 6


def test_a_text_names_what_it_names() -> None:
    shapes, colors, places = reading.NAMES
    assert reading.named("At the top left, a teal star") == [
        1 + shapes.index("star"),
        1 + colors.index("teal"),
        1 + places.index("top left"),
    ]
    assert reading.named("a circle") == [1 + shapes.index("circle"), 0, 0] and reading.named("") == [0, 0, 0]


def test_a_small_encoder_learns_to_read() -> None:
    """An embedding of bags of tokens, which is enough to name words."""
    words = {word: number for number, word in enumerate(dict.fromkeys(" ".join(" ".join(names) for names in reading.NAMES).split()))}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = torch.nn.EmbeddingBag(len(words), 32, mode="sum")

    def rows_of(texts: list[str]) -> torch.Tensor:
        bags = [[words[word] for word in text.lower().replace(",", "").split() if word in words] or [0] for text in texts]
        offsets = torch.tensor([0, *[len(bag) for bag in bags[:-1]]]).cumsum(0)
        return encoder(torch.tensor([number for bag in bags for number in bag]), offsets)[:, None]

    heads = reading.teach(encoder, rows_of, ReadingSettings(num_steps=120, learning_rate=0.03), 0, "bag")
    assert not any(weight.requires_grad for weight in encoder.parameters())
    told = ["a star at the top right, teal", "Red circle, left", "a hexagon"]
    known = torch.nn.functional.rms_norm(rows_of(told)[:, 0], (32,))
    answers = [head(known).argmax(dim=1).tolist() for head in heads]
    assert [list(one) for one in zip(*answers, strict=True)] == [reading.named(text) for text in told]


def test_a_training_whose_rate_does_not_know_its_length_is_made_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits of one that was meant to be as long; another family's state, or one with other settings, is refused."""
    monkeypatch.setattr(pretraining, "SAVE_STEPS", 10)
    saved = tmp_path / "state.safetensors"

    def trained(num_steps: int, state: Path | None, **changes: Any) -> Tensor:
        settings = pretraining.BaseSettings(num_steps=num_steps, num_warmup_steps=3, num_full_steps=4, **changes)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Linear(3, 1)
        rngs = (torch.Generator().manual_seed(step) for step in range(num_steps))
        shown = (torch.randn(4, 3, generator=rng) for rng in rngs)
        pretraining.train(model, lambda x: (model(x) - x.sum(dim=1, keepdim=True)).square().mean(), shown, settings, "line", state)
        return model.weight.detach()

    short = trained(10, saved)
    assert torch.equal(trained(20, saved), trained(20, None))
    assert not torch.equal(short, trained(20, None))
    with pytest.raises(ValueError, match="other settings"):
        trained(20, saved, learning_rate=0.5)


def test_a_training_that_is_given_up_early_is_shown_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretraining, "SAVE_STEPS", 2)
    settings, seen = pretraining.BaseSettings(num_steps=50, num_warmup_steps=3), []

    def trained() -> Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = nn.Linear(3, 1)
        batches = (seen.append(step) or torch.full((4, 3), step / 50) for step in range(50))
        pretraining.train(model, lambda x: (model(x) - 1).square().mean(), batches, settings, "line", tmp_path / "state.safetensors", 6)
        return model.weight.detach()

    first = trained()
    assert seen == list(range(6))
    assert torch.equal(trained(), first) and seen == list(range(6))
