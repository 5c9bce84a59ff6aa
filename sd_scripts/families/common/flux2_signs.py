"""Signs of files with a FLUX.2 transformer. Loads no torch."""

from __future__ import annotations

from sd_scripts.schema.facts import TensorNames

KLEIN, DEV = "a FLUX.2 Klein transformer", "a FLUX.2 dev transformer"


def is_flux2(names: TensorNames, guided: bool) -> bool:
    """Whether a file has a FLUX.2 transformer that is told a guidance scale, or one that is not."""
    told = names.has("guidance_in.", "guidance_embedder.")
    return names.has("double_stream_modulation_img.") and told == guided
