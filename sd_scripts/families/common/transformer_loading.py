"""What loading models shares that come as a transformer in a file of its own, with other networks that options may name."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import nn

from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import DeviceMap, Dtypes, Parts, Version
from sd_scripts.library.loading.common import (
    BASE,
    Base,
    Companion,
    Config,
    FamilySpec,
    FoundNetwork,
    PartSpec,
    adapter,
    base_source,
    check_kind,
    config_of,
    described_by,
    from_folder,
    given,
    listed,
    network,
    read_json,
    structure,
    tokenizer_for,
    tried,
)
from sd_scripts.library.loading.headers import read_header
from sd_scripts.library.loading.quantized import check_whole, read_quantized
from sd_scripts.library.loading.source import Source
from sd_scripts.library.loading.weights import TensorEntry, entries
from sd_scripts.library.loading.writing import original_tensors, write_file, write_folder
from sd_scripts.runs.model_headers import VAE, Header
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.files import pipeline_file
from sd_scripts.schema.model import BaseModelOptions

from . import original_unet as original
from .transformer_options import AREA, control_area

PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""What may stand before the names of a transformer in a file."""
AUTOENCODER = PartSpec(
    "vae",
    "AutoencoderKL",
    AutoencoderKL.from_config,
    original.vae,
    ("vae.", "first_stage_model."),
    (VAE,),
    companion=Companion("ae", "the autoencoder", "ae.safetensors"),
)
"""The VAE of FLUX, which is Z-Image's, too."""


def gather(
    spec: FamilySpec,
    options: BaseModelOptions,
    without: Collection[str],
    in_file: Callable[[Source, Header, Sequence[str]], Base],
    further: Sequence[Callable[[], object]] = (),
) -> tuple[Base, list[str], list[Path]]:
    """A model that comes in several files: the base with all networks, the names of those that are not its own, and files of base_weights.

    in_file reads a single file of the family, of which it wants the networks of these names; further: checks whose problems are told with
    the others. Reads no weights.
    """
    problems: list[Problem] = []
    values = {name: value for name, one in spec.companions.items() if (value := getattr(options, one.option)) is not None}
    own = [name for name in spec.parts if name not in values]
    base = tried(problems, lambda: _base(spec, options, own, without, in_file))
    described = described_by(spec, Path(options.pretrained_model_name_or_path).expanduser())
    spec = replace(spec, configs=described) if base is None else base.spec
    others = {
        name: tried(problems, partial(given, spec, name, spec.companions[name].option, value, options.variant))
        for name, value in values.items()
    }
    adapters = [tried(problems, partial(adapter, value)) for value in options.base_weights]
    for check_further in further:
        tried(problems, check_further)
    if base is None or problems:
        raise OptionError(problems)
    base.networks.update({name: found for name, found in others.items() if found is not None})
    return base, list(values), [path for path in adapters if path is not None]


def _base(
    spec: FamilySpec,
    options: BaseModelOptions,
    own: Sequence[str],
    without: Collection[str],
    in_file: Callable[[Source, Header, Sequence[str]], Base],
) -> Base:
    """The base model with the networks named in own, of which a file needs to hold only the transformer."""
    needed = [name for name in own if name not in without]
    source = base_source(spec, options.pretrained_model_name_or_path, options.revision, options.variant, needed)
    if not source.is_file:
        return from_folder(replace(spec, configs=described_by(spec, source.path)), source, options.variant, own, without)
    header = read_header(source.path, BASE)
    check_kind(spec, header, source)
    return in_file(source, header, own)


def check_holds(spec: FamilySpec, source: Source, header: Header, names: Sequence[str]) -> None:
    """Raises OptionError for a file without one of these networks, which says what to set; every file holds the transformer."""
    missing = [spec.companions[name] for name in names if name != "backbone" and not header.starts(*spec.parts[name].prefixes)]
    if missing:
        raise OptionError(
            f"{BASE}: {source.label} lacks {listed([one.noun for one in missing])}. Set "
            f"{listed([f'{one.option} ({one.usual})' for one in missing])}, or give a whole diffusers folder or a hub id"
        )


def tensors_of(spec: FamilySpec, header: Header, name: str) -> dict[str, TensorEntry]:
    """A network's tensors in a file, names without prefix; a transformer alone may have none."""
    prefix = next((prefix for prefix in spec.parts[name].prefixes if header.starts(prefix)), "")
    return entries(header, BASE, prefix)


def config_in(
    spec: FamilySpec, source: Source, header: Header, label: str, config_of: Callable[[Mapping[str, tuple[int, ...]]], Config]
) -> Config:
    """Configuration of the transformer in a file, from the shapes of its tensors; label names its kind in the sentence for another."""
    shapes = {name: entry.shape for name, entry in tensors_of(spec, header, "backbone").items()}
    try:
        return config_of(shapes)
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as err:
        raise OptionError(
            f"{BASE}: the transformer of {source.label} lacks the tensor {err.args[0]}, or it has no shape of {label}'s"
        ) from err


def networks_in(spec: FamilySpec, source: Source, header: Header, transformer: Config, own: Sequence[str]) -> dict[str, FoundNetwork]:
    """The transformer of this configuration and the other networks named in own, of which the file may hold none but their structure.

    Their configurations are in the folder spec.configs.
    """
    what = f"the transformer of {source.label}"
    networks = {"backbone": network(spec, "backbone", transformer, tensors_of(spec, header, "backbone"), BASE, what)}
    for name in own[1:]:
        folder, noun = spec.configs / spec.parts[name].folder, spec.companions[name].noun
        if header.starts(*spec.parts[name].prefixes):
            config = read_json(folder / "config.json", BASE)
            networks[name] = network(spec, name, config, tensors_of(spec, header, name), BASE, f"{noun} of {source.label}")
        else:
            networks[name] = structure(spec, name, folder, None, BASE, f"{noun} for {source.label}")
    return networks


def channel_problems(base: Base, own: Collection[str]) -> list[str]:
    """Why a transformer does not work on the VAE's latents; own: networks that are not the base's own."""
    takes, makes = base.networks["backbone"].module.config.in_channels, _channels(base)
    option = "vae" if "vae" in own else BASE
    return [] if takes == makes else [f"{option}: the transformer takes latents of {takes} channels, but those of the VAE have {makes}"]


def token_problems(base: Base) -> list[str]:
    """Why a transformer does not work on squares of 2 x 2 latents of the VAE."""
    takes, makes = base.networks["backbone"].module.config.in_channels, 4 * _channels(base)
    return [] if takes == makes else [f"{BASE}: the transformer takes {takes} numbers a token, but 2 x 2 latents are {makes}"]


def _channels(base: Base) -> int:
    config = base.networks["vae"].module.config
    return int(config.get("z_dim") or config.latent_channels)


def text_width(base: Base) -> int:
    """Numbers of a row of text that the language model makes."""
    config = config_of(base.networks["te1"].module)
    return int(config.get("text_config", config)["hidden_size"])


def width_problems(own: Collection[str], makes: int, takes: int, reads: str, taker: str = "transformer") -> list[str]:
    """Why rows of text of so many numbers are none for what takes them; reads: what the model reads with."""
    option = "text_encoder" if "te1" in own else BASE
    return [] if makes == takes else [f"{option}: the text encoder makes rows of {makes} numbers, but the {taker} takes {takes}; {reads}"]


def scheduler_in(configs: Path) -> Config:
    """The scheduler's configuration in a folder of the diffusers layout."""
    return read_json(configs / "scheduler" / "scheduler_config.json", BASE)


def usual_settings(options: Any, label: str) -> dict[str, Any]:
    """Settings of Parts by the options: tokens of a caption, what the model is called, and areas where it takes reference images."""
    areas = {"area": AREA, "control_area": control_area(options)} if options.controls.most else {}
    return {"max_token_length": options.max_token_length, "model_version": label, **areas}


def tell(problems: Sequence[str | Problem]) -> None:
    """Raises OptionError with all problems, if there are any; a sentence stands at the option that it begins with."""
    if problems:
        raise OptionError([Problem(one.partition(":")[0], one) if isinstance(one, str) else one for one in problems])


def save_transformer(spec: FamilySpec, parts: Parts, path: Path, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
    """Writes the transformer alone as it is published."""
    write_file(path, original_tensors(spec.parts["backbone"], parts.backbone, dtype, prefix=""), metadata)


@dataclass(frozen=True, kw_only=True)
class Loader:
    """How the models of a family are loaded and written that has one version, and whose transformer may be configured by its tensors."""

    spec: FamilySpec
    options: type[BaseModelOptions]
    version: Version
    config_of: Callable[[Mapping[str, tuple[int, ...]]], Config]
    """The transformer's configuration from the shapes of its tensors; see config_in."""
    same: tuple[str, ...] = ("attention_head_dim", "num_attention_heads")
    untold: tuple[str, ...]
    """Entries of the configuration in the folder around a file that no tensor tells, and count when those of `same` agree."""
    problems: Callable[[Base, Sequence[str], Any, Dtypes], Sequence[str]]
    """What does not fit together: of the networks, those that are not the base's own by name, the options and the precision."""
    settings: Callable[[Any, Base | None], dict[str, Any]] | None = None
    """Settings of Parts by the options; without a base, by those and the published model alone. None are the usual ones."""
    scheduler: Callable[[Any, Config], Config] = lambda options, found: found
    """The scheduler's configuration by the options and the one that was found."""
    versions: Mapping[str, Path] = field(default_factory=dict)
    """Folders with the published configurations of further versions, by a piece of the names that they are published under."""
    kept: tuple[str, ...] = ()
    """Switches of model_index.json, off where it does not have them; they stand in Parts.denoising."""
    denoising: Callable[[Any], dict[str, Any]] = lambda options: {}
    """What else stands in Parts.denoising, by the options."""
    also: tuple[str, ...] = ()
    """Files of the published configurations that nothing here reads, and diffusers does; they are written with a folder."""
    write: Callable[[FamilySpec, Parts, Path, torch.dtype | None, Mapping[str, str]], None] = save_transformer
    """Writes the file that a transformer is published as."""
    finish: Callable[[Parts], None] = lambda parts: None
    """What is done with networks that have been read."""

    def load(
        self, options: Any, device: DeviceMap, dtype: Dtypes, without: Collection[str] = (), further: Sequence[Callable[[], object]] = ()
    ) -> Parts:
        """All parts on `device`, frozen and in eval mode; backbone and text encoders in dtype, the VAE in options.vae_dtype.

        Networks named in `without` are not read. further: see gather. Raises OptionError with every problem that can be seen before weights
        are read.
        """

        def in_file(source: Source, header: Header, own: Sequence[str]) -> Base:
            check_holds(self.spec, source, header, [name for name in own if name not in without])
            return self._in_file(source, header, own)

        base, given_names, adapters = gather(self.spec, options, without, in_file, further)
        for name in self.spec.tokenizers:
            if name not in base.tokenizers and base.networks[name].tensors:
                base.tokenizers[name] = tokenizer_for(base, name)
        tell(self.problems(base, given_names, options, dtype))
        return read_quantized(base, options, device, dtype, without, adapters, lambda modules: self._parts(base, options, modules))

    def save(self, parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
        """Writes the model in dtype or as it is: `diffusers` is a folder with everything, `safetensors` the transformer as it is
        published."""
        check_whole(*(parts.modules().values() if save_model_as == "diffusers" else [parts.backbone]))

        def copied(folder: Path) -> None:
            for name in self.also:
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(self.spec.configs / name, folder / name)

        if save_model_as == "diffusers":
            write_folder(self.spec, parts, path, dtype, metadata, {name: parts.denoising[name] for name in self.kept}, also=copied)
        else:
            self.write(self.spec, parts, path, dtype, metadata)

    def named(self, model: str) -> FamilySpec:
        """How the version is read that a model of this name most likely is."""
        configs = next((folder for piece, folder in self.versions.items() if piece in Path(model).name.lower()), self.spec.configs)
        return replace(self.spec, configs=configs)

    def settings_of(self, options: Any, base: Base | None = None) -> dict[str, Any]:
        """Parts.settings; see `settings`."""
        return usual_settings(options, self.spec.label) if self.settings is None else self.settings(options, base)

    def denoising_of(self, options: Any, index: Config) -> dict[str, Any]:
        """Parts.denoising by the options and the model's own index."""
        return {name: bool(index.get(name)) for name in self.kept} | self.denoising(options)

    def _in_file(self, source: Source, header: Header, own: Sequence[str]) -> Base:
        """The base model in a single file, its transformer configured by the shapes of its tensors and by the file's own folder."""
        spec = replace(self.spec, configs=described_by(self.spec, source.path))
        config = config_in(spec, source, header, spec.label, self.config_of)
        if spec.configs != self.spec.configs:
            beside = read_json(spec.configs / spec.parts["backbone"].folder / "config.json", BASE)
            if all(beside.get(key) == config[key] for key in self.same):
                config |= {key: beside[key] for key in self.untold if key in beside}
        else:
            spec = replace(spec, configs=self._like(config))
        networks = networks_in(spec, source, header, config, own)
        index = pipeline_file(spec.configs)
        return Base(spec, source, networks, {}, scheduler_in(spec.configs), {} if index is None else read_json(index, BASE))

    def _like(self, config: Config) -> Path:
        """The folder with the published configurations of the version whose transformer is most like this one; of several the first."""

        def alike(folder: Path) -> int:
            its = read_json(folder / self.spec.parts["backbone"].folder / "config.json", BASE)
            return sum(its.get(key) == config[key] for key in self.same)

        return max((self.spec.configs, *self.versions.values()), key=alike) if self.versions else self.spec.configs

    def _parts(self, base: Base, options: Any, modules: Mapping[str, nn.Module]) -> Parts:
        """The model of these networks."""
        scheduler = self.scheduler(options, dict(base.scheduler))
        parts = Parts(
            backbone=modules["backbone"],
            vae=modules["vae"],
            text_encoders={name: modules[name] for name in self.spec.tokenizers},
            tokenizers=base.tokenizers,
            path=diffusion.path_of(scheduler),
            kind=diffusion.kind_of(scheduler),
            scheduler_config=scheduler,
            source=base.source.label,
            settings=self.settings_of(options, base),
            denoising=self.denoising_of(options, base.index),
        )
        self.finish(parts)
        return parts
