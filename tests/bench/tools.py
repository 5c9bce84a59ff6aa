"""Merging into and extracting from a full-size FLUX transformer on disk: time, and the most memory a tool takes.

usage: tools.py FOLDER

In a new folder in FOLDER it makes a random FLUX.1 transformer (12 billion parameters, bf16, 24 GB, in shards), a LoRA of rank 16 for all
its layers, and a tuned copy in which some layers differ and the other files are links; then it runs the tools' own scripts and deletes
everything. It needs 50 GB.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
from report import report
from torch import Tensor

from sd_scripts.families.common.pooled_original import transformer
from sd_scripts.families.flux.loading import DEV
from sd_scripts.library.loading.common import read_json
from sd_scripts.library.loading.layouts import places, shape_to_original
from sd_scripts.library.tools.models import published
from sd_scripts.library.tools.tensor_files import Planned, open_file, write

SCRIPTS = Path(__file__).resolve().parents[2] / "sd_scripts" / "networks"
SHARD_BYTES = 5_000_000_000
CHANGED = (
    "transformer_blocks.0.attn.to_q.weight",
    "transformer_blocks.0.ff.net.0.proj.weight",
    "single_transformer_blocks.9.proj_out.weight",
)
CHANGED += tuple(f"transformer_blocks.{block}.norm1.linear.weight" for block in range(4))
RANK = 16


def shapes() -> dict[str, tuple[int, ...]]:
    """The transformer's tensors, diffusers names."""
    from diffusers import FluxTransformer2DModel

    with torch.device("meta"):
        model = FluxTransformer2DModel.from_config(read_json(DEV / "transformer" / "config.json", "config"))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def random(shape: tuple[int, ...], seed: int, size: float = 0.02) -> Tensor:
    """Random bf16 numbers: a short random row repeated, since 12 billion draws would take longer than all tools together."""
    row = torch.randn(1_000_003, generator=torch.Generator().manual_seed(seed)) * size
    count = math.prod(shape)
    return row.to(torch.bfloat16).repeat(count // len(row) + 1)[:count].reshape(shape)


def make_model(folder: Path) -> None:
    """A transformer's folder in the diffusers layout, with shards and index."""
    folder.mkdir(parents=True)
    shutil.copyfile(DEV / "transformer" / "config.json", folder / "config.json")
    shards: list[dict[str, Planned]] = [{}]
    size = 0
    for seed, (name, shape) in enumerate(shapes().items()):
        count = 2 * math.prod(shape)
        if size + count > SHARD_BYTES:
            shards.append({})
            size = 0
        size += count
        shards[-1][name] = Planned(torch.bfloat16, shape, lambda shape=shape, seed=seed: random(shape, seed))
    names = [f"diffusion_pytorch_model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards):
        write(folder / name, shard, {"format": "pt"}, hashed=False, label=name)
    index = {"metadata": {}, "weight_map": {key: name for name, shard in zip(names, shards) for key in shard}}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def make_tuned(base: Path, folder: Path) -> None:
    """A copy in which a few layers have a change of rank 8 and a little noise; shards without them are links."""
    folder.mkdir(parents=True)
    for path in base.iterdir():
        slots = open_file(path, "base").slots if path.suffix == ".safetensors" else {}
        if not slots.keys() & set(CHANGED):
            (folder / path.name).hardlink_to(path)
            continue
        planned = {name: Planned(slot.dtype, slot.shape, slot) for name, slot in slots.items()}
        for name in slots.keys() & set(CHANGED):
            planned[name] = Planned(torch.bfloat16, slots[name].shape, lambda slot=slots[name]: tuned(slot.read()))
        write(folder / path.name, planned, {"format": "pt"}, hashed=False, label=path.name)


def tuned(weight: Tensor) -> Tensor:
    """A weight with a change of rank 8."""
    rng = torch.Generator().manual_seed(len(weight))
    up, down = torch.randn(len(weight), 8, generator=rng), torch.randn(8, weight.shape[1], generator=rng)
    return (weight.float() + 0.002 * up @ down).to(torch.bfloat16)


def make_lora(path: Path) -> None:
    """A LoRA for every layer of the blocks, kohya's names and fused shapes."""
    layers = published("flux")
    config = read_json(DEV / "transformer" / "config.json", "config")
    stored = places(
        transformer,
        [f"{name.removeprefix('backbone.')}.weight" for name in layers.modules if "blocks." in name and name.startswith("backbone.")],
        config,
    )
    planned: dict[str, Planned] = {}
    for number, (key, place) in enumerate(stored.items()):
        stem = f"lora_unet_{place.name.removesuffix('.weight').replace('.', '_')}"
        shape = shape_to_original(place, tuple(layers.shapes[f"backbone.{key.removesuffix('.weight')}"]))
        for rest, size in (("lora_down", (RANK, shape[1])), ("lora_up", (shape[0], RANK))):
            planned[f"{stem}.{rest}.weight"] = Planned(torch.bfloat16, size, lambda size=size, number=number: random(size, 7000 + number))
        planned[f"{stem}.alpha"] = Planned(torch.bfloat16, (), lambda: torch.tensor(float(RANK), dtype=torch.bfloat16))
    write(path, planned, {}, hashed=True)


def watched(command: list[str]) -> tuple[float, float]:
    """Seconds that a command takes, and the most resident memory it had, GiB."""
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=sys.stderr)
    memory = [0]

    def watch() -> None:
        inside = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                memory.append(inside.memory_info().rss)
            except psutil.NoSuchProcess:
                return
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    code = process.wait()
    watcher.join()
    assert code == 0, f"{command} ended with {code}"
    return time.perf_counter() - started, max(memory) / 2**30


def tool(name: str, *arguments: str) -> tuple[float, float]:
    """Runs a tool's script."""
    return watched([sys.executable, str(SCRIPTS / f"{name}.py"), *arguments])


def runs(root: Path) -> Iterator[tuple[str, Callable[[], tuple[float, float]]]]:
    """The measurements by name."""
    base, lora, merged, other = root / "base", root / "lora.safetensors", root / "merged", root / "tuned"
    yield (
        "merge",
        lambda: tool(
            "merge_lora", "--base_model", str(base), "--models", str(lora), "--save_to", str(merged), "--report", str(root / "merge.json")
        ),
    )
    yield (
        "extract",
        lambda: tool(
            "extract_lora",
            "--model_org",
            str(base),
            "--model_tuned",
            str(other),
            "--dim",
            "8",
            "--save_to",
            str(root / "x.safetensors"),
            "--report",
            str(root / "extract.json"),
        ),
    )
    yield "resize", lambda: tool("resize_lora", "--model", str(lora), "--new_rank", "4", "--save_to", str(root / "small.safetensors"))
    yield (
        "convert",
        lambda: tool("convert_lora", "--model", str(lora), "--save_model_as", "diffusers", "--save_to", str(root / "c.safetensors")),
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1], prefix="tools-") as name:
        root = Path(name)
        make_model(root / "base")
        make_lora(root / "lora.safetensors")
        for what, run in runs(root):
            if what == "extract":
                shutil.rmtree(root / "merged")
                make_tuned(root / "base", root / "tuned")
            seconds, gib = run()
            found = json.loads((root / f"{what}.json").read_text(encoding="utf-8")) if (root / f"{what}.json").exists() else {}
            errors = {key: found[key] for key in ("rounding", "relative_error") if key in found}
            report(f"tools {what}", "under 2 GiB of memory", seconds=seconds, peak_gib=gib, **errors)
