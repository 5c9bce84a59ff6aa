"""What runs on FLUX.2 Klein have of their own in each section, and their kinds."""

from typing import Annotated, ClassVar

from pydantic import Field

from sd_scripts.families.common.flux2_options import Flux2AdapterOutputOptions, Flux2FlowObjectiveOptions, Flux2ModelOptions
from sd_scripts.families.common.transformer_options import transformer_runs
from sd_scripts.schema.fields import NotNegative, Show
from sd_scripts.schema.model import MAX_CONTROLS, Controls, FewStepModelOptions
from sd_scripts.schema.samples import EditSampleOptions

from .facts import FACTS


class KleinModelOptions(Flux2ModelOptions, FewStepModelOptions):
    """The FLUX.2 Klein base model, 4B (Apache-2.0) or 9B (non-commercial): text to image, and editing with reference images."""

    own_controls: ClassVar[Controls] = Controls(0, MAX_CONTROLS, FACTS.label)

    text_encoder: Annotated[str | None, Show(kind="file")] = None
    """The Qwen3 text encoder (4B for Klein 4B, 8B for 9B): a .safetensors file, a folder (with its tokenizer) or a hub id; None takes the
    one that comes with the base model."""


class KleinSampleOptions(EditSampleOptions):
    """Previews of a FLUX.2 Klein model, shifted by the image's size unless a scheduler is chosen."""

    sample_steps: Annotated[int, Field(ge=1, le=1000)] = 28
    """Denoising steps of a preview without --s: 28 to 50 for the base models, 4 for the distilled ones."""
    sample_cfg_scale: NotNegative = 4.0
    """Guidance scale of a preview without --l, with the negative prompt; 1 turns it off, above 1 doubles the time. A folder or hub id that
    says of itself that it is distilled is drawn without."""


RUNS = transformer_runs("flux2", FACTS.label, KleinModelOptions, Flux2FlowObjectiveOptions, KleinSampleOptions, Flux2AdapterOutputOptions)
