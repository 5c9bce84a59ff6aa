"""The moving average against its closed form, and back to the bit."""

from __future__ import annotations

import random

import pytest
import torch

from sd_scripts.library.train.ema import MovingAverage


def test_the_average_is_the_weighted_sum_of_all_weights_it_saw() -> None:
    decay, weights = random.uniform(0.3, 0.95), {"a": torch.nn.Parameter(torch.randn(4)), "b": torch.nn.Parameter(torch.randn(2, 3))}
    average = MovingAverage(weights, decay)
    wanted = {name: weight.detach().double() for name, weight in weights.items()}
    for step in range(40):
        for weight in weights.values():
            weight.data = torch.randn_like(weight)
        average.update(step)
        d = min(decay, (1 + step) / (10 + step))
        wanted = {name: d * wanted[name] + (1 - d) * weights[name].detach().double() for name in weights}
    for name, found in average.state_dict().items():
        torch.testing.assert_close(found.double(), wanted[name], rtol=1e-5, atol=1e-6)


def test_it_is_shown_for_a_while_and_the_weights_come_back_to_the_bit() -> None:
    weight = torch.nn.Parameter(torch.randn(5))
    average = MovingAverage({"a": weight}, 0.5)
    weight.data.add_(1)
    average.update(9)
    before, shown = weight.detach().clone(), average.state_dict()["a"].clone()
    with pytest.raises(RuntimeError, match="in the middle"), average.shown():
        assert torch.equal(weight, shown) and not torch.equal(weight, before)
        raise RuntimeError("in the middle")
    assert torch.equal(weight, before) and torch.equal(average.state_dict()["a"], shown)


def test_a_saved_average_goes_on_and_another_ones_is_refused() -> None:
    weight = torch.nn.Parameter(torch.randn(5))
    first, second = MovingAverage({"a": weight}, 0.9), MovingAverage({"a": weight}, 0.9)
    weight.data.add_(1)
    first.update(50)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first.state_dict()["a"], second.state_dict()["a"])
    with pytest.raises(ValueError, match="other weights"):
        second.load_state_dict({"b": torch.zeros(5)})
