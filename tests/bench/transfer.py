"""Transfer of style: CPU seconds of an image and calls of the network for each sampler and start, with guidance and with temperature, and
what guessing the source costs, in turns in one process.

usage: transfer.py [side in pixels, default 128] [steps, default 15] [base_channels, default 32]
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from report import median, report
from torch import Tensor

from sd_scripts.families.lgt.model import Lgt
from sd_scripts.families.lgt.options import LgtModelOptions
from sd_scripts.families.lgt.transfer import Settings, guess_source, num_calls, transfer
from sd_scripts.library.core.protocols import Beginning, Parts
from sd_scripts.library.core.rng import rng_for

ROUNDS = 5
STYLES = ("flat", "line", "night")


def parts_of(side: int, channels: int) -> Parts:
    """A new model in the latents of the built-in VAE, with a last layer that is not zero."""
    options = LgtModelOptions(vae="toy", base_channels=channels, layers_per_block=1, attention_head_dim=channels)
    beginning = Beginning(0, ((side, side),), Lgt().files(options, STYLES))
    parts = Lgt().build(options, beginning, torch.device("cpu"), torch.float32)
    parts.backbone.conv_out.weight.normal_(std=0.05, generator=rng_for(0, 0, "bench"))
    return parts


def seconds(do: Callable[[], object]) -> float:
    """CPU time of one call: other programs on the machine do not count."""
    started = time.process_time()
    do()
    return time.process_time() - started


def main(side: int, steps: int, channels: int) -> None:
    parts, family = parts_of(side, channels), Lgt()
    x: Tensor = torch.randn((1, parts.vae.config.latent_channels, side // 8, side // 8), generator=rng_for(0, 0, "image"))
    plain = Settings(steps)
    ways = {
        "euler": replace(plain, sampler="euler"),
        "midpoint": plain,
        "heun": replace(plain, sampler="heun"),
        "midpoint, from noise": replace(plain, start="noise"),
        "midpoint, guided": replace(plain, cfg_scale=2.0),
        "midpoint, temperature": replace(plain, temperature=0.3),
    }
    found: dict[str, list[float]] = {name: [] for name in (*ways, "guess")}
    for round_number in range(ROUNDS + 1):
        for name, taken in found.items():

            def do(name: str = name) -> None:
                if name == "guess":
                    guess_source(family, parts, x)
                else:
                    transfer(family, parts, x, ["flat"], ["line"], [0], ways[name])

            spent = seconds(do)
            # The first round is for warming up.
            if round_number:
                taken.append(spent)
    millions = sum(weight.numel() for weight in parts.backbone.parameters()) / 1e6
    for name, settings in ways.items():
        sizes = {"side": side, "steps": steps, "million_weights": millions}
        report("transfer", "-", way=name, **sizes, network_calls=num_calls(settings), seconds_per_image=median(found[name]))
    report("guessing the source", "-", side=side, styles=len(STYLES), million_weights=millions, seconds_per_image=median(found["guess"]))


if __name__ == "__main__":
    main(*(int(given) if given else default for given, default in zip((*sys.argv[1:], "", "", "")[:3], (128, 15, 32), strict=True)))
