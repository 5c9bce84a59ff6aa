"""Copies of networks, made quickly."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeVar

from torch import nn

Networks = TypeVar("Networks")


def copied(networks: Networks, modules: Iterable[nn.Module]) -> Networks:
    """A deep copy of networks, or of what holds several; modules: those whose modules are known.

    A module has a dozen empty dictionaries, for hooks mostly, and copying those takes most of the time, so theirs are made beforehand.
    """
    inside = (value for each in modules for one in each.modules() for value in vars(one).values())
    return copy.deepcopy(networks, {id(value): type(value)() for value in inside if type(value) in (dict, OrderedDict) and not value})
