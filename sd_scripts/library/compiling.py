"""torch.compile of the denoising network, in place: names of weights, saved files and states are those of the plain network."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from sd_scripts.schema.compile import CompileOptions
from sd_scripts.schema.errors import OptionError, Problem

from .errors import TrainingError

MOST_VERSIONS = 64
"""Of one piece of code: sizes of pictures, with and without gradient, with and without an adapter. torch's own limit is 8, beyond which it
runs the plain code without a word."""
REMEDY = "install one, choose another compile_backend, or turn compile off"


def check(options: CompileOptions, device: torch.device) -> None:
    """Raises OptionError where inductor has nothing that makes machine code."""
    if not options.compile or options.compile_backend != "inductor":
        return
    # Heavy, and only here: nobody else needs it.
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    try:
        if device.type == "cpu":
            get_cpp_compiler()
        elif device.type == "cuda" and not has_triton():
            raise OptionError(Problem("compile_backend", f"compile_backend: inductor needs the package triton on a GPU; {REMEDY}"))
    except (InvalidCxxCompiler, OSError) as err:
        text = f"compile_backend: inductor needs a C++ compiler (g++ or clang++, on Windows cl), and none works here; {REMEDY}"
        raise OptionError(Problem("compile_backend", text)) from err


def compile_network(network: nn.Module, options: CompileOptions) -> None:
    """Has the network's code compiled when it is first called, with everything that is attached to it by now."""
    torch._dynamo.config.recompile_limit = MOST_VERSIONS
    torch._dynamo.config.accumulated_recompile_limit = 8 * MOST_VERSIONS
    network.compile(backend=options.compile_backend, dynamic={"auto": None, "true": True, "false": False}[options.compile_dynamic])


def plain_code(network: nn.Module) -> AbstractContextManager[object]:
    """Within the block a compiled network runs its plain code: previews and validation have other sizes and no gradient, and for a few
    calls compiling takes longer than it saves."""
    return torch.compiler.set_stance("force_eager") if network._compiled_call_impl is not None else nullcontext()


@contextmanager
def explained() -> Iterator[None]:
    """Turns an error of the compiler within the block into a sentence; others pass."""
    from torch._dynamo.exc import TorchDynamoException

    try:
        yield
    except TorchDynamoException as err:
        said = " ".join(line.strip() for line in str(err).strip().splitlines()[:2])
        raise TrainingError(
            f"the network cannot be compiled here ({said}); try compile_backend = aot_eager, or turn compile off: "
            "training goes on from the last saved state, and computes the same"
        ) from err
