"""Header texts of saved files."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save

from sd_scripts.families import RUNS
from sd_scripts.families.sdxl.loading import VERSION
from sd_scripts.families.sdxl.options import SdxlModelOptions, SdxlNetwork, SdxlNetworkOptions
from sd_scripts.library.adapters.files import export
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.train import metadata
from sd_scripts.library.train.metadata import CONFIG, BaseFacts, DatasetFacts
from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.distributed import DistributedOptions
from sd_scripts.schema.output import AdapterOutputOptions
from sd_scripts.schema.runs import RunOptions
from tests.library.networks.adapters_in_small import attached, shaken

SECRET = "/home/somebody/secret"


def options(**output: object) -> SdxlNetwork:
    return SdxlNetwork(
        model=SdxlModelOptions(pretrained_model_name_or_path=f"{SECRET}/base.safetensors", vae=f"{SECRET}/vae.safetensors"),
        dataset=DatasetOptions(train_data_dir=f"{SECRET}/10_cat", cache_dir=f"{SECRET}/cache", cache_text_encoder_outputs=False),
        network=SdxlNetworkOptions(network_dim=8, network_alpha=4.0, conv_dim=2, train_text_encoder=True, text_encoder_lr=(1e-5,)),
        output=AdapterOutputOptions(output_dir=f"{SECRET}/out", output_name="cat", **output),
        distributed=DistributedOptions(resume=f"{SECRET}/state"),
    )


FACTS = DatasetFacts(
    num_train_images=30,
    num_reg_images=10,
    subsets=((10, 3),),
    tag_frequency={"cat": 3, "猫": 1},
    buckets={(1024, 1024): 20, (832, 1216): 10},
)


def build(run: SdxlNetwork, **changes: object) -> dict[str, str]:
    return metadata.build(run, BaseFacts("base", "v_prediction", VERSION), **{"step": 100, "epoch": 2, "dataset": FACTS, **changes})


def test_kohyas_keys_have_kohyas_formats() -> None:
    texts = build(options(training_comment="first try"))
    want = {
        "ss_network_module": "networks.lora",
        "ss_network_dim": "8",
        "ss_network_alpha": "4.0",
        "ss_network_args": '{"conv_dim": "2"}',
        "ss_base_model_version": "sdxl_base_v1-0",
        "ss_v2": "False",
        "ss_steps": "100",
        "ss_epoch": "2",
        "ss_unet_lr": "None",
        "ss_text_encoder_lr": "1e-05",
        "ss_min_snr_gamma": "None",
        "ss_resolution": "(1024, 1024)",
        "ss_training_comment": "first try",
        "ss_sd_model_name": "base",
        "ss_vae_name": "vae.safetensors",
        "ss_num_train_images": "30",
        "ss_dataset_dirs": '{"1": {"n_repeats": 10, "img_count": 3}}',
        "ss_tag_frequency": '{"1": {"cat": 3, "猫": 1}}',
    }
    assert {key: texts.get(key) for key in want} == want
    assert json.loads(texts["ss_bucket_info"])["buckets"]["0"] == {"resolution": [832, 1216], "count": 10}
    assert all(isinstance(value, str) for value in texts.values())


def test_modelspec_says_what_the_file_is() -> None:
    texts = build(options(metadata_author="me", save_model_as="diffusers"), date="2026-11-20")
    modelspec = {key.removeprefix("modelspec."): value for key, value in texts.items() if key.startswith("modelspec.")}
    assert modelspec == {
        "sai_model_spec": "1.0.1",
        "architecture": "stable-diffusion-xl-v1-base/lora",
        "implementation": "diffusers",
        "title": "cat",
        "resolution": "1024x1024",
        "prediction_type": "v",
        "timestep_range": "0,1000",
        "date": "2026-11-20",
        "author": "me",
    }


@pytest.mark.parametrize("extent", ["all", "minimal"])
def test_no_folder_gets_into_the_header(extent: str) -> None:
    assert "somebody" not in json.dumps(build(options(metadata=extent)))


def test_the_settings_of_the_run_are_in_the_header() -> None:
    settings = json.loads(build(options())[CONFIG])
    assert settings["network_dim"] == 8
    assert settings["pretrained_model_name_or_path"] == "base"
    assert settings["text_encoder_lr"] == [1e-5]
    assert "train_data_dir" not in settings


def test_minimal_keeps_what_readers_need_and_no_statistics() -> None:
    texts = build(options(metadata="minimal"))
    assert {key for key in texts if key.startswith("ss_")} == {
        "ss_v2",
        "ss_base_model_version",
        "ss_network_module",
        "ss_network_dim",
        "ss_network_alpha",
        "ss_network_args",
    }
    assert not any("kohya_like" in key for key in texts)


def test_a_resumed_start_writes_the_same_texts() -> None:
    run = options()
    resumed = run.model_copy(update={"distributed": run.distributed.model_copy(update={"resume": "auto"})})
    assert build(run) == build(resumed)
    assert build(run)["ss_session_id"].isdigit()


def test_the_hashes_are_those_that_kohyas_tools_compute(tmp_path: Path, parts: Parts) -> None:
    network = shaken(attached(parts, SdxlNetworkOptions(network_dim=64, train_text_encoder=True)))
    file = tmp_path / "cat.safetensors"
    export(network, parts, file, precision="float", metadata=build(options()))
    data = file.read_bytes()
    digest = hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()
    with safe_open(file, framework="pt") as opened:
        header = dict(opened.metadata())
    assert header["sshs_model_hash"] == digest
    assert header["modelspec.hash_sha256"] == f"0x{digest}"
    assert len(header["sshs_legacy_hash"]) == 8
    assert header["ss_network_dim"] == "8"


def test_the_tensor_hash_is_that_of_the_library_for_tensors_of_one_width() -> None:
    tensors = {"b": torch.randn(3, 4), "a": torch.randn(5)}
    data = save(tensors, {"x": "y"})
    want = hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()
    assert metadata.with_hashes({}, tensors)["sshs_model_hash"] == want


def test_equal_runs_write_equal_bytes(tmp_path: Path, parts: Parts) -> None:
    network = shaken(attached(parts, SdxlNetworkOptions(network_dim=4)))
    for name in ("a", "b"):
        export(network, parts, tmp_path / f"{name}.safetensors", metadata=build(options()))
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize("run", RUNS.values(), ids=lambda run: run.script)
def test_every_model_says_how_it_was_read_without_naming_a_folder(run: type[RunOptions]) -> None:
    kind = run.model_fields["model"].annotation
    assert kind is not None
    files = {name: "/somewhere/x.safetensors" for name in ("vae", "ae") if name in kind.model_fields}
    values = kind(pretrained_model_name_or_path="toy", **files).header_values()
    assert values["vae_name"] == "x.safetensors"
    assert "/somewhere" not in str(values)
