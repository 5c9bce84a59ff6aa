"""The second phase of a start: the model is loaded, and what its encoders make of images and texts is cached. Afterwards only what training
needs of them is on the device."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import torch
from torch import nn

from sd_scripts import families
from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.library.core.devices import CPU, META
from sd_scripts.library.core.protocols import Beginning, ModelFamily, NewFamily, Parts
from sd_scripts.library.data.cache import open_caches
from sd_scripts.library.data.pipeline import DataPipeline
from sd_scripts.library.memory import kernels, swapping
from sd_scripts.library.objectives import make as objectives
from sd_scripts.library.render.remembering import with_known_texts
from sd_scripts.runs.resume import Start
from sd_scripts.schema.files import write_atomically

from .editing import check_control_area, check_prompts, encoder_devices
from .prepare import Prepared, Read, begin_loading, loaded, prompts_of
from .trained import dtypes_of_run, is_read_straight, trained_encoders

FEWEST_VALIDATED = 64
"""Samples that a held-out loss is the mean of, at least: of five, each at one noise level, the lowest was that of a checkpoint whose images
were up to 25 points worse than the best one's (tests/bench/picks.py)."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model whose batches are ready; the network that is trained is where it was read to, see trained.is_read_straight."""

    prepared: Prepared
    parts: Parts
    data: DataPipeline
    previewing: ModelFamily
    """The family, with the texts of all previews encoded where that is worth it."""


def load(prepared: Prepared) -> Loaded:
    """Loads everything and fills the caches. Raises OptionError for options that do not fit the model."""
    options, process, family = prepared.options, prepared.process, prepared.family
    late = _is_read_late(prepared)
    parts = networks(prepared, start=prepared.start, tested=prepared.source_sizes, backbone=META if late else CPU)
    kernels.check(options, process.device, parts.backbone)
    swapping.check_number(options.memory.blocks_to_swap, len(blocks_of(parts.backbone)))
    check_prompts(prepared.prompts, family, parts)
    data, previewing = fill(prepared, parts), family
    if process.device.type != "cpu" and data.cached_encoders and prepared.sources is None and process.peers.is_first:
        # While the encoders are where they are fast, and before the network needs the room.
        previewing = with_known_texts(family, parts, prepared.prompts, data.cached_encoders)
    _leave(*(parts.text_encoders[name] for name in data.cached_encoders))
    if late:
        parts = _with_backbone(prepared, parts)
    return Loaded(prepared=prepared, parts=parts, data=data, previewing=previewing)


def _is_read_late(prepared: Prepared) -> bool:
    """Whether the denoising network is read when the encoders have left its device; one that trains on the CPU is in host RAM anyway."""
    read_already = prepared.parts is not None or families.maker_of(prepared.family) is not None
    return prepared.process.device != CPU and not read_already and is_read_straight(prepared.options)


def _with_backbone(found: Read, parts: Parts) -> Parts:
    """The parts with their denoising network, on the device where it trains. It comes now that the encoders have left it."""
    # What does not fit now is what training needs.
    found.process.working("train")
    companions = tuple(name for name in parts.modules() if name != "backbone")
    read = loaded(found.process, found.options, found.family, companions, found.process.device)
    ready = {name: getattr(parts, name) for name in ("vae", "text_encoders", "tokenizers", "processor", "settings")}
    return replace(read, **ready)


def networks(
    found: Read,
    *,
    start: Start | None = None,
    tested: tuple[tuple[int, int], ...] = (),
    without: tuple[str, ...] = (),
    backbone: torch.device = CPU,
) -> Parts:
    """All networks on the CPU, apart from those in `without`, which nobody will run.

    start: where training begins, where that is known; tested: sizes of what evaluations are made of; backbone: where the denoising network
    of a published model is read to.
    """
    maker = families.maker_of(found.family)
    if maker is None:
        return found.parts or loaded(found.process, found.options, found.family, without, backbone)
    options, plan = found.options, found.plan
    sizes = dict.fromkeys((*plan.sizes(), *((spec.width, spec.height) for spec in prompts_of(found))))
    if maker.is_new(options.model):
        begin_loading(found.process, options)
        beginning = Beginning(options.training.seed, tuple(sizes), _files(found, maker, start))
        parts = maker.build(options.model, beginning, CPU, dtypes_of_run(options), without)
    else:
        parts = found.parts or loaded(found.process, options, maker, without)
    held_out = [plan.cut(image, 0).bucket for image in plan.held_out]
    maker.check_sizes(parts, list(dict.fromkeys((*sizes, *held_out, *tested))))
    maker.check_captions(parts, plan.captions())
    factor = maker.latent_factor(parts)
    objectives.check_sides(options.objective, [(height // factor, width // factor) for width, height in (*plan.sizes(), *held_out)])
    return parts


def _files(found: Read, family: NewFamily, start: Start | None) -> dict[str, str]:
    """The text files of a new model: those that the run has kept, or that of the state it begins with; in a first start new ones."""
    texts: dict[str, str] = {}
    run, peers = found.process.run, found.process.peers
    if peers.is_first:
        folders = [run.path] if run is not None else []
        folders += [start.state.parent.parent] if start is not None and start.state is not None else []
        kept = next((folder for folder in folders if all((folder / name).is_file() for name in family.file_names)), None)
        if kept is None:
            texts = family.files(found.options.model, found.plan.captions())
        else:
            texts = {name: (kept / name).read_text(encoding="utf-8") for name in family.file_names}
        if run is not None and kept != run.path:
            for name, text in texts.items():
                write_atomically(run.path / name, text)
    told: dict[str, str] = json.loads(peers.same_text(json.dumps(texts)))
    return told


def fill(found: Read, parts: Parts) -> DataPipeline:
    """Brings the encoders to their devices, and the caches to what this run needs.

    Text encoders come when the VAE has made all latents and is gone: the two need not fit on the device together.
    """
    options, process = found.options, found.process
    check_control_area(found.family, options.model, parts)
    process.working("cache")
    process.phases.enter("cache")
    data = DataPipeline(
        options.dataset,
        found.family,
        found.plan,
        open_caches(options.dataset, found.cache_folder),
        options.training.seed,
        num_steps=found.total_steps,
        trained_encoders=trained_encoders(options, parts),
        empty_text=options.objective.wants_empty_text,
        validation_samples=max(FEWEST_VALIDATED, options.objective.num_anchors),
        rank=process.accelerator.process_index,
        world=process.accelerator.num_processes,
        barrier=process.peers.barrier,
        warn=process.warn,
    )
    process.resources.callback(data.close)
    vae_device, text_encoder_device = encoder_devices(options.model, process.device)
    parts.vae.to(vae_device)

    def before_texts() -> None:
        if options.dataset.cache_latents:
            _leave(parts.vae)
        for encoder in parts.text_encoders.values():
            encoder.to(text_encoder_device)

    data.prepare(parts, process.cached, before_texts)
    return data


def _leave(*networks: nn.Module) -> None:
    """Networks that are needed no more leave the device, and their memory with them."""
    for network in networks:
        network.to(CPU)
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
