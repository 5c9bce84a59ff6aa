"""Configurations of SimpleTuner, and the files that they name, as our options."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kohya_like import importers
from sd_scripts.families import RUNS
from sd_scripts.schema.errors import OptionError
from tests.ui.foreign_files import SIMPLE, builds, said, simple


def test_a_configuration_of_simpletuner_becomes_the_same_run() -> None:
    found = simple()
    options = builds(found)
    assert found.run is RUNS["zimage", "network"]
    wanted = {
        "pretrained_model_name_or_path": "Tongyi-MAI/Z-Image",
        "network_dim": 32,
        "network_alpha": None,
        "network_dropout": 0.1,
        "transformer_quantization": "qint8",
        "learning_rate": 2e-4,
        "optimizer_type": "AdamW8bit",
        "lr_scheduler": "polynomial",
        "max_train_steps": 700,
        "max_train_epochs": None,
        "train_batch_size": 3,
        "timestep_sampling": "shift",
        "discrete_flow_shift": 2.0,
        "max_grad_norm": 0.5,
        "save_every_n_steps": 50,
        "save_last_n_steps": 150,
        "resolution": (1024, 1024),
        "caption_dropout_rate": 0.1,
        "sample_prompts": "a dog --d 3 --w 768 --h 512",
        "sample_every_n_steps": 25,
    }
    assert {name: options[name] for name in wanted} == wanted
    assert [text.partition(" = ")[0] for text in found.conflicts] == ["data_backend_config"]
    assert "value by value" in said(simple(grad_clip_method="value"), "max_grad_norm")[1]
    flat_times = builds(simple(flow_use_uniform_schedule=True))
    assert (flat_times["timestep_sampling"], flat_times["discrete_flow_shift"]) == ("sigma", 2.0)
    with pytest.raises(OptionError, match="trains a ControlNet"):
        simple(controlnet=True)
    assert simple(model_family="flux2", model_flavour="dev").run is RUNS["flux2_dev", "network"]


def test_a_network_that_simpletuner_compiles_is_compiled() -> None:
    names = ("compile", "compile_backend", "compile_scope", "compile_mode")
    for given, wanted in (("inductor", (True, "inductor", "blocks", "reduce-overhead")), ("no", (False, "inductor", "auto", "default"))):
        found = builds(simple(dynamo_backend=given, dynamo_mode="reduce-overhead", dynamo_use_regional_compilation=True))
        assert tuple(map(found.get, names)) == wanted
    lost = simple(dynamo_backend="onnxrt", dynamo_mode="default")
    assert said(lost, "dynamo_backend")[0] == "not supported" and builds(lost)["compile"] is False


LYCORIS = {
    "bypass_mode": True,
    "algo": "lokr",
    "multiplier": 1.0,
    "linear_dim": 10000,
    "linear_alpha": 1,
    "factor": 12,
    "apply_preset": {"target_module": ["Attention"], "module_algo_map": {"Attention": {"factor": 12}, "FeedForward": {"factor": 6}}},
}


def test_the_file_of_lycoris_that_simpletuner_names_is_read_with_it_and_alone(tmp_path: Any) -> None:
    (tmp_path / "config" / "mine").mkdir(parents=True)
    (tmp_path / "config" / "mine" / "lycoris_config.json").write_text(json.dumps(LYCORIS))
    given = {**SIMPLE, "--lora_type": "lycoris", "--lycoris_config": "config/mine/lycoris_config.json"}
    main = tmp_path / "config" / "mine" / "config.json"
    main.write_text(json.dumps(given))
    found = importers.read("config.json", main.read_bytes(), importers.Opened(path=main))
    options = builds(found)
    assert (options["network_type"], options["network_dim"], options["network_alpha"], options["lokr_factor"]) == ("lokr", 4096, None, 12)
    assert said(found, "lycoris_config.apply_preset.module_algo_map.Attention.factor")[0] == "not needed"
    assert said(found, "lycoris_config.apply_preset.module_algo_map.FeedForward.factor")[0] == "not supported"
    assert not [row for row in found.rows if row.verdict == "unknown"]
    alone = importers.read("lycoris_config.json", json.dumps(LYCORIS).encode(), importers.Opened(found.run))
    assert alone.adds and alone.values["network_type"] == "lokr" and alone.values["lokr_factor"] == 12
    absent = builds(simple(lora_type="lycoris", lycoris_config="elsewhere.json"))
    assert absent["network_type"] == "lora"


def test_a_library_of_prompts_that_simpletuner_names_becomes_previews(tmp_path: Any) -> None:
    library = {"portrait": "a woman with blue hair", "place": "a cafe in the morning"}
    (tmp_path / "library.json").write_text(json.dumps(library))
    main = tmp_path / "config.json"
    main.write_text(json.dumps({**SIMPLE, "--user_prompt_library": "library.json"}))
    found = importers.read("config.json", main.read_bytes(), importers.Opened(path=main))
    texts = [SIMPLE["--validation_prompt"], *library.values()]
    assert builds(found)["sample_prompts"].splitlines() == [f"{text} --d 3 --w 768 --h 512" for text in texts]
    alone = importers.read("library.json", json.dumps(library).encode(), importers.Opened(found.run))
    assert alone.adds and alone.values["sample_prompts"].splitlines() == list(library.values())
    assert said(simple(user_prompt_library="elsewhere.json"), "user_prompt_library")[0] == "not supported"


def test_a_setting_of_simpletuner_that_begins_as_others_do_is_unknown() -> None:
    assert {said(simple(**{name: 3}), name)[0] for name in ("validation_made_up", "vae_enable_made_up", "accelerate_made_up")} == {
        "unknown"
    }


def test_whole_matrices_of_lycoris_have_no_alpha(tmp_path: Any) -> None:
    """peft divides alpha by the rank whatever the factors are: an alpha of 1 would have made such a network learn 4096 times less."""
    (tmp_path / "lycoris_config.json").write_text(
        json.dumps({"algo": "lokr", "linear_dim": 10000, "linear_alpha": 1, "factor": 16}), encoding="utf-8"
    )
    main = tmp_path / "config.json"
    given = {**SIMPLE, "--lora_type": "lycoris", "--lora_alpha": 128, "--lycoris_config": "config/mine/lycoris_config.json"}
    main.write_text(json.dumps(given), encoding="utf-8")
    found = importers.read("config.json", main.read_bytes(), importers.Opened(path=main))
    options = builds(found)
    assert (options["network_type"], options["network_dim"], options["network_alpha"]) == ("lokr", 4096, None)
    assert said(found, "lora_alpha") == ("not needed", "lycoris_config says it")
    full = json.dumps({"algo": "lokr", "full_matrix": True, "linear_alpha": 1}).encode()
    alone = importers.read("lycoris_config.json", full, importers.Opened(found.run))
    assert (alone.values["network_dim"], alone.values["network_alpha"]) == (4096, None)
    kohya = b'network_module = "lycoris.kohya"\nnetwork_args = ["algo=lokr"]\nnetwork_dim = 100000\npretrained_model_name_or_path = "xl"\n'
    assert builds(importers.read("x.toml", kohya))["network_alpha"] is None
