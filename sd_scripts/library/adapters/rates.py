"""Learning rates of an adapter's layers, from the options that name modules, blocks or layers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from sd_scripts.schema.network import AdapterOptions

from .layer_names import Names


def explicit_rate(options: AdapterOptions, module: str) -> float | None:
    """The learning rate that the options give this module (backbone, te1, te2, te3); None where they leave it to learning_rate."""
    if module == "backbone":
        return options.unet_lr
    rates = options.text_encoder_lr
    return rates[min(0 if module == "te1" else 1, len(rates) - 1)] if rates else None


def block_factor(options: AdapterOptions, block: int | None) -> float:
    """What block_lr_weight multiplies the rate of this block by."""
    return options.block_factors[block] if options.block_factors and block is not None else 1.0


class Numbered:
    """A list of expression=number options: the first expression found in a layer's name, ours or kohya's, decides."""

    def __init__(self, texts: tuple[str, ...], names: Names) -> None:
        self._names = names
        self._rules = [(re.compile(expression), float(number)) for expression, _, number in (text.rpartition("=") for text in texts)]

    def rule(self, name: str) -> int | None:
        """Position of the expression that decides about `<module>.<layer>`."""
        if not self._rules:
            return None
        spellings = (name.partition(".")[2], self._names.to_kohya(name))
        return next((at for at, (pattern, _) in enumerate(self._rules) if any(map(pattern.search, spellings))), None)

    def __getitem__(self, rule: int) -> float:
        return self._rules[rule][1]

    def get(self, name: str) -> float | None:
        rule = self.rule(name)
        return None if rule is None else self[rule]

    def unused(self, names: Iterable[str]) -> list[str]:
        """Expressions that decide about none of these layers."""
        used = {self.rule(name) for name in names}
        return [pattern.pattern for at, (pattern, _) in enumerate(self._rules) if at not in used]


class Rates:
    """The learning rate of each layer. Part of the answer is a label: layers with one label have one rate."""

    def __init__(self, options: AdapterOptions, names: Names, learning_rate: float) -> None:
        self._options, self._names, self._default = options, names, learning_rate
        self._by_name = Numbered(options.network_reg_lrs, names)

    def of(self, name: str) -> tuple[float, str]:
        """Rate and label of `<module>.<layer>`; network_reg_lrs decides before all else."""
        module = name.partition(".")[0]
        label = "unet" if module == "backbone" else module
        rule = self._by_name.rule(name)
        if rule is not None:
            return self._by_name[rule], f"{label}_reg{rule}"
        rate = explicit_rate(self._options, module)
        rate = self._default if rate is None else rate
        factor = block_factor(self._options, self._names.block(name))
        return (rate, label) if factor == 1.0 else (rate * factor, f"{label}_x{factor:g}")

    def up_ratio(self, name: str) -> float | None:
        """LoRA+ (Hayou et al. 2024, arXiv 2402.12354): how many times faster the up matrices learn; None without LoRA+."""
        options = self._options
        own = options.loraplus_unet_lr_ratio if name.startswith("backbone.") else options.loraplus_text_encoder_lr_ratio
        return options.loraplus_lr_ratio if own is None else own
