"""Predicting beside diffusers' own pipeline, same networks and inputs, in turns in one process; and the memory that each way to hold the
model takes.

The width of the networks can be chosen: with small ones the cost of what is around them shows, with large ones their own.

usage: predict.py [side, default 256] [steps, default 8] [width of a head, default 64] [--memory]
With --memory a model of a few hundred MiB is written to a temporary folder and loaded in a process of its own for each way to hold it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from diffusers import QwenImageTransformer2DModel
from PIL import Image
from report import median, report

from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.render.predict import Predictor, Request
from tests.small_models import qwen_pipeline_of

ROUNDS = 5
TRAINING_MODES = {
    "float32": ["--precision", "no"],
    "bf16": ["--precision", "bf16"],
    "bf16, qint8": ["--precision", "bf16", "--transformer_quantization", "qint8"],
}
_PROBE = """
import gc, resource, sys
import optimum.quanto, psutil
from PIL import Image
from sd_scripts.library.render.predict import Predictor, Request
from sd_scripts.schema import command_line
from sd_scripts.families.qwen_edit.predict_options import QwenImagePredict

options = command_line.parse_tool(QwenImagePredict, sys.argv[1:])
before = psutil.Process().memory_info().rss
predictor = Predictor.load(options)
gc.collect()
held = psutil.Process().memory_info().rss - before
predictor.predict(Request("x", (Image.new("RGB", (64, 64), "red"),), steps=2))
print(held / 2**20, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before / 2**20)
"""
"""Prints MiB held after loading, and at most, both without what the libraries take."""


def parts_of(head: int, heads: int = 2, layers: int = 2) -> Parts:
    """The tiny model with a transformer of this width."""
    tiny = QwenEdit().tiny()
    torch.manual_seed(0)
    axes = (head // 8 * 2, head // 8 * 3, head // 8 * 3)
    config = {"in_channels": 64, "out_channels": 16, "num_layers": layers, "attention_head_dim": head, "num_attention_heads": heads}
    transformer = QwenImageTransformer2DModel(**config, joint_attention_dim=32, axes_dims_rope=axes)
    return replace(tiny, backbone=transformer.eval().requires_grad_(False))


def seconds(do: Callable[[], object]) -> float:
    """CPU time of one call: other programs on the machine do not count."""
    started = time.process_time()
    do()
    return time.process_time() - started


def speed(side: int, steps: int, head: int) -> None:
    """Cold (nothing kept), warm (the same images and instruction again) and diffusers, in turns."""
    parts = parts_of(head)
    # The pipeline takes control images at a million pixels whatever the model: here both take them at the image's size.
    import diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus as plus

    plus.VAE_IMAGE_SIZE, plus.CONDITION_IMAGE_SIZE = side * side, parts.settings["condition_area"]
    parts.settings["control_area"] = parts.settings["area"] = side * side
    predictor, pipeline = Predictor(QwenEdit(), parts), qwen_pipeline_of(parts)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8))
    request = Request("make the circle red", (image,), " ", steps, 4.0, 1, (side, side))

    def theirs() -> object:
        return pipeline(
            image=[image],
            prompt=request.prompt,
            negative_prompt=" ",
            true_cfg_scale=4.0,
            num_inference_steps=steps,
            width=side,
            height=side,
            generator=torch.Generator().manual_seed(1),
        )

    def cold() -> object:
        predictor.kept.clear()
        return predictor.predict(request)

    def warm() -> object:
        return predictor.predict(request)

    ways: dict[str, Callable[[], object]] = {"diffusers": theirs, "cold": cold, "warm": warm}
    for do in ways.values():
        do()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, do in ways.items():
            found[name].append(seconds(do))
    middle = {name: median(values) for name, values in found.items()}
    report(
        "predict",
        "at most 1.0 x diffusers, ahead with what is kept",
        side=side,
        steps=steps,
        head=head,
        diffusers_seconds=middle["diffusers"],
        cold_ratio=middle["cold"] / middle["diffusers"],
        warm_ratio=middle["warm"] / middle["diffusers"],
    )


def memory(folder: Path) -> None:
    """Memory of a model in host RAM for each way to hold it: after loading, and at most while loading and predicting."""
    family = QwenEdit()
    family.save(parts_of(head=128, heads=8, layers=3), folder / "model", "diffusers", None, {})
    size = sum(path.stat().st_size for path in (folder / "model").rglob("*.safetensors")) / 2**20
    for name, flags in TRAINING_MODES.items():
        asked = ["--pretrained_model_name_or_path", str(folder / "model"), "--prompt", "x", *flags]
        command = [sys.executable, "-c", _PROBE, *asked]
        done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
        held, most = map(float, done.stdout.split())
        report("predict memory", "less in each further way", way=name, file_mib=size, held_mib=held, peak_mib=most)


if __name__ == "__main__":
    if "--memory" in sys.argv:
        with tempfile.TemporaryDirectory() as name:
            memory(Path(name))
    else:
        numbers = [int(word) for word in sys.argv[1:]]
        speed(*(numbers + [256, 8, 64][len(numbers) :]))
