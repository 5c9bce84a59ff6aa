"""Drawing with what a run saved gives its preview and diffusers' own image; files tell what they are, and mistakes are sentences."""

from __future__ import annotations

import errno
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import diffusers
import diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus as plus
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sd_scripts import families
from sd_scripts.families import FACTS, RUNS
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.files import export
from sd_scripts.library.core.protocols import Preview
from sd_scripts.library.render.predict import Predictor
from sd_scripts.library.render.predicting.orders import order_of
from sd_scripts.library.render.predicting.work import Workbench, failed, request_of
from sd_scripts.library.render.renderer import Renderer
from sd_scripts.runs import drawing
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.generate import FAMILIES, generate_options
from tests.anima_in_diffusers import FolderPipeline
from tests.library.families.test_flux3_family import drawn as blocks_drawn
from tests.library.families.test_flux3_family import pipeline_of as blocks_of
from tests.library.families.test_qwen_edit_family import three_axes
from tests.library.networks.adapters_in_small import shaken
from tests.small_models import Words, qwen_pipeline_of

DRAW = np.random.default_rng(random.getrandbits(64))
SCHEDULERS = {
    "euler": diffusers.EulerDiscreteScheduler,
    "heun": diffusers.HeunDiscreteScheduler,
    "dpmsolver++": diffusers.DPMSolverMultistepScheduler,
    "dpm_2": diffusers.KDPM2DiscreteScheduler,
    "lms": diffusers.LMSDiscreteScheduler,
}
"""Samplers that draw no noise, and diffusers' own."""
ADAPTED = [name for name in FAMILIES if (name, "network") in RUNS]
WORDS, AWAY = "a red star", "a line"


@contextmanager
def decoding(vae: Any) -> Iterator[list[torch.Tensor]]:
    """What the VAE is given to decode within the block, in the scale that the network works in; apart from a shift, where it has one."""
    found: list[torch.Tensor] = []
    own = vae.decode

    def decode(latents: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        found.append(latents.clone() * getattr(vae.config, "scaling_factor", 1.0))
        return own(latents, *arguments, **named)

    vae.decode = decode
    try:
        yield found
    finally:
        del vae.decode


def latents_of(renderer: Renderer, request: Preview) -> torch.Tensor:
    with decoding(renderer.parts.vae) as found:
        renderer.render([request])
    return found[0]


def control(folder: Path) -> str:
    path = folder / "control.png"
    Image.fromarray(DRAW.integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(path)
    return str(path)


def on_a_noise_schedule(name: str) -> bool:
    """Whether a family takes diffusers' schedulers; those of flow matching take samplers of ComfyUI, which its own recordings judge."""
    options = flat.fields(generate_options(name))
    return "sampler" in options and set(SCHEDULERS) <= set(options["sampler"].choices)


class Trained:
    """A run folder with a LoRA in it, the base that it was trained on, and the network that wrote it, still attached."""

    def __init__(self, name: str, folder: Path, layout: str = "diffusers") -> None:
        self.family, self.base = families.family(name), folder / "base"
        self.family.save(self.family.tiny(), self.base, "diffusers", None, {})
        kind = RUNS[name, "network"]
        model = {"pretrained_model_name_or_path": str(self.base)}
        values = {**model, "train_data_dir": str(folder), "output_dir": str(folder), "resolution": 64, "sample_steps": 3}
        values |= {"sample_cfg_scale": 2.0, "sample_negative_prompt": AWAY, "output_name": "star", "save_model_as": layout}
        values |= {"network_dim": 4, "seed": int(DRAW.integers(2**31))}
        if self.family.num_controls(self.family.tiny())[1] == 0:
            values["sample_prompts"] = WORDS
        self.options = flat.build(kind, values)
        self.run = RunDirectory.create(folder / "runs", "star", self.options)
        self.parts = self.family.load(self.options.model, torch.device("cpu"), torch.float32)
        network = self.options.network
        self.network = shaken(attach(self.parts, network, self.family.adapter_targets(self.parts, network.wants_convolutions), 0))
        self.file = self.run.path / "star.safetensors"
        export(self.network, self.parts, self.file, save_model_as=layout, precision="float")


def asked(trained: Trained, folder: Path) -> dict[str, Any]:
    given: dict[str, Any] = {"draw_with": str(trained.run.path), "prompt": WORDS, "seed": 5}
    return given | ({"images": [control(folder)]} if trained.family.num_controls(trained.parts)[0] else {})


def check_equal(name: str, folder: Path, sampler: str = "auto") -> None:
    trained = Trained(name, folder)
    given = asked(trained, folder) | ({} if sampler == "auto" else {"sampler": sampler})
    order = order_of(drawing.completed, {"id": "a", **given}, {})
    predictor = Predictor.load(order.options)
    (request,) = predictor.prepared(request_of(order))
    assert (request.prompt, request.negative_prompt, request.steps, request.cfg_scale) == (WORDS, AWAY, 3, 2.0)
    assert (request.width, request.height, request.seed) == (64, 64, 5)
    predictor.adapters.put_on(order.variants[0].lora, order.variants[0].lora_weight)
    drawn = latents_of(predictor.renderer, request)
    preview = latents_of(Renderer(trained.family, trained.parts), request)
    torch.testing.assert_close(drawn, preview, rtol=1e-4, atol=1e-4)
    trained.network.detach()
    assert (latents_of(Renderer(trained.family, trained.parts), request) - drawn).abs().max() > 0.01, "the LoRA is on"
    torch.testing.assert_close(drawn, by_diffusers(name, trained, request), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def by_diffusers(name: str, trained: Trained, request: Preview) -> torch.Tensor:
    """The same by diffusers alone: its pipeline, its reader of LoRA files. Guidance is called differently there."""
    if name == "flux3":
        pipeline = blocks_of(trained.family.load(trained.options.model, torch.device("cpu"), torch.float32), request.cfg_scale)
        pipeline.load_lora_weights(trained.file)
        with decoding(pipeline.vae) as found:
            blocks_drawn(pipeline, request)
        return found[0]
    if name == "qwen_edit":
        # Its processor cannot be read from a folder without torchvision, and it forgets to tell which tokens are images.
        parts = trained.family.load(trained.options.model, torch.device("cpu"), torch.float32)
        pipeline, axes = qwen_pipeline_of(parts), three_axes(parts)
    else:
        # What reads with Qwen3-VL has a processor that cannot be read from a folder without torchvision either.
        own = {"processor": Words(trained.parts.tokenizers["te1"])} if name == "qwen_image21" else {}
        pipeline = FolderPipeline(trained.base) if name == "anima" else DiffusionPipeline.from_pretrained(trained.base, **own)
        axes = nullcontext()
    if request.sampler != "auto":
        pipeline.scheduler = SCHEDULERS[request.sampler].from_config(pipeline.scheduler.config)
    pipeline.load_lora_weights(trained.file)
    pipeline.set_progress_bar_config(disable=True)
    called: dict[str, Any] = {
        "flux": {"true_cfg_scale": request.cfg_scale, "guidance_scale": request.guidance, "max_sequence_length": 32},
        "kontext": {
            "true_cfg_scale": request.cfg_scale,
            "guidance_scale": request.guidance,
            "max_sequence_length": 32,
            "max_area": request.width * request.height,
            "image": list(request.controls) or None,
        },
        "qwen_edit": {"true_cfg_scale": request.cfg_scale, "image": list(request.controls)},
        "qwen_image21": {"true_cfg_scale": request.cfg_scale},
        "krea2": {"guidance_scale": request.cfg_scale - 1},
        "zimage": {"guidance_scale": request.cfg_scale - 1, "sigmas": [1 - step / request.steps for step in range(request.steps)]},
    }
    words: dict[str, Any] = {"prompt": request.prompt, "negative_prompt": request.negative_prompt}
    if name == "chroma":
        # The pipeline's own mask hides nothing; where nothing is to be hidden that is the same in both.
        texts = [one["t5"][None] for one in trained.family.encode_prompts(trained.parts, list(words.values()))]
        words = {"prompt_embeds": texts[0], "negative_prompt_embeds": texts[1]}
        words |= {name.replace("embeds", "attention_mask"): torch.ones(text.shape[:2]).bool() for name, text in list(words.items())}
    if name == "flux2":
        # It has no negative prompt but the empty one, and wants another in rows.
        (away,) = trained.family.encode_prompts(trained.parts, [words.pop("negative_prompt")])
        words |= {"negative_prompt_embeds": away["text"][None], "image": list(request.controls) or None}
        words |= {"max_sequence_length": trained.parts.settings["max_token_length"], "text_encoder_out_layers": (1, 2, 3)}
    with decoding(pipeline.vae) as found, pytest.MonkeyPatch.context() as patch, axes:
        patch.setattr(plus, "VAE_IMAGE_SIZE", 64 * 64)
        pipeline(
            **words,
            width=request.width,
            height=request.height,
            num_inference_steps=request.steps,
            generator=torch.Generator().manual_seed(request.seed),
            **called.get(name, {"guidance_scale": request.cfg_scale}),
        )
    return found[0]


def test_what_is_drawn_with_a_saved_lora_is_its_preview_and_diffusers_own(tmp_path: Path) -> None:
    check_equal("sdxl", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ADAPTED if name != "sdxl"])
def test_the_same_with_every_family(name: str, tmp_path: Path) -> None:
    check_equal(name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("sampler", SCHEDULERS)
@pytest.mark.parametrize("name", [name for name in ADAPTED if on_a_noise_schedule(name)])
def test_samplers_by_name_are_diffusers_own_from_the_saved_file(name: str, sampler: str, tmp_path: Path) -> None:
    check_equal(name, tmp_path, sampler)


# Whole models.


def saved_by_a_full_run(name: str, folder: Path) -> tuple[Path, Any]:
    """A run that trained a whole model, with the file that it saved, and the networks in that file."""
    family, base = families.family(name), folder / "base"
    family.save(family.tiny(), base, "diffusers", None, {})
    given = {"train_data_dir": str(folder), "output_dir": str(folder), "resolution": 64, "sample_steps": 2, "output_name": "whole"}
    options = flat.build(RUNS[name, "full"], {"pretrained_model_name_or_path": str(base), **given})
    run, parts = RunDirectory.create(folder / "runs", "whole", options), family.tiny()
    with torch.no_grad():
        for weight in parts.backbone.parameters():
            weight += 0.02 * torch.randn(weight.shape)
    # A single file of a family that has all networks in it is read with the published sizes.
    layout = "diffusers" if FACTS[name].whole_files else "safetensors"
    family.save(parts, run.path / ("whole" if layout == "diffusers" else "whole.safetensors"), layout, torch.float32, {})
    return run.path, parts


def check_whole(name: str, folder: Path) -> None:
    run, parts = saved_by_a_full_run(name, folder)
    for what in (run, *run.glob("whole*")):
        given = {"draw_with": str(what), "prompt": WORDS, "seed": 1, "cfg_scale": 2}
        predictor = Predictor.load(drawing.completed(given))
        (request,) = predictor.prepared(request_of(order_of(drawing.completed, {"id": "a", **given}, {})))
        found = latents_of(predictor.renderer, request)
        torch.testing.assert_close(found, latents_of(Renderer(families.family(name), parts), request), rtol=1e-4, atol=1e-4)


def test_a_model_that_was_trained_whole_is_drawn_with(tmp_path: Path) -> None:
    check_whole("flux", tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in FAMILIES if (name, "full") in RUNS and name != "flux"])
def test_every_familys_whole_model_is_drawn_with(name: str, tmp_path: Path) -> None:
    check_whole(name, tmp_path)


def test_a_model_that_its_run_made_is_drawn_with_by_its_file_alone(tmp_path: Path) -> None:
    family = families.family("ddpm")
    parts, request = family.tiny(), Preview(WORDS, "", 64, 64, 4, 3, 2.0, "ddim")
    told = {"kohya_like.config": json.dumps({"script": "ddpm_train.py"})}
    family.save(parts, tmp_path / "made.safetensors", "safetensors", torch.float32, told)
    options = drawing.completed({"draw_with": str(tmp_path / "made.safetensors"), "prompt": WORDS, "seed": 4, "steps": 3, "cfg_scale": 2})
    predictor = Predictor.load(options)
    (prepared,) = predictor.prepared(request_of(order_of(lambda _: options, {"id": "a"}, {})))
    assert prepared == request
    torch.testing.assert_close(latents_of(predictor.renderer, prepared), latents_of(Renderer(family, parts), request))


# The files, what is in them, and what is wrong.


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained("sdxl", tmp_path_factory.mktemp("trained"), "kohya")


def drawn(bench: Workbench, cancelled: Any = lambda: False, **given: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    bench.carry_out(order_of(drawing.completed, {"id": "a", **given}, {}), events.append, cancelled)
    return events


def test_a_run_draws_the_prompts_of_its_previews_with_all_settings_in_the_file(trained: Trained, tmp_path: Path) -> None:
    events = drawn(Workbench(), draw_with=str(trained.run.path), out=str(tmp_path / "out"))
    (file,) = events[-1]["files"]
    with Image.open(file) as image:
        text: dict[str, Any] = dict(image.text)  # type: ignore[attr-defined]
    lines = text["parameters"].splitlines()
    assert lines[:2] == [WORDS, f"Negative prompt: {AWAY}"]
    seed = trained.options.training.seed
    assert f"Steps: 3, Sampler: auto, CFG scale: 2.0, Seed: {seed}, Size: 64x64, Model: base" in lines[2] and "star:" in lines[2]
    told = json.loads(text["request"])
    assert told["prompt"] == WORDS and told["adapters"][0]["name"] == "star.safetensors" and told["seed"] == seed
    assert str(tmp_path) not in json.dumps(text)
    wanted = Renderer(trained.family, trained.parts).render([Preview(WORDS, AWAY, 64, 64, seed, 3, 2.0)])[0]
    with Image.open(file) as image:
        assert np.abs(np.asarray(image).astype(int) - np.asarray(wanted).astype(int)).max() <= 1


def test_a_list_of_prompts_has_its_own_sizes_seeds_and_samplers(trained: Trained, tmp_path: Path) -> None:
    lines = "a cat --w 96 --h 64 --d 7 --s 2 --ss ddim --l 1\n# nothing\na dog --n blue"
    events = drawn(Workbench(), draw_with=str(trained.file), prompt_list=lines, seed=40, num_images=2, out=str(tmp_path))
    made = []
    for file in events[-1]["files"]:
        with Image.open(file) as image:
            made.append((*image.size, *(json.loads(image.text["request"])[key] for key in ("seed", "sampler", "prompt"))))  # type: ignore[attr-defined]
    assert made == [
        (96, 64, 7, "ddim", "a cat"),
        (96, 64, 8, "ddim", "a cat"),
        (64, 64, 41, "auto", "a dog"),
        (64, 64, 42, "auto", "a dog"),
    ]
    wrong = drawn(Workbench(), draw_with=str(trained.file), prompt_list="a cat --w 65 --zz 1", out=str(tmp_path))
    assert wrong[-1]["event"] == "failed" and "prompt_list: line 1: there is no flag --zz" in wrong[-1]["text"]


def test_strengths_count_and_further_files_are_added(trained: Trained) -> None:
    more = drawing.completed({"draw_with": str(trained.run.path), "lora": [str(trained.file)], "lora_weight": [0.5, -1], "prompt": "x"})
    assert more.loading.lora == (str(trained.file),) * 2 and more.loading.lora_weight == (0.5, -1)
    plain = drawing.completed({"pretrained_model_name_or_path": str(trained.base), "prompt": "x", "steps": 4})
    assert plain.family == "sdxl" and plain.loading.lora == () and plain.predict.steps == 4


def test_a_file_apart_from_its_run_still_tells_family_and_settings(trained: Trained, tmp_path: Path) -> None:
    settings = {"script": "sdxl_train_network.py", "pretrained_model_name_or_path": "toy", "max_token_length": 150, "sample_steps": 7}
    file = tmp_path / "alone.safetensors"
    export(
        trained.network, trained.parts, file, save_model_as="kohya", precision="float", metadata={"kohya_like.config": json.dumps(settings)}
    )
    found = drawing.completed({"draw_with": str(file), "prompt": "x"})
    assert (found.family, found.model.pretrained_model_name_or_path, found.predict.steps) == ("sdxl", "toy", 7)
    assert found.model.model_dump()["max_token_length"] == 150 and found.loading.lora == (str(file),)


def test_cancelling_ends_between_two_steps_with_any_family(trained: Trained, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    order = order_of(drawing.completed, {"id": "a", "draw_with": str(trained.run.path), "steps": 50, "out": str(tmp_path)}, {})
    Workbench().carry_out(order, events.append, lambda: sum(event["event"] == "step" for event in events) == 2)
    assert [event["event"] for event in events][-3:] == ["step", "step", "cancelled"]
    assert all(event["preview"].startswith("data:image/jpeg") for event in events if event["event"] == "step")


def test_a_full_disk_is_a_sentence_and_leaves_no_half_file(trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: Any, **_named: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x.png"))

    monkeypatch.setattr(Image.Image, "save", full)
    last = drawn(Workbench(), draw_with=str(trained.run.path), out=str(tmp_path), preview_every=0)[-1]
    assert last["event"] == "failed" and "the disk is full" in last["text"] and "free some space" in last["advice"]
    assert list(tmp_path.iterdir()) == []
    assert "no memory" not in failed("a", OSError(errno.EACCES, "denied"))["text"]


def test_an_image_of_no_numbers_is_a_sentence_and_never_a_black_file(trained: Trained, tmp_path: Path) -> None:
    tensors, broken, huge = load_file(trained.file), tmp_path / "broken.safetensors", tmp_path / "huge.safetensors"
    with safe_open(trained.file, "pt") as header:
        texts = header.metadata()
    name = next(key for key, tensor in tensors.items() if tensor.ndim > 1)
    save_file({key: tensor * 1e30 for key, tensor in tensors.items()}, huge, texts)
    tensors[name].view(-1)[3] = math.nan
    save_file(tensors, broken, texts)
    common = {"pretrained_model_name_or_path": str(trained.base), "prompt": "x", "steps": 2, "out": str(tmp_path / "made")}
    bench = Workbench()
    for lora, option, words in (
        (broken, "lora", "broken.safetensors holds values that are no finite numbers"),
        (huge, "precision", "the values of this image are no finite numbers"),
    ):
        last = drawn(bench, **common, lora=[str(lora)])[-1]
        assert last["event"] == "failed" and words in last["text"] and last["problems"][0]["option"] == option, last
    assert not list(tmp_path.glob("made/*.png"))
    assert drawn(bench, **common, lora=[str(trained.file)])[-1]["event"] == "done"


@pytest.mark.parametrize(
    ("given", "option", "words"),
    [
        ({"draw_with": "{folder}/nowhere.safetensors"}, "draw_with", "there is no file or folder"),
        ({"draw_with": "toy"}, "family", "give one of sdxl"),
        ({"draw_with": "toy", "family": "ddpm"}, "draw_with", "there is no built-in toy of ddpm"),
        ({"draw_with": "toy", "family": "lgt"}, "family", "lgt is none that draws from a prompt"),
        ({"draw_with": "{base}", "lora": ["{other}"]}, "lora", "other.safetensors is for FLUX, but draw_with is for SDXL"),
        ({"draw_with": "{base}", "lora": ["{damaged}"]}, "lora", "damaged.safetensors"),
        ({"draw_with": "{damaged}"}, "draw_with", "damaged.safetensors ends within its header"),
        ({"draw_with": "{base}", "family": "flux"}, "family", "is for FLUX, but draw_with is for SDXL"),
        ({"draw_with": "{empty}"}, "draw_with", "has saved nothing yet"),
        ({"pretrained_model_name_or_path": "{other}"}, "pretrained_model_name_or_path", "is a LoRA file, not a base model"),
        ({"draw_with": "{other}"}, "draw_with", "draw_with is missing"),
        ({"draw_with": "{base}", "prompt": " "}, "prompt", "prompt is missing"),
        ({"draw_with": "{base}", "sampler": "eular"}, "sampler", "Did you mean euler"),
    ],
)
def test_what_is_wrong_is_a_sentence_at_its_option(
    given: dict[str, Any], option: str, words: str, trained: Trained, tmp_path: Path
) -> None:
    flux, empty = families.family("flux"), RunDirectory.create(tmp_path, "empty", trained.options)
    parts, other, damaged = flux.tiny(), tmp_path / "other.safetensors", tmp_path / "damaged.safetensors"
    network = attach(parts, RUNS["flux", "network"].model_fields["network"].default, flux.adapter_targets(parts, False), 0)
    export(network, parts, other, save_model_as="kohya", precision="float")
    damaged.write_bytes(trained.file.read_bytes()[:200])
    places = {"base": trained.base, "other": other, "damaged": damaged, "empty": empty.path, "folder": tmp_path}
    filled = {
        key: [one.format(**places) for one in value] if isinstance(value, list) else value.format(**places) for key, value in given.items()
    }
    with pytest.raises(OptionError) as err:
        drawing.completed({"prompt": "x", **filled})
    assert words in str(err.value)
    assert option in {problem.option for problem in err.value.problems}, err.value.problems
