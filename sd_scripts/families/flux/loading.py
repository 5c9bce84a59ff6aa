"""Load FLUX.1 from a diffusers folder, a hub id, or a transformer file with its autoencoder and text encoders; write it again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel

from sd_scripts.families.common import original_unet as original
from sd_scripts.families.common import transformer_loading as transformer
from sd_scripts.families.common.t5 import T5_PART, settle_t5, t5_problems
from sd_scripts.families.common.tokenizers import TokenizerSpec
from sd_scripts.families.common.transformer_loading import Companion, tell
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import Dtypes, Parts, Version
from sd_scripts.library.loading.common import (
    BASE,
    Base,
    Config,
    FamilySpec,
    FoundNetwork,
    PartSpec,
    config_of,
    described_by,
    read_json,
    tokenizer_for,
)
from sd_scripts.library.loading.headers import CLIP, T5, VAE, Header
from sd_scripts.library.loading.quantized import read_quantized
from sd_scripts.library.loading.source import Source

from . import original as original_flux
from .facts import TRANSFORMER
from .options import FluxModelOptions

DEV, SCHNELL = (Path(__file__).parent / "configs" / version for version in ("dev", "schnell"))
SPEC = FamilySpec(
    name="flux",
    label="FLUX",
    needs="a FLUX.1 transformer (dev, schnell or Kontext)",
    files=(TRANSFORMER,),
    pipelines=("FluxPipeline", "FluxKontextPipeline"),
    configs=DEV,
    parts={
        "backbone": PartSpec(
            folder="transformer",
            class_name="FluxTransformer2DModel",
            make=FluxTransformer2DModel.from_config,
            layout=original_flux.transformer,
            prefixes=transformer.PREFIXES,
        ),
        "vae": transformer.AUTOENCODER,
        "te1": PartSpec(
            folder="text_encoder",
            class_name="CLIPTextModel",
            make=lambda config: CLIPTextModel(CLIPTextConfig.from_dict(config)),
            layout=original.clip,
            folder_name=original.clip_in_folders,
            prefixes=("text_encoders.clip_l.transformer.",),
            kinds=(CLIP,),
            tokenizer=TokenizerSpec("tokenizer", "<|endoftext|>"),
            stem="model",
        ),
        "te3": T5_PART,
    },
    belongs={VAE: "ae", CLIP: "clip_l", T5: "t5xxl"},
)
"""FLUX.1 dev; schnell has other configs."""
COMPANIONS = {
    "vae": Companion("ae", "the autoencoder", "ae.safetensors"),
    "te1": Companion("clip_l", "the text encoder CLIP-L", "clip_l.safetensors"),
    "te3": Companion("t5xxl", "the text encoder T5-XXL", "t5xxl_fp16.safetensors"),
}
_LAYOUT = "https://github.com/black-forest-labs/flux"
VERSION_DEV = Version("flux1", "flux-1-dev", _LAYOUT, is_v2=False)
VERSION_SCHNELL = Version("flux1", "flux-1-schnell", _LAYOUT, is_v2=False)
MAX_TOKENS = {True: 512, False: 256}
"""Caption tokens that T5 reads for dev, which embeds guidance, and for schnell, which does not."""


def load(options: FluxModelOptions, device: torch.device, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
    """All parts on `device`, frozen and in eval mode; backbone and text encoders in dtype, the VAE in options.vae_dtype.

    Networks named in `without` are not read. Raises OptionError with every problem that can be seen before weights are read.
    """
    wanted = {"vae": options.ae, "te1": options.clip_l, "te3": options.t5xxl}
    base, given_names, adapters = transformer.gather(SPEC, COMPANIONS, options, wanted, without, _in_file)
    for name in SPEC.tokenizers:
        if name not in base.tokenizers:
            base.tokenizers[name] = tokenizer_for(base, name)
    tell(_problems(base.networks, given_names) + t5_problems(base, "t5xxl" if "te3" in given_names else BASE, options, dtype))
    return read_quantized(base, options, device, dtype, without, adapters, lambda modules: _parts(base, options, modules))


def published_scheduler(guidance_embeds: bool) -> Config:
    """Scheduler configuration of dev, which embeds guidance, or of schnell."""
    return transformer.scheduler_in(DEV if guidance_embeds else SCHNELL)


def save(parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
    """Writes the model in dtype or as it is: `diffusers` is a folder with everything, `safetensors` the transformer as it is published."""
    transformer.save(SPEC, parts, path, save_model_as, dtype, metadata)


def _in_file(source: Source, header: Header, own: Sequence[str]) -> Base:
    """The base model in a single file, which has the networks named in own."""
    transformer.check_holds(SPEC, COMPANIONS, source, header, own)
    configs, config = _configs(source, transformer.config_in(SPEC, source, header, "FLUX", original_flux.config_of))
    spec = replace(SPEC, configs=configs)
    networks = transformer.networks_in(spec, COMPANIONS, source, header, config, own)
    return Base(spec, source, networks, {}, transformer.scheduler_in(configs), read_json(configs / "model_index.json", BASE))


def _configs(source: Source, found: Config) -> tuple[Path, Config]:
    """Folder with the other networks' configurations, and the transformer's, found in its shapes, with what no tensor says.

    The folder is the file's own, when it lies in the folder of such a model, or that of the published model.
    """
    own = described_by(SPEC, source.path)
    if own != SPEC.configs:
        beside = read_json(own / SPEC.parts["backbone"].folder / "config.json", BASE)
        same = ("attention_head_dim", "num_attention_heads", "guidance_embeds")
        if all(beside.get(key) == found[key] for key in same):
            return own, {**found, "axes_dims_rope": beside.get("axes_dims_rope", found["axes_dims_rope"])}
    return (DEV if found["guidance_embeds"] else SCHNELL), found


def _problems(networks: Mapping[str, FoundNetwork], given_names: Sequence[str]) -> list[str]:
    """Why the transformer does not work on the autoencoder's latents or on CLIP's vectors."""
    config = networks["backbone"].module.config
    latents = 4 * networks["vae"].module.config.latent_channels
    problems = []
    if {config.in_channels, config.out_channels or config.in_channels} != {latents}:
        problems.append(
            f"{BASE}: the transformer takes {config.in_channels} numbers a token, but 2 x 2 latents of the autoencoder are {latents}. "
            "Fill, Canny, Depth and other models with a further image at the input cannot be trained here"
        )
    have = config_of(networks["te1"].module)["hidden_size"]
    if have != config.pooled_projection_dim:
        option, noun = "clip_l" if "te1" in given_names else BASE, COMPANIONS["te1"].noun
        problems.append(f"{option}: {noun} makes vectors of {have} numbers, but the transformer takes {config.pooled_projection_dim}")
    return problems


def _parts(base: Base, options: FluxModelOptions, modules: Mapping[str, nn.Module]) -> Parts:
    """The model of these networks."""
    settle_t5(modules["te3"])
    guidance_embeds = bool(modules["backbone"].config.guidance_embeds)
    words = base.tokenizers["te3"]
    return Parts(
        backbone=modules["backbone"],
        vae=modules["vae"],
        text_encoders={name: modules[name] for name in SPEC.tokenizers},
        tokenizers={name: base.tokenizers[name] for name in SPEC.tokenizers},
        path=diffusion.path_of(base.scheduler),
        kind=diffusion.kind_of(base.scheduler),
        scheduler_config=dict(base.scheduler),
        source=base.source.label,
        settings={
            "t5xxl_max_token_length": options.t5xxl_max_token_length or min(MAX_TOKENS[guidance_embeds], words.model_max_length),
            "apply_t5_attn_mask": options.apply_t5_attn_mask,
        },
        denoising={"guidance_scale": options.guidance_scale},
    )
