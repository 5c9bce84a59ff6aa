"""FLUX.2 Klein."""
