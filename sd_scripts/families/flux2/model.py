"""FLUX.2 Klein: how it reads.

Shapes: B samples, L text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from sd_scripts.families.common.flux2 import Flux2Family, tiny_transformer
from sd_scripts.families.common.qwen3 import tiny_qwen3, tiny_qwen3_tokenizer, told
from sd_scripts.families.common.reading import states_of_layers
from sd_scripts.families.common.square_vae import tiny_square_vae
from sd_scripts.families.common.transformer_loading import Loader
from sd_scripts.library.core.protocols import Condition, Parts

from .loading import LOADER


class Flux2(Flux2Family):
    """The FLUX.2 Klein family; see protocols.EditingFamily."""

    loader: ClassVar[Loader] = LOADER
    tiny_settings: ClassVar[Mapping[str, Any]] = {"max_token_length": 64}

    def tiny_networks(self) -> tuple[dict[str, nn.Module], dict[str, Any]]:
        """See TransformerFamily."""
        tokenizer = tiny_qwen3_tokenizer()
        networks = {
            "backbone": tiny_transformer(guidance_embeds=False),
            "vae": tiny_square_vae(),
            "te1": tiny_qwen3(tokenizer, num_layers=4, num_positions=64),
        }
        torch.nn.init.normal_(networks["vae"].bn.running_mean, std=0.1)
        return networks, {"te1": tokenizer}

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """Text part of each caption's condition, text (L, D): the states after a quarter, a half and three quarters of Qwen3's layers, side
        by side, with padding to max_token_length, which the transformer sees. Each caption is encoded alone. Runs with gradient when grad
        mode is on."""
        encoder, tokenizer = parts.text_encoders["te1"], parts.tokenizers["te1"]
        device = parts.bring(encoder)
        count = encoder.config.num_hidden_layers
        conditions = []
        for caption in captions:
            tokens = tokenizer(
                told(tokenizer, caption, thinking=False),
                padding="max_length",
                truncation=True,
                max_length=parts.settings["max_token_length"],
                return_tensors="pt",
            ).to(device)
            layers = [count * quarter // 4 for quarter in (1, 2, 3)]
            conditions.append({"text": states_of_layers(encoder, layers, tokens.input_ids, attention_mask=tokens.attention_mask)})
        return conditions


FAMILY = Flux2()
