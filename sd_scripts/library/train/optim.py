"""Optimizers by name, and the learning rate as a function of the step. Knows parameter groups, not networks."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sd_scripts.runs.schedules import Factor, factor_at, key_values
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.optimizer import BUILT_IN, OWN_RATE, PACKAGES, ZOO, OptimizerOptions

Groups = Sequence[dict[str, Any]]
"""torch's parameter groups: params, lr (the peak rate of the group) and name."""

STATE_BYTES = {
    "AdamW": 8.0, "Lion": 4.0, "Adafactor": 0.0, "Prodigy": 16.0, "AdamW8bit": 2.04, "PagedAdamW8bit": 0.0, "Lion8bit": 1.02
}  # fmt: skip
"""Bytes on the device that an optimizer remembers of each number that it trains; classes that are not listed count as AdamW.

Adafactor remembers rows and columns. 8-bit ones have a float32 scale for each 256 numbers, and the pages of a paged one leave a device that
is full. Prodigy keeps four numbers. SGD remembers 4 with momentum, else nothing.
"""


def _imported(package: str, name: str, option: str = "optimizer_type") -> Any:
    try:
        module = importlib.import_module(package)
    except ImportError as err:
        root = package.partition(".")[0].replace("_", "-")
        if root in PACKAGES.values():
            sentence = f"needs the package {root}, which cannot be imported ({err}): pip install {root}, or choose AdamW"
        else:
            sentence = f"cannot be imported from {package} ({err}); check the name of the module"
        raise OptionError(Problem(option, f"{option}: {name} {sentence}")) from err
    found = getattr(module, name, None)
    if found is None:
        raise OptionError(Problem(option, f"{option}: {package} has nothing called {name}; check the spelling and the version"))
    return found


def custom_class(option: str, path: str, allowed: bool) -> Any:
    """The class of a dotted name; only the person at the command line may allow that, because it runs other people's code."""
    module, _, name = path.rpartition(".")
    if not allowed:
        raise OptionError(
            Problem(option, f"{option}: {path} runs other people's code and needs --allow_custom_modules on the command line")
        )
    if not module:
        raise OptionError(
            Problem(
                option,
                f"{option}: {path} is neither in the list ({', '.join(BUILT_IN)}, and those of pytorch-optimizer) nor of the form "
                "module.Class",
            )
        )
    found = _imported(module, name, option)
    if not inspect.isclass(found):
        raise OptionError(Problem(option, f"{option}: {path} is not a class"))
    return found


def _optimizer_class(options: OptimizerOptions) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """The class and the arguments that differ here from its own defaults."""
    name = options.optimizer_type
    if name == "AdamW":
        return torch.optim.AdamW, {"fused": True}
    if name == "SGD":
        return torch.optim.SGD, {}
    if name == "Lion":
        from .lion import Lion

        return Lion, {}
    if name == "Adafactor":
        # The class's own default, relative_step, makes it ignore learning_rate and every schedule; scale_parameter makes the
        # step of a LoRA's up matrices, which start at zero, a thousand times smaller than asked for.
        return _imported("transformers.optimization", "Adafactor"), {
            "relative_step": False, "scale_parameter": False, "warmup_init": False
        }  # fmt: skip
    if name in ("AdamW8bit", "PagedAdamW8bit", "Lion8bit"):
        return _imported("bitsandbytes.optim", name), {}
    if name == "Prodigy":
        return _imported("prodigyopt", "Prodigy"), {}
    if name in ZOO:
        return _imported("pytorch_optimizer", name), {}
    return custom_class("optimizer_type", name, options.allow_custom_modules), {}


def make_optimizer(options: OptimizerOptions, groups: Groups) -> torch.optim.Optimizer:
    """The optimizer over parameter groups that carry their own peak rate. Raises OptionError with every wrong argument."""
    make, arguments = _optimizer_class(options)
    given = key_values("optimizer_args", options.optimizer_args)
    _check_arguments(options.optimizer_type, make, given)
    if options.optimizer_type == "Adafactor" and given.get("relative_step"):
        raise OptionError(
            Problem("optimizer_args", "optimizer_args: relative_step=True makes Adafactor ignore learning_rate and lr_scheduler; remove it")
        )
    if options.optimizer_type in OWN_RATE and len({group["lr"] for group in groups if group["lr"]}) > 1:
        raise OptionError(
            Problem(
                "optimizer_type",
                f"optimizer_type: {options.optimizer_type} finds one step size for all weights, so all learning rates must be equal; set "
                "them to 1",
            )
        )
    try:
        optimizer = make([dict(group) for group in groups], lr=options.learning_rate, **{**arguments, **given})
    except (TypeError, ValueError, RuntimeError) as err:
        raise OptionError(Problem("optimizer_args", f"optimizer_args: {options.optimizer_type} refuses them: {err}")) from err
    if hasattr(optimizer, "train"):
        optimizer.train()
    return optimizer


@contextmanager
def shown(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within the block the weights are those that are given out, of an optimizer that trains others; afterwards its own again, to the bit.

    Schedule-free ones, Defazio et al. 2024 (arXiv 2405.15682), go from one to the other by methods of the names eval and train.
    """
    if not hasattr(optimizer, "eval"):
        yield
        return
    kept = [(weight, weight.detach().clone()) for group in optimizer.param_groups for weight in group["params"]]
    optimizer.eval()
    try:
        yield
    finally:
        optimizer.train()
        with torch.no_grad():
            for weight, values in kept:
                weight.copy_(values)


def restore(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Loads what the optimizer has gathered; settings such as weight_decay stay those of this run's options.

    Raises ValueError when the state belongs to another optimizer or other groups.
    """
    names = set(inspect.signature(type(optimizer)).parameters)
    settings = [{name: value for name, value in group.items() if name in names and name != "params"} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(state)
    except (KeyError, RuntimeError, TypeError) as err:
        raise ValueError(f"it does not fit this optimizer: {err}") from err
    for group, chosen in zip(optimizer.param_groups, settings, strict=True):
        group.update(chosen)
    _keep_precision(optimizer, state)


def _keep_precision(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Puts the numbers of a state back that torch has rounded to the precision of their weights, which is bf16 in some runs."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    of_weights = {number: values for number, values in state["state"].items() if isinstance(number, int)}
    for number, values in of_weights.items():
        held = optimizer.state[weights[number]]
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point() and held[name].dtype is not value.dtype:
                held[name] = value.to(held[name].device, copy=True)


def _check_arguments(name: str, make: Callable[..., Any], given: dict[str, Any]) -> None:
    signature = inspect.signature(make)
    # Those of the zoo take any name, and leave out what they do not know.
    if name not in ZOO and any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values()):
        return
    known = [key for key, p in signature.parameters.items() if key not in ("params", "lr") and p.kind is not p.VAR_KEYWORD]
    problems = []
    for key in given:
        if key == "lr":
            problems.append(Problem("optimizer_args", "optimizer_args: lr is set by learning_rate; remove it here"))
        elif key not in known:
            problems.append(Problem("optimizer_args", f"optimizer_args: {name} does not know {key}; it knows {', '.join(known)}"))
    refuse(problems)


def learning_rate_at(options: OptimizerOptions, total_steps: int) -> Factor:
    """The factor on the peak learning rates as a function of the step, 0 for the first optimizer step.

    A scheduler class of the user's own is stepped through once, with an optimizer that moves nothing, and read off.
    Raises OptionError for wrong arguments.
    """
    if options.lr_scheduler_type is None:
        return factor_at(options, total_steps)
    make = custom_class("lr_scheduler_type", options.lr_scheduler_type, options.allow_custom_modules)
    arguments = key_values("lr_scheduler_args", options.lr_scheduler_args)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    factors = []
    try:
        schedule = make(optimizer, **arguments)
        for _ in range(total_steps):
            factors.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            schedule.step()
    except (TypeError, ValueError, RuntimeError, AttributeError) as err:
        raise OptionError(
            Problem("lr_scheduler_args", f"lr_scheduler_args: {options.lr_scheduler_type} cannot be used as a function of the step: {err}")
        ) from err
    return lambda step: factors[min(step, total_steps - 1)]
