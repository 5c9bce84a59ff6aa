"""Models that look at images, of the published classes with small sizes and random weights, as folders that transformers has written."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BartConfig,
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    Blip2QFormerConfig,
    Blip2VisionConfig,
    Florence2Config,
    Florence2ForConditionalGeneration,
    Florence2Processor,
    OPTConfig,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from sd_scripts.toy.tokens import WORDS

SIDE = 32
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }} {% for piece in message.content %}{% if piece.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ piece.text }}{% endif %}{% endfor %}<|im_end|> {% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
)
_TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def words(*special: str, **named: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the toy worlds' words; others are unknown. named: special tokens that the tokenizer knows by a name."""
    special = (*special, *named.values())
    vocab = {word: number for number, word in enumerate(("<pad>", "<s>", "</s>", "<unk>", *special, *WORDS))}
    inside = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inside.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inside,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=list(special),
        **named,
    )


def _lively(model: Any) -> Any:
    """With larger weights than at the start of a training, so that what it says depends on what it sees."""
    embeddings = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    with torch.no_grad():
        for weight in model.parameters():
            # A text model that hears its own last word too loudly repeats it for ever.
            if weight.dim() > 1 and not any(weight is each for each in embeddings):
                weight.mul_(10)
    return model


def _kept(model: Any, processor: Any, folder: Path) -> Path:
    _lively(model).save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def florence(folder: Path) -> Path:
    tokenizer = words(image_token="<image>")
    vision = {"depths": (1, 1), "embed_dim": (16, 32), "num_heads": (2, 4), "num_groups": (2, 4), "window_size": 4, "projection_dim": 32}
    vision |= {"patch_size": (7, 3), "patch_stride": (4, 2), "patch_padding": (3, 1), "patch_prenorm": (False, True)}
    text = BartConfig(
        vocab_size=len(tokenizer), d_model=32, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=48, decoder_ffn_dim=48,
        encoder_attention_heads=2, decoder_attention_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=2, forced_bos_token_id=None, forced_eos_token_id=None,
    )  # fmt: skip
    config = Florence2Config(text_config=text.to_dict(), vision_config=vision, image_token_id=tokenizer.image_token_id)
    images = CLIPImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_center_crop=False)
    images.image_seq_length = (SIDE // 8) ** 2 + 1
    return _kept(Florence2ForConditionalGeneration(config), Florence2Processor(images, tokenizer), folder)


def blip2(folder: Path) -> Path:
    tokenizer = words("<image>")
    config = Blip2Config(
        vision_config=Blip2VisionConfig(**_TEXT, image_size=SIDE, patch_size=16).to_dict(),
        qformer_config=Blip2QFormerConfig(**_TEXT, encoder_hidden_size=32, vocab_size=len(tokenizer)).to_dict(),
        text_config=OPTConfig(
            vocab_size=len(tokenizer), hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32,
            max_position_embeddings=128, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        ).to_dict(),
        num_query_tokens=4, image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    images = BlipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    return _kept(Blip2ForConditionalGeneration(config), Blip2Processor(images, tokenizer, num_query_tokens=4), folder)


_QWEN = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


def _qwen(folder: Path, config_class: Any, model_class: Any, vision: dict[str, Any], patch: int) -> Path:
    tokenizer = words(*_QWEN)
    numbers = dict(zip(("image", "video"), tokenizer.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"]), strict=True))
    starts = dict(zip(("start", "end"), tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"]), strict=True))
    text = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": len(tokenizer), "max_position_embeddings": 512}
    text |= {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
    text |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = config_class(
        text_config=text, vision_config=vision, image_token_id=numbers["image"], video_token_id=numbers["video"],
        vision_start_token_id=starts["start"], vision_end_token_id=starts["end"],
    )  # fmt: skip
    _lively(model_class(config)).save_pretrained(folder)
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(size={"shortest_edge": 1024, "longest_edge": 4096}, patch_size=patch).save_pretrained(folder)
    return folder


def qwen25(folder: Path) -> Path:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14}
    vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
    return _qwen(folder, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, vision, 14)


def qwen3(folder: Path) -> Path:
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32, "patch_size": 16}
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    return _qwen(folder, Qwen3VLConfig, Qwen3VLForConditionalGeneration, vision, 16)


BUILDERS = {"florence": florence, "blip2": blip2, "qwen25": qwen25, "qwen3": qwen3}


def build(name: str, folder: Path, seed: int = 0) -> Path:
    """A small model with weights from a seed, whose words depend on the image."""
    torch.manual_seed(seed)
    return BUILDERS[name](folder)


def tagger(folder: Path, weights: Any, tags: list[tuple[str, str]]) -> Path:
    """A network that tells for each tag the sigmoid of a sum over the image's mean colour: weights (3, tags), of BGR from 0 to 255."""
    folder.mkdir(parents=True, exist_ok=True)
    given = helper.make_tensor_value_info("input", TensorProto.FLOAT, ["n", SIDE, SIDE, 3])
    told = helper.make_tensor_value_info("told", TensorProto.FLOAT, ["n", len(tags)])
    axes = numpy_helper.from_array(np.array([1, 2]), "axes")
    nodes = [
        helper.make_node("ReduceMean", ["input", "axes"], ["mean"], keepdims=0),
        helper.make_node("MatMul", ["mean", "weights"], ["sum"]),
        helper.make_node("Sigmoid", ["sum"], ["told"]),
    ]
    graph = helper.make_graph(nodes, "tagger", [given], [told], [axes, numpy_helper.from_array(weights, "weights")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    with (folder / "selected_tags.csv").open("w", newline="", encoding="utf-8") as stream:
        rows = csv.writer(stream)
        rows.writerow(["tag_id", "name", "category", "count"])
        rows.writerows([number, name, category, 1] for number, (name, category) in enumerate(tags))
    return folder
