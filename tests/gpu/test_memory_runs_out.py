"""Preflight, OOM fallback and named kernels where memory and kernels are real; left out, with the reason, where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from sd_scripts import families
from sd_scripts.families.common.images import visiting
from sd_scripts.library.core.protocols import Preview
from sd_scripts.library.memory import kernels
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.errors import OptionError
from tests.library.batches import a_call
from tests.library.small_trainers import options_of

SCRIPT = Path(__file__).parents[2] / "sd_scripts" / "sdxl_train_network.py"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device; torch sees none")]


def train(folder: Path, *arguments: str) -> tuple[int, RunDirectory, str]:
    """A short run on the toy model in a process of its own: exit code, run, console."""
    command = [sys.executable, str(SCRIPT), "--pretrained_model_name_or_path=toy", "--train_data_dir=toy:star", f"--output_dir={folder}"]
    command += "--resolution=64 --min_bucket_reso=32 --bucket_reso_steps=16 --max_train_steps=4 --mixed_precision=no".split()
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, env=os.environ)
    return ended.returncode, RunDirectory(next(folder.glob("2*"), folder)), ended.stdout + ended.stderr


@contextmanager
def left(gib: float) -> Iterator[None]:
    """Within the block the card has about so much memory left."""
    free = torch.cuda.mem_get_info()[0]
    held = torch.empty(max(0, free - int(gib * 2**30)), dtype=torch.uint8, device="cuda")
    try:
        yield
    finally:
        del held
        torch.cuda.empty_cache()


def test_a_preflight_leaves_the_losses_and_says_what_it_took(tmp_path: Path) -> None:
    arguments = ("--deterministic", "--train_batch_size=4", "--sample_prompts=a star --w 64 --h 64 --s 2")
    found = []
    for name in ("on", "off"):
        code, run, said = train(tmp_path / name, f"--preflight={name}", *arguments)
        assert code == 0, said
        found.append([event["loss"] for event in run.events()[0] if event["kind"] == "step"])
        preflights = [event for event in run.events()[0] if event["kind"] == "preflight"]
        assert len(preflights) == (name == "on") and all(event["peak_gib"] > 0 for event in preflights)
    assert found[0] == found[1]


def test_a_batch_that_does_not_fit_is_named_and_the_oom_fallback_makes_it_fit(tmp_path: Path) -> None:
    with left(2):
        code, run, said = train(tmp_path / "plain", "--train_batch_size=512")
        assert code == 1 and "Traceback" not in said
        assert "a batch of 512 images of 64 x 64 of this run" in run.events()[0][-1]["text"]
        assert not [event for event in run.events()[0] if event["kind"] == "step"]
        for name in ("on", "off"):
            code, run, said = train(tmp_path / name, "--train_batch_size=512", "--oom_fallback", f"--preflight={name}")
            assert code == 0, said
            warnings = [event["text"] for event in run.events()[0] if event["kind"] == "warning"]
            assert any("the device had no memory left; from here on" in text for text in warnings)
            assert len([event for event in run.events()[0] if event["kind"] == "step"]) == 4


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn", "math"])
@pytest.mark.parametrize("family", ["sdxl", "flux", "qwen_edit", "zimage"])
def test_a_kernel_that_passes_the_probe_computes_what_others_compute(family: str, name: str) -> None:
    device, known = torch.device("cuda"), families.family(family)
    parts = known.tiny()
    options = options_of((family, "network"), attention_backend=name, mixed_precision="bf16")
    for module in parts.modules().values():
        module.to(device)
    parts.backbone.to(torch.bfloat16).requires_grad_(True)
    x_t, t, conditions = a_call(family, parts)
    call = (x_t.to(device), t.to(device), [{key: value.to(device) for key, value in one.items()} for one in conditions])
    plain = known.denoise(parts, *call)
    try:
        kernels.check(options, device, parts.backbone)
    except OptionError as err:
        assert "here work auto" in str(err)
        return
    kernels.use_attention(parts.backbone, name)
    found = known.denoise(parts, *call)
    found.sum().backward()
    torch.testing.assert_close(found, plain, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("family", ["sdxl", "flux", "qwen_edit", "zimage"])
def test_encoders_and_vae_come_to_the_card_and_leave_it(family: str) -> None:
    from PIL import Image

    known, device = families.family(family), torch.device("cuda")
    parts = known.tiny()
    controls = (Image.new("RGB", (64, 64)),) if family == "qwen_edit" else ()
    request = Preview("a star", "", 64, 64, 1, 2, 2.0, controls=controls)
    on_cpu = known.preview(parts, [request])[0]
    parts.backbone.to(device)
    with visiting(parts) as visited:
        on_gpu = known.preview(visited, [request])[0]
    assert on_gpu.size == on_cpu.size
    assert all(next(module.parameters()).device.type == "cpu" for name, module in parts.modules().items() if name != "backbone")
