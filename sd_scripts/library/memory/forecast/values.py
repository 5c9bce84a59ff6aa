"""What is asked of a forecast of memory, and what it says: plain values, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Size = tuple[int, int]
GIB = 2**30
CONTEXT = int(0.6 * GIB)
"""What a process has on a GPU besides PyTorch's tensors: CUDA's context and the code of kernels. 0.4 to 0.7 GiB by card and driver."""
WORKSPACE = 32 * 2**20
"""cuBLAS's, which PyTorch takes from its own memory."""
GAPS = 0.05
"""Of the tensors' memory, what lies idle between them in PyTorch's segments of 2 and 20 MiB, and what a driver keeps of a card."""
PROCESS = 2 * GIB
"""Host RAM of a process that trains, without networks: PyTorch, CUDA and diffusers, images of the next batches."""
CARDS = (8, 12, 16, 24, 32, 48, 80)
"""GiB of common cards."""


@dataclass(frozen=True)
class Bucket:
    """A size at which a run trains."""

    size: Size
    """(width, height) in pixels."""
    controls: tuple[Size, ...] = ()


@dataclass(frozen=True)
class Questions:
    """What of a run's data its memory depends on."""

    buckets: tuple[Bucket, ...]
    """The largest first."""
    caption: str
    """The longest."""
    previews: tuple[tuple[Size, int, float], ...] = ()
    """(width, height), number and cfg_scale of each kind of preview."""
    evaluation: tuple[Size, int, float] | None = None
    """Of style transfer: (width, height) of the largest source, number of styles and cfg_scale."""
    num_controls: int = 0
    """Control images of a preview."""


@dataclass(frozen=True)
class Phase:
    """What is on the device in one phase of a run at its peak."""

    name: str
    """caching, training or previews."""
    about: str
    """What is counted: sizes, batch."""
    parts: dict[str, int]
    """Bytes by part, the largest first; zeros are left out."""
    num_blocks: int = 0
    """Of training: blocks that the network has."""
    at_home: int = 0
    """Of training: bytes of host RAM for swapped blocks, with gradients and optimizer where they are trained."""
    tables: int = 0
    """Of training: bytes of host RAM for layers that are kept there, and tables of what they give."""
    offloaded: int = 0
    """Of training: bytes of host RAM for what recomputed blocks begin with."""
    weights: int = 0
    """Of training: bytes of the denoising network as it is read, before anything of it is on the device."""
    optimizer_known: bool = True
    """Of training: off where the optimizer's state could not be measured, and counts as AdamW's."""

    @property
    def total(self) -> int:
        """Bytes: what torch.cuda.max_memory_allocated would say."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Forecast:
    """The memory of a run."""

    phases: tuple[Phase, ...]
    published: str = ""
    """The model whose published configuration was taken, because the run's own is not on this disk; empty otherwise."""
    notes: tuple[str, ...] = ()
    """Sentences."""
    host: int = 0
    """Bytes of host RAM that all processes of the run on this machine need."""
    host_there: int = 0
    """Bytes of host RAM of this machine."""

    @property
    def worst(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def total(self) -> int:
        """Bytes of tensors at the peak."""
        return self.worst.total

    @property
    def on_card(self) -> int:
        """Bytes that the card shows at the peak, with what PyTorch and CUDA take besides."""
        return int(self.total * (1 + GAPS)) + CONTEXT

    def fits(self, card: int) -> bool:
        """Whether the run fits on a card of so many bytes in this machine."""
        return self.on_card <= card and self.host <= self.host_there

    def of(self, name: str) -> Phase | None:
        """The phase of this name, where the run has it."""
        return next((phase for phase in self.phases if phase.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """For programs: bytes by phase and part."""
        phases = [{"name": one.name, "about": one.about, "bytes": one.total, "parts": one.parts} for one in self.phases]
        return {
            "bytes": self.total,
            "on_card": self.on_card,
            "worst": self.worst.name,
            "host": self.host,
            "host_there": self.host_there,
            "phases": phases,
            "published": self.published,
            "notes": list(self.notes),
        }


def about_host(host: int, there: int, swapped: int, tables: int = 0) -> list[str]:
    """What of the host RAM that is needed swapped blocks and tables take, and whether it is there: sentences."""
    found = [f"Swapped blocks take {swapped / GIB:.1f} GiB of it."] if swapped else []
    # The modulation's layers may be held in fewer bits there, too.
    found += [f"The modulation and its tables take up to {tables / GIB:.1f} GiB of it."] if tables else []
    return found + ([f"This machine has {there / GIB:.1f} GiB."] if host > there else [])


def phase(name: str, about: str, parts: dict[str, int]) -> Phase:
    """The phase with these parts."""
    return Phase(name, about, dict(sorted(((part, size) for part, size in parts.items() if size > 0), key=lambda item: -item[1])))
