"""Load FLUX.1 Kontext from a diffusers folder, a hub id, or a transformer file with its autoencoder and text encoders; write it again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sd_scripts.families.common import clip_t5_loading, pooled_original
from sd_scripts.families.common.clip_t5_loading import MAX_TOKENS, spec_of
from sd_scripts.families.common.double_stream_signs import TRANSFORMER
from sd_scripts.families.common.t5 import settle_t5
from sd_scripts.families.common.transformer_loading import Loader
from sd_scripts.families.common.transformer_options import AREA, control_area
from sd_scripts.library.core.protocols import Dtypes, Version
from sd_scripts.library.loading.common import BASE, Base

from .facts import FACTS
from .options import KontextModelOptions


def _problems(base: Base, given: Sequence[str], options: KontextModelOptions, dtype: Dtypes) -> list[str]:
    problems = clip_t5_loading.problems(base, given, options, dtype)
    if not base.networks["backbone"].module.config.guidance_embeds:
        problems.append(f"{BASE}: {base.source.label} embeds no guidance, so it is FLUX.1 schnell or made from it, not Kontext")
    return problems


def _settings(options: KontextModelOptions, base: Base | None) -> dict[str, Any]:
    length = clip_t5_loading.num_tokens(options, base, MAX_TOKENS)
    return {"t5xxl_max_token_length": length, "model_version": FACTS.label, "area": AREA, "control_area": control_area(options)}


LOADER = Loader(
    spec=spec_of(
        "kontext",
        FACTS.label,
        "a FLUX.1 Kontext transformer",
        (TRANSFORMER,),
        ("FluxKontextPipeline", "FluxKontextInpaintPipeline"),
        Path(__file__).parent / "configs",
    ),
    options=KontextModelOptions,
    version=Version("flux_kontext", "flux-1-kontext", "https://github.com/black-forest-labs/flux", is_v2=False),
    config_of=pooled_original.config_of,
    same=("attention_head_dim", "num_attention_heads", "guidance_embeds"),
    untold=("axes_dims_rope",),
    problems=_problems,
    settings=_settings,
    denoising=clip_t5_loading.denoising,
    finish=lambda parts: settle_t5(parts.text_encoders["te3"]),
)
