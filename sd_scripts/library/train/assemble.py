"""The last phase of a start: what is trained is put on the model, laid out for its device, and handed to a trainer."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable
from typing import Any, cast

from torch import Tensor, nn

from sd_scripts import families
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.full import WholeNetwork, train_whole
from sd_scripts.library.adapters.network import AdapterNetwork
from sd_scripts.library.core.protocols import Parts, Samples
from sd_scripts.library.memory.arranging import Arranged, arrange
from sd_scripts.library.memory.oom_fallback import fallback_of
from sd_scripts.library.memory.recompile_count import recompile_count
from sd_scripts.library.memory.swapping import BlockSwap
from sd_scripts.library.objectives import make as objectives
from sd_scripts.library.objectives.colours import NUM_IMAGES, fit_colours
from sd_scripts.library.parallel.sharding import check_optimizer, shard, skeleton_of
from sd_scripts.library.render.renderer import Renderer
from sd_scripts.library.render.sample import Previews
from sd_scripts.runs.events import RunStarted, Warned
from sd_scripts.schema.errors import OptionError, Problem

from . import stepping
from .checkpoint import Checkpointer, read_state
from .conditioned import TrainedModel
from .describing import dataset_facts
from .editing import encoder_devices
from .environment import start_trackers
from .epochs import EpochTable
from .exporting import Exporter
from .fallbacks import Steps
from .learner import Learner
from .load import Loaded
from .observing import Observer
from .optim import make_optimizer
from .prepare import Prepared, prompts_in
from .profiling import StepProfiler
from .run_meta import devices
from .timetable import timetable_of
from .trainer import Trainer

log = logging.getLogger("sd_scripts")

WholeBackbone = Callable[[Iterable[tuple[str, Tensor]]], nn.Module]
"""Makes a whole network of the weights of one that is sharded and trained."""


class Swaps(Observer):
    """Says how often blocks came to the device."""

    def __init__(self, swap: BlockSwap) -> None:
        self._swap = swap

    def end(self, step: int) -> None:
        if self._swap.swapped:
            log.info("blocks were brought to the device %d times, %d of them late", self._swap.copies, self._swap.late)


def assemble(loaded: Loaded) -> Trainer:
    """The trainer of a start, at the step where it begins; the run's log says that it has started. Raises OptionError."""
    prepared, parts = loaded.prepared, loaded.parts
    options, process = prepared.options, prepared.process
    network, whole_backbone = _network(prepared, parts)
    arranged = arrange(parts, options, process.device, _is_sharded(prepared))
    _announce_compiling(prepared, arranged)
    optimizer = make_optimizer(options.optimizer, cast("Any", network).parameter_groups(options.network, options.optimizer.learning_rate))
    assert process.run is not None
    # The one that loads fastest waits here, and not in the exchange of weights, which has a limit.
    process.peers.barrier()
    epoch_of = prepared.plan.epoch_of
    facts = dataset_facts(prepared.plan, prepared.total_steps)
    exporter = Exporter(options, prepared.family, parts, network, facts, epoch_of, process.run, process.peers, process.warn, whole_backbone)
    process.resources.callback(exporter.finish_uploads)
    colours = _colours(loaded)
    learner = Learner(
        TrainedModel(family=prepared.family, parts=parts, network=network, data=loaded.data, compilation=arranged.compilation),
        prepared.family.objective(options.objective, parts.path, parts.kind, parts.scheduler_config, colours),
        optimizer,
        options.training,
        timetable_of(options, prepared.plan, prepared.total_steps),
        process,
        stepping.stepping_of(options.memory, optimizer, options.training.seed),
    )
    trainer = Trainer(
        Steps(learner, fallback_of(options, arranged, learner, process.warn) if options.memory.oom_fallback else None),
        checkpointer=Checkpointer(process.run, options.output, prepared.identity, epoch_of, prepared.total_steps),
        export=exporter,
        samples=_samples(loaded),
        observers=(
            StepProfiler(process.run, options.training.profile if process.is_main else 0, process.device),
            EpochTable(learner, process.run.epochs, options.objective.leading_parts),
            Swaps(arranged.swap),
        ),
    )
    _go_on(prepared, trainer)
    _say_started(prepared, trainer)
    return trainer


def _network(prepared: Prepared, parts: Parts) -> tuple[AdapterNetwork | WholeNetwork, WholeBackbone | None]:
    """What is trained, and with the model's own sharded weights what makes a whole network of them."""
    options, process = prepared.options, prepared.process
    network: AdapterNetwork | WholeNetwork
    if options.method == "network":
        targets = prepared.family.adapter_targets(parts, options.adapter.wants_convolutions)
        network = attach(parts, options.adapter, targets, options.training.seed)
    else:
        network = train_whole(parts, options.whole, prepared.family, stepping.trained_dtype(options.memory))
    whole_backbone = None
    if _is_sharded(prepared):
        # Each process keeps its share: of what is frozen when an adapter is trained, else of everything.
        whole = network.parameters()
        if isinstance(network, WholeNetwork):
            check_optimizer(options.optimizer.optimizer_type)
            whole_backbone, whole = skeleton_of(parts.backbone), []
        shard(parts.backbone, whole, process.device, process.peers.world)
    return network, whole_backbone


def _is_sharded(prepared: Prepared) -> bool:
    """Whether each process holds a share of the network."""
    return prepared.options.distributed.distributed_strategy == "fsdp2" and prepared.process.accelerator.num_processes > 1


def _announce_compiling(prepared: Prepared, arranged: Arranged) -> None:
    """Says what will be compiled, and how many graphs that makes at most."""
    made, process, options = arranged.compilation, prepared.process, prepared.options
    if made is None:
        return
    made.expect(recompile_count(options, prepared.plan.sizes()))
    if process.is_main:
        process.log(made.describe())
        most = (
            "as many graphs as sizes and lengths of texts turn out to need" if made.expected is None else f"at most {made.expected} graphs"
        )
        log.info("the first steps compile the %s with %s: %s", made.scope, options.compile.compile_backend, most)


def _colours(loaded: Loaded) -> Tensor | None:
    """The map from latents to colours, where a term of the loss looks at them."""
    prepared, vae = loaded.prepared, loaded.parts.vae
    if not objectives.wants_colours(prepared.options.objective, prepared.plan.own_terms):
        return None
    home, device = next(vae.parameters()).device, encoder_devices(prepared.options.model, prepared.process.device)[0]
    vae.to(device)
    latents = loaded.data.first_latents(NUM_IMAGES)
    colours = fit_colours(latents, lambda latents: prepared.family.decode(loaded.parts, latents.to(device)))
    vae.to(home)
    return colours


def _samples(loaded: Loaded) -> Samples | None:
    """Previews or evaluations by the first process; of a network that is sharded by all of them together. None without prompts."""
    prepared = loaded.prepared
    options, process, peers = prepared.options, prepared.process, prepared.process.peers
    assert process.run is not None

    def agreed(chosen: list[int]) -> list[int]:
        return list(json.loads(peers.same_text(json.dumps(chosen)))) if _is_sharded(prepared) else chosen

    evaluator = families.evaluator_of(prepared.family)
    if evaluator is not None:
        assert prepared.sources is not None
        return evaluator.evaluation(
            loaded.parts, options, prepared.plan, prepared.sources, loaded.data, process.run, peers.is_first, agreed, peers.progress
        )
    if not prepared.prompts:
        return None
    renderer = Renderer(loaded.previewing, loaded.parts, options.memory.vae_tiling)
    name = options.output.output_name
    same_text = peers.same_text if _is_sharded(prepared) else str
    return Previews(
        renderer,
        prepared.prompts,
        process.run,
        name,
        peers.is_first,
        agreed,
        peers.progress,
        lambda text: prompts_in(prepared, text),
        same_text,
    )


def _go_on(prepared: Prepared, trainer: Trainer) -> None:
    """Brings a trainer to the state where this start begins. Raises OptionError for one that does not fit."""
    folder, run = prepared.start.state, trainer.run
    if folder is None:
        return
    state, manifest = read_state(folder)
    try:
        trainer.load_state_dict(state)
    except ValueError as err:
        raise OptionError(Problem("resume", f"resume: the state {folder} does not fit: {err}")) from err
    if folder.parent == run.state:
        trainer.checkpointer.saved_step = manifest["step"]
        if prepared.process.is_main and (dropped := trainer.checkpointer.drop_states_after(manifest["step"])):
            run.log(Warned(text=f"training goes back to step {manifest['step']}; later states are removed: {dropped}"))


def _say_started(prepared: Prepared, trainer: Trainer) -> None:
    """The started event and line, and trackers."""
    options, process, plan = prepared.options, prepared.process, prepared.plan
    if not process.is_main:
        return
    described = plan.describe()
    process.log(
        RunStarted(
            steps=prepared.total_steps,
            start_step=trainer.step,
            epochs=plan.epoch_of(prepared.total_steps - 1) + 1,
            images=described["images"],
            batch=plan.global_batch_size,
            seed=options.training.seed,
            pid=os.getpid(),
            script=options.script,
        )
    )
    log.info(
        "%s: steps %d to %d, %d images, batch %d, %s trained weights, %s, %s",
        trainer.run.path,
        trainer.step,
        prepared.total_steps,
        described["images"],
        plan.global_batch_size,
        f"{sum(weight.numel() for weight in trainer.learner.weights.values()):,}",
        options.training.mixed_precision,
        devices()[0]["name"] if devices() else "CPU",
    )
    start_trackers(process.accelerator, options, trainer.run)
