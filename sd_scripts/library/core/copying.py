"""Copies of networks, made quickly."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

Networks = TypeVar("Networks")


def copied(networks: Networks, modules: Iterable[nn.Module]) -> Networks:
    """A deep copy of networks, or of what holds several; modules: those whose modules are known.

    What a module has of its own is a dozen dictionaries, most of them empty, which copy.deepcopy takes long for: here it finds the modules
    in its memo, and takes a third of the time. Modules that say themselves how they are copied are left to it.
    """
    memo: dict[int, Any] = {}
    found = {id(one): one for each in modules for one in each.modules() if _is_plain(type(one))}
    memo.update({number: object.__new__(type(one)) for number, one in found.items()})
    for number, one in found.items():
        memo[number].__setstate__({name: _copied(value, memo) for name, value in one.__getstate__().items()})
    return copy.deepcopy(networks, memo)


def _is_plain(kind: type[nn.Module]) -> bool:
    """Whether modules of this class are copied by their state."""
    ways = ("__reduce_ex__", "__reduce__")
    return not hasattr(kind, "__deepcopy__") and all(getattr(kind, name) is getattr(object, name) for name in ways)


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    kind = type(value)
    if kind in (bool, int, float, str, type(None)):
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind in (dict, OrderedDict, set) and not value:
        new: Any = kind()
    elif kind is dict and all(type(name) is str for name in value):
        new = {name: _copied(each, memo) for name, each in value.items()}
    elif kind is nn.Parameter:
        new = nn.Parameter(value.detach().clone(), value.requires_grad)
    else:
        return copy.deepcopy(value, memo)
    memo[id(value)] = new
    return new
