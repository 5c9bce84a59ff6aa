"""Weights that files of other programs hold in fewer bits, and the numbers that they stand for. Knows no network.

ComfyUI   X.weight in float8 or int8 with X.weight_scale (one number, or one for each row), X.comfy_quant naming the format; before
          that X.scale_weight. mxfp8: one factor, a power of 2, for 32 numbers. nvfp4: two numbers of 4 bits a byte, one factor in float8
          for 16 of them, and X.weight_scale_2 for all
bitsandbytes   X.weight with two numbers of 4 bits a byte, X.weight.absmax for each block of them, X.weight.quant_map of 16 levels
GGUF      files of their own kind, read by the package gguf and by diffusers
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sd_scripts.runs.model_headers import (
    BITS_AND_BYTES,
    BLOCKS,
    INSTEAD,
    MXFP8,
    NVFP4,
    SCALED,
    SCALES,
    TILE,
    Header,
    check_bits,
    form_of,
    refused_bits,
    scale_of,
)
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.outside import json_of

_MARK = ".comfy_quant"
_BESIDE = (*SCALES, ".weight_scale_2", ".scale_input", ".input_scale", _MARK, "scaled_fp8")
"""What ComfyUI's files have besides the weights: factors of weights and of layer inputs, and marks."""
_READ = {**dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "int8_tensorwise"), SCALED), "mxfp8": MXFP8, "nvfp4": NVFP4}
"""How weights of the formats that `.comfy_quant` names are held."""
_LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""What four bits stand for in nvfp4: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0, 2023, E2M1)."""
_TURN = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]) / 2
"""Of the orthogonal matrices that undo themselves by which ComfyUI's "convrot" turns groups of a row: Kronecker powers of this."""
Get = Callable[[str], Tensor]
"""The tensor of this name in the file."""


@dataclass(frozen=True)
class Packed:
    """A weight in few bits."""

    shape: tuple[int, ...]
    numbers: Callable[[Get], Tensor]
    """What it stands for."""


def packed_in(header: Header, option: str) -> tuple[dict[str, Packed], set[str]]:
    """The weights of a file that are held in few bits, by name, and the names of all tensors that only serve them.

    Raises OptionError for forms that cannot be read.
    """
    check_bits(header, option)
    found, beside = {}, {name for name in header.shapes if name.endswith(_BESIDE)}
    states = {name.partition(BITS_AND_BYTES)[0]: name for name in header.shapes if BITS_AND_BYTES in name}
    told = _told(header, [*states.values(), *(name for name in header.shapes if name.endswith(_MARK))], option)
    marks = _in_metadata(header) | {name.removesuffix(_MARK): one for name, one in told.items() if name.endswith(_MARK)}
    for name, mark in marks.items():
        weight = f"{name}.weight"
        form, scale = _READ.get(str(mark.get("format"))), scale_of(weight, header)
        if form is None or (scale is not None and form != form_of(weight, scale, header)):
            raise refused_bits(header, option, f"{name}{_MARK}: {mark.get('format')}")
    for weight, state in states.items():
        found[weight] = _four_bits(weight, told[state], header, option)
        beside |= {name for name in header.shapes if name.startswith(f"{weight}.")}
    for name in header.shapes:
        if (scale := scale_of(name, header)) is not None:
            one = _scaled(name, scale, header) if form_of(name, scale, header) == SCALED else _by_blocks(name, scale, header)
            found[name] = _turned(one, name, marks.get(name.removesuffix(".weight"), {}), header, option)
    return {name: _by_stored_names(one, header) for name, one in found.items()}, beside


def _by_stored_names(one: Packed, header: Header) -> Packed:
    """The same, asking for tensors by the names that they have in the file, which torch.compile may have changed."""
    return replace(one, numbers=lambda get: one.numbers(lambda name: get(header.stored.get(name, name))))


def _told(header: Header, names: list[str], option: str) -> dict[str, dict[str, Any]]:
    """The JSON in tensors of bytes."""
    if not names:
        return {}
    try:
        with safe_open(str(header.path), framework="pt", device="cpu") as file:
            found = {name: json_of(bytes(file.get_tensor(header.stored.get(name, name)).flatten().tolist())) for name in names}
    except (SafetensorError, OSError, ValueError, TypeError) as err:
        raise OptionError(f"{option}: {header.path.name} does not say how its weights are quantised ({err}). {INSTEAD}") from err
    return {name: value if isinstance(value, dict) else {} for name, value in found.items()}


def _in_metadata(header: Header) -> dict[str, dict[str, Any]]:
    """The marks of layers that stand in the header, for all, in place of one tensor for each."""
    try:
        layers = json_of(header.metadata.get("_quantization_metadata", "{}")).get("layers", {})
        return {name: mark for name, mark in layers.items() if isinstance(mark, dict)}
    except (ValueError, AttributeError):
        return {}


def _scaled(name: str, scale: str, header: Header) -> Packed:
    shape, factors = header.shapes[name], header.shapes[scale]
    rows = (-1, *[1] * (len(shape) - 1)) if math.prod(factors) > 1 else ()
    return Packed(shape, lambda get: get(name).float() * get(scale).float().view(rows))


def _by_blocks(name: str, scale: str, header: Header) -> Packed:
    """The factors lie in tiles of 128 rows and 4 columns, each as 32 rows of 4 x 4: row r and column c at r % 32, r // 32, c."""
    form, (rows, columns) = form_of(name, scale, header), header.shapes[name]
    columns *= 2 if form == NVFP4 else 1

    def numbers(get: Get) -> Tensor:
        tiles = get(scale).view(torch.uint8).view(-(-rows // TILE[0]), -1, 32, TILE[0] // 32, TILE[1])
        kept = tiles.permute(0, 3, 2, 1, 4).reshape(len(tiles) * TILE[0], -1)[:rows, : columns // BLOCKS[form]].contiguous()
        if form == NVFP4:
            factors = kept.view(torch.float8_e4m3fn).float() * get(f"{scale}_2").float().flatten()
            values = _levels(get(name), _LEVELS)
        else:
            factors, values = kept.view(torch.float8_e8m0fnu).float(), get(name).float()
        return (values.view(rows, -1, BLOCKS[form]) * factors[:, :, None]).view(rows, columns)

    return Packed((rows, columns), numbers)


def _levels(codes: Tensor, levels: Tensor) -> Tensor:
    """Of two numbers of 4 bits a byte; the first of two is in the upper half."""
    codes = codes.flatten()
    return levels[torch.stack([codes >> 4, codes & 15], dim=1).flatten().long()]


def _turned(one: Packed, name: str, mark: dict[str, Any], header: Header, option: str) -> Packed:
    """The same, turned back if the mark says that groups of each row were turned."""
    params = mark.get("params")
    told = {**(params if isinstance(params, dict) else {}), **mark}
    if told.get("format") != "int8_tensorwise" or not told.get("convrot"):
        return one
    group = told.get("convrot_groupsize", 256)
    power = next((power for power in range(1, 8) if 4**power == group), None)
    if power is None or len(one.shape) != 2 or one.shape[1] % group:
        raise refused_bits(header, option, f"{name}: turned in groups of {group}")
    return replace(one, numbers=lambda get: (one.numbers(get).view(-1, group) @ reduce(torch.kron, [_TURN] * power)).view(one.shape))


def _four_bits(name: str, state: dict[str, Any], header: Header, option: str) -> Packed:
    """Dettmers et al. 2023 (arXiv 2305.14314): blocks of 16 levels, whose factors may be held in 8 bits themselves."""
    try:
        shape, block = tuple(int(side) for side in state["shape"]), int(state["blocksize"])
        inner, offset = int(state.get("nested_blocksize", 0)), float(state.get("nested_offset", 0.0))
    except (KeyError, TypeError, ValueError) as err:
        raise OptionError(f"{option}: {header.path.name} does not say how {name} is quantised ({err}). {INSTEAD}") from err
    nested = f"{name}.nested_absmax" in header.shapes
    needed = [".absmax", ".quant_map", *([".nested_absmax", ".nested_quant_map"] if nested else [])]
    missing = [name + ending for ending in needed if name + ending not in header.shapes]
    if missing or math.prod(header.shapes.get(name, ())) * 2 < math.prod(shape):
        raise OptionError(f"{option}: {header.path.name} lacks {(missing or [name])[0]}, a part of a weight of 4 bits. Download it again")

    def numbers(get: Get) -> Tensor:
        factors = get(f"{name}.absmax")
        if nested:
            outer = get(f"{name}.nested_absmax").repeat_interleave(inner)[: factors.numel()]
            factors = get(f"{name}.nested_quant_map")[factors.long()] * outer + offset
        levels = _levels(get(name), get(f"{name}.quant_map").float())
        return (levels * factors.float().repeat_interleave(block)[: levels.numel()])[: math.prod(shape)].view(shape)

    return Packed(shape, numbers)


class GgufFile:
    """A GGUF file: names, shapes and numbers of its tensors."""

    def __init__(self, path: Path, option: str) -> None:
        if importlib.util.find_spec("gguf") is None:
            raise OptionError(
                f"{option}: {path.name} is a GGUF file, which needs the package gguf: pip install gguf. Or take the .safetensors version"
            )
        from gguf import GGUFReader

        self._path, self._option = path, option
        try:
            self._tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
        # The reader trusts what it reads, so that a damaged file may raise anything.
        except Exception as err:
            raise OptionError(f"{option}: {path.name} is a damaged GGUF file ({err}). Download or copy it again") from err

    def header(self) -> Header:
        """What the file holds."""
        return Header(self._path, {name: tuple(int(side) for side in reversed(one.shape)) for name, one in self._tensors.items()}, {})

    def __call__(self, name: str) -> Tensor:
        """A tensor's numbers. Raises OptionError for a form that diffusers does not read."""
        from diffusers.quantizers.gguf.utils import SUPPORTED_GGUF_QUANT_TYPES, GGUFParameter, dequantize_gguf_tensor

        one = self._tensors[name]
        stored = torch.from_numpy(one.data.copy())
        if one.tensor_type.name in ("F32", "F16"):
            return stored
        if one.tensor_type not in SUPPORTED_GGUF_QUANT_TYPES:
            raise OptionError(
                f"{self._option}: {self._path.name} holds {name} as {one.tensor_type.name}, which cannot be read here. Take a file of the "
                "kind Q8_0, Q6_K, Q5_K, Q4_K or BF16"
            )
        return dequantize_gguf_tensor(GGUFParameter(stored, quant_type=one.tensor_type))
