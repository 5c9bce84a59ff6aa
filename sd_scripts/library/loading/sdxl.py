"""Load SDXL from a diffusers folder, a hub id or a single file, and write the single file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sd_scripts.library import diffusion
from sd_scripts.library.loading import original, tokenizers
from sd_scripts.library.loading.headers import SDXL, VAE, read_header, what_is
from sd_scripts.library.loading.source import Source, find
from sd_scripts.library.loading.weights import Entry, Reader, check, empty, entries, fill, folder_entries
from sd_scripts.library.protocols import Parts
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.files import written_aside
from sd_scripts.schema.model import SdxlModelOptions

CONFIGS = Path(__file__).parents[1] / "configs" / "sdxl"
"""Configuration of the published SDXL networks, for single files, which carry none."""
FOLDERS = {"backbone": "unet", "vae": "vae", "te1": "text_encoder", "te2": "text_encoder_2"}
"""Folder of each network in the diffusers layout."""
_TOKENIZERS = {"te1": "tokenizer", "te2": "tokenizer_2"}
_OPTION = "pretrained_model_name_or_path"
VAE_DTYPES = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FLOW_SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}

CPU = torch.device("cpu")

Config = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Found:
    """One network, and where its tensors are, by their names in the network."""

    tensors: dict[str, tuple[Entry, original.Stored]]
    module: nn.Module
    """Made from the configuration, with empty weights."""


def load(options: SdxlModelOptions, device: torch.device, dtype: torch.dtype) -> Parts:
    """All parts on `device`, frozen and in eval mode; backbone and text encoders in dtype, the VAE in options.vae_dtype.

    Raises OptionError with every problem that can be seen before weights are read.
    """
    problems: list[Problem] = []
    own = [name for name in FOLDERS if name != "vae" or options.vae is None]
    base = _tried(problems, lambda: _base(options, own))
    vae = _tried(problems, lambda: _given_vae(options)) if options.vae is not None else None
    adapters = [_tried(problems, lambda value=value: _adapter(value)) for value in options.base_weights]
    if base is None or problems:
        raise OptionError(problems)
    if vae is not None:
        base.networks["vae"] = vae
    _check_channels(base.networks)
    parts = _read(base, options, device, dtype)
    if adapters:
        from sd_scripts.library.networks.merge import merge_into

        strengths = options.base_weights_multiplier or (1.0,) * len(adapters)
        for path, strength in tqdm(list(zip(adapters, strengths)), desc="merging base_weights", disable=len(adapters) < 2):
            merge_into(parts, path, strength)
    return parts


def load_single_file(
    path: Path,
    config: Path = CONFIGS,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> Parts:
    """The model in a single file of the original layout, with the configuration in the folder `config`; all networks in dtype."""
    base = _from_file(Source(path, path.name), config, list(FOLDERS))
    return _read(base, SdxlModelOptions(pretrained_model_name_or_path=str(path)), device, dtype)


def save_single_file(parts: Parts, path: Path, dtype: torch.dtype | None = None, metadata: Mapping[str, str] | None = None) -> None:
    """Writes all networks to one file in the original layout, in dtype or as they are; marks v_pred and ztsnr models as such."""
    state: dict[str, Tensor] = {}
    for name, module in parts.modules().items():
        own = {key: tensor.detach().to("cpu", dtype) for key, tensor in module.state_dict().items() if not key.endswith(original.TOLERATED)}
        state |= original.to_original(name, own, _as_dict(module.config))
    if parts.kind == "v_prediction":
        state["v_pred"] = torch.empty(0)
    if parts.scheduler_config.get("rescale_betas_zero_snr"):
        state["ztsnr"] = torch.empty(0)
    with written_aside(path) as aside:
        save_file(state, aside, metadata={"format": "pt", **(metadata or {})})


@dataclass(frozen=True)
class _Base:
    """Everything about a base model that is known before its weights are read."""

    source: Source
    networks: dict[str, Found]
    tokenizers: dict[str, Any]
    scheduler: Config
    force_zeros: bool


def _base(options: SdxlModelOptions, own: list[str]) -> _Base:
    """The base model, with the networks named in own."""
    source = find(
        _OPTION, options.pretrained_model_name_or_path, "sdxl", options.revision, options.variant, [FOLDERS[name] for name in own]
    )
    if not source.is_file:
        return _from_folder(source, options.variant, own)
    if options.variant is not None:
        raise OptionError(
            f"variant: {options.variant} chooses among the files of a folder, but {_OPTION} is the file {source.label}; remove it"
        )
    beside = source.path.parent
    return _from_file(source, beside if (beside / "model_index.json").is_file() else CONFIGS, own)


def _from_folder(source: Source, variant: str | None, own: list[str]) -> _Base:
    index = _check_folder(source, own)
    networks, problems = {}, []
    for name in own:
        found = _tried(
            problems,
            lambda name=name: _network_in_folder(name, source.path / FOLDERS[name], variant, _OPTION, f"{source.label}/{FOLDERS[name]}"),
        )
        if found is not None:
            networks[name] = found
    if problems:
        raise OptionError(problems)
    words = {
        name: tokenizers.read(source.path / folder, _as_dict(networks[name].module.config), _OPTION, f"{source.label}/{folder}")
        for name, folder in _TOKENIZERS.items()
    }
    scheduler = read_json(source.path / "scheduler" / "scheduler_config.json", _OPTION)
    return _Base(source, networks, words, scheduler, bool(index.get("force_zeros_for_empty_prompt", True)))


def _from_file(source: Source, configs: Path, own: list[str]) -> _Base:
    header = read_header(source.path, _OPTION)
    what = what_is(header)
    if what != SDXL:
        raise OptionError(
            f"{_OPTION}: {source.label} is {what}; you chose SDXL, which needs {SDXL} with UNet, VAE and both text encoders{_remedy(what)}"
        )
    if "vae" in own and not header.starts(original.PREFIXES["vae"]):
        raise OptionError(f"{_OPTION}: {source.label} holds no VAE; set vae to one for SDXL")
    networks = {}
    for name in own:
        config = read_json(configs / FOLDERS[name] / "config.json", _OPTION)
        tensors = entries(header, _OPTION, original.PREFIXES[name])
        networks[name] = _network(name, config, tensors, True, _OPTION, f"{FOLDERS[name]} of {source.label}")
    words = tokenizers.find_for_file(source.path, configs, [_as_dict(networks[name].module.config) for name in _TOKENIZERS], _OPTION)
    scheduler = read_json(configs / "scheduler" / "scheduler_config.json", _OPTION)
    if "v_pred" in header.shapes:
        scheduler["prediction_type"] = "v_prediction"
    if "ztsnr" in header.shapes:
        scheduler["rescale_betas_zero_snr"] = True
    index = read_json(configs / "model_index.json", _OPTION)
    return _Base(source, networks, dict(zip(_TOKENIZERS, words)), scheduler, bool(index.get("force_zeros_for_empty_prompt", True)))


def _read(base: _Base, options: SdxlModelOptions, device: torch.device, dtype: torch.dtype) -> Parts:
    """Reads the weights."""
    read = Reader()
    bar = tqdm(base.networks.items(), desc=f"loading {base.source.label}", unit="network", leave=False)
    for name, found in bar:
        getters = {
            key: lambda entry=entry, stored=stored: original.from_original(stored, read(entry))
            for key, (entry, stored) in found.tensors.items()
        }
        fill(found.module, getters, device, VAE_DTYPES[options.vae_dtype] if name == "vae" else dtype)
    scheduler = scheduler_config(base.scheduler, options)
    modules = {name: found.module for name, found in base.networks.items()}
    return Parts(
        backbone=modules["backbone"],
        vae=modules["vae"],
        text_encoders={name: modules[name] for name in _TOKENIZERS},
        tokenizers=base.tokenizers,
        path=diffusion.path_of(scheduler),
        kind=diffusion.kind_of(scheduler),
        scheduler_config=scheduler,
        source=base.source.label,
        settings={
            "max_token_length": options.max_token_length,
            "weighted_captions": options.weighted_captions,
            "force_zeros_for_empty_prompt": base.force_zeros,
        },
    )


def scheduler_config(config: Config, options: SdxlModelOptions) -> Config:
    """The model's scheduler configuration with what the options say about it."""
    wanted = options.prediction_type
    if wanted == "flow":
        return dict(config) if diffusion.is_flow(config) else dict(FLOW_SCHEDULER)
    changed = dict(config)
    if diffusion.is_flow(config):
        if options.zero_terminal_snr and wanted == "auto":
            raise OptionError("zero_terminal_snr belongs to noise schedules; this model is a flow-matching model and has none. Turn it off")
        if wanted != "auto":
            changed = read_json(CONFIGS / "scheduler" / "scheduler_config.json", _OPTION)
    if wanted != "auto":
        changed["prediction_type"] = wanted
    if options.zero_terminal_snr or changed.get("rescale_betas_zero_snr"):
        changed |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return changed


def _check_folder(source: Source, own: list[str]) -> Config:
    """The folder's model_index.json. Raises OptionError for a folder that is no SDXL model, and lists what is missing."""
    index_file = source.path / "model_index.json"
    if not index_file.is_file():
        files = sorted(path.name for path in source.path.glob("*.safetensors"))
        hint = f" It has {files[0]}; to load that file, give its path" if files else ""
        config = source.path / "config.json"
        alone = read_json(config, _OPTION).get("_class_name") if config.is_file() else None
        kind = f"is a {alone} alone, not a whole model" if alone else "is not a diffusers folder: it has no model_index.json"
        raise OptionError(f"{_OPTION}: the folder {source.label} {kind}.{hint}")
    index = read_json(index_file, _OPTION)
    name = str(index.get("_class_name", "unknown"))
    if not name.startswith("StableDiffusionXL"):
        raise OptionError(
            f"{_OPTION}: {source.label} is a {name.removesuffix('Pipeline')} model ({name}); you chose SDXL. "
            "Choose its own family, or an SDXL model"
        )
    needed = [f"{FOLDERS[part]}/config.json" for part in own]
    missing = [name for name in [*needed, "scheduler/scheduler_config.json"] if not (source.path / name).is_file()]
    missing += [folder for folder in _TOKENIZERS.values() if not (source.path / folder).is_dir()]
    if missing:
        raise OptionError(f"{_OPTION}: the diffusers folder {source.label} is not complete; missing: {', '.join(missing)}")
    return index


def _network_in_folder(name: str, folder: Path, variant: str | None, option: str, label: str) -> Found:
    config = read_json(folder / "config.json", option)
    stem = "diffusion_pytorch_model" if name in ("backbone", "vae") else "model"
    return _network(name, config, folder_entries(folder, stem, variant, option, label), False, option, label)


def _network(name: str, config: Config, tensors: dict[str, Entry], in_original_layout: bool, option: str, what: str) -> Found:
    """Matches the tensors of a file with those of the network. Raises OptionError when they do not fit."""
    module = empty(lambda: make(name, config, option, what))
    keys = list(module.state_dict())
    if in_original_layout:
        placed = original.layout(name, keys, _as_dict(module.config))
    else:
        placed = {key: original.Stored(_spelling(key, tensors)) for key in keys}
    pairs = {key: (tensors[stored.name], stored) for key, stored in placed.items() if stored.name in tensors}
    found = {key: original.shape_from_original(stored, entry.shape) for key, (entry, stored) in pairs.items()}
    used = {stored.name for stored in placed.values()}
    found |= {key: entry.shape for key, entry in tensors.items() if key not in used}
    check(module, found, what, option)
    return Found(pairs, module)


_OLD_ATTENTION = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}


def _spelling(key: str, tensors: Mapping[str, Entry]) -> str:
    """A tensor's name in a file: transformers before 5.6 wrote `text_model.`, old diffusers had other names in the VAE's attention."""
    candidates = [key, f"text_model.{key}", key.removeprefix("text_model.")]
    candidates += [key.replace(f".{new}.", f".{old}.") for new, old in _OLD_ATTENTION.items() if f".attentions.0.{new}." in key]
    return next((name for name in candidates if name in tensors), key)


_CLASSES = {"backbone": "UNet2DConditionModel", "vae": "AutoencoderKL", "te1": "CLIPTextModel", "te2": "CLIPTextModelWithProjection"}


def make(name: str, config: Config, option: str, what: str) -> nn.Module:
    """A network from its configuration. Raises OptionError for a configuration of another class, and for one that makes no network."""
    makers: dict[str, Callable[[], nn.Module]] = {
        "backbone": lambda: UNet2DConditionModel.from_config(config),
        "vae": lambda: AutoencoderKL.from_config(config),
        "te1": lambda: CLIPTextModel(CLIPTextConfig.from_dict(config)),
        "te2": lambda: CLIPTextModelWithProjection(CLIPTextConfig.from_dict(config)),
    }
    class_name = config.get("_class_name") or next(iter(config.get("architectures") or []), _CLASSES[name])
    if class_name != _CLASSES[name]:
        raise OptionError(f"{option}: {what} is a {class_name}; SDXL has a {_CLASSES[name]} there")
    try:
        return makers[name]()
    except (TypeError, ValueError, KeyError, IndexError) as err:
        raise OptionError(f"{option}: the configuration of {what} makes no {class_name}: {err}") from err


def _given_vae(options: SdxlModelOptions) -> Found:
    """The VAE that the option `vae` names."""
    assert options.vae is not None
    source = find("vae", options.vae, "sdxl", folders=("vae",))
    if not source.is_file:
        folder = source.path if _class_in(source.path) == _CLASSES["vae"] else source.path / "vae"
        if _class_in(folder) != _CLASSES["vae"]:
            raise OptionError(
                f"vae: the folder {source.label} has no VAE: neither its config.json nor vae/config.json is one of an AutoencoderKL"
            )
        variant = options.variant if _has_variant(folder, options.variant) else None
        return _network_in_folder("vae", folder, variant, "vae", source.label)
    header = read_header(source.path, "vae")
    what = what_is(header)
    if what not in (VAE, SDXL):
        raise OptionError(f"vae: {source.label} is {what}; a VAE for SDXL is needed")
    beside = source.path.parent
    config = read_json((beside if _class_in(beside) == _CLASSES["vae"] else CONFIGS / "vae") / "config.json", "vae")
    prefix = original.PREFIXES["vae"] if header.starts(original.PREFIXES["vae"]) else ""
    tensors = entries(header, "vae", prefix)
    return _network("vae", config, tensors, any(".mid.block_1." in key for key in tensors), "vae", source.label)


def _adapter(value: str) -> Path:
    """A LoRA file of base_weights. Raises OptionError unless it is one."""
    path = Path(value).expanduser()
    if not path.is_file():
        raise OptionError(f"base_weights: there is no file {value}")
    what = what_is(read_header(path, "base_weights"))
    if what != "a LoRA file":
        raise OptionError(f"base_weights: {path.name} is {what}; LoRA files are merged here")
    return path


def _check_channels(networks: Mapping[str, Found]) -> None:
    """Raises OptionError when the UNet does not work on the VAE's latents, as inpainting models do not."""
    have, need = networks["backbone"].module.config.in_channels, networks["vae"].module.config.latent_channels
    if have != need:
        raise OptionError(
            f"{_OPTION}: the UNet takes {have} channels, but the VAE makes latents of {need}. "
            "Inpainting and edit models cannot be trained here, and the VAE must be one for this model"
        )


def _remedy(what: str) -> str:
    if what == "a LoRA file":
        return ". LoRA files go into base_weights (merged first) or network_weights (trained further)"
    if what == VAE:
        return ". A VAE of its own goes into vae"
    return ". Choose its own family, or an SDXL model"


def _class_in(folder: Path) -> str | None:
    file = folder / "config.json"
    return read_json(file, "vae").get("_class_name") if file.is_file() else None


def _has_variant(folder: Path, variant: str | None) -> bool:
    return variant is not None and any(folder.glob(f"*.{variant}*"))


def _as_dict(config: Any) -> Config:
    return config.to_dict() if hasattr(config, "to_dict") else dict(config)


def read_json(path: Path, option: str) -> Config:
    """A configuration file. Raises OptionError when it is missing or no JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise OptionError(f"{option}: {path.parent.name}/{path.name} is missing") from err
    except (OSError, ValueError) as err:
        raise OptionError(f"{option}: {path.parent.name}/{path.name} cannot be read as JSON ({err})") from err
    if not isinstance(content, dict):
        raise OptionError(f"{option}: {path.parent.name}/{path.name} is not a JSON object")
    return content


def _tried(problems: list[Problem], action: Callable[[], T]) -> T | None:
    """The action's result; its problems join the others, so that all are told at once."""
    try:
        return action()
    except OptionError as err:
        problems.extend(err.problems)
        return None
