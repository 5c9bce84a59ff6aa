"""What runs on Qwen-Image-2.1 have of their own in each section, and their kinds."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sd_scripts.families.common.transformer_options import LanguageModelOptions, ReferenceModelOptions, transformer_runs
from sd_scripts.schema.fields import NotNegative, Positive, Show, Side
from sd_scripts.schema.model import MAX_CONTROLS, Controls, EncoderDevicesOptions, FewStepModelOptions
from sd_scripts.schema.objective import FlowObjectiveOptions, SizeShift
from sd_scripts.schema.output import AdapterOutputOptions
from sd_scripts.schema.samples import EditSampleOptions

from .facts import FACTS


class QwenImage21ModelOptions(ReferenceModelOptions, LanguageModelOptions, FewStepModelOptions, EncoderDevicesOptions):
    """The Qwen-Image-2.1 base model: text to image, and editing with reference images."""

    grid: ClassVar[int] = 32
    latent_side: ClassVar[int] = 16
    model_type: ClassVar[str] = "qwen_image_21"
    own_controls: ClassVar[Controls] = Controls(0, MAX_CONTROLS, FACTS.label)

    vae: Annotated[str | None, Show(kind="file")] = None
    """The VAE (Qwen-Image-2.1's, of 64 channels): a .safetensors file, a diffusers folder or a hub id; None takes the one that comes with
    the base model."""
    text_encoder: Annotated[str | None, Show(kind="file")] = None
    """The Qwen3-VL-8B text encoder: a .safetensors file, a folder (with its tokenizer) or a hub id; None takes the one that comes with the
    base model."""
    max_token_length: Annotated[int, Field(ge=16, le=4096)] = 512
    """Tokens of a caption that are read, besides those of the template around it."""
    control_resolution: Annotated[Side | None, Show(unit="px")] = None
    """Reference images are shown to the VAE and to the text encoder at about the area of a square of this side, each in its own aspect
    ratio. None takes 1024; less saves memory and time."""


class QwenImage21FlowObjectiveOptions(FlowObjectiveOptions):
    """The training objective of Qwen-Image-2.1."""

    # scheduler_config.json: max_image_seq_len, max_shift. A token is one latent of 16 x 16 pixels.
    size_shifts: ClassVar[dict[str, SizeShift]] = {"qwen_shift": SizeShift((256, 0.5), (8192, 0.9), patch=1)}

    timestep_sampling: Literal["uniform", "sigmoid", "logit_normal", "shift", "qwen_shift", "mode", "sigma"] = "shift"
    discrete_flow_shift: Positive = 2.2


class QwenImage21SampleOptions(EditSampleOptions):
    """Previews of a Qwen-Image-2.1 model, shifted by the image's size unless a scheduler is chosen."""

    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 40
    sample_cfg_scale: NotNegative = 1.0
    """Guidance scale of a preview without --l, with the negative prompt; 1 turns it off, as the published model is drawn, above 1 doubles
    the time."""


class QwenImage21AdapterOutputOptions(AdapterOutputOptions):
    """Run folder, saved adapter files, states, trackers, metadata."""

    save_model_as: Literal["kohya", "diffusers", "comfyui"] = "diffusers"
    """Names inside the saved .safetensors file. A LoRA is read whole with diffusers' by ComfyUI, diffusers; with comfyui's
    (`diffusion_model.`, with alphas) by diffusers (ComfyUI leaves parts of the MLPs out); with kohya's here alone. verify_lora counts the
    layers of a file."""


RUNS = transformer_runs(
    "qwen_image21",
    FACTS.label,
    QwenImage21ModelOptions,
    QwenImage21FlowObjectiveOptions,
    QwenImage21SampleOptions,
    QwenImage21AdapterOutputOptions,
)
