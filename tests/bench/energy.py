"""Style transfer's loss: CPU milliseconds of each part of it, forward and backward with all draws, for latents of the toy VAE and of SD's;
then seconds of a whole step and the memory it needs at most, against the number of integration steps, on one thread.

usage: energy.py [samples in a batch, default 16]
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from report import median, report, resident_mib
from torch import Tensor

from sd_scripts.families.lgt.energy import Energy
from sd_scripts.families.lgt.model import Lgt
from sd_scripts.families.lgt.options import LgtModelOptions, LgtObjectiveOptions
from sd_scripts.library.core.diffusion import FlowPath
from sd_scripts.library.core.protocols import Batch, Beginning, Condition, Parts

ROUNDS = 5
STYLES = ("flat", "line", "night")
REFERENCES = 8
LATENTS = {"16x16x16": (16, 16, 16), "4x32x32": (4, 32, 32)}
NONE = {"w_style": 0.0, "w_content": 0.0, "w_flow": 0.0}
PARTS: dict[str, dict[str, object]] = {
    "flow": {"w_flow": 1.0},
    "style": {"w_style": 1.0},
    "style, sample by sample": {"w_style": 1.0, "swd_pooling": "sample"},
    "content": {"w_content": 1.0},
    "content, all places": {"w_content": 1.0, "content_positions": 65536},
    "low": {"w_low": 1.0},
    "velocity": {"w_velocity": 1.0, "w_velocity_tv": 1.0},
}
INTEGRATIONS = [(steps, again) for again in ("yes", "no") for steps in (1, 4, 16)]


@dataclass
class Free:
    """A network that costs nothing: what is measured is the loss."""

    velocity: Tensor
    kind: str = "velocity"
    takes_edges: bool = False

    def told(self, entries: Sequence[Condition]) -> Free:
        return self

    def __call__(self, x_t: Tensor, t: Tensor) -> Tensor:
        return self.velocity + 0 * x_t


@dataclass
class Bound:
    """The U-Net with the conditions of a batch."""

    parts: Parts
    conditions: Sequence[Condition]
    kind: str = "velocity"
    takes_edges: bool = False

    def edges(self, latents: torch.Tensor) -> torch.Tensor:
        return Lgt().edge_map(self.parts, latents)

    def told(self, entries: Sequence[Condition]) -> Bound:
        return Bound(self.parts, entries)

    def __call__(self, x_t: Tensor, t: Tensor) -> Tensor:
        return Lgt().denoise(self.parts, x_t, t, self.conditions)


def batch_of(size: int, latents: tuple[int, ...], condition: Callable[[str], Condition]) -> Batch:
    goals = [STYLES[place % len(STYLES)] for place in range(size)]
    conditions = [condition(goal) for goal in goals]
    return Batch(
        x0=torch.randn(size, *latents),
        conditions=conditions,
        numbers=torch.arange(size),
        weights=torch.ones(size),
        names=goals,
        towards=conditions[1:] + conditions[:1],
        goals=goals[1:] + goals[:1],
        references=[torch.randn(REFERENCES, *latents) for _ in range(size)],
    )


def cpu_seconds(do: Callable[[], object]) -> float:
    """CPU time of one call: other programs on the machine do not count."""
    started = time.process_time()
    do()
    return time.process_time() - started


def parts_of_the_loss(size: int) -> None:
    for name, latents in LATENTS.items():
        batch = batch_of(size, latents, lambda _: {})
        network = Free(torch.randn(size, *latents, requires_grad=True))
        figures: dict[str, float] = {}
        for part, given in PARTS.items():
            objective = Energy(FlowPath(), LgtObjectiveOptions(**{**NONE, "w_flow": 1e-9, "ode_integration_steps": 1, **given}))

            def step(objective=objective, batch=batch, network=network) -> None:  # type: ignore[no-untyped-def]
                objective(network, batch, 0).loss.sum().backward()

            step()
            figures[part] = 1000 * median([cpu_seconds(step) for _ in range(ROUNDS)])
        report("parts of the energy, CPU ms", "none", latents=name, batch=size, **figures)


def one_integration(size: int, num_steps: int, again: str) -> None:
    """Alone in a process, whose highest memory is that of these steps."""
    options = LgtModelOptions(vae="toy", base_channels=32, channel_multipliers=(1, 2, 4), layers_per_block=1, attention_head_dim=32)
    parts = Lgt().build(options, Beginning(0, ((128, 128),), Lgt().files(options, STYLES)), torch.device("cpu"), torch.float32)
    parts.backbone.requires_grad_(True).train()
    batch = batch_of(size, LATENTS["16x16x16"], lambda style: Lgt().encode_prompts(parts, [style])[0])
    given = LgtObjectiveOptions(w_flow=0.0, ode_integration_steps=num_steps, checkpoint_steps=again == "yes")
    objective = Energy(parts.path, given)

    def step() -> None:
        parts.backbone.zero_grad(set_to_none=True)
        objective(Bound(parts, batch.conditions), batch, 0).loss.sum().backward()

    before = resident_mib()
    seconds = median([cpu_seconds(step) for _ in range(3)])
    # Not that of getrusage, which begins with the highest memory of the process that started this one. Linux alone has it.
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024 - before
    report("integration steps", "none", steps=num_steps, computed_again=again, batch=size, seconds=seconds, peak_mib=peak)


def main(arguments: Sequence[str]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = int(arguments[0]) if arguments else 16
    if len(arguments) == 3:
        one_integration(size, int(arguments[1]), arguments[2])
        return
    parts_of_the_loss(size)
    for num_steps, again in INTEGRATIONS:
        subprocess.run([sys.executable, __file__, str(size), str(num_steps), again], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
