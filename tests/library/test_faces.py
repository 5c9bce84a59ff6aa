"""Faces that are cut off: told from boxes that were planted, and the way from an image to boxes with a small random model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForObjectDetection

from sd_scripts.library.tools import faces, run
from sd_scripts.schema.command_line import parse_tool
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.faces import FaceSection, FindFaces
from tests import small_segmenters


def test_planted_faces_are_told_whole_cut_at_the_edge_and_left_out() -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    for _ in range(200):
        left, top = rng.uniform(0.05, 0.3, 2)
        width, height = rng.uniform(0.5, 0.65, 2)
        frame = (left, top, left + width, top + height)
        size = rng.uniform(0.05, 0.15)
        # Whole inside, with a little room.
        x, y = left + rng.uniform(0.01, width - size - 0.01), top + rng.uniform(0.01, height - size - 0.01)
        assert faces.fault((x, y, x + size, y + size), frame) == ""
        # Pushed over one side of the cut by a tenth to nine tenths of itself, and not to the image's edge.
        over = rng.uniform(0.1, 0.9) * size
        if left - over > 0.01:
            assert faces.fault((left - over, y, left - over + size, y + size), frame) == "a face that the cut goes through"
        if left > size + 0.02:
            assert faces.fault((left - size - 0.01, y, left - 0.01, y + size), frame) == "a face outside of the cut"
        # At an edge of the image, wherever the cut is.
        for box in ((0.0, y, size, y + size), (x, 0.001, x + size, size), (1 - size, y, 1.0, y + size), (x, 1 - size, x + size, 0.998)):
            assert faces.fault(box, frame) == "a face at the edge of the image"


def test_what_the_model_finds_comes_back_as_shares_of_the_image(tmp_path: Path) -> None:
    rng = np.random.default_rng(random.getrandbits(64))
    folder = small_segmenters.build("yolos", tmp_path / "yolos", seed=int(rng.integers(2**31)))
    image = Image.fromarray(rng.integers(0, 256, (int(rng.integers(30, 90)), int(rng.integers(30, 90)), 3), dtype=np.uint8))
    options = FaceSection(image_dir=".", face_model=str(folder), face_threshold=0.0, device="cpu")
    told = faces.Detector(folder, options).boxes(image)
    processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True)
    model = AutoModelForObjectDetection.from_pretrained(folder, local_files_only=True).eval()
    with torch.no_grad():
        answer = model(**processor(images=[image], return_tensors="pt"))
    kinds = answer.logits[0, :, :-1].argmax(-1)
    middle, size = answer.pred_boxes[0, :, :2], answer.pred_boxes[0, :, 2:]
    wanted = torch.cat([middle - size / 2, middle + size / 2], 1)[kinds == 1]
    np.testing.assert_allclose(np.array(told).reshape(-1, 4), wanted.numpy(), atol=1e-5)
    with pytest.raises(OptionError, match="has no class"):
        faces.Detector(folder, options.model_copy(update={"face_labels": ("nose",)}))


def test_a_work_names_the_images_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small_segmenters.build("yolos", tmp_path / "yolos", seed=2)
    (tmp_path / "mine").mkdir()
    for name in ("a.png", "b.png"):
        Image.fromarray(np.full((40, 60, 3), 90, np.uint8)).save(tmp_path / "mine" / name)
    listed, report = tmp_path / "list.jsonl", tmp_path / "report.json"
    listed.write_text("".join(json.dumps({"file_name": name, "frame": [0.25, 0.0, 0.5, 1.0]}) + "\n" for name in ("a.png", "b.png")))
    line = ["--image_dir", str(tmp_path / "mine"), "--image_list", str(listed), "--face_model", str(folder), "--report", str(report)]
    assert run.start(parse_tool(FindFaces, [*line, "--face_threshold", "0"])) == 0
    told: dict[str, Any] = json.loads(report.read_text())
    assert told["images"] == 2 and {row["file"] for row in told["cut"]} <= {"a.png", "b.png"} and told["unreadable"] == []
    assert sorted(path.name for path in (tmp_path / "mine").iterdir()) == ["a.png", "b.png"]
    listed.write_text(json.dumps({"file_name": "../else.png"}))
    with pytest.raises(SystemExit):
        run.start(parse_tool(FindFaces, line))
