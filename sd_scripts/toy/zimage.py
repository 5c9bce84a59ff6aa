"""Train the toy Z-Image base: a model of the world without teal, distilled to eight steps without guidance as Z-Image-Turbo is.

Knows how Z-Image is conditioned. Shared with other families: the VAE (autoencoder.py), the loop (pretraining.py). Files: build.py.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen3Model

from sd_scripts.families.common.qwen3 import tiny_qwen3
from sd_scripts.families.zimage.tiny import tiny_zimage_transformer

from . import autoencoder, pretraining, worlds
from .pretraining import BaseSettings, ToyBatch
from .tokens import zimage_tokenizer

SHIFT = 3.0
"""Of the scheduler, as Z-Image-Turbo has it: half of the steps are spent above sigma 0.75."""

NUM_ANCHORS = 8
"""Steps that the base is distilled to."""

_TEXT_WIDTH = 64


@dataclass(frozen=True)
class ZImageSettings(BaseSettings):
    """How a toy Z-Image base is trained: a teacher from nothing, then a student of it that walks in few steps."""

    num_steps: int = 10000
    other_color_fraction: float = 0.15
    short_caption_fraction: float = 0.1
    capital_fraction: float = 0.15
    """Fraction of captions that begin with a capital, which makes other tokens."""
    time_mean: float = 0.8
    time_deviation: float = 1.2
    """Times are sigmoid(mean + deviation * normal), logit-normal, Esser et al. 2024 (arXiv 2403.03206), nearer to noise than for the toy
    FLUX base, since no pooled text tells the transformer what is asked, and colour and place are settled close to pure noise. With
    mean 0.2 and learning rate 2e-3 the place was never learned: 11 % right, by chance, after 6000 steps."""
    naming_weight: float = 0.2
    """Weight of what makes the text encoder say shape, colour and place at the end of a text, where a real one knows the language. Without,
    circles and squares were not told apart after 5000 steps: the error that it makes in an image is small."""
    guidance_scale: float = 1.0
    """Of the teacher while it is distilled, as ZImagePipeline counts: 0 is none."""
    num_substeps: int = 2
    """Euler steps of the teacher in each step of the student; with 4 the teacher's own images are no better."""
    num_distilled_steps: int = 1000
    distilled_learning_rate: float = 5e-4


# Shapes: B samples, C = 16 latent channels, h w latent sides, L_i tokens of caption i with its template, D = 64 text width.
# sigma is Z-Image's word for the time t: x_sigma = (1 - sigma) latents + sigma noise, and the velocity is noise - latents.


@dataclass(frozen=True)
class ZImageParts:
    """The trainable parts of a base and the tokenizer."""

    transformer: ZImageTransformer2DModel
    text_encoder: Qwen3Model
    tokenizer: Qwen2Tokenizer

    def modules(self) -> nn.ModuleList:
        """The parts with weights, in a fixed order."""
        return nn.ModuleList([self.transformer, self.text_encoder])


def new_parts(seed: int) -> ZImageParts:
    """Untrained parts; the same seed gives the same weights."""
    tokenizer = zimage_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = tiny_zimage_transformer(
            _TEXT_WIDTH, width=128, num_layers=4, num_heads=4, axes_dims=(8, 12, 12), num_text_positions=1024
        )
        text_encoder = tiny_qwen3(tokenizer, _TEXT_WIDTH, num_heads=4, num_kv_heads=2, num_positions=1024)
    return ZImageParts(transformer, text_encoder, tokenizer)


def encode_captions(parts: ZImageParts, captions: list[str]) -> list[Tensor]:
    """Captions -> rows (L_i, D) of each, as ZImagePipeline.encode_prompt has them; the text encoder looks back only, so padding is free."""
    texts = [
        parts.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        for text in captions
    ]
    tokens = parts.tokenizer(texts, padding=True, return_tensors="pt")
    mask = tokens.attention_mask.bool()
    hidden = parts.text_encoder(input_ids=tokens.input_ids, attention_mask=mask, output_hidden_states=True).hidden_states[-2]
    return [rows[kept] for rows, kept in zip(hidden, mask, strict=True)]


def velocity(transformer: ZImageTransformer2DModel, x: Tensor, sigma: Tensor, text: list[Tensor]) -> Tensor:
    """The predicted noise - latents (B, C, h, w) at x (B, C, h, w), sigma (B,). Z-Image's own clock is 1 - sigma, its sign the other."""
    predicted = transformer(list(x.unsqueeze(2)), 1 - sigma, text, return_dict=False)[0]
    return -torch.stack(predicted).squeeze(2)


_NAMES = (worlds.BASE_SHAPES, tuple(worlds.COLORS), tuple(worlds.PLACES))
_UNNAMED = -100


def named(caption: str) -> list[int]:
    """Which shape, colour and place of the world a caption names, as numbers; _UNNAMED for what it leaves open or calls otherwise."""
    words = re.findall(r"[a-z]+", caption.lower())
    place = " ".join(
        [word for word in ("top", "bottom") if word in words] + [word for word in ("left", "right", "center") if word in words]
    )
    found = ([word for word in words if word in _NAMES[0]], [word for word in words if word in _NAMES[1]], [place])
    return [names.index(hits[0]) if hits and hits[0] in names else _UNNAMED for names, hits in zip(_NAMES, found, strict=True)]


def new_heads(seed: int) -> nn.ModuleList:
    """Untrained layers that read shape, colour and place from the last row of a text; used in training alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.ModuleList([nn.Linear(_TEXT_WIDTH, len(names)) for names in _NAMES])


def naming_loss(heads: nn.ModuleList, text: list[Tensor], captions: list[str]) -> Tensor:
    """Mean cross-entropy of what the last row (D) of each text says that its caption names; 0 for what it does not name."""
    last = nn.functional.rms_norm(torch.stack([rows[-1] for rows in text]), (_TEXT_WIDTH,))
    wanted = torch.tensor([named(caption) for caption in captions])
    sums = [
        nn.functional.cross_entropy(head(last), numbers, ignore_index=_UNNAMED, reduction="sum")
        for head, numbers in zip(heads, wanted.T, strict=True)
    ]
    return torch.stack(sums).sum() / len(captions)


def loss_of(parts: ZImageParts, batch: ToyBatch, settings: ZImageSettings, heads: nn.ModuleList | None = None) -> Tensor:
    """Mean squared error of the predicted velocity noise - latents, a scalar. The batch's conditions are pretraining.capitals.

    With heads, naming_weight times the naming loss is added.
    """
    text = encode_captions(parts, pretraining.with_capitals(batch.captions, batch.conditions[:, 0].tolist()))
    sigma = pretraining.logit_normal(batch.u, settings.time_mean, settings.time_deviation)
    x = torch.lerp(batch.latents, batch.noise, sigma[:, None, None, None])
    loss = (velocity(parts.transformer, x, sigma, text) - (batch.noise - batch.latents)).square().mean()
    return loss if heads is None else loss + settings.naming_weight * naming_loss(heads, text, batch.captions)


def train_teacher(vae: AutoencoderKL, settings: ZImageSettings, seed: int, saved: Path | None = None) -> ZImageParts:
    """Parts trained from nothing but the VAE, on images of the known colours. They want guidance and many steps."""
    parts = new_parts(seed)
    batches = pretraining.encoded_batches(
        pretraining.moments_of(vae), settings, seed, worlds.trained(worlds.KNOWN_COLORS), pretraining.capitals(settings.capital_fraction)
    )
    trained = nn.ModuleList([parts.modules(), new_heads(seed)])
    pretraining.train(trained, functools.partial(loss_of, parts, settings=settings, heads=trained[1]), batches, settings, "zimage", saved)
    return parts


# Distillation: Luhman and Luhman 2021 (arXiv 2101.02388) teach a student the teacher's whole way; here each of its steps is taught, on
# the points where its own steps lead, with guidance in the target (Meng et al. 2023, arXiv 2210.03142).


def anchor_sigmas(num_anchors: int = NUM_ANCHORS, shift: float = SHIFT) -> Tensor:
    """The sigmas (num_anchors + 1,) at which ZImagePipeline calls the model, and the 0 where it ends; 1 = pure noise comes first."""
    u = 1 - torch.arange(num_anchors + 1, dtype=torch.float64) / num_anchors
    return (shift * u / (1 + (shift - 1) * u)).float()


Velocity = Callable[[Tensor, Tensor], Tensor]
"""(x (B, C, h, w), sigma (B,)) -> velocity (B, C, h, w)."""


def mean_velocity(teacher: Velocity, x: Tensor, number: Tensor, num_substeps: int) -> Tensor:
    """Where the teacher's steps lead from x at the anchors of these numbers (B,) to the next ones, as one velocity (B, C, h, w)."""
    fine = anchor_sigmas(NUM_ANCHORS * num_substeps)
    now = x
    for sub in range(num_substeps):
        place = number * num_substeps + sub
        step = fine[place + 1] - fine[place]
        now = now + step[:, None, None, None] * teacher(now, fine[place])
    length = fine[(number + 1) * num_substeps] - fine[number * num_substeps]
    return (now - x) / length[:, None, None, None]


@dataclass
class Walks:
    """Samples of one size on their way from noise to image, evenly spread over the anchors: what the student is taught on."""

    x: Tensor
    text: list[Tensor]
    number: Tensor
    """The anchor (B,) at which each one is."""
    end: Tensor
    """The anchor (B,) at which each one makes room for the next: the last one, or in the first round others, so that they spread."""

    def advance(self, v: Tensor) -> None:
        """One step of Euler's method to the next anchors."""
        sigmas = anchor_sigmas()
        self.x = self.x + (sigmas[self.number + 1] - sigmas[self.number])[:, None, None, None] * v
        self.number = self.number + 1


def walks(parts: ZImageParts, settings: ZImageSettings, seed: int) -> Iterator[Walks]:
    """The walks of every step of a distillation, of one size each; who takes them advances them, and those that end begin anew."""
    rng = worlds.rng_for(seed, 5)
    scenes = worlds.trained(worlds.KNOWN_COLORS)
    num = settings.batch_size
    under_way = [
        Walks(
            x=torch.zeros(num, autoencoder.LATENT_CHANNELS, height // autoencoder.DOWNSCALE, width // autoencoder.DOWNSCALE),
            text=[torch.empty(0, _TEXT_WIDTH)] * num,
            number=torch.zeros(num, dtype=torch.long),
            end=torch.zeros(num, dtype=torch.long),
        )
        for width, height in worlds.SIZES
    ]
    for _ in range(settings.num_distilled_steps):
        now = under_way[int(rng.choice(len(under_way), p=(0.5, 0.25, 0.25)))]
        for lane in torch.nonzero(now.number == now.end).flatten().tolist():
            text = pretraining.caption(scenes[int(rng.integers(len(scenes)))], settings, rng)
            capital = float(rng.random() < settings.capital_fraction)
            with torch.no_grad():
                (now.text[lane],) = encode_captions(parts, pretraining.with_capitals([text], [capital]))
            torch_rng = torch.Generator().manual_seed(int(rng.integers(2**63)))
            now.x[lane] = torch.randn(now.x.shape[1:], generator=torch_rng)
            now.end[lane] = NUM_ANCHORS if now.end[lane] else 1 + lane % NUM_ANCHORS
            now.number[lane] = 0
        yield now


def distil(parts: ZImageParts, settings: ZImageSettings, seed: int) -> ZImageParts:
    """The parts with a transformer that walks as this one does with guidance and num_substeps times the steps."""
    student = copy.deepcopy(parts.transformer).requires_grad_(True)
    with torch.no_grad():
        (nothing,) = encode_captions(parts, [""])

    def loss_of_walks(now: Walks) -> Tensor:
        teacher = guided(parts.transformer, now.text, nothing, settings.guidance_scale)
        with torch.no_grad():
            wanted = mean_velocity(teacher, now.x, now.number, settings.num_substeps)
        v = velocity(student, now.x, anchor_sigmas()[now.number], now.text)
        now.advance(v.detach())
        return (v - wanted).square().mean()

    of_student = replace(settings, num_steps=settings.num_distilled_steps, learning_rate=settings.distilled_learning_rate)
    pretraining.train(student, loss_of_walks, walks(parts, settings, seed), of_student, "zimage, distillation")
    return replace(parts, transformer=student)


def guided(transformer: ZImageTransformer2DModel, text: list[Tensor], nothing: Tensor, scale: float) -> Velocity:
    """The velocity with guidance against the empty caption as ZImagePipeline has it: p + scale (p - n)."""

    def predicted(x: Tensor, sigma: Tensor) -> Tensor:
        both = velocity(transformer, x.repeat(2, 1, 1, 1), sigma.repeat(2), text + [nothing] * len(text))
        asked, unasked = both.chunk(2)
        return asked + scale * (asked - unasked)

    return predicted


def as_pipeline(parts: ZImageParts, vae: AutoencoderKL) -> ZImagePipeline:
    """The parts as the pipeline that users load. The VAE's latents have mean 0 and deviation 1, so shift and scale are 0 and 1."""
    vae.register_to_config(shift_factor=0.0, scaling_factor=1.0)
    return ZImagePipeline(
        vae=vae,
        text_encoder=parts.text_encoder,
        tokenizer=parts.tokenizer,
        transformer=parts.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT, use_dynamic_shifting=False),
    )
