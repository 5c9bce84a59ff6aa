"""Compilation of the network."""

from typing import Annotated, ClassVar, Literal

from .fields import Section, Show, WholeNumber

_ON = Show(needs="compile")


class CompileOptions(Section):
    """torch.compile of the denoising network."""

    title: ClassVar[str] = "Torch Compile"

    compile: bool = False
    """Compile the network's code before the first step, which then takes a minute or more; later steps are faster. Previews and validation
    run the plain code. Saved files and states are the same as without it, and a run may be continued with or without."""
    compile_scope: Annotated[Literal["auto", "blocks", "network"], _ON] = "auto"
    """What becomes one piece of code: each kind of block, which is quick to compile, or the whole network. auto takes what docs/compile.md
    found faster: the network on a CPU, blocks on a GPU and wherever blocks are swapped."""
    compile_backend: Annotated[Literal["inductor", "cudagraphs", "eager", "aot_eager"], _ON] = "inductor"
    """What makes the code: inductor is the fast one and needs a C++ compiler (on a GPU Triton); cudagraphs replays the plain kernels
    without Python between them; the others are for finding faults."""
    compile_mode: Annotated[
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"], Show(needs="compile_backend=inductor")
    ] = "default"
    """How much inductor tries: reduce-overhead replays CUDA graphs, max-autotune measures kernels too, which takes long at the start,
    max-autotune-no-cudagraphs measures without CUDA graphs."""
    compile_dynamic: Annotated[Literal["auto", "true", "false"], _ON] = "auto"
    """Whether one code serves images of all sizes: auto makes code for the first size and then for any, false a code for each size."""
    compile_fullgraph: Annotated[bool, _ON] = False
    """Stop with a sentence where a piece of code cannot be compiled in one, instead of running the rest of it plain."""
    compile_cache_size_limit: Annotated[WholeNumber | None, _ON] = None
    """Most versions of one piece of code (sizes, with and without gradient) before the plain code runs instead. None, or 0, means 64."""
    compile_fallback: Annotated[bool, _ON] = False
    """Train with the plain code, and say why, where compiling fails; without it the run stops with the reason."""

    @property
    def graph_option(self) -> str:
        """The option by which CUDA graphs are used, for sentences; empty without them."""
        if self.compile_backend == "cudagraphs":
            return "compile_backend cudagraphs"
        return f"compile_mode {self.compile_mode}" if self.compile_mode in ("reduce-overhead", "max-autotune") else ""

    @property
    def records_addresses(self) -> bool:
        """Whether the code is recorded with the addresses of weights, as CUDA graphs are."""
        return self.compile and bool(self.graph_option)
