"""Whole models on disk: what is written loads elsewhere as the same model, in equal bytes, whole or not at all."""

import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline, StableDiffusionPipeline, StableDiffusionXLPipeline
from safetensors.torch import load_file
from torch.testing import assert_close

from sd_scripts.families.sd import loading as sd
from sd_scripts.families.sd.model import Sd
from sd_scripts.families.sd.options import SdModelOptions
from sd_scripts.families.sdxl import loading as sdxl
from sd_scripts.families.sdxl.model import Sdxl
from sd_scripts.families.sdxl.options import SdxlModelOptions
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.library.loading.headers import read_header
from sd_scripts.library.loading.writing import Lazy, tensors_of, write_file, write_folder
from sd_scripts.runs.model_headers import what_is
from tests.library.loading_in_small import assert_same

MODELS: dict[str, Callable[[], Parts]] = {
    "sd1": lambda: Sd().tiny(),
    "sd2": lambda: Sd().tiny(second=True),
    "sdxl": lambda: Sdxl().tiny(),
}
KINDS = {"sd1": "an SD 1.x model", "sd2": "an SD 2.x model", "sdxl": "an SDXL checkpoint"}
SPECS = {"sd1": sd.SPEC, "sd2": sd.SPEC2, "sdxl": sdxl.SPEC}
IMAGE = Preview("a red star", negative_prompt="ugly", width=64, height=48, seed=11, steps=4, cfg_scale=5.0)


@pytest.fixture(params=MODELS)
def model(request) -> str:
    return request.param


@pytest.fixture
def parts(model) -> Parts:
    return MODELS[model]()


def family(model: str) -> Sd | Sdxl:
    return Sdxl() if model == "sdxl" else Sd()


def load(model: str, path: Path) -> Parts:
    made = SdxlModelOptions if model == "sdxl" else SdModelOptions
    return family(model).load(made(pretrained_model_name_or_path=str(path)), torch.device("cpu"), torch.float32)


def image(pipeline: DiffusionPipeline) -> torch.Tensor:
    """The pipeline's own image, in [0, 1]."""
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(
        IMAGE.prompt,
        negative_prompt=IMAGE.negative_prompt,
        width=IMAGE.width,
        height=IMAGE.height,
        num_inference_steps=IMAGE.steps,
        guidance_scale=IMAGE.cfg_scale,
        generator=torch.Generator().manual_seed(IMAGE.seed),
        output_type="pt",
    ).images[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_diffusers_renders_a_written_folder_as_we_render_the_model(model, parts, tmp_path):
    family(model).save(parts, tmp_path / "model", "diffusers", None, {})
    kind = StableDiffusionXLPipeline if model == "sdxl" else StableDiffusionPipeline
    theirs = image(kind.from_pretrained(tmp_path / "model", local_files_only=True))
    assert_close(family(model).render(parts, [IMAGE])[0] / 2 + 0.5, theirs, atol=1e-5, rtol=0)
    assert_same(load(model, tmp_path / "model"), parts)


def test_diffusers_renders_a_written_file_as_we_render_the_model(model, parts, tmp_path):
    family(model).save(parts, tmp_path / "model", "diffusers", None, {})
    file = tmp_path / "model" / "one.safetensors"
    family(model).save(parts, file, "safetensors", None, {})
    assert what_is(read_header(file, "")) == KINDS[model]
    kind = StableDiffusionXLPipeline if model == "sdxl" else StableDiffusionPipeline
    pipeline = kind.from_single_file(str(file), config=str(tmp_path / "model"), local_files_only=True, torch_dtype=torch.float32)
    theirs = image(pipeline)
    assert_close(family(model).render(parts, [IMAGE])[0] / 2 + 0.5, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("v_prediction", [False, True])
def test_a_file_that_is_read_and_written_again_has_the_same_bytes(model, parts, tmp_path, v_prediction):
    if v_prediction:
        parts = replace(parts, kind="v_prediction", scheduler_config={**parts.scheduler_config, "prediction_type": "v_prediction"})
    family(model).save(parts, tmp_path / "model", "diffusers", None, {})  # its configuration
    first, second = tmp_path / "model" / "first.safetensors", tmp_path / "model" / "second.safetensors"
    family(model).save(parts, first, "safetensors", None, {"b": "ü", "a": "1"})
    again = load(model, first)
    assert_same(again, parts)
    assert again.kind == parts.kind
    family(model).save(again, second, "safetensors", None, {"a": "1", "b": "ü"})
    assert first.read_bytes() == second.read_bytes()
    assert read_header(first, "").metadata == {"a": "1", "b": "ü", "format": "pt"}


def test_equal_models_give_equal_folders(model, parts, tmp_path):
    family(model).save(parts, tmp_path / "one", "diffusers", torch.float16, {"title": "x"})
    family(model).save(MODELS[model](), tmp_path / "two", "diffusers", torch.float16, {"title": "x"})
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    backbone = read_header(tmp_path / "one" / "unet" / "diffusion_pytorch_model.safetensors", "")
    assert backbone.metadata == {"format": "pt", "title": "x"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_all_networks_are_written_in_the_wanted_precision(model, parts, tmp_path, dtype):
    family(model).save(parts, tmp_path / "one.safetensors", "safetensors", dtype, {})
    family(model).save(parts, tmp_path / "folder", "diffusers", dtype, {})
    files = [tmp_path / "one.safetensors", *(tmp_path / "folder").rglob("*.safetensors")]
    assert len(files) == 1 + len(parts.modules())
    assert {tensor.dtype for file in files for tensor in load_file(file).values()} == {dtype}
    config = json.loads((tmp_path / "folder" / "text_encoder" / "config.json").read_text())
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    expected = {key: tensor.to(dtype).float() for key, tensor in parts.backbone.state_dict().items()}
    written = load(model, tmp_path / "folder").backbone.state_dict()
    assert all(torch.equal(written[key], tensor) for key, tensor in expected.items())


def test_large_weights_are_split_into_files_that_every_reader_joins(model, parts, tmp_path):
    limit = 40_000
    write_folder(SPECS[model], parts, tmp_path / "model", None, {}, shard_bytes=limit)
    files = sorted((tmp_path / "model" / "unet").glob("*.safetensors"))
    assert len(files) > 2 and files[0].name == f"diffusion_pytorch_model-00001-of-{len(files):05}.safetensors"
    for file in files:
        tensors = load_file(file)
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert size <= limit or len(tensors) == 1
    index = json.loads((tmp_path / "model" / "unet" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == parts.backbone.state_dict().keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in parts.backbone.state_dict().values())
    assert (tmp_path / "model" / "text_encoder" / "model.safetensors.index.json").is_file()
    assert_same(load(model, tmp_path / "model"), parts)
    kind = StableDiffusionXLPipeline if model == "sdxl" else StableDiffusionPipeline
    theirs = kind.from_pretrained(tmp_path / "model", local_files_only=True)
    for read, ours in ((theirs.unet, parts.backbone), (theirs.text_encoder, parts.text_encoders["te1"])):
        state = read.state_dict()
        assert all(torch.equal(state[key], tensor) for key, tensor in ours.state_dict().items())


def test_no_written_file_names_a_folder_of_this_machine(model, parts, tmp_path):
    family(model).save(parts, tmp_path / "secret-place", "diffusers", None, {})
    again = load(model, tmp_path / "secret-place")
    family(model).save(again, tmp_path / "out" / "model", "diffusers", None, {})
    family(model).save(again, tmp_path / "out" / "one.safetensors", "safetensors", None, {})
    for name, content in contents(tmp_path / "out").items():
        assert b"secret-place" not in content and str(tmp_path).encode() not in content, name


def test_a_folder_that_is_there_is_replaced_whole_or_not_at_all(model, parts, tmp_path):
    place = tmp_path / "model"
    family(model).save(parts, place, "diffusers", None, {})
    (place / "old.txt").write_text("from before")
    before = contents(place)
    broken = replace(parts, tokenizers={})
    with pytest.raises(KeyError):
        family(model).save(broken, place, "diffusers", None, {})
    assert contents(place) == before
    family(model).save(parts, place, "diffusers", None, {})
    assert contents(place) == {name: content for name, content in before.items() if name != "old.txt"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing temporary stays"


def test_networks_that_are_compiled_in_part_are_written_under_their_own_names(model, parts, tmp_path):
    expected = {key: tensor.clone() for key, tensor in parts.backbone.state_dict().items()}
    parts.backbone.mid_block = torch.compile(parts.backbone.mid_block)
    assert any("_orig_mod" in key for key in parts.backbone.state_dict())
    family(model).save(parts, tmp_path / "model", "diffusers", None, {})
    family(model).save(parts, tmp_path / "model" / "one.safetensors", "safetensors", None, {})
    for path in (tmp_path / "model", tmp_path / "model" / "one.safetensors"):
        assert all(torch.equal(tensor, expected[key]) for key, tensor in load(model, path).backbone.state_dict().items())


def test_tensors_are_made_one_after_the_other(tmp_path):
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0

    def make() -> torch.Tensor:
        nonlocal most
        tensor = torch.zeros(1000)
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    write_file(tmp_path / "x.safetensors", {f"t{number}": Lazy((1000,), torch.float32, make) for number in range(20)}, {})
    assert most <= 2, "the one that is written, and the next"
    assert len(load_file(tmp_path / "x.safetensors")) == 20


def test_a_tensor_with_two_names_is_written_once():
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    second.weight = first.weight
    assert tensors_of(torch.nn.Sequential(first, second)).keys() == {"0.weight", "0.bias", "1.bias"}


def test_sd2_files_have_the_last_layer_that_other_programs_want(tmp_path):
    parts = Sd().tiny(second=True)
    Sd().save(parts, tmp_path / "one.safetensors", "safetensors", torch.float16, {})
    state = load_file(tmp_path / "one.safetensors")
    block = "cond_stage_model.model.transformer.resblocks."
    last = {key.removeprefix(f"{block}2."): tensor for key, tensor in state.items() if key.startswith(f"{block}2.")}
    assert len(last) == 12 and all(torch.equal(tensor, state[f"{block}1.{key}"]) for key, tensor in last.items())
    assert torch.equal(state["cond_stage_model.model.text_projection"], torch.eye(24, dtype=torch.float16))
