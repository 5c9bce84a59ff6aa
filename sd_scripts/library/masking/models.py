"""Models of transformers that make masks: those that give each pixel a class, SAM 2 and 3, which find the object at a point or in a box,
and SAM 3 again, which finds everything that words name. Weights come from safetensors; no code of a model's own is ever run."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate
from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer, Sam3Model
from transformers.image_processing_base import ImageProcessingMixin
from transformers.models.auto import modeling_auto as known

from sd_scripts.dataset.images import Pixels
from sd_scripts.library.captioning.vision_models import HERE, loaded
from sd_scripts.library.core.devices import best_device
from sd_scripts.schema.errors import OptionError, Problem, first_line
from sd_scripts.schema.masking import MaskSection

from .segmenter import Segmenter

CLASSES = (known.AutoModelForSemanticSegmentation, known.AutoModelForUniversalSegmentation, known.AutoModelForInstanceSegmentation)
SAM = ("sam2", "sam2_video", "sam3_tracker", "sam3_video", "edgetam", "edgetam_video")
"""Types of models that see the image as one square, and points in it as shares of that."""
WORDS = ("sam3", "sam3_video")
"""Types of models that are asked by words; the second one by points and boxes too."""
LEAST_SCORE = 0.5
"""From this probability on a thing is what the words say."""
_WORDS_LENGTH = 32
"""Tokens of the words, as the model was trained."""
_BACKGROUND = ("background", "__background__", "bg")
_SHOWN = 12


def opened(folder: Path, options: MaskSection) -> Segmenter:
    """The model in a folder. Raises OptionError for one that makes no masks."""
    try:
        config = AutoConfig.from_pretrained(folder, **HERE)
    except (OSError, ValueError, KeyError) as err:
        raise _problem(f"{folder.name} has no config.json that transformers knows ({first_line(err)})") from err
    device = best_device(options.device)
    if config.model_type in WORDS and (options.mask_labels or config.model_type not in SAM):
        return Worded(folder, options, device)
    if config.model_type in SAM:
        return Sam(folder, options, device)
    for each in CLASSES:
        if type(config) in each._model_mapping:
            return Classes(folder, each, options, device)
    raise _problem(
        f"{folder.name} is a {config.model_type}, which makes no masks here; take a model for semantic, panoptic or instance segmentation, "
        "SAM 2 or SAM 3"
    )


class Classes:
    """A model that gives each pixel one of its classes."""

    def __init__(self, folder: Path, model_class: Any, options: MaskSection, device: torch.device) -> None:
        self.about = folder.name
        self._device = device
        try:
            self._processor = AutoImageProcessor.from_pretrained(folder, **HERE)
        except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as err:
            raise _problem(f"the image processor of {folder.name} cannot be loaded: {first_line(err)}") from err
        if not hasattr(self._processor, "post_process_semantic_segmentation"):
            raise _problem(f"{folder.name} tells boxes and outlines of things, and no class for each pixel; take another model")
        # float32: these are small, and some of their processors know no other.
        self._model = loaded(model_class, "mask_model", folder, torch.float32).to(device)
        self._takes = inspect.signature(self._model.forward).parameters
        names = {int(number): str(name) for number, name in self._model.config.id2label.items()}
        self._wanted = torch.tensor(_wanted(folder.name, names, options.mask_labels), device=device)

    @torch.inference_mode()
    def mask(self, image: Image.Image) -> Pixels:
        given = self._processor(images=[image], return_tensors="pt").to(self._device)
        told = self._model(**{name: value for name, value in given.items() if name in self._takes})
        classes = self._processor.post_process_semantic_segmentation(told, target_sizes=[(image.height, image.width)])[0]
        found = torch.isin(torch.as_tensor(classes, device=self._device), self._wanted)
        return _as_pixels(found)


def _wanted(model: str, names: dict[int, str], asked: Sequence[str]) -> list[int]:
    """The numbers of the classes that count. Raises OptionError."""
    shown = ", ".join(list(names.values())[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    if not asked:
        ground = [number for number, name in names.items() if name.strip().casefold() in _BACKGROUND]
        if not ground:
            raise _problem(f"{model} has no class background, so say what counts; its classes are {shown}", "mask_labels")
        return [number for number in names if number not in ground]
    # Names such as "car, automobile" are known by each of their words.
    by_name: dict[str, list[int]] = {}
    for number, name in names.items():
        for each in {name.strip().casefold(), *(part.strip().casefold() for part in name.split(","))}:
            by_name.setdefault(each, []).append(number)
    unknown = [name for name in asked if name.strip().casefold() not in by_name]
    if unknown:
        raise _problem(f"{model} has no class {unknown[0]!r}; its classes are {shown}", "mask_labels")
    return sorted({number for name in asked for number in by_name[name.strip().casefold()]})


class Square:
    """How a model sees an image: as one square, whatever its shape."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._device = device
        try:
            given, _ = ImageProcessingMixin.get_image_processor_dict(folder, local_files_only=True)
            size = given["size"]
            self.side = (int(size["height"]), int(size["width"]))
            self._mean, self._std = (torch.tensor(given[name], dtype=torch.float32)[:, None, None] for name in ("image_mean", "image_std"))
        except (OSError, ValueError, KeyError, TypeError) as err:
            wanted = "preprocessor_config.json with size, image_mean and image_std"
            raise _problem(f"{folder.name} has no {wanted} ({first_line(err)})") from err

    def pixels(self, image: Image.Image) -> torch.Tensor:
        """An RGB image as the model takes it (1, 3, H, W)."""
        rgb = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None].float()
        square = interpolate(rgb, self.side, mode="bilinear", antialias=True).round().clamp(0, 255)[0] / 255
        return ((square - self._mean) / self._std)[None].to(self._device)


class Worded:
    """SAM 3: everything that some words name."""

    def __init__(self, folder: Path, options: MaskSection, device: torch.device) -> None:
        self.about = folder.name
        if options.points or options.box is not None:
            raise _problem(f"{folder.name} is asked by words; leave mask_points and mask_box empty, or mask_labels", "mask_labels")
        if not options.mask_labels:
            raise _problem(f"{folder.name} asks in words what counts, such as a red hat", "mask_labels")
        self._model = loaded(Sam3Model, "mask_model", folder, torch.float32).to(device)
        self._square = Square(folder, device)
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, **HERE)
        except (OSError, ValueError, KeyError, ImportError) as err:
            raise _problem(f"the tokenizer of {folder.name} cannot be loaded: {first_line(err)}") from err
        told = tokenizer(list(options.mask_labels), padding="max_length", max_length=_WORDS_LENGTH, truncation=True, return_tensors="pt")
        self._words = [
            {"input_ids": ids[None].to(device), "attention_mask": mask[None].to(device)}
            for ids, mask in zip(told["input_ids"], told["attention_mask"], strict=True)
        ]

    @torch.inference_mode()
    def mask(self, image: Image.Image) -> Pixels:
        # The image is looked at once, whatever is asked of it.
        seen = self._model.get_vision_features(self._square.pixels(image))
        found = torch.zeros((image.height, image.width), dtype=torch.bool, device=seen.last_hidden_state.device)
        for words in self._words:
            told = self._model(vision_embeds=seen, **words)
            scores = told.pred_logits[0].sigmoid() * told.presence_logits[0].sigmoid()
            shares = told.pred_masks[0, scores > LEAST_SCORE].float().sigmoid()  # of the things (N, h, w)
            if len(shares):
                whole = interpolate(shares[None], (image.height, image.width), mode="bilinear", align_corners=False)[0]
                found |= (whole > 0.5).any(0)
        return _as_pixels(found)


class Sam:
    """SAM 2 or 3: the object at some points, or in a box."""

    def __init__(self, folder: Path, options: MaskSection, device: torch.device) -> None:
        self.about = folder.name
        self._device, self._points, self._box = device, options.points, options.box
        if not self._points and self._box is None:
            raise _problem(f"{folder.name} asks where the object is: give mask_points or mask_box", "mask_points")
        self._model = loaded(known.AutoModelForMaskGeneration, "mask_model", folder, torch.float32).to(device)
        self._square = Square(folder, device)

    @torch.inference_mode()
    def mask(self, image: Image.Image) -> Pixels:
        height, width = self._square.side
        asked: dict[str, Any] = {"pixel_values": self._square.pixels(image)}
        # Shapes: one image, one object, its points or its box.
        if self._points:
            asked["input_points"] = torch.tensor([[[[x * width, y * height] for x, y, _ in self._points]]], device=self._device)
            asked["input_labels"] = torch.tensor([[[int(is_on) for _, _, is_on in self._points]]], device=self._device)
        if self._box is not None:
            left, top, right, bottom = self._box
            asked["input_boxes"] = torch.tensor([[[left * width, top * height, right * width, bottom * height]]], device=self._device)
        # One point may mean an object, its part or the whole; the model says which of its three answers it trusts most.
        several = len(self._points) == 1 and self._box is None
        told = self._model(**asked, multimask_output=several)
        best = int(told.iou_scores[0, 0].argmax())
        logits = told.pred_masks[0, 0, best][None, None].float()
        return _as_pixels(interpolate(logits, (image.height, image.width), mode="bilinear", align_corners=False)[0, 0] > 0)


def _as_pixels(found: torch.Tensor) -> Pixels:
    pixels: Pixels = (found.to(torch.uint8) * 255).cpu().numpy()
    return pixels


def _problem(text: str, option: str = "mask_model") -> OptionError:
    return OptionError(Problem(option, f"{option}: {text}"))
