"""Gives memory that is not used any more back to devices and to the system."""

from __future__ import annotations

import ctypes
import gc
import sys

import torch


def give_back() -> None:
    """Collects what nobody refers to, empties the device's cache, and returns free pages of main memory.

    glibc keeps pages of freed tensors below 32 MiB for itself: after quantising a model of 450 MiB that was 350 MiB (measured).
    """
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
