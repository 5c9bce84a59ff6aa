"""Training times of other trainers: drawn by their rules, written anew here, against the density that an imported file gives."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from kohya_like import importers
from kohya_like.importers import Imported
from sd_scripts.families import RUNS
from sd_scripts.library.objectives.make import density_of
from sd_scripts.schema import flat

SIDE = 1024
U = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000


def ours(found: Imported) -> Tensor:
    """Quantiles of the times that the imported run trains, at squares of SIDE pixels."""
    named = {sentence.partition(":")[0] for sentence in found.missing}
    options: Any = flat.build(found.run, {**dict.fromkeys(named, "given"), **found.values})
    low, high = options.objective.times
    latent = 16 if found.run.family in ("flux2", "flux2_dev") else 8
    return density_of(options.objective, (SIDE // latent, SIDE // latent)).within(low / 1000, high / 1000, U)


def assert_same(found: Imported, theirs: Tensor) -> None:
    assert float((ours(found) - theirs.sort().values).abs().max()) < 0.004, [row for row in found.rows if "time" in row.text]


def shift(t: Tensor, by: float) -> Tensor:
    return by * t / (1 + (by - 1) * t)


def line(tokens: float, most: int = 4096, high: float = 1.15) -> float:
    return math.exp(0.5 + (high - 0.5) * (tokens - 256) / (most - 256))


def sigmoid(scale: float = 1.0, mean: float = 0.0) -> Tensor:
    return torch.sigmoid(mean + scale * torch.special.ndtri(U))


def job(arch: str, **train: Any) -> Imported:
    process = {
        "type": "diffusion_trainer",
        "network": {"type": "lora", "linear": 4},
        "datasets": [{"folder_path": "a", "resolution": [512, SIDE]}],
        "train": {"noise_scheduler": "flowmatch", "steps": 9, **train},
        "model": {"name_or_path": "a/b", "arch": arch},
    }
    return importers.read("job.yaml", yaml.safe_dump({"job": "extension", "config": {"name": "x", "process": [process]}}).encode())


@pytest.mark.parametrize(
    ("arch", "by"),
    [("flux", line(4096)), ("chroma", line(16384)), ("krea2", line(16384, 6400)), ("zimage", 3.0), ("flux2_klein_4b", line(4096))],
)
def test_ai_toolkits_shift_is_the_one_that_its_own_scheduler_has(arch: str, by: float) -> None:
    """It counts patches where it finds them in the network, and single latents else."""
    assert_same(job(arch, timestep_type="shift"), shift(U, by))


def test_ai_toolkits_steps_count_from_the_noisiest_time_down() -> None:
    rng = random.Random(random.getrandbits(64))
    low, high = rng.randrange(1, 400), rng.randrange(500, 990)
    places = 1 - (low + (high - low) * U) / 1000
    bounds: dict[str, Any] = {"min_denoising_steps": low, "max_denoising_steps": high}
    assert_same(job("zimage", timestep_type="linear", **bounds), places)
    assert_same(job("zimage", **bounds), torch.sigmoid(torch.special.ndtri(places)))
    assert_same(job("zimage", timestep_type="shift", **bounds), shift(places, 3.0))
    usual = job("zimage", min_denoising_steps=0, max_denoising_steps=999)
    assert {row.verdict for row in usual.rows if "denoising" in row.key} == {"not needed"}


def pipe(kind: str, model: str) -> Imported:
    text = f'output_dir = "o"\ndataset = "d"\nepochs = 1\n[model]\ntype = "{kind}"\ndiffusion_model = "{model}"\nflux_shift = true\n'
    return importers.read("main.toml", (text + '[adapter]\ntype = "lora"\nrank = 8\n[optimizer]\ntype = "adamw"\n').encode())


def one(model_type: str, **changes: Any) -> Imported:
    given = {"training_method": "LORA", "model_type": model_type, "base_model_name": "x/y", "resolution": str(SIDE), **changes}
    return importers.read("OneTrainer.json", json.dumps(given).encode())


def test_onetrainer_bounds_the_noise_before_it_shifts() -> None:
    rng = random.Random(random.getrandbits(64))
    low, high, by = rng.uniform(0.05, 0.4), rng.uniform(0.6, 0.95), rng.uniform(1.2, 4)
    bounds = {"min_noising_strength": low, "max_noising_strength": high, "timestep_shift": by}
    assert_same(one("CHROMA_1", timestep_distribution="UNIFORM", **bounds), shift(low + (high - low) * U, by))
    squeezed = one("CHROMA_1", timestep_distribution="LOGIT_NORMAL", **bounds)
    assert sum("squeezed into the range" in text for text in squeezed.conflicts) == 2
    lost = one("CHROMA_1", timestep_distribution="INVERTED_PARABOLA", noising_weight=0.1, timestep_shift=by)
    assert_same(lost, shift(U, by))
    assert any("INVERTED_PARABOLA" in text and "sigma was put" in text for text in lost.conflicts)


@pytest.mark.parametrize(
    ("model", "by"), [("Z_IMAGE", line(4096)), ("FLUX_2", line(4096)), ("QWEN", line(4096, 8192, 0.9)), ("CHROMA_1", 1.7)]
)
def test_onetrainer_shifts_by_size_along_its_own_line(model: str, by: float) -> None:
    changes = {"dynamic_timestep_shifting": True, "timestep_shift": 1.7, "base_model_name": "black-forest-labs/FLUX.2-klein-base-4B"}
    assert_same(one(model, timestep_distribution="LOGIT_NORMAL", noising_weight=0.3, **changes), shift(sigmoid(1.3), by))
    assert_same(one(model, timestep_distribution="UNIFORM", **changes), shift(U, by))


def simple(family: str, **changes: Any) -> Imported:
    given = {"model_family": family, "model_type": "lora", "pretrained_model_name_or_path": "a/klein", "resolution": SIDE, **changes}
    return importers.read("config.json", json.dumps(given).encode())


@pytest.mark.parametrize(
    ("family", "by"),
    [("flux", line(4096)), ("chroma", line(4096)), ("z_image", line(4096)), ("flux2", line(1024)), ("qwen_image", line(4096, 8192, 0.9))],
)
def test_simpletuners_shift_by_size_wins_over_the_number_beside_it(family: str, by: float) -> None:
    assert_same(simple(family, flow_schedule_auto_shift=True, flow_schedule_shift=3), shift(sigmoid(), by))
    assert_same(simple(family, flow_schedule_auto_shift=True, flow_use_uniform_schedule=True), shift(U, by))
    assert_same(simple(family, flow_sigmoid_scale=1.4), shift(sigmoid(1.4), 3.0))


def test_simpletuner_gives_an_offset_to_a_part_of_the_samples_and_says_so() -> None:
    found = simple("sdxl", offset_noise=True, noise_offset=0.07)
    assert found.values["noise_offset"] == 0.07
    assert any("25% of them" in text for text in found.conflicts)
    assert not simple("sdxl", offset_noise=True, noise_offset_probability=1.0).conflicts


def musubi(module: str, **changes: Any) -> Imported:
    given = {"dit": "klein.safetensors", "network_module": f"networks.lora_{module}", "dataset_config": "d.toml", **changes}
    return importers.read("run.toml", "\n".join(f"{name} = {json.dumps(value)}" for name, value in given.items()).encode())


def test_musubi_tuners_sigma_has_no_shift_of_its_own_and_its_schemes_choose_the_density() -> None:
    heavy = U - 0.8 * (torch.sin(math.pi * U / 2) ** 2 - U)
    for module in ("qwen_image", "flux_2"):
        assert_same(musubi(module, timestep_sampling="sigma", weighting_scheme="mode", mode_scale=0.8), heavy)
        assert_same(musubi(module, timestep_sampling="sigma", weighting_scheme="logit_normal", logit_mean=0.4), sigmoid(1.0, -0.4))
    shifted = musubi("qwen_image", timestep_sampling="sigma", weighting_scheme="mode", discrete_flow_shift=2.0)
    assert any("without the shift of the steps by 2" in text for text in shifted.conflicts)


def test_musubi_tuners_lines_through_the_sizes_are_kept_at_1024_pixels_where_the_family_has_another() -> None:
    assert_same(musubi("flux_2", timestep_sampling="flux2_shift", sigmoid_scale=1.2), shift(sigmoid(1.2), line(4096)))
    assert_same(musubi("zimage", timestep_sampling="qwen_shift"), shift(sigmoid(), line(4096, 8192, 0.9)))
    own = musubi("krea2", timestep_sampling="krea2_shift")
    assert_same(own, shift(sigmoid(), line(4096, 6400)))
    assert own.values["timestep_sampling"] == "krea2_shift" and not own.conflicts


def test_bounds_of_times_that_are_squeezed_there_are_said() -> None:
    bounds = {"min_timestep": 200, "max_timestep": 800, "discrete_flow_shift": 2.0}
    squeezed = musubi("qwen_image", timestep_sampling="shift", **bounds)
    assert sum("squeezed into the range" in text for text in squeezed.conflicts) == 2
    for changes in ({"timestep_sampling": "uniform"}, {"timestep_sampling": "shift", "preserve_distribution_shape": True}):
        assert not musubi("qwen_image", **bounds, **changes).conflicts
    # timesteps[u (max - min) + min] of a scheduler that falls from 1000: 200 leaves out the noisiest fifth, not the clearest.
    steps = musubi("qwen_image", timestep_sampling="sigma", **bounds)
    assert sum("counts its sampler's steps with it, from noise to image" in text for text in steps.conflicts) == 2


def test_diffusion_pipe_shifts_every_family_along_one_line() -> None:
    for kind, tokens in (("flux", 4096), ("qwen_image", 4096), ("krea2", 4096), ("z_image", 4096), ("flux2", 1024)):
        assert_same(pipe(kind, "klein"), shift(sigmoid(), line(tokens)))


def test_kohyas_scripts_bound_the_times_of_noise_schedules_alone() -> None:
    lines: dict[str, Callable[[Imported], bool]] = {
        "flux_train_network.py": lambda found: "min_timestep" not in found.values,
        "sdxl_train_network.py": lambda found: found.values["min_timestep"] == 200,
    }
    for script, holds in lines.items():
        found = importers.read("x.sh", f"accelerate launch {script} --network_module networks.lora --min_timestep 200".encode())
        assert holds(found) and found.run in RUNS.values()


def test_flux2_dev_of_other_programs_is_a_run_of_its_family() -> None:
    dev = {"pretrained_model_name_or_path": "black-forest-labs/FLUX.2-dev"}
    for found in (
        one("FLUX_2", base_model_name="black-forest-labs/FLUX.2-dev"),
        simple("flux2", model_flavour="dev", **dev),
        musubi("flux_2", dit="flux2-dev.safetensors"),
        job("flux2"),
        pipe("flux2", "flux2-dev.safetensors"),
    ):
        assert found.run is RUNS["flux2_dev", "network"]
    assert pipe("flux2", "flux-2-klein-base-4b.safetensors").run is RUNS["flux2", "network"], "told by the name of its files"
