"""What a run on edit pairs asks for beside any other run: sizes of control pictures, devices of encoders, pictures for previews."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

import sd_scripts.toy
from sd_scripts.dataset.buckets import Size, area_size
from sd_scripts.dataset.plan import Plan
from sd_scripts.families.qwen_edit.options import QwenImageModelOptions, QwenImageSampleOptions
from sd_scripts.library.core.devices import device_of
from sd_scripts.library.core.protocols import ModelFamily, Parts
from sd_scripts.library.loading.common import BASE, read_json
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.model import ModelOptions
from sd_scripts.schema.prompts import OPTION, PromptSpec
from sd_scripts.schema.samples import SampleOptions

AREA = 1024 * 1024
"""Pixels of a control picture as the published models take it."""
SIDE = "_default_side"
"""Entry of model_index.json with the side of pictures in a model that was made for another size."""


def control_area(model: QwenImageModelOptions) -> int:
    """Pixels of a control picture as the VAE gets it, found without loading the model. Raises OptionError for a broken model_index.json."""
    if model.control_resolution is not None:
        return model.control_resolution**2
    name = model.pretrained_model_name_or_path
    folder = Path(sd_scripts.toy.__file__).parent / "bases" / "qwen_edit" if name == "toy" else Path(name).expanduser()
    index = folder / "model_index.json"
    side = read_json(index, BASE).get(SIDE) if index.is_file() else None
    return AREA if side is None else side * side


def control_size(model: ModelOptions) -> Callable[[Size], Size] | None:
    """The size at which a model takes a control picture of a given size; None for models that take none."""
    return partial(area_size, area=control_area(model)) if isinstance(model, QwenImageModelOptions) else None


def check_control_area(model: ModelOptions, parts: Parts) -> None:
    """Raises OptionError when the loaded model takes control pictures of another area than was found without loading it."""
    area = parts.settings.get("control_area")
    if isinstance(model, QwenImageModelOptions) and area != control_area(model):
        side = round(area**0.5)
        text = f"control_resolution: {parts.source} was made for pictures of about {side} x {side}; set control_resolution to {side}"
        raise OptionError(Problem("control_resolution", text))


def encoder_devices(model: ModelOptions, default: torch.device) -> tuple[torch.device, torch.device]:
    """Where the VAE and the text encoders encode. Raises OptionError, with both problems, for devices that are not here."""
    if not isinstance(model, QwenImageModelOptions):
        return default, default
    problems: list[Problem] = []
    found = []
    for option, name in (("vae_device", model.vae_device), ("text_encoder_device", model.text_encoder_device)):
        try:
            found.append(device_of(option, name, default))
        except OptionError as err:
            problems += err.problems
    if problems:
        raise OptionError(problems)
    return found[0], found[1]


def with_controls(prompts: Sequence[PromptSpec], options: SampleOptions, plan: Plan) -> list[PromptSpec]:
    """The prompts with control pictures: those that name none take those of the pairs in turn, held-out pairs first."""
    pairs = [plan.pictures[index].controls for index in (*plan.held_out, *plan.trained_pictures())]
    pairs = [controls for controls in pairs if controls]
    if not isinstance(options, QwenImageSampleOptions) or not pairs:
        return list(prompts)
    return [
        spec if spec.controls else replace(spec, controls=tuple(control.path for control in pairs[index % len(pairs)]))
        for index, spec in enumerate(prompts)
    ]


def check_prompts(prompts: Sequence[PromptSpec], family: ModelFamily, parts: Parts) -> None:
    """Raises OptionError for prompts with more or fewer control pictures than the model takes."""
    fewest, most = family.num_controls(parts)
    allowed = "none" if most == 0 else str(most) if fewest == most else f"{fewest} to {most}"
    version = parts.settings.get("model_version", parts.source)
    problems = [
        Problem(OPTION, f"{OPTION}: prompt {number} has {len(spec.controls)} control pictures (--ci), and {version} takes {allowed}")
        for number, spec in enumerate(prompts, 1)
        if not fewest <= len(spec.controls) <= most
    ]
    if problems:
        raise OptionError(problems)
