"""Krea 2: how it reads captions and denoises. Twelve states of Qwen3-VL are a token's text; text and image are one sequence.

Shapes: B samples, h w latent sides (an eighth of H W, the image's), L text tokens, D text width. Latents have 16 channels;
2 x 2 of them are a token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sd_scripts.families.common.comfyui_levels import Graph, exponential_shift
from sd_scripts.families.common.double_stream import positions
from sd_scripts.families.common.packing import packed, unpacked
from sd_scripts.families.common.qwen3vl import tiny_qwen3vl
from sd_scripts.families.common.qwen_vae import QwenVaeFamily, tiny_qwen_vae
from sd_scripts.families.common.reading import states_of_layers, tokens_of
from sd_scripts.families.common.scheduled import DISTILLED
from sd_scripts.families.common.tiny_words import tiny_qwen_tokenizer
from sd_scripts.families.common.transformer_loading import Loader
from sd_scripts.families.common.transformers import TextShape, TransformerFamily
from sd_scripts.library.core.protocols import Parts

from .loading import LOADER, TAPS
from .network import made

BEFORE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the "
    "objects and background:<|im_end|>\n<|im_start|>user\n"
)
"""Rows of these tokens are read by the caption's and not given to the transformer (diffusers, pipeline_krea2.py)."""
AFTER = "<|im_end|>\n<|im_start|>assistant\n"
TURBO_MU = 1.15


class Krea2(QwenVaeFamily, TransformerFamily):
    """The Krea 2 family; see protocols.ModelFamily."""

    loader: ClassVar[Loader] = LOADER
    adapted: ClassVar[Mapping[str, str]] = {"backbone": r"^transformer_blocks\.", "te1": r"language_model\.layers\."}
    graph: ClassVar[Graph] = Graph("simple", exponential_shift(1.15))

    def tiny_networks(self) -> tuple[dict[str, nn.Module], dict[str, Any]]:
        """See TransformerFamily."""
        tokenizer = tiny_qwen_tokenizer([BEFORE, AFTER])
        shape = {"num_layers": 3, "attention_head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 64}
        text = {"text_hidden_dim": 32, "text_num_attention_heads": 2, "text_num_key_value_heads": 2, "text_intermediate_size": 48}
        networks = {
            "backbone": made({**shape, **text, "timestep_embed_dim": 16, "axes_dims_rope": (4, 6, 6)}),
            "vae": tiny_qwen_vae(),
            "te1": tiny_qwen3vl(tokenizer, num_layers=TAPS[-1] + 1).model,
        }
        return networks, {"te1": tokenizer}

    def text_shape(self, parts: Parts, num_tokens: int, num_controls: int) -> TextShape:
        """With what of the template stands behind the caption; what stands before it is only read. See TransformerFamily."""
        rows = min(parts.settings["max_token_length"], num_tokens + 5)
        return TextShape(rows, len(TAPS) * parts.backbone.config.text_hidden_dim, rows + 34)

    def rows(self, parts: Parts, caption: str) -> Tensor:
        """Text (L, 12 D): states after twelve of Qwen3-VL's layers side by side, without padding; see TransformerFamily."""
        encoder, tokenizer, limit = parts.text_encoders["te1"], parts.tokenizers["te1"], parts.settings["max_token_length"]
        closing, lead = tokenizer(AFTER).input_ids, len(tokenizer(BEFORE).input_ids)
        ids = tokens_of(tokenizer, BEFORE + caption, limit, further=lead - len(closing))
        return states_of_layers(encoder.language_model, TAPS, torch.tensor([ids + closing], device=parts.bring(encoder)))[lead:]

    def mu(self, parts: Parts, num_tokens: int, steps: int) -> float | None:
        """Turbo has one shift for all sizes; see TransformerFamily."""
        return TURBO_MU if parts.denoising[DISTILLED] else None

    def alike(self, parts: Parts, x_t: Tensor, t: Tensor, text: Tensor, images: Sequence[Tensor]) -> Tensor:
        """See TransformerFamily."""
        height, width = x_t.shape[-2:]
        prediction: Tensor = parts.backbone(
            hidden_states=packed(x_t).to(text.dtype),
            encoder_hidden_states=text.unflatten(-1, (len(TAPS), -1)),
            timestep=t,
            position_ids=torch.cat([torch.zeros(text.shape[1], 3), positions(height, width)]).to(x_t.device),
            return_dict=False,
        )[0]
        return unpacked(prediction.float(), height, width)


FAMILY = Krea2()
