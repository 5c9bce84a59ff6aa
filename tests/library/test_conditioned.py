"""The network with the conditions of a batch bound, as objectives call it, on a real Z-Image: some samples, no text, no adapter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from sd_scripts import families
from sd_scripts.families import RUNS
from sd_scripts.families.zimage.options import ZImageNetworkOptions
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.core.protocols import Batch
from sd_scripts.library.objectives.make import make
from sd_scripts.library.train.conditioned import Conditioned
from sd_scripts.schema.anchored_flow import AnchoredFlowOptions
from sd_scripts.schema.network import NetworkOptions
from sd_scripts.schema.objective import FlowObjectiveOptions
from tests.library.small_trainers import options_of, samples_of

FAMILY = families.family("zimage")
FLOW_FAMILIES = [
    name
    for name, method in RUNS
    if method == "network" and isinstance(RUNS[name, method].model_fields["objective"].default, FlowObjectiveOptions)
]
CAPTIONS = ["a red star on the left", "blue", "three green circles, large"]


@pytest.fixture
def conditioned() -> Iterator[Conditioned]:
    parts = FAMILY.tiny()
    options = ZImageNetworkOptions(network_dim=2)
    network = attach(parts, options, FAMILY.adapter_targets(parts, False), 3)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in network.named_parameters().values():
            weight.normal_(std=0.3)
        conditions = FAMILY.encode_prompts(parts, CAPTIONS)
        empty = FAMILY.encode_prompts(parts, [""])[0]
    yield Conditioned(FAMILY, parts, network, conditions, lambda: empty)


def inputs(conditioned: Conditioned) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(torch.randint(2**31, ()).item())
    channels = conditioned.parts.vae.config.latent_channels
    return torch.randn(3, channels, 6, 8, generator=rng), torch.rand(3, generator=rng)


def test_some_samples_are_answered_as_within_their_batch(conditioned: Conditioned) -> None:
    x, t = inputs(conditioned)
    with torch.no_grad():
        whole, some = conditioned(x, t), conditioned.only([2, 0])(x[[2, 0]], t[[2, 0]])
        assert torch.allclose(some, whole[[2, 0]], atol=1e-5)
        base = conditioned.base(x, t)
        assert torch.allclose(conditioned.only([1]).base(x[1:2], t[1:2]), base[1:2], atol=1e-5)
        assert (base - whole).abs().max() > 1e-3


def test_without_text_is_the_answer_to_the_empty_caption(conditioned: Conditioned) -> None:
    x, t = inputs(conditioned)
    empty = FAMILY.encode_prompts(conditioned.parts, [""] * 3)
    with torch.no_grad():
        wanted = FAMILY.denoise(conditioned.parts, x, t, empty)
        found = conditioned.without_text(x, t)
        assert torch.allclose(found, wanted, atol=1e-5) and (found - conditioned(x, t)).abs().max() > 1e-4


def test_acrf_with_everything_trains_the_adapter_and_nothing_else(conditioned: Conditioned) -> None:
    x, _ = inputs(conditioned)
    everything = dict.fromkeys(("lambda_cosine", "lambda_fft", "alpha_hf", "beta_lf", "lambda_struct", "lambda_tex"), 0.1)
    options = AnchoredFlowOptions(
        objective="acrf", base_prior_weight=1.0, cfg_training_scale=2.0, curvature_weight=0.1, turbo_steps=3, **everything
    )
    config = conditioned.parts.scheduler_config
    objective = make(options, conditioned.parts.path, conditioned.kind, config, torch.randn(3, x.shape[1]))
    captions = Batch(x, conditioned.conditions, torch.arange(3), torch.ones(3), CAPTIONS, regularisation=torch.tensor([False, True, False]))
    losses = objective(conditioned, captions, 5)
    losses.loss.sum().backward()
    assert losses.loss.isfinite().all() and losses.parts["prior"][1] > 0
    weights = conditioned.network.named_parameters()
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in weights.values())
    trained = {id(weight) for weight in weights.values()}
    assert all(id(other) in trained or other.grad is None for other in conditioned.parts.backbone.parameters())


@pytest.mark.parametrize("name", FLOW_FAMILIES)
def test_an_adapter_of_each_flow_family_is_held_to_its_base_on_regularisation_images_alone(name: str) -> None:
    seed = int(torch.randint(2**31, ()))
    family, samples = families.family(name), samples_of(name, seed)[:2]
    options = options_of((name, "network"), base_prior_weight=2.0, reg_data_dir="others")
    assert isinstance(options.network, NetworkOptions) and isinstance(options.objective, FlowObjectiveOptions)
    parts = family.tiny()
    network = attach(parts, options.network, family.adapter_targets(parts, False), 3)
    conditions = [condition for _, condition in samples]
    model = Conditioned(family, parts, network, conditions, dict)
    objective = family.objective(options.objective, parts.path, parts.kind, parts.scheduler_config)
    x0, is_reg = torch.stack([latents for latents, _ in samples]), torch.tensor([False, True])
    batch = Batch(x0, conditions, torch.arange(2), torch.ones(2), CAPTIONS[:2], regularisation=is_reg)
    with torch.no_grad():
        assert objective(model, batch, seed).loss[1] < 1e-9, "an adapter at its beginning is the base"
        for weight in network.named_parameters().values():
            weight.normal_(std=0.3)
        losses, drawn = objective(model, batch, seed), objective.draw(batch, seed)
        t = drawn.t.view(-1, 1, 1, 1)
        x_t = t * drawn.noise + (1 - t) * x0
        answers, plain = family.denoise(parts, x_t, drawn.t, conditions), family.tiny()
        of_base = family.denoise(plain, x_t, drawn.t, conditions)
    wanted = torch.stack([drawn.noise[0] - x0[0], of_base[1]])
    expected = (answers - wanted).square().mean(dim=(1, 2, 3)) * torch.tensor([1.0, 2.0]) * drawn.weights
    assert torch.allclose(losses.loss, expected, rtol=1e-4)


def test_a_batch_on_a_device_is_there_but_for_what_is_drawn_from() -> None:
    entry = {"text": torch.ones(2, 3)}
    batch = Batch(torch.ones(1, 4, 2, 2), [entry], torch.arange(1), torch.ones(1), ["a.png"], masks=torch.ones(1, 1, 2, 2), towards=[entry])
    batch = replace(batch, references=[torch.ones(2, 4, 2, 2)], terms={"cosine": torch.ones(1)}, step=3, progress=0.5)
    batch = replace(batch, regularisation=torch.ones(1, dtype=torch.bool))
    there = batch.to(torch.device("meta"))
    moved = [there.x0, there.weights, there.masks, there.conditions[0]["text"], there.towards[0]["text"], there.references[0]]
    assert [tensor.device.type for tensor in (*moved, there.terms["cosine"]) if tensor is not None] == ["meta"] * 7
    assert torch.equal(there.numbers, batch.numbers) and there.regularisation is batch.regularisation
    assert (there.names, there.step, there.progress) == (["a.png"], 3, 0.5)
