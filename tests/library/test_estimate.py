"""Forecasts of runs: every kind of run has one, memory options move what they should, and plans fit."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from kohya_like import presets
from sd_scripts import families
from sd_scripts.families import RUNS
from sd_scripts.families.flux.loading import DEV
from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.library.core.devices import META
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.memory.forecast import fitting
from sd_scripts.library.memory.forecast.accounting import AsOnDevice, Ledger, backward, bytes_of
from sd_scripts.library.memory.forecast.answers import ForecastComparison, plan_lines, verdict
from sd_scripts.library.memory.forecast.estimate import Forecaster, Swapped, packed_blocks
from sd_scripts.library.memory.forecast.fitting import plan_for, with_values
from sd_scripts.library.memory.forecast.structure import structure_of
from sd_scripts.library.memory.forecast.values import CONTEXT, GIB, Bucket, Forecast, Questions
from sd_scripts.library.memory.forecast.weighing import BlockWeight, weight_of
from sd_scripts.library.memory.swapping import BlockSwap
from sd_scripts.library.train.launch import main
from sd_scripts.library.train.trained import dtypes_of_run
from sd_scripts.runs.command import SCRIPTS
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import command_line, flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.runs import RunOptions
from sd_scripts.toy.build import BASES

MODELS = {
    "sd": "a/stable-diffusion-v1-5",
    "sdxl": "a/sdxl",
    "flux": "a/FLUX.1-dev",
    "kontext": "a/FLUX.1-Kontext-dev",
    "flux3": "a/flux-3-image-klein-base",
    "zimage": "a/Z-Image-Turbo",
    "qwen_edit": "a/Qwen-Image",
    "qwen_image21": "a/Qwen-Image-2.1",
    "krea2": "a/Krea-2-Raw",
    "anima": "a/Anima-Base-v1.0-Diffusers",
}
"""Hub ids that nobody has: their published structure is taken."""
SIDE = 512


def options_of(family: str, method: str = "network", **values: Any) -> RunOptions:
    given = {"pretrained_model_name_or_path": MODELS[family], "train_data_dir": "toy:star", "mixed_precision": "bf16"}
    return flat.build(RUNS[family, method], {**given, **values})


def shortened(family: str, options: RunOptions, dtypes: dict[str, torch.dtype]) -> Parts:
    """The published structure with one block where there are many alike: a pass of it takes a tenth of the time."""
    parts = structure_of(families.family(family), options.model, dtypes).parts
    for module in list(parts.backbone.modules()):
        for name, blocks in module.named_children():
            if name in ("transformer_blocks", "single_transformer_blocks", "layers", "noise_refiner", "context_refiner"):
                setattr(module, name, blocks[:1])
            elif name in ("resnets", "attentions") and len(blocks) > 1:
                # A level going up has one more than the same going down, and its last one meets what that level was given.
                down = type(module).__name__.endswith("DownBlock2D")
                setattr(module, name, blocks[:1] if down else torch.nn.ModuleList([blocks[0], blocks[-1]]))
    return parts


def forecaster(family: str, previews: bool = False, whole: bool = False) -> Forecaster:
    drawn = (((SIDE, SIDE), 1, 6.0),) if previews else ()
    questions = Questions((Bucket((SIDE, SIDE)),), "a star " * 8, drawn)
    resolution = (SIDE, SIDE) if family == "sd" else (1024, 1024)
    return Forecaster(families.family(family), questions, resolution, made=None if whole else partial(shortened, family))


@pytest.fixture(scope="module")
def sd() -> Forecaster:
    return forecaster("sd", previews=True)


BILLIONS = {"sd": 0.8595, "sdxl": 2.567, "flux": 11.901, "zimage": 6.155, "qwen_edit": 20.430, "qwen_image21": 7.115, "krea2": 12.819}
BILLIONS |= {"kontext": BILLIONS["flux"], "anima": 1.956, "flux3": 5.54}
"""Weights of the published models, as their makers count them."""


@pytest.mark.parametrize("family", BILLIONS)
def test_a_model_that_is_not_here_has_the_weights_of_the_published_one(family: str) -> None:
    options = options_of(family)
    found, other = (structure_of(families.family(family), options.model, dtypes_of_run(options)) for _ in range(2))
    # In bf16: two bytes each.
    assert found.published and bytes_of(found.parts.backbone.parameters()) / 2e9 == pytest.approx(BILLIONS[family], rel=0.01)
    # Built once, and each has its own.
    found.parts.backbone.to(torch.float32)
    assert {weight.dtype for weight in other.parts.backbone.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("family", [pytest.param(name, marks=[pytest.mark.long] * (name not in ("sd", "flux"))) for name in BILLIONS])
def test_what_is_trained_of_a_model_that_is_not_here_has_a_forecast(family: str) -> None:
    """Of tiny models of every family, see test_every_kind_of_run_has_a_forecast."""
    options = options_of(family, gradient_checkpointing=True)
    training = forecaster(family)(options).of("training")
    assert training is not None
    assert training.parts["base model"] == bytes_of(shortened(family, options, dtypes_of_run(options)).backbone.parameters())
    assert training.parts["gradients"] == training.parts["adapter"] == pytest.approx(training.parts["optimizer"] / 2, rel=0.01)


@pytest.mark.parametrize("family", ["sd", *(pytest.param(name, marks=pytest.mark.long) for name in BILLIONS if name != "sd")])
def test_the_whole_of_a_model_that_is_not_here_has_a_forecast(family: str) -> None:
    forecast = forecaster(family, whole=True)(options_of(family, gradient_checkpointing=True))
    training = forecast.of("training")
    assert training is not None and forecast.published
    assert training.parts["base model"] / 2e9 == pytest.approx(BILLIONS[family], rel=0.01)
    assert training.parts["gradients"] == training.parts["adapter"] == pytest.approx(training.parts["optimizer"] / 2, rel=0.01)


def test_memory_options_that_spare_memory_do_so_in_a_forecast(sd: Forecaster) -> None:
    plain = sd(options_of("sd"))
    memory_options: list[tuple[dict[str, Any], str, str]] = [
        ({"gradient_checkpointing": True}, "training", "activations"),
        ({"blocks_to_swap": 10}, "training", "base model"),
        ({"transformer_quantization": "qint8"}, "training", "base model"),
        ({"vae_tiling": True, "sample_size": (1024, 1024)}, "previews", ""),
        ({"network_dim": 4}, "training", "adapter"),
        ({"optimizer_type": "SGD"}, "training", "optimizer"),
    ]
    for values, phase, part in memory_options:
        before, after = plain.of(phase), sd(options_of("sd", **values)).of(phase)
        assert before is not None and after is not None
        if part:
            assert after.parts.get(part, 0) < before.parts[part], values


def test_a_part_of_the_blocks_recomputed_lies_between_all_and_none(sd: Forecaster) -> None:
    def activations(**values: Any) -> int:
        training = sd(options_of("sd", **values)).of("training")
        assert training is not None
        return training.parts["activations"]

    none, half, every = (
        activations(),
        activations(gradient_checkpointing=True, gradient_checkpointing_share=0.5),
        activations(gradient_checkpointing=True),
    )
    offloaded = activations(gradient_checkpointing=True, gradient_checkpointing_cpu_offload=True)
    assert none > half > every > offloaded


def test_what_swapping_spares_is_what_the_swapper_says() -> None:
    network = families.family("flux").tiny().backbone
    swap = BlockSwap(network, torch.device("cpu"))
    swap.set(3)
    blocks = tuple(weight_of(block, set(), set(), 0) for block in blocks_of(network).values())
    told = Swapped.of(blocks, 3)
    assert told.frozen == pytest.approx(swap.bytes_at_home, rel=0.05)
    assert told.slots == pytest.approx(2 * swap.slot_bytes, rel=0.05)


def test_packed_weights_weigh_what_the_forecast_says() -> None:
    from sd_scripts.library.memory.packed import pack

    layer = (640, 768)
    blocks = (BlockWeight(0, 0, (layer,), 0),)
    weight = torch.randn(layer)
    for kind in ("fp8", "nf4"):
        spared, _ = packed_blocks(blocks, 2, kind)
        # The table of nf4's levels is 2 KiB in each layer.
        held = sum(tensor.nbytes for tensor in pack(weight, kind))  # type: ignore[arg-type]
        assert 2 * weight.numel() - spared == pytest.approx(held, abs=4096)


def test_host_ram_of_swapped_blocks_is_told(sd: Forecaster) -> None:
    """Of frozen blocks their weights; of trained ones gradients and the optimizer's state as well."""
    options = options_of("sd")
    blocks = blocks_of(shortened("sd", options, dtypes_of_run(options)).backbone)
    frozen, trained = (sd(options_of("sd", method, blocks_to_swap=len(blocks))) for method in ("network", "full"))
    training, home = frozen.of("training"), trained.of("training")
    assert training is not None and home is not None
    size = training.at_home / GIB
    # In bf16; trained ones in float32, four times over with AdamW.
    assert size == pytest.approx(2 * sum(weight.numel() for block in blocks.values() for weight in block.parameters()) / GIB, rel=0.001)
    assert home.at_home / GIB == pytest.approx(8 * size, rel=0.05)
    assert frozen.notes[:2] == (f"The run needs {frozen.host / GIB:.1f} GiB of host RAM.", f"Swapped blocks take {size:.1f} GiB of it.")
    assert not any("wapped" in note for note in sd(options_of("sd")).notes)


def test_vae_and_text_encoders_are_not_on_the_card_together_while_both_are_cached(sd: Forecaster) -> None:
    both, latents, texts = (
        sd(options_of("sd", **switched_off)).of("caching")
        for switched_off in ({}, {"cache_text_encoder_outputs": False}, {"cache_latents": False})
    )
    assert both is not None and latents is not None and texts is not None
    assert {"VAE"} == latents.parts.keys() - {"activations", "cuBLAS"} and {"VAE", "text encoders"} < texts.parts.keys()
    assert both.total == max(latents.total, texts.total - texts.parts["VAE"])


def test_encoders_on_devices_of_their_own_take_nothing_of_the_card() -> None:
    asked = forecaster("qwen_image21")
    plain, texts_away, both_away = (
        asked(options_of("qwen_image21", **devices)).of("caching")
        for devices in ({}, {"text_encoder_device": "cpu"}, {"text_encoder_device": "cuda:1", "vae_device": "cpu"})
    )
    assert plain is not None and "text encoders" in plain.parts and both_away is None
    assert texts_away is not None and {"VAE", "activations", "cuBLAS"} == texts_away.parts.keys()


def test_a_table_of_the_modulation_spares_a_third_of_the_weights_and_is_pulled_where_equal_memory_options_are_not_enough() -> None:
    qwen = forecaster("qwen_edit")
    plain, tables = (qwen(options_of("qwen_edit", gradient_checkpointing=True, modulation_table=on)) for on in (False, True))
    one, two = plain.of("training"), tables.of("training")
    assert one is not None and two is not None
    # A block has two layers of 3072 x 18432 weights and as many biases as rows each, in bf16.
    spared = 2 * (3072 + 1) * 18432 * 2
    assert one.parts["base model"] - two.parts["base model"] == pytest.approx(spared, rel=1e-3)
    # They are in host RAM then, beside what they give at 1001 times.
    assert two.tables == pytest.approx(spared + 2 * 18432 * 1001 * 2, rel=1e-3)
    assert f"The modulation and its tables take up to {two.tables / GIB:.1f} GiB of it." in tables.notes
    pulled = list(fitting._tables(options_of("qwen_edit"), plain, qwen, 0))
    assert [values for values, _ in pulled] == [{"modulation_table": True}]
    assert not list(fitting._tables(options_of("sd"), plain, qwen, 0))
    assert fitting.with_values(options_of("qwen_edit", lora_targets="all_with_modulation"), pulled[0][0]) is None


class WithNumbers(torch.optim.SGD):
    """An optimizer that looks at what it computes, as the meta device has nothing to look at."""

    def step(self, closure: Any = None) -> None:
        sum(weight.grad.norm().item() for group in self.param_groups for weight in group["params"])
        super().step(closure)


@pytest.mark.parametrize(("optimizer", "known"), [(f"{__name__}.WithNumbers", False), ("torch.optim.SGD", True)])
def test_an_optimizer_whose_state_is_guessed_is_named(optimizer: str, known: bool) -> None:
    given = [
        "--pretrained_model_name_or_path",
        "toy",
        "--train_data_dir",
        "toy:star",
        "--mixed_precision",
        "bf16",
        "--allow_custom_modules",
    ]
    options = command_line.parse_cli(RUNS["sd", "network"], [*given, "--optimizer_type", optimizer]).options
    found = Forecaster(families.family("sd"), Questions((Bucket((64, 64)),), "a star"), (64, 64))(options)
    training = found.of("training")
    assert training is not None and ("optimizer" in training.parts) is not known
    said = f"{optimizer} cannot be measured without numbers, and its state is counted as AdamW's."
    assert found.notes[1:] == ("Previews are not counted: sample_prompts is empty.", *(() if known else (said,)))


def test_accumulation_keeps_gradients_while_the_next_batch_computes(sd: Forecaster) -> None:
    one, two = (sd(options_of("sd", gradient_accumulation_steps=count)).of("training") for count in (1, 2))
    assert one is not None and two is not None and one.total < two.total <= one.total + 2 * one.parts["gradients"]


def test_training_the_whole_model_counts_weights_gradients_and_state_in_float32(sd: Forecaster) -> None:
    options = options_of("sd", "full", train_text_encoder=False)
    training = sd(options).of("training")
    assert training is not None
    weights = training.parts["trained weights"]
    network = shortened("sd", options, dtypes_of_run(options)).backbone
    assert weights / 4 == pytest.approx(sum(weight.numel() for weight in network.parameters()), rel=0.01)
    assert training.parts["optimizer"] == pytest.approx(2 * weights, rel=0.01)
    assert "base model" not in training.parts


def test_gradients_that_are_let_go_of_are_no_part_of_training(sd: Forecaster) -> None:
    plain, fused = (
        # In bf16, whose weights have no copies in lower precision that autocast keeps until the backward pass.
        sd(options_of("sd", "full", full_bf16=True, max_grad_norm=0.0, gradient_checkpointing=True, fused_backward_pass=fused)).of(
            "training"
        )
        for fused in (False, True)
    )
    assert plain is not None and fused is not None
    gradients = plain.parts["gradients"]
    assert gradients == plain.parts["trained weights"] and "gradients" not in fused.parts
    # One gradient at a time is among the activations.
    assert 0.8 * gradients < plain.total - fused.total <= gradients
    assert 0 < fused.parts["activations"] < 0.5 * gradients


@pytest.mark.parametrize("card", [1.8, 2.4])
def test_a_plan_fits_and_pulls_no_memory_option_in_vain(sd: Forecaster, card: float) -> None:
    options = options_of("sd")
    plan = plan_for(int(card * GIB), options, sd)
    assert plan.fits and plan.forecast.on_card <= card * GIB < sd(options).on_card
    changed = flat.flatten(plan.options)
    assert all(changed[name] == value for name, value in plan.changes.items())
    untouched = {name: value for name, value in flat.flatten(options).items() if name not in plan.changes}
    assert all(changed[name] == value for name, value in untouched.items())
    if "blocks_to_swap" in plan.changes:
        fewer = flat.build(type(options), {**changed, "blocks_to_swap": plan.changes["blocks_to_swap"] - 1})
        assert sd(fewer).on_card > card * GIB


def test_a_plan_for_a_machine_with_little_host_ram_says_so_and_takes_what_helps(sd: Forecaster) -> None:
    def here(gib: float) -> Callable[[RunOptions], Forecast]:
        return lambda options: replace(sd(options), host_there=int(gib * GIB))

    options = options_of("sd", transformer_quantization="none")
    needed = sd(options).host / GIB
    assert not plan_for(24 * GIB, options, here(needed)).steps
    less = plan_for(24 * GIB, options, here(needed - 0.1))
    assert less.fits and less.changes and less.forecast.host < sd(options).host
    none = plan_for(24 * GIB, options, here(0.5))
    assert not none.fits and "it fits on the card, but the" in " ".join(plan_lines(none))
    assert "too little host RAM" in verdict(replace(sd(options), host_there=GIB), None)
    assert "without previews" in verdict(replace(sd(options), phases=sd(options).phases[:2]), None)


def test_a_plan_that_does_not_fit_lists_nothing_that_spares_nothing(sd: Forecaster) -> None:
    plan = plan_for(CONTEXT, options_of("sd"), sd)
    assert not plan.fits and plan.steps
    for needed in plan.steps:
        values = {name: value for step in plan.steps if step is not needed for name, value in step.options.items()}
        without = with_values(options_of("sd"), values)
        assert without is None or sd(without).on_card > plan.forecast.on_card or sd(without).host > plan.forecast.host, needed


def test_a_run_that_fits_needs_no_plan(sd: Forecaster) -> None:
    plan = plan_for(24 * GIB, options_of("sd"), sd)
    assert plan.fits and not plan.steps


def test_what_cannot_fit_is_said() -> None:
    small = Forecaster(families.family("sd"), Questions((Bucket((64, 64)),), "a star"), (64, 64))
    assert not plan_for(CONTEXT, options_of("sd", pretrained_model_name_or_path="toy"), small).fits


def test_autocast_on_the_meta_device_computes_in_the_precisions_of_a_real_one() -> None:
    x = torch.randn(4, 32)
    layer, norm = torch.nn.Linear(32, 16), torch.nn.LayerNorm(16)

    def run(device: torch.device) -> list[torch.dtype]:
        there, low = x.to(device), layer.to(device)
        product = low(there)
        normed = norm.to(device)(product)
        return [
            product.dtype,
            normed.dtype,
            (product @ product.T).dtype,
            product.softmax(-1).dtype,
            product.exp().dtype,
            (product * 2).dtype,
        ]

    mode = AsOnDevice(torch.bfloat16)
    with mode, mode.autocast():
        found = run(META)
    # torch/include/ATen/autocast_mode.h: products in bf16; norms, softmax and exp in float32; the rest as it comes.
    low, high = torch.bfloat16, torch.float32
    assert found == [low, high, low, high, high, low]


def test_autocast_that_is_turned_off_inside_stays_off_there() -> None:
    layer, x = torch.nn.Linear(8, 8).to(META), torch.empty(2, 8, device=META)
    mode = AsOnDevice(torch.bfloat16)
    with mode, mode.autocast():
        with torch.autocast("meta", enabled=False):
            assert layer(x).dtype == torch.float32
        assert layer(x).dtype == torch.bfloat16
    assert torch.autocast.__module__.startswith("torch")


def test_attention_keeps_no_weights_with_a_fused_kernel_and_all_without() -> None:
    def kept(fused: bool) -> int:
        q = torch.empty(1, 4, 512, 32, device=META, requires_grad=True)
        with AsOnDevice(None, fused=fused), Ledger() as ledger:
            backward(torch.nn.functional.scaled_dot_product_attention(q, q, q).sum())
        return ledger.peak

    weights = 4 * 512 * 512 * 4
    assert kept(True) < weights < kept(False)


def test_a_forecast_stands_beside_what_was_measured(sd: Forecaster, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    forecast = sd(options_of("sd"))
    ForecastComparison(run, forecast).measured(forecast.total / GIB / 1.05)
    first, second = run.events()[0]
    assert first["kind"] == "forecast" and sum(first["parts"].values()) == pytest.approx(first["gib"], abs=0.01)
    assert second["kind"] == "forecast_checked" and second["error_percent"] == pytest.approx(5.0, abs=0.1)


@pytest.mark.parametrize(("text", "size"), [("12GB", 12.0), ("11.5 GiB", 11.5), ("24", 24.0), (None, None)])
def test_sizes_of_cards_are_read(text: str | None, size: float | None) -> None:
    assert command_line.card_size(text) == size


@pytest.mark.parametrize("text", ["big", "0", "-3GB", "12MB"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="write it as 12GB"):
        command_line.card_size(text)


def estimated(run: type[RunOptions], folder: Path, ask: Callable[[list[str]], str]) -> None:
    """A run that is only asked about says what it measures, then its forecast, and starts nothing."""
    if run.method == "scratch":
        model = ["--vae", "toy"] if run.family == "lgt" else []
    elif (BASES / run.family).is_dir():
        model = ["--pretrained_model_name_or_path", "toy"]
    else:
        family = families.family(run.family)
        family.save(family.tiny(), folder / "base", "diffusers", None, {})
        model = ["--pretrained_model_name_or_path", str(folder / "base")]
    said = ask(["--train_data_dir", "toy:star", "--output_dir", str(folder), *model, "--estimate", "--json"])
    *progress, last = (json.loads(line) for line in said.splitlines())
    assert progress and all("measuring" in line for line in progress)
    phases = {phase["name"]: phase for phase in last["forecast"]["phases"]}
    assert phases["training"]["parts"]["activations"] > 0 and last["forecast"]["on_card"] > last["forecast"]["bytes"] > 0
    assert not [path for path in folder.iterdir() if (path / "events.jsonl").exists()], "an estimate starts no run"


# That of Stable Diffusion is the script below.
@pytest.mark.parametrize("run", [run for run in RUNS.values() if run.method != "full" and run.family != "sd"], ids=lambda run: run.script)
def test_every_kind_of_run_has_a_forecast(run: type[RunOptions], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(arguments: list[str]) -> str:
        with pytest.raises(SystemExit) as ended:
            main(run.family, run.method, arguments)
        out, err = capsys.readouterr()
        assert ended.value.code == 0, err
        return out

    estimated(run, tmp_path, ask)


def test_a_script_that_is_asked_for_a_forecast_writes_it_and_nothing_else(tmp_path: Path) -> None:
    run = RUNS["sd", "network"]

    def ask(arguments: list[str]) -> str:
        done = subprocess.run([sys.executable, str(SCRIPTS / run.script), *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    estimated(run, tmp_path, ask)


MODEL_OF_PRESET = {"sd": MODELS["sd"], "sdxl": MODELS["sdxl"], "flux": MODELS["flux"]}
FOR_A_CARD = [path for path in sorted(presets.BUILT_IN.glob("*/*.toml")) if re.search(r"gb$", path.stem)]
QUICK = ("ddpm-pixels-64px-8gb", "lgt-256px-8gb", "qwen-image21-8gb")
"""A few seconds each: both kinds of models that a run makes, with a VAE that is not here and without one, and one of billions
of weights, whose previews need most."""


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As large as cameras make them, so that every bucket is as large as it can be, and one long caption."""
    folder = tmp_path_factory.mktemp("photographs")
    for name in ("plain", "pairs/target", "pairs/control", "styles/oil", "styles/ink"):
        (folder / name).mkdir(parents=True)
        for number, size in enumerate([(2048, 2048), (2048, 1365)]):
            Image.new("RGB", size, (number, 100, 150)).save(folder / name / f"{number}.jpg")
            if not name.endswith(("control", "oil", "ink")):
                (folder / name / f"{number}.txt").write_text("a house by the sea, with a garden full of red flowers, " * 6)
    return folder


@pytest.mark.parametrize("path", [pytest.param(p, id=p.stem, marks=() if p.stem in QUICK else pytest.mark.long) for p in FOR_A_CARD])
def test_a_preset_with_a_card_in_its_name_fits_that_card(
    path: Path, photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = presets.read(path, own=False).run
    data = "pairs" if "qwen-edit" in path.stem or run.family == "kontext" else "styles" if run.family == "lgt" else "plain"
    given = ["--config_file", str(path), "--train_data_dir", str(photographs / data), "--output_dir", str(tmp_path), "--estimate", "--json"]
    if run.family in MODEL_OF_PRESET:
        given += ["--pretrained_model_name_or_path", MODEL_OF_PRESET[run.family]]
    given += [] if run.family == "lgt" else ["--sample_prompts", "a house\na cat\na boat\na tree"]
    with pytest.raises(SystemExit) as ended:
        main(run.family, run.method, given)
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    found = json.loads(out.splitlines()[-1])["forecast"]
    cards, card = (int(number or 1) for number in re.search(r"(?:(\d)x)?(\d+)gb$", path.stem).groups())  # type: ignore[union-attr]
    assert {phase["name"] for phase in found["phases"]} == {"caching", "training", "previews"}
    assert found["on_card"] <= card * GIB
    # With fsdp2 each process reads the whole network.
    assert found["host"] <= (32 if cards == 1 else 64 * cards) * GIB


def test_published_configurations_are_there() -> None:
    assert (DEV / "transformer" / "config.json").is_file()
