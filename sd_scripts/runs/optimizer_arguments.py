"""What the optimizers of the list take besides the learning rate, so that a wrong argument is told before torch is loaded.

A test compares this with their own signatures. Those that are not here are asked when they are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sd_scripts.schema.errors import Problem

Check = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_part(value: Any) -> bool:
    return _is_number(value) and 0 <= value < 1


def _are_parts(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_part, value))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_number, value))


SWITCH: tuple[str, Check] = ("True or False", lambda value: value in (False, True))
CHOICE: tuple[str, Check] = ("True, False or None", lambda value: value in (None, False, True))
NUMBER: tuple[str, Check] = ("a number", _is_number)
NOT_NEGATIVE: tuple[str, Check] = ("a number from 0 up", lambda value: _is_number(value) and value >= 0)
PART: tuple[str, Check] = ("a number below 1, or None", lambda value: value is None or _is_part(value))
PARTS: tuple[str, Check] = ("two numbers from 0 to below 1, such as (0.9,0.99)", _are_parts)
NUMBERS: tuple[str, Check] = ("two numbers, such as (1e-30,1e-3)", _are_numbers)
WHOLE: tuple[str, Check] = ("a whole number from 1 up", lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 1)

ARGUMENTS: dict[str, dict[str, tuple[str, Check]]] = {
    "AdamW": {
        "betas": PARTS, "eps": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE, "amsgrad": SWITCH, "maximize": SWITCH, "foreach": CHOICE,
        "capturable": SWITCH, "differentiable": SWITCH, "fused": CHOICE,
    },
    "SGD": {
        "momentum": NOT_NEGATIVE, "dampening": NUMBER, "weight_decay": NOT_NEGATIVE, "nesterov": SWITCH, "maximize": SWITCH,
        "foreach": CHOICE, "differentiable": SWITCH, "fused": CHOICE,
    },
    "Lion": {"betas": PARTS, "weight_decay": NOT_NEGATIVE},
    "Adafactor": {
        "eps": NUMBERS, "clip_threshold": NUMBER, "decay_rate": NUMBER, "beta1": PART, "weight_decay": NOT_NEGATIVE,
        "scale_parameter": SWITCH, "relative_step": SWITCH, "warmup_init": SWITCH,
    },
    "Prodigy": {
        "betas": PARTS, "beta3": PART, "eps": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE, "decouple": SWITCH, "use_bias_correction": SWITCH,
        "safeguard_warmup": SWITCH, "d0": NUMBER, "d_coef": NUMBER, "growth_rate": NUMBER, "fsdp_in_use": SWITCH, "slice_p": WHOLE,
    },
}  # fmt: skip
"""By optimizer and name: what is allowed, as words and as a question."""


def problems_of_arguments(optimizer: str, given: dict[str, Any]) -> list[Problem]:
    """What is wrong with the arguments of an optimizer; nothing for one that is not in the table."""
    known, problems = ARGUMENTS.get(optimizer), []
    for name, value in given.items() if known is not None else ():
        assert known is not None
        if name == "lr":
            problems.append(Problem("optimizer_args", "optimizer_args: lr is set by learning_rate; remove it here"))
        elif name not in known:
            problems.append(Problem("optimizer_args", f"optimizer_args: {optimizer} does not know {name}; it knows {', '.join(known)}"))
        elif not known[name][1](value):
            problems.append(Problem("optimizer_args", f"optimizer_args: {name} is {value!r} there; {optimizer} takes {known[name][0]}"))
    if optimizer == "Adafactor" and given.get("relative_step") is True:
        text = "optimizer_args: relative_step=True makes Adafactor ignore learning_rate and lr_scheduler; remove it"
        problems.append(Problem("optimizer_args", text))
    return problems
