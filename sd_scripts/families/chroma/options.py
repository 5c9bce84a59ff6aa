"""What runs on Chroma have of their own in each section, and their kinds."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sd_scripts.families.common.transformer_options import UnsizedObjectiveOptions, transformer_runs
from sd_scripts.schema.fields import NotNegative, Positive, Show
from sd_scripts.schema.model import BaseModelOptions, file_name
from sd_scripts.schema.output import AdapterOutputOptions
from sd_scripts.schema.samples import FlowSampleOptions

from .facts import FACTS


class ChromaModelOptions(BaseModelOptions):
    """The Chroma1 base model: HD, Base or one made from them."""

    grid: ClassVar[int] = 16
    latent_side: ClassVar[int] = 8

    ae: Annotated[str | None, Show(kind="file")] = None
    """The autoencoder (VAE, FLUX's): ae.safetensors, a diffusers folder or a hub id; None takes the one that comes with the base model."""
    t5xxl: Annotated[str | None, Show(kind="file")] = None
    """The T5-XXL text encoder as a file or folder; None takes the one that comes with the base model."""
    t5xxl_max_token_length: Annotated[int | None, Field(ge=16, le=512)] = None
    """Caption tokens that T5 reads; None takes 512. Padding is hidden from T5 and, but for its first token, from the transformer, as in
    Chroma's own training."""
    text_encoder_quantization: Literal["none", "qint8", "qfloat8"] = "none"
    """Hold the T5 encoder in 8 bits, which halves its memory while captions are encoded."""

    def header_values(self) -> dict[str, object]:
        """See ModelOptions."""
        return {"model_type": "chroma"} | ({"vae_name": file_name(self.ae)} if self.ae else {})


class ChromaFlowObjectiveOptions(UnsizedObjectiveOptions):
    """The training objective of Chroma."""

    timestep_sampling: Literal["uniform", "sigmoid", "logit_normal", "shift", "mode", "sigma"] = "sigmoid"
    discrete_flow_shift: Positive = 1.0
    """The s in t' = s t / (1 + (s - 1) t) for timestep_sampling = shift and sigma; above 1 trains more on noisy times. 1 is the model's
    own."""


class ChromaSampleOptions(FlowSampleOptions):
    """Previews of a Chroma model."""

    sample_cfg_scale: NotNegative = 4.0
    """Guidance scale of a preview without --l, with the negative prompt; 1 turns it off, above 1 doubles the time."""


class ChromaAdapterOutputOptions(AdapterOutputOptions):
    """Run folder, saved adapter files, states, trackers, metadata."""

    save_model_as: Literal["kohya", "diffusers", "comfyui"] = "kohya"
    """Names inside the saved .safetensors file. A LoRA is read whole with kohya's by ComfyUI, sd-scripts, diffusers; with diffusers' by
    ComfyUI, diffusers; with comfyui's (`diffusion_model.`) by ComfyUI, diffusers. verify_lora counts the layers of a file."""


RUNS = transformer_runs(
    "chroma", FACTS.label, ChromaModelOptions, ChromaFlowObjectiveOptions, ChromaSampleOptions, ChromaAdapterOutputOptions
)
