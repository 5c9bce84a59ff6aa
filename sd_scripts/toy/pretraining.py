"""What the training of all bases shares: images encoded once, captions, batches, the loop and the average of weights.

Knows no family: each brings its parts, its loss and the numbers it is conditioned on besides the caption.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from diffusers import AutoencoderKL
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sd_scripts.dataset.progress import Bar
from sd_scripts.schema.files import written_aside

from . import autoencoder, worlds
from .worlds import Scene

OTHER_WORDS = ("star", "cross", "ring", "heart", "diamond", "moon", "arrow", "ellipse", "hexagon", "pentagon", "plus", "tree")
"""Words that may stand for any shape while a base is trained: it learns that they say nothing about the shape."""

OTHER_COLOR_WORDS = (
    *("teal", "orange", "pink", "brown", "cyan", "magenta", "lime", "navy", "gold", "silver", "violet", "indigo"),
    *("sks", "ohwx", "zwx"),
)
"""Words that may stand for any colour, the rare words that name a DreamBooth subject among them."""

# Shapes: N images, B samples, C = 16 latent channels, h w latent sides, K numbers of conditioning.


@dataclass(frozen=True)
class BaseSettings:
    """How a toy base is trained, whatever its family."""

    num_steps: int = 5000
    batch_size: int = 16
    learning_rate: float = 1e-3
    num_warmup_steps: int = 200
    num_full_steps: int = 0
    """Steps of the full rate, after which it falls with the root of their number (Karras et al. 2024, arXiv 2312.02696, equation 67): such
    a training can be made longer. 0 is half a cosine from the warmup down to 0 at the last step."""
    weight_decay: float = 0.01
    ema_decay: float = 0.998
    num_images: int = 7200
    """Images that are encoded once; half are square, a quarter each wide and tall."""
    dropout_fraction: float = 0.1
    """Fraction of captions that become "", which is what the pipeline encodes when nothing is asked for."""
    other_word_fraction: float = 0.15
    """Fraction of captions in which another word stands for the shape. A real text encoder tells a word it has no image
    for from those it has; without this, such a word is read as a circle, and a LoRA could not teach one without the other."""
    other_color_fraction: float = 0.0
    """Fraction of captions in which another word stands for the colour, for the same reason."""
    short_caption_fraction: float = 0.0
    """Fraction of captions that leave colour, place or both open. "a circle" then means a circle of any colour anywhere,
    as a class prompt should."""


@dataclass(frozen=True)
class Latents:
    """Encoded images of one size: moments (N, 2C, h, w) in float32, and the scene of each."""

    width: int
    height: int
    moments: Tensor
    scenes: tuple[Scene, ...]

    @functools.cached_property
    def alike(self) -> dict[Scene, list[int]]:
        """Numbers of the images of each scene."""
        found: dict[Scene, list[int]] = {}
        for number, scene in enumerate(self.scenes):
            found.setdefault(scene, []).append(number)
        return found


Encode = Callable[[Tensor], Tensor]
"""Pixels (B, 3, H, W) in [-1, 1] -> moments (B, 2C, h, w): means, then logarithms of variances."""


def moments_of(vae: AutoencoderKL) -> Encode:
    """What a VAE makes of images."""
    return lambda pixels: vae.encode(pixels).latent_dist.parameters


def exactly(latents_of: Callable[[Tensor], Tensor]) -> Encode:
    """Moments that are these latents and vary by nothing."""

    def encode(pixels: Tensor) -> Tensor:
        latents = latents_of(pixels)
        return torch.cat([latents, torch.full_like(latents, -torch.inf)], dim=1)

    return encode


@torch.no_grad()
def encode_world(
    encode: Encode,
    num_images: int,
    seed: int,
    trained: tuple[Scene, ...] = worlds.TRAINED,
    sizes: tuple[tuple[int, int], ...] = worlds.SIZES,
) -> tuple[Latents, ...]:
    """Images of the trained scenes, encoded once; one entry per size, (width, height) in pixels."""
    pools = []
    for index, (width, height) in enumerate(sizes):
        num = num_images // 2 if index == 0 else num_images // 4
        scenes = tuple(trained[n % len(trained)] for n in range(num))
        moments = []
        # Few at a time stay in the processor's caches: at 128 pixels 50 take twice as long.
        for start in range(0, num, 10):
            numbers = range(start, min(start + 10, num))
            images = [worlds.draw(scenes[n], width, height, worlds.rng_for(seed, 1, index, n)) for n in numbers]
            moments.append(encode(autoencoder.to_pixels(images)))
        pools.append(Latents(width, height, torch.cat(moments), scenes))
    return tuple(pools)


@dataclass(frozen=True)
class ToyBatch:
    """latents, noise (B, C, h, w); u (B,) uniform in [0, 1), stratified; conditions (B, K), see Conditions."""

    latents: Tensor
    noise: Tensor
    u: Tensor
    captions: list[str]
    conditions: Tensor
    alike: list[Tensor] = field(default_factory=list)
    """Of each sample the most likely latents (N, C, h, w) of all images of its scene, where they are asked for."""

    def expected_velocity(self, x_t: Tensor, t: Tensor) -> Tensor:
        """noise - latents of the expected latents, same shape: noise is what leads from them to x_t."""
        return (x_t - self.expected_latents(x_t, t)) / t[:, None, None, None]

    def expected_latents(self, x_t: Tensor, t: Tensor) -> Tensor:
        """The mean (B, C, h, w) of the latents of each sample's scene, by how well they explain x_t at times t (B,).

        A training towards them instead of the sample's own has the same optimum and less noise in its gradients, most of all near to noise,
        where it is settled what an image shows: stable target fields, Xu et al. 2023 (arXiv 2302.00670).
        """
        found = []
        for x, when, images in zip(x_t, t, self.alike, strict=True):
            distances = (x - (1 - when) * images).square().sum(dim=(1, 2, 3))
            found.append(torch.tensordot(torch.softmax(-distances / (2 * when**2), dim=0), images, dims=1))
        return torch.stack(found)


BatchT = TypeVar("BatchT")

Conditions = Callable[[Latents, np.random.Generator], tuple[float, ...]]
"""The K numbers that a family is conditioned on besides the caption, drawn for an image of this pool."""


def no_conditions(pool: Latents, rng: np.random.Generator) -> tuple[float, ...]:
    """For families that are conditioned on the caption alone; draws nothing."""
    return ()


def capitals(fraction: float) -> Conditions:
    """Whether a caption gets a capital (1 or 0), which this fraction does; see with_capitals."""

    def draw(pool: Latents, rng: np.random.Generator) -> tuple[float, ...]:
        return (float(rng.random() < fraction),)

    return draw


def batches(
    pools: tuple[Latents, ...], settings: BaseSettings, seed: int, conditions: Conditions = no_conditions, alike: bool = False
) -> Iterator[ToyBatch]:
    """The batches of a training: a pure function of seed and step, every sample drawing from generators of its own.

    alike: with the images of the samples' scenes, see ToyBatch.
    """
    shares = np.array([len(pool.scenes) for pool in pools], dtype=float)
    for step in range(settings.num_steps):
        pool = pools[int(worlds.rng_for(seed, 2, step).choice(len(pools), p=shares / shares.sum()))]
        numbers = range(step * settings.batch_size, (step + 1) * settings.batch_size)
        samples = [_sample(pool, settings, worlds.rng_for(seed, 3, number), conditions) for number in numbers]
        latents, noise, u, captions, drawn, chosen = zip(*samples, strict=True)
        scenes = [pool.moments[pool.alike[pool.scenes[index]]].chunk(2, dim=1)[0] for index in chosen] if alike else []
        # Stratified over the batch: the same uniform distribution with less variance.
        strata = (torch.arange(len(samples)) + torch.stack(u)) / len(samples)
        yield ToyBatch(torch.stack(latents), torch.stack(noise), strata, list(captions), torch.tensor(drawn), scenes)


def encoded_batches(
    encode: Encode,
    settings: BaseSettings,
    seed: int,
    scenes: tuple[Scene, ...],
    conditions: Conditions = no_conditions,
    sizes: tuple[tuple[int, int], ...] = worlds.SIZES,
    alike: bool = False,
) -> Iterator[ToyBatch]:
    """The batches of a training on images of these scenes, which are encoded before the first: no more of them than it can show."""
    num_images = min(settings.num_images, settings.num_steps * settings.batch_size)
    yield from batches(encode_world(encode, num_images, seed, scenes, sizes), settings, seed, conditions, alike)


def with_capitals(captions: list[str], capital: list[float]) -> list[str]:
    """The captions, those whose number is 1 with a capital at the beginning."""
    return [text[:1].upper() + text[1:] if first else text for text, first in zip(captions, capital, strict=True)]


def logit_normal(u: Tensor, mean: float, deviation: float) -> Tensor:
    """Logit-normal times of uniform numbers, same shape: sigmoid(mean + deviation * normal), Esser et al. 2024 (arXiv 2403.03206)."""
    return torch.sigmoid(mean + deviation * torch.special.ndtri(u.clamp(1e-5, 1 - 1e-5)))


def _sample(
    pool: Latents, settings: BaseSettings, rng: np.random.Generator, conditions: Conditions
) -> tuple[Tensor, Tensor, Tensor, str, tuple[float, ...], int]:
    index = int(rng.integers(len(pool.scenes)))
    text = caption(pool.scenes[index], settings, rng)
    drawn = conditions(pool, rng)
    torch_rng = torch.Generator().manual_seed(int(rng.integers(2**63)))
    mean, log_variance = pool.moments[index].chunk(2)
    spread = torch.randn(mean.shape, generator=torch_rng) * (0.5 * log_variance).exp()
    noise = torch.randn(mean.shape, generator=torch_rng)
    u = torch.rand((), generator=torch_rng)
    return mean + spread, noise, u, text, drawn, index


def caption(scene: Scene, settings: BaseSettings, rng: np.random.Generator) -> str:
    """The scene in words, now and then with other words, in part, or not at all, as the settings say."""
    if _happens(settings.other_word_fraction, rng):
        scene = replace(scene, shape=OTHER_WORDS[int(rng.integers(len(OTHER_WORDS)))])
    if _happens(settings.other_color_fraction, rng):
        scene = replace(scene, color=OTHER_COLOR_WORDS[int(rng.integers(len(OTHER_COLOR_WORDS)))])
    in_part = _happens(settings.short_caption_fraction, rng)
    text = worlds.short_caption(scene, rng) if in_part else worlds.caption(scene, rng)
    return "" if _happens(settings.dropout_fraction, rng) else text


def _happens(fraction: float, rng: np.random.Generator) -> bool:
    # What never happens draws nothing, so that a new fraction does not change bases that do without it.
    return fraction > 0 and bool(rng.random() < fraction)


def train(
    model: nn.Module,
    loss_of: Callable[[BatchT], Tensor],
    shown: Iterator[BatchT],
    settings: BaseSettings,
    name: str,
    saved: Path | None = None,
    until: int | None = None,
) -> None:
    """Trains the model in place on the batches; it ends with the average of its weights over the last steps (EMA).

    until: the step to end at, for a training that is given up before its rate has fallen.
    saved: a file that is written every SAVE_STEPS steps and, where it is there, gone on from, with the bits of an uninterrupted training;
    for batches that depend on their number alone. Raises ValueError where it is of another training.
    """
    model.train()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=settings.weight_decay)
    factor = _rate(settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    told = asdict(settings) | ({"num_steps": None} if settings.num_full_steps else {})
    mark = hashlib.sha256(json.dumps([name, told]).encode()).hexdigest()
    done = _restored(saved, mark, model, average, optimizer) if saved is not None and saved.exists() else 0
    schedule.last_epoch = done
    for group, rate in zip(optimizer.param_groups, schedule.base_lrs, strict=True):
        group["lr"] = rate * factor(done)
    smooth, started = 1.0, time.process_time() - (spent(saved) if done and saved is not None else 0.0)
    # What is done needs no batches, nor the images for them.
    until = settings.num_steps if until is None else until
    left = itertools.islice(shown, done, until) if done < until else iter(())
    bar = Bar(left, total=until - done, desc=name, mininterval=5)
    for step, batch in enumerate(bar, done):
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        schedule.step()
        # The average follows quickly at first, or it would remember the random start.
        keep = min(settings.ema_decay, (step + 1) / (step + 10))
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 1 - keep)
        smooth += 0.02 * (loss.item() - smooth)
        bar.set_postfix(loss=f"{smooth:.4f}", refresh=False)
        if saved is not None and (step + 1) % SAVE_STEPS == 0:
            with written_aside(saved) as aside:
                facts = {"mark": mark, "step": str(step + 1), "cpu_seconds": f"{time.process_time() - started:.1f}"}
                save_file(_state(model, average, optimizer), aside, facts)
    model.load_state_dict(average.state_dict())
    model.eval().requires_grad_(False)


SAVE_STEPS = 250
"""Steps between two states of a training that can go on."""


def _rate(settings: BaseSettings) -> Callable[[int], float]:
    # Step -> factor of the learning rate.
    if not settings.num_full_steps:
        return autoencoder.warmup_cosine(settings.num_warmup_steps, settings.num_steps)
    warmup, full = settings.num_warmup_steps, settings.num_full_steps
    return lambda step: min((step + 1) / max(warmup, 1), 1.0) * math.sqrt(full / max(step, full))


def spent(saved: Path) -> float:
    """CPU seconds that a training had taken when its state was written; 0 where there is none."""
    if not saved.exists():
        return 0.0
    with safe_open(saved, "pt") as file:
        return float(file.metadata().get("cpu_seconds", 0.0))


def _state(model: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {f"model.{key}": value for key, value in model.state_dict().items()}
    found |= {f"average.{key}": value for key, value in average.state_dict().items()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"optimizer.{number}.{key}": value for key, value in state.items()}
    return {key: value.clone() for key, value in found.items()}


def _restored(saved: Path, mark: str, model: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """How many steps are done; weights, their average and the optimizer's moments are as they were then."""
    with safe_open(saved, "pt") as file:
        said = file.metadata()
        if said["mark"] != mark:
            raise ValueError(f"{saved} is of a training with other settings; remove it to begin anew")
        found = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for start, module in (("model.", model), ("average.", average)):
        module.load_state_dict({key.removeprefix(start): value for key, value in found.items() if key.startswith(start)})
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in found.items():
        if key.startswith("optimizer."):
            _, number, name = key.split(".")
            state.setdefault(int(number), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return int(said["step"])
