"""Objectives: how a clean latent becomes a loss."""

from __future__ import annotations

from sd_scripts.library.objectives.make import make
from sd_scripts.library.objectives.regression import Regression

__all__ = ["Regression", "make"]
