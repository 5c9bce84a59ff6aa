"""FLUX.1: how it reads prompts, and how it denoises.

Shapes: B samples, C latent channels, h w latent sides (an eighth of H W, the image's), L text tokens, D text width, P pooled width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from torch import Tensor

from sd_scripts.families.common import structures
from sd_scripts.families.common.clip_t5 import ClipT5Family, pooled_vectors, velocity
from sd_scripts.families.common.double_stream import t5_states
from sd_scripts.families.common.transformer_loading import Loader
from sd_scripts.library.core.protocols import Condition, Parts, Version

from .loading import DEV_VERSION, LOADER, SCHNELL_VERSION


class Flux(ClipT5Family):
    """The FLUX.1 family; see protocols.ModelFamily."""

    loader: ClassVar[Loader] = LOADER
    separate_texts: ClassVar[bool] = True

    def version(self, parts: Parts) -> Version:
        """See ModelFamily."""
        return DEV_VERSION if parts.backbone.config.guidance_embeds else SCHNELL_VERSION

    def texts_like(self, parts: Parts, caption: str, batch: int, num_controls: int) -> list[Condition]:
        """t5, as long as the captions where padding is hidden, and pooled; see protocols.ModelFamily."""
        config, limit = parts.backbone.config, parts.settings["t5xxl_max_token_length"]
        length = min(limit, structures.num_tokens(caption)) if parts.settings["apply_t5_attn_mask"] else limit
        return structures.texts_of(parts, batch, {"t5": (length, config.joint_attention_dim), "pooled": (config.pooled_projection_dim,)})

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """Text part of each caption's condition: t5 (L, D) and pooled (P,), in the encoders' precision.

        t5: T5's last hidden states, of t5xxl_max_token_length tokens with padding; with apply_t5_attn_mask of the caption's own tokens
        alone, which then have not seen the padding either. pooled: CLIP-L's vector of the first 77 tokens. encoders te1 is pooled alone,
        te3 t5 alone. Runs with gradient when grad mode is on.
        """
        conditions: list[Condition] = [{} for _ in captions]
        if captions and (encoders is None or "te3" in encoders):
            settings = parts.settings
            texts = t5_states(parts, captions, settings["t5xxl_max_token_length"], settings["apply_t5_attn_mask"])
            conditions = [{"t5": text} for text in texts]
        if captions and (encoders is None or "te1" in encoders):
            vectors = pooled_vectors(parts, captions)
            conditions = [{**found, "pooled": vector} for found, vector in zip(conditions, vectors, strict=True)]
        return conditions

    def denoise(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """See clip_t5.velocity."""
        return velocity(parts, x_t, t, [one["t5"] for one in conditions], [one["pooled"] for one in conditions])


FAMILY = Flux()
