"""FLUX.3 Image Klein: how it reads, edits and denoises. Its latents are squares of 2 x 2 latents of its VAE, normalised: one is a token.

Shapes: B samples, 128 latent channels, h w latent sides (a sixteenth of H W, the image's), L text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor
from torch import Tensor, nn

from sd_scripts.families.common import structures
from sd_scripts.families.common.editing import AREA, EditingTransformerFamily, controls_of
from sd_scripts.families.common.qwen3vl import tell_of_cut, tiny_qwen3vl
from sd_scripts.families.common.square_vae import SquareVaeFamily, tiny_square_vae
from sd_scripts.families.common.tiny import tiny_parts
from sd_scripts.families.common.tiny_words import tiny_qwen_tokenizer
from sd_scripts.families.common.transformer_loading import Loader, scheduler_in
from sd_scripts.library.core.protocols import Condition, Parts, Preview, dtype_of
from sd_scripts.schema.model import MAX_CONTROLS

from .loading import LOADER, SPEC, TAPS
from .network import made
from .options import Flux3ModelOptions

BEFORE, AFTER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
WINDOW = 80
"""A text is padded to a multiple of so many tokens; the transformer sees the padding (diffusers, modular_pipelines/flux3/encoders.py)."""
SCALE = 0.5
"""Rows and columns of images are counted in steps of this (diffusers, modular_pipelines/flux3/before_denoise.py)."""
BLOCKS = r"^(mode_blocks|txt_mode_blocks|single_transformer_blocks)\."


class Flux3(SquareVaeFamily, EditingTransformerFamily):
    """The FLUX.3 family; see protocols.EditingFamily."""

    name: ClassVar[str] = "flux3"
    grid: ClassVar[int] = Flux3ModelOptions.grid
    loader: ClassVar[Loader] = LOADER
    adapted: ClassVar[Mapping[str, str]] = {"backbone": BLOCKS, "te1": r"language_model\.layers\."}
    most_controls: ClassVar[int] = MAX_CONTROLS
    reader: ClassVar[str] = "te1"

    def tiny(self) -> Parts:
        """See protocols.ModelFamily."""
        tokenizer = tiny_qwen_tokenizer([BEFORE + AFTER])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            networks = {
                "backbone": made(
                    {
                        "num_layers": 1,
                        "num_single_layers": 2,
                        "attention_head_dim": 16,
                        "num_attention_heads": 2,
                        "joint_attention_dim": 32 * len(TAPS),
                        "axes_dims_rope": (4, 4, 4, 4),
                    }
                ),
                "vae": tiny_square_vae(),
                "te1": tiny_qwen3vl(tokenizer, num_layers=TAPS[-1] + 1),
            }
            torch.nn.init.normal_(networks["vae"].bn.running_mean, std=0.1)
        settings = {"max_token_length": 8192, "model_version": SPEC.label, "area": AREA, "control_area": AREA, "whole_reference": True}
        return tiny_parts(networks, {"te1": tokenizer}, scheduler_in(SPEC.configs), settings)

    def texts_like(self, parts: Parts, caption: str, batch: int, num_controls: int) -> list[Condition]:
        """text, in windows; see protocols.ModelFamily."""
        return structures.texts_of(parts, batch, {"text": (_length(parts, caption), parts.backbone.config.joint_attention_dim)})

    def read_like(self, parts: Parts, name: str, caption: str, batch: int) -> Tensor:
        """What Qwen3-VL makes of texts with their padding; see protocols.ModelFamily."""
        return structures.read(parts.text_encoders[name], batch, _length(parts, caption))

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """Text part of each caption's condition, text (L, 8 D): states after eight of Qwen3-VL's layers side by side, with padding to whole
        windows, in the encoder's precision. Each caption is encoded alone. Runs with gradient when grad mode is on."""
        encoder, tokenizer, limit = parts.text_encoders["te1"], parts.tokenizers["te1"], parts.settings["max_token_length"]
        device = parts.bring(encoder)
        conditions = []
        for caption in captions:
            ids = tokenizer(BEFORE + caption + AFTER).input_ids
            if len(ids) > limit:
                tell_of_cut(limit)
            count = min(len(ids), limit)
            length = min(-(-count // WINDOW) * WINDOW, limit)
            seen = torch.arange(length, device=device)[None] < count
            tokens = torch.tensor([ids[:count] + [tokenizer.pad_token_id] * (length - count)], device=device)
            # Padding stands at place 1, as it did in the model's training.
            places = torch.arange(length, device=device)[None].masked_fill(~seen, 1)
            found = encoder.model.language_model(
                input_ids=tokens, attention_mask=seen.long(), position_ids=places, output_hidden_states=True, use_cache=False
            )
            conditions.append({"text": torch.cat([found.hidden_states[layer][0] for layer in TAPS], dim=-1)})
        return conditions

    def control_pixels(self, parts: Parts, image: Any) -> Tensor:
        """A reference image as the VAE gets it, (3, H, W) in [-1, 1]: made smaller where it has more than the area, then cut."""
        processor, (width, height) = Flux3ImageProcessor(), self.control_size(parts, image.size)
        if parts.settings.get("alone"):
            whole: Tensor = processor.preprocess(image, resize_mode="fill")[0]
            return whole[0]
        smaller = processor._resize_if_exceeds_area(image.convert("RGB"), parts.settings["control_area"])
        pixels: Tensor = VaeImageProcessor.preprocess(processor, smaller, height=height, width=width, resize_mode="crop")
        return pixels[0]

    def conditions_of(self, parts: Parts, requests: Sequence[Preview]) -> tuple[list[Condition], list[Condition] | None]:
        """See EditingFamily. A single reference image is taken whole, its sides filled up to tokens, unless control_resolution is set."""
        found = []
        for request in requests:
            alone = len(request.controls) == 1 and parts.settings["whole_reference"]
            found.append(super().conditions_of(replace(parts, settings={**parts.settings, "alone": alone}), [request]))
        negative = [one[1][0] for one in found if one[1] is not None]
        return [one[0][0] for one in found], negative or None

    def alike(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """See TransformerFamily."""
        dtype, device = dtype_of(parts.backbone), x_t.device
        text = torch.stack([condition["text"] for condition in conditions]).to(device, dtype)
        images = [torch.stack(same).to(device) for same in zip(*map(controls_of, conditions), strict=True)]
        t = t.to(device, torch.float32)
        seen: dict[str, Tensor] = {}
        if images:
            places = [_places(image, -1 - number) for number, image in enumerate(images)]
            seen = {
                "image_cond_hidden_states": torch.cat([_tokens(image) for image in images], dim=1).to(dtype),
                "image_cond_ids": torch.cat(places).to(device),
            }
        with _timed(parts.backbone.time_proj, 1000 * t):
            prediction = parts.backbone(
                hidden_states=_tokens(x_t).to(dtype),
                encoder_hidden_states=text,
                timestep=t,
                img_ids=_places(x_t, 0).to(device),
                txt_ids=torch.cartesian_prod(*(torch.arange(side) for side in (1, 1, 1, text.shape[1]))).to(device, torch.float32),
                return_dict=False,
                **seen,
            )[0]
        velocity: Tensor = prediction.float().transpose(1, 2).reshape(x_t.shape)
        return velocity


def _length(parts: Parts, caption: str) -> int:
    """Tokens of a caption in its template, in whole windows."""
    return min(parts.settings["max_token_length"], -(-(structures.num_tokens(caption) + 8) // WINDOW) * WINDOW)


def _tokens(latents: Tensor) -> Tensor:
    """Tokens (B, N, C) of latents (B, C, h, w), row by row."""
    return latents.flatten(2).transpose(1, 2)


def _places(latents: Tensor, image: int) -> Tensor:
    """Position (N, 4) of each token: time, row, column, and 0 for the image, -1, -2, ... for reference images."""
    rows, columns = (SCALE * torch.arange(side) for side in latents.shape[-2:])
    return torch.cartesian_prod(torch.zeros(1), rows, columns, torch.tensor([float(image)]))


@contextmanager
def _timed(embedding: nn.Module, times: Tensor) -> Iterator[None]:
    """Within the block the first call of this module is given these times; the second is the one of text and reference images, at 0.

    diffusers rounds times to the precision of the network before it embeds them, to three digits in bfloat16.
    """
    left = [times]

    def given(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (left.pop() if left else arguments[0], *arguments[1:])

    handle = embedding.register_forward_pre_hook(given)
    try:
        yield
    finally:
        handle.remove()


FAMILY = Flux3()
