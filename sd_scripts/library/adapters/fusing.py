"""One adapter for a matrix of the original layout that is several layers of diffusers, and back.

Knows what rows of an adapter mean, and neither files nor models. Shapes: up (o, r), down (r, i), update = scale up @ down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from .layer_names import Target
from .maths import AdapterLayer, Kind

MAGNITUDE = "lora_magnitude_vector.weight"

FACTORS: dict[Kind, tuple[tuple[str, str], ...]] = {
    "lora": (("lora_B.weight", "lora_A.weight"),),
    "dora": (("lora_B.weight", "lora_A.weight"),),
    "loha": (("hada_w1_a", "hada_w1_b"), ("hada_w2_a", "hada_w2_b")),
}
"""The up and down matrices of each kind that has them. A row of an up matrix belongs to one output, so rows can be put together and taken
apart; for loha this holds for both products alike."""

SHARED: dict[Kind, tuple[str, ...]] = {kind: tuple(down for _, down in factors) for kind, factors in FACTORS.items()}
"""Matrices that the layers of a fused target have in common in kohya's files."""


def fuse(target: Target, members: Mapping[str, AdapterLayer]) -> AdapterLayer | None:
    """The one adapter of the target's matrix that updates each layer as its member does; None where no such adapter exists.

    Layers without a member get rows of zeros. Members with the same down matrices keep their rank; else the downs are stacked, the ups
    stand block by block on the diagonal, and the rank is the sum of theirs.
    """
    present = [members[layer] for layer in target.layers if layer in members]
    kind = present[0].kind
    if kind not in FACTORS or (kind == "dora" and not _can_fuse_lengths(target, present)):
        return None
    if target.swapped:
        return take_rows(present[0], _halves(out_features(present[0])))
    scale = present[0].scale
    present = [member.rescaled(scale) for member in present]
    common = all(torch.equal(member.tensors[down], present[0].tensors[down]) for member in present for down in SHARED[kind])
    tensors: dict[str, Tensor] = {}
    for up, down in FACTORS[kind]:
        downs = [member.tensors[down] for member in present]
        ups = [member.tensors[up] for member in present]
        if not common:
            ups = list(torch.block_diag(*ups).split([len(block) for block in ups]))
        tensors[down] = downs[0] if common else torch.cat(downs)
        tensors[up] = torch.cat(_with_gaps(target, members, ups))
    if kind == "dora":
        tensors[MAGNITUDE] = torch.cat([member.tensors[MAGNITUDE] for member in present])
    return AdapterLayer(kind, tensors, scale)


def _can_fuse_lengths(target: Target, present: Sequence[AdapterLayer]) -> bool:
    """A dora's lengths by output can be put one after the other, if no layer lacks them; those by input belong to one matrix alone."""
    return len(present) == len(target.layers) and all(member.tensors[MAGNITUDE].dim() == 1 for member in present)


def _with_gaps(target: Target, members: Mapping[str, AdapterLayer], ups: Sequence[Tensor]) -> list[Tensor]:
    """Rows for every layer of the target: those given, and zeros for layers without a member."""
    given = iter(ups)
    rows = [next(given) if layer in members else None for layer in target.layers]
    unit, like = next((len(up) // share, up) for up, share in zip(rows, target.shares) if up is not None)
    return [like.new_zeros(unit * share, like.shape[1]) if up is None else up for up, share in zip(rows, target.shares)]


def split(target: Target, adapter: AdapterLayer) -> dict[str, AdapterLayer]:
    """The adapter of each layer of a target. Raises ValueError where an adapter cannot be taken apart.

    A layer whose rows are all zero beside layers with others has no adapter. Ups that stand block by block on the diagonal give their
    layers the ranks of the blocks.
    """
    if target.is_plain:
        return {target.layers[0]: adapter}
    rows = out_features(adapter)
    if target.swapped:
        return {target.layers[0]: take_rows(adapter, _halves(rows))}
    edges = [0, *torch.tensor(target.sizes(rows)).cumsum(0).tolist()]
    members = {layer: take_rows(adapter, [bounds]) for layer, bounds in zip(target.layers, pairwise(edges))}
    if adapter.kind not in FACTORS:
        return members
    filled = members if adapter.kind == "dora" else {layer: member for layer, member in members.items() if not _is_zero(member)}
    return _with_own_ranks(filled or members)


def _is_zero(adapter: AdapterLayer) -> bool:
    return not any(adapter.tensors[up].any() for up, _ in FACTORS[adapter.kind])


def _with_own_ranks(members: dict[str, AdapterLayer]) -> dict[str, AdapterLayer]:
    """Members that use columns of their own keep only those."""
    kind = next(iter(members.values())).kind
    used = [torch.stack([member.tensors[up].ne(0).any(0) for up, _ in FACTORS[kind]]).any(0) for member in members.values()]
    bands = _bands(used)
    if bands is None:
        return members
    narrow = {}
    for (layer, member), (start, stop) in zip(members.items(), bands):
        tensors = dict(member.tensors)
        for up, down in FACTORS[kind]:
            tensors |= {up: tensors[up][:, start:stop], down: tensors[down][start:stop]}
        narrow[layer] = replace(member, tensors=tensors)
    return narrow


def _bands(used: Sequence[Tensor]) -> list[tuple[int, int]] | None:
    """Neighbouring ranges of columns, one for each member, that hold all columns it uses; None where columns are used in common.

    used: for each member which of the r columns are not zero. Equal ranges are tried first: trained columns may be zero by chance.
    """
    count, rank = len(used), len(used[0])
    if count == 1 or not all(columns.any() for columns in used):
        return None
    edges = [[rank // count * number for number in range(count)] + [rank]] if rank % count == 0 else []
    edges.append([0, *(int(columns.nonzero()[0]) for columns in used[1:]), rank])
    for candidate in edges:
        bands = list(pairwise(candidate))
        if all(start < stop and columns.sum() == columns[start:stop].sum() for columns, (start, stop) in zip(used, bands)):
            return bands
    return None


def out_features(adapter: AdapterLayer) -> int:
    """Rows of the weight that an adapter is for. Raises ValueError for oft, which does not tell."""
    t = adapter.tensors
    if adapter.kind in FACTORS:
        return t[FACTORS[adapter.kind][0][0]].shape[0]
    if adapter.kind == "lokr":
        return len(t["lokr_w1"] if "lokr_w1" in t else t["lokr_w1_a"]) * _height_of_second(adapter)
    raise ValueError("an oft adapter turns inputs and has no rows")


def _height_of_second(adapter: AdapterLayer) -> int:
    t = adapter.tensors
    return len(t["lokr_w2"] if "lokr_w2" in t else t["lokr_w2_a"])


def _halves(rows: int) -> list[tuple[int, int]]:
    return [(rows // 2, rows), (0, rows // 2)]


def take_rows(adapter: AdapterLayer, ranges: Sequence[tuple[int, int]]) -> AdapterLayer:
    """The adapter of these rows of the weight, in this order. Raises ValueError where they do not stand for themselves."""

    def taken(tensor: Tensor, unit: int = 1) -> Tensor:
        return torch.cat([tensor[start // unit : stop // unit] for start, stop in ranges])

    tensors = dict(adapter.tensors)
    if adapter.kind == "lokr":
        # Each row of the first factor of a Kronecker product gives as many rows as the second factor has.
        unit = _height_of_second(adapter)
        if any(edge % unit for bounds in ranges for edge in bounds):
            raise ValueError(f"its small matrices do not divide at the borders of the layers (blocks of {unit} rows)")
        first = "lokr_w1" if "lokr_w1" in tensors else "lokr_w1_a"
        return replace(adapter, tensors={**tensors, first: taken(tensors[first], unit)})
    for up, _ in FACTORS[adapter.kind]:
        tensors[up] = taken(tensors[up])
    if adapter.kind == "dora":
        if tensors[MAGNITUDE].dim() > 1:
            raise ValueError("its dora lengths are for inputs of the whole matrix")
        tensors[MAGNITUDE] = taken(tensors[MAGNITUDE])
    return replace(adapter, tensors=tensors)
