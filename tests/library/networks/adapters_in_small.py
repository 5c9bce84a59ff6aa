"""A tiny SDXL model, adapters with random values of visible effect, and pipelines that run it."""

from __future__ import annotations

import torch
from diffusers import StableDiffusionXLPipeline

from sd_scripts.library.families.sdxl import Sdxl
from sd_scripts.library.networks import Network, attach
from sd_scripts.library.protocols import Parts
from sd_scripts.schema.network import UNetNetworkOptions
from tests.small_models import pipeline_of

FAMILY = Sdxl()


def attached(parts: Parts, options: UNetNetworkOptions, seed: int = 0) -> Network:
    conv = options.conv_dim is not None or bool(options.conv_block_dims)
    return attach(parts, options, FAMILY.adapter_targets(parts, conv), seed)


def shaken(network: Network, seed: int = 1) -> Network:
    """Random values in every tensor, large enough that the picture changes and small enough that it stays a picture."""
    rng = torch.Generator().manual_seed(seed)
    state = network.state()
    for key, tensor in state.items():
        noise = torch.randn(tensor.shape, generator=rng)
        state[key] = tensor * (1 + 0.1 * noise) if "magnitude" in key else 0.3 * noise
    network.load(state)
    return network


def render(parts: Parts, prompt: str = "a red star") -> torch.Tensor:
    """A picture (1, 3, 64, 64) in [0, 1] by diffusers' own pipeline."""
    return picture(pipeline_of(parts), prompt)


@torch.no_grad()
def outputs(parts: Parts, seed: int = 2) -> torch.Tensor:
    """What the UNet and both text encoders give for random inputs, in one row of numbers."""
    rng = torch.Generator().manual_seed(seed)
    size = 6 * 8 + 20
    added = {"text_embeds": torch.randn(2, 20, generator=rng), "time_ids": torch.full((2, 6), 64.0)}
    assert parts.backbone.config.projection_class_embeddings_input_dim == size
    noise, text = torch.randn(2, 4, 8, 8, generator=rng), torch.randn(2, 7, 40, generator=rng)
    found = [parts.backbone(noise, torch.tensor([10, 900]), text, added_cond_kwargs=added).sample]
    ids = torch.randint(0, 500, (2, 12), generator=rng)
    found += [encoder(ids, output_hidden_states=True).hidden_states[-2] for encoder in parts.text_encoders.values()]
    return torch.cat([values.flatten() for values in found])


@torch.no_grad()
def picture(pipe: StableDiffusionXLPipeline, prompt: str = "a red star") -> torch.Tensor:
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    return pipe(prompt, height=64, width=64, num_inference_steps=2, guidance_scale=3.0, latents=noise, output_type="pt").images
