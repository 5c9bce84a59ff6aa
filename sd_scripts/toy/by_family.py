"""Models that diffusers has as blocks alone, not as a pipeline: their family stores, reads and draws them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image
from torch import nn

from sd_scripts.families import RUNS, family
from sd_scripts.families.common.tiny import tiny_parts
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.library.loading.common import FamilySpec

CLASSES = {"AnimaModularPipeline": "anima", "Flux3ModularPipeline": "flux3", "QwenImage21Pipeline": "qwen_image21"}
"""What model_index.json calls such models -> their family."""


@dataclass(frozen=True)
class FamilyModel:
    """A model and the name of its family; what the building of bases needs of a diffusers pipeline."""

    family: str
    parts: Parts

    @staticmethod
    def made(
        name: str,
        networks: Mapping[str, nn.Module],
        tokenizers: dict[str, Any],
        settings: Mapping[str, Any] = MappingProxyType({}),
        schedule: Mapping[str, Any] = MappingProxyType({}),
    ) -> FamilyModel:
        """A model of these networks with its family's schedule and settings, but for these."""
        tiny = family(name).tiny()
        return FamilyModel(name, tiny_parts(networks, tokenizers, {**tiny.scheduler_config, **schedule}, {**tiny.settings, **settings}))

    @staticmethod
    def read(name: str, folder: Path) -> FamilyModel:
        """The model in a folder, in float32."""
        options: Any = RUNS[name, "network"].model_fields["model"].annotation
        asked = options(pretrained_model_name_or_path=str(folder))
        return FamilyModel(name, family(name).load(asked, torch.device("cpu"), torch.float32))

    @property
    def components(self) -> dict[str, Any]:
        """Networks and tokenizers by the names of their folders."""
        spec: FamilySpec = family(self.family).loader.spec  # type: ignore[attr-defined]
        networks = {spec.parts[name].folder: module for name, module in self.parts.modules().items()}
        return networks | {spec.tokenizers[name].folder: one for name, one in self.parts.tokenizers.items()}

    def __getattr__(self, name: str) -> Any:
        if name in ("family", "parts") or name not in self.components:
            raise AttributeError(name)
        return self.components[name]

    def save_pretrained(self, folder: Path, safe_serialization: bool = True) -> None:
        """Writes it in the precision that it has, tokenizers in one file each."""
        family(self.family).save(self.parts, folder, "diffusers", None, {})
        for name in ("vocab.json", "merges.txt"):
            for path in folder.glob(f"*/{name}"):
                path.unlink()

    def draw(
        self, prompts: list[str], seeds: list[int], width: int, height: int, num_steps: int, guidance_scale: float
    ) -> list[Image.Image]:
        """An image of each prompt from the noise of its seed."""
        each = zip(prompts, seeds, strict=True)
        asked = [Preview(prompt, "", width, height, seed, num_steps, guidance_scale) for prompt, seed in each]
        return family(self.family).preview(self.parts, asked)

    def edit(
        self, instructions: list[str], sources: list[Image.Image], seeds: list[int], num_steps: int, guidance_scale: float
    ) -> list[Image.Image]:
        """What becomes of sources of one size, from the noise of each seed. They are seen in the size that they have."""
        width, height = sources[0].size
        parts = Parts(**{**vars(self.parts), "settings": {**self.parts.settings, "control_area": width * height}})
        asked = [
            Preview(text, "", width, height, seed, num_steps, guidance_scale, controls=(source,))
            for text, source, seed in zip(instructions, sources, seeds, strict=True)
        ]
        return family(self.family).preview(parts, asked)
