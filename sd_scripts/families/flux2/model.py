"""FLUX.2 Klein: how it reads.

Shapes: B samples, L text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from sd_scripts.families.common.flux2 import Flux2Family, tiny_transformer
from sd_scripts.families.common.qwen3 import tiny_qwen3, tiny_qwen3_tokenizer, told
from sd_scripts.families.common.square_vae import tiny_square_vae
from sd_scripts.families.common.transformer_loading import Loader

from .loading import LOADER


class Flux2(Flux2Family):
    """The FLUX.2 Klein family; see protocols.EditingFamily."""

    loader: ClassVar[Loader] = LOADER
    depth: ClassVar[str] = "num_hidden_layers"
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

    def told(self, tokenizer: Any, caption: str) -> str:
        """See Flux2Family."""
        return told(tokenizer, caption, thinking=False)


FAMILY = Flux2()
