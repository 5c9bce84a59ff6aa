"""Images are rated by models of transformers as those say it themselves, and mistakes are sentences."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModel, AutoModelForObjectDetection, AutoProcessor

from sd_scripts.library.tools.rating import cut, rate
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.rating import RateImages
from tests import small_segmenters
from tests.small_raters import arcface, clip, dino, siglip

DRAW = np.random.default_rng(random.getrandbits(64))
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


def test_a_face_is_cut_out_square_with_a_tenth_more_on_each_side() -> None:
    image = Image.new("RGB", (200, 100), (10, 20, 30))
    image.paste((200, 100, 50), (60, 20, 100, 60))
    inside = np.asarray(cut(image, (0.3, 0.2, 0.5, 0.6)))
    assert inside.shape == (48, 48, 3) and (inside[4:44, 4:44] == (200, 100, 50)).all()
    assert (inside[:4] == (10, 20, 30)).all() and (inside[:, 44:] == (10, 20, 30)).all()
    outside = np.asarray(cut(image, (0.0, 0.0, 0.1, 0.4)))
    assert outside.shape == (48, 48, 3) and not outside[:4].any() and (outside[4:, 14:] == (10, 20, 30)).all()


@torch.no_grad()
def test_the_likeness_of_faces_is_that_of_the_largest_ones_and_images_without_one_are_counted(folder: Path, tmp_path: Path) -> None:
    finder = small_segmenters.build("yolos", tmp_path / "yolos", seed=int(DRAW.integers(2**31)))
    model = AutoModelForObjectDetection.from_pretrained(finder)
    model.class_labels_classifier.layers[-1].bias[1] += 3  # all that it finds is a face, more or less surely
    model.save_pretrained(finder)
    processor = AutoImageProcessor.from_pretrained(finder)
    weights = DRAW.normal(size=(3, 8)).astype(np.float32)
    network = arcface(tmp_path / "w600k.onnx", weights)

    def found(path: Path) -> tuple[float, np.ndarray]:
        """How sure the surest face is, and what the network says of the largest."""
        image = Image.open(path).convert("RGB")
        told = processor.post_process_object_detection(
            model(**processor(images=[image], return_tensors="pt")), threshold=threshold, target_sizes=[image.size[::-1]]
        )[0]
        if not len(told["boxes"]):
            return 0.0, weights
        left, top, right, bottom = max(told["boxes"].tolist(), key=lambda box: (box[2] - box[0]) * (box[3] - box[1]))
        half, x, y = 0.6 * max(right - left, bottom - top), (left + right) / 2, (top + bottom) / 2
        face = image.crop((round(x - half), round(y - half), round(x + half), round(y + half))).resize((32, 32), Image.Resampling.BICUBIC)
        vector = (np.asarray(face, np.float64) / 127.5 - 1).mean((0, 1)) @ weights
        return float(told["scores"].max()), vector / np.linalg.norm(vector)

    drawn, trained = ([folder / f"{name}-{number}.png" for number in range(count)] for name, count in (("drawn", 3), ("trained", 2)))
    threshold = 0.0
    sure = sorted((found(path)[0], path) for path in (*drawn, *trained))
    threshold = (sure[0][0] + sure[1][0]) / 2
    without = sure[0][1]
    told = {path: found(path)[1] for path in (*drawn, *trained) if path != without}
    known = [told[path] for path in trained if path in told]
    given = {"image_list": str(folder / "drawn.jsonl"), "train_list": str(folder / "trained.jsonl"), "device": "cpu"}
    given |= {"face_model": str(finder), "face_likeness_model": str(network)}
    report = rate(flat.build(RateImages, {**given, "face_threshold": threshold}).rating)
    for row, path in zip(report.values["images"], drawn, strict=True):
        assert row["prompt"] is None and row["likeness"] is None
        mean = float(np.mean([told[path] @ one for one in known])) if path in told else None
        assert row["face"] == (None if mean is None else pytest.approx(mean, abs=1e-4))
    count = int(without in drawn)
    assert (report.values["faceless"], report.values["faceless_trained"]) == ([str(without)] * count, [str(without)] * (1 - count))
    assert (
        f"images without a face: {count} of 3" in report.lines and report.lines[-1] == f"training images without a face: {1 - count} of 2"
    )
    report = rate(flat.build(RateImages, {**given, "face_threshold": 1}).rating)
    assert [row["face"] for row in report.values["images"]] == [None] * 3
    assert report.lines == ["images without a face: 3 of 3", "training images without a face: 2 of 2"]
    given["face_likeness_model"] = str(folder / "dino")
    assert all(
        -1.001 <= row["face"] <= 1.001 for row in rate(flat.build(RateImages, {**given, "face_threshold": 0}).rating).values["images"]
    )
    arcface(tmp_path / "second.onnx", weights)
    for wrong, sentence in (
        (tmp_path, r"several ONNX files \(second\.onnx, w600k\.onnx\)"),
        (folder / "drawn.jsonl", "cannot be loaded"),
        (finder, "face_likeness_model: "),
    ):
        with pytest.raises(OptionError, match=sentence):
            rated(folder, face_model=str(finder), face_likeness_model=str(wrong))


def test_what_is_no_such_model_or_list_is_a_sentence(folder: Path, tmp_path: Path) -> None:
    for more, sentence in (
        ({"clip_model": str(folder / "dino")}, "reads no texts; give a CLIP or SigLIP model"),
        ({"clip_model": str(tmp_path / "gone")}, "clip_model: there is no folder"),
        ({"image_model": str(tmp_path)}, "image_model: .* cannot be loaded"),
        ({"clip_model": str(folder / "clip"), "image_list": str(tmp_path / "gone")}, "image_list: .* cannot be read"),
        ({}, "clip_model, image_model and face_likeness_model are missing"),
        ({"face_model": str(folder / "dino")}, "face_likeness_model is missing: face_model works with it"),
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
