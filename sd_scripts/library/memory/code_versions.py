"""How many versions of compiled code a run will need, told before its first step. Knows options, not networks."""

from __future__ import annotations

from collections.abc import Sequence

from sd_scripts.families.ddpm.options import DdpmModelOptions, DdpmObjectiveOptions
from sd_scripts.families.flux.options import FluxModelOptions
from sd_scripts.families.lgt.options import LgtObjectiveOptions
from sd_scripts.families.qwen_edit.options import QwenImageModelOptions
from sd_scripts.families.zimage.options import ZImageModelOptions
from sd_scripts.schema.anchored_flow import AnchoredFlowOptions
from sd_scripts.schema.memory import UNetMemoryOptions
from sd_scripts.schema.objective import FlowObjectiveOptions
from sd_scripts.schema.runs import RunOptions


def versions_of(options: RunOptions, sizes: Sequence[tuple[int, int]]) -> int | None:
    """Most versions of each piece of code; None where their number follows from what is in the captions.

    sizes: (width, height) of all buckets, in pixels. Code for any size is made for each measure that turns out to vary, one after the
    other, and once more where two of them were equal by chance.
    """
    dynamic = options.compile.compile_dynamic
    calls, some_rows = _calls(options)
    texts_vary = _texts_vary(options)
    # A batch of texts of one length has no mask.
    calls, others = calls * (1 + texts_vary), (texts_vary, some_rows)
    if dynamic == "false":
        return None if any(others) else calls * _shapes(options, sizes)
    varying = sum(others) + _varying(options, sizes)
    if dynamic == "true":
        return calls * (2 if varying else 1)
    return calls * (1 + varying + (varying > 0))


def _varying(options: RunOptions, sizes: Sequence[tuple[int, int]]) -> int:
    """How many measures of pictures vary: the sides for a U-Net, their product for a transformer."""
    if isinstance(options.memory, UNetMemoryOptions):
        return sum(len(set(sides)) > 1 for sides in zip(*sizes, strict=True))
    return int(_shapes(options, sizes) > 1)


def _shapes(options: RunOptions, sizes: Sequence[tuple[int, int]]) -> int:
    if isinstance(options.memory, UNetMemoryOptions):
        return len(set(sizes))
    return len({width * height for width, height in sizes})


def _texts_vary(options: RunOptions) -> bool:
    """Whether the network is given texts of different lengths."""
    model = options.model
    if isinstance(model, FluxModelOptions):
        return model.apply_t5_attn_mask
    return isinstance(model, QwenImageModelOptions | ZImageModelOptions | DdpmModelOptions)


def _calls(options: RunOptions) -> tuple[int, bool]:
    """In how many ways an objective calls the network, with and without gradient, adapter and text; and whether with some rows only."""
    objective = options.objective
    if isinstance(objective, LgtObjectiveOptions):
        # Inversion without gradient; with it the first step, whose input needs none, and the later ones, whose input does.
        return 3, False
    if isinstance(objective, DdpmObjectiveOptions) and isinstance(options.model, DdpmModelOptions) and options.model.self_conditioning:
        return 2, True
    prior = isinstance(objective, FlowObjectiveOptions) and objective.base_prior_weight > 0
    if isinstance(objective, AnchoredFlowOptions):
        guided = objective.cfg_training_scale != 1
        return 1 + prior + guided + (objective.curvature_weight > 0), prior or guided
    return 1 + prior, prior
