"""Qwen-Image-2.1: how it reads captions and denoises. Its latents have 64 channels and are tokens as they are.

Text and image are one sequence: each text token sees those before it, and is as if at time 0; image tokens see all. Shapes: B samples,
h w latent sides (a sixteenth of H W, the image's), N = h w image tokens, L text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLQwenImage21
from torch import Tensor

from sd_scripts.families.common import structures
from sd_scripts.families.common.comfyui_levels import Graph, exponential_shift
from sd_scripts.families.common.double_stream import linear_layers
from sd_scripts.families.common.images import in_tiles, posterior_mean
from sd_scripts.families.common.qwen3vl import states_before_norm, tell_of_cut, tiny_qwen3vl
from sd_scripts.families.common.tiny import tiny_parts
from sd_scripts.families.common.tiny_words import tiny_qwen_tokenizer
from sd_scripts.families.common.transformer_loading import Loader, scheduler_in
from sd_scripts.families.common.transformers import TransformerFamily, given_first, in_groups
from sd_scripts.library.core.protocols import Condition, Parts, dtype_of

from .loading import LOADER, SPEC
from .network import QwenImage21Network
from .options import QwenImage21ModelOptions

SYSTEM = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
"""Rows of these tokens are read by the captions' and not given to the transformer (diffusers, pipeline_qwenimage21.py)."""
BEFORE, AFTER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


class QwenImage21(TransformerFamily):
    """The Qwen-Image-2.1 family; see protocols.ModelFamily."""

    name: ClassVar[str] = "qwen_image21"
    grid: ClassVar[int] = QwenImage21ModelOptions.grid
    loader: ClassVar[Loader] = LOADER
    latent: ClassVar[tuple[int, int]] = (64, 16)

    def tiny(self) -> Parts:
        """See protocols.ModelFamily."""
        tokenizer = tiny_qwen_tokenizer([SYSTEM, BEFORE, AFTER])
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            networks = {
                "backbone": QwenImage21Network(
                    num_layers=3, attention_head_dim=16, num_attention_heads=2, context_in_dim=32, axes_dims_rope=(4, 6, 6)
                ),
                "vae": AutoencoderKLQwenImage21(base_dim=8, decoder_base_dim=8, dim_mult=[1, 1, 2, 2, 2], num_res_blocks=1),
                "te1": tiny_qwen3vl(tokenizer),
            }
            # As they are drawn, the gates are nearly closed, and nothing is seen of what the blocks do.
            for layer in (networks["backbone"].modulation[1], networks["backbone"].proj_out):
                torch.nn.init.normal_(layer.weight, std=0.3)
        return tiny_parts(networks, {"te1": tokenizer}, scheduler_in(SPEC.configs), {"max_token_length": 512, "model_version": SPEC.label})

    def texts_like(self, parts: Parts, caption: str, batch: int, num_controls: int) -> list[Condition]:
        """text, as long as the captions and what of the template stands around them; see protocols.ModelFamily."""
        length = min(parts.settings["max_token_length"], structures.num_tokens(caption)) + 8
        return structures.texts_of(parts, batch, {"text": (length, parts.backbone.config.context_in_dim)})

    def read_like(self, parts: Parts, name: str, caption: str, batch: int) -> Tensor:
        """What Qwen3-VL makes of captions in their template; see protocols.ModelFamily."""
        length = min(parts.settings["max_token_length"], structures.num_tokens(caption)) + 24
        return structures.read(parts.text_encoders[name], batch, length)

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """Text part of each caption's condition, text (L, D), in the encoder's precision: the states after Qwen3-VL's last layer, before
        its last norm, without the rows of the system's part. Each caption is encoded alone. Runs with gradient when grad mode is on."""
        tokenizer, limit = parts.tokenizers["te1"], parts.settings["max_token_length"]
        start, closing = len(tokenizer(SYSTEM).input_ids), tokenizer(AFTER).input_ids
        lead = len(tokenizer(SYSTEM + BEFORE).input_ids)
        conditions = []
        for caption in captions:
            # diffusers reads a blank for nothing.
            ids = tokenizer(SYSTEM + BEFORE + (caption or " ")).input_ids
            if len(ids) > lead + limit:
                tell_of_cut(limit)
            states = states_before_norm(parts, "te1", ids[: lead + limit] + closing)
            conditions.append({"text": states[start:]})
        return conditions

    @torch.no_grad()
    def encode_images(self, parts: Parts, pixels: Tensor) -> Tensor:
        """Scaled latents of RGB images: (B, 3, H, W) in [-1, 1] -> (B, 64, H/16, W/16) float32; the mean of the posterior.

        The VAE has an alpha channel, and reads films: an image is opaque, and a film of one frame. Raises ValueError for sides off the
        grid.
        """
        latents = posterior_mean(parts, torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1)[:, :, None], self.grid)[:, :, 0]
        mean, deviation = _statistics(parts, latents)
        return (latents - mean) / deviation

    @torch.no_grad()
    def decode(self, parts: Parts, latents: Tensor) -> Tensor:
        """Images of scaled latents: (B, 64, h, w) -> (B, 3, 16h, 16w) in [-1, 1], float32; what is transparent stands on white."""
        device, latents = parts.bring(parts.vae), latents.float()
        mean, deviation = _statistics(parts, latents)
        with torch.autocast(device.type, enabled=False), in_tiles(parts):
            film = parts.vae.decode((latents * deviation + mean).to(device, dtype_of(parts.vae))[:, :, None]).sample
        pixels = film[:, :, 0].float().clamp(-1, 1)
        opaque = (pixels[:, 3:] + 1) / 2
        return 1 - (1 - pixels[:, :3]) * opaque

    def denoise(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The network's velocity noise - x0 at canonical times t (B,); same shape as x_t (B, 64, h, w), float32.

        Samples whose texts have one length go together, because the image's place on the axis of time is behind the text. Times reach their
        embedding in float32, whatever the precision of the network.
        """
        parts.bring(parts.backbone)
        return in_groups(parts.backbone, x_t, t, conditions, lambda one: len(one["text"]), lambda *samples: self._alike(parts, *samples))

    def _alike(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The velocity of samples whose texts have one length."""
        network, (height, width) = parts.backbone, x_t.shape[-2:]
        text = torch.stack([condition["text"] for condition in conditions]).to(x_t.device, dtype_of(network))
        t = t.to(x_t.device, torch.float32)
        exact = torch.cat([t, t.new_zeros(1)]) if network.config.causal_condition else t
        with given_first(network.time_text_embed.time_proj, exact):
            prediction: Tensor = network(x_t.flatten(2).transpose(1, 2).to(text.dtype), text, t, (height, width))
        return prediction.float().transpose(1, 2).reshape(x_t.shape)

    def comfyui(self, parts: Parts) -> Graph:
        """See ScheduledFamily."""
        return Graph("simple", exponential_shift(0.69))

    def adapter_targets(self, parts: Parts, conv: bool) -> dict[str, list[str]]:
        """Names of the layers that get an adapter by default: every linear layer of the blocks; attention and MLP of Qwen3-VL's language
        model."""
        return {
            "backbone": linear_layers(parts.backbone, lambda path: path.startswith("transformer_blocks.")),
            "te1": linear_layers(parts.text_encoders["te1"], lambda path: "language_model.layers." in path),
        }


def _statistics(parts: Parts, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of latents, (1, 64, 1, 1), float32."""
    config: Any = parts.vae.config
    mean, deviation = (torch.tensor(row, device=like.device).view(1, -1, 1, 1) for row in (config.latents_mean, config.latents_std))
    return mean, deviation


FAMILY = QwenImage21()
