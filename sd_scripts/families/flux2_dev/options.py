"""What runs on FLUX.2 dev have of their own in each section, and their kinds."""

from typing import Annotated, ClassVar

from pydantic import Field

from sd_scripts.families.common.flux2_options import Flux2AdapterOutputOptions, Flux2FlowObjectiveOptions, Flux2ModelOptions
from sd_scripts.families.common.transformer_options import GuidedEditSampleOptions, transformer_runs
from sd_scripts.schema.fields import NotNegative, Show
from sd_scripts.schema.model import MAX_CONTROLS, Controls

from .facts import FACTS


class Flux2DevModelOptions(Flux2ModelOptions):
    """The FLUX.2 dev base model, 32 B (non-commercial): text to image, and editing with reference images."""

    own_controls: ClassVar[Controls] = Controls(0, MAX_CONTROLS, FACTS.label)

    pretrained_model_name_or_path: Annotated[str, Show(basic=True, kind="file")]
    """Base model: a .safetensors file, a diffusers folder or a hub id."""
    text_encoder: Annotated[str | None, Show(kind="file")] = None
    """The text encoder Mistral Small 3: a .safetensors file, a folder (with its tokenizer) or a hub id; None takes the one that comes with
    the base model. Of its layers three quarters are read."""
    guidance_scale: NotNegative = 1.0
    """Guidance that the model's embedding is told during training. 1 is what other trainers take; previews have their own,
    sample_guidance_scale."""

    def header_values(self) -> dict[str, object]:
        """See ModelOptions."""
        return super().header_values() | {"guidance_scale": self.guidance_scale}


class Flux2DevSampleOptions(GuidedEditSampleOptions):
    """Previews of a FLUX.2 dev model, shifted by the image's size unless a scheduler is chosen."""

    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 28
    """Denoising steps of a preview without --s: 28 to 50."""
    sample_guidance_scale: NotNegative = 4.0


RUNS = transformer_runs(
    "flux2_dev", FACTS.label, Flux2DevModelOptions, Flux2FlowObjectiveOptions, Flux2DevSampleOptions, Flux2AdapterOutputOptions
)
