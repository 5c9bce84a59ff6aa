"""What prepares control pictures for Qwen2.5-VL. Made here because transformers' own wants torchvision, for films that nobody has."""

from __future__ import annotations

from typing import Any

from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.processing_utils import ProcessorMixin

PICTURE, FILM = "<|image_pad|>", "<|video_pad|>"
"""Marks in a text that stand for one vision token each."""


class PictureProcessor(Qwen2VLProcessor):
    """Qwen2-VL's processor for texts and pictures, without the part for films and so without torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token, self.video_token = PICTURE, FILM
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([PICTURE, FILM])
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def make(tokenizer: Any, config: dict[str, Any] | None = None) -> PictureProcessor:
    """A processor with this tokenizer; config is a preprocessor_config.json, without one the sizes are transformers' own."""
    pictures = Qwen2VLImageProcessorPil() if config is None else Qwen2VLImageProcessorPil.from_dict(config)
    return PictureProcessor(pictures, tokenizer)
