"""What the encoders of a run make of images and texts, and under which entries it is kept. Knows no batches and no files but images.

A text on control images is kept in two parts, because a language model reads from left to right: the rows of the control images come
first and are the same for every instruction, so they are encoded and kept once for each set of control images, and each instruction
adds the few rows of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sd_scripts.dataset.plan import Plan
from sd_scripts.library.core.protocols import Condition, EditingFamily, ModelFamily, Parts

from .cache import CODE_REVISION, Entry, entry_of, fingerprint, processor_settings, tokenizer_fingerprint
from .fill import Tensors
from .views import ControlView, Look, Seen, View, control_views, facts_of, facts_of_control, mask_at, see, see_control


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of text that are kept together: those of one instruction on the control images of a view; None those that all share."""

    view: View
    text: str | None


class Encoding:
    """The encoders of a family as the data side uses them.

    encoders names the text encoders that are asked, and all of them means None to the family. vae_batch_size images are encoded at
    once, also outside the cache, so that both give the same bits.
    """

    def __init__(
        self,
        family: ModelFamily,
        parts: Parts,
        plan: Plan,
        seed: int,
        encoders: Collection[str],
        trained: Collection[str],
        vae_batch_size: int,
    ) -> None:
        self.family, self.parts, self.plan, self.seed = family, parts, plan, seed
        self.encoders, self.trained, self._at_once = tuple(encoders), tuple(trained), vae_batch_size
        self.edits = family.num_controls(parts)[1] > 0
        self._vae_print = self._text_print = ""
        self._processor = processor_settings(parts.processor)

    # Entries.

    def latents_entry(self, look: Look) -> Entry:
        """The entry of an image, or of a control image."""
        self._vae_print = self._vae_print or fingerprint(self.parts.vae)
        facts = {"family": self.family.name, "encoder": self._vae_print, "revision": CODE_REVISION}
        mirrored = "mirrored" if look.mirrored else ""
        item = self.plan.images[look.image]
        if isinstance(look, View):
            return entry_of({**facts, **facts_of(self.plan, look)}, f"{item.path}|{look.resolution}|{mirrored}")
        subject = f"{item.controls[look.index].path}|control {look.resolution}|{mirrored}"
        return entry_of({**facts, **facts_of_control(self.plan, look)}, subject)

    def text_entry(self, text: str) -> Entry:
        """The entry of a caption without control images."""
        return entry_of({**self._text_facts(), "text": text}, text)

    def rows_entry(self, rows: Rows) -> Entry:
        """The entry of rows of text on control images: what it is made from names every one of them and how it is cut."""
        seen = [facts_of_control(self.plan, view) for view in control_views(self.plan, rows.view)]
        facts = {
            **self._text_facts(),
            "processor": self._processor,
            "pictures": [one["picture"] for one in seen],
            "cuts": [[one["bucket"], one["resized"], one["crop"], one["mirrored"], one["interpolation"]] for one in seen],
            "text": rows.text,
        }
        if rows.text is None:
            return entry_of(facts, "")
        paths = "|".join(control.path for control in self.plan.images[rows.view.image].controls)
        return entry_of(facts, f"{paths}|{rows.view.resolution}|{'mirrored' if rows.view.mirrored else ''}|{rows.text}")

    def _text_facts(self) -> dict[str, object]:
        self._text_print = self._text_print or self._fingerprint_text()
        return {
            "family": self.family.name,
            "encoder": self._text_print,
            "revision": CODE_REVISION,
            "settings": self.parts.settings,
        }

    def _fingerprint_text(self) -> str:
        parts = self.parts
        return "".join(
            [fingerprint(*(parts.text_encoders[name] for name in self.encoders))]
            + [tokenizer_fingerprint(parts.tokenizers[name]) for name in sorted(parts.tokenizers) if name not in self.trained]
            + (list(self.encoders) if len(self.encoders) < len(parts.text_encoders) else [])
        )

    # Images.

    def see_all(self, looks: Sequence[Look]) -> list[Seen]:
        """The pixels of images and control images."""
        return [self._see(look) for look in looks]

    def _see(self, look: Look) -> Seen:
        return see(self.plan, self.seed, look) if isinstance(look, View) else Seen(see_control(self.plan, self.seed, look), None)

    def encode_seen(self, seen: Sequence[Seen]) -> list[Tensors]:
        """Latents, and masks at their size, of images of one size."""
        latents = self.encode_pixels([one.pixels for one in seen])
        return [with_mask(latent, one.mask) for latent, one in zip(latents, seen)]

    @torch.no_grad()
    def encode_pixels(self, pixels: Sequence[Tensor]) -> Tensor:
        """Latents (B, C, h, w) of images (3, H, W) of one size."""
        device = next(self.parts.vae.parameters()).device
        pieces = [pixels[start : start + self._at_once] for start in range(0, len(pixels), self._at_once)]
        return torch.cat(
            [self.family.encode_images(self.parts, torch.stack(list(piece)).to(device, non_blocking=True)) for piece in pieces]
        )

    # Texts.

    @torch.no_grad()
    def encode_texts(self, texts: Sequence[str]) -> list[Condition]:
        """The text part of the condition of captions without control images."""
        return self.family.encode_prompts(self.parts, texts, self.encoders if self.trained else None)

    def read_controls(self, group: Sequence[Rows]) -> tuple[list[Tensor], list[str | None]]:
        """Pixels of the control images that these rows have in common, and their texts."""
        return self.shown(group[0].view), [rows.text for rows in group]

    def shown(self, view: View) -> list[Tensor]:
        """Pixels of a view's control images as the text encoder sees them: never tinted, because a kept text knows of no tint."""
        return [see_control(self.plan, self.seed, _untinted(control)) for control in control_views(self.plan, view)]

    def encode_rows(self, material: tuple[list[Tensor], list[str | None]]) -> list[Tensors]:
        """The rows of each text; None stands for those that all share."""
        controls, texts = material
        shared, own = self.encode_instructions(controls, [text for text in texts if text is not None])
        following = iter(own)
        return [{"text": shared if text is None else next(following)} for text in texts]

    @torch.no_grad()
    def encode_instructions(self, controls: Sequence[Tensor], texts: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """Rows that all instructions on these control images share, and the rows of each."""
        editing: EditingFamily = self.family  # type: ignore[assignment]
        return editing.encode_instructions(self.parts, controls, texts)


def _untinted(view: ControlView) -> ControlView:
    return ControlView(view.image, view.resolution, view.index, view.place, view.mirrored)


def with_mask(latent: Tensor, mask: Tensor | None) -> Tensors:
    """What is kept of an image: its latents (C, h, w), and its mask at their size where it has one."""
    return {"latents": latent} if mask is None else {"latents": latent, "mask": mask_at(mask, (latent.shape[-2], latent.shape[-1]))}
