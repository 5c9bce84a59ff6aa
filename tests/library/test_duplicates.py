"""Near duplicates by a model: groups, what is kept, and what a model that has learned crops and colours finds that hashes miss."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel

from sd_scripts.dataset import triage
from sd_scripts.library.tools import duplicates, run
from sd_scripts.schema.command_line import parse_tool
from sd_scripts.schema.duplicates import DuplicateSection, FindDuplicates
from sd_scripts.schema.errors import OptionError
from tests import small_raters
from tests.dataset.test_triage import scene


def unit(vectors: Any) -> Any:
    vectors = np.asarray(vectors, np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def test_each_of_a_group_is_near_its_first_and_no_chain_joins_what_is_far(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = np.arange(0, 1.2, 0.1)
    chain = unit(np.stack([np.cos(turns), np.sin(turns)], 1))
    limit = 1 - np.cos(0.25)
    assert [[place for place, _ in group] for group in duplicates.groups_of(chain, limit)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    rng = np.random.default_rng(random.getrandbits(64))
    monkeypatch.setattr(duplicates, "_BLOCK", int(rng.integers(3, 50)))
    vectors = unit(rng.normal(size=(120, 3)))
    limit = float(rng.uniform(0.01, 0.3))
    found = duplicates.groups_of(vectors, limit)
    places = [place for group in found for place, _ in group]
    assert len(places) == len(set(places)), "an image is in one group"
    away = 1 - vectors.astype(np.float64) @ vectors.T
    firsts = {place: group[0][0] for group in found for place, _ in group}
    leaders = [place for place in range(120) if firsts.get(place, place) == place]
    for place in range(120):
        first = firsts.get(place, place)
        best = next(leader for leader in leaders if leader == place or (leader < place and away[leader, place] <= limit + 1e-6))
        assert first == best
    for group in found:
        np.testing.assert_allclose([distance for _, distance in group], away[group[0][0], [place for place, _ in group]], atol=1e-5)
    assert duplicates.groups_of(np.repeat(vectors[:1], 3, axis=0), 0.0) == [
        [(0, 0.0), (1, pytest.approx(0, abs=1e-6)), (2, pytest.approx(0, abs=1e-6))]
    ]


@pytest.mark.parametrize("kind", ["dino", "clip", "siglip"])
def test_a_work_names_groups_by_the_models_own_vectors_and_looks_at_nothing_twice(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    model = getattr(small_raters, kind)(tmp_path / kind)
    mine = tmp_path / "mine"
    (mine / ".left_out").mkdir(parents=True)
    for number in range(5):
        scene(rng, number, 64).save(mine / f"{number}.png")
    Image.open(mine / "3.png").resize((96, 96)).save(mine / "a larger one.png")
    Image.open(mine / "3.png").save(mine / ".left_out" / "3.png")
    (mine / "broken.png").write_bytes(b"no image")
    report, kept = tmp_path / "report.json", tmp_path / "kept"
    line = ["--image_dir", str(mine), "--image_model", str(model), "--report", str(report), "--vector_dir", str(kept), "--device", "cpu"]
    assert run.start(parse_tool(FindDuplicates, [*line, "--duplicate_distance", "2"])) == 0
    told: dict[str, Any] = json.loads(report.read_text())
    (group,) = told["groups"]
    assert group[0] == {"file": "a larger one.png", "distance": 0.0} and len(group) == 6 and told["images"] == 6
    assert [line.split()[0] for line in told["unreadable"]] == ["broken.png"]
    processor, network = AutoImageProcessor.from_pretrained(model), AutoModel.from_pretrained(model).eval()

    def vector(name: str) -> Any:
        given = processor(images=[Image.open(mine / name).convert("RGB")], return_tensors="pt")
        with torch.no_grad():
            made = network.get_image_features(**given) if kind != "dino" else network(**given).pooler_output
        return unit(np.asarray(getattr(made, "pooler_output", made)).reshape(1, -1))[0]

    first = vector("a larger one.png")
    for row in group:
        assert row["distance"] == pytest.approx(1 - float(first @ vector(row["file"])), abs=2e-4)
    # What was kept is taken for the same image under another name; another model looks for itself.
    files = sorted(kept.rglob("*.vector"))
    assert len(files) == 6
    (mine / "0.png").rename(mine / "renamed.png")
    assert run.start(parse_tool(FindDuplicates, line)) == 0 and sorted(kept.rglob("*.vector")) == files
    files[0].write_bytes(b"123")
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(mine / "new.png")
    assert run.start(parse_tool(FindDuplicates, line)) == 0 and len(list(kept.rglob("*.vector"))) == 7
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "note": "another"}))
    assert run.start(parse_tool(FindDuplicates, line)) == 0 and len(list(kept.rglob("*.vector"))) == 14
    assert sorted(path.name for path in mine.iterdir() if path.suffix == ".vector") == []


def test_what_cannot_compare_is_refused_with_a_sentence(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "a.png")
    (tmp_path / "empty").mkdir()
    model = str(small_raters.dino(tmp_path / "dino"))
    (tmp_path / "file").write_text("no folder")
    good = {"image_dir": str(tmp_path), "image_model": model}
    for wrong, sentence in (
        ({"image_dir": str(tmp_path / "typo")}, "there is no folder"),
        ({"image_dir": str(tmp_path / "empty")}, "there are no images"),
        ({"image_model": str(tmp_path / "typo")}, "image_model: there is no folder"),
        ({"image_model": str(tmp_path / "empty")}, "image_model: empty cannot be loaded"),
        ({"vector_dir": str(tmp_path / "file")}, "vector_dir: .* cannot be written"),
    ):
        with pytest.raises(OptionError, match=sentence):
            duplicates.find(DuplicateSection(**{**good, **wrong}, device="cpu"))


def turned(image: Image.Image, number: int, rng: np.random.Generator) -> Image.Image:
    """Mirrored or turned, in colours that are a little others."""
    ways = (Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180)
    pixels = np.asarray(image.transpose(ways[number % len(ways)]), np.float32)
    return Image.fromarray(np.clip(pixels + rng.uniform(-3, 3, 3), 0, 255).astype(np.uint8))


def colours(folder: Path) -> Path:
    """A SigLIP model that sees which colours there are and not where: places have no weights, and each patch is its mean colour."""
    torch.manual_seed(0)
    small_raters.siglip(folder)
    network = AutoModel.from_pretrained(folder)
    vision = network.vision_model
    layers, width = vision.encoder.layers, vision.embeddings.patch_embedding.out_channels
    with torch.no_grad():
        vision.embeddings.position_embedding.weight.zero_()
        vision.embeddings.patch_embedding.weight.copy_(torch.randn(width, 3, 1, 1).expand(-1, -1, 8, 8) / 64)
        vision.embeddings.patch_embedding.bias.normal_()
        vision.head.attention.in_proj_weight[: 2 * width].zero_()
        for layer in layers:
            layer.self_attn.out_proj.weight.zero_()
            layer.mlp.fc1.weight.normal_(0, 0.25)
    network.save_pretrained(folder)
    return folder


def test_a_model_finds_copies_that_are_mirrored_turned_and_recoloured_which_hashes_miss(tmp_path: Path) -> None:
    """With a model made for it: that the way from a model to groups is whole, and nothing of what a published model finds."""
    model, mine = colours(tmp_path / "colours"), tmp_path / "mine"
    mine.mkdir()
    rng = np.random.default_rng(11)
    for number in range(24):
        image = scene(rng, number, 128)
        image.save(mine / f"{number:02}.png")
        if number < 12:
            turned(image, number, rng).save(mine / f"{number:02}b.png")
    assert triage.groups_of([triage.signs_of(path) for path in sorted(mine.iterdir())]) == ([], [])
    told = duplicates.find(DuplicateSection(image_dir=str(mine), image_model=str(model), duplicate_distance=0.0008, device="cpu"))
    groups = {tuple(row["file"] for row in group) for group in told.values["groups"]}
    assert groups == {(f"{number:02}.png", f"{number:02}b.png") for number in range(12)}
