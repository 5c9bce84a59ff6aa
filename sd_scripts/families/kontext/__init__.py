"""FLUX.1 Kontext."""
