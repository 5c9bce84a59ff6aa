"""Train the toy Qwen-Image-Edit base: real pipeline classes of edit-2509, small configs, the world of edits.

Knows how the family is conditioned. Its VAE is qwen_vae.py's, the pairs editing.py's, the loop pretraining.py's.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from pathlib import Path

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

from . import editing, pretraining, qwen_vae, sharing, worlds
from .editing import EditBatch, EditSettings, Pairs
from .measure import EditRender
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
class QwenEditSettings(EditSettings):
    """How a toy Qwen-Image-Edit base is trained."""

    num_steps: int = 9000
    """Steps of each round."""
    num_rounds: int = 3
    """Warm restarts, Loshchilov and Hutter 2017 (arXiv 1608.03983): each round starts from the last one's average of weights, with fresh
    pairs. What to do is learned in the first; which of two shapes is meant comes late."""
    round_factor: float = 0.8
    """How the learning rate of a round compares with the one before."""
    num_text_rounds: int = 1
    """Rounds that train the text encoder; the later ones leave it as it is. Trained to the end it holds instructions without a meaning
    nearer to each other, and a LoRA then teaches one of them at the cost of the others."""
    batch_size: int = 24
    learning_rate: float = 1.5e-3
    num_images: int = 12000
    """Pairs of source and target that are encoded once."""
    time_mean: float = 0.4
    time_deviation: float = 1.2
    """Times are sigmoid(mean + deviation * normal): logit-normal, Esser et al. 2024 (arXiv 2403.03206)."""
    late_move_fractions: tuple[float, ...] = (0.6, 0.4)
    """Moves of two more rounds, which tell shapes apart in images that are not square, near to noise. Before them 38 of 150 moves had
    another shape, 36 of them in such images, where 28 of 61 circles were squares or triangles, and nothing else was wrong."""
    late_fraction: float = 0.3
    """Steps of such a round, as a part of num_steps."""
    late_learning_rate: float = 1e-3
    late_time_mean: float = 1.8
    late_recolour_fraction: float = 0.1


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


def patches_of(processor: ImageProcessor, images: list[Image.Image]) -> tuple[Tensor, Tensor]:
    """What the vision tower gets of images of one size: patches (B, V, 1176) and their grid (3,)."""
    seen = processor.image_processor([condition_image(image) for image in images], return_tensors="pt")
    return seen["pixel_values"].reshape(len(images), -1, seen["pixel_values"].shape[-1]), seen["image_grid_thw"][0]


def encode_world(
    vae: AutoencoderKLQwenImage,
    processor: ImageProcessor,
    settings: QwenEditSettings,
    seed: int,
    sizes: tuple[tuple[int, int], ...] = worlds.SIZES,
) -> tuple[Pairs, ...]:
    """Pairs of edits that bases are trained on, with the patches of their sources."""
    return editing.encode_pairs(
        functools.partial(qwen_vae.encode, vae), settings, seed, sizes, look=lambda images: patches_of(processor, images)[0]
    )


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
    grid = patches_of(parts.processor, [Image.new("RGB", batch.size)])[1]
    text, mask = encode_instructions(parts, batch.instructions, batch.seen, grid)
    t = pretraining.logit_normal(batch.u, settings.time_mean, settings.time_deviation)
    x_t = torch.lerp(batch.targets, batch.noise, t[:, None, None, None])
    v = velocity(parts, x_t, batch.sources, t, text, mask)
    return (v - packed(batch.noise - batch.targets)).square().mean()


def rounds(settings: QwenEditSettings) -> tuple[QwenEditSettings, ...]:
    """The settings of all rounds."""
    first = (
        replace(settings, learning_rate=settings.learning_rate * settings.round_factor**number) for number in range(settings.num_rounds)
    )
    late = replace(
        settings,
        num_steps=max(1, round(settings.late_fraction * settings.num_steps)),
        learning_rate=settings.late_learning_rate,
        time_mean=settings.late_time_mean,
        recolour_fraction=settings.late_recolour_fraction,
    )
    return (*first, *(replace(late, move_fraction=fraction) for fraction in settings.late_move_fractions))


def train_qwen_edit(
    vae: AutoencoderKLQwenImage, settings: QwenEditSettings, seed: int, saved: Path | None = None
) -> QwenImageEditPlusPipeline:
    """A pipeline whose transformer and text encoder are trained from nothing on top of this VAE; each round has a state of its own."""
    parts = new_parts(seed)
    all_rounds = rounds(settings)
    for number, of_round in enumerate(all_rounds):
        sizes = worlds.SIZES if number < settings.num_rounds else (worlds.SIZES[0], *2 * worlds.SIZES[1:])
        pools = encode_world(vae, parts.processor, of_round, seed + 1000 * number, sizes)
        shown = editing.batches(pools, of_round, seed + 1000 * number)
        parts.modules().requires_grad_(True)
        parts.text_encoder.requires_grad_(number < settings.num_text_rounds)
        state = None if saved is None else saved.with_name(f"{saved.name}.{number}")
        name = f"qwen_edit, round {number + 1} of {len(all_rounds)}"
        pretraining.train(parts.modules(), functools.partial(loss_of, parts, settings=of_round), shown, of_round, name, state)
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
    patches, grid = patches_of(parts.processor, sources)
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
