"""A request of the worker's protocol, read and checked. Knows options, not models: nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sd_scripts.families.qwen_edit.predict_options import QwenImagePredict
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError, Problem

_OWN_KEYS = ("op", "id", "variants", "preview_every")
_VARIANT_KEYS = ("lora", "lora_weight", "label")
_PER_REQUEST = ("lora", "lora_weight")
"""Options of the section loading that change without loading the model again."""
MAX_VARIANTS = 16


@dataclass(frozen=True)
class Variant:
    """Adapter files with strengths, and what to call them together."""

    label: str
    lora: tuple[str, ...]
    lora_weight: tuple[float, ...]


@dataclass(frozen=True)
class Order:
    """A predict request."""

    id: str
    options: QwenImagePredict
    variants: tuple[Variant, ...]
    compares: bool
    """Whether variants were asked for, and with them a picture of all."""
    preview_every: int

    @property
    def model(self) -> QwenImagePredict:
        """The options that decide what is loaded; equal for orders that one loaded model serves."""
        loading = self.options.loading.model_copy(update={"lora": (), "lora_weight": ()})
        return QwenImagePredict(model=self.options.model, loading=loading, predict=type(self.options.predict)(serve=True))


def order_of(given: Mapping[str, object], defaults: Mapping[str, object]) -> Order:
    """The order in a predict request. defaults: values of options that the request leaves out. Raises OptionError with every problem."""
    problems: list[Problem] = []
    values = {**defaults, **{key: value for key, value in given.items() if key not in _OWN_KEYS}}
    if "variants" in given:
        values = {key: value for key, value in values.items() if key not in _PER_REQUEST or key in given}
    options = None
    try:
        options = flat.build(QwenImagePredict, values)
    except OptionError as err:
        problems += err.problems
    variants = _variants(given, options, defaults, problems)
    preview_every = given.get("preview_every", 1)
    if not isinstance(preview_every, int) or isinstance(preview_every, bool) or preview_every < 0:
        problems.append(Problem("preview_every", f"preview_every: {preview_every!r} is not a whole number of steps, 0 or more"))
    if problems or options is None:
        raise OptionError(problems)
    assert isinstance(preview_every, int)
    return Order(str(given["id"]), options, variants, "variants" in given, preview_every)


def _variants(
    given: Mapping[str, object], options: QwenImagePredict | None, defaults: Mapping[str, object], problems: list[Problem]
) -> tuple[Variant, ...]:
    if "variants" not in given:
        return () if options is None else (variant_of(options),)
    asked = given["variants"]
    if not isinstance(asked, list) or not 1 <= len(asked) <= MAX_VARIANTS or not all(isinstance(item, Mapping) for item in asked):
        problems.append(Problem("variants", f"variants: a list of 1 to {MAX_VARIANTS} objects with lora, lora_weight and label is wanted"))
        return ()
    for key in _PER_REQUEST:
        if given.get(key):
            problems.append(Problem("variants", f"variants and {key} both say which adapters are on the model; leave {key} out"))
    found = []
    for number, item in enumerate(asked, 1):
        unknown = [str(key) for key in item if key not in _VARIANT_KEYS]
        if unknown:
            problems.append(
                Problem("variants", f"variants: number {number} has {', '.join(unknown)}; lora, lora_weight and label are known")
            )
        values = {**defaults, "serve": True, **{key: item.get(key, []) for key in _PER_REQUEST}}
        try:
            loading = flat.build(QwenImagePredict, values, from_cli=True).loading
        except OptionError as err:
            problems += [Problem("variants", f"variants: number {number}: {problem}") for problem in err.problems]
            continue
        label = item.get("label")
        found.append(_variant(loading.lora, loading.lora_weight, str(label) if label else ""))
    return tuple(found)


def _variant(lora: tuple[str, ...], weights: tuple[float, ...], label: str = "") -> Variant:
    weights = weights or (1.0,) * len(lora)
    names = [Path(file).stem + ("" if weight == 1 else f" {weight:g}") for file, weight in zip(lora, weights)]
    return Variant(label or " + ".join(names) or "base", lora, weights)


def variant_of(options: QwenImagePredict) -> Variant:
    """The adapters that the options themselves name."""
    return _variant(options.loading.lora, options.loading.lora_weight)
