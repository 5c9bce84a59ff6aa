"""Adapters on a model: where they go, how they start, how they are trained."""

from __future__ import annotations

import math

import pytest
import torch

from sd_scripts.families.sdxl.model import Sdxl
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.maths import KINDS, AdapterLayer, low_rank_update, merged_weight
from sd_scripts.library.core.errors import TrainingError
from sd_scripts.library.core.protocols import Parts
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.network import UNetNetworkOptions
from tests.library.networks.adapters_in_small import attached, outputs, shaken


def options_for(kind: str, **changes: object) -> UNetNetworkOptions:
    conv = {} if kind == "oft" else {"conv_dim": 2}
    return UNetNetworkOptions(
        **{"network_type": kind, "network_dim": 4, "network_alpha": 2.0, "train_text_encoder": True, **conv, **changes}
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_base_model_is_what_it_was_under_an_adapter_that_is_new_or_disabled_or_taken_off(
    kind: str, parts: Parts, twin: Parts, subtests: pytest.Subtests
) -> None:
    before, keys = outputs(parts), list(parts.backbone.state_dict())
    network = attached(parts, options_for(kind))
    with subtests.test(msg="a new adapter changes nothing"):
        assert torch.equal(outputs(parts), before)
    shaken(network)
    trained = [tensor.requires_grad for tensor in network.named_parameters().values()]
    live = outputs(parts)
    assert not torch.allclose(live, before, atol=1e-2)
    with subtests.test(msg="a disabled one leaves the base model and its values and training alone"):
        with network.disabled():
            assert torch.equal(outputs(parts), before)
        assert torch.equal(outputs(parts), live)
        assert [tensor.requires_grad for tensor in network.named_parameters().values()] == trained
    with subtests.test(msg="the formula of the kind gives peft's output"):
        weights = {f"{module}.{name}": tensor for module, model in twin.modules().items() for name, tensor in model.named_parameters()}
        with torch.no_grad():
            for name, adapter in network.adapters().items():
                weight = weights[f"{name}.weight"]
                weight.copy_(merged_weight(weight.double(), adapter))
        assert torch.allclose(outputs(twin), live, atol=2e-5)
    with subtests.test(msg="one that is taken off restores the model"):
        network.detach()
        assert torch.equal(outputs(parts), before)
        assert list(parts.backbone.state_dict()) == keys


@pytest.mark.parametrize("kind", KINDS)
def test_the_start_follows_from_the_seed_and_not_from_torchs_random_state(kind: str, parts: Parts, twin: Parts) -> None:
    torch.manual_seed(1)
    first = attached(parts, options_for(kind), seed=5)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = attached(twin, options_for(kind), seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    a, b = first.state(), second.state()
    assert list(a) == list(b)
    assert all(torch.equal(a[key], b[key]) for key in a)
    drawn = [key for key in a if a[key].count_nonzero() and "magnitude" not in key]
    assert (kind == "oft") == (not drawn)
    second.detach()
    other = attached(twin, options_for(kind, train_text_encoder=False, target_modules=("mid_block",)), seed=6).state()
    assert other and not any(torch.equal(a[key], other[key]) for key in drawn if key in other)


def test_a_layer_starts_alike_whichever_others_are_trained(parts: Parts, twin: Parts) -> None:
    all_layers = attached(parts, UNetNetworkOptions(network_dim=4)).state()
    some = attached(twin, UNetNetworkOptions(network_dim=4, target_modules=(r"attn2\.to_k",))).state()
    assert some
    assert all(torch.equal(all_layers[key], some[key]) for key in some)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_adapter_is_trained_and_in_float32(kind: str, parts: Parts) -> None:
    parts.backbone.half()
    network = attached(parts, options_for(kind))
    trained = {id(tensor) for module in parts.modules().values() for tensor in module.parameters() if tensor.requires_grad}
    assert trained == {id(tensor) for tensor in network.parameters()} == {id(tensor) for tensor in network.named_parameters().values()}
    assert {tensor.dtype for tensor in network.parameters()} == {torch.float32}


def test_two_models_in_one_process_do_not_touch_each_other(parts: Parts, twin: Parts) -> None:
    before = outputs(twin)
    attached(parts, UNetNetworkOptions(network_dim=4, conv_dim=2))
    plain = attached(twin, UNetNetworkOptions(network_dim=4))
    assert not any("resnets" in key for key in plain.state())
    assert torch.equal(outputs(twin), before)


def test_a_state_goes_back_in_and_a_foreign_one_is_refused(parts: Parts, twin: Parts) -> None:
    network = shaken(attached(parts, options_for("lora")))
    other = attached(twin, options_for("lora"))
    other.load(network.state())
    assert torch.equal(outputs(twin), outputs(parts))
    incomplete = network.state()
    key = sorted(incomplete)[0]
    del incomplete[key]
    with pytest.raises(TrainingError, match="missing " + key.replace(".", r"\.")):
        other.load(incomplete)
    with pytest.raises(TrainingError, match="instead of"):
        other.load({**network.state(), key: torch.zeros(1, 1)})


def rates(groups: list[dict]) -> dict[str, float]:
    return {group["name"]: group["lr"] for group in groups}


def test_each_part_gets_its_own_rate_and_loraplus_its_ratio(parts: Parts) -> None:
    options = UNetNetworkOptions(
        network_dim=4,
        train_text_encoder=True,
        unet_lr=1e-3,
        text_encoder_lr=(1e-4, 5e-5),
        loraplus_lr_ratio=16,
        loraplus_text_encoder_lr_ratio=4,
    )
    network = attached(parts, options)
    groups = network.parameter_groups(options, 7.0)
    assert rates(groups) == pytest.approx({"unet": 1e-3, "unet_up": 1.6e-2, "te1": 1e-4, "te1_up": 4e-4, "te2": 5e-5, "te2_up": 2e-4})
    grouped = [id(tensor) for group in groups for tensor in group["params"]]
    assert sorted(grouped) == sorted(id(tensor) for tensor in network.parameters())
    ups = {id(tensor) for key, tensor in network.named_parameters().items() if "lora_B" in key}
    assert ups == {id(tensor) for group in groups if group["name"].endswith("_up") for tensor in group["params"]}


def test_rates_that_are_not_given_are_the_learning_rate(parts: Parts) -> None:
    options = UNetNetworkOptions(network_dim=4, train_text_encoder=True)
    assert rates(attached(parts, options).parameter_groups(options, 3e-4)) == {"unet": 3e-4, "te1": 3e-4, "te2": 3e-4}


def test_rate_zero_leaves_a_text_encoder_as_it_is(parts: Parts) -> None:
    network = attached(parts, UNetNetworkOptions(network_dim=4, train_text_encoder=True, text_encoder_lr=(0.0, 1e-5)))
    assert list(network.modules) == ["backbone", "te2"]


def test_blocks_get_their_ranks_alphas_and_rates(parts: Parts) -> None:
    # The tiny UNet: input blocks 0 to 3, the middle, output blocks 0 to 3.
    options = UNetNetworkOptions(
        network_alpha=1.0,
        block_dims=(0, 0, 0, 2, 4, 6, 8, 0, 0),
        block_alphas=(1, 1, 1, 1, 2, 3, 4, 1, 1),
        conv_block_dims=(0, 0, 0, 0, 3, 0, 0, 0, 0),
        block_lr_weight=(1, 1, 1, 0.5, 1, 0, 2, 1, 1),
    )
    network = attached(parts, options)
    found = {}
    for name, adapter in network.adapters().items():
        kernel = adapter.tensors["lora_A.weight"].dim() == 4 and adapter.tensors["lora_A.weight"].shape[-1] == 3
        found.setdefault((network.names.block(name), kernel), set()).add((adapter.rank, adapter.scale))
    assert found == {(3, False): {(2, 0.5)}, (4, False): {(4, 0.5)}, (4, True): {(3, 1.0)}, (6, False): {(8, 0.5)}}
    assert rates(network.parameter_groups(options, 1.0)) == {"unet_x0.5": 0.5, "unet": 1.0, "unet_x2": 2.0}


def test_rank_stabilised_scale_is_alpha_over_the_root_of_the_rank(parts: Parts) -> None:
    network = attached(parts, UNetNetworkOptions(network_dim=16, network_alpha=8.0, rank_stabilized=True))
    assert {adapter.scale for adapter in network.adapters().values()} == {8.0 / math.sqrt(16)}


def test_patterns_choose_and_leave_out_layers(parts: Parts) -> None:
    network = attached(parts, UNetNetworkOptions(network_dim=4, target_modules=(r"attn\d\.to_[kv]",), exclude_modules=("mid_block",)))
    names = list(network.adapters())
    assert names
    assert all(name.endswith(("to_k", "to_v")) and "mid_block" not in name for name in names)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_dims": (4,) * 19}, ["block_dims has 19 numbers", "this UNet has 9 blocks", "give 9 numbers"]),
        ({"block_lr_weight": (1.0,) * 25}, ["block_lr_weight has 25 numbers"]),
        ({"target_modules": ("to_x",)}, ["target_modules: 'to_x' matches no layer", "attn1.to_q"]),
        ({"exclude_modules": ("to_x",)}, ["exclude_modules: 'to_x' matches no layer"]),
        ({"train_text_encoder": True, "target_modules": ("attn2",)}, ["leave no layer of te1", "leave no layer of te2"]),
        ({"unet_lr": 0.0}, ["all learning rates of the network are 0"]),
        ({"train_unet": False, "train_text_encoder": True, "block_dims": (4,) * 9}, ["block_dims is for the UNet"]),
        ({"block_dims": (4,) * 3, "target_modules": ("to_x",)}, ["block_dims has 3 numbers", "'to_x' matches no layer"]),
    ],
)
def test_what_cannot_be_attached_is_refused_in_sentences_and_nothing_is_attached(parts: Parts, changes: dict, words: list[str]) -> None:
    with pytest.raises(OptionError) as caught:
        attached(parts, UNetNetworkOptions(**changes))
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not hasattr(parts.backbone, "peft_config")


def test_scale_weight_norms_shrinks_large_updates_to_the_limit_and_leaves_small_ones(parts: Parts) -> None:
    network = shaken(attached(parts, UNetNetworkOptions(network_dim=4, conv_dim=2, network_alpha=2.0, scale_weight_norms=4.0)))
    shapes = {
        name: torch.Size((a.tensors["lora_B.weight"].shape[0], a.tensors["lora_A.weight"][0].numel()))
        for name, a in network.adapters().items()
    }

    def norms() -> dict[str, float]:
        return {name: float(low_rank_update(a, shapes[name]).norm()) for name, a in network.adapters().items()}

    before = norms()
    network.after_step()
    assert 0 < sum(norm > 4.0 for norm in before.values()) < len(before)
    assert norms() == pytest.approx({name: min(norm, 4.0) for name, norm in before.items()}, rel=1e-4)


def test_without_scale_weight_norms_a_step_changes_nothing(parts: Parts) -> None:
    network = shaken(attached(parts, UNetNetworkOptions(network_dim=4)))
    before = network.state()
    network.after_step()
    assert all(torch.equal(before[key], tensor) for key, tensor in network.state().items())


@pytest.mark.parametrize("kind", KINDS)
def test_gradient_checkpointing_gives_the_same_gradients(kind: str, parts: Parts) -> None:
    network = shaken(attached(parts, options_for(kind, train_text_encoder=False)))
    network.train()
    rng = torch.Generator().manual_seed(0)
    noise, text = torch.randn(1, 4, 8, 8, generator=rng), torch.randn(1, 7, 40, generator=rng)
    added = {"text_embeds": torch.randn(1, 20, generator=rng), "time_ids": torch.full((1, 6), 64.0)}

    def gradients() -> list[torch.Tensor]:
        for tensor in network.parameters():
            tensor.grad = None
        parts.backbone(noise, torch.tensor([500]), text, added_cond_kwargs=added).sample.square().mean().backward()
        return [tensor.grad.clone() for tensor in network.parameters()]

    plain = gradients()
    parts.backbone.enable_gradient_checkpointing()
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-7) for a, b in zip(plain, gradients()))
    assert all(gradient.count_nonzero() for gradient in plain)


def test_oft_blocks_take_the_nearest_smaller_divisor_and_convolutions_stay_out(parts: Parts) -> None:
    network = attached(parts, UNetNetworkOptions(network_type="oft", oft_block_size=12, train_text_encoder=True))
    sides = {name: round((1 + math.sqrt(1 + 8 * a.tensors["oft_R.weight"].shape[1])) / 2) for name, a in network.adapters().items()}
    assert sides["te1.encoder.layers.0.self_attn.q_proj"] == 8
    assert sides["te2.text_model.encoder.layers.0.self_attn.q_proj"] == 12


def test_a_second_trained_adapter_on_one_model_is_our_mistake(parts: Parts) -> None:
    targets = Sdxl().adapter_targets(parts, conv=False)
    attach(parts, UNetNetworkOptions(network_dim=4), targets, seed=0)
    with pytest.raises(ValueError, match="already"):
        attach(parts, UNetNetworkOptions(network_dim=4), targets, seed=0)


def test_folding_the_scale_into_a_factor_keeps_the_update() -> None:
    rng = torch.Generator().manual_seed(0)
    layers = {
        "lora": {"lora_A.weight": (2, 6), "lora_B.weight": (4, 2)},
        "loha": {"hada_w1_a": (4, 2), "hada_w1_b": (2, 6), "hada_w2_a": (4, 2), "hada_w2_b": (2, 6)},
        "lokr": {"lokr_w1": (2, 2), "lokr_w2_a": (2, 1), "lokr_w2_b": (1, 3)},
    }
    for kind, shapes in layers.items():
        layer = AdapterLayer(kind, {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}, 0.37)
        folded = layer.rescaled(1.0)
        assert folded.scale == 1.0
        assert torch.allclose(low_rank_update(folded, torch.Size((4, 6))), low_rank_update(layer, torch.Size((4, 6))), atol=1e-6)
