"""Draw prompts with a diffusers pipeline, in the form that measure.py takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from diffusers import ChromaPipeline, Flux2KleinPipeline, FluxPipeline, Krea2Pipeline, ZImagePipeline
from PIL import Image

from .by_family import FamilyModel
from .measure import EditRender, Render
from .tokens import KLEIN_MAX_TOKENS, KREA2_MAX_TOKENS, T5_MAX_TOKENS, ZIMAGE_MAX_TOKENS

NUM_STEPS = 12
GUIDANCE_SCALE = 2.0

DISTILLED_NUM_STEPS = 8
"""Of the base zimage, which was distilled to so many steps and to no guidance."""


class TextToImage(Protocol):
    """A diffusers text-to-image pipeline."""

    def __call__(self, *, prompt: list[str], **settings: object) -> Any:
        """The result has the images in `images`."""
        ...

    def set_progress_bar_config(self, **settings: object) -> None:
        """Settings of the bar over denoising steps."""
        ...


def render_with(
    pipeline: TextToImage | FamilyModel, num_steps: int | None = None, guidance_scale: float | None = None, batch_size: int = 32
) -> Render:
    """A render callable; each image's noise comes from its own seed, whatever is drawn beside it.

    Steps and guidance of None are those that suit the family's base. Sides in pixels must be multiples of 16.
    """
    distilled = isinstance(pipeline, ZImagePipeline)
    steps = num_steps if num_steps is not None else DISTILLED_NUM_STEPS if distilled else NUM_STEPS
    scale = guidance_scale if guidance_scale is not None else 0.0 if distilled else GUIDANCE_SCALE
    draw = pipeline.draw if isinstance(pipeline, FamilyModel) else _drawing(pipeline)

    def render(prompts: list[str], seeds: list[int], width: int, height: int) -> list[Image.Image]:
        images: list[Image.Image] = []
        for start in range(0, len(prompts), batch_size):
            chosen = slice(start, start + batch_size)
            images += draw(prompts[chosen], seeds[chosen], width, height, steps, scale)
        return images

    return render


def edit_with(model: FamilyModel, num_steps: int = NUM_STEPS, guidance_scale: float = 1.0, batch_size: int = 32) -> EditRender:
    """The same of a model that edits."""

    def render(instructions: list[str], sources: list[Image.Image], seeds: list[int]) -> list[Image.Image]:
        images: list[Image.Image] = []
        for start in range(0, len(seeds), batch_size):
            chosen = slice(start, start + batch_size)
            images += model.edit(instructions[chosen], sources[chosen], seeds[chosen], num_steps, guidance_scale)
        return images

    return render


def _drawing(pipeline: TextToImage) -> Callable[[list[str], list[int], int, int, int, float], list[Image.Image]]:
    # What FamilyModel.draw does, of a diffusers pipeline.
    pipeline.set_progress_bar_config(disable=True)

    def draw(prompts: list[str], seeds: list[int], width: int, height: int, num_steps: int, scale: float) -> list[Image.Image]:
        result = pipeline(
            prompt=prompts,
            width=width,
            height=height,
            num_inference_steps=num_steps,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            **_guidance(pipeline, scale, len(prompts)),
        )
        images: list[Image.Image] = result.images
        return images

    return draw


def _guidance(pipeline: TextToImage, scale: float, num_prompts: int) -> dict[str, object]:
    # FLUX means by guidance_scale a number that is embedded; what others call so is its true CFG, against the empty caption.
    if isinstance(pipeline, FluxPipeline):
        return {"true_cfg_scale": scale, "negative_prompt": [""] * num_prompts, "max_sequence_length": T5_MAX_TOKENS}
    if isinstance(pipeline, ChromaPipeline):
        return {"guidance_scale": scale, "negative_prompt": [""] * num_prompts, "max_sequence_length": T5_MAX_TOKENS}
    if isinstance(pipeline, Flux2KleinPipeline):
        return {"guidance_scale": scale, "max_sequence_length": KLEIN_MAX_TOKENS, "text_encoder_out_layers": (1, 2, 3)}
    if isinstance(pipeline, Krea2Pipeline):
        # Its own scale is one less: 0 is no guidance.
        return {"guidance_scale": scale - 1, "negative_prompt": [""] * num_prompts, "max_sequence_length": KREA2_MAX_TOKENS}
    if isinstance(pipeline, ZImagePipeline):
        return {"guidance_scale": scale, "max_sequence_length": ZIMAGE_MAX_TOKENS}
    return {"guidance_scale": scale}
