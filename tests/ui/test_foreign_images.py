"""Images of other programs beside the form: what their PNG says, and which settings differ."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, PngImagePlugin
from playwright.sync_api import expect

from kohya_like.foreign_images import differences, read
from sd_scripts.library.core.protocols import Preview
from sd_scripts.library.render.sample import save_image
from sd_scripts.schema.errors import OptionError

LINE = (
    "a <lora:star-20:0.8> red star, (sharp:1.2)\nwith two lines\nNegative prompt: blurred, low\n"
    "Steps: 28, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 6.0, Seed: 7, Size: 512x768, Model hash: 0123456789, Model: base, "
    'Clip skip: 1, Lora hashes: "star-20: 0123456789", RNG: CPU, Version: v1.10.1'
)
GRAPH = {
    "3": {
        "class_type": "KSampler",
        "inputs": {
            "seed": 7,
            "steps": 28,
            "cfg": 6.0,
            "sampler_name": "euler_ancestral",
            "scheduler": "karras",
            "denoise": 1.0,
            "model": ["10", 0],
            "positive": ["12", 0],
            "negative": ["7", 0],
            "latent_image": ["5", 0],
        },
    },
    "4": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "models\\sub\\base.safetensors"}},
    "5": {"class_type": "EmptyLatentImage", "inputs": {"width": 512, "height": 768, "batch_size": 1}},
    "6": {"class_type": "CLIPTextEncode", "inputs": {"text": "a red star", "clip": ["10", 1]}},
    "7": {"class_type": "CLIPTextEncode", "inputs": {"text": "blurred", "clip": ["10", 1]}},
    "12": {"class_type": "Guidance", "inputs": {"guidance": 2.5, "conditioning": ["6", 0]}},
    "10": {
        "class_type": "LoraLoader",
        "inputs": {"lora_name": "star-20.safetensors", "strength_model": 0.8, "strength_clip": 1, "model": ["4", 0]},
    },
}
FORM = {
    "prompt": "a red star",
    "negative_prompt": "blurred",
    "steps": "28",
    "cfg_scale": "6",
    "sampler": "euler_a",
    "seed": "7",
    "size": "512,768",
}
BASE = {"pretrained_model_name_or_path": "/models/base.safetensors"}


def png(**texts: str) -> bytes:
    info, stream = PngImagePlugin.PngInfo(), io.BytesIO()
    for name, text in texts.items():
        info.add_itxt(name, text) if any(ord(letter) > 255 for letter in text) else info.add_text(name, text)
    Image.new("RGB", (512, 768)).save(stream, format="PNG", pnginfo=info)
    return stream.getvalue()


def unlike(data: bytes, texts: dict[str, str], loras: list[tuple[str, float]]) -> dict[str, tuple[str, str, str]]:
    rows = differences(read(data), texts, loras)
    return {row.setting: (row.theirs or row.there, row.ours or row.here, row.verdict) for row in rows if row.verdict != "same"}


def test_the_line_of_a1111_is_read_and_what_differs_is_listed() -> None:
    found = read(png(parameters=LINE))
    assert found.program == "A1111" and found.model == "base" and found.loras == [("star-20", 0.8)]
    assert found.values["prompt"] == "a  red star, (sharp:1.2)\nwith two lines" and found.values["negative_prompt"] == "blurred, low"
    form = {**FORM, **BASE, "prompt": "a red star, (sharp:1.2) with two lines", "negative_prompt": "blurred, low", "sampler": "dpmsolver++"}
    assert unlike(png(parameters=LINE), {**form, "scheduler": "auto"}, [("/runs/star-20.safetensors", 0.8)]) == {
        "scheduler": ("Karras", "auto", "differs")
    }
    assert unlike(png(parameters=LINE), {**form, "scheduler": "karras"}, [("/runs/star-20.safetensors", 0.8)]) == {}
    form |= {"cfg_scale": "5.5", "seed": "", "size": "768,512"}
    told = unlike(png(parameters=LINE.replace("RNG: CPU, ", "")), form, [("star-20", 1.0)])
    assert told["cfg_scale"] == ("6.0", "5.5", "differs") and told["seed"][1:] == ("drawn anew", "differs")
    assert told["LoRA files"] == ("star-20: 0.8", "star-20: 1", "differs") and {"size", "First noise"} <= told.keys()
    rows = differences(read(png(parameters=LINE)), form, [])
    assert [row.verdict for row in rows] == sorted((row.verdict for row in rows), key=("differs", "only there", "same").index)


@pytest.mark.parametrize(
    ("tag", "strength"),
    [
        ("<lora:a>", 1.0),
        ("<lora:a:0>", 0.0),
        ("<lora:a:-0.5>", -0.5),
        ("<lyco:a:0.5:0.7>", 0.7),
        ("<lora:a:te=0.5:unet=0.8>", 0.8),
        ("<lora:a:te=0.5>", 0.5),
        ("<lora:a:much>", 1.0),
    ],
)
def test_a_tag_s_strength_is_that_of_the_transformer(tag: str, strength: float) -> None:
    assert read(png(parameters=LINE.replace("<lora:star-20:0.8>", tag))).loras[0] == ("a", strength)


def test_a_file_of_which_the_line_has_the_hash_alone_is_listed_without_a_strength() -> None:
    data = png(parameters=LINE.replace("star-20: 0123456789", "star-20: 0123456789, detail, v2: 98765"))
    # A name with a comma is cut by who wrote the line.
    assert read(data).loras[0] == ("star-20", 0.8) and read(data).loras[-1] == ("v2", None)
    (row,) = (row for row in differences(read(data), FORM, [("star-20", 0.8)]) if row.setting == "LoRA files")
    assert (row.theirs, row.ours, row.verdict) == ("star-20: 0.8, v2: ?", "star-20: 0.8", "differs")
    (row,) = (row for row in differences(read(data), FORM, []) if row.setting == "LoRA files")
    assert (row.ours, row.here) == ("", "without any")


def test_what_the_page_says_of_settings_is_in_words_that_can_be_translated() -> None:
    rows = differences(read(png(parameters=LINE.replace("RNG: CPU, ", "Denoising strength: 0.5, "))), {"seed": "", "steps": "28"}, [])
    assert {row.label for row in rows} >= {"Prompt", "CFG scale", "Seed", "Base model", "LoRA files", "Denoising strength", "First noise"}
    # Values stand apart from words: a prompt that is one of our words stays a prompt.
    assert {row.setting: row.here for row in rows if row.setting in ("seed", "size")} == {
        "seed": "drawn anew",
        "size": "no such setting of this model",
    }


def test_comfyui_s_graph_is_read_through_its_nodes() -> None:
    data = png(prompt=json.dumps(GRAPH), workflow="{}")
    assert unlike(data, {**FORM, **BASE, "guidance": "2.5", "scheduler": "auto"}, [("star-20.safetensors", 0.8)]) == {
        "scheduler": ("karras", "auto", "differs")
    }
    told = unlike(data, {**FORM, **BASE, "prompt": "a blue star"}, [("star-20.safetensors", 0.8)])
    assert told["prompt"] == ("a red star", "a blue star", "differs")
    square = json.dumps({**GRAPH, "5": {"inputs": {"width": 64, "height": 64, "batch_size": 1}}})
    assert "size" not in unlike(png(prompt=square), {**FORM, "size": "64"}, [])
    assert told["guidance"] == ("2.5", "no such setting of this model", "only there")
    # Numbers that stand in nodes of their own, the first one through another; a size that a node computes is not known.
    apart = {"20": {"inputs": {"value": ["21", 0]}}, "21": {"inputs": {"value": 77}}, "22": {"inputs": {"value": 96}}, "23": {"inputs": {}}}
    noise = {**apart, "9": {"inputs": {"noise_seed": ["20", 0]}}, "5": {"inputs": {"width": ["22", 0], "height": 64, "batch_size": 1}}}
    assert read(png(prompt=json.dumps(noise))).values == {"seed": "77", "size": "96x64"}
    computed = {**noise, "5": {"inputs": {"width": ["23", 0], "height": 64, "batch_size": 1}}}
    assert read(png(prompt=json.dumps(computed))).values == {"seed": "77"}


def test_a_file_as_comfyui_itself_wrote_it_is_read() -> None:
    found = read((Path(__file__).parents[1] / "data" / "comfyui" / "saved.png").read_bytes())
    assert (found.program, found.model, found.loras) == ("ComfyUI", "sub/zimage-base.safetensors", [("star-20.safetensors", 0.8)])
    told = {"steps": "9", "cfg_scale": "1", "sampler": "dpmpp_2m", "scheduler": "sgm_uniform", "shift": "3", "seed": "7", "size": "64x96"}
    assert {name: found.values[name] for name in told} == told and found.values["prompt"] == "ein roter Stern ★"
    form = {**told, "sampler": "dpmsolver++", "prompt": "ein roter Stern ★", "negative_prompt": found.values["negative_prompt"]}
    same = differences(found, {**form, "pretrained_model_name_or_path": "zimage-base.safetensors"}, [("star-20", 0.8)])
    assert all(row.verdict == "same" for row in same), same


def test_what_this_program_saves_is_read_back_the_same(tmp_path: Path) -> None:
    request = Preview("ein roter Stern ★", "low", 64, 96, 9, 12, 5.5, "heun", 3.5, (), "karras", 2.5)
    save_image(Image.new("RGB", (64, 96)), tmp_path / "made.png", request, "base")
    form = {
        "prompt": "ein roter Stern ★",
        "negative_prompt": "low",
        "steps": "12",
        "cfg_scale": "5.5",
        "sampler": "heun",
        "seed": "9",
        "size": "64,96",
        "scheduler": "karras",
        "shift": "2.5",
    }
    assert unlike((tmp_path / "made.png").read_bytes(), {**form, **BASE}, []) == {}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"nothing", "no PNG that can be read"),
        (png()[:60], "does not say how it was made|no PNG"),
        (png(), "does not say how it was made"),
        (png(prompt="{", parameters="a star"), "does not say how it was made"),
        (png(prompt='{"1": 3, "2": {"inputs": 4}}'), "does not say how it was made"),
    ],
)
def test_what_tells_nothing_is_a_sentence(data: bytes, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        read(data)


@pytest.mark.browser
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_the_page_lists_what_differs(studio: Any, visit: Callable[..., Any], tmp_path: Path, width: int, theme: str) -> None:
    page = visit(studio.url, width=width, height=844, theme=theme).page
    page.get_by_role("tab", name="Generate").click()
    page.get_by_text("Why does it look different?").click()
    page.locator("#kl-inf-why").set_input_files({"name": "theirs.png", "mimeType": "image/png", "buffer": png(prompt=json.dumps(GRAPH))})
    told = page.locator(".kl-inf-told")
    expect(told).to_contain_text("Made by ComfyUI.")
    expect(told.locator("tr", has_text="LoRA files")).to_contain_text("star-20: 0.8")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    told.scroll_into_view_if_needed()
    page.screenshot(path=tmp_path / f"why-{width}.png")
    page.locator("#kl-inf-why").set_input_files({"name": "plain.png", "mimeType": "image/png", "buffer": png()})
    expect(told.get_by_role("alert")).to_contain_text("does not say how it was made")
