"""One start of one run: from options to a trainer, in the order that needs least memory. Knows every component; trains nothing itself."""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from sd_scripts import families
from sd_scripts.dataset import plan as plans
from sd_scripts.dataset import weights as loss_weights
from sd_scripts.dataset.contents import FILE as IMAGES
from sd_scripts.dataset.contents import contents_of
from sd_scripts.dataset.findings import findings_of_length
from sd_scripts.dataset.pairs import controls_of
from sd_scripts.dataset.progress import Bars
from sd_scripts.dataset.scan import read_dataset
from sd_scripts.families.common.made import latent_factor
from sd_scripts.families.lgt.evaluation import Evaluation, Sources, sources_of
from sd_scripts.families.lgt.model import Lgt
from sd_scripts.families.lgt.options import LgtObjectiveOptions, LgtSampleOptions
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.full import WholeNetwork, train_whole
from sd_scripts.library.adapters.network import Network
from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.library.core.protocols import Beginning, Dtypes, ModelFamily, NewFamily, Parts
from sd_scripts.library.data.cache import open_caches
from sd_scripts.library.data.pipeline import DataPipeline
from sd_scripts.library.loading.common import config_of
from sd_scripts.library.memory import compiling, kernels, rehearsal, swapping
from sd_scripts.library.memory.arranging import arrange
from sd_scripts.library.memory.code_versions import versions_of
from sd_scripts.library.memory.forecast import answers as forecasts
from sd_scripts.library.memory.ladder import check_alone, ladder_of
from sd_scripts.library.memory.remedies import Work, levers
from sd_scripts.library.objectives import make as objectives
from sd_scripts.library.objectives.colours import NUM_PICTURES, fit_colours
from sd_scripts.library.parallel.peers import PeerLost, Peers
from sd_scripts.library.parallel.sharding import check_optimizer, shard, skeleton_of
from sd_scripts.library.render.class_pictures import wanted as wanted_class_pictures
from sd_scripts.library.render.prompt_texts import with_known_texts
from sd_scripts.library.render.sample import Previews
from sd_scripts.runs import resume
from sd_scripts.runs.preflight import missing_packages
from sd_scripts.runs.rundir import LAST_WORDS, RunDirectory
from sd_scripts.runs.states import state_folders
from sd_scripts.runs.stopping import StopRequest, is_for_earlier_start
from sd_scripts.schema import flat
from sd_scripts.schema.compile import CompileOptions
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.files import write_atomically
from sd_scripts.schema.network import NetworkOptions
from sd_scripts.schema.prompts import Defaults, PromptSpec, read_prompts

from . import stepping
from .checkpoint import Checkpointer, Identity, read_state, remove_leftovers
from .describing import about_caches, about_start, dataset_facts
from .editing import check_control_area, check_prompts, control_size, encoder_devices, with_controls
from .environment import CPU, check_processes, make_accelerator, start_trackers, with_global_batch, with_precision
from .exporting import Exporter
from .meter import Phases, peak_gib
from .model_files import model_files
from .optim import learning_rate_at, make_optimizer
from .run_meta import devices, write_meta
from .timetable import timetable_of
from .trained import dtypes_of_run, trained_encoders
from .trainer import Samples, Trainer

log = logging.getLogger("sd_scripts")


class _ConsoleFile(logging.FileHandler):
    """The run's own copy of what is said; one that cannot be written any more is not worth an error."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Says nothing: whoever loses the folder says so."""

    def close(self) -> None:
        """Closes the file."""
        with suppress(OSError):
            super().close()


class Session:
    """Builds the components of one start and hands them to the trainer."""

    def __init__(self, asked: flat.Invocation, stop: StopRequest) -> None:
        self.started = time.time()
        self.asked, self.stop = asked, stop
        self.run_dir: RunDirectory | None = None
        self.phases = Phases(None)
        self.work: Work = "train"
        self.closing = ""
        """What the last event says."""
        self._trainer: Trainer | None = None
        self._data: DataPipeline | None = None
        self._lock: resume.RunLock | None = None
        self._parts: Parts | None = None
        self._begins_with: Path | None = None
        """The state that training goes on from."""
        self._exporter: Exporter | None = None
        self._console: logging.Handler | None = None
        self._whole_backbone: Callable[[Iterable[tuple[str, Tensor]]], nn.Module] | None = None
        """What makes a whole network of the weights of one that is shared out and trained."""
        self._family_of_previews: ModelFamily | None = None
        """The family with the texts of all previews encoded; None where they are encoded when they are due."""
        self.sources: Sources | None = None
        """The pictures that evaluations transfer; None where prompts are rendered instead."""
        check_processes(asked.options)
        self._joined_before = torch.distributed.is_available() and torch.distributed.is_initialized()
        """Whether whoever called us made the process group, and has more to do with it."""
        self.accelerator = make_accelerator(asked.options)
        self.device = self.accelerator.device
        self.peers = Peers(60.0 * asked.options.distributed.distributed_timeout, self._end_without_return)
        self.options = with_global_batch(with_precision(asked.options, self.device), self.peers.world)
        self.family = families.family(self.options.family)
        self.vae_device, self.text_encoder_device = encoder_devices(self.options.model, self.device)
        if asked.run_dir is not None and not asked.dry_run and self.accelerator.is_main_process:
            self._open(RunDirectory(asked.run_dir))

    # Set-up, in order.

    def run(self) -> bool:
        """Trains; True at the end of the run, False after a request to stop."""
        self._make_class_pictures()
        options = self.options
        self.plan = self._scan()
        self.total_steps = self.plan.steps_of_run(self.options.training)
        prompts = self._prompts()
        self.sources = self._sources()
        uncompiled = compiling.check(options.compile, self.device)
        kernels.check(options, self.device)
        stepping.check(options.memory, options.optimizer.optimizer_type)
        check_alone(options.memory, self.peers.world)
        start = self._begin()
        if start.finished:
            assert start.run is not None
            self.closing = (
                f"{start.run.path} was finished already ({self.total_steps} steps); "
                "more max_train_steps make it longer, resume = none starts a new run"
            )
            log.info("%s", self.closing)
            return True
        if uncompiled:
            self._warn(uncompiled)
            self.options = self.options.model_copy(update={"compile": CompileOptions()})
        self.stop.check()
        forecast = self._forecast(prompts)
        parts = self._load()
        kernels.check(options, self.device, parts.backbone)
        swapping.check_number(options.memory.blocks_to_swap, len(blocks_of(parts.backbone)))
        check_prompts(prompts, self.family, parts)
        data = self._prepare(parts, prompts)
        network = self._attach(parts)
        optimizer = make_optimizer(options.optimizer, network.parameter_groups(options.network, options.optimizer.learning_rate))
        trainer = self._make_trainer(parts, network, data, optimizer, prompts, start)
        self._log_start(trainer)
        self._trainer, self.work = trainer, "train"
        with kernels.chosen(options.memory, self.device), compiling.explained():
            self._rehearse(trainer, data)
            done = trainer.fit()
        if self.arranged.swap.swapped:
            log.info("blocks were brought to the device %d times, %d of them late", self.arranged.swap.copies, self.arranged.swap.late)
        if forecast is not None:
            forecast.measured(peak_gib(self.device))
        assert self._exporter is not None
        self._exporter.finish_uploads()
        self.closing = f"{trainer.step} of {self.total_steps} steps are done"
        return done

    def _forecast(self, prompts: list[PromptSpec]) -> forecasts.Beside | None:
        """What this run will take of a GPU, written down by the first process; elsewhere there is nothing to run out of."""
        if self.device.type != "cuda" or not self.accelerator.is_main_process or self.run_dir is None:
            return None
        sources = () if self.sources is None else self.sources.sizes
        return forecasts.beside(self.run_dir, self.family, self.options, self.plan, prompts, sources, self.peers.world)

    def _rehearse(self, trainer: Trainer, data: DataPipeline) -> None:
        """Tries what takes most memory, where a run does that, and makes the ladder for what does not fit."""
        if self.options.memory.oom_ladder:
            trainer.ladder = ladder_of(self.options, self.arranged, trainer, self._warn)
        if rehearsal.is_wanted(self.options.memory, self.device) and trainer.step < self.total_steps:
            rehearsal.rehearse(trainer, data, self._working)

    def _working(self, work: Work) -> None:
        self.work = work

    def fill_caches(self) -> str:
        """Encodes what the run needs and is not kept yet, without the denoising network; a summary for people."""
        self._keep_on_disk()
        self._make_class_pictures()
        self.plan = self._scan()
        self.total_steps = self.plan.steps_of_run(self.options.training)
        self.stop.check()
        data = self._fill(self._load(without=("backbone",)))
        self.closing = about_caches(data.kept(), plans.cache_folder(self.options.dataset, self.options.output.output_dir))
        return self.closing

    def _keep_on_disk(self) -> None:
        """Leaves out of the caches what would be in memory only. Raises OptionError where nothing is left."""
        data = self.options.dataset
        kept = {
            "cache_latents": data.cache_latents and data.cache_latents_to_disk,
            "cache_text_encoder_outputs": data.cache_text_encoder_outputs and data.cache_text_encoder_outputs_to_disk,
        }
        if not any(kept.values()):
            text = "cache_only fills the caches on disk, and all are off; turn on cache_latents with cache_latents_to_disk, or leave it out"
            raise OptionError(Problem("cache_only", text))
        self.options = self.options.model_copy(update={"dataset": data.model_copy(update=kept)})

    def _make_class_pictures(self) -> None:
        """Prior preservation: the base model makes what is missing of num_class_images, in the first process."""
        pictures = wanted_class_pictures(self.options, self.family.grid)
        if pictures is None:
            return
        if pictures.requests and self.accelerator.is_main_process:
            self.work = "sample"
            parts = self._load()
            if self.family.num_controls(parts)[0] > 0:
                text = f"num_class_images: {parts.source} edits pictures and makes none from text alone; set it to 0"
                raise OptionError(Problem("num_class_images", text))
            swap = swapping.BlockSwap(parts.backbone, self.device)
            swap.set(self.options.memory.blocks_to_swap)
            parts.backbone.to(self.device)
            self.phases.enter("cache")
            pictures.make(self.family, parts, self._cached, self.options.memory.vae_tiling)
            swap.end()
            parts.backbone.to(CPU)
        self.peers.barrier()
        dataset = self.options.dataset.model_copy(update={"reg_data_dir": str(pictures.folder)})
        self.options = self.options.model_copy(update={"dataset": dataset})

    def _scan(self) -> plans.Plan:
        options, accelerator = self.options, self.accelerator
        self.phases.enter("scan")
        folder = plans.cache_folder(options.dataset, options.output.output_dir)
        # The first process fills the index of pictures, the others read it.
        with self.peers.first_before_others(), Bars(self._checked, shown=accelerator.is_main_process) as bars:
            dataset = read_dataset(options.dataset, folder, bars, controls=controls_of(options.model))
        plan = plans.make_plan(
            dataset,
            options.dataset,
            seed=options.training.seed,
            grid=self.family.grid,
            processes=accelerator.num_processes,
            accumulation=options.training.gradient_accumulation_steps,
            control_size=control_size(options.model),
            terms=loss_weights.terms_of(options.objective),
        )
        if options.output.save_best and not plan.held_out:
            raise OptionError(Problem("save_best", "save_best: no picture is held out, so no loss is the lowest; set a validation_split"))
        # Class pictures that are not made yet will be there.
        if not options.dataset.num_class_images:
            objectives.check_prior(options.objective, any(plan.subset_of(picture).is_reg for picture in plan.trained_pictures()))
        objectives.check_styles(options.objective, plan.captions())
        return plan

    def _checked(self, what: str, done: int, total: int) -> None:
        """Progress of long work before the loop: a chance to stop."""
        self.peers.progress()
        self.stop.check()

    def _prompts(self) -> list[PromptSpec]:
        options = self.options
        prompts = read_prompts(Defaults(options.samples, options.dataset.resolution, self.family.grid, options.training.seed))
        return with_controls(prompts, options.samples, self.plan)

    def _sources(self) -> Sources | None:
        """The pictures that evaluations transfer, see `sources`."""
        options = self.options
        if not isinstance(options.samples, LgtSampleOptions):
            return None
        folder = plans.cache_folder(options.dataset, options.output.output_dir)
        with self.peers.first_before_others():
            return sources_of(options.samples, options.dataset, self.plan, folder)

    def _begin(self) -> resume.Start:
        """Chooses where to start, in the first process, and opens the run folder."""
        wanted = self._wanted(self._model_files)
        self.identity = Identity(wanted.fingerprint, self.plan.dataset_hash, self.accelerator.num_processes)
        start = resume.Start(None)
        if self.accelerator.is_main_process:
            # Of two starts at once the second one finds the run that the first one has made.
            with resume.one_at_a_time(Path(self.options.output.output_dir)) if self.asked.run_dir is None else nullcontext():
                start = resume.choose(wanted)
                if not start.finished:
                    start = self._open_for(start, wanted)
        told = {"run": str(start.run.path) if start.run else "", "state": str(start.state or ""), "finished": start.finished}
        heard = json.loads(self.peers.same_text(json.dumps(told)))
        start = resume.Start(
            RunDirectory(Path(heard["run"])), Path(heard["state"]) if heard["state"] else None, start.warnings, heard["finished"]
        )
        if not start.finished:
            self.run_dir = start.run
            self.stop.run = start.run
            self._begins_with = start.state
        return start

    def _wanted(self, model_files: Callable[[], dict[str, str]] = dict) -> resume.Wanted:
        options, plan = self.options, self.plan
        return resume.Wanted(
            options.output,
            options.distributed.resume,
            self.asked.run_dir,
            resume.training_settings(options, plan.global_batch_size),
            plan.dataset_hash,
            self.total_steps,
            contents_of(plan),
            functools.cache(model_files),
        )

    def _model_files(self) -> dict[str, str]:
        """A hash of each file of the model."""
        with Bars(self._checked) as bars:
            return model_files(self.options, plans.cache_folder(self.options.dataset, self.options.output.output_dir), bars)

    def _open_for(self, start: resume.Start, wanted: resume.Wanted) -> resume.Start:
        """The first process: makes the folder where there is none, and writes down with what this start trains."""
        options = self.options
        run = start.run or RunDirectory.create(Path(options.output.output_dir), options.output.output_name, self.asked.options)
        self._open(run)
        config = flat.to_toml(self.asked.options)
        if not run.config.is_file() or run.config.read_text(encoding="utf-8") != config:
            write_atomically(run.config, config)
        write_atomically(run.path / IMAGES, json.dumps(wanted.images))
        described = self.plan.describe()
        write_meta(
            run,
            fingerprint=self.identity.fingerprint,
            settings=wanted.settings,
            model_files=wanted.model_files(),
            dataset={
                "dataset_hash": self.plan.dataset_hash,
                "pictures": described["pictures"],
                "regularisation": described["regularisation"],
            },
            seed=options.training.seed,
            processes=self.accelerator.num_processes,
            ranks=self.peers.everybody,
        )
        about_tests = () if self.sources is None else self.sources.warnings
        of_length = findings_of_length(self.plan, self.total_steps)
        for text in (*self.asked.notes, *start.warnings, *self.plan.warnings, *of_length, *about_tests):
            self._warn(text)
        return replace(start, run=run)

    def _open(self, run: RunDirectory) -> None:
        """Takes a run folder for this process: lock, console file, and nothing left of a process that was killed."""
        if self.run_dir is not None:
            return
        run.path.mkdir(parents=True, exist_ok=True)
        lock = resume.RunLock(run)
        lock.take()
        self._lock, self.run_dir = lock, run
        self.phases.run = run
        self.stop.run = run
        if is_for_earlier_start(run, self.options.script):
            run.clear_stop()
        remove_leftovers(run)
        # Whoever started this process with run.json beside it catches its output already.
        if not (run.path / "run.json").exists():
            self._console = _ConsoleFile(run.console, encoding="utf-8")
            logging.getLogger().addHandler(self._console)

    def _load(self, without: Collection[str] = ()) -> Parts:
        """All networks on the CPU, apart from those that nobody will run; each goes to the device when it is needed there.

        A second call gives the same ones.
        """
        if self._parts is not None:
            return self._parts
        self.phases.enter("load")
        if self.options.training.deterministic:
            # Some kernels have no deterministic form; torch names them in a warning instead of ending the run.
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.backends.cudnn.benchmark = False
        dtypes = dtypes_of_run(self.options)
        maker = families.maker_of(self.family)
        if maker is None:
            self._parts = self.family.load(self.options.model, CPU, dtypes, without)
        else:
            self._parts = self._made(maker, dtypes, without)
        return self._parts

    def _made(self, family: NewFamily, dtypes: Dtypes, without: Collection[str]) -> Parts:
        """The model of a family whose runs make their model, or go on from one that such a run has saved."""
        options, plan = self.options, self.plan
        sizes = dict.fromkeys((*plan.sizes(), *((spec.width, spec.height) for spec in self._prompts())))
        if family.is_new(options.model):
            beginning = Beginning(options.training.seed, tuple(sizes), self._files(family))
            parts = family.build(options.model, beginning, CPU, dtypes, without)
        else:
            parts = family.load(options.model, CPU, dtypes, without)
        held_out = [plan.cut(picture, 0).bucket for picture in plan.held_out]
        tested = () if self.sources is None else self.sources.sizes
        family.check_sizes(parts, list(dict.fromkeys((*sizes, *held_out, *tested))))
        if isinstance(family, Lgt):
            family.check_styles(parts, plan.captions())
            factor = latent_factor(config_of(parts.vae))
            objectives.check_sides(options.objective, [(height // factor, width // factor) for width, height in (*plan.sizes(), *held_out)])
        return parts

    def _files(self, family: NewFamily) -> dict[str, str]:
        """The text files of a new model: those that the run has kept, or that of the state it begins with; in a first start new ones."""
        found: dict[str, str] = {}
        if self.peers.is_first:
            folders = [self.run_dir.path] if self.run_dir is not None else []
            folders += [self._begins_with.parent.parent] if self._begins_with is not None else []
            kept = next((folder for folder in folders if all((folder / name).is_file() for name in family.file_names)), None)
            if kept is None:
                found = family.files(self.options.model, self.plan.captions())
            else:
                found = {name: (kept / name).read_text(encoding="utf-8") for name in family.file_names}
            if self.run_dir is not None and kept != self.run_dir.path:
                for name, text in found.items():
                    write_atomically(self.run_dir.path / name, text)
        told: dict[str, str] = json.loads(self.peers.same_text(json.dumps(found)))
        return told

    def _prepare(self, parts: Parts, prompts: list[PromptSpec]) -> DataPipeline:
        """Fills the caches; afterwards only what training needs is on the device."""
        data = self._fill(parts)
        if self.device.type != "cpu" and data.cached_encoders and self.sources is None and self.peers.is_first:
            # While the encoders are where they are fast, and before the network needs the room.
            self._family_of_previews = with_known_texts(self.family, parts, prompts, data.cached_encoders)
        if self.options.dataset.cache_latents:
            parts.vae.to(CPU)
        for name in data.cached_encoders:
            parts.text_encoders[name].to(CPU)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return data

    def _fill(self, parts: Parts) -> DataPipeline:
        """Brings the encoders to their devices, and the caches to what this run needs."""
        options, accelerator = self.options, self.accelerator
        check_control_area(options.model, parts)
        self.work = "cache"
        self.phases.enter("cache")
        data = DataPipeline(
            options.dataset,
            self.family,
            self.plan,
            open_caches(options.dataset, plans.cache_folder(options.dataset, options.output.output_dir)),
            options.training.seed,
            num_steps=self.total_steps,
            trained_encoders=trained_encoders(options, parts),
            empty_text=objectives.wants_empty_text(options.objective),
            validation_samples=objectives.num_anchors(options.objective),
            rank=accelerator.process_index,
            world=accelerator.num_processes,
            barrier=self.peers.barrier,
            warn=self._warn,
        )
        self._data = data
        parts.vae.to(self.vae_device)
        for encoder in parts.text_encoders.values():
            encoder.to(self.text_encoder_device)
        data.prepare(parts, self._cached)
        return data

    def _warn(self, text: str) -> None:
        """A sentence for the log, from any thread."""
        log.warning("%s", text)
        if self.run_dir is not None:
            self.run_dir.log("warning", text=text)

    def _cached(self, what: str, done: int, total: int) -> None:
        if self.run_dir is not None and self.accelerator.is_main_process:
            self.run_dir.log("cached", what=what, done=done, total=total)
        self.peers.progress()
        self.stop.check()

    def _attach(self, parts: Parts) -> Network | WholeNetwork:
        options = self.options
        network_options = options.network
        network: Network | WholeNetwork
        if isinstance(network_options, NetworkOptions):
            targets = self.family.adapter_targets(parts, network_options.wants_convolutions)
            network = attach(parts, network_options, targets, options.training.seed)
        else:
            network = train_whole(parts, network_options, self.family, stepping.trained_dtype(options.memory))
        if self._shares_out:
            self._share_out(parts, network)
        self.arranged = arrange(parts, options, self.device, self._shares_out)
        self._announce_compiling()
        return network

    def _announce_compiling(self) -> None:
        """Says what will be compiled, and how many graphs that makes at most."""
        made = self.arranged.compilation
        if made is None:
            return
        made.expect(versions_of(self.options, self.plan.sizes()))
        if self.accelerator.is_main_process and self.run_dir is not None:
            self.run_dir.log("compiling", **made.describe())
            most = (
                "as many graphs as sizes and lengths of texts turn out to need"
                if made.expected is None
                else f"at most {made.expected} graphs"
            )
            log.info("the first steps compile the %s with %s: %s", made.scope, self.options.compile.compile_backend, most)

    def _share_out(self, parts: Parts, network: Network | WholeNetwork) -> None:
        """Leaves this process with its share of the backbone: of what is frozen when an adapter is trained, else of everything."""
        whole = network.parameters()
        if isinstance(network, WholeNetwork):
            check_optimizer(self.options.optimizer.optimizer_type)
            self._whole_backbone = skeleton_of(parts.backbone)
            whole = []
        shard(parts.backbone, whole, self.device, self.peers.world)

    def _make_trainer(
        self,
        parts: Parts,
        network: Network | WholeNetwork,
        data: DataPipeline,
        optimizer: torch.optim.Optimizer,
        prompts: list[PromptSpec],
        start: resume.Start,
    ) -> Trainer:
        options, run = self.options, self.run_dir
        assert run is not None
        # The one that loads fastest waits here, and not in the exchange of weights, which has a limit.
        self.peers.barrier()
        facts = dataset_facts(self.plan, self.total_steps)
        self._exporter = Exporter(
            options, self.family, parts, network, facts, self.plan.epoch_of, run, self.peers, self._warn, self._whole_backbone
        )
        trainer = Trainer(
            options.training,
            timetable_of(options, self.plan, self.total_steps),
            self.family,
            parts,
            network,
            objectives.make(options.objective, parts.path, parts.kind, parts.scheduler_config, self._colours(parts, data)),
            data,
            optimizer,
            Checkpointer(run, options.output, self.identity, self.plan.epoch_of, self.total_steps),
            self._exporter,
            self._samples(parts, prompts, data, run),
            run,
            self.accelerator,
            self.stop,
            self.phases,
            self.peers,
            ("swd", "ssm") if isinstance(options.objective, LgtObjectiveOptions) else (),
            self.arranged.compilation,
            stepping.stepping_of(options.memory, optimizer, options.training.seed),
        )
        if start.state is not None:
            state, manifest = read_state(start.state)
            try:
                trainer.load_state_dict(state)
            except ValueError as err:
                raise OptionError(Problem("resume", f"resume: the state {start.state} does not fit: {err}")) from err
            if start.state.parent == run.state:
                trainer.checkpointer.saved_step = manifest["step"]
            if self.accelerator.is_main_process and start.state.parent == run.state:
                dropped = trainer.checkpointer.drop_states_after(manifest["step"])
                if dropped:
                    run.log("warning", text=f"training goes back to step {manifest['step']}; later states are removed: {dropped}")
        return trainer

    def _colours(self, parts: Parts, data: DataPipeline) -> torch.Tensor | None:
        """The map from latents to colours, where a term of the loss looks at them."""
        if not objectives.wants_colours(self.options.objective, self.plan.own_terms):
            return None
        place = next(parts.vae.parameters()).device
        parts.vae.to(self.vae_device)
        colours = fit_colours(data.first_latents(NUM_PICTURES), lambda latents: self.family.decode(parts, latents.to(self.vae_device)))
        parts.vae.to(place)
        return colours

    @property
    def _shares_out(self) -> bool:
        """Whether the network is shared out over the processes."""
        return self.options.distributed.distributed_strategy == "fsdp2" and self.accelerator.num_processes > 1

    def _samples(self, parts: Parts, prompts: list[PromptSpec], data: DataPipeline, run: RunDirectory) -> Samples | None:
        """Previews or evaluations by the first process; of a network that is shared out by all of them together. None without prompts."""

        def agreed(chosen: list[int]) -> list[int]:
            return list(json.loads(self.peers.same_text(json.dumps(chosen)))) if self._shares_out else chosen

        options, first = self.options, self.peers.is_first
        if self.sources is not None:
            assert isinstance(options.samples, LgtSampleOptions) and isinstance(self.family, Lgt)
            return Evaluation(
                self.family,
                parts,
                options.samples,
                options.dataset,
                self.plan,
                self.sources.items,
                data,
                run,
                options.training.seed,
                first,
                agreed,
                self.peers.progress,
                options.memory.vae_tiling,
            )
        if not prompts:
            return None
        family, tiled = self._family_of_previews or self.family, options.memory.vae_tiling
        return Previews(family, parts, prompts, run, options.output.output_name, first, agreed, self.peers.progress, tiled)

    def _log_start(self, trainer: Trainer) -> None:
        if not self.accelerator.is_main_process or self.run_dir is None:
            return
        options, described = self.options, self.plan.describe()
        fields = {
            "steps": self.total_steps,
            "start_step": trainer.step,
            "epochs": self.plan.epoch_of(self.total_steps - 1) + 1,
            "images": described["pictures"],
            "batch": self.plan.global_batch_size,
            "seed": options.training.seed,
            "pid": os.getpid(),
            "script": options.script,
        }
        self.run_dir.log("started", **fields)
        weights = sum(weight.numel() for weight in trainer.weights.values())
        log.info(
            "%s: steps %d to %d, %d pictures, batch %d, %s trained weights, %s, %s",
            self.run_dir.path,
            trainer.step,
            self.total_steps,
            described["pictures"],
            self.plan.global_batch_size,
            f"{weights:,}",
            options.training.mixed_precision,
            devices()[0]["name"] if devices() else "CPU",
        )
        start_trackers(self.accelerator, options, self.run_dir)

    # Without training.

    def dry_run(self) -> str:
        """Checks everything that can be checked without weights; a summary for people. Raises OptionError."""
        missing = self._expected_class_pictures()
        options = self.options
        self.plan = self._scan()
        self.total_steps = self.plan.steps_of_run(self.options.training)
        prompts = self._prompts()
        self.sources = self._sources()
        if not missing_packages(options):
            parameter = torch.nn.Parameter(torch.zeros(1))
            make_optimizer(options.optimizer, [{"params": [parameter], "lr": options.optimizer.learning_rate, "name": "all"}])
        learning_rate_at(options.optimizer, self.total_steps)
        compiling.check(options.compile, self.device)
        kernels.check(options, self.device)
        stepping.check(options.memory, options.optimizer.optimizer_type)
        check_alone(options.memory, self.peers.world)
        start = resume.choose(self._wanted())
        return about_start(options, self.plan, self.total_steps, start, len(prompts), missing, self.sources)

    def estimate(self) -> str:
        """The memory that the run will take on a GPU, and a plan for a card where one is named. Raises OptionError."""
        self._expected_class_pictures()
        self.plan = self._scan()
        sources = self._sources()
        sizes, processes = () if sources is None else sources.sizes, self.options.distributed.num_gpus or 1
        asked = forecasts.Estimate(self.family, self.options, self.plan, self._prompts(), self.asked.as_json, sizes, processes)
        return asked.answer(self.asked.fit)

    def _expected_class_pictures(self) -> int:
        """How many class pictures a start would make; those that are there are counted among the pictures."""
        pictures = wanted_class_pictures(self.options, self.family.grid)
        if pictures is None:
            return 0
        there = str(pictures.folder) if pictures.folder.is_dir() else None
        dataset = self.options.dataset.model_copy(update={"reg_data_dir": there})
        self.options = self.options.model_copy(update={"dataset": dataset})
        return len(pictures.requests)

    # The end.

    @property
    def step(self) -> int:
        """Steps done."""
        return 0 if self._trainer is None else self._trainer.step

    def levers(self) -> str:
        """What to change after running out of memory."""
        return "; ".join(levers(self.options, self.device.type == "cuda", self.work))

    def last_word(self, kind: str, text: str, remedy: str = "", refused: bool = False) -> None:
        """Logs the one last event of this start; refused: the same options would fail again.

        A full disk may have no room for it; the console has said it then.
        """
        assert kind in LAST_WORDS, kind
        run = self.run_dir
        if run is None or (kind != "failed" and not self.accelerator.is_main_process):
            return
        if any(event["kind"] in LAST_WORDS and event.get("time", 0) >= self.started for event in run.events()[0]):
            return
        with suppress(OSError):
            run.log(kind, step=self.step, text=text, remedy=remedy, **({"refused": True} if refused else {}))

    def saved_step(self) -> int | None:
        """Step of the newest state on disk."""
        folders = state_folders(self.run_dir.state) if self.run_dir is not None else []
        return int(folders[-1].name) if folders else None

    def about_loss(self, err: PeerLost) -> str:
        """The sentence about a process that is gone, and what is left."""
        saved = self.saved_step()
        left = "nothing is saved yet" if saved is None else f"the last saved state is that of step {saved}"
        return f"{err}; {left}. Start again to go on"

    def _end_without_return(self, err: PeerLost) -> None:
        """The last word of a process whose main thread waits for one that is gone."""
        if self.peers.speaks or "distributed_timeout" in str(err):
            text = self.about_loss(err)
            sys.stderr.write(f"{text}\n")
            self.last_word("failed", text=text, remedy=err.remedy)

    def close(self) -> None:
        """Gives everything back that outlives a process."""
        if self._exporter is not None:
            self._exporter.finish_uploads()
        self.peers.leave()
        if self._data is not None:
            self._data.close()
        with suppress(RuntimeError):
            for tracker in self.accelerator.trackers:
                tracker.finish()
            if not self._joined_before:
                self.accelerator.state.destroy_process_group()
        if self._console is not None:
            logging.getLogger().removeHandler(self._console)
            self._console.close()
        if self._lock is not None:
            self._lock.release()
