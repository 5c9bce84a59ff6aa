"""Swapped blocks on a GPU: the numbers of the network that is there as a whole, less memory, and copies that nobody waits for."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.library.memory import recomputing
from sd_scripts.library.memory.swapping import BlockSwap
from tests.library.test_swapping import HALF, OFFLOADED, RECOMPUTED, MemoryOptions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device; torch sees none")]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class Model:
    """What recomputing needs of Parts."""

    def __init__(self, backbone: nn.Module) -> None:
        self.backbone, self.text_encoders = backbone, dict[str, nn.Module]()


def a_network(full: bool) -> nn.Module:
    """A FLUX of 8 + 8 blocks, 1024 wide: 1.6 GiB in float32."""
    torch.manual_seed(0)
    network = FluxTransformer2DModel(
        in_channels=64, num_layers=8, num_single_layers=8, attention_head_dim=128, num_attention_heads=8, joint_attention_dim=256,
        pooled_projection_dim=128, axes_dims_rope=(16, 56, 56),
    )  # fmt: skip
    network.requires_grad_(full).train()
    if not full:
        inside = tuple(f"{path}." for path in blocks_of(network))
        layers = [path for path, layer in network.named_modules() if isinstance(layer, nn.Linear) and path.startswith(inside)]
        inject_adapter_in_model(LoraConfig(r=4, target_modules=layers), network)
    return network


def call(network: nn.Module, seed: int, tokens: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(GPU)

    ids = torch.zeros(tokens, 3, device=GPU)
    ids[:, 1] = torch.arange(tokens)
    given = {
        "hidden_states": normal(1, tokens, 64), "encoder_hidden_states": normal(1, 32, 256), "pooled_projections": normal(1, 128),
        "timestep": torch.rand(1, generator=draw).to(GPU), "img_ids": ids, "txt_ids": torch.zeros(32, 3, device=GPU),
    }  # fmt: skip
    result: Tensor = network(**given, return_dict=False)[0]
    return result


def trained(number: int, full: bool, memory: MemoryOptions, tokens: int = 256, steps: int = 4) -> tuple[list[Tensor], int, BlockSwap]:
    """Losses, previews and weights after some steps, the most memory that a step took, and the swap."""
    network = a_network(full)
    recomputing.switch(Model(network), memory, encoders=False)  # type: ignore[arg-type]
    swap = BlockSwap(network, GPU)
    swap.set(number)
    network.to(GPU)
    weights = [weight for weight in network.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    found: list[Tensor] = []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for step in range(steps):
        for micro in range(2):
            prediction = call(network, 2 * step + micro, tokens)
            prediction.square().mean().backward()
            found.append(prediction.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(call(network, 99, tokens).cpu())
    peak = torch.cuda.max_memory_allocated()
    found += [weight.detach().cpu() for weight in weights]
    assert all((weight.device == GPU) for name, weight in network.named_parameters() if "lora_" in name)
    del network, optimizer, weights
    gc.collect()
    torch.cuda.empty_cache()
    return found, peak, swap


def assert_close(found: list[Tensor], wanted: list[Tensor], **tolerance: Any) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("memory", [MemoryOptions(), RECOMPUTED, HALF, OFFLOADED], ids=["kept", "recomputed", "half", "offloaded"])
@pytest.mark.parametrize("number", [1, 5, 16])
def test_adapters_learn_the_same_in_less_memory(number: int, memory: MemoryOptions) -> None:
    wanted, all_there, _ = trained(0, False, memory)
    found, peak, swap = trained(number, False, memory)
    assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert swap.late == 1
    # Pieces of the allocator are up to 2 MiB.
    assert peak <= all_there - swap.saved_bytes + swap.count * 2**21


@pytest.mark.parametrize("memory", [MemoryOptions(), RECOMPUTED], ids=["kept", "recomputed"])
def test_trained_blocks_learn_the_same_with_their_state_in_host_ram(memory: MemoryOptions) -> None:
    wanted, all_there, _ = trained(0, True, memory)
    found, peak, swap = trained(12, True, memory)
    # AdamW on a CPU rounds otherwise than on a GPU.
    assert_close(found, wanted, rtol=1e-3, atol=1e-4)
    # Gradients of a block are on the device until they are all there; those of others, and both moments, never.
    assert peak < all_there - 2 * swap.bytes_at_home


def test_copies_that_take_longer_than_what_computes_are_waited_for() -> None:
    """With few tokens a block computes in a fraction of the time in which the next one comes."""
    wanted, _, _ = trained(0, False, RECOMPUTED, tokens=4, steps=8)
    found, _, _ = trained(16, False, RECOMPUTED, tokens=4, steps=8)
    assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_homes_are_pinned_and_let_go_of() -> None:
    network = a_network(False)
    swap = BlockSwap(network, GPU)
    swap.set(16)
    network.to(GPU)
    homes = [weight for name, weight in network.named_parameters() if "transformer_blocks" in name and "lora_" not in name]
    assert all(weight.is_cpu and weight.is_pinned() for weight in homes) and "pinned host RAM" in swap.summary()
    wanted = call(network, 1, 16)
    swap.set(0)
    assert all(weight.is_cuda for weight in network.parameters())
    torch.testing.assert_close(call(network, 1, 16), wanted)
    swap.set(16)
    swap.end()
    assert all(weight.is_cpu and not weight.is_pinned() for weight in homes)
    torch.testing.assert_close(call(network.to(GPU), 1, 16), wanted)


def test_arguments_that_wait_in_host_ram_save_what_they_are() -> None:
    _, kept, _ = trained(0, False, RECOMPUTED, tokens=4096, steps=1)
    _, peak, _ = trained(0, False, OFFLOADED, tokens=4096, steps=1)
    # 16 blocks begin with 4128 x 1024 float32 numbers each.
    assert peak < kept - 12 * 4128 * 1024 * 4
