"""Adapters (LoRA and relatives) on a model: attach and train them, write and read their files, merge and apply them."""
