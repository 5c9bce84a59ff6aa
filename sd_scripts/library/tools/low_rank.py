"""Best approximations of low rank, and how many singular values are worth keeping. Knows matrices, neither files nor layers.

Shapes: A (m, n) a matrix, k wanted rank, l = k + a few; A = U diag(s) V with U (m, r), s (r,) descending, V (r, n).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sd_scripts.schema.tools import DynamicMethod

EXACT_SIDE = 384
"""Matrices whose smaller side is at most this are decomposed as a whole."""
_OVERSAMPLING = 16
_MAX_ITERATIONS = 12
_SETTLED = 1e-6
"""The search for the largest singular values ends when an iteration adds less than this share of the energy."""
_BLOCK_ROWS = 1024
_BLOCK = 1 << 16
"""Numbers that are added up at a time in float32."""


@dataclass(frozen=True)
class Limit:
    """How many singular values are kept: at most rank of them, by one of kohya's methods (networks/resize_lora.py has the same names)."""

    rank: int
    method: DynamicMethod = "rank"
    parameter: float | None = None


@dataclass(frozen=True)
class Singular:
    """The largest singular values and vectors of a matrix, and what all of its values add up to."""

    u: Tensor
    s: Tensor
    """float64."""
    v: Tensor
    energy: float
    """Sum of the squares of all singular values: the squared Frobenius norm."""
    total: float
    """Sum of all singular values; infinite where it was not asked for and not all are known."""

    def rank(self, limit: Limit) -> int:
        """How many values the limit keeps, at least 1."""
        s, share = self.s, limit.parameter
        count = len(s)
        if limit.method != "rank":
            assert share is not None, "validated by the options"
            if limit.method == "sv_ratio":
                count = int((s > s[0] / share).sum())
            elif limit.method == "sv_fro":
                count = int(torch.searchsorted(s.square().cumsum(0) / max(self.energy, 1e-300), share**2)) + 1
            else:
                count = int(torch.searchsorted(s.cumsum(0) / max(self.total, 1e-300), share)) + 1
        return max(1, min(count, limit.rank, len(s)))

    def factors(self, rank: int) -> tuple[Tensor, Tensor]:
        """up (m, rank) and down (rank, n), float32, whose product is the best one; both get the roots of the singular values.

        So neither matrix has numbers much smaller than the other's, which half precision would lose.
        """
        root = self.s[:rank].sqrt()
        return (self.u[:, :rank] * root.to(self.u.dtype)).float(), (root[:, None].to(self.v.dtype) * self.v[:rank]).float()


def decompose(matrix: Tensor, limit: Limit, rng: torch.Generator) -> Singular:
    """The largest singular values and vectors of a float32 matrix, as many as the limit may keep.

    Small matrices are decomposed exactly, in float64; for others a subspace is searched by the randomised method of Halko, Martinsson
    and Tropp 2011 (arXiv 0909.4061), iterated until the energy it catches does not grow any more.
    """
    energy = squared_norm(matrix)
    side = min(matrix.shape)
    if side <= EXACT_SIDE or 2 * (limit.rank + _OVERSAMPLING) >= side:
        u, s, v = torch.linalg.svd(matrix.double(), full_matrices=False)
        return Singular(u, s, v, energy, float(s.sum()))
    u, s, v = _largest(matrix, min(limit.rank, side), energy, rng)
    total = math.inf
    if limit.method == "sv_cumulative":
        # The sum needs all values, so the eigenvalues of the smaller Gram matrix; several seconds for a side of 3072.
        total = float(torch.linalg.eigvalsh(_gram(matrix)).clamp(min=0).sqrt().sum())
    return Singular(u, s, v, energy, total)


def _largest(matrix: Tensor, rank: int, energy: float, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """U, s, V of the `rank` largest singular values."""
    test = torch.randn(matrix.shape[1], rank + _OVERSAMPLING, generator=rng)
    basis = torch.linalg.qr(matrix @ test).Q
    caught = 0.0
    for _ in range(_MAX_ITERATIONS):
        seen = matrix.T @ basis
        # Largest values of the small matrix that the subspace sees; they only grow from one iteration to the next.
        now = float(torch.linalg.eigvalsh((seen.T @ seen).double())[-rank:].sum())
        if now - caught <= _SETTLED * energy:
            break
        caught = now
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(seen).Q).Q
    # Both sides at once: the columns seen are few, so their own decomposition is small.
    q, r = torch.linalg.qr(matrix.T @ basis)
    left, s, right = torch.linalg.svd(r.double())
    u = basis @ right.T.to(basis.dtype)
    v = (q @ left.to(q.dtype)).T
    return u[:, :rank], s[:rank], v[:rank]


def of_product(up: Tensor, down: Tensor) -> Singular:
    """All singular values and vectors of up (m, r) @ down (r, n), exactly, in float64, from r x r matrices: the product is never formed."""
    q_up, r_up = torch.linalg.qr(up.double())
    q_down, r_down = torch.linalg.qr(down.double().T)
    u, s, v = torch.linalg.svd(r_up @ r_down.T, full_matrices=False)
    return Singular(q_up @ u, s, v @ q_down.T, float(s.square().sum()), float(s.sum()))


def squared_norm(matrix: Tensor) -> float:
    """Squared Frobenius norm: blocks are added up in float32, and their sums in float64."""
    return sum(float(torch.linalg.vector_norm(block)) ** 2 for block in matrix.reshape(-1).split(_BLOCK))


def squared_distance(a: Tensor, b: Tensor) -> float:
    """Squared Frobenius norm of the difference of two tensors of one shape, without forming it."""
    blocks = zip(a.reshape(-1).split(_BLOCK), b.reshape(-1).split(_BLOCK))
    return sum(float(torch.linalg.vector_norm(left.float() - right.float())) ** 2 for left, right in blocks)


def squared_error(matrix: Tensor, up: Tensor, down: Tensor) -> float:
    """Squared Frobenius norm of matrix - up @ down, some rows at a time."""
    return sum(squared_norm(rows - block @ down) for rows, block in zip(matrix.split(_BLOCK_ROWS), up.split(_BLOCK_ROWS)))


def product_norm(up: Tensor, down: Tensor) -> float:
    """Frobenius norm of up @ down without forming it: the squared norm is sum(U^T U * D D^T)."""
    up, down = up.double(), down.double()
    return float(((up.T @ up) * (down @ down.T)).sum().clamp(min=0).sqrt())


def clamped(up: Tensor, down: Tensor, quantile: float) -> tuple[Tensor, Tensor]:
    """Both matrices with their largest elements cut at this quantile of all their magnitudes; 1 changes nothing."""
    if quantile >= 1:
        return up, down
    magnitudes = torch.cat([up.flatten(), down.flatten()]).abs()
    limit = float(magnitudes.kthvalue(max(1, math.ceil(quantile * magnitudes.numel()))).values)
    return up.clamp(-limit, limit), down.clamp(-limit, limit)


def _gram(matrix: Tensor) -> Tensor:
    """A A^T or A^T A, whichever is smaller, in float64, from blocks."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    gram = torch.zeros(len(wide), len(wide), dtype=torch.float64)
    for block in wide.split(_BLOCK_ROWS, dim=1):
        gram += block.double() @ block.double().T
    return gram
