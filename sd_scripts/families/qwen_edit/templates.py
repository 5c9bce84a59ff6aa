"""What tells the versions of Qwen-Image apart, and the text that each puts around an instruction, as diffusers has it."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import Any

import diffusers

from sd_scripts.schema.errors import OptionError

from .processor import IMAGE

PIPELINES = {
    "image": "QwenImagePipeline",
    "edit": "QwenImageEditPipeline",
    "edit-2509": "QwenImageEditPlusPipeline",
    "edit-2511": "QwenImageEditPlusPipeline",
}
"""diffusers' pipeline of each version; edit-2511 differs from edit-2509 in its transformer, which has zero_cond_t."""
MAX_CONTROLS = {"image": 0, "edit": 1, "edit-2509": 3, "edit-2511": 3}
AREA = 1024 * 1024
"""Pixels of an image, and of a control image as the VAE gets it, unless the model or its user says otherwise."""
CONDITION_AREA = 384 * 384
"""Pixels of a control image as the image processor of edit-2509 and later gets it."""


@dataclass(frozen=True)
class Template:
    """The text around an instruction, which stands at {}."""

    text: str
    start: int
    """Tokens of the system part, whose rows the transformer does not get."""

    @property
    def fingerprint(self) -> str:
        """First 16 hexadecimal digits of the text's SHA-256."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


_PUBLISHED = {
    "QwenImagePipeline": (34, "0194d360a674d2f1"),
    "QwenImageEditPipeline": (64, "846b0a7896f4ed82"),
    "QwenImageEditPlusPipeline": (64, "d5d65822319c1228"),
}
"""Tokens of the system part and fingerprint of each pipeline's template, of the models as they were published."""


@functools.cache
def template_of(version: str) -> Template:
    """The template that a version was trained with. Raises OptionError when the installed diffusers has another one."""
    name = PIPELINES[version]
    empty = dict.fromkeys(("vae", "text_encoder", "tokenizer", "transformer", *(() if version == "image" else ("processor",))))
    pipeline = getattr(diffusers, name)(scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), **empty)
    template = Template(pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx)
    if (template.start, template.fingerprint) != _PUBLISHED[name]:
        raise OptionError(
            f"model_version: the installed diffusers {diffusers.__version__} has another prompt template for {name} than the one the "
            "model was trained with, so instructions would be misread. Install the version in requirements.txt"
        )
    return template


def settings_of(version: str, max_token_length: int, area: int, control_area: int, images: Any) -> dict[str, Any]:
    """Parts.settings of a model: everything besides weights that decides what instructions and control images become.

    area: pixels of an image where nobody says otherwise; control_area: those of a control image for the VAE. images: the image
    processor; None where nobody looks at images.
    """
    template = template_of(version)
    settings: dict[str, Any] = {
        "model_version": version,
        "max_token_length": max_token_length,
        "area": area,
        "control_area": control_area,
        "condition_area": control_area if version == "edit" else CONDITION_AREA,
        "template": template.fingerprint,
        "template_start": template.start,
    }
    if images is not None:
        sizes = dict(images.size)
        settings["pictures"] = {
            "least_pixels": sizes["shortest_edge"],
            "most_pixels": sizes["longest_edge"],
            **{name: getattr(images, name) for name in ("patch_size", "temporal_patch_size", "merge_size")},
            "image_mean": list(images.image_mean),
            "image_std": list(images.image_std),
        }
    return settings


def check_tokenizer(tokenizer: Any, version: str, image_id: int, option: str) -> None:
    """Raises OptionError unless a tokenizer cuts the template as the model's own does, and its mark of images is image_id."""
    template = template_of(version)
    system, mark, _ = template.text.partition("<|im_start|>user\n")
    found = len(tokenizer(system + mark).input_ids)
    marks = len(tokenizer("<|vision_start|><|vision_end|>").input_ids)
    if found != template.start or marks != 2 or tokenizer.convert_tokens_to_ids(IMAGE) != image_id:
        raise OptionError(
            f"{option}: the tokenizer cuts the model's prompt template into {found} tokens before the instruction where {template.start} "
            "are expected, or does not know the marks of images; it is not the tokenizer of Qwen2.5-VL"
        )
