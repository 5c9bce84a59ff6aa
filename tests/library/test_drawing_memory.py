"""Memory of drawing: its options change no image where they promise that, and its forecast counts what is loaded."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from sd_scripts import families
from sd_scripts.families import RUNS
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.files import export
from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.library.memory.forecast.accounting import bytes_of
from sd_scripts.library.memory.forecast.drawing import DrawingForecaster
from sd_scripts.library.memory.forecast.drawing_answers import plan_for, verdict_on_cpu
from sd_scripts.library.memory.forecast.fitting import with_values
from sd_scripts.library.memory.forecast.values import GIB, PROCESS, Forecast
from sd_scripts.library.memory.swapping import BlockSwap
from sd_scripts.library.render.predict import Predictor, Request
from sd_scripts.library.render.predicting.command import generate
from sd_scripts.runs import drawing
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.generate import FAMILIES, GenerateOptions
from tests.library.networks.adapters_in_small import shaken

DRAW = np.random.default_rng(random.getrandbits(64))


@pytest.fixture(scope="module")
def forecaster() -> DrawingForecaster:
    return DrawingForecaster()


def options_of(family: str, **more: Any) -> GenerateOptions:
    given = {"pretrained_model_name_or_path": "toy", "family": family, "prompt": "a red star", **more}
    return drawing.completed(given)


def published(name: str, family: str, **more: Any) -> GenerateOptions:
    return options_of(family, pretrained_model_name_or_path=name, size=(1024, 1024), **more)


def flux(**more: Any) -> GenerateOptions:
    return published("black-forest-labs/FLUX.1-dev", "flux", **more)


def saved_lora(name: str, folder: Path) -> Path:
    """A LoRA file of the family's small model."""
    family = families.family(name)
    parts, network = family.tiny(), RUNS[name, "network"].model_fields["network"].annotation(network_dim=2)  # type: ignore[misc]
    adapters = shaken(attach(parts, network, family.adapter_targets(parts, False), 0))
    export(adapters, parts, folder / "star.safetensors", save_model_as="diffusers", precision="float")
    return folder / "star.safetensors"


# The image stays.


def check_same_image(name: str, folder: Path) -> None:
    """With all memory options that promise the same image, and a LoRA: bit for bit."""
    family = families.family(name)
    seed = int(DRAW.integers(2**31))
    lora: tuple[str, ...] = ()
    if (name, "network") in RUNS:
        lora = (str(saved_lora(name, folder)),)
    control = Image.fromarray(DRAW.integers(0, 255, (64, 64, 3), dtype=np.uint8))
    fewest, _ = family.num_controls(family.tiny())
    request = Request("a red star", images=(control,) * fewest, steps=2, seed=seed, size=(64, 64), true_cfg_scale=2.0, lora=lora)
    plain = Predictor(family, family.tiny()).predict(request)
    count = len(blocks_of(family.tiny().backbone))
    for number in {1, count}:
        swapped = Predictor(family, family.tiny(), offload=number == 1, blocks_to_swap=number)
        assert swapped.swap is not None and swapped.swap.swapped == number
        # The second image: what is kept from the first must not hide anything.
        for _ in range(2):
            (image,) = swapped.predict(request)
            assert np.array_equal(np.asarray(image), np.asarray(plain[0])), (name, number)
        # One alone may be a block that such a request does not pass, as that of control images.
        assert swapped.swap.copies >= (2 if number == count else 0)
        swapped.free()


@pytest.mark.parametrize("name", ["sd", "zimage"])
def test_swapped_blocks_and_offloading_draw_the_same_image(name: str, tmp_path: Path) -> None:
    check_same_image(name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("sd", "zimage")])
def test_the_same_with_every_family(name: str, tmp_path: Path) -> None:
    check_same_image(name, tmp_path)


def test_the_options_reach_what_is_loaded() -> None:
    predictor = Predictor.load(options_of("sdxl", blocks_to_swap=3, vae_tiling=True))
    assert predictor.swap is not None and predictor.swap.swapped == 3 and predictor.renderer.tiled
    with pytest.raises(OptionError, match=r"blocks_to_swap: the network has .* not 400; set it to"):
        Predictor.load(options_of("sdxl", blocks_to_swap=400))


# The forecast.


@pytest.mark.parametrize("name", ["flux", "zimage"])
def test_a_forecast_weighs_the_networks_that_drawing_loads(name: str, forecaster: DrawingForecaster) -> None:
    loaded = Predictor.load(options_of(name, precision="no", transformer_device="cpu"))
    found = forecaster(options_of(name, precision="no"))
    drawn = found.of("drawing")
    assert drawn is not None and found.host == PROCESS
    assert drawn.parts["base model"] == bytes_of(loaded.parts.backbone.parameters())
    assert drawn.parts["VAE"] == bytes_of(loaded.parts.vae.parameters())
    assert drawn.parts["text encoders"] == sum(bytes_of(one.parameters()) for one in loaded.parts.text_encoders.values())


def test_swapping_spares_what_the_swapper_says(forecaster: DrawingForecaster) -> None:
    loaded = Predictor.load(options_of("flux", precision="no", transformer_device="cpu"))
    swap = BlockSwap(loaded.parts.backbone, torch.device("cpu"))
    number = int(DRAW.integers(1, swap.count + 1))
    swap.set(number)
    whole, less = (forecaster(options_of("flux", precision="no", blocks_to_swap=blocks)).of("drawing") for blocks in (0, number))
    assert whole is not None and less is not None
    away = whole.parts["base model"] - less.parts["base model"]
    assert away == pytest.approx(swap.bytes_at_home, rel=0.05) and less.parts["swap slots"] == pytest.approx(
        min(2, number) * swap.slot_bytes, rel=0.05
    )


def test_each_memory_option_spares_what_it_is_for(forecaster: DrawingForecaster) -> None:
    plain = forecaster(flux())
    # 11.9 billion numbers in bf16, and T5's 4.8 billion.
    assert plain.phases[0].parts["base model"] / GIB == pytest.approx(22.2, abs=0.1)
    assert plain.published == "FLUX" and [one.name for one in plain.phases] == ["reading", "drawing", "decoding"]
    offloaded = forecaster(flux(offload=True))
    assert offloaded.on_card < plain.on_card and offloaded.host > plain.host + 30 * GIB
    assert all("VAE" not in one.parts for one in offloaded.phases if one.name != "decoding")
    tiled, whole = (forecaster(flux(vae_tiling=on)).of("decoding") for on in (True, False))
    assert tiled is not None and whole is not None and 3 * tiled.parts["activations"] < whole.parts["activations"]
    swapped = forecaster(flux(blocks_to_swap=40))
    assert swapped.on_card < plain.on_card - 10 * GIB
    packed = forecaster(flux(transformer_quantization="qint8"))
    assert packed.on_card < plain.on_card - 9 * GIB
    apart = forecaster(options_of("qwen_edit", text_encoder_device="cpu", vae_device="cpu"))
    assert [one.name for one in apart.phases] == ["drawing"] and "text encoders" not in apart.phases[0].parts
    assert sum("is not counted on the card" in note for note in apart.notes) == 2
    on_cpu = forecaster(options_of("flux", transformer_device="cpu"))
    assert on_cpu.host > PROCESS and "of host RAM: it fits." in verdict_on_cpu(on_cpu, None)


def test_larger_images_take_more_and_a_list_counts_its_largest(forecaster: DrawingForecaster) -> None:
    small, large = (forecaster(options_of("sdxl", size=(side, side))).total for side in (64, 512))
    listed = forecaster(options_of("sdxl", prompt="", prompt_list="a star\na star --w 512 --h 512\na star --w 128")).total
    assert small < large == listed
    with pytest.raises(OptionError, match="prompt_list"):
        forecaster(options_of("sdxl", prompt="", prompt_list="a star --w much"))


def test_lora_files_and_what_a_run_made_are_counted(tmp_path: Path, forecaster: DrawingForecaster) -> None:
    file = saved_lora("sdxl", tmp_path)
    drawn = forecaster(options_of("sdxl", lora=[str(file)])).of("drawing")
    numbers = sum(tensor.numel() for tensor in load_file(file).values())
    assert drawn is not None and drawn.parts["adapter"] == 2 * numbers
    maker = families.family("ddpm")
    told = {"kohya_like.config": json.dumps({"script": "ddpm_train.py"})}
    maker.save(maker.tiny(), tmp_path / "made.safetensors", "safetensors", torch.float32, told)
    found = forecaster(drawing.completed({"draw_with": str(tmp_path / "made.safetensors"), "prompt": "a star", "size": (64, 64)}))
    drawn = found.of("drawing")
    weights = sum(weight.numel() for weight in maker.tiny().backbone.parameters())
    assert drawn is not None and drawn.parts["base model"] == pytest.approx(2 * weights, rel=0.2)


# The plan.


@pytest.mark.parametrize("card", [8, 24])
def test_a_plan_fits_and_takes_what_changes_no_image_first(
    card: int, forecaster: DrawingForecaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Forecast, "fits", lambda self, size: self.on_card <= size)
    plan = plan_for(card * GIB, flux(), forecaster)
    assert plan.fits and forecaster(plan.options) == plan.forecast
    assert next(iter(plan.changes)) == "offload" and plan.steps[-1].after == plan.forecast.on_card
    changed = with_values(flux(), plan.changes)
    assert changed == plan.options
    if "blocks_to_swap" in plan.changes:
        fewer = with_values(plan.options, {"blocks_to_swap": plan.changes["blocks_to_swap"] - 1})
        assert fewer is not None and not forecaster(fewer).fits(card * GIB)
    assert "transformer_quantization" not in plan.changes, "swapping is enough, and changes nothing"


def test_what_fits_needs_no_plan_and_what_cannot_fit_is_said(forecaster: DrawingForecaster) -> None:
    assert plan_for(80 * GIB, options_of("sdxl"), forecaster).steps == ()
    assert not plan_for(GIB // 10, flux(), forecaster).fits


def test_the_script_answers_with_a_table_and_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        generate(["--draw_with", "toy", "--family", "sd", "--estimate"])
    said = capsys.readouterr().out
    assert left.value.code == 0 and "drawing: 64 x 64" in said and said.rstrip().endswith("a card of 8 GB is enough.")
    with pytest.raises(SystemExit):
        generate(["--draw_with", "toy", "--family", "sd", "--fit", "8GB", "--json"])
    *lines, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert lines and all(list(line) == ["measuring"] for line in lines)
    assert last["plan"]["fits"] and last["plan"]["changes"] == {} and last["forecast"]["worst"] in ("drawing", "decoding", "reading")
    with pytest.raises(SystemExit) as left:
        generate(["--draw_with", "toy", "--family", "sd", "--estimate", "--blocks_to_swap", "400"])
    assert left.value.code == 2 and "set it to" in capsys.readouterr().err
