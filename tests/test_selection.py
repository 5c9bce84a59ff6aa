"""Which cases of a matrix always run."""

import itertools

import pytest

from tests.conftest import covering


@pytest.mark.parametrize("sizes", [(1,), (5,), (2, 3), (5, 4, 3), (1, 7, 2)])
def test_each_value_occurs_in_as_few_cases_as_the_longest_parameter_has_values(sizes: tuple[int, ...]) -> None:
    cases = [dict(zip("abc", values)) for values in itertools.product(*map(range, sizes))]
    chosen = [cases[number] for number in covering(cases)]
    assert len(chosen) == max(sizes)
    assert all({case[name] for case in chosen} == set(range(size)) for name, size in zip("abc", sizes))


def test_cases_with_holes_are_covered_too() -> None:
    cases = [{"a": 0, "b": 0}, {"a": 0, "b": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 0}]
    found = covering(cases)
    assert {value for number in found for value in cases[number].items()} == {value for case in cases for value in case.items()}


@pytest.mark.covering
@pytest.mark.parametrize("second", range(3))
@pytest.mark.parametrize("first", range(3))
def test_a_marked_matrix_is_cut(first: int, second: int, request: pytest.FixtureRequest) -> None:
    always = [
        item
        for item in request.session.items
        if item.name.startswith("test_a_marked_matrix_is_cut[") and not item.get_closest_marker("long")
    ]
    if request.config.option.markexpr == "not long":
        assert len(always) <= 3 and request.node in always
