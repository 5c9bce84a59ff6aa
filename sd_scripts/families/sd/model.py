"""Stable Diffusion 1.x and 2.x: what they are made of, how they read prompts, how they denoise and render.

Shapes: B samples, C latent channels, h w latent sides (an eighth of H W, the image's), L text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn
from transformers import CLIPTextModel

from sd_scripts.families.common import images, structures, unet
from sd_scripts.families.common.tiny import made_once, tiny_clip_config, tiny_clip_tokenizer, tiny_vae
from sd_scripts.library.core.protocols import Condition, DeviceMap, Dtypes, Geometry, Parts, Version
from sd_scripts.runs.model_headers import Header, what_is

from . import loading
from .facts import SECOND
from .options import SdModelOptions

_SETTLED = {"steps_offset": 1, "clip_sample": False}
"""Entries of scheduler configurations that StableDiffusionPipeline takes for mistakes when they are anything else."""


class Sd(unet.UNetFamily):
    """The Stable Diffusion 1.x and 2.x family; see protocols.ModelFamily."""

    name: ClassVar[str] = "sd"
    grid: ClassVar[int] = SdModelOptions.grid

    def load(self, options: SdModelOptions, device: DeviceMap, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
        """Loads all parts on `device`; backbone and text encoder in dtype; those named in `without` stay on the meta device.

        Raises OptionError with a sentence for what cannot be read.
        """
        return loading.load(options, device, dtype, without)

    def version(self, parts: Parts) -> Version:
        """See ModelFamily."""
        if loading.spec_of(parts.backbone) is loading.SPEC:
            return loading.VERSION1
        return loading.VERSION2_V if parts.kind == "v_prediction" else loading.VERSION2

    @made_once
    def tiny(self, second: bool = False) -> Parts:
        """The same classes with two layers and random (seeded) weights, float32, on the CPU, in eval mode; second makes it SD 2.x-like."""
        tokenizer = tiny_clip_tokenizer("!" if second else "<|endoftext|>")
        config = tiny_clip_config(tokenizer, width=24, projection=24)
        config.hidden_act = "gelu" if second else "quick_gelu"
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            networks: dict[str, nn.Module] = {
                "te1": CLIPTextModel(config),
                "backbone": _tiny_unet(text_width=24, second=second),
                "vae": tiny_vae(scaling_factor=0.18215),
            }
        settings = {"max_token_length": 75, "weighted_captions": False, "clip_skip": None}
        return unet.tiny_parts(loading.spec_of(networks["backbone"]), networks, {"te1": tokenizer}, settings)

    def published(self, options: SdModelOptions, header: Header | None) -> tuple[Parts, str]:
        """SD 1.5, or 2.1 where the name or the file says so; see protocols.PublishedFamily."""
        name = Path(options.pretrained_model_name_or_path).name.lower()
        second = "diffusion-2" in name or (header is not None and what_is(header) == SECOND)
        settings = {key: getattr(options, key) for key in ("max_token_length", "weighted_captions", "clip_skip")}
        return structures.published(loading.SPEC2 if second else loading.SPEC, self.tiny(), options, header, settings)

    def texts_like(self, parts: Parts, caption: str, batch: int, num_controls: int) -> list[Condition]:
        """prompt_embeds of one length for all captions; see protocols.ModelFamily."""
        return structures.texts_of(
            parts, batch, {"prompt_embeds": (structures.clip_tokens(parts), parts.backbone.config.cross_attention_dim)}
        )

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """Text part of each caption's condition: prompt_embeds (L, D), in the encoder's precision.

        The hidden states of the clip_skip-th last layer, by default the last, after the final layer norm. Longer captions than one chunk
        are encoded chunk by chunk, chunks joined along L. Runs with gradient when grad mode is on.
        """
        if not captions:
            return []
        layer = parts.settings["clip_skip"] or 1

        def states_of(encoder: nn.Module, output: Any) -> Tensor:
            # Number 1 by the encoder itself: its own norm is the same, but need not be run twice.
            return output.last_hidden_state if layer == 1 else encoder.final_layer_norm(output.hidden_states[-layer])

        return [{"prompt_embeds": states} for states in unet.encode_captions(parts, "te1", captions, states_of).states]

    def size_condition(self, geometry: Geometry) -> Condition:
        """Nothing: the UNet is not told how an image was cut."""
        return {}

    def save(self, parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
        """Writes all networks, in dtype or as they are: `safetensors` is one file of the original layout, `diffusers` a folder."""
        loading.save(parts, path, save_model_as, dtype, metadata)

    def pipeline(self, parts: Parts, scheduler: Any) -> Any:
        """See UNetFamily."""
        # What the pipeline makes of configurations of the first months, said before it remarks on it with every preview.
        scheduler.register_to_config(**{key: value for key, value in _SETTLED.items() if key in scheduler.config})
        return images.pipeline_class("StableDiffusionPipeline")(
            vae=None,
            text_encoder=None,
            tokenizer=None,
            unet=parts.backbone,
            scheduler=scheduler,
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )


def _tiny_unet(text_width: int, second: bool) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        attention_head_dim=(1, 2) if second else 2,
        cross_attention_dim=text_width,
        norm_num_groups=8,
        use_linear_projection=second,
    )


FAMILY = Sd()
