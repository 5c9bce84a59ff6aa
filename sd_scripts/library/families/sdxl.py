"""Stable Diffusion XL: what it is made of, how it reads prompts and sizes, how it denoises and renders.

Shapes: B samples, C latent channels, h w latent sides (an eighth of H W, the picture's), L text tokens, D text width, P pooled width.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.downsampling import Downsample2D
from diffusers.models.resnet import ResnetBlock2D
from diffusers.models.transformers.transformer_2d import Transformer2DModel
from diffusers.models.upsampling import Upsample2D
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from sd_scripts.library import diffusion
from sd_scripts.library.families.clip_prompts import tokenize
from sd_scripts.library.families.samplers import scheduler_for
from sd_scripts.library.loading import sdxl as loading
from sd_scripts.library.loading.common import read_json
from sd_scripts.library.protocols import Condition, Geometry, Parts, Preview, StateDict
from sd_scripts.schema.model import SdxlModelOptions

if TYPE_CHECKING:
    from diffusers import StableDiffusionXLPipeline

TEXT_ENCODERS = ("te1", "te2")
CHUNK_TOKENS = 75
"""Tokens of a chunk as max_token_length counts them, without start and end."""


class Sdxl:
    """The SDXL family; see protocols.ModelFamily."""

    name: ClassVar[str] = "sdxl"
    grid: ClassVar[int] = 8

    def load(self, options: SdxlModelOptions, device: torch.device, dtype: torch.dtype) -> Parts:
        """Loads all parts on `device`; backbone and text encoders in dtype. Raises OptionError with a sentence for what cannot be read."""
        return loading.load(options, device, dtype)

    def tiny(self) -> Parts:
        """The same classes with two layers and random (seeded) weights, float32, on the CPU, in eval mode."""
        tokenizers = {"te1": _tiny_tokenizer("<|endoftext|>"), "te2": _tiny_tokenizer("!")}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            te1 = CLIPTextModel(_tiny_text_config(tokenizers["te1"], width=16, projection=16))
            te2 = CLIPTextModelWithProjection(_tiny_text_config(tokenizers["te2"], width=24, projection=20))
            unet, vae = _tiny_unet(text_width=16 + 24, pooled_width=20), _tiny_vae()
        scheduler = read_json(loading.SPEC.configs / "scheduler" / "scheduler_config.json", "tiny")
        parts = Parts(
            backbone=unet,
            vae=vae,
            text_encoders={"te1": te1, "te2": te2},
            tokenizers=tokenizers,
            path=diffusion.path_of(scheduler),
            kind=diffusion.kind_of(scheduler),
            scheduler_config=scheduler,
            source="tiny",
            settings={"max_token_length": 75, "weighted_captions": False, "force_zeros_for_empty_prompt": True},
        )
        for module in parts.modules().values():
            module.eval().requires_grad_(False)
        return parts

    @torch.no_grad()
    def encode_pictures(self, parts: Parts, pixels: Tensor) -> Tensor:
        """Scaled latents of RGB pictures: (B, 3, H, W) in [-1, 1] -> (B, C, H/8, W/8) float32; the mean of the posterior.

        Raises ValueError for sides off the grid.
        """
        if pixels.shape[-1] % self.grid or pixels.shape[-2] % self.grid:
            raise ValueError(f"picture sides {tuple(pixels.shape[-2:])} are not multiples of {self.grid}")
        device, dtype = _place(parts.vae)
        # The VAE's precision is chosen by vae_dtype alone: SDXL's overflows in fp16, whatever the rest runs in.
        with torch.autocast(device.type, enabled=False):
            mean = parts.vae.encode(pixels.to(device, dtype)).latent_dist.mean.float()
        scale, shift = _latent_scale(parts.vae, mean)
        return (mean - shift) * scale

    @torch.no_grad()
    def decode(self, parts: Parts, latents: Tensor) -> Tensor:
        """Pictures of scaled latents: (B, C, h, w) -> (B, 3, 8h, 8w) in [-1, 1], float32."""
        device, dtype = _place(parts.vae)
        latents = latents.to(device).float()
        scale, shift = _latent_scale(parts.vae, latents)
        with torch.autocast(device.type, enabled=False):
            pixels = parts.vae.decode((latents / scale + shift).to(dtype)).sample
        return pixels.float().clamp(-1, 1)

    def encode_prompts(self, parts: Parts, captions: Sequence[str]) -> list[Condition]:
        """Text part of each caption's condition: prompt_embeds (L, D) and pooled (P,), in the encoders' precision.

        Both encoders' last but one hidden states side by side; pooled from encoder 2. Longer captions than one chunk are encoded chunk by
        chunk, chunks joined along L, pooled from the first. Runs with gradient when grad mode is on.
        """
        if not captions:
            return []
        num_chunks = parts.settings["max_token_length"] // CHUNK_TOKENS
        hidden, pooled = [], None
        for name in TEXT_ENCODERS:
            encoder = parts.text_encoders[name]
            tokens = tokenize(parts.tokenizers[name], captions, num_chunks, parts.settings["weighted_captions"])
            device, _ = _place(encoder)
            output = encoder(tokens.ids.flatten(0, 1).to(device), output_hidden_states=True)
            states = output.hidden_states[-2]
            if parts.settings["weighted_captions"]:
                states = states * tokens.weights.flatten(0, 1).to(device)[..., None].to(states.dtype)
            hidden.append(states.unflatten(0, tokens.ids.shape[:2]).flatten(1, 2))
            if name == TEXT_ENCODERS[-1]:
                pooled = output.text_embeds.unflatten(0, tokens.ids.shape[:2])[:, 0]
        assert pooled is not None
        joined = torch.cat([states.to(hidden[-1].device) for states in hidden], dim=-1)
        return [{"prompt_embeds": states, "pooled": vector} for states, vector in zip(joined, pooled)]

    def size_condition(self, geometry: Geometry) -> Condition:
        """time_ids (6,): original height, width, crop top, left, target height, width, in pixels (Podell et al. 2023, section 2.2)."""
        (width, height), (left, top), (target_width, target_height) = geometry.original, geometry.crop, geometry.target
        return {"time_ids": torch.tensor([height, width, top, left, target_height, target_width], dtype=torch.float32)}

    def denoise(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The network's prediction, of kind parts.kind, at canonical times t (B,); same shape as x_t, float32."""
        _, dtype = _place(parts.backbone)

        def stack(name: str) -> Tensor:
            return torch.stack([condition[name] for condition in conditions]).to(x_t.device, dtype)

        prediction = parts.backbone(
            x_t.to(dtype),
            parts.path.model_times(t).to(x_t.device),
            encoder_hidden_states=stack("prompt_embeds"),
            added_cond_kwargs={"text_embeds": stack("pooled"), "time_ids": stack("time_ids")},
            return_dict=False,
        )[0]
        return prediction.float()

    def adapter_targets(self, parts: Parts, conv: bool) -> dict[str, list[str]]:
        """Names of the layers that get an adapter by default, by module name.

        backbone: linear layers and 1x1 convolutions inside the transformers; conv adds every layer of the ResNet, down- and upsampling
        blocks. te1, te2: attention and MLP.
        """
        blocks = (Transformer2DModel, *((ResnetBlock2D, Downsample2D, Upsample2D) if conv else ()))
        targets = {"backbone": _layers_within(parts.backbone, blocks)}
        for name, encoder in parts.text_encoders.items():
            targets[name] = [path for path, layer in encoder.named_modules() if isinstance(layer, nn.Linear) and ".layers." in f".{path}"]
        return targets

    def export_names(self, state: StateDict) -> StateDict:
        """kohya names for adapter tensors named `<module>.<layer>.<rest>` (module: backbone, te1, te2)."""
        from sd_scripts.library.networks.sdxl_names import to_kohya

        return to_kohya(state)

    @torch.no_grad()
    def preview(self, parts: Parts, requests: Sequence[Preview]) -> list[Image.Image]:
        """Renders pictures of equal size, steps, cfg_scale and sampler in one batch, each from noise of its own seed.

        Leaves devices, train or eval mode and the global random state as they were. Raises OptionError for a sampler that cannot render
        the model, ValueError for sides off the grid.
        """
        pixels = self.render(parts, requests)
        return VaeImageProcessor.numpy_to_pil((pixels / 2 + 0.5).cpu().permute(0, 2, 3, 1).numpy()) if requests else []

    @torch.no_grad()
    def render(self, parts: Parts, requests: Sequence[Preview]) -> Tensor:
        """The pictures of `preview` before rounding: (B, 3, H, W) in [-1, 1], float32."""
        if not requests:
            return torch.empty(0, 3, 0, 0)
        first = requests[0]
        same = {(r.width, r.height, r.steps, r.cfg_scale, r.sampler) for r in requests}
        assert len(same) == 1, f"one batch has one size, steps, cfg_scale and sampler, not {same}"
        if first.width % self.grid or first.height % self.grid:
            raise ValueError(f"picture sides {first.width} x {first.height} are not multiples of {self.grid}")
        # Without VAE and text encoders the pipeline runs on the device of its UNet, wherever the others are.
        pipeline = _pipeline_class()(
            vae=None,
            text_encoder=None,
            text_encoder_2=None,
            tokenizer=None,
            tokenizer_2=None,
            unet=parts.backbone,
            scheduler=scheduler_for(first.sampler, parts.scheduler_config),
            add_watermarker=False,
        )
        pipeline.set_progress_bar_config(disable=True)
        with _evaluating(parts):
            positive = self._embeddings(parts, [request.prompt for request in requests])
            negative = self._negative(parts, requests, positive) if first.cfg_scale > 1 else (None, None)
            latents = pipeline(
                prompt_embeds=positive[0],
                pooled_prompt_embeds=positive[1],
                negative_prompt_embeds=negative[0],
                negative_pooled_prompt_embeds=negative[1],
                width=first.width,
                height=first.height,
                num_inference_steps=first.steps,
                guidance_scale=first.cfg_scale,
                generator=[torch.Generator().manual_seed(request.seed) for request in requests],
                output_type="latent",
            ).images
            return self.decode(parts, latents)

    def _embeddings(self, parts: Parts, captions: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Embeddings (B, L, D) and pooled vectors (B, P) of captions, for the backbone."""
        device, dtype = _place(parts.backbone)
        conditions = self.encode_prompts(parts, captions)
        embeddings = torch.stack([condition["prompt_embeds"] for condition in conditions]).to(device, dtype)
        return embeddings, torch.stack([condition["pooled"] for condition in conditions]).to(device, dtype)

    def _negative(self, parts: Parts, requests: Sequence[Preview], positive: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """What guidance leads away from; for an empty negative prompt zeros, where the model's configuration says so."""
        embeddings, pooled = self._embeddings(parts, [request.negative_prompt for request in requests])
        if parts.settings["force_zeros_for_empty_prompt"]:
            for index, request in enumerate(requests):
                if not request.negative_prompt:
                    embeddings[index], pooled[index] = 0, 0
        return embeddings, pooled


def _pipeline_class() -> type[StableDiffusionXLPipeline]:
    """diffusers' pipeline, imported with the first preview, without transformers' remarks on image processors that nobody uses."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        from diffusers import StableDiffusionXLPipeline
    finally:
        logger.setLevel(level)
    return StableDiffusionXLPipeline


def _place(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and precision of a network: those of its first floating-point parameter, which no adapter replaces."""
    first = next(parameter for parameter in module.parameters() if parameter.is_floating_point())
    return first.device, first.dtype


def _latent_scale(vae: nn.Module, like: Tensor) -> tuple[Tensor, Tensor]:
    """Factor and shift, (1, C or 1, 1, 1), with scaled latents = (z - shift) factor, as the pipeline undoes it."""
    config = vae.config

    def row(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=like.device).view(1, -1, 1, 1)

    mean, std = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
    if mean is not None and std is not None:
        return config.scaling_factor / row(std), row(mean)
    return row([config.scaling_factor]), row([getattr(config, "shift_factor", None) or 0.0])


def _layers_within(module: nn.Module, blocks: tuple[type[nn.Module], ...]) -> list[str]:
    """Names of the linear and convolution layers inside blocks of these classes, in the order of the module."""
    roots = [path for path, block in module.named_modules() if isinstance(block, blocks)]
    inside = tuple(f"{root}." for root in roots)
    return [path for path, layer in module.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d) and path.startswith(inside)]


@contextmanager
def _evaluating(parts: Parts) -> Iterator[None]:
    """All networks in eval mode; afterwards every submodule is in the mode it was in."""
    modes = [(module, module.training) for part in parts.modules().values() for module in part.modules()]
    for part in parts.modules().values():
        part.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _tiny_tokenizer(pad_token: str) -> CLIPTokenizer:
    """A CLIP tokenizer whose tokens are single bytes; "!" has id 0, as in the real one."""
    letters = sorted(_byte_letters())
    tokens = letters + [f"{letter}</w>" for letter in letters] + ["<|startoftext|>", "<|endoftext|>"]
    vocab = {token: number for number, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], pad_token=pad_token, model_max_length=32)


def _byte_letters() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()


def _tiny_text_config(tokenizer: CLIPTokenizer, width: int, projection: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=projection,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _tiny_unet(text_width: int, pooled_width: int) -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(16, 32),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        transformer_layers_per_block=(1, 2),
        attention_head_dim=(1, 2),
        cross_attention_dim=text_width,
        norm_num_groups=8,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + pooled_width,
    )


def _tiny_vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(8, 8, 8, 16),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=64,
        scaling_factor=0.13025,
        force_upcast=False,
    )
