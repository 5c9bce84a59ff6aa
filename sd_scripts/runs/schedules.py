"""Learning-rate schedules: the factor on the peak rate as a pure function of the step, so that resuming has nothing to restore."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.optimizer import OptimizerOptions

Factor = Callable[[int], float]

_CURVES: dict[str, Callable[[float], float]] = {
    "linear": lambda p: p,
    "cosine": lambda p: 0.5 * (1 - math.cos(math.pi * p)),
    "1-sqrt": lambda p: 1 - math.sqrt(1 - p),
}
"""Rising curves of warmup_stable_decay, from 0 to 1 over p in [0, 1]."""

_ARGUMENTS = {
    "cosine": {"num_cycles"},
    "cosine_with_min_lr": {"num_cycles"},
    "polynomial": {"lr_end"},
    "warmup_stable_decay": {"warmup_type", "decay_type", "num_cycles"},
    "piecewise_constant": {"step_rules"},
}


def key_values(option: str, arguments: Sequence[str]) -> dict[str, Any]:
    """key=value strings as a dictionary; values are Python literals, and a word that is none is text. Raises OptionError."""
    problems, values = [], {}
    for argument in arguments:
        key, equals, text = argument.partition("=")
        key = key.strip()
        if not equals or not key.isidentifier():
            problems.append(Problem(option, f"{option}: {argument!r} is not of the form key=value, such as weight_decay=0.01"))
            continue
        if key in values:
            problems.append(Problem(option, f"{option}: {key} is given twice; keep one"))
        values[key] = _literal(text.strip())
        if values[key] is _BROKEN:
            problems.append(
                Problem(
                    option,
                    f"{option}: the value of {argument!r} is not a Python literal; write numbers, True, None, (0.9, 0.99) or a plain word",
                )
            )
    refuse(problems)
    return values


_BROKEN = object()


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        plain = bool(text) and not set(text) & set("()[]{}'\"`;= ")
        return text if plain else _BROKEN


def num_steps(value: float, total_steps: int) -> int:
    """A length in steps: below 1 it is a fraction of total_steps."""
    return round(value * total_steps) if value < 1 else int(value)


def factor_at(options: OptimizerOptions, total_steps: int) -> Factor:
    """The named schedule as a function step -> factor on the peak learning rate; step 0 is the first optimizer step.

    The values are those of the functions of the same name in diffusers and transformers, which kohya's scripts give half of
    lr_scheduler_num_cycles where these count whole waves. Raises OptionError for wrong lr_scheduler_args.
    """
    name = options.lr_scheduler
    arguments = key_values("lr_scheduler_args", options.lr_scheduler_args)
    allowed = _ARGUMENTS.get(name, set())
    if unknown := sorted(set(arguments) - allowed):
        knows = f"it knows {', '.join(sorted(allowed))}" if allowed else "it has no further arguments"
        raise OptionError(Problem("lr_scheduler_args", f"lr_scheduler_args: {name} does not know {', '.join(unknown)}; {knows}"))
    warmup = num_steps(options.lr_warmup_steps, total_steps)
    if name == "constant":
        return lambda step: 1.0
    if name == "piecewise_constant":
        return _piecewise(arguments)
    if name == "warmup_stable_decay":
        return _warmup_stable_decay(options, arguments, warmup, total_steps)
    return _after_warmup(warmup, _falling(options, arguments, warmup, total_steps))


def _after_warmup(warmup: int, after: Factor) -> Factor:
    return lambda step: step / warmup if step < warmup else after(step)


def _falling(options: OptimizerOptions, arguments: Mapping[str, Any], warmup: int, total: int) -> Factor:
    """What follows the warm-up. p runs from 0 at its end to 1 at the last step."""
    length = max(1, total - warmup)
    name = options.lr_scheduler

    def p(step: int) -> float:
        return (step - warmup) / length

    if name == "constant_with_warmup":
        return lambda step: 1.0
    if name == "linear":
        return lambda step: max(0.0, 1.0 - p(step))
    if name in ("cosine", "cosine_with_min_lr"):
        cycles = _number(arguments, "num_cycles", 0.5 if name == "cosine" else options.lr_scheduler_num_cycles / 2)
        floor = options.lr_scheduler_min_lr_ratio if name == "cosine_with_min_lr" else 0.0
        return lambda step: max(0.0, 0.5 * (1 + math.cos(2 * math.pi * cycles * p(step))) * (1 - floor) + floor)
    if name == "cosine_with_restarts":
        cycles = options.lr_scheduler_num_cycles
        return lambda step: 0.0 if p(step) >= 1 else 0.5 * (1 + math.cos(math.pi * (cycles * p(step) % 1.0)))
    if name == "polynomial":
        return _polynomial(options, _number(arguments, "lr_end", 1e-7), p)
    assert name == "inverse_sqrt", name
    scale = options.lr_scheduler_timescale or warmup or 10_000
    return lambda step: 1 / math.sqrt((step + scale - warmup) / scale)


def _polynomial(options: OptimizerOptions, lr_end: float, p: Callable[[int], float]) -> Factor:
    floor = lr_end / options.learning_rate if options.learning_rate else 0.0
    if floor >= 1:
        raise OptionError(
            Problem("lr_scheduler_args", f"lr_scheduler_args: lr_end ({lr_end}) must be below learning_rate ({options.learning_rate})")
        )
    power = options.lr_scheduler_power
    return lambda step: floor if p(step) > 1 else (1 - floor) * (1 - p(step)) ** power + floor


def _warmup_stable_decay(options: OptimizerOptions, arguments: Mapping[str, Any], warmup: int, total: int) -> Factor:
    floor, cycles = options.lr_scheduler_min_lr_ratio, _number(arguments, "num_cycles", options.lr_scheduler_num_cycles / 2)
    kinds = {key: arguments.get(key, default) for key, default in (("warmup_type", "linear"), ("decay_type", "cosine"))}
    for key, kind in kinds.items():
        if kind not in _CURVES:
            raise OptionError(Problem("lr_scheduler_args", f"lr_scheduler_args: {key} = {kind!r} is not one of {', '.join(_CURVES)}"))
    decay = num_steps(options.lr_decay_steps, total)
    if warmup + decay > total:
        raise OptionError(
            Problem(
                "lr_decay_steps",
                f"lr_decay_steps: warm-up ({warmup} steps) and decay ({decay}) are longer than the run ({total}); shorten one",
            )
        )
    start = total - decay

    def factor(step: int) -> float:
        if step < warmup:
            return _CURVES[kinds["warmup_type"]](step / warmup) * (1 - floor) + floor
        if step < start:
            return 1.0
        if step >= total:
            return floor
        p = (step - start) / decay
        if kinds["decay_type"] == "cosine":
            fall = 0.5 * (1 + math.cos(2 * math.pi * cycles * p))
        else:
            fall = _CURVES[kinds["decay_type"]](1 - p) if kinds["decay_type"] == "linear" else 1 - math.sqrt(p)
        return max(0.0, fall * (1 - floor) + floor)

    return factor


def _piecewise(arguments: Mapping[str, Any]) -> Factor:
    """step_rules 1:10,0.1:20,0.01 is 1 up to step 10, 0.1 up to step 20, then 0.01."""
    rules = arguments.get("step_rules")
    wrong = Problem(
        "lr_scheduler_args",
        f'lr_scheduler_args: piecewise_constant needs step_rules="1:10,0.1:20,0.01" (factor:until step, the last without), not {rules!r}',
    )
    try:
        *pairs, last = [part.strip() for part in str(rules).split(",")]
        until = sorted((int(step), float(value)) for value, step in (pair.split(":") for pair in pairs))
        rest = float(last)
    except ValueError as err:
        raise OptionError(wrong) from err
    return lambda step: next((value for end, value in until if step < end), rest)


def _number(arguments: Mapping[str, Any], key: str, default: float) -> float:
    value = arguments.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise OptionError(Problem("lr_scheduler_args", f"lr_scheduler_args: {key} must be a number, not {value!r}"))
    return float(value)
