"""Every random draw of a run: a function of the seed and the number of the sample, of nothing else."""

from __future__ import annotations

import hashlib

import torch


def seed_for(seed: int, number: int, stream: str = "") -> int:
    """A 63-bit seed for one sample; equal arguments give equal seeds on every machine and Python."""
    digest = hashlib.blake2b(f"{seed}/{number}/{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def rng_for(seed: int, number: int, stream: str = "") -> torch.Generator:
    """A CPU generator of its own for one sample of the run.

    number counts samples from the start of the run, over all GPUs; stream keeps draws for different purposes apart, so that
    turning one option on does not change the noise of another.
    """
    return torch.Generator().manual_seed(seed_for(seed, number, stream))
