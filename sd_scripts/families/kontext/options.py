"""What runs on FLUX.1 Kontext have of their own in each section, and their kinds."""

from typing import Annotated, ClassVar

from sd_scripts.families.common.clip_t5_options import ClipT5ModelOptions, ClipT5ObjectiveOptions, FluxAdapterOutputOptions
from sd_scripts.families.common.transformer_options import GuidedEditSampleOptions, ReferenceModelOptions, transformer_runs
from sd_scripts.schema.fields import NotNegative, Show, Side
from sd_scripts.schema.model import Controls, file_name

from .facts import FACTS

MAX_REFERENCES = 1


class KontextModelOptions(ReferenceModelOptions, ClipT5ModelOptions):
    """The FLUX.1 Kontext base model, which edits an image as it is told, or draws from text alone."""

    own_controls: ClassVar[Controls] = Controls(0, MAX_REFERENCES, FACTS.label)

    control_resolution: Annotated[Side | None, Show(unit="px")] = None
    """The reference image is given to the VAE at about the area of a square of this side, in its own aspect ratio. None takes 1024, what
    the model was trained with; less saves memory and time."""

    def header_values(self) -> dict[str, object]:
        """See ModelOptions."""
        return {"model_type": "flux_kontext", "guidance_scale": self.guidance_scale, "vae_name": file_name(self.ae)}


class KontextSampleOptions(GuidedEditSampleOptions):
    """Previews of a Kontext model."""

    sample_guidance_scale: NotNegative = 2.5


RUNS = transformer_runs("kontext", FACTS.label, KontextModelOptions, ClipT5ObjectiveOptions, KontextSampleOptions, FluxAdapterOutputOptions)
