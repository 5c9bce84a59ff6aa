"""Kinds of files that several families have. Loads no torch."""

TRANSFORMER = "a FLUX transformer"
"""That its tensors tell no family is right: the same network was trained for text to image and for editing."""
