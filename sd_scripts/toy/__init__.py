"""Toy worlds: procedural pictures with captions, tiny trained bases, and how well a model obeys."""
