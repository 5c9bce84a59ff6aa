"""Train the toy VAE: one AutoencoderKL that all families with 16 latent channels can share.

Knows images and latents, not captions. It sees every shape of the world, new ones too, and many that are not in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL import Image
from torch import Tensor, nn

from sd_scripts.dataset.progress import Bar

from . import edits, worlds

LATENT_CHANNELS = 16
DOWNSCALE = 8  # four blocks halve the sides three times


@dataclass(frozen=True)
class VaeSettings:
    """How a toy VAE is trained."""

    num_steps: int = 3600
    batch_size: int = 16
    learning_rate: float = 2e-3
    num_warmup_steps: int = 100
    kl_weight: float = 3e-4
    """Weight of the mean KL per latent number, beside a reconstruction loss of about 0.02."""
    shape_weight: float = 4.0
    """How many times a pixel of a shape counts compared with one of the background."""
    color_weight: float = 1.0
    """How many times an error of colour counts compared with one of brightness, which all three channels share."""
    num_decoder_steps: int = 1000
    """Steps of each of two more rounds, of the decoder alone, at the sizes of all bases; latents stay as they are. Its norms see the whole
    image: taught at 64 pixels it draws grounds of 128 lighter, by 8 of 255 on average, and without the border that half of the images of
    the last round have it darkens a ground inside of one by as much."""
    decoder_batch_size: int = 8
    decoder_learning_rate: float = 1e-3


# Shapes: B samples, C = 16 latent channels, H W image sides in pixels, h = H / 8, w = W / 8.


def new_vae(seed: int) -> AutoencoderKL:
    """An untrained VAE with f8 and 16 channels; the same seed gives the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoencoderKL(
            in_channels=3,
            out_channels=3,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(16, 32, 32, 64),
            layers_per_block=1,
            latent_channels=LATENT_CHANNELS,
            norm_num_groups=8,
            sample_size=64,
            scaling_factor=1.0,
            force_upcast=False,
        )


def to_pixels(images: list[Image.Image]) -> Tensor:
    """Images of one size as (B, 3, H, W) in [-1, 1], float32."""
    array = np.stack([np.asarray(image.convert("RGB"), dtype=np.float32) for image in images])
    return torch.from_numpy(array).permute(0, 3, 1, 2).contiguous() / 127.5 - 1


def to_images(pixels: Tensor) -> list[Image.Image]:
    """The opposite of to_pixels; values outside [-1, 1] are cut off."""
    array = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    return [Image.fromarray(sample) for sample in array.permute(0, 2, 3, 1).contiguous().numpy()]


def any_image(width: int, height: int, rng: np.random.Generator) -> tuple[Image.Image, np.ndarray]:
    """An image to train a VAE on, and a mask (height, width) in [0, 1] of its shapes.

    Half are scenes of the world in any colour, half are up to three outlines in any colour on any background.
    """
    plain = bool(rng.random() < 0.5)
    lightness = rng.uniform(238, 255) if plain or rng.random() < 0.5 else rng.uniform(0, 255)
    canvas = np.clip(lightness + rng.uniform(-4, 0, 3) * (1 if plain else rng.uniform(0, 20)), 0, 255)
    canvas = np.broadcast_to(canvas, (height, width, 3))
    shown = np.zeros((height, width, 1))
    for _ in range(1 if plain else int(rng.integers(1, 4))):
        corners = worlds.outline(worlds.SHAPES[int(rng.integers(len(worlds.SHAPES)))])
        if not plain and rng.random() < 0.5:
            corners = _any_outline(rng)
        tilt = rng.uniform(-10, 10) if plain else rng.uniform(0, 360)
        radius = (rng.uniform(0.19, 0.26) if plain else rng.uniform(0.12, 0.35)) * min(width, height)
        centre = rng.uniform(0.25, 0.75, size=2) * (width, height)
        mask = worlds.coverage(worlds.turned(corners, tilt) * radius + centre, width, height)[..., None]
        named = list(worlds.COLORS.values())[int(rng.integers(len(worlds.COLORS)))]
        tint = np.clip(named + rng.uniform(-12, 12, 3), 0, 255) if rng.random() < 0.5 else rng.uniform(0, 255, 3)
        canvas = canvas * (1 - mask) + tint * mask
        shown = np.maximum(shown, mask)
    return Image.fromarray(np.rint(canvas).astype(np.uint8)), shown[..., 0]


def any_framed_image(width: int, height: int, rng: np.random.Generator) -> tuple[Image.Image, np.ndarray]:
    """The same, half of them with the border that "add a border" asks for."""
    image, shown = any_image(width, height, rng)
    return edits.framed(image) if rng.random() < 0.5 else image, shown


AnyImage = Callable[[int, int, np.random.Generator], tuple[Image.Image, np.ndarray]]
"""(width, height, rng) -> an image to train on, and the mask (height, width) in [0, 1] of what counts more in it."""


def _any_outline(rng: np.random.Generator) -> np.ndarray:
    num_corners = 2 * int(rng.integers(2, 7))
    angles = np.arange(num_corners) * (2 * np.pi / num_corners)
    radii = np.where(np.arange(num_corners) % 2 == 0, 1.1, rng.uniform(0.35, 1.1)) * rng.uniform(0.85, 1.1, num_corners)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1) * radii[:, None]


def batches(
    settings: VaeSettings, seed: int, drawn: AnyImage = any_image, sizes: tuple[tuple[int, int], ...] = worlds.SIZES
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pixels (B, 3, H, W) and loss weights (B, 1, H, W) of every step: a pure function of seed and step."""
    for step in range(settings.num_steps):
        width, height = sizes[step % len(sizes)]
        numbers = range(step * settings.batch_size, (step + 1) * settings.batch_size)
        images, masks = zip(*(drawn(width, height, worlds.rng_for(seed, n)) for n in numbers), strict=True)
        weights = 1 + (settings.shape_weight - 1) * torch.from_numpy(np.stack(masks)).float()[:, None]
        yield to_pixels(list(images)), weights


def train_vae(settings: VaeSettings, seed: int) -> AutoencoderKL:
    """A VAE trained from nothing, whose latents of the world have mean 0 and deviation 1 in each channel."""
    vae = new_vae(seed)
    fit(
        vae,
        lambda pixels: vae.encode(pixels).latent_dist,
        lambda latents: vae.decode(latents).sample,
        batches(settings, seed),
        settings,
        seed,
    )
    fold_scale(vae, *_latent_statistics(vae, seed))
    teach_decoder(vae, settings, any_image, seed + 1)
    teach_decoder(vae, settings, any_framed_image, seed + 2)
    return vae


def teach_decoder(vae: AutoencoderKL, settings: VaeSettings, drawn: AnyImage, seed: int) -> None:
    """Goes on with the decoder alone, on what the stored encoder will make of images: its weights are halves."""
    vae.half().float()
    settings = replace(
        settings,
        num_steps=settings.num_decoder_steps,
        batch_size=settings.decoder_batch_size,
        learning_rate=settings.decoder_learning_rate,
    )
    for part in (vae.post_quant_conv, vae.decoder):
        part.requires_grad_(True)
    fit(
        vae,
        lambda pixels: vae.encode(pixels).latent_dist,
        lambda latents: vae.decode(latents).sample,
        batches(settings, seed, drawn, worlds.SIZES + worlds.LARGE_SIZES),
        settings,
        seed,
    )


def fit(
    vae: nn.Module,
    encode: Callable[[Tensor], DiagonalGaussianDistribution],
    decode: Callable[[Tensor], Tensor],
    shown: Iterator[tuple[Tensor, Tensor]],
    settings: VaeSettings,
    seed: int,
) -> None:
    """Trains a VAE in place on the batches; encode and decode are its two halves, on pixels in [-1, 1]."""
    vae.train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup_cosine(settings.num_warmup_steps, settings.num_steps))
    bar = Bar(shown, total=settings.num_steps, desc="vae", mininterval=5)
    for step, (pixels, weights) in enumerate(bar):
        rng = torch.Generator().manual_seed(seed * 1_000_003 + step)
        posterior = encode(pixels)
        error = decode(posterior.sample(rng)) - pixels
        if settings.color_weight != 1:
            error = torch.lerp(error.mean(dim=1, keepdim=True).expand_as(error), error, settings.color_weight)
        # L1 keeps edges, L2 keeps flat colours; one alone gave blur or specks.
        reconstruction = ((error.abs() + error**2) * weights).mean() / weights.mean()
        kl = 0.5 * (posterior.mean**2 + posterior.var - 1 - posterior.logvar).mean()
        loss = reconstruction + settings.kl_weight * kl
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        schedule.step()
        bar.set_postfix(rec=f"{reconstruction.item():.4f}", kl=f"{kl.item():.2f}", refresh=False)
    vae.eval().requires_grad_(False)


def warmup_cosine(num_warmup_steps: int, num_steps: int) -> Callable[[int], float]:
    """Step -> factor in [0, 1]: linear from 0, then half a cosine down to 0 at num_steps."""

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return (step + 1) / num_warmup_steps
        done = (step - num_warmup_steps) / max(num_steps - num_warmup_steps, 1)
        return 0.5 * (1 + float(np.cos(np.pi * min(done, 1.0))))

    return factor


@torch.no_grad()
def _latent_statistics(vae: AutoencoderKL, seed: int) -> tuple[Tensor, Tensor]:
    # Mean and deviation (C,) of sampled latents over images of trained scenes at all sizes.
    latents = []
    for index, (width, height) in enumerate(worlds.SIZES):
        rngs = [worlds.rng_for(seed, index, n) for n in range(160)]
        images = [worlds.draw(worlds.TRAINED[n % len(worlds.TRAINED)], width, height, r) for n, r in enumerate(rngs)]
        rng = torch.Generator().manual_seed(seed + index)
        # Few at a time stay in the processor's caches, which takes half as long.
        moments = torch.cat([vae.encode(few).latent_dist.parameters for few in to_pixels(images).split(8)])
        latents.append(DiagonalGaussianDistribution(moments).sample(rng).transpose(0, 1).flatten(1))
    together = torch.cat(latents, dim=1)
    return together.mean(dim=1), together.std(dim=1)


@torch.no_grad()
def fold_scale(vae: AutoencoderKL, mean: Tensor, deviation: Tensor) -> None:
    """Changes the latents to (latent - mean) / deviation, exactly, inside the two 1x1 convolutions around them.

    mean, deviation (C,). One scaling_factor cannot do it: channels differ, and those with a mean other than 0
    leak the image's layout into what a denoiser takes for pure noise.
    """
    to_moments, from_latents = vae.quant_conv, vae.post_quant_conv
    c = mean.shape[0]
    to_moments.weight[:c] /= deviation[:, None, None, None]
    to_moments.bias[:c] = (to_moments.bias[:c] - mean) / deviation
    to_moments.bias[c:] -= 2 * deviation.log()
    from_latents.bias += from_latents.weight[:, :, 0, 0] @ mean
    from_latents.weight *= deviation[None, :, None, None]


@torch.no_grad()
def reconstruct(vae: AutoencoderKL, images: list[Image.Image]) -> list[Image.Image]:
    """The images (all of one size) after going through the most likely latents."""
    return to_images(vae.decode(vae.encode(to_pixels(images)).latent_dist.mode()).sample)
