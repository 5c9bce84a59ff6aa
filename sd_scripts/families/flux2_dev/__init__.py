"""FLUX.2 dev."""
