"""FLUX.3 Image Klein: how it reads, edits and denoises. Its latents are squares of 2 x 2 latents of its VAE, normalised: one is a token.

Shapes: B samples, 128 latent channels, h w latent sides (a sixteenth of H W, the image's), L text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor
from PIL import Image
from torch import Tensor, nn

from sd_scripts.families.common.editing import EditingTransformerFamily
from sd_scripts.families.common.packing import by_rows
from sd_scripts.families.common.qwen3vl import tiny_qwen3vl
from sd_scripts.families.common.reading import states_of_layers, tokens_of
from sd_scripts.families.common.square_vae import SquareVaeFamily, tiny_square_vae
from sd_scripts.families.common.tiny_words import tiny_qwen_tokenizer
from sd_scripts.families.common.transformer_loading import Loader
from sd_scripts.families.common.transformers import TextShape, given_first
from sd_scripts.library.core.protocols import Condition, Parts, Preview

from .loading import LOADER, TAPS
from .network import made

BEFORE, AFTER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
WINDOW = 80
"""A text is padded to a multiple of so many tokens; the transformer sees the padding (diffusers, modular_pipelines/flux3/encoders.py)."""
SCALE = 0.5
"""Rows and columns of images are counted in steps of this (diffusers, modular_pipelines/flux3/before_denoise.py)."""
BLOCKS = r"^(mode_blocks|txt_mode_blocks|single_transformer_blocks)\."


class Flux3(SquareVaeFamily, EditingTransformerFamily):
    """The FLUX.3 family; see protocols.EditingFamily."""

    loader: ClassVar[Loader] = LOADER
    adapted: ClassVar[Mapping[str, str]] = {"backbone": BLOCKS, "te1": r"language_model\.layers\."}

    def tiny_networks(self) -> tuple[dict[str, nn.Module], dict[str, Any]]:
        """See TransformerFamily."""
        tokenizer = tiny_qwen_tokenizer([BEFORE + AFTER])
        shape = {"num_layers": 1, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
        networks = {
            "backbone": made({**shape, "joint_attention_dim": 32 * len(TAPS), "axes_dims_rope": (4, 4, 4, 4)}),
            "vae": tiny_square_vae(),
            "te1": tiny_qwen3vl(tokenizer, num_layers=TAPS[-1] + 1),
        }
        nn.init.normal_(networks["vae"].bn.running_mean, std=0.1)
        return networks, {"te1": tokenizer}

    def text_shape(self, parts: Parts, num_tokens: int, num_controls: int) -> TextShape:
        """In whole windows; see TransformerFamily."""
        length = min(parts.settings["max_token_length"], -(-(num_tokens + 8) // WINDOW) * WINDOW)
        return TextShape(length, parts.backbone.config.joint_attention_dim, length)

    def rows(self, parts: Parts, caption: str) -> Tensor:
        """Text (L, 8 D): states after eight of Qwen3-VL's layers side by side, with padding to whole windows; see TransformerFamily."""
        encoder, tokenizer, limit = parts.text_encoders["te1"], parts.tokenizers["te1"], parts.settings["max_token_length"]
        device, ids = parts.bring(encoder), tokens_of(tokenizer, BEFORE + caption + AFTER, limit)
        length = min(-(-len(ids) // WINDOW) * WINDOW, limit)
        seen = torch.arange(length, device=device)[None] < len(ids)
        tokens = torch.tensor([ids + [tokenizer.pad_token_id] * (length - len(ids))], device=device)
        # Padding stands at place 1, as it did in the model's training.
        places = torch.arange(length, device=device)[None].masked_fill(~seen, 1)
        return states_of_layers(encoder.model.language_model, TAPS, tokens, attention_mask=seen.long(), position_ids=places)

    def control_pixels(self, parts: Parts, image: Image.Image) -> Tensor:
        """As several reference images are given to the VAE, or a single one, which is taken whole; see EditingFamily."""
        if parts.settings.get("alone"):
            whole: Tensor = Flux3ImageProcessor().preprocess(image, resize_mode="fill")[0]
            return whole[0]
        return super().control_pixels(parts, image)

    def conditions_of(self, parts: Parts, requests: Sequence[Preview]) -> tuple[list[Condition], list[Condition] | None]:
        """See EditingFamily. A single reference image is taken whole, its sides filled up to tokens, unless control_resolution is set."""
        found = []
        for request in requests:
            alone = len(request.controls) == 1 and parts.settings["whole_reference"]
            found.append(super().conditions_of(replace(parts, settings={**parts.settings, "alone": alone}), [request]))
        negative = [one[1][0] for one in found if one[1] is not None]
        return [one[0][0] for one in found], negative or None

    def alike(self, parts: Parts, x_t: Tensor, t: Tensor, text: Tensor, images: Sequence[Tensor]) -> Tensor:
        """See TransformerFamily."""
        network, device, seen = parts.backbone, x_t.device, {}
        if images:
            places = [_places(image, -1 - number) for number, image in enumerate(images)]
            seen = {
                "image_cond_hidden_states": torch.cat([by_rows(image) for image in images], dim=1).to(text.dtype),
                "image_cond_ids": torch.cat(places).to(device),
            }
        # Text and reference images are as if at time 0.
        with given_first(network.time_proj, 1000 * t, torch.zeros_like(t)):
            prediction = network(
                hidden_states=by_rows(x_t).to(text.dtype),
                encoder_hidden_states=text,
                timestep=t,
                img_ids=_places(x_t, 0).to(device),
                txt_ids=torch.cartesian_prod(*(torch.arange(side) for side in (1, 1, 1, text.shape[1]))).to(device, torch.float32),
                return_dict=False,
                **seen,
            )[0]
        velocity: Tensor = prediction.float().transpose(1, 2).reshape(x_t.shape)
        return velocity


def _places(latents: Tensor, image: int) -> Tensor:
    """Position (N, 4) of each token: time, row, column, and 0 for the image, -1, -2, ... for reference images."""
    rows, columns = (SCALE * torch.arange(side) for side in latents.shape[-2:])
    return torch.cartesian_prod(torch.zeros(1), rows, columns, torch.tensor([float(image)]))


FAMILY = Flux3()
