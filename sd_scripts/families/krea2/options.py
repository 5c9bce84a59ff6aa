"""What runs on Krea 2 have of their own in each section, and their kinds."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sd_scripts.families.common.transformer_options import Qwen3VL4BModelOptions, QwenVaeModelOptions, transformer_runs
from sd_scripts.schema.fields import NotNegative, Positive
from sd_scripts.schema.model import EncoderDevicesOptions, FewStepModelOptions
from sd_scripts.schema.objective import FlowObjectiveOptions, SizeShift
from sd_scripts.schema.output import AdapterOutputOptions
from sd_scripts.schema.samples import FlowSampleOptions

from .facts import FACTS


class Krea2ModelOptions(QwenVaeModelOptions, Qwen3VL4BModelOptions, FewStepModelOptions, EncoderDevicesOptions):
    """The Krea 2 base model: Raw is trained, and Turbo, distilled from it, draws with what was trained."""

    model_type: ClassVar[str] = "krea_2"

    max_token_length: Annotated[int, Field(ge=16, le=4096)] = 512
    """Tokens of a caption that are read, with the five of the template behind it."""


class Krea2FlowObjectiveOptions(FlowObjectiveOptions):
    """The training objective of Krea 2."""

    # diffusers, pipeline_krea2.py, calculate_shift. A token is 2 x 2 latents.
    size_shifts: ClassVar[dict[str, SizeShift]] = {"krea2_shift": SizeShift((256, 0.5), (6400, 1.15), patch=2)}

    timestep_sampling: Literal["uniform", "sigmoid", "logit_normal", "shift", "krea2_shift", "mode", "sigma"] = "shift"
    discrete_flow_shift: Positive = 2.2


class Krea2SampleOptions(FlowSampleOptions):
    """Previews of a Krea 2 model, shifted by the image's size unless a scheduler is chosen."""

    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 28
    """Denoising steps of a preview without --s; 8 with Turbo."""
    sample_cfg_scale: NotNegative = 5.5
    """Guidance scale of a preview without --l, with the negative prompt; 1 turns it off, above 1 doubles the time. It is one more than
    Krea's own, where 0 turns it off: its 4.5 is 5.5 here. A folder or hub id that says of itself that it is distilled is drawn without."""


class Krea2AdapterOutputOptions(AdapterOutputOptions):
    """Run folder, saved adapter files, states, trackers, metadata."""

    save_model_as: Literal["kohya", "diffusers", "comfyui"] = "comfyui"
    """Names inside the saved .safetensors file. A LoRA is read whole with kohya's by ComfyUI, musubi-tuner; with diffusers' by ComfyUI,
    diffusers; with comfyui's (`diffusion_model.`, without alphas) by ComfyUI, diffusers. verify_lora counts the layers of a file."""


RUNS = transformer_runs("krea2", FACTS.label, Krea2ModelOptions, Krea2FlowObjectiveOptions, Krea2SampleOptions, Krea2AdapterOutputOptions)
