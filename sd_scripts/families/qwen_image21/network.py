"""The transformer of Qwen-Image-2.1, called without the masks by which diffusers places images among the text.

Those make a graph that depends on numbers, which neither torch.compile nor a forecast without weights can follow; the blocks, and what is
around them, are diffusers' own. Shapes: B samples, N = h w image tokens, L text tokens, C channels of a latent, D text width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from diffusers import QwenImage21Transformer2DModel
from torch import Tensor

from sd_scripts.families.common.blocks import through_blocks


class QwenImage21Network(QwenImage21Transformer2DModel):
    """See the module."""

    def forward(self, images: Sequence[Tensor], text: Tensor, timestep: Tensor, before: Sequence[int]) -> Tensor:
        """The prediction (B, C, h, w) of the last of these latents (B, C, h, w), behind texts (B, L, D), at times (B,).

        The others are reference images, which stand among the text, each behind as many of its rows as before says.
        """
        device, sides = text.device, [(image.shape[-2], image.shape[-1]) for image in images]
        pieces = self.txt_in(text).tensor_split(list(before), dim=1)
        shown = [self.img_in(image.flatten(2).transpose(1, 2).to(text.dtype)) for image in images]
        parts = [part for pair in zip(pieces, shown, strict=True) for part in pair]
        ends = torch.tensor([part.shape[1] for part in parts]).cumsum(0).tolist()
        joint = torch.cat(parts, dim=1)
        of_image = torch.arange(joint.shape[1], device=device) >= ends[-2] if self.config.causal_condition else None
        # Text and references are as if at time 0, which stands behind the samples' times.
        times = self.time_text_embed(timestep if of_image is None else torch.cat([timestep, timestep.new_zeros(1)]), joint)
        modulation, rotations = self.modulation(times), self._rotations([piece.shape[1] for piece in pieces], sides, device)
        # All before the image, piece by piece, and which of them are text. A mask of attention, and a cache that previews do without,
        # stand between.
        segments = [(start, end, not number % 2) for number, (start, end) in enumerate(pairwise([0, *ends[:-1]]))]
        joint = through_blocks(self, joint, modulation, rotations, None, of_image, None, None, None, segments)
        prediction: Tensor = self.proj_out(self.norm_out(joint, times, of_image))[:, ends[-2] :]
        return prediction.transpose(1, 2).unflatten(2, sides[-1])

    def _rotations(self, lengths: Sequence[int], sides: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
        """Rotation of each place, complex: text counts on three axes; an image stands at the next time, its rows and columns around 0, and
        what follows it behind its longer side."""
        places, time = [], 0
        for length, (height, width) in zip(lengths, sides, strict=True):
            text = torch.arange(time, time + length)
            time += length
            rows = (torch.arange(height) - (height - height // 2)).repeat_interleave(width)
            columns = (torch.arange(width) - (width - width // 2)).repeat(height)
            places += [text.expand(3, -1), torch.stack([torch.full_like(rows, time), rows, columns])]
            time += max(height, width)
        found = [table[axis] for table, axis in zip(self.pos_embed.freqs, torch.cat(places, dim=1), strict=True)]
        return torch.cat(found, dim=-1).to(device)
