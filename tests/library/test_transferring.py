"""What lgt_infer.py does around the model: sizes, upright images, sheets, names of files, too little memory."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from sd_scripts.families.lgt import script as transferring
from sd_scripts.families.lgt.model import Lgt
from sd_scripts.families.lgt.script import SHEET_PAIRS, named, opened, sheet_of, size_for, transfer
from sd_scripts.families.lgt.tools import TransferSection
from sd_scripts.library.render.sample import GAP
from sd_scripts.schema.errors import OptionError

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, made for 64 x 64, as a single file."""
    path = tmp_path_factory.mktemp("saved") / "small.safetensors"
    Lgt().save(Lgt().tiny(), path, "safetensors", None, {})
    return path


@pytest.mark.parametrize(
    ("size", "expected"),
    [((100, 100), (64, 64)), ((4000, 3000), (80, 48)), ((300, 400), (48, 80)), ((1000, 10), (640, 16)), ((1, 1), (64, 64))],
)
def test_an_image_is_worked_at_about_the_trained_area_in_its_own_aspect_ratio(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert size_for(size, 64 * 64, 16) == expected


def test_sizes_are_the_nearest_multiples_of_the_sides_that_keep_area_and_aspect() -> None:
    for width, height in ((640, 480), (333, 777), (1920, 1080)):
        found = size_for((width, height), 256 * 256, 32)
        exact = (math.sqrt(256 * 256 * width / height), math.sqrt(256 * 256 * height / width))
        assert all(side % 32 == 0 and abs(side - wanted) <= 16 for side, wanted in zip(found, exact, strict=True))


def order(file: Path, size: tuple[int, int]) -> transferring.Order:
    return transferring.Order(file, size, 0)


def test_an_image_is_turned_upright_and_its_middle_is_cut_without_squeezing(tmp_path: Path) -> None:
    pixels = np.zeros((40, 100, 3), dtype=np.uint8)
    pixels[:, :50, 0] = 255
    exif = Image.Exif()
    exif[274] = 6  # to be turned clockwise by a quarter: the left half comes to the top
    Image.fromarray(pixels).save(tmp_path / "turned.png", exif=exif)
    image = np.asarray(opened(order(tmp_path / "turned.png", (16, 32))))
    assert image.shape == (32, 16, 3) and (image[:15, :, 0] > 250).all() and (image[17:, :, 0] < 5).all()
    # A disc stays one when the frame is much wider than the cut.
    y, x = np.mgrid[:60, :200]
    disc = ((x - 99.5) ** 2 + (y - 29.5) ** 2 < 15**2)[..., None] * np.full(3, 255, dtype=np.uint8)
    Image.fromarray(disc.astype(np.uint8)).save(tmp_path / "disc.png")
    cut = np.asarray(opened(order(tmp_path / "disc.png", (48, 48))))[..., 0] > 127
    assert (cut.any(axis=0).sum(), cut.any(axis=1).sum()) == (24, 24)


@pytest.mark.parametrize(("count", "columns", "rows"), [(1, 1, 1), (3, 1, 3), (5, 2, 3)])
def test_a_sheet_has_each_result_to_the_right_of_its_source(count: int, columns: int, rows: int) -> None:
    pairs = [(Image.new("RGB", (6, 4), (number, 0, 0)), Image.new("RGB", (6, 4), (number, 9, 0))) for number in range(count)]
    sheet = sheet_of(pairs)
    assert sheet.size == (2 * columns * (6 + GAP) - GAP, rows * (4 + GAP) - GAP)
    for number in range(count):
        corner = (number % columns * 2 * (6 + GAP), number // columns * (4 + GAP))
        assert sheet.getpixel(corner) == (number, 0, 0) and sheet.getpixel((corner[0] + 6 + GAP, corner[1])) == (number, 9, 0)


@pytest.mark.parametrize(
    ("style", "name"), [("monet", "monet"), ("", "average"), ("a 0.5, b/c 0.5", "a-0.5-b-c-0.5"), ("浮世絵", "浮世絵"), ("..", "..")]
)
def test_a_style_becomes_a_part_of_a_files_name(style: str, name: str) -> None:
    assert named(style) == name


def images(folder: Path, count: int) -> Path:
    folder.mkdir()
    for number in range(count):
        Image.new("RGB", (16, 16), (number, 3 * number, 100)).save(folder / f"{number:03}.png")
    return folder


def test_a_sheet_of_many_images_shows_the_first_and_says_so(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transferring, "SHEET_PAIRS", 2)
    image = images(tmp_path / "many", 3)
    report = transfer(
        TransferSection(
            ckpt=str(saved),
            image=str(image),
            target="line",
            steps=1,
            sampler="euler",
            size=(16, 16),
            out=str(tmp_path / "out"),
            device="cpu",
        )
    )
    assert "the sheet has the first 2 of them" in report.text and len(report.values["outputs"]) == 3
    with Image.open(report.values["grid"]) as sheet:
        assert sheet.size == (2 * (16 + GAP) - GAP, 2 * (16 + GAP) - GAP)
    assert SHEET_PAIRS > 2


def test_too_little_memory_is_a_sentence_and_finished_images_stay(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, met = Lgt.denoise, list[int]()

    def greedy(self: Lgt, parts: object, x_t: Tensor, *rest: object) -> Tensor:
        met.append(1)
        if len(met) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return own(self, parts, x_t, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Lgt, "denoise", greedy)
    options = TransferSection(
        ckpt=str(saved),
        image=str(images(tmp_path / "two", 2)),
        target="line",
        source="flat",
        steps=1,
        sampler="euler",
        out=str(tmp_path / "out"),
        device="cpu",
    )
    with pytest.raises(OptionError, match=r"size: 001.png at 64 x 64 does not fit into the memory of cpu; take a smaller size"):
        transfer(options)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["000_to_line.png"]


def test_the_latents_are_those_of_pixels_from_minus_one_to_one(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    own = Lgt.encode_images
    monkeypatch.setattr(Lgt, "encode_images", lambda self, parts, pixels: (seen.append(pixels), own(self, parts, pixels))[1])
    pixels = np.arange(256, dtype=np.uint8).repeat(3).reshape(16, 16, 3)
    Image.fromarray(pixels).save(tmp_path / "ramp.png")
    options = TransferSection(
        ckpt=str(saved), image=str(tmp_path / "ramp.png"), target="line", steps=1, size=(16, 16), out=str(tmp_path / "out"), device="cpu"
    )
    transfer(options)
    (given,) = seen
    assert given.dtype == torch.float32 and given.min() == -1 and given.max() == 1
    assert torch.allclose(given[0, 1].flatten(), torch.linspace(-1, 1, 256), atol=1e-6)
