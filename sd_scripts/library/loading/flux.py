"""Load FLUX.1 from a diffusers folder, a hub id, or a transformer file with its autoencoder and text encoders; write it again."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel, T5Tokenizer

from sd_scripts.library import diffusion
from sd_scripts.library.loading import original, original_flux
from sd_scripts.library.loading.common import (
    BASE,
    CONFIGS,
    Base,
    Config,
    FamilySpec,
    Found,
    PartSpec,
    adapter,
    base_source,
    check_kind,
    config_of,
    configs_for,
    dtypes_of,
    from_folder,
    given,
    merge_adapters,
    network,
    read_json,
    read_networks,
    tokenizer_for,
    tried,
)
from sd_scripts.library.loading.headers import CLIP, FLUX, T5, VAE, Header, read_header
from sd_scripts.library.loading.source import Source
from sd_scripts.library.loading.tokenizers import TokenizerSpec
from sd_scripts.library.loading.weights import Entry, entries
from sd_scripts.library.loading.writing import original_tensors, write_file, write_folder
from sd_scripts.library.protocols import Dtypes, Parts
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.model import FluxModelOptions

DEV, SCHNELL = CONFIGS / "flux" / "dev", CONFIGS / "flux" / "schnell"
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
            prefixes=("model.diffusion_model.", "diffusion_model."),
        ),
        "vae": PartSpec(
            folder="vae",
            class_name="AutoencoderKL",
            make=AutoencoderKL.from_config,
            layout=original.vae,
            prefixes=("vae.", "first_stage_model."),
            kinds=(VAE,),
        ),
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
GIVEN = {"vae": "ae", "te1": "clip_l", "te3": "t5xxl"}
"""The option that names each network outside the base model."""
_USUAL = {"vae": "ae.safetensors", "te1": "clip_l.safetensors", "te3": "t5xxl_fp16.safetensors"}
MAX_TOKENS = {True: 512, False: 256}
"""Caption tokens that T5 reads for dev, which embeds guidance, and for schnell, which does not."""


def load(options: FluxModelOptions, device: torch.device, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
    """All parts on `device`, frozen and in eval mode; backbone and text encoders in dtype, the VAE in options.vae_dtype.

    Networks named in `without` are not read. Raises OptionError with every problem that can be seen before weights are read.
    """
    problems: list[Problem] = []
    wanted = {"vae": options.ae, "te1": options.clip_l, "te3": options.t5xxl}
    values = {name: value for name, value in wanted.items() if value is not None}
    base = tried(problems, lambda: _base(options, [name for name in SPEC.parts if name not in values], without))
    spec = replace(SPEC, configs=_described_by(Path(options.pretrained_model_name_or_path).expanduser())) if base is None else base.spec
    others = {
        name: tried(problems, lambda name=name, value=value: given(spec, name, GIVEN[name], value, options.variant))
        for name, value in values.items()
    }
    adapters = [tried(problems, lambda value=value: adapter(value)) for value in options.base_weights]
    if base is None or problems:
        raise OptionError(problems)
    base.networks.update({name: found for name, found in others.items() if found is not None})
    for name in SPEC.tokenizers:
        if name not in base.tokenizers:
            base.tokenizers[name] = tokenizer_for(base, name)
    _check_fit(base.networks, list(values))
    parts = _read(base, options, device, dtype, without)
    merge_adapters(parts, [path for path in adapters if path is not None], options.base_weights_multiplier)
    return parts


def published_scheduler(guidance_embeds: bool) -> Config:
    """Scheduler configuration of dev, which embeds guidance, or of schnell."""
    return read_json((DEV if guidance_embeds else SCHNELL) / "scheduler" / "scheduler_config.json", BASE)


def save(parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
    """Writes the model in dtype or as it is: `diffusers` is a folder with everything, `safetensors` the transformer as it is published."""
    if save_model_as == "diffusers":
        write_folder(SPEC, parts, path, dtype, metadata)
    else:
        write_file(path, original_tensors(SPEC.parts["backbone"], parts.backbone, dtype, prefix=""), metadata)


def _base(options: FluxModelOptions, own: Sequence[str], without: Collection[str]) -> Base:
    """The base model with the networks named in own, of which a file needs to hold only the transformer."""
    needed = [name for name in own if name not in without]
    source = base_source(SPEC, options.pretrained_model_name_or_path, options.revision, options.variant, needed)
    if not source.is_file:
        return from_folder(replace(SPEC, configs=_described_by(source.path)), source, options.variant, own, without)
    header = read_header(source.path, BASE)
    check_kind(SPEC, header, source)
    missing = [name for name in own if name != "backbone" and not header.starts(*SPEC.parts[name].prefixes)]
    if missing:
        raise OptionError(
            f"{BASE}: {source.label} lacks {_listed([_NOUNS[name] for name in missing])}. Set "
            f"{_listed([f'{GIVEN[name]} ({_USUAL[name]})' for name in missing])}, or give a whole diffusers folder or a hub id"
        )
    transformer = _transformer_in(header, source)
    configs, transformer = _configs(source, transformer)
    spec = replace(SPEC, configs=configs)
    networks = {
        "backbone": network(spec, "backbone", transformer, _tensors(header, "backbone"), BASE, f"the transformer of {source.label}")
    }
    for name in own[1:]:
        config = read_json(configs / spec.parts[name].folder / "config.json", BASE)
        networks[name] = network(spec, name, config, _tensors(header, name), BASE, f"{_NOUNS[name]} of {source.label}")
    scheduler = read_json(configs / "scheduler" / "scheduler_config.json", BASE)
    return Base(spec, source, networks, {}, scheduler, read_json(configs / "model_index.json", BASE))


_NOUNS = {"vae": "the autoencoder", "te1": "the text encoder CLIP-L", "te3": "the text encoder T5-XXL"}


def _listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _tensors(header: Header, name: str) -> dict[str, Entry]:
    """A network's tensors in a file, names without prefix; a transformer alone may have none."""
    prefix = next((prefix for prefix in SPEC.parts[name].prefixes if header.starts(prefix)), "")
    return entries(header, BASE, prefix)


def _transformer_in(header: Header, source: Source) -> Config:
    """Configuration of the transformer in a file, from the shapes of its tensors."""
    shapes = {name: entry.shape for name, entry in _tensors(header, "backbone").items()}
    try:
        return original_flux.config_of(shapes)
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as err:
        raise OptionError(
            f"{BASE}: the transformer of {source.label} lacks the tensor {err.args[0]}, or it has no shape of FLUX's"
        ) from err


def _described_by(place: Path) -> Path:
    """The folder with the configuration of a model at this place: its own where there is one, or the published one."""
    if place.is_file():
        return configs_for(SPEC, place)
    complete = all((place / part.folder / "config.json").is_file() for part in SPEC.parts.values())
    return place if complete else SPEC.configs


def _configs(source: Source, transformer: Config) -> tuple[Path, Config]:
    """Folder with the other networks' configurations, and the transformer's with what no tensor says.

    The folder is the file's own, when it lies in the folder of such a model, or that of the published model.
    """
    own = _described_by(source.path)
    if own != SPEC.configs:
        beside = read_json(own / SPEC.parts["backbone"].folder / "config.json", BASE)
        same = ("attention_head_dim", "num_attention_heads", "guidance_embeds")
        if all(beside.get(key) == transformer[key] for key in same):
            return own, {**transformer, "axes_dims_rope": beside.get("axes_dims_rope", transformer["axes_dims_rope"])}
    return (DEV if transformer["guidance_embeds"] else SCHNELL), transformer


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
            option = GIVEN[name] if name in given_names else BASE
            problems.append(f"{option}: {_NOUNS[name]} makes vectors of {have} numbers, but the transformer takes {width}")
    if problems:
        raise OptionError([Problem(problem.partition(":")[0], problem) for problem in problems])


def _read(base: Base, options: FluxModelOptions, device: torch.device, dtype: Dtypes, without: Collection[str]) -> Parts:
    """Reads the weights, but not of the networks named in `without`."""
    dtypes = dtypes_of(base.networks, dtype, options.vae_dtype)
    modules = read_networks(base.networks, base.source.label, device, dtypes, without)
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
