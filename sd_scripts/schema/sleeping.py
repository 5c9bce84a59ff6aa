"""Options whose switch is off: they sleep. Without effect, they are neither checked nor written, and refuse nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from .fields import Need

if TYPE_CHECKING:
    from .flat import FlatField


def asleep(known: Mapping[str, FlatField], values: Mapping[str, Any]) -> dict[str, str]:
    """Those of the given options that sleep, each with what would wake it: `use_ema is on`."""
    return {name: missing for name in values if name in known and (missing := _missing(known, values, known[name]))}


def notes(known: Mapping[str, FlatField], values: Mapping[str, Any]) -> tuple[str, ...]:
    """A sentence for each switch that leaves given values without effect; values that are the defaults anyway are passed over."""
    waiting: dict[str, list[str]] = {}
    for name, missing in asleep(known, values).items():
        if _read(known[name], values[name]) != known[name].default:
            waiting.setdefault(missing, []).append(name)
    return tuple(f"{', '.join(names)}: no effect until {missing}; left out" for missing, names in waiting.items())


def _missing(known: Mapping[str, FlatField], values: Mapping[str, Any], field: FlatField) -> str:
    """What an option waits for; empty when it is awake. A kind of run without the option that is needed lets it be."""
    needs = [need for need in field.show.conditions if need.name in known]
    for need in needs:
        deeper = _missing(known, values, known[need.name])
        if deeper:
            return deeper
        if _is_met(need, known[need.name], values.get(need.name)):
            return ""
    return " or ".join(_condition(need, known[need.name]) for need in needs)


def _is_met(need: Need, field: FlatField, value: Any) -> bool:
    said = field.default if value is None else _read(field, value)
    return (str(said) in need.values) != need.but if need.values else bool(said) != need.off


def _condition(need: Need, field: FlatField) -> str:
    if need.values:
        return f"{need.name} is {'not ' if need.but else ''}{' or '.join(need.values)}"
    if field.type is bool:
        return f"{need.name} is {'off' if need.off else 'on'}"
    if need.off:
        return f"{need.name} is {'none' if field.optional else '0'}"
    return f"{need.name} is {'not 0' if field.type in (int, float) and not field.optional else 'given'}"


def _read(field: FlatField, value: Any) -> Any:
    """The value that a text of the command line or the page means; a wrong one as it is."""
    try:
        return field.reader.validate_python(value)
    except ValidationError:
        return value
