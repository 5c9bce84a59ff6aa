"""Several adapter files on one model, with weights: against merging into plain weights, and on quantised ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from optimum.quanto import freeze, qint8, quantize
from safetensors.torch import load_file, save_file

from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.families.qwen_edit.options import QwenImageNetworkOptions
from sd_scripts.library.adapters.applying import apply_adapters
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.files import export
from sd_scripts.library.adapters.layer_names import layers_of
from sd_scripts.library.adapters.maths import KINDS
from sd_scripts.library.adapters.merge import merge_into
from sd_scripts.library.core.protocols import Parts
from sd_scripts.schema.errors import OptionError
from tests.library.networks.adapters_in_small import outputs, shaken

ATTENTION, MLP = r"attn\.to_(q|out)", "img_mlp"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A file of each kind on all layers, a second lora and dora, and one of two kinds."""
    folder = tmp_path_factory.mktemp("adapters")
    wanted = [(kind, kind, 1, ()) for kind in KINDS] + [("second lora", "lora", 2, ()), ("second dora", "dora", 3, ())]
    wanted += [("lora on attention", "lora", 4, (ATTENTION,)), ("lokr on mlp", "lokr", 5, (MLP,))]
    found = {}
    for name, kind, seed, targets in wanted:
        parts = QwenEdit().tiny()
        options = QwenImageNetworkOptions(network_type=kind, network_dim=4, network_alpha=2.0, target_modules=targets)
        network = shaken(attach(parts, options, QwenEdit().adapter_targets(parts, False), 0), seed)
        found[name] = folder / f"{name}.safetensors"
        export(network, parts, found[name], precision="float")
    found["two kinds"] = folder / "two kinds.safetensors"
    save_file({**load_file(found["lora on attention"]), **load_file(found["lokr on mlp"])}, found["two kinds"])
    return found


def merged(files: dict[str, Path], weights: dict[str, float]) -> torch.Tensor:
    """What a model gives whose weights are W + sum of weight x (W' - W), each W' made of the model's own W."""
    parts, base = QwenEdit().tiny(), QwenEdit().tiny()
    with torch.no_grad():
        for name, weight in weights.items():
            other = QwenEdit().tiny()
            merge_into(other, files[name], weight)
            for layer, changed in layers_of(other).items():
                layers_of(parts)[layer].weight += changed.weight - layers_of(base)[layer].weight
    return outputs(parts)


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((left - right).abs().max() <= 2e-6 * max(1.0, float(right.abs().max())))


@pytest.mark.parametrize(
    "weights",
    [
        {"lora": 0.7, "second lora": -0.4},
        {"lora": 1.0, "dora": 0.5, "second dora": 0.8},
        {"dora": 0.6, "second lora": 1.2},
        {"loha": 0.5},
        {"lokr": -1.5},
        {"oft": 1.0},
        {"two kinds": 0.8},
    ],
    ids=" + ".join,
)
def test_files_with_weights_do_what_their_sum_in_the_weights_does(weights: dict[str, float], files: dict[str, Path], qwen: Parts) -> None:
    before = outputs(qwen)
    handle = apply_adapters(qwen, [(files[name], weight) for name, weight in weights.items()])
    want = merged(files, weights)
    assert (want - before).abs().max() > 1e-2
    assert close(outputs(qwen), want)
    assert handle.weights == tuple(weights.values()) and [path.stem for path in handle.paths] == list(weights)
    assert not any(tensor.requires_grad for tensor in qwen.backbone.parameters())
    handle.remove()
    assert torch.equal(outputs(qwen), before)
    assert not hasattr(qwen.backbone, "peft_config")
    handle.remove()


def test_new_weights_count_at_once_and_zero_is_the_model_without_the_file(files: dict[str, Path], qwen: Parts) -> None:
    names = ("lora", "dora", "second lora")
    before = outputs(qwen)
    handle = apply_adapters(qwen, [(files[name], 0.0) for name in names])
    assert torch.equal(outputs(qwen), before)
    for weights in ((0.5, 0.0, -1.0), (0.0, 0.9, 0.3), (1.0, 0.4, 0.0)):
        handle.set_weights(weights)
        assert close(outputs(qwen), merged(files, dict(zip(names, weights))))
    handle.set_weights((0.0, 0.0, 0.0))
    assert torch.equal(outputs(qwen), before)
    handle.remove()
    assert torch.equal(outputs(qwen), before)


@pytest.mark.parametrize("kind", KINDS)
def test_on_a_quantised_model_a_file_does_what_it_does_on_the_weights_that_it_stands_for(
    kind: str, files: dict[str, Path], qwen: Parts, qwen_twin: Parts
) -> None:
    quantize(qwen.backbone, weights=qint8)
    freeze(qwen.backbone)
    for name, layer in layers_of(qwen_twin).items():
        if name.startswith("backbone."):
            layer.weight.data = layers_of(qwen)[name].weight.dequantize().float()
    before = outputs(qwen)
    handle = apply_adapters(qwen, [(files[kind], 1.0)])
    merge_into(qwen_twin, files[kind])
    assert close(outputs(qwen), outputs(qwen_twin))
    handle.remove()
    assert torch.equal(outputs(qwen), before)


def test_lora_values_can_be_held_in_the_models_precision(files: dict[str, Path], qwen: Parts, qwen_twin: Parts) -> None:
    for parts in (qwen, qwen_twin):
        parts.backbone.to(torch.bfloat16)
    apply_adapters(qwen, [(files["lora"], 1.0)], dtype=torch.bfloat16)
    assert {tensor.dtype for tensor in qwen.backbone.parameters()} == {torch.bfloat16}
    apply_adapters(qwen_twin, [(files["lora"], 1.0)])
    with torch.autocast("cpu", torch.bfloat16):
        low, high = outputs(qwen).float(), outputs(qwen_twin).float()
    assert (low - high).abs().max() <= 0.03 * high.abs().max()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_works_on_a_quantised_model_in_bf16(kind: str, files: dict[str, Path], qwen: Parts, qwen_twin: Parts) -> None:
    for layer in layers_of(qwen).values():
        layer.to(torch.bfloat16)
    quantize(qwen.backbone, weights=qint8)
    freeze(qwen.backbone)
    apply_adapters(qwen, [(files[kind], 1.0)], dtype=torch.bfloat16)
    apply_adapters(qwen_twin, [(files[kind], 1.0)])
    with torch.autocast("cpu", torch.bfloat16):
        low = outputs(qwen).float()
    want = outputs(qwen_twin)
    assert (low - want).norm() <= 0.05 * want.norm()


def test_all_problems_are_told_and_the_model_stays_as_it_was(files: dict[str, Path], qwen: Parts, tmp_path: Path) -> None:
    before = outputs(qwen)
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no")
    with pytest.raises(OptionError) as told:
        apply_adapters(qwen, [(files["lora"], 1.0), (broken, 1.0), (files["oft"], 0.5), (files["lokr"], 1.0)])
    text = str(told.value)
    assert "broken.safetensors is not a readable safetensors file" in text
    assert "oft.safetensors is an oft adapter" in text
    assert "a lokr adapter cannot stand on a layer with one of another kind" in text
    assert torch.equal(outputs(qwen), before)
    handle = apply_adapters(qwen, [(files["oft"], 1.0)])
    live = outputs(qwen)
    for weights in ((0.5,), (1.0, 1.0)):
        with pytest.raises(OptionError):
            handle.set_weights(weights)
    assert torch.equal(outputs(qwen), live)
    handle.set_weights((0.0,))
    assert torch.equal(outputs(qwen), before)
