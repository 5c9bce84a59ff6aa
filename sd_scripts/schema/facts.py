"""What a family states about itself without torch: frozen, complete, and with no default that could be wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class TensorNames(Protocol):
    """Names and shapes of the tensors in a file, see library.loading.headers.Header."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def has(self, *parts: str) -> bool:
        """Whether some tensor's name contains one of these."""
        ...

    def starts(self, *prefixes: str) -> bool:
        """Whether some tensor's name starts with one of these."""
        ...


@dataclass(frozen=True)
class Sign:
    """A kind of file that is told by the names and shapes of its tensors."""

    what: str
    """A noun for a sentence: "a VAE alone"."""
    recognises: Callable[[TensorNames], bool]
    """True for no file of another family."""


@dataclass(frozen=True, kw_only=True)
class FamilyFacts:
    """Everything the program must know of a family besides its options and its model. What is missing is an error at import."""

    label: str
    """The family's name on the page."""
    place: int
    """Where it stands in lists, from 0; two families never have the same."""
    edits: bool
    """Whether its models may take control images: an EditingFamily."""
    lora_module: str | None
    """What in kohya's programs trains such a LoRA, for headers; None for families without adapters."""
    signs: tuple[Sign, ...]
    """Kinds of its files and of those that are taken for them; the first that recognises a file counts."""
