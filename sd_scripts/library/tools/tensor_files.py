"""safetensors files read and written one tensor at a time, with plain reads: mapped pages would count as memory of the process."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from sd_scripts.dataset.progress import Bar
from sd_scripts.library.core.safetensors_file import DTYPES, data_of, header_of
from sd_scripts.library.loading.headers import read_header
from sd_scripts.runs.safetensors_header import copy_bytes, not_told
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.files import unfinished, written_aside
from sd_scripts.schema.outside import json_of

_TORCH = {code: dtype for dtype, code in DTYPES.items()}
HASHES = {"sshs_model_hash": 64, "sshs_legacy_hash": 8, "modelspec.hash_sha256": 66}
"""Header texts that follow from the tensors, and their lengths."""


@dataclass(frozen=True)
class Slot:
    """One tensor of a file, not read yet. start: place in the file, in bytes."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """The tensor, in memory of its own."""
        return self.rows(0, self.shape[0]) if self.shape else self._read(self.start, ())

    def rows(self, start: int, stop: int) -> Tensor:
        """A range of rows; nothing else is read."""
        width = math.prod(self.shape[1:]) * self.dtype.itemsize
        return self._read(self.start + start * width, (stop - start, *self.shape[1:]))

    def _read(self, start: int, shape: tuple[int, ...]) -> Tensor:
        tensor = torch.empty(shape, dtype=self.dtype)
        view = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
        with self.path.open("rb", buffering=0) as file:
            file.seek(start)
            while view:
                count = file.readinto(view)
                if not count:
                    raise OptionError(f"{self.path.name} ends inside {self.name}; it was changed while it was read")
                view = view[count:]
        return tensor

    def copy_to(self, file: BinaryIO, told: Callable[[bytes], None]) -> None:
        """Writes the stored bytes to a file, a block at a time; told hears each of them."""
        copy_bytes(self.path, self.start, self.num_bytes, file, told)


@dataclass(frozen=True)
class TensorFile:
    """What a safetensors file holds, from its header alone."""

    path: Path
    slots: dict[str, Slot]
    metadata: dict[str, str]
    data_start: int
    """Where the tensors begin, in bytes."""

    @property
    def dtypes(self) -> dict[torch.dtype, int]:
        """How many numbers are stored in each format."""
        counts: dict[torch.dtype, int] = {}
        for slot in self.slots.values():
            counts[slot.dtype] = counts.get(slot.dtype, 0) + math.prod(slot.shape)
        return counts


def open_file(path: Path, option: str) -> TensorFile:
    """Reads a file's header. Raises OptionError for a file that is not there, is a pickle, is cut off or makes no sense."""
    if not path.is_file():
        raise OptionError(f"{option}: there is no file {path}")
    header = read_header(path, option)
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json_of(file.read(length))
    entries.pop("__metadata__", None)
    slots: dict[str, Slot] = {}
    problems = []
    for name, entry in entries.items():
        dtype, shape = _TORCH.get(entry.get("dtype")), tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        if dtype is None:
            problems.append(f"{option}: {path.name} stores {name} as {entry.get('dtype')}, which cannot be read here")
        elif stop - start != math.prod(shape) * dtype.itemsize or start < 0:
            problems.append(f"{option}: {path.name} is damaged: {name} has {stop - start:,} bytes for the shape {shape}")
        else:
            slots[name] = Slot(path, name, dtype, shape, 8 + length + start)
    if problems:
        raise OptionError(problems[0] + (f"; so it is with {len(problems) - 1} more" if len(problems) > 1 else ""))
    return TensorFile(path, slots, dict(header.metadata), 8 + length)


@dataclass(frozen=True)
class Planned:
    """A tensor of a file to be written: its format is known, its numbers are made or copied when its turn comes."""

    dtype: torch.dtype
    shape: Sequence[int]
    make: Callable[[], Tensor] | Slot


def write(path: Path, tensors: Mapping[str, Planned], metadata: Mapping[str, str], *, hashed: bool, label: str | None = None) -> None:
    """Writes a file aside, header first, then the tensors one at a time, and puts it in its place when it is complete.

    hashed: adds the hashes that galleries know an adapter by (see metadata.with_hashes); they are filled in after the data. label is
    shown with the progress; None shows none.
    """
    texts = {**metadata, **{name: "0" * length for name, length in HASHES.items()}} if hashed else dict(metadata)
    formats = {name: (planned.dtype, planned.shape) for name, planned in tensors.items()}
    header, order = header_of(formats, texts)
    digest = hashlib.sha256()
    sizes = {name: math.prod(planned.shape) * planned.dtype.itemsize for name, planned in tensors.items()}
    bar = Bar(total=sum(sizes.values()), desc=label, unit="B", unit_scale=True, delay=2, leave=False, disable=label is None)
    with bar, written_aside(path) as aside, aside.open("wb+") as file:
        file.write(header)
        for name in order:
            planned = tensors[name]
            if isinstance(planned.make, Slot):
                planned.make.copy_to(file, digest.update if hashed else not_told)
            else:
                data = _checked(name, planned, planned.make())
                if hashed:
                    digest.update(data)
                file.write(data)
            bar.update(sizes[name])
        if hashed:
            legacy = _legacy_hash(
                file, header_of(formats, {key: text for key, text in metadata.items() if key.startswith("ss_")})[0], header
            )
            found = (digest.hexdigest(), legacy, f"0x{digest.hexdigest()}")
            final, _ = header_of(formats, {**texts, **dict(zip(HASHES, found))})
            assert len(final) == len(header), "hashes have lengths of their own"
            file.seek(0)
            file.write(final)


def _checked(name: str, planned: Planned, tensor: Tensor) -> memoryview:
    assert tensor.dtype == planned.dtype and tuple(tensor.shape) == tuple(planned.shape), f"{name} is not what its header says"
    return data_of(tensor)


def rounded(tensor: Tensor, dtype: torch.dtype, where: str, option: str) -> Tensor:
    """The tensor in the precision of a file. Raises OptionError when it is not finite or too large for it; option names the precision."""
    if tensor.numel():
        low, high = (float(value) for value in torch.aminmax(tensor))
        if not (math.isfinite(low) and math.isfinite(high)):
            raise OptionError(f"{where} has values that are not finite numbers, so the result would be broken. Nothing was written")
        if max(-low, high) > torch.finfo(dtype).max:
            raise OptionError(
                f"{option}: {where} reaches {max(-low, high):g}, more than {str(dtype).removeprefix('torch.')} can hold; "
                "use bf16 or float. Nothing was written"
            )
    return tensor.to(dtype)


def _legacy_hash(file: BinaryIO, short: bytes, header: bytes) -> str:
    """First 8 digits of the SHA-256 of 64 KiB from the first MiB on, of the file with the header `short`; see metadata.with_hashes."""
    begin, end = 0x100000, 0x110000
    file.flush()
    file.seek(len(header) + max(0, begin - len(short)))
    data = short[begin:end] + file.read(max(0, end - max(begin, len(short))))
    return hashlib.sha256(data).hexdigest()[:8]


class Spool:
    """Tensors whose shapes are not known beforehand, kept beside the file that they will become; use it in a `with` block."""

    def __init__(self, path: Path) -> None:
        """path: the file that will be written."""
        self.path = path
        self.planned: dict[str, Planned] = {}

    def __enter__(self) -> Spool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._aside = unfinished(self.path)
        try:
            self._file = self._aside.open("xb")
            return self
        except BaseException:
            self._aside.unlink(missing_ok=True)
            raise

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._aside.unlink(missing_ok=True)

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Keeps these tensors. Raises OptionError for a name that is there already."""
        for name, tensor in tensors.items():
            if name in self.planned:
                raise OptionError(f"two layers of the new file would have the name {name}")
            slot = Slot(self._aside, name, tensor.dtype, tuple(tensor.shape), self._file.tell())
            self._file.write(data_of(tensor))
            self.planned[name] = Planned(tensor.dtype, tensor.shape, slot)

    def finish(self, metadata: Mapping[str, str]) -> None:
        """Writes the file from what was kept, with hashes."""
        self._file.flush()
        write(self.path, self.planned, metadata, hashed=True)
