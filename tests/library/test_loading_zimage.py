"""Loading of Z-Image: folders, files of the published layout with VAE and text encoder, 8-bit networks, sentences for the rest."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import ZImagePipeline, ZImageTransformer2DModel
from diffusers.loaders.single_file_utils import convert_z_image_transformer_checkpoint_to_diffusers
from safetensors.torch import save_file

from sd_scripts.families.zimage import loading as zimage
from sd_scripts.families.zimage import original as original_zimage
from sd_scripts.families.zimage.model import ZImage
from sd_scripts.families.zimage.options import ZImageModelOptions
from sd_scripts.library.core.diffusion import anchor_sigmas
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.library.loading import layouts
from sd_scripts.library.memory import quantize
from sd_scripts.schema.errors import OptionError
from tests.library.loading_in_small import assert_same, original_state, prefixed, shipped_configs, to_original
from tests.small_models import zimage_pipeline_of

ZIMAGE = ZImage()
pytestmark = pytest.mark.usefixtures("no_network")
CPU = torch.device("cpu")
NAME = "pretrained_model_name_or_path"


@pytest.fixture(scope="module")
def tiny() -> Parts:
    return ZIMAGE.tiny()


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory) -> Path:
    """The tiny model as diffusers itself writes it."""
    folder = tmp_path_factory.mktemp("models") / "tiny-zimage"
    zimage_pipeline_of(tiny).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "tiny-zimage"))


@pytest.fixture
def pieces(tiny, folder) -> dict[str, str]:
    """A transformer file and its companions, beside the configuration and tokenizer of the tiny model; as options."""
    files = {NAME: "backbone", "vae": "vae", "text_encoder": "te1"}
    for option, name in files.items():
        save_file(original_state(zimage.SPEC, tiny, name), folder / f"{option}.safetensors")
    return {option: str(folder / f"{option}.safetensors") for option in files}


def load(*places: Path | str, without=(), dtype=torch.float32, **more) -> Parts:
    values = {NAME: str(places[0])} if places else {}
    return ZIMAGE.load(ZImageModelOptions(**{**values, **more}), CPU, dtype, without)


def sentence(*places: Path | str, **more) -> str:
    """What a person is told when this cannot be loaded."""
    with pytest.raises(OptionError) as raised:
        load(*places, **more)
    return str(raised.value)


def changed(file: Path, **values) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


# What can be loaded


def test_a_diffusers_folder_gives_its_networks_ready_and_frozen(saved, tiny):
    parts = load(saved)
    assert_same(parts, tiny)
    assert parts.source == "tiny-zimage" and parts.kind == "velocity" and parts.settings == tiny.settings
    for module in parts.modules().values():
        assert not any(one.training for one in module.modules()) and not any(p.requires_grad for p in module.parameters())
    expected, own = (ZIMAGE.encode_prompts(one, ["a red star"])[0]["text"] for one in (tiny, parts))
    assert torch.equal(expected, own)


def test_diffusers_reads_what_is_written_and_draws_the_same(tmp_path, tiny):
    ZIMAGE.save(tiny, tmp_path / "model", "diffusers", None, {})
    read = ZImagePipeline.from_pretrained(tmp_path / "model")
    read.set_progress_bar_config(disable=True)
    for name, module in (("backbone", read.transformer), ("vae", read.vae), ("te1", read.text_encoder)):
        wanted = tiny.modules()[name].state_dict()
        assert all(torch.equal(tensor, wanted[key]) for key, tensor in module.state_dict().items()), name
    drawn = read(
        "a red star",
        width=64,
        height=64,
        num_inference_steps=3,
        guidance_scale=0.0,
        generator=torch.Generator().manual_seed(4),
        output_type="pt",
    )
    own = ZIMAGE.render(tiny, [Preview("a red star", width=64, height=64, seed=4, steps=3, cfg_scale=1.0)])
    assert (drawn.images * 2 - 1 - own).abs().max() < 1e-4


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
def test_a_transformer_file_is_loaded_with_its_companions(prefix, tiny, pieces):
    extra = {"norm_final.weight": torch.ones(48)}
    save_file(prefixed({**original_state(zimage.SPEC, tiny, "backbone"), **extra}, prefix), pieces[NAME])
    parts = load(**pieces)
    assert_same(parts, tiny)
    assert parts.settings == tiny.settings and parts.source == f"{NAME}.safetensors"


def test_a_transformer_file_in_the_diffusers_layout_is_loaded(tiny, pieces):
    save_file({key: tensor.contiguous() for key, tensor in tiny.backbone.state_dict().items()}, pieces[NAME])
    assert_same(load(**pieces), tiny)


def test_networks_of_one_file_or_folder_are_taken_for_their_options(tiny, pieces, folder):
    for option, place in (("vae", folder / "vae"), ("vae", folder), ("text_encoder", folder / "text_encoder"), ("text_encoder", folder)):
        assert_same(load(**{**pieces, option: str(place)}), tiny)
    whole = {
        **prefixed(original_state(zimage.SPEC, tiny, "backbone"), "model.diffusion_model."),
        **prefixed(original_state(zimage.SPEC, tiny, "vae"), "vae."),
        **prefixed(original_state(zimage.SPEC, tiny, "te1"), "text_encoders.qwen3_4b.transformer."),
    }
    save_file(whole, folder / "whole.safetensors")
    assert_same(load(folder / "whole.safetensors"), tiny)


def test_a_text_encoder_with_its_head_is_read_without_it(tiny, pieces, folder, caplog):
    state = original_state(zimage.SPEC, tiny, "te1")
    save_file({**state, "lm_head.weight": state["model.embed_tokens.weight"].clone()}, pieces["text_encoder"])
    changed(folder / "text_encoder" / "config.json", architectures=["Qwen3ForCausalLM"])
    assert_same(load(**pieces), tiny)
    # As Z-Image's folders hold it.
    shutil.copy(pieces["text_encoder"], folder / "text_encoder" / "model.safetensors")
    assert_same(load(folder), tiny)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_without_a_network_its_weights_are_not_read(tiny, folder):
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    parts = load(folder, without=("backbone",))
    assert next(parts.backbone.parameters()).is_meta
    assert_same(parts, tiny, ("vae", "te1"))


@pytest.mark.parametrize("kind", ["qint8", "qfloat8"])
def test_both_large_networks_can_be_held_in_8_bits_and_merging_comes_first(kind, saved, tiny, caplog):
    with caplog.at_level(logging.INFO):
        parts = load(saved, transformer_quantization=kind, text_encoder_quantization=kind, dtype=torch.bfloat16)
    assert f"{kind}: 31 layers of ZImageTransformer2DModel are held in 8 bits" in caplog.text
    assert quantize.is_quantized(parts.backbone) and quantize.is_quantized(parts.text_encoders["te1"])
    assert not quantize.is_quantized(parts.vae)
    for name, layer in parts.backbone.layers.named_modules():
        if isinstance(layer, torch.nn.Linear):
            wanted = tiny.backbone.layers.get_submodule(name).weight
            assert (layer.weight.dequantize().float() - wanted).norm() < 0.06 * wanted.norm()
    x, text = torch.randn(1, 16, 8, 8), ZIMAGE.encode_prompts(parts, ["a star"])
    assert ZIMAGE.denoise(parts, x, torch.tensor([0.5]), text).isfinite().all()


def test_the_shift_is_the_models_unless_another_is_given(folder, pieces):
    assert load(folder).scheduler_config["shift"] == 3.0
    changed(folder / "scheduler" / "scheduler_config.json", shift=6.0)
    assert load(folder).scheduler_config["shift"] == 6.0
    parts = load(folder, scheduler_shift=2.5)
    assert parts.scheduler_config["shift"] == 2.5
    clocks = []
    parts.backbone.register_forward_pre_hook(lambda module, arguments: clocks.append(1 - arguments[1]))
    ZIMAGE.preview(parts, [Preview("a", width=64, height=64, steps=4, cfg_scale=1.0)])
    assert torch.cat(clocks).tolist() == pytest.approx(anchor_sigmas(4, 2.5), abs=1e-6)


def test_a_single_file_far_from_any_configuration_has_turbos_shift(tiny, pieces, folder, tmp_path):
    (tmp_path / "alone").mkdir()
    shutil.copytree(folder / "tokenizer", tmp_path / "alone" / "tokenizer")
    changed(folder / "scheduler" / "scheduler_config.json", shift=6.0)
    alone = tmp_path / "alone" / "z.safetensors"
    save_file(original_state(zimage.SPEC, tiny, "backbone"), alone)
    parts = load(alone, vae=str(folder), text_encoder=str(folder))
    assert parts.scheduler_config["shift"] == 3.0
    assert_same(parts, tiny)
    # A head of 16 splits as the published one of 128 does.
    assert parts.backbone.config.axes_dims == [4, 6, 6] and parts.backbone.config.n_refiner_layers == 1


# The published layout


@pytest.fixture(scope="module")
def real() -> ZImageTransformer2DModel:
    with torch.device("meta"):
        return ZImageTransformer2DModel.from_config(dict(shipped_configs(zimage.SPEC))["backbone"])


def test_the_transformer_of_full_size_has_the_published_size_and_shapes(real):
    assert sum(tensor.numel() for tensor in real.parameters()) == 6_154_908_736
    shapes = {key: tuple(tensor.shape) for key, tensor in real.state_dict().items()}
    assert shapes["layers.29.feed_forward.w2.weight"] == (3840, 10240) and shapes["cap_embedder.1.weight"] == (3840, 2560)
    stored = layouts.places(original_zimage.transformer, shapes, real.config)
    published = {one.name: layouts.shape_to_original(one, shapes[key]) for key, one in stored.items()}
    assert published["layers.0.attention.qkv.weight"] == (11520, 3840)
    assert published["noise_refiner.1.attention.out.weight"] == (3840, 3840)
    assert {
        "x_embedder.weight",
        "final_layer.linear.weight",
        "context_refiner.0.attention.q_norm.weight",
        "cap_pad_token",
    } <= published.keys()
    for names in (shapes, published):
        found = original_zimage.config_of(names)
        assert {key: found[key] for key in found if key[0] != "_"} == {key: real.config[key] for key in found if key[0] != "_"}


def test_there_and_back_is_the_identity_on_names_and_shapes_of_full_size(real):
    state = dict(real.state_dict())
    stored = layouts.places(original_zimage.transformer, state, real.config)
    packed = to_original(stored, state)
    back = {key: layouts.from_original(one, packed[one.name]).shape for key, one in stored.items()}
    assert back == {key: tensor.shape for key, tensor in state.items()}
    theirs = convert_z_image_transformer_checkpoint_to_diffusers(prefixed(packed, "model.diffusion_model."))
    assert {key: tensor.shape for key, tensor in theirs.items()} == back


def test_diffusers_converter_puts_every_number_where_ours_does(tiny):
    theirs = convert_z_image_transformer_checkpoint_to_diffusers(dict(original_state(zimage.SPEC, tiny, "backbone")))
    wanted = tiny.backbone.state_dict()
    assert theirs.keys() == wanted.keys() and all(torch.equal(theirs[key], wanted[key]) for key in wanted)


def test_the_text_encoder_of_full_size_is_that_of_qwen3_4b():
    with torch.device("meta"):
        encoder = zimage.SPEC.parts["te1"].make(dict(shipped_configs(zimage.SPEC))["te1"])
    assert sum(tensor.numel() for tensor in encoder.parameters()) == 4_022_468_096
    assert encoder.config.hidden_size == 2560 and len(encoder.layers) == 36


# Sentences


def test_what_a_transformer_file_lacks_is_named_with_its_options(pieces):
    told = sentence(pieces[NAME])
    assert "lacks the VAE and the text encoder Qwen3. Set vae (ae.safetensors) and text_encoder (qwen_3_4b.safetensors)" in told


def test_networks_that_do_not_belong_together_are_named_all_at_once(folder, tiny):
    config = dict(tiny.backbone.config)
    odd = ZImageTransformer2DModel.from_config({**config, "in_channels": 4, "cap_feat_dim": 24})
    save_file({key: tensor.contiguous() for key, tensor in odd.state_dict().items()}, folder / "transformer" / "m.safetensors")
    shutil.move(folder / "transformer" / "m.safetensors", folder / "transformer" / "diffusion_pytorch_model.safetensors")
    changed(folder / "transformer" / "config.json", in_channels=4, cap_feat_dim=24, axes_lens=[256, 512, 512])
    told = sentence(folder)
    assert "takes latents of 4 channels, but those of the VAE have 16" in told
    assert "makes rows of 32 numbers, but the transformer takes 24" in told
    assert "max_token_length: 512 tokens do not fit into the 256 positions of the transformer; take at most 224" in told
    assert "max_token_length" in sentence(folder, max_token_length=225) and "max_token_length" not in sentence(folder, max_token_length=224)


def test_a_scheduler_that_shifts_by_size_needs_a_shift(folder):
    changed(folder / "scheduler" / "scheduler_config.json", use_dynamic_shifting=True)
    assert "scheduler_shift: the scheduler configuration of tiny-zimage shifts by the size" in sentence(folder)
    assert load(folder, scheduler_shift=3.0).scheduler_config["use_dynamic_shifting"] is False


def test_a_tokenizer_without_chat_template_and_an_omni_model_are_refused(folder, tiny):
    (folder / "tokenizer" / "chat_template.jinja").unlink()
    assert "the tokenizer has no chat template" in sentence(folder)
    config = {key: value for key, value in tiny.backbone.config.items() if key[0] != "_"}
    omni = ZImageTransformer2DModel(**{**config, "siglip_feat_dim": 8})
    save_file({key: tensor.contiguous() for key, tensor in omni.state_dict().items()}, folder / "m.safetensors")
    shutil.move(folder / "m.safetensors", folder / "transformer" / "diffusion_pytorch_model.safetensors")
    changed(folder / "transformer" / "config.json", siglip_feat_dim=8)
    assert "is a Z-Image-Omni model, which cannot be trained here" in sentence(folder)


def test_a_file_without_a_needed_tensor_is_a_sentence(tiny, pieces):
    state = original_state(zimage.SPEC, tiny, "backbone")
    save_file({key: tensor for key, tensor in state.items() if key != "x_embedder.weight"}, pieces[NAME])
    assert "lacks the tensor x_embedder.weight" in sentence(**pieces)
    save_file({key: tensor for key, tensor in state.items() if key != "layers.1.attention.qkv.weight"}, pieces[NAME])
    assert "lacks 3 of" in sentence(**pieces)
