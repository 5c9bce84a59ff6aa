"""What a computation on the meta device says about memory, beside what the same one takes on the CPU, as torch's profiler sees it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, UNet2DConditionModel, ZImageTransformer2DModel
from torch import Tensor, nn

from sd_scripts import families
from sd_scripts.families.flux.options import FluxNetworkOptions
from sd_scripts.families.qwen_edit.options import QwenImageNetworkOptions
from sd_scripts.families.zimage.options import ZImageNetworkOptions
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.core.copying import copied
from sd_scripts.library.core.devices import META
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.weights import Unfilled
from sd_scripts.library.memory.forecast.accounting import AsOnDevice, Ledger, backward, bytes_of, optimizer_bytes
from sd_scripts.schema.network import UNetNetworkOptions
from tests.library.batches import a_call

WITHIN = 0.05


def measured(work: Callable[[], object], tmp_path: Path) -> int:
    """The most bytes of the CPU that were in use at once during work, besides those in use before, by the profiler's account."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    trace = tmp_path / "trace.json"
    profile.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event["ts"]):
        live += event["args"]["Bytes"]
        peak = max(peak, live)
    assert peak, "the profiler saw nothing"
    return peak


def mid_size(name: str, parts: Parts) -> nn.Module:
    """A network of the family of 20 to 100 million weights, for the texts of the tiny model."""
    tiny = parts.backbone.config
    torch.manual_seed(1)
    if name == "sdxl":
        return UNet2DConditionModel.from_config(
            dict(tiny) | {"block_out_channels": (128, 256), "transformer_layers_per_block": (1, 4), "attention_head_dim": (4, 8)}
        )
    if name == "flux":
        sizes = {
            "num_attention_heads": 8,
            "attention_head_dim": 64,
            "axes_dims_rope": (16, 24, 24),
            "num_layers": 2,
            "num_single_layers": 4,
        }
        return FluxTransformer2DModel.from_config(dict(tiny) | sizes)
    if name == "zimage":
        sizes = {"dim": 512, "n_heads": 8, "n_kv_heads": 8, "n_layers": 6, "axes_dims": [16, 24, 24]}
        return ZImageTransformer2DModel.from_config(dict(tiny) | sizes)
    sizes = {"num_attention_heads": 8, "attention_head_dim": 64, "axes_dims_rope": (16, 24, 24), "num_layers": 4}
    return QwenImageTransformer2DModel.from_config(dict(tiny) | sizes)


OPTIONS = {
    "sdxl": UNetNetworkOptions(network_dim=8, train_text_encoder=False),
    "flux": FluxNetworkOptions(network_dim=8),
    "zimage": ZImageNetworkOptions(network_dim=8),
    "qwen_edit": QwenImageNetworkOptions(network_dim=8),
}


def prepared(name: str, whole: bool, checkpointing: bool) -> tuple[Parts, list[nn.Parameter]]:
    """A model of middle size and its trained weights."""
    parts = families.family(name).tiny()
    parts.backbone = mid_size(name, parts).requires_grad_(False)
    if checkpointing:
        parts.backbone.enable_gradient_checkpointing()
    if whole:
        weights = [weight.requires_grad_() for weight in parts.backbone.parameters()]
    else:
        weights = attach(parts, OPTIONS[name], families.family(name).adapter_targets(parts, False), 3).parameters()
    parts.backbone.train()
    return parts, weights


def on_meta(parts: Parts, weights: list[nn.Parameter]) -> tuple[Parts, list[nn.Parameter]]:
    copied = copy.copy(parts)
    copied.backbone = copy.deepcopy(parts.backbone).to(META)
    names = {id(weight): name for name, weight in parts.backbone.named_parameters()}
    there = dict(copied.backbone.named_parameters())
    return copied, [there[names[id(weight)]] for weight in weights]


def zeros_where_none(weights: list[nn.Parameter]) -> None:
    """What a run does before a step: weights that no gradient reaches get one of zeros."""
    for weight in weights:
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad


def loss_of(name: str, parts: Parts, call: tuple[Tensor, Tensor, list[dict[str, Tensor]]]) -> Tensor:
    prediction = families.family(name).denoise(parts, *call)
    return torch.nn.functional.mse_loss(prediction, torch.zeros_like(prediction))


ALWAYS = (("flux", True, False), ("zimage", False, True))


@pytest.mark.parametrize(
    ("name", "whole", "checkpointing"),
    [
        pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.long)
        for name, whole in (("sdxl", False), ("sdxl", True), ("flux", False), ("flux", True), ("zimage", False), ("qwen_edit", True))
        for case in ((name, whole, False), (name, whole, True))
    ],
)
def test_a_forecast_is_within_5_percent_of_what_is_measured(name: str, whole: bool, checkpointing: bool, tmp_path: Path) -> None:
    parts, weights = prepared(name, whole, checkpointing)
    x_t, t, conditions = a_call(name, parts, size=2, side=256)
    shadow, shadows = on_meta(parts, weights)

    def make(those: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(those, lr=1e-4, fused=those is weights, foreach=False if those is shadows else None)

    optimizer = make(weights)

    def train() -> None:
        for _ in range(2):
            loss_of(name, parts, (x_t, t, conditions)).backward()
            zeros_where_none(weights)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    found = measured(train, tmp_path)
    state, _ = optimizer_bytes(lambda: make(shadows), shadows, block=1)
    call = x_t.to(META), t, [{key: value.to(META) for key, value in condition.items()} for condition in conditions]
    with AsOnDevice(None, sums_in_float32=False), Ledger(block=1) as ledger:
        backward(loss_of(name, shadow, call))
        zeros_where_none(shadows)
    frozen = bytes_of(parts.backbone.parameters(), block=1)
    forecast, real = frozen + state + ledger.peak, frozen + found
    kind = f"{name} {'whole' if whole else 'lora'} {'checkpointing' if checkpointing else 'plain'}"
    sizes = f"forecast {forecast / 2**20:.1f} MiB, measured {real / 2**20:.1f} MiB"
    print(f"{kind}: {sizes}, {100 * (forecast / real - 1):+.2f} %, besides weights {100 * ((forecast - frozen) / found - 1):+.2f} %")
    assert abs(forecast / real - 1) < WITHIN


def test_a_gradient_that_nobody_wants_is_remembered_as_none() -> None:
    peaks = []
    for _ in range(2):
        entry = torch.empty(3, 700, 11, device=META, requires_grad=True)
        with Ledger() as ledger:
            # Its weights are frozen, so that the backward pass gives nothing for them.
            backward(nn.functional.layer_norm(entry, (11,), torch.empty(11, device=META), torch.empty(11, device=META)).sum())
        assert entry.grad is not None and entry.grad.shape == entry.shape
        peaks.append(ledger.peak)
    assert peaks[0] == peaks[1] > 0


def test_tensors_without_numbers_are_not_filled_and_others_are() -> None:
    with Unfilled():
        there, absent = torch.zeros(5), torch.empty(5, device=META)
        for tensor in (there, absent):
            assert nn.init.normal_(tensor, mean=9.0) is tensor and tensor.uniform_(7, 8) is tensor
    assert bool((there >= 7).all()) and absent.is_meta


def test_a_copy_of_a_network_shares_no_hooks_with_it_and_keeps_what_is_shared_inside() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[1].weight = network[0].weight
    two = copied([network], [network])[0]
    two[0].register_forward_pre_hook(lambda module, given: None)
    assert two[0]._forward_pre_hooks and not two[1]._forward_pre_hooks and not network[0]._forward_pre_hooks
    assert two[1].weight is two[0].weight is not network[0].weight
    assert two(torch.ones(1, 2)).tolist() == network(torch.ones(1, 2)).tolist()
