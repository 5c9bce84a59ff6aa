"""Files of Qwen-Image-2.1: diffusers' own conversion and pipeline on what is written here, at full size by names, small by numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import QwenImage21Pipeline, QwenImage21Transformer2DModel
from diffusers.loaders.single_file_utils import convert_qwen_image21_transformer_checkpoint_to_diffusers as by_diffusers
from safetensors.torch import save_file

from sd_scripts.families.common.samplers import scheduler_for
from sd_scripts.families.qwen_image21.loading import LOADER, SPEC, transformer_config
from sd_scripts.families.qwen_image21.model import QwenImage21
from sd_scripts.families.qwen_image21.options import QwenImage21ModelOptions
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.common import read_json
from sd_scripts.library.loading.layouts import places, shape_to_original
from tests.library.loading_in_small import assert_same, to_original
from tests.library.networks.adapters_in_small import near, saved, velocity
from tests.small_models import Words

QWEN = QwenImage21()


@pytest.fixture
def parts() -> Parts:
    return QWEN.tiny()


def test_a_comfyui_file_of_full_size_becomes_what_diffusers_makes_of_it() -> None:
    with torch.device("meta"):
        model = QwenImage21Transformer2DModel.from_config(read_json(SPEC.configs / "transformer" / "config.json", "model"))
    own = model.state_dict()
    placed = places(SPEC.parts["backbone"].layout, own, model.config)
    fused = {stored.name: torch.empty(shape_to_original(stored, tuple(own[key].shape)), device="meta") for key, stored in placed.items()}
    assert sum(tensor.numel() for tensor in own.values()) == pytest.approx(7.12e9, rel=2e-3) and len(own) - len(fused) == 32
    config = transformer_config({name: tuple(tensor.shape) for name, tensor in fused.items()})
    assert {key: value for key, value in config.items() if key != "_class_name" and _plain(model.config.get(key)) != value} == {}
    found = by_diffusers({f"model.diffusion_model.{name}": tensor for name, tensor in fused.items()})
    assert {key: tensor.shape for key, tensor in found.items()} == {key: tensor.shape for key, tensor in own.items()}


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def test_a_comfyui_file_has_the_numbers_that_diffusers_reads(parts: Parts) -> None:
    state = parts.backbone.state_dict()
    found = by_diffusers(to_original(places(SPEC.parts["backbone"].layout, state, parts.backbone.config), state))
    assert found.keys() == state.keys() and all(torch.equal(found[key], tensor) for key, tensor in state.items())


@pytest.mark.covering
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_files_of_the_transformer_alone_are_read(prefix: str, fused: bool, parts: Parts, tmp_path: Path) -> None:
    """Fused as ComfyUI has them or not, with VAE and text encoder beside them, under ComfyUI's names."""
    QWEN.save(parts, tmp_path / "model", "diffusers", None, {})
    state = parts.backbone.state_dict()
    held = to_original(places(SPEC.parts["backbone"].layout, state, parts.backbone.config), state) if fused else state
    encoder = parts.text_encoders["te1"]
    words = to_original(places(SPEC.parts["te1"].layout, encoder.state_dict(), {}), encoder.state_dict())
    assert {"model.layers.0.self_attn.q_proj.weight", "visual.blocks.0.attn.qkv.weight"} <= words.keys()
    save_file({f"{prefix}{name}": tensor.contiguous() for name, tensor in held.items()}, tmp_path / "model" / "qwen21.safetensors")
    save_file({name: tensor.clone() for name, tensor in words.items()}, tmp_path / "model" / "text_encoder" / "qwen3vl.safetensors")
    options = QwenImage21ModelOptions(
        pretrained_model_name_or_path=str(tmp_path / "model" / "qwen21.safetensors"),
        vae=str(tmp_path / "model" / "vae"),
        text_encoder=str(tmp_path / "model" / "text_encoder" / "qwen3vl.safetensors"),
    )
    found = LOADER.load(options, torch.device("cpu"), torch.float32)
    assert_same(found, parts)


@pytest.mark.parametrize("layout", ["diffusers", "comfyui"])
def test_diffusers_pipeline_does_with_the_file_what_the_trained_model_does(layout: str, parts: Parts, tmp_path: Path) -> None:
    live, before = saved(QWEN, parts, tmp_path / "lora.safetensors", layout), velocity(QWEN, parts)
    pipeline = QwenImage21Pipeline(
        scheduler_for("auto", parts.scheduler_config),
        parts.vae,
        parts.text_encoders["te1"],
        Words(parts.tokenizers["te1"]),
        parts.backbone,
    )
    pipeline.load_lora_weights(tmp_path / "lora.safetensors")
    assert (before - live).abs().max() > 1e-2 and near(velocity(QWEN, parts), live)
