"""Loading of SDXL: every form a model comes in gives the same networks, and everything else a sentence, without any network access."""

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from sd_scripts.families import RUNS, family
from sd_scripts.families.sdxl.options import SdxlModelOptions
from sd_scripts.library.core import diffusion
from sd_scripts.library.core.devices import META
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.headers import read_header
from sd_scripts.runs.model_headers import what_is
from sd_scripts.schema.errors import OptionError
from sd_scripts.toy.build import BASES
from tests.library.loading_in_small import assert_same
from tests.small_models import pipeline_of

SDXL = family("sdxl")
pytestmark = pytest.mark.usefixtures("no_network")
CPU = torch.device("cpu")
NAME = "pretrained_model_name_or_path"


@pytest.fixture(scope="module")
def tiny() -> Parts:
    return SDXL.tiny()


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory) -> Path:
    """The tiny model as diffusers itself writes it."""
    folder = tmp_path_factory.mktemp("models") / "tiny-xl"
    pipeline_of(tiny, force_zeros_for_empty_prompt=False).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy to spoil."""
    return Path(shutil.copytree(saved, tmp_path / "tiny-xl"))


@pytest.fixture
def single(tiny, folder) -> Path:
    """A single file, with configuration and tokenizers beside it."""
    file = folder / "one.safetensors"
    SDXL.save(tiny, file, "safetensors", None, {})
    return file


def options(value: Path | str, **more) -> SdxlModelOptions:
    return SdxlModelOptions(pretrained_model_name_or_path=str(value), **more)


def load(value: Path | str, **more) -> Parts:
    return SDXL.load(options(value, **more), CPU, torch.float32)


def sentence(value: Path | str, **more) -> str:
    """What a person is told when this cannot be loaded."""
    with pytest.raises(OptionError) as raised:
        load(value, **more)
    return str(raised.value)


# What can be loaded


def test_a_diffusers_folder_gives_its_networks_ready_and_frozen(saved, tiny):
    parts = load(saved)
    assert_same(parts, tiny)
    assert parts.source == "tiny-xl" and parts.kind == "epsilon" and parts.settings["force_zeros_for_empty_prompt"] is False
    for module in parts.modules().values():
        assert not any(part.training for part in module.modules())
        assert all(not p.requires_grad and p.device == CPU for p in module.parameters())
        assert all(buffer.device == CPU for buffer in module.buffers())
    with torch.no_grad():
        (got,), (wanted,) = SDXL.encode_prompts(parts, ["a red star"]), SDXL.encode_prompts(tiny, ["a red star"])
    assert torch.equal(got["prompt_embeds"], wanted["prompt_embeds"]) and torch.equal(got["pooled"], wanted["pooled"])


def test_a_single_file_gives_the_networks_of_the_folder(single, tiny):
    parts = load(single)
    assert_same(parts, tiny)
    assert parts.source == "one.safetensors"


def test_nothing_of_the_global_random_state_is_used_while_loading(saved):
    before = torch.get_rng_state()
    load(saved)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_network_on_the_meta_device_is_checked_and_not_read(saved, folder, tiny):
    places = {**dict.fromkeys(("vae", "te1", "te2"), CPU), "backbone": META}
    file = folder / "unet" / "diffusion_pytorch_model.safetensors"
    weights = load_file(file)
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}, file)
    with pytest.raises(OptionError, match="NaN"):
        load(folder)
    parts = SDXL.load(options(folder), places, torch.float32)
    assert all(tensor.is_meta for tensor in parts.backbone.state_dict().values())
    assert_same(parts, tiny, ("vae", "te1", "te2"))
    save_file({name: tensor for name, tensor in weights.items() if name != "conv_in.weight"}, file)
    with pytest.raises(OptionError, match="lacks 1 of"):
        SDXL.load(options(folder), places, torch.float32)


def test_a_model_in_the_hub_cache_loads_without_a_network(saved, tiny, tmp_path, monkeypatch):
    repository = tmp_path / "hub" / "models--someone--tiny-xl"
    shutil.copytree(saved, repository / "snapshots" / ("a" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    parts = load("someone/tiny-xl")
    assert_same(parts, tiny)
    assert parts.source == "someone/tiny-xl"


def test_a_link_is_called_by_its_own_name(single, tiny):
    kept = single.with_name("0123abcd")
    single.rename(kept)
    single.symlink_to(kept)
    parts = load(single)
    assert parts.source == "one.safetensors"
    assert_same(parts, tiny, ("vae",))


def test_the_loaded_model_does_not_change_with_its_file(single, tiny):
    parts = load(single)
    with single.open("r+b") as file:
        file.seek(single.stat().st_size // 4)
        file.write(b"\x11" * (single.stat().st_size // 2))
    assert_same(parts, tiny)


def test_networks_come_in_the_wanted_precision_and_the_vae_in_its_own(saved, single):
    for place in (saved, single):
        parts = SDXL.load(options(place), CPU, torch.float16)
        assert {p.dtype for p in parts.backbone.parameters()} == {torch.float16}
        assert {p.dtype for encoder in parts.text_encoders.values() for p in encoder.parameters()} == {torch.float16}
        assert {p.dtype for p in parts.vae.parameters()} == {torch.float32}
    assert {p.dtype for p in load(saved, vae_dtype="bf16").vae.parameters()} == {torch.bfloat16}


def test_the_variant_chooses_the_files(folder, tiny):
    for file in folder.rglob("*.safetensors"):
        file.rename(file.with_name(f"{file.stem}.fp16.safetensors"))
    assert_same(load(folder, variant="fp16"), tiny)
    text = sentence(folder)
    assert "tiny-xl/unet has no diffusion_pytorch_model.safetensors, but variant fp16; set variant" in text
    assert text.count("set variant") == 4, "every network is named"
    assert "no diffusion_pytorch_model.bf16.safetensors, but variant fp16" in sentence(folder, variant="bf16")


def test_a_variant_that_is_not_there_is_told(saved, single):
    assert "only the plain weights; remove variant" in sentence(saved, variant="fp16")
    assert "variant: fp16 chooses among the files of a folder" in sentence(single, variant="fp16")


def test_weights_may_be_split_over_files(folder, tiny):
    whole = folder / "unet" / "diffusion_pytorch_model.safetensors"
    state = load_file(whole)
    names = sorted(state)
    halves = {"a.safetensors": names[: len(names) // 2], "b.safetensors": names[len(names) // 2 :]}
    for file, keys in halves.items():
        save_file({key: state[key] for key in keys}, folder / "unet" / file)
    index = {"weight_map": {key: file for file, keys in halves.items() for key in keys}}
    (folder / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    whole.unlink()
    assert_same(load(folder), tiny)
    (folder / "unet" / "b.safetensors").unlink()
    assert "tiny-xl/unet lacks b.safetensors, which its index lists" in sentence(folder)


def test_older_names_of_text_encoder_and_vae_are_understood(folder, tiny):
    file = folder / "text_encoder" / "model.safetensors"
    save_file({f"text_model.{key.removeprefix('text_model.')}": tensor for key, tensor in load_file(file).items()}, file)
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = load_file(file)
    for new, name in old.items():
        state = {key.replace(f".attentions.0.{new}.", f".attentions.0.{name}."): tensor for key, tensor in state.items()}
    assert any("proj_attn" in key for key in state)
    save_file(state, file)
    assert_same(load(folder), tiny)


@pytest.mark.parametrize("form", ["folder", "whole model", "diffusers file", "original file"])
def test_another_vae_replaces_the_bases_own(saved, tiny, tmp_path, form):
    other = SDXL.tiny()
    with torch.no_grad():
        for parameter in other.vae.parameters():
            parameter.mul_(0.5)
    other.vae.save_pretrained(tmp_path / "model" / "vae")
    place = {"folder": tmp_path / "model" / "vae", "whole model": tmp_path / "model"}.get(
        form, tmp_path / "model" / "vae" / "mine.safetensors"
    )
    if form == "diffusers file":
        shutil.copy(tmp_path / "model" / "vae" / "diffusion_pytorch_model.safetensors", place)
    if form == "original file":
        SDXL.save(other, tmp_path / "whole.safetensors", "safetensors", None, {})
        state = load_file(tmp_path / "whole.safetensors")
        prefix = "first_stage_model."
        save_file({key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}, place)
    parts = load(saved, vae=str(place))
    assert_same(parts, other, ("vae",))
    assert_same(parts, tiny, ("backbone", "te1", "te2"))


def test_a_file_without_a_vae_needs_one_given(single, saved, tiny):
    state = {key: tensor for key, tensor in load_file(single).items() if not key.startswith("first_stage_model.")}
    save_file(state, single)
    assert "one.safetensors holds no VAE; set vae" in sentence(single)
    assert_same(load(single, vae=str(saved / "vae")), tiny)


def test_lora_files_are_merged_into_the_base_in_their_order_and_strength(saved, tiny, tmp_path):
    layer = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    kohya = "lora_unet_middle_block_1_transformer_blocks_0_attn1_to_q"
    down, up = torch.randn(2, 32), torch.randn(32, 2)
    file = tmp_path / "adapter.safetensors"
    save_file({f"{kohya}.lora_down.weight": down, f"{kohya}.lora_up.weight": up, f"{kohya}.alpha": torch.tensor(1.0)}, file)
    merged = load(saved, base_weights=(str(file), str(file)), base_weights_multiplier=(0.5, 2.0)).backbone.state_dict()
    before = tiny.backbone.state_dict()
    assert_close(merged[f"{layer}.weight"], before[f"{layer}.weight"] + (0.5 + 2.0) * 0.5 * up @ down, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(merged[key], before[key]) for key in before if not key.startswith(layer))


def test_published_extras_in_a_single_file_do_not_matter(single, tiny):
    state = load_file(single)
    state["conditioner.embedders.0.transformer.text_model.embeddings.position_ids"] = torch.arange(32)[None]
    state["conditioner.embedders.1.model.logit_scale"] = torch.tensor(4.6)
    save_file(state, single)
    assert_same(load(single), tiny)


def test_the_marks_of_a_v_prediction_file_are_honoured_and_written(single, tiny):
    assert load(single).kind == "epsilon"
    state = load_file(single)
    save_file({**state, "v_pred": torch.empty(0), "ztsnr": torch.empty(0)}, single)
    parts = load(single)
    assert parts.kind == "v_prediction" and parts.path.coefficients(torch.ones(1))[0] == 0
    assert parts.scheduler_config["timestep_spacing"] == "trailing"
    SDXL.save(parts, single.with_name("again.safetensors"), "safetensors", None, {"modelspec.title": "again"})
    again = load(single.with_name("again.safetensors"))
    assert again.kind == "v_prediction" and again.scheduler_config == parts.scheduler_config
    assert read_header(single.with_name("again.safetensors"), NAME).metadata["modelspec.title"] == "again"
    assert load(single, prediction_type="epsilon").kind == "epsilon"


def test_what_a_single_file_says_in_its_header_is_obeyed_and_what_nobody_reads_is_named(single, caplog):
    state = load_file(single)
    for text, kind in (("v", "v_prediction"), ("epsilon", "epsilon"), ("x0", "epsilon")):
        save_file({**state, "some_control.0.weight": torch.zeros(2)}, single, {"modelspec.prediction_type": text})
        assert load(single).kind == kind, text
    assert load(single, prediction_type="v_prediction").kind == "v_prediction"
    assert "1 tensors of" in caplog.text and "such as some_control.0.weight" in caplog.text and "predicts 'x0'" in caplog.text


def test_options_may_say_what_the_network_predicts(saved, folder):
    assert load(saved, prediction_type="v_prediction").kind == "v_prediction"
    rescaled = load(saved, prediction_type="v_prediction", zero_terminal_snr=True)
    assert rescaled.path.coefficients(torch.ones(1))[0] == 0 and rescaled.scheduler_config["rescale_betas_zero_snr"]
    flow = load(saved, prediction_type="flow")
    assert flow.kind == "velocity" and isinstance(flow.path, diffusion.FlowPath)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(flow.scheduler_config))
    assert load(folder).kind == "velocity" and load(folder, prediction_type="epsilon").kind == "epsilon"
    assert "zero_terminal_snr belongs to noise schedules" in sentence(folder, zero_terminal_snr=True)


def test_settings_of_the_text_encoding_reach_the_parts(saved):
    parts = load(saved, max_token_length=150, weighted_captions=True)
    assert parts.settings["max_token_length"] == 150 and parts.settings["weighted_captions"] is True


def test_a_single_file_has_the_tokenizer_in_either_folder_beside_it(single, tiny):
    shutil.rmtree(single.parent / "tokenizer_2")
    parts = load(single)
    for name in ("te1", "te2"):
        ours, wanted = parts.tokenizers[name], tiny.tokenizers[name]
        assert ours("a red star", padding="max_length").input_ids == wanted("a red star", padding="max_length").input_ids


# What cannot, and what a person is told


def test_an_sdxl_file_is_recognised(single):
    assert what_is(read_header(single, NAME)) == "an SDXL checkpoint"


@pytest.mark.parametrize("value", ["models/nothing.safetensors", "nothing", "/nowhere/at/all", "a/b/c"])
def test_a_missing_path_is_said_to_be_missing(value):
    assert f"there is no file or folder {value}" in sentence(value)


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".pth", ".bin"])
def test_pickle_files_are_refused(tmp_path, suffix):
    file = tmp_path / f"model{suffix}"
    file.write_bytes(b"\x80\x04.")
    assert "pickle" in sentence(file) and ".safetensors" in sentence(file)


def test_a_hub_id_that_is_neither_cached_nor_reachable_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    text = sentence("someone/model")
    assert "there is no folder someone/model here" in text and "the hub cannot be reached" in text
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in sentence("someone/model")


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


def cut_in_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:500])


def grow(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0" * 10)


def scramble_header(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[8:60] = b"{" * 52
    file.write_bytes(bytes(content))


@pytest.mark.parametrize(
    "damage, expected",
    [
        (cut, r"damaged or was not downloaded whole: it should have [\d,]+ bytes and has [\d,]+"),
        (cut_in_header, "ends inside its header, after 500 bytes"),
        (grow, "it should have"),
        (scramble_header, "its header makes no sense"),
        (lambda file: file.write_bytes(b""), r"\(0 bytes\) is not a safetensors file"),
        (lambda file: file.write_bytes(b"<html>Not found, sorry</html>"), "is a web page, not a model"),
    ],
)
def test_a_damaged_file_is_told_apart_from_a_wrong_one(single, folder, damage: Callable[[Path], None], expected):
    damage(single)
    with pytest.raises(OptionError, match=f"{NAME}: one.safetensors.*{expected}"):
        load(single)
    damage(folder / "unet" / "diffusion_pytorch_model.safetensors")
    with pytest.raises(OptionError, match=expected):
        load(folder)


def test_a_folder_that_is_no_model_says_what_is_missing(folder, tmp_path):
    (tmp_path / "images").mkdir()
    assert "the folder images is not a diffusers folder: it has no model_index.json" in sentence(tmp_path / "images")
    save_file({"x": torch.zeros(1)}, tmp_path / "images" / "base.safetensors")
    assert "It has base.safetensors; to load that file, give its path" in sentence(tmp_path / "images")
    assert "unet is a UNet2DConditionModel alone, not a whole model" in sentence(folder / "unet")
    shutil.rmtree(folder / "vae")
    shutil.rmtree(folder / "tokenizer_2")
    assert "tiny-xl is not complete; missing: vae/config.json, tokenizer_2" in sentence(folder)


def test_a_folder_of_another_family_is_called_by_its_name(folder):
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    assert "tiny-xl is a Flux model (FluxPipeline); you chose SDXL" in sentence(folder)


def test_broken_configuration_files_are_named(folder):
    (folder / "unet" / "config.json").write_text("{")
    assert "unet/config.json cannot be read as JSON" in sentence(folder)
    (folder / "unet" / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    assert "tiny-xl/unet is a FluxTransformer2DModel; SDXL has a UNet2DConditionModel there" in sentence(folder)
    (folder / "unet" / "config.json").write_text(json.dumps({"_class_name": "UNet2DConditionModel", "down_block_types": ["Nonsense"]}))
    assert "the configuration of tiny-xl/unet makes no UNet2DConditionModel" in sentence(folder)


DAMAGES = {
    "half": lambda whole: whole[: len(whole) // 2],
    "bytes": lambda whole: b"\xff\xfe\x00" * 50,
    "list": lambda whole: b"[]",
    "nonsense": lambda whole: (
        b'{"added_tokens": 3, "model": 4, "num_train_timesteps": "x", "pad_token": 5, "vocab_size": "y", "weight_map": 3, "_class_name": 7}'
    ),
}


def told_of_damage(base: Path, files: Iterable[Path], load_it: Callable[[], object], damages: Iterable[str] = DAMAGES) -> list[str]:
    """What loading does other than work, or say a sentence that names the file or its folder, for each damaged JSON file."""
    wrong = []
    for file in files:
        whole = file.read_bytes()
        for name in damages:
            file.unlink()
            file.write_bytes(DAMAGES[name](whole))
            try:
                load_it()
            except OptionError as err:
                if not any(word in str(err) for word in (file.name, file.parent.name, base.name)):
                    wrong.append(f"{file.parent.name}/{file.name}, {name}: {err}")
            except Exception as err:
                wrong.append(f"{file.parent.name}/{file.name}, {name}: {type(err).__name__}: {err}")
        file.write_bytes(whole)
    return wrong


def test_no_damaged_file_beside_the_weights_ends_in_a_traceback(folder):
    assert (
        told_of_damage(
            folder, [*folder.glob("tokenizer/*.json"), *folder.glob("scheduler/*.json")], lambda: load(folder), ("half", "nonsense")
        )
        == []
    )


@pytest.mark.long
@pytest.mark.parametrize("name", [folder.name for folder in sorted(BASES.iterdir()) if folder.is_dir()])
def test_no_damaged_file_of_a_base_ends_in_a_traceback(name, tmp_path):
    bases = shutil.copytree(BASES, tmp_path / "bases", copy_function=os.symlink)
    chosen = RUNS[name, "network"].model_fields["model"].annotation(pretrained_model_name_or_path=str(bases / name))
    assert told_of_damage(bases / name, sorted((bases / name).rglob("*.json")), lambda: family(name).load(chosen, CPU, torch.float32)) == []


def test_a_folder_with_pickled_weights_only_is_refused(folder):
    file = folder / "vae" / "diffusion_pytorch_model.safetensors"
    file.rename(file.with_suffix(".bin"))
    assert "tiny-xl/vae has only diffusion_pytorch_model.bin, a pickle file" in sentence(folder)
    file.with_suffix(".bin").unlink()
    assert "tiny-xl/vae has no diffusion_pytorch_model.safetensors" in sentence(folder)


def test_missing_and_misshapen_tensors_are_named(single, folder):
    state = load_file(single)
    key = "model.diffusion_model.input_blocks.0.0.weight"
    save_file({name: tensor for name, tensor in state.items() if name != key}, single)
    assert "unet of one.safetensors lacks 1 of" in sentence(single) and "conv_in.weight" in sentence(single)
    save_file({**state, key: torch.zeros(16, 7, 3, 3)}, single)
    assert "conv_in.weight has shape (16, 7, 3, 3), (16, 4, 3, 3) was expected" in sentence(single)


def test_an_inpainting_unet_is_refused(folder, single):
    state = load_file(single)
    save_file({**state, "model.diffusion_model.input_blocks.0.0.weight": torch.zeros(16, 9, 3, 3)}, single)
    assert "one.safetensors is an inpainting model: its UNet takes 9 channels" in sentence(single)
    config_file = folder / "unet" / "config.json"
    config_file.write_text(json.dumps({**json.loads(config_file.read_text()), "in_channels": 9}))
    weights = folder / "unet" / "diffusion_pytorch_model.safetensors"
    save_file({**load_file(weights), "conv_in.weight": torch.zeros(16, 9, 3, 3)}, weights)
    assert "takes 9 channels, but the VAE makes latents of 4" in sentence(folder)


def test_empty_and_foreign_tokenizers_are_refused(folder):
    for file in (folder / "tokenizer").iterdir():
        file.unlink()
    assert "tiny-xl/tokenizer has no tokenizer.json" in sentence(folder)
    (folder / "tokenizer" / "vocab.json").write_text(json.dumps({"<|startoftext|>": 0, "<|endoftext|>": 1}))
    (folder / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    assert "tiny-xl/tokenizer has 2 tokens, but its text encoder knows 514" in sentence(folder)


def test_a_single_file_without_tokenizers_says_what_to_put_where(single, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for name in ("tokenizer", "tokenizer_2"):
        shutil.rmtree(single.parent / name)
    text = sentence(single)
    assert "one.safetensors holds no tokenizer" in text and "vocab.json and merges.txt" in text and "tiny-xl/tokenizer" in text


def test_a_file_that_does_not_fit_the_shipped_configuration_is_told(single, tmp_path):
    shutil.copy(single, tmp_path / "alone.safetensors")
    text = sentence(tmp_path / "alone.safetensors")
    assert "unet of alone.safetensors" in text and "lacks" in text


def test_a_revision_is_only_for_the_hub(saved):
    assert "revision: main is a branch, tag or commit of a hub model" in sentence(saved, revision="main")


def test_what_is_no_vae_is_not_taken_for_one(saved, tmp_path):
    assert "vae: there is no file or folder nothing" in sentence(saved, vae="nothing")
    assert "has no VAE" in sentence(saved, vae=str(saved / "unet"))
    file = tmp_path / "x.safetensors"
    save_file({"lora_unet_x.lora_down.weight": torch.zeros(1)}, file)
    assert "vae: x.safetensors is a LoRA file; a VAE for SDXL is needed" in sentence(saved, vae=str(file))


def test_a_vae_of_other_latents_is_refused(saved, tmp_path):
    config = {**dict(SDXL.tiny().vae.config), "latent_channels": 16}
    type(SDXL.tiny().vae).from_config(config).save_pretrained(tmp_path / "vae16")
    assert "takes 4 channels, but the VAE makes latents of 16" in sentence(saved, vae=str(tmp_path / "vae16"))


def test_all_problems_are_told_at_once(tmp_path, single):
    text = sentence("nothing", vae="nowhere", base_weights=("gone.safetensors", str(single)))
    assert f"{NAME}: there is no file or folder nothing" in text and "vae: there is no file or folder nowhere" in text
    assert "base_weights: there is no file gone.safetensors" in text
    assert "base_weights: one.safetensors is an SDXL checkpoint; a LoRA file belongs here" in text


def test_no_sentence_shows_the_path_of_a_folder_that_was_found(folder, single):
    (folder / "unet" / "config.json").write_text("{")
    assert str(folder.parent) not in sentence(folder)
