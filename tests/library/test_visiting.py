"""Where networks are while previews are rendered, texts that are known by then, and images that are decoded in tiles."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sd_scripts import families
from sd_scripts.families.common import images
from sd_scripts.families.common.images import TILE, visiting
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.library.render.remembering import with_known_texts
from sd_scripts.library.render.sample import request_of
from sd_scripts.schema.prompts import PromptSpec

WITH_TEXTS = [name for name in families.NAMES if name != "lgt"]


def a_request(name: str, **values: Any) -> Preview:
    given = {"width": 64, "height": 64, "steps": 2, "cfg_scale": 2.0, "seed": 3, **values}
    controls = (Image.new("RGB", (64, 64), (200, 30, 90)),) if name == "qwen_edit" else ()
    return Preview("a star", "a line", controls=controls, **given)


class Elsewhere:
    """Networks that are said to be at another place than they are, so that coming and going can be seen without a GPU."""

    def __init__(self, parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        self.here: set[str] = set()
        away = {module: name for name, module in parts.modules().items() if name != "backbone"}
        for module, name in away.items():
            monkeypatch.setattr(module, "to", self._mover(name, module))

        plain = images.Visits.__init__

        def begun(visits: Any, *arguments: Any) -> None:
            plain(visits, *arguments)
            visits._homes = dict.fromkeys(away, torch.device("meta"))

        monkeypatch.setattr(images.Visits, "__init__", begun)

    def _mover(self, name: str, module: torch.nn.Module) -> Any:
        def to(device: torch.device) -> torch.nn.Module:
            (self.here.discard if device.type == "meta" else self.here.add)(name)
            assert len(self.here) <= 1, f"{self.here} are on the device together"
            self.events.append((name, "goes" if device.type == "meta" else "comes"))
            return module

        return to


@pytest.mark.parametrize("name", WITH_TEXTS)
def test_networks_come_one_at_a_time_while_they_compute_and_leave(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family = families.family(name)
    parts = family.tiny()
    request = a_request(name)
    plain = family.preview(parts, [request])[0]
    seen = Elsewhere(parts, monkeypatch)
    drawing: list[set[str]] = []
    handle = parts.backbone.register_forward_pre_hook(lambda module, arguments: drawing.append(set(seen.here)))
    with visiting(parts) as visited:
        found = family.preview(visited, [request])[0]
    handle.remove()
    assert np.array_equal(np.asarray(found), np.asarray(plain))
    assert seen.here == set() and drawing and all(here == set() for here in drawing), "the network draws alone"
    came = [who for who, what in seen.events if what == "comes"]
    assert {*parts.text_encoders, "vae"} == set(came) and came[-1] == "vae"


def test_without_a_gpu_nobody_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    family = families.family("sdxl")
    parts = family.tiny()
    for module in parts.modules().values():
        monkeypatch.setattr(module, "to", lambda *_: pytest.fail("a network was moved"))
    with visiting(parts) as visited:
        family.preview(visited, [a_request("sdxl")])


def test_after_an_error_they_are_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    family = families.family("sdxl")
    parts = family.tiny()
    seen = Elsewhere(parts, monkeypatch)
    handle = parts.vae.decoder.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyError("broken")))
    with pytest.raises(KeyError), visiting(parts) as visited:
        family.preview(visited, [a_request("sdxl")])
    handle.remove()
    assert seen.here == set()
    before = len(seen.events)
    family.preview(parts, [a_request("sdxl")])
    assert len(seen.events) == before


# Texts that are known.


def specs(name: str, folder: Path) -> list[PromptSpec]:
    files: tuple[str, ...] = ()
    if name == "qwen_edit":
        file = folder / "control.png"
        Image.fromarray(np.random.default_rng(random.getrandbits(30)).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(file)
        files = (str(file),)
    texts = ("a star", "a much longer text, with a comma", "")
    return [PromptSpec(text, "a line", 64, 64, seed, 2, 2.0, "auto", controls=files) for seed, text in enumerate(texts)]


@pytest.mark.parametrize("name", WITH_TEXTS)
def test_known_texts_render_the_same_and_ask_no_encoder(name: str, tmp_path: Path) -> None:
    family = families.family(name)
    parts = family.tiny()
    requests = [request_of(spec) for spec in specs(name, tmp_path)]
    wanted = [family.preview(parts, [request])[0] for request in requests]
    knowing = with_known_texts(family, parts, specs(name, tmp_path) if name != "qwen_edit" else _same(tmp_path), tuple(parts.text_encoders))
    handles = [
        module.register_forward_pre_hook(lambda *_: pytest.fail("an encoder was asked"))
        for encoder in parts.text_encoders.values()
        for module in encoder.modules()
    ]
    for request, plain in zip(requests, wanted, strict=True):
        found = knowing.preview(parts, [request])[0]
        assert np.abs(np.asarray(found).astype(int) - np.asarray(plain).astype(int)).max() <= 1
    together = knowing.preview(parts, requests)
    assert len(together) == 3
    for handle in handles:
        handle.remove()
    other = Preview("something else", "", 64, 64, 1, 1, 1.0, controls=requests[0].controls)
    assert np.array_equal(np.asarray(knowing.preview(parts, [other])[0]), np.asarray(family.preview(parts, [other])[0]))


def _same(folder: Path) -> Sequence[PromptSpec]:
    """The prompts on the control image that is there already."""
    texts = ("a star", "a much longer text, with a comma", "")
    file = (str(folder / "control.png"),)
    return [PromptSpec(text, "a line", 64, 64, seed, 2, 2.0, "auto", controls=file) for seed, text in enumerate(texts)]


def test_encoders_that_are_trained_are_asked_every_time(tmp_path: Path) -> None:
    flux, sdxl = families.family("flux"), families.family("sdxl")
    parts = flux.tiny()
    knowing = with_known_texts(flux, parts, specs("flux", tmp_path), ("te3",))
    asked: list[str] = []
    for name, encoder in parts.text_encoders.items():
        encoder.register_forward_pre_hook(lambda *_, name=name: asked.append(name))
    knowing.preview(parts, [request_of(specs("flux", tmp_path)[0])])
    assert set(asked) == {"te1"}
    # Its encoders make one entry together.
    assert with_known_texts(sdxl, sdxl.tiny(), specs("sdxl", tmp_path), ("te2",)) is sdxl


# Tiles.


@pytest.mark.parametrize("name", ["sdxl", "flux", "qwen_edit", "zimage"])
def test_large_previews_are_decoded_in_tiles_and_everything_else_is_not(name: str) -> None:
    family = families.family(name)
    parts = family.tiny()
    settings = {key: value for key, value in vars(parts.vae).items() if "til" in key}
    if name != "qwen_edit":
        parts.vae.tile_sample_min_size, parts.vae.tile_latent_min_size = 1024, 128
    kept = {key: value for key, value in vars(parts.vae).items() if "til" in key}
    # Wider than a tile, and low, as most of the time would go into what is there twice.
    size = (128, 640) if name != "qwen_edit" else (128, 320)
    latents = family.encode_images(parts, torch.nn.functional.interpolate(torch.rand(1, 3, 8, 8), size, mode="bicubic").clamp(0, 1))
    sizes: list[tuple[int, int]] = []
    handle = parts.vae.decoder.register_forward_pre_hook(lambda module, arguments: sizes.append(tuple(arguments[0].shape[-2:])))
    plain = family.decode(parts, latents)
    assert sizes == [(size[0] // 8, size[1] // 8)]
    sizes.clear()
    with visiting(parts, tiled=True) as visited:
        encoded = family.encode_images(visited, plain)
        tiled = family.decode(visited, latents)
    handle.remove()
    assert len(sizes) > 1 and max(map(max, sizes)) <= TILE // 8
    assert tiled.shape == plain.shape
    corner = max(map(max, sizes))
    alone = family.decode(parts, latents[..., :corner, :corner])
    torch.testing.assert_close(tiled[..., : 4 * corner, : 4 * corner], alone[..., : 4 * corner, : 4 * corner])
    assert torch.equal(encoded, family.encode_images(parts, plain)), "what is encoded is not cut"
    assert {key: value for key, value in vars(parts.vae).items() if "til" in key} == kept and not parts.vae.use_tiling
    assert set(kept) == set(settings)
