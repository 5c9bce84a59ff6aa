"""FLUX.3 Image Klein."""
