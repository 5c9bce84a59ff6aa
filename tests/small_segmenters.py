"""Models that make masks, and one that finds things: published classes with small sizes and random weights, written by transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Sam2Config,
    Sam2Model,
    Sam3Config,
    Sam3Model,
    Sam3TrackerConfig,
    Sam3TrackerModel,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    YolosConfig,
    YolosForObjectDetection,
)
from transformers.models.mask2former.image_processing_pil_mask2former import Mask2FormerImageProcessorPil
from transformers.models.segformer.image_processing_pil_segformer import SegformerImageProcessorPil
from transformers.models.yolos.image_processing_pil_yolos import YolosImageProcessorPil

from tests.small_captioners import words

SIDE = 64
NAMES = {0: "background", 1: "person", 2: "car, automobile", 3: "sky"}


def _saved(model: Any, folder: Path) -> None:
    """Random weights as published classes begin with (0.02) say nearly the same of all pixels, so that rounding would decide."""
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data *= 8
    model.save_pretrained(folder)


def _kept(model: Any, processor: Any, folder: Path) -> Path:
    _saved(model, folder)
    processor.save_pretrained(folder)
    return folder


def segformer(folder: Path) -> Path:
    config = SegformerConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 1, 2, 2], decoder_hidden_size=16, id2label=NAMES
    )
    return _kept(SegformerForSemanticSegmentation(config), SegformerImageProcessorPil(size={"height": SIDE, "width": SIDE}), folder)


_SWIN = {"model_type": "swin", "embed_dim": 8, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 1, 1], "window_size": 4, "image_size": SIDE}
_SWIN |= {"out_features": ["stage1", "stage2", "stage3", "stage4"]}


def mask2former(folder: Path) -> Path:
    config = Mask2FormerConfig(
        backbone_config=_SWIN, feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=16, encoder_layers=1,
        dim_feedforward=16, decoder_layers=2, num_attention_heads=2, num_queries=6, id2label=NAMES,
    )  # fmt: skip
    processor = Mask2FormerImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return _kept(Mask2FormerForUniversalSegmentation(config), processor, folder)


def sam2(folder: Path) -> Path:
    backbone = {"model_type": "sam2_hiera_det_model", "hidden_size": 8, "image_size": [SIDE, SIDE], "blocks_per_stage": [1, 1, 2, 1]}
    backbone |= {"embed_dim_per_stage": [8, 16, 32, 64], "num_attention_heads_per_stage": [1, 1, 2, 4]}
    backbone |= {"window_size_per_stage": [4, 2, 2, 2], "global_attention_blocks": [3]}
    backbone |= {"window_positional_embedding_background_size": [4, 4]}
    config = Sam2Config(
        vision_config={
            "backbone_config": backbone, "backbone_channel_list": [64, 32, 16, 8], "fpn_hidden_size": 16,
            "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        },
        prompt_encoder_config={"hidden_size": 16, "image_size": SIDE, "patch_size": 16},
        mask_decoder_config={"hidden_size": 16, "mlp_dim": 16, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
    )  # fmt: skip
    return _with_square(Sam2Model(config), folder, SIDE, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])


def sam3(folder: Path) -> Path:
    backbone = {"model_type": "sam3_vit_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "patch_size": 14}
    backbone |= {"num_attention_heads": 2, "image_size": 56, "pretrain_image_size": 28, "window_size": 2, "global_attn_indexes": [1]}
    config = Sam3TrackerConfig(
        vision_config={
            "model_type": "sam3_vision_model", "backbone_config": backbone, "fpn_hidden_size": 16,
            "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        },
        prompt_encoder_config={"hidden_size": 16, "image_size": 56, "patch_size": 14},
        mask_decoder_config={"hidden_size": 16, "mlp_dim": 16, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
    )  # fmt: skip
    return _with_square(Sam3TrackerModel(config), folder, 56, [0.5, 0.5, 0.5], [0.5, 0.5, 0.5])


_LAYERS = {"hidden_size": 16, "num_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


def sam3_words(folder: Path) -> Path:
    """SAM 3 with the part that reads words."""
    tokenizer = words()
    backbone = {"model_type": "sam3_vit_model", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "patch_size": 14}
    backbone |= {"num_attention_heads": 2, "image_size": 56, "pretrain_image_size": 28, "window_size": 2, "global_attn_indexes": [0]}
    config = Sam3Config(
        vision_config={
            "model_type": "sam3_vision_model", "backbone_config": backbone, "fpn_hidden_size": 16,
            "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
        },
        text_config={
            "model_type": "clip_text_model", "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 16,
            "projection_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 32,
            "eos_token_id": tokenizer.eos_token_id,
        },
        geometry_encoder_config=_LAYERS, detr_encoder_config=_LAYERS, detr_decoder_config={**_LAYERS, "num_queries": 6},
        mask_decoder_config={"hidden_size": 16, "num_attention_heads": 2},
    )  # fmt: skip
    tokenizer.save_pretrained(folder)
    return _with_square(Sam3Model(config), folder, 56, [0.5, 0.5, 0.5], [0.5, 0.5, 0.5])


def _with_square(model: Any, folder: Path, side: int, mean: list[float], std: list[float]) -> Path:
    """With the file that says as what an image is shown; transformers' class for it needs torchvision."""
    _saved(model, folder)
    kept = {"size": {"height": side, "width": side}, "image_mean": mean, "image_std": std}
    (folder / "preprocessor_config.json").write_text(json.dumps(kept))
    return folder


def yolos(folder: Path) -> Path:
    config = YolosConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=[SIDE, SIDE], patch_size=16,
        num_detection_tokens=8, id2label={0: "hat", 1: "face", 2: "hand"},
    )  # fmt: skip
    return _kept(YolosForObjectDetection(config), YolosImageProcessorPil(size={"height": SIDE, "width": SIDE}), folder)


BUILDERS = {"segformer": segformer, "mask2former": mask2former, "sam2": sam2, "sam3": sam3, "sam3_words": sam3_words, "yolos": yolos}


def build(name: str, folder: Path, seed: int = 0) -> Path:
    """A small model with weights from a seed."""
    torch.manual_seed(seed)
    return BUILDERS[name](folder)
