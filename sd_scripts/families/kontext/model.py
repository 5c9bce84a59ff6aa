"""FLUX.1 Kontext: FLUX.1's network, which also sees a reference image behind the one that it draws.

Shapes: B samples, C latent channels, h w latent sides (an eighth of H W, the image's), L text tokens, D text width, P pooled width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS
from torch import Tensor
from torch.nn.functional import pad

from sd_scripts.families.common.clip_t5 import ClipT5Family, pooled_vectors, velocity
from sd_scripts.families.common.double_stream import t5_states
from sd_scripts.families.common.editing import EditingTransformerFamily, pixels_at
from sd_scripts.families.common.transformer_loading import Loader
from sd_scripts.families.common.transformer_options import AREA
from sd_scripts.families.common.transformers import TextShape
from sd_scripts.library.core.protocols import Condition, Parts

from .loading import LOADER


class Kontext(ClipT5Family, EditingTransformerFamily):
    """The Kontext family; see protocols.EditingFamily."""

    loader: ClassVar[Loader] = LOADER
    reader: ClassVar[str] = "te3"

    def text_shape(self, parts: Parts, num_tokens: int, num_controls: int) -> TextShape:
        """With padding, behind CLIP-L's vector; see TransformerFamily."""
        length = parts.settings["t5xxl_max_token_length"]
        return TextShape(1 + length, parts.backbone.config.joint_attention_dim, length)

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """Text part of each caption's condition: text (1 + L, D), CLIP-L's vector of the first 77 tokens with zeros behind it, then T5's
        last hidden states of t5xxl_max_token_length tokens with padding. Runs with gradient when grad mode is on."""
        if not captions:
            return []
        texts = t5_states(parts, captions, parts.settings["t5xxl_max_token_length"], masked=False)
        vectors = [
            pad(vector, (0, text.shape[1] - len(vector))) for vector, text in zip(pooled_vectors(parts, captions), texts, strict=True)
        ]
        return [{"text": torch.cat([vector[None].to(text), text])} for vector, text in zip(vectors, texts, strict=True)]

    def control_size(self, parts: Parts, size: tuple[int, int]) -> tuple[int, int]:
        """(width, height) at which a reference image of this size is given to the VAE: of the sizes that the model was trained on the one
        of the nearest aspect ratio, made smaller or larger where the options ask for another area."""
        ratio, scale = size[0] / size[1], (parts.settings["control_area"] / AREA) ** 0.5
        _, width, height = min((abs(ratio - width / height), width, height) for width, height in PREFERRED_KONTEXT_RESOLUTIONS)
        width, height = (max(self.grid, int(side * scale) // self.grid * self.grid) for side in (width, height))
        return width, height

    def control_pixels(self, parts: Parts, image: Any) -> Tensor:
        """A reference image as the VAE gets it, (3, H, W) in [-1, 1]."""
        return pixels_at(image.convert("RGB"), self.control_size(parts, image.size))

    def alike(self, parts: Parts, x_t: Tensor, t: Tensor, text: Tensor, images: Sequence[Tensor]) -> Tensor:
        """See clip_t5.velocity."""
        width = parts.backbone.config.pooled_projection_dim
        return velocity(parts, x_t, t, list(text[:, 1:]), list(text[:, 0, :width]), images)


FAMILY = Kontext()
