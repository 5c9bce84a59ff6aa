"""Training of a model's own weights: which of them, at which rates. The counterpart of `network` for DreamBooth and fine-tuning."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sd_scripts.families.common import original_unet as original
from sd_scripts.library.core.errors import TrainingError
from sd_scripts.library.core.protocols import ModelFamily, Parts
from sd_scripts.library.loading import layouts
from sd_scripts.schema.errors import Problem, refuse
from sd_scripts.schema.network import WholeOptions

from .layers import examples


class WholeNetwork:
    """The trained weights of a model. Made by `train_whole`."""

    def __init__(self, parts: Parts, rates: Mapping[str, tuple[str, float | None]]) -> None:
        """rates: group and learning rate (None is the run's own) of each trained weight by `<module>.<weight>`."""
        everything = parts.modules()
        self.modules: dict[str, nn.Module] = {
            module: everything[module] for module in dict.fromkeys(name.partition(".")[0] for name in rates)
        }
        """The networks with trained weights, by name; they are what train() and eval() are for."""
        self._rates = dict(rates)

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The trained weights by `<module>.<weight>`, in the order of the model."""
        # Looked up anew: sharing a network out over processes puts other tensors in the place of these.
        return {name: self.modules[name.partition(".")[0]].get_parameter(name.partition(".")[2]) for name in self._rates}

    def parameters(self) -> list[nn.Parameter]:
        """The trained weights in the order of the model."""
        return list(self.named_parameters().values())

    def parameter_groups(self, options: WholeOptions, learning_rate: float) -> list[dict[str, Any]]:
        """Groups for the optimizer: {"params", "lr", "name"}, one for each module, or for each part of the UNet with block_lr."""
        groups: dict[str, dict[str, Any]] = {}
        for name, tensor in self.named_parameters().items():
            label, rate = self._rates[name]
            group = groups.setdefault(label, {"params": [], "lr": learning_rate if rate is None else rate, "name": label})
            group["params"].append(tensor)
        return list(groups.values())

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Raises TrainingError: nobody keeps the model as it was before training."""
        raise TrainingError("this objective compares with the untouched model, which training of the whole model does not keep")
        yield

    def train(self, mode: bool = True) -> None:
        """train() or eval() of every network with trained weights."""
        for module in self.modules.values():
            module.train(mode)

    def after_step(self) -> None:
        """Nothing: a full fine-tune has no rules of their own."""


def train_whole(parts: Parts, options: WholeOptions, family: ModelFamily, dtype: torch.dtype = torch.float32) -> WholeNetwork:
    """Unfreezes the weights that the options ask for; everything else stays frozen. Networks with trained weights have them in dtype.

    A text encoder's weights that no output depends on (the last layer, where the last but one is read) stay as they are: without a
    gradient, weight decay alone would move them. Raises OptionError with every problem.
    """
    problems: list[Problem] = []
    rates = _unet_rates(parts, options, problems) if options.train_unet else {}
    if options.train_text_encoder:
        rates |= _text_rates(parts, options, family, problems)
    if not rates and not problems:
        problems.append(Problem("learning_rate", "all learning rates are 0, so nothing would be trained; give one of them a value"))
    refuse(problems)
    for name in dict.fromkeys(name.partition(".")[0] for name in rates):
        for tensor in parts.modules()[name].parameters():
            tensor.data = tensor.data.to(dtype)
    network = WholeNetwork(parts, rates)
    for tensor in network.parameters():
        tensor.requires_grad_(True)
    return network


def _unet_rates(parts: Parts, options: WholeOptions, problems: list[Problem]) -> dict[str, tuple[str, float | None]]:
    """Group and rate of each trained weight of the UNet or transformer."""
    names = [name for name, _ in parts.backbone.named_parameters() if options.trains(name)]
    kept = _filtered(names, options, problems)
    rate_of = _block_rates(parts, options, names, problems)
    rates = {f"backbone.{name}": rate_of(name) for name in kept}
    return {name: (label, rate) for name, (label, rate) in rates.items() if rate != 0}


def _filtered(names: list[str], options: WholeOptions, problems: list[Problem]) -> list[str]:
    """The names that target_modules and exclude_modules leave."""
    kept = names
    for option, texts in (("target_modules", options.target_modules), ("exclude_modules", options.exclude_modules)):
        patterns = []
        for text in texts:
            pattern = re.compile(text)
            if not any(pattern.search(name) for name in names):
                problems.append(
                    Problem(
                        option, f"{option}: {text!r} matches no weight of the model; names look like {examples(names[:: len(names) // 5])}"
                    )
                )
            patterns.append(pattern)
        if patterns:
            wanted = option == "target_modules"
            kept = [name for name in kept if any(pattern.search(name) for pattern in patterns) == wanted]
    if not kept and not problems:
        problems.append(Problem("exclude_modules", "target_modules and exclude_modules leave no weight to train; change them"))
    return kept


def _block_rates(
    parts: Parts, options: WholeOptions, names: list[str], problems: list[Problem]
) -> Callable[[str], tuple[str, float | None]]:
    """Group and rate of a UNet's weight by its name; block_lr gives each part of the original layout its own."""
    block_lr = options.part_rates
    if not block_lr:
        return lambda name: ("unet", options.unet_lr)
    stored = {name: where.name for name, where in layouts.places(original.unet, names, dict(parts.backbone.config)).items()}
    inputs, outputs = (
        1 + max(int(name.split(".")[1]) for name in stored.values() if name.startswith(f"{side}_blocks.")) for side in ("input", "output")
    )
    first = {
        "time_embed": 0,
        "label_emb": 0,
        "input_blocks": 1,
        "middle_block": 1 + inputs,
        "output_blocks": 4 + inputs,
        "out": 4 + inputs + outputs,
    }
    count = 5 + inputs + outputs
    if len(block_lr) != count:
        problems.append(
            Problem(
                "block_lr",
                f"block_lr has {len(block_lr)} numbers, but this UNet has {count} parts: embeddings, {inputs} input blocks, 3 middle "
                f"blocks, {outputs} output blocks, the last layer; give {count} numbers, or none",
            )
        )
        return lambda name: ("unet", None)

    def rate(name: str) -> tuple[str, float | None]:
        head, number, *_ = stored[name].split(".")
        part = first[head] + (int(number) if head in ("input_blocks", "middle_block", "output_blocks") else 0)
        return f"unet_{part}", block_lr[part]

    return rate


def _text_rates(parts: Parts, options: WholeOptions, family: ModelFamily, problems: list[Problem]) -> dict[str, tuple[str, float | None]]:
    """Group and rate of each trained weight of the text encoders."""
    given = options.text_encoder_lr
    encoders = sorted(parts.text_encoders)
    if len(given) > len(encoders):
        problems.append(
            Problem("text_encoder_lr", f"text_encoder_lr has {len(given)} numbers, but this model has {len(encoders)} text encoder")
        )
    rates: dict[str, tuple[str, float | None]] = {}
    read = _read_weights(parts, family)
    for index, module in enumerate(encoders):
        rate = given[min(index, len(given) - 1)] if given else None
        if rate == 0:
            continue
        rates |= {
            f"{module}.{name}": (module, rate) for name, _ in parts.text_encoders[module].named_parameters() if f"{module}.{name}" in read
        }
    return rates


def _read_weights(parts: Parts, family: ModelFamily) -> set[str]:
    """Names of the text encoders' weights that the family's text conditions depend on, found by one backward pass."""
    weights = {f"{module}.{name}": tensor for module, encoder in parts.text_encoders.items() for name, tensor in encoder.named_parameters()}
    for tensor in weights.values():
        tensor.requires_grad_(True)
    try:
        with torch.enable_grad():
            condition = family.encode_prompts(parts, ["a"])[0]
            outputs: list[Tensor] = [tensor.float().sum() for tensor in condition.values() if tensor.is_floating_point()]
            gradients = torch.autograd.grad(torch.stack(outputs).sum(), list(weights.values()), allow_unused=True)
    finally:
        for tensor in weights.values():
            tensor.requires_grad_(False)
    return {name for name, gradient in zip(weights, gradients, strict=True) if gradient is not None}
