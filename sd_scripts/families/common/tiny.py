"""What the families' tiny models are made of; weights come from torch's generator as the caller has set it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from diffusers import AutoencoderKL
from torch import nn
from transformers import CLIPTextConfig, CLIPTokenizer

from sd_scripts.library.core import diffusion
from sd_scripts.library.core.copying import copied
from sd_scripts.library.core.protocols import Parts

Family = TypeVar("Family")
Given = ParamSpec("Given")


def made_once(make: Callable[Concatenate[Family, Given], Parts]) -> Callable[Concatenate[Family, Given], Parts]:
    """For the methods that make tiny models: what they give are copies of the first one, which take half of the time."""
    kept: dict[Any, Parts] = {}

    @wraps(make)
    def tiny(family: Family, /, *given: Given.args, **named: Given.kwargs) -> Parts:
        asked = (type(family), given, *named.items())
        if asked not in kept:
            # Wherever the caller has new tensors go: others will ask for them.
            with torch.device("cpu"):
                kept[asked] = make(family, *given, **named)
        return copied(kept[asked], kept[asked].modules().values())

    return tiny


def tiny_parts(
    networks: Mapping[str, nn.Module],
    tokenizers: dict[str, Any],
    scheduler: dict[str, Any],
    settings: dict[str, Any],
    denoising: Mapping[str, Any] = MappingProxyType({}),
) -> Parts:
    """Parts of these networks with the schedule of this configuration, frozen and in eval mode; every text encoder has a tokenizer."""
    parts = Parts(
        backbone=networks["backbone"],
        vae=networks["vae"],
        text_encoders={name: networks[name] for name in tokenizers},
        tokenizers=tokenizers,
        path=diffusion.path_of(scheduler),
        kind=diffusion.kind_of(scheduler),
        scheduler_config=scheduler,
        source="tiny",
        settings=settings,
        denoising=dict(denoising),
    )
    for module in parts.modules().values():
        module.eval().requires_grad_(False)
    return parts


def tiny_clip_tokenizer(pad_token: str) -> CLIPTokenizer:
    """A CLIP tokenizer whose tokens are single bytes; "!" has id 0, as in the real one."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    tokens = letters + [f"{letter}</w>" for letter in letters] + ["<|startoftext|>", "<|endoftext|>"]
    vocab = {token: number for number, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], pad_token=pad_token, model_max_length=32)


def tiny_clip_config(tokenizer: CLIPTokenizer, width: int, projection: int) -> CLIPTextConfig:
    """A CLIP text encoder for this tokenizer."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=projection,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def tiny_vae(latent_channels: int = 4, scaling_factor: float = 0.13025, shift_factor: float | None = None) -> AutoencoderKL:
    """A VAE that shrinks sides to an eighth; with a shift it is FLUX's kind, without convolutions around the latents."""
    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=latent_channels,
        norm_num_groups=4,
        sample_size=64,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=shift_factor is None,
        use_post_quant_conv=shift_factor is None,
        force_upcast=False,
    )
