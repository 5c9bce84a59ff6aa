"""How well images show their prompts, by CLIP or SigLIP, and how like training images they and their faces are, by models that look at
images.

All are cosines of what a model makes of two things (Radford et al. 2021; DINO's of all pairs as in DreamBooth, Ruiz et al. 2023; of faces
as ArcFace, Deng et al. 2019).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModel, AutoProcessor

from sd_scripts.dataset import images
from sd_scripts.dataset.progress import Bar
from sd_scripts.library.captioning.captioner import folder_of
from sd_scripts.library.captioning.tagger import session_of
from sd_scripts.library.captioning.vision_models import HERE, loaded
from sd_scripts.library.core.devices import best_device
from sd_scripts.schema.errors import OptionError, Problem, first_line
from sd_scripts.schema.outside import json_of
from sd_scripts.schema.rating import RatingSection

from .faces import Box, Detector
from .report import Report

FACE_SIDE = 112
"""Of what ArcFace's networks see, where a file does not say."""


@dataclass(frozen=True)
class ListedImage:
    """An image of a list, with its prompt where it has one."""

    path: Path
    prompt: str = ""


def rate(options: RatingSection) -> Report:
    """Rates the images. Raises OptionError."""
    drawn = listed("image_list", options.image_list)
    trained = listed("train_list", options.train_list) if options.train_list is not None else []
    device = best_device(options.device)
    by_prompt: list[float | None] = [None] * len(drawn)
    by_likeness: list[float | None] = [None] * len(drawn)
    by_face: list[float | None] = [None] * len(drawn)
    if options.clip_model is not None:
        reader = PromptReader("clip_model", options.clip_model, device)
        by_prompt = [
            reader.shows(opened(one.path), one.prompt) if one.prompt.strip() else None
            for one in Bar(drawn, desc="prompts", unit="image", delay=1)
        ]
    if options.image_model is not None:
        by_likeness = _likenesses(ImageViewer("image_model", options.image_model, device), drawn, trained)
    faces: dict[str, Any] = {}
    lines = []
    if options.face_likeness_model is not None:
        viewer = FaceViewer(options, device)
        by_face = _likenesses(viewer, drawn, trained)
        faces = {"faceless": sorted({str(one.path) for one in drawn} & viewer.faceless)}
        faces["faceless_trained"] = sorted({str(one.path) for one in trained} & viewer.faceless)
        lines = [
            f"images without a face: {len(faces['faceless'])} of {len(drawn)}",
            f"training images without a face: {len(faces['faceless_trained'])} of {len(trained)}",
        ]
    told = [
        {"file_name": str(one.path), "prompt": shown, "likeness": like, "face": face}
        for one, shown, like, face in zip(drawn, by_prompt, by_likeness, by_face, strict=True)
    ]
    kinds = (("agreement with the prompt", by_prompt), ("likeness to the training images", by_likeness), ("likeness of the faces", by_face))
    means = [(what, [value for value in values if value is not None]) for what, values in kinds]
    lines = [f"{what}: {sum(there) / len(there):.4f} (images: {len(there)})" for what, there in means if there] + lines
    return Report(lines, {"images": told, **faces})


def _likenesses(viewer: Viewer, drawn: Sequence[ListedImage], trained: Sequence[ListedImage]) -> list[float | None]:
    """The mean cosine of each image with the training images; None where the viewer sees nothing."""

    def seen(listed: Sequence[ListedImage], what: str) -> list[Tensor | None]:
        return [viewer.vector(one.path) for one in Bar(listed, desc=what, unit="image", delay=1)]

    known = [one for one in seen(trained, "training images") if one is not None]
    of_drawn = seen(drawn, "images")
    return [None if one is None or not known else float((torch.stack(known) @ one).mean()) for one in of_drawn]


def listed(option: str, file: str) -> list[ListedImage]:
    """What a list names. Raises OptionError for a file that is not there, or makes no sense, or is empty."""
    path = Path(file).expanduser()
    try:
        rows = [json_of(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        found = [ListedImage(Path(row["file_name"]), str(row.get("prompt", ""))) for row in rows]
    except OSError as err:
        raise OptionError(Problem(option, f"{option}: {file} cannot be read: {err.strerror}")) from err
    except (ValueError, TypeError, KeyError, AttributeError) as err:
        raise OptionError(Problem(option, f"{option}: {file} has a line that is no JSON object with file_name")) from err
    if not found:
        raise OptionError(Problem(option, f"{option}: {file} names no image"))
    return found


def opened(path: Path) -> Image.Image:
    """The image, upright, in RGB. Raises OptionError."""
    try:
        return Image.fromarray(images.decode(path).rgb)
    except images.BadImage as err:
        raise OptionError(Problem("image_list", f"image_list: {path.name} {err}")) from err


class PromptReader:
    """A model that has one space for images and texts."""

    def __init__(self, option: str, model: str, device: torch.device) -> None:
        """Raises OptionError."""
        folder = folder_of(option, model)
        self._device = device
        self._model = loaded(AutoModel, option, folder, torch.float32).to(device)
        if not hasattr(self._model, "get_text_features"):
            kind = self._model.config.model_type
            raise OptionError(Problem(option, f"{option}: {folder.name} ({kind}) reads no texts; give a CLIP or SigLIP model"))
        self._processor = _of(AutoProcessor, option, folder)
        config = self._model.config
        self._texts: dict[str, Any] = {"truncation": True, "max_length": config.text_config.max_position_embeddings}
        # SigLIP has learned from texts of one length, and sees no mask.
        self._texts["padding"] = "max_length" if "siglip" in config.model_type else True

    @torch.inference_mode()
    def shows(self, image: Image.Image, prompt: str) -> float:
        """The cosine of an image and its prompt."""
        given = self._processor(images=[image], text=[prompt], return_tensors="pt", **self._texts).to(self._device)
        made = self._model(**given)
        return float(torch.nn.functional.cosine_similarity(made.image_embeds.float(), made.text_embeds.float())[0])


class Viewer(Protocol):
    """Looks at images."""

    def vector(self, path: Path) -> Tensor | None:
        """What it makes of an image, a unit vector (D,); None where it sees nothing in it. Raises OptionError."""


class ImageViewer:
    """A model of transformers that looks at images."""

    def __init__(self, option: str, model: str, device: torch.device) -> None:
        """Raises OptionError."""
        folder = folder_of(option, model)
        self._device = device
        self._model = loaded(AutoModel, option, folder, torch.float32).to(device)
        self._processor = _of(AutoImageProcessor, option, folder)
        if not hasattr(self._model, "get_image_features") and "pixel_values" not in inspect.signature(self._model.forward).parameters:
            raise OptionError(Problem(option, f"{option}: {folder.name} ({self._model.config.model_type}) looks at no images"))

    def vector(self, path: Path) -> Tensor:
        return self.of(opened(path))

    @torch.inference_mode()
    def of(self, image: Image.Image) -> Tensor:
        """A unit vector (D,)."""
        given = self._processor(images=[image], return_tensors="pt").to(self._device)
        if hasattr(self._model, "get_image_features"):
            made = self._model.get_image_features(**given)
        else:
            made = self._model(**given)
        if not isinstance(made, Tensor):
            pooled = getattr(made, "pooler_output", None)
            made = made.last_hidden_state[:, 0] if pooled is None else pooled
        return torch.nn.functional.normalize(made[0].float().flatten(), dim=0).cpu()


class FaceNetwork:
    """A network in ONNX that looks at faces: RGB from -1 to 1."""

    def __init__(self, option: str, file: Path, device: torch.device) -> None:
        """Raises OptionError."""
        self._session = session_of(option, file, device.type)
        given = self._session.get_inputs()
        shape = given[0].shape
        if len(given) != 1 or len(shape) != 4 or shape[1] != 3:
            raise OptionError(Problem(option, f"{option}: {file.name} takes {[one.shape for one in given]}, not one image of 3 channels"))
        self._input, self._side = given[0].name, shape[2] if isinstance(shape[2], int) else FACE_SIDE

    def of(self, face: Image.Image) -> Tensor:
        """A unit vector (D,)."""
        resized = np.asarray(face.resize((self._side, self._side), Image.Resampling.BICUBIC), np.float32)
        made = self._session.run(None, {self._input: (resized / 127.5 - 1).transpose(2, 0, 1)[None]})[0]
        return torch.nn.functional.normalize(torch.from_numpy(np.array(made, np.float32)).flatten(), dim=0)


class FaceViewer:
    """A detector and a model that looks at the largest face that it finds."""

    def __init__(self, options: RatingSection, device: torch.device) -> None:
        """Raises OptionError."""
        assert options.face_model is not None and options.face_likeness_model is not None
        self._detector = Detector(folder_of("face_model", options.face_model), options)
        self._viewer = _face_likeness("face_likeness_model", options.face_likeness_model, device)
        self.faceless: set[str] = set()
        """Images in which no face was found."""

    def vector(self, path: Path) -> Tensor | None:
        image = opened(path)
        boxes = self._detector.boxes(image)
        if not boxes:
            self.faceless.add(str(path))
            return None
        return self._viewer.of(cut(image, max(boxes, key=lambda box: (box[2] - box[0]) * (box[3] - box[1]))))


def cut(image: Image.Image, box: Box) -> Image.Image:
    """The square around a box with a tenth more on each side; black where the image ends."""
    left, top, right, bottom = (share * side for share, side in zip(box, image.size * 2, strict=True))
    half = 0.6 * max(right - left, bottom - top, 1)
    x, y = (left + right) / 2, (top + bottom) / 2
    return image.crop((round(x - half), round(y - half), round(x + half), round(y + half)))


def _face_likeness(option: str, model: str, device: torch.device) -> FaceNetwork | ImageViewer:
    file = Path(model).expanduser()
    if not file.is_file():
        folder = folder_of(option, model)
        files = sorted(folder.glob("*.onnx"))
        if not files or any(folder.glob("*.safetensors")):
            return ImageViewer(option, model, device)
        if len(files) > 1:
            names = ", ".join(file.name for file in files)
            raise OptionError(Problem(option, f"{option}: {folder.name} has several ONNX files ({names}); give the path of one"))
        (file,) = files
    return FaceNetwork(option, file, device)


def _of(kind: Any, option: str, folder: Path) -> Any:
    try:
        return kind.from_pretrained(folder, **HERE)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as err:
        raise OptionError(Problem(option, f"{option}: the processor of {folder.name} cannot be loaded: {first_line(err)}")) from err
