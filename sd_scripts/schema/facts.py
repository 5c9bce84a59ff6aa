"""What a family states about itself without torch: frozen, complete, and with no default that could be wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


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
class NetworkFacts:
    """What memory, kernels and compiled code follow from. Functions take the model options of a run."""

    head_sizes: Callable[[Any], tuple[int, ...]]
    """Numbers of each attention head: in published models, or as the options have it."""
    text_lengths_vary: Callable[[Any], bool]
    """Whether the denoising network is given texts of different lengths."""
    always_masked: bool
    """Whether attention is told in every call what is padding; off where only texts of different lengths need that."""
    mostly_weights: bool
    """Whether the network's weights are most of what training has on the device."""
    guided_together: bool
    """Whether previews ask the network for both sides of guidance at once."""
    quantized_encoder: str | None
    """The text encoder that text_encoder_quantization is about, by its name in Parts.modules(); None where no option quantises one."""
    vae_in_16_bits: bool
    """Whether the published VAE computes in 16 bits what it does in 32."""


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
    companions: tuple[str, ...]
    """Model options that name a network beside the base model's own."""
    whole_files: bool
    """Whether a single file of it holds all networks of a model, so that nothing else is looked for."""
    network: NetworkFacts
