"""LoRA steps of full-size models with random weights, with each memory option: ms, TFLOP/s beside those of a matrix product, peak memory.

Nothing is downloaded: networks are made on the device from the published configurations, and are given random conditions of the shapes that
text encoders and VAE would make. Everything else is what a run does: attach, arrange, the family's denoise, objective, optimizer.

A case is a memory option or several joined by +, one after the other in the same process:

    plain  checkpoint  share:0.5  offload  swap:N  swap:all  qint8  qfloat8  fp8  nf4  compile  compile:network

usage: gpu.py [--families sdxl,flux,qwen_edit,zimage] [--memory_options plain,checkpoint,compile,compile+swap:all] [--size 1024] [--batch 1]
              [--steps 8] [--small]

--small measures the tiny networks on the CPU, to see that all of this works; compile is without inductor there.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sd_scripts import families
from sd_scripts.families import RUNS
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.library.core.protocols import Batch, Condition, Geometry, Parts
from sd_scripts.library.loading.common import read_json
from sd_scripts.library.loading.weights import empty, fill, leave_out
from sd_scripts.library.memory.arranging import Arranged, arrange
from sd_scripts.library.memory.forecast.accounting import AsOnDevice
from sd_scripts.library.memory.forecast.structure import conditions_of, latents_of, structure_of
from sd_scripts.library.memory.quantize import QuantizationReport, quantize_network
from sd_scripts.library.memory.quantize import blocks_of as quantized_blocks_of
from sd_scripts.library.train.conditioned import Conditioned
from sd_scripts.library.train.meter import peak_gib
from sd_scripts.library.train.optim import make_optimizer
from sd_scripts.schema.command_line import parse_cli
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.runs import RunOptions

MODELS = {
    "sdxl": "stabilityai/stable-diffusion-xl-base-1.0",
    "flux": "black-forest-labs/FLUX.1-dev",
    "qwen_edit": "Qwen/Qwen-Image-Edit",
    "zimage": "Tongyi-MAI/Z-Image",
}
"""What the options name; only the configuration that comes with the program is used."""
SPECS = {"sdxl": "sdxl:SPEC", "flux": "flux:SPEC", "qwen_edit": "qwen:SPEC", "zimage": "zimage:SPEC"}
FLAGS = {
    "plain": (),
    "checkpoint": ("--gradient_checkpointing",),
    "share": ("--gradient_checkpointing", "--gradient_checkpointing_share={}"),
    "offload": ("--gradient_checkpointing", "--gradient_checkpointing_cpu_offload"),
    "swap": ("--blocks_to_swap={}",),
    "compile": ("--compile", "--compile_scope={}"),
    **{kind: (f"--transformer_quantization={kind}",) for kind in ("qint8", "qfloat8", "fp8", "nf4")},
}
WARM_UP = 3
CAPTION = "a photograph of a red bicycle that leans against an old wall of bricks in the evening sun, with ivy and a cat " * 2


@dataclass
class Case:
    """One family with some memory options, ready to train."""

    options: RunOptions
    parts: Parts
    arranged: Arranged
    step: Callable[[], Tensor]


def options_of(name: str, memory_options: str, num_blocks: int, small: bool) -> RunOptions:
    """The options of a run with these memory options."""
    arguments = [f"--pretrained_model_name_or_path={'toy' if small else MODELS[name]}", "--train_data_dir=toy:star", "--output_dir=unused"]
    arguments += ["--network_dim=16", f"--mixed_precision={'no' if small else 'bf16'}"]
    if name == "qwen_edit":
        arguments += ["--model_version=edit"]
    for memory_option in memory_options.split("+"):
        kind, _, value = memory_option.partition(":")
        value = {"swap": str(num_blocks) if value == "all" else value, "compile": value or "auto"}.get(kind, value)
        arguments += [flag.format(value) for flag in FLAGS[kind]]
        arguments += ["--compile_backend=aot_eager"] if small and kind == "compile" else []
    return parse_cli(RUNS[name, "network"], arguments).options


def outline(name: str, options: RunOptions, dtype: torch.dtype, small: bool) -> Parts:
    """All networks of a model on the meta device."""
    family = families.family(name)
    if not small:
        return structure_of(family, options.model, {"backbone": dtype}).parts
    parts = family.tiny()
    for module in parts.modules().values():
        leave_out(module)
    return parts


def random_backbone(name: str, options: RunOptions, home: torch.device, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The denoising network of the published configuration with random weights, made on `device` and kept at home; quantised on the way."""
    module, _, attribute = SPECS[name].partition(":")
    spec = getattr(import_module(f"sd_scripts.library.loading.{module}"), attribute)
    part = spec.parts["backbone"]
    network = empty(lambda: part.make(read_json(spec.configs / part.folder / "config.json", "pretrained_model_name_or_path")))
    random = torch.Generator(device).manual_seed(0)

    def tensor(path: str, shape: torch.Size) -> Tensor:
        if len(shape) == 1:
            return (torch.ones if path.endswith("weight") else torch.zeros)(shape, device=device, dtype=dtype)
        return torch.randn(shape, generator=random, device=device, dtype=dtype) / shape[1:].numel() ** 0.5

    tensors = {path: (lambda path=path, shape=value.shape: tensor(path, shape)) for path, value in network.state_dict().items()}
    kind = options.model.transformer_quantization
    report = QuantizationReport(kind, name) if kind != "none" else None
    fill(network, tensors, home, dtype, quantized_blocks_of(network) if report else (), report.quantize if report else None)
    return network


def make(name: str, memory_options: str, size: int, batch: int, device: torch.device, small: bool) -> Case:
    """The network with its adapter and memory options, and a step on a random batch."""
    family, dtype = families.family(name), torch.float32 if small else torch.bfloat16
    shapes = outline(name, options_of(name, "plain", 0, small), dtype, small)
    options = options_of(name, memory_options, len(blocks_of(shapes.backbone)), small)
    home = torch.device("cpu") if options.memory.blocks_to_swap else device
    if small:
        backbone = family.tiny().backbone
        if options.model.transformer_quantization != "none":
            quantize_network(backbone, options.model.transformer_quantization)
    else:
        backbone = random_backbone(name, options, home, device, dtype)
    parts = replace(shapes, backbone=backbone)
    network = attach(parts, options.network, family.adapter_targets(parts, False), 0)
    arranged = arrange(parts, options, device)
    optimizer = make_optimizer(options.optimizer, network.parameter_groups(options.network, options.optimizer.learning_rate))
    objective = family.objective(options.objective, parts.path, parts.kind, parts.scheduler_config)
    network.train()
    data = random_batch(name, shapes, size, batch, device)

    def step() -> Tensor:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=not small):
            loss = objective(Conditioned(family, parts, network, data.conditions, dict), data, 0).loss.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Case(options, parts, arranged, step)


def random_batch(name: str, shapes: Parts, size: int, batch: int, device: torch.device) -> Batch:
    """A batch of images of size x size pixels and their conditions, of numbers that mean nothing."""
    family, random = families.family(name), torch.Generator(device).manual_seed(1)

    def real(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=random, device=device, dtype=tensor.dtype)

    told = family.size_condition(Geometry((size, size), (0, 0), (size, size)))
    with AsOnDevice(None):
        latents, wanted = shapes_of(name, shapes, size, batch)
    conditions: list[Condition] = [
        {**{key: real(value) for key, value in condition.items()}, **{key: value.to(device) for key, value in told.items()}}
        for condition in wanted
    ]
    x0 = real(latents)
    return Batch(x0, conditions, torch.arange(batch), torch.ones(batch, device=device), [str(number) for number in range(batch)])


def flops_of_step(name: str, size: int, batch: int, small: bool) -> float:
    """Floating-point operations of a forward and a backward pass without any memory option, counted on the meta device."""
    family, dtype = families.family(name), torch.float32 if small else torch.bfloat16
    options = options_of(name, "plain", 0, small)
    parts = outline(name, options, dtype, small)
    attach(parts, options.network, family.adapter_targets(parts, False), 0)
    # Attention as two products, each of which is counted.
    with AsOnDevice(None, fused=False), FlopCounterMode(display=False) as counter:
        x_t, conditions = shapes_of(name, parts, size, batch)
        before = counter.get_total_flops()
        family.denoise(parts, x_t, torch.full((batch,), 0.5, device="meta"), conditions).sum().backward()
    return float(counter.get_total_flops() - before)


def shapes_of(name: str, parts: Parts, size: int, batch: int) -> tuple[Tensor, list[Condition]]:
    """Latents and conditions of a batch on the meta device, within AsOnDevice."""
    family, sizes = families.family(name), (size, size)
    return latents_of(family, parts, sizes, batch), conditions_of(
        family, parts, sizes, batch, CAPTION, [sizes] if name == "qwen_edit" else []
    )


def seconds_of(step: Callable[[], object], device: torch.device, times: int) -> list[float]:
    """Wall time of each of several calls, the device's work included."""
    found = []
    for _ in range(times):
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started)
    return found


def ceiling(device: torch.device, small: bool) -> float:
    """FLOP/s of a large matrix product in the precision that is measured."""
    side, dtype = (512, torch.float32) if small else (8192, torch.bfloat16)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / min(seconds_of(lambda: a @ b, device, 20)[3:])


def measured(name: str, memory_options: str, arguments: argparse.Namespace, device: torch.device, most: float) -> dict[str, object]:
    """The figures of one case, or why there are none."""
    gc.collect()
    torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    told: dict[str, object] = {"family": name, "memory_options": memory_options, "size": arguments.size, "batch": arguments.batch}
    try:
        flops = flops_of_step(name, arguments.size, arguments.batch, arguments.small)
        case = make(name, memory_options, arguments.size, arguments.batch, device, arguments.small)
        first, *_ = seconds_of(case.step, device, 1)
        seconds_of(case.step, device, WARM_UP - 1)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        seconds = sorted(seconds_of(case.step, device, arguments.steps))[arguments.steps // 2]
    except OptionError as err:
        return {**told, "left_out": str(err)}
    except torch.OutOfMemoryError:
        return {**told, "left_out": "no memory"}
    made = case.arranged.compilation
    compiled = {"compile_seconds": round(made.take().seconds, 1)} if made is not None else {}
    if made is not None:
        made.close()
    return {
        **told,
        "ms": round(1000 * seconds, 1),
        "first_step_seconds": round(first, 2),
        **compiled,
        "tflop": float(f"{flops / 1e12:.3g}"),
        "tflops": float(f"{flops / seconds / 1e12:.3g}"),
        "of_ceiling": float(f"{flops / seconds / most:.3g}"),
        "peak_gib": round(peak_gib(device), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default="sdxl,flux,qwen_edit,zimage")
    parser.add_argument(
        "--memory_options", default="plain,checkpoint,share:0.5,offload,swap:all,qint8,fp8,nf4,compile,compile+checkpoint,compile+swap:all"
    )
    parser.add_argument("--size", type=int, default=None)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--small", action="store_true")
    arguments = parser.parse_args()
    if not arguments.small and not torch.cuda.is_available():
        sys.exit("full-size models need a GPU, and torch sees none; --small measures tiny ones on the CPU")
    device = torch.device("cpu" if arguments.small else "cuda")
    arguments.size = arguments.size or (64 if arguments.small else 1024)
    most = ceiling(device, arguments.small)
    name = "CPU" if arguments.small else torch.cuda.get_device_name(device)
    sys.stdout.write(
        json.dumps({"bench": "gpu", "device": name, "torch": torch.__version__, "ceiling_tflops": round(most / 1e12, 3)}) + "\n"
    )
    rows = []
    for family in arguments.families.split(","):
        for memory_options in arguments.memory_options.split(","):
            rows.append(measured(family, memory_options, arguments, device, most))
            sys.stdout.write(json.dumps({"bench": "gpu", **rows[-1]}) + "\n")
            sys.stdout.flush()
    sys.stdout.write(table(rows))


def table(rows: list[dict[str, object]]) -> str:
    """The figures as a table in Markdown; ratios are to the family's plain step."""
    lines = ["| family | memory options | ms | of plain | TFLOP/s | of ceiling | peak GiB | first step, s |", "|" + "---|" * 8]
    plain = {row["family"]: row["ms"] for row in rows if row["memory_options"] == "plain" and "ms" in row}
    for row in rows:
        if "ms" not in row:
            lines.append(f"| {row['family']} | {row['memory_options']} | {row['left_out']} | | | | | |")
            continue
        ratio = f"{float(str(row['ms'])) / float(str(plain[row['family']])):.2f}" if row["family"] in plain else ""
        cells = (
            row["family"],
            row["memory_options"],
            row["ms"],
            ratio,
            row["tflops"],
            row["of_ceiling"],
            row["peak_gib"],
            row["first_step_seconds"],
        )
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
