"""The networks of a run on the meta device, and calls of them: what a forecast measures instead of the model itself. Reads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import Tensor, nn

from sd_scripts.families.flux.loading import SCHNELL
from sd_scripts.families.qwen_edit.modulation import tabulate
from sd_scripts.families.qwen_edit.options import QwenImageModelOptions
from sd_scripts.families.zimage.options import ZImageModelOptions
from sd_scripts.library.adapters.applying import put_on_for_training
from sd_scripts.library.core.protocols import Condition, Geometry, ModelFamily, Parts
from sd_scripts.library.loading.common import FamilySpec, dtypes_of, read_json
from sd_scripts.library.loading.headers import Header, read_header, what_is
from sd_scripts.library.loading.source import find
from sd_scripts.library.loading.weights import empty, leave_out
from sd_scripts.schema.model import BaseModelOptions, ModelOptions

from .accounting import META

_COMPANIONS = ("vae", "ae", "text_encoder", "clip_l", "t5xxl")
"""Options that name a network beside the base model's own."""
EVERYTHING = ("backbone", "vae", "te1", "te2", "te3")
_SPECS = {"sd": "sd:SPEC1", "sdxl": "sdxl:SPEC", "flux": "flux:SPEC", "qwen_edit": "qwen_edit:SPEC", "zimage": "zimage:SPEC"}


@dataclass(frozen=True)
class Structure:
    """The networks of a model on the meta device, in the precision that a run reads them in."""

    parts: Parts
    published: str = ""
    """The family whose published configuration it was made from; empty where the model's own was there."""


def structure_of(family: ModelFamily, options: ModelOptions, dtypes: dict[str, torch.dtype]) -> Structure:
    """The structure of the model that the options name, of its own configuration or, where it is not on this disk, of the published one.

    Raises OptionError for a model that is there and cannot be read. Quantisation and merged files change no structure and are left out, and
    so is a training adapter that is not on this disk.
    """
    assert isinstance(options, BaseModelOptions)
    asked = options
    plain: dict[str, Any] = {"base_weights": (), "base_weights_multiplier": (), "transformer_quantization": "none"}
    off = {"text_encoder_quantization": "none", "training_adapter": None, "training_adapter_multiplier": 1.0, "modulation_table": False}
    plain |= {name: value for name, value in off.items() if hasattr(options, name)}
    # A network of its own that is not here is built as the base's.
    plain |= {name: None for name in _COMPANIONS if is_absent(getattr(options, name, None))}
    options = options.model_copy(update=plain)
    name = options.pretrained_model_name_or_path
    path = Path(name).expanduser()
    if name == "toy" or path.is_dir() or _whole(path):
        found = Structure(family.load(options, META, torch.float32, EVERYTHING))
    elif (folder := _cached(name, options.revision)) is not None:
        here = options.model_copy(update={"pretrained_model_name_or_path": str(folder), "revision": None})
        found = Structure(family.load(here, META, torch.float32, EVERYTHING))
    elif path.is_file():
        found = _published(family, options, read_header(path, "pretrained_model_name_or_path"))
    elif name.count("/") == 1 and not name.endswith(".safetensors"):
        found = _published(family, options, None)
    else:
        # It says in a sentence what is missing.
        find("pretrained_model_name_or_path", name, family.name)
        raise AssertionError(name)
    cast(found.parts, dtypes_of(found.parts.modules(), {**dict.fromkeys(EVERYTHING, torch.float32), **dtypes}, options.vae_dtype))
    if isinstance(asked, QwenImageModelOptions) and asked.modulation_table:
        tabulate(found.parts, META)
    if isinstance(asked, ZImageModelOptions) and has_training_adapter(asked):
        assert asked.training_adapter is not None
        put_on_for_training(found.parts, Path(asked.training_adapter).expanduser(), asked.training_adapter_multiplier)
    return found


def has_training_adapter(options: ModelOptions) -> bool:
    """Whether the options name a training adapter that is on this disk."""
    file = getattr(options, "training_adapter", None)
    return file is not None and Path(file).expanduser().is_file()


def cast(parts: Parts, dtypes: dict[str, torch.dtype]) -> None:
    """Gives the weights of each network their precision, frozen."""
    for name, module in parts.modules().items():
        for weight in module.parameters():
            if weight.is_floating_point():
                weight.data = weight.data.to(dtypes[name])
        module.eval().requires_grad_(False)


def _whole(path: Path) -> bool:
    """Whether a file holds all networks of a model, so that nothing else is looked for."""
    return path.is_file() and what_is(read_header(path, "pretrained_model_name_or_path")).startswith(("an SD", "a DDPM", "an LGT"))


def _cached(name: str, revision: str | None) -> Path | None:
    """The folder of a hub model that was fetched before, with its tokenizers and configurations."""
    if name.count("/") != 1:
        return None
    try:
        folder = Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None
    return folder if (folder / "model_index.json").is_file() else None


def is_absent(name: str | None) -> bool:
    """Whether this is the hub id of a network, or of a model, that was not fetched yet."""
    if name is None or name == "toy" or name.count("/") != 1 or name.endswith(".safetensors") or Path(name).expanduser().exists():
        return False
    try:
        huggingface_hub.snapshot_download(name, local_files_only=True)
    except (LocalEntryNotFoundError, ValueError, OSError):
        return True
    return False


def _published(family: ModelFamily, options: BaseModelOptions, header: Header | None) -> Structure:
    """The published model that the options most likely mean: of FLUX dev or schnell, of SD 1 or 2, of Qwen-Image the version."""
    name = Path(options.pretrained_model_name_or_path).name.lower()
    module, _, attribute = _SPECS[family.name].partition(":")
    spec: FamilySpec = getattr(import_module(f"sd_scripts.families.{module}.loading"), attribute)
    parts = family.tiny()
    if family.name == "flux" and "schnell" in name:
        spec = replace(spec, configs=SCHNELL)
    if family.name == "sd" and ("diffusion-2" in name or (header is not None and what_is(header) == "an SD 2.x model")):
        spec = import_module("sd_scripts.families.sd.loading").SPEC2
    if isinstance(options, QwenImageModelOptions):
        parts = family.tiny_version(_version(options, name))  # type: ignore[attr-defined]
    networks: dict[str, nn.Module] = {}
    for key, part in spec.parts.items():
        config = read_json(spec.configs / part.folder / "config.json", "pretrained_model_name_or_path")
        if key == "backbone" and parts.settings.get("model_version") == "edit-2511":
            config = {**config, "zero_cond_t": True}
        networks[key] = empty(lambda part=part, config=config: part.make(config))  # type: ignore[misc]
        leave_out(networks[key])
    if "te3" in networks:
        encoder: Any = networks["te3"]
        encoder.encoder.embed_tokens.weight = encoder.shared.weight
    encoders = {key: network for key, network in networks.items() if key.startswith("te")}
    settings = {key: getattr(options, key) for key in ("max_token_length", "weighted_captions", "clip_skip") if hasattr(options, key)}
    if family.name == "flux":
        settings["t5xxl_max_token_length"] = getattr(options, "t5xxl_max_token_length", None) or (256 if "schnell" in name else 512)
    if isinstance(options, QwenImageModelOptions):
        settings |= {"area": 1024**2, "control_area": (options.control_resolution or 1024) ** 2}
    parts = replace(
        parts,
        backbone=networks["backbone"],
        vae=networks["vae"],
        text_encoders=encoders,
        processor=None,
        source=options.pretrained_model_name_or_path,
        settings={**parts.settings, **settings},
    )
    return Structure(parts, spec.label)


def _version(options: QwenImageModelOptions, name: str) -> str:
    if options.model_version != "auto":
        return options.model_version
    return next((version for version in ("edit-2511", "edit-2509", "edit") if version in name), "image")


def latents_of(family: ModelFamily, parts: Parts, size: tuple[int, int], batch: int) -> Tensor:
    """Latents (batch, C, h, w) of pictures of this (width, height), float32, on the meta device."""
    with torch.no_grad():
        return family.encode_pictures(parts, torch.empty(batch, 3, size[1], size[0], device=META)).float()


def conditions_of(
    family: ModelFamily, parts: Parts, size: tuple[int, int], batch: int, caption: str, controls: Mapping[str, Tensor]
) -> list[Condition]:
    """What a batch of pictures of this (width, height) is conditioned on, on the meta device, for captions as long as this one.

    controls: latents of the control pictures of each, by their names in a condition.
    """
    told = {name: tensor.to(META) for name, tensor in family.size_condition(Geometry(size, (0, 0), size)).items()} | dict(controls)
    if family.name in ("ddpm", "lgt"):
        with torch.no_grad():
            return [{**text, **told} for text in family.encode_prompts(parts, [caption] * batch)]
    dtype = next(parts.backbone.parameters()).dtype
    shapes = _text_shapes(family, parts, caption, len(controls))
    return [{**{name: torch.empty(shape, device=META, dtype=dtype) for name, shape in shapes.items()}, **told} for _ in range(batch)]


def _text_shapes(family: ModelFamily, parts: Parts, caption: str, num_controls: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the text entries of a condition."""
    config: Any = parts.backbone.config
    if family.name == "sd":
        return {"prompt_embeds": (_clip_tokens(parts), config.cross_attention_dim)}
    if family.name == "sdxl":
        pooled: Any = parts.text_encoders["te2"].config
        return {"prompt_embeds": (_clip_tokens(parts), config.cross_attention_dim), "pooled": (pooled.projection_dim,)}
    if family.name == "flux":
        limit = parts.settings["t5xxl_max_token_length"]
        length = min(limit, num_tokens(caption)) if parts.settings["apply_t5_attn_mask"] else limit
        return {"t5": (length, config.joint_attention_dim), "pooled": (config.pooled_projection_dim,)}
    limit = parts.settings["max_token_length"]
    if family.name == "zimage":
        return {"text": (min(limit, num_tokens(caption) + 12), config.cap_feat_dim)}
    assert family.name == "qwen_edit", f"{family.name} has no shapes of texts here"
    return {"text": (min(limit, num_tokens(caption) + 12) + num_controls * _picture_tokens(parts), config.joint_attention_dim)}


def num_tokens(caption: str) -> int:
    """Tokens of a caption, without its tokenizer: the most that English prose has, one for each three letters."""
    return len(caption) // 3 + 2


def _clip_tokens(parts: Parts) -> int:
    chunks: int = parts.settings["max_token_length"] // 75
    return 77 * chunks


def _picture_tokens(parts: Parts) -> int:
    """Rows of text that a control picture has: of 384 x 384 pixels for the later editing models, of 1024 x 1024 for the first, each of
    28 x 28 pixels."""
    side = 1024 if parts.settings["model_version"] == "edit" else 384
    return (side // 28) ** 2 + 8
