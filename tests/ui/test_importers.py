"""Importing kohya_ss's and sd-scripts' configurations: every key gets one row, everything that fits is taken, and the result builds."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kohya_like import form, importers
from kohya_like.importers import Imported
from sd_scripts.families import RUNS
from sd_scripts.families.flux.options import FluxFull, FluxNetwork
from sd_scripts.families.sd.options import SdFull, SdNetwork
from sd_scripts.families.sdxl.options import SdxlFull, SdxlNetwork
from sd_scripts.programs.kohya import reading as kohya_ss
from sd_scripts.schema import flat, prompts, toml_files
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.runs import RunOptions

DATA = Path(__file__).parents[1] / "data"
PAGE_NAMES = (DATA / "kohya_page_names.txt").read_text().split()
SCRIPT_NAMES = [name for name in (DATA / "kohya_option_names.txt").read_text().split() if name != "dit"]
"""dit is musubi-tuner's, by which its files are known."""
BOXES = {
    "sd": {"sdxl": False, "flux1_checkbox": False},
    "sdxl": {"sdxl": True, "flux1_checkbox": False},
    "flux": {"sdxl": False, "flux1_checkbox": True},
    "anima": {"sdxl": False, "flux1_checkbox": False, "anima_checkbox": True},
}
TABS = {
    "lora": {"LoRA_type": "Standard", "network_dim": 8, "network_alpha": 1, "text_encoder_lr": 0, "unet_lr": 0.0001},
    "dreambooth": {"prior_loss_weight": 1.0},
    "finetune": {"image_folder": "images", "dataset_repeats": "40"},
}
PLACES = {"pretrained_model_name_or_path": "base.safetensors", "train_data_dir": "images"}


def page(**values: object) -> Imported:
    return importers.read("settings.json", json.dumps(values).encode())


def script(**values: object) -> Imported:
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    return importers.read("settings.toml", "\n".join(lines).encode())


def lora(family: str = "sdxl", **values: object) -> Imported:
    return page(**BOXES[family], **{**TABS["lora"], **PLACES, **values})


def row(imported: Imported, key: str) -> tuple[str, str]:
    (found,) = [row for row in imported.rows if row.key == key]
    return found.verdict, found.text


def builds(imported: Imported) -> RunOptions:
    """The options once the person has given what is missing; the form can show every value."""
    named = {sentence.partition(":")[0] for sentence in imported.missing}
    options = flat.build(imported.run, {**dict.fromkeys(named, "given"), **imported.values})
    form.texts(imported.run, imported.values)
    return options


def check(imported: Imported, keys: set[str]) -> None:
    names = [row.key for row in imported.rows]
    assert len(names) == len(set(names))
    assert keys <= set(names)
    # What is told besides the file's own keys is what the file leaves at the other program's defaults, or holds inside of a key.
    for found in imported.rows:
        assert found.text and found.verdict in ("taken", "renamed", "not needed", "not supported", "unknown")
        assert found.key in keys or found.text.startswith("not in the file") or keys & {"additional_parameters", "network_args"}
    builds(imported)


# --- every key ------------------------------------------------------------------------------------------------------


def likely(name: str, chance: random.Random) -> object:
    """A value such as kohya's page may hold under this name, off or on, a number or its text."""
    for run in RUNS.values():
        field = flat.fields(run).get(name)
        if field is None:
            continue
        if field.type is bool:
            return chance.choice([True, False])
        if field.choices:
            return chance.choice([*map(str, field.choices), "unheard of"])
        if field.type in (int, float):
            return chance.choice([0, 1, "2", 3.0, 0.5, "0.25", "", 100000, -1])
        if field.many:
            return chance.choice(["", "1,2,3", "4", "a=b"])
        return chance.choice(["", "some text", "a/b"])
    return chance.choice([True, False, 0, 1, 0.5, "", "none", "some text", None])


@pytest.mark.parametrize("tab", TABS)
@pytest.mark.parametrize("family", BOXES)
def test_every_key_of_the_page_gets_one_row_for_every_family_and_method(family: str, tab: str) -> None:
    fixed = BOXES[family] | TABS[tab]
    others = {name: marks for other, marks in TABS.items() if other != tab for name in marks}
    for seed in range(4):
        chance = random.Random(f"{family} {tab} {seed}")
        names = [name for name in PAGE_NAMES if name not in others and name not in kohya_ss.ADAPTER_MARKS + kohya_ss.FINETUNE_MARKS]
        names = [name for name in names if not name.endswith("_checkbox") and name != "model_type"]
        values = {name: likely(name, chance) for name in names} | fixed
        imported = page(**values)
        check(imported, set(values))
        assert imported.run is RUNS[family, "network" if tab == "lora" else "full"]


@pytest.mark.parametrize("module", ["networks.lora", "lycoris.kohya", "networks.lora_flux", None])
def test_every_option_of_the_scripts_gets_one_row(module: str | None) -> None:
    for seed in range(4):
        chance = random.Random(f"{module} {seed}")
        values = {name: likely(name, chance) for name in SCRIPT_NAMES if module or name not in kohya_ss.ADAPTER_MARKS}
        values |= {"network_module": module} if module else {}
        values = {name: value for name, value in values.items() if value is not None and name != "config_file"}
        check(script(**values), set(values))


anything = st.one_of(st.none(), st.booleans(), st.integers(-3, 5000), st.floats(-2, 5000), st.text(max_size=12), st.just("0.0001"))


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from(PAGE_NAMES), anything, min_size=3, max_size=25))
def test_no_configuration_is_too_strange_for_a_report(values: dict[str, object]) -> None:
    check(kohya_ss.from_json(values, "strange.json"), set(values))


# --- the presets of kohya_ss ----------------------------------------------------------------------------------------

_OLD = {
    "save_as_bool": False,
    "no_token_padding": False,
    "stop_text_encoder_training_pct": 0,
    "conv_dims": "",
    "conv_alphas": "",
    "seed": "1234",
}
_OLD |= {
    "lora_network_weights": "",
    "max_resolution": "1024,1024",
    "epoch": "10",
    "lr_warmup": "10",
    "train_batch_size": "4",
    "keep_tokens": "0",
}
_OLD |= {"max_train_epochs": "", "lr_scheduler_num_cycles": "", "lr_scheduler_power": "", "max_token_length": "75", "clip_skip": "1"}
_OLD |= {"xformers": True, "mixed_precision": "bf16", "save_precision": "fp16", "max_data_loader_n_workers": "0", "min_snr_gamma": 5}
_OLD |= {
    "noise_offset_type": "Original",
    "noise_offset": 0.0357,
    "adaptive_noise_scale": 0.00357,
    "max_bucket_reso": 2048,
    "bucket_reso_steps": 1,
}
_LYCORIS = {"LyCORIS_preset": "full", "conv_dim": 32, "conv_alpha": 4, "factor": -1, "use_cp": True, "train_norm": False, "unit": 1}
_RATES = {"learning_rate": 1.0, "text_encoder_lr": 1.0, "unet_lr": 1.0}
_KINDS: dict[str, tuple[type[RunOptions], dict[str, object], dict[str, object]]] = {
    "ia3": (
        SdNetwork,
        {"LoRA_type": "LyCORIS/iA3", "network_dim": 1024, "max_resolution": "512,512"},
        {"network_type": "lora", "network_dim": 16},
    ),
    "loha": (SdNetwork, {"LoRA_type": "LyCORIS/LoHa", **_LYCORIS, "max_resolution": "512,650"}, {"network_type": "loha", "conv_dim": 32}),
    "lokr": (
        SdxlNetwork,
        {"LoRA_type": "LyCORIS/LoKr", **_LYCORIS, "network_dim": 100000, "conv_dim": 100000, "factor": 6, "decompose_both": True},
        {"network_type": "lokr", "network_dim": 4096, "conv_dim": 4096, "lokr_factor": 6, "lokr_decompose_both": True},
    ),
    "locon": (SdxlNetwork, {"LoRA_type": "LyCORIS/LoCon", **_LYCORIS}, {"network_type": "lora", "conv_dim": 32, "conv_alpha": 4.0}),
    "dora": (SdxlNetwork, {"LoRA_type": "LyCORIS/LoCon", **_LYCORIS, "dora_wd": True}, {"network_type": "dora"}),
    "dylora": (SdNetwork, {"LoRA_type": "Kohya DyLoRA", **_LYCORIS, "max_resolution": "768,768"}, {"network_type": "lora", "conv_dim": 32}),
    "glora": (SdNetwork, {"LoRA_type": "LyCORIS/GLoRA", **_LYCORIS, "max_resolution": "512,512"}, {"network_type": "lora"}),
    "prodigy": (
        SdxlNetwork,
        {"optimizer": "Prodigy", "optimizer_args": '"decouple=True" "betas=0.9,0.99"', **_RATES},
        {"optimizer_type": "Prodigy", "optimizer_args": ("decouple=True", "betas=0.9,0.99"), "train_text_encoder": True},
    ),
    "dadaptation": (SdxlNetwork, {"optimizer": "dadaptadam", "optimizer_args": "decouple=True"} | _RATES, {"optimizer_type": "DAdaptAdam"}),
    "adafactor": (
        SdxlNetwork,
        {"optimizer": "Adafactor", "optimizer_args": "scale_parameter=False relative_step=False", "lr_scheduler": "adafactor"},
        {"optimizer_type": "Adafactor", "optimizer_args": (), "lr_scheduler": "constant"},
    ),
    "flux fp8": (
        FluxNetwork,
        {
            "flux1_checkbox": True, "LoRA_type": "Flux1", "fp8_base": True, "optimizer": "AdamW8bit", "ae": "ae.sft",
            "timestep_sampling": "sigmoid", "guidance_scale": 1, "model_prediction_type": "raw", "noise_offset": 0.05, "min_snr_gamma": 7,
            "flux1_cache_text_encoder_outputs": True, "discrete_flow_shift": 3, "huggingface_token": "", "t5xxl_max_token_length": 512,
        },
        {"timestep_sampling": "sigmoid", "guidance_scale": 1.0, "optimizer_type": "AdamW8bit", "ae": "ae.sft"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("boxed", [True, False], ids=["with boxes", "without boxes"])
@pytest.mark.parametrize("kind", _KINDS)
def test_presets_of_every_shape_load_with_a_report(kind: str, boxed: bool) -> None:
    run, own, expected = _KINDS[kind]
    values = (
        TABS["lora"] | _OLD | {"optimizer": "AdamW8bit", "lr_scheduler": "constant"} | ({"sdxl": run is SdxlNetwork} if boxed else {}) | own
    )
    imported = page(**values)
    check(imported, set(values))
    assert imported.run is run
    options = flat.flatten(builds(imported))
    assert {name: options[name] for name in expected} == expected
    assert options["max_train_epochs"] == 10 and options["seed"] == 1234
    assert [sentence.partition(":")[0] for sentence in imported.missing] == ["pretrained_model_name_or_path", "train_data_dir"]


@pytest.mark.parametrize("optimizer", ["PagedAdamW8bit", "Adafactor", "Lion", "AdamW"])
def test_presets_for_fine_tuning_load(optimizer: str) -> None:
    values = _OLD | {
        "train_dir": "train",
        "caption_metadata_filename": "meta_cap.json",
        "latent_metadata_filename": "meta_lat.json",
        "batch_size": "1",
    }
    values |= {"full_path": True, "create_caption": True, "create_buckets": True, "use_latent_files": "No", "dataset_repeats": "10"}
    values |= {
        "sdxl_checkbox": True,
        "train_text_encoder": True,
        "learning_rate": "0.0000166666666",
        "optimizer": optimizer,
        "block_lr": "",
    }
    del values["lora_network_weights"]
    imported = page(**values)
    check(imported, set(values))
    options = flat.flatten(builds(imported))
    assert imported.run is SdxlFull
    assert options["train_text_encoder"] and not options["cache_text_encoder_outputs"] and options["dataset_repeats"] == 10
    assert options["learning_rate"] == (1e-5 if optimizer == "Adafactor" else 0.0000166666666)


def test_a_preset_for_a_family_that_is_not_trained_loads_as_a_recipe_without_its_model() -> None:
    imported = page(
        sd3_checkbox=True, pretrained_model_name_or_path="sd3_medium.safetensors", clip_g="clip_g", prior_loss_weight=1, max_train_epochs=8
    )
    assert imported.values["max_train_epochs"] == 8
    assert "pretrained_model_name_or_path" not in imported.values
    assert row(imported, "sd3_checkbox")[0] == row(imported, "clip_g")[0] == "not supported"
    assert imported.missing[0].startswith("pretrained_model_name_or_path:")


# --- what becomes of single keys ------------------------------------------------------------------------------------


def test_the_kind_of_run_follows_the_boxes_and_the_page() -> None:
    wanted = {"sd": (SdNetwork, SdFull), "sdxl": (SdxlNetwork, SdxlFull), "flux": (FluxNetwork, FluxFull)}
    for family, (network, full) in wanted.items():
        assert page(**BOXES[family], **TABS["lora"]).run is network
        assert page(**BOXES[family], **TABS["dreambooth"]).run is full
        assert page(**BOXES[family], **TABS["finetune"]).run is full


@pytest.mark.parametrize(
    ("values", "run"),
    [
        ({"network_module": "networks.lora_flux", "network_dim": 4}, FluxNetwork),
        ({"ae": "ae.safetensors", "learning_rate": 1e-5, "seed": 1}, FluxFull),
        ({"network_module": "networks.lora", "pretrained_model_name_or_path": "sd_xl_base_1.0.safetensors", "seed": 1}, SdxlNetwork),
        ({"network_module": "networks.lora", "resolution": "1024,1024", "seed": 1}, SdxlNetwork),
        ({"network_module": "networks.lora", "resolution": "512", "seed": 1}, SdNetwork),
        ({"learning_rate_te2": 1e-5, "seed": 1, "output_name": "x"}, SdxlFull),
        ({"v2": True, "seed": 1, "output_name": "x"}, SdFull),
    ],
)
def test_without_boxes_the_family_is_told_by_what_the_file_has(values: dict[str, object], run: type[RunOptions]) -> None:
    imported = script(**values)
    assert imported.run is run
    assert "told by" in imported.origin


@pytest.mark.parametrize(
    ("unet", "text", "trained"), [(1e-4, 0, (True, False)), (0, 1e-5, (False, True)), (1e-4, 1e-5, (True, True)), (0, 0, (True, True))]
)
def test_rates_of_0_say_who_is_not_trained(unet: float, text: float, trained: tuple[bool, bool]) -> None:
    options = flat.flatten(builds(lora(unet_lr=unet, text_encoder_lr=text, sdxl_cache_text_encoder_outputs=True)))
    assert (options["train_unet"], options["train_text_encoder"]) == trained
    assert options["cache_text_encoder_outputs"] is not trained[1]
    assert options["text_encoder_lr"] == ((text,) if text else ())


def test_rates_of_several_text_encoders() -> None:
    flux = flat.flatten(builds(lora("flux", text_encoder_lr=1e-5, t5xxl_lr=2e-5)))
    assert flux["text_encoder_lr"] == (1e-5, 2e-5)
    options = flat.flatten(builds(script(network_module="networks.lora", text_encoder_lr=[1e-5, 1e-5], no_half_vae=True)))
    assert options["text_encoder_lr"] == (1e-5,)
    full = flat.flatten(builds(page(**BOXES["sdxl"], train_text_encoder=True, learning_rate_te1="3e-6", learning_rate_te2=1e-6)))
    assert full["text_encoder_lr"] == (3e-6, 1e-6)
    small = flat.flatten(builds(page(**BOXES["sd"], learning_rate_te="3e-6", stop_text_encoder_training=0)))
    assert small["text_encoder_lr"] == (3e-6,) and small["train_text_encoder"]
    assert not flat.flatten(builds(page(**BOXES["sd"], learning_rate_te="3e-6", stop_text_encoder_training=-1)))["train_text_encoder"]


def test_adafactor_with_its_own_rate_does_not_take_a_rate_of_1() -> None:
    imported = lora(
        optimizer="Adafactor", optimizer_args="relative_step=True warmup_init=True weight_decay=0.1", learning_rate=1.0, unet_lr=1.0
    )
    options = flat.flatten(builds(imported))
    assert options["learning_rate"] == 1e-4 and options["unet_lr"] is None
    assert options["optimizer_args"] == ("weight_decay=0.1",)
    assert row(imported, "learning_rate")[0] == "not supported"


@pytest.mark.parametrize(
    ("values", "warm_up"),
    [
        ({"lr_warmup": 10, "lr_scheduler": "cosine"}, 0.1),
        ({"lr_warmup": "0", "lr_scheduler": "cosine"}, 0),
        ({"lr_warmup": 10, "lr_warmup_steps": 250, "lr_scheduler": "linear"}, 250),
        ({"lr_warmup": 100, "lr_scheduler": "cosine"}, 0.999),
        ({"lr_warmup": 10, "lr_scheduler": "constant"}, 0.05),
    ],
)
def test_warm_up_in_percent_is_a_part_of_the_run(values: dict[str, object], warm_up: float) -> None:
    assert flat.flatten(builds(lora(**values)))["lr_warmup_steps"] == pytest.approx(warm_up)


@pytest.mark.parametrize(
    ("values", "length"),
    [
        ({"max_train_epochs": "", "max_train_steps": "", "epoch": "7"}, (1600, 7)),
        ({"max_train_epochs": 0, "max_train_steps": 900, "epoch": 7}, (900, None)),
        ({"max_train_epochs": 3, "max_train_steps": 900, "epoch": 7}, (1600, 3)),
    ],
)
def test_one_of_three_keys_says_how_long_the_run_is(values: dict[str, object], length: tuple[int, int | None]) -> None:
    imported = lora(**values)
    options = flat.flatten(builds(imported))
    assert (options["max_train_steps"], options["max_train_epochs"]) == length
    assert sum(row(imported, key)[0] in ("taken", "renamed") for key in values) == 1


def test_values_out_of_range_become_rows_and_leave_the_default() -> None:
    imported = lora(train_batch_size=0, min_timestep=5000, caption_dropout_rate=7, loss_type="l3", network_dim="many")
    options = flat.flatten(builds(imported))
    assert (options["train_batch_size"], options["min_timestep"], options["loss_type"], options["network_dim"]) == (1, 0, "l2", 16)
    verdict, text = row(imported, "min_timestep")
    assert verdict == "not supported" and "out of range" in text and "stays 0" in text


def test_contradictions_become_rows_too() -> None:
    imported = lora(min_snr_gamma=5, debiased_estimation_loss=True, min_bucket_reso=2048, max_bucket_reso=512, alpha_mask=True)
    builds(imported)
    assert imported.count("not supported") == 2
    assert row(imported, "alpha_mask")[1].endswith("it has no effect until masked_loss is on") and imported.values["alpha_mask"] is True


def test_secrets_are_never_kept() -> None:
    imported = lora(wandb_api_key="secret-1", huggingface_token="secret-2", log_with="wandb", wandb_run_name="mine")
    assert "secret-" not in repr(imported)
    assert imported.values["log_with"] == "wandb" and imported.values["wandb_run_name"] == "mine"


def test_blocks_ranks_and_curves_of_the_page() -> None:
    nineteen = ",".join(["4"] * 19)
    imported = lora(block_dims=nineteen, down_lr_weight="cosine", up_lr_weight="1,1,1,1,1,1,0.04,0,0", block_lr_zero_threshold="0.05")
    options = flat.flatten(builds(imported))
    assert options["block_dims"] == (4,) * 19
    weights = options["block_lr_weight"]
    assert len(weights) == 19 and weights[9] == 1.0 and weights[10:] == (1.0,) * 6 + (0.0,) * 3
    assert weights[0] == 1.0 and weights[8] == 0.0 and weights[4] == pytest.approx(math.sin(math.pi / 4), abs=1e-4)
    assert row(lora(block_dims="1,2,3"), "block_dims")[0] == "not supported"
    # sd-scripts counts 23 for SDXL: the time embedding, 9, the middle's ResNet, transformers and ResNet, 9, the last layer.
    there = [0, *range(1, 10), 30, 40, 50, *range(61, 70), 0]
    dims = flat.flatten(builds(lora(block_dims=",".join(map(str, there)))))["block_dims"]
    assert dims == (*range(1, 10), 40, *range(61, 70))
    assert row(lora(LoRA_type="LoCon", conv_dim=4, block_dims=",".join(map(str, there))), "block_dims")[0] == "not supported"


@pytest.mark.parametrize(("weights", "wanted"), [("0.5", 1.0), ("0.5,0.25", 0.25), ("0.5,0.25,0", 0.25), ("0,0,0", 0.0)])
def test_rates_of_the_middle_are_those_of_the_part_with_transformers(weights: str, wanted: float) -> None:
    """sd-scripts gives numbers to the three parts of SDXL's middle in turn, and 1 to those without one."""
    imported = lora(mid_lr_weight=weights)
    assert flat.flatten(builds(imported))["block_lr_weight"][9] == wanted
    assert ("those without a number have 1" in row(imported, "mid_lr_weight")[1]) == (weights.count(",") < 2)
    assert flat.flatten(builds(lora("sd", mid_lr_weight="0.5")))["block_lr_weight"][12] == 0.5
    with_convolutions = row(lora(LoRA_type="LoCon", conv_dim=4, mid_lr_weight=weights), "mid_lr_weight")
    assert with_convolutions[0] == ("renamed" if weights == "0,0,0" else "not supported")


@pytest.mark.parametrize(
    ("module", "arguments", "wanted"),
    [
        ("networks.lora", ["conv_dim=8"], 1.0),
        ("networks.lora", ["conv_dim=8", "conv_alpha=2"], 2.0),
        ("lycoris.kohya", ["algo=locon", "conv_dim=8"], 3.0),
        ("networks.lora", [], None),
    ],
)
def test_the_alpha_of_convolutions_is_sd_scripts_own_where_the_file_has_none(
    module: str, arguments: list[str], wanted: float | None
) -> None:
    """networks.lora takes 1, LyCORIS the alpha of the rest; ours is that of the rank."""
    imported = script(network_module=module, network_args=arguments, network_dim=6, network_alpha=3, learning_rate=1e-4, no_half_vae=True)
    assert builds(imported).network.conv_alpha == wanted


@pytest.mark.parametrize("no_upscale", [True, False])
def test_limits_of_buckets_that_have_no_effect_there_are_left_out(no_upscale: bool) -> None:
    """With bucket_no_upscale sd-scripts says that it ignores them, also its own default of 1024."""
    values = {"network_module": "networks.lora", "no_half_vae": True, "enable_bucket": True, "bucket_no_upscale": no_upscale}
    assert builds(script(**values)).dataset.max_bucket_reso == (2048 if no_upscale else 1024)
    given = script(**values, min_bucket_reso=320, max_bucket_reso=1216)
    dataset = builds(given).dataset
    assert (dataset.min_bucket_reso, dataset.max_bucket_reso) == ((256, 2048) if no_upscale else (320, 1216))
    assert row(given, "max_bucket_reso")[0] == ("not needed" if no_upscale else "taken")


@pytest.mark.parametrize("name", ["cosine_with_restarts", "cosine_with_min_lr", "warmup_stable_decay", "cosine"])
def test_cycles_are_taken_for_each_schedule_that_has_them(name: str) -> None:
    options = builds(lora(lr_scheduler=name, lr_scheduler_num_cycles="3"))
    assert options.optimizer.lr_scheduler_num_cycles == (1 if name == "cosine" else 3)
    # Where nothing says how long the last part is, sd-scripts has none.
    assert options.optimizer.lr_decay_steps == (0 if name == "warmup_stable_decay" else 0.1)
    assert len(flat.flatten(builds(lora("sd", block_dims=",".join(["2"] * 25))))["block_dims"]) == 25


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"timestep_sampling": "shift", "discrete_flow_shift": 3.1582}, {"timestep_sampling": "shift"}),
        ({"timestep_sampling": "sigma", "weighting_scheme": "none"}, {"timestep_sampling": "sigma", "discrete_flow_shift": 3.0}),
        (
            {"timestep_sampling": "sigma", "weighting_scheme": "cosmap"},
            {"weighting_scheme": "cosmap", "model_prediction_type": "sigma_scaled"},
        ),
        ({"timestep_sampling": "sigmoid", "weighting_scheme": "cosmap", "model_prediction_type": "raw"}, {"weighting_scheme": "none"}),
        ({"weighting_scheme": "mode", "mode_scale": 1.0}, {"timestep_sampling": "mode", "mode_scale": 1.0}),
    ],
)
def test_times_of_flux(values: dict[str, object], expected: dict[str, object]) -> None:
    options = flat.flatten(builds(script(network_module="networks.lora_flux", **values)))
    assert {name: options[name] for name in expected} == expected


def test_sigma_with_logit_normal_draws_the_times_that_kohya_draws() -> None:
    """kohya: u = sigmoid(mean + std N) counts steps from noisy to clean, so t = 1 - u, shifted by s. Against ours in closed form."""
    mean, std, shift = 0.3, 0.8, 2.5
    values = {"weighting_scheme": "logit_normal", "logit_mean": mean, "logit_std": std, "discrete_flow_shift": shift}
    options = flat.flatten(builds(script(network_module="networks.lora_flux", timestep_sampling="sigma", **values)))
    assert options["timestep_sampling"] == "logit_normal"
    for normal in (-2.0, -0.3, 0.0, 1.1):
        clean = 1 - 1 / (1 + math.exp(-(mean + std * normal)))
        theirs = shift * clean / (1 + (shift - 1) * clean)
        # The normal variable is symmetric: -N is as likely as N.
        ours = 1 / (1 + math.exp(-(options["logit_mean"] - options["logit_std"] * normal)))
        assert ours == pytest.approx(theirs, abs=1e-5)


def test_what_the_page_never_gave_to_a_family_is_not_taken_for_it() -> None:
    sdxl = lora("sdxl", discrete_flow_shift=9, timestep_sampling="sigmoid", guidance_scale=7, ae="ae.sft", t5xxl="t5", logit_mean=2)
    assert not {"discrete_flow_shift", "timestep_sampling", "guidance_scale", "logit_mean", "ae"} & set(sdxl.values)
    flux = lora("flux", weighting_scheme="logit_normal", logit_mean=2, min_snr_gamma=5, noise_offset=0.1)
    assert not {"weighting_scheme", "logit_mean", "min_snr_gamma", "noise_offset"} & set(flux.values)


def test_what_a_script_file_leaves_out_is_the_scripts_default() -> None:
    imported = script(network_module="networks.lora", learning_rate=1e-4, no_half_vae=True)
    options = flat.flatten(builds(imported))
    assert (options["network_dim"], options["network_alpha"], options["lr_scheduler"], options["lr_warmup_steps"]) == (
        4,
        1.0,
        "constant",
        0,
    )
    assert options["enable_bucket"] is False and options["train_text_encoder"]
    assert row(imported, "network_dim") == ("taken", "not in the file: network_dim = 4 is sd-scripts's default")


def test_additional_parameters_and_network_args_are_opened_and_win() -> None:
    extra = '--lr_scheduler_type "CosineAnnealingLR" --lr_scheduler_args "T_max=100" --max_grad_norm=0 --network_train_unet_only'
    extra += " --no_such_flag 3"
    imported = lora(additional_parameters=extra, text_encoder_lr=1e-5, max_grad_norm=1.0, lr_scheduler="constant")
    options = flat.flatten(builds(imported))
    assert (options["lr_scheduler"], options["max_grad_norm"], options["train_text_encoder"]) == ("cosine", 0.0, False)
    assert row(imported, "no_such_flag")[0] == "unknown"
    arguments = ["algo=lokr", "factor=8", "conv_dim=4", "conv_alpha=1", "preset=attn-mlp", "use_tucker=False", "rank_dropout=0.1"]
    opened = script(network_module="lycoris.kohya", network_args=arguments, learning_rate=1e-4, no_half_vae=True)
    options = flat.flatten(builds(opened))
    assert (options["network_type"], options["lokr_factor"], options["conv_dim"], options["rank_dropout"]) == ("lokr", 8, None, 0.1)
    assert row(opened, "network_args")[0] == "renamed"
    # LyCORIS gives convolutions the rank of the rest when nobody says another.
    same = script(network_module="lycoris.kohya", network_args=["algo=locon"], network_dim=6, network_alpha=3, no_half_vae=True)
    assert (same.values["conv_dim"], same.values["conv_alpha"]) == (6, 3.0)


def test_prompts_keep_the_flags_that_this_program_has() -> None:
    text = "a cat --w 512 --h 768 --d 1 --g 3\na dog --cn mask.png --n bad --ss k_dpm_2"
    imported = lora(sample_prompts=text, sample_sampler="k_dpm_2")
    assert imported.values["sample_prompts"] == "a cat --w 512 --h 768 --d 1\na dog --n bad --ss dpm_2"
    assert "--cn, --g" in row(imported, "sample_prompts")[1] and imported.values["sample_sampler"] == "dpm_2"
    flux = lora("flux", sample_prompts=text, sample_sampler="k_dpm_2")
    assert flux.values["sample_prompts"] == "a cat --w 512 --h 768 --d 1 --g 3\na dog --n bad"
    for found in (imported, flux):
        options = builds(found)
        defaults = prompts.Defaults(options.samples, (512, 512), 8, 0)
        assert [spec.prompt for spec in prompts.read_prompts(defaults)] == ["a cat", "a dog"]


def test_what_is_off_is_not_needed_and_what_is_the_same_is_taken() -> None:
    off = {
        "xformers": "none",
        "full_bf16": False,
        "blocks_to_swap": 0,
        "color_aug": False,
        "gpu_ids": "",
        "dynamo_backend": "no",
    }
    imported = lora(**off, shuffle_caption=True)
    assert {row(imported, key)[0] for key in off if key not in ("color_aug", "blocks_to_swap")} == {"not needed"}
    assert row(imported, "shuffle_caption") == ("taken", "as it is")
    on = lora(xformers="xformers", full_bf16=True, blocks_to_swap=4, compile=True)
    assert row(on, "compile") == ("taken", "as it is")
    assert row(on, "xformers")[0] == "not needed"
    assert row(on, "full_bf16")[0] == "not supported" and row(on, "blocks_to_swap") == ("taken", "as it is")


def test_several_processes_become_several_gpus() -> None:
    imported = lora(multi_gpu=True, num_processes=2, num_machines=1, gpu_ids="0,2", main_process_port=29501)
    distributed = builds(imported).distributed
    assert (distributed.multi_gpu, distributed.gpu_ids, distributed.num_gpus, distributed.main_process_port) == (True, ("0", "2"), 0, 29501)
    assert row(imported, "num_processes") == ("renamed", "multi_gpu = on, with a process for each of gpu_ids")
    assert row(imported, "multi_gpu") == ("taken", "as it is")
    unsaid = builds(lora(num_processes=4, multi_gpu=False, gpu_ids="")).distributed
    assert (unsaid.multi_gpu, unsaid.num_gpus) == (True, 4)


def test_one_process_needs_no_launching() -> None:
    imported = lora(multi_gpu=True, num_processes=1, num_machines=1, gpu_ids="1,0", main_process_port=29501)
    distributed = builds(imported).distributed
    assert (distributed.multi_gpu, distributed.gpu_ids, distributed.main_process_port) == (False, ("1",), 0)
    assert {row(imported, key)[0] for key in ("multi_gpu", "num_processes", "num_machines", "main_process_port")} == {"not needed"}


def test_several_machines_come_with_the_arguments_that_the_page_has_no_field_for() -> None:
    more = "--main_process_ip 10.0.0.7 --machine_rank=1 --rdzv_backend static"
    imported = lora(num_processes=8, num_machines=2, main_process_port=29500, extra_accelerate_launch_args=more)
    distributed = builds(imported).distributed
    assert (distributed.num_machines, distributed.num_gpus, distributed.machine_rank) == (2, 4, 1)
    assert (distributed.main_process_ip, distributed.main_process_port) == ("10.0.0.7", 29500)
    assert row(imported, "extra_accelerate_launch_args") == ("renamed", "opened into main_process_ip, machine_rank, rdzv_backend")
    lost = lora(num_processes=8, num_machines=2, main_process_port=29500, extra_accelerate_launch_args="")
    assert row(lost, "num_machines")[0] == "not supported" and "main_process_ip" in row(lost, "num_machines")[1]


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", RUNS.values(), ids=lambda run: run.script)
def test_our_own_toml_is_taken_whole(run: type[RunOptions]) -> None:
    chance = {
        "resolution": (640, 512),
        "seed": 7,
        "max_grad_norm": 0.0,
        "learning_rate": 3e-5,
        "caption_separator": ";",
        "optimizer_args": ("a=1",),
    }
    options = flat.build(run, {**PLACES, **{name: value for name, value in chance.items() if name in flat.fields(run)}})
    imported = importers.read("config.toml", toml_files.to_toml(options).encode())
    assert imported.run is run and imported.missing == [] and imported.count("not supported") == 0
    assert builds(imported) == options


def test_a_preset_of_ours_says_what_is_missing() -> None:
    text = '[kohya_like]\nscript = "sdxl_train_network.py"\n[network]\nnetwork_dim = 8\nno_such = 1\n'
    text += "[optimizer]\nallow_custom_modules = true\n"
    imported = importers.read("preset.toml", text.encode())
    assert imported.values == {"network_dim": 8}
    assert row(imported, "allow_custom_modules")[0] == row(imported, "no_such")[0] == "not supported"
    assert len(imported.missing) == 2


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("empty.json", b"", "empty"),
        ("broken.json", b'{"a": ', "not valid JSON"),
        ("deep.json", b'{"a":' * 60000, "not valid JSON"),
        ("list.json", b"[1, 2]", "a list"),
        ("other.json", b'{"name": "x", "version": 2, "files": []}', "no settings"),
        ("broken.toml", b"a = = 1", "not valid TOML"),
        ("set.toml", b"[general]\n[[datasets]]\nresolution = 512\n", "dataset_config"),
        ("set.json", b'{"datasets": []}', "dataset_config"),
        ("meta.json", b'{"a.png": {"caption": "x"}}', "in_json"),
        ("model.ckpt", b"PK\x03\x04", "can run code"),
        ("image.png", b"\x89PNG\r\n\x1a\n\xff\xfe", "not a text"),
        ("embedding.json", b'{"token_string": "x", "init_word": "y", "seed": 1, "epoch": 2, "vae": ""}', "embedding"),
        ("huge.json", b" " * (5 << 20), "too much"),
    ],
)
def test_files_that_are_no_configuration_are_refused_with_a_sentence(name: str, data: bytes, said: str) -> None:
    with pytest.raises(OptionError, match=said) as refused:
        importers.read(name, data)
    assert name in str(refused.value)


def test_a_byte_order_mark_and_tables_do_no_harm() -> None:
    text = '[model_arguments]\npretrained_model_name_or_path = "xl.safetensors"\n'
    text += '[network]\nnetwork_module = "networks.lora"\nnetwork_dim = 12\n'
    imported = importers.read("config.toml", b"\xef\xbb\xbf" + text.encode())
    assert imported.run is SdxlNetwork and imported.values["network_dim"] == 12


def test_a_data_set_configuration_takes_the_place_of_folders() -> None:
    imported = lora(dataset_config="set.toml", reg_data_dir="reg")
    assert imported.missing == [] and "train_data_dir" not in imported.values
    assert row(imported, "train_data_dir") == ("not needed", "dataset_config replaces it")


@pytest.mark.parametrize(
    "values",
    [
        {"optimizer": "DAdaptAdaGrad"},
        {"LoRA_type": "LyCORIS/Diag-OFT"},
        {"LoRA_type": "LyCORIS/LoKr", "train_norm": True},
        {"additional_parameters": "--deepspeed"},
        {"optimizer": "Adafactor", "learning_rate": 1e-6},
        {"resume": "a/state"},
    ],
)
def test_what_decides_the_result_and_is_not_here_stands_above_the_form(values: dict[str, object]) -> None:
    found = lora("sdxl", **values)
    lost = {row.key for row in found.rows if row.verdict == "not supported"}
    assert lost and lost == {sentence.partition(" = ")[0] for sentence in found.conflicts}, found.conflicts


def test_what_the_result_does_not_follow_from_stays_in_its_row() -> None:
    found = lora("sdxl", log_tracker_config="a.toml", save_state_to_huggingface=True, show_timesteps="image")
    assert {row.key for row in found.rows if row.verdict == "not supported"} >= {"log_tracker_config"} and not found.conflicts
