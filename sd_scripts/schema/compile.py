"""Compilation of the network."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import model_validator

from .fields import Section, Show, raise_all

_ON = Show(needs="compile")


class CompileOptions(Section):
    """torch.compile of the denoising network."""

    title: ClassVar[str] = "Torch Compile"

    compile: bool = False
    """Compile the network's code before the first step, which then takes a minute or more; later steps are faster. Previews and validation
    run the plain code. Saved files and states are the same as without it, and a run may be continued with or without."""
    compile_backend: Annotated[Literal["inductor", "aot_eager", "eager"], _ON] = "inductor"
    """What makes the code: inductor is the fast one and needs a C++ compiler (on a GPU Triton); the others are for finding faults."""
    compile_dynamic: Annotated[Literal["auto", "true", "false"], _ON] = "auto"
    """Whether one code serves pictures of all sizes: auto makes code for the first size and then for any, false a code for each size."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        if not self.compile and (self.compile_backend != "inductor" or self.compile_dynamic != "auto"):
            raise_all(["compile_backend and compile_dynamic have no effect without compile; turn it on"])
        return self
