"""What the page of lora-scripts (SD-Trainer) has beside the options of sd-scripts, which it starts: the kind of training, previews.

Facts about the program are those of its commit fdefba9 (2025-09), read in its code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.outside import toml_of
from sd_scripts.schema.sheet import is_empty, is_off, parts, unless_off

from .rules import write_prompts
from .sheet import KohyaSheet, Table, rules

TYPE = "model_train_type"
_PLAIN = {"lycoris_algo": "algo", "lokr_factor": "factor"}
"""Widgets of the page for what stands in network_args."""
_LISTS = {"network_args_custom": "network_args", "optimizer_args_custom": "optimizer_args"}
_OF_PRODIGY = ("prodigy_d0", "prodigy_d_coef")
RULES: Table = {}
rule = rules(RULES)


def plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """The page's settings under the names that sd-scripts has: its text of parameters of one's own wins, lists of arguments are joined."""
    own = str(given.get("ui_custom_params") or "")
    try:
        found = {**given, **toml_of(own)} if own.strip() else dict(given)
    except ValueError as err:
        raise OptionError(f"ui_custom_params is not valid TOML: {err}") from err
    found.pop("ui_custom_params", None)
    for name, ours in _PLAIN.items():
        if name in found:
            found.setdefault(ours, found.pop(name))
    of_prodigy = [f"{name.removeprefix('prodigy_')}={found.pop(name)}" for name in _OF_PRODIGY if not is_empty(found.get(name))]
    for name, ours in _LISTS.items():
        more = [*parts(found.pop(name, None) or ()), *(of_prodigy if ours == "optimizer_args" else [])]
        if more:
            found[ours] = [*parts(found.get(ours) or ()), *more]
    return found


@rule(TYPE)
def _type(sheet: KohyaSheet, key: str) -> None:
    sheet.skip(key, f"the kind of run says it: {sheet.run.label}")


@rule("enable_preview", "enable_base_weight", "enable_block_weights")
def _switches(sheet: KohyaSheet, key: str) -> None:
    sheet.skip(key, "it is off" if is_off(sheet.value(key)) else "what belongs to it says it")


_FLAGS = {"n": "negative_prompts", "w": "sample_width", "h": "sample_height", "l": "sample_cfg", "d": "sample_seed"}


@rule("positive_prompts", "prompt_file", *_FLAGS.values())
def _previews(sheet: KohyaSheet, key: str) -> None:
    """One prompt and what belongs to it, or a file of prompts, which wins."""
    file = str(sheet.value("prompt_file") or "").strip()
    if "enable_preview" in sheet.given and not sheet.on("enable_preview"):
        sheet.skip(key, "no previews are drawn")
    elif file:
        write_prompts(sheet, key, file) if key == "prompt_file" else sheet.skip(key, "prompt_file wins")
    elif is_empty(sheet.value("positive_prompts")):
        sheet.skip(key, "there is no prompt")
    elif key != "positive_prompts":
        sheet.skip(key, "it stands in sample_prompts")
    else:
        prompt = " ".join(str(sheet.value(key)).split())
        flags = {flag: " ".join(str(sheet.value(name)).split()) for flag, name in _FLAGS.items() if not is_empty(sheet.value(name))}
        write_prompts(sheet, key, " --".join([prompt, *(f"{flag} {value}" for flag, value in flags.items())]))


@rule("randomly_choice_prompt")
@unless_off
def _drawn_caption(sheet: KohyaSheet, key: str) -> None:
    sheet.refuse(key, "no caption is drawn for previews; write a prompt as sample_prompts")
