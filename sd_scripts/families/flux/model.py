"""FLUX.1: what it is made of, how it reads prompts, how it denoises and renders.

Shapes: B samples, C latent channels, h w latent sides (an eighth of H W, the image's), N = h/2 * w/2 image tokens, L text tokens,
D text width, P pooled width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor, nn
from transformers import CLIPTextModel, T5EncoderModel

from sd_scripts.families.common import structures
from sd_scripts.families.common.double_stream import (
    BLOCKS,
    batched_texts,
    exact_times,
    linear_layers,
    positions,
    t5_states,
    tiny_t5_config,
    tiny_t5_tokenizer,
)
from sd_scripts.families.common.images import ImageFamily, evaluating, first_of, quiet_transformers
from sd_scripts.families.common.packing import packed, unpacked
from sd_scripts.families.common.samplers import scheduler_for, watched
from sd_scripts.families.common.t5 import settle_t5
from sd_scripts.families.common.tiny import tiny_clip_config, tiny_clip_tokenizer, tiny_parts, tiny_vae
from sd_scripts.library.core.protocols import Condition, Dtypes, Geometry, OnStep, Parts, Preview, Version, dtype_of
from sd_scripts.library.loading.headers import Header

from . import loading
from .options import FluxModelOptions

if TYPE_CHECKING:
    from diffusers import FluxPipeline


class Flux(ImageFamily):
    """The FLUX.1 family; see protocols.ModelFamily."""

    name: ClassVar[str] = "flux"
    grid: ClassVar[int] = FluxModelOptions.grid
    separate_texts: ClassVar[bool] = True

    def load(self, options: FluxModelOptions, device: torch.device, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
        """Loads all parts on `device`; backbone and text encoders in dtype; those named in `without` stay on the meta device.

        Raises OptionError with a sentence for what cannot be read.
        """
        return loading.load(options, device, dtype, without)

    def version(self, parts: Parts) -> Version:
        """See ModelFamily."""
        return loading.VERSION_DEV if parts.backbone.config.guidance_embeds else loading.VERSION_SCHNELL

    def tiny(self) -> Parts:
        """The same classes with two layers and random (seeded) weights, float32, on the CPU, in eval mode."""
        tokenizers = {"te1": tiny_clip_tokenizer("<|endoftext|>"), "te3": tiny_t5_tokenizer()}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            te1 = CLIPTextModel(tiny_clip_config(tokenizers["te1"], width=16, projection=16))
            te3 = T5EncoderModel(tiny_t5_config(tokenizers["te3"], width=24))
            transformer, vae = _tiny_transformer(text_width=24, pooled_width=16), tiny_vae(16, 0.3611, 0.1159)
        networks = {"backbone": transformer, "vae": vae, "te1": te1, "te3": te3}
        settings = {"t5xxl_max_token_length": 32, "apply_t5_attn_mask": False}
        parts = tiny_parts(networks, tokenizers, loading.published_scheduler(guidance_embeds=True), settings)
        parts.denoising = {"guidance_scale": 1.0}
        return parts

    def published(self, options: FluxModelOptions, header: Header | None) -> tuple[Parts, str]:
        """dev, or schnell where the name says so; see protocols.PublishedFamily."""
        schnell = "schnell" in Path(options.pretrained_model_name_or_path).name.lower()
        spec = replace(loading.SPEC, configs=loading.SCHNELL) if schnell else loading.SPEC
        length = options.t5xxl_max_token_length or loading.MAX_TOKENS[not schnell]
        settings = {"t5xxl_max_token_length": length, "apply_t5_attn_mask": options.apply_t5_attn_mask}
        parts, label = structures.published(spec, self.tiny(), options, header, settings)
        settle_t5(parts.text_encoders["te3"])
        return parts, label

    def texts_like(self, parts: Parts, caption: str, batch: int, num_controls: int) -> list[Condition]:
        """t5, as long as the captions where padding is hidden, and pooled; see protocols.ModelFamily."""
        config, limit = parts.backbone.config, parts.settings["t5xxl_max_token_length"]
        length = min(limit, structures.num_tokens(caption)) if parts.settings["apply_t5_attn_mask"] else limit
        return structures.texts_of(parts, batch, {"t5": (length, config.joint_attention_dim), "pooled": (config.pooled_projection_dim,)})

    def read_like(self, parts: Parts, name: str, caption: str, batch: int) -> Tensor:
        """What T5 makes of texts with their padding, or CLIP of a chunk; see protocols.ModelFamily."""
        encoder = parts.text_encoders[name]
        if name == "te1":
            return structures.read_clip(encoder, batch)
        return structures.read(encoder, batch, parts.settings["t5xxl_max_token_length"])

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """Text part of each caption's condition: t5 (L, D) and pooled (P,), in the encoders' precision.

        t5: T5's last hidden states, of t5xxl_max_token_length tokens with padding; with apply_t5_attn_mask of the caption's own tokens
        alone, which then have not seen the padding either. pooled: CLIP-L's vector of the first 77 tokens. encoders te1 is pooled alone,
        te3 t5 alone. Runs with gradient when grad mode is on.
        """
        conditions: list[Condition] = [{} for _ in captions]
        if captions and (encoders is None or "te3" in encoders):
            settings = parts.settings
            texts = t5_states(parts, captions, settings["t5xxl_max_token_length"], settings["apply_t5_attn_mask"])
            conditions = [{"t5": text} for text in texts]
        if captions and (encoders is None or "te1" in encoders):
            conditions = [{**found, "pooled": vector} for found, vector in zip(conditions, _pooled(parts, captions), strict=True)]
        return conditions

    def size_condition(self, geometry: Geometry) -> Condition:
        """Nothing: FLUX is not told how an image was cut."""
        return {}

    def denoise(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The network's velocity noise - x0 at canonical times t (B,); same shape as x_t, float32.

        Texts of different lengths in one batch are padded, and the padding is hidden in attention. Embedded guidance is
        denoising["guidance_scale"]. Time and guidance reach their embedding in float32, whatever the precision of the network.
        """
        parts.bring(parts.backbone)
        dtype = dtype_of(parts.backbone)
        text, mask = batched_texts([condition["t5"] for condition in conditions], x_t.shape[-2] * x_t.shape[-1] // 4)
        t = t.to(x_t.device, torch.float32)
        guidance = torch.full_like(t, parts.denoising["guidance_scale"]) if parts.backbone.config.guidance_embeds else None
        with exact_times(parts.backbone, t, guidance):
            prediction = parts.backbone(
                hidden_states=packed(x_t).to(dtype),
                timestep=t,
                guidance=guidance,
                encoder_hidden_states=text.to(x_t.device, dtype),
                pooled_projections=torch.stack([condition["pooled"] for condition in conditions]).to(x_t.device, dtype),
                txt_ids=torch.zeros(text.shape[1], 3, device=x_t.device),
                img_ids=positions(x_t.shape[-2], x_t.shape[-1]).to(x_t.device),
                joint_attention_kwargs=None if mask is None else {"attention_mask": mask[:, None, None].to(x_t.device)},
                return_dict=False,
            )[0]
        return unpacked(prediction.float(), x_t.shape[-2], x_t.shape[-1])

    def adapter_targets(self, parts: Parts, conv: bool) -> dict[str, list[str]]:
        """Names of the layers that get an adapter by default, by module name; conv changes nothing, FLUX has no convolutions.

        backbone: every linear layer of the double and single blocks. te1, te3: attention and MLP.
        """
        targets = {"backbone": linear_layers(parts.backbone, lambda path: path.startswith(BLOCKS))}
        for name, encoder in parts.text_encoders.items():
            inside = ".block." if name == "te3" else ".layers."
            targets[name] = [path for path in linear_layers(encoder, lambda _: True) if inside in f".{path}"]
        return targets

    def save(self, parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
        """Writes the model: safetensors is the transformer alone in the published layout, diffusers a folder with everything."""
        loading.save(parts, path, save_model_as, dtype, metadata)

    @torch.no_grad()
    def render(self, parts: Parts, requests: Sequence[Preview], on_step: OnStep | None = None) -> Tensor:
        """The images of `preview` before rounding: (B, 3, H, W) in [-1, 1], float32."""
        if not requests:
            return torch.empty(0, 3, 0, 0)
        first = first_of(requests, self.grid)
        sides = first.height // 8, first.width // 8
        # Without VAE and text encoders the pipeline runs on the device of its transformer, wherever the others are.
        pipeline = _pipeline_class()(
            vae=None,
            text_encoder=None,
            text_encoder_2=None,
            tokenizer=None,
            tokenizer_2=None,
            transformer=parts.backbone,
            scheduler=watched(scheduler_for(first.sampler, parts.scheduler_config), on_step, lambda x: unpacked(x, *sides)),
        )
        pipeline.set_progress_bar_config(disable=True)
        with evaluating(parts):
            texts, pooled, masks = self._texts(parts, requests)
            negative = first.cfg_scale > 1
            with _masked(parts.backbone, dict(zip(map(id, texts), masks))) if masks else nullcontext():
                latents = pipeline(
                    prompt_embeds=texts[0],
                    pooled_prompt_embeds=pooled[0],
                    negative_prompt_embeds=texts[1] if negative else None,
                    negative_pooled_prompt_embeds=pooled[1] if negative else None,
                    true_cfg_scale=first.cfg_scale,
                    guidance_scale=first.guidance,
                    width=first.width,
                    height=first.height,
                    num_inference_steps=first.steps,
                    generator=[torch.Generator().manual_seed(request.seed) for request in requests],
                    output_type="latent",
                ).images
            return self.decode(parts, unpacked(latents, *sides))

    def _texts(self, parts: Parts, requests: Sequence[Preview]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Texts (B, L, D), pooled (B, P) and masks: of prompts, then of negative prompts where they count; no masks without padding."""
        captions = [request.prompt for request in requests]
        if requests[0].cfg_scale > 1:
            captions += [request.negative_prompt for request in requests]
        conditions = self.encode_prompts(parts, captions)
        device, dtype = parts.bring(parts.backbone), dtype_of(parts.backbone)
        text, mask = batched_texts([condition["t5"] for condition in conditions], requests[0].width * requests[0].height // self.grid**2)
        pooled = torch.stack([condition["pooled"] for condition in conditions]).to(device, dtype)
        size = len(requests)
        masks = [] if mask is None else list(mask[:, None, None].to(device).split(size))
        return list(text.to(device, dtype).split(size)), list(pooled.split(size)), masks


def _pooled(parts: Parts, captions: Sequence[str]) -> Tensor:
    """CLIP-L's vectors (B, P) of captions."""
    encoder, tokenizer = parts.text_encoders["te1"], parts.tokenizers["te1"]
    tokens = tokenizer(list(captions), padding="max_length", max_length=tokenizer.model_max_length, truncation=True, return_tensors="pt")
    device = parts.bring(encoder)
    pooled: Tensor = encoder(tokens.input_ids.to(device)).pooler_output
    return pooled


@contextmanager
def _masked(transformer: nn.Module, masks: Mapping[int, Tensor]) -> Iterator[None]:
    """Within the block the transformer gets the mask of the text it is given, looked up by the text's id.

    The pipeline has one set of attention arguments for prompts and negative prompts, whose padding differs.
    """

    def given(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        mask = masks[id(named["encoder_hidden_states"])]
        return arguments, {**named, "joint_attention_kwargs": {"attention_mask": mask}}

    handle = transformer.register_forward_pre_hook(given, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _pipeline_class() -> type[FluxPipeline]:
    """diffusers' pipeline, imported with the first preview."""
    with quiet_transformers():
        from diffusers import FluxPipeline
    return FluxPipeline


def _tiny_transformer(text_width: int, pooled_width: int) -> FluxTransformer2DModel:
    return FluxTransformer2DModel(
        in_channels=64,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=text_width,
        pooled_projection_dim=pooled_width,
        guidance_embeds=True,
        axes_dims_rope=(4, 6, 6),
    )


FAMILY = Flux()
