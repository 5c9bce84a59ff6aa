"""Samples of batches that are not ours, encoded by the model's own encoders: a target, its control images and an instruction.

Shapes: N image tokens of 16 x 16 pixels, L text rows, D text width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch import Tensor

from sd_scripts.dataset.buckets import area_size
from sd_scripts.families.common.images import evaluating
from sd_scripts.families.common.packing import packed
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.data.cache import CODE_REVISION, Cache, CorruptEntry, fingerprint, key_of
from sd_scripts.schema.errors import OptionError

from .batches import SHAPES, Entries, digest, images_of
from .model import QwenEdit

Sample = tuple[Image.Image, list[Image.Image], str]
"""Target, control images and instruction."""
BATCHES = "batches"
"""Folder inside the cache of what is encoded here."""


class Encoder:
    """The encoders of a loaded model."""

    def __init__(self, family: QwenEdit, parts: Parts) -> None:
        self.family, self.parts = family, parts

    def samples_of(self, batch: Mapping[str, Any]) -> list[Sample]:
        """The samples of a batch with image, control (control_1, control_2) and prompt. Raises OptionError for one that lacks something."""
        missing = [name for name in ("image", "control", "prompt") if name not in batch]
        if missing:
            there = ", ".join(map(str, batch)) or "nothing"
            raise OptionError(
                f"the batch has no {' and no '.join(missing)}; it has {there}. Give image, control and prompt, or the encoded "
                "pixel_latent, control_latent, prompt_embed and prompt_embeds_mask"
            )
        prompts = [batch["prompt"]] if isinstance(batch["prompt"], str) else list(batch["prompt"])
        targets = images_of(batch["image"])
        controls = [images_of(batch[name]) for name in ("control", "control_1", "control_2") if name in batch]
        counts = [len(prompts), len(targets), *map(len, controls)]
        if len(set(counts)) > 1:
            raise OptionError(
                f"the batch has {counts[0]} prompts, {counts[1]} images and {counts[2:]} control images; give one of each for each"
            )
        fewest, most = self.family.num_controls(self.parts)
        if not fewest <= len(controls) <= most:
            raise OptionError(f"the batch has {len(controls)} control images for each sample; this model takes {fewest} to {most}")
        return [(target, list(row), prompt) for prompt, target, *row in zip(prompts, targets, *controls, strict=True)]

    @torch.no_grad()
    def encoded(self, sample: Sample, vae: torch.device, text: torch.device) -> Entries:
        """The entries of a sample, in host RAM: pixel_latent and control_latent (N, 64), prompt_embed (L, D) and prompt_embeds_mask (L,),
        the same of the empty prompt with empty_ before the name, and img_shapes (1 + controls, 3)."""
        target, controls, prompt = sample
        self.parts.vae.to(vae)
        width, height = self.target_size(target.size)
        pixels = [VaeImageProcessor(vae_scale_factor=16).preprocess(target, height, width)]
        pixels += [self.family.control_pixels(self.parts, image)[None] for image in controls]
        with evaluating(self.parts):
            latents = [self.family.encode_images(self.parts, one).cpu() for one in pixels]
        rows, empty = self.rows(controls, [prompt, ""], text)
        shapes = [(1, one.shape[-2] // 2, one.shape[-1] // 2) for one in latents]
        return {
            "pixel_latent": packed(latents[0])[0],
            "control_latent": torch.cat([packed(one)[0] for one in latents[1:]]),
            "prompt_embed": rows.cpu(),
            "prompt_embeds_mask": torch.ones(len(rows), dtype=torch.int64),
            "empty_prompt_embed": empty.cpu(),
            "empty_prompt_embeds_mask": torch.ones(len(empty), dtype=torch.int64),
            SHAPES: torch.tensor(shapes),
        }

    def rows(self, controls: Sequence[Image.Image], prompts: Sequence[str], device: torch.device) -> list[Tensor]:
        """Text rows (L, D) of instructions on the same control images."""
        self.parts.text_encoders["te1"].to(device)
        with torch.no_grad(), evaluating(self.parts):
            pixels = [self.family.control_pixels(self.parts, one) for one in controls]
            prefix, suffixes = self.family.encode_instructions(self.parts, pixels, prompts)
        return [torch.cat([prefix, suffix]) for suffix in suffixes]

    def target_size(self, size: tuple[int, int]) -> tuple[int, int]:
        """(width, height) at which a target of this size is learned: the model's area, in its own aspect ratio."""
        width, height = area_size(size, self.parts.settings["area"])
        return width // 16 * 16, height // 16 * 16

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.parts.vae, *self.parts.text_encoders.values())

    def key_of(self, sample: Sample) -> str:
        """Follows from everything that an entry is made from."""
        target, controls, prompt = sample
        images = [[*one.size, digest(one)] for one in (target, *controls)]
        made_with = {"encoders": self._fingerprint, "settings": self.parts.settings, "revision": CODE_REVISION}
        return key_of({"pictures": images, "text": prompt, **made_with})

    def kept(self, sample: Sample, cache: Cache | None) -> Entries | None:
        """The entries of a sample from the cache; None where there are none."""
        if cache is None or cache.folder is None or not cache.folder.is_dir():
            return None
        try:
            return cache.get(self.key_of(sample))
        except (KeyError, CorruptEntry):
            return None
