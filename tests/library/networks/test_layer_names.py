"""Names and shapes of the full-size models against the lists of kohya's files; no weights are needed for that."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, UNet2DConditionModel, ZImageTransformer2DModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, T5Config, T5EncoderModel

from sd_scripts.families.flux.model import Flux
from sd_scripts.families.flux.options import FluxNetworkOptions
from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.families.qwen_edit.options import QwenImageNetworkOptions
from sd_scripts.families.sd.model import Sd
from sd_scripts.families.sdxl.model import Sdxl
from sd_scripts.families.zimage.model import ZImage
from sd_scripts.families.zimage.options import ZImageNetworkOptions
from sd_scripts.library.adapters.architectures import architectures
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.layer_names import layers_of
from sd_scripts.library.adapters.layers import plan_layers
from sd_scripts.library.adapters.layouts import tensors_of
from sd_scripts.library.adapters.maths import AdapterLayer
from sd_scripts.library.adapters.names import Target, names_for, names_of
from sd_scripts.library.core.protocols import ModelFamily, Parts, StateDict
from sd_scripts.schema.network import NetworkOptions, UNetNetworkOptions

DATA = Path(__file__).parents[2] / "data"


@dataclass(frozen=True)
class Row:
    kohya: str
    own: tuple[str, ...]
    when: str
    down: str
    up: str


def rows(family: str) -> list[Row]:
    lines = gzip.decompress((DATA / f"{family}_lora_layers.tsv.gz").read_bytes()).decode().splitlines()
    fields = [line.split("\t") for line in lines if not line.startswith("#")]
    return [Row(kohya, tuple(own.split(",")), when, down, up) for kohya, own, when, down, up in fields]


@pytest.fixture(scope="module")
def sdxl() -> Parts:
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
        te2 = CLIPTextModelWithProjection(
            CLIPTextConfig(hidden_size=1280, intermediate_size=5120, num_hidden_layers=32, num_attention_heads=20, projection_dim=1280)
        )
        return full_size(Sdxl(), unet, {"te1": clip_l(), "te2": te2})


@pytest.fixture(scope="module")
def flux() -> Parts:
    """FLUX's networks in their real size on the meta device."""
    with torch.device("meta"):
        t5 = T5Config(d_model=4096, d_ff=10240, d_kv=64, num_heads=64, num_layers=24, feed_forward_proj="gated-gelu", vocab_size=32128)
        return full_size(Flux(), FluxTransformer2DModel(guidance_embeds=True), {"te1": clip_l(), "te3": T5EncoderModel(t5)})


@pytest.fixture(scope="module")
def qwen_edit() -> Parts:
    """Qwen-Image's transformer in its real size on the meta device."""
    family = QwenEdit()
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel(joint_attention_dim=3584)
    return full_size(family, transformer, family.tiny().text_encoders)


@pytest.fixture(scope="module")
def zimage() -> Parts:
    """Z-Image's transformer in its real size on the meta device."""
    family = ZImage()
    with torch.device("meta"):
        transformer = ZImageTransformer2DModel()
    return full_size(family, transformer, family.tiny().text_encoders)


def stable_diffusion(second: bool) -> Parts:
    """The networks of SD 1.5 or 2.1 in their real size on the meta device."""
    with torch.device("meta"):
        unet = UNet2DConditionModel(
            sample_size=64,
            cross_attention_dim=1024 if second else 768,
            attention_head_dim=(5, 10, 20, 20) if second else 8,
            use_linear_projection=second,
        )
        clip_h = CLIPTextConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=23, num_attention_heads=16, hidden_act="gelu")
        return full_size(Sd(), unet, {"te1": CLIPTextModel(clip_h) if second else clip_l()})


def clip_l() -> nn.Module:
    return CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12))


def full_size(family: ModelFamily, backbone: nn.Module, encoders: dict[str, nn.Module]) -> Parts:
    return replace(family.tiny(), backbone=backbone, text_encoders=encoders)


def written(family: ModelFamily, parts: Parts, options: NetworkOptions) -> dict[str, str]:
    """Keys and shapes of the kohya file of a fresh adapter."""
    network = attach(parts, options, family.adapter_targets(parts, options.wants_convolutions), seed=0)
    # Numbers in place of the meta device's nothing, from which layouts cannot tell whether layers share a matrix.
    numbers = {key: torch.zeros(1).expand(tensor.shape) for key, tensor in network.state().items()}
    found = keys_and_shapes(*tensors_of(network.adapters(numbers), network.names, "kohya", torch.float16))
    network.detach()
    return found


def keys_and_shapes(tensors: StateDict, _: dict[str, str]) -> dict[str, str]:
    return {name: str(list(tensor.shape)).replace(" ", "") for name, tensor in tensors.items()}


def expected(listed: list[Row]) -> dict[str, str]:
    found = {}
    for row in listed:
        found |= {f"{row.kohya}.lora_down.weight": row.down, f"{row.kohya}.lora_up.weight": row.up, f"{row.kohya}.alpha": "[]"}
    return found


def test_sdxl_of_rank_16_has_exactly_the_keys_and_shapes_of_kohyas_files(sdxl: Parts) -> None:
    options = UNetNetworkOptions(network_dim=16, train_text_encoder=True)
    assert written(Sdxl(), sdxl, options) == expected([row for row in rows("sdxl") if row.when == "default"])


def test_sdxl_with_convolutions_has_exactly_the_keys_and_shapes_of_kohyas_files(sdxl: Parts) -> None:
    options = UNetNetworkOptions(network_dim=16, conv_dim=16)
    unet = [row for row in rows("sdxl") if row.when != "never" and row.own[0].startswith("backbone.")]
    assert written(Sdxl(), sdxl, options) == expected(unet)


def test_flux_of_rank_16_has_exactly_the_keys_and_shapes_of_kohyas_files(flux: Parts) -> None:
    listed = rows("flux")
    plain = FluxNetworkOptions(network_dim=16, train_text_encoder=True)
    planned = plan_layers(flux, plain, Flux().adapter_targets(flux, False), names_of(flux))
    assert {(plan.name, plan.rank) for plan in planned} == {(name, 16) for row in listed if row.when == "default" for name in row.own}
    everything = FluxNetworkOptions(network_dim=16, train_text_encoder=True, train_t5xxl=True, in_dims=(16, 16, 16, 16, 16))
    found = written(Flux(), flux, everything)
    assert found == expected([row for row in listed if row.when != "never"])
    assert len(found) == 3 * (304 + 72 + 168 + 8)


def test_qwen_image_of_rank_16_has_exactly_the_keys_and_shapes_of_musubis_files(qwen_edit: Parts) -> None:
    listed = rows("qwen_edit")
    assert len(listed) == 840
    bases = layers_of(qwen_edit)
    whole = {name: rank_16(bases[name]) for row in listed for name in row.own}
    assert keys_and_shapes(*tensors_of(whole, names_of(qwen_edit), "kohya", torch.float16)) == expected(listed)
    options = QwenImageNetworkOptions(network_dim=16, lora_targets="all_with_modulation")
    assert written(QwenEdit(), qwen_edit, options) == expected([row for row in listed if row.when == "default"])


def test_zimage_of_rank_16_has_exactly_the_keys_and_shapes_of_musubis_files(zimage: Parts) -> None:
    listed = rows("zimage")
    assert len(listed) == 210
    assert written(ZImage(), zimage, ZImageNetworkOptions(network_dim=16)) == expected(listed)


@pytest.mark.parametrize(("targets", "count"), [("attention", 120), ("attention_and_mlp", 210), ("all", 210 + 30 + 4 * 7 + 2)])
def test_lora_targets_of_zimage_choose_kinds_of_layers(targets: str, count: int, zimage: Parts) -> None:
    options = ZImageNetworkOptions(lora_targets=targets)
    assert len(plan_layers(zimage, options, ZImage().adapter_targets(zimage, False), names_of(zimage))) == count


def rank_16(base: nn.Module) -> AdapterLayer:
    """A lora of rank 16 that takes no memory."""
    zero = torch.zeros(1)
    tensors = {"lora_A.weight": zero.expand(16, base.in_features), "lora_B.weight": zero.expand(base.out_features, 16)}
    return AdapterLayer("lora", tensors)


@pytest.mark.parametrize(
    ("targets", "count"), [("image_attention", 240), ("attention", 480 - 2), ("all", 720 - 4), ("all_with_modulation", 840 - 4)]
)
def test_lora_targets_choose_kinds_of_layers_and_never_those_that_nothing_reads(targets: str, count: int, qwen_edit: Parts) -> None:
    options = QwenImageNetworkOptions(lora_targets=targets)
    planned = plan_layers(qwen_edit, options, QwenEdit().adapter_targets(qwen_edit, False), names_of(qwen_edit))
    assert len(planned) == count
    assert not names_of(qwen_edit).idle & {plan.name for plan in planned}
    assert len(names_of(qwen_edit).idle) == 4


def test_flux_with_matrices_of_their_own_has_three_and_four_times_the_rank(flux: Parts) -> None:
    options = FluxNetworkOptions(network_dim=16, train_blocks="single", train_single_block_indices="0", split_qkv=True)
    network = attach(flux, options, Flux().adapter_targets(flux, False), seed=0)
    ranks = [plan.rank for plan in network.plans]
    numbers = {key: torch.full(tensor.shape, float(at)) for at, (key, tensor) in enumerate(network.state().items())}
    tensors, _ = tensors_of(network.adapters(numbers), network.names, "kohya", torch.float16)
    network.detach()
    assert ranks == [16] * 6
    assert tensors["lora_unet_single_blocks_0_linear1.lora_down.weight"].shape == (64, 3072)
    assert tensors["lora_unet_single_blocks_0_linear1.lora_up.weight"].shape == (21504, 64)
    assert tensors["lora_unet_single_blocks_0_linear1.alpha"] == 64


@pytest.mark.parametrize(("second", "encoder"), [(False, 12), (True, 23)])
def test_stable_diffusion_has_as_many_layers_as_kohyas_files_under_diffusers_own_paths(second: bool, encoder: int) -> None:
    parts = stable_diffusion(second)
    found = written(Sd(), parts, UNetNetworkOptions(network_dim=16, train_text_encoder=True))
    layers = {key.partition(".")[0] for key in found}
    assert sum(layer.startswith("lora_unet_") for layer in layers) == 192
    assert sum(layer.startswith("lora_te_text_model_encoder_layers_") for layer in layers) == 6 * encoder
    assert found["lora_unet_mid_block_attentions_0_proj_in.lora_down.weight"] == ("[16,1280]" if second else "[16,1280,1,1]")
    attention = "lora_unet_up_blocks_3_attentions_2_transformer_blocks_0_attn2_to_k.lora_down.weight"
    assert found[attention] == ("[16,1024]" if second else "[16,768]")
    wide = written(Sd(), parts, UNetNetworkOptions(network_dim=16, conv_dim=8))
    # 22 ResNets of two convolutions and a time embedding, 14 of them with a shortcut, 3 down- and 3 upsamplers.
    assert len(wide) == 3 * (192 + 3 * 22 + 14 + 3 + 3)
    assert wide["lora_unet_down_blocks_0_downsamplers_0_conv.lora_down.weight"] == "[8,320,3,3]"
    assert names_of(parts).num_blocks == 25


@pytest.mark.parametrize("family", ["sdxl", "flux", "qwen_edit", "zimage"])
def test_every_listed_name_translates_to_kohyas_and_back(family: str, request: pytest.FixtureRequest) -> None:
    names = names_of(request.getfixturevalue(family))
    for row in rows(family):
        for own in row.own:
            assert names.to_kohya(own) == row.kohya
            assert names.from_diffusers(names.to_diffusers(own)) == Target((own,))
            assert names.find(names.to_lycoris(own)) is not None
            assert names.from_comfyui(names.to_comfyui(own)) == names.from_kohya(row.kohya)
        assert names.from_kohya(row.kohya).layers == row.own


@pytest.mark.parametrize("family", ["sd1", "sd2", "sdxl", "flux", "qwen_edit", "zimage"])
def test_a_family_alone_gives_the_names_of_its_published_model(family: str, request: pytest.FixtureRequest) -> None:
    parts = stable_diffusion(family == "sd2") if family.startswith("sd") and family != "sdxl" else request.getfixturevalue(family)
    known, loaded = names_for(family), names_of(parts)
    assert known.architecture.name == loaded.architecture.name == family
    assert known.layers == loaded.layers
    assert known.num_blocks == loaded.num_blocks
    for name in known.layers:
        assert known.to_kohya(name) == loaded.to_kohya(name)
        assert known.fused(name) == loaded.fused(name)


def test_a_backbone_and_a_kind_of_file_belong_to_one_architecture() -> None:
    known = architectures()
    assert len({file for one in known.values() for file in one.files}) == sum(len(one.files) for one in known.values())
    for one in known.values():
        part = one.spec.parts["backbone"]
        config = json.loads((one.spec.configs / part.folder / "config.json").read_text(encoding="utf-8"))
        same_class = [other for other in known.values() if other.spec.parts["backbone"].class_name == part.class_name]
        assert [other.name for other in same_class if other.is_backbone(config)] == [one.name]


def test_a_folder_of_configurations_gives_the_names_of_its_model(tmp_path: Path) -> None:
    tiny = Flux().tiny()
    tiny.backbone.save_config(tmp_path / "transformer")
    for name, folder in (("te1", "text_encoder"), ("te3", "text_encoder_2")):
        tiny.text_encoders[name].config.architectures = [type(tiny.text_encoders[name]).__name__]
        tiny.text_encoders[name].config.save_pretrained(tmp_path / folder)
    assert names_for("flux", tmp_path).layers == names_of(tiny).layers
    edit = QwenEdit().tiny()
    edit.backbone.save_config(tmp_path / "transformer")
    assert names_for("qwen_edit", tmp_path).layers == names_of(edit).layers


def test_rows_of_a_fused_target_are_given_in_order_and_size() -> None:
    names = names_for("flux")
    single = names.from_kohya("lora_unet_single_blocks_7_linear1")
    assert [layer.removeprefix("backbone.single_transformer_blocks.7.") for layer in single.layers] == [
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "proj_mlp",
    ]
    assert single.sizes(21504) == [3072, 3072, 3072, 12288]
    assert names.fused(single.layers[3]) == single
    assert names.fused("backbone.single_transformer_blocks.7.proj_out") is None
    assert names.fused("backbone.norm_out.linear").swapped


def test_a_name_of_another_model_is_not_found(sdxl: Parts, flux: Parts) -> None:
    assert names_of(sdxl).find("lora_unet_double_blocks_0_img_attn_qkv") is None
    assert names_of(sdxl).find("transformer.transformer_blocks.0.attn.to_q") is None
    assert names_of(flux).find("lora_unet_middle_block_1_proj_in") is None
    assert names_of(flux).find("lora_unet_double_blocks_19_img_attn_qkv") is None
    qwen = names_for("qwen_edit")
    assert qwen.find("transformer.transformer_blocks.60.attn.to_q") is None
    assert qwen.find("transformer.single_transformer_blocks.0.attn.to_q") is None
    assert qwen.find("lora_te1_text_model_encoder_layers_0_mlp_fc1") is None


def test_comfyuis_names_are_its_original_paths(sdxl: Parts, flux: Parts) -> None:
    for names, own, comfyui in (
        (names_of(sdxl), "backbone.mid_block.attentions.0.proj_in", "diffusion_model.middle_block.1.proj_in"),
        (names_of(sdxl), "te1.encoder.layers.0.mlp.fc1", "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1"),
        (names_of(sdxl), "te2.text_model.encoder.layers.0.mlp.fc1", "text_encoders.clip_g.transformer.text_model.encoder.layers.0.mlp.fc1"),
        (names_of(flux), "backbone.transformer_blocks.3.attn.to_k", "diffusion_model.double_blocks.3.img_attn.qkv"),
        (names_of(flux), "te1.encoder.layers.0.mlp.fc1", "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1"),
        (
            names_of(flux),
            "te3.encoder.block.0.layer.0.SelfAttention.q",
            "text_encoders.t5xxl.transformer.encoder.block.0.layer.0.SelfAttention.q",
        ),
        (names_for("qwen_edit"), "backbone.transformer_blocks.3.img_mod.1", "diffusion_model.transformer_blocks.3.img_mod.1"),
        (names_for("sd1"), "backbone.mid_block.attentions.0.proj_in", "diffusion_model.middle_block.1.proj_in"),
        (names_for("sd1"), "te1.encoder.layers.0.mlp.fc1", "text_encoders.clip_l.transformer.text_model.encoder.layers.0.mlp.fc1"),
        (names_for("sd2"), "te1.encoder.layers.0.mlp.fc1", "text_encoders.clip_h.transformer.text_model.encoder.layers.0.mlp.fc1"),
    ):
        assert names.to_comfyui(own) == comfyui
        assert own in names.from_comfyui(comfyui).layers


def test_the_first_text_encoder_is_read_with_and_without_a_number_where_there_is_one_clip() -> None:
    layer = "text_model_encoder_layers_0_mlp_fc1"
    for family in ("sd1", "sd2", "flux"):
        names = names_for(family)
        assert names.from_kohya(f"lora_te_{layer}") == names.from_kohya(f"lora_te1_{layer}") == Target(("te1.encoder.layers.0.mlp.fc1",))
    assert names_for("sdxl").from_kohya(f"lora_te_{layer}") is None
    # OneTrainer counts FLUX's T5 as the second encoder.
    t5 = "encoder_block_0_layer_0_SelfAttention_q"
    assert names_for("flux").from_kohya(f"lora_te2_{t5}") == names_for("flux").from_kohya(f"lora_te3_{t5}")


def test_blocks_are_numbered_as_in_kohyas_block_lists(sdxl: Parts) -> None:
    names = names_of(sdxl)
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
    first = names_for("sd1")
    for name, block in (
        ("backbone.down_blocks.0.attentions.0.proj_in", 1),
        ("backbone.down_blocks.2.downsamplers.0.conv", 9),
        ("backbone.mid_block.attentions.0.proj_in", 12),
        ("backbone.up_blocks.3.attentions.2.proj_in", 24),
    ):
        assert first.block(name) == block
    transformer = names_for("flux")
    assert transformer.num_blocks == 57
    assert transformer.block("backbone.transformer_blocks.18.ff.net.2") == 18
    assert transformer.block("backbone.single_transformer_blocks.0.proj_out") == 19
    assert transformer.block("backbone.x_embedder") is None
    edit = names_for("qwen_edit")
    assert edit.num_blocks == 60
    assert edit.block("backbone.transformer_blocks.59.txt_mod.1") == 59
    assert edit.block("backbone.img_in") is None


@pytest.mark.parametrize(
    ("family", "layer", "kohya"),
    [
        ("sdxl", "backbone.mid_block.attentions.0.proj_in", "lora_unet_middle_block_1_proj_in"),
        ("sdxl", "te1.encoder.layers.0.mlp.fc1", "lora_te1_text_model_encoder_layers_0_mlp_fc1"),
        ("sd2", "backbone.mid_block.attentions.0.proj_in", "lora_unet_mid_block_attentions_0_proj_in"),
        ("sd2", "te1.encoder.layers.0.mlp.fc1", "lora_te_text_model_encoder_layers_0_mlp_fc1"),
        ("flux", "backbone.transformer_blocks.3.ff_context.net.2", "lora_unet_double_blocks_3_txt_mlp_2"),
        ("flux", "backbone.single_transformer_blocks.0.attn.to_q", "lora_unet_single_blocks_0_linear1"),
        ("flux", "te1.encoder.layers.0.mlp.fc1", "lora_te1_text_model_encoder_layers_0_mlp_fc1"),
        ("flux", "te3.encoder.block.5.layer.1.DenseReluDense.wi_0", "lora_te3_encoder_block_5_layer_1_DenseReluDense_wi_0"),
    ],
)
def test_a_layer_has_the_name_that_kohyas_files_give_it(family: str, layer: str, kohya: str) -> None:
    assert names_for(family).to_kohya(layer) == kohya
