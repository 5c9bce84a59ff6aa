"""Qwen-Image-2.1: how it reads captions, edits and denoises. Its latents have 64 channels and are tokens as they are.

Text, reference images and image are one sequence: each text token sees those before it, tokens of a reference also their own image, and
both are as if at time 0; the image's tokens see all. Shapes: B samples, h w latent sides (a sixteenth of H W, the image's), L text tokens,
D text width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLQwenImage21
from diffusers.pipelines.qwenimage21.pipeline_qwenimage21 import calculate_dimensions
from PIL import Image
from torch import Tensor, nn

from sd_scripts.families.common.comfyui_levels import Graph, exponential_shift
from sd_scripts.families.common.editing import EditingTransformerFamily, pixels_at
from sd_scripts.families.common.images import pixels_of
from sd_scripts.families.common.qwen3vl import tiny_qwen3vl
from sd_scripts.families.common.qwen_vae import QwenVaeFamily, statistics
from sd_scripts.families.common.reading import tokens_of
from sd_scripts.families.common.tiny_words import tiny_qwen_tokenizer
from sd_scripts.families.common.transformer_loading import Loader
from sd_scripts.families.common.transformers import TextShape, given_first
from sd_scripts.library.core.protocols import Parts

from .loading import LOADER
from .network import QwenImage21Network
from .reading import PAD, states_before_norm

SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
"""Rows of these tokens are read by the captions' and not given to the transformer (diffusers, pipeline_qwenimage21.py)."""
BEFORE, AFTER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
START, END = "<|vision_start|>", "<|vision_end|>"


class QwenImage21(QwenVaeFamily, EditingTransformerFamily):
    """The Qwen-Image-2.1 family; see protocols.EditingFamily."""

    loader: ClassVar[Loader] = LOADER
    adapted: ClassVar[Mapping[str, str]] = {"backbone": r"^transformer_blocks\.", "te1": r"language_model\.layers\."}
    graph: ClassVar[Graph] = Graph("simple", exponential_shift(0.69))
    latent: ClassVar[tuple[int, int]] = (64, 16)

    def tiny_networks(self) -> tuple[dict[str, nn.Module], dict[str, Any]]:
        """See TransformerFamily."""
        tokenizer = tiny_qwen_tokenizer([SYSTEM, BEFORE, AFTER])
        shape = {"num_layers": 3, "attention_head_dim": 16, "num_attention_heads": 2, "context_in_dim": 32, "axes_dims_rope": (4, 6, 6)}
        networks = {
            "backbone": QwenImage21Network(**shape),
            "vae": AutoencoderKLQwenImage21(base_dim=8, decoder_base_dim=8, dim_mult=[1, 1, 2, 2, 2], num_res_blocks=1),
            "te1": tiny_qwen3vl(tokenizer),
        }
        # As they are drawn, the gates are nearly closed, and nothing is seen of what the blocks do.
        for layer in (networks["backbone"].modulation[1], networks["backbone"].proj_out):
            nn.init.normal_(layer.weight, std=0.3)
        return networks, {"te1": tokenizer}

    def text_shape(self, parts: Parts, num_tokens: int, num_controls: int) -> TextShape:
        """With what of the template stands around the caption; the system's part is only read. See TransformerFamily."""
        length = min(parts.settings["max_token_length"], num_tokens)
        return TextShape(length + 8 + 6 * num_controls, parts.backbone.config.context_in_dim, length + 24)

    def rows(self, parts: Parts, caption: str, images: Sequence[Tensor] = ()) -> Tensor:
        """Text (L, D): the states after Qwen3-VL's last layer, before its last norm, without the rows of the system's part; see
        TransformerFamily. Where it sees one of these images there are no rows: the transformer has its latents there."""
        tokenizer, limit = parts.tokenizers["te1"], parts.settings["max_token_length"]
        start, closing = len(tokenizer(SYSTEM).input_ids), tokenizer(AFTER).input_ids
        # Two images are apart by a blank.
        shown = " ".join(f"<image{number}>{START}{PAD}{END}" for number in range(1, len(images) + 1))
        lead = len(tokenizer(SYSTEM + BEFORE + shown).input_ids)
        # diffusers reads a blank for nothing. Where an image stands is not for captions to say.
        ids = tokens_of(tokenizer, SYSTEM + BEFORE + shown + (caption.replace(PAD, "") or " "), limit, further=lead)
        return states_before_norm(parts, "te1", ids + closing, images)[start:]

    def encode_instructions(self, parts: Parts, controls: Sequence[Tensor], captions: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """Nothing that instructions share, and the rows of each, which have seen the control images; see EditingFamily."""
        return self.no_rows(parts), [self.rows(parts, caption, controls) for caption in captions]

    def control_size(self, parts: Parts, size: tuple[int, int]) -> tuple[int, int]:
        """(width, height) at which a reference image of this size is seen: of about the area, in its own aspect ratio."""
        width, height, _ = calculate_dimensions(parts.settings["control_area"], size[0] / size[1])
        return max(self.grid, width), max(self.grid, height)

    def control_pixels(self, parts: Parts, image: Any) -> Tensor:
        """A reference image as VAE and Qwen3-VL get it, (3, H, W) in [-1, 1]; what is transparent stands on white."""
        drawn = image.convert("RGBA")
        opaque = Image.new("RGB", drawn.size, "white")
        opaque.paste(drawn, mask=drawn.getchannel("A"))
        return pixels_at(opaque, self.control_size(parts, image.size))

    def encode_images(self, parts: Parts, pixels: Tensor) -> Tensor:
        """Scaled latents (B, 64, H/16, W/16) of RGB images, which are opaque: the VAE has an alpha channel, too; see QwenVaeFamily."""
        return super().encode_images(parts, torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1))

    @torch.no_grad()
    def decode(self, parts: Parts, latents: Tensor) -> Tensor:
        """Images of scaled latents: (B, 64, h, w) -> (B, 3, 16h, 16w) in [-1, 1], float32; what is transparent stands on white."""
        mean, deviation = statistics(parts, latents)
        film = pixels_of(parts, (latents.float() * deviation + mean)[:, :, None])[:, :, 0]
        return 1 - (1 - film[:, :3]) * ((film[:, 3:] + 1) / 2)

    def alike(self, parts: Parts, x_t: Tensor, t: Tensor, text: Tensor, images: Sequence[Tensor]) -> Tensor:
        """See TransformerFamily."""
        network = parts.backbone
        exact = torch.cat([t, t.new_zeros(1)]) if network.config.causal_condition else t
        with given_first(network.time_text_embed.time_proj, exact):
            prediction: Tensor = network([*images, x_t], text, t, _before(parts, len(images)))
        return prediction.float()


def _before(parts: Parts, count: int) -> list[int]:
    """How many rows of a text stand before each of its reference images."""
    tokenizer, text, found = parts.tokenizers["te1"], BEFORE, []
    for number in range(1, count + 1):
        text += f"<image{number}>{START}"
        found.append(len(tokenizer(text).input_ids))
        text += f"{END} "
    return found


FAMILY = QwenImage21()
