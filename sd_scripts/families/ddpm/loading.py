"""Make, load and save small text-conditioned diffusion models: U-Net, caption encoder, VAE or pixels, tokenizer, noise schedule."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from math import gcd
from pathlib import Path

import torch
from diffusers import UNet2DConditionModel
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from tokenizers import Tokenizer
from torch import nn

from sd_scripts.families.common import made
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import Beginning, DeviceMap, Dtypes, Parts, Version, mapped
from sd_scripts.library.loading.common import BASE, Config, FamilySpec, PartSpec, config_of, dtypes_of, read_json, read_networks
from sd_scripts.schema.errors import Problem, refuse

from . import caption_tokenizer
from .caption_encoder import CaptionEncoder
from .options import DdpmModelOptions

DESCRIPTION = "kohya_like.ddpm"
"""Header entry of a single file with everything that is no tensor, as JSON."""
TOKENIZER = "tokenizer.json"
NOT_ARCHITECTURE = ("pretrained_model_name_or_path", "vae", "vae_dtype", "tokenizer")
"""Options of the model that say where things are, or hold for one run."""


class PixelSpace(ModelMixin, ConfigMixin):
    """What stands in the place of a VAE in models that work on pixels: nothing is encoded."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        # Networks are asked for their device by their first weight.
        self.one = nn.Parameter(torch.ones(1), requires_grad=False)


SPEC = FamilySpec(
    name="ddpm",
    label="a small DDPM",
    needed="a model that ddpm_train.py saved",
    files=("a small DDPM",),
    pipelines=("TextDdpm",),
    configs=Path(__file__).parent / "configs",
    parts={
        "backbone": PartSpec("unet", "UNet2DConditionModel", UNet2DConditionModel.from_config, made.same_names, ("unet.",)),
        "te1": PartSpec("text_encoder", "CaptionEncoder", CaptionEncoder.from_config, made.same_names, ("text_encoder.",)),
        "vae": made.VAE_PART,
    },
)

VERSION = Version("ddpm", "text-ddpm", "diffusers", is_v2=None)


def tokenizer_for(options: DdpmModelOptions, captions: Collection[str]) -> str:
    """The tokenizer.json of a new model: the given one, or one made from the captions. Raises OptionError for one that cannot be used."""
    if options.tokenizer is None:
        return caption_tokenizer.make_tokenizer(captions, options.vocab_size, options.lowercase)
    path = Path(options.tokenizer).expanduser()
    problems = [
        Problem(name, f"{name}: the tokenizer {path.name} has its own; remove {name}, or tokenizer")
        for name in ("vocab_size", "lowercase")
        if getattr(options, name) != made.default_of(options, name)
    ]
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        caption_tokenizer.read_tokenizer(text, options.max_token_length)
    except OSError as err:
        problems.append(Problem("tokenizer", f"tokenizer: {path} cannot be read ({err.strerror}); give the path of a tokenizer.json"))
    except ValueError as err:
        problems.append(
            Problem("tokenizer", f"tokenizer: {path.name} cannot be used: {err}. Without tokenizer one is made from the captions")
        )
    refuse(problems)
    return text


def build(options: DdpmModelOptions, beginning: Beginning, device: torch.device, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
    """A new model on `device`, frozen and in eval mode; see protocols.NewFamily."""
    tokenizer = caption_tokenizer.read_tokenizer(beginning.files[TOKENIZER], options.max_token_length)
    found = None if options.vae is None else made.vae_of(options.vae, "a small DDPM in latents", without)
    config = None if found is None else config_of(found.module)
    check_sizes(beginning.sizes, len(options.channel_multipliers), config)
    dtypes = dtypes_of(("backbone", "te1", "vae"), dtype, options.vae_dtype)
    vae = PixelSpace() if found is None else read_networks({"vae": found}, "the VAE", device, dtypes, without)["vae"]
    networks = {
        "backbone": made.drawn(
            lambda: UNet2DConditionModel(**unet_config(options, config, beginning.sizes)), "backbone", beginning.seed, without
        ),
        "te1": made.drawn(lambda: CaptionEncoder(**text_config(options, tokenizer)), "te1", beginning.seed, without),
        "vae": vae,
    }
    made.placed(networks, device, dtypes, without)
    architecture = architecture_of(options) | {"vocab_size": caption_tokenizer.num_tokens(tokenizer)}
    return _parts(networks, tokenizer, scheduler_config(options), "a new model", architecture)


def _parts(networks: Mapping[str, nn.Module], tokenizer: Tokenizer, scheduler: Config, source: str, architecture: Config) -> Parts:
    return Parts(
        backbone=networks["backbone"],
        vae=networks["vae"],
        text_encoders={"te1": networks["te1"]},
        tokenizers={"te1": tokenizer},
        path=diffusion.path_of(scheduler),
        kind=diffusion.kind_of(scheduler),
        scheduler_config=scheduler,
        source=source,
        settings={"architecture": architecture},
        denoising={"self_conditioning": architecture["self_conditioning"]},
    )


# Configurations.


def unet_config(options: DdpmModelOptions, vae: Config | None, sizes: Sequence[tuple[int, int]]) -> Config:
    """Arguments of the U-Net; its sample_size is that of the training images that are nearest to a square, (height, width)."""
    widths = [options.base_channels * multiplier for multiplier in options.channel_multipliers]
    attends = [level in options.attention_levels for level in range(len(widths))]
    channels = 3 if vae is None else vae["latent_channels"]
    return {
        "sample_size": made.sample_size(sizes, vae),
        "in_channels": channels * (2 if options.self_conditioning else 1),
        "out_channels": channels,
        "block_out_channels": tuple(widths),
        "layers_per_block": options.layers_per_block,
        "down_block_types": tuple("CrossAttnDownBlock2D" if attended else "DownBlock2D" for attended in attends),
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "up_block_types": tuple("CrossAttnUpBlock2D" if attended else "UpBlock2D" for attended in reversed(attends)),
        # diffusers means the number of heads by this name (its issue 2011); blocks without attention do not read it.
        "attention_head_dim": tuple(max(1, width // options.attention_head_dim) for width in widths),
        # Small groups: with four channels each the toy world's shapes were right in 53 to 68 % of the images, with two in 73 to 82 %. At
        # least two: at the smallest sides a group of one channel would be a single number.
        "norm_num_groups": gcd(32, *(width // 2 for width in widths)),
        "dropout": options.unet_dropout,
        "resnet_time_scale_shift": "scale_shift" if options.scale_shift_norm else "default",
        "cross_attention_dim": options.text_width,
        # The mean of the caption's states is added to the time embedding.
        "class_embed_type": "simple_projection",
        "projection_class_embeddings_input_dim": options.text_width,
    }


def text_config(options: DdpmModelOptions, tokenizer: Tokenizer) -> Config:
    """Arguments of the caption encoder."""
    return {
        "vocab_size": caption_tokenizer.num_tokens(tokenizer),
        "max_length": options.max_token_length,
        "width": options.text_width,
        "num_layers": options.text_layers,
        "num_heads": options.text_heads,
        "dropout": options.text_dropout,
    }


def scheduler_config(options: DdpmModelOptions) -> Config:
    """The noise schedule as a configuration of diffusers' DDIMScheduler."""
    return {
        "_class_name": "DDIMScheduler",
        "num_train_timesteps": options.num_train_timesteps,
        "beta_schedule": {"cosine": "squaredcos_cap_v2"}.get(options.beta_schedule, options.beta_schedule),
        "beta_start": options.beta_start,
        "beta_end": options.beta_end,
        "prediction_type": options.prediction_type,
        "rescale_betas_zero_snr": options.zero_terminal_snr,
        "timestep_spacing": "trailing",
        "clip_sample": False,
        "set_alpha_to_one": True,
        "steps_offset": 0,
    }


def architecture_of(options: DdpmModelOptions) -> Config:
    """The options that the model's files hold, as plain JSON values by name."""
    return made.architecture_of(options, NOT_ARCHITECTURE)


def check_sizes(sizes: Collection[tuple[int, int]], levels: int, vae: Config | None) -> None:
    """Raises OptionError when images (width, height) cannot be halved as often as a U-Net of so many levels does."""
    made.check_sizes(sizes, levels, vae, "bucket_reso_steps, resolution, sample_size and --w and --h of prompts")


# Reading.


def load(options: DdpmModelOptions, device: DeviceMap, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
    """A model that `save` wrote, frozen and in eval mode, from a file, a folder, or the folder of a run, of which the newest is taken.

    Networks named in `without` are not read. Raises OptionError with a sentence for what cannot be read, and for options of the
    architecture that say otherwise than the model.
    """
    assert options.pretrained_model_name_or_path is not None
    source = made.source_of(SPEC, options.pretrained_model_name_or_path)
    with made.reading(source):
        described = made.described(SPEC, DESCRIPTION, source, without)
        text = described.more["tokenizer"] if source.is_file else read_json(source.path / "tokenizer" / TOKENIZER, BASE)
        tokenizer = caption_tokenizer.read_tokenizer(json.dumps(text), described.networks["te1"].module.config.max_length)
    _check_options(options, described)
    dtypes = dtypes_of(("backbone", "te1", "vae"), dtype, options.vae_dtype)
    networks = read_networks(described.networks, source.label, device, dtypes, without)
    networks.setdefault("vae", PixelSpace().eval().to(mapped(device, "vae")))
    return _parts(networks, tokenizer, described.scheduler, source.label, described.architecture)


def _check_options(options: DdpmModelOptions, described: made.Described) -> None:
    """Raises OptionError for options that were set and are not what the model is."""
    problems = made.architecture_problems(options, architecture_of(options), described)
    if options.vae is not None:
        own = "brings its own VAE" if "vae" in described.networks else "works on pixels"
        problems.append(Problem("vae", f"vae: {described.source.label} {own}; remove vae"))
    refuse(problems)


# Writing.


def save(parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
    """Writes the model in dtype or as it is: `safetensors` is one file, `diffusers` a folder; both hold everything that drawing needs."""
    written = {name: part for name, part in SPEC.parts.items() if not isinstance(parts.modules()[name], PixelSpace)}
    tokenizer = json.loads(_plain_tokenizer(parts.tokenizers["te1"]))

    def add_tokenizer(folder: Path) -> None:
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / TOKENIZER).write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

    # A file says of each network that it might have whether it has it.
    more = {"tokenizer": tokenizer, **{part.folder: None for name, part in SPEC.parts.items() if name not in written}}
    made.save(replace(SPEC, parts=written), DESCRIPTION, parts, path, save_model_as, dtype, metadata, more, add_tokenizer)


def _plain_tokenizer(tokenizer: Tokenizer) -> str:
    """The tokenizer.json as it was made: truncation and padding are set when it is read."""
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    return str(plain.to_str())
