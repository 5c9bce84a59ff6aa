"""The way back: what is exported for another program comes back as it was, and what cannot be said there is named."""

from __future__ import annotations

import json
import random
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kohya_like import importers
from sd_scripts.families import RUNS
from sd_scripts.programs import exports
from sd_scripts.programs.command_lines import commands
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.prompts import Defaults, read_prompts
from sd_scripts.schema.runs import RunOptions

BASE: dict[str, Any] = {"pretrained_model_name_or_path": "klein dir/it's", "train_data_dir": "my images", "mixed_precision": "bf16"}
CHANGES: dict[str, Any] = {
    "network_dim": 7,
    "network_alpha": 3.0,
    "learning_rate": 3e-5,
    "max_train_steps": 77,
    "optimizer_type": "AdamW8bit",
    "optimizer_args": ["weight_decay=0.02", "betas=(0.9,0.95)"],
    "lr_scheduler": "constant_with_warmup",
    "lr_warmup_steps": 12,
    "train_batch_size": 3,
    "gradient_accumulation_steps": 2,
    "gradient_checkpointing": True,
    "resolution": (512, 512),
    "flip_aug": True,
    "dataset_repeats": 4,
    "caption_dropout_rate": 0.1,
    "save_every_n_steps": 20,
    "save_precision": "bf16",
    "sample_at_first": False,
    "transformer_quantization": "fp8",
    "network_type": "lokr",
    "conv_dim": 4,
    "instance_prompt": "zwx",
    "blocks_to_swap": 3,
    "train_block_indices": "0-3",
    "timestep_sampling": "uniform",
    "cache_text_encoder_outputs": True,
    "sample_prompts": "a dog --w 512 --h 768 --d 5 --s 12 --n ugly, bad",
}


def chosen(run: type[RunOptions], rng: random.Random) -> RunOptions | None:
    """Some of the changes, as far as this kind of run has them and they go together."""
    known = flat.fields(run)
    some = {name: value for name, value in CHANGES.items() if name in known and rng.random() < 0.5}
    try:
        return flat.build(run, {**{name: value for name, value in BASE.items() if name in known}, **some})
    except OptionError:
        return None


@pytest.mark.parametrize("program", exports.PROGRAMS)
def test_settings_that_are_as_the_page_begins_are_written_or_refused_in_a_sentence(program: str) -> None:
    said = []
    for run in RUNS.values():
        known = flat.fields(run)
        options = flat.build(run, {name: value for name, value in BASE.items() if name in known and name != "mixed_precision"})
        try:
            said.append(exports.PROGRAMS[program](options))
        except OptionError as err:
            assert options.label in str(err)
    assert said


_OF_DATA = {"image_directory": "train_data_dir", "num_repeats": "dataset_repeats", "batch_size": "train_batch_size"}


def back(made: exports.Exported, run: type[RunOptions]) -> dict[str, Any]:
    """The options in an exported file, with those in the file of the data set beside it."""
    found = importers.read(made.name, made.text.encode())
    prompts = {name: text for name, text in made.beside.items() if name.endswith(".txt")}
    if found.values.get("sample_prompts") in prompts:
        found.values["sample_prompts"] = prompts[str(found.values["sample_prompts"])]
    for text in (text for name, text in made.beside.items() if name not in prompts):
        data = tomllib.loads(text)
        said = {**data["general"], **data["datasets"][0]}
        said.pop("cache_directory")
        assert found.values.pop("dataset_config") in made.beside
        found.values.update({_OF_DATA.get(name, name): value for name, value in said.items()})
    assert found.run is run and {text.partition(":")[0] for text in found.missing} <= {"train_data_dir"}
    return flat.flatten(flat.build(run, {"train_data_dir": "d", **found.values} if found.missing else found.values))


@pytest.mark.parametrize("program", exports.PROGRAMS)
def test_what_is_exported_and_not_named_comes_back_as_it_was(program: str) -> None:
    assert _compared(program, random.Random(11), 3) >= (3 if program == "musubi-tuner" else 10)


@pytest.mark.long
@pytest.mark.parametrize("program", exports.PROGRAMS)
def test_what_is_exported_comes_back_whatever_was_drawn_today(program: str) -> None:
    seed = random.getrandbits(32)
    try:
        assert _compared(program, random.Random(seed), 40) >= 40
    except AssertionError as err:
        raise AssertionError(f"drawn by {seed}: {err}") from err


def _compared(program: str, rng: random.Random, each: int) -> int:
    """How many settings, drawn at random, were compared with what came back of them."""
    compared = 0
    for run in RUNS.values():
        for _ in range(each):
            options = chosen(run, rng) if run.method != "scratch" else None
            if options is None:
                continue
            try:
                made = exports.PROGRAMS[program](options)
            except OptionError as err:
                assert run.label in str(err)
                continue
            unsaid = {text.partition(" = ")[0] for text in made.unsaid}
            there, here = back(made, run), flat.flatten(options)
            asleep = flat.asleep(run, here)
            for name, value in here.items():
                # Without an alpha it is the rank.
                rank = {"network_alpha": "network_dim", "conv_alpha": "conv_dim"}.get(name, name)
                said, wanted = there[name] or there[rank], value or here[rank]
                if name == "optimizer_args":
                    said, wanted = sorted(said), sorted(wanted)
                if name == "sample_prompts":
                    said, wanted = (read_prompts(Defaults(one.samples, (512, 512), 16, 1)) for one in (flat.build(run, there), options))
                assert name in unsaid or name in asleep or said == wanted or said == pytest.approx(wanted), (run.label, name)
            compared += 1
    return compared


def test_steps_are_whole_numbers_for_sd_scripts_and_parts_of_a_run_stay_parts() -> None:
    for warmup, written in ((12, "--lr_warmup_steps=12 "), (0.125, "--lr_warmup_steps=0.125 ")):
        made = exports.to_kohya(flat.build(RUNS["sdxl", "network"], {**BASE, "lr_warmup_steps": warmup}))
        assert written in made.text


def test_a_rank_of_lokr_is_told_to_programs_that_take_whole_matrices_otherwise() -> None:
    for program in ("ai-toolkit", "OneTrainer"):
        made = exports.PROGRAMS[program](flat.build(RUNS["sdxl", "network"], {**BASE, "network_type": "lokr", "network_dim": 7}))
        assert not any(text.startswith("network_") for text in made.unsaid)


def test_blocks_that_wait_in_host_ram_are_told_to_onetrainer_as_a_part_of_them() -> None:
    run = RUNS["flux", "network"]
    for number in (1, 23, 37, 57):
        made = exports.to_onetrainer(flat.build(run, {**BASE, "blocks_to_swap": number}))
        assert back(made, run)["blocks_to_swap"] == number and not any(text.startswith("blocks_to_swap") for text in made.unsaid)


@pytest.mark.parametrize("program", exports.PROGRAMS)
def test_images_and_previews_can_be_said_to_every_program(program: str) -> None:
    run = RUNS["zimage" if program == "musubi-tuner" else "sdxl", "network"]
    prompts = "a dog --w 512 --h 768 --s 12 --n ugly, bad\na cat --l 3 --d 8"
    made = exports.PROGRAMS[program](flat.build(run, {**BASE, "sample_prompts": prompts}))
    assert not {text.partition(" = ")[0] for text in made.unsaid} & {"train_data_dir", "sample_prompts", "pretrained_model_name_or_path"}


def test_a_model_of_version_2_is_exported_as_one(tmp_path: Path) -> None:
    run = RUNS["sd", "network"]
    for shape, version in ((1024, 2), (768, 1)):
        path = tmp_path / f"mine{shape}.safetensors"
        save_file({"model.diffusion_model.input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight": np.zeros((4, shape), "f2")}, path)
        folder = tmp_path / f"folder{shape}" / "unet"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"cross_attention_dim": shape}))
        names = {2: ("stabilityai/stable-diffusion-2-1-base", "v2-1_768.safetensors"), 1: ("runwayml/stable-diffusion-v1-5", "my_v2")}[
            version
        ]
        for base in (str(path), str(folder.parent), *names):
            options = flat.build(run, {**BASE, "pretrained_model_name_or_path": base})
            texts = {program: exports.PROGRAMS[program](options).text for program in ("OneTrainer", "ai-toolkit", "sd-scripts")}
            assert ("STABLE_DIFFUSION_21" in texts["OneTrainer"]) == (version == 2) == ("arch: sd2" in texts["ai-toolkit"]), base
            assert ("--v2 " in texts["sd-scripts"]) == (version == 2), base
            assert ("STABLE_DIFFUSION_21_BASE" in texts["OneTrainer"]) == ("-base" in base)


def test_what_another_program_cannot_say_is_named() -> None:
    run = RUNS["sdxl", "network"]
    options = flat.build(
        run,
        {**BASE, "masked_loss": True, "alpha_mask": True, "masked_loss_outside_weight": 0.5, "save_best": True, "validation_split": 0.1},
    )
    unsaid = exports.to_kohya(options).unsaid
    assert "masked_loss_outside_weight = 0.5" in unsaid and "save_best = on" in unsaid and not any("alpha_mask" in text for text in unsaid)
    with pytest.raises(OptionError, match="sd-scripts has no script"):
        exports.to_kohya(flat.build(RUNS["zimage", "network"], BASE))


def test_a_line_for_sd_scripts_has_only_words_that_its_script_has() -> None:
    text = (Path(__file__).parents[1] / "data" / "kohya_options_by_script.txt").read_text()
    names = {script: set(words.split()) for script, words in re.findall(r"^(\w+\.py):\n((?:  .*\n)+)", text, re.MULTILINE)}
    compared = 0
    for run in RUNS.values():
        for seed in range(6):
            options = chosen(run, random.Random(seed)) if run.method != "scratch" else None
            try:
                made = exports.to_kohya(options) if options is not None else None
            except OptionError:
                continue
            if made is not None:
                (command,) = commands(made.name, made.text)
                assert not command.options.keys() - names[command.name], (command.name, command.options.keys() - names[command.name])
                compared += 1
    assert compared > 20


def test_a_model_that_is_told_by_its_name_is_exported_as_that_model() -> None:
    run, said = RUNS["qwen_edit", "network"], {}
    for base in ("Qwen/Qwen-Image", "Qwen/Qwen-Image-Edit", "models/qwen_image_edit_2509_bf16.safetensors", "Qwen/Qwen-Image-Edit-2511"):
        options = flat.build(run, {**BASE, "pretrained_model_name_or_path": base})
        job, file = exports.to_ai_toolkit(options), exports.to_musubi(options)
        said[base] = (re.findall(r"arch: (\S+)", job.text)[0], re.findall(r'model_version = "(\S+)"', file.text)[0])
        assert not any("model_version" in text for text in (*job.unsaid, *file.unsaid))
    assert list(said.values()) == [
        ("qwen_image", "original"),
        ("qwen_image_edit", "edit"),
        ("qwen_image_edit_plus", "edit-2509"),
        ("qwen_image_edit_plus:2511", "edit-2511"),
    ]
    for export in (exports.to_ai_toolkit, exports.to_musubi, exports.to_onetrainer):
        with pytest.raises(OptionError, match=r"mine does not say which .* choose model_version"):
            export(flat.build(run, {**BASE, "pretrained_model_name_or_path": "models/mine"}))


def test_a_text_encoder_that_is_not_trained_is_told_to_the_script_that_trains_it() -> None:
    made = exports.to_kohya(flat.build(RUNS["sd", "full"], BASE))
    assert "--stop_text_encoder_training=-1" in made.text and not any("text_encoder" in text for text in made.unsaid)
