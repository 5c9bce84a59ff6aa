"""What a start is asked to do: to train, or a prefix of that. Each goes as far through prepare, load and assemble as it needs."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from sd_scripts.library.memory import compiling, kernels, preflight
from sd_scripts.library.memory.forecast import answers as forecasts
from sd_scripts.runs import resume
from sd_scripts.runs.early_checks import missing_packages
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import command_line
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.runs import RunOptions

from .assemble import assemble
from .describing import about_caches, about_start
from .load import fill, load, networks
from .meter import peak_gib
from .optim import learning_rate_at, make_optimizer
from .prepare import check, expecting_class_images, prepare, read, resolved_options, shown, wanted_of, with_class_images
from .process import Process

log = logging.getLogger("sd_scripts")


@dataclass(frozen=True)
class TrainingEnding:
    """How training ended that did not fail."""

    finished: bool
    """The run has all its steps; if not, somebody asked it to stop."""
    text: str
    """What the last event says."""
    run: RunDirectory
    step: int


def train(process: Process, asked: command_line.Invocation) -> TrainingEnding:
    """Trains to the last step, or until somebody asks it to stop."""
    prepared = prepare(process, asked)
    total, run = prepared.total_steps, prepared.start.run
    assert run is not None
    if prepared.start.finished:
        text = f"{run.path} was finished already ({total} steps); more max_train_steps make it longer, resume = none starts a new run"
        log.info("%s", text)
        return TrainingEnding(True, text, run, total)
    loaded = load(prepared)
    trainer = assemble(loaded)
    process.steps_done = lambda: trainer.step
    process.working("train")
    with kernels.chosen(prepared.options.memory, process.device), compiling.explained():
        if preflight.is_wanted(prepared.options.memory, process.device) and trainer.step < total:
            preflight.run(trainer, loaded.data, process.working)
        finished = trainer.fit()
    if prepared.forecast is not None:
        prepared.forecast.measured(peak_gib(process.device))
    process.resources.close()
    text = f"{trainer.step} of {total} steps are done" + (f"; {trainer.ended_early}" if trainer.ended_early else "")
    return TrainingEnding(finished, text, run, trainer.step)


def fill_caches(process: Process, asked: command_line.Invocation) -> str:
    """Encodes what the run needs and is not kept yet, without the denoising network; a summary for people."""
    options, parts = with_class_images(process, _kept_on_disk(resolved_options(process, asked)))
    found = read(process, asked, options, parts=parts)
    process.stop.check()
    data = fill(found, networks(found, without=("backbone",)))
    return about_caches(data.kept(), found.cache_folder)


def _kept_on_disk(options: RunOptions) -> RunOptions:
    """The options without caches that would be in memory only. Raises OptionError where nothing is left."""
    data = options.dataset
    kept = {
        "cache_latents": data.cache_latents and data.cache_latents_to_disk,
        "cache_text_encoder_outputs": data.cache_text_encoder_outputs and data.cache_text_encoder_outputs_to_disk,
    }
    if not any(kept.values()):
        text = "cache_only fills the caches on disk, and all are off; turn on cache_latents with cache_latents_to_disk, or leave it out"
        raise OptionError(Problem("cache_only", text))
    return options.model_copy(update={"dataset": data.model_copy(update=kept)})


def dry_run(process: Process, asked: command_line.Invocation) -> str:
    """Checks everything that can be checked without weights; a summary for people. Raises OptionError."""
    options, missing = expecting_class_images(resolved_options(process, asked))
    found = shown(read(process, asked, options))
    if not missing_packages(options):
        parameter = torch.nn.Parameter(torch.zeros(1))
        make_optimizer(options.optimizer, [{"params": [parameter], "lr": options.optimizer.learning_rate, "name": "all"}])
    learning_rate_at(options.optimizer, found.total_steps)
    check(found)
    start = resume.choose(wanted_of(found))
    return about_start(options, found.plan, found.total_steps, start, len(found.prompts), missing, found.sources)


def estimate(process: Process, asked: command_line.Invocation) -> str:
    """The memory that the run will take on a GPU, and a plan for a card where one is named. Raises OptionError."""
    options, _ = expecting_class_images(resolved_options(process, asked))
    found = shown(read(process, asked, options))
    processes = options.distributed.num_gpus or 1
    question = forecasts.Estimate(found.family, options, found.plan, found.prompts, asked.as_json, found.source_sizes, processes)
    return question.answer(asked.fit)
