"""Random calls of each family's small network, and what it takes to train it for a step."""

from __future__ import annotations

import torch
from torch import Tensor

from sd_scripts import families
from sd_scripts.families import RUNS
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.core.protocols import Condition, Geometry, Parts


def a_call(name: str, parts: Parts, size: int = 2, side: int = 64, seed: int = 0) -> tuple[Tensor, Tensor, list[Condition]]:
    """x_t, t and conditions for family.denoise: `size` random samples of images of `side` pixels."""
    family = families.family(name)
    random = torch.Generator().manual_seed(seed)
    prompts = (["flat", "line", "night"] if name == "lgt" else ["a star", "a red car", "nothing"])[:size]
    geometry = Geometry((side, side), (0, 0), (side, side))
    with torch.no_grad():
        pixels = torch.rand(1, 3, side, side, generator=random) * 2 - 1
        shape = family.encode_images(parts, pixels).shape[1:]
        if name == "qwen_edit":
            rows = torch.randn(9, parts.backbone.config.joint_attention_dim, generator=random)
            control = torch.randn(shape, generator=random)
            conditions: list[Condition] = [{"text": rows[: 7 + index], "control_0": control} for index in range(len(prompts))]
        else:
            conditions = [{**found, **family.size_condition(geometry)} for found in family.encode_prompts(parts, prompts)]
            if name in ("flux3", "qwen_image21"):
                # Some blocks of one compute for reference images alone, and those of the other part the text there.
                conditions = [{**found, "control_0": torch.randn(shape, generator=random)} for found in conditions]
    x_t = torch.randn(len(prompts), *shape, generator=random)
    return x_t, torch.rand(len(prompts), generator=random), conditions


def trainable(name: str, layers: tuple[str, ...] = ("",)) -> tuple[Parts, list[Tensor]]:
    """A family's small network as it is trained, with an adapter where runs have one that is not at its beginning any more.

    layers: ends of the names of those that get one.
    """
    family = families.family(name)
    parts, kind = family.tiny(), RUNS.get((name, "network"))
    if kind is None:
        parts.backbone.requires_grad_(True)
        return parts, list(parts.backbone.parameters())
    targets = {part: [path for path in paths if path.endswith(layers)] for part, paths in family.adapter_targets(parts, False).items()}
    network = attach(parts, kind.model_fields["network"].default, targets, 0)
    trained = [weight for weight in network.named_parameters().values() if weight.requires_grad]
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in trained:
            weight.add_(0.02 * torch.randn(weight.shape, generator=random))
    return parts, trained
