"""Saving and loading of models of style transfer: files, folders, run folders, and sentences for the rest."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, UNet2DModel
from torch.nn import functional as F

from sd_scripts import families
from sd_scripts.families.ddpm.model import Ddpm
from sd_scripts.families.lgt.edges import fine_edge_map
from sd_scripts.families.lgt.evaluation import correlation
from sd_scripts.families.lgt.loading import DESCRIPTION
from sd_scripts.families.lgt.model import Lgt
from sd_scripts.families.lgt.options import LgtModelOptions
from sd_scripts.library.core.protocols import Beginning, Parts
from sd_scripts.library.core.safetensors_file import read_file, serialise
from sd_scripts.schema.errors import OptionError

pytestmark = pytest.mark.usefixtures("no_network")
LGT = Lgt()
CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vae": "toy",
    "base_channels": 16,
    "channel_multipliers": (1, 2),
    "layers_per_block": 1,
    "attention_levels": (0,),
    "attention_head_dim": 8,
}
NAMES = ["van gogh", "monet", "浮世絵"]


def built(**changes: Any) -> Parts:
    options = LgtModelOptions(**(SMALL | changes))
    return LGT.build(options, Beginning(random.randrange(1000), ((64, 96),), LGT.files(options, NAMES)), CPU, torch.float32)


@pytest.fixture(scope="module")
def parts() -> Parts:
    return built()


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Parts:
    return LGT.load(LgtModelOptions(pretrained_model_name_or_path=str(path), **options), CPU, dtype)


def sentence(path: Path | str, **options: Any) -> str:
    """What a person is told when this cannot be loaded."""
    with pytest.raises(OptionError) as told:
        load(Path(path), **options)
    return str(told.value)


def saved(parts: Parts, path: Path, form: str, dtype: torch.dtype | None = None) -> Path:
    place = path.with_name(f"{path.name}.safetensors") if form == "safetensors" else path
    LGT.save(parts, place, form, dtype, {"modelspec.title": "x"})
    return place


def content(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path)): file.read_bytes() for file in files}


@pytest.mark.parametrize("form", ["safetensors", "diffusers"])
def test_a_saved_model_is_loaded_bit_for_bit_and_saved_again_in_the_same_bytes(form: str, parts: Parts, tmp_path: Path) -> None:
    place = saved(parts, tmp_path / "model", form)
    again = load(place)
    for name, module in parts.modules().items():
        state = again.modules()[name].state_dict()
        assert state.keys() == module.state_dict().keys()
        assert all(torch.equal(state[key], tensor) for key, tensor in module.state_dict().items()), name
        assert not any(weight.requires_grad for weight in again.modules()[name].parameters()) and not again.modules()[name].training
    assert (again.kind, again.path, again.settings, again.source) == ("velocity", parts.path, parts.settings, place.name)
    assert again.settings["styles"] == ("monet", "van gogh", "浮世絵")
    assert content(saved(again, tmp_path / "second", form)) == content(place)
    assert content(saved(again, tmp_path / "third", "safetensors")) == content(saved(parts, tmp_path / "fourth", "safetensors"))


def test_what_a_folder_holds_is_read_by_diffusers_itself(tmp_path: Path) -> None:
    parts = LGT.tiny()
    place = saved(parts, tmp_path / "model", "diffusers")
    unet = UNet2DModel.from_pretrained(place, subfolder="unet", local_files_only=True)
    vae = AutoencoderKL.from_pretrained(place, subfolder="vae", local_files_only=True)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(place, subfolder="scheduler", local_files_only=True)
    assert type(unet) is UNet2DModel and scheduler.config.num_train_timesteps == 1000
    assert all(torch.equal(tensor, vae.state_dict()[name]) for name, tensor in parts.vae.state_dict().items())
    index = json.loads((place / "model_index.json").read_text(encoding="utf-8"))
    assert (
        sorted(path.name for path in place.iterdir() if path.is_dir())
        == sorted(name for name, value in index.items() if isinstance(value, list))
        == ["scheduler", "unet", "vae"]
    )
    x, t = torch.randn(4, 16, 6, 8), torch.rand(4)
    styles = [*parts.settings["styles"], ""]
    with torch.no_grad():
        theirs = unet(x, 1000 * t, class_labels=torch.arange(4)).sample
        assert torch.equal(LGT.denoise(parts, x, t, LGT.encode_prompts(parts, styles)), theirs)
    assert unet.class_embedding.weight.shape == (4, 64) and theirs.std() > 0.1


def test_a_model_saved_in_16_bits_is_rounded_and_loaded_in_the_precision_asked_for(tmp_path: Path) -> None:
    parts = LGT.tiny()
    for form in ("safetensors", "diffusers"):
        again = load(saved(parts, tmp_path / form, form, torch.float16))
        state = again.backbone.state_dict()
        for name, weight in parts.backbone.state_dict().items():
            assert torch.equal(state[name], weight.half().float())
    again = load(tmp_path / "diffusers", torch.bfloat16)
    assert {weight.dtype for weight in again.backbone.parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in again.vae.parameters()} == {torch.float32}
    x, t = torch.randn(2, 16, 8, 8), torch.tensor([0.2, 0.8])
    conditions = LGT.encode_prompts(parts, ["flat", "line, night"])
    with torch.no_grad():
        single, half = (LGT.denoise(model, x, t, conditions) for model in (parts, again))
    assert half.dtype == torch.float32 and (half - single).abs().max() < 0.1


def test_a_part_that_nobody_runs_is_not_read(parts: Parts, tmp_path: Path) -> None:
    place = saved(parts, tmp_path / "model", "diffusers")
    (place / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    options = LgtModelOptions(pretrained_model_name_or_path=str(place))
    again = LGT.load(options, CPU, torch.float32, without=("backbone",))
    assert next(again.backbone.parameters()).device.type == "meta" and next(again.vae.parameters()).device.type == "cpu"


def test_the_folder_of_a_run_stands_for_the_newest_model_in_it(parts: Parts, tmp_path: Path) -> None:
    run = tmp_path / "20260101-run"
    run.mkdir()
    (run / "config.toml").write_text("")
    (run / "styles.json").write_text("[]")
    assert "the run 20260101-run has saved no model yet" in sentence(run)
    old, new = saved(parts, run / "styles-000002", "safetensors"), saved(parts, run / "styles-000004", "diffusers")
    for path, age in ((old, 100), (new, 50)):
        os.utime(path, (path.stat().st_mtime - age,) * 2)
    assert load(run).source == "styles-000004"
    os.utime(old)
    assert load(run).source == "styles-000002.safetensors"


def described(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Changes what a file says about itself."""

    def apply(file: Path) -> None:
        tensors, texts = read_file(file)
        description = json.loads(texts[DESCRIPTION])
        change(description)
        file.write_bytes(serialise(tensors, texts | {DESCRIPTION: json.dumps(description)}))

    return apply


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), "model.safetensors is damaged or was not downloaded whole"),
        (described(lambda it: it.pop("architecture")), "the description of model.safetensors is damaged ('architecture')"),
        (described(lambda it: it["architecture"].pop("styles")), "the description of model.safetensors is damaged ('styles')"),
        (described(lambda it: it["architecture"]["styles"].pop()), "is damaged (2 names of styles for a table of 4 rows)"),
        (described(lambda it: it["architecture"].update(styles=["a", "a", "b"])), "is damaged (3 names of styles for a table of 4 rows)"),
        (described(lambda it: it.update(vae=None)), "the description of model.safetensors is damaged (it has no vae)"),
        (described(lambda it: it.update(format=2)), "was saved by a newer version of this program (format 2, known is 1)"),
        (described(lambda it: it["unet"].update(num_class_embeds=7)), "tensors of unet of model.safetensors do not fit"),
        (described(lambda it: it["unet"].update(down_block_types=["Nonsense"])), "the configuration of unet of model.safetensors makes no"),
    ],
)
def test_a_damaged_file_is_a_sentence(damage: Callable[[Path], None], told: str, parts: Parts, tmp_path: Path) -> None:
    place = saved(parts, tmp_path / "model", "safetensors")
    damage(place)
    found = sentence(place)
    assert told in found and found.startswith("pretrained_model_name_or_path") and str(tmp_path) not in found


def test_other_models_and_folders_are_told_apart(tmp_path: Path) -> None:
    ddpm, sd = Ddpm(), families.family("sd")
    ddpm.save(ddpm.tiny(), tmp_path / "ddpm", "diffusers", None, {})
    ddpm.save(ddpm.tiny(), tmp_path / "ddpm.safetensors", "safetensors", None, {})
    sd.save(sd.tiny(), tmp_path / "sd.safetensors", "safetensors", None, {})
    assert "sd.safetensors is an SD 1.x model; a model that lgt_train.py saved is needed" in sentence(tmp_path / "sd.safetensors")
    assert "a model that lgt_train.py saved is needed" in sentence(tmp_path / "ddpm.safetensors")
    assert "ddpm is a TextDdpm; a model that lgt_train.py saved is needed" in sentence(tmp_path / "ddpm")
    (tmp_path / "empty").mkdir()
    assert "the folder empty has no model_index.json" in sentence(tmp_path / "empty")
    assert "there is no file or folder" in sentence(tmp_path / "nothing.safetensors")
    assert "there is no built-in model of this kind" in sentence("toy")


def test_options_that_say_otherwise_than_the_model_are_named_with_both_values(parts: Parts, tmp_path: Path) -> None:
    place = saved(parts, tmp_path / "model", "safetensors")
    own = {name: value for name, value in SMALL.items() if name != "vae"}
    assert load(place, **own).settings == parts.settings, "options that say the same may stay"
    told = sentence(place, base_channels=32, attention_head_dim=32, vae="toy")
    assert "base_channels: 32 is asked for, but model.safetensors was made with 16" in told
    assert "attention_head_dim: 32 is asked for, but model.safetensors was made with 8" in told
    assert "vae: model.safetensors brings its own VAE; remove vae" in told
    assert "layers_per_block" not in told, "the default says nothing"


@pytest.mark.parametrize("form", ["safetensors", "diffusers"])
def test_a_model_with_edge_conditioning_comes_back_as_one_and_an_older_file_is_one_without(form: str, parts: Parts, tmp_path: Path) -> None:
    edged = built(edge_conditioning=True)
    again = load(saved(edged, tmp_path / "edged", form))
    assert LGT.takes_edges(again) and again.denoising == {"edge_conditioning": True}
    assert again.backbone.config.in_channels == again.backbone.config.out_channels + 3
    place = saved(parts, tmp_path / "older", form)
    if form == "safetensors":
        described(lambda it: it["architecture"].pop("edge_conditioning"))(place)
    else:
        index = place / "model_index.json"
        it = json.loads(index.read_text(encoding="utf-8"))
        it["architecture"].pop("edge_conditioning")
        index.write_text(json.dumps(it), encoding="utf-8")
    assert load(place).denoising == {"edge_conditioning": False} and not LGT.takes_edges(load(place))
    assert "edge_conditioning: True is asked for, but" in sentence(place, edge_conditioning=True)


@pytest.mark.parametrize("form", ["safetensors", "diffusers"])
def test_a_finer_map_of_edges_comes_back_with_the_picture_it_is_made_of(form: str, tmp_path: Path) -> None:
    edged = built(edge_conditioning=True, edge_scale=2)
    again = load(saved(edged, tmp_path / "edged", form))
    assert again.backbone.config.in_channels == again.backbone.config.out_channels + 12
    latents = torch.randn(2, 16, 8, 4)
    told = LGT.edge_map(edged, latents)
    assert told.shape == (2, 12, 8, 4) and torch.equal(LGT.edge_map(again, latents), told)
    assert all(name not in dict(edged.backbone.named_parameters()) for name in ("sketch_weight", "sketch_bias")), "nothing to be trained"
    assert "edge_scale: 4 is asked for, but" in sentence(
        tmp_path / "edged" if form == "diffusers" else tmp_path / "edged.safetensors", edge_scale=4
    )


def test_the_small_picture_of_toy_latents_shows_edges_where_the_image_has_them() -> None:
    edged = built(edge_conditioning=True, edge_scale=2)
    pixels = torch.ones(1, 3, 128, 128)
    pixels[..., 40:90, 40:90] = -0.5
    found, wanted = LGT.edge_map(edged, LGT.encode_images(edged, pixels)), fine_edge_map(F.avg_pool2d(pixels, 4), 2)
    assert correlation(found[0, :4], wanted[0, :4]) > 0.75


def test_edges_are_not_finer_than_pixels() -> None:
    with pytest.raises(OptionError, match="edge_scale: 4 is finer than the pixels of this VAE, whose latents are 2 wide"):
        tiny = AutoencoderKL(
            block_out_channels=(8, 8),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            norm_num_groups=4,
        )
        with TemporaryDirectory() as folder:
            tiny.save_pretrained(folder)
            built(vae=folder, edge_conditioning=True, edge_scale=4)


def test_a_vae_is_taken_from_a_file_a_folder_or_the_built_in_one(parts: Parts, tmp_path: Path) -> None:
    parts.vae.save_pretrained(tmp_path / "vae")
    for value in (tmp_path / "vae", tmp_path / "vae" / "diffusion_pytorch_model.safetensors"):
        again = built(vae=str(value))
        assert all(torch.equal(tensor, parts.vae.state_dict()[name]) for name, tensor in again.vae.state_dict().items())
        assert again.backbone.config.in_channels == again.backbone.config.out_channels == parts.vae.config.latent_channels
    with pytest.raises(OptionError, match="vae: there is no file or folder"):
        built(vae=str(tmp_path / "nothing"))
    halved = built(vae_dtype="bf16")
    assert {weight.dtype for weight in halved.vae.parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in halved.backbone.parameters()} == {torch.float32}
    assert LGT.decode(halved, LGT.encode_images(halved, torch.zeros(1, 3, 32, 32))).dtype == torch.float32


def test_the_same_network_is_made_again_from_its_configuration_alone(parts: Parts) -> None:
    """As runs do whose weights are sharded over processes."""
    from sd_scripts.library.parallel.sharding import skeleton_of

    again = skeleton_of(parts.backbone)(parts.backbone.state_dict().items()).eval()
    x, t, conditions = torch.randn(1, 16, 4, 4), torch.rand(1), LGT.encode_prompts(parts, ["monet, van gogh"])
    with torch.no_grad():
        again.conv_out.weight.data = torch.randn_like(again.conv_out.weight)
        velocity = again(x, 1000 * t, class_labels=torch.stack([conditions[0]["style"]]), return_dict=False)[0]
    assert velocity.abs().max() > 0
