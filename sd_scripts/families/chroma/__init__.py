"""Chroma1."""
