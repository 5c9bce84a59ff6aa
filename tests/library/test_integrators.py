"""Integration of velocity fields against closed forms: exact where it must be, and of the order that each method promises."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sd_scripts.library.core.integrators import ORDERS, STEPS, integrate

DOUBLE = torch.float64


@pytest.mark.parametrize("method", STEPS)
@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_a_constant_field_moves_by_exactly_the_remaining_time(method, num_steps):
    start = torch.rand(5, dtype=DOUBLE)
    x, constant = torch.randn(5, 4, 3, 2, dtype=DOUBLE), torch.randn(4, 3, 2, dtype=DOUBLE)
    moved = integrate(lambda x, t: constant.expand_as(x), x, start, torch.zeros(5, dtype=DOUBLE), num_steps, method)
    assert torch.allclose(moved, x - start.view(-1, 1, 1, 1) * constant, rtol=0, atol=1e-12)


def test_euler_visits_the_start_and_never_the_end():
    asked: list[Tensor] = []

    def field(x: Tensor, t: Tensor) -> Tensor:
        asked.append(t)
        return x

    integrate(field, torch.ones(2, 1), torch.tensor([1.0, 0.5]), torch.zeros(2), 5, "euler")
    assert torch.allclose(torch.stack(asked), torch.tensor([[1.0, 0.8, 0.6, 0.4, 0.2], [0.5, 0.4, 0.3, 0.2, 0.1]]).T)


def test_the_field_minus_x_gives_the_known_numbers():
    """From the image's side, with time running up: 0.8 to the fifth for five steps of Euler, 1/e exactly."""
    up = integrate(lambda x, t: -x, torch.ones(1, 1, dtype=DOUBLE), torch.zeros(1, dtype=DOUBLE), torch.ones(1, dtype=DOUBLE), 5, "euler")
    assert up.item() == pytest.approx(0.32768, abs=1e-12)


@pytest.mark.parametrize("method", STEPS)
def test_halving_the_step_shows_the_order(method):
    exact = math.exp(-1)

    def error(num_steps: int) -> float:
        one = torch.ones(1, 1, dtype=DOUBLE)
        return abs(integrate(lambda x, t: -x, one, torch.zeros(1, dtype=DOUBLE), one[0], num_steps, method).item() - exact)

    orders = [math.log2(error(count) / error(2 * count)) for count in (64, 128, 256)]
    assert orders[-1] == pytest.approx(ORDERS[method], abs=0.02)


@pytest.mark.parametrize("method", STEPS)
def test_the_flow_of_a_gaussian_arrives_where_the_closed_form_says(method):
    """x0 ~ N(m, s^2) on the straight path: the ideal velocity is affine in x, and its flow maps noise n to m + s n."""
    m, s = 0.7, 0.4
    noise = torch.tensor([[1.3]], dtype=DOUBLE)

    def field(x: Tensor, t: Tensor) -> Tensor:
        a, t = 1 - t[:, None], t[:, None]
        return (t - a * s**2) / (t**2 + a**2 * s**2) * (x - a * m) - m

    def error(num_steps: int) -> float:
        zero, one = torch.zeros(1, dtype=DOUBLE), torch.ones(1, dtype=DOUBLE)
        return abs(integrate(field, noise, one, zero, num_steps, method).item() - (m + s * 1.3))

    if method == "euler":
        published = [9.735e-2, 5.077e-2, 2.598e-2, 1.315e-2, 6.616e-3]
        assert [error(count) for count in (8, 16, 32, 64, 128)] == pytest.approx(published, rel=1e-3)
    if method == "midpoint":
        published = [3.356e-4, 4.295e-5, 5.400e-6, 6.760e-7, 8.453e-8]
        assert [error(count) for count in (8, 16, 32, 64, 128)] == pytest.approx(published, rel=1e-3)
    assert math.log2(error(64) / error(128)) > ORDERS[method] - 0.1


@pytest.mark.parametrize("method", STEPS)
def test_computing_again_changes_no_bit_of_result_and_gradient(method):
    network = torch.nn.Conv2d(2, 2, 3, padding=1)
    x, start = torch.randn(3, 2, 5, 5), torch.rand(3)

    def gradients(recompute: bool) -> list[Tensor]:
        network.zero_grad()
        end = integrate(lambda x, t: network(x) * t.view(-1, 1, 1, 1), x, start, torch.zeros(3), 4, method, recompute)
        end.square().sum().backward()
        return [end.detach(), *(parameter.grad.clone() for parameter in network.parameters())]

    for plain, again in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize("method", STEPS)
def test_a_step_asks_the_field_as_often_as_its_order(method):
    asked: list[float] = []

    def field(x: Tensor, t: Tensor) -> Tensor:
        asked.append(t.item())
        return -x

    integrate(field, torch.ones(1, 1), torch.ones(1), torch.zeros(1), 4, method)
    assert len(asked) == 4 * ORDERS[method]
    assert asked[:2] == pytest.approx({"euler": [1, 0.75], "midpoint": [1, 0.875], "heun": [1, 0.75]}[method])


@pytest.mark.parametrize("method", STEPS)
def test_samples_go_their_own_ways_from_their_own_times_to_their_own(method):
    start, end = torch.tensor([1.0, 0.2, 0.7], dtype=DOUBLE), torch.tensor([0.0, 0.9, 0.7], dtype=DOUBLE)
    x = torch.randn(3, 2, 2, dtype=DOUBLE)

    def field(x: Tensor, t: Tensor) -> Tensor:
        return (t + 0.5).view(-1, 1, 1) * torch.tanh(x)

    together = integrate(field, x, start, end, 6, method)
    for row in range(3):
        alone = integrate(field, x[row : row + 1], start[row : row + 1], end[row : row + 1], 6, method)
        assert torch.allclose(together[row], alone[0], rtol=0, atol=1e-12)
    assert torch.equal(together[2], x[2]), "no time, no way"


@pytest.mark.parametrize("method", STEPS)
def test_the_gradient_through_all_steps_is_that_of_finite_differences(method):
    weight = torch.randn(3, 3, dtype=DOUBLE, requires_grad=True)
    x, start = torch.randn(2, 3, dtype=DOUBLE, requires_grad=True), torch.tensor([0.9, 0.4], dtype=DOUBLE)

    def end(x: Tensor, weight: Tensor) -> Tensor:
        return integrate(
            lambda x, t: torch.tanh(x @ weight) * t[:, None], x, start, torch.zeros(2, dtype=DOUBLE), 3, method, recompute=True
        )

    assert torch.autograd.gradcheck(end, (x, weight))


def test_with_computing_again_only_the_states_between_the_steps_are_kept():
    network = torch.nn.Sequential(torch.nn.Linear(8, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8))

    def kept(num_steps: int, recompute: bool) -> int:
        numbers = 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal numbers
            numbers += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            integrate(lambda x, t: network(x), torch.randn(4, 8), torch.ones(4), torch.zeros(4), num_steps, "euler", recompute)
        return numbers

    plain, again = (kept(12, recompute) - kept(4, recompute) for recompute in (False, True))
    assert plain > 8 * 4 * 512, "the wide activations of every step"
    assert again < 8 * 4 * (8 + 4), "the state and the times of every step"
