"""Files of Krea 2: diffusers' own conversion and pipeline on what is written here, at full size by names, small by numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import Krea2Pipeline
from diffusers.loaders.single_file_utils import convert_krea2_transformer_checkpoint_to_diffusers as by_diffusers
from safetensors.torch import save_file

from sd_scripts.families.common.samplers import scheduler_for
from sd_scripts.families.krea2.loading import LOADER, SPEC, transformer_config
from sd_scripts.families.krea2.model import Krea2
from sd_scripts.families.krea2.network import made
from sd_scripts.families.krea2.options import Krea2ModelOptions
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.common import read_json
from sd_scripts.library.loading.layouts import places, shape_to_original
from tests.library.loading_in_small import assert_same, to_original
from tests.library.networks.adapters_in_small import near, saved, velocity

KREA = Krea2()


@pytest.fixture
def parts() -> Parts:
    return KREA.tiny()


def test_a_published_file_of_full_size_becomes_what_diffusers_makes_of_it() -> None:
    with torch.device("meta"):
        model = made(read_json(SPEC.configs / "transformer" / "config.json", "model"))
    own = model.state_dict()
    placed = places(SPEC.parts["backbone"].layout, own, model.config)
    held = {stored.name: torch.empty(shape_to_original(stored, tuple(own[key].shape)), device="meta") for key, stored in placed.items()}
    assert sum(tensor.numel() for tensor in own.values()) == pytest.approx(12.82e9, rel=1e-3) and len(own) == len(held)
    assert {"blocks.27.attn.gate.weight", "txtfusion.refiner_blocks.1.mlp.down.weight", "last.modulation.lin"} <= held.keys()
    for tensors in (held, own):
        config = transformer_config({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        assert {key: value for key, value in config.items() if key != "_class_name" and _plain(model.config.get(key)) != value} == {}
    found = by_diffusers({f"model.diffusion_model.{name}": tensor for name, tensor in held.items()})
    assert {key: tensor.shape for key, tensor in found.items()} == {key: tensor.shape for key, tensor in own.items()}


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("published", [False, True])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_files_of_the_transformer_alone_are_read(prefix: str, published: bool, parts: Parts, tmp_path: Path) -> None:
    """Under Krea's names or diffusers', with VAE and text encoder beside them, under ComfyUI's names."""
    for name, tensor in parts.backbone.named_parameters():
        if "scale_shift_table" in name:
            tensor.data.normal_()
    KREA.save(parts, tmp_path / "model", "diffusers", None, {})
    state = parts.backbone.state_dict()
    original = to_original(places(SPEC.parts["backbone"].layout, state, parts.backbone.config), state)
    again = by_diffusers(dict(original))
    assert again.keys() == state.keys() and all(torch.equal(again[key], tensor) for key, tensor in state.items())
    held, encoder = original if published else state, parts.text_encoders["te1"]
    words = to_original(places(SPEC.parts["te1"].layout, encoder.state_dict(), {}), encoder.state_dict())
    assert {"model.layers.0.self_attn.q_proj.weight", "visual.blocks.0.attn.qkv.weight"} <= words.keys()
    save_file({f"{prefix}{name}": tensor.clone() for name, tensor in held.items()}, tmp_path / "model" / "krea2.safetensors")
    save_file({name: tensor.clone() for name, tensor in words.items()}, tmp_path / "model" / "text_encoder" / "qwen3vl.safetensors")
    options = Krea2ModelOptions(
        pretrained_model_name_or_path=str(tmp_path / "model" / "krea2.safetensors"),
        vae=str(tmp_path / "model" / "vae"),
        text_encoder=str(tmp_path / "model" / "text_encoder" / "qwen3vl.safetensors"),
    )
    found = LOADER.load(options, torch.device("cpu"), torch.float32)
    assert_same(found, parts)


@pytest.mark.parametrize("layout", ["diffusers", "comfyui"])
def test_diffusers_pipeline_does_with_the_file_what_the_trained_model_does(layout: str, parts: Parts, tmp_path: Path) -> None:
    live, before = saved(KREA, parts, tmp_path / "lora.safetensors", layout), velocity(KREA, parts)
    pipeline = Krea2Pipeline(
        scheduler_for("auto", parts.scheduler_config), parts.vae, parts.text_encoders["te1"], parts.tokenizers["te1"], parts.backbone
    )
    pipeline.load_lora_weights(tmp_path / "lora.safetensors")
    assert (before - live).abs().max() > 1e-2 and near(velocity(KREA, parts), live)
