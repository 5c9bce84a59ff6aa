"""safetensors files whose bytes follow from their content alone.

The safetensors library writes the header's text entries in an order that changes from process to process; a run that was killed
and resumed must give the same bytes as one that was not, so the (small) format is written here with everything sorted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import OptionError
from .protocols import StateDict

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The format's names of the number formats that are written."""


def header_of(formats: Mapping[str, tuple[torch.dtype, Sequence[int]]], metadata: Mapping[str, str]) -> tuple[bytes, list[str]]:
    """What stands before the data in a file with tensors of these formats and shapes, and the order in which their data follow."""
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    # Wide numbers first, so that every tensor starts at a multiple of its own width.
    order = sorted(formats, key=lambda name: (-formats[name][0].itemsize, name))
    offset = 0
    for name in order:
        dtype, shape = formats[name]
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def data_of(tensor: Tensor) -> memoryview:
    """A tensor's numbers as they stand in a file."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def serialise(tensors: StateDict, metadata: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file: equal tensors and texts give equal bytes in every process."""
    header, order = header_of({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, metadata)
    return b"".join([header, *(data_of(tensors[name]) for name in order)])


def read_file(path: Path) -> tuple[StateDict, dict[str, str]]:
    """Tensors and header texts of a file. Raises OptionError with a sentence for what is not a readable safetensors file."""
    if path.suffix.lower() != ".safetensors":
        raise OptionError(
            f"{path.name} is not a .safetensors file; .pt, .ckpt and .bin files can run code when they are read, "
            "so only .safetensors is accepted"
        )
    if not path.is_file():
        raise OptionError(f"the adapter file {path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            # Copies: the tensors are views of the mapped file, which may be replaced while they live, and which Windows would keep locked.
            return {name: file.get_tensor(name).clone() for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError) as err:
        raise OptionError(
            f"{path.name} is not a readable safetensors file ({err}); it may be truncated, so download or export it again"
        ) from err
