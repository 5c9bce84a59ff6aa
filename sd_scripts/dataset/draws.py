"""Random draws of the data side: functions of a seed, a number and a stream, without torch."""

from __future__ import annotations

import hashlib
import random

import numpy as np


def seed_for(seed: int, number: int, stream: str = "") -> int:
    """A 63-bit seed; equal arguments give equal seeds on every machine and Python."""
    digest = hashlib.blake2b(f"{seed}/{number}/{stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def fraction_for(seed: int, number: int, stream: str) -> float:
    """One number drawn evenly from [0, 1); much cheaper than a generator."""
    return (seed_for(seed, number, stream) >> 10) / 2**53


def choice_for(seed: int, number: int, stream: str, count: int) -> int:
    """One whole number drawn evenly from 0 ... count - 1."""
    return seed_for(seed, number, stream) % count


def random_for(seed: int, number: int, stream: str) -> random.Random:
    """A generator for several small draws, such as a shuffle."""
    return random.Random(seed_for(seed, number, stream))


def numpy_for(seed: int, number: int, stream: str) -> np.random.Generator:
    """A generator for large draws, such as permutations."""
    return np.random.Generator(np.random.PCG64(seed_for(seed, number, stream)))
