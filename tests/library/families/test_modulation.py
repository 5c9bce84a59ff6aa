"""Modulation as a table: the same prediction with a third less weights, at the table's times and at all others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.families.qwen_edit.modulation import NUM_TIMES, tabulate
from sd_scripts.families.qwen_edit.options import QwenFlowObjectiveOptions
from sd_scripts.library.core.protocols import Condition, Objective, Parts
from sd_scripts.library.objectives.flow_matching import FlowMatching
from sd_scripts.library.objectives.levels import FromDensity
from sd_scripts.library.objectives.make import make
from sd_scripts.library.objectives.regression import Times

FAMILY = QwenEdit()
CPU = torch.device("cpu")


def inputs(parts: Parts, times: Sequence[float]) -> tuple[Tensor, Tensor, list[Condition]]:
    """Fresh latents, given times, and samples with controls of different sizes and texts of different lengths."""
    width = parts.backbone.config.joint_attention_dim
    conditions = [
        {"text": torch.randn(5 + index, width), "control_0": torch.randn(16, 4, 4 + 2 * (index % 2))} for index in range(len(times))
    ]
    return torch.randn(len(times), 16, 4, 6), torch.tensor(times), conditions


@pytest.mark.parametrize("version", ["edit-2509", "edit-2511"])
@pytest.mark.parametrize("times", [(0.001, 0.5, 1.0), (0.3337, 0.5, 0.98765)], ids=["in the table", "outside of it"])
def test_a_table_predicts_what_the_layers_predicted(version: str, times: tuple[float, ...]) -> None:
    plain, tabled = FAMILY.tiny(version), tabulate(FAMILY.tiny(version), CPU)
    x_t, t, conditions = inputs(plain, times)
    with torch.no_grad():
        first, second = (FAMILY.denoise(parts, x_t, t, conditions) for parts in (plain, tabled))
    torch.testing.assert_close(first, second, rtol=0, atol=1e-6)


def test_the_weights_of_the_modulation_are_off_the_transformer() -> None:
    plain, tabled = FAMILY.tiny(), tabulate(FAMILY.tiny(), CPU)
    before, after = (sum(weight.numel() for weight in parts.backbone.parameters()) for parts in (plain, tabled))
    modulation = sum(weight.numel() for name, weight in plain.backbone.named_parameters() if "_mod." in name)
    assert modulation > 0 and before - after == modulation
    assert not [name for name in tabled.backbone.state_dict() if "_mod" in name]


@pytest.mark.parametrize("version", ["edit-2509", "edit-2511"])
def test_gradients_are_the_same_with_checkpointing_and_several_forward_passes(version: str) -> None:
    gradients = []
    torch.manual_seed(5)
    plain = FAMILY.tiny(version)
    x_t, t, conditions = inputs(plain, (0.25, 0.75, 0.9))
    for parts, checkpointing in ((plain, False), (tabulate(FAMILY.tiny(version), CPU), True)):
        if checkpointing:
            parts.backbone.enable_gradient_checkpointing()
        parts.backbone.train()
        start = x_t.clone().requires_grad_()
        # Controls of two sizes make two passes through the transformer before the one backward pass.
        FAMILY.denoise(parts, start, t, conditions).square().sum().backward()
        gradients.append(start.grad)
    # Sums in another order: the last digits of float32 are the processor's.
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-5)


def times_of(objective: Objective) -> Times:
    assert isinstance(objective, FlowMatching) and isinstance(objective.levels, FromDensity)
    return objective.levels.times


def test_training_times_are_those_of_the_table() -> None:
    parts = tabulate(FAMILY.tiny(), CPU)
    objective = make(QwenFlowObjectiveOptions(), parts.path, parts.kind)
    times = times_of(objective)(torch.rand(2000, dtype=torch.float64), (8, 8)).double() * NUM_TIMES
    assert (times - times.round()).abs().max() < 1e-3 and times.min() >= 1 and times.max() <= NUM_TIMES
    plain = make(QwenFlowObjectiveOptions(), FAMILY.tiny().path, parts.kind)
    u = torch.rand(2000, dtype=torch.float64)
    assert (times_of(objective)(u, (8, 8)) - times_of(plain)(u, (8, 8))).abs().max() <= 1 / NUM_TIMES
