"""Files of other trainers as our options, whatever program they are of: every key has its row, and what nobody knows is unknown.

Every text here is written anew. What the public examples of these programs become was measured beside them, with a script.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import toml
import yaml

from kohya_like import importers
from sd_scripts import programs
from sd_scripts.families import RUNS
from sd_scripts.programs import table
from sd_scripts.schema import command_line, flat
from sd_scripts.schema.errors import OptionError
from tests.ui.foreign_files import JOB, MUSUBI, ONE, PIPE, SIMPLE, builds, job, one, pipe, said, simple


def test_a_main_file_of_diffusion_pipe_becomes_the_same_run() -> None:
    found = pipe()
    options = builds(found)
    assert found.run is RUNS["flux", "network"]
    wanted = {
        "pretrained_model_name_or_path": "mine.safetensors",
        "ae": "models/flux",
        "t5xxl": "models/flux",
        "max_train_epochs": 40,
        "train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "max_grad_norm": 0.5,
        "lr_scheduler": "constant_with_warmup",
        "lr_warmup_steps": 20,
        "blocks_to_swap": 8,
        "save_every_n_steps": 100,
        "gradient_checkpointing_cpu_offload": True,
        "save_precision": "bf16",
        "transformer_quantization": "fp8",
        "timestep_sampling": "flux_shift",
        "sigmoid_scale": 1.3,
        "network_dim": 24,
        "network_alpha": None,
        "optimizer_type": "AdamW",
        "optimizer_args": ("betas=(0.9,0.99)", "weight_decay=0.01"),
        "learning_rate": 3e-5,
        "log_with": "wandb",
        "log_tracker_name": "project",
    }
    assert {name: options[name] for name in wanted} == wanted and "not to be seen" not in repr(found)
    assert any(text.startswith("dataset = ") for text in found.conflicts) and len(found.missing) == 1
    shifted = builds(pipe("flux_shift = true", "shift = 2.5"))
    assert (shifted["timestep_sampling"], shifted["discrete_flow_shift"]) == ("shift", 2.5)
    assert builds(pipe("flux_shift = true", 'timestep_sample_method = "uniform"'))["timestep_sampling"] == "uniform"
    assert "pipeline_stages" in " ".join(pipe("epochs = 40", "epochs = 40\npipeline_stages = 2").conflicts)
    with pytest.raises(OptionError, match="for Wan"):
        pipe('type = "flux"', 'type = "wan"')


FILES: dict[str, bytes] = {
    "job.yaml": yaml.safe_dump(JOB, sort_keys=False).encode(),
    "run.toml": MUSUBI.encode(),
    "one.json": json.dumps(ONE, indent=1).encode(),
    "main.toml": PIPE.encode(),
    "config.json": json.dumps(SIMPLE, indent=1).encode(),
}


ADDED: dict[str, tuple[str, Any, Callable[[Any], bytes]]] = {
    "ai-toolkit": ("job.yaml", JOB, lambda given: yaml.safe_dump(given, sort_keys=False).encode()),
    "diffusion-pipe": ("main.toml", toml.loads(PIPE), lambda given: toml.dumps(given).encode()),
    "SimpleTuner": ("config.json", SIMPLE, lambda given: json.dumps(given).encode()),
    "OneTrainer": ("preset.json", ONE, lambda given: json.dumps(given).encode()),
    "musubi-tuner": ("run.toml", toml.loads(MUSUBI), lambda given: toml.dumps(given).encode()),
}
"""A file of each program, and how it is written."""


def tables_of(given: Any) -> Iterator[dict[str, Any]]:
    """Every table of a file, the file itself first."""
    if isinstance(given, dict):
        yield given
    for value in given.values() if isinstance(given, dict) else given if isinstance(given, list) else ():
        yield from tables_of(value)


KREA_LINE = """accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 src/musubi_tuner/krea2_train_network.py \\
    --dit raw.safetensors --vae qwen_image_vae --dataset_config set.toml --sdpa --mixed_precision bf16 \\
    --timestep_sampling krea2_shift --weighting_scheme none --optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing \\
    --network_module networks.lora_krea2 --network_dim 32 --network_alpha 32 --max_train_epochs 16 --seed 42 --output_name mine
"""


KREA_PRESET = {
    "base_model_name": "krea/Krea-2-Raw",
    "model_type": "KREA_2",
    "training_method": "LORA",
    "resolution": "512",
    "learning_rate": 3e-4,
    "timestep_distribution": "LOGIT_NORMAL",
    "output_model_format": "DIFFUSERS_LORA",
    "transformer": {"train": True, "weight_dtype": "INT_W8A8"},
    "text_encoder": {"train": False, "weight_dtype": "FLOAT_8"},
}


KREA_PIPE = """micro_batch_size_per_gpu = 1
epochs = 10
output_dir = "out"
dataset = "set.toml"
[model]
type = "krea2"
diffusion_model = "krea2_raw.safetensors"
vae = "qwen_image_vae.safetensors"
text_encoders = [{path = "qwen3vl_4b_bf16.safetensors", type = "krea2"}]
dtype = "bfloat16"
timestep_sample_method = "logit_normal"
[adapter]
type = "lora"
rank = 32
dtype = "bfloat16"
[optimizer]
type = "adamw_optimi"
lr = 2e-5
"""


def test_krea_2_of_every_program_is_a_run_on_krea_2() -> None:
    line = importers.read("train.sh", KREA_LINE.encode())
    options = builds(line)
    assert (options["timestep_sampling"], options["vae"], options["network_dim"]) == ("krea2_shift", "qwen_image_vae", 32)
    assert line.conflicts == [], "its line through the sizes is this family's"
    preset = importers.read("#krea2 LoRA.json", json.dumps(KREA_PRESET).encode())
    assert (builds(preset)["transformer_quantization"], builds(preset)["text_encoder_quantization"]) == ("qint8", "qfloat8")
    pipe = importers.read("krea.toml", KREA_PIPE.encode())
    assert (builds(pipe)["text_encoder"], builds(pipe)["timestep_sampling"]) == ("qwen3vl_4b_bf16.safetensors", "sigmoid")
    tuner = importers.read(
        "config.json",
        json.dumps({**SIMPLE, "--model_family": "krea2", "--model_flavour": "turbo", "--validation_guidance": 4.5}).encode(),
    )
    tuned = builds(tuner)
    assert (tuned["pretrained_model_name_or_path"], tuned["sample_cfg_scale"]) == ("krea/Krea-2-Turbo", 5.5)

    def turbo(process: dict[str, Any]) -> None:
        process["model"] = {"arch": "krea2:turbo", "name_or_path": "krea/Krea-2-Turbo", "assistant_lora_path": "adapter.safetensors"}

    toolkit = job(turbo)
    assert builds(toolkit)["training_adapter"] == "adapter.safetensors"
    for found in (line, preset, pipe, tuner, toolkit):
        assert found.run is RUNS["krea2", "network"] and not [row for row in found.rows if row.verdict == "unknown"]
    for change in ({"arch": "krea2:o_edit"}, {"arch": "krea2", "model_kwargs": {"edit": True, "kv_cache": True}}):
        with pytest.raises(OptionError, match="Krea 2 with control images, which this version does not train"):
            job(lambda process: process.update(model={"name_or_path": "krea/Krea-2-Raw", **change}))  # noqa: B023


KONTEXT_LINE = """accelerate launch --mixed_precision bf16 src/musubi_tuner/flux_kontext_train_network.py --dit kontext.safetensors \\
    --vae ae.safetensors --text_encoder1 t5xxl_fp16.safetensors --text_encoder2 clip_l.safetensors --dataset_config data.toml --sdpa \\
    --mixed_precision bf16 --timestep_sampling flux_shift --weighting_scheme none --fp8_t5 --network_module networks.lora_flux \\
    --network_dim 32 --max_train_epochs 16 --output_name mine
"""


def test_kontext_of_every_program_is_a_run_on_kontext() -> None:
    line = importers.read("train.sh", KONTEXT_LINE.encode())
    options = builds(line)
    assert [options[name] for name in ("ae", "t5xxl", "clip_l")] == ["ae.safetensors", "t5xxl_fp16.safetensors", "clip_l.safetensors"]
    assert (options["timestep_sampling"], options["text_encoder_quantization"]) == ("flux_shift", "qfloat8")
    tuner = simple(model_family="flux", model_flavour="kontext")
    assert builds(tuner)["pretrained_model_name_or_path"] == "black-forest-labs/FLUX.1-Kontext-dev"
    toolkit = job(lambda process: process.update(model={"arch": "flux_kontext", "name_or_path": "black-forest-labs/FLUX.1-Kontext-dev"}))
    pipe = importers.read(
        "kontext.toml", KREA_PIPE.replace('type = "krea2"\ndiffusion', 'type = "flux"\ndiffusion').replace("krea2_raw", "kontext").encode()
    )
    for found in (line, tuner, toolkit, pipe):
        assert found.run is RUNS["kontext", "network"] and not [row for row in found.rows if row.verdict == "unknown"]


@pytest.mark.parametrize("program", ADDED)
def test_a_key_that_a_program_adds_tomorrow_is_unknown_in_every_table_and_not_dropped(program: str) -> None:
    name, given, written = ADDED[program]
    kept, silent = list(tables_of(given)), []
    for place, table_there in enumerate(kept):
        if "version" in table_there or any(name.endswith("_token") for name in table_there):
            continue  # A table of secrets, of which nothing is shown, and one that is written into the saved file as it is.
        changed = copy.deepcopy(given)
        list(tables_of(changed))[place]["made_up_today"] = 3
        found = importers.read(name, written(changed))
        rows = [row for row in found.rows if row.key.endswith("made_up_today")]
        if [row.verdict for row in rows] != ["unknown"] or program not in rows[0].text:
            silent.append((list(table_there)[:3], [(row.key, row.verdict, row.text) for row in rows]))
    assert silent == []
    builds(found)


def test_numbers_without_end_are_sentences() -> None:
    for found, key in (
        (one(transformer={"train": True, "offload_fraction": 1e308}), "transformer.offload_fraction"),
        (one(transformer={"train": True, "offload_fraction": math.inf}), "transformer.offload_fraction"),
        (simple(checkpoints_total_limit=1e200, checkpoint_step_interval=1e200), "checkpoints_total_limit"),
        (job(lambda process: process["save"].update(save_every=1e200, max_step_saves_to_keep=1e200)), "save.max_step_saves_to_keep"),
    ):
        assert said(found, key)[0] in ("not supported", "not needed"), said(found, key)
        builds(found)
    for sides in ("[inf]", "[[1e200, 1e200]]", "inf"):
        found = importers.read(
            "data.toml", f'resolutions = {sides}\n[[directory]]\npath = "a"\n'.encode(), importers.Opened(run=RUNS["flux", "network"])
        )
        assert said(found, "dataset.resolutions")[0] == "not supported", sides


def _damaged(text: bytes, rng: random.Random) -> bytes:
    """A text with some bytes, or a whole line, changed, doubled, or gone."""
    data = bytearray(text)
    for _ in range(rng.randint(1, 2)):
        place, kind = rng.randrange(len(data) or 1), rng.randrange(6)
        if kind == 0:
            data[place : place + rng.randint(1, 40)] = b""
        elif kind == 1:
            data[place:place] = rng.choice([b"\x00", b"{", b"]", b": ", b"'", b"\n", b"1e999", b"-", b"null", b"\xff", b"[[", b"&a *a"])
        elif kind == 2:
            data[place : place + 1] = bytes([rng.randrange(256)])
        elif kind == 3:
            data = data[:place]
        else:
            lines = bytes(data).split(b"\n")
            line = rng.randrange(len(lines))
            value = rng.choice([b"true", b"[]", b"{}", b"nan", b"-1", b"'x'", b"[1, [2]]", b"1e400", b"~", b'"\\ud800"', b"10" * 40])
            name = lines[line].partition(b":" if b":" in lines[line] else b"=")
            lines[line] = lines[line] * 2 if kind == 4 else name[0] + name[1] + value + (b"," if lines[line].endswith(b",") else b"")
            data = bytearray(b"\n".join(lines))
    return bytes(data)


def test_damaged_files_of_other_trainers_are_answered_with_sentences() -> None:
    assert _read_damaged(random.Random(20), 60) > 5


@pytest.mark.long
def test_500_files_damaged_today_are_answered_with_sentences() -> None:
    assert _read_damaged(random.Random(random.getrandbits(32)), 500) > 50


def _read_damaged(rng: random.Random, count: int) -> int:
    """How many of so many damaged files are read. Each is read, or refused; whatever is read builds and has a row for each key."""
    read = 0
    for _ in range(count):
        name = rng.choice(list(FILES))
        data = _damaged(FILES[name], rng)
        try:
            found = importers.read(name, data)
        except OptionError as err:
            assert str(err).strip() and "Traceback" not in str(err)
            continue
        read += 1
        try:
            builds(found)
        except OptionError as err:
            raise AssertionError((name, data, found.missing)) from err
    return read


def test_paths_of_keys_are_opened_and_no_deeper_than_they_are_read() -> None:
    deep: Any = 1
    for _ in range(50):
        deep = {"a": deep}
    assert table.opened({"x": [{"y": 1}, {"y": {"z": [1, 2]}}], "e": {}, "l": []}) == {"x[0].y": 1, "x[1].y.z": [1, 2], "e": {}, "l": []}
    ((key, value),) = table.opened(deep).items()
    assert key.count("a") == table.MAX_DEPTH + 1 and isinstance(value, dict)


def test_a_file_that_two_programs_could_own_asks_and_its_name_answers() -> None:
    both = json.dumps({**ONE, **SIMPLE}).encode()
    with pytest.raises(OptionError, match=r"configuration of OneTrainer .* or a configuration of SimpleTuner .*which of them"):
        importers.read("both.json", both)
    assert "OneTrainer" in importers.read("onetrainer-both.json", both).origin
    assert "SimpleTuner" in importers.read("simpletuner-both.json", both).origin


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_program_is_a_config_file_on_the_command_line(name: str, tmp_path: Any) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    found = importers.read(name, FILES[name])
    more = {"train_data_dir": "d"} if any(text.startswith("train_data_dir") for text in found.missing) else {}
    wanted = flat.build(found.run, {**found.values, **more, "output_name": "mine"})
    argv = ["--config_file", str(path), "--output_name", "mine", *(word for key, value in more.items() for word in (f"--{key}", value))]
    asked = command_line.parse_cli(found.run, argv, programs.of_config_file)
    assert asked.options == wanted
    lost = [row for row in found.rows if row.verdict in ("not supported", "unknown")]
    assert all(any(row.key in note and row.text in note for note in asked.notes) for row in lost) and found.origin in asked.notes[0]
    other = next(run for run in RUNS.values() if run is not found.run)
    with pytest.raises(OptionError, match=f"start {found.run.script}"):
        command_line.parse_cli(other, argv, programs.of_config_file)


ANIMA_PIPE = (
    KREA_PIPE.replace("krea2", "anima").split("diffusion_model")[0]
    + """transformer_path = "anima-base-v1.0.safetensors"
vae_path = "qwen_image_vae.safetensors"
llm_path = "qwen_3_06b_base.safetensors"
llm_adapter_lr = 0
"""
    + KREA_PIPE[KREA_PIPE.index("dtype =") :]
)


def test_anima_of_other_programs_is_a_run_on_anima() -> None:
    pipe = importers.read("anima.toml", ANIMA_PIPE.encode())
    options = builds(pipe)
    assert options["pretrained_model_name_or_path"] == "anima-base-v1.0.safetensors"
    assert (options["vae"], options["text_encoder"]) == ("qwen_image_vae.safetensors", "qwen_3_06b_base.safetensors")
    assert said(pipe, "model.llm_adapter_lr")[0] == "not needed"
    trained = importers.read("anima.toml", ANIMA_PIPE.replace("llm_adapter_lr = 0", "llm_adapter_lr = 1e-6").encode())
    assert said(trained, "model.llm_adapter_lr")[0] == "not supported"
    preset = {**KREA_PRESET, "base_model_name": "circlestone-labs/Anima-Base-v1.0-Diffusers", "model_type": "ANIMA"}
    assert builds(importers.read("#anima LoRA.json", json.dumps(preset).encode()))["text_encoder_quantization"] == "qfloat8"


def test_a_name_that_stands_twice_with_one_value_is_taken_once() -> None:
    """As in files that start from the template of a widely used page for kohya's scripts."""
    text = '[data]\nresolution = "{}"\ntrain_data_dir = "d"\n[training]\nresolution = "512,512"\nnetwork_module = "networks.lora"\n'
    text += 'pretrained_model_name_or_path = "m"\nnetwork_dim = 8\n'
    found = importers.read("x.toml", text.format("512,512").encode())
    assert found.run.family == "sd" and not found.missing and found.values["network_dim"] == 8
    with pytest.raises(OptionError, match=r"resolution stands twice in x\.toml, .*as 768,768 and as 512,512; keep one"):
        importers.read("x.toml", text.format("768,768").encode())


@pytest.mark.parametrize("base", ["D:/v1-5-pruned.safetensors", "sd_xl_base.safetensors"])
def test_options_that_are_off_do_not_say_the_family(base: str) -> None:
    """Pages for several families write the options of all of them, off."""
    off = "no_half_vae = false\napply_t5_attn_mask = false\nguidance_scale = 0\nlearning_rate_te2 = 0\n"
    text = f'pretrained_model_name_or_path = "{base}"\ntrain_data_dir = "d"\nnetwork_module = "networks.lora"\nnetwork_dim = 8\n'
    family = "sdxl" if "xl" in base else "sd"
    for more in (off, "no_half_vae = true\n", ""):
        assert importers.read("x.toml", f"{text}{more}".encode()).run.family == family, more
    unnamed = text.replace(base, "mine.safetensors")
    assert importers.read("x.toml", f"{unnamed}no_half_vae = true\n".encode()).run.family == "sdxl"
    assert importers.read("x.toml", f"{unnamed}guidance_scale = 1.0\n".encode()).run.family == "flux"


def test_a_text_of_no_kind_is_told_so() -> None:
    with pytest.raises(OptionError, match=r"notes\.md is neither a command line nor settings; as TOML: .*Give a kohya_ss configuration"):
        importers.read("notes.md", b"# Training\n\nTake the best images.\n")
