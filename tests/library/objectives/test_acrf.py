"""AC-RF: which noise levels are trained and with what weight, and the loss as a whole against its formula in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from sd_scripts.dataset.config import Subset
from sd_scripts.dataset.plan import Plan, make_plan
from sd_scripts.dataset.records import Dataset, ImageInfo
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.protocols import Batch, Losses
from sd_scripts.library.objectives import noise as noises
from sd_scripts.library.objectives.distances import distance_of
from sd_scripts.library.objectives.flow_matching import FlowMatching
from sd_scripts.library.objectives.levels import FromAnchors
from sd_scripts.library.objectives.make import make, times_of
from sd_scripts.library.objectives.regression import Regression
from sd_scripts.library.objectives.weights import anchor_weights, flow_weight_of
from sd_scripts.schema.anchored_flow import TERMS, AnchoredFlowOptions
from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.objective import FlowObjectiveOptions
from tests.library.objectives.references import all_terms

FLOW = diffusion.FlowPath()
TURBO = {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0, "use_dynamic_shifting": False}
SIGMAS = [3 * u / (1 + 2 * u) for u in (1 - i / 8 for i in range(8))]
"""Nodes of an 8-step sampler of Z-Image Turbo, spec and paper: 1 .9545 .9 .8333 .75 .6429 .5 .3."""
ALL_TERMS = {name: 0.1 + 0.07 * index for index, name in enumerate(TERMS)}


def fresh() -> torch.Generator:
    return torch.Generator().manual_seed(torch.randint(2**31, ()).item())


def acrf(colours: torch.Tensor | None = None, **options: object) -> FlowMatching:
    made = make(AnchoredFlowOptions(**{"objective": "acrf", **options}), FLOW, "velocity", TURBO, colours)
    assert isinstance(made, FlowMatching)
    return made


def anchors_of(objective: FlowMatching) -> FromAnchors:
    assert isinstance(objective.levels, FromAnchors)
    return objective.levels


def batch_of(count: int, first: int = 0, **more: object) -> Batch:
    x0 = torch.randn(count, 4, 8, 12, generator=torch.Generator().manual_seed(first))
    numbers = torch.arange(first, first + count)
    conditions = [{"text": torch.full((2,), float(number))} for number in numbers]
    return Batch(x0, conditions, numbers, torch.ones(count), [f"{number}.png" for number in numbers], **more)


class Network:
    """A small network with a weight, on which the conditions of the batch have an influence."""

    kind = "velocity"

    def __init__(self, batch: Batch, weight: torch.Tensor, in_step: bool = False) -> None:
        self.text = torch.stack([condition["text"].mean() for condition in batch.conditions]).view(-1, 1, 1, 1) / 10
        self.weight, self.in_step = weight, in_step
        self.told: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def only(self, rows: Sequence[int]) -> Network:
        some = Network.__new__(Network)
        some.text, some.weight, some.in_step, some.told = self.text[list(rows)], self.weight, self.in_step, self.told
        return some

    def answer(self, x_t: torch.Tensor, t: torch.Tensor, weight: torch.Tensor | float, text: torch.Tensor | float) -> torch.Tensor:
        return weight * torch.tanh(x_t + text) + t.view(-1, 1, 1, 1).square() * x_t.flip(1)

    def __call__(self, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        self.told.append(("call", x_t, t))
        return self.answer(x_t, t, self.weight, self.text)

    def base(self, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        self.told.append(("base", x_t, t))
        with torch.no_grad():
            return self.answer(x_t, t, 0.5, self.text)

    def without_text(self, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        self.told.append(("without_text", x_t, t))
        return self.answer(x_t, t, self.weight, 0.0)


def trained(objective: FlowMatching, batch: Batch, seed: int = 3, **network: bool) -> tuple[Losses, torch.Tensor, Network]:
    """Losses of a batch, the gradient of their sum, and the network that was asked."""
    weight = torch.tensor(0.8, requires_grad=True)
    asked = Network(batch, weight, **network)
    losses = objective(asked, batch, seed)
    losses.loss.sum().backward()
    assert weight.grad is not None
    return losses, weight.grad, asked


# Anchors and their weights.


def test_anchors_are_the_nodes_of_the_sampler() -> None:
    assert np.allclose(anchors_of(acrf()).sigmas, SIGMAS, rtol=0, atol=1e-15)
    for steps, shift in ((1, 3.0), (4, 6.0), (10, 1.0)):
        levels = anchors_of(make(AnchoredFlowOptions(objective="acrf", turbo_steps=steps), FLOW, "velocity", {"shift": shift}))
        u = 1 - np.arange(steps) / steps
        assert np.allclose(levels.sigmas, shift * u / (1 + (shift - 1) * u), rtol=0, atol=1e-15)


def test_a_sampler_without_fixed_steps_cannot_be_trained() -> None:
    with pytest.raises(OptionError, match="use_dynamic_shifting"):
        make(AnchoredFlowOptions(objective="acrf"), FLOW, "velocity", {**TURBO, "use_dynamic_shifting": True})
    assert isinstance(make(AnchoredFlowOptions(objective="flow"), FLOW, "velocity", {"use_dynamic_shifting": True}), FlowMatching)


@pytest.mark.parametrize(
    ("weighting", "floor", "published"),
    [
        ("vp_min_snr", 0.1, [0.1, 0.1, 0.1, 0.1, 0.1, 0.236, 0.5, 0.776]),
        ("min_snr", 0.0, [0, 0.002, 0.010, 0.028, 0.063, 0.128, 0.250, 0.450]),
        ("step_length", 0.1, [0.0455, 0.0545, 0.0667, 0.0833, 0.1071, 0.1429, 0.2, 0.3]),
    ],
)
def test_weights_of_anchors_have_the_published_values(weighting: str, floor: float, published: list[float]) -> None:
    weights = anchors_of(acrf(anchor_weighting=weighting, **({} if weighting == "step_length" else {"snr_floor": floor}))).weights
    assert abs(weights.mean() - 1) < 1e-15
    # As published they have another mean; the last one, the largest, fixes the factor.
    found = weights / weights[-1] * published[-1]
    assert np.allclose(found, published, rtol=0, atol=1e-3)


def test_weights_of_anchors_equal_their_formulas() -> None:
    sigmas = torch.rand(9, generator=fresh(), dtype=torch.float64).sort(descending=True).values
    snr = ((1 - sigmas) / sigmas) ** 2
    gamma, floor = 3.7, 0.05
    formulas = {
        "uniform": torch.ones(9, dtype=torch.float64),
        "step_length": sigmas - torch.tensor([*sigmas[1:].tolist(), 0.0], dtype=torch.float64),
        "min_snr": (snr.clamp(max=gamma) * sigmas**2).clamp(min=floor),
        "vp_min_snr": (snr.clamp(max=gamma) / (snr + 1)).clamp(min=floor),
    }
    for weighting, wanted in formulas.items():
        given = {"snr_gamma": gamma, "snr_floor": floor} if "snr" in weighting else {}
        found = anchor_weights(AnchoredFlowOptions(anchor_weighting=weighting, **given), sigmas)
        assert torch.allclose(found, wanted / wanted.mean(), rtol=1e-12, atol=0), weighting


# Dealing.


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_each_n_samples_in_a_row_get_all_n_anchors_in_changing_order(steps: int) -> None:
    levels = anchors_of(acrf(turbo_steps=steps))
    dealt = [levels.anchor_of(5, number) for number in range(40 * steps)]
    rounds = [tuple(dealt[start : start + steps]) for start in range(0, len(dealt), steps)]
    assert all(sorted(one) == list(range(steps)) for one in rounds)
    assert len(set(rounds)) > 1 or steps == 1
    assert dealt != [levels.anchor_of(6, number) for number in range(40 * steps)] or steps == 1
    # Resuming needs the number alone.
    assert levels.anchor_of(5, 17) == dealt[17]


def plan_with_regularisation(batch_size: int, images: int = 6) -> Plan:
    """A real plan: two bucket sizes, as many regularisation samples as training samples."""
    sizes = [(64, 64), (96, 48)]
    options = DatasetOptions(train_data_dir=".", resolution=(64, 64), min_bucket_reso=16, bucket_reso_steps=16, bucket_no_upscale=False)
    found = [
        ImageInfo(f"/{subset}/{index}.png", f"{index}.png", subset, *sizes[index % 2], "a", 1, 0, identity=f"{subset}/{index}")
        for subset in (0, 1)
        for index in range(images)
    ]
    dataset = Dataset((Subset(Path("0"), options), Subset(Path("1"), options, is_reg=True)), tuple(found))
    return make_plan(dataset, options, seed=4, grid=16, batch_size=batch_size)


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_training_and_regularisation_images_both_see_all_anchors_alike(batch_size: int) -> None:
    """On the samples of a real plan; each count is compared with what an even share would scatter by at most."""
    plan, levels = plan_with_regularisation(batch_size), anchors_of(acrf())
    refs = list(plan.samples(4000 // batch_size))
    seen = Counter((plan.subset_of(ref.image).is_reg, levels.anchor_of(4, ref.number)) for ref in refs)
    for is_reg in (False, True):
        counts = [seen[is_reg, anchor] for anchor in range(8)]
        assert stats.chisquare(counts).pvalue > 1e-6
    total = [seen[False, anchor] + seen[True, anchor] for anchor in range(8)]
    assert max(total) - min(total) <= 1


@pytest.mark.parametrize("period", [2, 4, 8])
def test_a_pattern_in_the_order_of_images_does_not_meet_the_same_anchors_always(period: int) -> None:
    levels = anchors_of(acrf())
    counts = Counter(levels.anchor_of(1, number) for number in range(0, 500 * period, period))
    assert stats.chisquare([counts[anchor] for anchor in range(8)]).pvalue > 1e-6


# Levels.


def test_without_jitter_the_anchors_are_trained_exactly() -> None:
    levels = anchors_of(acrf(jitter_scale=0.0))
    drawn = levels(batch_of(64), 9, torch.zeros(64, dtype=torch.bool))
    wanted = torch.tensor([SIGMAS[levels.anchor_of(9, number)] for number in range(64)])
    assert torch.equal(drawn.t, wanted) and drawn.t.dtype == torch.float32


def test_jittered_levels_are_uniform_in_their_cells_and_half_of_the_first_are_exactly_one() -> None:
    jitter = 0.6
    levels = anchors_of(acrf(jitter_scale=jitter))
    count = 16_000
    t = levels(replace(batch_of(1), numbers=torch.arange(count)), 2, torch.zeros(count, dtype=torch.bool)).t.double().numpy()
    dealt = np.array([levels.anchor_of(2, number) for number in range(count)])
    ends = [*SIGMAS, 0.0]
    for anchor in range(1, 8):
        here = t[dealt == anchor]
        low = SIGMAS[anchor] - jitter * (SIGMAS[anchor] - ends[anchor + 1]) / 2
        high = SIGMAS[anchor] + jitter * (SIGMAS[anchor - 1] - SIGMAS[anchor]) / 2
        assert here.min() >= low - 1e-7 and here.max() <= high + 1e-7
        assert stats.kstest((here - low) / (high - low), "uniform").pvalue > 1e-6
    first = t[dealt == 0]
    assert abs((first == 1).mean() - 0.5) < 5 * 0.5 / len(first) ** 0.5
    assert stats.kstest((1 - first[first < 1]) / (jitter * (1 - SIGMAS[1]) / 2), "uniform").pvalue > 1e-6


def test_the_network_is_told_exactly_the_level_of_what_it_sees() -> None:
    batch = batch_of(8)
    objective = acrf()
    _, _, network = trained(objective, batch)
    ((_, x_t, t),) = network.told
    drawn = objective.draw(batch, 3)
    assert t.dtype == torch.float32
    sigma = t.double().view(-1, 1, 1, 1)
    assert torch.allclose(x_t.double(), sigma * drawn.noise.double() + (1 - sigma) * batch.x0.double(), rtol=0, atol=1e-6)


def test_free_levels_take_their_share_which_may_change_over_the_run() -> None:
    objective = acrf(free_stream_ratio=0.2, free_stream_final_ratio=0.6, jitter_scale=0.0)
    count, anchors = 4000, torch.tensor(SIGMAS)
    many = replace(batch_of(1), numbers=torch.arange(count))
    for progress, share in ((0.0, 0.2), (0.5, 0.4), (1.0, 0.6)):
        t = objective.levels(replace(many, progress=progress), 8, torch.zeros(count, dtype=torch.bool)).t
        free = ~torch.isin(t, anchors)
        assert abs(free.double().mean() - share) < 5 * 0.5 / count**0.5
        # The uniform number before the shift.
        assert stats.kstest((t[free] / (3 - 2 * t[free])).numpy(), "uniform").pvalue > 1e-6
    assert torch.isin(objective.levels(many, 8, torch.ones(count, dtype=torch.bool)).t, anchors).all()


def test_a_free_level_has_the_weight_and_gap_of_the_samplers_step_over_it() -> None:
    levels = anchors_of(acrf(free_stream_ratio=1.0, anchor_weighting="step_length"))
    drawn = levels(replace(batch_of(1), numbers=torch.arange(2000)), 1, torch.zeros(2000, dtype=torch.bool))
    ends = np.array([*SIGMAS, 0.0])
    step = np.array([(ends[:-1] >= t - 1e-7).sum() - 1 for t in drawn.t.double().numpy()])
    lengths = ends[:-1] - ends[1:]
    assert np.allclose(drawn.gaps, lengths[step], atol=1e-6)
    assert np.allclose(drawn.weights, (lengths / lengths.mean())[step], atol=1e-5)


# The loss.


def reference(objective: FlowMatching, batch: Batch, colours: torch.Tensor, weights: dict[str, float]) -> list[float]:
    """The loss of each sample, in float64, from what was drawn."""
    drawn, losses = objective.draw(batch, 3), []
    for index in range(len(batch.names)):
        t, noise, x0 = float(drawn.t[index]), drawn.noise[index].double().numpy(), batch.x0[index].double().numpy()
        text = float(batch.conditions[index]["text"].mean()) / 10
        mask = np.ones(x0.shape[1:]) if batch.masks is None else batch.masks[index, 0].double().numpy()
        x_t = t * noise + (1 - t) * x0
        v = 0.8 * np.tanh(x_t + text) + t**2 * x_t[::-1]
        target = noise - x0
        terms = all_terms(v, target, x0, t, mask, colours.double().numpy(), 4, 0.3)
        plain = (np.square(v - target) * mask).mean()
        own = {name: float(values[index]) for name, values in batch.terms.items()}
        total = plain + sum({**weights, **own}[name] * value for name, value in terms.items())
        losses.append(float(drawn.weights[index] * batch.weights[index]) * total)
    return losses


@pytest.mark.parametrize("masked", [False, True])
def test_the_loss_is_the_weighted_sum_of_its_terms_sample_by_sample(masked: bool) -> None:
    colours = torch.randn(3, 4, generator=fresh())
    masks = torch.rand(8, 1, 8, 12, generator=fresh()) if masked else None
    own = {"lambda_fft": torch.rand(8, generator=fresh()), "lambda_tex": torch.rand(8, generator=fresh())}
    batch = replace(batch_of(8), masks=masks, weights=torch.rand(8, generator=fresh()), terms=own)
    objective = acrf(colours, anchor_weighting="min_snr", lf_magnitude_weight=0.3, **ALL_TERMS)
    losses, _, _ = trained(objective, batch)
    wanted = reference(objective, batch, colours, ALL_TERMS)
    assert torch.allclose(losses.loss.double(), torch.tensor(wanted, dtype=torch.float64), rtol=1e-4)
    assert losses.parts.keys() == {"unweighted", *TERMS}


def test_the_parts_of_the_log_add_up_to_the_loss() -> None:
    batch = replace(batch_of(8), regularisation=torch.arange(8) % 3 == 0, weights=torch.rand(8, generator=fresh()))
    objective = acrf(torch.randn(3, 4), base_prior_weight=2.0, curvature_weight=0.4, anchor_weighting="step_length", **ALL_TERMS)
    losses, _, _ = trained(objective, batch)
    weights = objective.draw(batch, 3).weights * batch.weights
    assert torch.allclose(losses.loss, sum(losses.parts.values()) * weights)


def test_a_term_whose_weight_is_nowhere_given_is_not_computed() -> None:
    losses, _, _ = trained(acrf(alpha_hf=0.5), batch_of(4))
    assert losses.parts.keys() == {"unweighted", "alpha_hf"}
    own = {"lambda_cosine": torch.tensor([0.0, 1.0, 2.0, 0.0])}
    parts = trained(acrf(), replace(batch_of(4), terms=own))[0].parts
    assert parts.keys() == {"unweighted", "lambda_cosine"}
    assert (parts["lambda_cosine"] > 0).tolist() == [False, True, True, False]


EVERYTHING = {
    **ALL_TERMS,
    "base_prior_weight": 0.7,
    "curvature_weight": 0.2,
    "curvature_interval": 1,
    "cfg_training_scale": 3.0,
    "cfg_training_ratio": 0.5,
    "latent_jitter": 0.05,
    "free_stream_ratio": 0.3,
    "anchor_weighting": "min_snr",
    "lf_magnitude_weight": 0.2,
}


@pytest.mark.parametrize("options", [{}, EVERYTHING, {"objective": "flow", "lambda_fft": 0.2}], ids=["plain", "everything", "flow"])
def test_batches_of_four_two_processes_with_two_and_accumulation_train_the_same(options: dict[str, object]) -> None:
    torch.manual_seed(0)
    objective = acrf(torch.randn(3, 4), **options)
    whole = replace(batch_of(4, first=20), regularisation=torch.tensor([True, False, False, True]), masks=torch.rand(4, 1, 8, 12))
    losses, gradient, _ = trained(objective, whole)
    for size in (1, 2):
        parts = []
        for start in range(0, 4, size):
            rows = slice(start, start + size)
            some = replace(
                whole,
                x0=whole.x0[rows],
                conditions=whole.conditions[rows],
                numbers=whole.numbers[rows],
                weights=whole.weights[rows],
                names=whole.names[rows],
                masks=None if whole.masks is None else whole.masks[rows],
                regularisation=None if whole.regularisation is None else whole.regularisation[rows],
            )
            parts.append(trained(objective, some))
        assert torch.allclose(torch.cat([part.loss for part, _, _ in parts]), losses.loss, rtol=1e-5)
        assert torch.allclose(sum(grad for _, grad, _ in parts), gradient, rtol=1e-4)


@pytest.mark.parametrize(
    "given", [{}, {"timestep_sampling": "logit_normal", "logit_mean": 0.3, "loss_type": "huber", "weighting_scheme": "cosmap"}]
)
def test_flow_matching_is_the_regression_of_the_velocity_in_every_family(given: dict[str, object]) -> None:
    batch = replace(batch_of(5, first=3), weights=torch.rand(5), masks=torch.rand(5, 1, 8, 12))
    losses, gradient, _ = trained(acrf(objective="flow", **given), batch)
    usual = {"timestep_sampling": "sigma", "discrete_flow_shift": AnchoredFlowOptions().discrete_flow_shift}
    options = FlowObjectiveOptions(**{**usual, **given})

    def noise(x0: Tensor, draw: noises.Draw) -> tuple[Tensor, Tensor]:
        drawn = noises.plain(x0, draw)
        return drawn, drawn

    regression = Regression(FLOW, "velocity", times_of(options, FLOW), noise, distance_of(options, FLOW), flow_weight_of(options))
    for other in (regression, make(options, FLOW, "velocity")):
        weight = torch.tensor(0.8, requires_grad=True)
        wanted = other(Network(batch, weight), batch, 3)
        wanted.loss.sum().backward()
        assert torch.equal(losses.loss, wanted.loss) and torch.equal(losses.parts["unweighted"], wanted.parts["unweighted"])
        assert torch.allclose(gradient, weight.grad)


# Prior, curvature, guidance, jitter.


def test_regularisation_images_are_held_to_the_base_model_and_to_nothing_else() -> None:
    is_reg = torch.tensor([False, True, True, False])
    batch = replace(batch_of(4), regularisation=is_reg, weights=torch.tensor([1.0, 0.5, 2.0, 1.0]))
    options = {**EVERYTHING, "base_prior_weight": 0.7, "free_stream_ratio": 1.0, "jitter_scale": 0.0}
    objective = acrf(torch.randn(3, 4), **options)
    losses, _, network = trained(objective, batch)
    (_, x_t, t), *_ = network.told
    assert torch.isin(t[is_reg], torch.tensor(SIGMAS)).all()
    text = torch.tensor([0.1, 0.2]).view(-1, 1, 1, 1)
    # The trained network has weight 0.8 and the base 0.5; the rest of both answers is the same.
    wanted = 0.7 * (0.3 * torch.tanh(x_t[is_reg] + text)).square().mean(dim=(1, 2, 3))
    assert torch.allclose(losses.parts["prior"][is_reg], wanted, rtol=1e-5) and (losses.parts["prior"][~is_reg] == 0).all()
    for name, part in losses.parts.items():
        assert name == "prior" or (part[is_reg] == 0).all(), name
    assert torch.allclose(losses.loss[is_reg], wanted * objective.draw(batch, 3).weights[is_reg] * batch.weights[is_reg], rtol=1e-5)
    assert [len(x) for what, x, _ in network.told if what == "base"] == [2]


def test_without_regularisation_images_in_the_batch_the_base_is_not_asked() -> None:
    objective = acrf(base_prior_weight=1.0)
    for regularisation in (None, torch.zeros(4, dtype=torch.bool)):
        _, _, network = trained(objective, replace(batch_of(4), regularisation=regularisation))
        assert [what for what, _, _ in network.told] == ["call"]
    plain = trained(acrf(), batch_of(4))[0]
    assert torch.equal(trained(objective, batch_of(4))[0].loss, plain.loss)


def test_a_network_that_is_sharded_is_called_equally_often_by_all_processes() -> None:
    objective = acrf(base_prior_weight=1.0, cfg_training_scale=4.0, cfg_training_ratio=0.5)
    for batch in (batch_of(1, first=number) for number in range(12)):
        for regularisation in (None, torch.tensor([True]), torch.tensor([False])):
            told = replace(batch, regularisation=regularisation)
            together, gradient, network = trained(objective, told, in_step=True)
            assert sorted(what for what, _, _ in network.told) == ["base", "call", "without_text"]
            alone, expected, _ = trained(objective, told)
            assert torch.allclose(together.loss, alone.loss) and torch.allclose(gradient, expected)


def test_curvature_is_the_second_difference_along_the_samples_own_path() -> None:
    objective = acrf(curvature_weight=0.3, jitter_scale=0.0, latent_jitter=0.1)
    batch = batch_of(8)
    losses, gradient, network = trained(objective, batch)
    drawn = objective.draw(batch, 3)
    (_, here, t), (_, x_above, above), (_, x_below, below) = network.told
    assert drawn.jitter is not None
    for x, times in ((here, t), (x_above, above), (x_below, below)):
        sigma = times.view(-1, 1, 1, 1)
        assert torch.allclose(x, sigma * drawn.noise + (1 - sigma) * batch.x0 + drawn.jitter, atol=1e-6)
    assert torch.allclose(above + below, 2 * t) and above.max() <= 1 and below.min() >= 0
    inside = (t < 1) & (t + drawn.gaps / 2 <= 1)
    assert torch.allclose((above - below)[inside], drawn.gaps[inside]) and inside.sum() == 7
    ask = Network(batch, torch.tensor(0.8))
    second = ask(x_above, above) - 2 * ask(here, t) + ask(x_below, below)
    wanted = 0.3 * second.square().mean(dim=(1, 2, 3))
    assert torch.allclose(losses.parts["curvature"], wanted, atol=1e-6) and losses.parts["curvature"][t == 1].abs().max() == 0
    # The outer two are given: only the middle one is moved.
    weight = torch.tensor(0.8, requires_grad=True)
    middle = Network(batch, weight)(here, t)
    plain = (middle - (drawn.noise - batch.x0)).square().mean()
    (plain * 8 + 0.3 * (ask(x_above, above) - 2 * middle + ask(x_below, below)).square().mean(dim=(1, 2, 3)).sum()).backward()
    assert torch.allclose(gradient, weight.grad, rtol=1e-4)


def test_curvature_comes_every_so_many_steps_from_its_start_and_never_on_held_out_images() -> None:
    objective = acrf(curvature_weight=1.0, curvature_interval=3, curvature_start=4)
    asked = [len(trained(objective, replace(batch_of(2), step=step))[2].told) for step in range(-1, 10)]
    assert asked == [1, 1, 1, 1, 1, 1, 1, 3, 1, 1, 3]
    assert (trained(objective, replace(batch_of(2), step=0))[0].parts["curvature"] == 0).all()


def test_guidance_is_trained_in_its_share_with_a_gradient_through_both_answers() -> None:
    batch = batch_of(64)
    objective = acrf(cfg_training_scale=3.0, cfg_training_ratio=0.5)
    losses, gradient, network = trained(objective, batch)
    (_, x_t, t), (_, x_some, _) = network.told
    chosen = torch.stack([(x_t == one).flatten(1).all(dim=1) for one in x_some]).any(dim=0)
    assert 12 < int(chosen.sum()) == len(x_some) < 52
    weight = torch.tensor(0.8, requires_grad=True)
    ask = Network(batch, weight)
    p, n = ask(x_t, t), ask.without_text(x_t, t)
    v = torch.where(chosen.view(-1, 1, 1, 1), p + 2 * (p - n), p)
    wanted = (v - (objective.draw(batch, 3).noise - batch.x0)).square().mean(dim=(1, 2, 3))
    wanted.sum().backward()
    assert torch.allclose(losses.loss, wanted, rtol=1e-5) and torch.allclose(gradient, weight.grad, rtol=1e-4)


def test_jitter_of_latents_moves_what_is_seen_and_not_the_target() -> None:
    batch = batch_of(16)
    plain, moved = acrf(), acrf(latent_jitter=0.2)
    (_, before, _), (_, after, _) = (trained(objective, batch)[2].told[0] for objective in (plain, moved))
    difference = after - before
    assert abs(difference.std() - 0.2) < 0.01
    assert torch.equal(plain.draw(batch, 3).noise, moved.draw(batch, 3).noise) and torch.equal(
        plain.draw(batch, 3).t, moved.draw(batch, 3).t
    )


def test_everything_is_finite_in_sixteen_bits_too() -> None:
    objective = acrf(torch.randn(3, 4), **EVERYTHING)
    batch = batch_of(16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses, gradient, _ = trained(objective, batch)
    exact, _, _ = trained(objective, batch)
    assert losses.loss.dtype == torch.float32 and losses.loss.isfinite().all() and gradient.isfinite()
    assert torch.allclose(losses.loss, exact.loss, rtol=1e-5)
