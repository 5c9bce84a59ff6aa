"""Frozen networks in few bits, for every family: which layers, how large the error, adapters on top, and no merging without a word."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sd_scripts import families
from sd_scripts.families import FACTS, RUNS
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.files import export
from sd_scripts.library.adapters.inject import plain_weight
from sd_scripts.library.adapters.layer_names import layers_of
from sd_scripts.library.adapters.maths import KINDS
from sd_scripts.library.adapters.merge import is_plain, merge_into
from sd_scripts.library.adapters.network import AdapterNetwork
from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.library.core.protocols import Parts, dtype_of
from sd_scripts.library.loading.quantized import check_whole
from sd_scripts.library.memory import quantize
from sd_scripts.library.memory.packed import PackedLinear
from sd_scripts.schema.errors import OptionError
from tests.library.batches import a_call
from tests.library.small_trainers import options_of

FAMILIES = tuple(name for name, method in RUNS if method == "network")
QUANTIZATIONS = ("qint8", "qfloat8", "fp8", "nf4")
OF_WEIGHTS = {"qint8": (0.003, 0.006), "qfloat8": (0.02, 0.03), "fp8": (0.02, 0.04), "nf4": (0.08, 0.12)}
"""Relative error of a normally distributed weight."""
OF_LOSS = {"qint8": 0.01, "qfloat8": 0.05, "fp8": 0.05, "nf4": 0.15}
OF_GRADIENT = {"qint8": 0.05, "qfloat8": 0.25, "fp8": 0.3, "nf4": 0.7}
"""Relative error of the loss, and of all gradients of a lora together, on the small networks."""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def seed() -> int:
    return random.getrandbits(16)


def tiny(name: str) -> Parts:
    return families.family(name).tiny()


def quantized(name: str, kind: str) -> Parts:
    parts = tiny(name)
    quantize.quantize_network(parts.backbone, kind)
    return parts


def dequantized(parts: Parts) -> Parts:
    """The same model in full precision, with the numbers that few bits stand for."""
    parts = copy.deepcopy(parts)
    for path, layer in list(parts.backbone.named_modules()):
        if isinstance(layer, PackedLinear) or type(layer).__name__ == "QLinear":
            plain = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
            plain.weight = nn.Parameter(plain_weight(layer).detach().clone(), requires_grad=False)
            plain.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
            parts.backbone.set_submodule(path, plain)
    return parts


def adapted(parts: Parts, name: str, kind: str = "lora", dtype: torch.dtype = torch.float32) -> AdapterNetwork:
    """An adapter with random values on every layer of its targets."""
    options = RUNS[name, "network"].model_fields["network"].annotation
    texts = {"train_text_encoder": False} if "train_text_encoder" in options.model_fields else {}
    made = options(network_type=kind, network_dim=4, network_alpha=4, **texts)
    network = attach(parts, made, families.family(name).adapter_targets(parts, False), seed=3)
    rng = torch.Generator().manual_seed(5)
    state = network.state()
    for key, tensor in state.items():
        noise = torch.randn(tensor.shape, generator=rng)
        state[key] = tensor * (1 + 0.1 * noise) if "magnitude" in key else 0.1 * noise
    network.load(state)
    for tensor in network.parameters():
        tensor.data = tensor.data.to(dtype)
    return network


def step(parts: Parts, network: AdapterNetwork, name: str, seed: int) -> tuple[Tensor, Tensor]:
    """Loss and gradients of a random batch."""
    x_t, t, conditions = a_call(name, tiny(name), seed=seed)
    target = torch.randn(x_t.shape, generator=torch.Generator().manual_seed(seed + 1))
    for tensor in network.parameters():
        tensor.grad = None
    loss = (families.family(name).denoise(parts, x_t, t, conditions) - target).square().mean()
    loss.backward()
    return loss.detach(), torch.cat([tensor.grad.flatten() for tensor in network.parameters()])


def linear_in_blocks(parts: Parts, kind: str) -> Iterator[str]:
    for path, block in blocks_of(parts.backbone).items():
        for inside, layer in block.named_modules():
            if type(layer) is nn.Linear and (kind != "qint8" or layer.in_features % 16 == 0):
                yield f"{path}.{inside}"


def every_other(kinds: tuple[str, ...], others: Sequence[str] = FAMILIES) -> list[Any]:
    """Families, or others, and kinds, each with half of the others; all pairs with --all."""
    return [
        pytest.param(name, kind, marks=pytest.mark.long if (row + column) % 2 else ())
        for row, name in enumerate(others)
        for column, kind in enumerate(kinds)
    ]


@pytest.mark.parametrize(("name", "kind"), every_other(QUANTIZATIONS))
def test_the_linear_layers_of_all_blocks_are_held_in_few_bits_and_no_others(name: str, kind: str) -> None:
    parts, plain = tiny(name), tiny(name)
    report = quantize.quantize_network(parts.backbone, kind)
    assert set(report.errors) == set(linear_in_blocks(plain, kind)) and len(report.errors) >= 20
    held = {path for path, layer in parts.backbone.named_modules() if isinstance(layer, PackedLinear) or type(layer).__name__ == "QLinear"}
    assert held == set(report.errors) and quantize.is_quantized(parts.backbone) and not quantize.is_quantized(plain.backbone)
    least, most = OF_WEIGHTS[kind]
    for path, error in report.errors.items():
        weight = plain.backbone.get_submodule(path).weight.double()
        found = (plain_weight(parts.backbone.get_submodule(path)).double() - weight).norm() / weight.norm()
        assert error == pytest.approx(float(found), rel=1e-4), path
        assert least < error < most, f"{path}: {error}"
    untouched = {key: tensor for key, tensor in parts.backbone.state_dict().items() if not key.startswith(tuple(f"{one}." for one in held))}
    state = plain.backbone.state_dict()
    assert untouched and all(torch.equal(tensor, state[key]) for key, tensor in untouched.items())
    assert (parts.device, dtype_of(parts.backbone)) == (plain.device, dtype_of(plain.backbone))
    with pytest.raises(AssertionError, match="lost its weights"):
        check_whole(*parts.modules().values())


WHOLE = [name for name, method in RUNS if method == "full" and FACTS[name].network.quantized_encoder is not None]


@pytest.mark.parametrize("name", WHOLE)
def test_a_trained_transformer_is_saved_beside_a_text_encoder_in_few_bits(name: str, tmp_path: Path) -> None:
    family, parts = families.family(name), tiny(name)
    family.save(parts, tmp_path / "plain.safetensors", "safetensors", None, {})
    quantize.quantize_network(parts.modules()[FACTS[name].network.quantized_encoder], "qint8")
    family.save(parts, tmp_path / "beside.safetensors", "safetensors", None, {})
    assert (tmp_path / "beside.safetensors").read_bytes() == (tmp_path / "plain.safetensors").read_bytes()
    with pytest.raises(AssertionError, match="lost its weights"):
        family.save(parts, tmp_path / "folder", "diffusers", None, {})


@pytest.mark.parametrize("name", WHOLE)
def test_a_folder_with_a_text_encoder_in_few_bits_is_refused_before_it_is_trained(name: str) -> None:
    kind, given = (name, "full"), {"text_encoder_quantization": random.choice(("qint8", "qfloat8"))}
    options_of(kind, **given)
    with pytest.raises(OptionError, match="set text_encoder_quantization to none, or save_model_as to safetensors"):
        options_of(kind, **given, save_model_as="diffusers")


@cache
def in_float64(name: str, seed: int, weights: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Loss and gradients of the plain network, whose weights were rounded to this precision first."""
    plain = tiny(name)
    plain.backbone.to(weights).double()
    return step(plain, adapted(plain, name, dtype=torch.float64), name, seed)


@pytest.mark.parametrize(("name", "kind"), every_other(QUANTIZATIONS))
def test_loss_and_gradient_are_near_those_of_the_plain_network_in_float64(name: str, kind: str, seed: int) -> None:
    wanted, right = in_float64(name, seed)
    parts = quantized(name, kind)
    loss, gradient = step(parts, adapted(parts, name), name, seed)
    off, turned = float((loss - wanted).abs() / wanted), float((gradient - right).norm() / right.norm())
    assert off < OF_LOSS[kind] and 0 < turned < OF_GRADIENT[kind], f"loss {off:.4f}, gradient {turned:.4f} with seed {seed}"


@pytest.mark.parametrize(("adapter", "kind"), every_other(("fp8", "nf4"), KINDS))
def test_an_adapter_on_packed_layers_is_that_on_plain_layers_of_their_numbers(kind: str, adapter: str, seed: int) -> None:
    name = "zimage"
    parts = quantized(name, kind)
    twin = dequantized(parts)
    network, other = adapted(parts, name, adapter), adapted(twin, name, adapter)
    assert all(torch.equal(one, two) for one, two in zip(network.parameters(), other.parameters(), strict=True))
    assert all(tensor.dtype is torch.float32 for tensor in network.parameters())
    found, expected = step(parts, network, name, seed), step(twin, other, name, seed)
    assert torch.allclose(found[0], expected[0], rtol=1e-5)
    assert (found[1] - expected[1]).norm() < 1e-4 * expected[1].norm()


@pytest.mark.parametrize(("name", "kind"), every_other(("qint8", "nf4")))
def test_a_base_in_bf16_is_quantised_and_trained_under_autocast(name: str, kind: str, seed: int) -> None:
    parts = tiny(name)
    # As a run with mixed_precision bf16 reads it.
    parts.backbone.bfloat16()
    quantize.quantize_network(parts.backbone, kind)
    network = adapted(parts, name)
    # Of the weights that are read: rounding them turns the gradients of some small networks by a third, and quantising by a hundredth.
    loss, gradient = in_float64(name, seed, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        other, turned = step(parts, network, name, seed)
    off = float((turned - gradient).norm() / gradient.norm())
    assert torch.isfinite(turned).all() and off < OF_GRADIENT[kind] + 0.2, f"gradient {off:.4f} with seed {seed}"
    assert float(other) == pytest.approx(float(loss), rel=OF_LOSS[kind] + 0.05)


# Merging.


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *zip(FAMILIES, [*QUANTIZATIONS, "fp8"]),
        *(pytest.param(*pair, marks=pytest.mark.long) for pair in zip(FAMILIES, ["nf4", *QUANTIZATIONS])),
    ],
)
def test_merging_into_a_quantised_model_is_refused_and_changes_nothing(name: str, kind: str, tmp_path: Path) -> None:
    whole = tiny(name)
    network = adapted(whole, name)
    export(network, whole, tmp_path / "a.safetensors", save_model_as="kohya", precision="float")
    parts = quantized(name, kind)
    before = {path: plain_weight(layer).clone() for path, layer in layers_of(parts).items()}
    with pytest.raises(OptionError, match=r"a\.safetensors cannot be merged into a quantised model"):
        merge_into(parts, tmp_path / "a.safetensors")
    assert all(torch.equal(plain_weight(layer), before[path]) for path, layer in layers_of(parts).items())


@pytest.mark.parametrize(("adapter", "kind"), every_other(("qint8", "nf4"), KINDS))
def test_nobody_merges_by_peft_into_quantised_layers(kind: str, adapter: str) -> None:
    parts = quantized("flux", kind)
    adapted(parts, "flux", adapter)
    tried = 0
    for layer in parts.backbone.modules():
        if hasattr(layer, "merge") and hasattr(layer, "get_base_layer") and not is_plain(layer.get_base_layer()):
            with pytest.raises(OptionError, match="cannot be merged into a quantised layer"):
                layer.merge()
            tried += 1
    assert tried >= 20


# Loading.


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A family and a folder with its tiny model."""
    folder = tmp_path_factory.mktemp("models") / request.param
    families.family(request.param).save(tiny(request.param), folder, "diffusers", None, {})
    return request.param, folder


def load(saved: tuple[str, Path], dtype: torch.dtype = torch.float32, **options: Any) -> Parts:
    name, folder = saved
    section = RUNS[name, "network"].model_fields["model"].annotation
    return families.family(name).load(section(pretrained_model_name_or_path=str(folder), **options), CPU, dtype)


@pytest.mark.parametrize(("saved", "kind"), every_other(("qfloat8", "fp8", "nf4")), indirect=["saved"])
def test_blocks_are_quantised_while_they_are_read(saved: tuple[str, Path], kind: str) -> None:
    at_once, later = load(saved, transformer_quantization=kind).backbone, load(saved).backbone
    quantize.quantize_network(later, kind)
    first, second = at_once.state_dict(), later.state_dict()
    assert first.keys() == second.keys() and quantize.is_quantized(at_once)
    assert all(torch.equal(first[key], second[key]) for key in first if isinstance(first[key], Tensor))
    assert not at_once.training and not any(tensor.requires_grad for tensor in at_once.parameters())


@pytest.mark.parametrize(("saved", "kind"), every_other(("qint8", "nf4")), indirect=["saved"])
def test_what_is_merged_first_is_quantised_afterwards(saved: tuple[str, Path], kind: str, tmp_path: Path) -> None:
    name, file = saved[0], tmp_path / "a.safetensors"
    whole = tiny(name)
    network = adapted(whole, name)
    export(network, whole, file, save_model_as="kohya", precision="float")
    network.detach()
    merge_into(whole, file, 0.5)
    parts = load(saved, transformer_quantization=kind, base_weights=(str(file),), base_weights_multiplier=(0.5,))
    quantize.quantize_network(whole.backbone, kind)
    wanted = layers_of(whole)
    held = [path for path, layer in layers_of(parts).items() if not is_plain(layer)]
    assert len(held) >= 20
    for path in held:
        assert torch.equal(plain_weight(layers_of(parts)[path]), plain_weight(wanted[path])), path
        assert not torch.equal(plain_weight(wanted[path]), layers_of(tiny(name))[path].weight)


@pytest.mark.parametrize("saved", FAMILIES, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_large_text_encoder_is_held_in_eight_bits(saved: tuple[str, Path], dtype: torch.dtype) -> None:
    name, _ = saved
    large = {"flux": "te3", "qwen_edit": "te1", "zimage": "te1"}.get(name)
    if large is None:
        return
    if name == "flux" and dtype is torch.float16:
        with pytest.raises(OptionError, match="text_encoder_quantization: T5 overflows in fp16"):
            load(saved, dtype, text_encoder_quantization="qint8")
        return
    parts = load(saved, dtype, text_encoder_quantization="qint8")
    assert {key for key, module in parts.modules().items() if quantize.is_quantized(module)} == {large}
    assert dtype_of(parts.text_encoders[large]) is dtype
    if name != "qwen_edit":
        family = families.family(name)
        found, wanted = (family.encode_prompts(one, ["a red star"])[0] for one in (parts, tiny(name)))
        for key, rows in wanted.items():
            assert (found[key].float() - rows).norm() < 0.2 * rows.norm(), key


@pytest.mark.parametrize("kind", ["fp8", "nf4"])
def test_a_training_adapter_stands_beside_packed_layers(kind: str, tmp_path: Path, seed: int) -> None:
    name = "zimage"
    whole = tiny(name)
    network = adapted(whole, name)
    export(network, whole, tmp_path / "undo.safetensors", save_model_as="kohya", precision="float")
    families.family(name).save(tiny(name), tmp_path / "base", "diffusers", None, {})
    given = {"transformer_quantization": kind, "training_adapter": str(tmp_path / "undo.safetensors")}
    parts, plain = load((name, tmp_path / "base"), **given), load((name, tmp_path / "base"), transformer_quantization=kind)
    call = a_call(name, tiny(name), seed=seed)
    with torch.no_grad():
        helped, want = (families.family(name).denoise(one, *call) for one in (parts, plain))
        with parts.without_training_adapter():
            assert torch.equal(families.family(name).denoise(parts, *call), want)
        like = adapted(plain, name)
        assert torch.allclose(families.family(name).denoise(plain, *call), helped, rtol=1e-3, atol=1e-4)
        like.detach()
    assert not torch.allclose(helped, want, rtol=1e-2)
