"""Train the built-in VAE of photographs: `python -m sd_scripts.toy.photograph_vae`. Owns bases/photographs.

Knows images and latents. It sees crops of the photographs that are learned from, in all styles, never the one that is for tests.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.upsampling import Upsample2D
from PIL import Image
from torch import Tensor, nn

from . import autoencoder, drawn_photographs, worlds
from .autoencoder import VaeSettings
from .build import BASES, settle, versions, write_json

LATENT_CHANNELS = 8
SIZES = ((drawn_photographs.SIDE, drawn_photographs.SIDE),)


@dataclass(frozen=True)
class PhotographSettings(VaeSettings):
    """How it is trained: at the side that it is used at, so that norms over the whole image see what they will see."""

    num_steps: int = 2000
    batch_size: int = 2
    learning_rate: float = 1.5e-3
    kl_weight: float = 2e-4
    color_weight: float = 4.0
    num_decoder_steps: int = 0


# Shapes: C = 8 latent channels, h w = a quarter of the image's sides.


def new_vae(seed: int) -> AutoencoderKL:
    """An untrained VAE with f4 and 8 channels; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = AutoencoderKL(
            in_channels=3,
            out_channels=3,
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=(16, 48, 64),
            layers_per_block=1,
            latent_channels=LATENT_CHANNELS,
            # Norms of small groups take an image's mean colour away.
            norm_num_groups=1,
            sample_size=drawn_photographs.SIDE,
            scaling_factor=1.0,
            shift_factor=0.0,
            mid_block_add_attention=False,
        )
    _pass_colors(vae)
    return vae


@torch.no_grad()
def _pass_colors(vae: AutoencoderKL) -> None:
    # The latents begin as the mean colours of 4 x 4 pixels, and the decoder by showing them: from a random beginning networks as narrow as
    # these learn brightness first and colours late, or never. Residual blocks begin as what they add to. Channel k carries a colour and
    # k + 3 its negative, as silu(x) - silu(-x) = x.
    signs = torch.cat([torch.eye(3), -torch.eye(3)])
    for part in (vae.encoder, vae.decoder):
        part.conv_in.weight[:6] = 0
        part.conv_in.weight[:6, :3, 1, 1] = signs
        part.conv_in.bias[:6] = 0
        part.conv_out.weight[:3] = 0
        part.conv_out.weight[:3, :6, 1, 1] = signs.T
        part.conv_out.bias[:3] = 0
        for module in part.modules():
            if isinstance(module, ResnetBlock2D):
                module.conv2.weight.zero_()
                module.conv2.bias.zero_()
                if module.conv_shortcut is not None:
                    _keep_colors(module.conv_shortcut, torch.ones(1, 1))
            elif isinstance(module, Downsample2D):
                _keep_colors(module.conv, torch.tensor([[0.25, 0.25, 0], [0.25, 0.25, 0], [0, 0, 0]]))
            elif isinstance(module, Upsample2D):
                _keep_colors(module.conv, torch.tensor([[0.0, 0, 0], [0, 1, 0], [0, 0, 0]]))
    for conv in (vae.quant_conv, vae.post_quant_conv):
        conv.weight[:3] = torch.eye(*conv.weight.shape[:2])[:3, :, None, None]
        conv.bias[:3] = 0


def _keep_colors(conv: nn.Conv2d, kernel: Tensor) -> None:
    # The first six channels come from their own alone, by this kernel.
    conv.weight[:6] = torch.eye(*conv.weight.shape[:2])[:6, :, None, None] * kernel
    conv.bias[:6] = 0


def any_image(width: int, height: int, rng: np.random.Generator) -> tuple[Image.Image, np.ndarray]:
    """A crop of a photograph in a style, half with exchanged colours, and a mask (height, width) of what counts more in it: nothing."""
    name = drawn_photographs.TRAINED[int(rng.integers(len(drawn_photographs.TRAINED)))]
    style = list(drawn_photographs.STYLES)[int(rng.integers(len(drawn_photographs.STYLES)))]
    image = drawn_photographs.draw(drawn_photographs.crop(name, rng, width), style, rng)
    if rng.random() < 0.5:
        image = Image.fromarray(np.asarray(image)[..., rng.permutation(3)])
    return image, np.zeros((height, width))


def train_vae(settings: PhotographSettings, seed: int) -> AutoencoderKL:
    """A VAE trained from nothing, whose latents of all styles together have mean 0 and deviation 1 in each channel."""
    vae = new_vae(seed)
    autoencoder.fit(
        vae,
        lambda pixels: vae.encode(pixels).latent_dist,
        lambda latents: vae.decode(latents).sample,
        autoencoder.batches(settings, seed, any_image, SIZES),
        settings,
        seed,
    )
    autoencoder.fold_scale(vae, *_latent_statistics(vae, seed))
    return vae


@torch.no_grad()
def _latent_statistics(vae: AutoencoderKL, seed: int) -> tuple[Tensor, Tensor]:
    # Mean and deviation (C,) of sampled latents.
    images = [any_image(*SIZES[0], worlds.rng_for(seed, 0, n))[0] for n in range(60)]
    rng = torch.Generator().manual_seed(seed)
    latents = vae.encode(autoencoder.to_pixels(images)).latent_dist.sample(rng).transpose(0, 1).flatten(1)
    return latents.mean(dim=1), latents.std(dim=1)


def errors(vae: AutoencoderKL, num: int = 6, seed: int = 1) -> dict[str, float]:
    """Style -> mean difference of crops of the photograph for tests to what the VAE makes of them, of 255."""
    found = {}
    for style in drawn_photographs.STYLES:
        rngs = [worlds.rng_for(seed, n) for n in range(num)]
        images = [drawn_photographs.draw(drawn_photographs.crop(drawn_photographs.TESTED, rng), style, rng) for rng in rngs]
        seen, made = (
            np.stack([np.asarray(image, np.float64) for image in some]) for some in (images, autoencoder.reconstruct(vae, images))
        )
        found[style] = round(float(np.abs(seen - made).mean()), 2)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m sd_scripts.toy.photograph_vae", description=__doc__.split(":")[0] + ".")
    parser.add_argument("--out", type=Path, default=BASES / "photographs", help="folder of the base")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num_steps", type=int, help="training steps; default: the recipe's")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    settings, started = PhotographSettings(), time.process_time()
    if given.num_steps is not None:
        settings = replace(settings, num_steps=given.num_steps)
    vae = train_vae(settings, given.seed)
    seconds = round(time.process_time() - started)
    vae.half().save_pretrained(given.out / "vae", safe_serialization=True)
    settle(given.out / "vae")
    record = {"seed": given.seed, "settings": asdict(settings), "cpu_seconds": seconds, "errors": errors(vae.float())}
    write_json(given.out / "BUILD.json", {"vae": record, "libraries": versions(), "python": platform.python_version()})
    logging.info("the VAE is in %s after %d CPU seconds; off on average by %s of 255", given.out, seconds, record["errors"])


if __name__ == "__main__":
    main()
