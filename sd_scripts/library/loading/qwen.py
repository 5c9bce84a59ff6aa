"""Load Qwen-Image and Qwen-Image-Edit from a diffusers folder, a hub id, or a transformer file with VAE and text encoder; write them."""

from __future__ import annotations

from sd_scripts.library.loading.common import BASE, CONFIGS, Config, read_json


def published_scheduler() -> Config:
    """Scheduler configuration of all published versions."""
    return read_json(CONFIGS / "qwen_image" / "scheduler" / "scheduler_config.json", BASE)
