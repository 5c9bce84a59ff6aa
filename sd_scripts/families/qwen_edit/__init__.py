"""Qwen-Image and Qwen-Image-Edit."""
