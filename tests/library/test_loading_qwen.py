"""Loading of Qwen-Image: folders, transformer files with VAE and text encoder of every layout, 8-bit networks, sentences for the rest."""

import json
import logging
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from safetensors.torch import save_file
from transformers import Qwen2VLImageProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from sd_scripts import families
from sd_scripts.families import RUNS
from sd_scripts.families.common.qwen_vae import QWEN_VAE_PART
from sd_scripts.families.qwen_edit import loading as qwen
from sd_scripts.families.qwen_edit import original as original_qwen
from sd_scripts.families.qwen_edit import processor as qwen_processor
from sd_scripts.families.qwen_edit import templates as qwen_templates
from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.families.qwen_edit.options import QwenImageModelOptions
from sd_scripts.library.core.protocols import Parts, StateDict
from sd_scripts.library.loading import layouts
from sd_scripts.library.loading.common import config_of
from sd_scripts.schema.errors import OptionError
from tests.library.loading_in_small import assert_same, original_state, prefixed, shipped_configs, to_original
from tests.small_models import model_options, qwen_pipeline_of

QWEN = QwenEdit()
pytestmark = pytest.mark.usefixtures("no_network")
CPU = torch.device("cpu")
NAME = "pretrained_model_name_or_path"
NETWORKS = ("backbone", "vae", "te1")
FP8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def tiny() -> Parts:
    return QWEN.tiny()


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory) -> Path:
    """The tiny model as diffusers itself writes it; its index says that its images are small."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen"
    qwen_pipeline_of(tiny).save_pretrained(folder)
    return with_index(folder, _default_side=64)


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "tiny-qwen"))


def with_index(folder: Path, **changes) -> Path:
    index = folder / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), **changes}))
    return folder


@pytest.fixture
def pieces(tiny, folder) -> dict[str, str]:
    """A transformer file and its companions, beside the configuration and tokenizer of the tiny model; as options."""
    files = {NAME: "backbone", "vae": "vae", "text_encoder": "te1"}
    for option, name in files.items():
        save_file(original_state(qwen.SPEC, tiny, name), folder / f"{option}.safetensors")
    return {option: str(folder / f"{option}.safetensors") for option in files}


def load(*places: Path | str, without=(), dtype=torch.float32, **more) -> Parts:
    values = {NAME: str(places[0])} if places else {}
    return QWEN.load(QwenImageModelOptions(**{**values, **more}), CPU, dtype, without)


def sentence(*places: Path | str, **more) -> str:
    """What a person is told when this cannot be loaded."""
    with pytest.raises(OptionError) as raised:
        load(*places, **more)
    return str(raised.value)


# What can be loaded


def test_a_diffusers_folder_gives_its_networks_ready_and_frozen(saved, tiny):
    parts = load(saved)
    assert_same(parts, tiny)
    assert parts.source == "tiny-qwen" and parts.kind == "velocity" and parts.settings == tiny.settings
    for module in parts.modules().values():
        assert not any(one.training for one in module.modules()) and not any(p.requires_grad for p in module.parameters())
    caption = "make it red"
    control = torch.rand(3, 64, 64) * 2 - 1
    expected, own = (QWEN.encode_instructions(one, [control], [caption]) for one in (tiny, parts))
    assert torch.equal(expected[0], own[0]) and torch.equal(expected[1][0], own[1][0])


@pytest.mark.parametrize("version", ["edit", "edit-2509", "edit-2511", "image"])
def test_what_is_written_says_which_version_it_is(version, tmp_path, caplog):
    parts = QWEN.tiny(version)
    QWEN.save(parts, tmp_path / "model", "diffusers", None, {})
    again = load(tmp_path / "model")
    assert_same(again, parts)
    assert again.settings == parts.settings and (again.processor is None) == (version == "image")
    assert again.backbone.config.zero_cond_t == (version == "edit-2511")
    assert not caplog.records


def test_diffusers_reads_what_is_written(tmp_path, tiny):
    QWEN.save(tiny, tmp_path / "model", "diffusers", None, {})
    read = QwenImageEditPlusPipeline.from_pretrained(tmp_path / "model", processor=tiny.processor)
    for name, module in (("backbone", read.transformer), ("vae", read.vae), ("te1", read.text_encoder)):
        wanted = tiny.modules()[name].state_dict()
        assert all(torch.equal(tensor, wanted[key]) for key, tensor in module.state_dict().items()), name
    text = "<|im_start|>make it red<|image_pad|>"
    assert read.tokenizer(text).input_ids == tiny.tokenizers["te1"](text).input_ids
    images = Qwen2VLImageProcessorPil.from_pretrained(tmp_path / "model" / "processor")
    assert qwen_templates.settings_of("edit", 1, 1, 1, images) == qwen_templates.settings_of(
        "edit", 1, 1, 1, tiny.processor.image_processor
    )


def test_a_model_without_a_side_of_its_own_has_images_of_a_million_pixels(folder):
    with_index(folder, _default_side=0)
    assert [load(folder).settings[name] for name in ("area", "control_area", "condition_area")] == [1024**2, 1024**2, 384**2]
    smaller = load(folder, control_resolution=512).settings
    assert [smaller[name] for name in ("area", "control_area", "condition_area")] == [1024**2, 512**2, 384**2]


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model."])
def test_a_transformer_file_is_loaded_with_its_companions(prefix, tiny, pieces):
    save_file(prefixed(original_state(qwen.SPEC, tiny, "backbone"), prefix), pieces[NAME])
    parts = load(**pieces)
    assert_same(parts, tiny)
    assert parts.settings == tiny.settings and parts.source == f"{NAME}.safetensors"


def test_networks_of_one_file_or_folder_are_taken_for_their_options(tiny, pieces, folder, saved):
    for option, place in (("vae", folder / "vae"), ("vae", folder), ("text_encoder", folder / "text_encoder"), ("text_encoder", folder)):
        assert_same(load(**{**pieces, option: str(place)}), tiny)
    whole = {
        **prefixed(original_state(qwen.SPEC, tiny, "backbone"), "model.diffusion_model."),
        **prefixed(original_state(qwen.SPEC, tiny, "vae"), "vae."),
        **prefixed(original_state(qwen.SPEC, tiny, "te1"), "text_encoders.qwen25_7b.transformer."),
    }
    save_file(whole, folder / "whole.safetensors")
    assert_same(load(folder / "whole.safetensors"), tiny)


def test_a_text_encoder_without_a_head_is_read_in_either_spelling(tiny, pieces):
    for state in (tiny.text_encoders["te1"].state_dict(), original_state(qwen.SPEC, tiny, "te1")):
        save_file({key: tensor.contiguous() for key, tensor in state.items() if key != "lm_head.weight"}, pieces["text_encoder"])
        encoder = load(**pieces).text_encoders["te1"]
        assert torch.equal(encoder.lm_head.weight, encoder.model.language_model.embed_tokens.weight)
        expected = tiny.text_encoders["te1"].model.state_dict()
        assert all(torch.equal(tensor, expected[key]) for key, tensor in encoder.model.state_dict().items())


def test_fp8_files_are_read_with_their_scales(tiny, pieces):
    plain = original_state(qwen.SPEC, tiny, "backbone")
    scaled: StateDict = {}
    for key, tensor in plain.items():
        if key.endswith(".weight") and tensor.ndim == 2:
            scale = tensor.abs().max() / 448
            scaled |= {key: (tensor / scale).to(FP8), key.replace(".weight", ".scale_weight"): scale}
        else:
            scaled[key] = tensor.to(torch.bfloat16)
    save_file({**scaled, "scaled_fp8": torch.zeros(0, dtype=FP8)}, pieces[NAME])
    state = load(**pieces).backbone.state_dict()
    for key, tensor in plain.items():
        assert (state[key] - tensor).norm() <= 0.04 * tensor.norm() + 1e-6, key
    save_file({key: tensor.to(FP8) for key, tensor in plain.items()}, pieces[NAME])
    state = load(**pieces, dtype=torch.bfloat16).backbone.state_dict()
    assert all(torch.equal(state[key], tensor.to(FP8).to(torch.bfloat16)) for key, tensor in plain.items())


def test_a_single_file_needs_a_version_unless_it_says_it(tiny, pieces, folder, tmp_path):
    (tmp_path / "alone").mkdir()
    shutil.copytree(folder / "tokenizer", tmp_path / "alone" / "tokenizer")
    alone = tmp_path / "alone" / "transformer.safetensors"
    state = original_state(qwen.SPEC, tiny, "backbone")
    save_file(state, alone)
    companions = {option: str(folder / folder_name) for option, folder_name in (("vae", "vae"), ("text_encoder", "text_encoder"))}
    told = sentence(alone, **companions)
    assert "model_version: the single file transformer.safetensors does not say which Qwen-Image it is" in told
    for version in ("edit", "edit-2509", "edit-2511", "image"):
        parts = load(alone, **companions, model_version=version)
        assert parts.settings["model_version"] == version and parts.settings["area"] == 1024 * 1024
        assert parts.backbone.config.zero_cond_t == (version == "edit-2511")
        # Heads of 16 have 1/8, 7/16 and 7/16 of their numbers for the three axes only roughly.
        assert sum(parts.backbone.config.axes_dims_rope) == 16
    save_file({**state, original_qwen.CONTROLS_AT_ZERO: torch.zeros(0)}, alone)
    assert load(alone, **companions).settings["model_version"] == "edit-2511"
    assert "only edit-2511 has" in sentence(alone, **companions, model_version="edit")


def test_a_chosen_version_is_taken_unless_the_transformer_is_another(folder, saved, caplog):
    assert load(saved, model_version="edit").settings["model_version"] == "edit"
    assert "tiny-qwen says that it is edit-2509; it is used as edit" in caplog.text
    assert "has no zero_cond_t, as edit-2511 has; take auto" in sentence(saved, model_version="edit-2511")


# Layouts of the full size


def test_the_transformer_of_full_size_has_the_published_tensors():
    with torch.device("meta"):
        real = QwenImageTransformer2DModel.from_config(dict(shipped_configs(qwen.SPEC))["backbone"])
    shapes = {key: tuple(tensor.shape) for key, tensor in real.state_dict().items()}
    linears = [layer for layer in real.modules() if isinstance(layer, torch.nn.Linear)]
    assert len(linears) == 846 and round(sum(tensor.numel() for tensor in real.parameters()) / 1e9, 3) == 20.430
    assert shapes["transformer_blocks.59.txt_mod.1.weight"] == (18432, 3072) and shapes["txt_in.weight"] == (3072, 3584)
    config = original_qwen.config_of(shapes, zero_cond_t=False)
    assert all(
        list(real.config[key]) == value if key == "axes_dims_rope" else real.config[key] == value
        for key, value in config.items()
        if key[0] != "_"
    )
    assert [key for key in shapes if original_qwen.transformer(config)(key).name != key] == []


def test_the_text_encoder_of_full_size_has_the_published_size_and_names():
    with torch.device("meta"):
        real = qwen.SPEC.parts["te1"].make(dict(shipped_configs(qwen.SPEC))["te1"])
    # As the index of the published weights says, in bf16.
    assert 2 * sum(tensor.numel() for tensor in real.parameters()) == 16_584_333_312
    names = {original_qwen.text_encoder({})(key).name for key in real.state_dict()}
    assert {
        "model.embed_tokens.weight",
        "model.layers.27.mlp.down_proj.weight",
        "visual.blocks.31.attn.qkv.bias",
        "lm_head.weight",
    } <= names
    assert {name.split(".")[0] for name in names} == {"model", "visual", "lm_head"}


def test_wans_names_of_the_vae_are_those_that_diffusers_converts():
    with torch.device("meta"):
        real = AutoencoderKLQwenImage.from_config(dict(shipped_configs(qwen.SPEC))["vae"])
    assert sum(tensor.numel() for tensor in real.parameters()) == 126_892_531
    state = real.state_dict()
    stored = to_original(layouts.places(QWEN_VAE_PART.layout, state, config_of(real)), state)
    assert len(stored) == len(state)
    back = convert_wan_vae_to_diffusers(dict(stored))
    assert back.keys() == state.keys() and all(back[key].shape == state[key].shape for key in state)


# Images for the text encoder


def test_the_image_processor_knows_sizes_by_every_name():
    for config in (
        {"min_pixels": 3136, "max_pixels": 12845056},
        {"size": {"shortest_edge": 3136, "longest_edge": 12845056}},
        {"size": {"min_pixels": 3136, "max_pixels": 12845056}, "patch_size": 14},
    ):
        assert dict(qwen_processor.images_of(config).size) == {"shortest_edge": 3136, "longest_edge": 12845056}
    assert dict(qwen_processor.images_of({}).size) == Qwen2VLImageProcessorPil.size
    assert Qwen2VLImageProcessor is not None


# Networks left out


@pytest.mark.parametrize("name", families.NAMES)
def test_networks_left_out_have_their_structure_and_none_of_their_weights_is_read(name, tmp_path):
    family = families.family(name)
    whole = family.tiny()
    family.save(whole, tmp_path / "model", "diffusers", None, {})
    options = model_options(name)
    every = list(whole.modules())
    for without in (("backbone",), ("vae", *whole.text_encoders)):
        copy = Path(shutil.copytree(tmp_path / "model", tmp_path / f"without-{without[0]}"))
        folders = {"backbone": ("unet", "transformer"), "vae": ("vae",), "te1": ("text_encoder",), "te2": ("text_encoder_2",)}
        for left in without:
            for folder in folders.get(left, ("text_encoder_2",)):
                for file in (copy / folder).glob("*.safetensors"):
                    file.unlink()
        parts = family.load(options(pretrained_model_name_or_path=str(copy)), CPU, torch.float32, without)
        for one in every:
            module, expected = parts.modules()[one], whole.modules()[one]
            assert [tuple(p.shape) for p in module.parameters()] == [tuple(p.shape) for p in expected.parameters()]
            assert {p.device.type for p in module.parameters()} == {"meta" if one in without else "cpu"}
            assert not any(p.requires_grad for p in module.parameters()) and not module.training
        assert parts.settings == whole.settings and parts.tokenizers.keys() == whole.tokenizers.keys()


def test_a_transformer_file_alone_is_enough_where_nothing_else_is_run(tiny, pieces):
    parts = load(pieces[NAME], without=("vae", "te1"))
    assert_same(parts, tiny, ("backbone",))
    assert parts.settings == tiny.settings and parts.vae.decoder.conv_in.weight.is_meta


def test_what_is_merged_into_a_network_that_was_left_out_is_passed_over(saved, tmp_path):
    layer = "transformer.transformer_blocks.0.attn.to_q"
    save_file({f"{layer}.lora_A.weight": torch.ones(2, 32), f"{layer}.lora_B.weight": torch.ones(32, 2)}, tmp_path / "lora.safetensors")
    parts = load(saved, without=("backbone",), base_weights=(str(tmp_path / "lora.safetensors"),))
    assert parts.backbone.get_submodule("transformer_blocks.0.attn.to_q").weight.is_meta


# Sentences


def test_what_is_missing_beside_a_transformer_is_named(pieces, folder, tmp_path):
    told = sentence(pieces[NAME])
    assert "lacks the VAE and the text encoder Qwen2.5-VL. Set vae (qwen_image_vae.safetensors) and text_encoder (" in told
    shutil.rmtree(folder / "tokenizer")
    shutil.rmtree(folder / "processor")
    place = tmp_path / "elsewhere"
    place.mkdir()
    for option, file in pieces.items():
        pieces[option] = str(Path(shutil.copy(file, place)))
    for name in ("vae", "text_encoder"):
        shutil.copytree(folder / name, place / name)
        pieces[name] = str(place / name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        told = sentence(**pieces, model_version="edit")
    assert "holds no tokenizer" in told and "Put Qwen2.5-VL's vocab.json and merges.txt and tokenizer_config.json" in told
    assert "into a folder named tokenizer beside the file" in told


@pytest.mark.parametrize(
    ("name", "words"),
    [("sdxl", "is an SDXL checkpoint; you chose Qwen-Image"), ("flux", "is a FLUX transformer; you chose Qwen-Image"), ("sd", "an SD 1.x")],
)
def test_models_of_other_families_are_told_apart_both_ways(name, words, tmp_path, saved, tiny):
    other = families.family(name)
    parts = other.tiny()
    other.save(parts, tmp_path / "other.safetensors", "safetensors", None, {})
    assert words in sentence(tmp_path / "other.safetensors", model_version="edit")
    other.save(parts, tmp_path / "other", "diffusers", None, {})
    assert "; you chose Qwen-Image. Choose its own family, or a Qwen-Image transformer" in sentence(tmp_path / "other")
    options = RUNS[(name, "network")].model_fields["model"].annotation
    assert options is not None
    save_file(original_state(qwen.SPEC, tiny, "backbone"), tmp_path / "qwen.safetensors")
    for place, told in ((tmp_path / "qwen.safetensors", "is a Qwen-Image transformer; you chose"), (saved, "is a QwenImageEditPlus model")):
        with pytest.raises(OptionError, match=told):
            other.load(options(pretrained_model_name_or_path=str(place)), CPU, torch.float32)


def test_the_wrong_file_for_an_option_is_named(pieces, tiny):
    assert f"vae: {NAME}.safetensors is a Qwen-Image transformer; a VAE for Qwen-Image is needed" in sentence(
        **{**pieces, "vae": pieces[NAME]}
    )
    assert "text_encoder: vae.safetensors is a VAE of Qwen-Image alone" in sentence(**{**pieces, "text_encoder": pieces["vae"]})
    assert "A VAE of Qwen-Image alone goes into vae" in sentence(**{**pieces, NAME: pieces["vae"]})
    assert "A Qwen2.5-VL text encoder goes into text_encoder" in sentence(**{**pieces, NAME: pieces["text_encoder"]})


def test_parts_that_do_not_belong_together_are_told_apart(folder, tiny):
    config = folder / "transformer" / "config.json"
    layered = {**json.loads(config.read_text()), "use_layer3d_rope": True}
    config.write_text(json.dumps(layered))
    assert "is a Qwen-Image-Layered model" in sentence(folder)
    wide = QwenImageTransformer2DModel(
        in_channels=64,
        out_channels=16,
        num_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        axes_dims_rope=(4, 6, 6),
    )
    wide.save_pretrained(folder / "transformer")
    assert "makes rows of 32 numbers, but the transformer takes 48" in sentence(folder)


def test_a_tokenizer_of_another_kind_is_refused_before_weights_are_read(folder):
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    words = json.loads(tokenizer.read_text())
    words["model"]["merges"] = words["model"]["merges"][:20]
    tokenizer.write_text(json.dumps(words))
    assert "it is not the tokenizer of Qwen2.5-VL" in sentence(folder)


def test_every_problem_is_told_at_once(tmp_path, pieces):
    told = sentence(pieces[NAME], vae=str(tmp_path / "no.safetensors"), text_encoder=pieces["vae"], base_weights=(str(tmp_path / "no"),))
    assert "vae: there is no" in told and "text_encoder: vae.safetensors is" in told and "base_weights: there is no" in told


# Eight bits


@pytest.mark.parametrize(("kind", "bound"), [("qint8", 0.012), ("qfloat8", 0.05)])
def test_networks_are_held_in_eight_bits_where_it_is_asked(kind, bound, saved, tiny, caplog):
    caplog.set_level(logging.INFO)
    parts = load(saved, transformer_quantization=kind, text_encoder_quantization=kind, dtype=torch.bfloat16)
    held = {name: quantised(parts.modules()[name]) for name in NETWORKS}
    assert not held["vae"] and len(held["backbone"]) == 2 * 14 and len(held["te1"]) == 2 * 7
    assert all(name.startswith("transformer_blocks.") for name in held["backbone"])
    assert all(name.startswith("model.language_model.layers.") for name in held["te1"])
    assert not any(p.requires_grad for module in parts.modules().values() for p in module.parameters())
    from sd_scripts.library.core.protocols import dtype_of

    assert [dtype_of(parts.modules()[name]) for name in ("backbone", "te1")] == [torch.bfloat16] * 2 and parts.device == CPU
    told = [record.message for record in caplog.records if "held in 8 bits" in record.message]
    assert len(told) == 2 and f"{kind}: 28 layers of QwenImageTransformer2DModel" in told[0]
    x_t, t = torch.randn(1, 16, 8, 8), torch.tensor([0.5])
    one = {"text": torch.randn(9, 32), "control_0": torch.randn(16, 8, 8)}
    plain = QWEN.denoise(tiny, x_t, t, [one])
    assert 0 < (QWEN.denoise(parts, x_t, t, [one]) - plain).norm() < bound * plain.norm()
    control = torch.rand(3, 64, 64) * 2 - 1
    rows, expected = (
        torch.cat([prefix, *suffixes]) for prefix, suffixes in (QWEN.encode_instructions(p, [control], ["red"]) for p in (parts, tiny))
    )
    assert 0 < (rows.float() - expected).norm() < 4 * bound * expected.norm()


def quantised(module: torch.nn.Module) -> list[str]:
    return [name for name, layer in module.named_modules() if type(layer).__name__ == "QLinear"]


def test_what_is_merged_first_is_quantised_afterwards(saved, tiny, tmp_path):
    layer = "transformer_blocks.0.attn.to_q"
    down, up = torch.randn(2, 32), torch.randn(32, 2)
    save_file({f"transformer.{layer}.lora_A.weight": down, f"transformer.{layer}.lora_B.weight": up}, tmp_path / "lora.safetensors")
    parts = load(saved, transformer_quantization="qint8", base_weights=(str(tmp_path / "lora.safetensors"),))
    assert len(quantised(parts.backbone)) == 28
    wanted = tiny.backbone.get_submodule(layer).weight + up @ down
    found = parts.backbone.get_submodule(layer).weight.dequantize()
    assert (found - wanted).norm() < 0.01 * wanted.norm()


def test_quantised_weights_are_those_of_reading_first_and_quantising_then(saved):
    from sd_scripts.library.memory.quantize import quantize_network

    at_once, later = load(saved, transformer_quantization="qint8").backbone, load(saved).backbone
    report = quantize_network(later, "qint8")
    assert len(report.errors) == 28 and 0 < max(report.errors.values()) < 0.01
    first, second = at_once.state_dict(), later.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first if isinstance(first[key], torch.Tensor))


def test_an_adapter_is_trained_on_a_transformer_in_eight_bits(saved):
    from sd_scripts.families.qwen_edit.options import QwenImageNetworkOptions
    from sd_scripts.library.adapters.attaching import attach

    parts = load(saved, transformer_quantization="qint8")
    before = {key: tensor.clone() for key, tensor in parts.backbone.state_dict().items()}
    network = attach(parts, QwenImageNetworkOptions(network_dim=4, network_alpha=4), QWEN.adapter_targets(parts, False), seed=1)
    trained = list(network.named_parameters().values())
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    x_t, target = torch.randn(2, 16, 8, 8), torch.randn(2, 16, 8, 8)
    conditions = [{"text": torch.randn(9, 32), "control_0": torch.randn(16, 8, 8)} for _ in range(2)]
    losses = []
    for _ in range(12):
        loss = (QWEN.denoise(parts, x_t, torch.tensor([0.3, 0.7]), conditions) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(parameter.grad is not None for parameter in trained)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    network.detach()
    after = parts.backbone.state_dict()
    assert before.keys() == after.keys() and all(torch.equal(after[key], before[key]) for key in before)


def test_the_other_pipelines_are_families_of_their_own(folder):
    for name in ("QwenImageLayeredPipeline", "QwenImage21Pipeline", "FluxPipeline"):
        with_index(folder, _class_name=name)
        assert f"({name}); you chose Qwen-Image" in sentence(folder)
    for pipeline in (QwenImagePipeline, QwenImageEditPipeline, QwenImageEditPlusPipeline):
        assert pipeline.__name__ in qwen.SPEC.pipelines
