"""What families share between pixels and latents, and around rendering: the VAE, modes of networks, pictures.

Shapes: B samples, C latent channels, h w latent sides (an eighth of H W, the picture's).
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import islice
from typing import ClassVar

import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch import Tensor, nn

from sd_scripts.library.core.protocols import Parts, Preview

TILE = 512
"""Pixels: side of the tiles in which large pictures are decoded, where that is asked for."""


class Visits:
    """Networks that are kept elsewhere, and come to the device of another one at a time, when they are needed; see visiting."""

    def __init__(self, parts: Parts, tiled: bool) -> None:
        self.tiled = tiled
        self._device = place(parts.backbone)[0]
        homes = {module: weight.device for module in parts.modules().values() for weight in islice(module.parameters(), 1)}
        self._homes = {module: home for module, home in homes.items() if home != self._device}
        self._here: nn.Module | None = None

    def call(self, module: nn.Module) -> None:
        """Brings a network that is about to compute, and sends the one before it home."""
        if module is self._here:
            return
        self.end()
        if module in self._homes:
            self._here = module
            module.to(self._device)

    def end(self) -> None:
        """Sends home who is here."""
        if self._here is None:
            return
        gone, self._here = self._here, None
        gone.to(self._homes[gone])
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


_visits: ContextVar[Visits | None] = ContextVar("visits", default=None)


@contextmanager
def visiting(parts: Parts, tiled: bool = False) -> Iterator[None]:
    """Within the block the VAE and each text encoder come to the backbone's device while they compute, one at a time; afterwards each is
    where it was. tiled: the VAE decodes in tiles."""
    visits = Visits(parts, tiled)
    token = _visits.set(visits)
    try:
        yield
    finally:
        _visits.reset(token)
        visits.end()


@contextmanager
def in_tiles(vae: nn.Module) -> Iterator[None]:
    """Within the block the VAE decodes in tiles of TILE x TILE pixels, where `visiting` asks for that and it can."""
    visits = _visits.get()
    if visits is None or not visits.tiled or not hasattr(vae, "enable_tiling"):
        yield
        return
    before = {name: value for name, value in vars(vae).items() if name == "use_tiling" or name.startswith("tile_")}
    vae.enable_tiling()
    if "tile_sample_min_size" in before:
        # The square that it was trained on, which may be the whole preview.
        share = min(1.0, TILE / vae.tile_sample_min_size)
        vae.tile_sample_min_size = int(vae.tile_sample_min_size * share)
        vae.tile_latent_min_size = int(vae.tile_latent_min_size * share)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(vae, name, value)


def place(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and precision of a network that is about to compute: those of its first floating-point parameter, which no adapter replaces.

    Within `visiting` the network is brought to its device first.
    """
    visits = _visits.get()
    if visits is not None:
        visits.call(module)
    first = next(parameter for parameter in module.parameters() if parameter.is_floating_point())
    return first.device, first.dtype


@torch.no_grad()
def encode_pictures(vae: nn.Module, pixels: Tensor, grid: int) -> Tensor:
    """Scaled latents of RGB pictures: (B, 3, H, W) in [-1, 1] -> (B, C, h, w) float32; the mean of the posterior.

    Raises ValueError for sides that are not multiples of grid.
    """
    if pixels.shape[-1] % grid or pixels.shape[-2] % grid:
        raise ValueError(f"picture sides {tuple(pixels.shape[-2:])} are not multiples of {grid}")
    device, dtype = place(vae)
    # The VAE's precision is chosen by vae_dtype alone: SDXL's overflows in fp16, whatever the rest runs in.
    with torch.autocast(device.type, enabled=False):
        mean = vae.encode(pixels.to(device, dtype)).latent_dist.mean.float()
    scale, shift = _latent_scale(vae, mean)
    return (mean - shift) * scale


@torch.no_grad()
def decode(vae: nn.Module, latents: Tensor) -> Tensor:
    """Pictures of scaled latents: (B, C, h, w) -> (B, 3, 8h, 8w) in [-1, 1], float32."""
    device, dtype = place(vae)
    latents = latents.to(device).float()
    scale, shift = _latent_scale(vae, latents)
    with torch.autocast(device.type, enabled=False), in_tiles(vae):
        pixels = vae.decode((latents / scale + shift).to(dtype)).sample
    return pixels.float().clamp(-1, 1)


class PictureFamily(ABC):
    """What the families with a VAE of 8 x 8 pixels have in common; see protocols.ModelFamily."""

    grid: ClassVar[int]

    def encode_pictures(self, parts: Parts, pixels: Tensor) -> Tensor:
        """Scaled latents of RGB pictures: (B, 3, H, W) in [-1, 1] -> (B, C, H/8, W/8) float32; the mean of the posterior.

        Raises ValueError for sides off the grid.
        """
        return encode_pictures(parts.vae, pixels, self.grid)

    def num_controls(self, parts: Parts) -> tuple[int, int]:
        """None: most families make pictures from text alone."""
        return 0, 0

    def decode(self, parts: Parts, latents: Tensor) -> Tensor:
        """Pictures of scaled latents: (B, C, h, w) -> (B, 3, 8h, 8w) in [-1, 1], float32."""
        return decode(parts.vae, latents)

    @torch.no_grad()
    def preview(self, parts: Parts, requests: Sequence[Preview]) -> list[Image.Image]:
        """Renders pictures of equal size, steps, cfg_scale, guidance and sampler in one batch, each from noise of its own seed.

        Leaves devices, train or eval mode and the global random state as they were. Raises OptionError for a sampler that cannot render
        the model, ValueError for sides off the grid.
        """
        return as_pictures(self.render(parts, requests))

    @abstractmethod
    def render(self, parts: Parts, requests: Sequence[Preview]) -> Tensor:
        """The pictures of `preview` before rounding: (B, 3, H, W) in [-1, 1], float32."""


def first_of(requests: Sequence[Preview], grid: int) -> Preview:
    """The first of requests that are rendered in one batch, which speaks for all but their prompts and seeds.

    Raises ValueError for sides that are not multiples of grid.
    """
    first = requests[0]
    same = {(r.width, r.height, r.steps, r.cfg_scale, r.guidance, r.sampler) for r in requests}
    assert len(same) == 1, f"one batch has one size, steps, cfg_scale, guidance and sampler, not {same}"
    if first.width % grid or first.height % grid:
        raise ValueError(f"picture sides {first.width} x {first.height} are not multiples of {grid}")
    return first


def _latent_scale(vae: nn.Module, like: Tensor) -> tuple[Tensor, Tensor]:
    """Factor and shift, (1, C or 1, 1, 1), with scaled latents = (z - shift) factor, as the pipelines undo it."""
    config = vae.config

    def row(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=like.device).view(1, -1, 1, 1)

    mean, std = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
    if mean is not None and std is not None:
        return config.scaling_factor / row(std), row(mean)
    return row([config.scaling_factor]), row([getattr(config, "shift_factor", None) or 0.0])


def as_pictures(pixels: Tensor) -> list[Image.Image]:
    """Pictures of pixels (B, 3, H, W) in [-1, 1]."""
    return VaeImageProcessor.numpy_to_pil((pixels / 2 + 0.5).cpu().permute(0, 2, 3, 1).numpy()) if len(pixels) else []


@contextmanager
def evaluating(parts: Parts) -> Iterator[None]:
    """All networks in eval mode; afterwards every submodule is in the mode it was in."""
    modes = [(module, module.training) for part in parts.modules().values() for module in part.modules()]
    for part in parts.modules().values():
        part.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """For importing pipelines without transformers' remarks on image processors that nobody uses."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
