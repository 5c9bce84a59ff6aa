"""What families share between pixels and latents, and around rendering: the VAE, modes of networks, images.

Shapes: B samples, C latent channels, h w latent sides (an eighth of H W, the image's).
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, ClassVar

import diffusers
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image
from torch import Tensor, nn

from sd_scripts.library.core.protocols import Kind, Objective, OnStep, Parts, Path, Preview, dtype_of
from sd_scripts.library.objectives.make import make

TILE = 512
"""Pixels: side of the tiles in which large images are decoded, where that is asked for."""


class Visits:
    """Networks that are kept elsewhere, and come to where they compute one at a time, when they are needed; see visiting."""

    def __init__(self, parts: Parts, tiled: bool, working: Mapping[str, torch.device] | None = None) -> None:
        self.tiled = tiled
        self._works = {module: parts.device if working is None else working[name] for name, module in parts.modules().items()}
        homes = {module: weight.device for module in self._works for weight in islice(module.parameters(), 1)}
        self._homes = {module: home for module, home in homes.items() if home != self._works[module]}
        self._here: nn.Module | None = None

    def bring(self, module: nn.Module) -> None:
        """Brings a network that is about to compute, and sends the one before it home."""
        if module is self._here:
            return
        self.end()
        if module in self._homes:
            self._here = module
            module.to(self._works[module])

    def end(self) -> None:
        """Sends home who is here."""
        if self._here is None:
            return
        gone, self._here = self._here, None
        gone.to(self._homes[gone])
        if self._works[gone].type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def visiting(parts: Parts, tiled: bool = False, working: Mapping[str, torch.device] | None = None) -> Iterator[Parts]:
    """The parts to render with: each network comes to where it computes when it is needed, one at a time; afterwards each is where it was.

    tiled: the VAE decodes in tiles. working: where each computes, by its name in Parts.modules(); None is the backbone's device for all.
    """
    visits = Visits(parts, tiled, working)
    try:
        yield replace(parts, visits=visits)
    finally:
        visits.end()


@contextmanager
def in_tiles(parts: Parts) -> Iterator[None]:
    """Within the block the VAE decodes in tiles of TILE x TILE pixels, where `visiting` asks for that and it can."""
    vae = parts.vae
    if parts.visits is None or not parts.visits.tiled or not hasattr(vae, "enable_tiling"):
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


def told_guidance(parts: Parts, guidance: float) -> Parts:
    """The parts whose network is told this guidance scale, and not that of training, where it is told one."""
    told = {"guidance_scale": guidance} if "guidance_scale" in parts.denoising else {}
    return replace(parts, denoising={**parts.denoising, **told})


@torch.no_grad()
def encode_images(parts: Parts, pixels: Tensor, grid: int) -> Tensor:
    """Scaled latents of RGB images: (B, 3, H, W) in [-1, 1] -> (B, C, h, w) float32; the mean of the posterior.

    Raises ValueError for sides that are not multiples of grid.
    """
    mean = posterior_mean(parts, pixels, grid)
    scale, shift = _latent_scale(parts.vae, mean)
    return (mean - shift) * scale


def posterior_mean(parts: Parts, pixels: Tensor, grid: int) -> Tensor:
    """What the VAE makes of RGB images (B, 3, H, W) in [-1, 1], float32. Raises ValueError for sides that are not multiples of grid."""
    if pixels.shape[-1] % grid or pixels.shape[-2] % grid:
        raise ValueError(f"image sides {tuple(pixels.shape[-2:])} are not multiples of {grid}")
    device, vae = parts.bring(parts.vae), parts.vae
    # The VAE's precision is chosen by vae_dtype alone: SDXL's overflows in fp16, whatever the rest runs in.
    with torch.autocast(device.type, enabled=False):
        mean: Tensor = vae.encode(pixels.to(device, dtype_of(vae))).latent_dist.mean.float()
    return mean


@torch.no_grad()
def decode(parts: Parts, latents: Tensor) -> Tensor:
    """Images of scaled latents: (B, C, h, w) -> (B, 3, 8h, 8w) in [-1, 1], float32."""
    latents = latents.to(parts.bring(parts.vae)).float()
    scale, shift = _latent_scale(parts.vae, latents)
    return pixels_of(parts, latents / scale + shift)


def pixels_of(parts: Parts, latents: Tensor) -> Tensor:
    """Images of the VAE's own latents, which are not scaled: (B, 3, H, W) in [-1, 1], float32."""
    device, vae = parts.bring(parts.vae), parts.vae
    with torch.autocast(device.type, enabled=False), in_tiles(parts):
        pixels: Tensor = vae.decode(latents.to(device, dtype_of(vae))).sample
    return pixels.float().clamp(-1, 1)


class ImageFamily(ABC):
    """What the families with a VAE of 8 x 8 pixels have in common; see protocols.ModelFamily."""

    grid: ClassVar[int]

    def encode_images(self, parts: Parts, pixels: Tensor) -> Tensor:
        """Scaled latents of RGB images: (B, 3, H, W) in [-1, 1] -> (B, C, H/8, W/8) float32; the mean of the posterior.

        Raises ValueError for sides off the grid.
        """
        return encode_images(parts, pixels, self.grid)

    def usual_size(self, parts: Parts) -> tuple[int, int]:
        """As the network's configuration says, in latents of 8 x 8 pixels; 1024 x 1024 where it says nothing."""
        side = parts.backbone.config.get("sample_size")
        return (8 * side, 8 * side) if isinstance(side, int) else (1024, 1024)

    def num_controls(self, parts: Parts) -> tuple[int, int]:
        """None: most families make images from text alone."""
        return 0, 0

    def objective(
        self,
        options: Any,
        path: Path,
        kind: Kind,
        scheduler_config: Mapping[str, Any] = MappingProxyType({}),
        colours: Tensor | None = None,
    ) -> Objective:
        """Noise prediction or flow matching, as the options say; see objectives.make."""
        return make(options, path, kind, scheduler_config, colours)

    def equipped(self, parts: Parts, options: Any, device: torch.device) -> Parts:
        """The parts as they are: most families have nothing to put on them."""
        return parts

    def decode(self, parts: Parts, latents: Tensor) -> Tensor:
        """Images of scaled latents: (B, C, h, w) -> (B, 3, 8h, 8w) in [-1, 1], float32."""
        return decode(parts, latents)

    @torch.no_grad()
    def preview(self, parts: Parts, requests: Sequence[Preview], on_step: OnStep | None = None) -> list[Image.Image]:
        """Renders images of equal size, steps, cfg_scale, guidance and sampler in one batch, each from noise of its own seed.

        on_step is told of every step, see protocols.OnStep. Leaves devices, train or eval mode and the global random state as they were.
        Raises OptionError for a sampler that cannot render the model, ValueError for sides off the grid.
        """
        return as_images(self.render(parts, requests, on_step))

    @abstractmethod
    def render(self, parts: Parts, requests: Sequence[Preview], on_step: OnStep | None = None) -> Tensor:
        """The images of `preview` before rounding: (B, 3, H, W) in [-1, 1], float32."""


def first_of(requests: Sequence[Preview], grid: int) -> Preview:
    """The first of requests that are rendered in one batch, which speaks for all but their prompts and seeds.

    Raises ValueError for sides that are not multiples of grid.
    """
    first = requests[0]
    same = {(r.width, r.height, r.steps, r.cfg_scale, r.guidance, r.sampler, r.scheduler, r.shift) for r in requests}
    assert len(same) == 1, f"one batch has one size, steps, cfg_scale, guidance, sampler and scheduler, not {same}"
    if first.width % grid or first.height % grid:
        raise ValueError(f"image sides {first.width} x {first.height} are not multiples of {grid}")
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


def as_images(pixels: Tensor) -> list[Image.Image]:
    """Images of pixels (B, 3, H, W) in [-1, 1]."""
    return VaeImageProcessor.numpy_to_pil((pixels / 2 + 0.5).cpu().permute(0, 2, 3, 1).numpy()) if len(pixels) else []


@contextmanager
def evaluating(parts: Parts) -> Iterator[None]:
    """All networks in eval mode; afterwards every submodule is in the mode it was in."""
    # In a program that only draws they are in it already; going through them once costs a third of doing it three times.
    awake = {part: [module for module in part.modules() if module.training] for part in parts.modules().values()}
    for part, modules in awake.items():
        if modules:
            part.eval()
    try:
        yield
    finally:
        for module in chain.from_iterable(awake.values()):
            module.training = True


@functools.cache
def pipeline_class(name: str) -> Any:
    """diffusers' pipeline of this name, imported with the first preview, without transformers' remarks on image processors that nobody
    uses; once, as a level that is set clears what all loggers have kept."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return getattr(diffusers, name)
    finally:
        logger.setLevel(level)
