"""How well images show their prompts, by CLIP or SigLIP, and how like training images they are, by a model that looks at images.

Both are cosines of what a model makes of two things (Radford et al. 2021; DINO's of all pairs as in DreamBooth, Ruiz et al. 2023).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import AutoImageProcessor, AutoModel, AutoProcessor

from sd_scripts.dataset import images
from sd_scripts.dataset.progress import Bar
from sd_scripts.library.captioning.captioner import folder_of
from sd_scripts.library.captioning.vision_models import HERE, loaded
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.outside import json_of
from sd_scripts.schema.rating import RatingSection

from .report import Report


@dataclass(frozen=True)
class ListedImage:
    """An image of a list, with its prompt where it has one."""

    path: Path
    prompt: str = ""


def rate(options: RatingSection) -> Report:
    """Rates the images. Raises OptionError."""
    drawn = listed("image_list", options.image_list)
    device = torch.device("cuda" if options.device == "auto" and torch.cuda.is_available() else "cpu")
    by_prompt: list[float | None] = [None] * len(drawn)
    by_likeness: list[float | None] = [None] * len(drawn)
    if options.clip_model is not None:
        reader = PromptReader("clip_model", options.clip_model, device)
        by_prompt = [
            reader.shows(opened(one.path), one.prompt) if one.prompt.strip() else None
            for one in Bar(drawn, desc="prompts", unit="image", delay=1)
        ]
    if options.image_model is not None:
        assert options.train_list is not None
        viewer = ImageViewer("image_model", options.image_model, device)
        trained = viewer.all_of([one.path for one in listed("train_list", options.train_list)], "training images")
        by_likeness = (viewer.all_of([one.path for one in drawn], "images") @ trained.T).mean(1).tolist()
    told = [
        {"file_name": str(one.path), "prompt": shown, "likeness": like}
        for one, shown, like in zip(drawn, by_prompt, by_likeness, strict=True)
    ]
    lines = [f"{what}: {_mean(values)} over {len(drawn)} images" for what, values in (("prompt", by_prompt), ("likeness", by_likeness))]
    return Report([line for line in lines if "None" not in line], {"images": told})


def _mean(values: Sequence[float | None]) -> str:
    there = [value for value in values if value is not None]
    return f"{sum(there) / len(there):.4f}" if there else "None"


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


class ImageViewer:
    """A model that looks at images."""

    def __init__(self, option: str, model: str, device: torch.device) -> None:
        """Raises OptionError."""
        folder = folder_of(option, model)
        self._device = device
        self._model = loaded(AutoModel, option, folder, torch.float32).to(device)
        self._processor = _of(AutoImageProcessor, option, folder)
        if not hasattr(self._model, "get_image_features") and "pixel_values" not in inspect.signature(self._model.forward).parameters:
            raise OptionError(Problem(option, f"{option}: {folder.name} ({self._model.config.model_type}) looks at no images"))

    def all_of(self, paths: Sequence[Path], what: str) -> Tensor:
        """Unit vectors (N, D) of images."""
        return torch.stack([self._one(opened(path)) for path in Bar(paths, desc=what, unit="image", delay=1)])

    @torch.inference_mode()
    def _one(self, image: Image.Image) -> Tensor:
        given = self._processor(images=[image], return_tensors="pt").to(self._device)
        if hasattr(self._model, "get_image_features"):
            made = self._model.get_image_features(**given)
        else:
            made = self._model(**given)
        if not isinstance(made, Tensor):
            pooled = getattr(made, "pooler_output", None)
            made = made.last_hidden_state[:, 0] if pooled is None else pooled
        return torch.nn.functional.normalize(made[0].float().flatten(), dim=0).cpu()


def _of(kind: Any, option: str, folder: Path) -> Any:
    try:
        return kind.from_pretrained(folder, **HERE)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as err:
        first = str(err).strip().split("\n", 1)[0] or type(err).__name__
        raise OptionError(Problem(option, f"{option}: the processor of {folder.name} cannot be loaded: {first}")) from err
