"""Images of a loaded model, for everybody who wants some: previews, class images, prediction, scripts, the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from PIL import Image

from sd_scripts.families.common.images import visiting
from sd_scripts.library.core.protocols import ModelFamily, OnStep, Parts, Preview


@dataclass(frozen=True)
class Renderer:
    """A model that renders; see visiting for tiled and working."""

    family: ModelFamily
    parts: Parts
    tiled: bool = False
    working: Mapping[str, torch.device] | None = None

    def render(self, requests: Sequence[Preview], on_step: OnStep | None = None) -> list[Image.Image]:
        """Images of equal size, steps, cfg_scale, guidance and sampler, in one batch; see ModelFamily.preview.

        Networks are where they were afterwards, and so is the global random state: training must not notice that somebody looked.
        """
        with torch.random.fork_rng(), visiting(self.parts, self.tiled, self.working) as parts:
            return self.family.preview(parts, requests, on_step)


def at_once(size: tuple[int, int]) -> int:
    """How many images of this (width, height) are rendered together: four small ones, or one of 1024 x 1024, which gains no speed from
    company but would need its memory again for each."""
    return max(1, min(4, 1024 * 1024 // (size[0] * size[1])))
