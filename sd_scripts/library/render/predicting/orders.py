"""A request of the worker's protocol, read and checked. Knows options, not models: nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError, Problem, gathering
from sd_scripts.schema.fields import Options
from sd_scripts.schema.predict import LoadingSection, PredictOptions

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


class _Adapters(Options):
    """What a variant says, as it is checked."""

    script = label = ""
    loading: LoadingSection = LoadingSection()


@dataclass(frozen=True)
class PredictOrder:
    """A predict request."""

    id: str
    options: PredictOptions
    variants: tuple[Variant, ...]
    compares: bool
    """Whether variants were asked for, and with them an image of all."""
    preview_every: int

    @property
    def model(self) -> tuple[str, object, object]:
        """The options that decide what is loaded; equal for orders that one loaded model serves."""
        return self.options.family, self.options.loads, self.options.loading.model_copy(update={"lora": (), "lora_weight": ()})


Read = Callable[[Mapping[str, object]], PredictOptions]
"""Checked options of flat values. Raises OptionError with every problem."""


def order_of(read: Read, given: Mapping[str, object], defaults: Mapping[str, object]) -> PredictOrder:
    """The order in a predict request. defaults: values of options that the request leaves out. Raises OptionError with every problem."""
    problems: list[Problem] = []
    values = {**defaults, **{key: value for key, value in given.items() if key not in _OWN_KEYS}}
    if "variants" in given:
        values = {key: value for key, value in values.items() if key not in _PER_REQUEST or key in given}
    options = None
    with gathering(problems):
        options = read(values)
    variants = _variants(given, options, problems)
    preview_every = given.get("preview_every", 1)
    if not isinstance(preview_every, int) or isinstance(preview_every, bool) or preview_every < 0:
        problems.append(Problem("preview_every", f"preview_every: {preview_every!r} is not a whole number of steps, 0 or more"))
    if problems or options is None:
        raise OptionError(problems)
    assert isinstance(preview_every, int)
    return PredictOrder(str(given["id"]), options, variants, "variants" in given, preview_every)


def _variants(given: Mapping[str, object], options: PredictOptions | None, problems: list[Problem]) -> tuple[Variant, ...]:
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
        try:
            loading = flat.build(_Adapters, {key: item.get(key, []) for key in _PER_REQUEST}).loading
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


def variant_of(options: PredictOptions) -> Variant:
    """The adapters that the options themselves name."""
    return _variant(options.loading.lora, options.loading.lora_weight)
