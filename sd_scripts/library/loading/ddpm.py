"""Make, load and save small text-conditioned diffusion models: U-Net, caption encoder, VAE or pixels, tokenizer, noise schedule."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from tokenizers import Tokenizer
from torch import Tensor, nn

from sd_scripts.library import diffusion
from sd_scripts.library.families import caption_tokenizer
from sd_scripts.library.families.caption_encoder import CaptionEncoder
from sd_scripts.library.loading import original
from sd_scripts.library.loading.common import (
    BASE,
    CONFIGS,
    Config,
    FamilySpec,
    Found,
    PartSpec,
    config_of,
    dtypes_of,
    given,
    network,
    network_in_folder,
    read_json,
    read_networks,
    structure,
)
from sd_scripts.library.loading.headers import VAE, read_header, what_is
from sd_scripts.library.loading.original import Stored
from sd_scripts.library.loading.source import Source, find
from sd_scripts.library.loading.weights import entries
from sd_scripts.library.loading.writing import Lazy, tensors_of, write_file, write_folder
from sd_scripts.library.protocols import Beginning, Dtypes, Parts
from sd_scripts.library.rng import seed_for
from sd_scripts.schema.ddpm import DdpmModelOptions
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.rundir import RunDirectory

FORMAT = 1
"""Version of what is written; raised when older programs could not read it rightly."""
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


def _same_names(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """The layout of networks that were never published in another one."""
    return Stored


SPEC = FamilySpec(
    name="ddpm",
    label="a small DDPM",
    needs="a model that ddpm_train.py saved",
    files=("a small DDPM",),
    pipelines=("TextDdpm",),
    configs=CONFIGS / "ddpm",
    parts={
        "backbone": PartSpec("unet", "UNet2DConditionModel", UNet2DConditionModel.from_config, _same_names, ("unet.",)),
        "te1": PartSpec("text_encoder", "CaptionEncoder", CaptionEncoder.from_config, _same_names, ("text_encoder.",)),
        "vae": PartSpec("vae", "AutoencoderKL", AutoencoderKL.from_config, _same_names, ("vae.",)),
    },
)
_VAES = FamilySpec(
    # The built-in bases share one VAE, and a single file has none but the published configuration of Stable Diffusion 1.x.
    name="sd",
    label="a small DDPM in latents",
    needs="",
    files=("an SD 1.x model", "an SD 2.x model", "an SDXL checkpoint"),
    pipelines=(),
    configs=CONFIGS / "sd1",
    parts={"vae": PartSpec("vae", "AutoencoderKL", AutoencoderKL.from_config, original.vae, ("first_stage_model.",), (VAE,))},
)


def is_new(options: DdpmModelOptions) -> bool:
    """Whether the options ask for a new model."""
    return options.pretrained_model_name_or_path is None


def tokenizer_for(options: DdpmModelOptions, captions: Collection[str]) -> str:
    """The tokenizer.json of a new model: the given one, or one made from the captions. Raises OptionError for one that cannot be used."""
    if options.tokenizer is None:
        return caption_tokenizer.make_tokenizer(captions, options.vocab_size, options.lowercase)
    path = Path(options.tokenizer).expanduser()
    problems = [
        Problem(name, f"{name}: the tokenizer {path.name} has its own; remove {name}, or tokenizer")
        for name in ("vocab_size", "lowercase")
        if getattr(options, name) != _default(name)
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
    if problems:
        raise OptionError(problems)
    return text


def build(options: DdpmModelOptions, beginning: Beginning, device: torch.device, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
    """A new model on `device`, frozen and in eval mode; see protocols.NewFamily."""
    tokenizer = caption_tokenizer.read_tokenizer(beginning.files[TOKENIZER], options.max_token_length)
    found = None if options.vae is None else given(_VAES, "vae", "vae", options.vae, None)
    config = None if found is None else config_of(found.module)
    check_sizes(beginning.sizes, len(options.channel_multipliers), config)
    dtypes = dtypes_of(("backbone", "te1", "vae"), dtype, options.vae_dtype)
    vae = PixelSpace() if found is None else read_networks({"vae": found}, "the VAE", device, dtypes, without)["vae"]
    networks = {
        "backbone": _drawn(
            lambda: UNet2DConditionModel(**unet_config(options, config, beginning.sizes)), "backbone", beginning.seed, without
        ),
        "te1": _drawn(lambda: CaptionEncoder(**text_config(options, tokenizer)), "te1", beginning.seed, without),
        "vae": vae,
    }
    for name, module in networks.items():
        if name not in without:
            # Past diffusers' own `to`, which warns of a list of modules to be kept in float32 that is empty here.
            nn.Module.to(module, device=device, dtype=dtypes[name] if name != "vae" else None)
        module.eval().requires_grad_(False)
    architecture = architecture_of(options) | {"vocab_size": caption_tokenizer.num_tokens(tokenizer)}
    return _parts(networks, tokenizer, scheduler_config(options), "a new model", architecture)


def _drawn(make: Callable[[], nn.Module], name: str, seed: int, without: Collection[str]) -> nn.Module:
    """A network with weights of its own stream of random numbers; nobody else's generator moves."""
    with torch.random.fork_rng(devices=[]), torch.device("meta" if name in without else "cpu"):
        torch.manual_seed(seed_for(seed, 0, f"weights/{name}"))
        return make()


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
    """Arguments of the U-Net; its sample_size is that of the training pictures that are nearest to a square, (height, width)."""
    widths = [options.base_channels * multiplier for multiplier in options.channel_multipliers]
    attends = [level in options.attention_levels for level in range(len(widths))]
    channels = 3 if vae is None else vae["latent_channels"]
    width, height = max(sizes, key=lambda size: (min(size) / max(size), size[0] * size[1]))
    factor = latent_factor(vae)
    return {
        "sample_size": (height // factor, width // factor),
        "in_channels": channels * (2 if options.self_conditioning else 1),
        "out_channels": channels,
        "block_out_channels": tuple(widths),
        "layers_per_block": options.layers_per_block,
        "down_block_types": tuple("CrossAttnDownBlock2D" if attended else "DownBlock2D" for attended in attends),
        "mid_block_type": "UNetMidBlock2DCrossAttn",
        "up_block_types": tuple("CrossAttnUpBlock2D" if attended else "UpBlock2D" for attended in reversed(attends)),
        # diffusers means the number of heads by this name (its issue 2011); blocks without attention do not read it.
        "attention_head_dim": tuple(max(1, width // options.attention_head_dim) for width in widths),
        # Small groups: with four channels each the toy world's shapes were right in 53 to 68 % of the pictures, with two in 73 to 82 %. At
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
    architecture: Config = {name: value for name, value in options.model_dump(mode="json").items() if name not in NOT_ARCHITECTURE}
    return architecture


def latent_factor(vae: Config | None) -> int:
    """How many pixels one latent is wide: 1 without a VAE."""
    return 1 if vae is None else 2 ** (len(vae["block_out_channels"]) - 1)


def check_sizes(sizes: Collection[tuple[int, int]], levels: int, vae: Config | None) -> None:
    """Raises OptionError when pictures (width, height) cannot be halved as often as a U-Net of so many levels does."""
    multiple = latent_factor(vae) * 2 ** (levels - 1)
    wrong = [f"{width} x {height}" for width, height in sizes if width % multiple or height % multiple]
    named = ", ".join(wrong[:6]) + (" and others" if len(wrong) > 6 else "")
    if wrong:
        raise OptionError(
            Problem(
                "channel_multipliers",
                f"channel_multipliers: {levels} levels halve the sides {levels - 1} times, which needs pictures with sides that are "
                f"multiples of {multiple}, but there are {named}. Set bucket_reso_steps, "
                f"resolution, sample_size and --w and --h of prompts to multiples of {multiple}, or take fewer levels",
            )
        )


def _default(name: str) -> Any:
    return DdpmModelOptions.model_fields[name].default


# Reading.


@dataclass(frozen=True)
class _Described:
    """A saved model before its weights are read."""

    networks: dict[str, Found]
    tokenizer: str
    scheduler: Config
    architecture: Config


def load(options: DdpmModelOptions, device: torch.device, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
    """A model that `save` wrote, frozen and in eval mode, from a file, a folder, or the folder of a run, of which the newest is taken.

    Networks named in `without` are not read. Raises OptionError with a sentence for what cannot be read, and for options of the
    architecture that say otherwise than the model.
    """
    assert options.pretrained_model_name_or_path is not None
    source = _source(options.pretrained_model_name_or_path)
    try:
        described = _in_file(source) if source.is_file else _in_folder(source, without)
        tokenizer = caption_tokenizer.read_tokenizer(described.tokenizer, described.networks["te1"].module.config.max_length)
    except OptionError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise OptionError(f"{BASE}: the description of {source.label} is damaged ({err}). Copy or export it again") from err
    _check_options(options, described, source)
    dtypes = dtypes_of(("backbone", "te1", "vae"), dtype, options.vae_dtype)
    networks = read_networks(described.networks, source.label, device, dtypes, without)
    networks.setdefault("vae", PixelSpace().eval().to(device))
    return _parts(networks, tokenizer, described.scheduler, source.label, described.architecture)


def _source(value: str) -> Source:
    if value == "toy":
        raise OptionError(f"{BASE}: there is no built-in model of this kind; leave it empty to begin from nothing")
    source = find(BASE, value, SPEC.name, folders=[part.folder for part in SPEC.parts.values()])
    if source.is_file or not (source.path / "config.toml").is_file():
        return source
    run = RunDirectory(source.path)
    shown = [path for path in run.path.iterdir() if not path.name.startswith(".")]
    saved = [path for path in shown if path.suffix == ".safetensors" or (path / "model_index.json").is_file()]
    if not saved:
        raise OptionError(f"{BASE}: the run {source.label} has saved no model yet; it saves at its end, and with save_every_n_steps before")
    newest = max(saved, key=lambda path: (path.stat().st_mtime_ns, path.name))
    return Source(newest, newest.name)


def _in_file(source: Source) -> _Described:
    header = read_header(source.path, BASE)
    text = header.metadata.get(DESCRIPTION)
    if text is None:
        raise OptionError(f"{BASE}: {source.label} is {what_is(header)}; {SPEC.needs} is needed")
    description = json.loads(text)
    _check_format(description, source)
    networks = {
        name: network(
            SPEC, name, description[part.folder], entries(header, BASE, part.prefixes[0]), BASE, f"{part.folder} of {source.label}"
        )
        for name, part in SPEC.parts.items()
        if description[part.folder] is not None
    }
    return _Described(networks, json.dumps(description["tokenizer"]), description["scheduler"], description["architecture"])


def _in_folder(source: Source, without: Collection[str]) -> _Described:
    """Of networks in `without` only the configuration is needed."""
    index_file = source.path / "model_index.json"
    if not index_file.is_file():
        raise OptionError(f"{BASE}: the folder {source.label} has no model_index.json; {SPEC.needs} is needed, or the folder of its run")
    index = read_json(index_file, BASE)
    if index.get("_class_name") not in SPEC.pipelines:
        raise OptionError(f"{BASE}: {source.label} is a {index.get('_class_name', 'model of an unknown kind')}; {SPEC.needs} is needed")
    _check_format(index, source)
    networks = {
        name: (structure if name in without else network_in_folder)(
            SPEC, name, source.path / part.folder, None, BASE, f"{source.label}/{part.folder}"
        )
        for name, part in SPEC.parts.items()
        if part.folder in index
    }
    tokenizer = read_json(source.path / "tokenizer" / TOKENIZER, BASE)
    scheduler = read_json(source.path / "scheduler" / "scheduler_config.json", BASE)
    scheduler.pop("_diffusers_version", None)
    return _Described(networks, json.dumps(tokenizer), scheduler, index["architecture"])


def _check_format(description: Mapping[str, Any], source: Source) -> None:
    if description["format"] > FORMAT:
        raise OptionError(
            f"{BASE}: {source.label} was saved by a newer version of this program (format {description['format']}, known is {FORMAT}); "
            "update this one"
        )


def _check_options(options: DdpmModelOptions, described: _Described, source: Source) -> None:
    """Raises OptionError for options that were set and are not what the model is."""
    wanted = architecture_of(options)
    problems = [
        Problem(
            name,
            f"{name}: {getattr(options, name)} is asked for, but {source.label} was made with {described.architecture[name]}, and a model "
            f"keeps its architecture; remove {name}",
        )
        for name, value in wanted.items()
        if getattr(options, name) != _default(name) and value != described.architecture[name]
    ]
    if options.vae is not None:
        own = "brings its own VAE" if "vae" in described.networks else "works on pixels"
        problems.append(Problem("vae", f"vae: {source.label} {own}; remove vae"))
    if problems:
        raise OptionError(problems)


# Writing.


def save(parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
    """Writes the model in dtype or as it is: `safetensors` is one file, `diffusers` a folder; both hold everything that drawing needs."""
    written = {name: part for name, part in SPEC.parts.items() if not isinstance(parts.modules()[name], PixelSpace)}
    tokenizer = json.loads(_plain_tokenizer(parts.tokenizers["te1"]))
    common = {"format": FORMAT, "architecture": parts.settings["architecture"]}
    if save_model_as == "diffusers":
        spec = FamilySpec(**{**vars(SPEC), "parts": written})

        def add_tokenizer(folder: Path) -> None:
            (folder / "tokenizer").mkdir()
            (folder / "tokenizer" / TOKENIZER).write_text(json.dumps(tokenizer, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")

        vae = {"vae": ["diffusers", "AutoencoderKL"]} if "vae" in written else {}
        write_folder(spec, parts, path, dtype, metadata, {**common, **vae}, also=add_tokenizer)
        return
    assert save_model_as == "safetensors", f"{save_model_as} is no form of a whole model"
    configs = {part.folder: _config(parts.modules()[name]) if name in written else None for name, part in SPEC.parts.items()}
    description = {**common, **configs, "tokenizer": tokenizer, "scheduler": parts.scheduler_config}
    tensors = {
        f"{part.prefixes[0]}{key}": _lazy(tensor, dtype)
        for name, part in written.items()
        for key, tensor in tensors_of(parts.modules()[name]).items()
    }
    write_file(path, tensors, {**metadata, DESCRIPTION: json.dumps(description, sort_keys=True, ensure_ascii=False)})


def _lazy(tensor: Tensor, dtype: torch.dtype | None) -> Lazy:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return Lazy(tuple(tensor.shape), wanted, lambda: tensor.to("cpu", wanted))


def _config(module: nn.Module) -> Config:
    """A network's configuration as JSON has it, without names of folders."""
    plain: Config = json.loads(json.dumps({key: value for key, value in config_of(module).items() if not key.startswith("_")}))
    return plain


def _plain_tokenizer(tokenizer: Tokenizer) -> str:
    """The tokenizer.json as it was made: truncation and padding are set when it is read."""
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.no_truncation()
    plain.no_padding()
    return str(plain.to_str())
