"""Drawing with a small DDPM: CPU seconds of an image and calls of the network for each sampler, and ddim beside a bare loop around
diffusers' scheduler with the same network, in turns in one process.

usage: drawing.py [side in pixels, default 32] [steps, default 30]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from diffusers import DDIMScheduler
from report import median, report

from sd_scripts.families.ddpm.model import Ddpm
from sd_scripts.families.ddpm.options import DDPM_SAMPLERS, DdpmModelOptions
from sd_scripts.families.ddpm.rendering import Settings, draw
from sd_scripts.library.core.protocols import Beginning, Parts, Preview
from sd_scripts.library.core.rng import rng_for

ROUNDS = 5
CAPTION, SCALE = "a red circle at the top left", 3.0


def parts_of(side: int) -> Parts:
    """A new model in pixels with 2.2 million weights in its U-Net."""
    options = DdpmModelOptions(base_channels=32, channel_multipliers=(1, 2, 2), attention_levels=(2,), text_width=64, text_layers=2)
    beginning = Beginning(0, ((side, side),), Ddpm().files(options, [CAPTION]))
    return Ddpm().build(options, beginning, torch.device("cpu"), torch.float32)


@torch.no_grad()
def bare(parts: Parts, side: int, steps: int) -> None:
    """One image by the least code that draws it, with the same network, guidance and clamp."""
    scheduler = DDIMScheduler.from_config({**parts.scheduler_config, "clip_sample": True})
    scheduler.set_timesteps(steps)
    conditions = Ddpm().encode_prompts(parts, [CAPTION, ""])
    x = torch.randn((1, 3, side, side), generator=rng_for(0, 0, "drawing"))
    for k in scheduler.timesteps:
        positive, negative = Ddpm().predict(parts, torch.cat([x, x]), k.float().expand(2), conditions).chunk(2)
        x = scheduler.step(negative + SCALE * (positive - negative), k, x).prev_sample


def seconds(do: Callable[[], object]) -> float:
    """CPU time of one call: other programs on the machine do not count."""
    started = time.process_time()
    do()
    return time.process_time() - started


def main(side: int, steps: int) -> None:
    parts = parts_of(side)
    request = Preview(CAPTION, width=side, height=side, seed=0, steps=steps, cfg_scale=SCALE)
    found: dict[str, list[float]] = {name: [] for name in ("bare", *DDPM_SAMPLERS)}
    calls: dict[str, int] = {}
    for round_number in range(ROUNDS + 1):
        for name, taken in found.items():

            def do(name: str = name) -> None:
                if name == "bare":
                    bare(parts, side, steps)
                else:
                    calls[name] = draw(Ddpm(), parts, [replace(request, sampler=name)], Settings()).num_calls

            spent = seconds(do)
            # The first round is for warming up.
            if round_number:
                taken.append(spent)
    for name in DDPM_SAMPLERS:
        report("drawing", "-", sampler=name, side=side, steps=steps, network_calls=calls[name], seconds_per_image=median(found[name]))
    ratio = median([ours / theirs for ours, theirs in zip(found["ddim"], found["bare"], strict=True)])
    report("drawing, ddim beside a bare loop", "at most 1.03", side=side, steps=steps, ratio=ratio)


if __name__ == "__main__":
    main(*(int(given) if given else default for given, default in zip((*sys.argv[1:], "", "")[:2], (32, 30), strict=True)))
