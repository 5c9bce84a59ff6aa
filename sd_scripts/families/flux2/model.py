"""FLUX.2 Klein: how it reads.

Shapes: B samples, L text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

import torch

from sd_scripts.families.common.editing import AREA
from sd_scripts.families.common.flux2 import Flux2Family, states_of_layers, tiny_transformer
from sd_scripts.families.common.qwen3 import tiny_qwen3, tiny_qwen3_tokenizer, told
from sd_scripts.families.common.square_vae import tiny_square_vae
from sd_scripts.families.common.tiny import tiny_parts
from sd_scripts.families.common.transformer_loading import Loader, scheduler_in
from sd_scripts.library.core.protocols import Condition, Parts

from .loading import LOADER, SPEC


class Flux2(Flux2Family):
    """The FLUX.2 Klein family; see protocols.EditingFamily."""

    name: ClassVar[str] = "flux2"
    loader: ClassVar[Loader] = LOADER

    def tiny(self) -> Parts:
        """See protocols.ModelFamily."""
        tokenizer = tiny_qwen3_tokenizer()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            networks = {
                "backbone": tiny_transformer(guidance_embeds=False),
                "vae": tiny_square_vae(),
                "te1": tiny_qwen3(tokenizer, num_layers=4, num_positions=64),
            }
            torch.nn.init.normal_(networks["vae"].bn.running_mean, std=0.1)
        settings = {"max_token_length": 64, "model_version": SPEC.label, "area": AREA, "control_area": AREA}
        parts = tiny_parts(networks, {"te1": tokenizer}, scheduler_in(SPEC.configs), settings)
        parts.denoising = {"is_distilled": False}
        return parts

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
            conditions.append({"text": states_of_layers(encoder, tokens, layers)})
        return conditions


FAMILY = Flux2()
