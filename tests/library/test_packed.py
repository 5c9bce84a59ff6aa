"""Linear layers in fp8 and nf4: their numbers against references of their own, and what may be done with them."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sd_scripts.library.memory.packed import PackedLinear, nf4_levels, pack_layers

PACKINGS = ("fp8", "nf4")
BYTES = {"fp8": 1.0, "nf4": 0.5 + 4 / 64}
PUBLISHED_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334, -0.09105003625154495,
    0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""Appendix E of arXiv 2305.14314."""


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(random.getrandbits(32))


def layer(rng: torch.Generator, inputs: int = 96, outputs: int = 50, scale: float = 0.05, bias: bool = True) -> nn.Linear:
    made = nn.Linear(inputs, outputs, bias=bias)
    for tensor in made.parameters():
        tensor.data = torch.randn(tensor.shape, generator=rng) * scale
    return made


def float8_numbers() -> list[float]:
    """All numbers of float8_e4m3fn by their definition: 1 sign, 4 exponent, 3 mantissa bits; bias 7; S.1111.111 is no number."""
    found = []
    for sign in (1, -1):
        for exponent in range(16):
            for mantissa in range(8):
                if (exponent, mantissa) != (15, 7):
                    found.append(sign * (mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)))
    return found


def test_levels_of_nf4_are_the_published_ones() -> None:
    assert nf4_levels() == pytest.approx(PUBLISHED_NF4, abs=3e-7)


def test_levels_of_nf4_are_quantiles_at_equal_distances() -> None:
    # Appendix E: 2^(k-1) quantiles on one side and 2^(k-1) + 1 on the other, unified, with one of the two zeros left out.
    offset = (1 - 1 / 30 + 1 - 1 / 32) / 2
    positive = torch.special.ndtri(torch.linspace(0.5, offset, 9, dtype=torch.float64))
    negative = -torch.special.ndtri(torch.linspace(offset, 0.5, 8, dtype=torch.float64))
    whole = torch.cat([negative, positive[1:]]) / positive[-1]
    assert nf4_levels() == pytest.approx(whole.tolist(), abs=1e-12)


@pytest.mark.parametrize("scale", [0.001, 0.05, 300.0])
def test_fp8_takes_the_nearest_number_and_stops_at_448(rng: torch.Generator, scale: float) -> None:
    plain = layer(rng, scale=scale)
    found = PackedLinear.of(plain, "fp8").unpacked()
    numbers = torch.tensor(sorted(float8_numbers()), dtype=torch.float64)
    away = (plain.weight.double()[..., None] - numbers).abs()
    assert torch.equal((plain.weight - found).abs().double(), away.amin(-1))
    assert found.abs().max() <= 448


@pytest.mark.parametrize("shape", [(96, 50), (7, 5), (64, 1), (130, 3)])
def test_nf4_takes_the_nearest_level_of_each_block_of_64(rng: torch.Generator, shape: tuple[int, int]) -> None:
    plain = layer(rng, *shape)
    found = PackedLinear.of(plain, "nf4").unpacked().flatten().double()
    weight = plain.weight.detach().flatten().double()
    for start in range(0, len(weight), 64):
        block = weight[start : start + 64]
        largest = block.abs().max()
        choices = torch.tensor(PUBLISHED_NF4, dtype=torch.float64) * largest
        nearest = choices[(block[:, None] - choices).abs().argmin(1)]
        # A weight in the middle of two levels may take either.
        assert ((found[start : start + 64] - block).abs() - (nearest - block).abs()).abs().max() < 1e-6 * largest


def test_a_block_of_zeros_stays_so(rng: torch.Generator) -> None:
    plain = layer(rng, 64, 4)
    plain.weight.data[1] = 0
    for packing in PACKINGS:
        assert not PackedLinear.of(plain, packing).unpacked()[1].any()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("packing", PACKINGS)
def test_output_and_gradient_are_those_of_the_unpacked_weight(packing: str, bias: bool, rng: torch.Generator) -> None:
    plain = layer(rng, bias=bias)
    held = PackedLinear.of(plain, packing)
    x = torch.randn(3, 4, 96, generator=rng, requires_grad=True)
    upstream = torch.randn(3, 4, 50, generator=rng)
    found = held(x)
    found.backward(upstream)
    weight = held.unpacked().double()
    expected = x.detach().double() @ weight.T + (plain.bias.double() if bias else 0)
    assert (found - expected).abs().max() < 1e-5
    assert (x.grad - upstream.double() @ weight).abs().max() < 1e-5
    assert not any(tensor.requires_grad or tensor.grad is not None for tensor in held.parameters())


@pytest.mark.parametrize("packing", PACKINGS)
def test_nothing_of_the_weight_is_kept_for_the_backward_pass(packing: str, rng: torch.Generator) -> None:
    plain = layer(rng, 256, 256)
    held, kept = PackedLinear.of(plain, packing), []
    x = torch.randn(2, 256, generator=rng, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        held(x).sum()
    own = {tensor.untyped_storage().data_ptr() for tensor in held.parameters()}
    assert kept and all(tensor.untyped_storage().data_ptr() in own for tensor in kept)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_weight_takes_as_many_bytes_as_is_said(packing: str, rng: torch.Generator) -> None:
    held = PackedLinear.of(layer(rng, 512, 1024, bias=False), packing)
    taken = sum(tensor.numel() * tensor.itemsize for tensor in held.parameters())
    # The table of levels of nf4 is 2 KiB a layer.
    assert taken - (2048 if packing == "nf4" else 0) == BYTES[packing] * 512 * 1024


@pytest.mark.parametrize("packing", PACKINGS)
def test_another_precision_of_the_network_leaves_the_packed_weight_alone(packing: str, rng: torch.Generator) -> None:
    held = PackedLinear.of(layer(rng), packing)
    numbers, x = held.unpacked(), torch.randn(2, 96, generator=rng)
    for change in (nn.Module.half, nn.Module.bfloat16, nn.Module.double, nn.Module.float, copy.deepcopy):
        held = change(held)
        assert torch.equal(held.unpacked(), numbers), change
    with torch.autocast("cpu", torch.bfloat16):
        found = held(x)
    assert found.dtype is torch.bfloat16
    assert (found - held(x)).norm() < 0.02 * held(x).norm()
    other = PackedLinear.of(layer(rng), packing)
    other.load_state_dict(held.state_dict())
    assert torch.equal(other.unpacked(), numbers)


@pytest.mark.parametrize("packing", PACKINGS)
def test_its_shape_is_known_on_the_meta_device(packing: str) -> None:
    block = nn.Sequential(nn.Linear(96, 50, device="meta"), nn.Linear(50, 8, device="meta"))
    errors = pack_layers(block, packing)
    assert list(errors) == ["0", "1"] and all(map(math.isnan, errors.values()))
    x = torch.randn(2, 96, device="meta", requires_grad=True)
    found = block(x)
    found.sum().backward()
    assert found.shape == (2, 8) and found.is_meta and x.grad.shape == x.shape
    like = PackedLinear.of(nn.Linear(96, 50), packing)
    assert [(t.shape, t.dtype) for t in block[0].parameters()] == [(t.shape, t.dtype) for t in like.parameters()]


# torch's compiler itself does both.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning", "ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("packing", PACKINGS)
def test_compiled_and_recomputed_it_gives_the_same(packing: str, rng: torch.Generator) -> None:
    torch._dynamo.reset()
    plain = nn.Sequential(layer(rng, 64, 32), nn.SiLU(), layer(rng, 32, 64))
    pack_layers(plain, packing)
    compiled = copy.deepcopy(plain)
    compiled.compile(backend="aot_eager", fullgraph=True)

    def result(call: object) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-2, 2, 128).view(2, 64).requires_grad_()
        y = call(x)
        y.square().sum().backward()
        return y.detach(), x.grad

    expected = result(plain)
    for call in (compiled, lambda x: checkpoint(plain, x, use_reentrant=False), lambda x: checkpoint(compiled, x, use_reentrant=False)):
        found = result(call)
        assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in zip(found, expected))


@pytest.mark.parametrize("packing", PACKINGS)
def test_weights_may_lie_elsewhere_between_the_passes(packing: str, rng: torch.Generator) -> None:
    held = PackedLinear.of(layer(rng), packing)
    x = torch.randn(2, 96, generator=rng, requires_grad=True)
    held(x).sum().backward()
    expected, x.grad = x.grad, None
    loss = held(x).sum()
    for tensor in held.parameters():
        tensor.data = tensor.data.clone()
    loss.backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_packed_weight_reads_as_a_weight_and_cannot_be_changed(packing: str, rng: torch.Generator) -> None:
    held = PackedLinear.of(layer(rng), packing)
    assert held.weight.shape == (50, 96) and held.weight.dtype is torch.float32 and held.weight.device.type == "cpu"
    assert torch.equal(held.weight + 0, held.unpacked()) and held.weight.norm() == held.unpacked().norm()

    def add() -> None:
        held.weight.data += 1

    def put() -> None:
        held.weight.data = torch.zeros(50, 96)

    for change in (add, put, lambda: held.weight.copy_(torch.zeros(50, 96)), lambda: held.weight.add_(1)):
        with pytest.raises(RuntimeError, match=f"held as {packing} cannot be changed"):
            change()


@pytest.mark.parametrize("safely", [False, True])
@pytest.mark.parametrize("packing", PACKINGS)
def test_peft_cannot_merge_into_a_packed_weight(packing: str, safely: bool, rng: torch.Generator) -> None:
    block = nn.Sequential(layer(rng))
    pack_layers(block, packing)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["0"]), block)
    assert block[0].lora_A["default"].weight.dtype is torch.float32
    with pytest.raises(RuntimeError, match="cannot be changed"):
        block[0].merge(safe_merge=safely)
