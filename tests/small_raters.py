"""Models that rate images, of the published classes with small sizes and random weights, as folders that transformers has written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPProcessor,
    Dinov2Config,
    Dinov2Model,
    SiglipConfig,
    SiglipModel,
    SiglipProcessor,
)
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from tests.small_captioners import SIDE, words

_TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_VISION = {**_TEXT, "image_size": SIDE, "patch_size": 8}
_SIZES = {"size": {"height": SIDE, "width": SIDE}}


def clip(folder: Path) -> Path:
    """A CLIP model."""
    tokenizer = words()
    text = {**_TEXT, "vocab_size": len(tokenizer), "max_position_embeddings": 16, "eos_token_id": tokenizer.eos_token_id}
    CLIPModel(CLIPConfig(text_config=text, vision_config=_VISION, projection_dim=24)).save_pretrained(folder)
    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    CLIPProcessor(CLIPImageProcessorPil(**sizes), tokenizer).save_pretrained(folder)
    return folder


def siglip(folder: Path) -> Path:
    """A SigLIP model; those of SigLIP 2 with one size of images are of the same class."""
    tokenizer = words()
    text = {**_TEXT, "vocab_size": len(tokenizer), "max_position_embeddings": 16}
    SiglipModel(SiglipConfig(text_config=text, vision_config=_VISION)).save_pretrained(folder)
    SiglipProcessor(SiglipImageProcessorPil(**_SIZES), tokenizer).save_pretrained(folder)
    return folder


def dino(folder: Path) -> Path:
    """A DINOv2 model."""
    config = Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=SIDE, patch_size=8)
    Dinov2Model(config).save_pretrained(folder)
    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    BitImageProcessorPil(**sizes).save_pretrained(folder)
    return folder


def arcface(file: Path, weights: Any) -> Path:
    """A network in ONNX that takes faces as ArcFace's do, and tells their mean colour from -1 to 1 by weights (3, D)."""
    given = helper.make_tensor_value_info("input.1", TensorProto.FLOAT, ["n", 3, SIDE, SIDE])
    told = helper.make_tensor_value_info("683", TensorProto.FLOAT, ["n", weights.shape[1]])
    axes = numpy_helper.from_array(np.array([2, 3]), "axes")
    nodes = [
        helper.make_node("ReduceMean", ["input.1", "axes"], ["mean"], keepdims=0),
        helper.make_node("MatMul", ["mean", "weights"], ["683"]),
    ]
    graph = helper.make_graph(nodes, "faces", [given], [told], [axes, numpy_helper.from_array(weights, "weights")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), file)
    return file
