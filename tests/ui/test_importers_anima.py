"""Anima as kohya's programs have it: lines and files of sd-scripts, the page of kohya_ss, and back."""

from __future__ import annotations

import json

import pytest

from kohya_like import importers
from kohya_like.importers import Imported
from sd_scripts.families import RUNS
from sd_scripts.programs import exports
from sd_scripts.schema import flat, kohya_lines
from sd_scripts.schema.errors import OptionError

RUN = RUNS["anima", "network"]
LINE = """accelerate launch --num_cpu_threads_per_process 1 {} --pretrained_model_name_or_path=anima.safetensors --qwen3=q.safetensors \\
  --vae=vae.safetensors --dataset_config=set.toml --output_name=mine --save_model_as=safetensors --optimizer_type=AdamW8bit \\
  --learning_rate 1e-4 --timestep_sampling=sigmoid --qwen3_max_token_length 256 --t5_max_token_length=256 --cache_text_encoder_outputs \\
  --vae_chunk_size=64 --vae_disable_cache --attn_mode flash --split_attn --max_token_length 225 --fp8_base {}
"""
_ADAPTER = "--network_module=networks.lora_anima --network_dim=8"


def line(script: str = "anima_train_network.py", more: str = "") -> Imported:
    found = importers.read("x.sh", LINE.format(script, f"{_ADAPTER if 'network' in script else ''} {more}").encode())
    flat.build(found.run, found.values)
    assert not [row for row in found.rows if row.verdict == "unknown"]
    return found


def said(found: Imported, key: str) -> tuple[str, str]:
    (row,) = [row for row in found.rows if row.key == key]
    return row.verdict, row.text


def test_a_line_of_sd_scripts_is_a_run_with_its_defaults() -> None:
    found = line()
    wanted = {
        "pretrained_model_name_or_path": "anima.safetensors",
        "text_encoder": "q.safetensors",
        "vae": "vae.safetensors",
        "max_token_length": 256,
        "network_dim": 8,
        "network_alpha": 1.0,
        "timestep_sampling": "sigmoid",
        "save_model_as": "kohya",
    }
    assert found.run is RUN and {name: found.values.get(name) for name in wanted} == wanted and not found.conflicts
    assert said(found, "max_token_length") == ("not needed", "it is for CLIP; qwen3_max_token_length says it for Anima")
    assert {said(found, key)[0] for key in ("vae_chunk_size", "vae_disable_cache", "attn_mode", "fp8_base")} == {"not needed"}
    assert said(found, "cache_text_encoder_outputs")[0] == "taken"


def test_what_is_trained_there_and_not_here_stands_above_the_form() -> None:
    several = line(more="--t5_max_token_length 512 --network_args train_llm_adapter=True include_patterns=['.*final_layer.*']")
    keys = {sentence.partition(" = ")[0] for sentence in several.conflicts}
    assert keys == {"t5_max_token_length", "train_llm_adapter", "include_patterns"}
    text = importers.read("x.sh", LINE.format("anima_train_network.py", _ADAPTER).replace("--cache_text_encoder_outputs", "").encode())
    assert [sentence for sentence in text.conflicts if "text encoder has an adapter in sd-scripts as well" in sentence]
    alone = text.values | {"network_dim": 8}
    assert "train_text_encoder" not in alone
    whole = line("anima_train.py", "--mlp_lr 0 --timestep_sampling flux_shift --full_bf16")
    assert any("text conditioner is trained in sd-scripts as well" in sentence for sentence in whole.conflicts)
    assert said(whole, "mlp_lr")[0] == "not supported" and whole.values["discrete_flow_shift"] == pytest.approx(3.1582)
    kept = line("anima_train.py", "--llm_adapter_lr 0")
    assert said(kept, "llm_adapter_lr")[0] == "not needed" and not any("conditioner" in sentence for sentence in kept.conflicts)


def test_the_page_of_kohya_ss_has_widgets_of_its_own_for_it() -> None:
    """The page's file holds the widgets of all families: those of this one win, and rows have the page's names."""
    given = {
        "anima_checkbox": True,
        "sdxl": False,
        "flux1_checkbox": False,
        "LoRA_type": "Anima",
        "pretrained_model_name_or_path": "a.safetensors",
        "train_data_dir": "d",
        "anima_qwen3": "q.safetensors",
        "anima_vae": "v.safetensors",
        "vae": "other.safetensors",
        "anima_timestep_sampling": "shift",
        "timestep_sampling": "sigma",
        "anima_discrete_flow_shift": 2.5,
        "discrete_flow_shift": 3.1,
        "anima_cache_text_encoder_outputs": True,
        "flux1_cache_text_encoder_outputs": False,
        "anima_compile": True,
        "anima_compile_mode": "max-autotune",
        "anima_attn_mode": "torch",
        "text_encoder_lr": 0,
        "unet_lr": 1e-4,
    }
    found = importers.read("mine.json", json.dumps(given).encode())
    assert found.run is RUN and {row.key for row in found.rows} >= given.keys()
    wanted = {"text_encoder": "q.safetensors", "vae": "v.safetensors", "discrete_flow_shift": 2.5, "compile": True}
    assert {name: found.values.get(name) for name in wanted} == wanted and flat.build(found.run, found.values)
    assert said(found, "anima_qwen3") == ("renamed", "text_encoder = q.safetensors")
    assert said(found, "timestep_sampling") == ("not needed", "it is for other families; Anima has anima_timestep_sampling")
    assert said(found, "anima_timestep_sampling")[0] == "renamed" and not found.conflicts


def test_models_of_sdxl_whose_names_begin_so_are_not_taken_for_it() -> None:
    given = {"pretrained_model_name_or_path": "animagine-xl-4.0.safetensors", "train_data_dir": "d", "LoRA_type": "Standard"}
    assert importers.read("x.json", json.dumps(given).encode()).run is RUNS["sdxl", "network"]


def test_a_file_of_the_script_without_a_box_is_told_by_its_words() -> None:
    text = 'pretrained_model_name_or_path = "m"\ntrain_data_dir = "d"\nqwen3 = "q"\nnetwork_module = "networks.lokr"\nnetwork_dim = 4\n'
    found = importers.read("x.toml", text.encode())
    assert found.run is RUN and found.values["network_type"] == "lokr" and found.values["timestep_sampling"] == "sigmoid"


def test_a_line_in_kohyas_words_starts_it_here() -> None:
    given = {"network_module": "networks.lora_anima", "qwen3": "q", "llm_adapter_path": "c", "network_train_unet_only": True}
    translated, notes = kohya_lines.translated(
        RUN, flat.fields(RUN), {"pretrained_model_name_or_path": "m", "train_data_dir": "d", **given}
    )
    assert (translated["text_encoder"], translated["text_conditioner"], translated["network_type"]) == ("q", "c", "lora")
    assert any("taken as text_encoder = q" in note for note in notes)


def test_what_is_exported_for_sd_scripts_comes_back() -> None:
    parts = {"vae": "v", "text_encoder": "q", "text_conditioner": "c", "max_token_length": 256, "save_model_as": "kohya"}
    options = flat.build(RUN, {"pretrained_model_name_or_path": "m", "train_data_dir": "d", "sample_at_first": False, **parts})
    made = exports.to_kohya(options)
    assert "anima_train_network.py" in made.text and "--qwen3=q" in made.text and "--max_token_length" not in made.text
    assert not {text.partition(" = ")[0] for text in made.unsaid} & parts.keys()


def test_other_families_of_sd_scripts_are_refused_by_their_names() -> None:
    for script, named in {"lumina_train_network.py": "Lumina", "anima_train_control_net_lllite.py": "a ControlNet"}.items():
        with pytest.raises(OptionError, match=f"for {named}, which is not trained here"):
            importers.read("x.sh", f"accelerate launch {script} --learning_rate 1".encode())
