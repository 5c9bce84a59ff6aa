"""Images are rated by models of transformers as those say it themselves, and mistakes are sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoProcessor

from sd_scripts.library.tools.rating import rate
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.rating import RateImages
from tests.small_raters import clip, dino, siglip

DRAW = np.random.default_rng()
PROMPTS = ("a red star", "a blue circle on the left", "")
RATERS = {"clip": clip, "siglip": siglip, "dino": dino}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The three models, and images of several shapes with lists of them."""
    root = tmp_path_factory.mktemp("rating")
    for name, make in RATERS.items():
        make(root / name)
    for name, count in (("drawn", len(PROMPTS)), ("trained", 2)):
        rows = []
        for number in range(count):
            path = root / f"{name}-{number}.png"
            shape = *DRAW.integers(20, 70, 2), 3
            Image.fromarray(DRAW.integers(0, 255, shape, dtype=np.uint8)).save(path)
            rows.append({"file_name": str(path)} | ({"prompt": PROMPTS[number]} if name == "drawn" else {}))
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


def rated(folder: Path, **more: Any) -> list[dict[str, Any]]:
    given = {"image_list": str(folder / "drawn.jsonl"), "train_list": str(folder / "trained.jsonl"), "device": "cpu", **more}
    report = rate(flat.build(RateImages, given).rating)
    return list(report.values["images"])


@pytest.mark.parametrize("name", ["clip", "siglip"])
@torch.no_grad()
def test_how_well_an_image_shows_its_prompt_is_the_model_s_own_logit(name: str, folder: Path) -> None:
    model, processor = (kind.from_pretrained(folder / name) for kind in (AutoModel, AutoProcessor))
    rows = rated(folder, clip_model=str(folder / name))
    assert [row["file_name"] for row in rows] == [str(folder / f"drawn-{number}.png") for number in range(3)]
    assert rows[2]["prompt"] is None, "without a prompt there is nothing to show"
    for row, prompt in zip(rows[:2], PROMPTS, strict=False):
        image, padding = Image.open(row["file_name"]).convert("RGB"), "max_length" if name == "siglip" else False
        given = processor(images=image, text=[prompt], padding=padding, max_length=16, truncation=True, return_tensors="pt")
        logit = model(**given).logits_per_image[0, 0]
        cosine = (logit - getattr(model, "logit_bias", torch.zeros(1))) / model.logit_scale.exp()
        assert row["prompt"] == pytest.approx(float(cosine.squeeze()), abs=1e-5) and row["likeness"] is None


@pytest.mark.parametrize("name", list(RATERS))
@torch.no_grad()
def test_likeness_is_the_mean_cosine_with_the_training_images(name: str, folder: Path) -> None:
    model, processor = (kind.from_pretrained(folder / name) for kind in (AutoModel, AutoImageProcessor))

    def made(path: str) -> torch.Tensor:
        given = processor(images=Image.open(path).convert("RGB"), return_tensors="pt")
        if name == "clip":
            return model.visual_projection(model.vision_model(**given).pooler_output)[0]
        return (model if name == "dino" else model.vision_model)(**given).pooler_output[0]

    rows = rated(folder, image_model=str(folder / name))
    trained = [made(str(folder / f"trained-{number}.png")) for number in range(2)]
    for row in rows:
        cosines = [torch.cosine_similarity(made(row["file_name"]), one, dim=0) for one in trained]
        assert row["likeness"] == pytest.approx(float(sum(cosines) / 2), abs=1e-5) and row["prompt"] is None


def test_what_is_no_such_model_or_list_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    for more, sentence in (
        ({"clip_model": str(folder / "dino")}, "reads no texts; give a CLIP or SigLIP model"),
        ({"clip_model": str(tmp_path / "gone")}, "clip_model: there is no folder"),
        ({"image_model": str(tmp_path)}, "image_model: .* cannot be loaded"),
        ({"clip_model": str(folder / "clip"), "image_list": str(tmp_path / "gone")}, "image_list: .* cannot be read"),
        ({}, "clip_model and image_model are missing"),
        ({"image_model": str(folder / "dino"), "train_list": None}, "train_list is missing"),
    ):
        with pytest.raises(OptionError, match=sentence):
            rated(folder, **more)
    broken = tmp_path / "broken.jsonl"
    broken.write_text("[1]\n")
    with pytest.raises(OptionError, match="no JSON object with file_name"):
        rated(folder, clip_model=str(folder / "clip"), image_list=str(broken))
    broken.write_text(json.dumps({"file_name": str(broken), "prompt": "a star"}))
    with pytest.raises(OptionError, match=r"image_list: broken\.jsonl "):
        rated(folder, clip_model=str(folder / "clip"), image_list=str(broken))
