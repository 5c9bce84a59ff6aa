"""Train the toy SDXL base: real pipeline classes, small configs, scenes of the toy world.

Knows how SDXL is conditioned and trained. Does not know the VAE's training (autoencoder.py) nor files (build.py).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from torch import Tensor, nn
from tqdm import tqdm
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from sd_scripts.toy import autoencoder, worlds
from sd_scripts.toy.tokens import CLIP_MAX_TOKENS, clip_tokenizer

LATENT_GRID = 16
"""Sides in pixels must be multiples of this: f8 latents, halved once inside the UNet."""

OTHER_WORDS = ("star", "cross", "ring", "heart", "diamond", "moon", "arrow", "ellipse", "hexagon", "pentagon", "plus", "tree")
"""Words that may stand for any shape while a base is trained: it learns that they say nothing about the shape."""

_TEXT_WIDTHS = (32, 64)
_TIME_WIDTH = 32  # of each of the six size and crop numbers


@dataclass(frozen=True)
class SdxlSettings:
    """How a toy SDXL base is trained."""

    num_steps: int = 5000
    batch_size: int = 16
    learning_rate: float = 1e-3
    num_warmup_steps: int = 200
    weight_decay: float = 0.01
    ema_decay: float = 0.998
    num_pictures: int = 7200
    """Pictures that are encoded once; half are square, a quarter each wide and tall."""
    dropout_fraction: float = 0.1
    """Fraction of captions that become "", which is what the pipeline encodes when nothing is asked for."""
    other_word_fraction: float = 0.15
    """Fraction of captions in which another word stands for the shape. A real text encoder tells a word it has no picture
    for from those it has; without this, such a word is read as a circle, and a LoRA could not teach one without the other."""
    other_size_fraction: float = 0.3
    """Fraction of samples whose original size is up to doubled, as if the picture had been scaled down."""


# Shapes: B samples, C = 16 latent channels, h w latent sides, L = 24 tokens, D = 96 text width, P = 64 pooled width.


@dataclass(frozen=True)
class SdxlParts:
    """The trainable parts of a base and what they need."""

    unet: UNet2DConditionModel
    text_encoders: tuple[CLIPTextModel, CLIPTextModelWithProjection]
    tokenizers: tuple[CLIPTokenizer, CLIPTokenizer]
    scheduler: DDIMScheduler

    def modules(self) -> nn.ModuleList:
        """The parts with weights, in a fixed order."""
        return nn.ModuleList([self.unet, *self.text_encoders])


def new_parts(seed: int) -> SdxlParts:
    """Untrained parts; the same seed gives the same weights."""
    tokenizers = (clip_tokenizer(), clip_tokenizer(pad_token="!"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        unet = UNet2DConditionModel(
            sample_size=8,
            in_channels=autoencoder.LATENT_CHANNELS,
            out_channels=autoencoder.LATENT_CHANNELS,
            down_block_types=("CrossAttnDownBlock2D",) * 2,
            up_block_types=("CrossAttnUpBlock2D",) * 2,
            block_out_channels=(64, 128),
            layers_per_block=1,
            transformer_layers_per_block=(1, 1),
            attention_head_dim=(2, 4),
            cross_attention_dim=sum(_TEXT_WIDTHS),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=_TIME_WIDTH,
            projection_class_embeddings_input_dim=6 * _TIME_WIDTH + _TEXT_WIDTHS[1],
        )
        encoders = (
            CLIPTextModel(_text_config(_TEXT_WIDTHS[0], tokenizers[0])),
            CLIPTextModelWithProjection(_text_config(_TEXT_WIDTHS[1], tokenizers[1])),
        )
    # v prediction with zero terminal SNR, Lin et al. 2023 (arXiv 2305.08891). With SD's own noise schedule and
    # eps prediction, position was never learned at this size: the layout is settled at noise it hardly sees.
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        prediction_type="v_prediction",
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
    )
    return SdxlParts(unet, encoders, tokenizers, scheduler)


def _text_config(width: int, tokenizer: CLIPTokenizer) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        projection_dim=_TEXT_WIDTHS[1],
        num_hidden_layers=2,  # the least: SDXL reads the last but one
        num_attention_heads=width // 16,
        max_position_embeddings=CLIP_MAX_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def encode_captions(parts: SdxlParts, captions: list[str]) -> tuple[Tensor, Tensor]:
    """Captions -> text (B, L, D) and pooled text (B, P), as StableDiffusionXLPipeline.encode_prompt has them."""
    states, pooled = [], None
    for tokenizer, encoder in zip(parts.tokenizers, parts.text_encoders, strict=True):
        ids = tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt").input_ids
        out = encoder(ids, output_hidden_states=True)
        states.append(out.hidden_states[-2])
        pooled = out[0]
    return torch.cat(states, dim=-1), pooled


@dataclass(frozen=True)
class Latents:
    """Encoded pictures of one size: moments (N, 2C, h, w) in float32, and the scene of each."""

    width: int
    height: int
    moments: Tensor
    scenes: tuple[worlds.Scene, ...]


@torch.no_grad()
def encode_world(vae: AutoencoderKL, num_pictures: int, seed: int) -> tuple[Latents, ...]:
    """Pictures of trained scenes, never of held-out ones, encoded once; one entry per size of the world."""
    pools = []
    for index, (width, height) in enumerate(worlds.SIZES):
        num = num_pictures // 2 if index == 0 else num_pictures // 4
        scenes = tuple(worlds.TRAINED[n % len(worlds.TRAINED)] for n in range(num))
        moments = []
        for start in range(0, num, 50):
            numbers = range(start, min(start + 50, num))
            images = [worlds.draw(scenes[n], width, height, worlds.rng_for(seed, 1, index, n)) for n in numbers]
            moments.append(vae.encode(autoencoder.to_pixels(images)).latent_dist.parameters)
        pools.append(Latents(width, height, torch.cat(moments), scenes))
    return tuple(pools)


@dataclass(frozen=True)
class Batch:
    """latents, noise (B, C, h, w); t (B,) in 0..999; size_numbers (B, 6): original h w, crop y x, target h w."""

    latents: Tensor
    noise: Tensor
    t: Tensor
    captions: list[str]
    size_numbers: Tensor


def _batches(pools: tuple[Latents, ...], settings: SdxlSettings, seed: int) -> Iterator[Batch]:
    # A pure function of seed and step: every sample draws from generators of its own.
    shares = np.array([len(pool.scenes) for pool in pools], dtype=float)
    for step in range(settings.num_steps):
        pool = pools[int(worlds.rng_for(seed, 2, step).choice(len(pools), p=shares / shares.sum()))]
        samples = [_sample(pool, settings, seed, step * settings.batch_size + index) for index in range(settings.batch_size)]
        latents, noise, u, captions, sizes = zip(*samples, strict=True)
        # Stratified over the batch: the same uniform distribution with less variance.
        strata = (torch.arange(len(samples)) + torch.stack(u)) / len(samples)
        yield Batch(torch.stack(latents), torch.stack(noise), (strata * 1000).long(), list(captions), torch.tensor(sizes))


def _sample(pool: Latents, settings: SdxlSettings, seed: int, number: int) -> tuple[Tensor, Tensor, Tensor, str, tuple[float, ...]]:
    rng = worlds.rng_for(seed, 3, number)
    index = int(rng.integers(len(pool.scenes)))
    scene = pool.scenes[index]
    if rng.random() < settings.other_word_fraction:
        scene = replace(scene, shape=OTHER_WORDS[int(rng.integers(len(OTHER_WORDS)))])
    text = worlds.caption(scene, rng)
    if rng.random() < settings.dropout_fraction:
        text = ""
    scale = rng.uniform(1, 2) if rng.random() < settings.other_size_fraction else 1.0
    sizes = (float(round(pool.height * scale)), float(round(pool.width * scale)), 0.0, 0.0)
    torch_rng = torch.Generator().manual_seed(int(rng.integers(2**63)))
    mean, log_variance = pool.moments[index].chunk(2)
    spread = torch.randn(mean.shape, generator=torch_rng) * (0.5 * log_variance).exp()
    noise = torch.randn(mean.shape, generator=torch_rng)
    u = torch.rand((), generator=torch_rng)
    return mean + spread, noise, u, text, (*sizes, float(pool.height), float(pool.width))


def loss_of(parts: SdxlParts, batch: Batch) -> Tensor:
    """Mean squared error of the predicted v, a scalar."""
    text, pooled = encode_captions(parts, batch.captions)
    x_t = parts.scheduler.add_noise(batch.latents, batch.noise, batch.t)
    v = parts.scheduler.get_velocity(batch.latents, batch.noise, batch.t)
    conditions = {"text_embeds": pooled, "time_ids": batch.size_numbers}
    return (parts.unet(x_t, batch.t, text, added_cond_kwargs=conditions).sample - v).square().mean()


def train_sdxl(vae: AutoencoderKL, settings: SdxlSettings, seed: int) -> StableDiffusionXLPipeline:
    """A pipeline trained from nothing but the VAE; its weights are averages over the last steps (EMA)."""
    parts = new_parts(seed)
    model = parts.modules().train()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=settings.weight_decay)
    factor = autoencoder.warmup_cosine(settings.num_warmup_steps, settings.num_steps)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    num_samples = settings.num_steps * settings.batch_size
    pools = encode_world(vae, min(settings.num_pictures, num_samples), seed)
    smooth = 1.0
    bar = tqdm(_batches(pools, settings, seed), total=settings.num_steps, desc="sdxl", mininterval=5)
    for step, batch in enumerate(bar):
        loss = loss_of(parts, batch)
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
    model.load_state_dict(average.state_dict())
    return as_pipeline(parts, vae)


def as_pipeline(parts: SdxlParts, vae: AutoencoderKL) -> StableDiffusionXLPipeline:
    """The parts as the pipeline that users load. An absent negative prompt means the encoded "" it was trained with."""
    for module in parts.modules():
        module.eval().requires_grad_(False)
    return StableDiffusionXLPipeline(
        vae=vae,
        text_encoder=parts.text_encoders[0],
        text_encoder_2=parts.text_encoders[1],
        tokenizer=parts.tokenizers[0],
        tokenizer_2=parts.tokenizers[1],
        unet=parts.unet,
        scheduler=parts.scheduler,
        force_zeros_for_empty_prompt=False,
        add_watermarker=False,
    )
