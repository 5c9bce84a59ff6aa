"""What the tests of loading share: published configurations, whether two models are the same, and the tensors of single files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sd_scripts.library.core.protocols import Parts, StateDict
from sd_scripts.library.loading import layouts
from sd_scripts.library.loading.common import Config, FamilySpec, config_of, read_json


def shipped_configs(spec: FamilySpec) -> Iterator[tuple[str, Config]]:
    """Name and published configuration of each network."""
    for name, part in spec.parts.items():
        yield name, read_json(spec.configs / part.folder / "config.json", "published")


def assert_same(parts: Parts, expected: Parts, names: Sequence[str] | None = None) -> None:
    """The networks of these names, or all, have the same tensors."""
    for name in expected.modules() if names is None else names:
        state, wanted = parts.modules()[name].state_dict(), expected.modules()[name].state_dict()
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[key], wanted[key]) for key in wanted), name


def original_state(spec: FamilySpec, parts: Parts, name: str) -> StateDict:
    """A network under the names of its single files."""
    module = parts.modules()[name]
    state = {key: tensor.contiguous() for key, tensor in module.state_dict().items()}
    return to_original(layouts.places(spec.parts[name].layout, state, config_of(module)), state)


def prefixed(state: StateDict, prefix: str) -> StateDict:
    """The tensors with this before their names."""
    return {prefix + key: tensor for key, tensor in state.items()}


def to_original(placed: Mapping[str, layouts.Stored], state: StateDict, prefix: str = "") -> StateDict:
    """A network's state in the original layout, names with this prefix."""
    pieces: dict[str, list[tuple[layouts.Stored, Tensor]]] = {}
    for key, stored in placed.items():
        pieces.setdefault(prefix + stored.name, []).append((stored, state[key]))
    return {name: layouts.assembled(parts) for name, parts in pieces.items()}
