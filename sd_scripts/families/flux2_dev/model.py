"""FLUX.2 dev: how it reads.

Shapes: B samples, L text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import torch
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
from torch import nn
from transformers import PreTrainedTokenizerFast

from sd_scripts.families.common.flux2 import Flux2Family, tiny_transformer
from sd_scripts.families.common.square_vae import tiny_square_vae
from sd_scripts.families.common.transformer_loading import Loader

from .loading import LOADER, mistral

BEFORE, AFTER = f"<s>[SYSTEM_PROMPT]{SYSTEM_MESSAGE}[/SYSTEM_PROMPT][INST]", "[/INST]"
"""What Mistral's chat template makes of the system's and the user's messages."""
IMAGE = "[IMG]"
"""Stands for an image in Mistral's texts, and in no caption."""
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% set text = message.content | map(attribute='text') | join %}"
    "{% if message.role == 'system' %}[SYSTEM_PROMPT]{{ text }}[/SYSTEM_PROMPT]{% else %}[INST]{{ text }}[/INST]{% endif %}{% endfor %}"
)
"""As Mistral's template begins a conversation; for the small tokenizer."""
MARKS = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", IMAGE, "<pad>")


class Flux2Dev(Flux2Family):
    """The FLUX.2 dev family; see protocols.EditingFamily."""

    loader: ClassVar[Loader] = LOADER
    depth: ClassVar[str] = "num_whole_layers"
    tiny_settings: ClassVar[Mapping[str, Any]] = {"max_token_length": 64}

    def tiny_networks(self) -> tuple[dict[str, nn.Module], dict[str, Any]]:
        """See TransformerFamily."""
        tokenizer = _tiny_tokenizer()
        text = {
            "vocab_size": len(tokenizer),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            # Heads that are together narrower than the states, as those of the published encoder are; see facts.py.
            "head_dim": 8,
            "max_position_embeddings": 64,
            "sliding_window": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": tokenizer.pad_token_id,
        }
        networks = {"backbone": tiny_transformer(guidance_embeds=True), "vae": tiny_square_vae(), "te1": mistral(text)}
        torch.nn.init.normal_(networks["vae"].bn.running_mean, std=0.1)
        # transformers begins it with zeros, which all layers leave as they are: padding stands before the text and sees nothing else.
        torch.nn.init.normal_(networks["te1"].embed_tokens.weight.data[tokenizer.pad_token_id], std=0.02)
        return networks, {"te1": tokenizer}

    def told(self, tokenizer: Any, caption: str) -> str:
        """See Flux2Family."""
        return BEFORE + caption.replace(IMAGE, "") + AFTER


@cache
def _tiny_pieces() -> str:
    """A tokenizer of bytes and the pieces of the template, as text."""
    tokenizer, bytes_ = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = bytes_
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        initial_alphabet=sorted(bytes_.alphabet()),
        special_tokens=[AddedToken(mark, special=True, normalized=False) for mark in MARKS],
    )
    tokenizer.train_from_iterator([SYSTEM_MESSAGE] * 2, trainer)
    return tokenizer.to_str()


def _tiny_tokenizer() -> PreTrainedTokenizerFast:
    """It, padded on the left as Mistral's is."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_tiny_pieces()),
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        padding_side="left",
    )
    made.chat_template = TEMPLATE
    return made


FAMILY = Flux2Dev()
