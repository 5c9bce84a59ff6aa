"""Fill a network with tensors from safetensors files, exactly: nothing missing, nothing of another shape, no random initial weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sd_scripts.dataset.progress import Bar
from sd_scripts.library.core.devices import META
from sd_scripts.library.loading.layouts import TOLERATED
from sd_scripts.runs.model_headers import GGUF, Header
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.outside import json_of

from .few_bits import Get, GgufFile, Packed, packed_in
from .headers import read_header

logger = logging.getLogger(__name__)
Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file, not read yet."""

    path: Path
    name: str
    shape: tuple[int, ...]
    option: str
    packed: Packed | None = None
    """How it is made of several tensors, where the file holds it in few bits."""


def entries(header: Header, option: str, prefix: str = "") -> dict[str, TensorEntry]:
    """The tensors of a file whose names start with prefix, by the rest of the name.

    Raises OptionError for weights in few bits of a form that cannot be read here.
    """
    stored, (packed, beside) = header.stored, packed_in(header, option)
    found = {name: shape for name, shape in header.shapes.items() if name.startswith(prefix) and name not in beside}
    found |= {name: one.shape for name, one in packed.items() if name.startswith(prefix)}
    return {
        name[len(prefix) :]: TensorEntry(header.path, stored.get(name, name), shape, option, packed.get(name))
        for name, shape in found.items()
    }


class Reader:
    """Opens each file once and reads tensors from it one at a time."""

    def __init__(self) -> None:
        self._open: dict[Path, Get] = {}

    def __call__(self, entry: TensorEntry) -> Tensor:
        """The tensor. Raises OptionError when the file cannot be read, and for what is no number."""
        try:
            if entry.path not in self._open:
                self._open[entry.path] = _opened(entry)
            get = self._open[entry.path]
            tensor = get(entry.name) if entry.packed is None else entry.packed.numbers(get)
        except (SafetensorError, OSError) as err:
            raise OptionError(
                f"{entry.option}: {entry.path.name} cannot be read at {entry.name} ({err}). Download or copy it again"
            ) from err
        if not _has_numbers(tensor):
            raise OptionError(
                f"{entry.option}: {entry.path.name} is broken: {entry.name} holds NaN or infinity. Its training or merging has failed, or "
                "it was saved in fp16 from larger numbers. Take another copy, or the version before"
            )
        return tensor


def _opened(entry: TensorEntry) -> Get:
    with entry.path.open("rb") as file:
        if file.read(len(GGUF)) == GGUF:
            return GgufFile(entry.path, entry.option)
    get: Get = safe_open(str(entry.path), framework="pt", device="cpu").get_tensor
    return get


def _has_numbers(tensor: Tensor) -> bool:
    """Whether all is finite. A sum is no number as soon as one of its terms is none, and takes no memory."""
    if not tensor.is_floating_point():
        return True
    wide = tensor if tensor.dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16) else tensor.float()
    return bool(wide.sum(dtype=torch.float64).isfinite())


class Unfilled(TorchFunctionMode):
    """Leaves out what fills tensors on the meta device: there is nothing to fill, and PyTorch goes through it in Python all the same."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        # By name, since transformers puts functions of its own in the place of PyTorch's.
        if getattr(func, "__name__", "") in _FILLS:
            tensor: Tensor = args[0] if args else kwargs["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


_FILLS = frozenset("uniform_ normal_ zero_ fill_ kaiming_uniform_ kaiming_normal_ zeros_ ones_ constant_".split())


def empty(make: Callable[[], Module]) -> Module:
    """The module with its real buffers and with parameters that take no memory yet."""
    with init_empty_weights(include_buffers=False), Unfilled():
        return make()


Finish = Callable[[str, nn.Module], None]
"""What is done with a block, told by its name, as soon as it has its weights."""


def fill(
    module: nn.Module,
    tensors: Mapping[str, Callable[[], Tensor]],
    device: torch.device,
    dtype: torch.dtype,
    blocks: Sequence[str] = (),
    finish: Finish | None = None,
) -> None:
    """Gives the module its tensors in this precision on this device, in eval mode and frozen; on the meta device nothing is read.

    finish is called for each of the blocks (names of submodules) before the next one is read, such as to make it smaller.
    """
    if device == META:
        leave_out(module)
        return
    names = list(module.state_dict())
    inside = {block: [name for name in names if name.startswith(f"{block}.")] for block in blocks}
    own = set(names).difference(*inside.values())

    def read(wanted: Iterable[str], start: int = 0) -> dict[str, Tensor]:
        state = {}
        for name in wanted:
            tensor = tensors[name]()
            # A copy: safetensors maps the file, so writing over it during training would change the weights.
            state[name[start:]] = tensor.contiguous().to(device, dtype if tensor.is_floating_point() else tensor.dtype, copy=True)
        return state

    missing = module.load_state_dict(read(name for name in names if name in own), strict=False, assign=True).missing_keys
    assert set(missing) == set(names) - own, f"{missing[:3]} have no weights"
    for block in Bar(blocks, desc=f"{type(module).__name__} block by block", unit="block", leave=False, delay=1, disable=not blocks):
        part = module.get_submodule(block)
        part.load_state_dict(read(inside[block], len(block) + 1), strict=True, assign=True)
        part.to(device).eval().requires_grad_(False)
        if finish is not None:
            finish(block, part)
    module.to(device).eval().requires_grad_(False)


def leave_out(module: nn.Module) -> None:
    """Makes a network that nobody will run: its structure on the meta device, in eval mode and frozen."""
    module.to("meta").eval().requires_grad_(False)


def check(module: nn.Module, found: Mapping[str, tuple[int, ...]], what: str, option: str) -> None:
    """Raises OptionError unless every tensor of the module is among the found names, in its shape; logs what nobody needs."""
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    missing = [name for name in wanted if name not in found]
    if missing:
        raise OptionError(
            f"{option}: {what} lacks {len(missing)} of {len(wanted)} tensors, {missing[0]} among them. It is incomplete or of another kind"
        )
    wrong = [name for name, shape in wanted.items() if found[name] != shape]
    if wrong:
        name = wrong[0]
        raise OptionError(
            f"{option}: {len(wrong)} tensors of {what} do not fit its configuration: {name} has "
            f"shape {found[name]}, {wanted[name]} was expected"
        )
    extra = [name for name in found if name not in wanted and not name.endswith(TOLERATED)]
    if extra:
        logger.warning("%s: %d tensors of %s are not used, such as %s", option, len(extra), what, extra[0])


def folder_entries(folder: Path, stem: str, variant: str | None, option: str, label: str) -> dict[str, TensorEntry]:
    """The tensors of one network of a diffusers folder, from one file or several. label names the folder in messages.

    Raises OptionError when there are no safetensors weights (of that variant), and says what is there instead.
    """
    files = _files(folder, stem, variant, option)
    absent = [path.name for path in files if not path.is_file()]
    if files and not absent:
        return {name: entry for path in files for name, entry in entries(read_header(path, option), option).items()}
    if absent:
        raise OptionError(f"{option}: {label} lacks {', '.join(absent)}, which its index lists. Download it again")
    there = {path.name[len(stem) + 1 :].split(".")[0].split("-")[0] for path in folder.glob(f"{stem}.*.safetensors")} - {"safetensors"}
    wanted = f"{stem}.{variant}.safetensors" if variant else f"{stem}.safetensors"
    if there:
        raise OptionError(f"{option}: {label} has no {wanted}, but variant {' or '.join(sorted(there))}; set variant to that")
    if variant and _files(folder, stem, None, option):
        raise OptionError(f"variant: {label} has no {wanted}, only the plain weights; remove variant")
    pickles = sorted(path.name for path in folder.glob(f"{stem}*.bin"))
    if pickles:
        raise OptionError(
            f"{option}: {label} has only {pickles[0]}, a pickle file, which can run any code while it is read, so it is refused. "
            "Get the .safetensors version of the model"
        )
    raise OptionError(f"{option}: {label} has no {wanted}")


def _files(folder: Path, stem: str, variant: str | None, option: str) -> list[Path]:
    """The files with the weights, as the index lists them; none when there are no such weights. Raises OptionError for a broken index."""
    names = [f"{stem}.{variant}.safetensors"] if variant else [f"{stem}.safetensors"]
    if (folder / names[0]).is_file():
        return [folder / names[0]]
    indices = (
        [f"{stem}.safetensors.index.{variant}.json", f"{stem}.{variant}.safetensors.index.json"]
        if variant
        else [f"{stem}.safetensors.index.json"]
    )
    for index in indices:
        if (folder / index).is_file():
            try:
                listed = json_of((folder / index).read_bytes())["weight_map"].values()
                return [folder / name for name in sorted(set(listed))]
            except (OSError, ValueError, TypeError, AttributeError, KeyError) as err:
                text = f"{folder.name}/{index} is damaged: it does not list the files of the weights ({err}). Download it again"
                raise OptionError(f"{option}: {text}") from err
    return []
