"""Options of models whose transformer is FLUX.2's. Loads no torch."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sd_scripts.schema.fields import Positive, Show, Side
from sd_scripts.schema.objective import FlowObjectiveOptions, SizeShift
from sd_scripts.schema.output import AdapterOutputOptions

from .transformer_options import ReferenceModelOptions, SquareVaeModelOptions


class Flux2ModelOptions(ReferenceModelOptions, SquareVaeModelOptions):
    """A FLUX.2 base model: text to image, and editing with reference images."""

    model_type: ClassVar[str] = "flux_2"

    max_token_length: Annotated[int, Field(ge=16, le=512)] = 512
    """Tokens of a caption that are read, with those of the chat template and of the padding, which the transformer sees. 512 is what the
    model was trained with."""
    control_resolution: Annotated[Side | None, Show(unit="px")] = None
    """Reference images are given to the VAE at about the area of a square of this side, each in its own aspect ratio; in previews smaller
    ones stay as they are. None takes 1024; less saves memory and time."""


class Flux2FlowObjectiveOptions(FlowObjectiveOptions):
    """The training objective of FLUX.2."""

    # diffusers, pipeline_flux2_klein.py, compute_empirical_mu at 50 steps; a token is one latent of 16 x 16 pixels.
    size_shifts: ClassVar[dict[str, SizeShift]] = {"flux2_shift": SizeShift((256, 1.62158), (4096, 2.02331), patch=1)}

    timestep_sampling: Literal["uniform", "sigmoid", "logit_normal", "shift", "flux2_shift", "mode", "sigma"] = "shift"
    """Density of the training times: uniform; sigmoid(sigmoid_scale * N); logit_normal(logit_mean, logit_std); shift = sigmoid shifted by
    discrete_flow_shift; flux2_shift = sigmoid shifted by the image's size, as FLUX.2 is sampled in 50 steps; mode (mode_scale); sigma =
    uniform shifted by discrete_flow_shift."""
    discrete_flow_shift: Positive = 3.0


class Flux2AdapterOutputOptions(AdapterOutputOptions):
    """Run folder, saved adapter files, states, trackers, metadata."""

    save_model_as: Literal["kohya", "diffusers", "comfyui"] = "kohya"
    """Names inside the saved .safetensors file. A LoRA is read whole with kohya's by ComfyUI, musubi-tuner, diffusers; with diffusers' by
    ComfyUI, diffusers; with comfyui's (`diffusion_model.`, without alphas) by ComfyUI, diffusers. verify_lora counts the layers of a
    file."""
