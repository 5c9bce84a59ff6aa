"""Options of families whose transformer reads T5 and CLIP-L and is mostly told a guidance scale. Loads no torch."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sd_scripts.schema.fields import NotNegative, Positive, Show
from sd_scripts.schema.model import FewStepModelOptions
from sd_scripts.schema.objective import FlowObjectiveOptions, SizeShift
from sd_scripts.schema.output import AdapterOutputOptions


class ClipT5ModelOptions(FewStepModelOptions):
    """A base model with a VAE, CLIP-L and T5-XXL."""

    grid: ClassVar[int] = 16
    latent_side: ClassVar[int] = 8

    ae: Annotated[str | None, Show(kind="file")] = None
    """The autoencoder (VAE): ae.safetensors, a diffusers folder or a hub id; None takes the one that comes with the base model."""
    clip_l: Annotated[str | None, Show(kind="file")] = None
    """The CLIP-L text encoder as a file or folder; None takes the one that comes with the base model."""
    t5xxl: Annotated[str | None, Show(kind="file")] = None
    """The T5-XXL text encoder as a file or folder; None takes the one that comes with the base model."""
    t5xxl_max_token_length: Annotated[int | None, Field(ge=16, le=512)] = None
    """Caption tokens that T5 reads; None takes what the model was trained with: 512, and 256 for schnell."""
    guidance_scale: NotNegative = 1.0
    """Guidance that the embedding of a guidance-distilled model (dev, Kontext) is told during training. 1 is what kohya's guide recommends;
    it has no effect on schnell. Previews have their own, sample_guidance_scale."""
    text_encoder_quantization: Literal["none", "qint8", "qfloat8"] = "none"
    """Hold the T5 encoder in 8 bits, which halves its memory while captions are encoded."""


class ClipT5ObjectiveOptions(FlowObjectiveOptions):
    """The training objective of such a model."""

    size_shifts: ClassVar[dict[str, SizeShift]] = {"flux_shift": SizeShift((256, 0.5), (4096, 1.15))}

    timestep_sampling: Literal["uniform", "sigmoid", "logit_normal", "shift", "flux_shift", "mode", "sigma"] = "shift"
    discrete_flow_shift: Positive = 3.1582
    """The s in t' = s t / (1 + (s - 1) t) for timestep_sampling = shift and sigma; above 1 trains more on noisy times. 3.1582 is FLUX's own
    at 1024 x 1024."""


class FluxAdapterOutputOptions(AdapterOutputOptions):
    """Run folder, saved adapter files, states, trackers, metadata."""

    save_model_as: Literal["kohya", "diffusers", "comfyui"] = "kohya"
    """Names inside the saved .safetensors file. A LoRA is read whole with kohya's by ComfyUI, Forge, sd-scripts, musubi-tuner, diffusers;
    with diffusers' by ComfyUI, Forge, diffusers; with comfyui's (`diffusion_model.`) by ComfyUI, Forge, diffusers. verify_lora counts the
    layers of a file."""
