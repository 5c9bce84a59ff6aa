"""Train the toy Qwen-Image-Edit base: real pipeline classes of edit-2509, small configs, the world of edits.

Knows how the family is conditioned. Its VAE is qwen_vae.py's, the loop pretraining.py's, the files build.py's.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from PIL import Image
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from sd_scripts.families.common.packing import packed, unpacked
from sd_scripts.families.qwen_edit.processor import ImageProcessor

from . import edits, pretraining, qwen_vae, sharing, worlds
from .edits import Edit
from .measure import EditRender
from .pretraining import BaseSettings
from .tokens import qwen_tokenizer

CONDITION_AREA = 384 * 384
"""Area in pixels of the image that goes to the text encoder's processor, which makes it VISION_AREA: as in the real model."""
VISION_AREA = 60 * 60
"""Most pixels that the vision tower sees: 56 x 56, which is four tokens; two for images that are not square."""

NUM_STEPS = 10
CFG_SCALE = 2.0
"""Steps and guidance that the base is measured with."""

_TEXT_WIDTH = 64
_VISION_WIDTH = 32
_IMAGE = "Picture 1: <|vision_start|><|image_pad|><|vision_end|>"


@dataclass(frozen=True)
class QwenEditSettings(BaseSettings):
    """How a toy Qwen-Image-Edit base is trained."""

    num_steps: int = 9000
    """Steps of each round."""
    num_rounds: int = 3
    """Warm restarts, Loshchilov and Hutter 2017 (arXiv 1608.03983): each round starts from the last one's average of weights, with fresh
    pairs. What to do is learned in the first; which of two shapes is meant comes late."""
    round_factor: float = 0.8
    """How the learning rate of a round compares with the one before."""
    batch_size: int = 24
    learning_rate: float = 1.5e-3
    num_images: int = 12000
    """Pairs of source and target that are encoded once; a third of each size: shapes of images that are not square come late."""
    recolour_fraction: float = 0.15
    """Fraction of the instructions with a meaning that ask for another colour, which is learned first."""
    move_fraction: float = 0.5
    """Fraction that asks for another place: a circle moved in a wide image is a square for long. The others ask to remove something."""
    other_word_fraction: float = 0.12
    """Fraction of pairs whose instruction has no meaning, and whose target is the source."""
    capital_fraction: float = 0.15
    """Fraction of instructions that begin with a capital."""
    blank_fraction: float = 0.5
    """Fraction of the instructions left out that are a space instead of "": pipelines are given either for "nothing is asked"."""
    time_mean: float = 0.4
    time_deviation: float = 1.2
    """Times are sigmoid(mean + deviation * normal): logit-normal, Esser et al. 2024 (arXiv 2403.03206)."""


# Shapes: B samples, C = 16 latent channels, h w latent sides, N = h/2 * w/2 tokens of an image, 4C = 64 numbers each, L text rows after
# the dropped beginning, D = 64 text width, V patches of 14 x 14 pixels of a source as the vision tower has it.


@dataclass(frozen=True)
class QwenEditParts:
    """The trainable parts of a base and what they need."""

    transformer: QwenImageTransformer2DModel
    text_encoder: Qwen2_5_VLForConditionalGeneration
    tokenizer: Qwen2Tokenizer
    processor: ImageProcessor

    def modules(self) -> nn.ModuleList:
        """The parts with weights, in a fixed order."""
        return nn.ModuleList([self.transformer, self.text_encoder])


def templates() -> dict[type, tuple[str, int]]:
    """The prompt template of each pipeline, and how many tokens of it are dropped, as the library has them."""
    found = {}
    for kind in (QwenImagePipeline, QwenImageEditPipeline, QwenImageEditPlusPipeline):
        nothing = dict.fromkeys(("vae", "text_encoder", "tokenizer", "transformer", "processor"))
        if kind is QwenImagePipeline:
            del nothing["processor"]
        pipeline = kind(scheduler=FlowMatchEulerDiscreteScheduler(), **nothing)
        found[kind] = (pipeline.prompt_template_encode, pipeline.prompt_template_encode_start_idx)
    return found


_TEMPLATE, NUM_DROPPED = templates()[QwenImageEditPlusPipeline]


def new_tokenizer() -> Qwen2Tokenizer:
    """The toy tokenizer; the beginnings of the templates have as many tokens as in the real one."""
    texts = [template for template, _ in templates().values()]
    return qwen_tokenizer((*texts, "Picture 1: Picture 2: Picture 3: "))


def new_parts(seed: int) -> QwenEditParts:
    """Untrained parts; the same seed gives the same weights."""
    tokenizer = new_tokenizer()
    ids = {
        name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("im_end", "image_pad", "video_pad", "vision_start", "vision_end")
    }
    config = Qwen2_5_VLConfig(
        text_config={
            "hidden_size": _TEXT_WIDTH,
            "intermediate_size": 2 * _TEXT_WIDTH,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": len(tokenizer),
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            "bos_token_id": tokenizer.pad_token_id,
            "eos_token_id": ids["im_end"],
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": _VISION_WIDTH,
            "intermediate_size": 2 * _VISION_WIDTH,
            "num_heads": 2,
            "out_hidden_size": _TEXT_WIDTH,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        transformer = QwenImageTransformer2DModel(
            in_channels=64,
            out_channels=16,
            num_layers=5,
            attention_head_dim=32,
            num_attention_heads=3,
            joint_attention_dim=_TEXT_WIDTH,
            axes_dims_rope=(4, 14, 14),
        )
        text_encoder = Qwen2_5_VLForConditionalGeneration(config)
    image_processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=VISION_AREA)
    return QwenEditParts(transformer, text_encoder, tokenizer, ImageProcessor(image_processor, tokenizer))


def condition_image(image: Image.Image) -> Image.Image:
    """The image at the size that the pipeline gives to the processor: CONDITION_AREA, sides multiples of 32."""
    width = (CONDITION_AREA * image.width / image.height) ** 0.5
    height = width * image.height / image.width
    return image.resize((round(width / 32) * 32, round(height / 32) * 32), Image.Resampling.LANCZOS)


@dataclass(frozen=True)
class Pairs:
    """Encoded pairs of one size: sources, targets (N, C, h, w) normalised; patches (N, V, 1176) of the sources, all on one grid (3,)."""

    width: int
    height: int
    sources: Tensor
    targets: Tensor
    patches: Tensor
    grid: Tensor
    edits: tuple[Edit, ...]


def encode_world(vae: AutoencoderKLQwenImage, processor: ImageProcessor, settings: QwenEditSettings, seed: int) -> tuple[Pairs, ...]:
    """Pairs of edits that bases are trained on, encoded once; one entry per size of the world."""
    pools = []
    for index, (width, height) in enumerate(worlds.SIZES):
        num = settings.num_images // len(worlds.SIZES)
        chosen: list[Any] = []
        sources, targets, patches = [], [], []
        for start in range(0, num, 50):
            drawn = [_drawn(settings, width, height, worlds.rng_for(seed, 1, index, n)) for n in range(start, min(start + 50, num))]
            of_edits, before, after = zip(*drawn, strict=True)
            chosen += of_edits
            sources.append(qwen_vae.encode(vae, list(before)))
            targets.append(qwen_vae.encode(vae, list(after)))
            seen = processor.image_processor([condition_image(image) for image in before], return_tensors="pt")
            patches.append(seen["pixel_values"].reshape(len(before), -1, seen["pixel_values"].shape[-1]).half())
        grid = seen["image_grid_thw"][0]
        pools.append(Pairs(width, height, torch.cat(sources), torch.cat(targets), torch.cat(patches), grid, tuple(chosen)))
    return tuple(pools)


def _drawn(settings: QwenEditSettings, width: int, height: int, rng: np.random.Generator) -> tuple[Edit, Image.Image, Image.Image]:
    shares = (settings.recolour_fraction, settings.move_fraction, 1 - settings.recolour_fraction - settings.move_fraction)
    kind = "keep" if rng.random() < settings.other_word_fraction else edits.OLD_KINDS[int(rng.choice(len(edits.OLD_KINDS), p=shares))]
    edit = edits.edit_of(kind, rng)
    return edit, *edits.draw(edit, width, height, rng)


@dataclass(frozen=True)
class EditBatch:
    """targets, sources, noise (B, C, h, w); u (B,) uniform in [0, 1), stratified; patches (B, V, 1176) on one grid (3,)."""

    targets: Tensor
    sources: Tensor
    noise: Tensor
    u: Tensor
    instructions: list[str]
    patches: Tensor
    grid: Tensor


def batches(pools: tuple[Pairs, ...], settings: QwenEditSettings, seed: int) -> Iterator[EditBatch]:
    """The batches of a training: a pure function of seed and step, every sample drawing from generators of its own."""
    shares = np.array([len(pool.edits) for pool in pools], dtype=float)
    for step in range(settings.num_steps):
        pool = pools[int(worlds.rng_for(seed, 2, step).choice(len(pools), p=shares / shares.sum()))]
        indices, noise, u, texts = [], [], [], []
        for number in range(step * settings.batch_size, (step + 1) * settings.batch_size):
            rng = worlds.rng_for(seed, 3, number)
            indices.append(int(rng.integers(len(pool.edits))))
            texts.append(instruction(pool.edits[indices[-1]], settings, rng))
            torch_rng = torch.Generator().manual_seed(int(rng.integers(2**63)))
            noise.append(torch.randn(pool.targets.shape[1:], generator=torch_rng))
            u.append(torch.rand((), generator=torch_rng))
        # Stratified over the batch: the same uniform distribution with less variance.
        strata = (torch.arange(len(u)) + torch.stack(u)) / len(u)
        yield EditBatch(
            pool.targets[indices], pool.sources[indices], torch.stack(noise), strata, texts, pool.patches[indices].float(), pool.grid
        )


def instruction(edit: Edit, settings: QwenEditSettings, rng: np.random.Generator) -> str:
    """The edit in words, now and then with a capital, or not at all, as the settings say."""
    text = edits.instruction(edit, rng)
    if rng.random() < settings.dropout_fraction:
        return " " if rng.random() < settings.blank_fraction else ""
    return text[:1].upper() + text[1:] if rng.random() < settings.capital_fraction else text


def encode_instructions(parts: QwenEditParts, instructions: list[str], patches: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Instructions on sources (B, V, 1176) -> text rows (B, L, D) and mask (B, L), as the pipeline has them with true positions.

    The pipeline forgets to say which tokens are the image's, and transformers 5 then numbers them in one dimension.
    """
    num_vision = int(grid.prod()) // parts.processor.image_processor.merge_size**2
    image = _IMAGE.replace("<|image_pad|>", "<|image_pad|>" * num_vision)
    texts = [_TEMPLATE.format(image + text) for text in instructions]
    tokens = parts.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    rows = parts.text_encoder.model(
        input_ids=tokens.input_ids,
        attention_mask=tokens.attention_mask,
        pixel_values=patches.flatten(0, 1),
        image_grid_thw=grid.expand(len(instructions), 3),
        mm_token_type_ids=(tokens.input_ids == parts.processor.image_token_id).int(),
    ).last_hidden_state
    mask = tokens.attention_mask[:, NUM_DROPPED:]
    return rows[:, NUM_DROPPED:] * mask[..., None], mask


def velocity(parts: QwenEditParts, x_t: Tensor, sources: Tensor, t: Tensor, text: Tensor, mask: Tensor) -> Tensor:
    """The predicted noise - latents as tokens (B, N, 4C) of noisy targets x_t at times t (B,); sources have their size."""
    target, control = packed(x_t), packed(sources)
    grid = (1, x_t.shape[2] // 2, x_t.shape[3] // 2)
    predicted = parts.transformer(
        hidden_states=torch.cat([target, control], dim=1),
        encoder_hidden_states=text,
        encoder_hidden_states_mask=mask,
        timestep=t,
        img_shapes=[[grid, grid]] * len(x_t),
    ).sample
    return predicted[:, : target.shape[1]]


def loss_of(parts: QwenEditParts, batch: EditBatch, settings: QwenEditSettings) -> Tensor:
    """Mean squared error of the predicted velocity noise - latents on the targets' tokens, a scalar."""
    text, mask = encode_instructions(parts, batch.instructions, batch.patches, batch.grid)
    t = pretraining.logit_normal(batch.u, settings.time_mean, settings.time_deviation)
    x_t = torch.lerp(batch.targets, batch.noise, t[:, None, None, None])
    v = velocity(parts, x_t, batch.sources, t, text, mask)
    return (v - packed(batch.noise - batch.targets)).square().mean()


def train_qwen_edit(
    vae: AutoencoderKLQwenImage, settings: QwenEditSettings, seed: int, saved: Path | None = None
) -> QwenImageEditPlusPipeline:
    """A pipeline whose transformer and text encoder are trained from nothing on top of this VAE; each round has a state of its own."""
    parts = new_parts(seed)
    for number in range(settings.num_rounds):
        of_round = replace(settings, learning_rate=settings.learning_rate * settings.round_factor**number)
        pools = encode_world(vae, parts.processor, of_round, seed + 1000 * number)
        shown = batches(pools, of_round, seed + 1000 * number)
        parts.modules().requires_grad_(True)
        state = None if saved is None else saved.with_name(f"{saved.name}.{number}")
        name = f"qwen_edit, round {number + 1} of {settings.num_rounds}"
        pretraining.train(parts.modules(), functools.partial(loss_of, parts, settings=settings), shown, of_round, name, state)
    return as_pipeline(parts, vae)


def as_pipeline(parts: QwenEditParts, vae: AutoencoderKLQwenImage) -> QwenImageEditPlusPipeline:
    """The parts as the pipeline that users load."""
    return QwenImageEditPlusPipeline(
        vae=vae,
        text_encoder=parts.text_encoder,
        tokenizer=parts.tokenizer,
        processor=parts.processor,
        transformer=parts.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0, use_dynamic_shifting=False),
    )


@torch.no_grad()
def sample(
    parts: QwenEditParts,
    vae: AutoencoderKLQwenImage,
    instructions: list[str],
    sources: list[Image.Image],
    seeds: list[int],
    num_steps: int = NUM_STEPS,
    cfg_scale: float = CFG_SCALE,
) -> list[Image.Image]:
    """Edited images by Euler's method with true guidance against the empty instruction; sources of one size.

    Each image's noise comes from its own seed. As in the pipeline, guided predictions get the length of the unguided ones.
    """
    control = qwen_vae.encode(vae, sources)
    seen = parts.processor.image_processor([condition_image(image) for image in sources], return_tensors="pt")
    grid = seen["image_grid_thw"][0]
    patches = seen["pixel_values"].reshape(len(sources), -1, seen["pixel_values"].shape[-1])
    asked = encode_instructions(parts, instructions, patches, grid)
    nothing = encode_instructions(parts, [""] * len(instructions), patches, grid)
    x_t = torch.stack([torch.randn(control.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in seeds])
    times = torch.linspace(1, 0, num_steps + 1)
    for t, following in itertools.pairwise(times):
        v = velocity(parts, x_t, control, t.expand(len(x_t)), *asked)
        if cfg_scale != 1:
            base = velocity(parts, x_t, control, t.expand(len(x_t)), *nothing)
            guided = base + cfg_scale * (v - base)
            v = guided * (v.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
        x_t = x_t + (following - t) * unpacked(v, *x_t.shape[2:])
    return qwen_vae.decode(vae, x_t)


def load(folder: Path) -> tuple[QwenEditParts, AutoencoderKLQwenImage]:
    """The parts and the VAE of a stored base, in float32."""
    tokenizer = Qwen2Tokenizer.from_pretrained(folder / "tokenizer", local_files_only=True)
    images = Qwen2VLImageProcessorPil.from_pretrained(folder / "processor", local_files_only=True)
    transformer = QwenImageTransformer2DModel.from_pretrained(folder / "transformer", local_files_only=True, dtype=torch.float32)
    text_encoder = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder / "text_encoder", local_files_only=True, dtype=torch.float32)
    vae = sharing.load_vae(folder / "vae")
    parts = QwenEditParts(transformer, text_encoder, tokenizer, ImageProcessor(images, tokenizer))
    parts.modules().eval().requires_grad_(False)
    return parts, vae


def render_with(
    parts: QwenEditParts, vae: AutoencoderKLQwenImage, num_steps: int = NUM_STEPS, cfg_scale: float = CFG_SCALE, batch_size: int = 32
) -> EditRender:
    """A render callable in the form that measure.py takes."""

    def render(instructions: list[str], sources: list[Image.Image], seeds: list[int]) -> list[Image.Image]:
        images: list[Image.Image] = []
        for start in range(0, len(seeds), batch_size):
            chosen = slice(start, start + batch_size)
            images += sample(parts, vae, instructions[chosen], sources[chosen], seeds[chosen], num_steps, cfg_scale)
        return images

    return render
