"""Families whose transformer reads T5's states and a vector of CLIP-L's, and is mostly told a guidance scale.

Shapes: B samples, C latent channels, h w latent sides (an eighth of H W, the image's), L text tokens, D text width, P pooled width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextModel, T5EncoderModel

from sd_scripts.library.core.protocols import Parts, dtype_of

from . import structures
from .comfyui_levels import FlowLevels, Graph, exponential_shift
from .double_stream import BLOCKS, batched_texts, exact_times, positions, tiny_t5_config, tiny_t5_tokenizer
from .packing import packed, unpacked
from .tiny import tiny_clip_config, tiny_clip_tokenizer, tiny_vae
from .transformers import TransformerFamily


class ClipT5Family(TransformerFamily):
    """See protocols.ModelFamily and PublishedFamily."""

    latent: ClassVar[tuple[int, int]] = (16, 8)
    adapted: ClassVar[Mapping[str, str]] = {"backbone": BLOCKS, "te1": r"(^|\.)layers\.", "te3": r"(^|\.)block\."}
    tiny_settings: ClassVar[Mapping[str, Any]] = {"t5xxl_max_token_length": 32}

    def tiny_networks(self) -> tuple[dict[str, nn.Module], dict[str, Any]]:
        """See TransformerFamily."""
        tokenizers = {"te1": tiny_clip_tokenizer("<|endoftext|>"), "te3": tiny_t5_tokenizer()}
        te1 = CLIPTextModel(tiny_clip_config(tokenizers["te1"], width=16, projection=16))
        te3 = T5EncoderModel(tiny_t5_config(tokenizers["te3"]))
        transformer = FluxTransformer2DModel(
            in_channels=64,
            num_layers=2,
            num_single_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=24,
            pooled_projection_dim=16,
            guidance_embeds=True,
            axes_dims_rope=(4, 6, 6),
        )
        return {"backbone": transformer, "vae": tiny_vae(16, 0.3611, 0.1159), "te1": te1, "te3": te3}, tokenizers

    def read_like(self, parts: Parts, name: str, caption: str, batch: int) -> Tensor:
        """What T5 makes of texts with their padding, or CLIP of a chunk; see protocols.ModelFamily."""
        encoder = parts.text_encoders[name]
        if name == "te1":
            return structures.read_clip(encoder, batch)
        return structures.read(encoder, batch, parts.settings["t5xxl_max_token_length"])

    def comfyui(self, parts: Parts) -> Graph:
        """Models that are told a guidance scale are shifted by e^1.15 for all sizes, the others not at all; see ScheduledFamily."""
        return Graph("simple", exponential_shift(1.15) if parts.backbone.config.guidance_embeds else FlowLevels(1.0))


def velocity(
    parts: Parts, x_t: Tensor, t: Tensor, texts: Sequence[Tensor], pooled: Sequence[Tensor], images: Sequence[Tensor] = ()
) -> Tensor:
    """The network's velocity noise - x0 at canonical times t (B,); same shape as x_t, float32.

    texts: T5's states (L_i, D); with different lengths they are padded, and the padding is hidden in attention. pooled: CLIP's vectors.
    images: latents (B, C, h_i, w_i) of reference images, each at a place of its own behind the image. Embedded guidance is
    denoising["guidance_scale"]. Time and guidance reach their embedding in float32, whatever the precision of the network.
    """
    device, dtype = parts.bring(parts.backbone), dtype_of(parts.backbone)
    shown = [x_t, *(image.to(x_t.device) for image in images)]
    tokens = torch.cat([packed(image) for image in shown], dim=1)
    places = torch.cat([positions(image.shape[-2], image.shape[-1], number) for number, image in enumerate(shown)])
    text, mask = batched_texts(texts, tokens.shape[1])
    t = t.to(x_t.device, torch.float32)
    guidance = torch.full_like(t, parts.denoising["guidance_scale"]) if parts.backbone.config.guidance_embeds else None
    with exact_times(parts.backbone, t, guidance):
        prediction = parts.backbone(
            hidden_states=tokens.to(dtype),
            timestep=t,
            guidance=guidance,
            encoder_hidden_states=text.to(device, dtype),
            pooled_projections=torch.stack(list(pooled)).to(device, dtype),
            txt_ids=torch.zeros(text.shape[1], 3, device=device),
            img_ids=places.to(device),
            joint_attention_kwargs=None if mask is None else {"attention_mask": mask[:, None, None].to(device)},
            return_dict=False,
        )[0]
    own = prediction[:, : x_t.shape[-2] * x_t.shape[-1] // 4]
    return unpacked(own.float(), x_t.shape[-2], x_t.shape[-1])


def pooled_vectors(parts: Parts, captions: Sequence[str]) -> Tensor:
    """CLIP-L's vectors (B, P) of the first 77 tokens of captions."""
    encoder, tokenizer = parts.text_encoders["te1"], parts.tokenizers["te1"]
    tokens = tokenizer(list(captions), padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt")
    device = parts.bring(encoder)
    pooled: Tensor = encoder(tokens.input_ids.to(device)).pooler_output
    return pooled
