"""What a safetensors file holds, read from its header alone, and which model that is. Reads no weights, and loads no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from sd_scripts.families import OWN_SIGNS, SHARED_SIGNS
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.facts import Sign, TensorNames
from sd_scripts.schema.outside import json_of

T = TypeVar("T")
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

COMPILED = "_orig_mod."
"""What torch.compile's wrapper puts into names."""
GGUF = b"GGUF"
"""What a GGUF file begins with."""
PICKLES = (".ckpt", ".pt", ".pth", ".bin", ".pkl", ".pickle")


@dataclass(frozen=True)
class Header:
    """Names and shapes of a file's tensors, and its free-form metadata."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    metadata: dict[str, str]
    stored: dict[str, str] = field(default_factory=dict)
    """Names in the file by those in shapes, where they differ: without what torch.compile's wrapper has put into them."""
    dtypes: dict[str, str] = field(default_factory=dict)
    """How the file holds each tensor: F32, BF16, F8_E4M3, ...; empty for a GGUF file, which has forms of its own."""

    def has(self, *parts: str) -> bool:
        """Whether some tensor's name contains one of these."""
        return any(part in key for key in self.shapes for part in parts)

    def starts(self, *prefixes: str) -> bool:
        """Whether some tensor's name starts with one of these."""
        return any(key.startswith(prefixes) for key in self.shapes)


def is_gguf(path: Path) -> bool:
    """Whether a file begins as a GGUF file does."""
    with path.open("rb") as file:
        return file.read(len(GGUF)) == GGUF


def read_safetensors(path: Path, option: str) -> Header:
    """The header of a safetensors file, with the names that its networks have without torch.compile.

    Raises OptionError for a pickle, a file that is cut off, or no safetensors file at all; OSError where the disk does not read it.
    """
    if path.suffix.lower() in PICKLES:
        raise OptionError(
            f"{option}: {path.name} is a pickle file, which can run any code while it is read, so it is refused. "
            "Convert it to .safetensors with a tool you trust, or get the .safetensors version of the model"
        )
    size = path.stat().st_size
    with path.open("rb") as file:
        _check_start(path, option, file.read(512))
        file.seek(0)
        first = file.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length > MAX_HEADER_BYTES:
            raise OptionError(f"{option}: {path.name} ({size:,} bytes) is not a safetensors file; a .safetensors model was expected")
        raw = file.read(length)
    broken = f"{option}: {path.name} is damaged or was not downloaded whole"
    if len(raw) < length:
        raise OptionError(f"{broken}: it ends inside its header, after {size:,} bytes. Download or copy it again")
    try:
        header = json_of(raw)
        metadata = header.pop("__metadata__", {})
        shapes = {key: tuple(entry["shape"]) for key, entry in header.items()}
        dtypes = {key: str(entry.get("dtype")) for key, entry in header.items()}
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as err:
        raise OptionError(
            f"{option}: {path.name} is not a readable safetensors file: its header makes no sense. Download it again"
        ) from err
    if size != 8 + length + end:
        raise OptionError(f"{broken}: it should have {8 + length + end:,} bytes and has {size:,}. Download or copy it again")
    stored = {key.replace(COMPILED, ""): key for key in shapes if COMPILED in key}
    return Header(path, _plain(shapes), metadata, stored, _plain(dtypes))


def _plain(values: Mapping[str, T]) -> dict[str, T]:
    return {key.replace(COMPILED, ""): value for key, value in values.items()}


def _check_start(path: Path, option: str, start: bytes) -> None:
    """Raises OptionError for what is often found under the name of a model and is none."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(b"version https://git-lfs"):
        raise OptionError(
            f"{option}: {path.name} is a git-lfs pointer, a few lines of text in place of the model. Fetch the model itself with "
            "`git lfs pull`, or download the file from its page"
        )
    if text.startswith((b"<!doctype", b"<html", b"<head", b"<?xml")):
        raise OptionError(
            f"{option}: {path.name} is a web page, not a model: the download got a page instead, such as one that asks to log in. "
            "Download the file again"
        )
    if text.startswith((b'{"error', b'{"message')):
        raise OptionError(f"{option}: {path.name} is an answer of a server that refused the download, not a model. Download the file again")
    # The length of a safetensors header may be written in the same bytes, but then the header follows.
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")) and start[8:9] != b"{":
        raise OptionError(
            f"{option}: {path.name} is a pickle or zip file under another name, which can run any code while it is read, so it is refused. "
            "Get the .safetensors version of the model"
        )


INSTEAD = "Take the bf16, fp16 or fp8_e4m3fn version of the model"
FLOAT8 = ("F8_E4M3", "F8_E5M2")
BITS_AND_BYTES = ".quant_state.bitsandbytes__"
SCALES = (".scale_weight", ".weight_scale")
"""What stands in place of `.weight` in the name of a weight's factors, ComfyUI's."""
SCALED, MXFP8, NVFP4 = "scaled", "mxfp8", "nvfp4"
"""How ComfyUI holds weights in few bits: with one factor for the tensor or for each row, or with one for each block of a row."""
BLOCKS = {MXFP8: 32, NVFP4: 16}
"""Numbers of a row that share a factor."""
TILE = (128, 4)
"""Rows and columns of the tiles in which the factors of blocks are stored, filled up."""
_FEW_BITS = re.compile(r"(.*)\.(absmax|quant_map|quant_state\..*|nested_.*|weight_scale_2|qweight|qzeros|pre_quant_scale|weight_s_rel)")
"""Names that only files with weights of a few bits have."""


def scale_of(name: str, header: Header) -> str | None:
    """The tensor of the factors by which a weight is multiplied, if it has some."""
    if not name.endswith(".weight"):
        return None
    return next((other for ending in SCALES if (other := name.removesuffix(".weight") + ending) in header.shapes), None)


def form_of(name: str, scale: str, header: Header) -> str:
    """How ComfyUI holds a weight of these factors, as the kinds of numbers tell it: SCALED, MXFP8 or NVFP4."""
    kinds = header.dtypes.get(name), header.dtypes.get(scale)
    # The factors of blocks may be held as plain bytes.
    if kinds[0] == "U8" and kinds[1] in ("U8", "F8_E4M3") and f"{scale}_2" in header.shapes:
        return NVFP4
    return MXFP8 if kinds[0] in FLOAT8 and kinds[1] in ("U8", "F8_E8M0") else SCALED


def refused_bits(header: Header, option: str, name: str) -> OptionError:
    """The sentence for a file whose weights are in a form that cannot be read, as the tensor of this name says."""
    return OptionError(f"{option}: {header.path.name} holds quantised weights ({name}), which cannot be read here. {INSTEAD}")


def check_bits(header: Header, option: str) -> None:
    """Raises OptionError for weights in few bits of a form that cannot be read, as far as names, shapes and kinds of numbers tell it."""
    read = {name.partition(BITS_AND_BYTES)[0] for name in header.shapes if BITS_AND_BYTES in name}
    for name in header.shapes:
        if (scale := scale_of(name, header)) is not None and _check_factors(name, scale, header, option) == NVFP4:
            read.add(name.removesuffix(".weight"))
    for name in header.shapes:
        marked = _FEW_BITS.fullmatch(name)
        if marked is not None and marked[1] not in read:
            raise refused_bits(header, option, name)


def _check_factors(name: str, scale: str, header: Header, option: str) -> str:
    form, shape, factors = form_of(name, scale, header), header.shapes[name], header.shapes[scale]
    if scale.endswith(".weight_scale") and form != NVFP4 and header.dtypes.get(name) not in (*FLOAT8, "I8"):
        raise refused_bits(header, option, f"{name} in {header.dtypes.get(name)}")
    if form == SCALED:
        fits = tuple(side for side in factors if side != 1) in ((), shape[:1]) and (math.prod(factors) == 1 or factors[0] != 1)
        known = "one for each tensor or each row"
    else:
        rows, row = shape if len(shape) == 2 else (0, 1)
        row *= 2 if form == NVFP4 else 1
        held = -(-rows // TILE[0]) * -(-row // (BLOCKS[form] * TILE[1])) * math.prod(TILE)
        fits = row % BLOCKS[form] == 0 and math.prod(factors) == held and math.prod(header.shapes.get(f"{scale}_2", ())) == 1
        known = f"one for each {BLOCKS[form]} numbers of a row"
    if not fits:
        raise OptionError(
            f"{option}: {header.path.name} scales {name} by {factors} numbers; only {known} can be read here. "
            "Take the bf16 or fp16 version of the model"
        )
    return form


VAE = "a VAE alone"
CLIP = "a CLIP text encoder"
T5 = "a T5 text encoder"
LORA = "a LoRA file"
UNKNOWN = "an unknown kind of file"


def what_is(header: Header) -> str:
    """The kind of model in a file, as a noun for a sentence: "a VAE alone", "a LoRA file", ..., or "an unknown kind of file"."""
    signs = (*_FIRST, *(sign for signs in OWN_SIGNS.values() for sign in signs), *SHARED_SIGNS, *_LAST)
    return next((sign.what for sign in signs if sign.recognises(header)), UNKNOWN)


def _is_vae(names: TensorNames) -> bool:
    prefixes = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.", "first_stage_model.", "loss.", "model_ema.")
    return names.has("decoder.conv_in.weight") and all(key.startswith(prefixes) for key in names.shapes)


def _is_unet(names: TensorNames) -> bool:
    ends = names.has("up_blocks.0.resnets.0.conv1.weight", "conv_norm_out.weight")
    return ends and names.has("down_blocks.0.resnets.0.conv1.weight") and not _is_vae(names)


_CONTROLS = ("control_model.", "controlnet_cond_embedding", "controlnet_down_blocks", "controlnet_blocks", "controlnet_x_embedder")
_FIRST = (
    Sign("an empty file", lambda names: not names.shapes),
    Sign(LORA, lambda names: names.has("lora_down", "lora_up", ".lora_A.", ".lora_B.", "hada_w1", "lokr_w", ".oft_", ".dora_scale")),
    Sign("a textual inversion", lambda names: names.starts("emb_params", "clip_g", "clip_l") and len(names.shapes) < 5),
    Sign("a ControlNet", lambda names: names.has(*_CONTROLS, "input_hint_block")),
    # Of the second and third; their other names are Mistral's and Qwen3's.
    Sign("a Gemma text encoder", lambda names: names.has("layers.0.pre_feedforward_layernorm.")),
    Sign("a HunyuanVideo transformer", lambda names: names.has("double_blocks.0.img_attn_qkv.")),
)
"""What may have names of a family's files, too."""
_LAST = (
    Sign("a UNet alone", _is_unet),
    Sign(VAE, _is_vae),
    Sign(T5, lambda names: names.has("block.0.layer.0.SelfAttention.q.weight")),
    # The first Mistrals, of 7B, have its shapes, too.
    Sign("a Llama text encoder", lambda names: names.has("layers.0.mlp.gate_proj.weight") and not names.has("q_norm", "q_proj.bias")),
    Sign(CLIP, lambda names: names.has("encoder.layers.0.self_attn.q_proj.weight", "transformer.resblocks.0.")),
)
"""Networks of several families, which files of whole models hold as well."""
