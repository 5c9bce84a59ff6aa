"""torch.compile of the denoising network, in place: names of weights, saved files and states are those of the plain network.

What becomes one piece of code is the whole network, or each kind of its blocks. Blocks of a kind share code, so their number does not
count. The code of a block stands at the level of its `forward`, so what wraps that later, and every hook, stays outside of it.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from time import perf_counter
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn

from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.library.core.errors import TrainingError
from sd_scripts.runs.events import Compiling
from sd_scripts.schema.compile import CompileOptions
from sd_scripts.schema.errors import OptionError, Problem

from .oom_advice import is_out_of_memory

log = logging.getLogger("sd_scripts")

MOST_VERSIONS = 64
"""Of one piece of code: sizes of images, with and without gradient, with and without an adapter. torch's own limit is 8, beyond which it
runs the plain code without a word."""
ADVICE = "install one, choose another compile_backend, or turn compile off"
_MARK = "_code_of_blocks"
"""Attribute of a network whose blocks are compiled."""
_OF_NO_INTEREST = ("The .grad attribute of a Tensor that is not a leaf", "Dynamo detected a call to a `functools.lru_cache`")
"""Beginnings of warnings about what torch reads itself while it compiles, and about diffusers' checkpointing."""
_MAKERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton")
"""Modules whose errors are those of compiling."""

Scope = Literal["network", "blocks"]
Forward = Callable[..., Any]


def check(options: CompileOptions, device: torch.device) -> str:
    """Why inductor cannot make machine code here, where compile_fallback lets the run go on without; empty where it can.

    Raises OptionError with that reason where it is off, and for options that cannot work on this device or in this launch.
    """
    if not options.compile:
        return ""
    launcher = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if launcher.lower() not in ("", "no"):
        text = f"compile: the launcher compiles too (dynamo_backend {launcher.lower()}), and one of them is enough; set that one to no"
        raise OptionError(Problem("compile", text))
    if options.records_addresses and device.type != "cuda":
        name, value = options.graph_option.split()
        text = f"{name}: {value} replays CUDA graphs, and this run is on {device.type.upper()}; choose compile_mode default"
        raise OptionError(Problem(name, f"{text} with compile_backend inductor" if name == "compile_backend" else text))
    missing = _missing(device) if options.compile_backend == "inductor" else ""
    if missing and not options.compile_fallback:
        raise OptionError(Problem("compile_backend", f"compile_backend: inductor needs {missing}; {ADVICE}"))
    return f"compile is off: inductor needs {missing}" if missing else ""


def _missing(device: torch.device) -> str:
    """What inductor needs to make machine code for the device and does not find."""
    # Heavy, and only here: nobody else needs it.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    try:
        if device.type == "cpu":
            get_cpp_compiler()
    except (InvalidCxxCompiler, OSError):
        return "a C++ compiler (g++ or clang++, on Windows cl), and none works here"
    return "the package triton on a GPU" if device.type == "cuda" and not has_triton() else ""


def scope_of(options: CompileOptions, device: torch.device, swapped: bool, network: nn.Module) -> Scope:
    """What is compiled in one piece: what the options say, or what docs/compile.md found faster; a network without blocks as a whole."""
    if not blocks_of(network):
        return "network"
    if options.compile_scope == "auto":
        return "network" if device.type == "cpu" and not swapped else "blocks"
    return options.compile_scope


def compile_network(network: nn.Module, options: CompileOptions, device: torch.device, swapped: bool = False) -> Compilation:
    """Has the network's code compiled when it is first called, with everything that is attached to it by now.

    swapped: something will bring the weights of blocks before their code runs.
    """
    scope = scope_of(options, device, swapped, network)
    blocks = blocks_of(network) if scope == "blocks" else {}
    signatures = {_signature(block) for block in blocks.values()}
    made = Compilation(network, options, scope, max(1, 2 * len(signatures)))
    of_one_kind = max((sum(kind is other for other, *_ in signatures) for kind, *_ in signatures), default=1)
    made.limit = (options.compile_cache_size_limit or MOST_VERSIONS) * of_one_kind
    torch._dynamo.config.recompile_limit = made.limit
    torch._dynamo.config.accumulated_recompile_limit = 8 * made.limit
    if options.compile_backend == "inductor":
        keep_code()
    for words in _OF_NO_INTEREST:
        warnings.filterwarnings("ignore", re.escape(words), UserWarning)
    settings = _settings(options)
    if scope == "network":
        _fill_tables(network)
        network.compile(**settings)
        return made
    code = {
        kind: made.switched(torch.compile(kind.forward, **settings), kind.forward) for kind in {type(block) for block in blocks.values()}
    }
    for block in blocks.values():
        # What replaced forward would be left out of the code, or be lost.
        assert "forward" not in vars(block), f"{type(block).__name__}.forward is replaced already"
        block.forward = MethodType(code[type(block)], block)
    setattr(network, _MARK, True)
    return made


def _settings(options: CompileOptions) -> dict[str, Any]:
    """Arguments of torch.compile, which takes a mode for inductor only."""
    return {
        "backend": options.compile_backend,
        "dynamic": {"auto": None, "true": True, "false": False}[options.compile_dynamic],
        "fullgraph": options.compile_fullgraph,
        **({"mode": options.compile_mode} if options.compile_backend == "inductor" else {}),
    }


def _signature(block: nn.Module) -> tuple[Any, ...]:
    """Equal for blocks that share code: their class, and names and shapes of their weights."""
    return type(block), *((name, tuple(weight.shape)) for name, weight in block.named_parameters())


def _fill_tables(network: nn.Module) -> None:
    """Computes the positions that some transformers keep of their first call, which no compiler can follow."""
    embedder = getattr(network, "rope_embedder", None)
    if embedder is not None and embedder.freqs_cis is None:
        embedder.freqs_cis = embedder.precompute_freqs_cis(embedder.axes_dims, embedder.axes_lens, theta=embedder.theta)


def keep_code() -> None:
    """Has inductor keep what it makes in the user's folder for caches, unless the environment names another: its own one lies among
    temporary files. triton keeps its kernels beside."""
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:
        return
    base = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME") or "~/.cache"
    folder = Path(base).expanduser() / "kohya_like" / "compiled"
    # A home that cannot be written is no reason to stop: inductor has a folder of its own then.
    with suppress(OSError, RuntimeError):
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def is_compiled(network: nn.Module) -> bool:
    """Whether the network, or each of its blocks, runs compiled code."""
    return network._compiled_call_impl is not None or _MARK in vars(network)


def plain_code(network: nn.Module) -> AbstractContextManager[object]:
    """Within the block a compiled network runs its plain code: previews and validation have other sizes and no gradient, and for a few
    calls compiling takes longer than it saves."""
    return torch.compiler.set_stance("force_eager") if is_compiled(network) else nullcontext()


@dataclass
class CompiledCode:
    """Code that was made."""

    graphs: int = 0
    seconds: float = 0.0
    """That compiling took, on whatever thread."""
    full: bool = False
    """The limit of versions was reached: what is new runs the plain code from now on."""


class _Watch:
    """Counts what torch compiles in this process, with its clock."""

    def __init__(self) -> None:
        from torch._dynamo.callback import callback_handler
        from torch._dynamo.utils import counters

        self._counters, self._handler = counters, callback_handler
        self._seconds, self._began = 0.0, 0.0
        self._before = self._counted()
        callback_handler.register_start_callback(self._start)
        callback_handler.register_end_callback(self._end)

    def _start(self, _: object) -> None:
        self._began = perf_counter()

    def _end(self, _: object) -> None:
        self._seconds += perf_counter() - self._began

    def _counted(self) -> tuple[int, int]:
        """Graphs, and how often a limit of versions was met, by torch's own counts."""
        refused = sum(number for said, number in self._counters["unimplemented"].items() if "recompile limit exceeded" in said)
        return self._counters["stats"]["unique_graphs"], refused

    def take(self) -> CompiledCode:
        before, self._before = self._before, self._counted()
        made = CompiledCode(self._before[0] - before[0], self._seconds, self._before[1] > before[1])
        self._seconds = 0.0
        return made

    def close(self) -> None:
        # torch._dynamo.reset() forgets them, too.
        with suppress(ValueError):
            self._handler.remove_start_callback(self._start)
            self._handler.remove_end_callback(self._end)


class Compilation:
    """The code of one network: what it is made of, how much of it was made, and a way back to plain code."""

    def __init__(self, network: nn.Module, options: CompileOptions, scope: Scope, pieces: int) -> None:
        """pieces: graphs that one version of the code consists of, at most."""
        self.network, self.options, self.scope, self.pieces = network, options, scope, pieces
        self.limit = MOST_VERSIONS
        self.expected: int | None = None
        """Most graphs that the run should need; None where nobody knows."""
        self.graphs, self.seconds = 0, 0.0
        """Made so far, and what that took."""
        self.given_up = False
        self._watch = _Watch()
        self._told: set[str] = set()

    def switched(self, compiled: Forward, plain: Forward) -> Forward:
        """The compiled code, and the plain one once compiling was given up."""

        @wraps(plain)
        def forward(*arguments: Any, **named: Any) -> Any:
            return (plain if self.given_up else compiled)(*arguments, **named)

        return forward

    def expect(self, versions: int | None) -> None:
        """versions: how many there will be of each piece, at most; None where nobody knows."""
        self.expected = None if versions is None else versions * self.pieces

    def describe(self) -> Compiling:
        """What will be compiled."""
        options = self.options
        return Compiling(
            scope=self.scope,
            backend=options.compile_backend,
            mode=options.compile_mode if options.compile_backend == "inductor" else None,
            dynamic=options.compile_dynamic,
            expected=self.expected,
            limit=self.limit,
        )

    def begin_batch(self) -> None:
        """The backward pass of all batches before is done: CUDA graphs may write over what they have left."""
        if self.options.records_addresses:
            torch.compiler.cudagraph_mark_step_begin()

    def take(self) -> CompiledCode:
        """What was compiled since the last call."""
        made = self._watch.take()
        self.graphs, self.seconds = self.graphs + made.graphs, self.seconds + made.seconds
        return made

    def close(self) -> None:
        """Stops counting."""
        self._watch.close()

    def warnings(self, made: CompiledCode) -> list[str]:
        """What is worth saying about code that was just made, each once in a run."""
        found = {}
        if made.full:
            found["full"] = (
                f"a piece of the network's code has {self.limit} versions, and the plain code runs wherever another would be needed; "
                "choose compile_dynamic auto, or raise compile_cache_size_limit"
            )
        if self.expected is not None and self.graphs > self.expected:
            found["more"] = (
                f"compiling has made {self.graphs} graphs, where {self.expected} were expected at most; each takes time. The environment "
                "variable TORCH_LOGS=recompiles,graph_breaks says why"
            )
        fresh = [text for name, text in found.items() if name not in self._told]
        self._told |= found.keys()
        return fresh

    def gives_up(self, err: BaseException) -> str:
        """Goes back to plain code after a failure of compiling, where the options say so, with the reason; empty for other errors."""
        if self.given_up or not self.options.compile_fallback or not is_failure(err):
            return ""
        self.given_up = True
        if self.scope == "network":
            self.network._compiled_call_impl = None
        return f"the network cannot be compiled here, so the plain code runs, which computes the same ({_first_words(err)})"


def is_failure(err: BaseException) -> bool:
    """Whether an error is one of making code, and not one of what the code computes or of memory."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    causes = [err, *(cause for cause in (err.__cause__, getattr(err, "inner_exception", None)) if cause is not None)]
    if any(is_out_of_memory(cause) for cause in causes):
        return False
    return isinstance(err, TorchDynamoException | FailOnRecompileLimitHit) or type(err).__module__.startswith(_MAKERS)


def _first_words(err: BaseException) -> str:
    return " ".join(line.strip() for line in str(err).strip().splitlines()[:2])


@contextmanager
def explained() -> Iterator[None]:
    """Turns an error of the compiler within the block into a sentence; others pass."""
    try:
        yield
    except Exception as err:
        if "torch._dynamo" not in sys.modules or not is_failure(err):
            raise
        raise TrainingError(
            f"the network cannot be compiled here ({_first_words(err)}); try compile_backend = aot_eager, or turn compile off: "
            "training goes on from the last saved state, and computes the same. compile_fallback does so by itself"
        ) from err
