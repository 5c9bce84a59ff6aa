"""Noise levels and samplers by name are ComfyUI's, as tests/data/comfyui has them, and do what their papers say."""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from sd_scripts import families
from sd_scripts.families import RUNS
from sd_scripts.families.common import k_samplers
from sd_scripts.families.common.comfyui_levels import FlowLevels, beta_quantile, exponential_shift, levels_of, sigmas_of
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.library.core.safetensors_file import read_file
from sd_scripts.library.render.predicting.adapters import Adapters
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.samples import FlowSampleOptions, UNetSampleOptions
from tests.library.families import comfyui_in_small as small

RECORDED = Path(__file__).resolve().parents[2] / "data" / "comfyui"
LOADERS_SHIFT = exponential_shift(1.15)
"""That of Qwen-Image without a node, with which it was recorded; its usual graph has one."""
SLOW = ("chroma",)


def recorded(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(RECORDED / f"{name}.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        return tensors, file.metadata()


def digest(path: Path, with_shapes: bool) -> str:
    tensors, _ = read_file(path)
    lines = [f"{key} {tuple(tensor.shape)}" if with_shapes else key for key, tensor in tensors.items()]
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def read_back(name: str, folder: Path) -> Parts:
    """The model of a case as it was saved, with the LoRA file that was saved for it, after both were found to be named as recorded."""
    parts, told = small.parts_of(name), recorded(name)[1]
    family: Any = families.family(small.CASES[name].family)
    small.file_of(name, parts, folder / "whole.safetensors")
    small.lora_of(name, parts, folder / "lora.safetensors")
    assert digest(folder / "whole.safetensors", True) == told["file"], "ComfyUI has loaded a file with other names"
    assert digest(folder / "lora.safetensors", False) == told["lora"], "ComfyUI has loaded a LoRA with other names"
    family.save(parts, folder / "base", "diffusers", None, {})
    options: Any = RUNS[small.CASES[name].family, "network"].model_fields["model"].annotation
    loaded: Parts = family.load(options(pretrained_model_name_or_path=str(folder / "base")), torch.device("cpu"), torch.float32)
    Adapters(loaded, torch.float32).put_on([str(folder / "lora.safetensors")], [1.0])
    return loaded


def drawn(name: str, parts: Parts, key: str, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Our latents for a key of a recording: latents/sampler/scheduler, and /shift."""
    _, sampler, scheduler, *shifted = key.split("/")
    family: Any = families.family(small.CASES[name].family)
    request = small.request_of(sampler, scheduler, small.SHIFT if shifted else None)
    if small.CASES[name].family == "qwen_edit":
        usual = family.comfyui(parts)
        monkeypatch.setattr(type(family), "comfyui", lambda self, parts: type(usual)(usual.scheduler, LOADERS_SHIFT))
    positive, negative = small.conditions_of(name)
    return k_samplers.draw(family, parts, [request], [positive], [negative])[0]


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.long if name in SLOW else ()) for name in small.CASES])
def test_what_comfyui_draws_with_a_saved_model_and_its_lora_is_drawn_here(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, (wanted, _) = read_back(name, tmp_path), recorded(name)
    keys = [key for key in wanted if key.startswith("latents/")]
    assert len({key.split("/")[1] for key in keys}) >= 5 and len({key.split("/")[2] for key in keys}) >= 5
    for key in keys:
        # Of the size of the whole: a noise schedule with random networks goes far from 1.
        tolerance = 1e-4 * max(1.0, float(wanted[key].abs().max()))
        difference = float((drawn(name, parts, key, monkeypatch) - wanted[key]).abs().max())
        assert difference <= tolerance, f"{key}: {difference:.1e}"


@pytest.mark.parametrize("name", small.CASES)
def test_noise_levels_by_name_are_comfyuis(name: str) -> None:
    wanted, _ = recorded(name)
    case = small.CASES[name]
    family: Any = families.family(case.family)
    parts = family.tiny(case.variant) if case.family == "qwen_edit" else family.tiny()
    for key in (key for key in wanted if key.startswith("sigmas/")):
        _, scheduler, *shifted = key.split("/")
        levels: Any = levels_of(parts, family.comfyui(parts), small.SHIFT if shifted else None)
        if case.family == "qwen_edit" and not shifted:
            levels = LOADERS_SHIFT
        torch.testing.assert_close(torch.tensor(sigmas_of(levels, scheduler, small.STEPS)), wanted[key], rtol=1e-5, atol=1e-6)


DETECTED: dict[str, dict[str, Any]] = json.loads((RECORDED / "detected.json").read_text(encoding="utf-8"))


@pytest.mark.long
@pytest.mark.parametrize("base", DETECTED)
def test_comfyui_knows_whole_files_for_what_they_are(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of the published sizes has the names and shapes that ComfyUI's detection was given."""
    told, written = DETECTED[base], []
    family: Any = families.family(told["family"])
    for module in [one for name, one in sys.modules.items() if name.startswith("sd_scripts.") and hasattr(one, "write_file")]:
        # As far as the header: the numbers of such a model fill disks.
        monkeypatch.setattr(module, "write_file", lambda path, tensors, metadata: written.append(tensors))
    kinds = [run for (name, _), run in RUNS.items() if name == told["family"]]
    options: Any = kinds[-1].model_fields["model"].annotation
    parts, _ = family.published(options(pretrained_model_name_or_path=f"published/{base}"), None)
    family.save(parts, tmp_path / "whole.safetensors", "safetensors", None, {})
    lines = sorted(f"{name} {tuple(tensor.shape)}" for name, tensor in written[0].items())
    assert hashlib.sha256("\n".join(lines).encode()).hexdigest() == told["names"]


# What the formulas must do, whoever wrote them.


class Line:
    """A problem whose solution is known: all data at one point, so that D is that point at every level."""

    def __init__(self, sampler: str, sigmas: list[float], flow: bool, spread: float = 0.0) -> None:
        self.spread, self.flow = spread, flow
        self.problem = k_samplers.Problem(self.denoised, sigmas, lambda: torch.randn(20000), flow, lambda i, clean: None)
        self.sampler = k_samplers.SAMPLERS[sampler]

    def denoised(self, x: Tensor, sigma: float) -> Tensor:
        """The mean of x0 of variance spread^2 around 0.7, given x = a x0 + sigma noise."""
        a = 1 - sigma if self.flow else 1.0
        return 0.7 + a * self.spread**2 / (a**2 * self.spread**2 + sigma**2) * (x - a * 0.7)


LEVELS = {True: [1.0, 0.8, 0.5, 0.2, 0.0], False: [14.0, 6.0, 2.0, 0.3, 0.0]}


@pytest.mark.parametrize("flow", [True, False])
@pytest.mark.parametrize("sampler", ["euler", "heun", "euler_a", "dpmsolver++", "dpmpp_2m_sde"])
def test_every_sampler_finds_the_one_image_that_there_is(sampler: str, flow: bool) -> None:
    levels = [1 - 1e-4, *LEVELS[flow][1:]] if flow else LEVELS[flow]
    line = Line(sampler, levels, flow)
    torch.testing.assert_close(line.sampler(line.problem, levels[0] * torch.randn(20000)), torch.full((20000,), 0.7), atol=1e-5, rtol=0)


@pytest.mark.parametrize("flow", [True, False])
@pytest.mark.parametrize(
    ("sampler", "closeness"), [("euler", 0.03), ("heun", 0.01), ("euler_a", 0.06), ("dpmsolver++", 0.02), ("dpmpp_2m_sde", 0.04)]
)
def test_many_steps_give_images_as_they_are_spread(sampler: str, closeness: float, flow: bool) -> None:
    """Where data are normal every sampler must end with their mean and deviation: noise that is added has the right size."""
    levels = sigmas_of(FlowLevels(1.0), "karras" if not flow else "simple", 60)
    levels = [1 - 1e-4, *levels[1:]] if flow else [20 * level for level in levels]
    torch.manual_seed(random.randrange(1000))
    line = Line(sampler, levels, flow, spread=0.5)
    start = levels[0] * torch.randn(20000) + (1 - levels[0] if flow else 1.0) * (0.7 + 0.5 * torch.randn(20000))
    found = line.sampler(line.problem, start)
    assert abs(float(found.mean()) - 0.7) < 0.02
    assert abs(float(found.std()) - 0.5) < closeness


def test_quantiles_of_the_beta_distribution_are_those_that_have_a_formula() -> None:
    """Beta(1/2, 1/2) is the law of the arcsine, Beta(1, 1) is uniform, and Beta(2, 2) has 3 x^2 - 2 x^3 below x."""
    for p in (0.0, 0.5, 1.0, *torch.rand(100, dtype=torch.float64).tolist()):
        assert math.isclose(beta_quantile(p, 0.5), math.sin(math.pi * p / 2) ** 2, rel_tol=1e-9, abs_tol=1e-12)
        assert math.isclose(beta_quantile(p, 1), p, rel_tol=1e-9, abs_tol=1e-12)
        x = beta_quantile(p, 2)
        assert math.isclose(3 * x**2 - 2 * x**3, p, rel_tol=1e-9, abs_tol=1e-12)


def test_levels_fall_from_the_highest_to_nothing_for_any_number_of_steps() -> None:
    parts = families.family("sdxl").tiny()
    for levels in (levels_of(parts, families.family("sdxl").comfyui(parts), None), FlowLevels(3.0), exponential_shift(1.15)):  # type: ignore[attr-defined]
        for scheduler in ("normal", "karras", "exponential", "simple", "sgm_uniform", "ddim_uniform", "beta"):
            for steps in (1, 2, 7, 30):
                found = sigmas_of(levels, scheduler, steps)
                assert found[-1] == 0 and all(a > b for a, b in pairwise(found)), (scheduler, steps, found)
                if scheduler != "ddim_uniform":
                    assert math.isclose(found[0], float(levels.table[-1]), rel_tol=1e-6) and len(found) <= steps + 1


# From a request to an image.


def test_the_same_by_a_preview_with_words() -> None:
    """A preview goes the same way as what was recorded: its texts, its noise and the size that SDXL is told."""
    family: Any = families.family("sdxl")
    parts = family.tiny()
    request = Preview("a star", "a line", 64, 32, 9, 3, 2.0, "heun", scheduler="karras")
    told: list[tuple[int, int]] = []
    conditions = family.conditions_of(parts, [request])
    latents = k_samplers.draw(family, parts, [request], *conditions)
    pixels = family.decode(parts, latents)[0].permute(1, 2, 0)
    (image,) = family.preview(parts, [request], lambda step, steps, clean: told.append((step, steps)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert (torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(32, 64, 3) / 127.5 - 1 - pixels).abs().max() < 0.01
    assert conditions[0][0]["time_ids"].tolist() == [32, 64, 0, 0, 32, 64]


@pytest.mark.parametrize("name", ["flux", "zimage"])
def test_auto_is_the_pipelines_euler_with_its_own_levels(name: str) -> None:
    """Flow models draw with any sampler at their own noise levels; Euler's there is what the pipeline does."""
    family: Any = families.family(name)
    parts, request = family.tiny(), Preview("a star", "a line", 64, 32, 9, 4, 2.0)
    first, second = family.conditions_of(parts, [request])
    mine = family.decode(parts, k_samplers.draw(family, parts, [request], first, second))
    torch.testing.assert_close(mine, family.render(parts, [request]), atol=1e-4, rtol=0)


def test_what_cannot_be_is_a_sentence() -> None:
    for name, request, words in (
        ("sdxl", Preview("", sampler="lms", scheduler="karras", width=64, height=64), "lms does not take a scheduler; take euler"),
        (
            "sdxl",
            Preview("", scheduler="karras", shift=3.0, width=64, height=64),
            "shift: 3 means nothing to a model with",
        ),
        ("sdxl", Preview("", sampler="dpmpp_2m_sde", width=64, height=64), "dpmpp_2m_sde needs a scheduler"),
    ):
        family = families.family(name)
        with pytest.raises(OptionError, match=words):
            family.preview(family.tiny(), [request])


def test_comfyuis_names_of_samplers_are_taken() -> None:
    assert UNetSampleOptions(sample_sampler="dpmpp_2m").sampler == "dpmsolver++"  # type: ignore[arg-type]
    assert FlowSampleOptions(sample_sampler="euler_ancestral").sampler == "euler_a"  # type: ignore[arg-type]
