"""Signs of files with Qwen-Image's VAE. Loads no torch."""

from __future__ import annotations

from sd_scripts.schema.facts import Sign, TensorNames

VAE = "a VAE of Qwen-Image alone"


def _is_vae(names: TensorNames) -> bool:
    """Convolutions over time as well, in either layout; Wan's first VAE is of the same form."""
    film = len(names.shapes.get("decoder.conv_in.weight", ())) == 5 and names.starts("encoder.down_blocks.0.conv1.")
    return film or (names.starts("encoder.downsamples.") and names.starts("decoder.upsamples."))


QWEN_VAE_SIGN = Sign(VAE, _is_vae, companion=True)
