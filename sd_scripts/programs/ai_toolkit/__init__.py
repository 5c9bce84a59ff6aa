"""Jobs of ai-toolkit (YAML, or the JSON of its page), as a kind of run, values and a report.

Facts about the other program are those of its commit 27a03a9 (2026-08), read in its code.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.imported import Imported, Importer

from ..table import ForeignSheet, Table, assume_layers, each, fill, only, opened, to, unneeded
from . import data, model, models, previews, training
from .models import PROGRAM, SCHEDULERS, name_of

__all__ = ["IMPORTER", "PROGRAM", "SCHEDULERS", "TABLE", "looks_like", "models", "name_of", "read"]

_DEFAULTS: dict[str, object] = {
    "network_dim": 4,
    "network_alpha": 1.0,
    "learning_rate": 1e-6,
    "max_train_steps": 1000,
    "lr_scheduler": "constant",
    "lr_warmup_steps": 0,
    "gradient_checkpointing": True,
    "resolution": [512, 512],
    "save_every_n_steps": 1000,
    "save_last_n_steps": 5000,
    "mixed_precision": "no",
    "sample_every_n_steps": 100,
    "sample_cfg_scale": 7.0,
    "sample_steps": 20,
    "sample_size": [512, 512],
}
"""That program's own, where they may not be ours."""


def looks_like(given: Mapping[str, object]) -> bool:
    """Whether a file's tables are a job."""
    config = given.get("config")
    return "job" in given and isinstance(config, Mapping) and "process" in config


def read(name: str, given: Mapping[str, Any]) -> Imported:
    """The settings of a job, with a row for each key, named by its path in the process. Raises OptionError for a job that trains nothing
    that is trained here."""
    process = _process(name, given)
    said = models.said_by(process)
    method = "network" if isinstance(process.get("network"), Mapping) else "full"
    run, found = models.run_for(name, said, method)
    config = {f"config.{key}": value for key, value in given["config"].items() if key != "process"}
    rest = opened({key: value for key, value in given.items() if key != "config"})
    sheet = ForeignSheet(PROGRAM, run, {**rest, **config, **opened(process)}, found)
    for option, value in {**found.options, **models.TAGS.get(said, {})}.items():
        sheet.put(option, value, "model.arch" if "model.arch" in sheet.given else "")
    fill(sheet, TABLE)
    assume_layers(sheet)
    return sheet.finish(f"job of {PROGRAM}", _defaults(sheet))


def _defaults(sheet: ForeignSheet) -> dict[str, object]:
    """That program's own, as far as they mean something to this job."""
    without: tuple[str, ...] = ("network_",) if sheet.run.method == "full" else ()
    without += () if sheet.values.get("sample_prompts") else ("sample_",)
    without += ("sample_cfg_scale",) if "sample_guidance_scale" in sheet.known else ()
    found = {name: value for name, value in _DEFAULTS.items() if not name.startswith(without or ("-",))}
    found |= training.of_optimizer(sheet)
    found |= {"lr_warmup_steps": 1000} if sheet.values.get("lr_scheduler") == "constant_with_warmup" else {}
    return {**found, **({"timestep_sampling": "sigmoid"} if training.is_flow(sheet) else {})}


def _process(name: str, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one process of a job. Raises OptionError for what is not a training of images."""
    found = given["config"]["process"]
    found = [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []
    if len(found) != 1:
        raise OptionError(f"{name} is a job of {PROGRAM} with {len(found)} processes; give a job with the one that trains")
    kind = str(found[0].get("type") or "")
    if kind not in models.TRAINERS:
        raise OptionError(
            f"{name} is a job of {PROGRAM} for {kind or 'nothing that it names'}, not a training of a LoRA or a model; sliders, "
            "extracting, merging and generating are not read"
        )
    for table, what in (("adapter", "an adapter for images as conditions"), ("embedding", "an embedding"), ("decorator", "a decorator")):
        if isinstance(found[0].get(table), Mapping):
            raise OptionError(f"{name} is a job of {PROGRAM} that trains {what}, which is not trained here")
    process: Mapping[str, Any] = found[0]
    return process


TABLE: Table = {
    **models.TABLE,
    **model.TABLE,
    **training.TABLE,
    **data.TABLE,
    **previews.TABLE,
    "job": unneeded("it says that the file is a job"),
    "meta.*": unneeded("it is a note on the file"),
    "config.name": to("output_name", convert=lambda value: re.sub(r"[\x00-\x1f/\\:*?\"<>|]", "-", str(value)).lstrip(".")[:120]),
    "type": unneeded("the kind of run says it"),
    "training_folder": to("output_dir"),
    "device": unneeded("the launcher chooses devices; gpu_ids names them"),
    "training_seed": to("seed"),
    **each("", "do_lorm guidance", only(False, "it is not part of this version", banner=True)),
    "first_sample.*": unneeded("the previews before the first step are those of sample"),
    **each("", "torch_profiler log_dir lorm_extract_mode lorm_extract_mode_param", unneeded("it changes nothing that is trained")),
    **each("", "sqlite_db_path performance_log_every job_id is_ui_trainer", unneeded("it belongs to that program's page")),
}
"""The rule of each key, by its path in the process."""

IMPORTER = Importer(f"a job of {PROGRAM} (.yaml or .json)", (".yaml", ".yml", ".json"), looks_like, read)
