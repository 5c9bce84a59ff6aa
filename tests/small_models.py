"""Small models as diffusers' own pipelines, for comparing with them and for writing them to folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from diffusers import (
    DiffusionPipeline,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    SchedulerMixin,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    ZImagePipeline,
)
from transformers import Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from sd_scripts.families import RUNS
from sd_scripts.library.core.protocols import Parts
from sd_scripts.schema.model import ModelOptions

NEW_MODEL: dict[str, Any] = {
    "base_channels": 16,
    "channel_multipliers": "1,2",
    "layers_per_block": 1,
    "attention_levels": "1",
    "attention_head_dim": 8,
    "text_width": 24,
    "text_layers": 2,
    "text_heads": 2,
    "text_dropout": 0.1,
    "vocab_size": 300,
    "max_token_length": 32,
    "self_conditioning": True,
    "vae": "toy",
}
"""Options of a small model, for runs that make theirs; with everything that is drawn at random."""
NEW_STYLES: dict[str, Any] = {
    "base_channels": 16,
    "channel_multipliers": "1,2",
    "layers_per_block": 1,
    "attention_levels": "1",
    "attention_head_dim": 8,
    "unet_dropout": 0.1,
    "vae": "toy",
}
"""The same of a small model of style transfer."""
SMALL_DDPM: dict[str, Any] = {
    "base_channels": 8,
    "channel_multipliers": (1, 2),
    "layers_per_block": 1,
    "attention_levels": (1,),
    "attention_head_dim": 8,
    "max_token_length": 16,
    "text_width": 16,
    "text_layers": 1,
    "text_heads": 2,
    "vocab_size": 270,
}
"""Options of a still smaller one on pixels, for tests in this process."""


def model_given(family: str, method: str, base: Path | str) -> dict[str, Any]:
    """The options that name or describe the model of a run of this kind."""
    if method == "scratch":
        return dict(NEW_STYLES if family == "lgt" else NEW_MODEL)
    return {"pretrained_model_name_or_path": base}


def model_options(family: str) -> type[ModelOptions]:
    """The options of the model in the runs of a family."""
    found: Any = next(run for (name, _), run in RUNS.items() if name == family).model_fields["model"].annotation
    assert issubclass(found, ModelOptions)
    return found


def pipeline_of(
    parts: Parts, scheduler: SchedulerMixin | None = None, force_zeros_for_empty_prompt: bool | None = None
) -> StableDiffusionXLPipeline:
    """The parts of an SDXL model in diffusers' pipeline; the networks are shared, not copied."""
    if force_zeros_for_empty_prompt is None:
        force_zeros_for_empty_prompt = parts.settings["force_zeros_for_empty_prompt"]
    pipeline = StableDiffusionXLPipeline(
        vae=parts.vae,
        text_encoder=parts.text_encoders["te1"],
        text_encoder_2=parts.text_encoders["te2"],
        tokenizer=parts.tokenizers["te1"],
        tokenizer_2=parts.tokenizers["te2"],
        unet=parts.backbone,
        scheduler=scheduler or EulerDiscreteScheduler.from_config(parts.scheduler_config),
        force_zeros_for_empty_prompt=force_zeros_for_empty_prompt,
        add_watermarker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sd_pipeline_of(parts: Parts, scheduler: SchedulerMixin | None = None) -> StableDiffusionPipeline:
    """The parts of an SD 1.x or 2.x model in diffusers' pipeline; the networks are shared, not copied."""
    pipeline = StableDiffusionPipeline(
        vae=parts.vae,
        text_encoder=parts.text_encoders["te1"],
        tokenizer=parts.tokenizers["te1"],
        unet=parts.backbone,
        scheduler=scheduler or EulerDiscreteScheduler.from_config(parts.scheduler_config),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def flux_pipeline_of(parts: Parts) -> FluxPipeline:
    """The parts of a FLUX model in diffusers' pipeline; the networks are shared, not copied."""
    pipeline = FluxPipeline(
        vae=parts.vae,
        text_encoder=parts.text_encoders["te1"],
        text_encoder_2=parts.text_encoders["te3"],
        tokenizer=parts.tokenizers["te1"],
        tokenizer_2=parts.tokenizers["te3"],
        transformer=parts.backbone,
        scheduler=FlowMatchEulerDiscreteScheduler.from_config(parts.scheduler_config),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def qwen_pipeline_of(parts: Parts) -> DiffusionPipeline:
    """The parts of a Qwen-Image model in diffusers' pipeline of its version; the networks are shared, not copied."""
    kinds = {"image": QwenImagePipeline, "edit": QwenImageEditPipeline}
    pipeline = kinds.get(parts.settings["model_version"], QwenImageEditPlusPipeline)(
        vae=parts.vae,
        text_encoder=parts.text_encoders["te1"],
        tokenizer=parts.tokenizers["te1"],
        transformer=parts.backbone,
        scheduler=FlowMatchEulerDiscreteScheduler.from_config(parts.scheduler_config),
        **({} if parts.processor is None else {"processor": parts.processor}),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def zimage_pipeline_of(parts: Parts) -> ZImagePipeline:
    """The parts of a Z-Image model in diffusers' pipeline; the networks are shared, not copied."""
    pipeline = ZImagePipeline(
        vae=parts.vae,
        text_encoder=parts.text_encoders["te1"],
        tokenizer=parts.tokenizers["te1"],
        transformer=parts.backbone,
        scheduler=FlowMatchEulerDiscreteScheduler.from_config(parts.scheduler_config),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for piece in message.content %}{{ piece.text }}{% endfor %}"
    "<|im_end|>\n{% endfor %}"
)


_PAD = "<|image_pad|>"


class Words(Qwen3VLProcessor):
    """Qwen3-VL's processor: its own wants torchvision for images, which are made into patches by that of Qwen2-VL here."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.chat_template = tokenizer, _TEMPLATE

    def __call__(self, text: list[str], images: Any = None, **settings: Any) -> Any:
        if images is None:
            return self.tokenizer(text, **settings)
        half = {name: [0.5] * 3 for name in ("image_mean", "image_std")}
        seen = Qwen2VLImageProcessorPil(patch_size=16, min_pixels=32 * 32, max_pixels=4096**2, **half)(images=images, return_tensors="pt")
        grids = iter(seen.image_grid_thw.prod(dim=1) // 4)
        tokens = self.tokenizer([re.sub(re.escape(_PAD), lambda _: _PAD * int(next(grids)), one) for one in text], **settings)
        tokens.update(seen)
        tokens["mm_token_type_ids"] = (tokens.input_ids == self.tokenizer.convert_tokens_to_ids(_PAD)).int()
        return tokens

    def apply_chat_template(self, conversation: Any, tokenize: bool, return_dict: bool) -> list[list[int]]:
        assert tokenize and not return_dict
        return [self.tokenizer(self.tokenizer.apply_chat_template(conversation, chat_template=_TEMPLATE, tokenize=False)).input_ids]
