"""Train the toy VAE of Qwen-Image-2.1: an AutoencoderKLQwenImage21 with its 64 channels, one latent for 16 x 16 pixels, and alpha.

Squares of 4 x 4 pixels go in as channels, which the class can and the published model does not do: at full size a step takes many times as
long. Knows images and latents, not captions. The loop is autoencoder.py's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import AutoencoderKLQwenImage21
from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import QwenImage21AttentionBlock, QwenImage21ResidualBlock, _unpatchify
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from torch import Tensor

from . import autoencoder, edits, worlds
from .autoencoder import VaeSettings

LATENT_CHANNELS = 64
_SQUARE = 4
_NUM_COLORS = 3 * 16
"""Latent channels that begin as colours: those of 4 x 4 squares of 4 x 4 pixels."""
_WIDTH, _DECODER_WIDTH = _NUM_COLORS + 4, 32

# Shapes: B samples, C = 64 latent channels, H W image sides in pixels, h = H / 16, w = W / 16.


@dataclass(frozen=True)
class Qwen21VaeSettings(VaeSettings):
    """How the toy VAE of Qwen-Image-2.1 is trained: on images as large as those that it is used for."""

    num_steps: int = 5000
    batch_size: int = 8
    learning_rate: float = 2e-3
    shape_weight: float = 3.0
    num_decoder_steps: int = 0


def new_vae(seed: int) -> AutoencoderKLQwenImage21:
    """An untrained VAE; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vae = AutoencoderKLQwenImage21(
            base_dim=_WIDTH,
            decoder_base_dim=_DECODER_WIDTH,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 1, 1],
            num_res_blocks=0,
            temperal_downsample=[False, False],
            latents_mean=[0.0] * LATENT_CHANNELS,
            latents_std=[1.0] * LATENT_CHANNELS,
            in_channels=4 * _SQUARE**2,
            out_channels=4 * _SQUARE**2,
            patch_size=_SQUARE,
        )
    _pass_colors(vae)
    return vae


_LENGTH = 14.0
"""A number beside an encoder's colours, whose length is below 7: norms then divide by nearly the same everywhere, and keep the colours."""
_DECODER_LENGTH = 5.0


@torch.no_grad()
def _pass_colors(vae: AutoencoderKLQwenImage21) -> None:
    # The latents begin as the mean colours of squares of 4 x 4 pixels, and the decoder by showing their mean: from a random beginning
    # networks as narrow as these learn brightness first and colours late, or never. Residual blocks begin as what they add to.
    for module in vae.modules():
        if isinstance(module, QwenImage21ResidualBlock | QwenImage21AttentionBlock):
            last = module.conv2 if isinstance(module, QwenImage21ResidualBlock) else module.proj
            last.weight.zero_()
            last.bias.zero_()
    encoder, decoder, num = vae.encoder, vae.decoder, _NUM_COLORS
    of_square = torch.zeros(3, 4 * _SQUARE**2)
    for color in range(3):
        of_square[color, color * _SQUARE**2 : (color + 1) * _SQUARE**2] = 1 / _SQUARE**2
    encoder.conv_in.weight[: num + 1] = 0
    encoder.conv_in.weight[:3, :, 1, 1] = of_square
    encoder.conv_in.bias[: num + 1] = torch.zeros(num + 1).index_fill(0, torch.tensor([num]), _LENGTH)
    for number, block in enumerate(list(encoder.down_blocks)[:-1]):
        conv = block.downsampler.resample[1]
        conv.weight[: num + 1] = 0
        conv.bias[: num + 1] = 0
        # Four squares become four channels; the mean of them, which the block adds besides, is taken away.
        for channel in range(num):
            conv.weight[channel, channel, :2, :2] = -0.25
        for channel in range(3 * 4**number):
            for place in range(4):
                conv.weight[4 * channel + place, channel, place // 2, place % 2] += 1
    # silu(x) is nearly x / 2 of small x.
    encoder.norm_out.gamma.fill_(0.5)
    scale = 2 * _LENGTH / (0.5 * _WIDTH**0.5)
    encoder.conv_out.weight[:num] = 0
    encoder.conv_out.weight[:num, :num, 1, 1] = scale * torch.eye(num)
    encoder.conv_out.bias[:num] = 0
    encoder.conv_out.weight[LATENT_CHANNELS:] = 0
    encoder.conv_out.bias[LATENT_CHANNELS:] = -5
    for conv in (vae.quant_conv, vae.post_quant_conv):
        conv.weight.copy_(torch.eye(conv.weight.shape[0])[:, :, None, None])
        conv.bias.zero_()
    # Of the decoder channel k carries a colour and k + 3 its negative, as silu(x) - silu(-x) = x.
    signs = torch.cat([torch.eye(3), -torch.eye(3)])
    decoder.conv_in.weight[:7] = 0
    decoder.conv_in.weight[:6, :num, 1, 1] = signs.repeat_interleave(16, dim=1) / 16
    decoder.conv_in.bias[:7] = torch.tensor([0.0] * 6 + [_DECODER_LENGTH])
    for block in list(decoder.up_blocks)[:-1]:
        block.upsampler.resample[1].weight[:7] = 0
        block.upsampler.resample[1].bias[:7] = 0
    decoder.conv_out.weight.mul_(0.1)
    decoder.conv_out.weight[:, :6] = 0
    scale = _DECODER_LENGTH / _DECODER_WIDTH**0.5
    decoder.conv_out.weight[: 3 * _SQUARE**2, :6, 1, 1] = scale * signs.T.repeat_interleave(_SQUARE**2, dim=0)
    decoder.conv_out.bias[:] = torch.tensor([0.0] * 3 * _SQUARE**2 + [1.0] * _SQUARE**2)


def _opaque(pixels: Tensor) -> Tensor:
    # (B, 3, H, W) -> (B, 4, H, W)
    return torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1)


def posterior_of(vae: AutoencoderKLQwenImage21, drawn: Tensor) -> DiagonalGaussianDistribution:
    """Of pixels with alpha (B, 4, H, W) in [-1, 1]; its samples are (B, C, 1, h, w)."""
    return vae.encode(drawn[:, :, None]).latent_dist


def decoded(vae: AutoencoderKLQwenImage21, latents: Tensor) -> Tensor:
    """Pixels with alpha of latents (B, C, 1, h, w), not normalised. decode() cuts off what is too bright, and with it the gradient."""
    pixels: Tensor = _unpatchify(vae.decoder(vae.post_quant_conv(latents), first_chunk=True), _SQUARE)
    return pixels[:, :, 0]


def train_vae(settings: Qwen21VaeSettings, seed: int) -> AutoencoderKLQwenImage21:
    """A VAE trained from nothing; latents_mean and latents_std in its config are those of sampled latents of both worlds."""
    vae = new_vae(seed)
    shown = autoencoder.batches(settings, seed, sizes=worlds.sizes_of("qwen_image21"))
    autoencoder.fit(
        vae,
        lambda drawn: posterior_of(vae, drawn),
        lambda latents: decoded(vae, latents),
        ((_opaque(pixels), weights) for pixels, weights in shown),
        settings,
        seed,
    )
    mean, deviation = _latent_statistics(vae, seed)
    vae.register_to_config(latents_mean=[round(v, 4) for v in mean.tolist()], latents_std=[round(v, 4) for v in deviation.tolist()])
    return vae


@torch.no_grad()
def _latent_statistics(vae: AutoencoderKLQwenImage21, seed: int) -> tuple[Tensor, Tensor]:
    # Mean and deviation (C,) of sampled latents over scenes, and sources and targets of edits, at all sizes.
    latents, torch_rng = [], torch.Generator().manual_seed(seed)
    for index, (width, height) in enumerate(worlds.sizes_of("qwen_image21")):
        images: list[Image.Image] = []
        for number in range(60):
            rng = worlds.rng_for(seed, 4, index, number)
            kind = edits.OLD_KINDS[number % len(edits.OLD_KINDS)]
            images += edits.draw(edits.edit_of(kind, rng), width, height, rng)
            images.append(worlds.draw(worlds.TRAINED[number % len(worlds.TRAINED)], width, height, rng))
        drawn = _opaque(autoencoder.to_pixels(images))
        latents += [posterior_of(vae, some).sample(torch_rng).transpose(0, 1).flatten(1) for some in drawn.split(20)]
    together = torch.cat(latents, dim=1)
    return together.mean(dim=1), together.std(dim=1)


@torch.no_grad()
def latents_of(vae: AutoencoderKLQwenImage21, pixels: Tensor) -> Tensor:
    """Normalised most likely latents (B, C, h, w) of opaque pixels (B, 3, H, W) in [-1, 1]."""
    mean, deviation = (torch.tensor(values)[None, :, None, None] for values in (vae.config.latents_mean, vae.config.latents_std))
    return (posterior_of(vae, _opaque(pixels)).mode()[:, :, 0] - mean) / deviation
