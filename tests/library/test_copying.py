"""Quick copies of networks are deep copies: the same computations, and nothing in common with what they were made of."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sd_scripts import families
from sd_scripts.families.common.tiny import made_once
from sd_scripts.families.sd.model import Sd
from sd_scripts.library.core.copying import copied


class Tied(nn.Module):
    """Two names for a layer, two for a weight, a layer that is known to a list alone, a hook, and one that copies itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.again, self.last.weight = self.first, self.first.weight
        self.hidden, self.names = [nn.Linear(3, 3)], {("a", 1): {"b": [self.first]}}
        self.register_buffer("steps", torch.rand(3))
        self.own = Own(3, 3)
        self.first.register_forward_hook(self.doubled)

    @staticmethod
    def doubled(_module: nn.Module, _given: Any, result: Tensor) -> Tensor:
        return 2 * result

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.own(self.last(self.again(x))) + self.hidden[0](x) + self.steps)


class Own(nn.Linear):
    copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Own:
        Own.copies += 1
        new = Own(3, 3)
        new.load_state_dict(self.state_dict())
        return new


def test_what_is_tied_stays_tied_and_a_layer_that_copies_itself_does() -> None:
    made, x, before = Tied(), torch.rand(2, 3), Own.copies
    for new in (copied(made, [made]), copy.deepcopy(made)):
        assert new.again is new.first is new.names["a", 1]["b"][0] is not made.first and new.last.weight is new.first.weight
        assert torch.equal(new(x), made(x)) and new.hidden[0] is not made.hidden[0]
        assert set(map(id, new.parameters())).isdisjoint(map(id, made.parameters()))
        with torch.no_grad():
            new.first.weight.zero_()
            new.steps.zero_()
        assert made.first.weight.any() and made.steps.any()
    assert Own.copies == before + 2


def inside(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """What modules hold, by where it is."""
    if isinstance(value, nn.Module):
        value = vars(value)
    if isinstance(value, dict):
        for name, each in value.items():
            yield from inside(each, f"{path}.{name}")
    else:
        yield path, value


@pytest.mark.parametrize("name", families.NAMES)
def test_a_copy_holds_what_a_deep_copy_holds_and_shares_no_memory(name: str) -> None:
    parts = families.family(name).tiny()
    # Not all in one mode, nor all frozen.
    parts.backbone.train()
    next(parts.backbone.parameters()).requires_grad_()
    for key, module in parts.modules().items():
        mine, theirs = dict(inside(copied(module, [module]))), dict(inside(copy.deepcopy(module)))
        assert mine.keys() == theirs.keys(), key
        memory = {tensor.data_ptr() for tensor in module.state_dict().values() if tensor.numel()}
        for path, value in theirs.items():
            assert type(mine[path]) is type(value), path
            if isinstance(value, Tensor):
                assert torch.equal(mine[path], value) and mine[path].requires_grad == value.requires_grad, path
                assert mine[path].dtype == value.dtype and mine[path].data_ptr() not in memory, path


def test_a_tiny_model_that_is_first_asked_for_on_another_device_is_made_where_all_are() -> None:
    tiny = made_once(Sd.tiny.__wrapped__)  # type: ignore[attr-defined]
    with torch.device("meta"):
        parts = tiny(Sd())
    for module in (*parts.modules().values(), *tiny(Sd()).modules().values()):
        assert {tensor.device.type for tensor in module.state_dict().values()} == {"cpu"}
