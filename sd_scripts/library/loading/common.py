"""What the loaders of all families share: find each network in a folder or file, match its tensors, read it. Knows no family.

A family describes itself by a FamilySpec with one PartSpec for each network, and puts together from the functions here:

    base_source -> from_folder | from_file     the base model, all its networks found and checked, no weights read
    given                                      one network from an option of its own (vae, clip_l, ...), in any form
    network                                    one network from tensors that the family has found itself
    read_networks, merge_adapters              weights

Every problem that can be seen before weights are read is collected with `tried` and told at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from sd_scripts.dataset.progress import Bar
from sd_scripts.families.common import tokenizers
from sd_scripts.families.common.tokenizers import TokenizerSpec
from sd_scripts.library.core.protocols import DeviceMap, Dtypes, Parts, mapped
from sd_scripts.library.loading.layouts import Extras, Layout, Stored, from_original, no_extras, places, shape_from_original
from sd_scripts.runs.model_headers import LORA, Header, what_is
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.files import pipeline_file
from sd_scripts.schema.outside import json_of

from .headers import read_header
from .source import Source, find
from .weights import Finish, Reader, TensorEntry, check, empty, entries, fill, folder_entries, leave_out

logger = logging.getLogger(__name__)

BASE = "pretrained_model_name_or_path"
"""The option that names the base model."""
VAE_DTYPES = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Config = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Companion:
    """How a network is given that may come from outside the base model."""

    option: str
    """The option that names it."""
    noun: str
    usual: str = ""
    """The file that it is published as, for sentences."""


@dataclass(frozen=True)
class PartSpec:
    """One network of a family."""

    folder: str
    """Its folder in the diffusers layout."""
    class_name: str
    make: Callable[[Config], nn.Module]
    """The network from its configuration."""
    layout: Layout
    """Its names in the original layout."""
    prefixes: tuple[str, ...] = ("",)
    """Beginnings of its names in a single file of the whole model: the one that is written, then others that are read, longest first."""
    kinds: tuple[str, ...] = ()
    """What what_is calls a file of this network alone."""
    extras: Extras = no_extras
    """Tensors of the original layout that the network does not have."""
    unread: tuple[str, ...] = ()
    """Beginnings of the names of tensors of some files that say something else, or nothing, and are not written with the network."""
    inside: tuple[str, ...] = ()
    """Beginnings of its names in files of models that hold more than it; what does not begin so is left out of such a file."""
    tokenizer: TokenizerSpec | None = None
    stem: str = "diffusion_pytorch_model"
    """Name of its weights in the diffusers layout, without ending."""
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    """Tensors that a file may lack because nothing reads them, and the tensors of the same shape that stand for them."""
    other_classes: tuple[str, ...] = ()
    """Classes that hold the same network, and more that nobody reads, by whose names its configuration may go."""
    folder_name: Callable[[str], str] = str
    """The name of a tensor in the diffusers layout, where that is not the network's own."""
    companion: Companion | None = None
    """None for a network that is always the base model's own."""

    def is_class(self, name: str | None) -> bool:
        """Whether a configuration of the class of this name describes the network."""
        return name == self.class_name or name in self.other_classes


@dataclass(frozen=True)
class FamilySpec:
    """What the loader needs to know about a family."""

    name: str
    """As in families.NAMES; `toy` is looked for under it."""
    label: str
    """As in "you chose ..."."""
    files: tuple[str, ...]
    """What what_is calls the family's single files."""
    pipelines: tuple[str, ...]
    """Beginnings of its pipelines' class names in model_index.json."""
    configs: Path
    """Folder with the published networks' configurations, in the diffusers layout."""
    parts: Mapping[str, PartSpec]
    """By the names of Parts.modules(): backbone, vae, te1, ..."""
    needed: str | None = None
    """What a single file must be, for the sentence about a wrong one; None is what its files are called."""
    describes: Callable[[Path], bool] = lambda folder: True
    """Whether the configuration in a diffusers folder of the family is of this version of it."""

    @property
    def needs(self) -> str:
        """What a single file must be."""
        return self.files[0] if self.needed is None else self.needed

    @property
    def companions(self) -> dict[str, Companion]:
        """By the name of the network: vae, te1, ..."""
        return {name: part.companion for name, part in self.parts.items() if part.companion is not None}

    @property
    def belongs(self) -> dict[str, str]:
        """The option for a file of one network alone, by what what_is calls it."""
        return {kind: one.option for name, one in self.companions.items() for kind in self.parts[name].kinds}

    @property
    def tokenizers(self) -> dict[str, TokenizerSpec]:
        """By the name of their text encoder."""
        return {name: part.tokenizer for name, part in self.parts.items() if part.tokenizer is not None}


@dataclass(frozen=True)
class FoundNetwork:
    """One network, and where its tensors are, by their names in the network."""

    tensors: dict[str, tuple[TensorEntry, Stored]]
    module: nn.Module
    """Made from the configuration, with empty weights."""


@dataclass(frozen=True)
class Base:
    """Everything about a base model that is known before its weights are read."""

    spec: FamilySpec
    source: Source
    networks: dict[str, FoundNetwork]
    tokenizers: dict[str, Any]
    scheduler: Config
    index: Config
    """Its model_index.json."""


def base_source(spec: FamilySpec, value: str, revision: str | None, variant: str | None, own: Iterable[str]) -> Source:
    """The base model on this disk, fetched when it is a hub id; own are the names of the networks whose weights are taken from it."""
    source = find(BASE, value, spec.name, revision, variant, [spec.parts[name].folder for name in own])
    if source.is_file and variant is not None:
        raise OptionError(f"variant: {variant} chooses among the files of a folder, but {BASE} is the file {source.label}; remove it")
    return source


def from_folder(spec: FamilySpec, source: Source, variant: str | None, own: Sequence[str], without: Collection[str] = ()) -> Base:
    """The base model in a diffusers folder, with the networks named in own and the tokenizers of those among them that have one.

    Of those in `without` only the configuration is needed.
    """
    words = {name: tokenizer for name, tokenizer in spec.tokenizers.items() if name in own}
    index = check_folder(spec, source, own)
    networks: dict[str, FoundNetwork] = {}
    problems: list[Problem] = []
    for name in own:
        folder = source.path / spec.parts[name].folder
        label = f"{source.label}/{folder.name}"
        look = structure if name in without else network_in_folder
        found = tried(problems, partial(look, spec, name, folder, variant, BASE, label))
        if found is not None:
            networks[name] = found
    refuse(problems)
    read = {
        name: tokenizers.read(
            tokenizer, source.path / tokenizer.folder, config_of(networks[name].module), BASE, f"{source.label}/{tokenizer.folder}"
        )
        for name, tokenizer in words.items()
    }
    return Base(spec, source, networks, read, read_json(source.path / "scheduler" / "scheduler_config.json", BASE), index)


def from_file(spec: FamilySpec, source: Source, header: Header, configs: Path, own: Sequence[str]) -> Base:
    """The base model in one file of the original layout that holds everything, with the configurations in the folder `configs`."""
    check_kind(spec, header, source)
    _tell_unread(spec, header, source)
    networks: dict[str, FoundNetwork] = {}
    for name in own:
        part = spec.parts[name]
        prefix = next((prefix for prefix in part.prefixes if header.starts(prefix)), part.prefixes[0])
        tensors = entries(header, BASE, prefix)
        if name == "vae" and not tensors:
            raise OptionError(f"{BASE}: {source.label} holds no VAE; set vae to one for {spec.label}")
        config = read_json(configs / part.folder / "config.json", BASE)
        networks[name] = network(spec, name, config, tensors, BASE, f"{part.folder} of {source.label}")
    words = {name: tokenizer for name, tokenizer in spec.tokenizers.items() if name in own}
    encoders = [config_of(networks[name].module) for name in words]
    read = tokenizers.find_for_file(source.path, configs, list(words.values()), encoders, BASE)
    scheduler = read_json(configs / "scheduler" / "scheduler_config.json", BASE)
    return Base(spec, source, networks, dict(zip(words, read)), scheduler, read_json(configs / "model_index.json", BASE))


_NO_WEIGHTS = ("model_ema.", "alphas_cumprod", "betas", "sqrt_", "log_one_minus_", "posterior_", "denoiser.", "lvlb_weights", "logvar")
"""Beginnings of what checkpoints have besides their networks: schedules, and averages of the weights."""
_MARKS = ("v_pred", "ztsnr", "edm_vpred.sigma_max", "edm_vpred.sigma_min", "edm_mean", "edm_std", "global_step", "scaled_fp8")


def _tell_unread(spec: FamilySpec, header: Header, source: Source) -> None:
    """Logs tensors of a file of the whole model that belong to none of its networks."""
    known = tuple(prefix for part in spec.parts.values() for prefix in part.prefixes if prefix)
    unread = [name for name in header.shapes if not name.startswith((*known, *_NO_WEIGHTS)) and name not in _MARKS]
    if unread:
        logger.warning(
            "%s: %d tensors of %s belong to no network of %s and are not used, such as %s; if the model depends on them, results differ",
            BASE, len(unread), source.label, spec.label, unread[0],
        )  # fmt: skip


def described_by(spec: FamilySpec, place: Path) -> Path:
    """The folder with the configuration of a model at this place: its own where there is one, or the published one."""
    if place.is_file():
        return configs_for(spec, place)
    complete = all((place / part.folder / "config.json").is_file() for part in spec.parts.values())
    return place if complete else spec.configs


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def configs_for(spec: FamilySpec, file: Path) -> Path:
    """The folder with a single file's configuration: its own, where a diffusers folder of the family holds it, or the published one."""
    index = pipeline_file(file.parent)
    if index is not None and str(read_json(index, BASE).get("_class_name", "")).startswith(spec.pipelines) and spec.describes(file.parent):
        return file.parent
    return spec.configs


def check_kind(spec: FamilySpec, header: Header, source: Source) -> None:
    """Raises OptionError with a sentence about what the file is, unless it is one of the family's."""
    what = what_is(header)
    if what in spec.files:
        return
    if what == LORA:
        advice = "LoRA files go into base_weights (merged first) or network_weights (trained further)"
    elif what in spec.belongs:
        advice = f"{what[0].upper()}{what[1:]} goes into {spec.belongs[what]}"
    else:
        advice = f"Choose its own family, or {spec.files[0]}"
    raise OptionError(f"{BASE}: {source.label} is {what}; you chose {spec.label}, which needs {spec.needs}. {advice}")


def check_folder(spec: FamilySpec, source: Source, own: Sequence[str]) -> Config:
    """The folder's model_index.json, or modular_model_index.json. Raises OptionError for a folder that is no model of the family, and lists
    what is missing."""
    index_file = pipeline_file(source.path)
    if index_file is None:
        files = sorted(path.name for path in source.path.glob("*.safetensors"))
        hint = f" It has {files[0]}; to load that file, give its path" if files else ""
        alone = class_in(source.path, BASE)
        kind = f"is a {alone} alone, not a whole model" if alone else "is not a diffusers folder: it has no model_index.json"
        raise OptionError(f"{BASE}: the folder {source.label} {kind}.{hint}")
    index = read_json(index_file, BASE)
    name = str(index.get("_class_name", "unknown"))
    if not name.startswith(spec.pipelines):
        raise OptionError(
            f"{BASE}: {source.label} is a {name.removesuffix('Pipeline')} model ({name}); you chose {spec.label}. "
            f"Choose its own family, or {spec.files[0]}"
        )
    needed = [f"{spec.parts[part].folder}/config.json" for part in own]
    missing = [name for name in [*needed, "scheduler/scheduler_config.json"] if not (source.path / name).is_file()]
    missing += [
        tokenizer.folder for part, tokenizer in spec.tokenizers.items() if part in own and not (source.path / tokenizer.folder).is_dir()
    ]
    if missing:
        raise OptionError(f"{BASE}: the diffusers folder {source.label} is not complete; missing: {', '.join(missing)}")
    return index


def given(
    spec: FamilySpec, name: str, option: str, value: str, variant: str | None, also: Sequence[str] = (), without: Collection[str] = ()
) -> FoundNetwork:
    """The network that an option of its own names: a file in the original or the diffusers layout, its folder, a whole model, a hub id.

    also: what what_is calls further files that hold it, besides the network alone and the family's single files. Of a network in `without`
    only the configuration is needed.
    """
    part = spec.parts[name]
    noun = f"a {name.upper()}" if name == "vae" else f"a {part.class_name}"
    source = find(option, value, spec.name, folders=(part.folder,))
    if not source.is_file:
        folder = source.path if part.is_class(class_in(source.path, option)) else source.path / part.folder
        if not part.is_class(class_in(folder, option)):
            raise OptionError(
                f"{option}: the folder {source.label} has no {noun.removeprefix('a ')}: neither its config.json nor "
                f"{part.folder}/config.json is one of {_with_article(part.class_name)}"
            )
        has_variant = variant is not None and any(folder.glob(f"*.{variant}*"))
        look = structure if name in without else network_in_folder
        return look(spec, name, folder, variant if has_variant else None, option, source.label)
    header = read_header(source.path, option)
    what = what_is(header)
    # A file of the whole model may hold the network among others, the transformer alone does not.
    whole = what in spec.files and header.starts(*filter(None, part.prefixes))
    if what not in (*part.kinds, *also) and not whole:
        raise OptionError(f"{option}: {source.label} is {what}; {noun} for {spec.label} is needed")
    beside = source.path.parent
    own = part.is_class(class_in(beside, option))
    config = read_json((beside if own else spec.configs / part.folder) / "config.json", option)
    prefix = next((prefix for prefix in part.prefixes if header.starts(prefix)), "")
    tensors = entries(header, option, prefix)
    if name == "vae":
        _check_latents(tensors, config, f"{option}: {source.label}", spec.label)
    return network(spec, name, config, tensors, option, source.label)


def _check_latents(tensors: Mapping[str, TensorEntry], config: Config, where: str, label: str) -> None:
    """Raises OptionError for a VAE with latents of another number of channels, the commonest mix-up of families."""
    entry = tensors.get("decoder.conv_in.weight")
    if entry is not None and len(entry.shape) == 4 and entry.shape[1] != config.get("latent_channels", 4):
        raise OptionError(
            f"{where} makes latents of {entry.shape[1]} channels, but those of {label} have {config.get('latent_channels', 4)}; "
            "it is the VAE of another family"
        )


def network_in_folder(spec: FamilySpec, name: str, folder: Path, variant: str | None, option: str, label: str) -> FoundNetwork:
    """A network in its own folder of the diffusers layout; label names the folder in messages."""
    config = read_json(folder / "config.json", option)
    return network(spec, name, config, folder_entries(folder, spec.parts[name].stem, variant, option, label), option, label)


def structure(spec: FamilySpec, name: str, folder: Path, variant: str | None, option: str, label: str) -> FoundNetwork:
    """A network of which nobody reads the weights, from its own folder; parameters as of network_in_folder."""
    config = read_json(folder / "config.json", option)
    return FoundNetwork({}, empty(lambda: make(spec, name, config, option, label)))


def network(spec: FamilySpec, name: str, config: Config, tensors: Mapping[str, TensorEntry], option: str, what: str) -> FoundNetwork:
    """Matches tensors (names without prefix, original or diffusers layout) with those of the network. OptionError when they do not fit."""
    part = spec.parts[name]
    start = next((start for start in part.inside if any(key.startswith(start) for key in tensors)), "")
    tensors = {key.removeprefix(start): entry for key, entry in tensors.items() if key.startswith(start)}
    module = empty(lambda: make(spec, name, config, option, what))
    keys = list(module.state_dict())
    original = {key: _norm_spelling(stored, tensors) for key, stored in places(part.layout, keys, config_of(module)).items()}
    diffusers = {key: Stored(_spelling(key, tensors)) for key in keys}
    # The layout that more of the names belong to; a file mixes none.
    placed = max((diffusers, original), key=lambda layout: sum(stored.name in tensors for stored in layout.values()))
    pairs = {key: (tensors[stored.name], stored) for key, stored in placed.items() if stored.name in tensors}
    pairs |= {key: pairs[other] for key, other in part.stand_ins.items() if key not in pairs and other in pairs}
    found = {key: shape_from_original(stored, entry.shape) for key, (entry, stored) in pairs.items()}
    used = {stored.name for stored in placed.values()} | set(part.extras(config_of(module)))
    found |= {key: entry.shape for key, entry in tensors.items() if key not in used and not key.startswith(part.unread)}
    check(module, found, what, option)
    return FoundNetwork(pairs, module)


_OLD_ATTENTION = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}

_T5_EMBEDDING = ("shared.weight", "encoder.embed_tokens.weight")


def _spelling(key: str, tensors: Mapping[str, TensorEntry]) -> str:
    """A tensor's name in a file: transformers before 5.6 wrote `text_model.`, old diffusers had other names in the VAE's attention.

    T5's one embedding has two names in the network and either of them in a file.
    """
    candidates = [key, f"text_model.{key}", key.removeprefix("text_model.")]
    candidates += [key.replace(f".{new}.", f".{old}.") for new, old in _OLD_ATTENTION.items() if f".attentions.0.{new}." in key]
    candidates += [name for name in _T5_EMBEDDING if key in _T5_EMBEDDING]
    return next((name for name in candidates if name in tensors), key)


def _norm_spelling(stored: Stored, tensors: Mapping[str, TensorEntry]) -> Stored:
    """The place of a tensor in a file: the scale of a norm is its weight in models that ComfyUI of 2026 has saved."""
    other = f"{stored.name.removesuffix('.scale')}.weight"
    return replace(stored, name=other) if stored.name.endswith(".scale") and stored.name not in tensors and other in tensors else stored


def make(spec: FamilySpec, name: str, config: Config, option: str, what: str) -> nn.Module:
    """A network from its configuration. Raises OptionError for a configuration of another class, and for one that makes no network."""
    wanted = spec.parts[name].class_name
    class_name = config.get("_class_name") or next(iter(config.get("architectures") or []), wanted)
    if not spec.parts[name].is_class(class_name):
        raise OptionError(f"{option}: {what} is a {class_name}; {spec.label} has {_with_article(wanted)} there")
    try:
        return spec.parts[name].make(config)
    except (TypeError, ValueError, KeyError, IndexError) as err:
        raise OptionError(f"{option}: the configuration of {what} makes no {class_name}: {err}") from err


def tokenizer_for(base: Base, name: str) -> Any:
    """The tokenizer of a text encoder that is no part of a base folder: beside base model or encoder, in the hub cache, on the hub."""
    tokenizer, found = base.spec.parts[name].tokenizer, base.networks[name]
    assert tokenizer is not None
    entry = next(iter(found.tensors.values()))[0]
    file, option, config = entry.path, entry.option, config_of(found.module)
    own = base.source.path.parent if base.source.is_file else base.source.path
    for root in (own, base.spec.configs, file.parent, file.parent.parent):
        if tokenizers.is_there(root / tokenizer.folder, tokenizer):
            return tokenizers.read(tokenizer, root / tokenizer.folder, config, option, f"{tokenizer.folder} beside {file.name}")
    return tokenizers.find_for_file(file, base.spec.configs, [tokenizer], [config], option)[0]


def adapter(value: str, option: str = "base_weights") -> Path:
    """A LoRA file that an option names. Raises OptionError unless it is one."""
    path = Path(value).expanduser()
    if not path.is_file():
        raise OptionError(f"{option}: there is no file {value}")
    what = what_is(read_header(path, option))
    if what != LORA:
        raise OptionError(f"{option}: {path.name} is {what}; a LoRA file belongs here")
    return path


def dtypes_of(names: Iterable[str], dtype: Dtypes, vae_dtype: str) -> dict[str, torch.dtype]:
    """The precision of each network: the VAE's is an option of its own, the others' are one, or one for each name."""
    return {name: VAE_DTYPES[vae_dtype] if name == "vae" else dtype if isinstance(dtype, torch.dtype) else dtype[name] for name in names}


def read_networks(
    found: Mapping[str, FoundNetwork],
    label: str,
    device: DeviceMap,
    dtypes: Mapping[str, torch.dtype],
    without: Collection[str] = (),
    finishing: Mapping[str, tuple[Sequence[str], Finish]] | None = None,
) -> dict[str, nn.Module]:
    """Reads the weights of each network, in the precision that dtypes has for its name: frozen, in eval mode, on the device.

    Those named in `without` are on the meta device instead. finishing: blocks and what is done with each as soon as it is read.
    """
    read = Reader()
    for name, one in Bar(found.items(), desc=f"loading {label}", unit="network", leave=False):
        if name in without:
            leave_out(one.module)
            continue
        getters = {
            key: lambda entry=entry, stored=stored: from_original(stored, read(entry)) for key, (entry, stored) in one.tensors.items()
        }
        fill(one.module, getters, mapped(device, name), dtypes[name], *(finishing or {}).get(name, ()))
    return {name: one.module for name, one in found.items()}


def merge_adapters(parts: Parts, adapters: Sequence[Path], multipliers: Sequence[float]) -> None:
    """Merges LoRA files into the networks in their order, with these strengths; none given means 1.0 for all."""
    if not adapters:
        return
    from sd_scripts.library.adapters.merge import merge_into

    strengths = multipliers or (1.0,) * len(adapters)
    for path, strength in Bar(list(zip(adapters, strengths, strict=True)), desc="merging base_weights", disable=len(adapters) < 2):
        merge_into(parts, path, strength)


def tried(problems: list[Problem] | list[str | Problem], action: Callable[[], T]) -> T | None:
    """The action's result; its problems join the others, so that all are told at once."""
    try:
        return action()
    except OptionError as err:
        problems.extend(err.problems)
        return None


def read_json(path: Path, option: str) -> Config:
    """A configuration file. Raises OptionError when it is missing or no JSON object."""
    try:
        content = json_of(path.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise OptionError(f"{option}: {path.parent.name}/{path.name} is missing") from err
    except (OSError, ValueError) as err:
        raise OptionError(f"{option}: {path.parent.name}/{path.name} cannot be read as JSON ({err})") from err
    if not isinstance(content, dict):
        raise OptionError(f"{option}: {path.parent.name}/{path.name} is not a JSON object")
    return content


def class_in(folder: Path, option: str) -> str | None:
    """The class that a folder's config.json is a configuration of; None without."""
    file = folder / "config.json"
    if not file.is_file():
        return None
    config = read_json(file, option)
    return config.get("_class_name") or next(iter(config.get("architectures") or []), None)


def config_of(module: nn.Module) -> Config:
    """A network's configuration as a plain dictionary."""
    config: Any = module.config
    return config.to_dict() if hasattr(config, "to_dict") else dict(config)


def _with_article(noun: str) -> str:
    return f"{'an' if noun[0] in 'AEIO' else 'a'} {noun}"
