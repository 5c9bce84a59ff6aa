"""Build a toy base from nothing: `python -m sd_scripts.toy.build sdxl`. Owns the base folders and their record.

A base is an ordinary diffusers pipeline folder in fp16, with BUILD.json beside model_index.json saying how it was made.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING

from sd_scripts.toy import measure, worlds

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, DiffusionPipeline

logger = logging.getLogger(__name__)

BASES = Path(__file__).parent / "bases"
"""Where built bases lie, one folder per family."""

MAX_BYTES = 11_000_000
"""Largest base folder that is accepted."""

_RECORDED_LIBRARIES = ("torch", "diffusers", "transformers", "tokenizers", "numpy", "pillow")


@dataclass(frozen=True)
class Built:
    """A trained pipeline in float32 and the settings it was trained with."""

    pipeline: DiffusionPipeline
    settings: dict[str, float]


def _build_sdxl(vae: AutoencoderKL, seed: int, num_steps: int | None) -> Built:
    from sd_scripts.toy import sdxl

    settings = sdxl.SdxlSettings()
    if num_steps is not None:
        settings = replace(settings, num_steps=num_steps)
    return Built(sdxl.train_sdxl(vae, settings, seed), asdict(settings))


FAMILIES: dict[str, Callable[[AutoencoderKL, int, int | None], Built]] = {"sdxl": _build_sdxl}
"""Family -> (vae, seed, steps or None for the family's own number) -> trained pipeline."""


def build(
    family: str,
    out: Path,
    seed: int,
    num_steps: int | None = None,
    vae_dir: Path | None = None,
    num_vae_steps: int | None = None,
) -> dict[str, object]:
    """Trains a base, stores it as folder out in place of what was there, and returns what BUILD.json says.

    vae_dir is a trained toy VAE to use; None trains one. Steps of None are the settings' own.
    """
    started = time.process_time()
    vae, vae_record = _get_vae(vae_dir, seed, num_vae_steps)
    vae_seconds = time.process_time() - started
    built = FAMILIES[family](vae, seed, num_steps)
    seconds = time.process_time() - started - vae_seconds
    record: dict[str, object] = {
        "family": family,
        "seed": seed,
        "vae": vae_record,
        "vae_cpu_seconds": round(vae_seconds),
        "settings": built.settings,
        "cpu_seconds": round(seconds),
        "libraries": {name: version(name).split("+")[0] for name in _RECORDED_LIBRARIES},
        "python": platform.python_version(),
    }
    aside = _store(built.pipeline, out)
    try:
        record["scores"] = score_base(aside / "new")
        _write_json(aside / "new" / "BUILD.json", record)
        num_bytes = sum(path.stat().st_size for path in (aside / "new").rglob("*") if path.is_file())
        if num_bytes > MAX_BYTES:
            raise ValueError(f"the base has {num_bytes / 1e6:.1f} MB; at most {MAX_BYTES / 1e6:.0f} MB are accepted")
        if out.exists():
            out.rename(aside / "old")
        (aside / "new").rename(out)
    finally:
        shutil.rmtree(aside)
    return record


def _get_vae(vae_dir: Path | None, seed: int, num_steps: int | None) -> tuple[AutoencoderKL, dict[str, object]]:
    import torch
    from diffusers import AutoencoderKL

    from sd_scripts.toy import autoencoder

    if vae_dir is not None:
        logger.info("using the VAE in %s", vae_dir)
        record_path = vae_dir.parent / "BUILD.json"
        record = json.loads(record_path.read_text())["vae"] if record_path.exists() else {"settings": None}
        vae = AutoencoderKL.from_pretrained(vae_dir, local_files_only=True, torch_dtype=torch.float32)
        return vae.eval().requires_grad_(False), record
    settings = autoencoder.VaeSettings()
    if num_steps is not None:
        settings = replace(settings, num_steps=num_steps)
    started = time.process_time()
    vae = autoencoder.train_vae(settings, seed)
    return vae, {"seed": seed, "settings": asdict(settings), "cpu_seconds": round(time.process_time() - started)}


def _store(pipeline: DiffusionPipeline, out: Path) -> Path:
    # Writes the pipeline in fp16 to <folder>/new, where <folder> is returned and lies beside out.
    import torch

    out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    pipeline.to(torch.float16).save_pretrained(aside / "new", safe_serialization=True)
    for path in (aside / "new").rglob("*.json"):
        content = json.loads(path.read_text())
        if "_name_or_path" in content:
            # Otherwise the builder's folder would travel with the base.
            content["_name_or_path"] = ""
            _write_json(path, content)
    for path in (aside / "new").rglob("*"):
        if path.is_file():
            _sync(path)
    return aside


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def score_base(folder: Path, num: int = 200, seed: int = 1) -> dict[str, object]:
    """How well a stored base obeys, over num prompts of each kind at all sizes; star should be near 0."""
    import torch
    from diffusers import DiffusionPipeline

    from sd_scripts.toy.render import render_with

    pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True, torch_dtype=torch.float32)
    render = render_with(pipeline)
    scores = {kind: measure.obedience(render, measure.prompts(kind, num, seed)) for kind in ("old", "held_out", "star")}
    for kind, result in scores.items():
        logger.info("%s: %s", kind, result)
    return {kind: asdict(result) for kind, result in scores.items()}


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m sd_scripts.toy.build", description="Build a toy base from nothing.")
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("--out", type=Path, help="folder of the base; default: the family's place in sd_scripts/toy/bases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vae", type=Path, help="folder of a trained toy VAE; default: train one")
    parser.add_argument("--num_steps", type=int, help="training steps of the base; default: the family's own number")
    parser.add_argument("--num_vae_steps", type=int, help="training steps of the VAE")
    parser.add_argument("--num_threads", type=int, default=1, help="CPU threads; other numbers change the last bits")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported, so before
    import torch

    torch.set_num_threads(options.num_threads)
    out = options.out or BASES / options.family
    record = build(options.family, out, options.seed, options.num_steps, options.vae, options.num_vae_steps)
    logger.info("%s is in %s after %s CPU seconds", options.family, out, record["cpu_seconds"])


if __name__ == "__main__":
    main()
