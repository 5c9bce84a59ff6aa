"""Files of FLUX.2: diffusers' own conversions and pipeline on what is written here, at full size by names and shapes, small by numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import Flux2KleinPipeline, Flux2Transformer2DModel
from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers
from safetensors.torch import load_file, save_file

from sd_scripts.families.common.flux2_loading import transformer_config
from sd_scripts.families.common.samplers import scheduler_for
from sd_scripts.families.flux2.loading import LOADER, SPEC
from sd_scripts.families.flux2.model import Flux2
from sd_scripts.families.flux2.options import KleinModelOptions
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.common import read_json
from sd_scripts.library.loading.layouts import places, shape_to_original
from sd_scripts.schema.errors import OptionError
from tests.library.loading_in_small import to_original
from tests.library.networks.adapters_in_small import LAYOUTS, near, saved, velocity

FLUX2 = Flux2()
SIZES = {"klein_4b": (5, 20, 3.88e9), "klein_9b": (8, 24, 9.08e9)}
"""Double and single blocks, and numbers, of the published models."""


@pytest.fixture
def parts() -> Parts:
    return FLUX2.tiny()


def on_meta(version: str) -> Flux2Transformer2DModel:
    with torch.device("meta"):
        return Flux2Transformer2DModel.from_config(read_json(SPEC.configs.parent / version / "transformer" / "config.json", "model"))


@pytest.mark.parametrize("version", SIZES)
def test_a_published_file_of_full_size_becomes_what_diffusers_makes_of_it(version: str) -> None:
    model = on_meta(version)
    own = model.state_dict()
    placed = places(SPEC.parts["backbone"].layout, own, model.config)
    published = {
        stored.name: torch.empty(shape_to_original(stored, tuple(own[key].shape)), device="meta") for key, stored in placed.items()
    }
    double, single, numbers = SIZES[version]
    assert len(published) == 9 + 12 * double + 4 * single and len(own) > len(published)
    assert sum(tensor.numel() for tensor in own.values()) == pytest.approx(numbers, rel=2e-3)
    shapes = {name: tuple(tensor.shape) for name, tensor in published.items()}
    config = transformer_config(shapes) | {"out_channels": None}
    assert {key: value for key, value in config.items() if key != "_class_name" and model.config.get(key) != value} == {}
    found = convert_flux2_transformer_checkpoint_to_diffusers(published)
    assert {key: tensor.shape for key, tensor in found.items()} == {key: tensor.shape for key, tensor in own.items()}


def test_a_published_file_has_the_numbers_that_diffusers_reads(parts: Parts) -> None:
    state = parts.backbone.state_dict()
    placed = places(SPEC.parts["backbone"].layout, state, parts.backbone.config)
    found = convert_flux2_transformer_checkpoint_to_diffusers(to_original(placed, state))
    assert found.keys() == state.keys() and all(torch.equal(found[key], tensor) for key, tensor in state.items())


@pytest.mark.parametrize(
    ("prefix", "scaled"),
    [
        pytest.param(prefix, scaled, marks=[pytest.mark.long] * ((number + scaled) % 2))
        for number, prefix in enumerate(("", "model.diffusion_model.", "diffusion_model."))
        for scaled in (False, True)
    ],
)
def test_comfyuis_files_are_read(prefix: str, scaled: bool, parts: Parts, tmp_path: Path) -> None:
    """A transformer with VAE and text encoder beside it; scaled: fp8 with a scale for each matrix."""
    FLUX2.save(parts, tmp_path / "model", "diffusers", None, {})
    placed = places(SPEC.parts["backbone"].layout, parts.backbone.state_dict(), parts.backbone.config)
    held = {f"{prefix}{name}": tensor for name, tensor in to_original(placed, parts.backbone.state_dict()).items()}
    if scaled:
        for name in [name for name, tensor in held.items() if tensor.dim() == 2 and "blocks" in name]:
            scale = held[name].abs().max() / 448
            held |= {
                name: (held[name] / scale).to(torch.float8_e4m3fn),
                name.replace(".weight", ".weight_scale"): scale.float(),
            }
    vae = places(SPEC.parts["vae"].layout, parts.vae.state_dict(), parts.vae.config)
    encoder = {f"model.{name}": tensor for name, tensor in parts.text_encoders["te1"].state_dict().items()}
    # Beside the configuration of the small model, as single files of odd sizes are.
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, tmp_path / "model" / "klein.safetensors")
    save_file(to_original(vae, parts.vae.state_dict()), tmp_path / "model" / "vae" / "flux2-vae.safetensors")
    save_file(encoder, tmp_path / "model" / "text_encoder" / "qwen_3_4b.safetensors")
    options = KleinModelOptions(
        pretrained_model_name_or_path=str(tmp_path / "model" / "klein.safetensors"),
        vae=str(tmp_path / "model" / "vae" / "flux2-vae.safetensors"),
        text_encoder=str(tmp_path / "model" / "text_encoder" / "qwen_3_4b.safetensors"),
    )
    found = LOADER.load(options, torch.device("cpu"), torch.float32)
    for name, module in parts.modules().items():
        inexact, state = scaled and name == "backbone", found.modules()[name].state_dict()
        for key, tensor in module.state_dict().items():
            torch.testing.assert_close(state[key], tensor, atol=0.01 * inexact, rtol=0.07 * inexact)


def test_dev_is_refused_with_a_sentence(parts: Parts, tmp_path: Path) -> None:
    config = dict(parts.backbone.config) | {"guidance_embeds": True}
    parts.backbone = Flux2Transformer2DModel.from_config(config)
    FLUX2.save(parts, tmp_path / "model", "diffusers", None, {})
    with pytest.raises(OptionError, match=r"embeds a guidance scale, so it is FLUX\.2 dev"):
        LOADER.load(KleinModelOptions(pretrained_model_name_or_path=str(tmp_path / "model")), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("changes", [{}, {"rank_stabilized": True}])
def test_diffusers_pipeline_does_with_the_file_what_the_trained_model_does(
    layout: str, changes: dict, parts: Parts, tmp_path: Path
) -> None:
    live, before = saved(FLUX2, parts, tmp_path / "lora.safetensors", layout, **changes), velocity(FLUX2, parts)
    pipeline = Flux2KleinPipeline(
        scheduler_for("auto", parts.scheduler_config), parts.vae, parts.text_encoders["te1"], parts.tokenizers["te1"], parts.backbone
    )
    pipeline.load_lora_weights(tmp_path / "lora.safetensors")
    assert (before - live).abs().max() > 1e-2 and near(velocity(FLUX2, parts), live)


def test_comfyuis_names_are_those_of_the_published_file(parts: Parts, tmp_path: Path) -> None:
    saved(FLUX2, parts, tmp_path / "lora.safetensors", "comfyui")
    published = to_original(places(SPEC.parts["backbone"].layout, (state := parts.backbone.state_dict()), parts.backbone.config), state)
    stems = {
        name.removeprefix("diffusion_model.").split(".lora_")[0].removesuffix(".alpha") for name in load_file(tmp_path / "lora.safetensors")
    }
    assert {f"{stem}.weight" for stem in stems} <= published.keys() and {"double_blocks.0.img_attn.qkv", "single_blocks.1.linear1"} <= stems
