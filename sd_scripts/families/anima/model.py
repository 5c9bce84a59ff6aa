"""Anima: how it reads captions and denoises. A text conditioner makes rows of T5's tokens and Qwen3's states, and the transformer's image
tokens look at them.

Shapes: B samples, h w latent sides (an eighth of H W, the image's), L text tokens, D text width. Latents have 16 channels; 2 x 2 of them
are a token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import AnimaTextConditioner
from torch import Tensor, nn

from sd_scripts.families.common import structures
from sd_scripts.families.common.comfyui_levels import FlowLevels, Graph
from sd_scripts.families.common.double_stream import tiny_t5_tokenizer
from sd_scripts.families.common.qwen3 import tiny_qwen3
from sd_scripts.families.common.qwen_vae import QwenVaeFamily, tiny_qwen_vae
from sd_scripts.families.common.reading import tokens_of
from sd_scripts.families.common.tiny_words import tiny_qwen_tokenizer
from sd_scripts.families.common.transformer_loading import Loader
from sd_scripts.families.common.transformers import TextShape, TransformerFamily
from sd_scripts.library.core.devices import META
from sd_scripts.library.core.protocols import Condition, Parts, dtype_of

from .loading import LOADER
from .network import AnimaTransformer


class Anima(QwenVaeFamily, TransformerFamily):
    """The Anima family; see protocols.ModelFamily."""

    loader: ClassVar[Loader] = LOADER
    adapted: ClassVar[Mapping[str, str]] = {"backbone": r"^transformer_blocks\.", "te1": r"^layers\.", "te2": r"^blocks\."}
    graph: ClassVar[Graph] = Graph("simple", FlowLevels(3.0))
    tiny_settings: ClassVar[Mapping[str, Any]] = {"max_token_length": 32}

    def tiny_networks(self) -> tuple[dict[str, nn.Module], dict[str, Any]]:
        """See TransformerFamily."""
        words, tokens = tiny_qwen_tokenizer([]), tiny_t5_tokenizer()
        shape = {"num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 16, "adaln_lora_dim": 8, "text_embed_dim": 24}
        networks = {
            "backbone": AnimaTransformer(mlp_ratio=2.0, rope_scale=(1.0, 4.0, 4.0), extra_pos_embed_type=None, **shape),
            "vae": tiny_qwen_vae(),
            "te1": tiny_qwen3(words),
            "te2": AnimaTextConditioner(32, 24, 32, 2, 2, 2.0, target_vocab_size=len(tokens), min_sequence_length=32),
        }
        return networks, {"te1": words, "te2": tokens}

    def text_shape(self, parts: Parts, num_tokens: int, num_controls: int) -> TextShape:
        """Filled up; see TransformerFamily."""
        conditioner = parts.text_encoders["te2"].config
        return TextShape(conditioner.min_sequence_length, conditioner.target_dim, min(parts.settings["max_token_length"], num_tokens + 1))

    def read_like(self, parts: Parts, name: str, caption: str, batch: int) -> Tensor:
        """What Qwen3 makes of captions, or the conditioner of that; see protocols.ModelFamily."""
        if name == "te1":
            return super().read_like(parts, name, caption, batch)
        encoder, length = parts.text_encoders[name], self.text_shape(parts, structures.num_tokens(caption), 0).tokens
        states = torch.empty(batch, length, encoder.config.source_dim, device=META, dtype=dtype_of(encoder))
        rows: Tensor = encoder(states, torch.zeros(batch, length, dtype=torch.long, device=META))
        return rows

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """Text part of each caption's condition, text (L, D), in the encoders' precision: the conditioner's row for each of T5's tokens,
        which has looked at Qwen3's states of the caption, filled up with zeros, which the transformer sees, to a number that it was trained
        with. Each caption is encoded alone. Runs with gradient when grad mode is on."""
        states = [self._states(parts, caption) for caption in captions]
        conditioner, limit = parts.text_encoders["te2"], parts.settings["max_token_length"]
        device, conditions = parts.bring(conditioner), []
        for caption, seen in zip(captions, states, strict=True):
            tokens = parts.tokenizers["te2"](caption, truncation=True, max_length=limit).input_ids
            # Its norms do not take what an autocast makes of the layers before them.
            with torch.autocast(device.type, enabled=False):
                rows = conditioner(seen.to(device, dtype_of(conditioner)), torch.tensor([tokens], device=device))
            conditions.append({"text": rows[0]})
        return conditions

    def _states(self, parts: Parts, caption: str) -> Tensor:
        """Qwen3's last states of a caption, (1, L, D). An empty one has no token; of zeros the conditioner takes nothing, as where
        diffusers hides all of them."""
        encoder, limit = parts.text_encoders["te1"], parts.settings["max_token_length"]
        ids, device = tokens_of(parts.tokenizers["te1"], caption, limit), parts.bring(encoder)
        if not ids:
            return torch.zeros(1, 1, encoder.config.hidden_size, device=device)
        states: Tensor = encoder(input_ids=torch.tensor([ids], device=device), use_cache=False).last_hidden_state
        return states

    def alike(self, parts: Parts, x_t: Tensor, t: Tensor, text: Tensor, images: Sequence[Tensor]) -> Tensor:
        """See TransformerFamily."""
        prediction: Tensor = parts.backbone(x_t.to(text.dtype), t, text)
        return prediction.float()


FAMILY = Anima()
