"""What a family states about itself without torch: frozen, complete, and with no default that could be wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
    companions: tuple[str, ...]
    """Model options that name a network beside the base model's own."""
    whole_files: bool
    """Whether a single file of it holds all networks of a model, so that nothing else is looked for."""
    network: NetworkFacts
