"""Loading of FLUX: folders, transformer files of every layout with their autoencoder and text encoders, and sentences for the rest."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import huggingface_hub
import pytest
import sentencepiece
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from torch.testing import assert_close
from transformers import T5Config, T5EncoderModel

from sd_scripts.families import family
from sd_scripts.families.common import original_unet as original
from sd_scripts.families.common import pooled_original
from sd_scripts.families.flux import loading as flux
from sd_scripts.families.flux.options import FluxModelOptions
from sd_scripts.families.sdxl.options import SdxlModelOptions
from sd_scripts.library.core.protocols import Parts, StateDict
from sd_scripts.library.loading import layouts
from sd_scripts.library.loading.common import config_of
from sd_scripts.library.loading.headers import read_header
from sd_scripts.schema.errors import OptionError
from tests.library.loading_in_small import assert_same, to_original
from tests.small_models import flux_pipeline_of

FLUX = family("flux")
pytestmark = pytest.mark.usefixtures("no_network")
CPU = torch.device("cpu")
NAME = "pretrained_model_name_or_path"
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def tiny() -> Parts:
    return FLUX.tiny()


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory) -> Path:
    """The tiny model as diffusers itself writes it."""
    folder = tmp_path_factory.mktemp("models") / "tiny-flux"
    flux_pipeline_of(tiny).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "tiny-flux"))


def transformer_file(parts: Parts) -> StateDict:
    """The transformer under the published names."""
    state = parts.backbone.state_dict()
    return to_original(layouts.places(pooled_original.transformer, state, config_of(parts.backbone)), state)


def vae_file(parts: Parts) -> StateDict:
    state = parts.vae.state_dict()
    return to_original(layouts.places(original.vae, state, config_of(parts.vae)), state)


def clip_file(parts: Parts) -> StateDict:
    state = {f"text_model.{key.removeprefix('text_model.')}": tensor for key, tensor in parts.text_encoders["te1"].state_dict().items()}
    return {**state, "logit_scale": torch.tensor(4.6)}


def t5_file(parts: Parts) -> StateDict:
    return {key: tensor for key, tensor in parts.text_encoders["te3"].state_dict().items() if key != "encoder.embed_tokens.weight"}


@pytest.fixture
def pieces(tiny, folder) -> dict[str, str]:
    """A transformer file and its companions, beside the configuration and tokenizers of the tiny model; as options."""
    files = {NAME: transformer_file(tiny), "ae": vae_file(tiny), "clip_l": clip_file(tiny), "t5xxl": t5_file(tiny)}
    names = {NAME: "flux1-dev.safetensors", "ae": "ae.safetensors", "clip_l": "clip_l.safetensors", "t5xxl": "t5xxl.safetensors"}
    for option, state in files.items():
        save_file(state, folder / names[option])
    return {option: str(folder / name) for option, name in names.items()}


def load(*places: Path | str, **more) -> Parts:
    values = {NAME: str(places[0])} if places else {}
    return FLUX.load(FluxModelOptions(**{**values, **more}), CPU, more.pop("dtype", torch.float32))


def sentence(*places: Path | str, **more) -> str:
    """What a person is told when this cannot be loaded."""
    with pytest.raises(OptionError) as raised:
        load(*places, **more)
    return str(raised.value)


# What can be loaded


def test_a_diffusers_folder_gives_its_networks_ready_and_frozen(saved, tiny):
    parts = load(saved)
    assert_same(parts, tiny)
    assert parts.source == "tiny-flux" and parts.kind == "velocity"
    assert parts.settings == {"t5xxl_max_token_length": 32, "apply_t5_attn_mask": False} and parts.denoising == {"guidance_scale": 1.0}
    for module in parts.modules().values():
        assert not any(part.training for part in module.modules())
        assert all(not p.requires_grad and p.device == CPU for p in module.parameters())
    te3 = parts.text_encoders["te3"]
    assert te3.encoder.embed_tokens.weight is te3.shared.weight
    with torch.no_grad():
        (got,), (wanted,) = FLUX.encode_prompts(parts, ["a red star"]), FLUX.encode_prompts(tiny, ["a red star"])
    assert torch.equal(got["t5"], wanted["t5"]) and torch.equal(got["pooled"], wanted["pooled"])


def test_t5_has_no_dropout_even_while_it_is_trained(folder):
    config_file = folder / "text_encoder_2" / "config.json"
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "dropout_rate": 0.5}))
    parts = load(folder)
    with torch.no_grad():
        (before,) = FLUX.encode_prompts(parts, ["a red star"])
        parts.text_encoders["te3"].train()
        (after,) = FLUX.encode_prompts(parts, ["a red star"])
    assert torch.equal(after["t5"], before["t5"])


def test_t5s_bare_vocabulary_is_enough_of_a_tokenizer(folder, tmp_path):
    lines = [f"a {color} {shape} at the {place}" for color in ("red", "blue") for shape in ("star", "ring") for place in ("top", "left")]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines * 20),
        model_prefix=str(tmp_path / "spiece"),
        vocab_size=24,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    for file in (folder / "tokenizer_2").iterdir():
        file.unlink()
    (tmp_path / "spiece.model").rename(folder / "tokenizer_2" / "spiece.model")
    # 24 pieces and T5's 100 marks.
    with torch.random.fork_rng(devices=[]):
        T5EncoderModel(T5Config.from_pretrained(folder / "text_encoder_2", vocab_size=124)).save_pretrained(folder / "text_encoder_2")
    parts = load(folder)
    own = sentencepiece.SentencePieceProcessor(str(folder / "tokenizer_2" / "spiece.model"))
    for caption in ("a red star at the top", "blue ring, left"):
        assert parts.tokenizers["te3"](caption).input_ids == [*own.encode(caption), 1]
    assert parts.settings["t5xxl_max_token_length"] == 512


def test_options_of_the_text_reach_the_settings(saved):
    parts = load(saved, t5xxl_max_token_length=48, apply_t5_attn_mask=True, guidance_scale=3.5)
    # What only denoising needs is kept apart: cached texts do not depend on it.
    assert parts.settings == {"t5xxl_max_token_length": 48, "apply_t5_attn_mask": True} and parts.denoising == {"guidance_scale": 3.5}


def test_a_transformer_file_with_its_companions_is_the_whole_model(pieces, tiny):
    parts = load(**pieces)
    assert_same(parts, tiny)
    assert parts.source == "flux1-dev.safetensors"
    x_t, t = torch.randn(1, 16, 4, 6), torch.tensor([0.5])
    with torch.no_grad():
        ours = FLUX.denoise(parts, x_t, t, FLUX.encode_prompts(parts, ["a star"]))
        assert torch.equal(ours, FLUX.denoise(tiny, x_t, t, FLUX.encode_prompts(tiny, ["a star"])))


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model."])
def test_prefixes_before_the_names_of_a_transformer_do_not_matter(pieces, tiny, prefix):
    save_file({prefix + key: tensor for key, tensor in transformer_file(tiny).items()}, pieces[NAME])
    assert_same(load(**pieces), tiny)


def test_a_transformer_file_may_have_diffusers_names(pieces, tiny):
    save_file(tiny.backbone.state_dict(), pieces[NAME])
    assert_same(load(**pieces), tiny)


def test_companions_may_be_folders_and_whole_models(pieces, saved, tiny):
    parts = load(**{**pieces, "ae": str(saved / "vae"), "clip_l": str(saved / "text_encoder"), "t5xxl": str(saved)})
    assert_same(parts, tiny)


def test_one_file_may_hold_everything(folder, tiny):
    state = {f"model.diffusion_model.{key}": tensor for key, tensor in transformer_file(tiny).items()}
    state |= {f"vae.{key}": tensor for key, tensor in vae_file(tiny).items()}
    state |= {f"text_encoders.clip_l.transformer.{key}": tensor for key, tensor in clip_file(tiny).items()}
    state |= {f"text_encoders.t5xxl.transformer.{key}": tensor for key, tensor in t5_file(tiny).items()}
    state["text_encoders.clip_l.logit_scale"] = torch.tensor(4.6)
    file = folder / "everything.safetensors"
    save_file(state, file)
    assert_same(load(file), tiny)


def test_companions_replace_those_of_a_folder(saved, pieces, tiny):
    other = FLUX.tiny()
    with torch.no_grad():
        for module in other.modules().values():
            for parameter in module.parameters():
                parameter.mul_(0.5)
    save_file(vae_file(other), pieces["ae"])
    save_file(t5_file(other), pieces["t5xxl"])
    parts = load(saved, ae=pieces["ae"], t5xxl=pieces["t5xxl"])
    assert_same(parts, other, ("vae", "te3"))
    assert_same(parts, tiny, ("backbone", "te1"))


def test_fp8_files_are_read_in_the_precision_of_the_run(pieces, tiny):
    for option, state in ((NAME, transformer_file(tiny)), ("t5xxl", t5_file(tiny))):
        save_file({key: tensor.to(FP8) for key, tensor in state.items()}, pieces[option])
    parts = FLUX.load(FluxModelOptions(**pieces), CPU, torch.bfloat16)
    for name in ("backbone", "te3"):
        state = tiny.modules()[name].state_dict()
        for key, tensor in parts.modules()[name].state_dict().items():
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, state[key].to(FP8).to(torch.bfloat16)), key


def scaled(state: StateDict) -> StateDict:
    """Matrices in fp8 with the factor that uses its whole range, as ComfyUI's scaled files have them."""
    file: StateDict = {"scaled_fp8": torch.empty(0).to(FP8)}
    for key, tensor in state.items():
        if tensor.ndim != 2 or not key.endswith(".weight"):
            file[key] = tensor
            continue
        scale = tensor.abs().max() / torch.finfo(FP8).max
        file |= {key: (tensor / scale).to(FP8), f"{key.removesuffix('weight')}scale_weight": scale}
        file[f"{key.removesuffix('weight')}scale_input"] = torch.tensor(1.0)
    return file


def test_scaled_fp8_files_are_scaled_back(pieces, tiny):
    save_file(scaled(t5_file(tiny)), pieces["t5xxl"])
    save_file(scaled(transformer_file(tiny)), pieces[NAME])
    parts = load(**pieces)
    for name in ("backbone", "te3"):
        state = parts.modules()[name].state_dict()
        for key, tensor in tiny.modules()[name].state_dict().items():
            # Three bits after the point: the last is off by at most half, an 1/16 of the number, or of the smallest one with that many.
            limit = (tensor.abs() / 16).clamp(min=tensor.abs().max() * 2**-9 / 448)
            assert ((state[key] - tensor).abs() <= limit * 1.01 + 1e-7).all(), key
    assert_same(parts, tiny, ("vae", "te1"))


def test_files_of_comfyui_with_a_scale_for_each_layer_or_row_are_read(pieces, tiny):
    """Its QUANTIZATION.md: X.weight in float8, X.weight_scale, X.input_scale, and the format as bytes of JSON in X.comfy_quant."""
    file: StateDict = {}
    state = transformer_file(tiny)
    for number, (key, tensor) in enumerate(state.items()):
        file[key] = tensor
        if tensor.ndim == 2 and key.endswith(".weight"):
            layer = key.removesuffix(".weight")
            most = tensor.abs().max() if number % 2 else tensor.abs().amax(dim=1, keepdim=True)
            told = json.dumps({"format": "float8_e4m3fn", "full_precision_matrix_mult": False}).encode()
            file |= {key: (tensor / (most / 448)).to(FP8), f"{layer}.weight_scale": most / 448, f"{layer}.input_scale": torch.tensor(1.0)}
            file[f"{layer}.comfy_quant"] = torch.tensor(list(told), dtype=torch.uint8)
    save_file(file, pieces[NAME])
    backbone = load(**pieces).backbone.state_dict()
    for key, tensor in tiny.backbone.state_dict().items():
        limit = (tensor.abs() / 16).clamp(min=tensor.abs().max() * 2**-9 / 448)
        assert ((backbone[key] - tensor).abs() <= limit * 1.01 + 1e-7).all(), key
    layer = next(name for name in file if name.endswith(".comfy_quant"))
    for format_ in ("nvfp4", "mxfp8", "convrot_w4a4"):
        told = torch.tensor(list(json.dumps({"format": format_}).encode()), dtype=torch.uint8)
        save_file({**file, layer: told}, pieces[NAME])
        with pytest.raises(OptionError, match=f"holds quantised weights .*{format_}.*Take the bf16"):
            load(**pieces)


def test_gguf_files_are_read(pieces, tiny):
    state, wanted = transformer_file(tiny), {}
    pieces[NAME] = str(Path(pieces[NAME]).with_suffix(".gguf"))
    writer = gguf.GGUFWriter(pieces[NAME], "flux")
    kinds = [gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "Q5_1", "BF16", "F16")]
    for number, (key, tensor) in enumerate(state.items()):
        whole = tensor.ndim == 2 and tensor.shape[1] % 32 == 0
        kind = kinds[number % len(kinds)] if whole else gguf.GGMLQuantizationType.F32
        data = gguf.quants.quantize(tensor.numpy(), kind)
        writer.add_tensor(key, data, raw_dtype=kind)
        wanted[key] = torch.from_numpy(gguf.quants.dequantize(data, kind).copy())
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    read = transformer_file(load(**pieces))
    # Not to the bit: diffusers multiplies some blocks in half precision.
    wrong = [key for key, tensor in wanted.items() if (read[key] - tensor).abs().max() > 2e-3 * tensor.abs().max()]
    assert not wrong and read.keys() == wanted.keys()
    Path(pieces[NAME]).write_bytes(Path(pieces[NAME]).read_bytes()[:200])
    with pytest.raises(OptionError, match="is a damaged GGUF file"):
        load(**pieces)


def test_in_fp16_the_last_layers_of_t5s_mlps_stay_in_float(saved):
    parts = FLUX.load(FluxModelOptions(pretrained_model_name_or_path=str(saved)), CPU, torch.float16)
    kept = {name for name, p in parts.text_encoders["te3"].named_parameters() if p.dtype == torch.float32}
    assert kept == {f"encoder.block.{block}.layer.1.DenseReluDense.wo.weight" for block in (0, 1)}
    assert {p.dtype for name in ("backbone", "te1") for p in parts.modules()[name].parameters()} == {torch.float16}
    assert {p.dtype for p in parts.vae.parameters()} == {torch.float32}
    with torch.no_grad():
        (condition,) = FLUX.encode_prompts(parts, ["a red star"])
    assert condition["t5"].dtype == torch.float16 and condition["t5"].isfinite().all()


def companions_elsewhere(saved: Path) -> dict[str, str]:
    return {"ae": str(saved / "vae"), "clip_l": str(saved / "text_encoder"), "t5xxl": str(saved / "text_encoder_2")}


@pytest.mark.parametrize("guidance", [True, False])
def test_depth_widths_and_kind_of_model_are_seen_from_the_file_alone(saved, tmp_path, guidance):
    with torch.random.fork_rng(devices=[]):
        config = {
            **FLUX.tiny().backbone.config,
            "num_layers": 3,
            "num_single_layers": 1,
            "num_attention_heads": 3,
            "guidance_embeds": guidance,
        }
        other = replace(FLUX.tiny(), backbone=FluxTransformer2DModel.from_config(config))
    file = tmp_path / "flux1-mine.safetensors"
    save_file(transformer_file(other), file)
    parts = load(file, **companions_elsewhere(saved))
    assert_same(parts, other, ("backbone",))
    assert list(parts.backbone.config.axes_dims_rope) == [4, 6, 6]
    assert parts.scheduler_config == flux.published_scheduler(guidance)
    assert (parts.scheduler_config["shift"], parts.scheduler_config["use_dynamic_shifting"]) == ((3.0, True) if guidance else (1.0, False))


def test_t5_reads_512_tokens_for_dev_and_256_for_schnell(folder, tmp_path):
    config_file = folder / "tokenizer_2" / "tokenizer_config.json"
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "model_max_length": 512}))
    assert load(folder).settings["t5xxl_max_token_length"] == 512
    config = {**FLUX.tiny().backbone.config, "guidance_embeds": False}
    with torch.random.fork_rng(devices=[]):
        FluxTransformer2DModel.from_config(config).save_pretrained(folder / "transformer")
    assert load(folder).settings["t5xxl_max_token_length"] == 256


def test_a_kontext_folder_is_read(folder, tiny):
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps({**index, "_class_name": "FluxKontextPipeline"}))
    assert_same(load(folder), tiny)


def test_a_model_and_its_companions_in_the_hub_cache_load_without_a_network(saved, tiny, tmp_path, monkeypatch):
    repository = tmp_path / "hub" / "models--someone--tiny-flux"
    shutil.copytree(saved, repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    parts = load("someone/tiny-flux")
    assert_same(parts, tiny)
    assert parts.source == "someone/tiny-flux"
    file = tmp_path / "alone" / "flux1-dev.safetensors"
    file.parent.mkdir()
    save_file(transformer_file(tiny), file)
    assert_same(load(file, ae="someone/tiny-flux", clip_l="someone/tiny-flux", t5xxl="someone/tiny-flux"), tiny)


def test_t5_may_be_saved_under_either_name_of_its_embedding(pieces, tiny):
    state = t5_file(tiny)
    save_file({**state, "encoder.embed_tokens.weight": state["shared.weight"].clone()}, pieces["t5xxl"])
    assert_same(load(**pieces), tiny)
    state["encoder.embed_tokens.weight"] = state.pop("shared.weight")
    save_file(state, pieces["t5xxl"])
    assert_same(load(**pieces), tiny)


def test_a_lora_is_merged_into_the_base(saved, tiny, tmp_path):
    down, up = torch.randn(2, 32), torch.randn(96, 2)
    name = "lora_unet_double_blocks_0_img_attn_qkv"
    file = tmp_path / "adapter.safetensors"
    save_file({f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": torch.tensor(1.0)}, file)
    merged, before = load(saved, base_weights=(str(file),)).backbone.state_dict(), tiny.backbone.state_dict()
    for third, layer in enumerate(("to_q", "to_k", "to_v")):
        key = f"transformer_blocks.0.attn.{layer}.weight"
        assert_close(merged[key], before[key] + 0.5 * up[32 * third : 32 * third + 32] @ down, atol=1e-5, rtol=1e-5)


# What is written


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_written_transformer_file_is_the_published_one_and_loads_again(pieces, tiny, saved, tmp_path, dtype):
    file = tmp_path / "trained.safetensors"
    FLUX.save(tiny, file, "safetensors", dtype, {"modelspec.title": "trained"})
    expected = {key: tensor.to(dtype or tensor.dtype) for key, tensor in transformer_file(tiny).items()}
    written = load_file(file)
    assert written.keys() == expected.keys() and all(torch.equal(written[key], expected[key]) for key in expected)
    assert {tensor.dtype for tensor in written.values()} == {dtype or torch.float32}
    assert read_header(file, NAME).metadata == {"format": "pt", "modelspec.title": "trained"}
    again = load(file, **companions_elsewhere(saved))
    state = again.backbone.state_dict()
    for key, tensor in tiny.backbone.state_dict().items():
        assert torch.equal(state[key], tensor.to(dtype or tensor.dtype).float()), key


def test_a_written_folder_is_read_by_us_and_by_diffusers(tiny, tmp_path):
    folder = tmp_path / "trained"
    FLUX.save(tiny, folder, "diffusers", None, {})
    again = load(folder)
    assert_same(again, tiny)
    assert again.scheduler_config["shift"] == 3.0 and again.settings == tiny.settings
    theirs = FluxPipeline.from_pretrained(folder, local_files_only=True)
    theirs.set_progress_bar_config(disable=True)
    # Weights at other addresses round otherwise in the last bit, which would be seen in float32.
    theirs.to(torch.float64)
    ours = flux_pipeline_of(FLUX.tiny()).to(torch.float64)
    image = {"width": 32, "height": 32, "num_inference_steps": 2, "max_sequence_length": 32, "output_type": "pt"}
    made = theirs("a star", generator=torch.Generator().manual_seed(1), **image).images
    assert_close(made, ours("a star", generator=torch.Generator().manual_seed(1), **image).images, atol=1e-9, rtol=0)


# What cannot, and what a person is told


def test_all_missing_companions_are_named_in_one_sentence(pieces):
    text = sentence(pieces[NAME])
    assert "flux1-dev.safetensors lacks the autoencoder, the text encoder CLIP-L and the text encoder T5-XXL" in text
    assert "Set ae (ae.safetensors), clip_l (clip_l.safetensors) and t5xxl (t5xxl_fp16.safetensors)" in text and text.count(NAME) == 1
    text = sentence(**{key: value for key, value in pieces.items() if key != "t5xxl"})
    assert "lacks the text encoder T5-XXL. Set t5xxl (t5xxl_fp16.safetensors)" in text


def test_all_problems_are_told_at_once(tmp_path, pieces):
    text = sentence("nothing", ae="nowhere", clip_l=pieces["t5xxl"], t5xxl=pieces["ae"], base_weights=("gone.safetensors",))
    assert f"{NAME}: there is no file or folder nothing" in text and "ae: there is no file or folder nowhere" in text
    assert "clip_l: t5xxl.safetensors is a T5 text encoder; a CLIPTextModel for FLUX is needed" in text
    assert "t5xxl: ae.safetensors is a VAE alone; a T5EncoderModel for FLUX is needed" in text
    assert "base_weights: there is no file gone.safetensors" in text


def test_companions_given_as_the_model_are_sent_to_their_options(pieces):
    assert "ae.safetensors is a VAE alone; you chose FLUX" in sentence(pieces["ae"]) and "goes into ae" in sentence(pieces["ae"])
    assert "is a CLIP text encoder" in sentence(pieces["clip_l"]) and "goes into clip_l" in sentence(pieces["clip_l"])
    assert "is a T5 text encoder" in sentence(pieces["t5xxl"]) and "goes into t5xxl" in sentence(pieces["t5xxl"])


WRONG_FILES: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "sdxl": (
        {"conditioner.embedders.0.transformer.x": (1,), "conditioner.embedders.1.model.x": (1,)},
        "is an SDXL checkpoint; you chose FLUX, which needs a FLUX.1 transformer",
    ),
    "flux2": (
        {"double_blocks.0.img_attn.qkv.weight": (3, 1), "double_stream_modulation_img.lin.weight": (1,)},
        "is a FLUX.2 Klein transformer",
    ),
    "chroma": ({"double_blocks.0.img_attn.qkv.weight": (3, 1), "distilled_guidance_layer.in_proj.weight": (1,)}, "is a Chroma transformer"),
    "lora": ({"lora_unet_x.lora_down.weight": (1, 1)}, "is a LoRA file; you chose FLUX.*base_weights"),
    "incomplete": ({"double_blocks.0.img_attn.qkv.weight": (3, 1)}, "of model.safetensors lacks the tensor img_in.weight"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_file_of_another_kind_is_called_by_its_name(tmp_path, saved, name):
    shapes, expected = WRONG_FILES[name]
    file = tmp_path / "model.safetensors"
    save_file({key: torch.zeros(shape) for key, shape in shapes.items()}, file)
    with pytest.raises(OptionError, match=expected):
        load(file, **companions_elsewhere(saved))


def test_folders_of_other_models_are_called_by_their_names(folder):
    for name in ("StableDiffusionXLPipeline", "Flux2Pipeline", "FluxFillPipeline"):
        (folder / "model_index.json").write_text(json.dumps({"_class_name": name}))
        assert f"tiny-flux is a {name.removesuffix('Pipeline')} model ({name}); you chose FLUX" in sentence(folder)


def test_flux_chosen_as_sdxl_is_told(saved, pieces):
    for place in (str(saved), pieces[NAME]):
        with pytest.raises(OptionError, match=r"is a (Flux model|FLUX transformer).*you chose SDXL"):
            family("sdxl").load(SdxlModelOptions(pretrained_model_name_or_path=place), CPU, torch.float32)


def four_bits(file: Path) -> None:
    state = load_file(file)
    save_file({**state, "double_blocks.0.img_attn.proj.weight.absmax": torch.zeros(1)}, file)


def scales_of_rows(file: Path) -> None:
    state = load_file(file)
    save_file({**state, "double_blocks.0.img_attn.proj.scale_weight": torch.ones(4, 32)}, file)


def one_less(file: Path) -> None:
    state = load_file(file)
    del state["single_blocks.1.linear1.weight"]
    save_file(state, file)


def other_shape(file: Path) -> None:
    state = load_file(file)
    save_file({**state, "single_blocks.1.linear1.weight": torch.zeros(100, 32)}, file)


@pytest.mark.parametrize(
    "spoil, expected",
    [
        (four_bits, "holds quantised weights .*Take the bf16, fp16 or fp8_e4m3fn version"),
        (scales_of_rows, r"scales double_blocks.0.img_attn.proj.weight by \(4, 32\) numbers"),
        (one_less, "the transformer of flux1-dev.safetensors lacks 4 of"),
        (other_shape, r"has shape \(100, 32\), \(128, 32\) was expected"),
    ],
)
def test_spoiled_transformer_files_are_told(pieces, spoil: Callable[[Path], None], expected):
    spoil(Path(pieces[NAME]))
    with pytest.raises(OptionError, match=expected):
        load(**pieces)


def test_models_with_more_inputs_are_refused(folder):
    with torch.random.fork_rng(devices=[]):
        config = {**FLUX.tiny().backbone.config, "in_channels": 384, "out_channels": 64}
        FluxTransformer2DModel.from_config(config).save_pretrained(folder / "transformer")
    text = sentence(folder)
    assert "the transformer takes 384 numbers a token, but 2 x 2 latents of the autoencoder are 64" in text and "Fill" in text


def test_text_encoders_of_other_widths_are_refused(saved, folder):
    with torch.random.fork_rng(devices=[]):
        config = {**FLUX.tiny().backbone.config, "joint_attention_dim": 40, "pooled_projection_dim": 12}
        FluxTransformer2DModel.from_config(config).save_pretrained(folder / "transformer")
    text = sentence(folder, t5xxl=str(saved))
    assert "t5xxl: the text encoder T5-XXL makes vectors of 24 numbers, but the transformer takes 40" in text
    assert f"{NAME}: the text encoder CLIP-L makes vectors of 16 numbers, but the transformer takes 12" in text


def test_the_vae_of_another_family_is_refused(saved, tmp_path):
    save_file(vae_file(family("sdxl").tiny()), tmp_path / "sdxl_vae.safetensors")
    text = sentence(saved, ae=str(tmp_path / "sdxl_vae.safetensors"))
    assert "makes latents of 4 channels, but those of FLUX have 16" in text


def test_encoders_without_tokenizers_say_what_to_put_where(saved, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    alone = tmp_path / "alone"
    for part in ("vae", "text_encoder", "text_encoder_2"):
        shutil.copytree(saved / part, alone / part)
    file = alone / "flux1-dev.safetensors"
    save_file(transformer_file(tiny), file)
    places = companions_elsewhere(alone)
    assert "vocab.json and merges.txt" in sentence(file, **places) and "folder named tokenizer" in sentence(file, **places)
    shutil.copytree(saved / "tokenizer", alone / "tokenizer")
    text = sentence(file, **places)
    assert "spiece.model" in text and "google/t5-v1_1-xxl" in text and "folder named tokenizer_2" in text
    shutil.copytree(saved / "tokenizer_2", alone / "tokenizer_2")
    assert_same(load(file, **places), tiny)


def test_a_clip_tokenizer_is_not_taken_for_t5s(pieces, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    shutil.rmtree(Path(pieces[NAME]).parent / "tokenizer_2")
    text = sentence(**pieces)
    assert "t5xxl.safetensors holds no tokenizer" in text and "spiece.model" in text and "folder named tokenizer_2" in text
