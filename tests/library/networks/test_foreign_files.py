"""Files that other trainers wrote, by the names that they use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sd_scripts.library.adapters.files import read
from sd_scripts.library.adapters.names import names_for, names_of
from sd_scripts.library.adapters.reading import adapters_of
from sd_scripts.library.core.protocols import Parts
from sd_scripts.schema.errors import OptionError

RANK = 2
DOWN_UP = ("lora_down.weight", "lora_up.weight")
A_B = ("lora_A.weight", "lora_B.weight")

# What is written for (a layer's path in diffusers, its path in the original layout), by whom.
SDXL_STEMS: dict[str, tuple[Callable[[str, str], str], tuple[str, str]]] = {
    "kohya": (lambda _, original: f"lora_unet_{original}".replace(".", "_"), DOWN_UP),
    "kohya's prefix on diffusers' paths": (lambda own, _: f"lora_unet_{own}".replace(".", "_"), DOWN_UP),
    "SimpleTuner": (lambda own, _: f"lycoris_{own}".replace(".", "_"), DOWN_UP),
    "ComfyUI": (lambda _, original: f"diffusion_model.{original}", DOWN_UP),
    "a part of a checkpoint": (lambda _, original: f"model.diffusion_model.{original}", A_B),
    "diffusers": (lambda own, _: f"unet.{own}", A_B),
    "diffusers of 2023": (lambda own, _: f"unet.{own}", ("lora.down.weight", "lora.up.weight")),
    "peft": (lambda own, _: f"base_model.model.{own}", A_B),
    "peft with a component": (lambda own, _: f"unet.base_model.model.{own}", ("lora_A.default.weight", "lora_B.default.weight")),
    "a compiled model": (lambda own, _: f"unet._orig_mod.{own}", A_B),
    "no prefix": (lambda own, _: own, A_B),
}


@pytest.mark.parametrize("writer", SDXL_STEMS)
def test_a_unet_layer_is_found_under_every_writers_name(writer: str, parts: Parts, tmp_path: Path) -> None:
    stem_of, (down, up) = SDXL_STEMS[writer]
    own = "mid_block.attentions.0.proj_in"
    stem = stem_of(own, names_of(parts).to_comfyui(f"backbone.{own}").removeprefix("diffusion_model."))
    tensors = {f"{stem}.{down}": torch.ones(RANK, 32), f"{stem}.{up}": torch.ones(32, RANK)}
    for alpha, scale in ((None, 1.0), (1.0, 0.5)):
        extra = {} if alpha is None else {f"{stem}.alpha": torch.tensor(alpha)}
        save_file({**tensors, **extra}, tmp_path / "a.safetensors")
        found = read(tmp_path / "a.safetensors", parts)
        assert found.keys() == {f"backbone.{own}"}
        assert found[f"backbone.{own}"].scale == scale


def test_attention_processors_of_the_first_diffusers_are_found(parts: Parts, tmp_path: Path) -> None:
    stem = "mid_block.attentions.0.transformer_blocks.0.attn1"
    tensors = {}
    for side in ("to_q", "to_out"):
        tensors[f"{stem}.processor.{side}_lora.down.weight"] = torch.ones(RANK, 32)
        tensors[f"{stem}.processor.{side}_lora.up.weight"] = torch.ones(32, RANK)
    save_file(tensors, tmp_path / "a.safetensors")
    assert read(tmp_path / "a.safetensors", parts).keys() == {f"backbone.{stem}.to_q", f"backbone.{stem}.to_out.0"}


CLIP_L = ["text_encoder.text_model.{}", "text_encoder.{}", "text_encoders.clip_l.transformer.text_model.{}"]
TEXT_STEMS = {
    "sdxl": {
        "te1": ["lora_te1_text_model_{}", *CLIP_L],
        "te2": ["lora_te2_text_model_{}", "text_encoder_2.text_model.{}", "text_encoders.clip_g.transformer.text_model.{}"],
    },
    "flux": {
        "te1": ["lora_te1_text_model_{}", "lora_te_text_model_{}", *CLIP_L],
        "te3": ["lora_te3_{}", "lora_te2_{}", "text_encoder_2.{}", "text_encoders.t5xxl.transformer.{}"],
    },
    "sd1": {"te1": ["lora_te_text_model_{}", "lora_te1_text_model_{}", *CLIP_L]},
    "sd2": {"te1": ["lora_te_text_model_{}", "text_encoders.clip_h.transformer.text_model.{}"]},
}


@pytest.mark.parametrize("family", TEXT_STEMS)
def test_text_encoder_layers_are_found_under_every_writers_name(family: str) -> None:
    names = names_for(family)
    for module, stems in TEXT_STEMS[family].items():
        layer = "encoder.block.1.layer.0.SelfAttention.q" if module == "te3" else "encoder.layers.1.self_attn.q_proj"
        own = f"{module}.text_model.{layer}" if module == "te2" else f"{module}.{layer}"
        for stem in stems:
            path = layer if "." in stem else layer.replace(".", "_")
            key = stem.format(path)
            found = adapters_of({f"{key}.lora_A.weight": torch.ones(1, 2), f"{key}.lora_B.weight": torch.ones(2, 1)}, {}, names, "file")
            assert found.keys() == {own}, key


def flux_tensors(stem: str, rows: int, endings: tuple[str, str] = DOWN_UP, inputs: int = 32) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(rows)
    down, up = (f"{stem}.{ending}" for ending in endings)
    return {down: torch.randn(RANK, inputs, generator=rng), up: torch.randn(rows, RANK, generator=rng)}


FLUX_STEMS = {
    "lora_unet_double_blocks_1_img_attn_qkv": (96, [f"transformer_blocks.1.attn.to_{side}" for side in "qkv"]),
    "diffusion_model.double_blocks.1.txt_attn.qkv": (96, [f"transformer_blocks.1.attn.add_{side}_proj" for side in "qkv"]),
    "double_blocks.1.txt_attn.qkv": (96, [f"transformer_blocks.1.attn.add_{side}_proj" for side in "qkv"]),
    "base_model.model.double_blocks.1.img_mlp.2": (32, ["transformer_blocks.1.ff.net.2"]),
    "model.diffusion_model.single_blocks.0.modulation.lin": (96, ["single_transformer_blocks.0.norm.linear"]),
    "diffusion_model.single_blocks.0.linear1_qkv": (96, [f"single_transformer_blocks.0.attn.to_{side}" for side in "qkv"]),
    "transformer.single_transformer_blocks.0.proj_mlp": (128, ["single_transformer_blocks.0.proj_mlp"]),
    "single_transformer_blocks.0.proj_mlp": (128, ["single_transformer_blocks.0.proj_mlp"]),
    "lora_transformer_single_transformer_blocks_0_proj_mlp": (128, ["single_transformer_blocks.0.proj_mlp"]),
    "lycoris_single_transformer_blocks_0_proj_mlp": (128, ["single_transformer_blocks.0.proj_mlp"]),
    "transformer.proj_out": (64, ["proj_out"]),
    "lora_unet_final_layer_linear": (64, ["proj_out"]),
}  # fmt: skip


@pytest.mark.parametrize("stem", FLUX_STEMS)
def test_a_transformer_layer_is_found_under_every_writers_name(stem: str, flux: Parts, tmp_path: Path) -> None:
    rows, layers = FLUX_STEMS[stem]
    tensors = flux_tensors(stem, rows, inputs=128 if stem.endswith("img_mlp.2") else 32)
    save_file(tensors, tmp_path / "a.safetensors")
    found = read(tmp_path / "a.safetensors", flux)
    assert list(found) == [f"backbone.{layer}" for layer in layers]
    ups = torch.cat([adapter.tensors["lora_B.weight"] for adapter in found.values()])
    assert torch.equal(ups, tensors[f"{stem}.lora_up.weight"])


XLABS = {
    "double_blocks.0.processor.qkv_lora1": (96, 32, [f"transformer_blocks.0.attn.to_{side}" for side in "qkv"]),
    "double_blocks.0.processor.qkv_lora2": (96, 32, [f"transformer_blocks.0.attn.add_{side}_proj" for side in "qkv"]),
    "double_blocks.0.processor.proj_lora1": (32, 32, ["transformer_blocks.0.attn.to_out.0"]),
    "diffusion_model.double_blocks.0.processor.proj_lora2": (32, 32, ["transformer_blocks.0.attn.to_add_out"]),
    "single_blocks.1.processor.qkv_lora": (96, 32, [f"single_transformer_blocks.1.attn.to_{side}" for side in "qkv"]),
    "single_blocks.1.processor.proj_lora": (32, 160, ["single_transformer_blocks.1.proj_out"]),
}


@pytest.mark.parametrize("stem", XLABS)
def test_x_flux_names_are_understood(stem: str, flux: Parts, tmp_path: Path) -> None:
    rows, inputs, layers = XLABS[stem]
    save_file(flux_tensors(stem, rows, ("down.weight", "up.weight"), inputs), tmp_path / "a.safetensors")
    assert list(read(tmp_path / "a.safetensors", flux)) == [f"backbone.{layer}" for layer in layers]


@pytest.mark.parametrize(
    ("ending", "words"),
    [
        ("lora_mid.weight", "tucker"),
        ("hada_t1", "tucker"),
        ("lokr_t2", "tucker"),
        ("diff", "whole differences of weights or biases"),
        ("diff_b", "whole differences of weights or biases"),
        ("oft_blocks", "oft, which turns outputs"),
        ("a1.weight", "GLoRA"),
    ],
)
def test_what_is_known_but_not_supported_is_named(ending: str, words: str) -> None:
    stem = "lora_unet_middle_block_1_proj_in"
    tensors = {f"{stem}.lora_down.weight": torch.ones(1, 1), f"{stem}.{ending}": torch.ones(1)}
    with pytest.raises(OptionError, match="not supported") as caught:
        adapters_of(tensors, {}, names_for("sdxl"), "a.safetensors")
    assert words in str(caught.value)
    assert ending in str(caught.value)


def test_a_layer_under_two_names_is_refused(flux: Parts, tmp_path: Path) -> None:
    whole = flux_tensors("lora_unet_double_blocks_0_img_attn_qkv", 96)
    twice = {**whole, **flux_tensors("transformer.transformer_blocks.0.attn.to_k", 32, A_B)}
    save_file(twice, tmp_path / "a.safetensors")
    with pytest.raises(OptionError, match=r"holds some layers twice.*transformer_blocks\.0\.attn\.to_k"):
        read(tmp_path / "a.safetensors", flux)


def test_a_kronecker_product_across_layers_that_cannot_be_divided_is_refused(flux: Parts, tmp_path: Path) -> None:
    stem = "lora_unet_double_blocks_0_img_attn_qkv"
    save_file({f"{stem}.lokr_w1": torch.ones(2, 4), f"{stem}.lokr_w2": torch.ones(48, 8)}, tmp_path / "a.safetensors")
    with pytest.raises(OptionError, match=r"the lokr of .* cannot be taken apart"):
        read(tmp_path / "a.safetensors", flux)
    save_file({f"{stem}.lokr_w1": torch.ones(6, 4), f"{stem}.lokr_w2": torch.ones(16, 8)}, tmp_path / "a.safetensors")
    assert len(read(tmp_path / "a.safetensors", flux)) == 3
