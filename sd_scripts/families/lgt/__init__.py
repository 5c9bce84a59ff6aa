"""Style transfer in the latents of a VAE."""
