"""What runs on FLUX.2 Klein have of their own in each section, and their kinds."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sd_scripts.families.common.transformer_options import LanguageModelOptions, ReferenceModelOptions, transformer_runs
from sd_scripts.schema.dataset import PairDatasetOptions
from sd_scripts.schema.fields import NotNegative, Positive, Show, Side
from sd_scripts.schema.model import MAX_CONTROLS, Controls, FewStepModelOptions
from sd_scripts.schema.objective import FlowObjectiveOptions, SizeShift
from sd_scripts.schema.output import AdapterOutputOptions
from sd_scripts.schema.runs import RunOptions
from sd_scripts.schema.samples import EditSampleOptions

from .facts import FACTS


class Flux2ModelOptions(ReferenceModelOptions, LanguageModelOptions, FewStepModelOptions):
    """The FLUX.2 Klein base model, 4B (Apache-2.0) or 9B (non-commercial): text to image, and editing with reference images."""

    grid: ClassVar[int] = 16
    latent_side: ClassVar[int] = 16
    model_type: ClassVar[str] = "flux_2"
    own_controls: ClassVar[Controls] = Controls(0, MAX_CONTROLS, FACTS.label)

    vae: Annotated[str | None, Show(kind="file")] = None
    """The VAE (FLUX.2's): flux2-vae.safetensors, a diffusers folder or a hub id; None takes the one that comes with the base model."""
    text_encoder: Annotated[str | None, Show(kind="file")] = None
    """The Qwen3 text encoder (4B for Klein 4B, 8B for 9B): a .safetensors file, a folder (with its tokenizer) or a hub id; None takes the
    one that comes with the base model."""
    max_token_length: Annotated[int, Field(ge=16, le=512)] = 512
    """Tokens of a caption that are read, with those of the chat template and of the padding behind it, which the transformer sees. 512 is
    what the model was trained with."""
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


class Flux2SampleOptions(EditSampleOptions):
    """Previews of a FLUX.2 Klein model, shifted by the image's size unless a scheduler is chosen."""

    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 28
    """Denoising steps of a preview without --s: 28 to 50 for the base models, 4 for the distilled ones."""
    sample_cfg_scale: NotNegative = 4.0
    """Guidance scale of a preview without --l, with the negative prompt; 1 turns it off, above 1 doubles the time. A folder or hub id that
    says of itself that it is distilled is drawn without."""


class Flux2AdapterOutputOptions(AdapterOutputOptions):
    """Run folder, saved adapter files, states, trackers, metadata."""

    save_model_as: Literal["kohya", "diffusers", "comfyui"] = "kohya"
    """Names inside the saved .safetensors file. A LoRA is read whole with kohya's by ComfyUI, musubi-tuner, diffusers; with diffusers' by
    ComfyUI, diffusers; with comfyui's (`diffusion_model.`, without alphas) by ComfyUI, diffusers. verify_lora counts the layers of a
    file."""


class _Flux2Run(RunOptions):
    family: ClassVar[str] = "flux2"

    model: Flux2ModelOptions
    dataset: PairDatasetOptions
    objective: Flux2FlowObjectiveOptions = Flux2FlowObjectiveOptions()
    samples: Flux2SampleOptions = Flux2SampleOptions()


RUNS = transformer_runs(_Flux2Run, FACTS.label, Flux2AdapterOutputOptions)
