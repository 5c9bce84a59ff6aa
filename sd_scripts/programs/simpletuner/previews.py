"""What SimpleTuner draws while it trains, and whom it tells: previews, trackers, uploads."""

from __future__ import annotations

import re

from sd_scripts.schema.sheet import is_empty, is_off, parts

from ..table import ForeignSheet, Rule, Table, each, line_of_prompt, more_than_zero, only, to, where

LIBRARY = "user_prompt_library"


def _previews(sheet: ForeignSheet, key: str) -> None:
    """The prompt, and those of the library, which has a name for each."""
    library = [name for name in sheet.given if name.startswith(f"{LIBRARY}.")]
    texts = {name: sheet.value(name) for name in ("validation_prompt", *library) if not is_empty(sheet.value(name))}
    if not texts or sheet.on("validation_disable"):
        sheet.skip(key, "no previews are drawn")
    elif key != next(iter(texts)):
        sheet.skip(key, "it stands in sample_prompts")
    else:
        sides = [int(side) for side in re.findall(r"\d+", str(sheet.value("validation_resolution") or ""))[:2]]
        flags = {"d": sheet.value("validation_seed"), "w": sides[0] if sides else None, "h": sides[-1] if sides else None}
        sheet.take(key, "sample_prompts", "\n".join(line_of_prompt(text, **flags) for text in texts.values()), "a prompt a line")


def _tracker(sheet: ForeignSheet, key: str) -> None:
    names = [name for name in parts(sheet.value(key)) if name in ("wandb", "tensorboard")]
    if not names:
        told = "it is off" if is_off(sheet.value(key)) else "tensorboard and wandb are the trackers here; the page shows the curves"
        sheet.skip(key, told)
    else:
        sheet.take(key, "log_with", "all" if len(names) > 1 else names[0])


def _tracked(option: str) -> Rule:
    tracks = ("wandb",) if option == "wandb_run_name" else ("wandb", "tensorboard")
    return where(lambda sheet: any(name in str(sheet.value("report_to")) for name in tracks), to(option), "no tracker would use it")


def _hub(sheet: ForeignSheet, key: str) -> None:
    repository = str(sheet.value("hub_model_id") or "")
    if is_off(sheet.value("push_to_hub")) or is_empty(repository):
        sheet.skip(key, "nothing is uploaded")
    elif key != "hub_model_id":
        sheet.skip(key, "huggingface_repo_id says it")
    elif "/" not in repository:
        sheet.refuse(key, "write it as owner/name")
    else:
        sheet.take(key, "huggingface_repo_id", repository)


def holds_prompts(given: object) -> bool:
    """Whether every value is a text of several words, as no file of settings has."""
    return isinstance(given, dict) and bool(given) and all(isinstance(text, str) and len(text.split()) > 2 for text in given.values())


OF_LIBRARY: Table = {f"{LIBRARY}.*": _previews}
"""The rules of a file of prompts alone."""
TABLE: Table = {
    **each("", "validation_prompt validation_seed validation_resolution", _previews),
    **each("", "validation_steps validation_step_interval", more_than_zero("sample_every_n_steps")),
    "validation_epoch_interval": more_than_zero("sample_every_n_epochs"),
    "validation_num_inference_steps": to("sample_steps"),
    "validation_negative_prompt": to("sample_negative_prompt"),
    "disable_benchmark": lambda sheet, key: sheet.take(key, "sample_at_first", is_off(sheet.value(key))),
    "user_prompt_library": only(None, "the file was not there to be read; open it too, or write its prompts as sample_prompts, one a line"),
    **OF_LIBRARY,
    "report_to": _tracker,
    "tracker_project_name": _tracked("log_tracker_name"),
    "tracker_run_name": _tracked("wandb_run_name"),
    **each("", "push_to_hub push_checkpoints_to_hub hub_model_id push_to_hub_background", _hub),
}
