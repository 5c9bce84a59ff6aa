"""Kinds of models that adapters are for: a family's one or its versions, by what files of adapters and other programs know of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from sd_scripts.families import NAMES
from sd_scripts.library.core.protocols import Version
from sd_scripts.library.loading.common import Config, FamilySpec
from sd_scripts.runs.model_headers import Header

if TYPE_CHECKING:
    from .layer_names import LayerNames
    from .ranks import Ranks
    from .readers import Rule


@dataclass(frozen=True)
class Prefixes:
    """How the name of a layer begins, by module: the first is written, all are read."""

    kohya: Mapping[str, tuple[str, ...]]
    diffusers: Mapping[str, tuple[str, ...]]
    comfyui: Mapping[str, tuple[str, ...]]

    def __or__(self, more: Prefixes) -> Prefixes:
        """Of the modules of both; a module in both has those of more."""
        return Prefixes({**self.kohya, **more.kohya}, {**self.diffusers, **more.diffusers}, {**self.comfyui, **more.comfyui})


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """What a family states about a kind of model in its names.py. No two architectures have a backbone or a kind of file in common."""

    name: str
    """Families whose models have the same layers have one architecture, which each of them states: that of the first counts."""
    label: str
    """As in "a LoRA for ..."."""
    spec: FamilySpec
    """How its files are read."""
    is_backbone: Callable[[Config], bool]
    """Whether the configuration of a network of the backbone's class is one of this architecture."""
    config_of: Callable[[Header, Mapping[str, tuple[int, ...]]], Config] | None
    """The backbone's configuration from a file's header and its own shapes in it; None where files have that of the published model. Raises
    KeyError, IndexError, ValueError or ZeroDivisionError for tensors of another network."""
    files: tuple[str, ...]
    """What what_is calls its files."""
    encoders: tuple[str, ...]
    """Text encoders that adapters may be on."""
    version: Version
    """In the headers of files that tools make."""
    told_by: tuple[str, ...]
    """How the version begins in headers of adapter files whose layers do not tell which architecture they are for; empty where they do."""
    prefixes: Prefixes
    layer_names: Callable[[Architecture, Config, Iterable[str]], LayerNames]
    """Names of a model's layers, from the backbone's configuration and the layers `<module>.<layer>`."""
    ranks: Callable[[Any, Any], Ranks]
    """From the family's network options and the names of a model's layers."""
    has_one_alpha: bool
    """Whether all layers of a module have one alpha under kohya's names: diffusers' reader of UNet files loses those of attention layers
    when they differ."""
    comfyui_endings: Literal["kohya", "peft", "peft without alpha"]
    """Endings of tensors under ComfyUI's names: lora_down and lora_up, or lora_A and lora_B."""
    readers: Mapping[str, tuple[Rule, ...]]
    """Layers that other programs find, by the program's name in readers.PROGRAMS; those without rules do not know the architecture."""

    def carries_adapters(self, part: str) -> bool:
        """Whether adapters may be on a network of this name in Parts.modules(): not on a VAE, nor on a language model that only reads."""
        return part in ("backbone", *self.encoders)

    def named_by(self, text: str) -> int:
        """How many letters of a header's text name this architecture; 0 for a text about another, and where layers tell."""
        return max((len(start) for start in self.told_by if text.lower().startswith(start)), default=0)


@cache
def architectures() -> dict[str, Architecture]:
    """All architectures by name, in the order of their families."""
    modules = [f"sd_scripts.families.{name}.names" for name in NAMES]
    found: dict[str, Architecture] = {}
    for module in modules:
        if find_spec(module) is not None:
            for one in import_module(module).ARCHITECTURES:
                found.setdefault(one.name, one)
    return found


def architecture_of(class_names: Iterable[str], config: Config) -> Architecture | None:
    """The architecture of a backbone by the names of its class and those above it; None for another network."""
    names = set(class_names)
    known = architectures().values()
    return next((one for one in known if one.spec.parts["backbone"].class_name in names and one.is_backbone(config)), None)
