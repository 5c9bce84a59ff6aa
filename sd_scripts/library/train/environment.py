"""Processes, devices, precision and trackers of one start, as its options ask for them. Knows no networks and no images."""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator

from sd_scripts.library.core.errors import TrainingError
from sd_scripts.library.parallel.peers import join, world_size
from sd_scripts.runs.command import launch_command, shown
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.runs import RunOptions

DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""By the names of mixed_precision."""


def check_processes(options: RunOptions) -> None:
    """Raises OptionError when one process was started for a run that asks for several, with the command that starts them."""
    asked = options.distributed
    here = asked.num_gpus or len(asked.gpu_ids) or 1
    wanted = here * asked.num_machines
    if world_size() > 1 or wanted == 1 or not asked.multi_gpu:
        return
    command = shown([*launch_command(options), *sys.argv[1:]])
    text = f"multi_gpu: the run asks for {wanted} processes, but one was started, which would train alone; start it with: {command}"
    raise OptionError(Problem("multi_gpu", text))


def with_global_batch(options: RunOptions, num_processes: int) -> RunOptions:
    """The options with the gradient_accumulation_steps that global_batch_size asks for. Raises OptionError when there is no such number."""
    wanted, batch = options.distributed.global_batch_size, options.dataset.train_batch_size
    if wanted is None:
        return options
    at_once = batch * num_processes
    if wanted % at_once:
        low, high = wanted // at_once * at_once, -(-wanted // at_once) * at_once
        near = " and ".join(str(value) for value in (low, high) if value)
        fitting = [str(value) for value in range(1, wanted // num_processes + 1) if wanted % (value * num_processes) == 0]
        other = f", or train_batch_size {', '.join(fitting)}" if fitting else ""
        text = (
            f"global_batch_size: {wanted} samples cannot be shared evenly by {num_processes} processes with train_batch_size {batch}; "
            f"the nearest that can are {near}{other}"
        )
        raise OptionError(Problem("global_batch_size", text))
    steps = {"gradient_accumulation_steps": wanted // at_once}
    return options.model_copy(update={"training": options.training.model_copy(update=steps)})


def make_accelerator(options: RunOptions) -> Accelerator:
    """Devices and processes. Raises TrainingError when the launcher started another number of processes than it said."""
    trackers = {"none": None, "all": ["tensorboard", "wandb"]}.get(options.output.log_with, options.output.log_with)
    join(options.distributed)
    accelerator = Accelerator(
        # Precision is the trainer's own business: it casts, scales and checks by itself.
        mixed_precision="no",
        # Without a GPU accelerate joins the processes of a launch only when it is told that this is meant.
        cpu=not torch.cuda.is_available() and not torch.backends.mps.is_available(),
        log_with=trackers,
        project_dir=options.output.output_dir,
    )
    if accelerator.num_processes != world_size():
        raise TrainingError(
            f"the launcher started {world_size()} processes, but only {accelerator.num_processes} of them found each other, so each would "
            "train alone. Turn multi_gpu on and use the command that the page prints (accelerate launch --multi_gpu --num_processes N)"
        )
    return accelerator


def with_precision(options: RunOptions, device: torch.device) -> RunOptions:
    """The options with mixed_precision = auto replaced by what this device does best."""
    if options.training.mixed_precision != "auto":
        return options
    if device.type == "cuda":
        chosen = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    else:
        chosen = "no"
    return options.model_copy(update={"training": options.training.model_copy(update={"mixed_precision": chosen})})


def start_trackers(accelerator: Accelerator, options: RunOptions, run: RunDirectory) -> None:
    """TensorBoard and Weights & Biases, when asked for. They get the settings of the run without folders and files."""
    output = options.output
    if output.log_with == "none":
        return
    # Known only now: the accelerator was made before the run had a folder.
    accelerator.project_configuration.logging_dir = str(run.path / "trackers")
    known = flat.fields(type(options))
    shown = {name: value for name, value in flat.flatten(options).items() if known[name].show.kind not in ("folder", "file")}
    config = {name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in shown.items()}
    accelerator.init_trackers(
        output.log_tracker_name or output.output_name,
        config=config,
        init_kwargs={"wandb": {"name": output.wandb_run_name or run.name, "dir": str(run.path)}},
    )
