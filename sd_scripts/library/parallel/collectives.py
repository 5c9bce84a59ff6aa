"""Tensors that the processes of a run exchange: sums of gradients in few messages, weights. One process exchanges nothing.

This is what DistributedDataParallel does after the last micro-batch, without its wrapper: the weights of an adapter lie in many places of
a network that is called in more than one way, and only what is trained travels, once in an optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

BUCKET_NUMBERS = 2**25
"""Numbers in one message, 128 MiB in float32: large enough for speed, small beside the model."""


def all_reduce(gradients: Sequence[Tensor], sums: dict[str, Tensor], accelerator: Accelerator) -> None:
    """Replaces gradients, and the scalars in `sums`, by their sums over all processes; does nothing with one process.

    Each process has divided by the size of the global batch already, so the sum is the mean over all its samples.
    """
    if accelerator.num_processes == 1:
        return
    scalars = torch.stack(list(sums.values()))
    for bucket in _buckets([*gradients, scalars]):
        flat = torch.cat([tensor.reshape(-1).float() for tensor in bucket])
        flat = accelerator.reduce(flat, reduction="sum")
        for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
            tensor.copy_(part.view_as(tensor))
    sums.update(zip(sums, scalars.unbind()))


@torch.no_grad()
def broadcast(weights: Iterable[Tensor], accelerator: Accelerator) -> None:
    """Gives all processes the weights of the first."""
    for weight in weights if accelerator.num_processes > 1 else ():
        torch.distributed.broadcast(weight, src=0)


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(item.numel() for item in bucket) + tensor.numel() > BUCKET_NUMBERS:
            yield bucket
            bucket = []
        bucket.append(tensor)
    yield bucket
