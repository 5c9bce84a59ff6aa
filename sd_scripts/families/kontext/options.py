"""What runs on FLUX.1 Kontext have of their own in each section, and their kinds."""

from typing import Annotated, ClassVar

from sd_scripts.families.common.clip_t5_options import ClipT5ModelOptions, ClipT5ObjectiveOptions, FluxAdapterOutputOptions
from sd_scripts.families.common.transformer_options import ReferenceModelOptions, transformer_runs
from sd_scripts.schema.fields import NotNegative, Show, Side
from sd_scripts.schema.model import Controls, file_name
from sd_scripts.schema.samples import EditSampleOptions

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


class KontextSampleOptions(EditSampleOptions):
    """Previews of a Kontext model."""

    own_flags: ClassVar[tuple[str, ...]] = ("ci", "g")

    sample_prompts: Annotated[str, Show(basic=True, kind="text")] = ""
    """Prompts, one a line, or the path of a .txt, .toml or .json file. kohya's flags work: --w --h --d (seed) --l (CFG) --s (steps) --n
    (negative) --g (embedded guidance) --ci (control image). Empty makes no previews."""
    sample_cfg_scale: NotNegative = 1.0
    """True guidance scale of a preview without --l, with the negative prompt; 1 turns it off, as the model is meant, above 1 doubles the
    time."""
    sample_guidance_scale: NotNegative = 2.5
    """Guidance that the model's embedding is told in a preview without --g."""

    @property
    def embedded_guidance(self) -> float:
        return self.sample_guidance_scale


RUNS = transformer_runs("kontext", FACTS.label, KontextModelOptions, ClipT5ObjectiveOptions, KontextSampleOptions, FluxAdapterOutputOptions)
