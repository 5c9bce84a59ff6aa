"""One VAE file for several bases: the others name it in the index of their weights, where a model in parts lists its files.

A VAE of FLUX.2's kind that is the common one with statistics of its latents keeps those alone beside that index.

The trainers read such an index; diffusers alone refuses one that names another folder, so a pipeline is loaded here.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, AutoencoderKLFlux2, AutoencoderKLQwenImage, DiffusionPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
REST = "diffusion_pytorch_model-rest.safetensors"
"""What a base has besides the common weights."""

COMMON = "common"
"""The folder beside the bases with what several of them use."""

KINDS: dict[str, Any] = {
    "AutoencoderKL": AutoencoderKL,
    "AutoencoderKLQwenImage": AutoencoderKLQwenImage,
    "AutoencoderKLFlux2": AutoencoderKLFlux2,
}
_FOLDERS = {"AutoencoderKL": "vae", "AutoencoderKLQwenImage": "qwen_vae", "AutoencoderKLFlux2": "vae"}
"""Class of a VAE -> folder in COMMON with its weights, or with most of them."""


def share(base: Path, found: bool = False) -> None:
    """Replaces the VAE weights of a base by an index that names the common ones beside it, if there are such and it has all of them.

    found: where there are none, those of this base become the common ones.
    """
    own = base / "vae"
    if not (own / WEIGHTS).is_file():
        return
    common = base.parent / COMMON / _FOLDERS[_class_of(own)]
    if not (common / WEIGHTS).is_file():
        if not found:
            return
        _found(base, common)
    tensors, shared = load_file(own / WEIGHTS), load_file(common / WEIGHTS)
    if not all(name in tensors and _same(tensors[name], tensor) for name, tensor in shared.items()):
        return
    place = Path(os.path.relpath(common / WEIGHTS, own)).as_posix()
    if rest := {name: tensor for name, tensor in tensors.items() if name not in shared}:
        save_file(rest, own / REST, {"format": "pt"})
        (own / REST).chmod(0o644)
    places = {name: place if name in shared else REST for name in sorted(tensors)}
    index = {"metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())}, "weight_map": places}
    (own / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (own / WEIGHTS).unlink()


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
    """The files with the weights of a VAE's folder, wherever they are."""
    index = folder / INDEX
    if not index.is_file():
        return [folder / WEIGHTS]
    return [folder / str(place) for place in sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))]


def weights_in(folder: Path) -> dict[str, Tensor]:
    """The weights of a VAE's folder, its own and the common ones."""
    found: dict[str, Tensor] = {}
    for file in files_of(folder):
        found |= load_file(file)
    return found


def _class_of(folder: Path) -> str:
    return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["_class_name"])


def load_vae(folder: Path) -> Any:
    """The VAE in this folder in float32, frozen, with its own configuration and its own or the common weights."""
    made = KINDS[_class_of(folder)]
    vae = made.from_config(made.load_config(folder, local_files_only=True))
    vae.load_state_dict(weights_in(folder))
    return vae.eval().requires_grad_(False)


def load_pipeline(base: Path) -> DiffusionPipeline:
    """A stored base that draws images from captions, in float32."""
    return DiffusionPipeline.from_pretrained(base, vae=load_vae(base / "vae"), local_files_only=True, dtype=torch.float32)
