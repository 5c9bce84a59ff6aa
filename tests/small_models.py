"""Small models as diffusers' own pipelines, for comparing with them and for writing them to folders."""

from __future__ import annotations

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
)

from sd_scripts.library.protocols import Parts


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
