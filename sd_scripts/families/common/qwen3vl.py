"""The text encoder Qwen3-VL, as several families load it and ask it, and a small one."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration

from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.common import PartSpec

from .original_unet import Stored
from .qwen3vl_signs import TEXT_ENCODER
from .tiny_words import MARKS
from .tokenizers import TokenizerSpec

logger = logging.getLogger(__name__)


def _layout(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """ComfyUI's names: the language model is `model`, and the visual part stands beside it."""

    def stored(key: str) -> Stored:
        return Stored(key.replace("model.language_model.", "model.", 1).replace("model.visual.", "visual.", 1))

    return stored


WORDS = TokenizerSpec(
    "tokenizer",
    None,
    Qwen2Tokenizer,
    ("vocab.json", "merges.txt", "tokenizer_config.json"),
    (("Qwen/Qwen3-VL-8B-Instruct", ""),),
    "Qwen3-VL's",
    "4.5 MB",
)
QWEN3VL_PART = PartSpec(
    folder="text_encoder",
    class_name="Qwen3VLForConditionalGeneration",
    make=lambda config: Qwen3VLForConditionalGeneration(Qwen3VLConfig.from_dict(config)),
    layout=_layout,
    prefixes=("text_encoders.qwen3vl_8b.transformer.",),
    kinds=(TEXT_ENCODER,),
    tokenizer=WORDS,
    stem="model",
    # Rows of text are taken before the head, which some files leave out.
    stand_ins={"lm_head.weight": "model.language_model.embed_tokens.weight"},
)


PAD = "<|image_pad|>"
"""Stands where an image is seen: once in a text that is given to states_before_norm, as often as it has tokens to the model."""


def states_before_norm(parts: Parts, name: str, ids: Sequence[int], images: Sequence[Tensor] = ()) -> Tensor:
    """States (L, D) of these tokens after the last layer of the language model, before its norm, in the encoder's precision.

    images: what is seen where PAD stands, (3, H, W) in [-1, 1] with sides of whole tokens, 32 pixels; their own states are left out.
    transformers 5 gives the normalised states in the place where version 4 has these. Runs with gradient when grad mode is on.
    """
    encoder = parts.text_encoders[name]
    device = parts.bring(encoder)
    language: Any = encoder.model.language_model
    found: list[Tensor] = []
    handle = language.norm.register_forward_pre_hook(lambda module, given: found.append(given[0]))
    try:
        if not images:
            language(input_ids=torch.tensor([list(ids)], device=device), use_cache=False)
            return found[0][0]
        tokens, seen = _seen(encoder, ids, images)
        encoder.model(input_ids=tokens.to(device), use_cache=False, **{key: value.to(device) for key, value in seen.items()})
        return found[0][0][tokens[0].to(device) != encoder.config.image_token_id]
    finally:
        handle.remove()


def _seen(encoder: Any, ids: Sequence[int], images: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Tokens (1, L) with as many for each image as it has, and the images as the model takes them: in patches, those of a token together.

    Its own processor makes the same of images of 256 x 256 pixels and more, and enlarges smaller ones.
    """
    vision, pad = encoder.config.vision_config, encoder.config.image_token_id
    side, merged = vision.patch_size, vision.spatial_merge_size
    grids = [(1, image.shape[1] // side, image.shape[2] // side) for image in images]
    following = iter(grids)
    tokens: list[int] = []
    for token in ids:
        tokens += [token] if token != pad else [pad] * (math.prod(next(following)) // merged**2)
    patches = []
    for image, (_, rows, columns) in zip(images, grids, strict=True):
        squares = image.reshape(3, rows // merged, merged, side, columns // merged, merged, side).permute(1, 4, 2, 5, 0, 3, 6)
        films = squares[:, :, :, :, :, None].expand(-1, -1, -1, -1, -1, vision.temporal_patch_size, -1, -1)
        patches.append(films.reshape(rows * columns, -1))
    row = torch.tensor([tokens])
    return row, {
        "pixel_values": torch.cat(patches).to(next(encoder.model.visual.parameters()).dtype),
        "image_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (row == pad).int(),
    }


@functools.cache
def tell_of_cut(limit: int) -> None:
    """Says once that captions longer than the limit are cut."""
    logger.warning("captions longer than %d tokens are cut there; max_token_length sets the limit (this is said once)", limit)


def tiny_qwen3vl(tokenizer: Any, width: int = 32, num_layers: int = 2) -> Qwen3VLForConditionalGeneration:
    """A Qwen3-VL with heads of 16 that reads this tokenizer's tokens; weights come from torch's generator as the caller has set it."""
    marks = dict(zip(MARKS, tokenizer.convert_tokens_to_ids(list(MARKS)), strict=True))
    text = {
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 3, 3], "mrope_interleaved": True},
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": marks["<|im_end|>"],
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": width,
        "deepstack_visual_indexes": [0],
        "num_position_embeddings": 16,
    }
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=marks["<|image_pad|>"],
            video_token_id=marks["<|video_pad|>"],
            vision_start_token_id=marks["<|vision_start|>"],
            vision_end_token_id=marks["<|vision_end|>"],
        )
    )
