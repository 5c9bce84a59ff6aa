"""Devices by the names that people give them."""

from __future__ import annotations

import torch

from sd_scripts.schema.errors import OptionError, Problem

META = torch.device("meta")
CPU = torch.device("cpu")
PRECISIONS = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def best_device(asked: str = "auto") -> torch.device:
    """The first GPU, or the CPU where there is none, or where cpu is asked in place of auto."""
    return torch.device("cuda", 0) if asked == "auto" and torch.cuda.is_available() else CPU


def device_of(option: str, name: str | None, default: torch.device) -> torch.device:
    """The device that an option names; default for None. Raises OptionError for one that this machine does not have."""
    if name is None:
        return default
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise OptionError(Problem(option, f"{option}: {name} asked, {_gpus(count)}; {_instead(count)}, or leave it empty"))
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise OptionError(Problem(option, f"{option}: mps asked, but this machine has no Apple GPU; write cpu, or leave it empty"))
    return device


def precision_for(asked: str, device: torch.device) -> torch.dtype:
    """The precision of networks that are only run; auto takes the best that their device has."""
    if asked != "auto":
        return PRECISIONS[asked]
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def _gpus(count: int) -> str:
    return f"{count} {'GPU' if count == 1 else 'GPUs'} here" if count else "no GPU here"


def _instead(count: int) -> str:
    return "write cpu" if count == 0 else "write cuda:0 or cpu" if count == 1 else f"write cuda:0 to cuda:{count - 1}, or cpu"
