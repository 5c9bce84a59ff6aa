"""Swapped blocks compute what they compute without: to the bit, in every family, with every other memory option, and when put back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sd_scripts import families
from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.memory import compiling, quantize, recomputing
from sd_scripts.library.memory.swapping import ALIGNMENT, BlockSwap, check, spread
from sd_scripts.library.parallel.sharding import total_norm
from sd_scripts.library.train.stepping import Stepping
from sd_scripts.schema.compile import CompileOptions
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.memory import MemoryOptions
from tests.library.batches import a_call

CPU = torch.device("cpu")
ALL = 999
"""More blocks than any small network has."""
RECOMPUTED = MemoryOptions(gradient_checkpointing=True)
HALF = MemoryOptions(gradient_checkpointing=True, gradient_checkpointing_share=0.5)
OFFLOADED = MemoryOptions(gradient_checkpointing=True, gradient_checkpointing_cpu_offload=True)


def parts_with(name: str, full: bool, layers_end: str | tuple[str, ...] = "") -> tuple[Parts, list[nn.Parameter]]:
    """A family's small model and its trained weights: all of the backbone, or adapters in its blocks, drawn from fixed seeds.

    layers_end: of the names of the layers that have one."""
    torch.manual_seed(0)
    parts = families.family(name).tiny()
    network = parts.backbone
    if full:
        network.requires_grad_(True)
    else:
        inside = tuple(f"{path}." for path in blocks_of(network))
        linear = [path for path, layer in network.named_modules() if isinstance(layer, nn.Linear) and path.startswith(inside)]
        layers = [path for path in linear if path.endswith(layers_end)]
        inject_adapter_in_model(LoraConfig(r=2, target_modules=layers), network)
    network.train()
    trained = [weight for weight in network.parameters() if weight.requires_grad]
    for weight in () if full else trained:
        nn.init.normal_(weight, std=0.1)
    return parts, trained


def swapped(parts: Parts, number: int, kind: type[BlockSwap] = BlockSwap) -> BlockSwap:
    swap = kind(parts.backbone, CPU)
    swap.set(min(number, swap.count))
    return swap


def denoised(name: str, parts: Parts, seed: int) -> Tensor:
    return families.family(name).denoise(parts, *a_call(name, parts, side=32, seed=seed))


def steps(
    name: str,
    parts: Parts,
    trained: list[nn.Parameter],
    seed: int,
    count: int = 2,
    before: Callable[[int], object] = lambda step: None,
    previews: bool = True,
) -> list[Tensor]:
    """What some steps of two micro-batches with a preview in between give: predictions, gradients and weights."""
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    found = []
    for step in range(count):
        before(step)
        for micro in range(2):
            prediction = denoised(name, parts, seed + 2 * step + micro)
            prediction.square().mean().backward()
            found.append(prediction.detach())
            if previews:
                with torch.no_grad():
                    found.append(denoised(name, parts, seed + 100))
        found += [torch.zeros(()) if weight.grad is None else weight.grad.clone() for weight in trained]
        optimizer.step()
        optimizer.zero_grad()
    return found + [weight.detach().clone() for weight in trained]


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(torch.equal(*pair) for pair in zip(found, wanted))


def a_seed() -> int:
    return random.randrange(10**6)


_BESIDE = ((ALL, RECOMPUTED), (2, HALF), (ALL, OFFLOADED))


# One memory option beside swapping in each family, in adapters and whole networks by turns; --all has every one.
@pytest.mark.parametrize(
    ("name", "full", "memory_options"),
    [
        pytest.param(name, full, memory_options, id=f"{name}-{'full' if full else 'adapter'}-{text}", marks=marks)
        for number, name in enumerate(families.NAMES)
        for full in (False, True)
        for memory_options, text, marks in (
            ((_BESIDE[(number + full) % 3],), "one", () if full == number % 2 else pytest.mark.long),
            (_BESIDE, "every", pytest.mark.long),
        )
    ],
)
def test_swapping_changes_no_bit(name: str, full: bool, memory_options: tuple[tuple[int, MemoryOptions], ...]) -> None:
    seed = a_seed()
    wanted = steps(name, *parts_with(name, full), seed)
    assert len({float(one.abs().sum()) for one in wanted}) > 4
    for number, memory in ((3, MemoryOptions()), *memory_options):
        parts, trained = parts_with(name, full)
        recomputing.switch(parts, memory, encoders=False)
        swap = swapped(parts, number)
        assert_same(steps(name, parts, trained, seed), wanted)
        assert swap.copies > 0


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["some", "every"])
@pytest.mark.parametrize("full", [False, True], ids=["adapter", "full"])
def test_any_number_of_blocks_gives_the_same(full: bool, every: bool) -> None:
    seed = a_seed()
    wanted = steps("ddpm", *parts_with("ddpm", full), seed, count=1)
    count = len(blocks_of(parts_with("ddpm", full)[0].backbone))
    for number in range(1, count + 1) if every else (1, 2, count // 2, count - 1, count):
        parts, trained = parts_with("ddpm", full)
        assert swapped(parts, number).swapped == number
        assert_same(steps("ddpm", parts, trained, seed, count=1), wanted)


@pytest.mark.parametrize("kind", ["qint8", "qfloat8", "fp8", "nf4"])
def test_blocks_in_few_bits_are_swapped_too(kind: Any) -> None:
    seed, results = a_seed(), []
    for number, memory in ((0, MemoryOptions()), (ALL, MemoryOptions()), (3, RECOMPUTED)):
        torch.manual_seed(0)
        parts = families.family("zimage").tiny()
        quantize.quantize_network(parts.backbone, kind)
        before = {name: [type(value), value.device] for name, value in parts.backbone.named_parameters()}
        path = "layers.0.attention.to_q"
        inject_adapter_in_model(LoraConfig(r=2, target_modules=[path, "layers.1.attention.to_v"]), parts.backbone)
        recomputing.switch(parts, memory, encoders=False)
        swap = swapped(parts, number)
        trained = [weight for weight in parts.backbone.parameters() if weight.requires_grad]
        results.append(steps("zimage", parts, trained, seed))
        if number:
            assert swap.copies > 0 and swap.bytes_at_home > 0
            after = {name.replace(".base_layer", ""): value for name, value in parts.backbone.named_parameters()}
            assert all([type(after[name]), after[name].device] == seen for name, seen in before.items())
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


_COMPILED: list[tuple[str, MemoryOptions, str, Any]] = [("adapter", MemoryOptions(), "few", ("to_out.0", "proj_out"))]
_COMPILED_TOO: list[tuple[str, MemoryOptions, str, Any]] = [
    ("adapter", MemoryOptions(), "kept", ""),
    ("full", MemoryOptions(), "kept", ""),
    ("full", RECOMPUTED, "recomputed", ""),
    ("adapter", OFFLOADED, "offloaded", ""),
]


# torch looks at tensors while it makes code, and warns of its own look.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize(
    ("full", "memory", "layers_end"),
    [
        pytest.param(kind == "full", memory, layers_end, id=f"{kind}-{name}", marks=marks)
        for cases, marks in ((_COMPILED, ()), (_COMPILED_TOO, pytest.mark.long))
        for kind, memory, name, layers_end in cases
    ],
)
def test_compiled_blocks_are_swapped_without_more_code(full: bool, memory: MemoryOptions, layers_end: str | tuple[str, ...]) -> None:
    options = CompileOptions(compile=True, compile_backend="aot_eager", compile_scope="blocks", compile_fullgraph=True)
    seed, results, graphs = a_seed(), [], []
    parts, trained = parts_with("flux", full, layers_end)
    plain = steps("flux", parts, trained, seed, count=1, previews=not layers_end)[: -len(trained)]
    for number in (0, ALL):
        torch._dynamo.reset()
        parts, trained = parts_with("flux", full, layers_end)
        recomputing.switch(parts, memory, encoders=False)
        compilation = compiling.compile_network(parts.backbone, options, CPU, swapped=True)
        swapped(parts, number)
        results.append(steps("flux", parts, trained, seed, count=1, previews=not layers_end))
        compilation.take()
        graphs.append(compilation.graphs)
        compilation.close()
    assert_same(results[1], results[0])
    assert graphs[1] == graphs[0] > 0
    if layers_end:
        assert graphs[0] <= 8
    for compiled, wanted in zip(results[0], plain):
        assert float((compiled - wanted).norm()) <= 1e-5 * float(wanted.norm()) + 1e-8, "compiled code computes what the plain code does"


def test_autocast_sees_the_weights_of_this_step() -> None:
    seed, results = a_seed(), []
    for number in (0, ALL):
        parts, trained = parts_with("sdxl", True)
        swapped(parts, number)
        optimizer, found = torch.optim.SGD(trained, lr=0.1), []
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = denoised("sdxl", parts, seed + step).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        results.append([*found, *(weight.detach() for weight in trained)])
    assert_same(results[1], results[0])


def test_one_graph_may_call_the_network_more_than_once() -> None:
    """And recompute it as a whole, as objectives with many steps do."""
    seed, results = a_seed(), []
    for number, again in ((0, False), (ALL, False), (3, True)):
        parts, trained = parts_with("lgt", True)
        swapped(parts, number)
        losses: list[Tensor] = []
        for factor in (1, 2, 3):
            arguments = "lgt", parts, seed + factor
            output = checkpoint(denoised, *arguments, use_reentrant=False) if again else denoised(*arguments)
            losses.append(output.square().mean() * factor)
        torch.stack(losses).sum().backward()
        results.append([weight.grad for weight in trained if weight.grad is not None])
    assert_same(results[1], results[0])
    assert_same(results[2], results[0])


def test_weights_that_move_within_the_backward_pass_are_brought_anew() -> None:
    seed, results = a_seed(), []
    for number in (0, ALL):
        parts, trained = parts_with("flux", True)
        recomputing.switch(parts, RECOMPUTED, encoders=False)
        swapped(parts, number)
        stepping = Stepping(torch.optim.AdamW(trained, lr=1e-2), 7, fused=True)
        stepping.watch({str(index): weight for index, weight in enumerate(trained)})
        found = []
        for step in range(3):
            stepping.begin(step)
            loss = denoised("flux", parts, seed + step).square().mean()
            loss.backward()
            found += [loss.detach(), stepping.finish()]
        results.append([*found, *(weight.detach() for weight in trained)])
    assert_same(results[1], results[0])


class Logged(BlockSwap):
    """Writes down which block is brought when."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        self.log: list[tuple[str, int]] = []
        super().__init__(network, device)

    def _fill(self, index: int) -> Any:
        self.log.append(("brought", index))
        return super()._fill(index)


def logged(name: str, parts: Parts, number: int) -> tuple[Logged, list[nn.Module]]:
    """A swap whose log also says when each block computes, and the swapped blocks."""
    swap = swapped(parts, number, Logged)
    assert isinstance(swap, Logged)
    blocks = list(blocks_of(parts.backbone).values())
    chosen = [blocks[index] for index in spread(swap.swapped, swap.count)]
    for index, block in enumerate(chosen):
        inside = [layer for layer in block.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
        for layer in inside:
            layer.register_forward_pre_hook(lambda *_, index=index: swap.log.append(("computes", index)))
    return swap, chosen


@pytest.mark.parametrize("memory", [MemoryOptions(), RECOMPUTED], ids=["kept", "recomputed"])
def test_the_next_block_is_on_its_way_while_one_computes(memory: MemoryOptions) -> None:
    parts, _ = parts_with("sdxl", full=False)
    recomputing.switch(parts, memory, encoders=False)
    swap, chosen = logged("sdxl", parts, ALL)
    for step in range(3):
        denoised("sdxl", parts, step).sum().backward()
    count = len(chosen)
    # Each pass finds the first two of its blocks where the pass before left them.
    assert (swap.copies, swap.late) == (count + 5 * (count - 2), 1)
    first = swap.log[: next(place for place, event in enumerate(swap.log) if event == ("computes", count - 1))]
    brought = -1
    for event, index in first:
        if event == "brought":
            brought = index
        else:
            assert brought == index + 1
    with torch.no_grad():
        denoised("sdxl", parts, 0)
        before = swap.late
        denoised("sdxl", parts, 0)
        denoised("sdxl", parts, 0)
    assert swap.late == before


def test_trained_blocks_come_anew_in_each_forward_pass_and_only_the_first_comes_late() -> None:
    parts, _ = parts_with("flux", full=True)
    swap = swapped(parts, ALL)
    count = swap.swapped
    for step in range(3):
        denoised("flux", parts, step).sum().backward()
    assert (swap.copies, swap.late) == (3 * (count + count - 2), 3)


@pytest.mark.parametrize("full", [False, True], ids=["adapter", "full"])
def test_two_slots_are_all_that_blocks_have_on_the_device(full: bool) -> None:
    parts, _ = parts_with("sd", full)
    weights = {id(weight): weight for block in blocks_of(parts.backbone).values() for weight in block.parameters()}
    frozen_bytes = {id(weight): weight.numel() * weight.element_size() for weight in weights.values()}
    swap = swapped(parts, ALL)
    seen: set[int] = set()

    def look(module: nn.Module, *_: Any) -> None:
        seen.update(weight.untyped_storage().data_ptr() for weight in module.parameters())

    inside = [layer for block in blocks_of(parts.backbone).values() for layer in block.modules()]
    for layer in inside:
        if isinstance(layer, nn.Conv2d | nn.GroupNorm):
            layer.register_forward_pre_hook(look)
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    homes = {weight.untyped_storage().data_ptr() for weight in weights.values() if full or not weight.requires_grad}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = denoised("sd", parts, a_seed()).square().mean()
    assert len(seen) == 2 and not seen & homes
    # What the backward pass keeps is neither in a slot nor at home.
    assert not {tensor.untyped_storage().data_ptr() for tensor in kept} & (seen | homes)
    loss.backward()
    assert len(homes) == swap.swapped, "one piece of memory for each block"
    sizes = [frozen_bytes[key] for key, weight in weights.items() if full or not weight.requires_grad]
    assert sum(sizes) <= swap.bytes_at_home <= sum(sizes) + ALIGNMENT * len(sizes)
    assert swap.saved_bytes == swap.bytes_at_home - 2 * swap.slot_bytes
    assert all(weight.data_ptr() % 8 == 0 for weight in weights.values())


class Written(TorchDispatchMode):
    """Notes which memory operations write to."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function._schema.is_mutable:
            self.memory.add(arguments[0].untyped_storage().data_ptr())
        return function(*arguments, **(named or {}))


def test_frozen_weights_are_never_copied_back() -> None:
    parts, trained = parts_with("flux", full=False)
    swap = swapped(parts, ALL)
    homes = {weight.untyped_storage().data_ptr() for block in blocks_of(parts.backbone).values() for weight in block.buffers()}
    homes |= {weight.untyped_storage().data_ptr() for weight in parts.backbone.parameters() if not weight.requires_grad}
    optimizer = torch.optim.SGD(trained, lr=0.1)
    with Written() as written:
        denoised("flux", parts, a_seed()).square().mean().backward()
        optimizer.step()
    assert len(written.memory) >= 2, "slots are written to"
    assert swap.copies > 2 and not written.memory & homes


def test_adapters_and_what_is_around_blocks_stay_on_the_device() -> None:
    parts, _ = parts_with("flux", full=False)
    swap = swapped(parts, 2)
    # Without a second device here: what would be moved is what loses its numbers.
    parts.backbone.to("meta")
    chosen = [list(blocks_of(parts.backbone))[index] for index in spread(2, swap.count)]
    for name, weight in parts.backbone.named_parameters():
        at_home = any(name.startswith(f"{path}.") for path in chosen) and "lora_" not in name
        assert weight.is_meta is not at_home, name


def test_a_block_that_fails_leaves_its_weights_at_home_and_the_next_pass_is_right() -> None:
    seed = a_seed()
    parts, _ = parts_with("flux", full=True)
    wanted = denoised("flux", parts, seed).detach()
    swapped(parts, ALL)
    homes = {name: weight.data_ptr() for name, weight in parts.backbone.named_parameters()}
    names = set(dict(parts.backbone.named_parameters()))
    third = list(blocks_of(parts.backbone).values())[2]
    layer = next(layer for layer in third.modules() if isinstance(layer, nn.Linear))
    hook = layer.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        denoised("flux", parts, seed)
    hook.remove()
    after = dict(parts.backbone.named_parameters())
    assert after.keys() == names and all(weight.data_ptr() == homes[name] for name, weight in after.items())
    with torch.no_grad():
        next(third.parameters()).add_(0.0)
    assert torch.equal(denoised("flux", parts, seed), wanted)


@pytest.mark.parametrize("full", [False, True], ids=["adapter", "full"])
def test_names_and_numbers_of_the_state_are_those_without(full: bool) -> None:
    plain = {name: tensor.clone() for name, tensor in parts_with("sdxl", full)[0].backbone.state_dict().items()}
    parts, _ = parts_with("sdxl", full)
    swapped(parts, 5)
    state = parts.backbone.state_dict()
    assert list(state) == list(plain) and all(torch.equal(state[name], plain[name]) for name in plain)
    assert all(state[name].stride() == plain[name].stride() for name in plain)


def test_convolutions_keep_their_layout() -> None:
    parts, _ = parts_with("sd", full=True)
    parts.backbone.to(memory_format=torch.channels_last)
    strides = {name: weight.stride() for name, weight in parts.backbone.named_parameters()}
    swapped(parts, ALL)
    assert {name: weight.stride() for name, weight in parts.backbone.named_parameters()} == strides
    seen = []
    block = next(iter(blocks_of(parts.backbone).values()))
    block.conv1.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.is_contiguous(memory_format=torch.channels_last)))
    denoised("sd", parts, 0)
    assert seen == [True]


def test_the_number_may_change_between_steps() -> None:
    seed = a_seed()
    wanted = steps("sdxl", *parts_with("sdxl", full=False), seed, count=5)
    parts, trained = parts_with("sdxl", full=False)
    swap = swapped(parts, 0)
    numbers = [0, 5, ALL, 3, 0]
    assert_same(steps("sdxl", parts, trained, seed, 5, before=lambda step: swap.set(min(numbers[step], swap.count))), wanted)
    assert swap.copies > 0 and swap.bytes_at_home == swap.slot_bytes == 0
    assert all("forward" not in vars(block) and "_apply" not in vars(block) for block in blocks_of(parts.backbone).values())


@pytest.mark.parametrize("kind", ["none", "nf4"])
def test_after_the_end_a_network_is_as_it_was_and_may_be_swapped_anew(kind: Any) -> None:
    parts, _ = parts_with("flux", full=False)
    if kind != "none":
        quantize.quantize_network(parts.backbone, kind)
    with torch.no_grad():
        wanted, names = denoised("flux", parts, 3), list(parts.backbone.state_dict())
        swap = swapped(parts, ALL)
        assert torch.equal(denoised("flux", parts, 3), wanted)
        swap.end()
        assert (swap.swapped, swap.bytes_at_home, swap.slot_bytes) == (0, 0, 0) and list(parts.backbone.state_dict()) == names
        assert all("forward" not in vars(block) and "_apply" not in vars(block) for block in blocks_of(parts.backbone).values())
        assert torch.equal(denoised("flux", parts, 3), wanted)
        swapped(parts, 2)
        assert torch.equal(denoised("flux", parts, 3), wanted)


def test_sentences() -> None:
    parts, _ = parts_with("flux", full=True)
    swap = swapped(parts, 3)
    with pytest.raises(OptionError, match="blocks_to_swap: the network has 4 blocks, not 5; set it to 4 or less"):
        swap.set(5)
    with pytest.raises(OptionError, match="3 blocks are swapped and trained; their number cannot change"):
        swap.set(4)
    with pytest.raises(OptionError, match="blocks_to_swap: fsdp2 shards the weights"):
        check(swap, True, "AdamW")
    with pytest.raises(OptionError, match="blocks_to_swap: AdamW8bit needs all weights on one device"):
        check(swap, False, "AdamW8bit")
    check(swap, False, "AdamW")
    check(swapped(parts_with("flux", full=False)[0], 3), False, "AdamW8bit")
    assert "3 of 4 blocks are swapped" in swap.summary()


def test_the_norm_of_gradients_is_that_of_all_of_them() -> None:
    """The device of half of them is another one only where there is one: groups are made all the same."""
    gradients = [torch.randn(7, 3), torch.randn(5), torch.randn(2, 2, 2).bfloat16()]
    together = torch.cat([gradient.flatten().double() for gradient in gradients])
    torch.testing.assert_close(total_norm(gradients).double(), together.norm(), rtol=1e-3, atol=0)
    where = "cuda" if torch.cuda.is_available() else "cpu"
    torch.testing.assert_close(total_norm([gradients[0], gradients[1].to(where)]).double(), together[:26].norm(), rtol=1e-6, atol=0)
