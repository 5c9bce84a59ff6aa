"""Adapters on Qwen-Image: every kind and layout, quantised bases, files of other trainers and families."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageEditPlusPipeline
from optimum.quanto import freeze, qfloat8, qint8, quantize
from peft import LoraConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.families.qwen_edit.options import QwenImageNetworkOptions
from sd_scripts.library.adapters.architectures import architectures
from sd_scripts.library.adapters.files import export, read
from sd_scripts.library.adapters.layer_names import layers_of
from sd_scripts.library.adapters.maths import KINDS
from sd_scripts.library.adapters.merge import merge_into
from sd_scripts.library.adapters.names import names_for, names_of
from sd_scripts.library.core.protocols import Parts
from sd_scripts.schema.errors import OptionError
from tests.library.networks.adapters_in_small import attached, outputs, qwen_output, shaken
from tests.small_models import qwen_pipeline_of

LAYOUTS = ("kohya", "diffusers", "comfyui")
LAYER = "backbone.transformer_blocks.0.attn.to_q"


def options_for(kind: str = "lora", **changes: object) -> QwenImageNetworkOptions:
    values = {"network_type": kind, "network_dim": 4, "network_alpha": 2.0, "lora_targets": "all_with_modulation", **changes}
    return QwenImageNetworkOptions(**values)


def saved(parts: Parts, path: Path, kind: str = "lora", layout: str = "kohya", seed: int = 1, **changes: object) -> torch.Tensor:
    """Writes an adapter of random values and returns the model's output with it; the model stays as it was."""
    network = shaken(attached(parts, options_for(kind, **changes)), seed)
    export(network, parts, path, save_model_as=layout, precision="float")
    live = outputs(parts)
    network.detach()
    return live


def quantised(parts: Parts, qtype: object = qint8) -> Parts:
    quantize(parts.backbone, weights=qtype)
    freeze(parts.backbone)
    return parts


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        pytest.param(kind, targets, marks=() if kind == "lora" or targets == "all_with_modulation" else pytest.mark.long)
        for kind in KINDS
        for targets in ("image_attention", "attention", "all", "all_with_modulation")
    ],
)
def test_every_trained_tensor_gets_a_gradient(kind: str, targets: str, qwen: Parts) -> None:
    before = outputs(qwen)
    network = attached(qwen, options_for(kind, lora_targets=targets))
    assert (outputs(qwen) - before).abs().max() <= 1e-6 * before.abs().max()
    shaken(network)
    qwen_output(qwen, torch.Generator().manual_seed(5)).square().mean().backward()
    parameters = network.named_parameters()
    assert all(tensor.requires_grad and tensor.dtype == torch.float32 for tensor in parameters.values())
    assert not [key for key, tensor in parameters.items() if tensor.grad is None or not tensor.grad.any()]
    assert not any(tensor.grad is not None for name, tensor in qwen.backbone.named_parameters() if ".base_layer." in name)


def saved_in_all_layouts(parts: Parts, folder: Path, kind: str = "lora", **changes: object) -> tuple[torch.Tensor, dict[str, Path]]:
    """Writes an adapter of random values, and returns the model's output with it and the files by layout; the model stays as it was."""
    network = shaken(attached(parts, options_for(kind, **changes)))
    files = {layout: folder / f"{layout}.safetensors" for layout in LAYOUTS}
    for layout, file in files.items():
        export(network, parts, file, save_model_as=layout, precision="float")
    live = outputs(parts)
    network.detach()
    return live, files


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_file_does_what_the_live_adapter_does_merged_too(kind: str, qwen: Parts, tmp_path: Path, subtests: pytest.Subtests) -> None:
    live, files = saved_in_all_layouts(qwen, tmp_path, kind)
    assert (live - outputs(qwen)).abs().max() > 1e-2
    for layout, file in files.items():
        with subtests.test(msg=layout):
            twin = QwenEdit().tiny()
            assert merge_into(twin, file) == 24
            assert (outputs(twin) - live).abs().max() < 1e-6 * max(1.0, float(live.abs().max()))


@pytest.mark.parametrize(
    "changes",
    [
        *(pytest.param(changes, marks=pytest.mark.long) for changes in ({}, {"network_alpha": 12.0})),
        {"rank_stabilized": True},
        {"network_reg_dims": ("img_mlp=8",)},
    ],
)
def test_diffusers_pipeline_does_with_the_file_what_the_trained_model_does(
    changes: dict, qwen: Parts, tmp_path: Path, subtests: pytest.Subtests
) -> None:
    before = outputs(qwen)
    live, files = saved_in_all_layouts(qwen, tmp_path, **changes)
    assert (before - live).abs().max() > 1e-2
    for layout, file in files.items():
        with subtests.test(msg=layout):
            twin = QwenEdit().tiny()
            qwen_pipeline_of(twin).load_lora_weights(file)
            assert (outputs(twin) - live).abs().max() < 1e-6 * max(1.0, float(live.abs().max()))


def test_a_dora_in_diffusers_layout_is_read_by_diffusers(qwen: Parts, qwen_twin: Parts, tmp_path: Path) -> None:
    file = tmp_path / "dora.safetensors"
    live = saved(qwen, file, "dora", "diffusers")
    qwen_pipeline_of(qwen_twin).load_lora_weights(file)
    assert (outputs(qwen_twin) - live).abs().max() < 1e-6 * max(1.0, float(live.abs().max()))


def test_a_file_by_diffusers_own_writer_keeps_an_alpha_other_than_the_rank(qwen: Parts, qwen_twin: Parts, tmp_path: Path) -> None:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "img_mod.1"], init_lora_weights=False)
    qwen.backbone.add_adapter(config)
    live = outputs(qwen)
    assert (live - outputs(qwen_twin)).abs().max() > 1e-2
    QwenImageEditPlusPipeline.save_lora_weights(
        tmp_path, get_peft_model_state_dict(qwen.backbone), transformer_lora_adapter_metadata=config.to_dict()
    )
    file = tmp_path / "pytorch_lora_weights.safetensors"
    assert not any(key.endswith(".alpha") for key in load_file(file))
    assert {adapter.scale for adapter in read(file, qwen_twin).values()} == {2.0}
    merge_into(qwen_twin, file)
    assert (outputs(qwen_twin) - live).abs().max() < 1e-6 * max(1.0, float(live.abs().max()))


STEMS = {
    "musubi-tuner": ("lora_unet_transformer_blocks_0_attn_to_q", "lora_down.weight", "lora_up.weight"),
    "ComfyUI": ("diffusion_model.transformer_blocks.0.attn.to_q", "lora_down.weight", "lora_up.weight"),
    "ai-toolkit": ("diffusion_model.transformer_blocks.0.attn.to_q", "lora_A.weight", "lora_B.weight"),
    "diffusers": ("transformer.transformer_blocks.0.attn.to_q", "lora_A.weight", "lora_B.weight"),
    "qflux": ("transformer.transformer_blocks.0.attn.to_q", "lora.down.weight", "lora.up.weight"),
    "OneTrainer": ("lora_transformer_transformer_blocks_0_attn_to_q", "lora_down.weight", "lora_up.weight"),
    "SimpleTuner": ("lycoris_transformer_blocks_0_attn_to_q", "lora_down.weight", "lora_up.weight"),
    "DiffSynth": ("transformer_blocks.0.attn.to_q", "lora_A.default.weight", "lora_B.default.weight"),
    "peft": ("base_model.model.transformer_blocks.0.attn.to_q", "lora_A.weight", "lora_B.weight"),
}


@pytest.mark.parametrize("writer", STEMS)
def test_a_layer_is_found_under_every_writers_name_and_its_alpha_counts(
    writer: str, qwen: Parts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stem, down, up = STEMS[writer]
    file = tmp_path / "a.safetensors"
    tensors = {f"{stem}.{down}": torch.ones(4, 32), f"{stem}.{up}": torch.ones(32, 4)}
    for alpha, scale in ((None, 1.0), (1.0, 0.25)):
        save_file({**tensors, **({} if alpha is None else {f"{stem}.alpha": torch.tensor(alpha)})}, file)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            found = read(file, qwen)
        assert found.keys() == {LAYER}
        assert found[LAYER].scale == scale
        assert ("does not say its alpha" in caplog.text) == (alpha is None)


def some_keys(architecture: str, layout: str, path: Path) -> Path:
    """A file with the names of an architecture's published model and next to nothing in it."""
    names = names_for(architecture)
    stem_of = {"kohya": names.to_kohya, "diffusers": names.to_diffusers}[layout]
    save_file({f"{stem_of(name)}.lora_A.weight": torch.ones(1, 1) for name in names.layers}, path)
    return path


@pytest.mark.parametrize("layout", ["kohya", "diffusers"])
def test_a_lora_of_another_family_is_named(layout: str, qwen: Parts, flux: Parts, parts: Parts, tmp_path: Path) -> None:
    models, known = {"qwen_edit": qwen, "flux": flux, "sdxl": parts}, architectures()
    for made_for, model in (("flux", "qwen_edit"), ("sdxl", "qwen_edit"), ("qwen_edit", "flux"), ("qwen_edit", "sdxl"), ("sdxl", "flux")):
        file = some_keys(made_for, layout, tmp_path / f"{made_for}.safetensors")
        with pytest.raises(OptionError) as told:
            read(file, models[model])
        assert f"{file.name} is a LoRA for {known[made_for].label}, but the model is {known[model].label}" in str(told.value)


def test_names_that_two_families_share_are_told_apart_by_the_header(qwen: Parts, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    tensors = {f"transformer.{LAYER.removeprefix('backbone.')}.lora_{side}.weight": torch.ones(4, 32) for side in "A"}
    tensors |= {f"transformer.{LAYER.removeprefix('backbone.')}.lora_B.weight": torch.ones(32, 4)}
    save_file(tensors, file, metadata={"modelspec.architecture": "flux-1-dev/lora"})
    with pytest.raises(OptionError, match=r"is a LoRA for FLUX\.1, but the model is Qwen-Image"):
        read(file, qwen)
    save_file(tensors, file, metadata={"ss_base_model_version": "qwen_image_edit"})
    assert read(file, qwen).keys() == {LAYER}


def test_layers_that_nothing_reads_are_left_out_when_training_goes_on_from_a_foreign_file(
    qwen: Parts, qwen_twin: Parts, tmp_path: Path
) -> None:
    file = tmp_path / "a.safetensors"
    rng = torch.Generator().manual_seed(3)
    tensors = {}
    for name, base in layers_of(qwen).items():
        if name.startswith("backbone.transformer_blocks."):
            stem = names_of(qwen).to_kohya(name)
            tensors[f"{stem}.lora_down.weight"] = 0.2 * torch.randn(4, base.in_features, generator=rng)
            tensors[f"{stem}.lora_up.weight"] = 0.2 * torch.randn(base.out_features, 4, generator=rng)
            tensors[f"{stem}.alpha"] = torch.tensor(2.0)
    save_file(tensors, file)
    assert merge_into(qwen_twin, file) == 28
    want = outputs(qwen_twin)
    for dim_from_weights in (False, True):
        network = attached(qwen, options_for(network_weights=str(file), dim_from_weights=dim_from_weights))
        assert len(network.plans) == 24
        assert (outputs(qwen) - want).abs().max() < 1e-6 * max(1.0, float(want.abs().max()))
        network.detach()


@pytest.mark.parametrize(
    ("kind", "qtype"),
    [
        pytest.param(kind, qtype, id=f"{kind}-{name}", marks=() if kind == "lora" or qtype is qint8 else pytest.mark.long)
        for kind in KINDS
        for qtype, name in ((qint8, "qint8"), (qfloat8, "qfloat8"))
    ],
)
def test_training_on_a_quantised_base_has_the_gradients_of_the_base_that_it_stands_for(
    kind: str, qtype: object, qwen: Parts, qwen_twin: Parts
) -> None:
    before = outputs(quantised(qwen, qtype))
    for name, layer in layers_of(qwen_twin).items():
        if name.startswith("backbone."):
            layer.weight.data = layers_of(qwen)[name].weight.dequantize().float()
    gradients = []
    for parts in (qwen, qwen_twin):
        network = attached(parts, options_for(kind))
        if parts is qwen:
            assert (outputs(qwen) - before).abs().max() <= 1e-6 * before.abs().max()
        shaken(network)
        qwen_output(parts, torch.Generator().manual_seed(5)).square().mean().backward()
        gradients.append({key: tensor.grad for key, tensor in network.named_parameters().items()})
    for key, tensor in gradients[0].items():
        assert (tensor - gradients[1][key]).abs().max() <= 1e-5 * gradients[1][key].abs().max() + 1e-8


def test_merging_into_a_quantised_base_is_refused_and_leaves_it_alone(qwen: Parts, qwen_twin: Parts, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    saved(qwen, file)
    before = outputs(quantised(qwen_twin))
    with pytest.raises(OptionError, match="cannot be merged into a quantised model"):
        merge_into(qwen_twin, file)
    assert torch.equal(outputs(qwen_twin), before)


@pytest.mark.parametrize(
    ("kind", "qtype"),
    [
        pytest.param(kind, qtype, id=f"{kind}-{name}", marks=() if kind == "lora" or qtype is qint8 else pytest.mark.long)
        for kind in KINDS
        for qtype, name in ((None, "bf16"), (qint8, "qint8"), (qfloat8, "qfloat8"))
    ],
)
def test_an_adapter_trains_in_float32_on_a_base_in_bf16_with_checkpoints(kind: str, qtype: object, qwen: Parts, qwen_twin: Parts) -> None:
    for layer in layers_of(qwen).values():
        layer.to(torch.bfloat16)
    if qtype is not None:
        quantised(qwen, qtype)
    gradients = []
    for parts in (qwen, qwen_twin):
        network = shaken(attached(parts, options_for(kind)))
        parts.backbone.enable_gradient_checkpointing()
        network.train()
        with torch.autocast("cpu", torch.bfloat16, enabled=parts is qwen):
            qwen_output(parts, torch.Generator().manual_seed(5)).float().square().mean().backward()
        assert {tensor.grad.dtype for tensor in network.parameters()} == {torch.float32}
        gradients.append(torch.cat([tensor.grad.flatten() for tensor in network.parameters()]))
    assert torch.cosine_similarity(*gradients, dim=0) > 0.98


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"train_block_indices": "1", "lora_targets": "image_attention"}, {"1.attn.to_q", "1.attn.to_k", "1.attn.to_v", "1.attn.to_out.0"}),
        ({"target_modules": (r"0\.img_mod",), "lora_targets": "image_attention"}, {"0.img_mod.1"}),
        ({"exclude_modules": ("attn", "mlp")}, {"0.img_mod.1", "0.txt_mod.1", "1.img_mod.1", "1.txt_mod.1"}),
        ({"network_reg_dims": ("attn|mlp|txt=0",)}, {"0.img_mod.1", "1.img_mod.1"}),
    ],
)
def test_options_choose_layers(changes: dict, names: set[str], qwen: Parts) -> None:
    network = attached(qwen, options_for(**changes))
    assert {plan.layer.removeprefix("transformer_blocks.") for plan in network.plans} == names


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train_block_indices": "0-5"}, "this model has 2 such blocks, numbered 0 to 1, so 2 is none"),
        ({"train_block_indices": "none"}, "train_block_indices = none leaves nothing to train"),
        ({"exclude_modules": (".",)}, "leave no layer of the transformer to train"),
        ({"lora_targets": "image_attention", "network_reg_dims": ("img_mod=4",)}, "'img_mod' decides about no layer"),
    ],
)
def test_options_that_leave_nothing_or_do_nothing_are_refused(changes: dict, sentence: str, qwen: Parts) -> None:
    with pytest.raises(OptionError, match=sentence):
        attached(qwen, options_for(**changes))
