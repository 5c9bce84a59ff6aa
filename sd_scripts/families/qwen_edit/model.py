"""Qwen-Image and Qwen-Image-Edit: what they are made of, how they denoise and render. How they read instructions is in qwen_prompts.

Shapes: B samples, h w latent sides (an eighth of H W, the picture's), N = h/2 * w/2 tokens of the picture and N_i of control picture i,
L text tokens, D text width. Latents have 16 channels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers.image_processor import VaeImageProcessor
from torch import Tensor, nn

from sd_scripts.dataset.buckets import area_size
from sd_scripts.families.common.packing import packed, unpacked
from sd_scripts.families.common.pictures import PictureFamily, evaluating, first_of, in_tiles, place
from sd_scripts.families.common.tiny import tiny_parts
from sd_scripts.library.core.protocols import Condition, Dtypes, Geometry, OnStep, Parts, Preview
from sd_scripts.schema.errors import OptionError

from . import loading
from . import processor as qwen_processor
from . import prompts as qwen_prompts
from . import sampling as qwen_sampling
from . import templates as qwen_templates
from . import tiny as tiny_qwen
from .modulation import tabulate
from .options import QwenImageModelOptions
from .prompts import MAX_POSITIONS
from .templates import MAX_CONTROLS

BLOCKS = "transformer_blocks."
_UNUSED_AT_THE_END = ("attn.add_q_proj", "attn.to_add_out", "txt_mlp.")
"""Layers that nothing reads in the last block: only the picture's tokens leave it."""


class QwenEdit(PictureFamily):
    """The Qwen-Image family; see protocols.EditingFamily. parts.settings["model_version"] says which of its models it is."""

    name: ClassVar[str] = "qwen_edit"
    grid: ClassVar[int] = QwenImageModelOptions.grid
    separate_texts: ClassVar[bool] = False

    def load(self, options: QwenImageModelOptions, device: torch.device, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
        """Loads all parts on `device`, or those of the options; see protocols.ModelFamily."""
        parts = loading.load(options, device, dtype, without)
        qwen_prompts.check_positions(parts.text_encoders["te1"])
        if options.modulation_table and "backbone" not in without:
            return tabulate(parts, torch.device("cuda") if torch.cuda.is_available() else device)
        return parts

    def tiny(self) -> Parts:
        """The same classes with two layers and random (seeded) weights, float32, on the CPU, in eval mode; of version edit-2509."""
        return self.tiny_version("edit-2509")

    def tiny_version(self, version: str) -> Parts:
        """The tiny model of another version: edit, edit-2509, edit-2511 or image."""
        tokenizer = tiny_qwen.tiny_qwen_tokenizer(qwen_templates.template_of(one).text for one in MAX_CONTROLS)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            encoder, vae = tiny_qwen.tiny_qwen_text_encoder(tokenizer), tiny_qwen.tiny_qwen_vae()
            transformer = tiny_qwen.tiny_qwen_transformer(zero_cond_t=version == "edit-2511")
        # The vision part sees 56 x 56 pixels at most, four tokens, of whatever the pictures are resized to.
        pictures = None if version == "image" else qwen_processor.pictures_of({"min_pixels": 3136, "max_pixels": 60 * 60})
        settings = qwen_templates.settings_of(version, 512, 64 * 64, 64 * 64, pictures)
        networks = {"backbone": transformer, "vae": vae, "te1": encoder}
        parts = tiny_parts(networks, {"te1": tokenizer}, loading.published_scheduler(), settings)
        parts.processor = None if pictures is None else qwen_processor.PictureProcessor(pictures, tokenizer)
        return parts

    @torch.no_grad()
    def encode_pictures(self, parts: Parts, pixels: Tensor) -> Tensor:
        """Scaled latents of RGB pictures: (B, 3, H, W) in [-1, 1] -> (B, 16, H/8, W/8) float32; the mean of the posterior.

        Raises ValueError for sides off the grid.
        """
        if pixels.shape[-1] % self.grid or pixels.shape[-2] % self.grid:
            raise ValueError(f"picture sides {tuple(pixels.shape[-2:])} are not multiples of {self.grid}")
        device, dtype = place(parts.vae)
        with torch.autocast(device.type, enabled=False):
            # The VAE is one for films: a picture is a film of one frame.
            latents = parts.vae.encode(pixels.to(device, dtype)[:, :, None]).latent_dist.mode()[:, :, 0].float()
        mean, std = _statistics(parts.vae, latents)
        return (latents - mean) / std

    @torch.no_grad()
    def decode(self, parts: Parts, latents: Tensor) -> Tensor:
        """Pictures of scaled latents: (B, 16, h, w) -> (B, 3, 8h, 8w) in [-1, 1], float32."""
        device, dtype = place(parts.vae)
        latents = latents.to(device).float()
        mean, std = _statistics(parts.vae, latents)
        with torch.autocast(device.type, enabled=False), in_tiles(parts.vae):
            pixels = parts.vae.decode((latents / (1.0 / std) + mean).to(dtype)[:, :, None], return_dict=False)[0][:, :, 0]
        return pixels.float().clamp(-1, 1)

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """Text part of each caption's condition without control pictures, text (L, D), in the encoder's precision.

        What the versions for editing are asked about pictures goes through encode_instructions; of them, edit reads nothing without one.
        Each caption is encoded alone, so its rows do not depend on the others. Runs with gradient when grad mode is on.
        """
        return [{"text": rows} for rows in qwen_prompts.prompt_rows(parts, captions)]

    def encode_instructions(self, parts: Parts, controls: Sequence[Tensor], captions: Sequence[str]) -> tuple[Tensor, list[Tensor]]:
        """Rows (P, D) that instructions on the same control pictures share, and those of each, (S, D); see EditingFamily.

        controls: (3, H, W) in [-1, 1], as they are given to the VAE. Without any, P is 0.
        """
        if controls:
            return qwen_prompts.instruction_rows(parts, controls, captions)
        rows = qwen_prompts.prompt_rows(parts, captions)
        device, dtype = place(parts.text_encoders["te1"])
        return torch.zeros(0, parts.backbone.config.joint_attention_dim, device=device, dtype=dtype), rows

    def num_controls(self, parts: Parts) -> tuple[int, int]:
        """Fewest and most control pictures of a sample: none for image, one for edit, one to three for later versions."""
        most = MAX_CONTROLS[parts.settings["model_version"]]
        return min(1, most), most

    def control_size(self, parts: Parts, size: tuple[int, int]) -> tuple[int, int]:
        """(width, height) at which a control picture of this size is given to the VAE: the model's area, in its own aspect ratio."""
        width, height = area_size(size, parts.settings["control_area"])
        return width // self.grid * self.grid, height // self.grid * self.grid

    def size_condition(self, geometry: Geometry) -> Condition:
        """Nothing: Qwen-Image is not told how a picture was cut."""
        return {}

    def denoise(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The velocity at canonical times t (B,); same shape as x_t (B, 16, h, w), float32.

        conditions: text (L, D) and control_0, control_1, ... (16, h_i, w_i), none for text to image. Control pictures may differ in number
        and size from sample to sample: those of one shape go through the transformer together. Times reach their embedding in float32,
        whatever the precision of the network.
        """
        groups: dict[tuple[tuple[int, ...], ...], list[int]] = {}
        for index, condition in enumerate(conditions):
            groups.setdefault(tuple(tuple(control.shape) for control in _controls(condition)), []).append(index)
        if len(groups) == 1:
            return self._denoise_alike(parts, x_t, t, conditions)
        order = [index for group in groups.values() for index in group]
        found = [self._denoise_alike(parts, x_t[group], t[group], [conditions[index] for index in group]) for group in groups.values()]
        back = torch.tensor(order, device=x_t.device).argsort()
        return torch.cat(found)[back]

    def _denoise_alike(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """`denoise` of samples whose control pictures have the same sizes."""
        _, dtype = place(parts.backbone)
        controls = [torch.stack(same).to(x_t.device) for same in zip(*map(_controls, conditions), strict=True)]
        shapes = [(1, picture.shape[-2] // 2, picture.shape[-1] // 2) for picture in (x_t, *controls)]
        text, mask = _batched([condition["text"] for condition in conditions])
        _check_positions(shapes, text.shape[1])
        t = t.to(x_t.device, torch.float32)
        with _exact_times(parts.backbone, t):
            prediction = parts.backbone(
                hidden_states=torch.cat([packed(picture.to(dtype)) for picture in (x_t, *controls)], dim=1),
                timestep=t,
                encoder_hidden_states=text.to(x_t.device, dtype),
                encoder_hidden_states_mask=None if mask is None else mask.to(x_t.device),
                # The target first: the tokens of all further pictures are at time 0 in models with zero_cond_t.
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
    def render(self, parts: Parts, requests: Sequence[Preview], on_step: OnStep | None = None) -> Tensor:
        """The pictures of `preview` before rounding: (B, 3, H, W) in [-1, 1], float32.

        Control pictures may differ from request to request; guidance is on with cfg_scale above 1, negative_prompt "" included. on_step is
        told of every step. Raises OptionError for a number of control pictures that the model does not take.
        """
        if not requests:
            return torch.empty(0, 3, 0, 0)
        with evaluating(parts):
            positive, negative = self.conditions_of(parts, requests)
            return self.decode(parts, self.draw(parts, requests, positive, negative, on_step))

    @torch.no_grad()
    def conditions_of(self, parts: Parts, requests: Sequence[Preview]) -> tuple[list[Condition], list[Condition] | None]:
        """Conditions of the requests' prompts, and of their negative prompts where guidance is on."""
        guided = requests[0].cfg_scale > 1
        fewest, most = self.num_controls(parts)
        for request in requests:
            _check_controls(len(request.controls), fewest, most, parts.settings["model_version"])
        positive: list[Condition] = [{} for _ in requests]
        negative: list[Condition] = [{} for _ in requests]
        alike: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            alike.setdefault(tuple(id(picture) for picture in request.controls), []).append(index)
        for indices in alike.values():
            pictures = [self.control_pixels(parts, picture) for picture in requests[indices[0]].controls]
            latents = {f"control_{i}": self.encode_pictures(parts, pixels[None])[0] for i, pixels in enumerate(pictures)}
            prompts = [requests[index].prompt for index in indices]
            prompts += [requests[index].negative_prompt for index in indices] if guided else []
            prefix, suffixes = self.encode_instructions(parts, pictures, prompts)
            texts = [{"text": torch.cat([prefix, suffix]), **latents} for suffix in suffixes]
            for place_in, index in enumerate(indices):
                positive[index] = texts[place_in]
                negative[index] = texts[len(indices) + place_in] if guided else {}
        return positive, negative if guided else None

    @torch.no_grad()
    def draw(
        self,
        parts: Parts,
        requests: Sequence[Preview],
        positive: Sequence[Condition],
        negative: Sequence[Condition] | None,
        on_step: OnStep | None = None,
    ) -> Tensor:
        """Scaled latents (B, 16, h, w), float32, of requests with these conditions, each from noise of its own seed."""
        first = first_of(requests, self.grid)
        device, _ = place(parts.backbone)
        height, width = first.height // 8, first.width // 8
        scheduler = qwen_sampling.schedule(first.sampler, parts.scheduler_config, first.steps, height * width // 4, device)

        def predict(conditions: Sequence[Condition]) -> qwen_sampling.Predict:
            return lambda x_t, t: self.denoise(parts, x_t, t, conditions)

        start = qwen_sampling.noise([request.seed for request in requests], height, width).to(device)
        return qwen_sampling.draw(
            start, scheduler, predict(positive), None if negative is None else predict(negative), first.cfg_scale, on_step
        )

    def control_pixels(self, parts: Parts, picture: Any) -> Tensor:
        """A control picture as the VAE gets it, (3, H, W) in [-1, 1]."""
        width, height = self.control_size(parts, picture.size)
        prepared: Tensor = VaeImageProcessor(vae_scale_factor=self.grid).preprocess(picture.convert("RGB"), height, width)
        return prepared[0]


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


def _controls(condition: Condition) -> list[Tensor]:
    """The encoded control pictures of a sample, (16, h, w) each, in their order."""
    found: list[Tensor] = []
    while (control := condition.get(f"control_{len(found)}")) is not None:
        found.append(control)
    return found


def _batched(texts: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Texts (L_i, D) as one tensor (B, L, D), and which rows are text, (B, L) bool; None where nothing is padded."""
    lengths = torch.tensor([len(text) for text in texts])
    longest = int(lengths.max())
    if (lengths == longest).all():
        return torch.stack(list(texts)), None
    padded = torch.stack([nn.functional.pad(text, (0, 0, 0, longest - len(text))) for text in texts])
    return padded, torch.arange(longest) < lengths[:, None]


def _check_positions(shapes: Sequence[tuple[int, int, int]], length: int) -> None:
    """Raises OptionError for a text that is longer than the table of positions behind these pictures."""
    half = max(max(rows, columns) // 2 for _, rows, columns in shapes)
    if half + length > MAX_POSITIONS:
        raise OptionError(
            f"a text of {length} rows on a picture of {16 * shapes[0][2]} x {16 * shapes[0][1]} is more than the {MAX_POSITIONS} positions "
            "that Qwen-Image has; choose smaller control pictures (control_resolution) or a smaller max_token_length"
        )


def _check_controls(count: int, fewest: int, most: int, version: str) -> None:
    """Raises OptionError unless a model takes this many control pictures."""
    if fewest <= count <= most:
        return
    allowed = str(fewest) if fewest == most else f"{fewest} to {most}"
    raise OptionError(f"control pictures: {count} were given, but Qwen-Image {version} takes {allowed}")


def _statistics(vae: nn.Module, like: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of latents, (1, 16, 1, 1)."""
    config: Any = vae.config
    mean, std = (torch.tensor(row, device=like.device).view(1, -1, 1, 1) for row in (config.latents_mean, config.latents_std))
    return mean, std


@contextmanager
def _exact_times(transformer: nn.Module, t: Tensor) -> Iterator[None]:
    """Within the block the transformer embeds these times (B,), and zeros after them where it has zero_cond_t.

    diffusers rounds them to the precision of the network before it embeds them: to three digits in bfloat16.
    """
    exact = torch.cat([t, 0 * t]) if transformer.config.zero_cond_t else t

    def given(module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        return (exact, *arguments[1:])

    handle = transformer.time_text_embed.register_forward_pre_hook(given)
    try:
        yield
    finally:
        handle.remove()


FAMILY = QwenEdit()
