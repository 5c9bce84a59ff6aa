"""Memory that a computation would take, followed storage by storage while it runs on the meta device. Knows no model and no options.

Nothing is computed there, so a pass of a network of any size takes seconds and no memory, but every tensor is born and dies as on a real
device: a Ledger writes both down. Two things differ on the meta device and are put right: attention, which has no fused kernel there and
would be charged with all its weights, and autocast, which leaves meta tensors alone.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from sd_scripts.library.core.devices import META

BLOCK = 512
"""Bytes that PyTorch's CUDA allocator rounds each tensor up to."""


def rounded(num_bytes: int, block: int = BLOCK) -> int:
    """Bytes that the allocator counts for a tensor of so many."""
    return -(-num_bytes // block) * block


def bytes_of(tensors: Iterable[Tensor], block: int = BLOCK) -> int:
    """Bytes of tensors, those that share their memory once."""
    storages = {id(storage): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(rounded(size, block) for size in storages.values())


class Ledger(TorchDispatchMode):
    """Follows the memory of all meta tensors that are born within the block, to the byte."""

    def __init__(self, block: int = BLOCK) -> None:
        """block: what the size of each tensor is rounded up to; 1 counts bytes as they are."""
        super().__init__()
        self.live: int = 0
        """Bytes of what is born and not dead."""
        self.peak: int = 0
        """The most that `live` has been."""
        self._block = block
        self._watched: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and to say so costs more than each call itself.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        # AsOnDevice has had its say, and would be asked anew for every shape and stride that is looked at here: most of its calls.
        with torch._C.DisableTorchFunction():
            return self._followed(func, args, kwargs or {})

    def _followed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the operation gives; what it bears is counted."""
        kind = _KINDS.get(id(func)) or _kind_of(func)
        if kind is _GIVES_BACK:
            return func(*args, **kwargs)
        key, known = _remembered(func, args, kwargs) if kind is _MAKES_NEW else (None, None)
        if known:
            made = [None if one is None else torch.empty_strided(one[0], one[1], dtype=one[2], device=META) for one in known]
            for tensor in made:
                if tensor is not None:
                    self._count(tensor)
            return tuple(made) if len(made) > 1 else made[0]
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.is_meta}
        result = func(*args, **kwargs)
        # What was an argument is a view or a change in place, of something counted already or older than this ledger.
        new = [
            leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_meta and id(leaf.untyped_storage()) not in given
        ]
        for leaf in new:
            self._count(leaf)
        if key is not None and known is None:
            flat = result if isinstance(result, tuple) else (result,)
            there = [leaf for leaf in flat if leaf is not None]
            whole = len(new) == len(there) and all(map(_is_whole, there)) and isinstance(result, tuple) == (len(flat) > 1)
            _SHAPES[key] = tuple(None if leaf is None else (leaf.shape, leaf.stride(), leaf.dtype) for leaf in flat) if whole else ()
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._watched:
            return
        size = rounded(storage.nbytes(), self._block)

        def died(_: object) -> None:
            del self._watched[key]
            self.live -= size

        self._watched[key] = weakref.ref(storage, died)
        self.live += size
        self.peak = max(self.peak, self.live)


_Shapes = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype] | None, ...]
_SHAPES: dict[Any, _Shapes] = {}
"""A memo, of what operations give by what they are asked: most have their meta form in Python, which takes a millisecond, and the blocks of
a network ask the same again and again. None for a gradient that nobody wants; empty for what is no new tensor that fills its memory."""


_GIVES_BACK, _MAKES_NEW, _DOES_BOTH = "gives back", "makes new", "does both"
_KINDS: dict[int, str] = {}
"""A memo of kinds of operations, by their ids: they live for ever, and their hash is made in Python."""


def _kind_of(func: Any) -> str:
    """Whether all that an operation gives is a view of an argument, or an argument that it has changed, as of half of all calls; or whether
    it changes no argument and gives no view of one, as far as it says."""
    returns, arguments = func._schema.returns, func._schema.arguments
    if returns and all(one.alias_info for one in returns):
        kind = _GIVES_BACK
    else:
        kind = _DOES_BOTH if any(one.alias_info for one in (*arguments, *returns)) else _MAKES_NEW
    return _KINDS.setdefault(id(func), kind)


def _remembered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, _Shapes | None]:
    """What decides the shapes of an operation's results, and those shapes if it was asked so before; None for what is not to be remembered,
    and for what is not known yet."""
    key = (id(func), _told(args), _told(tuple(kwargs.items())) if kwargs else ())
    try:
        return key, _SHAPES.get(key)
    except TypeError:
        return None, None


def _is_whole(tensor: Tensor) -> bool:
    """Whether a tensor is all that is in its storage."""
    alone = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    return type(tensor) is Tensor and not tensor.storage_offset() and tensor.untyped_storage().nbytes() == alone.untyped_storage().nbytes()


def _told(value: Any) -> Any:
    """What decides the shape of a result: of tensors shape, stride, precision and device, of numbers their kind too (1 is not 1.0)."""
    if value is None:
        return None
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype, value.device)
    if isinstance(value, (tuple, list)):
        return tuple(map(_told, value))
    return (type(value), value)


_LOWER = frozenset(
    "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu addmm addmv addr matmul rmatmul einsum mm mv linear "
    "addbmm baddbmm bmm scaled_dot_product_attention".split()
)
_FLOAT32 = frozenset(
    "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow rpow softplus layer_norm rms_norm group_norm "
    "cosine_similarity kl_div l1_loss smooth_l1_loss huber_loss mse_loss binary_cross_entropy_with_logits cdist logsumexp norm "
    "interpolate".split()
)
_FLOAT32_RESULT = frozenset("prod softmax log_softmax cumprod cumsum vector_norm linalg_vector_norm sum".split())
"""Names of the operations that autocast computes in the lower precision, in float32, and with a result in float32, of
torch/include/ATen/autocast_mode.h."""


@cache
def _kind(func: Any) -> frozenset[str] | None:
    """Which of these an operation belongs to, if any."""
    name = getattr(func, "__name__", "").strip("_")
    return next((names for names in (_LOWER, _FLOAT32, _FLOAT32_RESULT) if name in names), None)


class AsOnDevice(TorchFunctionMode):
    """Lets the meta device compute as a real one does: with fused attention, and within `autocast` in the lower precision."""

    def __init__(self, precision: torch.dtype | None, fused: bool = True, sums_in_float32: bool = True) -> None:
        """precision: that of autocast, None without. fused: whether attention has a kernel that keeps no weights, as all but `math` have.
        sums_in_float32: whether such a kernel adds up gradients in float32, as those of CUDA do."""
        super().__init__()
        self._precision, self._fused, self._sums = precision, fused, sums_in_float32
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}
        """Of trained weights, the weight and its cast, kept until the block of autocast ends."""
        self._keeps_casts = False

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        kind = _kind(func)
        if kind is None:
            return func(*args, **kwargs)
        if self._precision is not None:
            if kind is _LOWER:
                args, kwargs = _cast(self._lowered, args, kwargs)
            elif kind is _FLOAT32:
                args, kwargs = _cast(_raised, args, kwargs)
            elif kwargs.get("dtype") is None and args and _is_low(args[0]):
                kwargs = {**kwargs, "dtype": torch.float32}
        if func is torch.nn.functional.scaled_dot_product_attention and self._fused:
            q, k, v = (*args, *(kwargs[name] for name in ("query", "key", "value") if name in kwargs))[:3]
            if q.is_meta and q.dim() == 4:
                return _Attention.apply(q, k, v, self._sums)
        return func(*args, **kwargs)

    def __enter__(self) -> Self:
        # torch.autocast refuses the meta device, even to be turned off there, as families do around their VAE.
        self._real, self._asked = torch.autocast, self._precision
        torch.autocast = self._block_of
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.autocast = self._real
        super().__exit__(*error)

    @contextmanager
    def _block_of(self, device_type: str, *args: Any, enabled: bool = True, **kwargs: Any) -> Iterator[None]:
        """torch.autocast while this mode is on: a block on the meta device with `enabled` off has no lower precision inside."""
        if device_type != META.type:
            with self._real(device_type, *args, enabled=enabled, **kwargs):
                yield
            return
        before, self._precision = self._precision, self._asked if enabled else None
        try:
            yield
        finally:
            self._precision = before

    def _lowered(self, tensor: Tensor) -> Tensor:
        assert self._precision is not None
        if not tensor.is_meta or not tensor.is_floating_point() or tensor.dtype in (self._precision, torch.float64):
            return tensor
        if not (self._keeps_casts and tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32):
            return tensor.to(self._precision)
        if id(tensor) not in self._casts:
            self._casts[id(tensor)] = (tensor, tensor.to(self._precision))
        return self._casts[id(tensor)][1]

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Around what stands in a block of torch.autocast: casts of trained weights are kept until it ends."""
        self._keeps_casts = True
        try:
            yield
        finally:
            self._keeps_casts = False
            self._casts.clear()


def backward(loss: Tensor) -> None:
    """The backward pass of a number, in which AsOnDevice stays on for what is recomputed there: loss.backward() would leave it."""
    one = torch.ones_like(loss)
    _engine_run_backward((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _cast(change: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with their tensors changed, those in lists too."""

    def cast(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        return tree_map_only(Tensor, change, value) if isinstance(value, list | tuple | dict) else value

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def _is_low(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta and value.dtype in (torch.bfloat16, torch.float16)


def _raised(tensor: Tensor) -> Tensor:
    return tensor.float() if _is_low(tensor) else tensor


class _Attention(torch.autograd.Function):
    """The memory of a fused attention kernel: it keeps q, k, v, the result and a float32 for each query, and no weights."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sums_in_float32: bool) -> Tensor:
        # (B, H, L, D), laid out as (B, L, H, D), as the kernels do it.
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        ctx.sums_in_float32 = sums_in_float32
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        q, k, v, _, sums = ctx.saved_tensors
        found = [torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)]
        if ctx.sums_in_float32:
            # Dead when the gradients leave.
            torch.empty_like(q, dtype=torch.float32)
            torch.empty_like(sums)
        return (*found, None)


def optimizer_bytes(make: Callable[[], torch.optim.Optimizer], weights: Iterable[Tensor], block: int = BLOCK) -> tuple[int, int]:
    """Bytes of an optimizer's state after a step, and the most that a step has besides; its weights are on the meta device."""
    weights, optimizer = list(weights), make()
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    with Ledger(block) as ledger:
        optimizer.step()
        state = ledger.live
    for weight in weights:
        weight.grad = None
    return state, ledger.peak - state
