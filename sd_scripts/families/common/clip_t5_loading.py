"""Loading models that are a transformer of `pooled_original`, its VAE, and CLIP-L and T5, which read its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diffusers import FluxTransformer2DModel

from sd_scripts.library.core.protocols import Dtypes
from sd_scripts.library.loading.common import BASE, Base, Companion, FamilySpec, PartSpec, config_of
from sd_scripts.runs.model_headers import CLIP

from . import pooled_original
from . import transformer_loading as transformer
from .t5 import T5_PART, t5_problems
from .unet_loading import CLIP_L

TRANSFORMER = PartSpec(
    folder="transformer",
    class_name="FluxTransformer2DModel",
    make=FluxTransformer2DModel.from_config,
    layout=pooled_original.transformer,
    prefixes=transformer.PREFIXES,
)
CLIP_PART = replace(
    CLIP_L,
    prefixes=("text_encoders.clip_l.transformer.",),
    kinds=(CLIP,),
    companion=Companion("clip_l", "the text encoder CLIP-L", "clip_l.safetensors"),
)
MAX_TOKENS = 512
"""Caption tokens that T5 reads for transformers that embed guidance."""


def spec_of(name: str, label: str, needs: str, files: tuple[str, ...], pipelines: tuple[str, ...], configs: Path) -> FamilySpec:
    """What the files of such a family hold."""
    return FamilySpec(
        name=name,
        label=label,
        needed=needs,
        files=files,
        pipelines=pipelines,
        configs=configs,
        parts={"backbone": TRANSFORMER, "vae": transformer.AUTOENCODER, "te1": CLIP_PART, "te3": T5_PART},
    )


def problems(base: Base, given: Sequence[str], options: Any, dtype: Dtypes) -> list[str]:
    """Why the transformer does not work on the autoencoder's latents, on CLIP's vectors or on T5's states; see Loader.problems."""
    config = base.networks["backbone"].module.config
    latents = 4 * base.networks["vae"].module.config.latent_channels
    found = []
    if {config.in_channels, config.out_channels or config.in_channels} != {latents}:
        found.append(
            f"{BASE}: the transformer takes {config.in_channels} numbers a token, but 2 x 2 latents of the autoencoder are {latents}. "
            "Fill, Canny, Depth and other models with a further image at the input cannot be trained here"
        )
    have = config_of(base.networks["te1"].module)["hidden_size"]
    if have != config.pooled_projection_dim:
        option = "clip_l" if "te1" in given else BASE
        found.append(
            f"{option}: the text encoder CLIP-L makes vectors of {have} numbers, but the transformer takes {config.pooled_projection_dim}"
        )
    return found + t5_problems(base, "t5xxl" if "te3" in given else BASE, options, dtype)


def num_tokens(options: Any, base: Base | None, most: int) -> int:
    """Caption tokens that T5 reads: as the options have it, or what the model was trained with, as far as the tokenizer goes."""
    room = most if base is None or "te3" not in base.tokenizers else base.tokenizers["te3"].model_max_length
    found: int = options.t5xxl_max_token_length or min(most, room)
    return found


def denoising(options: Any) -> dict[str, Any]:
    """See Loader.denoising."""
    return {"guidance_scale": options.guidance_scale}
