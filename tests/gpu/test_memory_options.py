"""Options for memory and speed on a GPU: each is the plain run on the same toy model; left out, with the reason, where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sd_scripts.runs.rundir import RunDirectory
from tests.gpu.test_cuda import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device; torch sees none")]

CHECKPOINTING = ["--gradient_checkpointing"]
SWAPPING = ["--blocks_to_swap=6"]
COMPILING = ["--compile"]


def losses(folder: Path, *arguments: str, precision: str = "no") -> list[float]:
    """Losses of a run of 12 steps that ends well."""
    code, run, said = train(folder, f"--mixed_precision={precision}", *arguments)
    assert code == 0, said
    return [event["loss"] for event in run.events()[0] if event["kind"] == "step"]


def kinds(folder: Path, kind: str) -> list[dict[str, object]]:
    """Events of one kind of the run in this folder."""
    return [event for event in RunDirectory(next(folder.glob("2*"))).events()[0] if event["kind"] == kind]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_swapped_blocks_change_nothing(precision: str, tmp_path: Path) -> None:
    """Streams and pinned memory: a weight that arrived late would show."""
    plain = losses(tmp_path / "plain", "--deterministic", precision=precision)
    assert losses(tmp_path / "swapped", "--deterministic", *SWAPPING, precision=precision) == plain
    assert losses(tmp_path / "both", "--deterministic", *SWAPPING, *CHECKPOINTING, precision=precision) == plain


@pytest.mark.parametrize(
    "arguments",
    [CHECKPOINTING, [*CHECKPOINTING, "--gradient_checkpointing_share=0.5"], [*CHECKPOINTING, "--gradient_checkpointing_cpu_offload"]],
    ids=["all", "share", "offload"],
)
def test_recomputed_activations_change_nothing(arguments: list[str], tmp_path: Path) -> None:
    plain = losses(tmp_path / "plain", "--deterministic")
    assert losses(tmp_path / "recomputed", "--deterministic", *arguments) == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--compile_scope=blocks"],
        ["--compile_scope=network"],
        ["--compile_scope=blocks", "--compile_mode=reduce-overhead"],
        ["--compile_scope=blocks", *CHECKPOINTING],
        ["--compile_scope=blocks", *SWAPPING],
    ],
    ids=["blocks", "network", "cuda graphs", "recomputed", "swapped"],
)
def test_compiled_code_is_the_plain_run_up_to_rounding(arguments: list[str], tmp_path: Path) -> None:
    plain = losses(tmp_path / "plain", precision="bf16")
    assert losses(tmp_path / "compiled", *COMPILING, *arguments, precision="bf16") == pytest.approx(plain, rel=1e-2)
    (told,) = kinds(tmp_path / "compiled", "compiling")
    graphs = sum(int(str(event["graphs"])) for event in kinds(tmp_path / "compiled", "compiled"))
    assert 0 < graphs <= int(str(told["expected"])) and not kinds(tmp_path / "compiled", "warning")


@pytest.mark.parametrize("kind", ["qint8", "qfloat8", "fp8", "nf4"])
@pytest.mark.parametrize("also", [[], SWAPPING, [*COMPILING, "--compile_scope=blocks"]], ids=["alone", "swapped", "compiled"])
def test_a_quantised_base_trains_nearly_the_same(kind: str, also: list[str], tmp_path: Path) -> None:
    plain = losses(tmp_path / "plain", precision="bf16")
    quantised = losses(tmp_path / "quantised", f"--transformer_quantization={kind}", *also, precision="bf16")
    assert quantised == pytest.approx(plain, rel=0.3 if kind == "nf4" else 0.1)


def test_swapped_blocks_leave_the_device(tmp_path: Path) -> None:
    peaks = []
    for name, arguments in (("plain", []), ("swapped", SWAPPING)):
        losses(tmp_path / name, *CHECKPOINTING, *arguments)
        peaks.append(max(float(str(event["peak_gib"])) for event in kinds(tmp_path / name, "step")))
    assert peaks[1] <= peaks[0]
