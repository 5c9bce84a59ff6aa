"""Toy worlds: procedural images with captions, tiny trained bases, and how well a model obeys."""
