"""Objectives: how a clean latent becomes a loss."""

from __future__ import annotations

from sd_scripts.library.objectives.colours import NUM_PICTURES, fit_colours
from sd_scripts.library.objectives.energy import Energy
from sd_scripts.library.objectives.flow_matching import FlowMatching
from sd_scripts.library.objectives.make import check_prior, check_sides, check_styles, make, num_anchors, wants_colours, wants_empty_text
from sd_scripts.library.objectives.regression import Regression

__all__ = [
    "NUM_PICTURES",
    "Energy",
    "FlowMatching",
    "Regression",
    "check_prior",
    "check_sides",
    "check_styles",
    "fit_colours",
    "make",
    "num_anchors",
    "wants_colours",
    "wants_empty_text",
]
