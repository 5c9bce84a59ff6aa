"""One VAE file for several bases: the others name it in the index of their weights, where a model in parts lists its files.

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
from safetensors.torch import load_file

WEIGHTS = "diffusion_pytorch_model.safetensors"
INDEX = f"{WEIGHTS}.index.json"

COMMON = "common"
"""The folder beside the bases with what several of them use."""

KINDS: dict[str, Any] = {"vae": AutoencoderKL, "qwen_vae": AutoencoderKLQwenImage, "flux2_vae": AutoencoderKLFlux2}
"""Folder in it -> the VAE that it holds."""


def share(base: Path, found: bool = False) -> None:
    """Replaces the VAE weights of a base by an index that names the common ones beside it, if there are such and they are equal.

    found: where there are none, those of this base become the common ones.
    """
    own = base / "vae"
    if not (own / WEIGHTS).is_file():
        return
    common = base.parent / COMMON / _kind_of(own)
    if not (common / WEIGHTS).is_file():
        if not found:
            return
        common.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", WEIGHTS):
            shutil.copyfile(own / name, common / name)
        record = base / "BUILD.json"
        if record.is_file():
            known = common.parent / record.name
            made = json.loads(known.read_text(encoding="utf-8")) if known.is_file() else {}
            made[common.name] = json.loads(record.read_text(encoding="utf-8"))["vae"]
            known.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    if (own / WEIGHTS).read_bytes() != (common / WEIGHTS).read_bytes():
        return
    place = Path(os.path.relpath(common / WEIGHTS, own)).as_posix()
    tensors = load_file(own / WEIGHTS)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict.fromkeys(sorted(tensors), place)}
    (own / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (own / WEIGHTS).unlink()


def weights_of(folder: Path) -> Path:
    """The file with the weights of a VAE's folder, wherever it is."""
    index = folder / INDEX
    if not index.is_file():
        return folder / WEIGHTS
    (place,) = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return folder / str(place)


def _kind_of(folder: Path) -> str:
    name = json.loads((folder / "config.json").read_text(encoding="utf-8"))["_class_name"]
    return next(kind for kind, made in KINDS.items() if made.__name__ == name)


def load_vae(folder: Path) -> Any:
    """The VAE in this folder in float32, frozen, with its own configuration and its own or the common weights."""
    made = KINDS[_kind_of(folder)]
    vae = made.from_config(made.load_config(folder, local_files_only=True))
    vae.load_state_dict(load_file(weights_of(folder)))
    return vae.eval().requires_grad_(False)


def load_pipeline(base: Path) -> DiffusionPipeline:
    """A stored base that draws images from captions, in float32."""
    return DiffusionPipeline.from_pretrained(base, vae=load_vae(base / "vae"), local_files_only=True, dtype=torch.float32)
