"""Qwen-Image and Qwen-Image-Edit: what they are made of, how they denoise and render. How they read instructions is in qwen_prompts.

Shapes: B samples, h w latent sides (an eighth of H W, the image's), N = h/2 * w/2 tokens of the image and N_i of control image i,
L text tokens, D text width. Latents have 16 channels.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from sd_scripts.dataset.buckets import area_size
from sd_scripts.families.common import structures
from sd_scripts.families.common.comfyui_levels import FlowLevels, Graph
from sd_scripts.families.common.editing import EditingTransformerFamily, conditions_with_controls, pixels_at
from sd_scripts.families.common.packing import packed, unpacked
from sd_scripts.families.common.qwen_vae import QwenVaeFamily, tiny_qwen_vae
from sd_scripts.families.common.tiny import made_once, tiny_parts
from sd_scripts.families.common.tiny_words import tiny_qwen_tokenizer
from sd_scripts.families.common.transformers import TextShape, controls_of, given_first, in_groups
from sd_scripts.library.core.devices import META
from sd_scripts.library.core.protocols import Condition, DeviceMap, Dtypes, Parts, Preview, Version, dtype_of
from sd_scripts.library.loading.common import BASE, read_json
from sd_scripts.library.loading.source import find
from sd_scripts.runs.model_headers import Header
from sd_scripts.schema.errors import OptionError

from . import loading
from . import processor as qwen_processor
from . import prompts as qwen_prompts
from . import templates as qwen_templates
from . import tiny as tiny_qwen
from .modulation import tabulate
from .options import QwenImageModelOptions
from .prompts import MAX_POSITIONS
from .templates import MAX_CONTROLS

BLOCKS = "transformer_blocks."
_UNUSED_AT_THE_END = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.")
"""Layers that nothing reads in the last block: only the image's tokens leave it."""


class QwenEdit(QwenVaeFamily, EditingTransformerFamily):
    """The Qwen-Image family; see protocols.EditingFamily. parts.settings["model_version"] says which of its models it is."""

    name: ClassVar[str] = "qwen_edit"
    grid: ClassVar[int] = QwenImageModelOptions.grid
    # With the shift of its published graphs, in place of the loader's e^1.15.
    graph: ClassVar[Graph] = Graph("simple", FlowLevels(3.1))

    def load(self, options: QwenImageModelOptions, device: DeviceMap, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
        """Loads all parts on `device`, or those of the options; see protocols.ModelFamily."""
        parts = loading.load(options, device, dtype, without)
        qwen_prompts.check_positions(parts.text_encoders["te1"])
        if parts.device == META:
            return parts
        return self.equipped(parts, options, torch.device("cuda") if torch.cuda.is_available() else parts.device)

    def equipped(self, parts: Parts, options: QwenImageModelOptions, device: torch.device) -> Parts:
        """The parts with tables in place of the modulation, where the options say so; see protocols.ModelFamily."""
        return tabulate(parts, device) if options.modulation_table else parts

    def version(self, parts: Parts) -> Version:
        """See ModelFamily."""
        return loading.VERSIONS[parts.settings["model_version"]]

    @made_once
    def tiny(self, version: str = "edit-2509") -> Parts:
        """The same classes with two layers and random (seeded) weights, float32, on the CPU, in eval mode; of any version."""
        tokenizer = tiny_qwen_tokenizer(qwen_templates.template_of(one).text for one in MAX_CONTROLS)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            encoder, vae = tiny_qwen.tiny_qwen_text_encoder(tokenizer), tiny_qwen_vae()
            transformer = tiny_qwen.tiny_qwen_transformer(zero_cond_t=version == "edit-2511")
        # The vision part sees 56 x 56 pixels at most, four tokens, of whatever the images are resized to.
        images = None if version == "image" else qwen_processor.images_of({"min_pixels": 3136, "max_pixels": 60 * 60})
        settings = qwen_templates.settings_of(version, 512, 64 * 64, 64 * 64, images)
        networks = {"backbone": transformer, "vae": vae, "te1": encoder}
        parts = tiny_parts(networks, {"te1": tokenizer}, loading.published_scheduler(), settings)
        parts.processor = None if images is None else qwen_processor.ImageProcessor(images, tokenizer)
        return parts

    def published(self, options: QwenImageModelOptions, header: Header | None) -> tuple[Parts, str]:
        """The version that the options or the name say; see protocols.PublishedFamily."""
        version, name = options.model_version, Path(options.pretrained_model_name_or_path).name.lower()
        if version == "auto":
            version = next((one for one in ("edit-2511", "edit-2509", "edit") if one in name), "image")
        area = qwen_templates.AREA if options.control_resolution is None else options.control_resolution**2
        settings = {"max_token_length": options.max_token_length, "area": qwen_templates.AREA, "control_area": area}
        changes = {"backbone": {"zero_cond_t": True}} if version == "edit-2511" else {}
        return structures.published(loading.SPEC, self.tiny(version), options, header, settings, changes)

    def text_shape(self, parts: Parts, num_tokens: int, num_controls: int) -> TextShape:
        """As long as the instruction in its template and the rows of its control images; see TransformerFamily."""
        limit, width = parts.settings["max_token_length"], parts.backbone.config.joint_attention_dim
        return TextShape(min(limit, num_tokens + 12) + num_controls * _image_tokens(parts), width, min(limit, num_tokens + 64))

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """Text part of each caption's condition without control images, text (L, D), in the encoder's precision.

        What the versions for editing are asked about images goes through encode_instructions; of them, edit reads nothing without one.
        Each caption is encoded alone, so its rows do not depend on the others. Runs with gradient when grad mode is on.
        """
        return [{"text": rows} for rows in qwen_prompts.prompt_rows(parts, captions)]

    def encode_instructions(self, parts: Parts, controls: Sequence[Tensor], captions: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """Rows (P, D) that instructions on the same control images share, and those of each, (S, D); see EditingFamily.

        controls: (3, H, W) in [-1, 1], as they are given to the VAE. Without any, P is 0.
        """
        if controls:
            return qwen_prompts.instruction_rows(parts, controls, captions)
        return self.no_rows(parts), qwen_prompts.prompt_rows(parts, captions)

    def usual_size(self, parts: Parts) -> tuple[int, int]:
        """A square of the model's own area."""
        return area_size((1, 1), parts.settings["area"])

    def num_controls(self, parts: Parts) -> tuple[int, int]:
        """Fewest and most control images of a sample: none for image, one for edit, one to three for later versions."""
        most = MAX_CONTROLS[parts.settings["model_version"]]
        return min(1, most), most

    def control_area(self, options: QwenImageModelOptions) -> int:
        """See EditingFamily."""
        if options.control_resolution is not None:
            return options.control_resolution**2
        name = options.pretrained_model_name_or_path
        folder = find(BASE, name, self.name).path if name == "toy" else Path(name).expanduser()
        index = folder / "model_index.json"
        side = read_json(index, BASE).get(loading.SIDE) if index.is_file() else None
        return qwen_templates.AREA if side is None else side * side

    def control_size(self, parts: Parts, size: tuple[int, int]) -> tuple[int, int]:
        """(width, height) at which a control image of this size is given to the VAE: the model's area, in its own aspect ratio."""
        width, height = area_size(size, parts.settings["control_area"])
        return width // self.grid * self.grid, height // self.grid * self.grid

    def denoise(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The velocity at canonical times t (B,); same shape as x_t (B, 16, h, w), float32.

        conditions: text (L, D) and control_0, control_1, ... (16, h_i, w_i), none for text to image. Control images may differ in number
        and size from sample to sample: those of one shape go through the transformer together. Times reach their embedding in float32,
        whatever the precision of the network.
        """
        return in_groups(
            parts.backbone,
            x_t,
            t,
            conditions,
            lambda one: tuple(control.shape for control in controls_of(one)),
            lambda *samples: self._denoise_alike(parts, *samples),
        )

    def _denoise_alike(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """`denoise` of samples whose control images have the same sizes."""
        parts.bring(parts.backbone)
        dtype = dtype_of(parts.backbone)
        controls = [torch.stack(same).to(x_t.device) for same in zip(*map(controls_of, conditions), strict=True)]
        shapes = [(1, image.shape[-2] // 2, image.shape[-1] // 2) for image in (x_t, *controls)]
        text, mask = _batched([condition["text"] for condition in conditions])
        _check_positions(shapes, text.shape[1])
        t = t.to(x_t.device, torch.float32)
        # In models with zero_cond_t zeros follow.
        exact = torch.cat([t, 0 * t]) if parts.backbone.config.zero_cond_t else t
        with given_first(parts.backbone.time_text_embed, exact):
            prediction = parts.backbone(
                hidden_states=torch.cat([packed(image.to(dtype)) for image in (x_t, *controls)], dim=1),
                timestep=t,
                encoder_hidden_states=text.to(x_t.device, dtype),
                encoder_hidden_states_mask=None if mask is None else mask.to(x_t.device),
                # The target first: the tokens of all further images are at time 0 in models with zero_cond_t.
                img_shapes=[shapes] * len(x_t),
                return_dict=False,
            )[0]
        num_tokens = shapes[0][1] * shapes[0][2]
        return unpacked(prediction[:, :num_tokens].float(), x_t.shape[-2], x_t.shape[-1])

    def adapter_targets(self, parts: Parts, conv: bool) -> dict[str, list[str]]:
        """Names of the layers that can get an adapter, by module name; conv changes nothing, there are no convolutions.

        backbone: every linear layer of the blocks that has a gradient, modulation included. te1: attention and MLP of the language model.
        """
        inside = "language_model.layers."
        words = [name for name, layer in parts.text_encoders["te1"].named_modules() if isinstance(layer, nn.Linear) and inside in name]
        return {"backbone": linear_layers(parts), "te1": words}

    def save(self, parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
        """Writes the model: safetensors is the transformer alone, diffusers a folder with everything."""
        loading.save(parts, path, save_model_as, dtype, metadata)

    @torch.no_grad()
    def conditions_of(self, parts: Parts, requests: Sequence[Preview]) -> tuple[list[Condition], list[Condition] | None]:
        """Conditions of the requests' prompts, and of their negative prompts where guidance is on."""
        return conditions_with_controls(self, parts, requests, f"Qwen-Image {parts.settings['model_version']}")

    def guided(self, positive: Tensor, negative: Tensor, scale: float) -> Tensor:
        """Guidance of velocities (B, 16, h, w) with the length of each token's prediction kept (diffusers, pipeline_qwenimage.py).

        v = n + scale (p - n), then v |p| / |v| token by token.
        """
        p, n = packed(positive), packed(negative)
        v = n + scale * (p - n)
        smallest = torch.finfo(v.dtype).tiny
        v = v * (torch.norm(p, dim=-1, keepdim=True) / torch.norm(v, dim=-1, keepdim=True).clamp(min=smallest))
        return unpacked(v, positive.shape[-2], positive.shape[-1])

    def control_pixels(self, parts: Parts, image: Any) -> Tensor:
        """A control image as the VAE gets it, (3, H, W) in [-1, 1]."""
        return pixels_at(image.convert("RGB"), self.control_size(parts, image.size))


def _image_tokens(parts: Parts) -> int:
    """Rows of text that a control image has: of 384 x 384 pixels for the later editing models, of 1024 x 1024 for the first, each of
    28 x 28 pixels."""
    side = 1024 if parts.settings["model_version"] == "edit" else 384
    return (side // 28) ** 2 + 8


def linear_layers(parts: Parts) -> list[str]:
    """Names of the transformer's linear layers that an adapter can be on, in its order: 14 in each block, ten to eleven in the last.

    Left out are those of the last block that nothing reads, which would never get a gradient.
    """
    last = f"{BLOCKS}{len(parts.backbone.transformer_blocks) - 1}."
    unused = tuple(last + layer for layer in _UNUSED_AT_THE_END)
    return [
        name
        for name, layer in parts.backbone.named_modules()
        if isinstance(layer, nn.Linear) and name.startswith(BLOCKS) and not name.startswith(unused)
    ]


def _batched(texts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Texts (L_i, D) as one tensor (B, L, D), and which rows are text, (B, L) bool; None where nothing is padded."""
    lengths = torch.tensor([len(text) for text in texts])
    longest = int(lengths.max())
    if (lengths == longest).all():
        return torch.stack(list(texts)), None
    padded = torch.stack([nn.functional.pad(text, (0, 0, 0, longest - len(text))) for text in texts])
    return padded, torch.arange(longest) < lengths[:, None]


def _check_positions(shapes: Sequence[tuple[int, int, int]], length: int) -> None:
    """Raises OptionError for a text that is longer than the table of positions behind these images."""
    half = max(max(rows, columns) // 2 for _, rows, columns in shapes)
    if half + length > MAX_POSITIONS:
        raise OptionError(
            f"a text of {length} rows on an image of {16 * shapes[0][2]} x {16 * shapes[0][1]} is more than the {MAX_POSITIONS} positions "
            "that Qwen-Image has; choose smaller control images (control_resolution) or a smaller max_token_length"
        )


FAMILY = QwenEdit()
