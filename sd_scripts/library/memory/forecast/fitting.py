"""A plan that makes a run fit on a card: memory options one after the other, those first that change no result and cost least time."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from sd_scripts.families import FACTS
from sd_scripts.library.memory.swapping import ON_ONE_DEVICE
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.fields import Options
from sd_scripts.schema.runs import RunOptions

from .values import GIB, Forecast

O = TypeVar("O", bound=Options)
Predict = Callable[[O], Forecast]
Values = Mapping[str, Any]
Tried = Iterator[tuple[dict[str, Any], str]]
"""Values, and what they cost."""
Change = Callable[[O, Forecast, Predict[O], int], Tried]

WORTH_IT = GIB // 20
"""A change that spares less than this is not made, unless it makes the run fit."""


@dataclass(frozen=True)
class Step:
    """A change that a plan makes."""

    options: dict[str, Any]
    """The flat options that it sets."""
    cost: str
    """What it costs, as a part of a sentence."""
    before: int
    """Bytes on the card without it."""
    after: int


@dataclass(frozen=True)
class FitPlan(Generic[O]):
    """What to change so that a run, or drawing, fits."""

    card: int
    """Bytes of the card."""
    options: O
    """With all changes of the plan."""
    forecast: Forecast
    """Of these options."""
    steps: tuple[Step, ...] = field(default_factory=tuple)

    @property
    def fits(self) -> bool:
        """Whether the run fits with these options."""
        return self.forecast.fits(self.card)

    @property
    def changes(self) -> dict[str, Any]:
        """The flat options that differ from those asked for."""
        found: dict[str, Any] = {}
        for step in self.steps:
            found |= step.options
        return found


def plan_for(card: int, options: RunOptions, predict: Predict[RunOptions]) -> FitPlan[RunOptions]:
    """The plan for a card of so many bytes; without steps where the run fits as it is. It may not fit with every change made."""
    return plan_of(card, options, predict, _CHANGES, _SPARE_HOST_RAM)


def plan_of(card: int, asked: O, predict: Predict[O], changes: Sequence[Change[O]], spare_host_ram: Collection[Change[O]]) -> FitPlan[O]:
    """The plan of these changes, tried in their order. spare_host_ram: those that are tried where the card has room enough."""
    options, forecast = asked, predict(asked)
    steps: list[Step] = []
    for change in changes:
        if forecast.on_card <= card and change not in spare_host_ram:
            continue
        for values, cost in () if forecast.fits(card) else change(options, forecast, predict, card):
            changed = with_values(options, values)
            if changed is None:
                continue
            found = predict(changed)
            if not found.fits(card) and not _helps(forecast, found, card):
                continue
            steps.append(Step(dict(values), cost, forecast.on_card, found.on_card))
            options, forecast = changed, found
            if forecast.fits(card):
                break
    plan = _pruned(FitPlan(card, options, forecast, tuple(steps)), asked, predict)
    return _told_again(_relaxed(plan, predict) if plan.fits else plan, asked, predict)


def _helps(before: Forecast, after: Forecast, card: int) -> bool:
    """Whether clearly less is needed of what is too little: card or host RAM; or by training, where another phase still needs as much."""
    if before.host > before.host_there and before.host - after.host > WORTH_IT:
        return True
    if before.on_card <= card:
        return False
    one, two = before.of("training"), after.of("training")
    trains_in_less = one is not None and two is not None and one.total - two.total > WORTH_IT and before.worst.name != "caching"
    return before.on_card - after.on_card > WORTH_IT or trains_in_less


def _pruned(plan: FitPlan[O], asked: O, predict: Predict[O]) -> FitPlan[O]:
    """The plan without changes that later ones have made needless, those that cost most left out first; of a plan that does not fit,
    without those that spare nothing of what is too little."""
    for needless in reversed(plan.steps[:-1] if plan.fits else plan.steps):
        kept = [step for step in plan.steps if step is not needless]
        values = {name: value for step in kept for name, value in step.options.items()}
        options = with_values(asked, values)
        if options is None:
            continue
        found = predict(options)
        if found.fits(plan.card) or (not plan.fits and not _helps_in_all(found, plan.forecast, plan.card)):
            plan = FitPlan(plan.card, options, found, tuple(kept))
    return plan


def _helps_in_all(before: Forecast, after: Forecast, card: int) -> bool:
    """Whether less is needed of what is too little, whichever phase needs it."""
    host = before.host > before.host_there and before.host > after.host
    return host or (before.on_card > card and before.on_card > after.on_card)


def _relaxed(plan: FitPlan[O], predict: Predict[O]) -> FitPlan[O]:
    """The same plan with as few swapped blocks as the changes that came later allow."""
    most = plan.changes.get("blocks_to_swap")
    if most is None:
        return plan
    values = {"blocks_to_swap": fewest_blocks(plan.options, predict, 0, most, lambda found: found.on_card <= plan.card)}
    options = with_values(plan.options, values)
    assert options is not None
    steps = tuple(replace(step, options=values) if "blocks_to_swap" in step.options else step for step in plan.steps)
    return FitPlan(plan.card, options, predict(options), steps)


def _told_again(plan: FitPlan[O], asked: O, predict: Predict[O]) -> FitPlan[O]:
    """The same plan with what each step spares, counted anew."""
    steps, options = [], asked
    for step in plan.steps:
        changed = with_values(options, step.options)
        if changed is None:
            return plan
        steps.append(replace(step, before=predict(options).on_card, after=predict(changed).on_card))
        options = changed
    return replace(plan, steps=tuple(steps))


def with_values(options: O, values: Values) -> O | None:
    """The options with these flat values; None where they do not go with the others, or there is no such option."""
    known, changed = flat.fields(type(options)), {**flat.flatten(options), **values}
    if any(name not in known for name in values) or not _may_swap(changed):
        return None
    try:
        return flat.build(type(options), changed, from_cli=True)
    except OptionError:
        return None


def _may_swap(values: Values) -> bool:
    """Whether an optimizer that trains the network itself can move weights that are swapped; of drawing there is none."""
    if "optimizer_type" not in values or "network_dim" in values:
        return True
    return not values.get("blocks_to_swap") or values["optimizer_type"] not in ON_ONE_DEVICE


def fewest_blocks(options: O, predict: Predict[O], low: int, high: int, fits: Callable[[Forecast], bool]) -> int:
    """The smallest number of swapped blocks from low to high with which it fits; high where none is enough."""
    while low < high:
        middle = (low + high) // 2
        changed = with_values(options, {"blocks_to_swap": middle})
        if changed is not None and fits(predict(changed)):
            high = middle
        else:
            low = middle + 1
    return low


# Changes: each gives values and what they cost, in the order in which to try them.


def _caches(options: RunOptions, forecast: Forecast, predict: Predict[RunOptions], card: int) -> Tried:
    data = options.dataset
    if not data.cache_latents:
        yield {"cache_latents": True}, "same result; crops are drawn once"
    if data.caches_texts and not data.cache_text_encoder_outputs:
        yield {"cache_text_encoder_outputs": True}, "same result"


def _batches_of_caching(options: RunOptions, forecast: Forecast, predict: Predict[RunOptions], card: int) -> Tried:
    if forecast.worst.name != "caching":
        return
    data = options.dataset
    smaller: dict[str, Any] = {
        name: 1 for name in ("vae_batch_size", "text_encoder_batch_size") if name in type(data).model_fields and getattr(data, name) > 1
    }
    if smaller:
        yield smaller, "same result, caching is slower"


def _checkpointing(options: RunOptions, forecast: Forecast, predict: Predict[RunOptions], card: int) -> Tried:
    if not options.memory.gradient_checkpointing:
        yield {"gradient_checkpointing": True}, "same result, a step takes about a third longer"


def _tiles(options: RunOptions, forecast: Forecast, predict: Predict[RunOptions], card: int) -> Tried:
    if forecast.worst.name == "previews" and not options.memory.vae_tiling:
        yield {"vae_tiling": True}, "same training; seams in previews are blended"


def _swap(options: RunOptions, forecast: Forecast, predict: Predict[RunOptions], card: int) -> Tried:
    now = options.memory.blocks_to_swap
    most = _most_blocks(options, predict, now)
    if most <= now:
        return
    cost = "same result; some of the speed, less with larger images"
    if options.method != "network":
        cost = "same result; some of the speed, less with larger images, and the optimizer works in host RAM"
    yield {"blocks_to_swap": fewest_blocks(options, predict, 0, most, lambda found: found.on_card <= card)}, cost


def _most_blocks(options: RunOptions, predict: Predict[RunOptions], now: int) -> int:
    """Number of blocks of the network, from the blocks that a forecast has weighed."""
    training = predict(options).of("training")
    return max(now, 0 if training is None else training.num_blocks)


def _offload(options: RunOptions, forecast: Forecast, predict: Predict[RunOptions], card: int) -> Tried:
    if options.memory.gradient_checkpointing and not options.memory.gradient_checkpointing_cpu_offload:
        yield {"gradient_checkpointing_cpu_offload": True}, "same result, a little slower"


def _batch(options: RunOptions, forecast: Forecast, predict: Predict[RunOptions], card: int) -> Tried:
    batch, steps = options.dataset.train_batch_size, options.training.gradient_accumulation_steps
    if batch > 1:
        yield {"train_batch_size": 1, "gradient_accumulation_steps": batch * steps}, "same training, slower"


def _tables(options: RunOptions, forecast: Forecast, predict: Predict[RunOptions], card: int) -> Tried:
    if getattr(options.model, "modulation_table", True) is False:
        yield {"modulation_table": True}, "the same but for times, which are multiples of 1/1000; see what host RAM it takes"


def _full_finetune(options: RunOptions, forecast: Forecast, predict: Predict[RunOptions], card: int) -> Tried:
    if options.method == "network":
        return
    accumulates = options.training.gradient_accumulation_steps > 1
    if not accumulates:
        yield {"fused_backward_pass": True, "max_grad_norm": 0.0}, "gradients are not clipped any more"
    yield {"full_bf16": True}, "weights in bf16 with stochastic rounding: nearly the same result"
    if options.optimizer.optimizer_type in ("AdamW", "Prodigy"):
        if importlib.util.find_spec("bitsandbytes") is not None:
            yield {"optimizer_type": "AdamW8bit"}, "the optimizer's state in 8 bits: nearly the same result"
        yield {"optimizer_type": "Adafactor"}, "another optimizer, with nearly no state"


def _text_encoder(options: RunOptions, forecast: Forecast, predict: Predict[RunOptions], card: int) -> Tried:
    if getattr(options.model, "text_encoder_quantization", "") == "none" and "text encoders" in forecast.worst.parts:
        yield {"text_encoder_quantization": "qint8"}, "the text encoder in 8 bits: nearly the same result"


def _fewer_bits(options: RunOptions, forecast: Forecast, predict: Predict[RunOptions], card: int) -> Tried:
    if getattr(options.model, "transformer_quantization", "") != "none" or options.method != "network":
        return
    yield {"transformer_quantization": "qint8"}, "the frozen network in 8 bits: nearly the same result"
    yield {"transformer_quantization": "nf4"}, "the frozen network in 4 bits: a less exact base"


def _vae(options: RunOptions, forecast: Forecast, predict: Predict[RunOptions], card: int) -> Tried:
    if options.model.vae_dtype == "float" and forecast.worst.name != "training" and FACTS[options.family].network.vae_in_16_bits:
        yield {"vae_dtype": "bf16"}, "the VAE in bf16: images change below what is seen"


def _resolution(options: RunOptions, forecast: Forecast, predict: Predict[RunOptions], card: int) -> Tried:
    width, height = options.dataset.resolution

    def at(side: int) -> dict[str, Any]:
        return {"resolution": tuple(max(64, round(one * side / min(width, height) / 64) * 64) for one in (width, height))}

    yield from _largest(at, min(width, height), "smaller images, and another result", options, predict, card)


def _controls(options: RunOptions, forecast: Forecast, predict: Predict[RunOptions], card: int) -> Tried:
    if "control_resolution" in type(options.model).model_fields:
        cost, now = "control images are seen in less detail, training images as before", getattr(options.model, "control_resolution", None)
        yield from _largest(lambda side: {"control_resolution": side}, now or 1024, cost, options, predict, card)


def _largest(
    at: Callable[[int], dict[str, Any]], now: int, cost: str, options: RunOptions, predict: Predict[RunOptions], card: int
) -> Tried:
    """The values of the largest side below the present one with which the run fits; of the smallest where none is small enough."""
    sides = [side for side in (1024, 896, 768, 640, 512, 384, 256) if side < now]
    low, high = 0, len(sides) - 1
    while low < high:
        middle = (low + high) // 2
        changed = with_values(options, at(sides[middle]))
        if changed is not None and predict(changed).fits(card):
            high = middle
        else:
            low = middle + 1
    if sides:
        yield at(sides[low]), cost


_CHANGES = (
    _caches,
    _batches_of_caching,
    _checkpointing,
    _tiles,
    _swap,
    _offload,
    _batch,
    _tables,
    _text_encoder,
    _full_finetune,
    _vae,
    _fewer_bits,
    _controls,
    _resolution,
)
_SPARE_HOST_RAM = (_full_finetune, _text_encoder, _fewer_bits, _vae)
"""What is tried where the card has room enough and the machine has not."""
