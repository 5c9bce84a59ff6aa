"""The repeated blocks of every family's network, in the order in which they compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, UNet2DConditionModel, ZImageTransformer2DModel

from sd_scripts import families
from sd_scripts.library.core.blocks import blocks_of
from tests.library.batches import a_call


@pytest.mark.parametrize("name", families.NAMES)
def test_blocks_are_listed_in_the_order_in_which_they_compute(name: str) -> None:
    family = families.family(name)
    parts = family.tiny()
    called: list[str] = []
    blocks = blocks_of(parts.backbone)
    for path, block in blocks.items():
        block.register_forward_hook(lambda module, given, output, path=path: called.append(path))
    with torch.no_grad():
        family.denoise(parts, *a_call(name, parts, size=1))
    assert called == list(blocks) and len(called) > 1
    inside = [path for path in blocks for other in blocks if path.startswith(f"{other}.")]
    assert not inside


@pytest.mark.parametrize(
    ("network", "folder", "number", "share"),
    [
        (UNet2DConditionModel, "sdxl/configs/unet", 70 + 17, 0.96),
        (UNet2DConditionModel, "sd/configs/sd1/unet", 16 + 22, 0.9),
        (FluxTransformer2DModel, "flux/configs/dev/transformer", 19 + 38, 0.99),
        (QwenImageTransformer2DModel, "qwen_edit/configs/transformer", 60, 0.99),
        (ZImageTransformer2DModel, "zimage/configs/transformer", 2 + 2 + 30, 0.99),
    ],
)
def test_the_published_networks_are_nearly_all_blocks(network: Any, folder: str, number: int, share: float) -> None:
    with torch.device("meta"):
        made = network.from_config(network.load_config(Path(families.__file__).parent / folder))
    blocks = blocks_of(made)
    inside = sum(weight.numel() for block in blocks.values() for weight in block.parameters())
    assert len(blocks) == number and inside > share * sum(weight.numel() for weight in made.parameters())
