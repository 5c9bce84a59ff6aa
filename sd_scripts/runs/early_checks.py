"""What is wrong with a run's options, as far as it can be told at once: no library is loaded, no image and no weight is looked at."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path

from sd_scripts.dataset.archives import archives_in
from sd_scripts.dataset.buckets import problems_of
from sd_scripts.families import FACTS
from sd_scripts.runs.schedules import factor_at, key_values
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError, Problem, gathering, refuse
from sd_scripts.schema.files import is_json
from sd_scripts.schema.model import built_in, is_hub_id, not_there
from sd_scripts.schema.optimizer import PACKAGES
from sd_scripts.schema.prompts import Defaults, read_prompts
from sd_scripts.schema.runs import RunOptions

from . import gpus
from .layers import LayerTable, blocks_in, examples, layers_of
from .model_files import problems_of_file, problems_of_toy
from .model_headers import read_safetensors
from .optimizer_arguments import problems_of_arguments
from .resume import epoch_in

PLAIN_FILES = ("base_weights", "network_weights", "training_adapter", "tokenizer")
"""Options that name a file on this disk; others of a model may name one on the hub."""
_MORE_BLOCKS = 200
"""Beyond what anybody has made of a published model."""
ADAPTERS = ("base_weights", "network_weights", "training_adapter")
"""Options that name LoRA files."""


def check_early(options: RunOptions, trains_here: bool = True) -> None:
    """Everything that can be checked without loading a library. Raises OptionError with every problem."""
    problems = [*missing_packages(options), *(missing_devices(options) if trains_here else ())]
    with gathering(problems):
        check_settings(options)
    refuse(problems)


def missing_packages(options: RunOptions) -> list[Problem]:
    """Packages that the run needs and this machine lacks, which a dry run can do without."""
    name = options.optimizer.optimizer_type
    package = PACKAGES.get(name)
    if package is None or importlib.util.find_spec(package.replace("-", "_")) is not None:
        return []
    return [Problem("optimizer_type", f"optimizer_type: {name} needs the package {package}: pip install {package}, or choose AdamW")]


def missing_devices(options: RunOptions) -> list[Problem]:
    """Devices, and kernels of GPUs, that the run names and this machine lacks; nothing where the driver is one that this cannot ask."""
    if sys.platform == "darwin" or not gpus.are_known():
        return []
    count, problems = len(gpus.visible()), list[Problem]()
    here = f"{count} GPUs are here, cuda:0 to cuda:{count - 1}" if count > 1 else "one GPU is here, cuda:0" if count else "no GPU is here"
    for name, device in zip(("vae_device", "text_encoder_device"), options.model.encoder_devices, strict=True):
        if device is not None and device.startswith("cuda") and int(device.partition(":")[2] or 0) >= count:
            problems.append(Problem(name, f"{name}: {device} is not there: {here}; choose another device, or leave it empty"))
    backend = options.memory.attention_backend
    if backend in ("efficient", "cudnn") and not count:
        text = f"{backend} computes on GPUs, and {here}; choose auto, flash or math"
        problems.append(Problem("attention_backend", f"attention_backend: {text}"))
    return problems


def check_settings(options: RunOptions) -> None:
    """What can be checked so early on any machine. Raises OptionError with every problem."""
    problems: list[Problem] = []
    checks: list[Callable[[RunOptions], None]] = [
        *(_check_folders, _check_models, _check_layers, _check_sizes, _check_optimizer, _check_prompts, _check_trackers),
        _check_resume,
    ]
    if options.output.huggingface_repo_id is not None:
        checks.append(_check_upload)
    for check in checks:
        with gathering(problems):
            check(options)
    refuse(problems)


def _check_folders(options: RunOptions) -> None:
    data = options.dataset
    problems = []
    for name in ("train_data_dir", "reg_data_dir", "conditioning_data_dir"):
        value = getattr(data, name)
        made = name == "reg_data_dir" and data.num_class_images > 0
        packed = name == "train_data_dir" and value is not None and bool(archives_in(Path(value).expanduser()))
        if value is not None and not made and not packed and not value.startswith("toy:") and not Path(value).expanduser().is_dir():
            problems.append(Problem(name, f"{name}: there is no folder {value}"))
    for name in ("dataset_config", "in_json"):
        value = getattr(data, name)
        if value is not None and not is_json(value) and not Path(value).expanduser().is_file():
            problems.append(Problem(name, f"{name}: there is no file {value}"))
    # The caches lie in output_dir unless cache_dir is given: what is wrong with the one must not be blamed on the other.
    for name, value in (("output_dir", options.output.output_dir), ("cache_dir", data.cache_dir)):
        if value is not None and (why := _why_not_written(Path(value).absolute())):
            problems.append(Problem(name, f"{name}: {value} cannot be written to: {why}; choose another folder"))
    refuse(problems)


def _check_models(options: RunOptions) -> None:
    """Files of models that are named and are not there, or are none; what the hub has is asked when it is loaded."""
    problems = []
    for name, field in flat.fields(type(options)).items():
        if field.section not in ("model", "network") or field.show.kind != "file":
            continue
        given = getattr(getattr(options, field.section), name)
        for value in given if isinstance(given, tuple) else [given]:
            if value is None or built_in(value, options.family) is not None:
                problems += problems_of_toy(options.family, name, value, field.show.suggestions) if value else []
            elif Path(value).expanduser().exists():
                problems += problems_of_file(options.family, name, value, name in ADAPTERS, _kind_in(options, name))
            elif name in PLAIN_FILES:
                problems.append(Problem(name, f"{name}: there is no file {value}"))
            elif not is_hub_id(value):
                problems.append(Problem(name, not_there(name, value, "toy" in field.show.suggestions)))
    refuse(problems)


def _kind_in(options: RunOptions, name: str) -> str | None:
    """The kind of adapter that a file must hold; None where any will do."""
    return getattr(options.network, "network_type", None) if name == "network_weights" else None


def _check_layers(options: RunOptions) -> None:
    """What the model does not have: so many blocks, layers by such names."""
    known, problems = _layers_known(options), list[Problem]()
    if known is None:
        return
    swapped = options.memory.blocks_to_swap
    if swapped > known.blocks:
        text = f"{FACTS[options.family].label} has {known.blocks} blocks, not {swapped}; set it to {known.blocks} or less"
        problems.append(Problem("blocks_to_swap", f"blocks_to_swap: {text}"))
    if options.method == "network":
        for name in ("target_modules", "exclude_modules"):
            lost = [text for text in getattr(options.network, name) if not known.finds(text)]
            for text in lost:
                looks = f"names look like {examples(known.layers, 5)}"
                problems.append(Problem(name, f"{name}: {text!r} matches no layer of {FACTS[options.family].label}; {looks}"))
    refuse(problems)


def _layers_known(options: RunOptions) -> LayerTable | None:
    """The layers of the base model. Files say themselves how many blocks they have; what is on the hub is taken for a published model."""
    table, base = layers_of(options.family), options.model.pretrained_model_name_or_path
    if table is None or not base or base == "toy":
        return table
    place = Path(base).expanduser()
    files = [place] if place.is_file() else sorted(place.glob("transformer/*.safetensors"))
    try:
        counted = blocks_in(name for file in files for name in read_safetensors(file, "").shapes)
    except (OptionError, OSError):
        # Whatever is wrong with a file is told where it is named.
        counted = None
    if counted is not None:
        return table.with_blocks(counted)
    # A folder has a configuration of its own.
    return table.with_blocks(table.blocks + _MORE_BLOCKS) if place.is_dir() else table


def _why_not_written(place: Path) -> str:
    """Why no folder can be made there, as far as it can be told without making one."""
    there = next(folder for folder in (place, *place.parents) if os.path.lexists(folder))
    if not there.is_dir():
        return f"{there} is no folder"
    return "" if os.access(there, os.W_OK | os.X_OK) else f"you may not write to {there}"


def _check_sizes(options: RunOptions) -> None:
    if problems := problems_of(options.dataset, options.model.grid):
        raise OptionError(problems)


def _check_optimizer(options: RunOptions) -> None:
    optimizer = options.optimizer
    given = key_values("optimizer_args", optimizer.optimizer_args)
    if problems := problems_of_arguments(optimizer.optimizer_type, given):
        raise OptionError(problems)
    if optimizer.lr_scheduler_type is None:
        factor_at(optimizer, options.training.max_train_steps)


def _check_prompts(options: RunOptions) -> None:
    read_prompts(Defaults(options.samples, options.dataset.resolution, options.model.grid, options.training.seed))


def _check_trackers(options: RunOptions) -> None:
    chosen = options.output.log_with
    for name in ("tensorboard", "wandb"):
        if chosen in (name, "all") and importlib.util.find_spec(name) is None:
            raise OptionError(Problem("log_with", f"log_with: {chosen} needs the package {name}: pip install {name}, or log_with = none"))
    offline = os.environ.get("WANDB_MODE", "online") != "online"
    if chosen in ("wandb", "all") and not offline and "WANDB_API_KEY" not in os.environ:
        raise OptionError(
            Problem("log_with", f"log_with: {chosen} needs your key in the environment variable WANDB_API_KEY (or WANDB_MODE=offline)")
        )


def _check_upload(options: RunOptions) -> None:
    from sd_scripts.runs.hub import check

    check(options.output)


def _check_resume(options: RunOptions) -> None:
    resume = options.distributed.resume
    named = resume in ("auto", "latest", "none") or resume.isdigit() or epoch_in(resume) is not None
    if not named and not Path(resume).expanduser().is_dir():
        text = "give auto, latest, none, a step, epoch:N, or the folder of a state or of a run"
        raise OptionError(Problem("resume", f"resume: {resume} is not a folder; {text}"))
