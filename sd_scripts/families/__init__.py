"""The model families by name. Importing this imports no model library; `family` imports the one that is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import cast

from sd_scripts.library.core.protocols import ModelFamily, NewFamily
from sd_scripts.schema.errors import OptionError

FAMILIES: dict[str, str] = {
    "sd": "sd_scripts.families.sd.model:Sd",
    "sdxl": "sd_scripts.families.sdxl.model:Sdxl",
    "flux": "sd_scripts.families.flux.model:Flux",
    "qwen_edit": "sd_scripts.families.qwen_edit.model:QwenEdit",
    "zimage": "sd_scripts.families.zimage.model:ZImage",
    "ddpm": "sd_scripts.families.ddpm.model:Ddpm",
    "lgt": "sd_scripts.families.lgt.model:Lgt",
}
"""Import path of each family's class by the family's name."""

NAMES: tuple[str, ...] = tuple(FAMILIES)


def family(name: str) -> ModelFamily:
    """The family of that name. Raises OptionError for an unknown one."""
    if name not in FAMILIES:
        raise OptionError(f"family: {name} is not known; there are {', '.join(NAMES)}")
    module, _, attribute = FAMILIES[name].partition(":")
    made: ModelFamily = getattr(import_module(module), attribute)()
    return made


def maker_of(family: ModelFamily) -> NewFamily | None:
    """The family as one whose runs make their model; None where models are only loaded."""
    return cast(NewFamily, family) if hasattr(family, "is_new") else None
