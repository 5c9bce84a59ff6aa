"""What a family states about itself without torch: frozen, complete, and with no default that could be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KohyaFacts:
    """What kohya's programs (sd-scripts, and its page kohya_ss) have for a family that they train as well, to read what they write."""

    asked: int
    """In which order a file is asked whether it is for this family, from 0."""
    boxes: tuple[str, ...]
    """Switches that say so."""
    versions: tuple[str, ...]
    """Switches between versions of the family, which say so where neither its options nor names of models do."""
    marks: tuple[str, ...]
    """Options that only the family's scripts have."""
    models: tuple[str, ...]
    """Pieces of names of its base models, in small letters."""
    side: int | None
    """A file without any other sign is for it from this resolution on, in pixels; None never."""
    model_type: str | None
    """The model_type of its scripts; None where they have no such option."""
    like: tuple[str, ...]
    """Families that are trained there and not here, and are more like this one than like the others."""
    prefix: str
    """How names that are for this family alone begin; empty where none do."""
    names: Mapping[str, str]
    """What the page calls otherwise for this family, with the name that others have for it."""
    types: Mapping[str, str]
    """Modules and types of adapters that are for this family alone, with the type that they are, in small letters."""
    defaults: Mapping[str, object]
    """Defaults of its scripts that are others than ours and change what is trained."""
    text_rates: tuple[str, ...]
    """Learning rates of the text encoders of a whole model, one for each."""
    dreambooth_trains_text: bool
    """Whether a script for DreamBooth trains the text encoder unless it is told not to."""
    unet_blocks: tuple[int, int, int] | None
    """Input, middle and output blocks that have ranks and rates of their own; None without a UNet."""
    swaps_pairs: bool
    """Whether blocks_to_swap there counts half as double blocks, and the rest twice as single blocks."""


@dataclass(frozen=True, kw_only=True)
class AdapterMarks:
    """By what the header of an adapter's file is known to be for a family."""

    architectures: tuple[str, ...]
    """How ss_base_model_version or modelspec.architecture begins, in small letters."""
    text_widths: tuple[int, ...]
    """Width of the texts that its UNet's attention reads; empty without a UNet."""
    layers: str
    """A regular expression for a name of a layer; families that stand later in lists are asked first."""


@dataclass(frozen=True, kw_only=True)
class FamilyFacts:
    """Everything the program must know of a family besides its options and its model. What is missing is an error at import."""

    label: str
    """The family's name on the page."""
    place: int
    """Where it stands in lists, from 0; two families never have the same."""
    evaluates: bool
    """Whether its runs are shown by evaluations of its own, and not by prompts."""
    demo: str | None
    """Built-in preset of an adapter that teaches the family's toy base a star; the demo takes that of the first family which has one."""
    labels: Mapping[str, str]
    """What options are called on the page where they mean something else than elsewhere."""
    kohya: KohyaFacts | None
    """None for a family that kohya's programs do not train, or not as this one does."""
    adapters: AdapterMarks | None
    """None for a family without adapters."""
