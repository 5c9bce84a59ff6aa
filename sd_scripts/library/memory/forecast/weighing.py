"""Measures on the meta device what a run's networks weigh and what its passes keep; `estimate` adds it up. Moves no weights."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from sd_scripts.families import FACTS
from sd_scripts.library.adapters.attaching import attach
from sd_scripts.library.adapters.full import train_whole
from sd_scripts.library.adapters.inject import all_adapter_tensors
from sd_scripts.library.core.blocks import blocks_of
from sd_scripts.library.core.copying import copied
from sd_scripts.library.core.devices import META
from sd_scripts.library.core.protocols import Condition, InHostRam, ModelFamily, Parts
from sd_scripts.library.loading.weights import Unfilled
from sd_scripts.library.memory.arranging import arrange
from sd_scripts.library.train.environment import DTYPES
from sd_scripts.library.train.optim import STATE_BYTES, make_optimizer
from sd_scripts.library.train.stepping import trained_dtype
from sd_scripts.library.train.trained import trained_encoders
from sd_scripts.runs.importing import building
from sd_scripts.schema.runs import RunOptions

from .accounting import AsOnDevice, Ledger, backward, bytes_of, optimizer_bytes, rounded
from .structure import conditions_of, latents_of
from .values import Bucket, Questions, Size

log = logging.getLogger("sd_scripts")

_NOT_ON_META = ("AdamW8bit", "PagedAdamW8bit", "Lion8bit", "Prodigy")
"""Optimizers that do not run on the meta device, so that what is known of their state counts."""


@dataclass(frozen=True)
class BlockWeight:
    """One of the blocks that can be swapped."""

    frozen: int
    """Bytes of weights that are not trained, adapters apart."""
    trained: int
    """Bytes of weights that are trained, adapters apart."""
    linear: tuple[tuple[int, int], ...]
    """(out, in) of the frozen linear layers, which can be held in fewer bits."""
    entry: int
    """Bytes of what the block is given in a forward pass and keeps when it is recomputed."""


@dataclass(frozen=True)
class Training:
    """What training has on its device, in bytes, with all weights there and in full."""

    frozen: int
    """Weights of the denoising network, and of an adapter for training alone, that are not trained."""
    tables: int
    """What layers keep in host RAM outside of their weights."""
    trained: int
    """Trained weights: the adapter, or the network itself."""
    num_trained: int
    optimizer: int
    """State of the optimizer after its first step."""
    optimizer_known: bool
    """Off for a class that only works on numbers, and counts as AdamW."""
    optimizer_step: int
    """What a step of the optimizer has besides."""
    gradients: int
    """Those of all trained weights together; 0 where each is let go of at once."""
    activations: int
    """The most that a forward and backward pass has besides weights, gradients included as far as they are there by then."""
    blocks: tuple[BlockWeight, ...]
    itemsize: int
    """Bytes of a number in the precision of the network."""


@dataclass
class Scales:
    """Measures one model in one precision. Each measurement takes seconds."""

    family: ModelFamily
    parts: Parts
    """The structure of the model, see structure.structure_of."""
    questions: Questions
    fused_attention: bool = True
    """Off for attention_backend math."""
    _sides: dict[Size, torch.Size] = field(default_factory=dict, init=False)

    def _mode(self, precision: torch.dtype | None) -> AsOnDevice:
        return AsOnDevice(precision, self.fused_attention)

    @cached_property
    def encoders(self) -> dict[str, int]:
        """Bytes of each text encoder."""
        return {name: bytes_of(encoder.parameters()) for name, encoder in self.parts.text_encoders.items()}

    def packed_encoder(self, name: str) -> int:
        """Bytes of a text encoder whose linear layers are held in 8 bits."""
        encoder = self.parts.text_encoders[name]
        layers = [layer for path, layer in encoder.named_modules() if isinstance(layer, nn.Linear) and "visual" not in path]
        spared = sum(layer.weight.numel() * (layer.weight.itemsize - 1) for layer in layers)
        return int(self.encoders[name] - spared)

    @cached_property
    def vae(self) -> int:
        """Bytes of the VAE."""
        return bytes_of(self.parts.vae.parameters())

    def encoding(self, size: Size, batch: int) -> int:
        """The most that the VAE has besides its weights while it encodes images of this size."""
        with self._mode(None), Ledger() as ledger:
            self._sides[size] = latents_of(self.family, self.parts, size, batch).shape
        return int(ledger.peak)

    def reading(self, batch: int) -> int:
        """The most that text encoders have besides their weights while they read the longest captions, one encoder after the other."""
        return max((self._reading(name, batch) for name in self.parts.text_encoders), default=0)

    def _reading(self, name: str, batch: int) -> int:
        with torch.no_grad(), self._mode(None), Ledger() as ledger:
            self.family.read_like(self.parts, name, self.questions.caption, batch)
        return int(ledger.peak)

    def latents(self, size: Size, batch: int) -> Tensor:
        """Latents (batch, C, h, w) of images of this size."""
        if size not in self._sides:
            with self._mode(None), Ledger():
                self._sides[size] = latents_of(self.family, self.parts, size, 1).shape
        return torch.empty(batch, *self._sides[size][1:], device=META)

    def _conditions(self, parts: Parts, size: Size, batch: int, controls: Sequence[Size]) -> list[Condition]:
        """What a batch is conditioned on, with latents of control images of these sizes."""
        told = {f"control_{index}": self.latents(control, 1)[0] for index, control in enumerate(controls)}
        with self._mode(None), Ledger():
            return conditions_of(self.family, parts, size, batch, self.questions.caption, told)

    def drawing(self, size: Size, batch: int, cfg_scale: float, controls: Sequence[Size]) -> int:
        """The most that a preview's steps have besides weights. controls: (width, height) of its control images."""
        both = 2 if cfg_scale not in (0, 1) and FACTS[self.family.name].network.guided_together else 1
        with torch.no_grad(), self._mode(None):
            latents = self.latents(size, batch)
            conditions = self._conditions(self.parts, size, batch * both, controls)
            with Ledger() as ledger:
                self.family.denoise(self.parts, latents.repeat(both, 1, 1, 1), torch.rand(batch * both), conditions)
        return int(ledger.peak)

    def decoding(self, size: Size, batch: int) -> int:
        """The most that the VAE has besides its weights while it decodes images of this size."""
        with torch.no_grad(), self._mode(None), Ledger() as ledger:
            self.family.decode(self.parts, self.latents(size, batch))
        return int(ledger.peak)

    def _copied(self, options: RunOptions) -> Parts:
        """The model with copies of the networks that training changes."""
        encoders = {name: self.parts.text_encoders[name] for name in trained_encoders(options, self.parts)}
        # At once, since a training adapter knows the layers that it stands on.
        asked = (self.parts.backbone, encoders, self.parts.training_adapter)
        backbone, encoders, adapter = copied(asked, (self.parts.backbone, *encoders.values()))
        return replace(self.parts, backbone=backbone, text_encoders={**self.parts.text_encoders, **encoders}, training_adapter=adapter)

    def training(self, options: RunOptions, bucket: Bucket) -> Training:
        """What a step of a batch of this bucket takes, all weights on the device and in full.

        options: without swapping, quantisation, offloaded activations and compilation.
        """
        with building():
            parts = self._copied(options)
            if options.method == "network":
                targets = self.family.adapter_targets(parts, options.adapter.wants_convolutions)
                # Else each matrix of the adapter would be filled with zeros on the CPU first.
                with META, Unfilled():
                    network: Any = attach(parts, options.adapter, targets, options.training.seed)
            else:
                network = train_whole(parts, options.whole, self.family, trained_dtype(options.memory))
            arrange(parts, options, META)
            network.train()
        weights: list[nn.Parameter] = [weight for weight in network.named_parameters().values() if weight.requires_grad]
        groups = network.parameter_groups(options.network, options.optimizer.learning_rate)
        state, in_step, known = _optimizer(options, groups, weights)
        own, adapters = {id(weight) for weight in weights}, {id(tensor): tensor for tensor in all_adapter_tensors(parts.backbone)}
        frozen = {id(weight): weight for weight in parts.backbone.parameters()} | adapters
        entries, activations = self._pass(options, parts, weights, bucket)
        return Training(
            frozen=bytes_of(weight for key, weight in frozen.items() if key not in own),
            tables=bytes_of(tensor for module in parts.backbone.modules() for tensor in _in_host_ram(module)),
            trained=bytes_of(weights),
            num_trained=sum(weight.numel() for weight in weights),
            optimizer=state,
            optimizer_known=known,
            optimizer_step=in_step,
            gradients=0 if options.memory.steps_in_backward else bytes_of(weights),
            activations=activations,
            blocks=tuple(weight_of(block, adapters.keys(), own, entries[name]) for name, block in blocks_of(parts.backbone).items()),
            itemsize=DTYPES[options.training.mixed_precision].itemsize,
        )

    def _pass(self, options: RunOptions, parts: Parts, weights: Sequence[nn.Parameter], bucket: Bucket) -> tuple[dict[str, int], int]:
        """Bytes that each block is given, and the most that a forward and backward pass has."""
        batch = options.dataset.train_batch_size
        entries: dict[str, int] = {}
        hooks = [
            block.register_forward_pre_hook(_noting(entries, name), with_kwargs=True) for name, block in blocks_of(parts.backbone).items()
        ]
        fused = options.memory.steps_in_backward
        hooks += [weight.register_post_accumulate_grad_hook(_let_go) for weight in weights] if fused else []
        precision = DTYPES[options.training.mixed_precision]
        mode = self._mode(None if precision is torch.float32 else precision)
        with mode:
            with torch.no_grad():
                latents = self.latents(bucket.size, batch)
                conditions = self._conditions(parts, bucket.size, batch, bucket.controls)
            with Ledger() as ledger:
                if options.training.gradient_accumulation_steps > 1:
                    for weight in weights:
                        weight.grad = torch.empty_like(weight)
                with mode.autocast():
                    prediction = self.family.denoise(parts, latents, torch.rand(batch), conditions)
                    loss = nn.functional.mse_loss(prediction.float(), torch.empty_like(latents), reduction="none").mean()
                    for name in trained_encoders(options, parts):
                        loss = loss + self.family.read_like(parts, name, self.questions.caption, batch).float().mean()
                backward(loss)
                if not fused:
                    # What no gradient reaches gets one of zeros.
                    for weight in weights:
                        weight.grad = torch.empty_like(weight) if weight.grad is None else weight.grad
        for hook in hooks:
            hook.remove()
        for weight in weights:
            weight.grad = None
        return {name: entries.get(name, 0) for name in blocks_of(parts.backbone)}, int(ledger.peak)


def _optimizer(options: RunOptions, groups: Sequence[dict[str, Any]], weights: Sequence[Tensor]) -> tuple[int, int, bool]:
    """Bytes of the optimizer's state, and of what a step has besides; and whether they are known."""
    optimizer = options.optimizer
    if optimizer.optimizer_type in _NOT_ON_META:
        known = STATE_BYTES[optimizer.optimizer_type]
        # Small weights stay in 32 bits.
        return sum(rounded(int(known * weight.numel())) if weight.numel() >= 4096 else 8 * weight.numel() for weight in weights), 0, True
    if optimizer.optimizer_type == "AdamW":
        # Fused kernels keep nothing besides; the meta device has none.
        more = (*(one for one in optimizer.optimizer_args if not one.startswith(("fused", "foreach"))), "fused=False", "foreach=False")
        optimizer = optimizer.model_copy(update={"optimizer_args": more})
        # It looks at one weight at a time, and those of one shape are alike.
        alike = Counter((weight.shape, weight.dtype) for weight in weights)
        one_each = {(weight.shape, weight.dtype): weight for weight in weights}
        state = (optimizer_bytes(partial(make_optimizer, optimizer, [{"params": [one]}]), [one])[0] for one in one_each.values())
        return sum(count * size for count, size in zip(map(alike.__getitem__, one_each), state)), 0, True
    try:
        return *optimizer_bytes(lambda: make_optimizer(optimizer, groups), weights), True
    except (RuntimeError, NotImplementedError, TypeError):
        # A class of the user's own that computes with numbers.
        return int(STATE_BYTES["AdamW"] * sum(weight.numel() for weight in weights)), 0, False


def _in_host_ram(module: nn.Module) -> list[Tensor]:
    """What a module keeps there. Its class is looked at first, because to ask each of thousands for a protocol takes long."""
    return module.host_tensors if hasattr(type(module), "host_tensors") and isinstance(module, InHostRam) else []


def _let_go(weight: Tensor) -> None:
    weight.grad = None


def _noting(entries: dict[str, int], name: str) -> Callable[..., None]:
    """Writes down the bytes of what a block is given that has a gradient."""

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.requires_grad]
        entries.setdefault(name, bytes_of(given))

    return note


def weight_of(block: nn.Module, apart: Set[int], trained: Set[int], entry: int) -> BlockWeight:
    """apart: ids of adapters' tensors, which no block counts as its own; trained: ids of trained weights."""
    own = [weight for weight in block.parameters() if id(weight) not in apart]
    linear = [layer for layer in block.modules() if isinstance(layer, nn.Linear) and not {id(layer.weight)} & (apart | trained)]
    return BlockWeight(
        frozen=bytes_of(weight for weight in own if id(weight) not in trained),
        trained=bytes_of(weight for weight in own if id(weight) in trained),
        linear=tuple((layer.out_features, layer.in_features) for layer in linear),
        entry=entry,
    )
