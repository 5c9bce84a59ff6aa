"""One file for several bases: they name it in the index of their weights, where a model in parts lists its files.

All share the VAE; a VAE of FLUX.2's kind that is the common one with statistics of its latents keeps those alone beside that index. A
base that continues another shares with it whatever it left as it was.

The trainers read such an index; diffusers alone refuses one that names another folder, so a pipeline is loaded here.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, AutoencoderKLQwenImage21, DiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from . import by_family

WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
REST = "diffusion_pytorch_model-rest.safetensors"
"""What a base has besides the common weights. Where both have a tensor, this one counts: it is read last, as ".." sorts before letters."""

COMMON = "common"
"""The folder beside the bases with what several of them use."""

KINDS: dict[str, Any] = {
    "AutoencoderKL": AutoencoderKL,
    "AutoencoderKLQwenImage": AutoencoderKLQwenImage,
    "AutoencoderKLFlux2": AutoencoderKLFlux2,
    "AutoencoderKLQwenImage21": AutoencoderKLQwenImage21,
}
_FOLDERS = {"AutoencoderKL": "vae", "AutoencoderKLQwenImage": "qwen_vae", "AutoencoderKLFlux2": "vae"}
"""Class of a VAE -> folder in COMMON with its weights, or with most of them; what is not named is its base's own."""


def share(base: Path, found: bool = False, first: str | None = None) -> None:
    """Replaces the VAE weights of a base by an index that names the common ones beside it, if there are such and it has all of them.

    found: where there are none, those of this base become the common ones. first: the base beside it that this one continues.
    """
    if first is not None and (base.parent / first).is_dir():
        for folder in sorted(path.parent.name for path in base.glob("*/*.safetensors") if path.parent.name != "vae"):
            own, other = _weights_of(base / folder), _weights_of(base.parent / first / folder)
            tensors, there = load_file(own), load_file(other)
            _point(own, other, {name for name, tensor in tensors.items() if name in there and _same(tensor, there[name])})
    own = base / "vae" / WEIGHTS
    if not own.is_file() or _class_of(own.parent) not in _FOLDERS:
        return
    common = base.parent / COMMON / _FOLDERS[_class_of(own.parent)]
    if not (common / WEIGHTS).is_file():
        if not found:
            return
        _found(base, common)
    tensors, shared = load_file(own), load_file(common / WEIGHTS)
    if all(name in tensors and _same(tensors[name], tensor) for name, tensor in shared.items()):
        _point(own, common / WEIGHTS, set(shared))


def _weights_of(folder: Path) -> Path:
    (file,) = folder.glob("*.safetensors")
    return file


def _point(own: Path, other: Path, shared: set[str]) -> None:
    """Replaces a file by an index that names another one for what both have, and a smaller file with the rest."""
    tensors, place = load_file(own), Path(os.path.relpath(other, own.parent)).as_posix()
    rest_file = own.with_name(f"{own.stem}-rest.safetensors")
    if rest := {name: tensor for name, tensor in tensors.items() if name not in shared}:
        save_file(rest, rest_file, {"format": "pt"})
        rest_file.chmod(0o644)
    places = {name: place if name in shared else rest_file.name for name in sorted(tensors)}
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": places}
    own.with_name(f"{own.name}.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    own.unlink()


def _found(base: Path, common: Path) -> None:
    """Makes the VAE of this base the common one, and notes how it was made."""
    common.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", WEIGHTS):
        shutil.copyfile(base / "vae" / name, common / name)
    record = base / "BUILD.json"
    if record.is_file():
        known = common.parent / record.name
        made = json.loads(known.read_text(encoding="utf-8")) if known.is_file() else {}
        made[common.name] = json.loads(record.read_text(encoding="utf-8"))["vae"]
        known.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other)


def files_of(folder: Path) -> list[Path]:
    """The files with the weights of a part's folder, wherever they are."""
    index = next(folder.glob("*.safetensors.index.json"), None)
    if index is None:
        return [_weights_of(folder)]
    return [folder / str(place) for place in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))]


def weights_in(folder: Path) -> dict[str, Tensor]:
    """The weights of a part's folder, its own and those that others have too."""
    found: dict[str, Tensor] = {}
    for file in files_of(folder):
        found |= load_file(file)
    return found


def digest(base: Path) -> str:
    """SHA-256 of all weights of a base with their names, the same whichever files they are in."""
    found = hashlib.sha256()
    for folder in sorted({path.parent for path in base.glob("*/*.safetensors*")}):
        for name, tensor in sorted(weights_in(folder).items()):
            found.update(f"{folder.name}/{name}".encode() + tensor.numpy().tobytes())
    return found.hexdigest()


def _class_of(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["_class_name"])


def load_vae(folder: Path) -> Any:
    """The VAE in this folder in float32, frozen, with its own configuration and its own or the common weights."""
    made = KINDS[_class_of(folder)]
    vae = made.from_config(made.load_config(folder, local_files_only=True))
    vae.load_state_dict(weights_in(folder))
    return vae.eval().requires_grad_(False)


def load_pipeline(base: Path) -> Any:
    """A stored base as its pipeline, in float32; as its family's model where diffusers has none."""
    kinds: dict[str, Any] = json.loads((base / "model_index.json").read_text(encoding="utf-8"))
    if (name := by_family.CLASSES.get(kinds["_class_name"])) is not None:
        return by_family.FamilyModel.read(name, base)
    shared = {path.parent.name for path in base.glob("*/*.safetensors.index.json")} - {"vae"}
    parts = {name: _part(base / name, *kinds[name]) for name in shared}
    return DiffusionPipeline.from_pretrained(base, vae=load_vae(base / "vae"), **parts, local_files_only=True, dtype=torch.float32)


def _part(folder: Path, library: str, kind: str) -> Any:
    """A part whose weights are in several files, some of them another base's."""
    made = getattr(importlib.import_module(library), kind)
    if library == "transformers":
        config = made.config_class.from_pretrained(folder, local_files_only=True)
        return made.from_pretrained(None, config=config, state_dict=weights_in(folder), dtype=torch.float32)
    part = made.from_config(made.load_config(folder, local_files_only=True))
    part.load_state_dict(weights_in(folder))
    return part.eval()
