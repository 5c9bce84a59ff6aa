"""What prepares control images for Qwen2.5-VL. Made here because transformers' own wants torchvision, for films that nobody has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor
from transformers.processing_utils import ProcessorMixin

IMAGE, FILM = "<|image_pad|>", "<|video_pad|>"
"""Marks in a text that stand for one vision token each."""


class ImageProcessor(Qwen2VLProcessor):
    """Qwen2-VL's processor for texts and images, without the part for films and so without torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token, self.video_token = IMAGE, FILM
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids([IMAGE, FILM])
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def images_of(config: Mapping[str, Any]) -> Qwen2VLImageProcessorPil:
    """The image processor of a preprocessor_config.json, which knows sizes by either of the names that transformers has had for them."""
    sizes = dict(config.get("size") or {})
    least = sizes.get("shortest_edge") or config.get("min_pixels") or sizes.get("min_pixels")
    most = sizes.get("longest_edge") or config.get("max_pixels") or sizes.get("max_pixels")
    names = ("patch_size", "temporal_patch_size", "merge_size", "image_mean", "image_std")
    known = {name: config[name] for name in names if config.get(name) is not None}
    default = Qwen2VLImageProcessorPil.size
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": least or default["shortest_edge"], "longest_edge": most or default["longest_edge"]}, **known
    )


def config_of(processor: ImageProcessor) -> dict[str, Any]:
    """The preprocessor_config.json of a processor, with the names that all versions of transformers read."""
    images = processor.image_processor
    sizes = dict(images.size)
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": sizes["shortest_edge"],
        "max_pixels": sizes["longest_edge"],
        "patch_size": images.patch_size,
        "temporal_patch_size": images.temporal_patch_size,
        "merge_size": images.merge_size,
        "image_mean": list(images.image_mean),
        "image_std": list(images.image_std),
    }
