"""The original single-file layouts of SD 1.x, SD 2.x and SDXL, both ways, against diffusers' own converters."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline
from diffusers.loaders.single_file_utils import (
    convert_ldm_unet_checkpoint,
    convert_ldm_vae_checkpoint,
    convert_open_clip_checkpoint,
    infer_diffusers_model_type,
)
from safetensors.torch import load_file

import sd_scripts.toy
from sd_scripts.families import family
from sd_scripts.families.common import original_unet as original
from sd_scripts.families.sd import loading as sd
from sd_scripts.families.sdxl import loading as sdxl
from sd_scripts.families.sdxl.options import SdxlModelOptions
from sd_scripts.library.loading import common, layouts
from sd_scripts.library.loading.common import FamilySpec
from sd_scripts.library.loading.writing import original_tensors
from tests.library.loading_in_small import shipped_configs, to_original
from tests.small_models import pipeline_of

TOY = Path(sd_scripts.toy.__file__).parent / "bases" / "sdxl"
PUBLISHED = {
    "sd1": (sd.SPEC, {"backbone": 686, "vae": 248, "te1": 196}, 1130, "v1"),
    # The file has the 24th layer of the text encoder, its projection and scale as well; q, k and v are one tensor.
    "sd2": (sd.SPEC2, {"backbone": 686, "vae": 248, "te1": 372}, 1228, "v2"),
    "sdxl": (sdxl.SPEC, {"backbone": 1680, "vae": 248, "te1": 196, "te2": 517}, 2513, "xl_base"),
}
"""Numbers of tensors of each network and of the single file, and what diffusers calls it."""


@dataclass(frozen=True)
class FullSize:
    """The published networks without memory for weights."""

    spec: FamilySpec
    networks: dict[str, torch.nn.Module]

    def places(self, name: str) -> dict[str, layouts.Stored]:
        module = self.networks[name]
        return layouts.places(self.spec.parts[name].layout, module.state_dict(), common.config_of(module))

    def original(self, name: str) -> dict[str, torch.Tensor]:
        tensors = original_tensors(self.spec.parts[name], self.networks[name], None, self.spec.parts[name].prefixes[0])
        return {key: torch.empty(tensor.shape, device="meta") for key, tensor in tensors.items()}


def full_size_of(spec: FamilySpec) -> FullSize:
    with torch.device("meta"):
        return FullSize(spec, {name: common.make(spec, name, config, name, name) for name, config in shipped_configs(spec)})


@pytest.fixture(scope="module", params=PUBLISHED)
def published(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def full_size(published) -> FullSize:
    return full_size_of(PUBLISHED[published][0])


def test_the_full_size_model_has_the_published_number_of_tensors(published, full_size):
    _, numbers, in_file, kind = PUBLISHED[published]
    assert {name: len(module.state_dict()) for name, module in full_size.networks.items()} == numbers
    file = {key: tensor for name in full_size.networks for key, tensor in full_size.original(name).items()}
    assert len(file) == in_file
    assert infer_diffusers_model_type(file) == kind


def test_there_and_back_is_the_identity_on_full_size_names_and_shapes(full_size):
    for name, module in full_size.networks.items():
        part, state, file = full_size.spec.parts[name], module.state_dict(), full_size.original(name)
        placed = full_size.places(name)
        for key, stored in placed.items():
            tensor = file[part.prefixes[0] + stored.name]
            assert layouts.shape_to_original(stored, tuple(state[key].shape)) == tuple(tensor.shape)
            assert layouts.from_original(stored, tensor).shape == state[key].shape
            assert layouts.shape_from_original(stored, tuple(tensor.shape)) == tuple(state[key].shape)
        again = to_original(placed, {key: layouts.from_original(one, file[part.prefixes[0] + one.name]) for key, one in placed.items()})
        extras = part.extras(common.config_of(module))
        assert {part.prefixes[0] + key: tensor.shape for key, tensor in again.items()} == {
            key: tensor.shape for key, tensor in file.items() if key.removeprefix(part.prefixes[0]) not in extras
        }


def test_diffusers_reads_the_full_size_layout_as_the_same_names_and_shapes(full_size):
    for name, convert in (("backbone", convert_ldm_unet_checkpoint), ("vae", convert_ldm_vae_checkpoint)):
        state, module = full_size.networks[name].state_dict(), full_size.networks[name]
        theirs = convert(full_size.original(name), common.config_of(module))
        assert {key: t.shape for key, t in theirs.items()} == {key: t.shape for key, t in state.items()}


def test_diffusers_reads_the_full_size_text_encoder_of_sd2_as_the_same_names_and_shapes():
    full_size = full_size_of(sd.SPEC2)
    theirs = convert_open_clip_checkpoint(full_size.networks["te1"], full_size.original("te1"), prefix="cond_stage_model.model.")
    state = full_size.networks["te1"].state_dict()
    # diffusers has the names of transformers before 5.6, and the projection that CLIPTextModel does not take.
    theirs = {key.removeprefix("text_model."): tensor.shape for key, tensor in theirs.items() if key != "text_projection.weight"}
    assert theirs == {key: tensor.shape for key, tensor in state.items()}


def test_known_places_of_the_published_sdxl_file():
    full_size = full_size_of(sdxl.SPEC)
    names = {key: stored.name for key, stored in full_size.places("backbone").items()}
    assert (
        names["down_blocks.1.attentions.0.transformer_blocks.1.attn2.to_k.weight"]
        == "input_blocks.4.1.transformer_blocks.1.attn2.to_k.weight"
    )
    assert names["down_blocks.0.downsamplers.0.conv.bias"] == "input_blocks.3.0.op.bias"
    assert names["mid_block.resnets.1.time_emb_proj.weight"] == "middle_block.2.emb_layers.1.weight"
    assert names["up_blocks.0.upsamplers.0.conv.weight"] == "output_blocks.2.2.conv.weight"
    assert names["up_blocks.2.resnets.2.conv_shortcut.weight"] == "output_blocks.8.0.skip_connection.weight"
    file = full_size.original("te2")
    assert file["conditioner.embedders.1.model.transformer.resblocks.31.attn.in_proj_weight"].shape == (3840, 1280)
    assert file["conditioner.embedders.1.model.positional_embedding"].shape == (77, 1280)


def test_known_places_of_the_published_sd_files():
    first, second = full_size_of(sd.SPEC), full_size_of(sd.SPEC2)
    names = {key: stored.name for key, stored in first.places("backbone").items()}
    assert names["up_blocks.0.upsamplers.0.conv.weight"] == "output_blocks.2.1.conv.weight"
    assert names["up_blocks.3.attentions.2.proj_out.weight"] == "output_blocks.11.1.proj_out.weight"
    assert names["down_blocks.3.resnets.1.conv2.bias"] == "input_blocks.11.0.out_layers.3.bias"
    assert "cond_stage_model.transformer.text_model.encoder.layers.11.mlp.fc2.weight" in first.original("te1")
    file = second.original("te1")
    assert file["cond_stage_model.model.transformer.resblocks.23.attn.in_proj_weight"].shape == (3072, 1024)
    assert file["cond_stage_model.model.text_projection"].shape == (1024, 1024)
    assert file["cond_stage_model.model.logit_scale"].shape == ()


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
        layouts.places(original.unet, ["conv_in.lora_A.weight2", "strange.weight"], dict(module.config))
    with pytest.raises(KeyError, match="no place in the original layout"):
        layouts.places(original.open_clip, ["strange.weight"], {"hidden_size": 4})
