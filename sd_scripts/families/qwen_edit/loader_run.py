"""Training of QwenImageEditTrainer on batches of a loader that is not ours: its loop, and the folder and states of its runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sd_scripts.dataset.plan import cache_folder
from sd_scripts.dataset.progress import Bars
from sd_scripts.library.core.errors import TrainingError
from sd_scripts.library.core.rng import seed_for
from sd_scripts.library.train.checkpoint import Checkpointer, Identity, read_state, remove_leftovers
from sd_scripts.library.train.environment import start_trackers, with_precision
from sd_scripts.library.train.model_files import model_files
from sd_scripts.library.train.optim import restore
from sd_scripts.library.train.run_meta import write_meta
from sd_scripts.programs.qwen_image_finetune.configuration import NO_IMAGES
from sd_scripts.runs import resume
from sd_scripts.runs.events import FileSaved, RunFailed, RunFinished, RunStarted, RunStopped, StepDone, Warned
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.runs.stopping import StopRequest
from sd_scripts.schema.errors import OptionError

from .batches import without_end

if TYPE_CHECKING:
    from .trainer import QwenImageEditTrainer

CONFIG = "# This run belongs to a script with QwenImageEditTrainer and batches of its own; it is continued by starting that script again.\n"


def fit(trainer: QwenImageEditTrainer, train_dataloader: Iterable[Mapping[str, Any]]) -> Path:
    """Trains on these batches, again and again until max_train_steps; the saved adapter file. Raises OptionError and TrainingError."""
    accelerator = trainer.setup_accelerator()
    if accelerator.num_processes > 1:
        raise OptionError("fit: batches of a loader are trained on in one process; fit without an argument trains on several GPUs")
    network, options = trainer.network or trainer.set_lora(), trainer.options
    precision = with_precision(options, accelerator.device).training.mixed_precision
    trainer._scaler = torch.amp.GradScaler(accelerator.device.type, enabled=precision == "fp16")
    if not options.memory.blocks_to_swap:
        # It may have predicted elsewhere.
        trainer.load_model().backbone.to(accelerator.device)
    if trainer.optimizer is None or trainer.lr_scheduler is None:
        trainer.configure_optimizers()
    total, together = options.training.max_train_steps, options.training.gradient_accumulation_steps
    trainer.global_step = trainer._num_samples = 0
    run, finished = _begin(trainer)
    final = run.path / f"{options.output.output_name}{options.output.ending}"
    if finished:
        # What it has trained, in place of the adapter that was made for training.
        network.detach()
        trainer.network = trainer.optimizer = trainer.lr_scheduler = None
        trainer.global_step, trainer.lora = total, []
        trainer.load_lora(final)
        return final
    lock, stop, batches = resume.RunLock(run), StopRequest(run), without_end(train_dataloader)
    lock.take()
    try:
        remove_leftovers(run)
        run.log(RunStarted(steps=total, start_step=trainer.global_step, script=options.script))
        start_trackers(accelerator, options, run)
        for _ in range(trainer.global_step * together):
            next(batches)
        network.train()
        with stop.listening(), stop.finishing_steps():
            while trainer.global_step < total:
                _one_step(trainer, [next(batches) for _ in range(together)])
                due = options.output.save_every_n_steps
                stopping = stop.requested() and trainer.global_step < total
                if (
                    stopping
                    or (due and trainer.global_step % due == 0)
                    or (trainer.global_step == total and options.output.save_state_on_train_end)
                ):
                    trainer.save_checkpoint(0, trainer.global_step)
                if stopping:
                    run.clear_stop()
                    run.log(RunStopped(step=trainer.global_step, text=f"{trainer.global_step} of {total} steps are done"))
                    return trainer.save_lora(run.path / f"{options.output.output_name}-{trainer.global_step:06d}{options.output.ending}")
        trainer.save_lora(final)
        run.log(FileSaved(step=total, what="export", file=final.name))
        run.log(RunFinished(step=total, text=f"{total} of {total} steps are done"))
    except BaseException as err:
        run.log(RunFailed(step=trainer.global_step, text=str(err) or type(err).__name__))
        raise
    finally:
        for tracker in accelerator.trackers:
            tracker.finish()
        lock.release()
    return final


def _one_step(trainer: QwenImageEditTrainer, batches: Sequence[Mapping[str, Any]]) -> None:
    """An optimizer step over these batches. Raises TrainingError before the weights are touched when the loss is no number."""
    network, optimizer, scheduler, options = trainer.network, trainer.optimizer, trainer.lr_scheduler, trainer.options
    assert network is not None and optimizer is not None and scheduler is not None
    # Dropout inside modules draws from the global generator: the same step drops the same, resumed or not.
    torch.manual_seed(seed_for(options.training.seed, trainer.global_step, "dropout/0"))
    total = 0.0
    for batch in batches:
        loss = trainer.training_step(batch) / len(batches)
        trainer._scaler.scale(loss).backward()
        total += float(loss.detach())
    if not math.isfinite(total):
        optimizer.zero_grad(set_to_none=True)
        raise TrainingError(f"the loss of step {trainer.global_step + 1} is {total}; nothing was changed. A lower learning rate may help")
    trainer._scaler.unscale_(optimizer)
    if options.optimizer.max_grad_norm:
        torch.nn.utils.clip_grad_norm_(network.parameters(), options.optimizer.max_grad_norm)
    trainer._scaler.step(optimizer)
    trainer._scaler.update()
    optimizer.zero_grad(set_to_none=True)
    network.after_step()
    rate = max(scheduler.get_last_lr())
    scheduler.step()
    trainer.global_step += 1
    assert trainer.run is not None and trainer.accelerator is not None
    RunDirectory(trainer.run).log(StepDone(step=trainer.global_step, epoch=0, loss=total, lr=rate))
    trainer.accelerator.log({"loss": total, "lr": rate}, step=trainer.global_step)


def _begin(trainer: QwenImageEditTrainer) -> tuple[RunDirectory, bool]:
    """The folder of the run, a new one or that of one that goes on, whose state is loaded then; and whether it is finished already."""
    options, total = trainer.options, trainer.options.training.max_train_steps
    settings = _settings_of(trainer)
    wanted = resume.Wanted(
        options.output, options.distributed.resume, None, settings, NO_IMAGES, total, model_files=lambda: _model_files(trainer)
    )
    start = resume.choose(wanted)
    if start.finished:
        assert start.run is not None
        trainer.run = start.run.path
        return start.run, True
    open_run(trainer, start.run)
    assert trainer.run is not None
    run = RunDirectory(trainer.run)
    for text in start.warnings:
        run.log(Warned(text=text))
    if start.state is not None:
        _go_on_from(trainer, start.state)
    return run, False


def _settings_of(trainer: QwenImageEditTrainer) -> dict[str, Any]:
    """What decides whether a run goes on."""
    options = trainer.options
    return resume.training_settings(options, options.dataset.train_batch_size * options.training.gradient_accumulation_steps)


def _model_files(trainer: QwenImageEditTrainer) -> dict[str, str]:
    """A hash of each file of the model; what did not change since the last look is not read again."""
    with Bars() as bars:
        return model_files(trainer.options, cache_folder(trainer.options.dataset, trainer.options.output.output_dir), bars)


def open_run(trainer: QwenImageEditTrainer, run: RunDirectory | None) -> Checkpointer:
    """Writes down what is trained in the folder of a run, None for a new one; what writes its states."""
    options, settings = trainer.options, _settings_of(trainer)
    run = run or RunDirectory.create(Path(options.output.output_dir), options.output.output_name, CONFIG)
    identity = Identity(resume.fingerprint(settings), NO_IMAGES, 1)
    about = {"dataset_hash": NO_IMAGES}
    known: dict[str, Any] = {"settings": settings, "model_files": _model_files(trainer), "dataset": about}
    write_meta(run, fingerprint=identity.fingerprint, **known, seed=options.training.seed, processes=1)
    trainer.run = run.path
    trainer._checkpointer = Checkpointer(run, options.output, identity, lambda step: 0, options.training.max_train_steps)
    return trainer._checkpointer


def _go_on_from(trainer: QwenImageEditTrainer, folder: Path) -> None:
    assert trainer.network is not None and trainer.optimizer is not None and trainer.lr_scheduler is not None
    state, _ = read_state(folder)
    trainer.network.load(state["weights"])
    restore(trainer.optimizer, state["optimizer"])
    trainer.global_step, trainer._num_samples = state["loop"]["step"], state["loop"]["samples"]
    if trainer._scaler.is_enabled():
        trainer._scaler.load_state_dict(state["loop"]["scaler"])
    trainer.lr_scheduler.last_epoch = trainer.global_step
    trainer.lr_scheduler._last_lr = [group["lr"] for group in trainer.optimizer.param_groups]
