"""How Qwen-Image models read instructions: templates, tokens, positions, and the text encoder's rows.

Control pictures stand before the instruction in a causal language model, so the rows up to the last picture are the same for every
instruction on them: they are computed once, with their keys and values, and each instruction alone after them.

Shapes: L tokens, P rows that instructions share, S rows of one instruction, D text width.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor, nn

from sd_scripts.library.families.pictures import as_pictures, place, quiet_transformers
from sd_scripts.library.loading.qwen_processor import PICTURE
from sd_scripts.library.protocols import Parts
from sd_scripts.schema.errors import OptionError

logger = logging.getLogger(__name__)

Version = Literal["edit", "edit-2509", "edit-2511", "image"]
MAX_CONTROLS = {"image": 0, "edit": 1, "edit-2509": 3, "edit-2511": 3}
CONDITION_AREA = 384 * 384
"""Pixels of a control picture as the text encoder of edit-2509 and later sees it."""
MAX_POSITIONS = 4096
"""Entries of the transformer's table of rotations, of which text takes those after half the longest side in tokens."""
_LISTED = "Picture {}: <|vision_start|><|image_pad|><|vision_end|>"
"""How each control picture is announced from edit-2509 on (diffusers, pipeline_qwenimage_edit_plus.py)."""
_VISION_MARKS = ("<|vision_start|>", "<|vision_end|>", PICTURE, "<|video_pad|>")


@dataclass(frozen=True)
class Template:
    """The text around an instruction, as diffusers has it."""

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
PIPELINES = {
    "image": "QwenImagePipeline",
    "edit": "QwenImageEditPipeline",
    "edit-2509": "QwenImageEditPlusPipeline",
    "edit-2511": "QwenImageEditPlusPipeline",
}


@functools.cache
def template_of(version: str) -> Template:
    """The template that a version was trained with. Raises OptionError when the installed diffusers has another one."""
    with quiet_transformers():
        import diffusers

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


def settings_of(version: str, max_token_length: int, control_area: int, condition_area: int, processor: Any) -> dict[str, Any]:
    """Parts.settings of a model: everything that decides what an instruction's rows are."""
    template = template_of(version)
    settings: dict[str, Any] = {
        "model_version": version,
        "max_token_length": max_token_length,
        "control_area": control_area,
        "condition_area": condition_area,
        "template": template.fingerprint,
        "template_start": template.start,
    }
    if processor is not None:
        pictures = processor.image_processor
        settings["processor"] = {
            "size": dict(sorted(dict(pictures.size).items())) if pictures.size else None,
            **{name: getattr(pictures, name) for name in ("patch_size", "temporal_patch_size", "merge_size")},
            "image_mean": list(pictures.image_mean),
            "image_std": list(pictures.image_std),
        }
    return settings


def area_size(area: int, ratio: float) -> tuple[int, int]:
    """(width, height) of about `area` pixels and this ratio of width to height, in multiples of 32 (diffusers, calculate_dimensions)."""
    width = math.sqrt(area * ratio)
    return max(1, round(width / 32)) * 32, max(1, round(width / ratio / 32)) * 32


def prompt_rows(parts: Parts, captions: Sequence[str]) -> list[Tensor]:
    """Rows (L, D) of captions without pictures, in the text encoder's precision; each is encoded alone."""
    if not captions:
        return []
    encoder, tokenizer = parts.text_encoders["te1"], parts.tokenizers["te1"]
    before, after = _around(parts, 0)
    closing, start = _ids(tokenizer, after), parts.settings["template_start"]
    rows = []
    for caption in captions:
        _check_marks(caption)
        # The line end before the caption may join with it into one token, so the two are read together.
        opened = _ids(tokenizer, before + caption)
        ids = opened[:start] + _cut(opened[start:], parts.settings["max_token_length"]) + closing
        positions = torch.arange(len(ids)).expand(3, -1)
        rows.append(_run(encoder, ids, positions, use_cache=False).last_hidden_state[0, start:])
    return rows


def instruction_rows(parts: Parts, controls: Sequence[Tensor], captions: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
    """Rows (P, D) of the part with control pictures (3, H, W) in [-1, 1], and (S, D) of each caption after it; see EditingFamily."""
    encoder, tokenizer = parts.text_encoders["te1"], parts.tokenizers["te1"]
    before, after = _around(parts, len(controls))
    pictures = parts.processor.image_processor(images=condition_pictures(parts, controls), return_tensors="pt")
    merge = encoder.config.vision_config.spatial_merge_size
    grids = [(height // merge, width // merge) for _, height, width in pictures["image_grid_thw"].tolist()]
    mark = encoder.config.image_token_id
    ids = _expanded(_ids(tokenizer, before), mark, [height * width for height, width in grids])
    positions = positions_of(ids, mark, grids)
    closing, start = _ids(tokenizer, after), parts.settings["template_start"]
    room = _room(parts, controls, len(ids) - start + len(closing))
    shared = _run(encoder, ids, positions, use_cache=True, pixel_values=pictures["pixel_values"], image_grid_thw=pictures["image_grid_thw"])
    cache, next_position = shared.past_key_values, int(positions.max()) + 1
    suffixes = []
    for caption in captions:
        _check_marks(caption)
        own = _cut(_ids(tokenizer, caption), room) + closing
        steps = next_position + torch.arange(len(own)).expand(3, -1)
        # One instruction at a time: its bits must not depend on which others are encoded with it.
        suffixes.append(_run(encoder, own, steps, use_cache=True, past_key_values=cache).last_hidden_state[0])
        cache.crop(-len(own))
    return shared.last_hidden_state[0, start:], suffixes


def condition_pictures(parts: Parts, controls: Sequence[Tensor]) -> list[Image.Image]:
    """The pictures that the text encoder sees: edit's as they are, those of later versions at the condition area (Lanczos)."""
    pictures = [as_pictures(control[None].float())[0] for control in controls]
    if parts.settings["model_version"] == "edit":
        return pictures
    area = parts.settings["condition_area"]
    return [picture.resize(area_size(area, picture.width / picture.height), Image.Resampling.LANCZOS) for picture in pictures]


def positions_of(ids: Sequence[int], mark: int, grids: Sequence[tuple[int, int]]) -> Tensor:
    """Time, row and column (3, L) of tokens, int64: Qwen2.5-VL's three-axis positions (Bai et al. 2025, arXiv 2502.13923).

    Text counts on all three axes alike. A picture of (rows, columns) tokens, each of them the token `mark`, stands at one time and in its
    rows and columns, and the text after it begins behind its longer side.
    """
    pieces, position, index = [], 0, 0
    left = list(grids)
    while index < len(ids):
        if ids[index] == mark:
            rows, columns = left.pop(0)
            time, row, column = torch.meshgrid(torch.zeros(1).long(), torch.arange(rows), torch.arange(columns), indexing="ij")
            pieces.append(position + torch.stack([time, row, column]).reshape(3, -1))
            index, position = index + rows * columns, position + max(rows, columns)
        else:
            pieces.append(torch.full((3, 1), position))
            index, position = index + 1, position + 1
    assert not left, f"{len(left)} pictures have no place in the text"
    return torch.cat(pieces, dim=1)


def check_tokenizer(parts: Parts, option: str) -> None:
    """Raises OptionError unless the tokenizer cuts the template as the model's own does, and marks are the text encoder's."""
    encoder, tokenizer = parts.text_encoders["te1"], parts.tokenizers["te1"]
    template = template_of(parts.settings["model_version"])
    system = template.text.partition("<|im_start|>user\n")
    found = len(_ids(tokenizer, system[0] + system[1]))
    mark = tokenizer.convert_tokens_to_ids(PICTURE)
    if found != template.start or len(_ids(tokenizer, "<|vision_start|><|vision_end|>")) != 2 or mark != encoder.config.image_token_id:
        raise OptionError(
            f"{option}: the tokenizer cuts the model's prompt template into {found} tokens before the instruction where {template.start} "
            "are expected, or does not know the marks of pictures; it is not the tokenizer of Qwen2.5-VL"
        )


def _around(parts: Parts, num_pictures: int) -> tuple[str, str]:
    """The text before and after an instruction on that many pictures."""
    version = parts.settings["model_version"]
    if num_pictures == 0 and version == "edit":
        raise OptionError("model_version: edit reads an instruction only together with its control picture, and there is none")
    before, _, after = template_of(version).text.partition("{}")
    if version in ("edit-2509", "edit-2511"):
        before += "".join(_LISTED.format(number) for number in range(1, num_pictures + 1))
    return before, after


def _ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text).input_ids
    return found


def _expanded(ids: Sequence[int], mark: int, counts: Sequence[int]) -> list[int]:
    """The tokens with each picture's mark repeated for every vision token it has."""
    found, left = [], iter(counts)
    for token in ids:
        found += [token] * (next(left) if token == mark else 1)
    return found


def _run(encoder: nn.Module, ids: Sequence[int], positions: Tensor, use_cache: bool, **more: Any) -> Any:
    """The encoder's output for one row of tokens at these positions (3, L); without the logits, which nobody reads."""
    device, _ = place(encoder)
    placed = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in more.items()}
    # Positions are given: transformers 5 falls back to plain ones without a word where it is not told which tokens are pictures.
    return encoder.model(
        input_ids=torch.tensor([ids], device=device), position_ids=positions[:, None].to(device), use_cache=use_cache, **placed
    )


def _room(parts: Parts, controls: Sequence[Tensor], num_taken: int) -> int:
    """Tokens an instruction may have: max_token_length, or what the transformer's table of positions leaves. OptionError for nothing."""
    half = max(max(control.shape[-2:]) // 16 // 2 for control in controls)
    left = MAX_POSITIONS - half - num_taken
    if left < 16:
        sizes = ", ".join(f"{control.shape[-1]} x {control.shape[-2]}" for control in controls)
        raise OptionError(
            f"control_resolution: control pictures of {sizes} fill {num_taken} of the {MAX_POSITIONS} text positions and leave none for "
            "an instruction; choose a smaller control_resolution"
        )
    return min(int(parts.settings["max_token_length"]), left)


def _cut(ids: list[int], limit: int) -> list[int]:
    if len(ids) > limit:
        _tell_of_cut(limit)
    return ids[:limit]


@functools.cache
def _tell_of_cut(limit: int) -> None:
    logger.warning("instructions longer than %d tokens are cut there; max_token_length sets the limit (this is said once)", limit)


def _check_marks(caption: str) -> None:
    mark = next((mark for mark in _VISION_MARKS if mark in caption), None)
    if mark is not None:
        raise OptionError(f"caption: {caption[:80]!r} contains {mark}, which stands for pictures in Qwen-Image's texts; remove it")
