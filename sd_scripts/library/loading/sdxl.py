"""Load SDXL from a diffusers folder, a hub id or a single file, and write the single file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sd_scripts.library.loading import common, original, unet
from sd_scripts.library.loading.common import Base, FamilySpec, PartSpec
from sd_scripts.library.loading.headers import SDXL, read_header
from sd_scripts.library.loading.source import Source
from sd_scripts.library.loading.tokenizers import TokenizerSpec
from sd_scripts.library.protocols import Parts
from sd_scripts.schema.files import written_aside
from sd_scripts.schema.model import SdxlModelOptions

SPEC = FamilySpec(
    name="sdxl",
    label="SDXL",
    needs=f"{SDXL} with UNet, VAE and both text encoders",
    files=(SDXL,),
    pipelines=("StableDiffusionXL",),
    configs=common.CONFIGS / "sdxl",
    parts={
        "backbone": unet.UNET,
        "vae": unet.AUTOENCODER,
        "te1": PartSpec(
            folder="text_encoder",
            class_name="CLIPTextModel",
            make=lambda config: CLIPTextModel(CLIPTextConfig.from_dict(config)),
            layout=original.clip,
            prefixes=("conditioner.embedders.0.transformer.text_model.",),
            tokenizer=TokenizerSpec("tokenizer", "<|endoftext|>"),
            stem="model",
        ),
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
CPU = torch.device("cpu")


def load(options: SdxlModelOptions, device: torch.device, dtype: torch.dtype) -> Parts:
    """All parts on `device`, frozen and in eval mode; backbone and text encoders in dtype, the VAE in options.vae_dtype.

    Raises OptionError with every problem that can be seen before weights are read.
    """
    return unet.load(SPEC, options, device, dtype, lambda base: _settings(base, options))


def _settings(base: Base, options: SdxlModelOptions) -> dict[str, Any]:
    return {
        "max_token_length": options.max_token_length,
        "weighted_captions": options.weighted_captions,
        "force_zeros_for_empty_prompt": bool(base.index.get("force_zeros_for_empty_prompt", True)),
    }


def load_single_file(path: Path, config: Path = SPEC.configs, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Parts:
    """The model in a single file of the original layout, with the configuration in the folder `config`; all networks in dtype."""
    header = read_header(path, common.BASE)
    base = unet.marked(common.from_file(SPEC, Source(path, path.name), header, config, list(SPEC.parts)), header)
    options = SdxlModelOptions(pretrained_model_name_or_path=str(path))
    return unet.read(base, options, device, dtype, _settings(base, options))


def save_single_file(parts: Parts, path: Path, dtype: torch.dtype | None = None, metadata: Mapping[str, str] | None = None) -> None:
    """Writes all networks to one file in the original layout, in dtype or as they are; marks v_pred and ztsnr models as such."""
    state: dict[str, Tensor] = {}
    for name, module in parts.modules().items():
        part = SPEC.parts[name]
        own = {key: tensor.detach().to("cpu", dtype) for key, tensor in module.state_dict().items() if not key.endswith(original.TOLERATED)}
        state |= original.to_original(original.places(part.layout, own, common.config_of(module)), own, part.prefixes[0])
    if parts.kind == "v_prediction":
        state["v_pred"] = torch.empty(0)
    if parts.scheduler_config.get("rescale_betas_zero_snr"):
        state["ztsnr"] = torch.empty(0)
    with written_aside(path) as aside:
        save_file(state, aside, metadata={"format": "pt", **(metadata or {})})
