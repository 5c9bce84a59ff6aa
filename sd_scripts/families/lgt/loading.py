"""Make, load and save models of style transfer: a U-Net that is told a style, in the latents of a frozen VAE, and names of styles."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial, wraps
from math import gcd, isqrt
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DModel
from torch import Tensor, nn
from torch.nn import functional as F

from sd_scripts.families.common import images, made
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import Beginning, DeviceMap, Dtypes, Parts, Version
from sd_scripts.library.loading.common import BASE, Config, FamilySpec, PartSpec, config_of, dtypes_of, read_networks
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.outside import json_of

from . import edges, sketch
from .options import LgtModelOptions

DESCRIPTION = "kohya_like.lgt"
"""Header entry of a single file with everything that is no tensor, as JSON."""
STYLES = "styles.json"
"""Text file of a run with the names of the styles, a list in the order of their rows."""
NOT_ARCHITECTURE = ("pretrained_model_name_or_path", "vae", "vae_dtype")
"""Options of the model that say where things are, or hold for one run."""
SCHEDULER: Config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 1.0}
"""The straight path of flow matching, as a configuration of diffusers."""


class StyleTable(nn.Embedding):
    """A table of styles that is asked with weights (B, rows) for mixtures of its rows, as well as with numbers of rows."""

    def forward(self, asked: Tensor) -> Tensor:
        """(B, width)."""
        return asked @ self.weight if asked.is_floating_point() else super().forward(asked)


class StyleUNet(UNet2DModel):
    """diffusers' U-Net with the same weights by the same names, whose class_labels may be weights of its classes (B, num_class_embeds)."""

    class_embedding: nn.Embedding
    sketch_weight: Tensor
    sketch_bias: Tensor

    @wraps(UNet2DModel.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.class_embedding = StyleTable(*self.class_embedding.weight.shape, _weight=self.class_embedding.weight)
        scale, channels = edge_scale(self), self.config.out_channels
        if scale > 1:
            self.register_buffer("sketch_weight", torch.zeros(edges.CHANNELS * scale**2, channels, 3, 3))
            self.register_buffer("sketch_bias", torch.zeros(edges.CHANNELS * scale**2))

    def know(self, weight: Tensor, bias: Tensor) -> None:
        """Takes over what `sketch` is made with; see sketch.fitted."""
        self.sketch_weight.copy_(weight)
        self.sketch_bias.copy_(bias)

    def sketch(self, latents: Tensor) -> Tensor:
        """A small picture (B, 3, scale h, scale w) of latents (B, C, h, w)."""
        with torch.autocast(latents.device.type, enabled=False):
            around = F.pad(latents.float(), (1, 1, 1, 1), mode="replicate")
            return F.pixel_shuffle(F.conv2d(around, self.sketch_weight.float(), self.sketch_bias.float()), edge_scale(self))


def edge_scale(unet: nn.Module) -> int:
    """How many times finer than the latents the map of edges is that the network is told; 0 without one."""
    return isqrt((unet.config.in_channels - unet.config.out_channels) // edges.CHANNELS)


SPEC = FamilySpec(
    name="lgt",
    label="a model of style transfer",
    needed="a model that lgt_train.py saved",
    files=("a model of style transfer",),
    pipelines=("StyleTransfer",),
    configs=Path(__file__).parent / "configs",
    parts={
        "backbone": PartSpec("unet", "UNet2DModel", StyleUNet.from_config, made.same_names, ("unet.",)),
        "vae": made.VAE_PART,
    },
)

VERSION = Version("lgt", "latent-style-transfer", "diffusers", is_v2=None)


def styles_text(captions: Collection[str]) -> str:
    """The styles.json of a new model: the captions, each once, sorted; the empty one stands for no style and is none."""
    return json.dumps(sorted({caption for caption in captions if caption}), ensure_ascii=False, indent=1) + "\n"


def read_styles(text: str) -> tuple[str, ...]:
    """The names in a styles.json. Raises OptionError for anything but a list of different names."""
    try:
        names = json_of(text)
    except ValueError as err:
        raise OptionError(f"{STYLES} of the run cannot be read as JSON ({err}); copy it back, or start a new run") from err
    right = isinstance(names, list) and names and all(isinstance(name, str) and name for name in names) and len(set(names)) == len(names)
    if not right:
        raise OptionError(f"{STYLES} of the run is no list of different names; copy it back, or start a new run")
    return tuple(names)


def build(options: LgtModelOptions, beginning: Beginning, device: torch.device, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
    """A new model on `device`, frozen and in eval mode, that leaves latents as they are (velocity 0); see protocols.NewFamily."""
    styles = read_styles(beginning.files[STYLES])
    found = made.vae_of(options.vae, "style transfer", without)
    vae = config_of(found.module)
    check_sizes(beginning.sizes, len(options.channel_multipliers), vae)
    if options.edge_conditioning and made.latent_factor(vae) % options.edge_scale:
        text = f"edge_scale: {options.edge_scale} is finer than the pixels of this VAE, whose latents are {made.latent_factor(vae)} wide"
        raise OptionError(Problem("edge_scale", f"{text}; take a smaller one"))
    dtypes = dtypes_of(("backbone", "vae"), dtype, options.vae_dtype)
    networks = {
        "backbone": made.drawn(
            lambda: _untrained(unet_config(options, vae, beginning.sizes, len(styles))), "backbone", beginning.seed, without
        ),
        "vae": read_networks({"vae": found}, "the VAE", device, dtypes, without)["vae"],
    }
    parts = _parts(networks, SCHEDULER, "a new model", architecture_of(options) | {"styles": list(styles)})
    if options.edge_conditioning and options.edge_scale > 1 and not {"backbone", "vae"} & set(without):
        encode = partial(images.encode_images, parts, grid=options.grid)
        parts.backbone.know(*sketch.fitted(encode, made.latent_factor(vae), options.edge_scale))
    made.placed(networks, device, dtypes, without)
    return parts


def _untrained(config: Config) -> StyleUNet:
    """A U-Net with random weights whose velocity is 0 everywhere."""
    unet = StyleUNet(**config)
    nn.init.zeros_(unet.conv_out.weight)
    nn.init.zeros_(unet.conv_out.bias)
    return unet


def _parts(networks: Mapping[str, nn.Module], scheduler: Config, source: str, architecture: Config) -> Parts:
    return Parts(
        backbone=networks["backbone"],
        vae=networks["vae"],
        text_encoders={},
        tokenizers={},
        path=diffusion.path_of(scheduler),
        kind=diffusion.kind_of(scheduler),
        scheduler_config=scheduler,
        source=source,
        settings={"architecture": architecture, "styles": tuple(architecture["styles"])},
        denoising={"edge_conditioning": architecture["edge_conditioning"]},
    )


# Configurations.


def unet_config(options: LgtModelOptions, vae: Config, sizes: Sequence[tuple[int, int]], num_styles: int) -> Config:
    """Arguments of the U-Net; its sample_size is that of the training images that are nearest to a square, (height, width).

    The table of classes has one row more than there are styles: the last one is the average of all.
    """
    widths = [options.base_channels * multiplier for multiplier in options.channel_multipliers]
    attends = [level in options.attention_levels for level in range(len(widths))]
    # Two channels a group, where that divides; see loading.ddpm.
    groups = gcd(32, *(width // 2 for width in widths))
    return {
        "sample_size": made.sample_size(sizes, vae),
        "in_channels": vae["latent_channels"] + (edges.CHANNELS * options.edge_scale**2 if options.edge_conditioning else 0),
        "out_channels": vae["latent_channels"],
        "block_out_channels": tuple(widths),
        "layers_per_block": options.layers_per_block,
        "down_block_types": tuple("AttnDownBlock2D" if attended else "DownBlock2D" for attended in attends),
        "up_block_types": tuple("AttnUpBlock2D" if attended else "UpBlock2D" for attended in reversed(attends)),
        "attention_head_dim": options.attention_head_dim,
        "norm_num_groups": groups,
        # With scales and shifts diffusers leaves the attention of the middle without a normalisation unless it is told of one.
        "attn_norm_num_groups": groups,
        "dropout": options.unet_dropout,
        "resnet_time_scale_shift": "scale_shift",
        "num_class_embeds": num_styles + 1,
    }


def architecture_of(options: LgtModelOptions) -> Config:
    """The options that the model's files hold, as plain JSON values by name."""
    return made.architecture_of(options, NOT_ARCHITECTURE)


def check_sizes(sizes: Collection[tuple[int, int]], levels: int, vae: Config) -> None:
    """Raises OptionError when images (width, height) cannot be halved as often as a U-Net of so many levels does."""
    made.check_sizes(sizes, levels, vae, "bucket_reso_steps and resolution")


# Reading and writing.


def load(options: LgtModelOptions, device: DeviceMap, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
    """A model that `save` wrote, frozen and in eval mode, from a file, a folder, or the folder of a run, of which the newest is taken.

    Networks named in `without` are not read. Raises OptionError with a sentence for what cannot be read, and for options of the
    architecture that say otherwise than the model.
    """
    assert options.pretrained_model_name_or_path is not None
    source = made.source_of(SPEC, options.pretrained_model_name_or_path)
    with made.reading(source):
        described = made.described(SPEC, DESCRIPTION, source, without)
        # Models that were saved before there was edge conditioning have none.
        described = replace(described, architecture={"edge_conditioning": False, "edge_scale": 1} | described.architecture)
        _check_whole(described)
    _check_options(options, described)
    networks = read_networks(described.networks, source.label, device, dtypes_of(("backbone", "vae"), dtype, options.vae_dtype), without)
    return _parts(networks, described.scheduler, source.label, described.architecture)


def _check_whole(described: made.Described) -> None:
    """Raises ValueError without one of the networks, and for names of styles that are not one less than the rows of the table."""
    missing = [part.folder for name, part in SPEC.parts.items() if name not in described.networks]
    if missing:
        raise ValueError(f"it has no {' and no '.join(missing)}")
    names, rows = described.architecture["styles"], described.networks["backbone"].module.config.num_class_embeds
    if len(set(names)) != len(names) or len(names) != rows - 1:
        raise ValueError(f"{len(names)} names of styles for a table of {rows} rows")


def _check_options(options: LgtModelOptions, described: made.Described) -> None:
    """Raises OptionError for options that were set and are not what the model is."""
    problems = made.architecture_problems(options, architecture_of(options), described)
    if options.vae != made.default_of(options, "vae"):
        problems.append(Problem("vae", f"vae: {described.source.label} brings its own VAE; remove vae"))
    refuse(problems)


def save(parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
    """Writes the model in dtype or as it is: `safetensors` is one file, `diffusers` a folder; both hold everything that transfer needs."""
    made.save(SPEC, DESCRIPTION, parts, path, save_model_as, dtype, metadata, {})


def check_styles(parts: Parts, styles: Collection[str]) -> None:
    """Raises OptionError unless these, the styles of a data set, are those of the model."""
    own = set(parts.settings["styles"])
    more, missing = sorted(set(styles) - own), sorted(own - set(styles))
    if not more and not missing:
        return
    told = [f"has {', '.join(more)}, which the model does not know" if more else "", f"lacks {', '.join(missing)}" if missing else ""]
    raise OptionError(
        Problem(
            "train_data_dir",
            f"train_data_dir: {BASE} {parts.source} knows the styles {', '.join(sorted(own))}, but the data set "
            f"{' and '.join(filter(None, told))}; a model keeps its styles. Name the folders as they were, or begin from nothing",
        )
    )
