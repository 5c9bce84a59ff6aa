"""The first phase of a start: what it will do, as far as options, images and files tell without the network that is trained.

`read`, `shown`, `checked` and `begun` follow each other; a dry run, an estimate and the filling of caches are the first of them.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from sd_scripts import families
from sd_scripts.dataset import plan as plans
from sd_scripts.dataset.contents import FILE as IMAGES
from sd_scripts.dataset.contents import contents_of
from sd_scripts.dataset.findings import findings_of_length
from sd_scripts.dataset.progress import Bars
from sd_scripts.dataset.scan import read_dataset
from sd_scripts.families import bases
from sd_scripts.library.core.devices import CPU
from sd_scripts.library.core.protocols import ModelFamily, Parts, Sources
from sd_scripts.library.memory import compiling, kernels, swapping
from sd_scripts.library.memory.forecast import answers as forecasts
from sd_scripts.library.memory.oom_fallback import check_alone
from sd_scripts.library.objectives import make as objectives
from sd_scripts.library.render.class_images import ClassImages
from sd_scripts.library.render.class_images import wanted as wanted_class_images
from sd_scripts.library.render.renderer import Renderer
from sd_scripts.runs import resume
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import command_line, toml_files
from sd_scripts.schema.compile import CompileOptions
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.files import one_at_a_time, write_atomically
from sd_scripts.schema.prompts import Defaults, PromptSpec, read_prompts
from sd_scripts.schema.runs import RunOptions

from .checkpoint import Identity
from .editing import control_size, encoder_devices, with_controls
from .environment import with_global_batch, with_precision
from .model_files import model_files
from .process import Process
from .run_meta import write_meta
from .trained import dtypes_of_run

log = logging.getLogger("sd_scripts")


@dataclass(frozen=True, kw_only=True)
class Read:
    """The images of a start, and how long it trains on them."""

    process: Process
    asked: command_line.Invocation
    """As it was given; options are what they come to in this process."""
    options: RunOptions
    family: ModelFamily
    plan: plans.Plan
    total_steps: int
    parts: Parts | None
    """The model that class images were made with; None where it is not loaded yet."""

    @property
    def cache_folder(self) -> Path:
        return plans.cache_folder(self.options.dataset, self.options.output.output_dir)


@dataclass(frozen=True, kw_only=True)
class WithPreviews(Read):
    """And by what it shows its progress."""

    prompts: tuple[PromptSpec, ...]
    sources: Sources | None
    """What evaluations are made of; None where prompts are rendered instead."""

    @property
    def source_sizes(self) -> tuple[tuple[int, int], ...]:
        return () if self.sources is None else self.sources.sizes


@dataclass(frozen=True, kw_only=True)
class Prepared(WithPreviews):
    """Everything that is known before the model is loaded; nothing is left to do where start.finished."""

    start: resume.Start
    identity: Identity
    forecast: forecasts.ForecastComparison | None
    """What this run is expected to take of a GPU, as the first process has written it down."""


def prepare(process: Process, asked: command_line.Invocation) -> Prepared:
    """All of this phase, with class images made and the run's folder open. Raises OptionError."""
    resolved, parts = with_class_images(process, resolved_options(process, asked))
    found = shown(read(process, asked, resolved, parts=parts))
    uncompiled = check(found)
    for note in bases.notes(resolved) if process.is_main else ():
        log.info("%s", note)
    prepared = _begun(found)
    if prepared.start.finished:
        return prepared
    if uncompiled:
        process.warn(uncompiled)
        prepared = replace(prepared, options=prepared.options.model_copy(update={"compile": CompileOptions()}))
    process.stop.check()
    return replace(prepared, forecast=_forecast(prepared))


def resolved_options(process: Process, asked: command_line.Invocation) -> RunOptions:
    """The options with what this process and its devices decide. Raises OptionError for devices that are not here."""
    options = with_global_batch(with_precision(asked.options, process.device), process.peers.world)
    encoder_devices(options.model, process.device)
    return options


# Images.


def with_class_images(process: Process, options: RunOptions) -> tuple[RunOptions, Parts | None]:
    """Prior preservation: the base model makes what is missing of num_class_images, in the first process. The options that name them, and
    the model where it had to be loaded."""
    family = families.family(options.family)
    wanted, parts = wanted_class_images(options, family.grid), None
    if wanted is None:
        return options, None
    if wanted.requests and process.is_main:
        process.working("sample")
        parts = _made(process, options, family, wanted)
    process.peers.barrier()
    return _with_class_folder(options, wanted.folder), parts


def _made(process: Process, options: RunOptions, family: ModelFamily, wanted: ClassImages) -> Parts:
    """Makes class images; the model that did, all of it on the CPU."""
    parts = loaded(process, options, family)
    if family.num_controls(parts)[0] > 0:
        text = f"num_class_images: {parts.source} edits images and makes none from text alone; set it to 0"
        raise OptionError(Problem("num_class_images", text))
    swap = swapping.BlockSwap(parts.backbone, process.device)
    swap.set(options.memory.blocks_to_swap)
    parts.backbone.to(process.device)
    process.phases.enter("cache")
    wanted.make(Renderer(family, parts, options.memory.vae_tiling), process.cached)
    swap.end()
    parts.backbone.to(CPU)
    return parts


def loaded(
    process: Process, options: RunOptions, family: ModelFamily, without: tuple[str, ...] = (), backbone: torch.device = CPU
) -> Parts:
    """The model that the options name, on the CPU; each network goes to the device when it is needed there. backbone: where the denoising
    network is read to."""
    begin_loading(process, options)
    dtypes = dtypes_of_run(options)
    return family.load(options.model, {**dict.fromkeys(("vae", *dtypes), CPU), "backbone": backbone}, dtypes, without)


def begin_loading(process: Process, options: RunOptions) -> None:
    """Before the first network is there."""
    process.phases.enter("load")
    if options.training.deterministic:
        # Some kernels have no deterministic form; torch names them in a warning instead of ending the run.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False


def expecting_class_images(options: RunOptions) -> tuple[RunOptions, int]:
    """The options with the class images that are there, and how many a start would make."""
    wanted = wanted_class_images(options, families.family(options.family).grid)
    if wanted is None:
        return options, 0
    return _with_class_folder(options, wanted.folder if wanted.folder.is_dir() else None), len(wanted.requests)


def _with_class_folder(options: RunOptions, folder: Path | None) -> RunOptions:
    named = {"reg_data_dir": None if folder is None else str(folder)}
    return options.model_copy(update={"dataset": options.dataset.model_copy(update=named)})


def read(process: Process, asked: command_line.Invocation, options: RunOptions, parts: Parts | None = None) -> Read:
    """Looks at the images and plans their batches. Raises OptionError with everything that is wrong with them.

    parts: what was loaded to make class images.
    """
    family = families.family(options.family)
    process.phases.enter("scan")
    folder = plans.cache_folder(options.dataset, options.output.output_dir)
    # The first process fills the index of images, the others read it.
    with process.peers.first_before_others(), Bars(process.checked, shown=process.is_main) as bars:
        dataset = read_dataset(options.dataset, folder, bars, controls=options.model.controls)
    plan = plans.make_plan(
        dataset,
        options.dataset,
        seed=options.training.seed,
        grid=family.grid,
        processes=process.accelerator.num_processes,
        accumulation=options.training.gradient_accumulation_steps,
        control_size=control_size(family, options.model),
        terms=options.objective.term_weights,
    )
    if options.output.save_best and not plan.held_out:
        raise OptionError(Problem("save_best", "save_best: no image is held out, so no loss is the lowest; set a validation_split"))
    if options.output.early_stop_patience is not None and not options.output.save_best:
        text = "early_stop_patience: without save_best the file of the lowest held-out loss is not kept; set save_best as well"
        raise OptionError(Problem("early_stop_patience", text))
    # Class images that are not made yet will be there.
    if not options.dataset.num_class_images:
        objectives.check_prior(options.objective, any(plan.subset_of(image).is_reg for image in plan.trained_images()))
    objectives.check_styles(options.objective, plan.captions())
    return Read(
        process=process,
        asked=asked,
        options=options,
        family=family,
        plan=plan,
        total_steps=plan.steps_of_run(options.training),
        parts=parts,
    )


# What is shown.


def shown(found: Read) -> WithPreviews:
    """With the prompts of previews, or what is evaluated instead. Raises OptionError."""
    sources, evaluator = None, families.evaluator_of(found.family)
    prompts = prompts_of(found)
    if evaluator is not None:
        with found.process.peers.first_before_others():
            sources = evaluator.sources(found.options, found.plan, found.cache_folder)
    return WithPreviews(**vars(found), prompts=prompts, sources=sources)


def prompts_of(found: Read) -> tuple[PromptSpec, ...]:
    """The prompts of previews, with their control images."""
    return prompts_in(found, found.options.samples.sample_prompts)


def prompts_in(found: Read, text: str) -> tuple[PromptSpec, ...]:
    """The prompts in a text that is written as sample_prompts, with their control images. Raises OptionError."""
    options = found.options
    samples = options.samples if text == options.samples.sample_prompts else options.samples.model_copy(update={"sample_prompts": text})
    prompts = read_prompts(Defaults(samples, options.dataset.resolution, found.family.grid, options.training.seed))
    return tuple(with_controls(prompts, found.plan))


def check(found: WithPreviews) -> str:
    """What can be wrong with options and this machine before a model is loaded; why nothing is compiled, where the options say that such a
    run trains all the same. Raises OptionError."""
    options, process = found.options, found.process
    uncompiled = compiling.check(options.compile, process.device)
    kernels.check(options, process.device)
    check_alone(options.memory, process.peers.world)
    return uncompiled


# Where it begins.


def wanted_of(found: WithPreviews | Read, files: Callable[[], dict[str, str]] = dict) -> resume.Wanted:
    """What resuming goes by; files looks at those of the model."""
    options, plan = found.options, found.plan
    return resume.Wanted(
        options.output,
        options.distributed.resume,
        found.asked.run_dir,
        resume.training_settings(options, plan.global_batch_size),
        plan.dataset_hash,
        found.total_steps,
        contents_of(plan),
        functools.cache(files),
    )


def files_of(found: Read) -> dict[str, str]:
    """A hash of each file of the model."""
    with Bars(found.process.checked) as bars:
        return model_files(found.options, found.cache_folder, bars)


def _begun(found: WithPreviews) -> Prepared:
    """Chooses where to start, in the first process, and opens the run folder."""
    process, wanted = found.process, wanted_of(found, lambda: files_of(found))
    identity = Identity(wanted.fingerprint, found.plan.dataset_hash, process.accelerator.num_processes)
    start = resume.Start(None)
    if process.is_main:
        # Of two starts at once the second one finds the run that the first one has made.
        with one_at_a_time(Path(found.options.output.output_dir)) if found.asked.run_dir is None else nullcontext():
            start = resume.choose(wanted)
            if not start.finished:
                start = _open_for(found, start, wanted)
    told = {"run": str(start.run.path) if start.run else "", "state": str(start.state or ""), "finished": start.finished}
    heard = json.loads(process.peers.same_text(json.dumps(told)))
    run, state = RunDirectory(Path(heard["run"])), Path(heard["state"]) if heard["state"] else None
    if not heard["finished"]:
        process.join(run)
    start = resume.Start(run, state, start.warnings, heard["finished"])
    return Prepared(**vars(found), start=start, identity=identity, forecast=None)


def _open_for(found: WithPreviews, start: resume.Start, wanted: resume.Wanted) -> resume.Start:
    """The first process: makes the folder where there is none, and writes down with what this start trains."""
    options, process, plan = found.options, found.process, found.plan
    run = start.run or RunDirectory.create(Path(options.output.output_dir), options.output.output_name, found.asked.options)
    process.open(run, options.script)
    config = toml_files.to_toml(found.asked.options)
    if not run.config.is_file() or run.config.read_text(encoding="utf-8") != config:
        write_atomically(run.config, config)
    write_atomically(run.path / IMAGES, json.dumps(wanted.images))
    described = plan.describe()
    write_meta(
        run,
        fingerprint=wanted.fingerprint,
        settings=wanted.settings,
        model_files=wanted.model_files(),
        dataset={"dataset_hash": plan.dataset_hash, "images": described["images"], "regularisation": described["regularisation"]},
        seed=options.training.seed,
        processes=process.accelerator.num_processes,
        ranks=process.peers.everybody,
    )
    about_tests = () if found.sources is None else found.sources.warnings
    of_length = findings_of_length(plan, found.total_steps)
    for text in (*found.asked.notes, *start.warnings, *plan.warnings, *of_length, *about_tests):
        process.warn(text)
    return replace(start, run=run)


def _forecast(prepared: Prepared) -> forecasts.ForecastComparison | None:
    """What this run will take of a GPU, written down by the first process; elsewhere there is nothing to run out of."""
    process = prepared.process
    if process.device.type != "cuda" or not process.is_main or process.run is None:
        return None
    shown_too = prepared.prompts, prepared.source_sizes
    return forecasts.beside(process.run, prepared.family, prepared.options, prepared.plan, *shown_too, process.peers.world)
