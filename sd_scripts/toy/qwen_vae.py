"""Train the toy VAE of Qwen-Image: an AutoencoderKLQwenImage that is only ever shown single images.

Knows images and latents, not instructions. The loop is autoencoder.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from torch import Tensor
from torch.nn import functional

from . import autoencoder, edits, worlds
from .autoencoder import LATENT_CHANNELS, VaeSettings

# Shapes: B samples, C = 16 latent channels, H W image sides in pixels, h = H / 8, w = W / 8. The frame axis of length 1 is added and
# taken away here.


@dataclass(frozen=True)
class QwenVaeSettings(VaeSettings):
    """How the toy VAE of Qwen-Image is trained."""

    num_steps: int = 3400
    learning_rate: float = 2.5e-3
    shape_weight: float = 3.0
    num_decoder_steps: int = 0
    """None: its norms see one place at a time, and it draws grounds of 128 pixels as they are."""


def new_vae(seed: int) -> AutoencoderKLQwenImage:
    """An untrained VAE with f8 and 16 channels; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 2, 4, 4],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.0] * LATENT_CHANNELS,
            latents_std=[1.0] * LATENT_CHANNELS,
        )
    with torch.no_grad():
        for conv in _convolutions(vae):
            # Of a single image only the last tap of the frame axis sees anything: the others see the causal padding.
            conv.weight[:, :, :-1] = 0
    return vae


def _convolutions(vae: AutoencoderKLQwenImage) -> list[QwenImageCausalConv3d]:
    return [module for module in vae.modules() if isinstance(module, QwenImageCausalConv3d)]


@contextmanager
def single_images(vae: AutoencoderKLQwenImage) -> Iterator[None]:
    """Inside, the causal convolutions over frames run as those over one image that they are: the same result, several times as fast."""
    convolutions = _convolutions(vae)

    def forward_of(conv: QwenImageCausalConv3d) -> Callable[..., Tensor]:
        sides = (conv._padding[2], conv._padding[0])  # rows, columns; torch's order begins with the last axis

        def forward(x: Tensor, cache_x: Tensor | None = None) -> Tensor:
            assert x.shape[2] == 1, x.shape
            return functional.conv2d(x[:, :, 0], conv.weight[:, :, -1], conv.bias, padding=sides)[:, :, None]

        return forward

    for conv in convolutions:
        conv.forward = forward_of(conv)
    try:
        yield
    finally:
        for conv in convolutions:
            del conv.forward


def any_image(width: int, height: int, rng: np.random.Generator) -> tuple[Image.Image, np.ndarray]:
    """An image to train on, and a mask (height, width) in [0, 1] of what counts more: autoencoder's, and those of the edits.

    One in four has a border, dark or of any colour, of any width that may be seen.
    """
    if rng.random() < 0.5:
        image, mask = autoencoder.any_image(width, height, rng)
    else:
        kind = edits.OLD_KINDS[int(rng.integers(len(edits.OLD_KINDS)))]
        image = edits.draw(edits.edit_of(kind, rng, held_out=rng.random() < 0.1), width, height, rng)[int(rng.integers(2))]
        pixels = np.asarray(image, dtype=np.float32)
        mask = np.clip(np.linalg.norm(pixels - pixels[0, 0], axis=2) / 200, 0, 1)
    if rng.random() < 0.25:
        color = edits.FRAME_COLOR if rng.random() < 0.6 else tuple(rng.integers(0, 256, size=3).tolist())
        num_pixels = edits.frame_pixels(width, height) + (0 if rng.random() < 0.6 else int(rng.integers(-1, 4)))
        framed = edits.framed(image, color, num_pixels)
        mask = np.maximum(mask, np.any(np.asarray(framed) != np.asarray(image), axis=2))
        image = framed
    return image, mask


def posterior_of(vae: AutoencoderKLQwenImage, pixels: Tensor) -> DiagonalGaussianDistribution:
    """The posterior of images (B, 3, H, W), whose mean and sample are (B, C, 1, h, w), not normalised."""
    return DiagonalGaussianDistribution(vae.quant_conv(vae.encoder(pixels[:, :, None])))


def decoded(vae: AutoencoderKLQwenImage, latents: Tensor) -> Tensor:
    """Images (B, 3, H, W) of latents (B, C, 1, h, w), not normalised. decode() cuts off what is too bright, and with it the gradient."""
    return vae.decoder(vae.post_quant_conv(latents))[:, :, 0]


def train_vae(settings: QwenVaeSettings, seed: int) -> AutoencoderKLQwenImage:
    """A VAE trained from nothing; latents_mean and latents_std in its config are those of the latents of the edit world."""
    vae = new_vae(seed)
    shown = autoencoder.batches(settings, seed, any_image)
    with single_images(vae):
        autoencoder.fit(vae, lambda pixels: posterior_of(vae, pixels), lambda latents: decoded(vae, latents), shown, settings, seed)
        mean, deviation = _latent_statistics(vae, seed)
    vae.register_to_config(latents_mean=[round(v, 4) for v in mean.tolist()], latents_std=[round(v, 4) for v in deviation.tolist()])
    return vae


@torch.no_grad()
def _latent_statistics(vae: AutoencoderKLQwenImage, seed: int) -> tuple[Tensor, Tensor]:
    # Mean and deviation (C,) of the most likely latents over sources and targets at all sizes.
    latents = []
    for index, (width, height) in enumerate(worlds.SIZES):
        images: list[Image.Image] = []
        for number in range(90):
            rng = worlds.rng_for(seed, 4, index, number)
            kind = edits.OLD_KINDS[number % len(edits.OLD_KINDS)]
            images += edits.draw(edits.edit_of(kind, rng), width, height, rng)
        latents.append(posterior_of(vae, autoencoder.to_pixels(images)).mode().transpose(0, 1).flatten(1))
    together = torch.cat(latents, dim=1)
    return together.mean(dim=1), together.std(dim=1)


def statistics(vae: AutoencoderKLQwenImage) -> tuple[Tensor, Tensor]:
    """latents_mean and latents_std as (1, C, 1, 1)."""
    mean, deviation = (torch.tensor(values)[None, :, None, None] for values in (vae.config.latents_mean, vae.config.latents_std))
    return mean, deviation


@torch.no_grad()
def latents_of(vae: AutoencoderKLQwenImage, pixels: Tensor) -> Tensor:
    """Normalised most likely latents (B, C, h, w) of pixels (B, 3, H, W) in [-1, 1]."""
    mean, deviation = statistics(vae)
    with single_images(vae):
        return (posterior_of(vae, pixels).mode()[:, :, 0] - mean) / deviation


def encode(vae: AutoencoderKLQwenImage, images: list[Image.Image]) -> Tensor:
    """The same of images of one size."""
    return latents_of(vae, autoencoder.to_pixels(images))


@torch.no_grad()
def decode(vae: AutoencoderKLQwenImage, latents: Tensor) -> list[Image.Image]:
    """The images of normalised latents (B, C, h, w)."""
    mean, deviation = statistics(vae)
    with single_images(vae):
        return autoencoder.to_images(decoded(vae, (latents * deviation + mean)[:, :, None]))
