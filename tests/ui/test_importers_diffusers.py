"""Command lines of the training scripts in diffusers' examples, and lines that leave everything to a file of settings."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling
from torch import Tensor

from kohya_like import importers
from kohya_like.importers import Imported
from kohya_like.importers.reading import Opened
from sd_scripts.families import FACTS, RUNS
from sd_scripts.programs import diffusers_examples
from sd_scripts.schema.errors import OptionError
from tests.ui.foreign_files import JOB, builds, said
from tests.ui.test_importers_times import ours


def line(script: str, *options: str, launcher: str = "") -> Imported:
    usual = ["--pretrained_model_name_or_path=a/b", "--instance_data_dir=dog", "--output_dir=o"]
    return importers.read("line", " ".join(["accelerate launch", launcher, f"train_{script}.py", *usual, *options]).encode())


def test_a_line_of_a_diffusers_example_becomes_the_same_run() -> None:
    found = line(
        "dreambooth_lora_flux",
        "--instance_prompt='a photo of sks dog' --resolution=512 --rank=16 --lora_layers='attn.to_k,attn.to_q' --guidance_scale=1",
        "--train_batch_size=2 --gradient_accumulation_steps 4 --learning_rate=1e-4 --scale_lr --optimizer=prodigy --adam_beta2=0.99",
        "--lr_scheduler=cosine --max_train_steps=500 --checkpoints_total_limit=3 --validation_prompt='sks dog in a bucket'",
        "--num_validation_images=2 --validation_epochs=25 --seed=7 --with_prior_preservation --class_prompt='a dog' --class_data_dir=dogs",
        "--hub_token=secret",
        launcher="--mixed_precision=bf16 --num_processes=2",
    )
    options = builds(found)
    assert found.run is RUNS["flux", "network"]
    wanted: dict[str, Any] = {
        "pretrained_model_name_or_path": "a/b",
        "train_data_dir": "dog",
        "instance_prompt": "a photo of sks dog",
        "resolution": (512, 512),
        "enable_bucket": False,
        "random_crop": True,
        "network_dim": 16,
        "network_alpha": 4.0,
        "target_modules": (r"(^|\.)attn\.to_k$", r"(^|\.)attn\.to_q$"),
        "guidance_scale": 1.0,
        "train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "learning_rate": 1e-4 * 2 * 4 * 2,
        "optimizer_type": "Prodigy",
        "lr_scheduler": "cosine",
        "lr_warmup_steps": 500,
        "max_train_steps": 500,
        "max_train_epochs": None,
        "save_every_n_steps": 500,
        "save_last_n_steps": 1500,
        "sample_prompts": "sks dog in a bucket --d 7\nsks dog in a bucket --d 8",
        "sample_every_n_epochs": 25,
        "class_prompt": "a dog",
        "num_class_images": 100,
        "prior_loss_weight": 1.0,
        "mixed_precision": "bf16",
        "multi_gpu": True,
        "num_gpus": 2,
        "save_model_as": "diffusers",
        "timestep_sampling": "uniform",
    }
    assert {name: options[name] for name in wanted} == wanted
    assert set(options["optimizer_args"]) == {
        *("weight_decay=0.0001", "betas=(0.9,0.99)", "decouple=True", "use_bias_correction=True", "safeguard_warmup=True")
    }
    assert said(found, "scale_lr")[0] == "not needed" and "secret" not in repr(found.rows)


def test_what_a_line_leaves_out_is_what_its_script_takes() -> None:
    sdxl = builds(line("dreambooth_lora_sdxl", "--center_crop --train_text_encoder"))
    assert (sdxl["network_dim"], sdxl["network_alpha"], sdxl["resolution"]) == (4, None, (1024, 1024))
    assert (sdxl["random_crop"], sdxl["train_text_encoder"], sdxl["text_encoder_lr"]) == (False, True, (5e-6,))
    assert (sdxl["max_train_epochs"], sdxl["lr_scheduler"], sdxl["lr_warmup_steps"]) == (1, "constant", 0)
    whole = builds(line("text_to_image", "--use_ema --tokenizer_max_length=77"))
    assert (whole["train_batch_size"], whole["max_train_epochs"], whole["optimizer_args"]) == (16, 100, ("weight_decay=0.01",))
    krea = line("dreambooth_lora_krea2", "--validation_prompt=x --validation_guidance_scale=3")
    assert (builds(krea)["network_dim"], builds(krea)["network_alpha"], builds(krea)["sample_cfg_scale"]) == (32, 32.0, 4.0)
    assert any(text.startswith("img_in, ") for text in krea.conflicts)


def test_every_option_of_a_script_has_a_rule_and_every_script_a_family() -> None:
    for script in diffusers_examples.MODELS:
        found = line(script, *(f"--{name}" for name in diffusers_examples.TABLE if name != "pretrained_model_name_or_path"))
        assert found.run.family in FACTS and not found.count("unknown")
    assert said(line("dreambooth_lora", "--use_peft"), "use_peft")[0] == "unknown"
    assert said(line("dreambooth_lora", "--use_peft $SOME"), "use_peft")[0] == "unknown"


def test_a_rate_that_is_scaled_counts_the_samples_that_the_script_takes_without_being_told() -> None:
    assert builds(line("dreambooth_lora", "--scale_lr"))["learning_rate"] == pytest.approx(5e-4 * 4)
    assert builds(line("text_to_image", "--scale_lr --learning_rate 1e-5"))["learning_rate"] == pytest.approx(1e-5 * 16)


@pytest.mark.parametrize("scheme", ["none", "logit_normal", "mode"])
@pytest.mark.parametrize(("script", "base", "shift"), [("flux", "a/dev", None), ("z_image", "a/Turbo", 3.0), ("z_image", "a/base", 6.0)])
def test_times_are_those_that_the_scripts_draw(script: str, base: str, shift: float | None, scheme: str) -> None:
    mean, deviation, scale = random.uniform(-1, 1), random.uniform(0.5, 1.5), random.uniform(0.3, 1.2)
    numbers = f"--weighting_scheme={scheme} --logit_mean={mean} --logit_std={deviation} --mode_scale={scale}"
    found = line(f"dreambooth_lora_{script}", f"--pretrained_model_name_or_path={base}", numbers)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift or 3.0, use_dynamic_shifting=shift is None)
    u = compute_density_for_timestep_sampling(scheme, 200_000, mean, deviation, scale)
    theirs = scheduler.timesteps[(u * scheduler.config.num_train_timesteps).long()].double().sort().values / 1000
    drawn: Tensor = ours(found)
    places = ((torch.arange(len(drawn)) + 0.5) / len(drawn) * len(theirs)).long()
    # The outermost hundredths are too few of what was drawn there; the scripts' times are a thousand, shifted.
    far = float((drawn - theirs[places]).abs().sort().values[: int(0.98 * len(drawn))].max())
    if scheme == "mode" and shift is not None:
        assert "without the scheduler's shift" in said(found, "weighting_scheme")[1] and far > 0.02
    else:
        assert far < 0.012


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("train_dreambooth_lora_sd3.py --instance_data_dir=dog", "for Stable Diffusion 3, which is not trained here"),
        ("train_instruct_pix2pix.py --dataset_name=a/b", "for InstructPix2Pix, which is not trained here"),
        ("train_dreambooth_lora.py --instance_data_dir=a --pretrained_model_name_or_path=DeepFloyd/IF", "for DeepFloyd IF, which is not"),
        ("train_realfill.py --train_data_dir=a", "starts train_realfill.py, which is no training whose command lines are read"),
    ],
)
def test_what_is_not_trained_here_is_refused_by_its_name(words: str, told: str) -> None:
    with pytest.raises(OptionError, match=told):
        importers.read("line", f"accelerate launch {words}".encode())


def test_a_data_set_of_the_hub_is_asked_for_and_a_folder_is_taken() -> None:
    found = line("text_to_image_lora", "--dataset_name=someone/something --caption_column=text")
    assert any("someone/something is a data set of the hub" in text for text in found.conflicts)
    near = importers.read("line", b"accelerate launch train_text_to_image_lora.py --dataset_name=./mine --caption_column=words --rank 8")
    assert builds(near)["train_data_dir"] == "./mine" and "rename words" in said(near, "caption_column")[1]


@pytest.mark.parametrize(
    "words", ["python run.py config/job.yaml", "WANDB=1 accelerate launch --config_file a.yaml -m some.main --config config/job.yaml"]
)
def test_a_line_that_leaves_everything_to_a_file_leads_to_it(words: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"whose settings are in config/job\.yaml; open that file"):
        importers.read("line", words.encode())
    script = tmp_path / "train.sh"
    script.write_text(words, encoding="utf-8")
    with pytest.raises(OptionError, match="open that file"):
        importers.read("train.sh", script.read_bytes(), Opened(path=script))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "job.yaml").write_text(yaml.safe_dump(JOB), encoding="utf-8")
    found = importers.read("train.sh", script.read_bytes(), Opened(path=script))
    assert found.values == importers.read("job.yaml", yaml.safe_dump(JOB).encode()).values
    assert "config/job.yaml; the settings are those of that file" in found.conflicts[0]

    def nowhere(path: Path) -> Path:
        raise OptionError(f"{path.name} is not to be opened")

    # Whether such a file is there is nobody's business either.
    with pytest.raises(OptionError, match=r"whose settings are in config/job\.yaml; open that file"):
        importers.read("train.sh", script.read_bytes(), Opened(path=script, allowed=nowhere))


@pytest.mark.parametrize(
    ("script", "options", "wanted"),
    [
        ("dreambooth_flux", "", 77),
        ("dreambooth_flux", "--max_sequence_length=512", 512),
        ("dreambooth_lora_flux", "", None),
        ("dreambooth_lora_flux_kontext", "--max_sequence_length=128", 128),
    ],
)
def test_as_much_of_a_caption_is_read_by_t5_as_there(script: str, options: str, wanted: int | None) -> None:
    assert builds(line(script, "--instance_prompt=x", options))["t5xxl_max_token_length"] == wanted
