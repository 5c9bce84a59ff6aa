"""The small text-conditioned diffusion model that a run makes and trains from nothing: how it reads captions, denoises and draws.

Shapes: B samples, C channels, h w sides (those of the images H W, or of a VAE's latents), L tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sd_scripts.families.common import structures
from sd_scripts.families.common.made import MadeFamily
from sd_scripts.families.common.tiny import made_once
from sd_scripts.library.core.devices import META
from sd_scripts.library.core.protocols import (
    ESTIMATE,
    Beginning,
    Condition,
    DeviceMap,
    Dtypes,
    Kind,
    Objective,
    OnStep,
    Parts,
    Preview,
    Version,
    dtype_of,
)
from sd_scripts.library.core.protocols import Path as DiffusionPath
from sd_scripts.library.loading.common import config_of
from sd_scripts.library.objectives.make import make
from sd_scripts.library.objectives.regression import Regression

from . import caption_tokenizer, loading
from .options import DdpmModelOptions, DdpmObjectiveOptions

TEXT = "text"
"""Entry of a condition with the states (L, D) of its caption, without padding."""
_TOKENS_AT_ONCE = 8
"""Captions are padded to multiples of this, so that compiled code meets few lengths."""


class Ddpm(MadeFamily):
    """The family of small models trained from nothing; see protocols.NewFamily."""

    name: ClassVar[str] = "ddpm"
    grid: ClassVar[int] = DdpmModelOptions.grid
    file_names: ClassVar[tuple[str, ...]] = (loading.TOKENIZER,)

    def files(self, options: DdpmModelOptions, captions: Collection[str]) -> dict[str, str]:
        """The tokenizer, given or made from the captions. Raises OptionError for one that cannot be used."""
        return {loading.TOKENIZER: loading.tokenizer_for(options, captions)}

    def build(
        self, options: DdpmModelOptions, beginning: Beginning, device: torch.device, dtype: Dtypes, without: Collection[str] = ()
    ) -> Parts:
        """A model with random weights, frozen and in eval mode; see protocols.NewFamily."""
        return loading.build(options, beginning, device, dtype, without)

    def check_sizes(self, parts: Parts, sizes: Collection[tuple[int, int]]) -> None:
        """Raises OptionError when the U-Net cannot halve images (width, height) of all these sizes as often as it does."""
        vae = None if isinstance(parts.vae, loading.PixelSpace) else config_of(parts.vae)
        loading.check_sizes(sizes, len(parts.backbone.config.block_out_channels), vae)

    def check_captions(self, parts: Parts, captions: Collection[str]) -> None:
        """Any text can be read."""

    def load(self, options: DdpmModelOptions, device: DeviceMap, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
        """Loads all parts of a saved model on `device`; see protocols.ModelFamily."""
        return loading.load(options, device, dtype, without)

    def version(self, parts: Parts) -> Version:
        """See ModelFamily."""
        return loading.VERSION

    @made_once
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

    def objective(
        self,
        options: DdpmObjectiveOptions,
        path: DiffusionPath,
        kind: Kind,
        scheduler_config: Mapping[str, Any] = MappingProxyType({}),
        colours: Tensor | None = None,
    ) -> Objective:
        """That of other U-Nets, with self-conditioning; see protocols.ModelFamily."""
        made = make(options, path, kind, scheduler_config, colours)
        assert isinstance(made, Regression), f"{type(made).__name__} has no self-conditioning"
        return replace(made, self_conditioning_rate=options.self_conditioning_rate)

    def texts_like(self, parts: Parts, caption: str, batch: int, num_controls: int) -> list[Condition]:
        """text of the caption itself: its tokenizer is there; see protocols.ModelFamily."""
        with torch.no_grad():
            return self.encode_prompts(parts, [caption] * batch)

    def read_like(self, parts: Parts, name: str, caption: str, batch: int) -> Tensor:
        """What the caption encoder makes of captions of this length; see protocols.ModelFamily."""
        encoder = parts.text_encoders[name]
        shape = batch, min(encoder.config.max_length, structures.num_tokens(caption) + 64)
        mask = torch.ones(shape, dtype=torch.bool, device=META)
        states: Tensor = encoder(torch.zeros_like(mask, dtype=torch.long), mask)
        return states

    def encode_images(self, parts: Parts, pixels: Tensor) -> Tensor:
        """Scaled latents (B, C, h, w), float32, of RGB images (B, 3, H, W) in [-1, 1]; without a VAE the images themselves.

        Raises ValueError for sides off the grid.
        """
        if not isinstance(parts.vae, loading.PixelSpace):
            return super().encode_images(parts, pixels)
        if pixels.shape[-1] % self.grid or pixels.shape[-2] % self.grid:
            raise ValueError(f"image sides {tuple(pixels.shape[-2:])} are not multiples of {self.grid}")
        return pixels.float()

    def decode(self, parts: Parts, latents: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [-1, 1], float32, of scaled latents; without a VAE the latents, clamped."""
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
        device = parts.bring(encoder)
        states = encoder(_on(device, ids), _mask_of(lengths, len(ids[0]), device))
        return [{TEXT: rows[:length]} for rows, length in zip(states, lengths, strict=True)]

    def denoise(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The network's prediction, of kind parts.kind, at canonical times t (B,); same shape as x_t, float32."""
        return self.predict(parts, x_t, parts.path.model_times(t), conditions)

    def predict(self, parts: Parts, x_t: Tensor, clock: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The same by the network's own clock (B,): the step of its schedule, from 0, which may lie between two steps."""
        parts.bring(parts.backbone)
        dtype = dtype_of(parts.backbone)
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

    def save(self, parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
        """Writes everything that drawing needs, in dtype or as it is: `safetensors` is one file, `diffusers` a folder."""
        loading.save(parts, path, save_model_as, dtype, metadata)

    @torch.no_grad()
    def render(self, parts: Parts, requests: Sequence[Preview], on_step: OnStep | None = None) -> Tensor:
        """The images of `preview` before rounding: (B, 3, H, W) in [-1, 1], float32."""
        from .rendering import Settings, draw

        return draw(self, parts, requests, parts.denoising.get("drawing", Settings()), on_step).pixels


def _mask_of(lengths: Sequence[int], longest: int, device: torch.device) -> Tensor:
    """(B, longest), True in the first `length` places of each row."""
    return torch.arange(longest, device=device) < _on(device, lengths)[:, None]


def _on(device: torch.device, numbers: Sequence[object]) -> Tensor:
    """Whole numbers on a device; from pinned memory a GPU fetches them without anybody waiting."""
    return torch.tensor(numbers, pin_memory=device.type == "cuda").to(device, non_blocking=True)


FAMILY = Ddpm()
