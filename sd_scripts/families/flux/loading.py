"""Load FLUX.1 from a diffusers folder, a hub id, or a transformer file with its autoencoder and text encoders; write it again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel, T5Tokenizer

from sd_scripts.families.common import original_unet as original
from sd_scripts.families.common import transformer_loading as transformer
from sd_scripts.families.common.tokenizers import TokenizerSpec
from sd_scripts.families.common.transformer_loading import Companion, tell
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import Dtypes, Parts
from sd_scripts.library.loading.common import (
    BASE,
    Base,
    Config,
    FamilySpec,
    Found,
    PartSpec,
    config_of,
    described_by,
    dtypes_of,
    read_json,
    tokenizer_for,
)
from sd_scripts.library.loading.headers import CLIP, FLUX, T5, VAE, Header
from sd_scripts.library.loading.quantized import read_quantized
from sd_scripts.library.loading.source import Source

from . import original as original_flux
from .options import FluxModelOptions

DEV, SCHNELL = (Path(__file__).parent / "configs" / version for version in ("dev", "schnell"))
_PUBLISHED_T5 = (
    ("google/t5-v1_1-xxl", ""),
    ("black-forest-labs/FLUX.1-schnell", "tokenizer_2/"),
    ("black-forest-labs/FLUX.1-dev", "tokenizer_2/"),
)


SPEC = FamilySpec(
    name="flux",
    label="FLUX",
    needs="a FLUX.1 transformer (dev, schnell or Kontext)",
    files=(FLUX,),
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
            prefixes=("text_encoders.clip_l.transformer.",),
            kinds=(CLIP,),
            tokenizer=TokenizerSpec("tokenizer", "<|endoftext|>"),
            stem="model",
        ),
        "te3": PartSpec(
            folder="text_encoder_2",
            class_name="T5EncoderModel",
            # Published configurations have dropout, which would draw from torch's global generator when the encoder is trained.
            make=lambda config: T5EncoderModel(T5Config.from_dict({**config, "dropout_rate": 0.0})),
            layout=lambda config: original.Stored,
            prefixes=("text_encoders.t5xxl.transformer.",),
            kinds=(T5,),
            tokenizer=TokenizerSpec("tokenizer_2", None, T5Tokenizer, ("spiece.model",), _PUBLISHED_T5, "T5's", "0.8 MB"),
            stem="model",
        ),
    },
    belongs={VAE: "ae", CLIP: "clip_l", T5: "t5xxl"},
)
"""FLUX.1 dev; schnell has other configs."""
COMPANIONS = {
    "vae": Companion("ae", "the autoencoder", "ae.safetensors"),
    "te1": Companion("clip_l", "the text encoder CLIP-L", "clip_l.safetensors"),
    "te3": Companion("t5xxl", "the text encoder T5-XXL", "t5xxl_fp16.safetensors"),
}
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
    _check_fit(base.networks, given_names)
    if options.text_encoder_quantization != "none" and dtypes_of(["te3"], dtype, options.vae_dtype)["te3"] is torch.float16:
        tell(["text_encoder_quantization: T5 overflows in fp16 unless some of its layers are float32; take mixed_precision bf16, or none"])
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


def _check_fit(networks: Mapping[str, Found], given_names: Sequence[str]) -> None:
    """Raises OptionError when the transformer does not work on the autoencoder's latents or the encoders' texts."""
    config = networks["backbone"].module.config
    latents = 4 * networks["vae"].module.config.latent_channels
    problems = []
    if {config.in_channels, config.out_channels or config.in_channels} != {latents}:
        problems.append(
            f"{BASE}: the transformer takes {config.in_channels} numbers a token, but 2 x 2 latents of the autoencoder are {latents}. "
            "Fill, Canny, Depth and other models with a further picture at the input cannot be trained here"
        )
    for name, key, width in (("te1", "hidden_size", config.pooled_projection_dim), ("te3", "d_model", config.joint_attention_dim)):
        have = config_of(networks[name].module)[key]
        if have != width:
            option = COMPANIONS[name].option if name in given_names else BASE
            problems.append(f"{option}: {COMPANIONS[name].noun} makes vectors of {have} numbers, but the transformer takes {width}")
    tell(problems)


def _parts(base: Base, options: FluxModelOptions, modules: Mapping[str, nn.Module]) -> Parts:
    """The model of these networks."""
    _settle_t5(modules["te3"])
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


def _settle_t5(encoder: nn.Module) -> None:
    """One embedding instead of two equal ones; in fp16, which T5's MLPs overflow, their last layers in float32, as in transformers."""
    encoder.encoder.embed_tokens.weight = encoder.shared.weight
    if encoder.shared.weight.dtype == torch.float16:
        for name, layer in encoder.named_modules():
            if name.endswith(".wo"):
                layer.float()
