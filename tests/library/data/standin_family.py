"""A very small family that keeps the whole protocol the data side uses; also run as a program that dies while caching."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

from sd_scripts.dataset.plan import Plan, make_plan
from sd_scripts.dataset.scan import read_dataset
from sd_scripts.library.core.diffusion import FlowPath
from sd_scripts.library.core.protocols import Condition, Geometry, Parts
from sd_scripts.library.data.cache import open_caches
from sd_scripts.library.data.pipeline import DataPipeline
from sd_scripts.schema.dataset import DatasetOptions

LETTERS = 128


class LetterEncoder(nn.Module):
    """Mixes the letters of a text; a real network, so that other weights give other embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, 6)
        self.mix = nn.GRU(6, 5, batch_first=True)

    def forward(self, letters: Tensor) -> Tensor:
        return self.mix(self.letters(letters))[0]


class SmallFamily:
    """8-pixel patches as latents, letters as tokens.

    What an encoder gives depends a little on what else is in the batch, like real kernels but far more, so that a cache that
    forms other batches after an interruption is found out. `batch_effect` is its size.
    """

    name: ClassVar[str] = "small"
    grid: ClassVar[int] = 8
    separate_texts = False

    def __init__(self, batch_effect: float = 0.0) -> None:
        self.batch_effect = batch_effect
        self.encoded_images = self.encoded_texts = 0
        self.on_encode: Callable[[], None] = lambda: None

    def tiny(self) -> Parts:
        torch.manual_seed(0)
        parts = Parts(nn.Identity(), nn.Conv2d(3, 4, 8, 8), {"te1": LetterEncoder()}, {}, FlowPath(), "velocity", {}, "small")
        parts.settings["max_token_length"] = 75
        return parts

    def encode_images(self, parts: Parts, pixels: Tensor) -> Tensor:
        self.encoded_images += len(pixels)
        self.on_encode()
        assert pixels.shape[-1] % 8 == 0 and pixels.shape[-2] % 8 == 0 and pixels.abs().max() <= 1
        return parts.vae(pixels).float() + self.batch_effect * pixels.mean()

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: object = None) -> list[Condition]:
        self.encoded_texts += len(captions)
        self.on_encode()
        length = 12
        letters = [[ord(letter) % LETTERS for letter in text[:length].ljust(length)] for text in captions]
        states = parts.text_encoders["te1"](torch.tensor(letters))
        return [{"hidden": state, "sum": state.sum(0) + self.batch_effect * states.mean()} for state in states]

    def num_controls(self, parts: Parts) -> tuple[int, int]:
        return 0, 0

    def size_condition(self, geometry: Geometry) -> Condition:
        return {"size": torch.tensor([*geometry.original, *geometry.crop, *geometry.target], dtype=torch.float32)}


def plan_for(options: DatasetOptions, root: Path, seed: int = 5, **shape: int) -> Plan:
    return make_plan(read_dataset(options, root / "cache"), options, seed=seed, grid=8, **shape)


def pipeline_for(
    options: DatasetOptions, root: Path, family: SmallFamily, num_steps: int = 30, seed: int = 5, **values: object
) -> DataPipeline:
    shape = {name: values.pop(name) for name in ("processes", "accumulation", "batch_size") if name in values}
    plan = plan_for(options, root, seed, **shape)  # type: ignore[arg-type]
    return DataPipeline(options, family, plan, open_caches(options, root / "cache"), seed, num_steps=num_steps, **values)  # type: ignore[arg-type]
