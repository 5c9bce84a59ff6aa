"""Every family and method as a real process: it can be killed and resumed, and what it saves does what its preview showed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file

from sd_scripts import families
from sd_scripts.families import RUNS
from sd_scripts.families.common.images import as_images
from sd_scripts.families.lgt import transfer as lgt_transfer
from sd_scripts.families.lgt.evaluation import QUALITY
from sd_scripts.families.lgt.model import Lgt
from sd_scripts.families.lgt.options import LgtDatasetOptions, LgtModelOptions, LgtSampleOptions
from sd_scripts.library.adapters.merge import merge_into
from sd_scripts.library.core.protocols import Preview
from sd_scripts.library.data.views import see_file
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema import flat
from tests.anima_in_diffusers import FolderPipeline
from tests.library.families.test_flux3_family import drawn as blocks_drawn
from tests.library.families.test_flux3_family import read_by_diffusers as blocks_read
from tests.runs.conftest import Runs
from tests.runs.together import trained_together
from tests.small_models import Words

PREVIEW = Preview("image 3, tag1", "", 64, 64, 7, 4, 1.0)
KINDS = list(RUNS)
SHARDED = [("flux", "network"), ("qwen_edit", "network"), ("zimage", "network")]
LONG = pytest.mark.long
EDITING = ("qwen_edit", "flux2", "flux2_dev", "flux3", "kontext", "qwen_image21")


@pytest.fixture
def kind(request: pytest.FixtureRequest, runs: Runs, tiny_bases: dict[str, Path], pairs: Path, styles: Path) -> Runs:
    return of_kind(runs, request.param, tiny_bases, pairs, styles)


def of_kind(runs: Runs, kind: tuple[str, str], tiny_bases: dict[str, Path], pairs: Path, styles: Path) -> Runs:
    """Runs of one kind; editing families get pairs of images, style transfer folders of styles."""
    runs.family, runs.method = kind
    runs.base = tiny_bases[runs.family] if runs.method != "scratch" else runs.base
    runs.images = {**dict.fromkeys(EDITING, pairs), "lgt": styles}.get(runs.family, runs.images)
    return runs


def control(kind: Runs) -> Path | None:
    """The image that previews of an editing family edit."""
    path = kind.images / "control" / "p03.png"
    return path if kind.family in EDITING and path.is_file() else None


def control_flag(kind: Runs) -> str:
    return f" --ci {control(kind)}" if control(kind) else ""


def preview_of(kind: Runs) -> Preview:
    """The preview that runs of this kind render."""
    path = control(kind)
    return replace(PREVIEW, controls=(Image.open(path).convert("RGB"),)) if path else PREVIEW


def ambitious(kind: Runs) -> dict[str, Any]:
    """Text encoders trained where they can be, an average, previews, several saves."""
    options: dict[str, Any] = {
        "max_train_steps": 6,
        "save_every_n_steps": 2,
        "learning_rate": 3e-2 if kind.method == "network" else 1e-3,
        "use_ema": True,
        "save_precision": "float",
        "sample_at_first": None,
        "output_name": "trained",
    }
    if kind.family in EDITING[1:]:
        options["control_resolution"] = 64
    if kind.family == "lgt":
        options |= {"sample_steps": 1, "sample_sampler": "euler", "ode_integration_steps": 2, "caption_dropout_rate": 0.2}
    else:
        options["sample_prompts"] = f"{PREVIEW.prompt} --w 64 --h 64 --s {PREVIEW.steps} --l 1 --d {PREVIEW.seed}{control_flag(kind)}"
    if "sample_guidance_scale" in flat.fields(RUNS[kind.family, kind.method]):
        options["sample_guidance_scale"] = PREVIEW.guidance
    if "train_text_encoder" in flat.fields(RUNS[kind.family, kind.method]):
        options |= {"train_text_encoder": True, "no_cache_text_encoder_outputs": True}
    return options


def saved(kind: Runs, run: RunDirectory) -> Path:
    found = [path for path in (run.path / "trained.safetensors", run.path / "trained") if path.exists()]
    assert len(found) == 1
    return found[0]


@pytest.fixture(scope="module")
def undisturbed(
    tiny_bases: dict[str, Path], images: Path, pairs: Path, styles: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[tuple[str, str]], RunDirectory]:
    """The run of a kind with ambitious options that is left alone, trained when it is first asked for."""

    @functools.cache
    def trained(kind: tuple[str, str]) -> RunDirectory:
        runs = Runs(Path(), images, tmp_path_factory.mktemp("-".join(kind)) / "out")
        run = of_kind(runs, kind, tiny_bases, pairs, styles)
        return run.train(**ambitious(run))

    return trained


KILLED = [("zimage", "full"), ("ddpm", "scratch")]
"""The methods besides a network, which test_runs_killed kills at more moments on sdxl, as it does lgt."""


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[LONG] * (kind not in KILLED)) for kind in KINDS], indirect=True, ids="/".join)
def test_a_killed_run_of_every_kind_continues_to_the_same_bytes(kind: Runs, undisturbed: Callable[[tuple[str, str]], RunDirectory]) -> None:
    options, alone = ambitious(kind), undisturbed((kind.family, kind.method))
    kind.killed("a step", random.randint(1, 4), **options)
    run = kind.train(**options)
    assert len(kind.folders()) == 1, "the second start continues the folder of the first"
    assert saved(kind, run).read_bytes() == saved(kind, alone).read_bytes()
    losses = {event["step"]: event["loss"] for event in run.events()[0] if event["kind"] == "step"}
    assert sorted(losses) == list(range(1, 7)) and all(np.isfinite(list(losses.values())))


def pixels(image: Image.Image) -> np.ndarray:
    """What is transparent stands on white."""
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"), dtype=np.int16)


# The other method of seven families, each of which is here with one of both.
OTHERS = [("sd", "network"), ("sdxl", "full"), ("flux", "full"), ("zimage", "network"), ("chroma", "network"), ("flux2", "full")]
OTHERS += [("kontext", "full"), ("anima", "full"), ("flux3", "full")]


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[LONG] * (kind in OTHERS)) for kind in KINDS], indirect=True, ids="/".join)
def test_the_saved_file_of_every_kind_gives_the_image_of_the_last_preview(
    kind: Runs, undisturbed: Callable[[tuple[str, str]], RunDirectory], tmp_path: Path
) -> None:
    run = undisturbed((kind.family, kind.method))
    if kind.family == "lgt":
        check_transfers(kind, run, tmp_path)
        return
    shown = pixels(Image.open(run.samples / "trained-000006-00.png"))
    family, file = families.family(kind.family), saved(kind, run)
    model = run.options().model
    if kind.method == "scratch":
        before = pixels(Image.open(run.samples / "trained-000000-00.png"))
    else:
        before = pixels(family.preview(family.load(model, CPU, torch.float32), [preview_of(kind)])[0])
    assert np.abs(shown - before).max() > 3, "the run changed nothing that can be seen"

    if kind.method == "scratch":
        parts = family.load(type(model)(pretrained_model_name_or_path=str(file)), CPU, torch.float32)
    elif kind.method == "network":
        parts = family.load(model, CPU, torch.float32)
        assert merge_into(parts, file) > 0
    else:
        # The original layout of a small model needs its configurations beside it, as single files of odd models do.
        parts = family.load(model.model_copy(update=_as_base(kind, file)), CPU, torch.float32)
    again = pixels(family.preview(parts, [preview_of(kind)])[0])
    assert np.abs(again - shown).max() <= 1, "the saved file shows another image than the preview"


def check_transfers(kind: Runs, run: RunDirectory, folder: Path) -> None:
    """What the saved file makes of a source has the bytes of the last evaluation's image, which is not the first one's."""
    options, pair = run.options(), "dark_to_striped.jpg"
    assert isinstance(options.dataset, LgtDatasetOptions) and isinstance(options.samples, LgtSampleOptions)
    parts = LGT.load(LgtModelOptions(pretrained_model_name_or_path=str(saved(kind, run))), CPU, torch.float32)
    source = min((kind.images / "dark").iterdir())
    latents = LGT.encode_images(parts, see_file(str(source), options.dataset)[None])
    settings = lgt_transfer.Settings(steps=1, sampler="euler")
    made = as_images(LGT.decode(parts, lgt_transfer.transfer(LGT, parts, latents, ["dark"], ["striped"], [0], settings)))[0]
    made.save(folder / pair, quality=QUALITY)
    assert (folder / pair).read_bytes() == (run.inference / "epoch_0000_step_000006" / pair).read_bytes()
    first = run.inference / "epoch_0000" / pair
    assert np.abs(pixels(Image.open(folder / pair)) - pixels(Image.open(first))).max() > 3, "the run changed nothing that can be seen"


CPU = torch.device("cpu")
LGT = Lgt()


def _as_base(kind: Runs, file: Path) -> dict[str, str]:
    """Options that read a saved single file as a base model: beside the configurations of the tiny one, with the parts it does not hold."""
    target = kind.base / file.name
    target.write_bytes(file.read_bytes())
    own = {
        "flux": {"ae": "vae", "clip_l": "text_encoder", "t5xxl": "text_encoder_2"},
        "kontext": {"ae": "vae", "clip_l": "text_encoder", "t5xxl": "text_encoder_2"},
        "zimage": {"vae": "vae", "text_encoder": "text_encoder"},
        "chroma": {"ae": "vae", "t5xxl": "text_encoder"},
        "flux2": {"vae": "vae", "text_encoder": "text_encoder"},
        "flux2_dev": {"vae": "vae", "text_encoder": "text_encoder"},
        "flux3": {"vae": "vae", "text_encoder": "text_encoder"},
        "krea2": {"vae": "vae", "text_encoder": "text_encoder"},
        "anima": {"vae": "vae", "text_encoder": "text_encoder"},
        "qwen_image21": {"vae": "vae", "text_encoder": "text_encoder"},
    }
    parts = own.get(kind.family, {})
    return {"pretrained_model_name_or_path": str(target), **{option: str(kind.base / folder) for option, folder in parts.items()}}


# Of the families whose whole models have no run above.
FOLDERS = [family for family, method in OTHERS if method == "full"]


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[LONG] * (family not in FOLDERS)) for family, method in KINDS if method == "full"]
)
def test_a_saved_folder_is_a_diffusers_pipeline_with_the_same_image(family: str, runs: Runs, tiny_bases: dict[str, Path]) -> None:
    runs.family, runs.method, runs.base = family, "full", tiny_bases[family]
    run = runs.train(**ambitious(runs) | {"save_model_as": "diffusers"})
    made = families.family(family)
    parts = made.load(run.options().model.model_copy(update={"pretrained_model_name_or_path": str(saved(runs, run))}), CPU, torch.float32)
    if family == "flux3":
        # Blocks that are put together, with the networks that diffusers reads from the folder.
        shown = pixels(Image.open(run.samples / "trained-000006-00.png"))
        assert np.abs(pixels(as_images(blocks_drawn(blocks_read(saved(runs, run), parts), PREVIEW))[0]) - shown).max() <= 1
        return
    # Its processor cannot be read without torchvision.
    given = {"processor": Words(parts.tokenizers["te1"])} if family == "qwen_image21" else {}
    if family == "anima":
        pipeline = FolderPipeline(saved(runs, run))
    else:
        pipeline = DiffusionPipeline.from_pretrained(saved(runs, run), local_files_only=True, dtype=torch.float32, **given)
    pipeline.set_progress_bar_config(disable=True)
    shown = pixels(Image.open(run.samples / "trained-000006-00.png"))
    assert np.abs(pixels(made.preview(parts, [PREVIEW])[0]) - shown).max() <= 1
    own: dict[str, Any] = {"prompt": PREVIEW.prompt}
    if family in ("flux", "kontext"):
        # The tiny T5 knows fewer positions than the pipeline's default asks for.
        own |= {"max_sequence_length": parts.settings["t5xxl_max_token_length"], "guidance_scale": PREVIEW.guidance}
    # Z-Image's pipeline counts guidance from 0.
    scale = {
        "zimage": {"guidance_scale": 0.0},
        "qwen_image21": {"true_cfg_scale": 1.0},
        "flux2_dev": {"guidance_scale": PREVIEW.guidance},
    }.get(family, {"guidance_scale": 1.0})
    if family in ("flux2", "flux2_dev"):
        # The tiny encoder has fewer layers and positions.
        own |= {"text_encoder_out_layers": (1, 2, 3), "max_sequence_length": parts.settings["max_token_length"]}
    if family == "kontext":
        # It draws images of a million pixels unless it is told another area.
        own |= {"max_area": PREVIEW.width * PREVIEW.height}
    if family == "chroma":
        # Its pipeline hides no padding, so it is told the tokens that count.
        text = made.encode_prompts(parts, [PREVIEW.prompt])[0]["t5"][None]
        own |= {"prompt": None, "prompt_embeds": text, "prompt_attention_mask": torch.ones(text.shape[:2])}
    theirs = pipeline(
        width=64,
        height=64,
        num_inference_steps=PREVIEW.steps,
        generator=torch.Generator().manual_seed(PREVIEW.seed),
        output_type="pil",
        **(scale | own),
    ).images[0]
    assert np.abs(pixels(theirs) - shown).max() <= 1


@pytest.mark.parametrize(
    "kind",
    [
        # An adapter is compared in test_runs_processes and below, and a whole model in test_runs_sharded, both sharded.
        ("lgt", "scratch"),
        *(pytest.param(kind, marks=LONG) for kind in (("ddpm", "scratch"), ("sd", "full"), ("flux", "full"), *SHARDED)),
    ],
    indirect=True,
    ids="/".join,
)
def test_two_processes_train_what_one_with_twice_the_batch_trains(kind: Runs, tmp_path: Path) -> None:
    options = {
        "max_train_steps": 5,
        "optimizer_type": "SGD",
        "learning_rate": 0.2,
        "lr_scheduler": "constant",
        "save_state_every_n_steps": 1,
    }
    options["save_last_n_states"] = 9
    if kind.method == "scratch":
        # Each process draws its own dropout, and weights that are drawn are not small.
        options |= {"learning_rate": 0.02, **({"unet_dropout": 0.0} if kind.family == "lgt" else {"text_dropout": 0.0})}
    if kind.family in EDITING[1:]:
        options["control_resolution"] = 64
    if kind.family == "lgt":
        options |= {"swd_pooling": "sample", "no_sample_at_first": True, "sample_steps": 1}
    two = trained_together(kind, 2, tmp_path / "two", train_batch_size=1, **options)
    kind.output = kind.output.parent / "one"
    one = kind.train(train_batch_size=2, **options)
    first, last, other = (
        load_file(run.state / step / "weights.safetensors") for run, step in ((one, "000001"), (one, "000005"), (two, "000005"))
    )
    assert last.keys() == other.keys()
    assert max(float((last[name] - first[name]).abs().max()) for name in last) > 1e-4, "it trains at all"
    assert max(float((last[name] - other[name]).abs().max()) for name in last) < 1e-5


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[LONG] * (kind[0] != "zimage")) for kind in SHARDED], indirect=True, ids="/".join
)
def test_a_base_that_is_sharded_trains_previews_and_validates_as_a_whole_one(kind: Runs, tmp_path: Path) -> None:
    options = {
        "max_train_steps": 4,
        "optimizer_type": "SGD",
        "learning_rate": 0.2,
        "lr_scheduler": "constant",
        "save_precision": "float",
        "output_name": "trained",
        "validation_split": 0.2,
        "sample_prompts": f"{PREVIEW.prompt} --w 64 --h 64 --s {PREVIEW.steps} --l 1 --d {PREVIEW.seed}{control_flag(kind)}",
    }
    sharded = {"multi_gpu": True, "num_gpus": 2, "distributed_strategy": "fsdp2"}
    sharded |= {"gradient_checkpointing": True, "gradient_checkpointing_cpu_offload": True}
    shared = trained_together(kind, 2, tmp_path / "two", train_batch_size=1, **sharded, **options)
    assert "sharded over 2 processes" in shared.console.read_text()
    kind.output = kind.output.parent / "one"
    whole = kind.train(train_batch_size=2, **options)
    first, second = load_file(saved(kind, shared)), load_file(saved(kind, whole))
    assert first.keys() == second.keys() and max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5
    held_out = [[event["loss"] for event in run.events()[0] if event["kind"] == "validation"] for run in (shared, whole)]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-4) and len(held_out[0]) == 1
    for step in ("000000", "000004"):
        one, other = (pixels(Image.open(run.samples / f"trained-{step}-00.png")) for run in (shared, whole))
        assert np.abs(one - other).max() <= 1


def test_flux_trains_clip_while_the_texts_of_t5_come_from_the_cache(runs: Runs, tiny_bases: dict[str, Path]) -> None:
    """The same weights as with both encoders at work in every step; only the cache is smaller by CLIP's part."""
    runs.family, runs.base = "flux", tiny_bases["flux"]
    options = {"max_train_steps": 4, "train_text_encoder": True, "learning_rate": 1e-2}
    cached = runs.train(**options)
    entries = list((runs.output / ".cache" / "text").rglob("*.safetensors"))
    assert entries and all(list(load_file(path)) == ["t5"] for path in entries)
    runs.output = runs.output.with_name("live")
    live = runs.train(**options, no_cache_text_encoder_outputs=True)
    assert not list((runs.output / ".cache" / "text").rglob("*.safetensors"))
    first, second = (load_file(run.state / "000004" / "weights.safetensors") for run in (cached, live))
    assert any(".te1." in name for name in first) and not any(".te3." in name for name in first)
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-6
