"""The small diffusion model that a run trains from nothing."""
