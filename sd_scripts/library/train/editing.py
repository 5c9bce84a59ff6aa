"""What a run on edit pairs asks for beside any other run: sizes of control images, devices of encoders, images for previews."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from sd_scripts.dataset.buckets import Size, area_size
from sd_scripts.dataset.plan import Plan
from sd_scripts.families import editor_of
from sd_scripts.library.core.devices import device_of
from sd_scripts.library.core.protocols import ModelFamily, Parts
from sd_scripts.schema.errors import OptionError, Problem, gathering, refuse
from sd_scripts.schema.model import ModelOptions
from sd_scripts.schema.prompts import OPTION, PromptSpec


def control_area(family: ModelFamily, model: ModelOptions) -> int | None:
    """Pixels of a control image as the VAE gets it, found without loading the model; None for models that take none."""
    editor = editor_of(family)
    return None if editor is None else editor.control_area(model)


def control_size(family: ModelFamily, model: ModelOptions) -> Callable[[Size], Size] | None:
    """The size at which a model takes a control image of a given size; None for models that take none."""
    area = control_area(family, model)
    return None if area is None else partial(area_size, area=area)


def check_control_area(family: ModelFamily, model: ModelOptions, parts: Parts) -> None:
    """Raises OptionError when the loaded model takes control images of another area than was found without loading it."""
    found, area = control_area(family, model), parts.settings.get("control_area")
    if found is not None and area is not None and area != found:
        side = round(area**0.5)
        text = f"control_resolution: {parts.source} was made for images of about {side} x {side}; set control_resolution to {side}"
        raise OptionError(Problem("control_resolution", text))


def encoder_devices(model: ModelOptions, default: torch.device) -> tuple[torch.device, torch.device]:
    """Where the VAE and the text encoders encode. Raises OptionError, with both problems, for devices that are not here."""
    problems: list[Problem] = []
    found = []
    for option, name in zip(("vae_device", "text_encoder_device"), model.encoder_devices):
        with gathering(problems):
            found.append(device_of(option, name, default))
    refuse(problems)
    return found[0], found[1]


def with_controls(prompts: Sequence[PromptSpec], plan: Plan) -> list[PromptSpec]:
    """The prompts with control images: those that name none take those of the pairs in turn, held-out pairs first."""
    pairs = [plan.images[index].controls for index in (*plan.held_out, *plan.trained_images())]
    pairs = [controls for controls in pairs if controls]
    if not pairs:
        return list(prompts)
    return [
        spec if spec.controls else replace(spec, controls=tuple(control.path for control in pairs[index % len(pairs)]))
        for index, spec in enumerate(prompts)
    ]


def check_prompts(prompts: Sequence[PromptSpec], family: ModelFamily, parts: Parts) -> None:
    """Raises OptionError for prompts with more or fewer control images than the model takes."""
    fewest, most = family.num_controls(parts)
    allowed = "none" if most == 0 else str(most) if fewest == most else f"{fewest} to {most}"
    version = parts.settings.get("model_version", parts.source)
    problems = [
        Problem(OPTION, f"{OPTION}: prompt {number} has {len(spec.controls)} control images (--ci), and {version} takes {allowed}")
        for number, spec in enumerate(prompts, 1)
        if not fewest <= len(spec.controls) <= most
    ]
    refuse(problems)
