"""What runs on FLUX.3 Image Klein have of their own in each section, and their kinds."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sd_scripts.families.common.transformer_options import (
    Qwen3VL4BModelOptions,
    ReferenceModelOptions,
    SquareVaeModelOptions,
    UnsizedObjectiveOptions,
    transformer_runs,
)
from sd_scripts.schema.fields import NotNegative, Positive, Show, Side
from sd_scripts.schema.model import MAX_CONTROLS, Controls
from sd_scripts.schema.output import AdapterOutputOptions
from sd_scripts.schema.samples import EditSampleOptions

from .facts import FACTS


class Flux3ModelOptions(ReferenceModelOptions, SquareVaeModelOptions, Qwen3VL4BModelOptions):
    """The FLUX.3 Image Klein base model: text to image, and editing with reference images."""

    model_type: ClassVar[str] = "flux_3"
    own_controls: ClassVar[Controls] = Controls(0, MAX_CONTROLS, FACTS.label)

    max_token_length: Annotated[int, Field(ge=80, le=8192)] = 8192
    """Tokens of a caption that are read, with those of the chat template; longer ones are cut. A text fills windows of 80 tokens, whose
    padding the transformer sees."""
    control_resolution: Annotated[Side | None, Show(unit="px")] = None
    """Reference images of another size than their target are given to the VAE at about the area of a square of this side, each in its own
    aspect ratio. None takes 1024; less saves memory and time. In previews it bounds several reference images, and a single one only where
    it is set: the model takes that whole, up to 2048 x 2048."""


class Flux3FlowObjectiveOptions(UnsizedObjectiveOptions):
    """The training objective of FLUX.3."""

    discrete_flow_shift: Positive = 6.93
    """The s in t' = s t / (1 + (s - 1) t) for timestep_sampling = shift and sigma; above 1 trains more on noisy times. 6.93 is the model's
    own, for all sizes."""


class Flux3SampleOptions(EditSampleOptions):
    """Previews of a FLUX.3 model, always with its own flow-matching sampler."""

    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 50
    sample_cfg_scale: NotNegative = 3.5
    """Guidance scale of a preview without --l, with the negative prompt; 1 turns it off, above 1 doubles the time."""


class Flux3AdapterOutputOptions(AdapterOutputOptions):
    """Run folder, saved adapter files, states, trackers, metadata."""

    save_model_as: Literal["kohya", "diffusers", "comfyui"] = "comfyui"
    """Names inside the saved .safetensors file. A LoRA is read whole with diffusers' by diffusers; with comfyui's (`diffusion_model.`,
    without alphas) by diffusers; kohya's are for this program alone. verify_lora counts the layers of a file."""


RUNS = transformer_runs("flux3", FACTS.label, Flux3ModelOptions, Flux3FlowObjectiveOptions, Flux3SampleOptions, Flux3AdapterOutputOptions)
