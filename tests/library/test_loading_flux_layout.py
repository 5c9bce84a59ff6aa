"""The layout of published FLUX files, both ways, against diffusers' own converters."""

import pytest
import torch
from diffusers import FluxTransformer2DModel
from diffusers.loaders.single_file_utils import convert_flux_transformer_checkpoint_to_diffusers, convert_ldm_vae_checkpoint

from sd_scripts.families import family
from sd_scripts.families.common import original_unet as original
from sd_scripts.families.common import pooled_original
from sd_scripts.families.flux import loading as flux
from sd_scripts.library.loading import layouts
from sd_scripts.library.loading.common import config_of, read_json
from tests.library.loading_in_small import to_original


@pytest.fixture(scope="module", params=["dev", "schnell"])
def published(request) -> FluxTransformer2DModel:
    """The published transformer without memory for weights."""
    config = read_json((flux.DEV if request.param == "dev" else flux.SCHNELL) / "transformer" / "config.json", "")
    with torch.device("meta"):
        return FluxTransformer2DModel.from_config(config)


def test_there_and_back_is_the_identity_on_full_size_names_and_shapes(published):
    state = published.state_dict()
    placed = layouts.places(pooled_original.transformer, state, published.config)
    file = to_original(placed, state)
    # Published flux1-dev has 780 tensors; schnell lacks the four of the guidance embedding.
    assert (len(state), len(file)) == ((1160, 780) if published.config.guidance_embeds else (1156, 776))
    for key, stored in placed.items():
        assert layouts.from_original(stored, file[stored.name]).shape == state[key].shape
        assert layouts.shape_from_original(stored, tuple(file[stored.name].shape)) == tuple(state[key].shape)


def test_diffusers_reads_the_full_size_layout_as_the_same_names_and_shapes(published):
    state = published.state_dict()
    file = to_original(layouts.places(pooled_original.transformer, state, published.config), state)
    theirs = convert_flux_transformer_checkpoint_to_diffusers(dict(file))
    assert {key: t.shape for key, t in theirs.items()} == {key: t.shape for key, t in state.items()}


def test_the_configuration_follows_from_the_tensors_of_either_layout(published):
    state = published.state_dict()
    file = to_original(layouts.places(pooled_original.transformer, state, published.config), state)
    for tensors in (file, state):
        config = pooled_original.config_of({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        made = {key: value for key, value in config.items() if key != "_class_name"}
        wanted = {key: published.config[key] for key in made} | {"out_channels": 64, "axes_dims_rope": [16, 56, 56]}
        assert made == wanted


def test_known_places_of_the_published_file(published):
    state = published.state_dict()
    file = to_original(layouts.places(pooled_original.transformer, state, published.config), state)
    assert file["double_blocks.18.txt_attn.qkv.weight"].shape == (9216, 3072)
    assert file["single_blocks.37.linear1.weight"].shape == (21504, 3072)
    assert file["single_blocks.37.linear2.weight"].shape == (3072, 15360)
    assert file["final_layer.adaLN_modulation.1.weight"].shape == (6144, 3072)
    assert file["double_blocks.0.img_attn.norm.query_norm.scale"].shape == (128,)


def test_diffusers_converter_puts_every_number_where_ours_does():
    """The converter knows one width only, so: one block of each kind at that width, narrow elsewhere."""
    config = {"num_layers": 1, "num_single_layers": 1, "in_channels": 4, "joint_attention_dim": 8, "pooled_projection_dim": 8}
    with torch.device("meta"):
        model = FluxTransformer2DModel(**config, guidance_embeds=True)
    state = {key: torch.empty_like(t, device="cpu", dtype=torch.float16) for key, t in model.state_dict().items()}
    for number, tensor in enumerate(state.values()):
        # Rows numbered through: enough to see every permutation, and quick to make.
        tensor.copy_((torch.arange(len(tensor)) % 1999 + number).view(-1, *[1] * (tensor.ndim - 1)))
    theirs = convert_flux_transformer_checkpoint_to_diffusers(
        to_original(layouts.places(pooled_original.transformer, state, model.config), state)
    )
    assert theirs.keys() == state.keys()
    assert all(torch.equal(theirs[key], state[key]) for key in state)


def test_the_autoencoder_has_the_published_layout():
    config = read_json(flux.DEV / "vae" / "config.json", "")
    with torch.device("meta"):
        vae = flux.SPEC.parts["vae"].make(config)
    state = vae.state_dict()
    file = to_original(layouts.places(original.vae, state, vae.config), state)
    assert len(file) == 244 and file["encoder.conv_out.weight"].shape == (32, 512, 3, 3) and "quant_conv.weight" not in file
    assert file["decoder.up.0.block.0.nin_shortcut.weight"].shape == (128, 256, 1, 1)
    theirs = convert_ldm_vae_checkpoint({f"first_stage_model.{key}": t for key, t in file.items()}, dict(vae.config))
    assert {key: t.shape for key, t in theirs.items()} == {key: t.shape for key, t in state.items()}


def test_the_published_text_encoders_have_the_published_number_of_tensors():
    with torch.device("meta"):
        made = {
            name: flux.SPEC.parts[name].make(read_json(flux.DEV / flux.SPEC.parts[name].folder / "config.json", ""))
            for name in ("te1", "te3")
        }
    # T5-XXL files have 219 tensors; the network counts the shared embedding twice.
    assert {name: len(module.state_dict()) for name, module in made.items()} == {"te1": 196, "te3": 220}


def test_a_name_without_a_place_is_an_error():
    for name in ("strange.weight", "transformer_blocks.0.strange.weight"):
        with pytest.raises(KeyError, match="no place in the original layout"):
            layouts.places(pooled_original.transformer, [name], config_of(family("flux").tiny().backbone))
