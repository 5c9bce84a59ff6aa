"""Keeps some blocks of a network in host RAM and brings the weights of each to the device when it is about to compute.

A swapped block has a home: one flat buffer in host RAM, pinned where the device is a GPU, which its weights are views of. Two slots on
the device are filled in turn, on a stream of their own: while a block computes, the next swapped one in the same direction arrives in the
other slot. During a block's forward pass its modules have views of the slot in place of their weights; before and after it the weights are
in host RAM, where states, files, averages and the optimizer see them. Nothing is ever copied back: frozen weights do not change, and the
gradients of trained ones travel home, where the optimizer moves them.

What the backward pass needs of a slot is not kept there but fetched again: autograd keeps a note of the place in the block instead.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sd_scripts.library.adapters.inject import all_adapter_tensors
from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.optimizer import ZOO

log = logging.getLogger("sd_scripts")

ALIGNMENT = 256
"""Bytes: where the tensors of a buffer begin, as those of the device's own allocator do."""
ON_ONE_DEVICE = ("AdamW8bit", "PagedAdamW8bit", "Lion8bit", "Prodigy", *ZOO)
"""Optimizers that work on a GPU alone, or sum over all weights where the first of them is."""
_GIB = 2**30
_PLAIN = (Tensor, nn.Parameter)


def spread(chosen: int, count: int) -> list[int]:
    """Numbers of `chosen` of `count` blocks, spread evenly: ((2 i + 1) count) // (2 chosen)."""
    return [(2 * i + 1) * count // (2 * chosen) for i in range(chosen)]


@dataclass(frozen=True)
class _Layout:
    """Where a plain tensor lies in a flat buffer."""

    offset: int
    """Bytes."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def view(self, buffer: Tensor) -> Tensor:
        return buffer.view(self.dtype).as_strided(self.size, self.stride, self.offset // self.dtype.itemsize)


def _layout(tensor: Tensor) -> _Layout:
    return _Layout(tensor.storage_offset() * tensor.dtype.itemsize, tensor.dtype, tensor.size(), tensor.stride())


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that a tensor is made of: itself, or those inside of a quantised one."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain(getattr(tensor, name))


def _rebuilt(like: Tensor, plain: Iterator[Tensor]) -> Tensor:
    """A tensor as `like`, made of other plain tensors."""
    if not is_traceable_wrapper_subclass(like):
        return next(plain)
    names, context = like.__tensor_flatten__()
    inside = {name: _rebuilt(getattr(like, name), plain) for name in names}
    return type(like).__tensor_unflatten__(inside, context, like.size(), like.stride())


@dataclass(eq=False)
class _Weight:
    """A parameter or buffer of a block, and where its modules have it."""

    tensor: Tensor
    """In host RAM, or on the device while its block is not swapped."""
    places: list[tuple[nn.Module, str]]

    def __post_init__(self) -> None:
        self.parameter = isinstance(self.tensor, nn.Parameter)
        self.trained = self.tensor.requires_grad

    def refresh(self) -> None:
        """Takes note of what the modules have now: moving a network makes new buffers."""
        module, name = self.places[0]
        held = (module._parameters if self.parameter else module._buffers)[name]
        assert held is not None
        self.tensor = held

    def put(self, tensor: Tensor | None) -> None:
        """Gives the modules a tensor in its place; None is nothing."""
        # Not by setattr, which takes no plain tensor for a parameter and asks hooks of each module.
        for module, name in self.places:
            (module._parameters if self.parameter else module._buffers)[name] = tensor

    def made_of(self, plain: Iterator[Tensor]) -> Tensor:
        """The same weight of other plain tensors, frozen."""
        made = _rebuilt(self.tensor, plain)
        return nn.Parameter(made, requires_grad=False) if self.parameter else made

    def take(self, plain: Iterator[Tensor]) -> None:
        """Moves the weight to other plain tensors, which have its values."""
        if is_traceable_wrapper_subclass(self.tensor):
            self.tensor = self.made_of(plain)
            self.put(self.tensor)
        else:
            # The optimizer, the average and the network know this very parameter.
            self.tensor.data = next(plain)


class _Home:
    """The weights of one block in host RAM."""

    def __init__(self, weights: Sequence[_Weight], pinned: bool) -> None:
        self.weights = weights
        self.layouts: list[list[_Layout]] = []
        end = 0
        for weight in weights:
            weight.refresh()
            mine = []
            for plain in _plain(weight.tensor):
                kept = plain if plain.is_contiguous() or _is_dense(plain) else plain.contiguous()
                mine.append(_Layout(end, plain.dtype, plain.size(), kept.stride()))
                end += _aligned(plain.numel() * plain.dtype.itemsize)
            self.layouts.append(mine)
        self.bytes = end
        self.flat = torch.empty(end, dtype=torch.uint8)
        self.pinned = pinned and end > 0 and _pin(self)
        with torch.no_grad():
            for weight, mine in zip(weights, self.layouts, strict=True):
                for plain, layout in zip(_plain(weight.tensor), mine, strict=True):
                    layout.view(self.flat).copy_(plain.detach())
                weight.take(layout.view(self.flat) for layout in mine)

    @torch.no_grad()
    def leave(self, device: torch.device) -> None:
        """Brings the weights to `device` for good."""
        for weight, mine in zip(self.weights, self.layouts, strict=True):
            weight.take(torch.empty_strided(at.size, at.stride, dtype=at.dtype, device=device).copy_(at.view(self.flat)) for at in mine)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps, in any order of its dimensions, such as channels_last."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _pin(home: _Home) -> bool:
    """Pins a home in place, as long as it lives; False where the system does not allow so much.

    torch's own pinned memory comes in powers of two, which would be up to twice as much.
    """
    pointer = home.flat.data_ptr()
    runtime = torch.cuda.cudart()
    # 1: for all devices of this process.
    if int(runtime.cudaHostRegister(pointer, home.bytes, 1)) != 0:
        return False
    weakref.finalize(home, runtime.cudaHostUnregister, pointer).atexit = False
    return True


@dataclass(eq=False)
class _Block:
    """A block of the network, swapped or not."""

    name: str
    module: nn.Module
    weights: list[_Weight]
    """What goes home when it is swapped: everything but adapters."""
    home: _Home | None = None

    @property
    def bytes(self) -> int:
        return sum(_aligned(plain.numel() * plain.dtype.itemsize) for weight in self.weights for plain in _plain(weight.tensor))

    @property
    def trained(self) -> bool:
        return any(weight.trained for weight in self.weights)


class _Slot:
    """Room for one block on the device."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.buffer = torch.empty(size, dtype=torch.uint8, device=device)
        self.pointer: int = self.buffer.untyped_storage().data_ptr()
        self.holds: int | None = None
        """Which of the swapped blocks."""
        self.ahead = False
        """Whether it was filled for a forward pass and not used in it yet."""
        self.arrived: torch.cuda.Event | None = None
        self.views: dict[int, list[Tensor]] = {}
        """Frozen weights of blocks as they are while they lie here."""

    def has(self, tensor: Tensor) -> bool:
        """Whether a plain tensor lies here."""
        if tensor.device != self.buffer.device or tensor.layout is not torch.strided:
            return False
        pointer: int = tensor.untyped_storage().data_ptr()
        return pointer == self.pointer


@dataclass(frozen=True)
class _Note:
    """What autograd keeps of a tensor in a slot."""

    block: int
    layouts: list[_Layout]
    like: Tensor | None
    """A quantised tensor of the same kind; None for a plain one."""


class BlockSwap:
    """Some blocks of a network in host RAM, none at first; see `set`."""

    def __init__(self, network: nn.Module, device: torch.device) -> None:
        """network: on the CPU, with its adapters, which stay on the device whatever is swapped."""
        self.device = device
        self.copies = 0
        """Blocks brought to the device so far."""
        self.late = 0
        """How many of them were brought when they were due already, and not ahead."""
        self._blocks = _blocks(network)
        self._swapped: list[_Block] = []
        self._slots: list[_Slot] = []
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last = -1
        self._step = 1
        self._undo: dict[str, Callable[[], None]] = {}
        self._staging: Tensor | None = None
        """Room for the gradients of one block on their way home."""

    @property
    def swapped(self) -> int:
        """How many blocks are swapped."""
        return len(self._swapped)

    @property
    def count(self) -> int:
        """How many blocks the network has."""
        return len(self._blocks)

    @property
    def trains_blocks(self) -> bool:
        """Whether some block, swapped or not, is trained itself."""
        return any(block.trained for block in self._blocks)

    @property
    def trained(self) -> bool:
        """Whether swapped blocks are trained themselves; their number is then fixed, because the optimizer has begun with them."""
        return any(block.trained for block in self._swapped)

    @property
    def bytes_at_home(self) -> int:
        """Bytes of host RAM."""
        return sum(block.home.bytes for block in self._swapped if block.home is not None)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one of the slots; there are as many slots as swapped blocks, at most two."""
        return len(self._slots[0].buffer) if self._slots else 0

    @property
    def saved_bytes(self) -> int:
        """What the device has more room by."""
        return self.bytes_at_home - sum(len(slot.buffer) for slot in self._slots)

    def summary(self) -> str:
        """A line for the log."""
        pinned = self.swapped > 0 and all(block.home is not None and block.home.pinned for block in self._swapped)
        home, slot, saved = (number / _GIB for number in (self.bytes_at_home, self.slot_bytes, self.saved_bytes))
        largest = max((block.bytes for block in self._blocks), default=0) / _GIB
        return (
            f"{self.swapped} of {self.count} blocks are swapped: {home:.2f} GiB in {'pinned ' if pinned else ''}host RAM, "
            f"{len(self._slots)} x {slot:.2f} GiB for them on the device, {saved:.2f} GiB saved; a block has up to {largest:.2f} GiB"
        )

    def set(self, number: int) -> None:
        """Swaps this many blocks, spread evenly, between two steps or before the first.

        Raises OptionError when there are not so many, or when blocks that are trained themselves are swapped already.
        """
        check_number(number, self.count)
        if number == self.swapped:
            return
        if self.trained:
            text = f"blocks_to_swap: {self.swapped} blocks are swapped and trained; their number cannot change in the middle of a run"
            raise OptionError(Problem("blocks_to_swap", text))
        self._choose([self._blocks[index] for index in spread(number, self.count)], self.device)

    def end(self) -> None:
        """Swaps nothing any more; what was swapped stays in host RAM."""
        self._choose([], torch.device("cpu"))

    def _choose(self, chosen: list[_Block], device: torch.device) -> None:
        """Swaps these blocks; those that are not swapped any more go to `device`."""
        if self._stream is not None:
            torch.cuda.synchronize(self.device)
        self._slots, self._last = [], -1
        for undo in self._undo.values():
            undo()
        self._undo = {}
        # First those that leave: the device may be full.
        for block in chosen:
            if block.home is None:
                block.home = _Home(block.weights, pinned=self._stream is not None)
        for block in self._swapped:
            if block not in chosen:
                assert block.home is not None
                block.home.leave(device)
                block.home = None
        self._swapped = chosen
        size = max((block.home.bytes for block in chosen if block.home is not None), default=0)
        self._slots = [_Slot(size, self.device) for _ in range(min(len(chosen), 2))]
        for index, block in enumerate(chosen):
            self._undo[block.name] = self._wrap(index, block)

    def _wrap(self, index: int, block: _Block) -> Callable[[], None]:
        """Has a block brought before each of its forward passes, outside of compiled code; gives what takes that back."""
        module = block.module
        before, own = module.forward, "forward" in vars(module)

        @torch.compiler.disable(recursive=False)
        def brought(*arguments: Any, **named: Any) -> Any:
            with self._present(index):
                return before(*arguments, **named)

        def move(fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
            """nn.Module._apply, by which networks are brought to devices, of everything but what is swapped."""
            for weight in block.weights:
                weight.put(None)
            try:
                return type(module)._apply(module, fn, recurse)
            finally:
                for weight in block.weights:
                    weight.put(weight.tensor)

        vars(module).update(forward=brought, _apply=move)

        def undo() -> None:
            vars(module).pop("_apply")
            if own:
                vars(module)["forward"] = before
            else:
                vars(module).pop("forward")

        return undo

    @contextmanager
    def _present(self, index: int) -> Iterator[None]:
        """Within the block the weights of a swapped block are on the device."""
        block = self._swapped[index]
        slot = self._fetch(index)
        hooks = self._notes(index, slot) if torch.is_grad_enabled() else nullcontext()
        try:
            for weight, tensor in zip(block.weights, self._tensors(index, slot), strict=True):
                weight.put(tensor)
            with hooks:
                yield
        finally:
            for weight in block.weights:
                weight.put(weight.tensor)

    def _tensors(self, index: int, slot: _Slot) -> list[Tensor]:
        """The weights of a block in a slot, as its modules take them."""
        home = self._swapped[index].home
        assert home is not None
        if index not in slot.views:
            slot.views[index] = [
                weight.made_of(layout.view(slot.buffer) for layout in mine) for weight, mine in zip(home.weights, home.layouts, strict=True)
            ]
        found = slot.views[index]
        trained = [weight.tensor for weight in home.weights if weight.trained]
        if not trained or not torch.is_grad_enabled():
            return found
        # New views, because autograd makes them part of this pass's graph.
        views = [mine[0].view(slot.buffer) for weight, mine in zip(home.weights, home.layouts, strict=True) if weight.trained]
        brought = iter(_Brought.apply(self, views, *trained))
        return [next(brought) if weight.trained else tensor for weight, tensor in zip(home.weights, found, strict=True)]

    # Bringing blocks.

    def _fetch(self, index: int) -> _Slot:
        """The slot that a block lies in, from now until two other blocks were fetched; the next one is on its way."""
        in_backward = torch._C._current_graph_task_id() != -1
        slot = next((slot for slot in self._slots if slot.holds == index), None)
        if self._swapped[index].trained and not in_backward:
            if slot is not None and not slot.ahead:
                slot = None
            if slot is None:
                # A new pass: the optimizer may have been at work.
                for other in self._slots:
                    other.holds = None
        if slot is None:
            self.late += 1
            slot = self._fill(index)
        slot.ahead = False
        if slot.arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(slot.arrived)
        far = abs(index - self._last) != 1
        self._step = (-1 if in_backward else 1) if far else index - self._last
        self._last = index
        following = self._following(index)
        if following is not None and all(slot.holds != following for slot in self._slots):
            self._fill(following).ahead = not in_backward
        return slot

    def _following(self, index: int) -> int | None:
        """The swapped block that will be wanted after this one."""
        following = index + self._step
        if 0 <= following < self.swapped:
            return following
        # A pass without gradient is followed by another pass or by none.
        wraps = following == self.swapped and not torch.is_grad_enabled() and not self.trained
        return 0 if wraps else None

    def _fill(self, index: int) -> _Slot:
        """Begins to bring a block to the slot that was used longer ago."""
        slot = next((slot for slot in self._slots if slot.holds is None), None)
        slot = slot or next(slot for slot in self._slots if len(self._slots) == 1 or slot.holds != self._last)
        home = self._swapped[index].home
        assert home is not None
        stream, slot.arrived = self._stream, None
        if stream is not None:
            # Whatever reads what lies there now was issued before.
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.no_grad(), torch.cuda.stream(stream):
            slot.buffer[: home.bytes].copy_(home.flat, non_blocking=True)
        if stream is not None:
            slot.arrived = stream.record_event()
        slot.holds = index
        self.copies += 1
        return slot

    def sent_home(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of one block's weights in host RAM, there when this returns: the CPU does not wait for a GPU by itself."""
        if self._staging is None:
            self._staging = torch.empty(self.slot_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)
        staged: list[Tensor | None] = []
        end = 0
        for gradient in gradients:
            if gradient is None:
                staged.append(None)
                continue
            at = self._staging[end : end + gradient.numel() * gradient.dtype.itemsize].view(gradient.dtype).view(gradient.shape)
            staged.append(at.copy_(gradient, non_blocking=True))
            end += _aligned(gradient.numel() * gradient.dtype.itemsize)
        if self._stream is not None:
            torch.cuda.current_stream(self.device).synchronize()
        # Not in pinned memory, of which torch takes up to twice as much as is asked for.
        return [None if at is None else at.clone() for at in staged]

    # Notes of the backward pass.

    def _notes(self, index: int, slot: _Slot) -> torch.autograd.graph.saved_tensors_hooks:
        """Has autograd keep notes in place of tensors in the slot; others go where they would go without, which may be a checkpoint."""
        keep, give = hooks_outside()

        def pack(tensor: Tensor) -> Any:
            return self._note(index, slot, tensor) or keep(tensor)

        def unpack(kept: Any) -> Tensor:
            return self._noted(kept) if isinstance(kept, _Note) else give(kept)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _note(self, index: int, slot: _Slot, tensor: Tensor) -> _Note | None:
        # Asked of each tensor that autograd keeps, so the usual answer comes first. Other classes may have no memory of their own.
        if type(tensor) in _PLAIN:
            return _Note(index, [_layout(tensor)], None) if slot.has(tensor) else None
        if not is_traceable_wrapper_subclass(tensor):
            return None
        plain = list(_plain(tensor))
        return _Note(index, [_layout(one) for one in plain], tensor) if all(slot.has(one) for one in plain) else None

    def _noted(self, note: _Note) -> Tensor:
        slot = self._fetch(note.block)
        plain = (layout.view(slot.buffer) for layout in note.layouts)
        return next(plain) if note.like is None else _rebuilt(note.like, plain)


def check_number(number: int, count: int) -> None:
    """Raises OptionError where more blocks are to be swapped than a network has."""
    if number > count:
        text = f"blocks_to_swap: the network has {count} blocks, not {number}; set it to {count} or less"
        raise OptionError(Problem("blocks_to_swap", text))


def check(swap: BlockSwap, sharded: bool, optimizer_type: str) -> None:
    """Raises OptionError where blocks_to_swap cannot do what the options ask for: several processes that hold or train the same weights, an
    optimizer that cannot move weights in host RAM. sharded: the weights are, over the processes."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if sharded:
        text = "fsdp2 shards the weights over the processes already; set it to 0, or distributed_strategy to ddp"
    elif several and swap.trains_blocks:
        text = "blocks that are trained themselves cannot be swapped by several processes; set it to 0, or use one process"
    elif swap.trains_blocks and optimizer_type in ON_ONE_DEVICE:
        text = (
            f"{optimizer_type} needs all weights on one device, and trained blocks that are swapped are moved in host RAM; set it to 0, "
            "or take the optimizer_type AdamW, Adafactor, Lion or SGD"
        )
    else:
        return
    raise OptionError(Problem("blocks_to_swap", f"blocks_to_swap: {text}"))


class _Brought(torch.autograd.Function):
    """Trained weights of a block in its slot; their gradients go home together, when the last of them is there."""

    @staticmethod
    def forward(ctx: Any, swap: BlockSwap, views: Sequence[Tensor], *homes: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.swap = swap
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.swap.sent_home(gradients)


def hooks_outside() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """What autograd does by now with a tensor that it keeps, and to have it back. Hooks that are set inside are called in their place."""
    outside = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return outside if outside is not None else (_same, _same)


def _same(tensor: Any) -> Any:
    return tensor


def _blocks(network: nn.Module) -> list[_Block]:
    """The blocks of a network with the weights that can go home: those that nobody outside of the block has and that are no adapter's."""
    adapters = {id(tensor) for tensor in all_adapter_tensors(network)}
    uses: dict[int, int] = {}
    for _, _, tensor in _held(network):
        uses[id(tensor)] = uses.get(id(tensor), 0) + 1
    found = []
    for path, block in blocks_of(network).items():
        weights: dict[int, _Weight] = {}
        for module, name, tensor in _held(block):
            if id(tensor) not in adapters:
                weights.setdefault(id(tensor), _Weight(tensor, [])).places.append((module, name))
        found.append(_Block(path, block, [weight for key, weight in weights.items() if len(weight.places) == uses[key]]))
    return found


def _held(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Parameters and buffers with each module that has them and their name there."""
    for inside in module.modules():
        for group in (inside._parameters, inside._buffers):
            yield from ((inside, name, tensor) for name, tensor in group.items() if tensor is not None)
