"""Masks by a model: transformers' classes with small random weights, compared with the classes themselves; and a work that goes on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate
from transformers import (
    AutoImageProcessor,
    AutoModelForSemanticSegmentation,
    AutoModelForUniversalSegmentation,
    AutoTokenizer,
    Sam2Model,
    Sam3Model,
    Sam3TrackerModel,
)

from sd_scripts.dataset.mask_files import MaskBook
from sd_scripts.library.masking import models
from sd_scripts.library.tools import masking, run
from sd_scripts.schema.command_line import parse_tool
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.flat import build
from sd_scripts.schema.masking import MaskImages, MaskSection
from tests import small_captioners, small_segmenters

HERE = {"local_files_only": True}


def noise(rng: np.random.Generator) -> Image.Image:
    height, width = map(int, rng.integers(24, 120, 2))
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def options_for(folder: Path | str = ".", model: Path | str = "alpha", **values: Any) -> MaskSection:
    return MaskSection(image_dir=str(folder), mask_model=str(model), device="cpu", **values)


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("segformer", AutoModelForSemanticSegmentation),
        pytest.param("mask2former", AutoModelForUniversalSegmentation, marks=pytest.mark.long),
    ],
)
def test_what_counts_are_the_classes_that_were_asked_for(name: str, taken: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    folder = small_segmenters.build(name, tmp_path / name, seed=int(rng.integers(2**31)))
    image, asked = noise(rng), [[], ["person"], ["Car", "sky"], ["automobile", "person"]][rng.integers(4)]
    numbers = {"person": 1, "car": 2, "automobile": 2, "sky": 3}
    wanted = {numbers[each.lower()] for each in asked} or {1, 2, 3}
    told = models.opened(folder, options_for(model=folder, mask_labels=tuple(asked))).mask(image)
    processor, model = AutoImageProcessor.from_pretrained(folder, **HERE), taken.from_pretrained(folder, **HERE).eval()
    with torch.no_grad():
        answer = model(**processor(images=[image], return_tensors="pt"))
    classes = processor.post_process_semantic_segmentation(answer, target_sizes=[image.size[::-1]])[0].numpy()
    np.testing.assert_array_equal(told > 0, np.isin(classes, list(wanted)))
    assert set(np.unique(told)) <= {0, 255}


@pytest.mark.parametrize(("name", "taken", "mean", "std"), [
    ("sam2", Sam2Model, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    pytest.param("sam3", Sam3TrackerModel, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), marks=pytest.mark.long),
])  # fmt: skip
def test_sam_is_asked_at_the_points_and_in_the_box_that_were_given(name: str, taken: Any, mean: Any, std: Any, tmp_path: Path) -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    folder = small_segmenters.build(name, tmp_path / name, seed=int(rng.integers(2**31)))
    model = taken.from_pretrained(folder, **HERE).eval()
    side = small_segmenters.SIDE if name == "sam2" else 56
    # An image of the model's own size, which nothing resizes.
    image = Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
    points = [(0.25, 0.5, True)] + ([(0.75, 0.125, False)] if rng.random() < 0.5 else [])
    box = (0.125, 0.25, 0.875, 0.75) if rng.random() < 0.5 else None
    asked = options_for(
        model=folder,
        mask_points=tuple(f"{'' if is_on else '-'}{x}:{y}" for x, y, is_on in points),
        mask_box=None if box is None else ":".join(map(str, box)),
    )
    told = models.opened(folder, asked).mask(image)
    pixels = (torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[
        :, None, None
    ]
    given: dict[str, Any] = {
        "input_points": torch.tensor([[[[x * side, y * side] for x, y, _ in points]]]),
        "input_labels": torch.tensor([[[int(is_on) for *_, is_on in points]]]),
    }
    if box is not None:
        given["input_boxes"] = torch.tensor([[[number * side for number in box]]])
    with torch.no_grad():
        answer = model(pixel_values=pixels[None], multimask_output=len(points) == 1 and box is None, **given)
    logits = answer.pred_masks[0, 0, int(answer.iou_scores[0, 0].argmax())]
    whole = interpolate(logits[None, None], (side, side), mode="bilinear", align_corners=False)[0, 0].numpy()
    clear = np.abs(whole) > 1e-4 * np.abs(whole).max()
    assert clear.mean() > 0.9
    np.testing.assert_array_equal((told > 0)[clear], (whole > 0)[clear])


def test_sam_3_finds_everything_that_the_words_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    folder = small_segmenters.build("sam3_words", tmp_path / "sam3", seed=int(rng.integers(2**31)))
    model, tokenizer = Sam3Model.from_pretrained(folder, **HERE).eval(), AutoTokenizer.from_pretrained(folder, **HERE)
    image = Image.fromarray(rng.integers(0, 256, (56, 56, 3), dtype=np.uint8))
    pixels = ((torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 - 0.5) / 0.5)[None]
    asked = ("a red star", "circle")
    scores, masks = [], []
    for words in asked:
        given = tokenizer(words, padding="max_length", max_length=32, return_tensors="pt")
        with torch.no_grad():
            told = model(pixel_values=pixels, input_ids=given["input_ids"], attention_mask=given["attention_mask"])
        scores.append(told.pred_logits[0].sigmoid() * told.presence_logits[0].sigmoid())
        masks.append(interpolate(told.pred_masks.sigmoid(), (56, 56), mode="bilinear", align_corners=False)[0])
    # Random weights believe in nothing much: some of the things are to count, of one word or the other.
    least = float(torch.cat(scores).sort().values[-4:-2].mean())
    monkeypatch.setattr(models, "LEAST_SCORE", least)
    shares = torch.cat([mask[score > least] for mask, score in zip(masks, scores, strict=True)]).numpy()
    told_of = models.opened(folder, options_for(model=folder, mask_labels=asked)).mask(image)
    clear = (np.abs(shares - 0.5) > 1e-5).all(0)
    assert len(shares) and clear.mean() > 0.9
    np.testing.assert_array_equal((told_of > 0)[clear], (shares > 0.5).any(0)[clear])


@pytest.mark.parametrize(("name", "values", "says"), [
    ("segformer", {"mask_labels": ("dog",)}, r"no class 'dog'; its classes are background, person, car, automobile, sky"),
    ("sam2", {}, "give mask_points or mask_box"),
    ("sam3_words", {}, "asks in words what counts"),
    ("sam3_words", {"mask_labels": ("a hat",), "mask_box": "0:0:1:1"}, "is asked by words; leave mask_points and mask_box empty"),
])  # fmt: skip
def test_a_model_that_is_not_told_what_to_find_says_what_it_needs(name: str, values: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = small_segmenters.build(name, tmp_path / name)
    with pytest.raises(OptionError, match=says):
        models.opened(folder, options_for(model=folder, **values))


def test_a_model_without_a_background_wants_names_and_one_that_writes_makes_no_masks(tmp_path: Path) -> None:
    folder = small_segmenters.build("segformer", tmp_path / "one")
    config = json.loads((folder / "config.json").read_text())
    config["id2label"]["0"] = "wall"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(OptionError, match="no class background, so say what counts; its classes are wall, person"):
        models.opened(folder, options_for(model=folder))
    with pytest.raises(OptionError, match="is a florence2, which makes no masks here"):
        models.opened(small_captioners.build("florence", tmp_path / "two"), options_for())
    (tmp_path / "one" / "config.json").write_text("{}")
    with pytest.raises(OptionError, match="that transformers knows"):
        models.opened(folder, options_for(model=folder))


@pytest.mark.parametrize("values", [
    {"mask_points": ("0.5",)}, {"mask_points": ("0.5:1.5",)}, {"mask_points": ("-0.5:0.5",)}, {"mask_points": ("a:b",)},
    {"mask_points": ("nan:0.5",)}, {"mask_box": "0.5:0.5:0.4:0.9"}, {"mask_box": "0.1:0.2"},
])  # fmt: skip
def test_a_place_that_is_none_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(values))):
        build(MaskImages, {"image_dir": ".", "mask_model": "alpha", **values})


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Images, two of them with alpha channels."""
    rng = np.random.default_rng(4)
    folder = tmp_path / "mine"
    (folder / "deep").mkdir(parents=True)
    for number in range(4):
        noise(rng).save(folder / ("deep" if number % 2 else "") / f"{number}.png")
    for name in ("4.png", "deep/5.png"):
        pixels = rng.integers(0, 256, (3000 if name == "4.png" else 20, 30, 4), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


def masks_in(folder: Path) -> dict[str, Any]:
    found = sorted(folder.rglob("*-masklabel.png"))
    return {path.relative_to(folder).as_posix(): np.array(Image.open(path)) for path in found if ".masks" not in path.parts}


def test_alpha_channels_become_masks_by_the_command_line_too(pictures: Path) -> None:
    line = ["--image_dir", str(pictures), "--mask_model", "alpha", "--invert_mask", "--max_image_side", "1500"]
    assert run.start(parse_tool(MaskImages, line)) == 0
    written = masks_in(pictures)
    assert {name: mask.shape for name, mask in written.items()} == {"4-masklabel.png": (1500, 15), "deep/5-masklabel.png": (20, 30)}
    alpha = np.array(Image.open(pictures / "deep/5.png"))[..., 3]
    np.testing.assert_array_equal(written["deep/5-masklabel.png"], 255 - alpha)


@pytest.mark.long
def test_a_work_that_was_stopped_goes_on_and_leaves_what_is_there(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_segmenters.build("sam2", tmp_path / "sam", seed=5)
    mine = Image.fromarray(np.full((5, 5), 77, np.uint8))
    mine.save(pictures / "0-masklabel.png")
    options = options_for(pictures, folder, mask_box="0.1:0.1:0.9:0.9", history_order="once")
    seen = 0
    found = models.Sam.mask

    def stops(self: models.Sam, image: Image.Image) -> Any:
        nonlocal seen
        seen += 1
        if seen == 3:
            raise KeyboardInterrupt
        return found(self, image)

    monkeypatch.setattr(models.Sam, "mask", stops)
    with pytest.raises(KeyboardInterrupt):
        masking.mask(options)
    begun = masks_in(pictures)
    monkeypatch.setattr(models.Sam, "mask", found)
    report = masking.mask(options)
    after = masks_in(pictures)
    told = dict(report.values)
    assert told["kept"] == 1 and told["done_before"] == len(begun) - 1
    assert told["written"] + told["done_before"] + len(told["empty"]) == 5
    np.testing.assert_array_equal(after["0-masklabel.png"], np.full((5, 5), 77))
    assert all(np.array_equal(after[name], mask) for name, mask in begun.items())
    what, done, _ = MaskBook(pictures).undo()
    assert what == "masks by sam" and len(done) == len(after) - 1 and list(masks_in(pictures)) == ["0-masklabel.png"]
    # For all, somebody else's mask is written over, and comes back to the byte.
    before = (pictures / "0-masklabel.png").read_bytes()
    masking.mask(options_for(pictures, folder, mask_points=("0.5:0.5",), overwrite=True))
    assert (pictures / "0-masklabel.png").read_bytes() != before
    MaskBook(pictures).undo()
    assert (pictures / "0-masklabel.png").read_bytes() == before


def test_a_list_may_name_masks_in_the_folder_of_masks_and_nowhere_else(pictures: Path, tmp_path: Path) -> None:
    there, listed = tmp_path / "masks", tmp_path / "list.jsonl"
    there.mkdir()
    rows = [{"file_name": "4.png", "mask_file": str(there / "mine" / "4.png")}, {"file_name": "deep/5.png"}]
    listed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    masking.mask(options_for(pictures, image_list=str(listed), mask_dir=str(there)))
    assert (there / "mine" / "4.png").is_file() and (there / "deep" / "5.png").is_file() and masks_in(pictures) == {}
    for row in ({"file_name": "../else.png"}, {"file_name": "4.png", "mask_file": str(tmp_path / "else.png")}, {"file": "4.png"}):
        listed.write_text(json.dumps(row))
        with pytest.raises(OptionError, match="image_list"):
            masking.mask(options_for(pictures, image_list=str(listed)))
