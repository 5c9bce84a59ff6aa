"""Families whose noise levels can be chosen by ComfyUI's names: one way for all of them, beside each one's own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from PIL import Image
from torch import Tensor

from sd_scripts.library.core.protocols import Condition, Geometry, OnStep, Parts, Preview

from . import k_samplers
from .comfyui_levels import Graph
from .images import ImageFamily, as_images, evaluating, first_of

DISTILLED = "is_distilled"
"""Switch of model_index.json by which a model says of itself that it draws in few steps, without guidance."""


class ScheduledFamily(ImageFamily):
    """See protocols.ModelFamily."""

    latent: ClassVar[tuple[int, int]]
    """Channels of a latent of the published models, and how many pixels it is wide."""
    graph: ClassVar[Graph] = Graph("auto")
    """How the published models are usually drawn with in ComfyUI; their own levels where that is not known."""

    def latent_in(self, parts: Parts) -> tuple[int, int]:
        """The same of this model."""
        return self.latent

    @torch.no_grad()
    def preview(self, parts: Parts, requests: Sequence[Preview], on_step: OnStep | None = None) -> list[Image.Image]:
        """See ImageFamily; with a scheduler, and in flow models with a sampler of a name, by k_samplers."""
        if requests and k_samplers.wanted(parts, requests[0]):
            return as_images(self.rendered_by_k_samplers(parts, requests, on_step))
        return super().preview(parts, requests, on_step)

    def rendered_by_k_samplers(self, parts: Parts, requests: Sequence[Preview], on_step: OnStep | None = None) -> Tensor:
        """The same with a sampler and a scheduler by name, before rounding; see k_samplers.draw."""
        first_of(requests, self.grid)
        with evaluating(parts), parts.without_training_adapter():
            if parts.denoising.get(DISTILLED):
                requests = [replace(request, cfg_scale=1.0) for request in requests]
            positive, negative = self.conditions_of(parts, requests)
            return self.decode(parts, k_samplers.draw(self, parts, requests, positive, negative, on_step))

    @torch.no_grad()
    def conditions_of(self, parts: Parts, requests: Sequence[Preview]) -> tuple[list[Condition], list[Condition] | None]:
        """Conditions of the requests' prompts, and of their negative prompts where guidance is on: with cfg_scale above 1."""
        guided = requests[0].cfg_scale > 1
        captions = [request.prompt for request in requests] + [request.negative_prompt for request in requests if guided]
        size = requests[0].width, requests[0].height
        whole = self.size_condition(Geometry(size, (0, 0), size))
        conditions = [{**condition, **whole} for condition in self.encode_prompts(parts, captions)]
        return conditions[: len(requests)], conditions[len(requests) :] if guided else None

    @abstractmethod
    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """See ModelFamily."""

    @abstractmethod
    def size_condition(self, geometry: Geometry) -> Condition:
        """See ModelFamily."""

    @abstractmethod
    def denoise(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """See ModelFamily."""

    def comfyui(self, parts: Parts) -> Graph:
        """The same of this model."""
        return self.graph

    def mu(self, parts: Parts, num_tokens: int, steps: int) -> float | None:
        """The logarithm of the shift for images of so many tokens; None where the scheduler's configuration says it."""
        return None
