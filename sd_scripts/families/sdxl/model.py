"""Stable Diffusion XL: what it is made of, how it reads prompts and sizes, how it denoises and renders.

Shapes: B samples, C latent channels, h w latent sides (an eighth of H W, the image's), L text tokens, D text width, P pooled width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from sd_scripts.families.common import images, structures, unet
from sd_scripts.families.common.tiny import made_once, tiny_clip_config, tiny_clip_tokenizer, tiny_vae
from sd_scripts.library.core.protocols import Condition, DeviceMap, Dtypes, Geometry, Parts, Preview, Version
from sd_scripts.runs.model_headers import Header

from . import loading
from .options import SdxlModelOptions

TEXT_ENCODERS = ("te1", "te2")


class Sdxl(unet.UNetFamily):
    """The SDXL family; see protocols.ModelFamily."""

    name: ClassVar[str] = "sdxl"
    grid: ClassVar[int] = SdxlModelOptions.grid
    texts: ClassVar[Mapping[str, str]] = {"prompt_embeds": "prompt_embeds", "pooled": "pooled_prompt_embeds"}
    added: ClassVar[Mapping[str, str]] = {"pooled": "text_embeds", "time_ids": "time_ids"}

    def load(self, options: SdxlModelOptions, device: DeviceMap, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
        """Loads all parts on `device`; backbone and text encoders in dtype; those named in `without` stay on the meta device.

        Raises OptionError with a sentence for what cannot be read.
        """
        return loading.load(options, device, dtype, without)

    def version(self, parts: Parts) -> Version:
        """See ModelFamily."""
        return loading.VERSION

    @made_once
    def tiny(self) -> Parts:
        """The same classes with two layers and random (seeded) weights, float32, on the CPU, in eval mode."""
        tokenizers = {"te1": tiny_clip_tokenizer("<|endoftext|>"), "te2": tiny_clip_tokenizer("!")}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            networks = {
                "te1": CLIPTextModel(tiny_clip_config(tokenizers["te1"], width=16, projection=16)),
                "te2": CLIPTextModelWithProjection(tiny_clip_config(tokenizers["te2"], width=24, projection=20)),
                "backbone": _tiny_unet(text_width=16 + 24, pooled_width=20),
                "vae": tiny_vae(),
            }
        settings = {"max_token_length": 75, "weighted_captions": False, "force_zeros_for_empty_prompt": True}
        return unet.tiny_parts(loading.SPEC, networks, tokenizers, settings)

    def published(self, options: SdxlModelOptions, header: Header | None) -> tuple[Parts, str]:
        """SDXL 1.0; see protocols.PublishedFamily."""
        settings = {"max_token_length": options.max_token_length, "weighted_captions": options.weighted_captions}
        return structures.published(loading.SPEC, self.tiny(), options, header, settings)

    def texts_like(self, parts: Parts, caption: str, batch: int, num_controls: int) -> list[Condition]:
        """prompt_embeds of one length for all captions, and pooled; see protocols.ModelFamily."""
        width, pooled = parts.backbone.config.cross_attention_dim, parts.text_encoders["te2"].config.projection_dim
        return structures.texts_of(parts, batch, {"prompt_embeds": (structures.clip_tokens(parts), width), "pooled": (pooled,)})

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """Text part of each caption's condition: prompt_embeds (L, D) and pooled (P,), in the encoders' precision.

        Both encoders' last but one hidden states side by side; pooled from encoder 2. Longer captions than one chunk are encoded chunk by
        chunk, chunks joined along L, pooled from the first. Runs with gradient when grad mode is on.
        """
        if not captions:
            return []
        encoded = [unet.encode_captions(parts, name, captions, lambda encoder, output: output.hidden_states[-2]) for name in TEXT_ENCODERS]
        last = encoded[-1]
        joined = torch.cat([one.states.to(last.states.device) for one in encoded], dim=-1)
        pooled = last.first_chunks(last.output.text_embeds)
        return [{"prompt_embeds": states, "pooled": vector} for states, vector in zip(joined, pooled)]

    def size_condition(self, geometry: Geometry) -> Condition:
        """time_ids (6,): original height, width, crop top, left, target height, width, in pixels (Podell et al. 2023, section 2.2)."""
        (width, height), (left, top), (target_width, target_height) = geometry.original, geometry.crop, geometry.target
        return {"time_ids": torch.tensor([height, width, top, left, target_height, target_width], dtype=torch.float32)}

    def save(self, parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
        """Writes all networks, in dtype or as they are: `safetensors` is one file of the original layout, `diffusers` a folder."""
        loading.save(parts, path, save_model_as, dtype, metadata)

    def pipeline(self, parts: Parts, scheduler: Any) -> Any:
        """See UNetFamily."""
        return images.pipeline_class("StableDiffusionXLPipeline")(
            vae=None,
            text_encoder=None,
            text_encoder_2=None,
            tokenizer=None,
            tokenizer_2=None,
            unet=parts.backbone,
            scheduler=scheduler,
            add_watermarker=False,
        )

    def negative(self, parts: Parts, requests: Sequence[Preview]) -> dict[str, Tensor]:
        """What guidance leads away from; for an empty negative prompt zeros, where the model's configuration says so."""
        embeddings = super().negative(parts, requests)
        empty = [not request.negative_prompt for request in requests]
        if parts.settings["force_zeros_for_empty_prompt"]:
            for rows in embeddings.values():
                rows[empty] = 0
        return embeddings


def _tiny_unet(text_width: int, pooled_width: int) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        transformer_layers_per_block=(1, 2),
        attention_head_dim=(1, 2),
        cross_attention_dim=text_width,
        norm_num_groups=8,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + pooled_width,
    )


FAMILY = Sdxl()
