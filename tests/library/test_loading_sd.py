"""Loading of SD 1.x and 2.x: told apart by the model itself, from every form, with a sentence where something cannot be known."""

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sd_scripts.families.common import tokenizers
from sd_scripts.families.sd import loading as sd
from sd_scripts.families.sd.model import Sd
from sd_scripts.families.sd.options import SdModelOptions
from sd_scripts.families.sdxl.model import Sdxl
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.common import configs_for
from sd_scripts.schema.errors import OptionError
from tests.library.loading_in_small import assert_same
from tests.small_models import sd_pipeline_of

SD = Sd()
CPU = torch.device("cpu")


@pytest.fixture(params=[False, True], ids=["sd1", "sd2"])
def second(request) -> bool:
    return request.param


@pytest.fixture
def parts(second) -> Parts:
    return SD.tiny(second=second)


@pytest.fixture
def folder(parts, tmp_path) -> Path:
    """The tiny model as diffusers itself writes it."""
    sd_pipeline_of(parts).save_pretrained(tmp_path / "tiny-sd")
    return tmp_path / "tiny-sd"


@pytest.fixture
def single(parts, folder) -> Path:
    """A single file, with configuration and tokenizer beside it."""
    SD.save(parts, folder / "one.safetensors", "safetensors", None, {})
    return folder / "one.safetensors"


def load(value: Path | str, **more) -> Parts:
    return SD.load(SdModelOptions(pretrained_model_name_or_path=str(value), **more), CPU, torch.float32)


def sentence(value: Path | str, **more) -> str:
    with pytest.raises(OptionError) as raised:
        load(value, **more)
    return str(raised.value)


def test_a_folder_and_a_file_give_the_same_networks_ready_and_frozen(folder, single, parts):
    for place in (folder, single):
        loaded = load(place)
        assert_same(loaded, parts)
        assert loaded.source == place.name and loaded.kind == "epsilon"
        assert not any(p.requires_grad for module in loaded.modules().values() for p in module.parameters())
        with torch.no_grad():
            (got,), (wanted,) = SD.encode_prompts(loaded, ["a red star"]), SD.encode_prompts(parts, ["a red star"])
        assert torch.equal(got["prompt_embeds"], wanted["prompt_embeds"])


def test_the_version_is_told_by_the_model(single, second):
    spec = sd.SPEC2 if second else sd.SPEC1
    assert sd.spec_of(load(single).backbone) is spec
    # Configuration beside the file counts when it is of the same version.
    assert configs_for(spec, single) == single.parent
    assert configs_for(sd.SPEC1 if second else sd.SPEC2, single) != single.parent


def test_files_of_the_first_months_without_a_level_of_names_are_read(tmp_path):
    parts = SD.tiny()
    sd_pipeline_of(parts).save_pretrained(tmp_path)
    file = tmp_path / "one.safetensors"
    SD.save(parts, file, "safetensors", None, {})
    state = {key.replace("transformer.text_model.", "transformer."): tensor for key, tensor in load_file(file).items()}
    state["cond_stage_model.transformer.embeddings.position_ids"] = torch.arange(32)[None]
    state["model_ema.decay"] = torch.tensor(0.9)
    save_file(state, file)
    assert_same(load(file), parts)


def test_what_a_folder_predicts_is_read_from_its_scheduler(folder):
    file = folder / "scheduler" / "scheduler_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "prediction_type": "v_prediction"}))
    assert load(folder).kind == "v_prediction"
    assert load(folder, prediction_type="epsilon").kind == "epsilon"


def test_what_a_single_file_of_sd2_predicts_is_assumed_aloud(single, second, caplog):
    with caplog.at_level(logging.WARNING):
        assert load(single).kind == "epsilon"
    assert ("one.safetensors is a single file of SD 2.x" in caplog.text) is second
    caplog.clear()
    assert load(single, prediction_type="v_prediction").kind == "v_prediction"
    state = load_file(single)
    save_file({**state, "v_pred": torch.empty(0)}, single)
    assert load(single).kind == "v_prediction"
    assert "does not say" not in caplog.text, "nothing is assumed where it is said"


def test_nothing_is_said_about_the_tensors_that_only_other_programs_want(single, caplog):
    with caplog.at_level(logging.WARNING):
        load(single)
    assert "are not used" not in caplog.text


def test_settings_reach_the_parts(folder):
    settings = load(folder, clip_skip=2, max_token_length=150, weighted_captions=True).settings
    assert (settings["clip_skip"], settings["max_token_length"], settings["weighted_captions"]) == (2, 150, True)


def test_a_clip_skip_beyond_the_encoder_is_refused(folder):
    assert "clip_skip: 3 is more than the 2 layers of this model's text encoder" in sentence(folder, clip_skip=3)


def test_another_vae_comes_as_folder_or_file_of_either_layout(folder, parts, tmp_path):
    with torch.no_grad():
        for parameter in parts.vae.parameters():
            parameter.mul_(0.5)
    SD.save(parts, tmp_path / "other", "diffusers", None, {})
    SD.save(parts, tmp_path / "other" / "whole.safetensors", "safetensors", None, {})
    state = load_file(tmp_path / "other" / "whole.safetensors")
    prefix = "first_stage_model."
    bare = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
    save_file(bare, tmp_path / "other" / "vae" / "bare.safetensors")
    shutil.copy(tmp_path / "other" / "vae" / "diffusion_pytorch_model.safetensors", tmp_path / "other" / "vae" / "named.safetensors")
    for place in ("", "vae", "vae/bare.safetensors", "vae/named.safetensors"):
        vae = load(folder, vae=str(tmp_path / "other" / place)).vae.state_dict()
        assert all(torch.equal(vae[key], tensor) for key, tensor in parts.vae.state_dict().items()), place


def test_the_vae_of_another_family_is_called_that(folder, tmp_path):
    save_file(
        {"decoder.conv_in.weight": torch.zeros(16, 16, 3, 3), "encoder.conv_in.weight": torch.zeros(8, 3, 3, 3)},
        tmp_path / "ae.safetensors",
    )
    text = sentence(folder, vae=str(tmp_path / "ae.safetensors"))
    assert "vae: ae.safetensors makes latents of 16 channels, but those of SD 1.x / 2.x have 4; it is the VAE of another family" in text


def test_the_tokenizer_of_a_file_pads_as_its_version_does(second, tmp_path):
    spec = (sd.SPEC2 if second else sd.SPEC1).parts["te1"].tokenizer
    config = {"vocab_size": 514, "max_position_embeddings": 32}
    vocabulary = tmp_path / "models" / "tokenizer"
    vocabulary.mkdir(parents=True)
    SD.tiny().tokenizers["te1"].backend_tokenizer.model.save(str(vocabulary))
    found = tokenizers.find_for_file(tmp_path / "models" / "one.safetensors", tmp_path / "published", [spec], [config], "")
    assert found[0].pad_token == ("!" if second else "<|endoftext|>")


def test_an_sdxl_model_is_refused_by_its_name(tmp_path):
    parts = Sdxl().tiny()
    Sdxl().save(parts, tmp_path / "xl", "diffusers", None, {})
    Sdxl().save(parts, tmp_path / "xl.safetensors", "safetensors", None, {})
    assert "xl is a StableDiffusionXL model (StableDiffusionXLPipeline); you chose SD 1.x / 2.x" in sentence(tmp_path / "xl")
    assert "xl.safetensors is an SDXL checkpoint; you chose SD 1.x / 2.x, which needs an SD 1.x model or" in sentence(
        tmp_path / "xl.safetensors"
    )
