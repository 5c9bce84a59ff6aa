"""Small networks that the families' tiny models are made of; weights come from torch's generator as the caller has set it."""

from __future__ import annotations

from diffusers import AutoencoderKL
from transformers import CLIPTextConfig, CLIPTokenizer


def tiny_clip_tokenizer(pad_token: str) -> CLIPTokenizer:
    """A CLIP tokenizer whose tokens are single bytes; "!" has id 0, as in the real one."""
    from tokenizers.pre_tokenizers import ByteLevel

    letters = sorted(ByteLevel.alphabet())
    tokens = letters + [f"{letter}</w>" for letter in letters] + ["<|startoftext|>", "<|endoftext|>"]
    vocab = {token: number for number, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], pad_token=pad_token, model_max_length=32)


def tiny_clip_config(tokenizer: CLIPTokenizer, width: int, projection: int, num_layers: int = 2) -> CLIPTextConfig:
    """A CLIP text encoder for this tokenizer."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=projection,
        num_hidden_layers=num_layers,
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
