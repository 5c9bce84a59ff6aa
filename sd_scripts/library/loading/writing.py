"""Write whole models: one file of the original layout, or a diffusers folder with weights in shards. Knows specs, not families.

Tensors are converted and written one at a time, so that no second copy of a model is ever in memory. Equal models give equal bytes (see
safetensors_file), and no file names a folder of this machine. Everything is written aside and renamed when it is complete.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import diffusers
import torch
import transformers
from torch import Tensor, nn

from sd_scripts.dataset.progress import Bar
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.core.safetensors_file import data_of, header_of
from sd_scripts.library.loading.layouts import TOLERATED, Stored, assembled, places, shape_to_original
from sd_scripts.runs.model_headers import COMPILED
from sd_scripts.schema.files import folder_aside, written_aside

from .common import BASE, Config, FamilySpec, PartSpec, read_json

SHARD_BYTES = 5_000_000_000
"""Largest file of a diffusers folder, unless one tensor alone is larger."""


@dataclass(frozen=True)
class Lazy:
    """A tensor that is made when it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        """Its size in a file."""
        return math.prod(self.shape) * self.dtype.itemsize


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """A network's tensors by the names that files use: without those of torch.compile, and each only once where two names share one."""
    found: dict[str, Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for key, tensor in module.state_dict().items():
        name, place = key.replace(COMPILED, ""), (tensor.data_ptr(), tuple(tensor.shape))
        if name.endswith(TOLERATED) or (place in seen and tensor.data_ptr() != 0):
            continue
        seen.add(place)
        found[name] = tensor.detach()
    return found


def original_tensors(part: PartSpec, module: nn.Module, dtype: torch.dtype | None, prefix: str) -> dict[str, Lazy]:
    """A network's tensors in the original layout, in dtype or as they are; names begin with prefix."""
    config, tensors = _plain(module), tensors_of(module)
    pieces: dict[str, list[tuple[Stored, Tensor]]] = {}
    for key, stored in places(part.layout, tensors, config).items():
        pieces.setdefault(stored.name, []).append((stored, tensors[key]))
    found: dict[str, Lazy] = {}
    for name, parts in pieces.items():
        stored, tensor = parts[0]
        wanted = _precision(tensor, dtype)

        def make(parts: Sequence[tuple[Stored, Tensor]] = parts, wanted: torch.dtype = wanted) -> Tensor:
            return assembled([(stored, tensor.to("cpu", wanted)) for stored, tensor in parts])

        found[prefix + name] = Lazy(shape_to_original(stored, tuple(tensor.shape)), wanted, make)
    own_dtype = next(iter(found.values())).dtype
    for name, extra in part.extras(config).items():
        if isinstance(extra, str):
            found[prefix + name] = found[prefix + extra]
        else:
            found[prefix + name] = Lazy(tuple(extra.shape), own_dtype, partial(extra.to, own_dtype))
    return found


def _precision(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def write_file(path: Path, tensors: Mapping[str, Lazy], metadata: Mapping[str, str]) -> None:
    """Writes one safetensors file aside, then puts it in its place; header texts are `format` (pt, which readers ask for) and metadata."""
    with written_aside(path) as aside, _progress(path.name, tensors) as bar, aside.open("wb") as file:
        _write(file, tensors, {"format": "pt", **metadata}, bar)


def _write(file: BinaryIO, tensors: Mapping[str, Lazy], metadata: Mapping[str, str], bar: Bar) -> None:
    header, order = header_of({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, metadata)
    file.write(header)
    for name in order:
        tensor = tensors[name].make()
        assert tuple(tensor.shape) == tensors[name].shape and tensor.dtype == tensors[name].dtype, f"{name} is not what its header says"
        file.write(data_of(tensor))
        bar.update(tensors[name].num_bytes)


@contextmanager
def _progress(label: str, tensors: Mapping[str, Lazy]) -> Iterator[Bar]:
    total = sum(tensor.num_bytes for tensor in tensors.values())
    with Bar(total=total, desc=f"writing {label}", unit="B", unit_scale=True, leave=False, delay=1) as bar:
        yield bar


def write_folder(
    spec: FamilySpec,
    parts: Parts,
    path: Path,
    dtype: torch.dtype | None,
    metadata: Mapping[str, str],
    index: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    also: Callable[[Path], None] | None = None,
) -> None:
    """Writes a diffusers folder with all parts, in dtype or as they are; it takes the place of a folder that is there.

    index: what its model_index.json says besides the classes. metadata goes into the header of the backbone's files. also writes what
    else belongs into the folder.
    """
    with folder_aside(path) as aside:
        for name, part in spec.parts.items():
            module = parts.modules()[name]
            folder = aside / part.folder
            folder.mkdir()
            write_json(folder / "config.json", _written_config(part, module, dtype))
            _write_weights(folder, part, module, dtype, metadata if name == "backbone" else {}, shard_bytes)
        for name, tokenizer in spec.tokenizers.items():
            write_tokenizer(aside / tokenizer.folder, parts.tokenizers[name])
        if also is not None:
            also(aside)
        scheduler = {key: value for key, value in parts.scheduler_config.items() if not key.startswith("_")}
        class_name = parts.scheduler_config["_class_name"]
        (aside / "scheduler").mkdir()
        write_json(
            aside / "scheduler" / "scheduler_config.json",
            {"_class_name": class_name, "_diffusers_version": diffusers.__version__, **scheduler},
        )
        write_json(
            aside / "model_index.json",
            {
                **read_json(spec.configs / "model_index.json", BASE),
                "_diffusers_version": diffusers.__version__,
                "scheduler": ["diffusers", class_name],
                **(index or {}),
            },
        )


def _write_weights(
    folder: Path, part: PartSpec, module: nn.Module, dtype: torch.dtype | None, metadata: Mapping[str, str], shard_bytes: int
) -> None:
    """A network's weights: one file, or shards with diffusers' and transformers' index."""
    tensors = {}
    for name, tensor in tensors_of(module).items():
        wanted = _precision(tensor, dtype)
        tensors[part.folder_name(name)] = Lazy(tuple(tensor.shape), wanted, partial(tensor.to, "cpu", wanted))
    shards = _shards(tensors, shard_bytes)
    if len(shards) == 1:
        write_file(folder / f"{part.stem}.safetensors", tensors, metadata)
        return
    files = {f"{part.stem}-{number:05}-of-{len(shards):05}.safetensors": shard for number, shard in enumerate(shards, start=1)}
    for name, shard in files.items():
        write_file(folder / name, shard, metadata)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    places = {key: name for name, shard in files.items() for key in shard}
    write_json(folder / f"{part.stem}.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": places})


def _shards(tensors: Mapping[str, Lazy], limit: int) -> list[dict[str, Lazy]]:
    """The tensors in their order, a new shard where the next one would make it larger than limit bytes."""
    shards: list[dict[str, Lazy]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.num_bytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.num_bytes
    return shards


def _written_config(part: PartSpec, module: nn.Module, dtype: torch.dtype | None) -> Config:
    """config.json of a network, without names of folders it came from."""
    config = {key: value for key, value in _plain(module, brief=True).items() if not key.startswith("_")}
    if part.stem != "model":
        return {"_class_name": part.class_name, "_diffusers_version": diffusers.__version__, **config}
    first = next(parameter for parameter in module.parameters() if parameter.is_floating_point())
    precision = str(_precision(first, dtype)).removeprefix("torch.")
    return {**config, "architectures": [part.class_name], "dtype": precision, "transformers_version": transformers.__version__}


def _plain(module: nn.Module, brief: bool = False) -> Config:
    """A network's configuration, as JSON has it; brief leaves out what transformers takes for granted."""
    config: Any = module.config
    plain: Config = json.loads(config.to_json_string(use_diff=brief) if hasattr(config, "to_diff_dict") else json.dumps(dict(config)))
    return plain


_PATHS = ("name_or_path", "_name_or_path", "is_local", "tokenizer_file", "vocab_file", "merges_file")


def write_tokenizer(folder: Path, tokenizer: Any) -> None:
    """A tokenizer's files; for CLIP also those that transformers before 5 needs."""
    folder.mkdir()
    tokenizer.save_pretrained(str(folder))
    config = read_json(folder / "tokenizer_config.json", BASE)
    write_json(folder / "tokenizer_config.json", {key: value for key, value in config.items() if key not in _PATHS})
    model = read_json(folder / "tokenizer.json", BASE)["model"]
    if model["type"] != "BPE":
        return
    write_json(folder / "vocab.json", dict(sorted(model["vocab"].items(), key=lambda item: item[1])))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a configuration file; keys in order, so that equal models give equal bytes."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, sort_keys=path.name != "vocab.json") + "\n", encoding="utf-8")
