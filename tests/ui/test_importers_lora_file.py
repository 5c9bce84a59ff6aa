"""Rebuilding a run from the file it made: ours exactly, kohya's as far as its texts go, and sentences for everything else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kohya_like import importers
from kohya_like.importers import Imported
from kohya_like.importers.lora_file import CONFIG
from sd_scripts.families import RUNS
from sd_scripts.families.flux.options import FluxNetwork
from sd_scripts.families.sd.options import SdNetwork
from sd_scripts.families.sdxl.options import SdxlNetwork
from sd_scripts.runs.safetensors_header import needed_bytes, read_header
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.runs import RunOptions
from tests.made_here import NETWORK_FAMILIES, exported, lora_of

PLACES = {"pretrained_model_name_or_path": "somewhere/base.safetensors", "train_data_dir": "images"}
UNET = "lora_unet_input_blocks_4_1_transformer_blocks_0_attn2_to_k"


def header(shapes: Mapping[str, tuple[int, ...]], texts: Mapping[str, str] | None = None) -> bytes:
    """The start of a safetensors file, as the page sends it: no weights."""
    entries: dict[str, object] = {"__metadata__": dict(texts)} if texts else {}
    entries |= {name: {"dtype": "F16", "shape": list(shape), "data_offsets": [0, 0]} for name, shape in shapes.items()}
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def adapter(rank: int = 8, width: int = 2048, *more: str) -> dict[str, tuple[int, ...]]:
    layers = [UNET, *more]
    return {f"{layer}.lora_down.weight": (rank, width) for layer in layers} | {f"{layer}.lora_up.weight": (640, rank) for layer in layers}


def texts_of(imported: Imported, key: str) -> tuple[str, str]:
    (row,) = [row for row in imported.rows if row.key == key]
    return row.verdict, row.text


def completed(imported: Imported) -> RunOptions:
    named = [sentence.partition(":")[0] for sentence in imported.missing]
    return flat.build(imported.run, {**{name: text for name, text in PLACES.items() if name in named}, **imported.values})


# --- our own files --------------------------------------------------------------------------------------------------

_CHOSEN = {
    "resolution": (512, 768), "seed": 2**62, "max_grad_norm": 0.0, "learning_rate": 3e-5, "loss_type": "huber",
    "caption_dropout_rate": 0.05, "optimizer_args": ("weight_decay=0.01", "betas=(0.9,0.99)"), "lr_warmup_steps": 0.0,
    "save_every_n_epochs": 2, "metadata_author": "me", "validation_split": 0.1, "target_modules": ("to_q",), "max_timestep": 900,
    "training_comment": "a\nb",
}  # fmt: skip


def start_of(options: RunOptions, folder: Path) -> bytes:
    """The header of the file that a run with these options leaves, as the page sends it."""
    data = exported(options, folder / "mine.safetensors").read_bytes()
    return data[: needed_bytes(data)]


@pytest.mark.parametrize("run", RUNS.values(), ids=lambda run: run.script)
def test_a_file_of_ours_gives_back_its_settings_exactly(run: type[RunOptions], tmp_path: Path) -> None:
    # What acrf trains at its anchors is no range of times.
    chosen = {**_CHOSEN, "objective": "flow"} if run.family == "zimage" else _CHOSEN
    chosen = {name: value for name, value in chosen.items() if name in flat.fields(run)}
    # A model from nothing needs no base.
    places = {name: text for name, text in PLACES.items() if flat.fields(run)[name].required or name == "train_data_dir"}
    options = flat.build(run, {**places, **chosen})
    start = start_of(options, tmp_path)
    imported = importers.read("mine.safetensors", start)
    assert imported.run is run
    assert completed(imported) == options
    assert [sentence.partition(":")[0] for sentence in imported.missing] == list(places)
    assert "pretrained_model_name_or_path" not in places or "base.safetensors" in imported.missing[0]
    assert imported.count("not supported") == 0
    texts = read_header("mine.safetensors", start).texts
    assert {row.key for row in imported.rows} >= set(texts) and len({row.key for row in imported.rows}) == len(imported.rows)


@pytest.mark.parametrize("family", NETWORK_FAMILIES)
def test_a_file_of_ours_with_the_least_texts_still_tells_its_family_and_network(family: str, tmp_path: Path) -> None:
    problems = []
    for kind in ("lora", "dora", "loha", "lokr", "oft") if family == "sdxl" else ("lora",):
        values: dict[str, object] = {"metadata": "minimal", "network_type": kind, "network_dim": 4, "network_alpha": 2.0}
        values |= {"conv_dim": 4, "conv_alpha": 2.0} if family == "sdxl" and kind != "oft" else {}
        options = flat.build(
            RUNS[family, "network"], {**PLACES, **values, "target_modules": ["to_q", "conv1"] if "conv_dim" in values else ["to_q"]}
        )
        imported = importers.read("mine.safetensors", start_of(options, tmp_path))
        told, wanted = flat.flatten(completed(imported)), flat.flatten(options)
        names = [name for name in values if name != "metadata" and (kind != "oft" or name == "network_type")]
        problems += [f"{kind}: {name} is {told[name]}" for name in names if told[name] != wanted[name]]
        problems += [f"{kind}: {imported.run.script}"] if imported.run.family != family else []
        problems += [f"{kind}: {imported.origin}"] if not imported.origin.startswith("LoRA without training metadata") else []
    assert problems == []


def test_a_base_that_can_be_found_by_its_name_is_kept(tmp_path: Path) -> None:
    file = lora_of("sdxl", tmp_path / "mine.safetensors", "toy", target_modules=["to_q"])
    imported = importers.read(file.name, file.read_bytes())
    assert imported.values["pretrained_model_name_or_path"] == "toy"
    assert [sentence.partition(":")[0] for sentence in imported.missing] == ["train_data_dir"]


def test_files_that_settings_need_are_told_as_missing_and_cost_no_setting(tmp_path: Path) -> None:
    values: dict[str, object] = {"masked_loss": True, "conditioning_data_dir": "masks", "dim_from_weights": True}
    values |= {"base_weights": ["a.safetensors", "b.safetensors"], "base_weights_multiplier": [0.5, 1.0], "target_modules": ["to_q"]}
    values["network_weights"] = str(lora_of("sdxl", tmp_path / "x.safetensors", target_modules=["to_q"]))
    options = flat.build(SdxlNetwork, {**PLACES, **values})
    imported = importers.read("mine.safetensors", start_of(options, tmp_path))
    assert {"masked_loss", "dim_from_weights", "base_weights_multiplier"} <= set(imported.values)
    assert {"conditioning_data_dir", "network_weights", "base_weights"} <= {sentence.partition(":")[0] for sentence in imported.missing}


def test_a_setting_that_a_later_version_has_is_told_and_the_rest_taken(tmp_path: Path) -> None:
    ours = read_header("mine.safetensors", start_of(flat.build(FluxNetwork, {**PLACES, "target_modules": ["to_q"]}), tmp_path))
    later = json.loads(ours.texts[CONFIG]) | {"network_dim": 12, "of_the_future": 3}
    imported = importers.read("new.safetensors", header(ours.shapes, {**ours.texts, CONFIG: json.dumps(later)}))
    assert imported.run is FluxNetwork and imported.values["network_dim"] == 12
    assert texts_of(imported, "of_the_future")[0] == "not supported"


# --- kohya's files --------------------------------------------------------------------------------------------------

KOHYA = {
    "ss_output_name": "cat", "ss_learning_rate": "0.0001", "ss_unet_lr": "0.0002", "ss_text_encoder_lr": "5e-05",
    "ss_num_train_images": "200", "ss_num_epochs": "10", "ss_epoch": "10", "ss_steps": "1000", "ss_max_train_steps": "1000",
    "ss_gradient_checkpointing": "True", "ss_gradient_accumulation_steps": "2", "ss_lr_scheduler": "cosine", "ss_lr_warmup_steps": "100",
    "ss_network_module": "networks.lora", "ss_network_dim": "32", "ss_network_alpha": "16.0", "ss_network_dropout": "0.1",
    "ss_mixed_precision": "bf16", "ss_full_fp16": "False", "ss_v2": "False", "ss_base_model_version": "sdxl_base_v1-0",
    "ss_clip_skip": "None", "ss_max_token_length": "225", "ss_seed": "1234", "ss_noise_offset": "0.05",
    "ss_adaptive_noise_scale": "None", "ss_multires_noise_iterations": "None", "ss_multires_noise_discount": "0.3",
    "ss_min_snr_gamma": "5.0", "ss_optimizer": "bitsandbytes.optim.adamw.AdamW8bit(weight_decay=0.1,betas=(0.9, 0.99))",
    "ss_max_grad_norm": "1.0", "ss_zero_terminal_snr": "False", "ss_debiased_estimation": "False", "ss_prior_loss_weight": "1.0",
    "ss_sd_model_name": "sd_xl_base_1.0.safetensors", "ss_batch_size_per_device": "4", "ss_total_batch_size": "8",
    "ss_resolution": "(1024, 768)", "ss_enable_bucket": "True", "ss_bucket_no_upscale": "False", "ss_min_bucket_reso": "256",
    "ss_max_bucket_reso": "1536", "ss_shuffle_caption": "True", "ss_keep_tokens": "1", "ss_flip_aug": "False",
    "ss_caption_dropout_rate": "0.05", "ss_cache_latents": "True",
    "ss_network_args": '{"conv_dim": "8", "conv_alpha": "4", "loraplus_lr_ratio": "4"}', "ss_training_comment": "trigger: cat",
    "ss_dataset_dirs": '{"10_sks cat": {"n_repeats": 10, "img_count": 20}}', "ss_reg_dataset_dirs": "{}",
    "ss_face_crop_aug_range": "None", "ss_tag_frequency": json.dumps({"10_sks cat": {f"tag {n}": n for n in range(999)}}),
    "modelspec.author": "somebody", "modelspec.architecture": "stable-diffusion-xl-v1-base/lora", "sshs_model_hash": "abc",
    "ss_loss_type": "l2", "ss_lowram": "False",
}  # fmt: skip


def test_kohyas_texts_are_taken_as_far_as_they_go() -> None:
    imported = importers.read("cat.safetensors", header(adapter(32, 2048, "lora_te1_text_model_encoder_layers_0_mlp_fc1"), KOHYA))
    assert imported.run is SdxlNetwork and imported.origin.startswith("LoRA with kohya's training metadata")
    options = flat.flatten(completed(imported))
    expected = {
        "output_name": "cat", "learning_rate": 1e-4, "unet_lr": 2e-4, "text_encoder_lr": (5e-5,), "train_text_encoder": True,
        "seed": 1234, "max_train_steps": 1000, "gradient_accumulation_steps": 2, "lr_scheduler": "cosine", "lr_warmup_steps": 100,
        "network_dim": 32, "network_alpha": 16.0, "network_dropout": 0.1, "conv_dim": 8, "conv_alpha": 4.0, "loraplus_lr_ratio": 4.0,
        "mixed_precision": "bf16", "max_token_length": 225, "noise_offset": 0.05, "min_snr_gamma": 5.0, "optimizer_type": "AdamW8bit",
        "resolution": (1024, 768), "optimizer_args": ("weight_decay=0.1", "betas=(0.9, 0.99)"), "train_batch_size": 4,
        "bucket_no_upscale": False, "keep_tokens": 1, "max_bucket_reso": 1536, "shuffle_caption": True, "caption_dropout_rate": 0.05,
        "training_comment": "trigger: cat", "metadata_author": "somebody", "cache_text_encoder_outputs": False, "network_type": "lora",
        "gradient_checkpointing": True,
    }  # fmt: skip
    assert {name: options[name] for name in expected} == expected
    keys = [row.key for row in imported.rows]
    assert len(keys) == len(set(keys)) and set(KOHYA) <= set(keys)
    assert max(len(str(row.value)) for row in imported.rows) < 400
    assert "sd_xl_base_1.0.safetensors" in imported.missing[0]
    assert "10_sks cat (20 images, 10 repeats)" in imported.missing[1]


def test_flux_files_keep_their_times_and_a_text_encoder_that_was_not_trained_stays_so() -> None:
    texts = {
        "ss_base_model_version": "flux1", "ss_network_module": "networks.lora_flux", "ss_network_dim": "16", "ss_network_alpha": "16",
        "ss_guidance_scale": "1.0", "ss_timestep_sampling": "shift", "ss_discrete_flow_shift": "3.1582",
        "ss_model_prediction_type": "raw", "ss_sigmoid_scale": "1.0", "ss_weighting_scheme": "none", "ss_apply_t5_attn_mask": "True",
        "ss_learning_rate": "0.0004", "ss_network_args": '{"train_blocks": "single", "split_qkv": "True"}',
        "ss_sd_model_name": "black-forest-labs/FLUX.1-dev", "ss_reg_dataset_dirs": '{"1_cat": {"n_repeats": 1, "img_count": 5}}',
        "ss_vae_name": "ae.safetensors", "ss_text_encoder_lr": "[1e-5, 1e-5]",
    }  # fmt: skip
    layer = "lora_unet_double_blocks_0_img_attn_qkv"
    imported = importers.read(
        "f.safetensors", header({f"{layer}.lora_down.weight": (16, 3072), f"{layer}.lora_up.weight": (9216, 16)}, texts)
    )
    assert imported.run is FluxNetwork
    options = flat.flatten(completed(imported))
    expected = {
        "timestep_sampling": "shift",
        "train_blocks": "single",
        "split_qkv": True,
        "train_text_encoder": False,
        "text_encoder_lr": (),
    }
    expected |= {"apply_t5_attn_mask": True, "pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev", "guidance_scale": 1.0}
    assert {name: options[name] for name in expected} == expected
    assert {"reg_data_dir", "ae", "train_data_dir"} == {sentence.partition(":")[0] for sentence in imported.missing}


def test_data_sets_in_one_text_are_read_as_well() -> None:
    subset = {"n_repeats": 3, "shuffle_caption": True, "keep_tokens": 2, "flip_aug": True}
    sets = [{"resolution": [768, 768], "batch_size_per_device": 2, "enable_bucket": True, "max_bucket_reso": 1024, "subsets": [subset]}]
    texts = {"ss_base_model_version": "sd_v1", "ss_network_dim": "8", "ss_network_module": "networks.lora", "ss_datasets": json.dumps(sets)}
    options = flat.flatten(completed(importers.read("x.safetensors", header(adapter(8, 768), texts))))
    assert (options["resolution"], options["train_batch_size"], options["keep_tokens"], options["flip_aug"]) == ((768, 768), 2, 2, True)


@pytest.mark.parametrize(
    ("shapes", "run", "kind", "rank"),
    [
        (adapter(24, 768), SdNetwork, "lora", 24),
        (adapter(24, 1024), SdNetwork, "lora", 24),
        (adapter(24, 2048), SdxlNetwork, "lora", 24),
        ({"lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight": (4, 3072)}, FluxNetwork, "lora", 4),
        ({"transformer.single_transformer_blocks.0.attn.to_q.lora_A.weight": (6, 3072)}, FluxNetwork, "lora", 6),
        ({"unet.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_k.lora_A.weight": (5, 2048)}, SdxlNetwork, "lora", 5),
        ({f"{UNET}.hada_w1_a": (4, 4), "lora_te_text_model_encoder_layers_0_mlp_fc1.hada_w1_a": (4, 4)}, SdNetwork, "loha", 16),
        ({f"{UNET}.lokr_w1": (4, 4), "lora_te2_text_model_encoder_layers_0_mlp_fc1.lokr_w1": (4, 4)}, SdxlNetwork, "lokr", 16),
        ({**adapter(3, 2048), f"{UNET}.dora_scale": (640, 1)}, SdxlNetwork, "dora", 3),
    ],
)
def test_without_texts_family_type_and_rank_are_told_by_the_tensors(
    shapes: dict[str, tuple[int, ...]], run: type[RunOptions], kind: str, rank: int
) -> None:
    imported = importers.read("bare.safetensors", header(shapes))
    options = flat.flatten(completed(imported))
    assert imported.run is run
    assert (options["network_type"], options["network_dim"]) == (kind, rank)
    assert imported.origin.startswith("LoRA without training metadata")
    assert any(sentence.startswith("learning_rate:") for sentence in imported.missing)


# --- files that are none --------------------------------------------------------------------------------------------


def raw(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"short", "does not start with a header"),
        (b"\xff" * 64, "does not start with a header"),
        (header(adapter())[:40], "ends within its header"),
        (raw(b"{not json}"), "cannot be read"),
        (raw(b'{"a": 3}'), "cannot be read"),
        (raw(b'{"__metadata__": [], "a": {"shape": [1]}}'), "cannot be read"),
        (raw(b'{"a": {"shape": ["x"]}}'), "cannot be read"),
        (raw(b'{"a":' * 50000), "cannot be read"),
        (header({"model.diffusion_model.input_blocks.0.0.weight": (320, 4, 3, 3)}), "holds no adapter"),
        (header(adapter(), {"ss_base_model_version": "sd3_medium"}), "not trained here"),
        (header({"lora_unet_blocks_0_attn_to_q.lora_down.weight": (8, 99)}), "neither its texts nor its layers"),
        (header(adapter(), {"kohya_like.config": "{", "ss_base_model_version": "sdxl_base_v1-0"}), "damaged"),
        (header(adapter(), {"kohya_like.config": "[1]", "ss_base_model_version": "sdxl_base_v1-0"}), "not a table"),
    ],
)
def test_a_broken_file_or_one_that_is_no_adapter_is_a_sentence(data: bytes, said: str) -> None:
    with pytest.raises(OptionError, match=said) as refused:
        importers.read("what.safetensors", data)
    assert "what.safetensors" in str(refused.value)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(KOHYA)), st.text(max_size=20) | st.sampled_from(["None", "[]", "{}", "1e999", "(", "nan"])))
def test_no_text_is_too_strange(texts: dict[str, str]) -> None:
    texts = {**texts, "ss_base_model_version": "sdxl_base_v1-0"}
    imported = importers.read("strange.safetensors", header(adapter(), texts))
    assert set(texts) <= {row.key for row in imported.rows}
    completed(imported)
