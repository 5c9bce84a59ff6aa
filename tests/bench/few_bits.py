"""Linear layers in few bits, ours beside those of optimum-quanto, bitsandbytes and torchao: `python -m tests.bench.few_bits`.

For each: the relative error of the product and of the gradient to its input, against float64 with the weight as it was; the CPU seconds of
a forward and a backward pass as a ratio to the layer in bf16 (medians of rounds in turns); and, in a process of its own, the memory that
LAYERS of them take once they are made one after the other, and the most beside the layers in bf16 meanwhile, as a ratio to those in bf16.
Libraries that are not installed are named as such.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from sd_scripts.library.memory.packed import PackedLinear

LAYERS = 8
RETURNING = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
"""With which what is freed goes back to the system at once, so that memory can be read off the process."""
Make = Callable[[nn.Linear], nn.Module]


def _quanto(kind: str) -> Make:
    def make(layer: nn.Linear) -> nn.Module:
        from optimum import quanto

        held = nn.Sequential(layer)
        quanto.quantize(held, weights=getattr(quanto, kind))
        quanto.freeze(held)
        return held

    return make


def _bitsandbytes(layer: nn.Linear) -> nn.Module:
    import bitsandbytes

    made = bitsandbytes.nn.Linear4bit(
        layer.in_features, layer.out_features, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16, compress_statistics=False
    )
    made.weight = bitsandbytes.nn.Params4bit(
        layer.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=False, module=made
    )
    return made.to("cpu")


def _torchao(kind: str) -> Make:
    def make(layer: nn.Linear) -> nn.Module:
        import torchao.quantization

        held = nn.Sequential(layer)
        torchao.quantization.quantize_(held, getattr(torchao.quantization, kind)())
        return held

    return make


WAYS: dict[str, tuple[str, Make]] = {
    "nf4, ours": ("torch", lambda layer: PackedLinear.of(layer, "nf4")),
    "nf4, bitsandbytes": ("bitsandbytes", _bitsandbytes),
    "fp8 without scale, ours": ("torch", lambda layer: PackedLinear.of(layer, "fp8")),
    "qfloat8, quanto": ("optimum.quanto", _quanto("qfloat8")),
    "float8, torchao": ("torchao", _torchao("Float8WeightOnlyConfig")),
    "qint8, quanto": ("optimum.quanto", _quanto("qint8")),
    "int8, torchao": ("torchao", _torchao("Int8WeightOnlyConfig")),
}


def linear(width: int, seed: int) -> nn.Linear:
    """A frozen layer (width, width) in bf16, each row with a size of its own, as trained ones have."""
    made = nn.Linear(width, width, bias=False, dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(seed)
    sizes = torch.randn(width, 1, generator=draw).exp()
    made.weight.data = (torch.randn(width, width, generator=draw) * sizes * width**-0.5).bfloat16()
    return made.requires_grad_(False)


def passed(layer: nn.Module, x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """Output (B, width) and gradient to x (B, width)."""
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(upstream)
    assert x.grad is not None
    return y.detach(), x.grad


def memory(name: str, width: int) -> None:
    """Prints what is held, and the most that is held beside what was there, as ratios to the layers in bf16."""
    make = WAYS[name][1]
    make(linear(64, 0))  # what is imported and built once
    network = nn.Sequential(*(linear(width, seed) for seed in range(LAYERS)))
    whole = 2 * width * width * LAYERS
    gc.collect()
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    for number in range(LAYERS):
        network[number] = make(network[number])
        gc.collect()
    after = psutil.Process().memory_info().rss
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024
    print(f"{1 + (after - before) / whole:.2f} {(peak - before) / whole:.2f}")


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--memory", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.memory:
        return memory(options.memory, options.width)
    plain = linear(options.width, options.seed)
    draw = torch.Generator().manual_seed(options.seed + 1)
    x, upstream = (torch.randn(options.tokens, options.width, generator=draw).bfloat16() for _ in range(2))
    weight = plain.weight.double()
    wanted = (x.double() @ weight.T, upstream.double() @ weight)
    layers: dict[str, nn.Module] = {"bf16": plain}
    for name, (package, make) in WAYS.items():
        if importlib.util.find_spec(package) is None:
            print(f"{name}: {package} is not installed")
            continue
        make(linear(64, 0))  # what is imported and built once
        try:
            layers[name] = make(linear(options.width, options.seed))
            passed(layers[name], x, upstream)
        except (RuntimeError, NotImplementedError, ImportError, AssertionError) as err:
            print(f"{name}: {str(err).splitlines()[0][:140]}")
            layers.pop(name, None)
            continue
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(options.rounds):
        for name, layer in layers.items():
            begun = time.process_time()
            passed(layer, x, upstream)
            seconds[name].append(time.process_time() - begun)
    usual = statistics.median(seconds["bf16"])
    print("| layer | error of the product | of the gradient to x | CPU time, bf16 = 1 | held | most beside |\n|---|---|---|---|---|---|")
    for name, layer in layers.items():
        product, gradient = passed(layer, x, upstream)
        ratio = statistics.median(seconds[name]) / usual
        command = [sys.executable, "-m", "tests.bench.few_bits", "--memory", name, "--width", str(options.width)]
        held = (
            "1 0"
            if layer is plain
            else subprocess.run(command, check=True, capture_output=True, text=True, env=RETURNING).stdout.splitlines()[-1]
        )
        errors = f"{error(product, wanted[0]):.4f} | {error(gradient, wanted[1]):.4f}"
        print(f"| {name} | {errors} | {ratio:.2f} | {' | '.join(held.split())} |", flush=True)


if __name__ == "__main__":
    main()
