"""Which layers get an adapter, of which rank and scale: options in, a list of layers out, or every problem at once."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from sd_scripts.library.core.protocols import Parts
from sd_scripts.schema.errors import Problem, refuse
from sd_scripts.schema.network import AdapterOptions

from .layer_names import Names, layers_of
from .maths import AdapterLayer
from .ranks import Ranks, is_wide, ranks_for
from .rates import Numbered, explicit_rate

_EXAMPLES = 5


@dataclass(frozen=True)
class LayerPlan:
    """One layer that gets an adapter. name is `<module>.<layer>`; rank is the block side for oft; the product is multiplied by scale."""

    name: str
    rank: int
    scale: float

    @property
    def module(self) -> str:
        return self.name.partition(".")[0]

    @property
    def layer(self) -> str:
        return self.name.partition(".")[2]


def examples(names: Iterable[str], limit: int = _EXAMPLES) -> str:
    """A few names for a sentence, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def trained_modules(parts: Parts, options: AdapterOptions) -> list[str]:
    """Modules that get an adapter, backbone first; a text encoder with rate 0 is left as it is unless it has values to keep from a file."""
    modules = ["backbone"] if options.train_unet else []
    if options.train_text_encoder:
        modules += [module for module in sorted(parts.text_encoders) if module not in options.frozen_encoders]
    return [module for module in modules if options.network_weights is not None or explicit_rate(options, module) != 0]


def plan_layers(parts: Parts, options: AdapterOptions, targets: Mapping[str, list[str]], names: Names) -> list[LayerPlan]:
    """The layers that options and default targets (by module) ask for, in the order of the model. Raises OptionError with all problems."""
    ranks = ranks_for(options, names)
    problems = ranks.problems()
    bases = layers_of(parts)
    modules = trained_modules(parts, options)
    if not modules:
        problems.append(
            Problem("unet_lr", "all learning rates of the network are 0, so nothing would be trained; give one of them a value")
        )
    wanted = {f"{module}.{layer}" for module in modules for layer in targets.get(module, [])}
    wanted |= {name for name in ranks.further_targets() if "backbone" in modules}
    chosen = [name for name in _filtered([name for name in bases if name in wanted], options, problems) if ranks.includes(name)]
    for option, texts in (("network_reg_dims", options.network_reg_dims), ("network_reg_lrs", options.network_reg_lrs)):
        for pattern in Numbered(texts, names).unused(chosen) if chosen else ():
            problems.append(Problem(option, f"{option}: {pattern!r} decides about no layer; {_looks(chosen)}"))
    refuse(problems)
    plans = [plan for name in chosen if (plan := _plan(name, bases[name], options, ranks)) is not None]
    problems = _empty_problems(plans, modules, bases, options)
    refuse(problems)
    return plans


def plan_of_file(adapters: Mapping[str, AdapterLayer], bases: Mapping[str, nn.Module]) -> list[LayerPlan]:
    """The layers that a file holds, with its ranks and scales, in the order of the model."""
    plans = []
    for name, base in bases.items():
        if name not in adapters:
            continue
        adapter = adapters[name]
        if adapter.kind == "oft":
            rank = adapter.tensors["oft_R.weight"].shape[1]
            rank = round((1 + math.sqrt(1 + 8 * rank)) / 2)
        elif adapter.rank is None:
            # A full lokr has no rank in its shapes; any rank this large makes peft build it in full.
            rank = max(base.weight.shape)
        else:
            rank = adapter.rank
        plans.append(LayerPlan(name, rank, adapter.scale))
    return plans


def _filtered(names: list[str], options: AdapterOptions, problems: list[Problem]) -> list[str]:
    """The names that target_modules and exclude_modules leave; patterns are searched in the path without `<module>.`."""
    kept = names
    include, exclude = ([re.compile(text) for text in texts] for texts in (options.target_modules, options.exclude_modules))
    paths = {name: name.partition(".")[2] for name in names}
    for option, patterns in (("target_modules", include), ("exclude_modules", exclude)):
        for pattern in patterns:
            if names and not any(pattern.search(path) for path in paths.values()):
                problems.append(
                    Problem(
                        option,
                        f"{option}: {pattern.pattern!r} matches no layer that can get an adapter; {_looks(names)}",
                    )
                )
    if include:
        kept = [name for name in kept if any(pattern.search(paths[name]) for pattern in include)]
    return [name for name in kept if not any(pattern.search(paths[name]) for pattern in exclude)]


def _looks(names: Iterable[str]) -> str:
    return f"names look like {examples(_variety(name.partition('.')[2] for name in names))}"


def _variety(paths: Iterable[str]) -> list[str]:
    """One path for each kind of layer, so that a sentence shows different ones."""
    by_ending: dict[str, str] = {}
    for path in paths:
        by_ending.setdefault(re.sub(r"^.*\d+\.", "", path), path)
    return list(by_ending.values())


def _plan(name: str, base: nn.Module, options: AdapterOptions, ranks: Ranks) -> LayerPlan | None:
    """Rank and scale of one layer, or None for one that is left out."""
    rank, alpha = ranks.of(name, base)
    if not rank:
        return None
    if options.network_type == "oft":
        return _oft_plan(name, base, options)
    alpha = float(rank) if alpha is None else alpha
    # rsLoRA, Kalajdzievski 2023 (arXiv 2312.03732): alpha / sqrt(rank) keeps the size of the update when the rank grows.
    return LayerPlan(name, rank, alpha / math.sqrt(rank) if options.rank_stabilized else alpha / rank)


def _oft_plan(name: str, base: nn.Module, options: AdapterOptions) -> LayerPlan | None:
    """oft is for linear layers only: peft's convolutions are not the identity at the start."""
    if not isinstance(base, nn.Linear):
        return None
    side = next(side for side in range(min(options.oft_block_size, base.in_features), 0, -1) if base.in_features % side == 0)
    return LayerPlan(name, side, 1.0) if side > 1 else None


def _empty_problems(plans: list[LayerPlan], modules: list[str], bases: Mapping[str, nn.Module], options: AdapterOptions) -> list[Problem]:
    """Options that ended up without any layer."""
    problems = []
    covered = {plan.module for plan in plans}
    left_nothing = "target_modules, exclude_modules and the options for ranks and blocks leave no layer of"
    for module in modules:
        if module in covered:
            continue
        if not options.chooses_networks:
            problems.append(Problem("target_modules", f"{left_nothing} {options.backbone} to train; change them"))
            continue
        switch = "train_unet" if module == "backbone" else "train_text_encoder"
        problems.append(
            Problem(
                switch,
                f"{switch} is on, but {left_nothing} {options.backbone if module == 'backbone' else module}; "
                f"change them or turn {switch} off",
            )
        )
    wide = any(is_wide(bases[plan.name]) for plan in plans)
    if options.wants_convolutions and not wide and "backbone" in covered:
        problems.append(
            Problem("conv_dim", "conv_dim is set, but no 3x3 convolution is left to train; change target_modules, or remove conv_dim")
        )
    return problems
