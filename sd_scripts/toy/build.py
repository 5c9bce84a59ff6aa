"""Build a toy base from nothing: `python -m sd_scripts.toy.build sdxl`. Owns the base folders and their record.

A base is a diffusers pipeline folder in fp16, with BUILD.json beside model_index.json saying how it was made. The VAE's file is
shared where it is the same, see sharing.py.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from . import edits, measure, worlds

if TYPE_CHECKING:
    from diffusers import AutoencoderKL, AutoencoderKLQwenImage, AutoencoderKLQwenImage21, DiffusionPipeline, ZImagePipeline

    from .pretraining import BaseSettings

    Vae: TypeAlias = AutoencoderKL | AutoencoderKLQwenImage | AutoencoderKLQwenImage21

Changes = dict[str, int]
"""Settings by name that differ from the family's own."""

SettingsT = TypeVar("SettingsT", bound="BaseSettings")
VaeT = TypeVar("VaeT", bound="Vae")

logger = logging.getLogger(__name__)

BASES = Path(__file__).parent / "bases"
"""Where built bases lie, one folder per family."""

MAX_BYTES = 11_000_000
"""Largest base folder that is accepted."""

CONTINUES = {"kontext": "flux"}
"""A family whose base continues the stored one of another, and shares with it what it left as it was."""

SIDE = 64
"""Side in pixels of a square image of the world. Editing pipelines work at 1024 unless model_index.json says otherwise."""

_RECORDED_LIBRARIES = ("torch", "diffusers", "transformers", "tokenizers", "numpy", "pillow")


@dataclass(frozen=True)
class Built:
    """A trained pipeline in float32 and the settings it was trained with."""

    pipeline: DiffusionPipeline
    settings: dict[str, float]
    teacher: ZImagePipeline | None = None
    """What the pipeline was distilled from."""


def _build_sd(vae: AutoencoderKL, seed: int, changes: Changes, saved: Path) -> Built:
    from . import sd

    return _built(sd.train_sd, vae, sd.SdSettings(), seed, changes, saved)


def _build_sdxl(vae: AutoencoderKL, seed: int, changes: Changes, saved: Path) -> Built:
    from . import sdxl

    return _built(sdxl.train_sdxl, vae, sdxl.SdxlSettings(), seed, changes, saved)


def _build_flux(vae: AutoencoderKL, seed: int, changes: Changes, saved: Path) -> Built:
    from . import flux

    return _built(flux.train_flux, vae, flux.SETTINGS, seed, changes, saved)


def _build_flux2(vae: AutoencoderKL, seed: int, changes: Changes, saved: Path) -> Built:
    from . import flux2, reading

    return _built(flux2.train_flux2, vae, reading.FlowSettings(), seed, changes, saved)


def _build_chroma(vae: AutoencoderKL, seed: int, changes: Changes, saved: Path) -> Built:
    from . import chroma

    return _built(chroma.train_chroma, vae, chroma.SETTINGS, seed, changes, saved)


def _build_krea2(vae: AutoencoderKLQwenImage, seed: int, changes: Changes, saved: Path) -> Built:
    from . import krea2, reading

    return _built(krea2.train_krea2, vae, reading.FlowSettings(), seed, changes, saved)


def _build_anima(vae: AutoencoderKLQwenImage, seed: int, changes: Changes, saved: Path) -> Built:
    from . import anima

    return _built(anima.train_anima, vae, anima.SETTINGS, seed, changes, saved)


def _build_flux3(vae: AutoencoderKL, seed: int, changes: Changes, saved: Path) -> Built:
    from . import flux3

    return _built(flux3.train_flux3, vae, flux3.SETTINGS, seed, changes, saved)


def _build_zimage(vae: AutoencoderKL, seed: int, changes: Changes, saved: Path) -> Built:
    from . import zimage

    settings = replace(zimage.ZImageSettings(), **changes)
    teacher = zimage.train_teacher(vae, settings, seed, saved)
    student = zimage.distil(teacher, settings, seed)
    return Built(zimage.as_pipeline(student, vae), asdict(settings), zimage.as_pipeline(teacher, vae))


def _build_qwen_edit(vae: AutoencoderKLQwenImage, seed: int, changes: Changes, saved: Path) -> Built:
    from . import qwen_edit

    return _built(qwen_edit.train_qwen_edit, vae, qwen_edit.QwenEditSettings(), seed, changes, saved)


def _build_kontext(vae: AutoencoderKL, seed: int, changes: Changes, saved: Path) -> Built:
    from . import kontext

    return _built(kontext.train_kontext, vae, kontext.KontextSettings(), seed, changes, saved)


def _build_qwen_image21(vae: AutoencoderKLQwenImage21, seed: int, changes: Changes, saved: Path) -> Built:
    from . import qwen_image21

    return _built(qwen_image21.train_qwen_image21, vae, qwen_image21.QwenImage21Settings(), seed, changes, saved)


def _built(
    train: Callable[[VaeT, SettingsT, int, Path], DiffusionPipeline],
    vae: VaeT,
    settings: SettingsT,
    seed: int,
    changes: Changes,
    saved: Path,
) -> Built:
    settings = replace(settings, **changes)
    return Built(train(vae, settings, seed, saved), asdict(settings))


FAMILIES: dict[str, Callable[[Any, int, Changes, Path], Built]] = {
    "sd": _build_sd,
    "sdxl": _build_sdxl,
    "flux": _build_flux,
    "flux2": _build_flux2,
    "chroma": _build_chroma,
    "krea2": _build_krea2,
    "anima": _build_anima,
    "flux3": _build_flux3,
    "zimage": _build_zimage,
}
"""Family -> (vae, seed, changes, state of the training) -> trained pipeline. These draw images from captions."""

EDITING: dict[str, Callable[[Any, int, Changes, Path], Built]] = {
    "kontext": _build_kontext,
    "qwen_edit": _build_qwen_edit,
    "qwen_image21": _build_qwen_image21,
}
"""The same of those that edit images: these are scored by how they do."""

DRAWING_TOO = "qwen_image21"
"""The one of them that draws from captions as well, and is scored by both."""

QWEN_VAE = ("anima", "krea2", "qwen_edit")
"""Families with Qwen-Image's kind of VAE; the others begin from the common one of SD's kind."""


@dataclass(frozen=True)
class BuildPlan:
    """What to build. Steps of None are the settings' own."""

    family: str
    out: Path
    """Folder of the base; what was there is replaced once the new one is complete."""
    seed: int = 0
    num_steps: int | None = None
    num_distilled_steps: int | None = None
    """Steps of the distillation, for the family that has one."""
    vae: Path | None = None
    """Folder of a trained toy VAE to use; None trains one."""
    num_vae_steps: int | None = None
    num_images: int | None = None
    """Images to train on, pairs for the editing base; None is the settings' own number."""
    num_prompts: int = 200
    """Prompts of each kind that the base is scored with."""


def build(plan: BuildPlan) -> dict[str, object]:
    """Trains and stores a base, and returns what its BUILD.json says.

    A training that was stopped goes on from the state beside the folder. Raises ValueError when the folder would be larger than MAX_BYTES;
    the old base then stays.
    """
    from . import pretraining, sharing

    vae, vae_record = _get_vae(plan)
    saved = plan.out.with_name(f".{plan.out.name}.training.safetensors")
    started = time.process_time() - sum(pretraining.spent(state) for state in saved.parent.glob(f"{saved.name}*"))
    train = (FAMILIES | EDITING)[plan.family]
    asked = {"num_steps": plan.num_steps, "num_distilled_steps": plan.num_distilled_steps, "num_images": plan.num_images}
    built = train(vae, plan.seed, {name: value for name, value in asked.items() if value is not None}, saved)
    record: dict[str, object] = {
        "family": plan.family,
        "seed": plan.seed,
        "settings": built.settings,
        "cpu_seconds": round(time.process_time() - started),
        "vae": vae_record,
        "libraries": versions(),
        "python": platform.python_version(),
    }
    if built.teacher is not None:
        record["teacher_scores"] = _teacher_scores(built.teacher, plan)
    plan.out.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(mkdtemp(prefix=f".{plan.out.name}.", dir=plan.out.parent))
    try:
        new = aside / "new"
        _store(built.pipeline, new)
        if plan.family == "qwen_edit":
            _as_published(new)
        record |= _scored(new, plan.family, plan.num_prompts)
        write_json(new / "BUILD.json", record)
        num_bytes = sum(path.stat().st_size for path in new.rglob("*") if path.is_file())
        if num_bytes > MAX_BYTES:
            raise ValueError(f"the base has {num_bytes / 1e6:.1f} MB; at most {MAX_BYTES / 1e6:.0f} MB are accepted")
        if plan.out.exists():
            plan.out.rename(aside / "old")
        new.rename(plan.out)
        sharing.share(plan.out, plan.out.parent == BASES, CONTINUES.get(plan.family))
        for state in saved.parent.glob(f"{saved.name}*"):
            state.unlink()
    finally:
        shutil.rmtree(aside)
    return record


def score_again(folder: Path, num_prompts: int) -> None:
    """Measures a stored base anew, with the world's reader and the drawing of today, and puts it into its BUILD.json."""
    path = folder / "BUILD.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    record |= _scored(folder, str(record["family"]), num_prompts)
    aside = path.with_name(".BUILD.json.new")
    write_json(aside, record)
    aside.replace(path)


def existing_vae(family: str) -> Path | None:
    """The VAE that stored bases share, of the kind that this family begins from; None when there is none."""
    folder = BASES / family / "vae" if family == "qwen_image21" else BASES / "common" / ("qwen_vae" if family in QWEN_VAE else "vae")
    return folder if (folder / "config.json").exists() else None


def _get_vae(plan: BuildPlan) -> tuple[Vae, dict[str, object]]:
    from . import autoencoder, qwen21_vae, qwen_vae, sharing

    if plan.vae is not None:
        logger.info("using the VAE in %s", plan.vae)
        record = json.loads((plan.vae.parent / "BUILD.json").read_text(encoding="utf-8"))
        return sharing.load_vae(plan.vae), record[plan.vae.name]
    started = time.process_time()
    own: Any = autoencoder
    settings = autoencoder.VaeSettings()
    if plan.family == "qwen_image21":
        own, settings = qwen21_vae, qwen21_vae.Qwen21VaeSettings()
    elif plan.family in QWEN_VAE:
        own, settings = qwen_vae, qwen_vae.QwenVaeSettings()
    if plan.num_vae_steps is not None:
        decoder_steps = min(settings.num_decoder_steps, plan.num_vae_steps)
        settings = replace(settings, num_steps=plan.num_vae_steps, num_decoder_steps=decoder_steps)
    vae = own.train_vae(settings, plan.seed)
    cpu_seconds = round(time.process_time() - started)
    return vae, {"seed": plan.seed, "settings": asdict(settings), "cpu_seconds": cpu_seconds}


def _store(pipeline: DiffusionPipeline, folder: Path) -> None:
    import torch

    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            # torch's own half: the libraries' say that it is inconsistent, naming no module that is.
            torch.nn.Module.half(part)
    pipeline.save_pretrained(folder, safe_serialization=True)
    template = folder / "tokenizer" / "chat_template.jinja"
    if template.exists():
        # Inside the tokenizer's configuration, where published models have it and older versions look.
        pipeline.tokenizer.save_pretrained(template.parent, save_jinja_files=False)
        template.unlink()
    settle(folder)


def settle(folder: Path) -> None:
    """Takes this machine's paths, and spaces, out of files that diffusers wrote, lets all read them, and returns when the disk has them."""
    for path in folder.rglob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "_name_or_path" in content:
            # Otherwise the builder's folder would travel with the base.
            content["_name_or_path"] = ""
            write_json(path, content)
        elif path.name == "tokenizer.json":
            # In one line, half as large.
            path.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(0o644)  # safetensors leaves its files to their owner alone
            _sync(path)


def _as_published(folder: Path) -> None:
    # The editing base as its originals are published: transformers' processor class by name, its settings in the older layout, which
    # every version reads; beside them, the side of its images.
    index, processor = folder / "model_index.json", folder / "processor"
    changed = {"processor": ["transformers", "Qwen2VLProcessor"], "_default_side": SIDE}
    write_json(index, json.loads(index.read_text(encoding="utf-8")) | changed)
    combined = processor / "processor_config.json"
    images = json.loads(combined.read_text(encoding="utf-8"))["image_processor"]
    write_json(processor / "preprocessor_config.json", images | {"processor_class": "Qwen2VLProcessor"})
    combined.unlink()
    words = processor / "tokenizer_config.json"
    write_json(words, json.loads(words.read_text(encoding="utf-8")) | {"processor_class": "Qwen2VLProcessor"})


def versions() -> dict[str, str]:
    """Of the libraries that what is built depends on."""
    return {name: version(name).split("+")[0] for name in _RECORDED_LIBRARIES}


def write_json(path: Path, content: dict[str, object]) -> None:
    """Writes a file, and returns when the disk has it."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def score_base(folder: Path, family: str, num: int) -> dict[str, object]:
    """How well a stored base obeys, over num prompts of each kind at all sizes; star, and teal where it is new, should be near 0."""
    from .render import render_with
    from .sharing import load_pipeline

    kinds: list[measure.Kind] = ["old", "held_out", "star"]
    if not set(worlds.NEW_COLORS) <= set(worlds.colors_of(family)):
        kinds.append("teal")
    return scores_of(render_with(load_pipeline(folder)), family, kinds, num)


def scores_of(render: measure.Render, family: str, kinds: Sequence[measure.Kind], num: int) -> dict[str, object]:
    """How well what is behind render obeys num prompts of each of these kinds."""
    colors = worlds.colors_of(family)
    sizes = worlds.sizes_of(family)
    scores = {kind: measure.obedience(render, measure.prompts(kind, num, 1, colors), sizes) for kind in kinds}
    for kind, result in scores.items():
        logger.info("%s: %s", kind, result)
    return {kind: asdict(result) for kind, result in scores.items()}


def _teacher_scores(teacher: ZImagePipeline, plan: BuildPlan) -> dict[str, object]:
    from .render import render_with

    ways = {"8 steps, no guidance": (8, 0.0), "32 steps, guidance 1": (32, 1.0)}
    return {
        name: scores_of(render_with(teacher, num_steps, guidance), plan.family, ("old", "held_out"), plan.num_prompts)
        for name, (num_steps, guidance) in ways.items()
    }


def score_editing_base(folder: Path, family: str, num: int) -> dict[str, object]:
    """How well a stored editing base obeys, over num edits of each kind at all sizes, half of them held out; border should be near 0."""
    render, sizes = _render_edits(folder, family), worlds.sizes_of(family)
    scores: dict[str, object] = {}
    for kind in edits.KINDS:
        held = num // 2
        trained = measure.edit_obedience(render, measure.edit_tasks(kind, num - held, 1, sizes=sizes))
        unseen = measure.edit_obedience(render, measure.edit_tasks(kind, held, 1, held_out=True, sizes=sizes))
        obeyed = (trained * (num - held) + unseen * held) / num
        scores[kind] = {"num": num, "obeyed": round(obeyed, 4), "trained": round(trained, 4), "held_out": round(unseen, 4)}
        logger.info("%s: %s", kind, scores[kind])
    return scores


def _render_edits(folder: Path, family: str) -> measure.EditRender:
    from . import kontext, qwen_edit, render, sharing

    if family == "qwen_edit":
        return qwen_edit.render_with(*qwen_edit.load(folder))
    loaded = sharing.load_pipeline(folder)
    return render.edit_with(loaded) if family == DRAWING_TOO else kontext.render_with(loaded)


def _scored(folder: Path, family: str, num: int) -> dict[str, object]:
    """What a record says of how well a base does, and of which weights that is said."""
    from . import sharing

    drawing = score_base(folder, family, num) if family not in EDITING or family == DRAWING_TOO else {}
    scores = drawing | (score_editing_base(folder, family, num) if family in EDITING else {})
    return {"scores": scores, "scored_weights": sharing.digest(folder)}


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m sd_scripts.toy.build", description="Build a toy base from nothing.")
    parser.add_argument("family", choices=sorted(FAMILIES | EDITING))
    parser.add_argument("--out", type=Path, help="folder of the base; default: the family's place in sd_scripts/toy/bases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_steps", type=int, help="training steps of the base; default: the family's own number")
    parser.add_argument("--num_distilled_steps", type=int, help="steps of the distillation; default: the family's own number")
    parser.add_argument("--vae", type=Path, help="folder of a trained toy VAE; default: that of a base already built")
    parser.add_argument("--train_vae", action="store_true", help="train a new VAE in any case")
    parser.add_argument("--num_vae_steps", type=int, help="training steps of a new VAE")
    parser.add_argument("--num_prompts", type=int, default=200, help="prompts of each kind to score the base with")
    parser.add_argument("--score_only", action="store_true", help="build nothing; measure the stored base again")
    parser.add_argument("--num_threads", type=int, default=1, help="CPU threads; other numbers change the last bits")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the libraries are imported, so before
    import torch

    torch.set_num_threads(options.num_threads)
    out = options.out or BASES / options.family
    if options.score_only:
        score_again(out, options.num_prompts)
        return
    plan = BuildPlan(
        family=options.family,
        out=out,
        seed=options.seed,
        num_steps=options.num_steps,
        num_distilled_steps=options.num_distilled_steps,
        vae=None if options.train_vae else options.vae or existing_vae(options.family),
        num_vae_steps=options.num_vae_steps,
        num_prompts=options.num_prompts,
    )
    record = build(plan)
    logger.info("%s is in %s after %s CPU seconds", plan.family, plan.out, record["cpu_seconds"])


if __name__ == "__main__":
    main()
