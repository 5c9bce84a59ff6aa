"""Faces that the edge of an image, or the cut to the training size, goes through, by a detector that somebody has given."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForObjectDetection

from sd_scripts.dataset import images
from sd_scripts.dataset.progress import Bar
from sd_scripts.library.captioning.captioner import folder_of
from sd_scripts.library.captioning.vision_models import HERE, loaded
from sd_scripts.library.core.devices import best_device
from sd_scripts.schema.errors import OptionError, Problem, first_line
from sd_scripts.schema.faces import FaceSection
from sd_scripts.schema.outside import json_of
from sd_scripts.schema.rating import RatingSection

from .beside_images import named
from .report import Report

Box = tuple[float, float, float, float]
"""Left, top, right and bottom as shares of the image."""
WHOLE: Box = (0.0, 0.0, 1.0, 1.0)
AT_EDGE = 0.005
"""A face that comes so near to the image's edge, as a share of its side, is taken to go on behind it."""
CUT = 0.95
"""A face of which less than this share is left after the cut is cut off."""
log = logging.getLogger("sd_scripts")


@dataclass(frozen=True)
class Sight:
    """An image and what of it training shows."""

    path: Path
    name: str
    frame: Box


def find(options: FaceSection) -> Report:
    """Names the images whose faces are cut. Raises OptionError."""
    root = Path(options.image_dir).expanduser().absolute()
    looked_at = sights(options.image_dir, options.image_list, root)
    detector = Detector(folder_of("face_model", options.face_model), options)
    rows: list[dict[str, Any]] = []
    bad = []
    faces = 0
    with Bar(total=len(looked_at), unit="image", mininterval=0.5) as bar:
        for sight in looked_at:
            try:
                image = Image.fromarray(images.decode(sight.path).rgb)
            except (images.BadImage, OSError) as err:
                bad.append(f"{sight.name} {err}")
            else:
                image.thumbnail((options.max_image_side, options.max_image_side), Image.Resampling.LANCZOS)
                found = detector.boxes(image)
                faces += len(found)
                rows += [
                    {"file": sight.name, "why": why} for why in dict.fromkeys(filter(None, (fault(box, sight.frame) for box in found)))
                ]
            bar.update(1)
    return _report(rows, faces, len(looked_at), bad)


def fault(face: Box, frame: Box) -> str:
    """What is wrong with a face in an image of which training shows a frame; "" for nothing."""
    left, top, right, bottom = face
    if min(left, top, 1 - right, 1 - bottom) <= AT_EDGE:
        return "a face at the edge of the image"
    across = max(0.0, min(right, frame[2]) - max(left, frame[0]))
    down = max(0.0, min(bottom, frame[3]) - max(top, frame[1]))
    whole = (right - left) * (bottom - top)
    if across * down == 0:
        return "a face outside of the cut"
    return "a face that the cut goes through" if across * down < CUT * whole else ""


def sights(image_dir: str, image_list: str | None, root: Path) -> list[Sight]:
    """What a list names, or else all images in root, the path of image_dir. Raises OptionError, also where there are none."""
    if not root.is_dir():
        raise OptionError(Problem("image_dir", f"image_dir: there is no folder {image_dir}"))
    found = _listed(image_list, root) if image_list is not None else _inside(root)
    if not found:
        raise OptionError(Problem("image_dir", f"image_dir: there are no images in {image_dir}"))
    return found


def _inside(root: Path) -> list[Sight]:
    found = (path for path in sorted(root.rglob("*")) if path.suffix.lower() in images.EXTENSIONS and path.is_file())
    names = [path.relative_to(root) for path in found]
    return [Sight(root / name, name.as_posix(), WHOLE) for name in names if not any(part.startswith(".") for part in name.parts)]


def _listed(image_list: str, root: Path) -> list[Sight]:
    try:
        text = Path(image_list).expanduser().read_text(encoding="utf-8")
        rows = [json_of(line) for line in text.splitlines() if line.strip()]
        found = [Sight(root / row["file_name"], str(row["file_name"]), _frame(row.get("frame"))) for row in rows]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as err:
        raise OptionError(Problem("image_list", f"image_list: {image_list} is not JSON lines with file_name ({err})")) from err
    outside = [sight.path for sight in found if ".." in sight.path.parts or not sight.path.is_relative_to(root)]
    if outside:
        raise OptionError(Problem("image_list", f"image_list: {outside[0]} lies outside of {root}"))
    return found


def _frame(given: Any) -> Box:
    if given is None:
        return WHOLE
    left, top, width, height = (float(number) for number in given)
    return (left, top, left + width, top + height)


class Detector:
    """A model that finds things, of which some classes are faces."""

    def __init__(self, folder: Path, options: FaceSection | RatingSection) -> None:
        self._threshold = options.face_threshold
        self._device = best_device(options.device)
        try:
            self._processor = AutoImageProcessor.from_pretrained(folder, **HERE)
        except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as err:
            raise _problem(f"the image processor of {folder.name} cannot be loaded: {first_line(err)}") from err
        if not hasattr(self._processor, "post_process_object_detection"):
            raise _problem(f"{folder.name} finds no things in boxes; take a model for object detection")
        self._model = loaded(AutoModelForObjectDetection, "face_model", folder, torch.float32).to(self._device)
        names = {str(name).strip().casefold(): int(number) for number, name in self._model.config.id2label.items()}
        unknown = [name for name in options.face_labels if name.strip().casefold() not in names]
        if unknown or not options.face_labels:
            raise _problem(f"{folder.name} has no class {unknown[:1]}; its classes are {', '.join(list(names)[:12])}", "face_labels")
        self._wanted = {names[name.strip().casefold()] for name in options.face_labels}

    @torch.inference_mode()
    def boxes(self, image: Image.Image) -> list[Box]:
        """The faces in an RGB image."""
        given = self._processor(images=[image], return_tensors="pt").to(self._device)
        told = self._model(**given)
        sizes = [(image.height, image.width)]
        found = self._processor.post_process_object_detection(told, threshold=self._threshold, target_sizes=sizes)[0]
        pairs = zip(found["labels"].tolist(), found["boxes"].tolist(), strict=True)
        return [
            (left / image.width, top / image.height, right / image.width, bottom / image.height)
            for label, (left, top, right, bottom) in pairs
            if label in self._wanted
        ]


def _problem(text: str, option: str = "face_model") -> OptionError:
    return OptionError(Problem(option, f"{option}: {text}"))


def _report(rows: Sequence[dict[str, Any]], faces: int, count: int, bad: Sequence[str]) -> Report:
    lines = [f"faces found: {faces}, in {count} images"]
    for why in dict.fromkeys(str(row["why"]) for row in rows):
        names = [str(row["file"]) for row in rows if row["why"] == why]
        lines.append(f"images with {why}: {named(names)}")
    if not rows:
        lines.append("none of them is cut off")
    lines += [f"cannot be read: {named(bad)}"] if bad else []
    return Report(lines, {"faces": faces, "images": count, "cut": list(rows), "unreadable": list(bad)})
