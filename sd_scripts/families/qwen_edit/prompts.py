"""How Qwen-Image models read instructions: templates, tokens, positions, and the text encoder's rows.

Control images stand before the instruction in a causal language model, so the rows up to the last image are the same for every
instruction on them: they are computed once, with their keys and values, and each instruction alone after them.

Shapes: L tokens, P rows that instructions share, S rows of one instruction, D text width.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor, nn

from sd_scripts.dataset.buckets import area_size
from sd_scripts.families.common.images import as_images
from sd_scripts.families.common.reading import expanded
from sd_scripts.library.core.protocols import Parts
from sd_scripts.schema.errors import OptionError

from .processor import IMAGE
from .templates import template_of

logger = logging.getLogger(__name__)

MAX_POSITIONS = 4096
"""Entries of the transformer's table of rotations, of which text takes those after half the longest side in tokens."""
_LISTED = "Picture {}: <|vision_start|><|image_pad|><|vision_end|>"
"""How each control image is announced from edit-2509 on (diffusers, pipeline_qwenimage_edit_plus.py)."""
_VISION_MARKS = ("<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>")


def prompt_rows(parts: Parts, captions: Sequence[str]) -> list[Tensor]:
    """Rows (L, D) of captions without images, in the text encoder's precision; each is encoded alone."""
    if not captions:
        return []
    tokenizer = parts.tokenizers["te1"]
    before, after = _around(parts, 0)
    closing, start = _ids(tokenizer, after), parts.settings["template_start"]
    rows = []
    for caption in captions:
        _check_marks(caption)
        # The line end before the caption may join with it into one token, so the two are read together.
        opened = _ids(tokenizer, before + caption)
        ids = opened[:start] + _cut(opened[start:], parts.settings["max_token_length"]) + closing
        positions = torch.arange(len(ids)).expand(3, -1)
        rows.append(_run(parts, ids, positions, use_cache=False).last_hidden_state[0, start:])
    return rows


def instruction_rows(parts: Parts, controls: Sequence[Tensor], captions: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
    """Rows (P, D) of the part with control images (3, H, W) in [-1, 1], and (S, D) of each caption after it; see EditingFamily."""
    encoder, tokenizer = parts.text_encoders["te1"], parts.tokenizers["te1"]
    before, after = _around(parts, len(controls))
    assert parts.processor is not None
    images = parts.processor.image_processor(images=condition_images(parts, controls), return_tensors="pt")
    merge = encoder.config.vision_config.spatial_merge_size
    grids = [(height // merge, width // merge) for _, height, width in images["image_grid_thw"].tolist()]
    mark = encoder.config.image_token_id
    ids = expanded(_ids(tokenizer, before), mark, [height * width for height, width in grids])
    positions = positions_of(ids, mark, grids)
    closing, start = _ids(tokenizer, after), parts.settings["template_start"]
    room = _room(parts, controls, len(ids) - start + len(closing))
    shared = _run(parts, ids, positions, use_cache=True, pixel_values=images["pixel_values"], image_grid_thw=images["image_grid_thw"])
    cache, next_position = shared.past_key_values, int(positions.max()) + 1
    suffixes = []
    for caption in captions:
        _check_marks(caption)
        own = _cut(_ids(tokenizer, caption), room) + closing
        steps = next_position + torch.arange(len(own)).expand(3, -1)
        # One instruction at a time: its bits must not depend on which others are encoded with it.
        suffixes.append(_run(parts, own, steps, use_cache=True, past_key_values=cache).last_hidden_state[0])
        cache.crop(-len(own))
    return shared.last_hidden_state[0, start:], suffixes


def condition_images(parts: Parts, controls: Sequence[Tensor]) -> list[Image.Image]:
    """The images that the image processor gets: edit's as they are, those of later versions at the condition area (Lanczos)."""
    images = [as_images(control[None].float())[0] for control in controls]
    if parts.settings["model_version"] == "edit":
        return images
    area = parts.settings["condition_area"]
    return [image.resize(area_size(image.size, area), Image.Resampling.LANCZOS) for image in images]


def positions_of(ids: Sequence[int], mark: int, grids: Sequence[tuple[int, int]]) -> Tensor:
    """Time, row and column (3, L) of tokens, int64: Qwen2.5-VL's three-axis positions (Bai et al. 2025, arXiv 2502.13923).

    Text counts on all three axes alike. An image of (rows, columns) tokens, each of them the token `mark`, stands at one time and in its
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
    assert not left, f"{len(left)} images have no place in the text"
    return torch.cat(pieces, dim=1)


def check_positions(encoder: nn.Module) -> None:
    """Raises OptionError when the installed transformers gives the tokens of images other positions than are given here."""
    mark, grids = encoder.config.image_token_id, [(3, 2), (1, 4)]
    ids = torch.tensor([[0, 0, *[mark] * 6, 0, *[mark] * 4, 0, 0]])
    merge = encoder.config.vision_config.spatial_merge_size
    sizes = torch.tensor([(1, rows * merge, columns * merge) for rows, columns in grids])
    index = encoder.model.get_rope_index
    # transformers 5 asks which tokens are images, 4 finds out.
    more = {"mm_token_type_ids": (ids == mark).int()} if "mm_token_type_ids" in inspect.signature(index).parameters else {}
    theirs, _ = index(ids, image_grid_thw=sizes, **more)
    if not torch.equal(theirs[:, 0], positions_of(ids[0].tolist(), mark, grids)):
        raise OptionError(
            f"text_encoder: the installed transformers {transformers.__version__} gives images other positions than Qwen-Image was "
            "trained with, so control images would be misread. Install the version in requirements.txt"
        )


def _around(parts: Parts, num_images: int) -> tuple[str, str]:
    """The text before and after an instruction on that many images."""
    version = parts.settings["model_version"]
    if num_images == 0 and version == "edit":
        raise OptionError("model_version: edit reads an instruction only together with its control image, and there is none")
    before, _, after = template_of(version).text.partition("{}")
    if version in ("edit-2509", "edit-2511"):
        before += "".join(_LISTED.format(number) for number in range(1, num_images + 1))
    return before, after


def _ids(tokenizer: Any, text: str) -> list[int]:
    found: list[int] = tokenizer(text).input_ids
    return found


def _run(parts: Parts, ids: Sequence[int], positions: Tensor, use_cache: bool, **more: Any) -> Any:
    """The encoder's output for one row of tokens at these positions (3, L); without the logits, which nobody reads."""
    encoder = parts.text_encoders["te1"]
    device = parts.bring(encoder)
    placed = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in more.items()}
    # Positions are given: transformers 5 falls back to plain ones without a word where it is not told which tokens are images.
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
            f"control_resolution: control images of {sizes} fill {num_taken} of the {MAX_POSITIONS} text positions and leave none for "
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
        raise OptionError(f"caption: {caption[:80]!r} contains {mark}, which stands for images in Qwen-Image's texts; remove it")
