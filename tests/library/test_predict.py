"""The predictor gives the family's own images, whatever it kept from calls before, and says what is wrong in sentences."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.families.qwen_edit.options import QwenImageNetworkOptions
from sd_scripts.families.qwen_edit.predict_options import QwenImagePredict
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.files import export
from sd_scripts.library.core.devices import CPU
from sd_scripts.library.core.protocols import Parts, Preview
from sd_scripts.library.render.predict import Devices, Predictor, Progress, Request, devices_for, precision_for
from sd_scripts.library.render.predicting.thumbnails import RIDGE, Thumbnails, colour_map, palette, shrunken
from sd_scripts.library.render.remembering import KeptTensors
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from tests.library.networks.adapters_in_small import shaken

QWEN = QwenEdit()
DRAW = np.random.default_rng(random.getrandbits(64))


def image(width: int = 64, height: int = 64) -> Image.Image:
    return Image.fromarray(DRAW.integers(0, 256, (height, width, 3), dtype=np.uint8))


def same(one: Image.Image, other: Image.Image) -> bool:
    return np.array_equal(np.asarray(one), np.asarray(other))


def distance(one: Image.Image, other: Image.Image) -> float:
    return float(np.abs(np.asarray(one, dtype=float) - np.asarray(other, dtype=float)).mean())


def lora_file(parts: Parts, path: Path, seed: int) -> str:
    """A LoRA of random values; the model stays as it was."""
    network = attach(parts, QwenImageNetworkOptions(network_dim=4, lora_targets="attention"), QWEN.adapter_targets(parts, False), 0)
    export(shaken(network, seed), parts, path, save_model_as="kohya", precision="float")
    network.detach()
    return str(path)


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor(QWEN, QWEN.tiny())


@pytest.fixture(scope="module")
def loras(predictor: Predictor, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("loras")
    return lora_file(predictor.parts, folder / "one.safetensors", 1), lora_file(predictor.parts, folder / "two.safetensors", 2)


def asked(**changes: object) -> Request:
    return replace(Request("make the circle red", (image(),), "dull", steps=3, seed=int(DRAW.integers(2**31))), **changes)


@pytest.mark.parametrize("version", ["edit", "edit-2509", "edit-2511", "image"])
def test_an_image_is_the_familys_own_bit_for_bit_with_and_without_what_was_kept(version: str) -> None:
    predictor = Predictor(QWEN, QWEN.tiny(version))
    most = predictor.controls[1]
    request = asked(images=tuple(image(64 + 16 * number, 64) for number in range(min(2, most))))
    previews = predictor.prepared(request)
    wanted = QWEN.preview(predictor.parts, previews)
    assert len(predictor.kept) == 0
    first = predictor.predict(request)
    kept = len(predictor.kept)
    assert kept == len(request.images) + 2
    again = predictor.predict(request)
    assert len(predictor.kept) == kept
    assert same(first[0], wanted[0]) and same(again[0], wanted[0])
    other = replace(request, prompt="move it to the left", seed=request.seed + 1)
    assert same(predictor.predict(other)[0], QWEN.preview(predictor.parts, predictor.prepared(other))[0])


def test_what_was_kept_spares_the_encoders(predictor: Predictor) -> None:
    request, runs = asked(), []
    predictor.predict(request)
    handles = [
        predictor.parts.text_encoders["te1"].model.register_forward_pre_hook(lambda *_: runs.append("text")),
        predictor.parts.vae.encoder.register_forward_pre_hook(lambda *_: runs.append("vae")),
    ]
    predictor.predict(replace(request, seed=1))
    assert runs == []
    predictor.predict(replace(request, prompt="another instruction", negative_prompt=None))
    assert set(runs) == {"text"}
    runs.clear()
    predictor.predict(replace(request, images=(image(),)))
    assert set(runs) == {"text", "vae"}
    for handle in handles:
        handle.remove()


def test_the_same_instruction_on_another_image_is_not_taken_for_the_same(predictor: Predictor) -> None:
    request = asked()
    other = replace(request, images=(image(),))
    assert not same(predictor.predict(request)[0], predictor.predict(other)[0])
    assert same(predictor.predict(other)[0], QWEN.preview(predictor.parts, predictor.prepared(other))[0])


def test_what_is_kept_stays_within_its_limit_and_the_least_used_goes_first() -> None:
    kept, rows = KeptTensors(1000), {name: {"text": torch.full((100,), float(number))} for number, name in enumerate("abc")}
    for name in ("a", "b", "a", "c"):
        assert kept.get(name, lambda name=name: rows[name])["text"] is rows[name]["text"]
    assert "a" in kept and "c" in kept and "b" not in kept and kept.num_bytes == 800
    assert kept.get("large", lambda: {"text": torch.zeros(1000)})["text"].numel() == 1000 and "large" not in kept


def test_images_of_one_request_are_those_of_their_seeds_alone(predictor: Predictor) -> None:
    request = asked(num_images=3)
    together = predictor.predict(request)
    for index, found in enumerate(together):
        assert same(found, predictor.predict(replace(request, num_images=1, seed=request.seed + index))[0])


def test_without_a_seed_one_is_drawn_and_told(predictor: Predictor) -> None:
    request = asked(seed=None)
    made = next(predictor.images(request))
    assert 0 <= made.preview.seed < 2**33
    assert same(made.image, predictor.predict(replace(request, seed=made.preview.seed))[0])


def test_guidance_needs_a_negative_prompt_and_an_empty_one_is_one(predictor: Predictor) -> None:
    request = asked(negative_prompt=None, true_cfg_scale=4.0)
    plain = predictor.predict(request)[0]
    assert same(plain, predictor.predict(replace(request, negative_prompt="x", true_cfg_scale=1.0))[0])
    assert not same(plain, predictor.predict(replace(request, negative_prompt=""))[0])


def test_one_step_gives_an_image(predictor: Predictor) -> None:
    found = np.asarray(predictor.predict(asked(steps=1))[0])
    assert found.shape == (64, 64, 3) and found.std() > 0


@pytest.mark.parametrize(("shape", "wanted"), [((64, 64), (64, 64)), ((80, 48), (80, 48)), ((300, 100), (112, 32))])
def test_without_a_size_the_last_control_image_gives_the_shape(
    predictor: Predictor, shape: tuple[int, int], wanted: tuple[int, int]
) -> None:
    assert predictor.predict(asked(images=(image(48, 80), image(*shape)), steps=1))[0].size == wanted


def test_steps_are_told_and_the_estimate_of_the_clean_image_ends_at_the_image(predictor: Predictor) -> None:
    request, seen = asked(num_images=2, steps=4), []
    made = predictor.predict(request, seen.append)
    assert [(one.index, one.step, one.steps) for one in seen] == [(index, step, 4) for index in range(2) for step in range(1, 5)]
    assert all(one.clean.shape == (16, 8, 8) for one in seen)
    last = QWEN.decode(predictor.parts, seen[3].clean[None])
    assert same(Image.fromarray(((last[0] / 2 + 0.5) * 255).round().byte().permute(1, 2, 0).numpy()), made[0])


def test_what_the_step_function_raises_ends_the_prediction_and_the_next_one_is_right(predictor: Predictor, loras: tuple[str, str]) -> None:
    class Enough(Exception):
        pass

    steps: list[int] = []

    def stop(progress: Progress) -> None:
        steps.append(progress.step)
        if progress.step == 2:
            raise Enough

    request = asked(steps=5)
    with pytest.raises(Enough):
        predictor.predict(replace(request, lora=loras[:1]), stop)
    assert steps == [1, 2]
    assert same(predictor.predict(request)[0], QWEN.preview(predictor.parts, predictor.prepared(request))[0])


# Adapters


def test_adapters_change_between_calls_without_loading_the_model(predictor: Predictor, loras: tuple[str, str]) -> None:
    request = asked()
    base = predictor.predict(request)[0]
    transformer = predictor.parts.backbone
    full = predictor.predict(replace(request, lora=loras[:1]))[0]
    half = predictor.predict(replace(request, lora=loras[:1], lora_weight=(0.5,)))[0]
    both = predictor.predict(replace(request, lora=loras, lora_weight=(1.0, 0.7)))[0]
    assert distance(full, base) > 0.5 and distance(half, base) > 0.2 and distance(both, full) > 0.2
    assert same(predictor.predict(replace(request, lora=loras[:1], lora_weight=(0.0,)))[0], base)
    assert same(predictor.predict(replace(request, lora=loras[:1]))[0], full)
    assert same(predictor.predict(request)[0], base)
    assert predictor.parts.backbone is transformer


def test_two_strengths_of_a_lora_are_those_of_a_fresh_model(predictor: Predictor, loras: tuple[str, str]) -> None:
    request = asked(lora=loras, lora_weight=(0.3, 0.9))
    predictor.predict(replace(request, lora=loras[1:], lora_weight=(2.0,)))
    assert same(predictor.predict(request)[0], Predictor(QWEN, QWEN.tiny()).predict(request)[0])


def test_a_lora_that_is_written_anew_is_read_anew(predictor: Predictor, tmp_path: Path) -> None:
    request = asked(lora=(lora_file(QWEN.tiny(), tmp_path / "lora.safetensors", 3),))
    before = predictor.predict(request)[0]
    lora_file(QWEN.tiny(), tmp_path / "lora.safetensors", 4)
    assert not same(predictor.predict(request)[0], before)


# What is wrong


def test_everything_wrong_with_a_request_is_told_at_once(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nnothing")
    (tmp_path / "bad.safetensors").write_bytes(b"0123456789")
    request = asked(
        images=(tmp_path / "missing.png", tmp_path / "broken.png", image(), image()),
        size=(100, 64),
        lora=(str(tmp_path / "gone.safetensors"), str(tmp_path / "bad.safetensors"), "old.ckpt"),
        lora_weight=(1.0,),
    )
    with pytest.raises(OptionError) as err:
        predictor.predict(request)
    text = str(err.value)
    for part in ("missing.png is not there", "broken.png", "4 given", "1 to 3 control images", "100x64 is off the model's grid", "96,64"):
        assert part in text, part
    for part in ("there is no file", "bad.safetensors", "lora_weight has 1 numbers for 3 files", "no file old.ckpt"):
        assert part in text, part
    assert {problem.option for problem in err.value.problems} == {"images", "size", "lora", "lora_weight"}


@pytest.mark.parametrize(("version", "count", "words"), [("edit", 2, "one control image"), ("image", 1, "no control image")])
def test_the_number_of_control_images_is_that_of_the_version(version: str, count: int, words: str) -> None:
    predictor = Predictor(QWEN, QWEN.tiny(version))
    with pytest.raises(OptionError, match=f"{count} given, but tiny is model_version {version}, which takes {words}"):
        predictor.predict(asked(images=tuple(image() for _ in range(count))))


def test_a_lora_of_another_family_is_refused_and_the_model_stays_as_it_was(predictor: Predictor, tmp_path: Path) -> None:
    from sd_scripts.families.flux.model import Flux
    from sd_scripts.families.flux.options import FluxNetworkOptions

    flux = Flux()
    parts = flux.tiny()
    network = attach(parts, FluxNetworkOptions(network_dim=4, train_text_encoder=False), flux.adapter_targets(parts, False), 0)
    export(shaken(network), parts, tmp_path / "flux.safetensors", save_model_as="kohya", precision="float")
    request = asked()
    base = predictor.predict(request)[0]
    with pytest.raises(OptionError, match=r"flux\.safetensors"):
        predictor.predict(replace(request, lora=(str(tmp_path / "flux.safetensors"),)))
    assert same(predictor.predict(request)[0], base)


def options(**values: object) -> QwenImagePredict:
    return flat.build(QwenImagePredict, {"pretrained_model_name_or_path": "toy", "prompt": "x", **values})


def test_devices_that_are_not_here_are_named_all_at_once() -> None:
    with pytest.raises(OptionError) as err:
        devices_for(options(transformer_device="cuda:55", vae_device="cuda:56", text_encoder_device="cuda:57"))
    assert [problem.option for problem in err.value.problems] == ["transformer_device", "vae_device", "text_encoder_device"]
    assert "cuda:55 asked" in str(err.value) and "here" in str(err.value)


def test_every_network_takes_the_transformers_device_unless_it_has_its_own() -> None:
    chosen = devices_for(options(transformer_device="cpu"))
    assert chosen == Devices(CPU, CPU, CPU)
    assert precision_for("auto", CPU) is torch.float32 and precision_for("bf16", CPU) is torch.bfloat16


# Memory


def test_offloading_gives_the_same_image(predictor: Predictor) -> None:
    request = asked()
    assert same(Predictor(QWEN, QWEN.tiny(), Devices(), offload=True).predict(request)[0], predictor.predict(request)[0])


def test_a_network_is_on_its_device_only_while_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[tuple[str, str]] = []
    predictor = Predictor(QWEN, QWEN.tiny(), Devices(), offload=True)
    # The meta device stands for a GPU: what is moved there, and when, can be seen on any machine.
    names = predictor.parts.modules()
    predictor.renderer = replace(predictor.renderer, working=dict.fromkeys(names, torch.device("meta")))
    for name, module in names.items():
        monkeypatch.setattr(module, "to", lambda device, name=name: moves.append((name, str(device))))
    predictor.predict(asked(steps=1))
    assert moves[:2] == [("vae", "meta"), ("vae", "cpu")]
    assert all(moves[at][0] == moves[at + 1][0] and moves[at + 1][1] == "cpu" for at in range(0, len(moves), 2))
    assert [name for name, device in moves if device == "meta"] == ["vae", "te1", "backbone", "vae"]


def test_free_lets_go_of_the_networks() -> None:
    predictor = Predictor(QWEN, QWEN.tiny())
    predictor.predict(asked(steps=1))
    transformer = weakref.ref(predictor.parts.backbone)
    predictor.free()
    gc.collect()
    assert transformer() is None and len(predictor.kept) == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gives_nearly_the_same_image(predictor: Predictor, dtype: torch.dtype) -> None:
    parts = QWEN.tiny()
    parts.backbone.to(dtype)
    parts.text_encoders["te1"].to(dtype)
    request = asked()
    assert distance(Predictor(QWEN, parts).predict(request)[0], predictor.predict(request)[0]) < 12


# Thumbnails


def test_a_thumbnail_is_the_decoded_image_where_that_is_cheap_and_a_linear_map_where_not(predictor: Predictor) -> None:
    seen: list[Progress] = []
    (made,) = predictor.predict(asked(), seen.append)
    thumbnails = Thumbnails(QWEN, predictor.parts)
    assert same(thumbnails.of(seen[-1].clean, 1e9), made)
    assert thumbnails.of(seen[-1].clean, 0.0).size == made.size


def test_the_linear_map_is_the_best_one_for_its_image(predictor: Predictor) -> None:
    found = colour_map(QWEN, predictor.parts).double()
    latents = QWEN.encode_images(predictor.parts, palette()[None])[0].double()
    points = torch.cat([latents, torch.ones_like(latents[:1])]).flatten(1).T
    colours = torch.nn.functional.avg_pool2d(palette()[None], 8)[0].double().flatten(1).T

    # Ridge regression as plain least squares with one more row for each weight.
    more = torch.cat([points, (RIDGE * len(points)) ** 0.5 * torch.eye(points.shape[1], dtype=torch.float64)])
    wanted = torch.linalg.lstsq(more, torch.cat([colours, torch.zeros(points.shape[1], 3, dtype=torch.float64)])).solution
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_large_latents_are_shrunken_to_a_thumbnails_size() -> None:
    assert shrunken(torch.randn(16, 128, 96)).shape == (16, 32, 24)
    assert shrunken(torch.randn(16, 8, 8)).shape == (16, 8, 8)
    assert shrunken(torch.full((16, 166, 92), 0.5)).unique().tolist() == [0.5]


def test_a_request_of_the_predictor_is_what_the_family_renders(predictor: Predictor) -> None:
    request = asked(size=(96, 64), true_cfg_scale=3.0)
    (preview,) = predictor.prepared(request)
    assert preview == Preview("make the circle red", "dull", 96, 64, request.seed, 3, 3.0, controls=preview.controls)
