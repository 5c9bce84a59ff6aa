"""Gradient checkpointing in all its forms: the same bits, fewer activations, and in host RAM what a block begins with."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sd_scripts import families
from sd_scripts.families.qwen_edit.modulation import tabulate
from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.memory import recomputing
from sd_scripts.schema.memory import MemoryOptions
from tests.library.batches import a_call

FULL = MemoryOptions(gradient_checkpointing=True)
HALF = MemoryOptions(gradient_checkpointing=True, gradient_checkpointing_share=0.5)
OFFLOADED = MemoryOptions(gradient_checkpointing=True, gradient_checkpointing_cpu_offload=True)
HALF_OFFLOADED = MemoryOptions(gradient_checkpointing=True, gradient_checkpointing_share=0.5, gradient_checkpointing_cpu_offload=True)


def parts_of(name: str) -> Parts:
    torch.manual_seed(0)
    parts = families.family(name).tiny()
    parts.backbone.requires_grad_(True).train()
    return parts


def gradients(name: str, parts: Parts, seed: int) -> list[Tensor]:
    """Prediction and gradients of one call."""
    parts.backbone.zero_grad()
    prediction = families.family(name).denoise(parts, *a_call(name, parts, side=32, seed=seed))
    prediction.square().mean().backward()
    return [prediction.detach(), *(weight.grad for weight in parts.backbone.parameters() if weight.grad is not None)]


def kept_bytes(name: str, parts: Parts) -> int:
    """Bytes of activations that the backward pass of a call has kept on the device: each piece of memory once, weights left out."""
    weights = {weight.untyped_storage().data_ptr() for weight in parts.backbone.parameters()}
    found: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    call = a_call(name, parts, side=32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = families.family(name).denoise(parts, *call)
    assert kept.requires_grad
    return sum(size for size, _ in found.values())


@pytest.mark.parametrize("name", families.NAMES)
def test_recomputing_changes_no_bit_and_may_be_switched_between_steps(name: str) -> None:
    seed, parts = random.randrange(10**6), parts_of(name)
    wanted = gradients(name, parts, seed)
    assert len(wanted) > 10
    for memory in (FULL, HALF, OFFLOADED, HALF_OFFLOADED, MemoryOptions()):
        recomputing.switch(parts, memory, encoders=False)
        found = gradients(name, parts, seed)
        assert len(found) == len(wanted) and all(torch.equal(*pair) for pair in zip(found, wanted))


@pytest.mark.parametrize("name", families.NAMES)
def test_each_form_keeps_less(name: str) -> None:
    kept = {}
    for label, memory in (("all", MemoryOptions()), ("half", HALF), ("full", FULL)):
        parts = parts_of(name)
        recomputing.switch(parts, memory, encoders=False)
        kept[label] = kept_bytes(name, parts)
    assert kept["full"] < kept["half"] < kept["all"]


def test_the_blocks_with_a_turn_are_spread_evenly() -> None:
    network = parts_of("flux").backbone
    names = list(blocks_of(network))
    assert recomputing.recomputed(network, 1.0) == names
    assert recomputing.recomputed(network, 0.5) == [names[1], names[3]]
    assert recomputing.recomputed(network, 0.01) == [names[2]]


@pytest.mark.parametrize("name", ["flux", "sdxl", "zimage"])
def test_offloaded_blocks_keep_nothing_on_the_device_and_copy_shared_arguments_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a second device here: copies are told from what they were made of by where they lie."""
    parts = parts_of(name)
    recomputing.switch(parts, OFFLOADED, encoders=False)
    given: dict[int, Tensor] = {}
    for block in blocks_of(parts.backbone).values():

        def look(_block: nn.Module, arguments: tuple[Any, ...]) -> None:
            given.update({value.data_ptr(): value for value in arguments if isinstance(value, Tensor) and value.numel()})

        block.register_forward_pre_hook(look)
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.data_ptr()] = tensor
        return tensor

    made: list[Tensor] = []
    copied = recomputing._copied

    def counted(tensor: Tensor) -> Tensor:
        made.append(copied(tensor))
        return made[-1]

    monkeypatch.setattr(recomputing, "_copied", counted)
    inputs = a_call(name, parts, side=32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        prediction = families.family(name).denoise(parts, *inputs)
    # One copy of each argument, whoever else has it: the embedding of the time goes to every block.
    assert 0 < len(made) <= len(given)
    assert all(copy.data_ptr() in kept for copy in made if copy.numel())
    assert prediction.requires_grad


@pytest.mark.parametrize("name", ["flux", "qwen_edit", "zimage"])
def test_what_a_block_begins_with_is_let_go_of(name: str) -> None:
    """Not only copied: what nobody else has is gone by the end of the forward pass."""
    alive = {}
    for memory in (FULL, OFFLOADED):
        parts = parts_of(name)
        recomputing.switch(parts, memory, encoders=False)
        seen: list[weakref.ref[Any]] = []
        for block in blocks_of(parts.backbone).values():
            block.register_forward_pre_hook(lambda _, arguments, seen=seen: seen.append(weakref.ref(arguments[0].untyped_storage())))
        inputs = a_call(name, parts, side=32)
        prediction = families.family(name).denoise(parts, *inputs)
        alive[memory] = sum(reference() is not None for reference in seen[1:])
        assert prediction.requires_grad
    assert alive[FULL] > alive[OFFLOADED]


def test_a_note_on_an_argument_is_there_when_the_block_is_computed_again() -> None:
    """Tables of modulation find their rows by it."""
    parts = parts_of("qwen_edit")
    parts.backbone.requires_grad_(False).to(torch.float32)
    parts = tabulate(parts, torch.device("cpu"))
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["to_q"]), parts.backbone)
    recomputing.switch(parts, OFFLOADED, encoders=False)
    seen: list[bool] = []
    for block in parts.backbone.transformer_blocks:
        block.img_mod.register_forward_pre_hook(lambda _, arguments: seen.append(hasattr(arguments[0], "time_index")))
    x_t, _, conditions = a_call("qwen_edit", parts, side=32)
    families.family("qwen_edit").denoise(parts, x_t, torch.tensor([0.25, 0.5]), conditions).sum().backward()
    assert seen == [True] * 2 * len(parts.backbone.transformer_blocks)


def test_what_waits_in_host_ram_is_not_counted_where_there_are_no_numbers() -> None:
    with torch.device("meta"):
        block, x = nn.Linear(8, 8), torch.empty(4, 8, requires_grad=True)
    counts = []
    for call in (recomputing._again, recomputing._Offload()):
        kept: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, kept=kept: kept.append(tensor) or tensor, lambda tensor: tensor):
            call(block, x)
        counts.append(len(kept))
    assert counts == [1, 0]


def test_dropout_drops_the_same_when_it_is_computed_again() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(self.linear(x).sin(), 0.5)

    torch.manual_seed(3)
    block, offload = Block(), recomputing._Offload()
    x = torch.randn(4, 8, requires_grad=True)
    results = []
    for call in (lambda: block(x), lambda: offload(block, x)):
        torch.manual_seed(5)
        x.grad = None
        call().square().sum().backward()
        assert x.grad is not None
        results.append(x.grad.clone())
    assert torch.equal(*results)


def test_an_argument_that_was_changed_in_place_is_copied_anew() -> None:
    block, offload = nn.Linear(3, 3), recomputing._Offload()
    shared = torch.randn(2, 3)
    first = offload(block, shared)
    shared.mul_(2)
    second = offload(block, shared)
    (first.sum() + second.sum()).backward()
    # The gradient of a linear layer's weight is the sum of its inputs: half of what is there now, and that.
    assert block.weight.grad is not None
    torch.testing.assert_close(block.weight.grad, (shared.sum(0) * 1.5).expand(3, 3))


def test_offloading_within_a_larger_piece_that_is_recomputed() -> None:
    """An objective may recompute whole calls of the network (checkpoint_steps); what it lets go of is not kept by blocks."""
    parts, seed = parts_of("lgt"), 5
    wanted = gradients("lgt", parts, seed)
    recomputing.switch(parts, OFFLOADED, encoders=False)
    parts.backbone.zero_grad()
    arguments = a_call("lgt", parts, side=32, seed=seed)
    prediction = checkpoint(families.family("lgt").denoise, parts, *arguments, use_reentrant=False)
    prediction.square().mean().backward()
    found = [prediction.detach(), *(weight.grad for weight in parts.backbone.parameters() if weight.grad is not None)]
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["sdxl", "flux", "ddpm"])
def test_text_encoders_are_switched_where_they_are_trained(name: str) -> None:
    parts = parts_of(name)
    for memory, encoders, on in ((FULL, False, False), (FULL, True, True), (MemoryOptions(), True, False)):
        recomputing.switch(parts, memory, encoders=encoders)
        for encoder in parts.text_encoders.values():
            switches = [module.gradient_checkpointing for module in encoder.modules() if hasattr(module, "gradient_checkpointing")]
            assert switches and all(value is on for value in switches)
