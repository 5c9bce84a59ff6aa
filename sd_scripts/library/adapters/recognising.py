"""Which model family an adapter file is for, from its names, and from its header where names do not tell."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sd_scripts.schema.errors import OptionError

from .layer_names import LABELS, Family, Names
from .names import names_for
from .reading import place_of

_SHARE = 0.9
# FLUX and Qwen-Image share the names of the attention in their double blocks, and its width.
_ALIKE: tuple[Family, ...] = ("flux", "qwen_edit")
_VERSIONS: tuple[tuple[str, Family], ...] = (("flux", "flux"), ("qwen", "qwen_edit"))


def other_family(keys: Collection[str], header: Mapping[str, str], names: Names) -> Family | None:
    """The family that a file is plainly for, when that is another than that of the names; None in any doubt."""
    fitting = sum(place_of(key, names) is not None for key in keys)
    if fitting == len(keys):
        found = family_in_header(header)
        return found if found != names.family and {found, names.family} <= set(_ALIKE) else None
    return _by_names(keys, names.family, fitting)


def check_family(keys: Collection[str], header: Mapping[str, str], names: Names, file: str) -> None:
    """Raises OptionError for a file that is plainly for another family than that of the names; any doubt is left to reading it."""
    other = other_family(keys, header, names)
    if other is not None:
        raise OptionError(
            f"{file} is a LoRA for {LABELS[other]}, but the model is {LABELS[names.family]}; give a file that was made for this model"
        )


def family_in_header(header: Mapping[str, str]) -> Family | None:
    """The family that a trainer has written into the header, for those whose names do not always tell; None without."""
    texts = [header.get(key, "").lower() for key in ("ss_base_model_version", "modelspec.architecture")]
    return next((family for start, family in _VERSIONS if any(text.startswith(start) for text in texts)), None)


def _by_names(keys: Collection[str], own: Family, fitting: int) -> Family | None:
    """The family that nearly all names fit, and more than fit this one."""
    fits = {family: sum(place_of(key, names_for(family)) is not None for key in keys) for family in LABELS if family != own}
    best = max(fits, key=lambda family: fits[family])
    return best if fits[best] > fitting and fits[best] >= _SHARE * len(keys) else None
