"""The energy of transferred latents against its formula, its gradient, and what it must and must not compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import ot
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from sd_scripts import families
from sd_scripts.families.lgt.edges import edge_difference, edge_map
from sd_scripts.families.lgt.energy import Energy
from sd_scripts.families.lgt.options import INTEGRATORS, LgtObjectiveOptions
from sd_scripts.families.lgt.transport import directions, sliced_wasserstein
from sd_scripts.library.core.diffusion import FlowPath
from sd_scripts.library.core.integrators import ORDERS, integrate
from sd_scripts.library.core.protocols import EDGES, Batch, Condition
from sd_scripts.library.core.rng import rng_for
from sd_scripts.library.objectives import make as objectives
from sd_scripts.schema.errors import OptionError

STYLES = ("line", "flat")
ALL = {"w_style": 1.5, "w_content": 2.0, "w_flow": 0.5, "w_edges": 0.6, "w_low": 0.7, "w_velocity": 0.3, "w_velocity_tv": 0.2}
PARTS = {
    "w_style": "swd",
    "w_content": "ssm",
    "w_flow": "flow",
    "w_edges": "edges",
    "w_low": "low",
    "w_velocity": "velocity",
    "w_velocity_tv": "velocity_tv",
}


def energy(**given: object) -> Energy:
    """Transfers begin in noise unless it is said otherwise, so that a network without meaning has its states where they are expected."""
    made = families.family("lgt").objective(LgtObjectiveOptions(**{"energy_start": "noise", **given}), FlowPath(), "velocity")
    assert isinstance(made, Energy)
    return made


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def condition(goal: str) -> Condition:
    return {"style": torch.tensor(float(("", *STYLES).index(goal)))}


def batch_of(numbers: Sequence[int], goals: Sequence[str], sides: tuple[int, int] = (8, 8), references: int = 3) -> Batch:
    """Images and references follow from the sample number, as in a run."""
    return Batch(
        x0=torch.stack([normal(4, *sides, seed=number) for number in numbers]),
        conditions=[condition(STYLES[number % 2]) for number in numbers],
        numbers=torch.tensor(numbers),
        weights=torch.ones(len(numbers)),
        names=[f"{number}.png" for number in numbers],
        towards=[condition(goal) for goal in goals],
        goals=list(goals),
        references=[1.5 * normal(references, 4, *sides, seed=1000 + number) + 0.5 for number in numbers],
    )


@dataclass
class Network:
    """Two layers with a style, which say what they were asked and which activations of theirs are still kept."""

    conditions: list[Condition]
    layers: nn.ModuleList
    asked: list[tuple[Tensor, Tensor, list[float]]] = field(default_factory=list)
    activations: list[StorageWeakRef] = field(default_factory=list)
    takes_edges: bool = False
    told_edges: list[Tensor] = field(default_factory=list)
    most_kept: list[int] = field(default_factory=list)
    """How many activations were kept when each was made."""
    kind: str = "velocity"
    in_step: bool = False

    @staticmethod
    def new(batch: Batch) -> Network:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            layers = nn.ModuleList([nn.Conv2d(4, 5, 3, padding=1), nn.Conv2d(5, 4, 3, padding=1)])
        return Network(batch.conditions, layers)

    @property
    def num_kept(self) -> int:
        return sum(not activation.expired() for activation in self.activations)

    def told(self, entries: Sequence[Condition]) -> Network:
        self.told_edges += [told[EDGES] for told in entries if EDGES in told]
        return replace(self, conditions=[{**mine, **told} for mine, told in zip(self.conditions, entries, strict=True)])

    def edges(self, latents: Tensor) -> Tensor:
        return edge_map(latents)

    def only(self, rows: Sequence[int]) -> Network:
        return replace(self, conditions=[self.conditions[row] for row in rows])

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        first, second = self.layers
        styles = torch.stack([condition["style"] for condition in self.conditions])
        self.asked.append((x.detach(), t, styles.tolist()))
        hidden = torch.tanh(first(x.to(first.weight.dtype)) + (0.3 * styles - t).view(-1, 1, 1, 1))
        self.activations.append(StorageWeakRef(hidden.untyped_storage()))
        self.most_kept.append(self.num_kept)
        return second(hidden.square())


@dataclass
class Fixed:
    """A network that says the same everywhere, and remembers whether a gradient was wanted."""

    velocity: Tensor
    with_gradient: list[bool] = field(default_factory=list)
    kind: str = "velocity"
    in_step: bool = False
    takes_edges: bool = False

    def told(self, entries: Sequence[Condition]) -> Fixed:
        return self

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        self.with_gradient.append(torch.is_grad_enabled())
        return self.velocity


@dataclass
class Guided:
    """A perfect network that brings every sample to a given end, by a straight line, from wherever it is."""

    end: Tensor
    kind: str = "velocity"
    in_step: bool = False
    takes_edges: bool = False

    def told(self, entries: Sequence[Condition]) -> Guided:
        return self

    def __call__(self, x: Tensor, t: Tensor) -> Tensor:
        return (x - self.end) / t.view(-1, 1, 1, 1)


# The formula.


def expected_parts(options: LgtObjectiveOptions, batch: Batch, network: Network) -> dict[str, list[float]]:
    """Everything once more, in float64, sample by sample, with POT for the distances."""
    network.layers.double()

    def velocity(row: int, entries: Sequence[Condition], x: Tensor, t: float) -> Tensor:
        one = replace(network, conditions=[entries[row]])
        return one(x[None], torch.tensor([t], dtype=torch.float64))[0].detach()

    found: dict[str, list[float]] = {name: [] for name in PARTS.values()}
    ends = []
    for row, number in enumerate(batch.numbers.tolist()):
        x0 = batch.x0[row].double()

        def drawn(stream: str, number: int = number) -> float:
            return torch.rand((), generator=rng_for(0, number, stream), dtype=torch.float64).item()

        def noise(stream: str, number: int = number, shape: torch.Size = x0.shape) -> Tensor:
            return torch.randn(shape, generator=rng_for(0, number, stream)).double()

        t = drawn("time")
        error = velocity(row, batch.conditions, (1 - t) * x0 + t * noise("noise"), t) - (noise("noise") - x0)
        found["flow"].append(error.square().mean().item())
        t = options.min_start + (options.max_start - options.min_start) * drawn("start")
        step, x = t / options.ode_integration_steps, (1 - t) * x0 + t * noise("start noise")
        met = []
        for _ in range(options.ode_integration_steps):
            met.append(velocity(row, batch.towards, x, t))
            if options.integrator == "midpoint":
                met.append(velocity(row, batch.towards, x - step / 2 * met[-1], t - step / 2))
            elif options.integrator == "heun":
                met.append(velocity(row, batch.towards, x - step * met[-1], t - step))
            x, t = x - step * (sum(met[-2:]) / 2 if options.integrator == "heun" else met[-1]), t - step
        assert t == pytest.approx(0, abs=1e-12)
        ends.append(x)
        found["velocity"].append(float(np.mean([v.square().mean() for v in met])))
        tv = [(v[:, 1:] - v[:, :-1]).abs().mean() + (v[:, :, 1:] - v[:, :, :-1]).abs().mean() for v in met]
        found["velocity_tv"].append(float(np.mean(tv)))
        found["ssm"].append(self_similarity(x, x0, options, number))
        found["edges"].append(edge_difference(x[None], x0[None]).item())
        found["low"].append(low(x - x0, options.low_pass_size))
    for row in range(len(ends)):
        together = [row]
        if options.swd_pooling == "style":
            together = [other for other, goal in enumerate(batch.goals) if goal == batch.goals[row]]
        first = min(batch.numbers[other].item() for other in together) if options.projections == "fresh" else 0
        total = 0.0
        for size, weight in zip(options.swd_scales, options.swd_scale_weights or [1.0] * 9, strict=False):
            along = directions(4 * size * size, options.num_projections, rng_for(0, first, f"directions/{size}")).double()
            ours = torch.cat([windows(ends[other], size) for other in together])
            theirs = torch.cat([windows(image.double(), size) for other in together for image in batch.references[other]])
            total += weight * float(np.mean(ot.wasserstein_1d((ours @ along).numpy(), (theirs @ along).numpy(), p=2)))
        found["swd"].append(total)
    return found


def windows(latents: Tensor, size: int) -> Tensor:
    return F.unfold(latents[None], size)[0].T


def low(difference: Tensor, size: int) -> float:
    """The mean square of means over what lies inside of squares, by loops."""
    channels, height, width = difference.shape
    border = size // 2
    means = [
        difference[channel, max(0, i) : max(0, i + size), max(0, j) : max(0, j + size)].mean().item()
        for channel in range(channels)
        for i in range(-border, height + border - size + 1)
        for j in range(-border, width + border - size + 1)
    ]
    return float(np.mean(np.square(means)))


def self_similarity(found: Tensor, source: Tensor, options: LgtObjectiveOptions, number: int) -> float:
    size, count = options.descriptor_size, found.shape[1] * found.shape[2]
    places = torch.arange(count)
    if count > options.content_positions:
        places = torch.randperm(count, generator=rng_for(0, number, "content positions"))[: options.content_positions]
    cosines = []
    for latents in (found, source):
        around = windows(F.pad(latents[None], (size // 2,) * 4, mode="reflect")[0], size)
        unit = F.normalize(around - around.mean(dim=0), dim=1)[places]
        cosines.append(unit @ unit.T)
    return (cosines[0] - cosines[1]).square().mean().item()


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"integrator": "midpoint", "swd_pooling": "sample", "projections": "fixed", "descriptor_size": 1},
        {"integrator": "heun", "swd_scales": (1, 5), "swd_scale_weights": (0.5, 2.0), "low_pass_size": 4, "content_positions": 20},
        {"min_start": 0.6, "max_start": 0.6, "ode_integration_steps": 1, "num_projections": 7, "swd_scales": (3,)},
        {"style_weights": ("line=3", "flat=0"), "low_pass_size": 12, "checkpoint_steps": False},
    ],
)
def test_the_loss_is_its_formula(given):
    objective = energy(**ALL, **given)
    batch = replace(batch_of([5, 3, 8, 12], ["line", "flat", "line", ""], (9, 7)), weights=torch.tensor([1.0, 2.0, 0.5, 1.0]))
    network = Network.new(batch)
    losses = objective(network, batch, 0)
    expected = expected_parts(objective.options, batch, network)
    for name, values in expected.items():
        assert losses.parts[name].tolist() == pytest.approx(values, rel=2e-4), name
        assert not losses.parts[name].requires_grad
    of_style = [objective.options.weight_of_style.get(goal, 1.0) for goal in batch.goals]
    total = sum(ALL[weight] * np.array(expected[name]) * (of_style if name == "swd" else 1) for weight, name in PARTS.items())
    assert losses.loss.tolist() == pytest.approx((total * batch.weights.numpy()).tolist(), rel=2e-4)


@pytest.mark.parametrize("method", INTEGRATORS)
@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_a_constant_velocity_moves_the_latent_by_exactly_the_remaining_time(method, num_steps):
    """A shorter way would leave the rest of t0 at every place, which the blurred difference shows."""
    batch = batch_of([0, 1, 2], ["line"] * 3)

    @dataclass
    class Constant(Guided):
        def __call__(self, x: Tensor, t: Tensor) -> Tensor:
            return self.end

    objective = energy(w_low=1.0, low_pass_size=2, integrator=method, ode_integration_steps=num_steps)
    noise = torch.stack([torch.randn(4, 8, 8, generator=rng_for(0, number, "start noise")) for number in range(3)])
    # Its own velocity, constant on its path, brings a sample back to itself; one that is greater by 1 to t0 below.
    back = objective(Constant(noise - batch.x0), batch, 0).parts
    assert back["low"].max().item() < 1e-10
    assert back["ssm"].max().item() < 1e-10
    below = objective(Constant(noise - batch.x0 + 1), batch, 0).parts
    t0 = [0.3 + 0.7 * torch.rand((), generator=rng_for(0, number, "start"), dtype=torch.float64).item() for number in range(3)]
    assert below["low"].sqrt().tolist() == pytest.approx(t0, rel=1e-5)


def test_flow_is_trained_on_the_own_style_and_the_way_goes_towards_the_wanted_one():
    batch = batch_of([0, 1, 2, 3], ["flat", "line", "", "flat"])
    network = Network.new(batch)
    energy(ode_integration_steps=2, min_start=0.5, max_start=0.5, checkpoint_steps=False)(network, batch, 0)
    own, *way = network.asked
    assert own[2] == [1, 2, 1, 2]
    assert [styles for _, _, styles in way] == [[2, 1, 0, 2]] * 2
    assert [t.tolist() for _, t, _ in way] == [[0.5] * 4, [0.25] * 4]


def test_starts_are_spread_over_their_range_and_times_of_the_flow_over_all():
    count = 400
    batch = batch_of(range(count), ["line"] * count, (4, 4), 1)
    network = Network.new(batch)
    energy(min_start=0.2, max_start=0.6, ode_integration_steps=1, swd_scales=(1,))(network, batch, 0)
    (own, times, _), (towards, starts, _) = network.asked
    assert 0.2 <= starts.min() < 0.21 and 0.59 < starts.max() <= 0.6
    assert times.min() < 0.02 and times.max() > 0.98
    # Noise and level of the two are independent.
    assert abs(np.corrcoef(times, starts)[0, 1]) < 0.15
    noise = [((x - (1 - t.view(-1, 1, 1, 1)) * batch.x0) / t.view(-1, 1, 1, 1)).flatten() for x, t in ((own, times), (towards, starts))]
    assert abs(np.corrcoef(*noise)[0, 1]) < 0.05


def test_a_network_that_takes_edges_is_told_them_with_noise_or_not_at_all_and_exactly_on_the_way():
    count, rate, most = 400, 0.25, 0.5
    batch = batch_of(range(count), ["line"] * count, (6, 6), 1)
    objective = energy(edge_noise=most, edge_dropout_rate=rate, ode_integration_steps=1, swd_scales=(1,))
    network = Network.new(batch)
    objective(network, batch, 0)
    assert not network.told_edges, "a network without edge conditioning is told nothing"
    network.takes_edges = True
    objective(network, batch, 0)
    maps = edge_map(batch.x0)
    flow, way = torch.stack(network.told_edges).split(count)
    assert torch.equal(way, maps)
    dropped = flow.flatten(1).abs().amax(dim=1) == 0
    assert dropped.float().mean().item() == pytest.approx(rate, abs=0.06)
    levels = (flow - maps)[~dropped].flatten(1).std(dim=1)
    assert levels.max() < most * 1.5 and levels.mean().item() == pytest.approx(most / 2, abs=0.03)


def test_back_translation_tells_the_flow_the_edges_of_what_the_model_draws_in_the_wanted_style():
    count, rate = 40, 0.5
    batch = batch_of(range(count), [STYLES[number % 2] for number in range(count)], (6, 6), 1)
    alone = {"w_style": 0.0, "w_content": 0.0, "w_low": 0.0, "edge_noise": 0.0, "edge_dropout_rate": 0.0}
    objective = energy(**alone, back_translation_rate=rate, energy_from_step=2, ode_integration_steps=2, integrator="midpoint")

    def told(step: int) -> tuple[Network, Tensor]:
        network = Network.new(batch)
        network.takes_edges = True
        loss = objective(network, replace(batch, step=step), 0).loss
        loss.sum().backward()
        return network, torch.stack(network.told_edges[-count:])

    own = edge_map(batch.x0)
    assert torch.equal(told(1)[1], own), "before the energy joins there is none"
    network, maps = told(2)
    chances = [torch.rand((), generator=rng_for(0, number, "back-translation"), dtype=torch.float64) for number in range(count)]
    rows = [number for number, chance in enumerate(chances) if chance < rate]
    assert 0 < len(rows) < count
    others = [number for number in range(count) if number not in rows]
    assert torch.equal(maps[others], own[others])
    # The way from noise to the image in two steps, each asking twice, in the wanted style.
    assert [t[0].item() for _, t, _ in network.asked] == [1.0, 0.75, 0.5, 0.25, network.asked[-1][1][0].item()]
    assert network.asked[0][2] == [float(1 + STYLES.index(batch.goals[row])) for row in rows]
    noise = [torch.randn(4, 6, 6, generator=rng_for(0, row, "back-translation noise")) for row in rows]
    assert torch.equal(network.asked[0][0], torch.stack(noise))
    with torch.no_grad():
        field = replace(network, conditions=[batch.towards[row] for row in rows])
        ones = torch.ones(len(rows))
        made = integrate(field, torch.stack(noise), ones, 0 * ones, 2, "midpoint")
    assert torch.allclose(maps[rows], edge_map(made), atol=1e-5)


# What is compared with what.


def two_styles(count: int, sides: tuple[int, int] = (16, 16)) -> tuple[Batch, Tensor]:
    """Latents N(+1, I) that are to become N(-1, I), and the other way round, with the shift that does it."""
    sign = torch.tensor([1.0, -1.0]).repeat(count // 2).view(-1, 1, 1, 1)
    batch = batch_of(range(count), [STYLES[(number + 1) % 2] for number in range(count)], sides)
    x0 = torch.stack([normal(4, *sides, seed=number) for number in range(count)]) + sign
    references = [normal(4, 4, *sides, seed=500 + number) - sign[number] for number in range(count)]
    return replace(batch, x0=x0, references=references), -2 * sign


@pytest.mark.parametrize("pooling", ["style", "sample"])
def test_leaving_everything_as_it_is_scores_far_worse_than_a_perfect_transfer(pooling):
    """A distance of 4 by the closed form, against the noise floor. Pooled over styles, as an earlier program did, both score the same."""
    batch, shift = two_styles(8)
    objective = energy(swd_pooling=pooling, swd_scales=(3,), ode_integration_steps=1)

    def swd(end: Tensor) -> float:
        return objective(Guided(end), batch, 0).parts["swd"].mean().item()

    def pooled(end: Tensor) -> float:
        along = directions(36, 64, torch.Generator().manual_seed(0))
        return sliced_wasserstein([end], [[torch.cat(batch.references)]], [along], 3)[0].item()

    assert swd(batch.x0) == pytest.approx(4.0, rel=0.2)
    # 7/n at 196 patches alone, at 4 times as many together.
    floor = 7 / 196 / (4 if pooling == "style" else 1)
    assert swd(batch.x0 + shift) < 1.5 * floor
    assert pooled(batch.x0) < 2 * pooled(batch.x0 + shift)


def test_references_of_one_style_have_no_influence_on_samples_towards_another():
    batch = batch_of([0, 1, 2, 3], ["flat", "line", "flat", "line"])
    other = [latents + (goal == "line") for latents, goal in zip(batch.references, batch.goals)]
    first, second = (energy()(Network.new(batch), replace(batch, references=some), 0).parts["swd"] for some in (batch.references, other))
    assert torch.equal(first[[0, 2]], second[[0, 2]])
    assert (first[[1, 3]] != second[[1, 3]]).all()


def test_samples_of_one_style_get_the_value_of_their_patches_together():
    batch = batch_of([0, 1, 2, 3], ["flat", "line", "flat", "line"])
    together = energy()(Network.new(batch), batch, 0).parts["swd"]
    alone = energy(swd_pooling="sample")(Network.new(batch), batch, 0).parts["swd"]
    assert together[0] == together[2] != together[1] == together[3]
    assert len(set(alone.tolist())) == 4


@pytest.mark.parametrize("pooling", ["style", "sample"])
def test_references_may_have_other_sizes_and_numbers_than_the_samples(pooling):
    batch = batch_of([0, 1, 2], ["flat", "flat", "line"])
    references = [normal(2, 4, 6, 10, seed=1), normal(5, 4, 8, 8, seed=2), normal(1, 4, 12, 7, seed=3)]
    objective = energy(swd_pooling=pooling, swd_scales=(3,), ode_integration_steps=1)
    found = objective(Guided(batch.x0), replace(batch, references=references), 0).parts["swd"]
    for row, rows in enumerate([[0, 1], [0, 1], [2]] if pooling == "style" else [[0], [1], [2]]):
        along = directions(36, 64, rng_for(0, rows[0], "directions/3")).double()
        ours = torch.cat([windows(batch.x0[other].double(), 3) for other in rows]) @ along
        theirs = torch.cat([windows(image.double(), 3) for other in rows for image in references[other]]) @ along
        assert found[row].item() == pytest.approx(float(np.mean(ot.wasserstein_1d(ours.numpy(), theirs.numpy(), p=2))), rel=1e-3)


@pytest.mark.parametrize("pooling", ["style", "sample"])
@pytest.mark.parametrize("projections", ["fresh", "fixed"])
def test_directions_are_those_of_the_sample_or_the_same_in_every_step(pooling, projections):
    batch = batch_of([0, 1], ["flat", "line"])
    objective = energy(swd_pooling=pooling, projections=projections, num_projections=4, ode_integration_steps=1)
    steps = [objective(Guided(batch.x0), replace(batch, numbers=batch.numbers + 2 * step), 0).parts["swd"] for step in range(2)]
    assert torch.allclose(*steps, rtol=1e-4) == (projections == "fixed")


# Splitting a batch.


def loss_and_gradients(objective: Energy, batches: Sequence[Batch]) -> tuple[Tensor, list[Tensor]]:
    network = Network.new(batches[0])
    losses = []
    for batch in batches:
        losses.append(objective(replace(network, conditions=batch.conditions), batch, 0).loss)
        losses[-1].sum().backward()
    return torch.cat(losses).detach(), [weight.grad for layer in network.layers for weight in layer.parameters()]


@pytest.mark.parametrize("sizes", [(2, 2), (1, 1, 1, 1), (3, 1)])
def test_a_batch_split_over_processes_or_accumulation_trains_the_same(sizes):
    goals = ["flat", "line", "flat", ""]
    objective = energy(**ALL, swd_pooling="sample")
    parts = torch.arange(4).split(sizes)
    whole, gradients = loss_and_gradients(objective, [batch_of(range(4), goals)])
    split, others = loss_and_gradients(objective, [batch_of(rows.tolist(), [goals[row] for row in rows]) for rows in parts])
    assert torch.allclose(whole, split, rtol=1e-6, atol=1e-6)
    for one, other in zip(gradients, others, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)


def test_where_styles_do_not_meet_a_split_changes_nothing_with_pooling_either():
    goals = ["flat", "flat", "line", "line"]
    whole, _ = loss_and_gradients(energy(**ALL), [batch_of(range(4), goals)])
    split, _ = loss_and_gradients(energy(**ALL), [batch_of((0, 1), goals[:2]), batch_of((2, 3), goals[2:])])
    assert torch.allclose(whole, split, rtol=1e-6, atol=1e-6)


# Gradient, and what it costs.


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("method", INTEGRATORS)
def test_the_gradient_through_all_steps_is_that_of_finite_differences(method, checkpointing):
    batch = batch_of([0, 1, 2], ["flat", "line", "flat"], (5, 5), 2)
    network = Network.new(batch)
    network.layers.double()
    objective = energy(**ALL, integrator=method, ode_integration_steps=2, checkpoint_steps=checkpointing, swd_scales=(1, 3))
    # It moves the weights in place, one after the other.
    assert torch.autograd.gradcheck(lambda *_: objective(network, batch, 0).loss, tuple(network.layers.parameters()), fast_mode=True)


@pytest.mark.parametrize("method", INTEGRATORS)
def test_computing_again_changes_no_bit_of_loss_and_gradient(method):
    found = [
        loss_and_gradients(energy(**ALL, integrator=method, checkpoint_steps=again), [batch_of(range(3), ["flat", "line", ""])])
        for again in (True, False)
    ]
    assert torch.equal(found[0][0], found[1][0])
    for one, other in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("given", [{}, {"w_velocity": 0.1, "w_velocity_tv": 0.1}])
@pytest.mark.parametrize("method", INTEGRATORS)
def test_what_is_kept_for_the_gradient_does_not_grow_with_the_number_of_steps(method, given):
    batch = batch_of([0, 1], ["flat", "line"])

    def kept(num_steps: int, checkpointing: bool) -> tuple[int, int]:
        """Activations of the network that are there between forward and backward, and at most in between."""
        network = Network.new(batch)
        objective = energy(w_flow=0.0, integrator=method, ode_integration_steps=num_steps, checkpoint_steps=checkpointing, **given)
        loss = objective(network, batch, 0).loss.sum()
        before = network.num_kept
        loss.backward()
        del loss
        assert network.num_kept == 0
        return before, max(network.most_kept)

    of_step = ORDERS[method]
    assert kept(3, False) == (3 * of_step, 3 * of_step)
    assert kept(12, False) == (12 * of_step, 12 * of_step)
    assert kept(3, True) == kept(12, True)
    assert kept(12, True)[0] == 0
    assert kept(12, True)[1] <= of_step


# What is not asked for costs nothing.


@pytest.mark.parametrize(
    ("given", "num_calls", "parts"),
    [
        ({"w_style": 0, "w_content": 0}, 1, {"flow"}),
        ({"w_flow": 0, "w_content": 0}, 3, {"swd"}),
        ({"w_flow": 0}, 3, {"swd", "ssm"}),
        ({}, 4, {"flow", "swd", "ssm"}),
        ({"integrator": "heun"}, 7, {"flow", "swd", "ssm"}),
        ({"w_style": 0, "w_content": 0, "w_low": 1}, 4, {"flow", "low"}),
        ({"w_style": 0, "w_content": 0, "w_velocity": 1}, 4, {"flow", "velocity"}),
        ({"w_style": 0, "w_content": 0, "w_velocity_tv": 1}, 4, {"flow", "velocity_tv"}),
    ],
)
def test_the_network_is_asked_for_nothing_that_has_no_weight(given, num_calls, parts):
    batch = batch_of([0, 1], ["flat", "line"])
    network = Network.new(batch)
    losses = energy(**{"ode_integration_steps": 3, "checkpoint_steps": False, "w_low": 0, **given})(network, batch, 0)
    assert len(network.asked) == num_calls
    assert losses.parts.keys() == parts


@pytest.mark.parametrize("method", ["euler", "midpoint", "heun"])
def test_inversion_begins_where_the_sources_own_velocity_leads(method):
    batch = batch_of([0, 1], ["line", ""])
    network = Network.new(batch)
    given = {"w_flow": 0, "min_start": 0.6, "max_start": 0.6, "integrator": method, "ode_integration_steps": 5, "checkpoint_steps": False}
    energy(**given, energy_start="inversion")(network, batch, 0)
    calls = 5 * ORDERS[method]
    ways_out, ways_back = network.asked[:calls], network.asked[calls:]
    assert len(ways_back) == calls
    own, wanted = ([one["style"].item() for one in entries] for entries in (batch.conditions, batch.towards))
    assert all(styles == own for *_, styles in ways_out) and all(styles == wanted for *_, styles in ways_back)
    x, field = batch.x0.double(), network.told(batch.conditions)
    network.layers.double()
    with torch.no_grad():
        for number in range(5):
            t = torch.full((2,), 0.12 * number, dtype=torch.float64)
            if method == "euler":
                x = x + 0.12 * field(x, t)
            elif method == "midpoint":
                x = x + 0.12 * field(x + 0.06 * field(x, t), t + 0.06)
            else:
                first = field(x, t)
                x = x + 0.06 * (first + field(x + 0.12 * first, t + 0.12))
    assert torch.allclose(ways_back[0][0].double(), x, atol=1e-5)
    assert torch.allclose(ways_back[0][1], torch.full((2,), 0.6))


def test_inversion_brings_the_same_style_back_and_gets_no_gradient():
    batch = batch_of([0, 1], [STYLES[0], STYLES[1]])
    given = {"w_style": 0, "w_content": 0, "w_low": 1, "low_pass_size": 2, "energy_start": "inversion"}
    assert energy(**given, ode_integration_steps=200)(Network.new(batch), batch, 0).parts["low"].max() < 1e-3, "there and back again"
    network = Fixed(batch.x0)
    energy(**given, ode_integration_steps=3, checkpoint_steps=False)(network, batch, 0)
    assert network.with_gradient == [True, False, False, False, True, True, True], "the flow, the way out, the way back"


def test_the_energy_joins_at_its_step_and_is_always_there_for_held_out_images():
    batch = batch_of([0, 1], ["flat", "line"])
    found = {}
    for step in (0, 9, 10, -1):
        network = Network.new(batch)
        losses = energy(ode_integration_steps=2, checkpoint_steps=False, energy_from_step=10)(network, replace(batch, step=step), 0)
        found[step] = (len(network.asked), "swd" in losses.parts)
    assert found == {0: (1, False), 9: (1, False), 10: (3, True), -1: (3, True)}


def test_without_gradient_nothing_is_computed_again():
    batch = batch_of([0, 1], ["flat", "line"])
    network = Network.new(batch)
    with torch.no_grad():
        losses = energy(ode_integration_steps=3)(network, batch, 0)
    assert len(network.asked) == 4
    assert torch.isfinite(losses.loss).all()


def test_a_scale_without_weight_is_not_compared_at_all():
    batch = batch_of([0], ["flat"])
    found = [
        energy(swd_scales=scales, swd_scale_weights=weights)(Network.new(batch), batch, 0).loss
        for scales, weights in (((1, 3), (2.0, 0.0)), ((1,), (2.0,)))
    ]
    assert torch.equal(*found)


# What cannot be, and what the engine asks of every objective.


def test_patches_that_do_not_fit_are_named():
    batch = replace(batch_of([0, 1], ["flat", "line"], (8, 8)), references=[normal(2, 4, 8, 8), normal(2, 4, 6, 12)])
    objective = energy(swd_scales=(1, 7, 9))
    with pytest.raises(OptionError, match=r"swd_scales: patches of 7, 9 latent pixels .* 6 a side"):
        objective(Network.new(batch), batch, 0)
    with pytest.raises(OptionError) as wrong:
        objectives.check_sides(LgtObjectiveOptions(swd_scales=(3,), descriptor_size=5), [(16, 16), (8, 2)])
    assert [problem.option for problem in wrong.value.problems] == ["swd_scales", "descriptor_size"]
    objectives.check_sides(LgtObjectiveOptions(swd_scales=(3,), descriptor_size=5), [(3, 3)])
    objectives.check_sides(LgtObjectiveOptions(w_style=0, w_content=0), [(1, 1)])


def test_weights_of_styles_that_are_not_there_are_named():
    options = LgtObjectiveOptions(style_weights=("line=2", "monet=0.5"))
    objectives.check_styles(options, ["line", "monet", "flat"])
    with pytest.raises(OptionError, match="style_weights: the data set has no style 'monet'; it has flat, line"):
        objectives.check_styles(options, ["line", "flat"])


def test_it_has_no_levels_texts_priors_or_colours_of_its_own():
    options = LgtObjectiveOptions()
    assert (options.num_anchors, options.wants_empty_text, options.term_weights) == (0, False, {})
    assert not objectives.wants_colours(options, ())
    objectives.check_prior(options, has_regularisation=False)
