"""The transformer of Qwen-Image-2.1 for text to image, called without the masks by which diffusers places images among the text.

Those make a graph that depends on numbers, which neither torch.compile nor a forecast without weights can follow; the blocks, and what is
around them, are diffusers' own. Shapes: B samples, N = h w image tokens, L text tokens, C channels of a latent, D text width.
"""

from __future__ import annotations

import torch
from diffusers import QwenImage21Transformer2DModel
from torch import Tensor


class QwenImage21Network(QwenImage21Transformer2DModel):
    """See the module."""

    def forward(self, tokens: Tensor, text: Tensor, timestep: Tensor, sides: tuple[int, int]) -> Tensor:
        """The prediction (B, N, C) of image tokens (B, N, C) of an image of these sides, behind texts (B, L, D), at times (B,)."""
        length, device = text.shape[1], tokens.device
        joint = torch.cat([self.txt_in(text), self.img_in(tokens)], dim=1)
        of_image = torch.arange(joint.shape[1], device=device) >= length if self.config.causal_condition else None
        # Text is as if at time 0, which stands behind the samples' times.
        times = self.time_text_embed(timestep if of_image is None else torch.cat([timestep, timestep.new_zeros(1)]), joint)
        modulation, rotations = self.modulation(times), self._rotations(length, sides, device)
        # A mask of attention, and a cache that previews do without, stand between.
        more = (modulation, rotations, None, of_image, None, None, None, [(0, length, True)])
        for block in self.transformer_blocks:
            kept = not (torch.is_grad_enabled() and self.gradient_checkpointing)
            joint = block(joint, *more) if kept else self._gradient_checkpointing_func(block, joint, *more)
        prediction: Tensor = self.proj_out(self.norm_out(joint, times, of_image))[:, length:]
        return prediction

    def _rotations(self, length: int, sides: tuple[int, int], device: torch.device) -> Tensor:
        """Rotation of each place, complex: text counts on three axes; the image stands at the next time, its rows and columns around 0."""
        text, (height, width) = torch.arange(length), sides
        rows = (torch.arange(height) - (height - height // 2)).repeat_interleave(width)
        columns = (torch.arange(width) - (width - width // 2)).repeat(height)
        axes = (torch.full_like(rows, length), rows, columns)
        found = [table[torch.cat([text, axis])] for table, axis in zip(self.pos_embed.freqs, axes, strict=True)]
        return torch.cat(found, dim=-1).to(device)
