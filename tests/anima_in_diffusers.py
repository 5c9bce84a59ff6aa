"""A small Anima as diffusers' own networks and modular pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import AnimaAutoBlocks, CosmosTransformer3DModel, FlowMatchEulerDiscreteScheduler, ModularPipeline
from diffusers.guiders import ClassifierFreeGuidance
from diffusers.models.transformers import transformer_cosmos
from torch import Tensor
from torch.nn import functional as F

from sd_scripts.library.core.protocols import Parts


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Within the block diffusers' network scales its mask of padding, which is zero, without torchvision, which is not installed."""

    def resize(mask: Tensor, size: list[int], interpolation: str) -> Tensor:
        return F.interpolate(mask, size, mode=interpolation)

    stand_in = SimpleNamespace(functional=SimpleNamespace(resize=resize), InterpolationMode=SimpleNamespace(NEAREST="nearest"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_cosmos, "transforms", stand_in, raising=False)
        yield


def transformer_of(parts: Parts) -> CosmosTransformer3DModel:
    """diffusers' own transformer with the same weights."""
    found: CosmosTransformer3DModel = CosmosTransformer3DModel.from_config(dict(parts.backbone.config)).eval()
    found.load_state_dict(parts.backbone.state_dict())
    return found


def pipeline_of(parts: Parts, cfg_scale: float = 1.0) -> ModularPipeline:
    """diffusers' pipeline of this model, with guidance of this scale."""
    found = AnimaAutoBlocks().init_pipeline()
    found.update_components(
        text_encoder=parts.text_encoders["te1"],
        tokenizer=parts.tokenizers["te1"],
        t5_tokenizer=parts.tokenizers["te2"],
        text_conditioner=parts.text_encoders["te2"],
        transformer=transformer_of(parts),
        vae=parts.vae,
        scheduler=FlowMatchEulerDiscreteScheduler.from_config(parts.scheduler_config),
        guider=ClassifierFreeGuidance(guidance_scale=cfg_scale),
    )
    found.set_progress_bar_config(disable=True)
    return found


def drawn(pipeline: ModularPipeline, **called: Any) -> Tensor:
    """Images (B, 3, H, W) in [-1, 1]."""
    with without_torchvision():
        images: Tensor = pipeline(**called, output_type="pt", output="images")
    return 2 * images - 1


class FolderPipeline:
    """diffusers' pipeline of a folder, called as those that are no blocks."""

    def __init__(self, folder: Path) -> None:
        self.blocks = ModularPipeline.from_pretrained(str(folder), local_files_only=True)
        self.blocks.load_components(dtype=torch.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.blocks, name)

    def __call__(self, guidance_scale: float, **called: Any) -> Any:
        self.blocks.update_components(guider=ClassifierFreeGuidance(guidance_scale=guidance_scale))
        with without_torchvision():
            return SimpleNamespace(images=self.blocks(**called, output="images"))
