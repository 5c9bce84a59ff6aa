"""Names and shapes of the full-size model against the lists of kohya's files; no weights are needed for that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from diffusers import UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from sd_scripts.library.families.sdxl import Sdxl
from sd_scripts.library.networks import attach, names_of
from sd_scripts.library.networks.layouts import tensors_of
from sd_scripts.library.networks.names import Target, kohya_keys
from sd_scripts.library.protocols import Parts
from sd_scripts.schema.network import UNetNetworkOptions

LIST = Path(__file__).parents[2] / "data" / "sdxl_lora_layers.tsv"


@dataclass(frozen=True)
class Row:
    kohya: str
    own: str
    when: str
    down: str
    up: str


def rows() -> list[Row]:
    return [Row(*line.split("\t")) for line in LIST.read_text().splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module")
def full_size() -> Parts:
    """SDXL's networks in their real size on the meta device: shapes without numbers."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(
            sample_size=128,
            block_out_channels=(320, 640, 1280),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            layers_per_block=2,
            transformer_layers_per_block=(1, 2, 10),
            attention_head_dim=(5, 10, 20),
            cross_attention_dim=2048,
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=256,
            projection_class_embeddings_input_dim=2816,
        )
        te1 = CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12))
        te2 = CLIPTextModelWithProjection(
            CLIPTextConfig(hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20, projection_dim=1280)
        )
    tiny = Sdxl().tiny()
    return Parts(unet, tiny.vae, {"te1": te1, "te2": te2}, tiny.tokenizers, tiny.path, tiny.kind, tiny.scheduler_config, "full size")


def written(parts: Parts, options: UNetNetworkOptions) -> dict[str, str]:
    """Keys and shapes of the kohya file of a fresh adapter."""
    conv = options.conv_dim is not None
    network = attach(parts, options, Sdxl().adapter_targets(parts, conv), seed=0)
    tensors, _ = tensors_of(network.adapters(), network.names, "kohya", torch.float16)
    network.detach()
    return {name: str(list(tensor.shape)).replace(" ", "") for name, tensor in tensors.items()}


def expected(listed: list[Row]) -> dict[str, str]:
    found = {}
    for row in listed:
        found |= {f"{row.kohya}.lora_down.weight": row.down, f"{row.kohya}.lora_up.weight": row.up, f"{row.kohya}.alpha": "[]"}
    return found


def test_rank_16_of_unet_and_text_encoders_has_exactly_the_keys_and_shapes_of_kohyas_files(full_size: Parts) -> None:
    options = UNetNetworkOptions(network_dim=16, train_text_encoder=True)
    assert written(full_size, options) == expected([row for row in rows() if row.when == "default"])


def test_rank_16_with_convolutions_has_exactly_the_keys_and_shapes_of_kohyas_files(full_size: Parts) -> None:
    options = UNetNetworkOptions(network_dim=16, conv_dim=16)
    assert written(full_size, options) == expected([row for row in rows() if row.when != "never" and row.own.startswith("backbone.")])


def test_every_listed_name_translates_to_kohyas_and_back(full_size: Parts) -> None:
    names = names_of(full_size)
    for row in rows():
        assert names.to_kohya(row.own) == row.kohya
        assert names.from_kohya(row.kohya) == Target((row.own,))
        assert names.from_diffusers(names.to_diffusers(row.own)) == Target((row.own,))


def test_a_name_of_another_model_is_not_found(full_size: Parts) -> None:
    names = names_of(full_size)
    assert names.from_kohya("lora_unet_double_blocks_0_img_attn_qkv") is None
    assert names.from_diffusers("transformer.transformer_blocks.0.attn.to_q") is None


def test_text_encoder_1_gets_back_the_level_that_transformers_5_dropped(full_size: Parts) -> None:
    names = names_of(full_size)
    assert names.to_kohya("te1.encoder.layers.0.mlp.fc1") == "lora_te1_text_model_encoder_layers_0_mlp_fc1"
    assert names.to_kohya("te2.text_model.encoder.layers.0.mlp.fc1") == "lora_te2_text_model_encoder_layers_0_mlp_fc1"


def test_blocks_are_numbered_as_in_kohyas_block_lists(full_size: Parts) -> None:
    names = names_of(full_size)
    assert names.num_blocks == 19
    for name, block in (
        ("backbone.conv_in", 0),
        ("backbone.down_blocks.1.attentions.0.proj_in", 4),
        ("backbone.down_blocks.2.resnets.1.conv2", 8),
        ("backbone.mid_block.attentions.0.proj_out", 9),
        ("backbone.up_blocks.0.resnets.0.conv1", 10),
        ("backbone.up_blocks.0.upsamplers.0.conv", 12),
        ("backbone.up_blocks.2.resnets.2.conv1", 18),
        ("backbone.time_embedding.linear_1", None),
        ("te1.encoder.layers.0.mlp.fc1", None),
    ):
        assert names.block(name) == block


def test_a_state_is_renamed_key_by_key() -> None:
    state = {
        "backbone.mid_block.attentions.0.proj_in.lora_A.weight": torch.zeros(1),
        "te1.encoder.layers.0.mlp.fc1.lora_B.weight": torch.zeros(2),
    }
    assert sorted(kohya_keys("sdxl", state)) == [
        "lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_up.weight",
        "lora_unet_middle_block_1_proj_in.lora_down.weight",
    ]
