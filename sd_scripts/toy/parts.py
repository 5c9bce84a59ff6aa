"""Parts that several toy families are built from: configurations of text encoders, and the noise schedule."""

from __future__ import annotations

from diffusers import DDIMScheduler
from transformers import CLIPTextConfig, CLIPTokenizer, T5Config, T5Tokenizer

from .tokens import CLIP_MAX_TOKENS


def clip_text_config(width: int, tokenizer: CLIPTokenizer, projection_width: int) -> CLIPTextConfig:
    """A CLIP text encoder of two layers for this tokenizer. Widths are multiples of 16."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=projection_width,
        num_hidden_layers=2,  # the least: SDXL reads the last but one
        num_attention_heads=width // 16,
        max_position_embeddings=CLIP_MAX_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def t5_config(width: int, tokenizer: T5Tokenizer) -> T5Config:
    """A T5 encoder of two layers for this tokenizer. Widths are multiples of 16."""
    return T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=16,
        d_ff=2 * width,
        num_layers=2,
        num_heads=width // 16,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def zero_snr_scheduler(steps_offset: int = 0) -> DDIMScheduler:
    """SD's noise schedule with v prediction and zero terminal SNR, Lin et al. 2023 (arXiv 2305.08891).

    With SD's own schedule and eps prediction, position was never learned at this size: the layout is settled at
    noise that such a training hardly sees. Trailing steps ignore the offset; StableDiffusionPipeline wants to read 1.
    """
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
        steps_offset=steps_offset,
    )
