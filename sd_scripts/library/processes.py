"""What the processes of a run tell each other: sums of gradients in few messages, weights, a text. One process tells nobody."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from accelerate import Accelerator
from torch import Tensor

BUCKET_NUMBERS = 2**25
"""Numbers in one message, 128 MiB in float32: large enough for speed, small beside the model."""


def add_up(gradients: Sequence[Tensor], sums: dict[str, Tensor], accelerator: Accelerator) -> None:
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


def same_text(text: str, accelerator: Accelerator) -> str:
    """The first process's text, in all processes."""
    if accelerator.num_processes == 1:
        return text
    data = text.encode()
    length = torch.tensor([len(data)], device=accelerator.device)
    torch.distributed.broadcast(length, src=0)
    letters = torch.zeros(int(length), dtype=torch.uint8, device=accelerator.device)
    if accelerator.is_main_process:
        letters.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    torch.distributed.broadcast(letters, src=0)
    return bytes(letters.tolist()).decode()


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        if bucket and sum(item.numel() for item in bucket) + tensor.numel() > BUCKET_NUMBERS:
            yield bucket
            bucket = []
        bucket.append(tensor)
    yield bucket


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Euclidean norm of all gradients together, float32, on their device."""
    if not gradients:
        return torch.zeros(())
    return torch.linalg.vector_norm(torch.stack([norm.float() for norm in torch._foreach_norm(list(gradients))]))
