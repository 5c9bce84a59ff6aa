"""The networks of a run on the meta device, and calls of them: what a forecast measures instead of the model itself. Reads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import huggingface_hub
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from torch import Tensor

from sd_scripts.families import FACTS
from sd_scripts.library.core.devices import META
from sd_scripts.library.core.protocols import Condition, Geometry, ModelFamily, Parts, PublishedFamily
from sd_scripts.library.loading.common import BASE, dtypes_of
from sd_scripts.library.loading.headers import read_header
from sd_scripts.library.loading.source import find
from sd_scripts.schema.files import pipeline_file
from sd_scripts.schema.model import ModelOptions

EVERYTHING = ("backbone", "vae", "te1", "te2", "te3")


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
    asked, published = options, cast("PublishedFamily", family)
    plain: dict[str, Any] = {"base_weights": (), "base_weights_multiplier": (), "transformer_quantization": "none"}
    off = {"text_encoder_quantization": "none", "training_adapter": None, "training_adapter_multiplier": 1.0, "modulation_table": False}
    plain |= {name: value for name, value in off.items() if hasattr(options, name)}
    # A network of its own that is not here is built as the base's.
    plain |= {name: None for name in FACTS[family.name].companions if is_absent(getattr(options, name))}
    options = options.model_copy(update=plain)
    name = options.pretrained_model_name_or_path or ""
    path = Path(name).expanduser()
    if name == "toy" or path.is_dir() or (path.is_file() and FACTS[family.name].whole_files):
        found = Structure(family.load(options, META, torch.float32, EVERYTHING))
    elif (folder := _cached(name, getattr(options, "revision", None))) is not None:
        here = options.model_copy(update={"pretrained_model_name_or_path": str(folder), "revision": None})
        found = Structure(family.load(here, META, torch.float32, EVERYTHING))
    elif path.is_file():
        found = Structure(*published.published(options, read_header(path, BASE)))
    elif name.count("/") == 1 and not name.endswith(".safetensors"):
        found = Structure(*published.published(options, None))
    else:
        # It says in a sentence what is missing.
        find(BASE, name, family.name)
        raise AssertionError(name)
    settle(found.parts, dtypes_of(found.parts.modules(), {**dict.fromkeys(EVERYTHING, torch.float32), **dtypes}, options.vae_dtype))
    if not has_training_adapter(asked) and hasattr(asked, "training_adapter"):
        asked = asked.model_copy(update={"training_adapter": None})
    return Structure(family.equipped(found.parts, asked, META), found.published)


def has_training_adapter(options: ModelOptions) -> bool:
    """Whether the options name a training adapter that is on this disk."""
    file = getattr(options, "training_adapter", None)
    return file is not None and Path(file).expanduser().is_file()


def settle(parts: Parts, dtypes: dict[str, torch.dtype]) -> None:
    """Gives the weights of each network their precision, frozen."""
    for name, module in parts.modules().items():
        for weight in module.parameters():
            if weight.is_floating_point():
                weight.data = weight.data.to(dtypes[name])
        module.eval().requires_grad_(False)


def _cached(name: str, revision: str | None) -> Path | None:
    """The folder of a hub model that was fetched before, with its tokenizers and configurations."""
    if name.count("/") != 1:
        return None
    try:
        folder = Path(huggingface_hub.snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None
    return folder if pipeline_file(folder) is not None else None


def is_absent(name: str | None) -> bool:
    """Whether this is the hub id of a network, or of a model, that was not fetched yet."""
    if name is None or name == "toy" or name.count("/") != 1 or name.endswith(".safetensors") or Path(name).expanduser().exists():
        return False
    try:
        huggingface_hub.snapshot_download(name, local_files_only=True)
    except (LocalEntryNotFoundError, ValueError, OSError):
        return True
    return False


def latents_of(family: ModelFamily, parts: Parts, size: tuple[int, int], batch: int) -> Tensor:
    """Latents (batch, C, h, w) of images of this (width, height), float32, on the meta device."""
    with torch.no_grad():
        return family.encode_images(parts, torch.empty(batch, 3, size[1], size[0], device=META)).float()


def conditions_of(
    family: ModelFamily, parts: Parts, size: tuple[int, int], batch: int, caption: str, controls: Mapping[str, Tensor]
) -> list[Condition]:
    """What a batch of images of this (width, height) is conditioned on, on the meta device, for captions as long as this one.

    controls: latents of the control images of each, by their names in a condition.
    """
    told = {name: tensor.to(META) for name, tensor in family.size_condition(Geometry(size, (0, 0), size)).items()} | dict(controls)
    return [{**text, **told} for text in family.texts_like(parts, caption, batch, len(controls))]
