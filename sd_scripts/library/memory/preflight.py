"""Trying what takes most memory before the first step, so that a run that does not fit says so at once. Leaves no trace in the numbers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch

from sd_scripts.library.core.errors import OutOfMemory
from sd_scripts.library.core.protocols import Batch
from sd_scripts.library.parallel.sharding import own
from sd_scripts.library.train.meter import largest, peak_gib
from sd_scripts.library.train.optim import STATE_BYTES
from sd_scripts.library.train.trainer import Trainer
from sd_scripts.runs.events import PreflightDone
from sd_scripts.schema.memory import MemoryOptions

from .oom_advice import Work, is_out_of_memory

log = logging.getLogger("sd_scripts")


class HeaviestBatches(Protocol):
    """Batches of the run; see data.pipeline."""

    def heaviest(self) -> tuple[Batch, str]: ...


def is_wanted(options: MemoryOptions, device: torch.device) -> bool:
    """Whether a run has a preflight on this device."""
    return options.preflight == "on" or (options.preflight == "auto" and device.type == "cuda")


def run(trainer: Trainer, data: HeaviestBatches, working: Callable[[Work], None]) -> None:
    """Does the heaviest batch of the run forward and backward, and its heaviest previews, and throws the results away.

    All processes call it together. working is told what is being tried. Raises OutOfMemory, naming what did not fit; where the trainer has
    an OOM fallback, its memory options are turned on first.
    """
    start = time.perf_counter()
    trainer.process.phases.enter("preflight")
    device = trainer.process.device
    working("train")
    batch, what = data.heaviest()
    _try_out(trainer, batch, what)
    _release(device)
    working("sample")
    previews = _try_out_samples(trainer)
    working("train")
    _release(device)
    trainer.process.peers.barrier()
    with trainer.process.peers.exchanging():
        peak = largest(peak_gib(device), trainer.process.accelerator)
    if trainer.process.is_main:
        seconds, said = time.perf_counter() - start, f"{what}; {previews}" if previews else what
        trainer.run.log(PreflightDone(seconds=round(seconds, 3), peak_gib=round(peak, 3), what=said))
        log.info("preflight of %s: at most %.2f GiB, %.1f s", said, peak, seconds)


def state_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Bytes that the optimizer will remember on the device beside what it does already."""
    each = STATE_BYTES.get(type(optimizer).__name__, STATE_BYTES["AdamW"])
    if isinstance(optimizer, torch.optim.SGD):
        each = 4 if optimizer.defaults["momentum"] else 0
    weights = [own(weight) for group in optimizer.param_groups for weight in group["params"] if not optimizer.state.get(weight)]
    return int(each * sum(weight.numel() for weight in weights if weight.device.type == device.type))


def _try_out(trainer: Trainer, batch: Batch, what: str) -> None:
    while True:
        try:
            _beside_state(trainer, batch)
            return
        except (RuntimeError, MemoryError) as err:
            if not is_out_of_memory(err):
                raise
            # Its frames keep the graph.
            failed = err.with_traceback(None)
        if trainer.steps.fallback is None or not trainer.steps.fallback.turn_on_next("preflight"):
            raise OutOfMemory(_sentence(what)) from failed


def _beside_state(trainer: Trainer, batch: Batch) -> None:
    """Tries a batch while as much memory is held as the optimizer will need from its first step on."""
    device = trainer.process.device
    state = torch.empty(state_bytes(trainer.learner.optimizer, device), dtype=torch.uint8, device=device)
    trainer.steps.try_out(batch)
    del state


def _try_out_samples(trainer: Trainer) -> str:
    try:
        return trainer.try_out_samples()
    # What else a sampler or a decoder can raise is said when the previews are due, and ends no run then either.
    except Exception as err:
        if is_out_of_memory(err):
            raise OutOfMemory(_sentence("the largest previews")) from err
        log.debug("the previews could not be tried", exc_info=err)
        return ""


def _sentence(what: str) -> str:
    return f"{what} of this run: the device has no memory for that, which was tried before the first step (preflight)"


def _release(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
