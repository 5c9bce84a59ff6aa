"""What families that edit share: control images in conditions, and the conditions of previews with control images."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sd_scripts.library.core.protocols import Condition, EditingFamily, Parts, Preview
from sd_scripts.schema.errors import OptionError


def controls_of(condition: Condition) -> list[Tensor]:
    """The encoded control images of a sample, (C, h, w) each, in their order."""
    found: list[Tensor] = []
    while (control := condition.get(f"control_{len(found)}")) is not None:
        found.append(control)
    return found


def conditions_with_controls(
    family: EditingFamily, parts: Parts, requests: Sequence[Preview], label: str
) -> tuple[list[Condition], list[Condition] | None]:
    """Conditions of the requests' prompts, and of their negative prompts where guidance is on: with cfg_scale above 1.

    Raises OptionError, naming the model by its label, for a number of control images that it does not take.
    """
    guided = requests[0].cfg_scale > 1
    fewest, most = family.num_controls(parts)
    for request in requests:
        _check_controls(len(request.controls), fewest, most, label)
    positive: list[Condition] = [{} for _ in requests]
    negative: list[Condition] = [{} for _ in requests]
    alike: dict[tuple[int, ...], list[int]] = {}
    for index, request in enumerate(requests):
        alike.setdefault(tuple(id(control) for control in request.controls), []).append(index)
    for indices in alike.values():
        controls = [family.control_pixels(parts, control) for control in requests[indices[0]].controls]
        latents = {f"control_{i}": family.encode_images(parts, pixels[None])[0] for i, pixels in enumerate(controls)}
        prompts = [requests[index].prompt for index in indices]
        prompts += [requests[index].negative_prompt for index in indices] if guided else []
        prefix, suffixes = family.encode_instructions(parts, controls, prompts)
        texts = [{"text": torch.cat([prefix, suffix]), **latents} for suffix in suffixes]
        for place_in, index in enumerate(indices):
            positive[index] = texts[place_in]
            negative[index] = texts[len(indices) + place_in] if guided else {}
    return positive, negative if guided else None


def _check_controls(count: int, fewest: int, most: int, label: str) -> None:
    """Raises OptionError unless a model takes this many control images."""
    if fewest <= count <= most:
        return
    allowed = str(fewest) if fewest == most else f"{fewest} to {most}"
    raise OptionError(f"control images: {count} were given, but {label} takes {allowed}")
