"""FLUX.2: how it edits and denoises, whatever reads its prompts. Its latents are squares of 2 x 2 latents of its VAE, normalised: one is a
token.

Shapes: B samples, 128 latent channels, h w latent sides (a sixteenth of H W, the image's), L text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import Flux2Transformer2DModel
from torch import Tensor

from sd_scripts.library.core.protocols import Parts

from .comfyui_levels import Graph, exponential_shift
from .double_stream import BLOCKS
from .editing import EditingTransformerFamily
from .packing import by_rows
from .reading import states_of_layers
from .square_vae import SquareVaeFamily
from .transformers import TextShape, given_first


class Flux2Family(SquareVaeFamily, EditingTransformerFamily):
    """See protocols.EditingFamily."""

    adapted: ClassVar[Mapping[str, str]] = {"backbone": BLOCKS, "te1": r"^layers\."}
    # Its node Flux2Scheduler counts as diffusers does.
    graph: ClassVar[Graph] = Graph("auto", exponential_shift(2.02))
    depth: ClassVar[str]
    """The entry of its language model's configuration that counts the layers."""

    def text_shape(self, parts: Parts, num_tokens: int, num_controls: int) -> TextShape:
        """With padding; see TransformerFamily."""
        length = parts.settings["max_token_length"]
        return TextShape(length, parts.backbone.config.joint_attention_dim, length)

    def rows(self, parts: Parts, caption: str) -> Tensor:
        """Text (L, D): states after a quarter, a half and three quarters of the language model's layers side by side, with padding to
        max_token_length, which the transformer sees; see TransformerFamily."""
        encoder, tokenizer = parts.text_encoders["te1"], parts.tokenizers["te1"]
        tokens = tokenizer(
            self.told(tokenizer, caption),
            add_special_tokens=False,
            padding="max_length",
            truncation=True,
            max_length=parts.settings["max_token_length"],
            return_tensors="pt",
        ).to(parts.bring(encoder))
        layers = [getattr(encoder.config, self.depth) * quarter // 4 for quarter in (1, 2, 3)]
        return states_of_layers(encoder, layers, tokens.input_ids, attention_mask=tokens.attention_mask)

    def told(self, tokenizer: Any, caption: str) -> str:
        """A caption in the chat template of the language model."""
        raise NotImplementedError

    def mu(self, parts: Parts, num_tokens: int, steps: int) -> float | None:
        """The logarithm of the shift, which depends on the steps too (diffusers, pipeline_flux2_klein.py, compute_empirical_mu): a line
        between those of 10 and of 200 steps; above 4300 tokens that of 200."""
        many = 0.00016927 * num_tokens + 0.45666666
        few = 8.73809524e-05 * num_tokens + 1.89833333
        return many if num_tokens > 4300 else many + (few - many) * (200 - steps) / 190

    def alike(self, parts: Parts, x_t: Tensor, t: Tensor, text: Tensor, images: Sequence[Tensor]) -> Tensor:
        """See TransformerFamily."""
        device, images = x_t.device, [x_t, *images]
        # Reference images stand 10, 20, ... places behind the image in time.
        places = torch.cat([_places(10 * number, image.shape[-2], image.shape[-1], 1) for number, image in enumerate(images)])
        guidance = torch.full_like(t, parts.denoising["guidance_scale"]) if parts.backbone.config.guidance_embeds else None
        told = (t,) if guidance is None else (t, guidance)
        with given_first(parts.backbone.time_guidance_embed.time_proj, *(1000 * number for number in told)):
            prediction = parts.backbone(
                hidden_states=torch.cat([by_rows(image) for image in images], dim=1).to(text.dtype),
                timestep=t,
                encoder_hidden_states=text,
                txt_ids=_places(0, 1, 1, text.shape[1]).to(device),
                img_ids=places.to(device),
                guidance=guidance,
                return_dict=False,
            )[0]
        num_tokens = x_t.shape[-2] * x_t.shape[-1]
        return prediction[:, :num_tokens].float().transpose(1, 2).reshape(x_t.shape)


def _places(time: int, rows: int, columns: int, length: int) -> Tensor:
    """Position (N, 4) of each token: time, row, column, and place in the text."""
    return torch.cartesian_prod(torch.tensor([time]), torch.arange(rows), torch.arange(columns), torch.arange(length))


def tiny_transformer(guidance_embeds: bool) -> Flux2Transformer2DModel:
    """Reads rows of 3 x 32 numbers; weights come from torch's generator as the caller has set it."""
    return Flux2Transformer2DModel(
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=96,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )
