"""Objectives: how a clean latent becomes a loss."""

from __future__ import annotations

from sd_scripts.library.objectives.colours import NUM_PICTURES, fit_colours
from sd_scripts.library.objectives.flow_matching import FlowMatching
from sd_scripts.library.objectives.make import check_prior, make, num_anchors, wants_colours, wants_empty_text
from sd_scripts.library.objectives.regression import Regression

__all__ = [
    "NUM_PICTURES",
    "FlowMatching",
    "Regression",
    "check_prior",
    "fit_colours",
    "make",
    "num_anchors",
    "wants_colours",
    "wants_empty_text",
]
