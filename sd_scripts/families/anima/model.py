"""Anima: how it reads captions and denoises. A text conditioner makes rows of T5's tokens and Qwen3's states, and the transformer's image
tokens look at them.

Shapes: B samples, h w latent sides (an eighth of H W, the image's), L text tokens, D text width. Latents have 16 channels; 2 x 2 of them
are a token.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import torch
from diffusers import AnimaTextConditioner
from torch import Tensor

from sd_scripts.families.common import structures
from sd_scripts.families.common.comfyui_levels import FlowLevels, Graph
from sd_scripts.families.common.double_stream import tiny_t5_tokenizer
from sd_scripts.families.common.qwen3 import tiny_qwen3
from sd_scripts.families.common.qwen3vl import tell_of_cut
from sd_scripts.families.common.qwen_vae import QwenVaeFamily, tiny_qwen_vae
from sd_scripts.families.common.tiny import tiny_parts
from sd_scripts.families.common.tiny_words import tiny_qwen_tokenizer
from sd_scripts.families.common.transformer_loading import Loader, scheduler_in
from sd_scripts.families.common.transformers import TransformerFamily
from sd_scripts.library.core.devices import META
from sd_scripts.library.core.protocols import Condition, Parts, dtype_of

from .loading import LOADER, SPEC, save_file
from .network import AnimaTransformer
from .options import AnimaModelOptions


class Anima(QwenVaeFamily, TransformerFamily):
    """The Anima family; see protocols.ModelFamily."""

    name: ClassVar[str] = "anima"
    grid: ClassVar[int] = AnimaModelOptions.grid
    loader: ClassVar[Loader] = LOADER
    adapted: ClassVar[Mapping[str, str]] = {"backbone": r"^transformer_blocks\.", "te1": r"^layers\.", "te2": r"^blocks\."}
    graph: ClassVar[Graph] = Graph("simple", FlowLevels(3.0))

    def tiny(self) -> Parts:
        """See protocols.ModelFamily."""
        words, tokens = tiny_qwen_tokenizer([]), tiny_t5_tokenizer()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            shape = {"num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 16, "adaln_lora_dim": 8, "text_embed_dim": 24}
            same = {"rope_scale": (1.0, 4.0, 4.0), "extra_pos_embed_type": None}
            networks = {
                "backbone": AnimaTransformer(mlp_ratio=2.0, **shape, **same),
                "vae": tiny_qwen_vae(),
                "te1": tiny_qwen3(words),
                "te2": AnimaTextConditioner(32, 24, 32, 2, 2, 2.0, target_vocab_size=len(tokens), min_sequence_length=32),
            }
        settings = {"max_token_length": 32, "model_version": SPEC.label}
        return tiny_parts(networks, {"te1": words, "te2": tokens}, scheduler_in(SPEC.configs), settings)

    def texts_like(self, parts: Parts, caption: str, batch: int, num_controls: int) -> list[Condition]:
        """text, filled up; see protocols.ModelFamily."""
        conditioner = parts.text_encoders["te2"].config
        return structures.texts_of(parts, batch, {"text": (conditioner.min_sequence_length, conditioner.target_dim)})

    def read_like(self, parts: Parts, name: str, caption: str, batch: int) -> Tensor:
        """What Qwen3 makes of captions, or the conditioner of that; see protocols.ModelFamily."""
        length, encoder = min(parts.settings["max_token_length"], structures.num_tokens(caption) + 1), parts.text_encoders[name]
        if name == "te1":
            return structures.read(encoder, batch, length)
        states = torch.empty(batch, length, encoder.config.source_dim, device=META, dtype=dtype_of(encoder))
        rows: Tensor = encoder(states, torch.zeros(batch, length, dtype=torch.long, device=META))
        return rows

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """Text part of each caption's condition, text (L, D), in the encoders' precision: the conditioner's row for each of T5's tokens,
        which has looked at Qwen3's states of the caption, filled up with zeros, which the transformer sees, to a number that it was trained
        with. Each caption is encoded alone. Runs with gradient when grad mode is on."""
        states = [self._states(parts, caption) for caption in captions]
        conditioner, limit = parts.text_encoders["te2"], parts.settings["max_token_length"]
        device, conditions = parts.bring(conditioner), []
        for caption, seen in zip(captions, states, strict=True):
            tokens = parts.tokenizers["te2"](caption, truncation=True, max_length=limit).input_ids
            # Its norms do not take what an autocast makes of the layers before them.
            with torch.autocast(device.type, enabled=False):
                rows = conditioner(seen.to(device, dtype_of(conditioner)), torch.tensor([tokens], device=device))
            conditions.append({"text": rows[0]})
        return conditions

    def _states(self, parts: Parts, caption: str) -> Tensor:
        """Qwen3's last states of a caption, (1, L, D). An empty one has no token; of zeros the conditioner takes nothing, as where
        diffusers hides all of them."""
        encoder, limit = parts.text_encoders["te1"], parts.settings["max_token_length"]
        ids, device = parts.tokenizers["te1"](caption).input_ids, parts.bring(encoder)
        if len(ids) > limit:
            tell_of_cut(limit)
        if not ids:
            return torch.zeros(1, 1, encoder.config.hidden_size, device=device)
        states: Tensor = encoder(input_ids=torch.tensor([ids[:limit]], device=device), use_cache=False).last_hidden_state
        return states

    def denoise(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The network's velocity noise - x0 at canonical times t (B,); same shape as x_t (B, 16, h, w), float32.

        Times reach their embedding in float32, whatever the precision of the network.
        """
        network, dtype = parts.backbone, dtype_of(parts.backbone)
        parts.bring(network)
        text = torch.stack([condition["text"] for condition in conditions])
        prediction: Tensor = network(x_t.to(dtype), t.to(x_t.device, torch.float32), text.to(x_t.device, dtype))
        return prediction.float()

    def save(self, parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
        """Writes the model: safetensors is transformer and conditioner in the published layout, diffusers a folder with everything."""
        if save_model_as == "diffusers":
            super().save(parts, path, save_model_as, dtype, metadata)
        else:
            save_file(parts, path, dtype, metadata)


FAMILY = Anima()
