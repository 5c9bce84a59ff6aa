"""Signs of files with the VAE of which squares of latents are tokens. Loads no torch."""

from __future__ import annotations

from sd_scripts.schema.facts import Sign

VAE = "a VAE of FLUX.2 alone"
SQUARE_VAE_SIGN = Sign(VAE, lambda names: names.has("bn.running_mean") and names.has("decoder.conv_in.weight"), companion=True)
