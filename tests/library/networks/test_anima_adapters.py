"""Files of Anima: diffusers' own conversion and readers on what is written here, at full size by names, small by numbers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from diffusers import AnimaTextConditioner
from diffusers.loaders.single_file_utils import convert_cosmos_transformer_checkpoint_to_diffusers as by_diffusers
from safetensors.torch import load_file, save_file

from sd_scripts.families.anima.loading import LOADER, SPEC, transformer_config
from sd_scripts.families.anima.model import Anima
from sd_scripts.families.anima.network import made
from sd_scripts.families.anima.options import AnimaModelOptions, AnimaNetworkOptions
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.merge import merge_into
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.common import read_json
from sd_scripts.library.loading.layouts import places, shape_to_original
from sd_scripts.schema.errors import OptionError
from tests.anima_in_diffusers import pipeline_of, without_torchvision
from tests.library.loading_in_small import assert_same
from tests.library.networks.adapters_in_small import near, saved, velocity

ANIMA = Anima()


@pytest.fixture
def parts() -> Parts:
    return ANIMA.tiny()


def test_a_published_file_of_full_size_becomes_what_diffusers_makes_of_it() -> None:
    with torch.device("meta"):
        model = made(read_json(SPEC.configs / "transformer" / "config.json", "model"))
        conditioner = AnimaTextConditioner.from_config(read_json(SPEC.configs / "text_conditioner" / "config.json", "model"))
    own = model.state_dict()
    placed = places(SPEC.parts["backbone"].layout, own, model.config)
    held = {stored.name: torch.empty(shape_to_original(stored, tuple(own[key].shape)), device="meta") for key, stored in placed.items()}
    assert sum(tensor.numel() for tensor in own.values()) == 1_956_405_248 and len(own) == len(held) == 567
    assert sum(weight.numel() for weight in conditioner.parameters()) == 134_663_680 and len(conditioner.state_dict()) == 118
    assert {"blocks.27.cross_attn.output_proj.weight", "blocks.0.adaln_modulation_mlp.2.weight", "x_embedder.proj.1.weight"} <= held.keys()
    for tensors in (held, own):
        config = transformer_config({name: tuple(tensor.shape) for name, tensor in tensors.items()})
        assert {key: value for key, value in config.items() if key != "_class_name" and _plain(model.config.get(key)) != value} == {}
    found = by_diffusers({f"net.{name}": tensor for name, tensor in held.items()})
    assert {key: tensor.shape for key, tensor in found.items()} == {key: tensor.shape for key, tensor in own.items()}


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("prefix", ["net.", "", "model.diffusion_model."])
def test_files_of_the_transformer_are_read_with_the_conditioner_in_them(prefix: str, parts: Parts, tmp_path: Path) -> None:
    """With VAE and text encoder beside them, whose file has its head, and with numbers of positions that some writers keep."""
    ANIMA.save(parts, tmp_path / "model", "diffusers", None, {})
    ANIMA.save(parts, tmp_path / "published.safetensors", "safetensors", None, {})
    held = {name.removeprefix("net."): tensor for name, tensor in load_file(tmp_path / "published.safetensors").items()}
    assert {"blocks.2.mlp.layer2.weight", "llm_adapter.blocks.1.cross_attn.k_norm.weight", "llm_adapter.embed.weight"} <= held.keys()
    held["pos_embedder.seq"] = torch.arange(8.0)
    words = {f"model.{name}": tensor for name, tensor in parts.text_encoders["te1"].state_dict().items()}
    words["lm_head.weight"] = words["model.embed_tokens.weight"].clone()
    file, encoder = tmp_path / "model" / "anima.safetensors", tmp_path / "model" / "text_encoder" / "qwen_3_06b_base.safetensors"
    save_file({f"{prefix}{name}": tensor.clone() for name, tensor in held.items()}, file)
    save_file(words, encoder)
    vae = str(tmp_path / "model" / "vae")
    found = loaded(pretrained_model_name_or_path=str(file), vae=vae, text_encoder=str(encoder))
    assert_same(found, parts)


def loaded(**given: str) -> Parts:
    return LOADER.load(AnimaModelOptions(**given), torch.device("cpu"), torch.float32)


def test_a_conditioner_of_its_own_takes_the_place_of_the_models(parts: Parts, tmp_path: Path) -> None:
    """A file of it alone, or of a whole transformer."""
    other = copy.deepcopy(parts)
    for weight in other.text_encoders["te2"].parameters():
        weight.data.normal_()
    ANIMA.save(parts, tmp_path / "model", "diffusers", None, {})
    ANIMA.save(other, tmp_path / "model" / "text_conditioner" / "whole.safetensors", "safetensors", None, {})
    alone = tmp_path / "model" / "text_conditioner" / "llm_adapter.safetensors"
    save_file({name: tensor.clone() for name, tensor in other.text_encoders["te2"].state_dict().items()}, alone)
    for file in (alone, alone.with_name("whole.safetensors")):
        found = loaded(pretrained_model_name_or_path=str(tmp_path / "model"), text_conditioner=str(file))
        wanted = other.text_encoders["te2"].state_dict()
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.text_encoders["te2"].state_dict().items())
    with pytest.raises(OptionError, match=r"a text conditioner of Anima alone; you chose Anima.*goes into text_conditioner"):
        loaded(pretrained_model_name_or_path=str(alone))


@pytest.mark.parametrize("layout", ["diffusers", "comfyui"])
def test_diffusers_does_with_the_file_what_the_trained_model_does(layout: str, parts: Parts, tmp_path: Path) -> None:
    live, before = saved(ANIMA, parts, tmp_path / "lora.safetensors", layout), velocity(ANIMA, parts)
    pipeline = pipeline_of(parts)
    pipeline.load_lora_weights(tmp_path / "lora.safetensors")
    theirs = copy.copy(parts)
    theirs.backbone = Called(pipeline.transformer)
    with without_torchvision():
        assert (before - live).abs().max() > 1e-2 and near(velocity(ANIMA, theirs), live)


class Called(torch.nn.Module):
    """diffusers' own transformer, called as ours."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, latents: torch.Tensor, timestep: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(1, 1, 8 * latents.shape[-2], 8 * latents.shape[-1])
        found: torch.Tensor = self.network(latents[:, :, None], timestep, text, padding_mask=mask, return_dict=False)[0]
        return found[:, :, 0]


@pytest.mark.parametrize(
    "stem", ["lora_unet_llm_adapter_blocks_1_cross_attn_q_proj", "diffusion_model.llm_adapter.blocks.1.cross_attn.q_proj"]
)
def test_adapters_of_other_trainers_on_the_conditioner_are_merged(stem: str, parts: Parts, tmp_path: Path) -> None:
    down, up = torch.randn(2, 32), torch.randn(32, 2)
    endings = ("lora_down.weight", "lora_up.weight") if stem.startswith("lora") else ("lora_A.weight", "lora_B.weight")
    save_file(dict(zip((f"{stem}.{ending}" for ending in endings), (down, up))), tmp_path / "lora.safetensors")
    layer = parts.text_encoders["te2"].blocks[1].cross_attn.q_proj
    before = layer.weight.clone()
    assert merge_into(parts, tmp_path / "lora.safetensors") == 1
    assert torch.allclose(layer.weight, before + up @ down, atol=1e-5)


def test_the_usual_targets_are_those_of_other_trainers() -> None:
    names = set(load_names("attention_and_mlp"))
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "v_proj", "output_proj", "layer1", "layer2"}
    assert len(names) == 3 * 10 and len(load_names("all")) == 3 * 16


def load_names(targets: str) -> list[str]:
    parts = ANIMA.tiny()
    network = attach(parts, AnimaNetworkOptions(lora_targets=targets), ANIMA.adapter_targets(parts, False), 0)
    return [network.names.to_comfyui(plan.name) for plan in network.plans]


def test_a_lora_of_sd_scripts_is_on_the_text_encoder_too_and_is_merged_but_not_trained_on(parts: Parts, tmp_path: Path) -> None:
    held = {"lora_unet_blocks_0_mlp_layer1": parts.backbone.transformer_blocks[0].ff.net[0].proj}
    held["lora_te_layers_1_self_attn_q_proj"] = parts.text_encoders["te1"].layers[1].self_attn.q_proj
    tensors = {}
    for stem, layer in held.items():
        rows, columns = layer.weight.shape
        tensors |= {f"{stem}.lora_down.weight": torch.randn(2, columns), f"{stem}.lora_up.weight": torch.randn(rows, 2)}
        tensors[f"{stem}.alpha"] = torch.tensor(1.0)
    save_file(tensors, tmp_path / "lora.safetensors", {"ss_network_module": "networks.lora_anima"})
    targets = ANIMA.adapter_targets(parts, False)
    options = AnimaNetworkOptions(network_weights=str(tmp_path / "lora.safetensors"), dim_from_weights=True)
    with pytest.raises(OptionError, match=r"holds layers of the text encoders, which are not trained here\. Name the file in base_weights"):
        attach(parts, options, targets, 0)
    wanted = {
        stem: layer.weight + tensors[f"{stem}.lora_up.weight"] @ tensors[f"{stem}.lora_down.weight"] / 2 for stem, layer in held.items()
    }
    assert merge_into(parts, tmp_path / "lora.safetensors") == 2
    for stem, layer in held.items():
        torch.testing.assert_close(layer.weight, wanted[stem])
