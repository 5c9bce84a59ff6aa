"""What models that their run makes have in common: their first weights, their VAE, sizes, files that describe themselves.

A saved model is one safetensors file whose header has everything that is no tensor, as JSON, or a diffusers folder. Either holds all that
it takes to use the model, and the folder of a run stands for the newest of them in it. Knows no family.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKL
from pydantic import BaseModel
from torch import Tensor, nn

from sd_scripts.library.core.devices import precision_for
from sd_scripts.library.core.protocols import Condition, Geometry, ModelFamily, Parts
from sd_scripts.library.core.rng import seed_for
from sd_scripts.library.loading.common import (
    BASE,
    Companion,
    Config,
    FamilySpec,
    FoundNetwork,
    PartSpec,
    config_of,
    given,
    network,
    network_in_folder,
    read_json,
    structure,
)
from sd_scripts.library.loading.headers import read_header
from sd_scripts.library.loading.layouts import Stored
from sd_scripts.library.loading.source import Source, find
from sd_scripts.library.loading.weights import entries
from sd_scripts.library.loading.writing import Lazy, tensors_of, write_file, write_folder
from sd_scripts.runs.model_headers import VAE, what_is
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.model import ModelOptions
from sd_scripts.schema.outside import json_of

from . import original_unet as original
from . import unet
from .images import ImageFamily

FORMAT = 1
"""Version of what is written; raised when older programs could not read it rightly."""


def same_names(config: Mapping[str, Any]) -> Callable[[str], Stored]:
    """The layout of networks that were never published in another one."""
    return Stored


CONFIGS = Path(__file__).parent / "configs"
_COMPANION = Companion("vae", "the VAE")
VAE_PART = PartSpec("vae", "AutoencoderKL", AutoencoderKL.from_config, same_names, ("vae.",), (VAE,), companion=_COMPANION)
"""The VAE in the files of such a model."""
_VAES = FamilySpec(
    # The built-in VAE is in the folder that the bases share; a single file has no configuration but that of Stable Diffusion 1.x.
    name="common",
    label="",
    files=("an SD 1.x model", "an SD 2.x model", "an SDXL checkpoint"),
    pipelines=(),
    configs=CONFIGS,
    parts={"vae": PartSpec("vae", "AutoencoderKL", AutoencoderKL.from_config, original.vae, ("first_stage_model.",), (VAE,))},
)


class MadeFamily(ImageFamily):
    """What families do alike whose models are made by their runs; see protocols.NewFamily."""

    separate_texts: ClassVar[bool] = False

    def is_new(self, options: ModelOptions) -> bool:
        """Whether the options ask for a new model."""
        return options.pretrained_model_name_or_path is None

    def latent_factor(self, parts: Parts) -> int:
        """How many pixels one latent is wide."""
        return latent_factor(parts.vae.config)

    def usual_size(self, parts: Parts) -> tuple[int, int]:
        """That of its training."""
        return trained_size(parts)

    def size_condition(self, geometry: Geometry) -> Condition:
        """Nothing: the network is not told how an image was cut."""
        return {}

    def adapter_targets(self, parts: Parts, conv: bool) -> dict[str, list[str]]:
        """Names of the layers of transformers, and with conv of the other blocks, by module name."""
        return unet.adapter_targets(parts, conv)


# Making.


def vae_of(value: str, label: str, without: Collection[str] = ()) -> FoundNetwork:
    """The VAE that the option vae names: `toy`, a file, a folder, a hub id; label says of which models it is to be, in messages.

    Of one in `without` only the configuration is needed."""
    return given(replace(_VAES, label=label), "vae", "vae", value, None, without=without)


def drawn(make: Callable[[], nn.Module], name: str, seed: int, without: Collection[str]) -> nn.Module:
    """A network with weights of its own stream of random numbers; nobody else's generator moves."""
    with torch.random.fork_rng(devices=[]), torch.device("meta" if name in without else "cpu"):
        torch.manual_seed(seed_for(seed, 0, f"weights/{name}"))
        return make()


def placed(networks: Mapping[str, nn.Module], device: torch.device, dtypes: Mapping[str, torch.dtype], without: Collection[str]) -> None:
    """Puts new networks on the device, frozen and in eval mode, all but the VAE in their precision; those in `without` stay."""
    for name, module in networks.items():
        if name not in without:
            # Past diffusers' own `to`, which warns of a list of modules to be kept in float32 that is empty here.
            nn.Module.to(module, device=device, dtype=dtypes[name] if name != "vae" else None)
        module.eval().requires_grad_(False)


def latent_factor(vae: Config | None) -> int:
    """How many pixels one latent is wide: 1 without a VAE, and with what stands in its place in models of pixels."""
    return int(2 ** (len(vae["block_out_channels"]) - 1)) if vae is not None and "block_out_channels" in vae else 1


def state_shape(parts: Parts, width: int, height: int) -> tuple[int, int, int]:
    """(C, h, w) of the state of an image: its pixels, or the VAE's latents."""
    factor = latent_factor(parts.vae.config)
    return parts.backbone.config.out_channels, height // factor, width // factor


def size_multiple(family: ModelFamily, parts: Parts) -> int:
    """What the sides of images are multiples of, in pixels: of the grid, and the U-Net halves those of the state from level to level."""
    num_levels = len(parts.backbone.config.block_out_channels)
    return math.lcm(family.grid, latent_factor(parts.vae.config) * int(2 ** (num_levels - 1)))


def check_size(family: ModelFamily, parts: Parts, size: tuple[int, int]) -> None:
    """Raises OptionError for a (width, height) that the network cannot halve."""
    multiple = size_multiple(family, parts)
    if size[0] % multiple or size[1] % multiple:
        text = f"size: {size[0]} x {size[1]} is not possible; the sides are multiples of {multiple} for this model"
        raise OptionError(Problem("size", text))


def trained_size(parts: Parts) -> tuple[int, int]:
    """(width, height) in pixels that the model was made for."""
    height, width = parts.backbone.config.sample_size
    return width * latent_factor(parts.vae.config), height * latent_factor(parts.vae.config)


def sample_size(sizes: Sequence[tuple[int, int]], vae: Config | None) -> tuple[int, int]:
    """(height, width) in latents of those of the training images (width, height) that are nearest to a square."""
    width, height = max(sizes, key=lambda size: (min(size) / max(size), size[0] * size[1]))
    factor = latent_factor(vae)
    return height // factor, width // factor


def check_sizes(sizes: Collection[tuple[int, int]], levels: int, vae: Config | None, settings: str) -> None:
    """Raises OptionError when images (width, height) cannot be halved as often as a U-Net of so many levels does.

    settings names the options that decide about sizes.
    """
    multiple = latent_factor(vae) * 2 ** (levels - 1)
    wrong = [f"{width} x {height}" for width, height in sizes if width % multiple or height % multiple]
    named = ", ".join(wrong[:6]) + (" and others" if len(wrong) > 6 else "")
    if wrong:
        raise OptionError(
            Problem(
                "channel_multipliers",
                f"channel_multipliers: {levels} levels halve the sides {levels - 1} times, which needs images with sides that are "
                f"multiples of {multiple}, but there are {named}. Set {settings} to multiples of {multiple}, or take fewer levels",
            )
        )


# Reading.


@dataclass(frozen=True)
class Described:
    """A saved model before its weights are read."""

    source: Source
    networks: dict[str, FoundNetwork]
    scheduler: Config
    architecture: Config
    more: Config
    """What a single file's header says besides; of a folder, its model_index.json."""


@contextmanager
def reading(source: Source) -> Iterator[None]:
    """Inside, an error of what a model says about itself becomes a sentence."""
    try:
        yield
    except OptionError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as err:
        raise OptionError(f"{BASE}: the description of {source.label} is damaged ({err}). Copy or export it again") from err


def source_of(spec: FamilySpec, value: str) -> Source:
    """The file or folder that the option names; of a run's folder the newest model in it."""
    if value == "toy":
        raise OptionError(f"{BASE}: there is no built-in model of this kind; leave it empty to begin from nothing")
    source = find(BASE, value, spec.name, folders=[part.folder for part in spec.parts.values()])
    if source.is_file or not (source.path / "config.toml").is_file():
        return source
    run = RunDirectory(source.path)
    shown = [path for path in run.path.iterdir() if not path.name.startswith(".")]
    saved = [path for path in shown if path.suffix == ".safetensors" or (path / "model_index.json").is_file()]
    if not saved:
        raise OptionError(f"{BASE}: the run {source.label} has saved no model yet; it saves at its end, and with save_every_n_steps before")
    newest = max(saved, key=lambda path: (path.stat().st_mtime_ns, path.name))
    return Source(newest, newest.name)


def described(spec: FamilySpec, key: str, source: Source, without: Collection[str] = ()) -> Described:
    """What a saved model says about itself, with its networks found and checked; key is the header entry of a single file.

    Raises what `reading` turns into a sentence, or OptionError.
    """
    return _in_file(spec, key, source) if source.is_file else _in_folder(spec, source, without)


def _in_file(spec: FamilySpec, key: str, source: Source) -> Described:
    header = read_header(source.path, BASE)
    text = header.metadata.get(key)
    if text is None:
        raise OptionError(f"{BASE}: {source.label} is {what_is(header)}; {spec.needs} is needed")
    description = json_of(text)
    _check_format(description, source)
    networks = {
        name: network(
            spec, name, description[part.folder], entries(header, BASE, part.prefixes[0]), BASE, f"{part.folder} of {source.label}"
        )
        for name, part in spec.parts.items()
        if description[part.folder] is not None
    }
    return Described(source, networks, description["scheduler"], description["architecture"], description)


def _in_folder(spec: FamilySpec, source: Source, without: Collection[str]) -> Described:
    """Of networks in `without` only the configuration is needed."""
    index_file = source.path / "model_index.json"
    if not index_file.is_file():
        raise OptionError(f"{BASE}: the folder {source.label} has no model_index.json; {spec.needs} is needed, or the folder of its run")
    index = read_json(index_file, BASE)
    if index.get("_class_name") not in spec.pipelines:
        raise OptionError(f"{BASE}: {source.label} is a {index.get('_class_name', 'model of an unknown kind')}; {spec.needs} is needed")
    _check_format(index, source)
    networks = {
        name: (structure if name in without else network_in_folder)(
            spec, name, source.path / part.folder, None, BASE, f"{source.label}/{part.folder}"
        )
        for name, part in spec.parts.items()
        if part.folder in index
    }
    scheduler = read_json(source.path / "scheduler" / "scheduler_config.json", BASE)
    scheduler.pop("_diffusers_version", None)
    return Described(source, networks, scheduler, index["architecture"], index)


def _check_format(description: Mapping[str, Any], source: Source) -> None:
    if description["format"] > FORMAT:
        raise OptionError(
            f"{BASE}: {source.label} was saved by a newer version of this program (format {description['format']}, known is {FORMAT}); "
            "update this one"
        )


def architecture_of(options: BaseModel, without: Collection[str]) -> Config:
    """The options that the model's files hold, as plain JSON values by name; all but those in `without`."""
    architecture: Config = {name: value for name, value in options.model_dump(mode="json").items() if name not in without}
    return architecture


def architecture_problems(options: BaseModel, wanted: Config, found: Described) -> list[Problem]:
    """Options that were set and are not what the model is; wanted is their architecture."""
    return [
        Problem(
            name,
            f"{name}: {getattr(options, name)} is asked for, but {found.source.label} was made with {found.architecture[name]}, and "
            f"a model keeps its architecture; remove {name}",
        )
        for name, value in wanted.items()
        if getattr(options, name) != default_of(options, name) and value != found.architecture[name]
    ]


def default_of(options: BaseModel, name: str) -> Any:
    """The default of an option by its name."""
    return type(options).model_fields[name].default


def saved_model(family: ModelFamily, options: type[ModelOptions], ckpt: str, device: torch.device, precision: str, trainer: str) -> Parts:
    """The model that a script's option ckpt names, on the device; trainer: what saves such models. Raises OptionError of ckpt."""
    if not Path(ckpt).expanduser().exists():
        text = f"ckpt: there is no {ckpt}; give a model that {trainer} saved, file or folder, or the folder of its run"
        raise OptionError(Problem("ckpt", text))
    try:
        return family.load(options(pretrained_model_name_or_path=ckpt), device, precision_for(precision, device))
    except OptionError as err:
        # The loader speaks of the option that a training has in its place.
        raise OptionError([Problem("ckpt", problem.message.replace(BASE, "ckpt")) for problem in err.problems]) from err


# Writing.


def save(
    spec: FamilySpec,
    key: str,
    parts: Parts,
    path: Path,
    save_model_as: str,
    dtype: torch.dtype | None,
    metadata: Mapping[str, str],
    more: Mapping[str, Any],
    also: Callable[[Path], None] | None = None,
) -> None:
    """Writes the model in dtype or as it is: `safetensors` is one file, `diffusers` a folder; both hold everything that using it needs.

    spec has the networks that are written. more is what a single file's header says besides; also writes the same into a folder.
    """
    common = {"format": FORMAT, "architecture": parts.settings["architecture"]}
    if save_model_as == "diffusers":
        vae = {"vae": ["diffusers", "AutoencoderKL"]} if "vae" in spec.parts else {}
        write_folder(spec, parts, path, dtype, metadata, {**common, **vae}, also=also)
        return
    assert save_model_as == "safetensors", f"{save_model_as} is no form of a whole model"
    configs = {part.folder: _config(parts.modules()[name]) for name, part in spec.parts.items()}
    description = {**common, **configs, **more, "scheduler": parts.scheduler_config}
    tensors = {
        f"{part.prefixes[0]}{name}": _lazy(tensor, dtype)
        for module, part in spec.parts.items()
        for name, tensor in tensors_of(parts.modules()[module]).items()
    }
    write_file(path, tensors, {**metadata, key: json.dumps(description, sort_keys=True, ensure_ascii=False)})


def _lazy(tensor: Tensor, dtype: torch.dtype | None) -> Lazy:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return Lazy(tuple(tensor.shape), wanted, lambda: tensor.to("cpu", wanted))


def _config(module: nn.Module) -> Config:
    """A network's configuration as JSON has it, without names of folders."""
    plain: Config = json.loads(json.dumps({key: value for key, value in config_of(module).items() if not key.startswith("_")}))
    return plain
