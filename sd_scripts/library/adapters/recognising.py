"""Which architecture an adapter file is for, from its names, and from its header where names do not tell."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sd_scripts.schema.errors import OptionError

from .architectures import Architecture, architectures
from .layer_names import Names
from .names import names_for
from .reading import place_of

_SHARE = 0.9


def other_architecture(keys: Collection[str], header: Mapping[str, str], names: Names) -> Architecture | None:
    """What a file is plainly for, when that is another architecture than that of the names; None in any doubt."""
    own = names.architecture
    fitting = sum(place_of(key, names) is not None for key in keys)
    if fitting == len(keys):
        found = architecture_in_header(header)
        return found if own.told_by and found is not own else None
    return _by_names(keys, own, fitting)


def check_architecture(keys: Collection[str], header: Mapping[str, str], names: Names, file: str) -> None:
    """Raises OptionError for a file that is plainly for another model than that of the names; any doubt is left to reading it."""
    other = other_architecture(keys, header, names)
    if other is not None:
        raise OptionError(
            f"{file} is a LoRA for {other.label}, but the model is {names.architecture.label}; give a file that was made for this model"
        )


def architecture_in_header(header: Mapping[str, str]) -> Architecture | None:
    """What a trainer has written into the header, for architectures whose names do not always tell; None without."""
    texts = [header.get(key, "") for key in ("ss_base_model_version", "modelspec.architecture")]
    named = {one.name: max(map(one.named_by, texts)) for one in architectures().values()}
    best = max(architectures().values(), key=lambda one: named[one.name])
    return best if named[best.name] else None


def _by_names(keys: Collection[str], own: Architecture, fitting: int) -> Architecture | None:
    """The architecture that nearly all names fit, and more than fit this one."""
    others = [one for one in architectures().values() if one is not own]
    fits = {one.name: sum(place_of(key, names_for(one.name)) is not None for key in keys) for one in others}
    best = max(others, key=lambda one: fits[one.name])
    return best if fits[best.name] > fitting and fits[best.name] >= _SHARE * len(keys) else None
