"""Load FLUX.1 from a diffusers folder, a hub id, or a transformer file with its autoencoder and text encoders; write it again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sd_scripts.families.common import clip_t5_loading, pooled_original
from sd_scripts.families.common.clip_t5_loading import spec_of
from sd_scripts.families.common.double_stream_signs import TRANSFORMER
from sd_scripts.families.common.t5 import settle_t5
from sd_scripts.families.common.transformer_loading import Loader, scheduler_in
from sd_scripts.library.core.protocols import Version
from sd_scripts.library.loading.common import Base, Config

from .options import FluxModelOptions

DEV, SCHNELL = (Path(__file__).parent / "configs" / version for version in ("dev", "schnell"))
SPEC = spec_of(
    "flux", "FLUX", "a FLUX.1 transformer (dev, schnell or Kontext)", (TRANSFORMER,), ("FluxPipeline", "FluxKontextPipeline"), DEV
)
"""FLUX.1 dev; schnell has other configs."""
_LAYOUT = "https://github.com/black-forest-labs/flux"
DEV_VERSION = Version("flux1", "flux-1-dev", _LAYOUT, is_v2=False)
SCHNELL_VERSION = Version("flux1", "flux-1-schnell", _LAYOUT, is_v2=False)
MAX_TOKENS = {True: clip_t5_loading.MAX_TOKENS, False: 256}
"""Caption tokens that T5 reads for dev, which embeds guidance, and for schnell, which does not."""


def published_scheduler(guidance_embeds: bool) -> Config:
    """Scheduler configuration of dev, which embeds guidance, or of schnell."""
    return scheduler_in(DEV if guidance_embeds else SCHNELL)


def _settings(options: FluxModelOptions, base: Base | None) -> dict[str, Any]:
    if base is None:
        guided = LOADER.named(options.pretrained_model_name_or_path).configs == DEV
    else:
        guided = bool(base.networks["backbone"].module.config.guidance_embeds)
    length = clip_t5_loading.num_tokens(options, base, MAX_TOKENS[guided])
    return {"t5xxl_max_token_length": length, "apply_t5_attn_mask": options.apply_t5_attn_mask}


LOADER = Loader(
    spec=SPEC,
    options=FluxModelOptions,
    version=DEV_VERSION,
    config_of=pooled_original.config_of,
    same=("attention_head_dim", "num_attention_heads", "guidance_embeds"),
    untold=("axes_dims_rope",),
    problems=clip_t5_loading.problems,
    settings=_settings,
    versions={"schnell": SCHNELL},
    denoising=clip_t5_loading.denoising,
    finish=lambda parts: settle_t5(parts.text_encoders["te3"]),
)
