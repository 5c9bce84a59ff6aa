"""One VAE file for several bases: the others name it in the index of their weights, where a model in parts lists its files.

The trainers read such an index; diffusers alone refuses one that names another folder, so a pipeline is loaded here.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DiffusionPipeline
from safetensors.torch import load_file

WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"

OWNER = "sdxl"
"""The base whose VAE file the others use when theirs is the same."""


def share(base: Path) -> None:
    """Replaces the VAE weights of a base by an index that names those of the owner beside it, if there are such and they are equal."""
    own, shared = base / "vae" / WEIGHTS, base.parent / OWNER / "vae" / WEIGHTS
    if base.name == OWNER or not own.is_file() or not shared.is_file() or own.read_bytes() != shared.read_bytes():
        return
    place = Path(os.path.relpath(shared, own.parent)).as_posix()
    tensors = load_file(own)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(tensors), place)}
    (base / "vae" / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    own.unlink()


def weights_of(folder: Path) -> Path:
    """The file with the weights of a VAE's folder, wherever it is."""
    index = folder / INDEX
    if not index.is_file():
        return folder / WEIGHTS
    (place,) = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return folder / str(place)


def users_of(base: Path) -> list[str]:
    """The bases beside this one that use its VAE file."""
    file = base / "vae" / WEIGHTS
    return sorted(
        index.parents[1].name
        for index in base.parent.glob(f"*/vae/{INDEX}")
        if weights_of(index.parent).resolve() == file.resolve() and index.parents[1] != base
    )


def load_vae(folder: Path) -> AutoencoderKL:
    """The VAE in this folder in float32, frozen, with its own configuration and its own or another base's weights."""
    vae: AutoencoderKL = AutoencoderKL.from_config(AutoencoderKL.load_config(folder, local_files_only=True))
    vae.load_state_dict(load_file(weights_of(folder)))
    return vae.eval().requires_grad_(False)


def load_pipeline(base: Path) -> DiffusionPipeline:
    """A stored base that draws pictures from captions, in float32."""
    return DiffusionPipeline.from_pretrained(base, vae=load_vae(base / "vae"), local_files_only=True, dtype=torch.float32)
