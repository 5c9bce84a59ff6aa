"""Saving and loading of small models trained from nothing: files, folders, run folders, and sentences for the rest."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel

from sd_scripts import families
from sd_scripts.families.ddpm.caption_encoder import CaptionEncoder
from sd_scripts.families.ddpm.caption_tokenizer import ids_of
from sd_scripts.families.ddpm.loading import DESCRIPTION, PixelSpace
from sd_scripts.families.ddpm.model import Ddpm
from sd_scripts.families.ddpm.options import DdpmModelOptions
from sd_scripts.library.core.protocols import Beginning, Parts
from sd_scripts.library.core.safetensors_file import read_file, serialise
from sd_scripts.schema.errors import OptionError

pytestmark = pytest.mark.usefixtures("no_network")
DDPM = Ddpm()
CPU = torch.device("cpu")
NAME = "pretrained_model_name_or_path"
SMALL: dict[str, Any] = {
    "base_channels": 16,
    "channel_multipliers": (1, 2),
    "layers_per_block": 1,
    "attention_levels": (0,),
    "attention_head_dim": 8,
    "text_width": 16,
    "text_layers": 1,
    "text_heads": 2,
    "max_token_length": 12,
    "vocab_size": 280,
    "beta_schedule": "cosine",
    "prediction_type": "sample",
}
CAPTIONS = ["a red star", "a red ring", "ein blauer Stern", "赤い星"]


def built(**changes: Any) -> Parts:
    options = DdpmModelOptions(**(SMALL | changes))
    return DDPM.build(options, Beginning(random.randrange(1000), ((32, 64),), DDPM.files(options, CAPTIONS)), CPU, torch.float32)


@pytest.fixture(scope="module")
def pixels() -> Parts:
    return built()


@pytest.fixture(scope="module")
def latents() -> Parts:
    return built(vae="toy", self_conditioning=True)


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Parts:
    return DDPM.load(DdpmModelOptions(pretrained_model_name_or_path=str(path), **options), CPU, dtype)


def sentence(path: Path | str, **options: Any) -> str:
    """What a person is told when this cannot be loaded."""
    with pytest.raises(OptionError) as told:
        load(Path(path), **options)
    return str(told.value)


def saved(parts: Parts, path: Path, form: str, dtype: torch.dtype | None = None) -> Path:
    place = path.with_name(f"{path.name}.safetensors") if form == "safetensors" else path
    DDPM.save(parts, place, form, dtype, {"modelspec.title": "x"})
    return place


def content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.mark.parametrize("form", ["safetensors", "diffusers"])
@pytest.mark.parametrize("space", ["pixels", "latents"])
def test_a_saved_model_is_loaded_bit_for_bit_and_saved_again_in_the_same_bytes(
    form: str, space: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    parts: Parts = request.getfixturevalue(space)
    place = saved(parts, tmp_path / "model", form)
    again = load(place)
    assert isinstance(again.vae, PixelSpace) == (space == "pixels")
    for name, module in parts.modules().items():
        state = again.modules()[name].state_dict()
        assert state.keys() == module.state_dict().keys()
        assert all(torch.equal(state[key], tensor) for key, tensor in module.state_dict().items()), name
        assert not any(weight.requires_grad for weight in again.modules()[name].parameters()) and not again.modules()[name].training
    assert (again.kind, again.settings, again.source) == ("sample", parts.settings, place.name)
    assert torch.equal(again.path.alphas_cumprod, parts.path.alphas_cumprod)
    texts = ["", "a red star", "never seen before: 星, and much too long for it"]
    assert ids_of(again.tokenizers["te1"], texts) == ids_of(parts.tokenizers["te1"], texts)
    assert content(saved(again, tmp_path / "second", form)) == content(place)
    assert content(saved(again, tmp_path / "third", "safetensors")) == content(saved(parts, tmp_path / "fourth", "safetensors"))


def test_what_a_folder_holds_is_read_by_diffusers_itself(latents: Parts, tmp_path: Path) -> None:
    place = saved(latents, tmp_path / "model", "diffusers")
    unet = UNet2DConditionModel.from_pretrained(place, subfolder="unet", local_files_only=True)
    vae = AutoencoderKL.from_pretrained(place, subfolder="vae", local_files_only=True)
    encoder = CaptionEncoder.from_pretrained(place, subfolder="text_encoder", local_files_only=True)
    scheduler = DDIMScheduler.from_pretrained(place, subfolder="scheduler", local_files_only=True)
    for mine, theirs in ((latents.backbone, unet), (latents.vae, vae), (latents.text_encoders["te1"], encoder)):
        state = theirs.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in mine.state_dict().items())
    assert (scheduler.config.prediction_type, scheduler.config.beta_schedule) == ("sample", "squaredcos_cap_v2")
    index = json.loads((place / "model_index.json").read_text())
    assert (
        sorted(path.name for path in place.iterdir() if path.is_dir())
        == sorted(name for name, value in index.items() if isinstance(value, list))
        == ["scheduler", "text_encoder", "tokenizer", "unet", "vae"]
    )


def test_a_model_saved_in_16_bits_is_rounded_and_loaded_in_the_precision_asked_for(pixels: Parts, tmp_path: Path) -> None:
    for form in ("safetensors", "diffusers"):
        again = load(saved(pixels, tmp_path / form, form, torch.float16))
        state = again.backbone.state_dict()
        for name, weight in pixels.backbone.state_dict().items():
            assert torch.equal(state[name], weight.half().float())
    assert load(tmp_path / "diffusers", torch.bfloat16).text_encoders["te1"].tokens.weight.dtype == torch.bfloat16


def test_the_folder_of_a_run_stands_for_the_newest_model_in_it(pixels: Parts, latents: Parts, tmp_path: Path) -> None:
    run = tmp_path / "20260101-run"
    run.mkdir()
    (run / "config.toml").write_text("")
    assert "the run 20260101-run has saved no model yet" in sentence(run)
    old, new = saved(pixels, run / "model-000002", "safetensors"), saved(latents, run / "model-000004", "diffusers")
    for path, age in ((old, 100), (new, 50)):
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    assert load(run).source == "model-000004"
    os.utime(old)
    assert load(run).source == "model-000002.safetensors"


def described(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Changes what a file says about itself."""

    def apply(file: Path) -> None:
        tensors, texts = read_file(file)
        description = json.loads(texts[DESCRIPTION])
        change(description)
        file.write_bytes(serialise(tensors, texts | {DESCRIPTION: json.dumps(description)}))

    return apply


def without_tensor(file: Path) -> None:
    tensors, texts = read_file(file)
    tensors.pop("unet.conv_in.weight")
    file.write_bytes(serialise(tensors, texts))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), "model.safetensors is damaged or was not downloaded whole"),
        (lambda file: file.write_bytes(b"no"), "is not a safetensors file"),
        (without_tensor, "unet of model.safetensors lacks 1 of"),
        (lambda file: file.write_bytes(serialise(*reversed_texts(file))), "the description of model.safetensors is damaged"),
        (described(lambda it: it.pop("scheduler")), "the description of model.safetensors is damaged ('scheduler')"),
        (
            described(lambda it: it.update(tokenizer={"version": "1.0"})),
            "the description of model.safetensors is damaged (it is no tokenizer",
        ),
        (described(lambda it: it.update(format=2)), "was saved by a newer version of this program (format 2, known is 1)"),
        (described(lambda it: it["unet"].update(block_out_channels=[16, 48])), "tensors of unet of model.safetensors do not fit"),
        (described(lambda it: it["unet"].update(down_block_types=["Nonsense"])), "the configuration of unet of model.safetensors makes no"),
    ],
)
def test_a_damaged_file_is_a_sentence(damage: Callable[[Path], None], told: str, pixels: Parts, tmp_path: Path) -> None:
    place = saved(pixels, tmp_path / "model", "safetensors")
    damage(place)
    found = sentence(place)
    assert told in found and found.startswith(NAME) and str(tmp_path) not in found


def reversed_texts(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and texts of a file, with a description that is no JSON."""
    tensors, texts = read_file(file)
    return tensors, texts | {DESCRIPTION: texts[DESCRIPTION][::-1]}


def test_other_models_and_folders_are_told_apart(pixels: Parts, tmp_path: Path) -> None:
    sd = families.family("sd")
    sd.save(sd.tiny(), tmp_path / "sd.safetensors", "safetensors", None, {})
    sd.save(sd.tiny(), tmp_path / "sd", "diffusers", None, {})
    assert "sd.safetensors is an SD 1.x model; a model that ddpm_train.py saved is needed" in sentence(tmp_path / "sd.safetensors")
    assert "sd is a StableDiffusionPipeline; a model that ddpm_train.py saved is needed" in sentence(tmp_path / "sd")
    (tmp_path / "empty").mkdir()
    assert "the folder empty has no model_index.json" in sentence(tmp_path / "empty")
    assert "there is no file or folder" in sentence(tmp_path / "nothing.safetensors")
    assert "there is no built-in model of this kind" in sentence("toy")
    place = saved(pixels, tmp_path / "model", "diffusers")
    for piece, told in (
        ("tokenizer/tokenizer.json", "tokenizer/tokenizer.json is missing"),
        ("unet/config.json", "unet/config.json is missing"),
    ):
        copy = Path(shutil.copytree(place, tmp_path / "copy", dirs_exist_ok=True))
        (copy / piece).unlink()
        assert told in sentence(copy)
        shutil.rmtree(copy)


def test_options_that_say_otherwise_than_the_model_are_named_with_both_values(pixels: Parts, latents: Parts, tmp_path: Path) -> None:
    place = saved(pixels, tmp_path / "model", "safetensors")
    own = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    assert load(place, **own).settings == pixels.settings, "options that say the same may stay"
    told = sentence(place, base_channels=32, attention_head_dim=32, lowercase=False, vae="toy")
    assert "base_channels: 32 is asked for, but model.safetensors was made with 16" in told
    assert "lowercase: False is asked for, but model.safetensors was made with True" in told
    assert "vae: model.safetensors works on pixels; remove vae" in told
    assert "attention_head_dim" not in told, "the default says nothing"
    assert "brings its own VAE" in sentence(saved(latents, tmp_path / "latents", "diffusers"), vae="toy")


def test_a_vae_is_taken_from_a_file_a_folder_or_the_built_in_one(latents: Parts, tmp_path: Path) -> None:
    latents.vae.save_pretrained(tmp_path / "vae")
    for value in (tmp_path / "vae", tmp_path / "vae" / "diffusion_pytorch_model.safetensors"):
        parts = built(vae=str(value))
        assert all(torch.equal(tensor, latents.vae.state_dict()[name]) for name, tensor in parts.vae.state_dict().items())
        assert parts.backbone.config.in_channels == latents.vae.config.latent_channels
    with pytest.raises(OptionError, match="vae: there is no file or folder"):
        built(vae=str(tmp_path / "nothing"))
    options = DdpmModelOptions(**(SMALL | {"vae": "toy", "vae_dtype": "bf16"}))
    parts = DDPM.build(options, Beginning(0, ((32, 32),), DDPM.files(options, CAPTIONS)), CPU, torch.float32)
    assert {weight.dtype for weight in parts.vae.parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in parts.backbone.parameters()} == {torch.float32}
    assert DDPM.decode(parts, DDPM.encode_images(parts, torch.zeros(1, 3, 32, 32))).dtype == torch.float32
