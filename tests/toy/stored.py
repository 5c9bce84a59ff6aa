"""Whether a stored base has the weights of a training that was done beside it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def assert_stored(loaded: Mapping[str, object], trained: Mapping[str, object]) -> None:
    """Every network of what was loaded is the trained one, bit for bit, but for the half precision that it is stored in."""
    networks = {name: part for name, part in loaded.items() if isinstance(part, nn.Module)}
    assert len(networks) >= 2
    for name, network in networks.items():
        own = trained[name]
        assert isinstance(own, nn.Module)
        wanted, found = own.state_dict(), network.state_dict()
        assert found.keys() == wanted.keys(), name
        assert [key for key, tensor in found.items() if not tensor.equal(wanted[key].half().float())] == [], name
