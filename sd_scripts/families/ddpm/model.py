"""The small text-conditioned diffusion model that a run makes and trains from nothing: how it reads captions, denoises and draws.

Shapes: B samples, C channels, h w sides (those of the pictures H W, or of a VAE's latents), L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sd_scripts.families.common import pictures, unet
from sd_scripts.library.core.protocols import ESTIMATE, Beginning, Condition, Dtypes, Geometry, Parts, Preview
from sd_scripts.library.loading.common import config_of

from . import caption_tokenizer, loading
from .options import DdpmModelOptions

TEXT = "text"
"""Entry of a condition with the states (L, D) of its caption, without padding."""
_TOKENS_AT_ONCE = 8
"""Captions are padded to multiples of this, so that compiled code meets few lengths."""


class Ddpm(pictures.PictureFamily):
    """The family of small models trained from nothing; see protocols.NewFamily."""

    name: ClassVar[str] = "ddpm"
    grid: ClassVar[int] = DdpmModelOptions.grid
    separate_texts: ClassVar[bool] = False
    file_names: ClassVar[tuple[str, ...]] = (loading.TOKENIZER,)

    def is_new(self, options: DdpmModelOptions) -> bool:
        """Whether the options ask for a new model."""
        return loading.is_new(options)

    def files(self, options: DdpmModelOptions, captions: Collection[str]) -> dict[str, str]:
        """The tokenizer, given or made from the captions. Raises OptionError for one that cannot be used."""
        return {loading.TOKENIZER: loading.tokenizer_for(options, captions)}

    def build(
        self, options: DdpmModelOptions, beginning: Beginning, device: torch.device, dtype: Dtypes, without: Collection[str] = ()
    ) -> Parts:
        """A model with random weights, frozen and in eval mode; see protocols.NewFamily."""
        return loading.build(options, beginning, device, dtype, without)

    def check_sizes(self, parts: Parts, sizes: Collection[tuple[int, int]]) -> None:
        """Raises OptionError when the U-Net cannot halve pictures (width, height) of all these sizes as often as it does."""
        vae = None if isinstance(parts.vae, loading.PixelSpace) else config_of(parts.vae)
        loading.check_sizes(sizes, len(parts.backbone.config.block_out_channels), vae)

    def load(self, options: DdpmModelOptions, device: torch.device, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
        """Loads all parts of a saved model on `device`; see protocols.ModelFamily."""
        return loading.load(options, device, dtype, without)

    def tiny(self) -> Parts:
        """A model in the latents of the built-in VAE with two levels and random (seeded) weights, float32, on the CPU, in eval mode."""
        options = DdpmModelOptions(
            vae="toy",
            base_channels=16,
            channel_multipliers=(1, 2),
            layers_per_block=1,
            attention_levels=(1,),
            attention_head_dim=8,
            max_token_length=32,
            text_width=24,
            text_layers=2,
            text_heads=2,
            vocab_size=300,
        )
        captions = ("a red star at the top left", "a blue ring")
        return self.build(options, Beginning(0, ((64, 64),), self.files(options, captions)), torch.device("cpu"), torch.float32)

    def encode_pictures(self, parts: Parts, pixels: Tensor) -> Tensor:
        """Scaled latents (B, C, h, w), float32, of RGB pictures (B, 3, H, W) in [-1, 1]; without a VAE the pictures themselves.

        Raises ValueError for sides off the grid.
        """
        if not isinstance(parts.vae, loading.PixelSpace):
            return super().encode_pictures(parts, pixels)
        if pixels.shape[-1] % self.grid or pixels.shape[-2] % self.grid:
            raise ValueError(f"picture sides {tuple(pixels.shape[-2:])} are not multiples of {self.grid}")
        return pixels.float()

    def decode(self, parts: Parts, latents: Tensor) -> Tensor:
        """Pictures (B, 3, H, W) in [-1, 1], float32, of scaled latents; without a VAE the latents, clamped."""
        if not isinstance(parts.vae, loading.PixelSpace):
            return super().decode(parts, latents)
        return latents.float().clamp(-1, 1)

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """Text part of each caption's condition, text (L, D), L the tokens of the caption with its beginning and end.

        A caption of more tokens than the model reads is cut before its end token. Runs with gradient when grad mode is on.
        """
        if not captions:
            return []
        encoder = parts.text_encoders["te1"]
        ids, lengths = caption_tokenizer.ids_of(parts.tokenizers["te1"], captions)
        device, _ = pictures.place(encoder)
        states = encoder(_on(device, ids), _mask_of(lengths, len(ids[0]), device))
        return [{TEXT: rows[:length]} for rows, length in zip(states, lengths, strict=True)]

    def size_condition(self, geometry: Geometry) -> Condition:
        """Nothing: the network is not told how a picture was cut."""
        return {}

    def denoise(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The network's prediction, of kind parts.kind, at canonical times t (B,); same shape as x_t, float32."""
        return self.predict(parts, x_t, parts.path.model_times(t), conditions)

    def predict(self, parts: Parts, x_t: Tensor, clock: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The same by the network's own clock (B,): the step of its schedule, from 0, which may lie between two steps."""
        _, dtype = pictures.place(parts.backbone)
        texts = [condition[TEXT] for condition in conditions]
        lengths = [len(text) for text in texts]
        longest = -(-max(lengths) // _TOKENS_AT_ONCE) * _TOKENS_AT_ONCE
        text = pad_sequence(texts, batch_first=True).to(x_t.device, dtype)
        text = torch.nn.functional.pad(text, (0, 0, 0, longest - text.shape[1]))
        mask = _mask_of(lengths, longest, x_t.device)
        # Rows of padding are zeros.
        pooled = text.sum(dim=1) / mask.sum(dim=1, keepdim=True)
        prediction = parts.backbone(
            self._with_estimates(parts, x_t, conditions).to(dtype),
            clock.to(x_t.device),
            encoder_hidden_states=text,
            encoder_attention_mask=mask,
            class_labels=pooled.to(dtype),
            return_dict=False,
        )[0]
        return prediction.float()

    def is_self_conditioned(self, parts: Parts) -> bool:
        """Whether the network is given an estimate of the clean latents."""
        return bool(parts.backbone.config.in_channels > parts.backbone.config.out_channels)

    def _with_estimates(self, parts: Parts, x_t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The network's input: x_t, with the estimates as further channels in models with self-conditioning; zeros are none."""
        if not self.is_self_conditioned(parts):
            return x_t
        none = torch.zeros_like(x_t[0])
        estimates = [condition.get(ESTIMATE, none).to(x_t) for condition in conditions]
        return torch.cat([x_t, torch.stack(estimates)], dim=1)

    def adapter_targets(self, parts: Parts, conv: bool) -> dict[str, list[str]]:
        """Names of the layers of transformers, and with conv of the other blocks, by module name."""
        return unet.adapter_targets(parts, conv)

    def save(self, parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
        """Writes everything that drawing needs, in dtype or as it is: `safetensors` is one file, `diffusers` a folder."""
        loading.save(parts, path, save_model_as, dtype, metadata)

    @torch.no_grad()
    def render(self, parts: Parts, requests: Sequence[Preview]) -> Tensor:
        """The pictures of `preview` before rounding: (B, 3, H, W) in [-1, 1], float32."""
        from .rendering import render

        return render(self, parts, requests)


def _mask_of(lengths: Sequence[int], longest: int, device: torch.device) -> Tensor:
    """(B, longest), True in the first `length` places of each row."""
    return torch.arange(longest, device=device) < _on(device, lengths)[:, None]


def _on(device: torch.device, numbers: Sequence[object]) -> Tensor:
    """Whole numbers on a device; from pinned memory a GPU fetches them without anybody waiting."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


FAMILY = Ddpm()
