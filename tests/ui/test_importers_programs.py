"""Files of other trainers: each is taken only for the program whose signs it bears, and refused by that program's name otherwise.

Every text here is written anew; what real files of these programs become was tried beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kohya_like import app, importers
from kohya_like.importers import Imported
from kohya_like.tabs.train import TrainTab
from sd_scripts.families import RUNS
from sd_scripts.schema.errors import OptionError

_TABLES = """[model]
{model}

[{table}]
{rest}
"""
_MUSUBI = """dit = "models/dit.safetensors"
vae = "models/vae.safetensors"
text_encoder = "models/te.safetensors"
dataset_config = "set.toml"
network_module = "networks.lora_{kind}"
network_dim = 16
learning_rate = 5e-5
optimizer_type = "adamw8bit"
timestep_sampling = "shift"
mixed_precision = "bf16"
sdpa = true
max_train_epochs = 8
output_dir = "out"
output_name = "mine"
"""
_ONETRAINER = {"base_model_name": "org/flux", "model_type": "FLUX_DEV_1", "training_method": "LORA", "resolution": "768", "batch_size": 2}
_ONETRAINER |= {"learning_rate": 3e-4, "optimizer": {"optimizer": "ADAMW"}, "output_model_format": "SAFETENSORS", "compile": True}
_SIMPLE = {"model_family": "flux", "model_type": "lora", "data_backend_config": "data.json", "lora_rank": 8, "learning_rate": 1e-4}
_SIMPLE |= {
    "lr_scheduler": "polynomial",
    "max_train_steps": 100,
    "train_batch_size": 1,
    "seed": 42,
    "output_dir": "out",
    "optimizer": "adamw",
}
_AI = "job: extension\nconfig:\n  name: x\n  process:\n    - type: sd_trainer\n      train: {steps: 10}\n      model: {quantize: true}\n"
_PIPE = "output_dir = 'o'\ndataset = 'd.toml'\nepochs = 10\nmicro_batch_size_per_gpu = 1\npipeline_stages = 1\n"
_PIPE += "[model]\ntype = 'flux'\ndtype = 'bf16'\n[adapter]\ntype = 'lora'\nrank = 8\ndtype = 'bf16'\n[optimizer]\ntype = 'adamw'\n"
_DIFFUSERS = {"pretrained_model_name_or_path": "m", "instance_data_dir": "d", "instance_prompt": "p", "rank": 4, "checkpointing_steps": 9}
_DIFFUSERS |= {"output_dir": "o", "resolution": 512, "train_batch_size": 1, "learning_rate": 1e-4, "max_train_steps": 5, "seed": 0}
_ACRF = {
    "model": 'dit = "D:/zimage/transformer"\noutput_dir = "out"',
    "table": "training",
    "rest": "num_train_epochs = 3\nlearning_rate = 1e-4",
}
_FOREIGN = [
    ("ideogram.toml", _MUSUBI.format(kind="ideogram4"), "a file of musubi-tuner"),
    ("wan.toml", "[parts]\n" + _MUSUBI.format(kind="wan").replace("dit =", "dit_high_noise ="), "a file of musubi-tuner"),
    ("data.toml", '[general]\n[[datasets]]\nimage_directory = "a"\ncache_directory = "b"\n', "give its path as dataset_config"),
    ("sana.json", json.dumps({**_ONETRAINER, "model_type": "SANA"}), "a file of OneTrainer for Sana"),
    ("concepts.json", json.dumps([{"path": "p", "image_variations": 1, "include_subdirectories": False}]), "concepts of OneTrainer"),
    ("config.json", json.dumps({**_SIMPLE, "model_family": "sd3"}), "a file of SimpleTuner for Stable Diffusion 3"),
    (
        "dashed.json",
        json.dumps({f"--{name}": value for name, value in _SIMPLE.items()} | {"--model_family": "wan"}),
        "a file of SimpleTuner",
    ),
    ("backends.json", json.dumps([{"id": "a", "dataset_type": "image", "repeats": 1}]), "data backends of SimpleTuner"),
    ("slider.yaml", _AI.replace("sd_trainer", "slider"), "a job of ai-toolkit for slider"),
    ("job.json", json.dumps({"job": "extension", "config": {"name": "x", "process": []}}), "a job of ai-toolkit with 0 processes"),
    ("run.toml", _PIPE.replace("'flux'", "'wan'"), "a file of diffusion-pipe for Wan"),
    ("set.toml", "resolutions = [512]\n[[directory]]\npath = 'p'\nnum_repeats = 1\n", "a data set of diffusion-pipe"),
    ("acc.yaml", "compute_environment: LOCAL_MACHINE\nnum_machines: 1\n", "a file of accelerate"),
    ("model.json", json.dumps({"_class_name": "UNet", "sample_size": 64, "in_channels": 4}), "a file of diffusers"),
    ("unknown.json", json.dumps(_DIFFUSERS), "no settings that kohya_ss saves"),
    (
        "control.toml",
        _TABLES.format(model='dit = "x"', table="controlnet", rest='control_type = "canny"\n[acrf]\nturbo_steps = 4'),
        "a ControlNet",
    ),
    ("attention.toml", '[sdpa]\nsdpa_optimize_level = "auto"\n', "not a run"),
]
_PAGE = """[server]
allowed_paths = []
[accelerate_launch]
mixed_precision = "bf16"
[model]
models_dir = "./models"
pretrained_model_name_or_path = "sdxl_base.safetensors"
train_data_dir = "images"
output_name = "mine"
[basic]
epoch = 4
max_resolution = "768,768"
caption_extension = ".txt"
save_every_n_steps = 7
[advanced]
save_every_n_steps = 50
clip_skip = 1
[sdxl]
sdxl_no_half_vae = true
[flux1]
guidance_scale = 9.0
[wd14_caption]
caption_extension = ".cap"
train_data_dir = ""
"""


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[TrainTab]:
    context = app.make_context(tmp_path, [], is_private=True)
    yield TrainTab(context)
    context.supervisor.close()


def test_files_of_other_trainers_are_refused_by_the_name_of_their_program() -> None:
    wrong = []
    for name, text, said in _FOREIGN:
        try:
            wrong.append(f"{name} became {importers.read(name, text.encode()).origin}")
        except OptionError as err:
            wrong += [] if said in str(err) and name in str(err) else [f"{name}: {err}"]
    assert not wrong, "\n".join(wrong)


def test_short_files_of_the_ac_rf_trainer_are_for_z_image_and_say_which_kind() -> None:
    lora = importers.read("simple.toml", _TABLES.format(**_ACRF).encode())
    whole = importers.read("whole.toml", (_TABLES.format(**_ACRF) + '[finetune]\ntrainable_modules = "attention"\n').encode())
    assert (lora.run, whole.run) == (RUNS["zimage", "network"], RUNS["zimage", "full"])
    assert lora.values["max_train_epochs"] == whole.values["max_train_epochs"] == 3


def test_the_defaults_of_kohyas_page_are_read_although_names_stand_in_two_tables(tab: TrainTab) -> None:
    opened = tab.load({"name": "config.toml", "text": _PAGE})
    assert opened["problems"] == [] and opened["imported"]["label"] == RUNS["sdxl", "full"].label
    found = importers.read("config.toml", _PAGE.encode())
    assert found.run is RUNS["sdxl", "full"] and found.missing == []
    wanted = {"max_train_epochs": 4, "save_every_n_steps": 50, "resolution": (768, 768), "train_data_dir": "images"}
    assert wanted.items() <= found.values.items() and "caption_extension" not in found.values
    keys = [row.key for row in found.rows]
    assert len(keys) == len(set(keys)) and {"basic.save_every_n_steps", "flux1.guidance_scale", "wd14_caption.train_data_dir"} <= set(keys)


def test_a_script_file_for_a_family_that_is_not_trained_never_gives_its_model_to_another() -> None:
    for module, mark in (("networks.lora_sd3", ""), ("networks.lora", 'clip_g = "g.safetensors"'), ("networks.lora_lumina", "")):
        text = (
            f'pretrained_model_name_or_path = "m.safetensors"\ntrain_data_dir = "p"\nnetwork_module = "{module}"\nnetwork_dim = 4\n{mark}\n'
        )
        found = importers.read("x.toml", text.encode())
        assert "not trained here" in found.origin and "pretrained_model_name_or_path" not in found.values, module


_PARTS = {"pretrained_model_name_or_path": "m.safetensors", "train_data_dir": "p"}
_ADAPTER = {**_PARTS, "network_module": "networks.lora_flux", "network_dim": 4}
_WHOLE = {**_PARTS, "ae": "ae.safetensors"}
_GRAPHS = {"compile": True, "compile_mode": "reduce-overhead"}
_FUSED = {"fused_backward_pass": True}
_FITTING: list[tuple[dict[str, object], dict[str, object], dict[str, object], str]] = [
    # settings, more of them, what has to be in the form, the option that gives way
    (_ADAPTER, {**_GRAPHS, "blocks_to_swap": 10}, {"blocks_to_swap": 10, "compile": True}, "compile_mode"),
    (_ADAPTER, {"torch_compile": True, "dynamo_mode": "reduce-overhead", "blocks_to_swap": 10}, {"blocks_to_swap": 10}, "compile_mode"),
    (_ADAPTER, {"compile": True, "compile_scope": "network", "blocks_to_swap": 10}, {"blocks_to_swap": 10}, "compile_scope"),
    (_ADAPTER, {"fp8_base": True}, {"transformer_quantization": "fp8"}, ""),
    (_ADAPTER, {"cpu_offload_checkpointing": True}, {"gradient_checkpointing": True, "gradient_checkpointing_cpu_offload": True}, ""),
    (_ADAPTER, {"split_mode": True}, {"blocks_to_swap": 18}, ""),
    (_WHOLE, {"double_blocks_to_swap": 6, "single_blocks_to_swap": 8}, {"blocks_to_swap": 14}, ""),
    (_WHOLE, _FUSED, {"fused_backward_pass": True, "max_grad_norm": 0.0}, ""),
    (_WHOLE, {**_FUSED, "max_grad_norm": 1.0}, {"fused_backward_pass": True, "max_grad_norm": 0.0}, ""),
    (_WHOLE, {"fused_optimizer_groups": 8}, {"fused_backward_pass": True}, ""),
    (_WHOLE, {**_FUSED, "gradient_accumulation_steps": 4}, {"fused_backward_pass": True}, "gradient_accumulation_steps"),
    (_WHOLE, {**_FUSED, "mixed_precision": "fp16"}, {"fused_backward_pass": True}, "mixed_precision"),
    (_WHOLE, {**_FUSED, "num_processes": 2}, {"fused_backward_pass": True}, "multi_gpu"),
    (_WHOLE, {"full_fp16": True, "mixed_precision": "fp16"}, {"full_bf16": True}, "mixed_precision"),
]


def _toml(values: dict[str, object]) -> Imported:
    return importers.read("run.toml", "".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()).encode())


def test_what_decides_whether_a_run_fits_stays_and_what_gives_way_is_told(tab: TrainTab) -> None:
    wrong = []
    for base, more, wanted, left in _FITTING:
        found = _toml({**base, **more})
        lost = {name: value for name, value in wanted.items() if found.values.get(name) != value}
        told = [sentence.partition(" = ")[0] for sentence in found.conflicts]
        if lost or told != ([left] if left else []) or left in found.values:
            wrong.append(f"{more}: lost {lost}, told {found.conflicts}")
    assert not wrong, "\n".join(wrong)
    boxes = {"flux1_checkbox": True, "LoRA_type": "Flux1", "compile": True, "compile_mode": "reduce-overhead", "blocks_to_swap": 10}
    page = tab.load({"name": "flux.json", "text": json.dumps({**_PARTS, **boxes})})
    assert page["fill"]["texts"]["blocks_to_swap"] == "10"
    assert page["imported"]["conflicts"][0].startswith("compile_mode = reduce-overhead gave way to blocks_to_swap = 10")
