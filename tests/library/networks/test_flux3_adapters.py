"""Files of FLUX.3: diffusers' own conversions and pipeline on what is written here, at full size by names and shapes, small by numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import Flux3Transformer2DModel
from diffusers.loaders.lora_conversion_utils import _convert_non_diffusers_flux3_lora_to_diffusers
from diffusers.loaders.single_file_utils import convert_flux3_transformer_checkpoint_to_diffusers
from safetensors.torch import load_file, save_file

from sd_scripts.families.flux3.loading import LOADER, SPEC, transformer_config
from sd_scripts.families.flux3.model import Flux3
from sd_scripts.families.flux3.options import Flux3ModelOptions
from sd_scripts.library.adapters.names import names_for
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.common import read_json
from sd_scripts.library.loading.layouts import places, shape_to_original
from sd_scripts.schema.errors import OptionError
from tests.library.families.test_flux3_family import pipeline_of
from tests.library.loading_in_small import to_original
from tests.library.networks.adapters_in_small import near, saved, velocity

FLUX3, CPU = Flux3(), torch.device("cpu")


@pytest.fixture
def parts() -> Parts:
    return FLUX3.tiny()


def test_a_published_file_of_full_size_becomes_what_diffusers_makes_of_it() -> None:
    with torch.device("meta"):
        model = Flux3Transformer2DModel.from_config(read_json(SPEC.configs / "transformer" / "config.json", "model"))
    own = model.state_dict()
    placed = places(SPEC.parts["backbone"].layout, own, model.config)
    published = {
        stored.name: torch.empty(shape_to_original(stored, tuple(own[key].shape)), device="meta") for key, stored in placed.items()
    }
    # Five blocks for text, image and reference images each, 28 joint ones, and 13 matrices around them.
    assert len(published) == len(own) == 8 * (3 * 5 + 28) + 13
    assert sum(tensor.numel() for tensor in own.values()) == pytest.approx(5.54e9, rel=2e-3)
    config = transformer_config({name: tuple(tensor.shape) for name, tensor in published.items()})
    assert {key: value for key, value in config.items() if key != "_class_name" and model.config.get(key) != value} == {}
    assert config == transformer_config({name: tuple(tensor.shape) for name, tensor in own.items()})
    found = convert_flux3_transformer_checkpoint_to_diffusers(published)
    assert {key: tensor.shape for key, tensor in found.items()} == {key: tensor.shape for key, tensor in own.items()}


def test_a_published_file_has_the_numbers_that_diffusers_reads(parts: Parts) -> None:
    state = parts.backbone.state_dict()
    placed = places(SPEC.parts["backbone"].layout, state, parts.backbone.config)
    found = convert_flux3_transformer_checkpoint_to_diffusers(to_original(placed, state))
    assert found.keys() == state.keys() and all(torch.equal(found[key], tensor) for key, tensor in state.items())


def test_every_layer_of_full_size_has_a_name_that_diffusers_converts() -> None:
    names = names_for("flux3")
    layers = [name for name in names.layers if names.block(name) is not None]
    keys = {f"{names.to_comfyui(name)}.lora_A.weight" for name in layers}
    found = {
        key.removeprefix("transformer.").removesuffix(".lora_A.weight")
        for key in _convert_non_diffusers_flux3_lora_to_diffusers(dict.fromkeys(keys))
    }
    assert len(layers) == 6 * (3 * 5 + 28) and found == {name.removeprefix("backbone.") for name in layers}
    assert names.num_blocks == 5 + 28 and names.block("backbone.single_transformer_blocks.0.attn.to_q") == 5


@pytest.mark.parametrize(("prefix", "scaled"), [("", True), pytest.param("model.diffusion_model.", False, marks=pytest.mark.long)])
def test_comfyuis_files_are_read(prefix: str, scaled: bool, parts: Parts, tmp_path: Path) -> None:
    """A transformer with VAE and text encoder beside it; scaled: fp8 with a scale for each matrix."""
    FLUX3.save(parts, tmp_path / "model", "diffusers", None, {})
    state = parts.backbone.state_dict()
    placed = places(SPEC.parts["backbone"].layout, state, parts.backbone.config)
    held = {f"{prefix}{name}": tensor for name, tensor in to_original(placed, state).items()}
    held[f"{prefix}repa_projectors.0.weight"] = torch.zeros(2, 2)
    if scaled:
        for name in [name for name, tensor in held.items() if tensor.dim() == 2 and "blocks" in name]:
            scale = held[name].abs().max() / 448
            held |= {name: (held[name] / scale).to(torch.float8_e4m3fn), name.replace(".weight", ".weight_scale"): scale.float()}
    vae = places(SPEC.parts["vae"].layout, parts.vae.state_dict(), parts.vae.config)
    encoder = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in parts.text_encoders["te1"].state_dict().items()
    }
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, tmp_path / "model" / "klein.safetensors")
    save_file(to_original(vae, parts.vae.state_dict()), tmp_path / "model" / "vae" / "flux2-vae.safetensors")
    save_file({name: tensor.clone() for name, tensor in encoder.items()}, tmp_path / "model" / "text_encoder" / "qwen3vl_4b.safetensors")
    options = Flux3ModelOptions(
        pretrained_model_name_or_path=str(tmp_path / "model" / "klein.safetensors"),
        vae=str(tmp_path / "model" / "vae" / "flux2-vae.safetensors"),
        text_encoder=str(tmp_path / "model" / "text_encoder" / "qwen3vl_4b.safetensors"),
    )
    found = LOADER.load(options, CPU, torch.float32)
    for name, module in parts.modules().items():
        inexact, state = scaled and name == "backbone", found.modules()[name].state_dict()
        for key, tensor in module.state_dict().items():
            torch.testing.assert_close(state[key], tensor, atol=0.01 * inexact, rtol=0.07 * inexact)


@pytest.mark.parametrize("single", [False, True])
def test_the_distilled_flow_map_is_refused_with_a_sentence(single: bool, parts: Parts, tmp_path: Path) -> None:
    config = {key: value for key, value in parts.backbone.config.items() if not key.startswith("_")}
    parts.backbone = Flux3Transformer2DModel.from_config(config | {"flow_map": True})
    FLUX3.save(parts, tmp_path / "model", "diffusers", None, {})
    given = {"pretrained_model_name_or_path": str(tmp_path / "model")}
    if single:
        FLUX3.save(parts, tmp_path / "model" / "klein.safetensors", "safetensors", None, {})
        given = {"pretrained_model_name_or_path": str(tmp_path / "model" / "klein.safetensors")}
        given |= {"vae": str(tmp_path / "model" / "vae"), "text_encoder": str(tmp_path / "model" / "text_encoder")}
    with pytest.raises(OptionError, match=r"is the distilled FLUX\.3 Image Klein, a flow map.*flux-3-image-klein-base"):
        LOADER.load(Flux3ModelOptions(**given), CPU, torch.float32)


@pytest.mark.parametrize("layout", ["diffusers", "comfyui"])
def test_diffusers_pipeline_does_with_the_file_what_the_trained_model_does(layout: str, parts: Parts, tmp_path: Path) -> None:
    live, before = saved(FLUX3, parts, tmp_path / "lora.safetensors", layout), velocity(FLUX3, parts)
    pipeline_of(parts).load_lora_weights(tmp_path / "lora.safetensors")
    assert (before - live).abs().max() > 1e-2 and near(velocity(FLUX3, parts), live)


def test_comfyuis_names_are_those_of_the_published_file(parts: Parts, tmp_path: Path) -> None:
    saved(FLUX3, parts, tmp_path / "lora.safetensors", "comfyui")
    state = parts.backbone.state_dict()
    published = to_original(places(SPEC.parts["backbone"].layout, state, parts.backbone.config), state)
    stems = {name.removeprefix("diffusion_model.").split(".lora_")[0] for name in load_file(tmp_path / "lora.safetensors")}
    assert {f"{stem}.weight" for stem in stems} <= published.keys()
    assert {"content_mode_blocks.image_cond.0.q_proj", "txt_mode_blocks.0.attn_out", "single_blocks.1.mlp_in"} <= stems
