"""Every kind of file and folder is called by its name, whichever family was chosen for it: "this is a FLUX transformer, you chose SDXL"."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sd_scripts import families
from sd_scripts.families import RUNS
from sd_scripts.families.flux import loading as flux
from sd_scripts.families.sd import loading as sd
from sd_scripts.families.sdxl import loading as sdxl
from sd_scripts.library.loading.common import BASE, FamilySpec
from sd_scripts.library.loading.headers import read_header
from sd_scripts.runs.model_headers import what_is
from sd_scripts.schema.errors import OptionError

SPECS: dict[str, FamilySpec] = {"sd": sd.SPEC, "sdxl": sdxl.SPEC, "flux": flux.SPEC}
_UNET = "model.diffusion_model."
_TO_K = "transformer_blocks.0.attn2.to_k.weight"

Shapes = dict[str, tuple[int, ...]]
FILES: dict[str, tuple[Shapes, str]] = {
    "flux": ({"double_blocks.0.img_attn.qkv.weight": (3, 1), "img_in.weight": (1,)}, "a FLUX transformer"),
    "flux fp8": (
        {"double_blocks.0.img_attn.qkv.weight": (3, 1), "double_blocks.0.img_attn.qkv.scale_weight": (), "scaled_fp8": (0,)},
        "a FLUX transformer",
    ),
    "flux whole": (
        {f"{_UNET}double_blocks.0.img_attn.qkv.weight": (3, 1), "vae.decoder.conv_in.weight": (1,), "text_encoders.clip_l.x": (1,)},
        "a FLUX transformer",
    ),
    "flux diffusers": (
        {"single_transformer_blocks.0.attn.to_q.weight": (1,), "transformer_blocks.0.attn.add_q_proj.weight": (1,)},
        "a FLUX transformer",
    ),
    "flux 2": (
        {"double_blocks.0.img_attn.qkv.weight": (1,), "double_stream_modulation_img.lin.weight": (1,)},
        "a FLUX.2 Klein transformer",
    ),
    "flux 2 dev": (
        {"double_stream_modulation_img.lin.weight": (1,), "guidance_in.in_layer.weight": (1,)},
        "a FLUX.2 dev transformer",
    ),
    "mistral": (
        {
            "model.layers.0.self_attn.q_proj.weight": (4, 5),
            "model.layers.0.mlp.gate_proj.weight": (32, 5),
            "model.layers.0.input_layernorm.weight": (5,),
        },
        "a Mistral text encoder",
    ),
    # Mistral's names: HunyuanVideo and HiDream read with it.
    "llama": (
        {
            "model.layers.0.self_attn.q_proj.weight": (4, 4),
            "model.layers.0.mlp.gate_proj.weight": (14, 4),
            "model.layers.0.input_layernorm.weight": (4,),
        },
        "a Llama text encoder",
    ),
    # Gemma 2 has Mistral's names and more norms, Gemma 3 has Qwen3's and those.
    "gemma 2": (
        {
            "model.layers.0.self_attn.q_proj.weight": (1,),
            "model.layers.0.mlp.gate_proj.weight": (1,),
            "model.layers.0.pre_feedforward_layernorm.weight": (1,),
        },
        "a Gemma text encoder",
    ),
    "gemma 3": (
        {
            "language_model.model.layers.0.self_attn.q_proj.weight": (1,),
            "language_model.model.layers.0.self_attn.q_norm.weight": (1,),
            "language_model.model.layers.0.pre_feedforward_layernorm.weight": (1,),
        },
        "a Gemma text encoder",
    ),
    "chroma": ({"double_blocks.0.img_attn.qkv.weight": (1,), "distilled_guidance_layer.in_proj.weight": (1,)}, "a Chroma transformer"),
    "hunyuan": ({"double_blocks.0.img_attn_qkv.weight": (1,)}, "a HunyuanVideo transformer"),
    "sd3": ({f"{_UNET}joint_blocks.0.x": (1,)}, "an SD3 model"),
    "sd3 diffusers": ({"transformer_blocks.0.attn.add_q_proj.weight": (1,)}, "an SD3 model"),
    "qwen": (
        {"transformer_blocks.0.img_mod.1.weight": (1,), "transformer_blocks.0.attn.add_q_proj.weight": (1,)},
        "a Qwen-Image transformer",
    ),
    "qwen 2.1": ({"txt_in.text_norm.weight": (1,), "transformer_blocks.0.img_mlp.gate_up.weight": (1,)}, "a Qwen-Image-2.1 transformer"),
    "zimage": ({"noise_refiner.0.attention.to_q.weight": (1,), "cap_pad_token": (1,)}, "a Z-Image transformer"),
    "zimage published": (
        {f"{_UNET}noise_refiner.0.attention.qkv.weight": (3, 1), f"{_UNET}cap_pad_token": (1, 1)},
        "a Z-Image transformer",
    ),
    "anima": (
        {"net.blocks.0.adaln_modulation_self_attn.1.weight": (1, 1), "net.llm_adapter.out_proj.weight": (1, 1)},
        "an Anima transformer",
    ),
    "anima conditioner": ({"blocks.0.norm_cross_attn.weight": (1,)}, "a text conditioner of Anima alone"),
    "sd1": (
        {
            "cond_stage_model.transformer.text_model.final_layer_norm.bias": (1,),
            f"{_UNET}input_blocks.1.1.{_TO_K}": (320, 768),
        },
        "an SD 1.x model",
    ),
    "sd2": ({"cond_stage_model.model.ln_final.bias": (1,), f"{_UNET}input_blocks.1.1.{_TO_K}": (320, 1024)}, "an SD 2.x model"),
    "sd2 unclip": ({"cond_stage_model.model.ln_final.bias": (1,), f"{_UNET}label_emb.0.0.weight": (1,)}, "an SD 2.x model"),
    "sdxl": (
        {"conditioner.embedders.0.transformer.text_model.x": (1,), "conditioner.embedders.1.model.ln_final.bias": (1,)},
        "an SDXL checkpoint",
    ),
    "refiner": ({"conditioner.embedders.0.model.ln_final.bias": (1,)}, "an SDXL refiner"),
    "sd1 unet": ({f"{_UNET}input_blocks.1.1.{_TO_K}": (320, 768)}, "the UNet of SD 1.x alone"),
    "sd1 unet diffusers": ({f"down_blocks.0.attentions.0.{_TO_K}": (320, 768)}, "the UNet of SD 1.x alone"),
    "sd2 unet diffusers": ({f"down_blocks.0.attentions.0.{_TO_K}": (320, 1024)}, "the UNet of SD 2.x alone"),
    "sdxl unet": ({f"{_UNET}label_emb.0.0.weight": (1,)}, "the UNet of SDXL alone"),
    "sdxl unet diffusers": ({f"down_blocks.1.attentions.0.{_TO_K}": (640, 2048)}, "the UNet of SDXL alone"),
    "other unet": ({"down_blocks.0.resnets.0.conv1.weight": (1,), "conv_norm_out.weight": (1,)}, "a UNet alone"),
    "lora": ({"lora_unet_x.lora_down.weight": (1, 1), "lora_unet_x.alpha": ()}, "a LoRA file"),
    "peft lora": ({"unet.x.lora_A.weight": (1, 1)}, "a LoRA file"),
    "flux lora": ({"lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": (1, 1)}, "a LoRA file"),
    "loha": ({"lora_unet_x.hada_w1_a": (1, 1)}, "a LoRA file"),
    "vae": ({"encoder.conv_in.weight": (1,), "decoder.conv_in.weight": (1,)}, "a VAE alone"),
    "clip": ({"text_model.encoder.layers.0.self_attn.q_proj.weight": (1,)}, "a CLIP text encoder"),
    "open clip": ({"transformer.resblocks.0.attn.in_proj_weight": (1,)}, "a CLIP text encoder"),
    "qwen3": (
        {"model.layers.0.self_attn.q_proj.weight": (1,), "model.layers.0.self_attn.q_norm.weight": (1,)},
        "a Qwen3 text encoder",
    ),
    "t5": ({"encoder.block.0.layer.0.SelfAttention.q.weight": (1,)}, "a T5 text encoder"),
    "controlnet": ({"control_model.input_blocks.0.0.weight": (1,)}, "a ControlNet"),
    "flux controlnet": ({"controlnet_blocks.0.weight": (1,), "double_blocks.0.img_attn.qkv.weight": (1,)}, "a ControlNet"),
    "embedding": ({"emb_params": (4, 768)}, "a textual inversion"),
    "empty": ({}, "an empty file"),
    "other": ({"weight": (1,)}, "an unknown kind of file"),
}
OPTIONS = [(name, option) for name, spec in SPECS.items() for option in spec.belongs.values()]
PIPELINES = {
    "sd": "StableDiffusionPipeline",
    "sdxl": "StableDiffusionXLPipeline",
    "flux": "FluxPipeline",
    "sd3": "StableDiffusion3Pipeline",
    "qwen": "QwenImagePipeline",
    "zimage": "ZImagePipeline",
}


def written(folder: Path, kind: str) -> Path:
    file = folder / "model.safetensors"
    dtype = torch.float8_e4m3fn if "fp8" in kind else torch.float32
    save_file({key: torch.zeros(shape).to(dtype) for key, shape in FILES[kind][0].items()}, file)
    return file


def sentence(name: str, value: Path, **more: str) -> str:
    """What a person is told when this family cannot load this."""
    options = RUNS[(name, "network")].model_fields["model"].annotation
    assert options is not None
    with pytest.raises(OptionError) as raised:
        families.family(name).load(options(pretrained_model_name_or_path=str(value), **more), torch.device("cpu"), torch.float32)
    return str(raised.value)


@pytest.mark.parametrize("kind", FILES)
def test_every_kind_of_file_has_its_name(tmp_path, kind):
    assert what_is(read_header(written(tmp_path, kind), "")) == FILES[kind][1]


def test_no_family_takes_a_file_for_its_own_that_is_anothers(tmp_path):
    for kind in FILES:
        header = read_header(written(tmp_path, kind), "")
        own = {name: {sign for sign in signs if sign.recognises(header)} for name, signs in families.OWN_SIGNS.items()}
        told = {name: signs for name, signs in own.items() if signs}
        # Several only by the same sign: FLUX.1 and Kontext are one network that was trained for two things.
        assert len(told) <= 1 or set.intersection(*told.values()), f"{kind} is told by {told}"


def test_what_stands_beside_a_network_tells_no_family():
    modules = [importlib.import_module(f"sd_scripts.families.{name}.loading") for name in families.NAMES]
    beside = {noun for module in modules for noun in (module.SPEC if hasattr(module, "SPEC") else module.LOADER.spec).belongs}
    own = {sign.what for signs in families.OWN_SIGNS.values() for sign in signs}
    assert own.isdisjoint(beside), own & beside


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", FILES)
def test_a_file_of_another_kind_is_called_by_its_name(tmp_path, name, kind):
    spec, noun = SPECS[name], FILES[kind][1]
    if noun in spec.files:
        return
    text = sentence(name, written(tmp_path, kind))
    assert f"{BASE}: model.safetensors is {noun}; you chose {spec.label}, which needs {spec.needs}. " in text
    if noun in spec.belongs:
        assert f"{noun[1:]} goes into {spec.belongs[noun]}" in text
    elif noun == "a LoRA file":
        assert "LoRA files go into base_weights (merged first) or network_weights (trained further)" in text
    else:
        assert "Choose its own family" in text


@pytest.mark.parametrize("name, option", OPTIONS)
@pytest.mark.parametrize("kind", FILES)
def test_a_file_of_another_kind_is_called_by_its_name_in_the_options_for_single_networks(tmp_path, name, option, kind):
    spec, noun = SPECS[name], FILES[kind][1]
    if noun in spec.files or spec.belongs.get(noun) == option:
        return
    text = sentence(name, tmp_path / "nothing", **{option: str(written(tmp_path, kind))})
    assert f"{option}: model.safetensors is {noun}; a" in text and f"for {spec.label} is needed" in text
    assert f"there is no file or folder {tmp_path / 'nothing'}" in text, "all problems are told at once"


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("other", PIPELINES)
def test_a_folder_of_another_family_is_called_by_its_name(tmp_path, name, other):
    if name == other:
        return
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model_index.json").write_text(json.dumps({"_class_name": PIPELINES[other]}))
    text = sentence(name, tmp_path / "model")
    kind = PIPELINES[other].removesuffix("Pipeline")
    assert f"model is a {kind} model ({PIPELINES[other]}); you chose {SPECS[name].label}. Choose its own family, or a" in text
