"""Tiny models, adapters with random values of visible effect, and pipelines that run them."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel, QwenImageTransformer2DModel, ZImageTransformer2DModel

from sd_scripts.families import RUNS
from sd_scripts.families.flux.model import Flux
from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.families.sd.model import Sd
from sd_scripts.families.sdxl.model import Sdxl
from sd_scripts.families.zimage.model import ZImage
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.files import export
from sd_scripts.library.adapters.names import names_of
from sd_scripts.library.adapters.network import AdapterNetwork
from sd_scripts.library.core.protocols import ModelFamily, Parts
from sd_scripts.schema.network import NetworkOptions
from tests.small_models import flux_pipeline_of, pipeline_of, sd_pipeline_of

LAYOUTS = ("kohya", "diffusers", "comfyui")


def family_of(parts: Parts) -> ModelFamily:
    return {"sdxl": Sdxl, "flux": Flux, "sd1": Sd, "sd2": Sd, "qwen_edit": QwenEdit, "zimage": ZImage}[names_of(parts).architecture.name]()


def attached(parts: Parts, options: NetworkOptions, seed: int = 0) -> AdapterNetwork:
    return attach(parts, options, family_of(parts).adapter_targets(parts, options.wants_convolutions), seed)


def shaken(network: AdapterNetwork, seed: int = 1) -> AdapterNetwork:
    """Random values in every tensor, large enough that the image changes and small enough that it stays an image."""
    rng = torch.Generator().manual_seed(seed)
    state = network.state()
    for key, tensor in state.items():
        noise = torch.randn(tensor.shape, generator=rng)
        state[key] = tensor * (1 + 0.1 * noise) if "magnitude" in key else 0.3 * noise
    network.load(state)
    return network


@torch.no_grad()
def velocity(family: ModelFamily, parts: Parts) -> torch.Tensor:
    """What a model predicts for random latents, a caption, and a reference image where it takes one."""
    rng, (channels, _) = torch.Generator().manual_seed(2), family.latent_in(parts)
    conditions = family.encode_prompts(parts, ["a cat"])
    if family.num_controls(parts)[1]:
        conditions[0]["control_0"] = torch.randn(channels, 2, 4, generator=rng)
    return family.denoise(parts, torch.randn(1, channels, 4, 6, generator=rng), torch.tensor([0.4]), conditions)


def saved(family: ModelFamily, parts: Parts, file: Path, layout: str, kind: str = "lora", **changes: object) -> torch.Tensor:
    """Writes an adapter of the transformer with random values and returns the velocity with it; the model stays as it was."""
    chosen = type(RUNS[family.name, "network"].model_fields["network"].default)
    options = chosen(network_type=kind, network_dim=4, network_alpha=2.0, **changes)
    network = attach(parts, options, {"backbone": family.adapter_targets(parts, False)["backbone"]}, 0)
    shaken(network)
    export(network, parts, file, save_model_as=layout, precision="float")
    live = velocity(family, parts)
    network.detach()
    return live


def near(left: torch.Tensor, right: torch.Tensor) -> bool:
    return bool((left - right).abs().max() < 4e-6 * max(1.0, float(right.abs().max())))


def diffusers_pipeline(parts: Parts) -> DiffusionPipeline:
    """diffusers' own pipeline of a model; the networks are shared, not copied."""
    pipelines = {"sdxl": pipeline_of, "flux": flux_pipeline_of, "sd1": sd_pipeline_of, "sd2": sd_pipeline_of}
    return pipelines[names_of(parts).architecture.name](parts)


def render(parts: Parts, prompt: str = "a red star") -> torch.Tensor:
    """An image (1, 3, 64, 64) in [0, 1] by diffusers' own pipeline."""
    return image(diffusers_pipeline(parts), prompt)


@torch.no_grad()
def outputs(parts: Parts, seed: int = 2) -> torch.Tensor:
    """What the backbone and all text encoders that can be trained give for random inputs, in one row of numbers."""
    rng = torch.Generator().manual_seed(seed)
    if isinstance(parts.backbone, QwenImageTransformer2DModel):
        return qwen_output(parts, rng).flatten()
    if isinstance(parts.backbone, ZImageTransformer2DModel):
        return zimage_output(parts, rng).flatten()
    config = parts.backbone.config
    if isinstance(parts.backbone, FluxTransformer2DModel):
        found = [flux_output(parts, rng)]
    else:
        added = None
        if config.addition_embed_type == "text_time":
            added = {"text_embeds": torch.randn(2, 20, generator=rng), "time_ids": torch.full((2, 6), 64.0)}
        noise, text = torch.randn(2, 4, 8, 8, generator=rng), torch.randn(2, 7, config.cross_attention_dim, generator=rng)
        found = [parts.backbone(noise, torch.tensor([10, 900]), text, added_cond_kwargs=added).sample]
    for name, encoder in parts.text_encoders.items():
        ids = torch.randint(0, min(500, encoder.config.vocab_size), (2, 12), generator=rng)
        hidden = encoder(ids, output_hidden_states=True).hidden_states
        found.append(hidden[-1 if name == "te3" else -2])
    return torch.cat([values.flatten() for values in found])


def flux_output(parts: Parts, rng: torch.Generator) -> torch.Tensor:
    """What a FLUX transformer gives for random inputs."""
    config = parts.backbone.config
    return parts.backbone(
        hidden_states=torch.randn(2, 16, config.in_channels, generator=rng),
        encoder_hidden_states=torch.randn(2, 5, config.joint_attention_dim, generator=rng),
        pooled_projections=torch.randn(2, config.pooled_projection_dim, generator=rng),
        timestep=torch.tensor([0.1, 0.9]),
        img_ids=torch.zeros(16, 3),
        txt_ids=torch.zeros(5, 3),
        guidance=torch.ones(2) if config.guidance_embeds else None,
    ).sample


def qwen_output(parts: Parts, rng: torch.Generator) -> torch.Tensor:
    """What a Qwen-Image transformer gives for random inputs: a target of 4x4 tokens and a control of 4x2, and texts of 7 and 5."""
    config = parts.backbone.config
    return parts.backbone(
        hidden_states=torch.randn(2, 24, config.in_channels, generator=rng),
        encoder_hidden_states=torch.randn(2, 7, config.joint_attention_dim, generator=rng),
        encoder_hidden_states_mask=torch.tensor([[1] * 7, [1] * 5 + [0] * 2]),
        timestep=torch.tensor([0.1, 0.9]),
        img_shapes=[[(1, 4, 4), (1, 4, 2)]] * 2,
    ).sample


def zimage_output(parts: Parts, rng: torch.Generator) -> torch.Tensor:
    """What a Z-Image transformer gives for random inputs: latents of 8x8, texts of 7 and 5 rows."""
    latents = [torch.randn(16, 1, 8, 8, generator=rng) for _ in range(2)]
    texts = [torch.randn(length, parts.backbone.config.cap_feat_dim, generator=rng) for length in (7, 5)]
    return torch.stack(parts.backbone(latents, torch.tensor([0.1, 0.9]), texts).sample)


@torch.no_grad()
def image(pipe: DiffusionPipeline, prompt: str = "a red star") -> torch.Tensor:
    rng = torch.Generator().manual_seed(3)
    if hasattr(pipe, "transformer"):
        noise = torch.randn(1, 16, pipe.transformer.config.in_channels, generator=rng)
        return pipe(prompt, height=64, width=64, num_inference_steps=2, latents=noise, max_sequence_length=16, output_type="pt").images
    noise = torch.randn(1, 4, 8, 8, generator=rng)
    return pipe(prompt, height=64, width=64, num_inference_steps=2, guidance_scale=3.0, latents=noise, output_type="pt").images
