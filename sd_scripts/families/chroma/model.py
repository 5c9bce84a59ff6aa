"""Chroma1: FLUX's blocks whose modulation one small network makes from the time; T5 alone reads the prompt.

Shapes: B samples, C latent channels, h w latent sides (an eighth of H W, the image's), L text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import ChromaTransformer2DModel
from torch import Tensor, nn
from transformers import T5EncoderModel

from sd_scripts.families.common.comfyui_levels import Graph, exponential_shift
from sd_scripts.families.common.double_stream import BLOCKS, exact_times, positions, t5_states, tiny_t5_config, tiny_t5_tokenizer
from sd_scripts.families.common.packing import packed, unpacked
from sd_scripts.families.common.tiny import tiny_vae
from sd_scripts.families.common.transformer_loading import Loader
from sd_scripts.families.common.transformers import TextShape, TransformerFamily
from sd_scripts.library.core.protocols import Condition, Parts

from .loading import LOADER


class Chroma(TransformerFamily):
    """The Chroma family; see protocols.ModelFamily."""

    loader: ClassVar[Loader] = LOADER
    adapted: ClassVar[Mapping[str, str]] = {"backbone": BLOCKS, "te3": r"(^|\.)block\."}
    graph: ClassVar[Graph] = Graph("beta", exponential_shift(1.15))
    latent: ClassVar[tuple[int, int]] = (16, 8)
    text: ClassVar[str] = "t5"
    tiny_settings: ClassVar[Mapping[str, Any]] = {"t5xxl_max_token_length": 32}

    def text_shape(self, parts: Parts, num_tokens: int, num_controls: int) -> TextShape:
        """As long as the caption and a token of padding, of all that T5 reads; see TransformerFamily."""
        limit = parts.settings["t5xxl_max_token_length"]
        return TextShape(min(limit, num_tokens + 1), parts.backbone.config.joint_attention_dim, limit)

    def tiny_networks(self) -> tuple[dict[str, nn.Module], dict[str, Any]]:
        """See TransformerFamily."""
        tokenizer = tiny_t5_tokenizer()
        networks = {
            "backbone": ChromaTransformer2DModel(
                num_layers=2,
                num_single_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=24,
                axes_dims_rope=(4, 6, 6),
                approximator_num_channels=16,
                approximator_hidden_dim=32,
                approximator_layers=2,
            ),
            "vae": tiny_vae(16, 0.3611, 0.1159),
            "te3": T5EncoderModel(tiny_t5_config(tokenizer)),
        }
        return networks, {"te3": tokenizer}

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """Text part of each caption's condition: t5 (L, D), T5's last hidden states of the caption's own tokens and of one of padding,
        which have not seen the rest of the padding. Runs with gradient when grad mode is on."""
        length = parts.settings["t5xxl_max_token_length"]
        texts = t5_states(parts, captions, length, masked=True, num_padding=1) if captions else []
        return [{"t5": text} for text in texts]

    def alike(self, parts: Parts, x_t: Tensor, t: Tensor, text: Tensor, images: Sequence[Tensor]) -> Tensor:
        """See TransformerFamily."""
        with exact_times(parts.backbone, t, None):
            prediction = parts.backbone(
                hidden_states=packed(x_t).to(text.dtype),
                timestep=t,
                encoder_hidden_states=text,
                txt_ids=torch.zeros(text.shape[1], 3, device=x_t.device),
                img_ids=positions(x_t.shape[-2], x_t.shape[-1]).to(x_t.device),
                return_dict=False,
            )[0]
        return unpacked(prediction.float(), x_t.shape[-2], x_t.shape[-1])


FAMILY = Chroma()
