"""Every random draw of a run: a function of the seed and the number of the sample, of nothing else."""

from __future__ import annotations

import torch

from sd_scripts.dataset.draws import seed_for

__all__ = ["rng_for", "seed_for"]


def rng_for(seed: int, number: int, stream: str = "") -> torch.Generator:
    """A CPU generator of its own for one sample of the run.

    number counts samples from the start of the run, over all GPUs; stream keeps draws for different purposes apart, so that
    turning one option on does not change the noise of another.
    """
    return torch.Generator().manual_seed(seed_for(seed, number, stream))
