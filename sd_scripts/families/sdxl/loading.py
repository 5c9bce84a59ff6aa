"""Load SDXL from a diffusers folder, a hub id or a single file, and write it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import CLIPTextConfig, CLIPTextModelWithProjection

from sd_scripts.families.common import original_unet as original
from sd_scripts.families.common import unet_loading as unet
from sd_scripts.families.common.tokenizers import TokenizerSpec
from sd_scripts.library.core.protocols import DeviceMap, Dtypes, Parts, Version
from sd_scripts.library.loading.common import Base, FamilySpec, PartSpec

from .facts import CHECKPOINT
from .options import SdxlModelOptions

SPEC = FamilySpec(
    name="sdxl",
    label="SDXL",
    needed=f"{CHECKPOINT} with UNet, VAE and both text encoders",
    files=(CHECKPOINT,),
    pipelines=("StableDiffusionXL",),
    configs=Path(__file__).parent / "configs",
    parts={
        "backbone": unet.UNET,
        "vae": unet.AUTOENCODER,
        "te1": replace(unet.CLIP_L, prefixes=("conditioner.embedders.0.transformer.text_model.",)),
        "te2": PartSpec(
            folder="text_encoder_2",
            class_name="CLIPTextModelWithProjection",
            make=lambda config: CLIPTextModelWithProjection(CLIPTextConfig.from_dict(config)),
            layout=original.open_clip,
            prefixes=("conditioner.embedders.1.model.",),
            tokenizer=TokenizerSpec("tokenizer_2", "!"),
            stem="model",
        ),
    },
)

VERSION = Version("sdxl_base_v1-0", "stable-diffusion-xl-v1-base", "https://github.com/Stability-AI/generative-models", is_v2=False)


def load(options: SdxlModelOptions, device: DeviceMap, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
    """All parts on `device`, frozen and in eval mode; backbone and text encoders in dtype, the VAE in options.vae_dtype.

    Networks named in `without` are not read. Raises OptionError with every problem that can be seen before weights are read.
    """
    return unet.load(SPEC, options, device, dtype, lambda base: _settings(base, options), without=without)


def _settings(base: Base, options: SdxlModelOptions) -> dict[str, Any]:
    return {
        "max_token_length": options.max_token_length,
        "weighted_captions": options.weighted_captions,
        "force_zeros_for_empty_prompt": bool(base.index.get("force_zeros_for_empty_prompt", True)),
    }


def save(parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
    """Writes the model; see unet.save."""
    index = {"force_zeros_for_empty_prompt": parts.settings["force_zeros_for_empty_prompt"]}
    unet.save(SPEC, parts, path, save_model_as, dtype, metadata, index)
