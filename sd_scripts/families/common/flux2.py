"""FLUX.2: how it edits and denoises, whatever reads its prompts. Its latents are squares of 2 x 2 latents of its VAE, normalised: one is a
token.

Shapes: B samples, 128 latent channels, h w latent sides (a sixteenth of H W, the image's), L text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from diffusers import Flux2Transformer2DModel
from torch import Tensor

from sd_scripts.library.core.protocols import Condition, Parts
from sd_scripts.schema.model import MAX_CONTROLS

from . import structures
from .comfyui_levels import Graph, exponential_shift
from .double_stream import BLOCKS
from .editing import EditingTransformerFamily
from .packing import by_rows
from .square_vae import SquareVaeFamily
from .transformers import given_first


class Flux2Family(SquareVaeFamily, EditingTransformerFamily):
    """See protocols.EditingFamily."""

    adapted: ClassVar[Mapping[str, str]] = {"backbone": BLOCKS, "te1": r"^layers\."}
    # Its node Flux2Scheduler counts as diffusers does.
    graph: ClassVar[Graph] = Graph("auto", exponential_shift(2.02))
    most_controls: ClassVar[int] = MAX_CONTROLS
    reader: ClassVar[str] = "te1"

    def texts_like(self, parts: Parts, caption: str, batch: int, num_controls: int) -> list[Condition]:
        """text, with its padding; see protocols.ModelFamily."""
        shape = (parts.settings["max_token_length"], parts.backbone.config.joint_attention_dim)
        return structures.texts_of(parts, batch, {"text": shape})

    def read_like(self, parts: Parts, name: str, caption: str, batch: int) -> Tensor:
        """What the language model makes of texts with their padding; see protocols.ModelFamily."""
        return structures.read(parts.text_encoders[name], batch, parts.settings["max_token_length"])

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
