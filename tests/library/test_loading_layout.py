"""The original single-file layout of SDXL, both ways, against diffusers' own converters."""

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint, convert_ldm_vae_checkpoint, infer_diffusers_model_type
from safetensors.torch import load_file

import sd_scripts.toy
from sd_scripts.library.families import family
from sd_scripts.library.loading import common, original, sdxl
from sd_scripts.schema.model import SdxlModelOptions
from tests.small_models import pipeline_of

TOY = Path(sd_scripts.toy.__file__).parent / "bases" / "sdxl"


@pytest.fixture(scope="module")
def full_size() -> dict[str, torch.nn.Module]:
    """The published SDXL networks without memory for weights."""
    with torch.device("meta"):
        return {name: common.make(sdxl.SPEC, name, config, name, name) for name, config in common.shipped_configs(sdxl.SPEC)}


def places(name: str, module: torch.nn.Module) -> dict[str, original.Stored]:
    return original.places(sdxl.SPEC.parts[name].layout, module.state_dict(), common.config_of(module))


def to_original(name: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return original.to_original(places(name, module), module.state_dict(), sdxl.SPEC.parts[name].prefixes[0])


def test_the_full_size_model_has_the_published_number_of_tensors(full_size):
    assert {name: len(module.state_dict()) for name, module in full_size.items()} == {"backbone": 1680, "vae": 248, "te1": 196, "te2": 517}
    file = {key: t for name, module in full_size.items() for key, t in to_original(name, module).items()}
    assert len(file) == 2513
    assert infer_diffusers_model_type(file) == "xl_base"


def test_there_and_back_is_the_identity_on_full_size_names_and_shapes(full_size):
    for name, module in full_size.items():
        state, file = module.state_dict(), to_original(name, module)
        for key, stored in places(name, module).items():
            tensor = file[sdxl.SPEC.parts[name].prefixes[0] + stored.name]
            assert original.shape_to_original(stored, tuple(state[key].shape)) == tuple(tensor.shape)
            assert original.from_original(stored, tensor).shape == state[key].shape
            assert original.shape_from_original(stored, tuple(tensor.shape)) == tuple(state[key].shape)


def test_diffusers_reads_the_full_size_layout_as_the_same_names_and_shapes(full_size):
    for name, convert in (("backbone", convert_ldm_unet_checkpoint), ("vae", convert_ldm_vae_checkpoint)):
        state = full_size[name].state_dict()
        theirs = convert(to_original(name, full_size[name]), common.config_of(full_size[name]))
        assert {key: t.shape for key, t in theirs.items()} == {key: t.shape for key, t in state.items()}


def test_known_places_of_the_published_file(full_size):
    names = {key: stored.name for key, stored in places("backbone", full_size["backbone"]).items()}
    assert (
        names["down_blocks.1.attentions.0.transformer_blocks.1.attn2.to_k.weight"]
        == "input_blocks.4.1.transformer_blocks.1.attn2.to_k.weight"
    )
    assert names["down_blocks.0.downsamplers.0.conv.bias"] == "input_blocks.3.0.op.bias"
    assert names["mid_block.resnets.1.time_emb_proj.weight"] == "middle_block.2.emb_layers.1.weight"
    assert names["up_blocks.0.upsamplers.0.conv.weight"] == "output_blocks.2.2.conv.weight"
    assert names["up_blocks.2.resnets.2.conv_shortcut.weight"] == "output_blocks.8.0.skip_connection.weight"
    file = to_original("te2", full_size["te2"])
    assert file["conditioner.embedders.1.model.transformer.resblocks.31.attn.in_proj_weight"].shape == (3840, 1280)
    assert file["conditioner.embedders.1.model.positional_embedding"].shape == (77, 1280)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_diffusers_loads_our_single_file_without_any_difference(tmp_path: Path, dtype):
    parts = family("sdxl").tiny()
    pipeline_of(parts).save_pretrained(tmp_path)
    file = tmp_path / "one.safetensors"
    family("sdxl").save(parts, file, "safetensors", dtype, {})
    theirs = StableDiffusionXLPipeline.from_single_file(str(file), config=str(tmp_path), local_files_only=True, torch_dtype=torch.float32)
    ours = family("sdxl").load(SdxlModelOptions(pretrained_model_name_or_path=str(file)), torch.device("cpu"), torch.float32)
    networks = {"backbone": theirs.unet, "vae": theirs.vae, "te1": theirs.text_encoder, "te2": theirs.text_encoder_2}
    for name, module in networks.items():
        state, wanted = ours.modules()[name].state_dict(), module.state_dict()
        assert state.keys() == wanted.keys()
        assert all(torch.equal(state[key], wanted[key]) for key in state), name
    assert {tensor.dtype for tensor in load_file(file).values()} == {dtype}


def test_the_toy_base_survives_the_single_file_exactly(tmp_path: Path):
    toy = family("sdxl").load(SdxlModelOptions(pretrained_model_name_or_path="toy"), torch.device("cpu"), torch.float32)
    assert toy.source == "toy" and toy.kind == "v_prediction"
    shutil.copytree(TOY, tmp_path / "toy", ignore=shutil.ignore_patterns("*.safetensors"))
    file = tmp_path / "toy" / "one.safetensors"
    family("sdxl").save(toy, file, "safetensors", None, {})
    again = family("sdxl").load(SdxlModelOptions(pretrained_model_name_or_path=str(file)), torch.device("cpu"), torch.float32)
    assert (again.kind, again.scheduler_config, again.settings) == (toy.kind, toy.scheduler_config, toy.settings)
    for name, module in toy.modules().items():
        state = again.modules()[name].state_dict()
        assert all(torch.equal(tensor, state[key]) for key, tensor in module.state_dict().items()), name


def test_a_name_without_a_place_is_an_error():
    module = family("sdxl").tiny().backbone
    with pytest.raises(KeyError, match="no place in the original layout"):
        original.places(original.unet, ["conv_in.lora_A.weight2", "strange.weight"], dict(module.config))
    with pytest.raises(KeyError, match="no place in the original layout"):
        original.places(original.open_clip, ["strange.weight"], {"hidden_size": 4})
