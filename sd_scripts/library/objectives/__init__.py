"""Objectives: how a clean latent becomes a loss."""
