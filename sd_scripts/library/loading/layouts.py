"""Where each tensor of a network stands in another layout of files, and in which form; names and shapes, not files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

TOLERATED = ("position_ids", "logit_scale")
"""Tensors of published files that no network needs."""


@dataclass(frozen=True)
class Stored:
    """Name and form of a tensor in the original layout, without the prefix of its network.

    transposed: the matrix is stored the other way round; convolution: a linear layer is stored as a 1x1 convolution; rows: it is part of a
    packed tensor, of whose rows it is (start, stop, number of all rows); swapped: its two halves stand in the other order; flat: its rows,
    of which there are rows[0], are stored as one row.
    """

    name: str
    form: Literal["same", "transposed", "convolution", "rows", "swapped", "flat"] = "same"
    rows: tuple[int, int, int] = (0, 0, 0)


Layout = Callable[[Mapping[str, Any]], Callable[[str], Stored]]
"""From a network's configuration to the place of each of its tensors. The inner function raises KeyError for a name without a place."""


def renaming(table: Mapping[str, str], forms: Mapping[str, Stored] = MappingProxyType({})) -> Layout:
    """The layout in which what these regular expressions find in a name is replaced, in their order, whatever the configuration.

    forms: how tensors are stored in whose names these expressions find something; a name there says nothing. A tensor in which nothing of
    the table is found has no place.
    """

    def stored(key: str) -> Stored:
        name = key
        for piece, other in table.items():
            name = re.sub(piece, other, name)
        if name == key:
            raise KeyError(f"{key} has no place in the original layout")
        return replace(next((form for piece, form in forms.items() if re.search(piece, key)), Stored("")), name=name)

    return lambda config: stored


def places(layout: Layout, keys: Iterable[str], config: Mapping[str, Any]) -> dict[str, Stored]:
    """Where each of a network's tensors (diffusers names) stands in the original layout."""
    stored = layout(config)
    return {key: stored(key) for key in keys}


def assembled(pieces: Sequence[tuple[Stored, Tensor]]) -> Tensor:
    """The tensor as the original layout stores it, from the one tensor, or the several packed ones, of the diffusers layout."""
    stored, tensor = pieces[0]
    if stored.form == "rows":
        packed = [tensor for _, tensor in sorted(pieces, key=lambda piece: piece[0].rows)]
        assert sum(len(tensor) for tensor in packed) == stored.rows[2], f"{stored.name} is not complete"
        return torch.cat(packed)
    assert len(pieces) == 1, f"{stored.name} is given {len(pieces)} times"
    if stored.form == "transposed":
        tensor = tensor.T
    elif stored.form == "convolution":
        tensor = tensor[..., None, None]
    elif stored.form == "swapped":
        tensor = torch.cat(tensor.chunk(2)[::-1])
    elif stored.form == "flat":
        tensor = tensor.flatten()
    return tensor.contiguous()


def from_original(stored: Stored, tensor: Tensor) -> Tensor:
    """A tensor of the diffusers layout from what the original layout stores in its place."""
    if stored.form == "rows":
        return tensor[stored.rows[0] : stored.rows[1]]
    if stored.form == "transposed":
        return tensor.T
    if stored.form == "swapped":
        return torch.cat(tensor.chunk(2)[::-1])
    if stored.form == "flat":
        return tensor.reshape(stored.rows[0], -1)
    if stored.form == "convolution" and tensor.ndim == 4:
        return tensor[..., 0, 0]
    return tensor


def shape_from_original(stored: Stored, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that `from_original` gives a tensor of this stored shape; a packed tensor of another size than expected keeps its own."""
    if stored.form == "rows" and shape and shape[0] == stored.rows[2]:
        return (stored.rows[1] - stored.rows[0], *shape[1:])
    if stored.form == "flat" and len(shape) == 1 and shape[0] % stored.rows[0] == 0:
        return (stored.rows[0], shape[0] // stored.rows[0])
    if stored.form == "transposed":
        return shape[::-1]
    if stored.form == "convolution" and len(shape) == 4:
        return shape[:2]
    return shape


def shape_to_original(stored: Stored, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The stored shape of a tensor of this shape in the diffusers layout."""
    if stored.form == "rows":
        return (stored.rows[2], *shape[1:])
    if stored.form == "transposed":
        return shape[::-1]
    if stored.form == "convolution":
        return (*shape, 1, 1)
    if stored.form == "flat":
        return (shape[0] * shape[1],)
    return shape


Extras = Callable[[Mapping[str, Any]], dict[str, str | Tensor]]
"""From a network's configuration to what the original layout has besides its tensors: the name of one to copy, or a constant."""


def no_extras(config: Mapping[str, Any]) -> dict[str, str | Tensor]:
    """Everything in the original layout belongs to the network."""
    return {}
