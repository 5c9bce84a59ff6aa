"""Approximations of low rank against float64 decompositions of random matrices."""

from __future__ import annotations

import math
import random

import pytest
import torch

from sd_scripts.library.tools.low_rank import Limit, clamped, decompose, of_product, product_norm, squared_error, squared_norm


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def decaying(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Singular values that fall over three powers of ten, and a floor of noise."""
    count = min(rows, columns, 100)
    left = torch.linalg.qr(torch.randn(rows, count, generator=rng(seed))).Q
    right = torch.linalg.qr(torch.randn(columns, count, generator=rng(seed + 1))).Q
    return (left * torch.logspace(0, -3, count)) @ right.T + 1e-4 * torch.randn(rows, columns, generator=rng(seed + 2))


@pytest.mark.parametrize("shape", [(60, 200), (200, 60), (700, 520), (520, 900)], ids=str)
@pytest.mark.parametrize(
    "make", [decaying, lambda rows, columns, seed: torch.randn(rows, columns, generator=rng(seed))], ids=["decay", "noise"]
)
def test_no_other_matrix_of_the_rank_is_much_nearer(make, shape: tuple[int, int]) -> None:
    seed = random.getrandbits(31)
    matrix = make(*shape, seed)
    found = decompose(matrix, Limit(12), rng(0))
    up, down = found.factors(12)
    values = torch.linalg.svdvals(matrix.double())
    best = float(values[12:].square().sum())
    error = squared_error(matrix, up, down)
    assert best * (1 - 1e-4) <= error <= best * (1 + 2e-3), seed
    assert found.energy == pytest.approx(float(values.square().sum()), rel=1e-6)
    assert torch.allclose(found.s[:6], values[:6], rtol=1e-2)


def test_a_matrix_of_low_rank_is_found_exactly_at_any_size() -> None:
    up, down = torch.randn(900, 7, generator=rng(1)), torch.randn(7, 600, generator=rng(2))
    found = decompose(up @ down, Limit(8), rng(0))
    error = squared_error(up @ down, *found.factors(8))
    assert error <= 1e-10 * found.energy


def test_the_search_depends_on_its_seed_alone() -> None:
    matrix = torch.randn(500, 500, generator=rng(3))
    first, again, other = (decompose(matrix, Limit(4), rng(seed)) for seed in (5, 5, 6))
    assert torch.equal(first.u, again.u) and torch.equal(first.s, again.s) and torch.equal(first.v, again.v)
    assert torch.allclose(first.s, other.s, rtol=1e-2)


@pytest.mark.parametrize("side", [50, 500])
def test_limits_keep_as_many_values_as_their_definition_says(side: int) -> None:
    matrix = decaying(side, 120, 11) if side > 100 else decaying(120, 120, 11)[:side]
    values = torch.linalg.svdvals(matrix.double())
    energy, total = values.square().sum(), values.sum()
    wanted = {
        ("rank", None): 9,
        ("sv_ratio", 5.0): int((values > values[0] / 5).sum()),
        ("sv_fro", 0.9): next(k for k in range(1, 200) if values[:k].square().sum() >= 0.81 * energy),
        ("sv_cumulative", 0.3): next(k for k in range(1, 200) if values[:k].sum() >= 0.3 * total),
    }
    for (method, parameter), count in wanted.items():
        limit = Limit(9 if method == "rank" else 48, method, parameter)
        assert decompose(matrix, limit, rng(0)).rank(limit) == count, method
        assert decompose(matrix, limit, rng(0)).rank(Limit(3, method, parameter)) <= 3


def test_the_sum_of_all_values_is_known_where_a_limit_needs_it() -> None:
    matrix = torch.randn(450, 400, generator=rng(4))
    limit = Limit(8, "sv_cumulative", 0.01)
    assert decompose(matrix, limit, rng(0)).total == pytest.approx(float(torch.linalg.svdvals(matrix.double()).sum()), rel=1e-6)
    assert math.isinf(decompose(matrix, Limit(8), rng(0)).total)


def test_a_product_is_decomposed_without_forming_it() -> None:
    up, down = torch.randn(300, 9, generator=rng(5)), torch.randn(9, 200, generator=rng(6))
    found = of_product(up, down)
    values = torch.linalg.svdvals(up.double() @ down.double())[:9]
    assert torch.allclose(found.s, values, rtol=1e-10)
    for rank in (3, 9):
        error = squared_error(up @ down, *found.factors(rank))
        assert error == pytest.approx(float(values[rank:].square().sum()), rel=1e-4, abs=1e-6 * found.energy)
    assert product_norm(up, down) == pytest.approx(float((up.double() @ down.double()).norm()), rel=1e-12)
    assert squared_norm(up) == pytest.approx(float(up.double().square().sum()), rel=1e-6)


def test_factors_share_the_scale_so_that_half_precision_holds_both() -> None:
    up, down = 1e-6 * torch.randn(300, 4, generator=rng(7)), 1e2 * torch.randn(4, 200, generator=rng(8))
    new_up, new_down = of_product(up, down).factors(4)
    assert 0.2 < float(new_up.norm() / new_down.norm()) < 5
    rounded = new_up.half().float() @ new_down.half().float()
    assert float((rounded - up @ down).norm() / (up @ down).norm()) < 2e-3


def test_clamping_cuts_the_share_that_was_asked_for() -> None:
    up, down = torch.randn(400, 5, generator=rng(9)), torch.randn(5, 400, generator=rng(10))
    assert all(a is b for a, b in zip(clamped(up, down, 1.0), (up, down)))
    cut = torch.cat([part.flatten() for part in clamped(up, down, 0.9)]).abs()
    whole = torch.cat([up.flatten(), down.flatten()]).abs()
    assert float((cut < whole).float().mean()) == pytest.approx(0.1, abs=0.001)
    assert float(cut.max()) == pytest.approx(float(whole.quantile(0.9)), rel=1e-2)
