"""Hold frozen networks in 8 bits: the linear layers of their blocks, one block at a time, with the error of each.

Layers around the blocks keep their precision: they are 0.2 % of a transformer's weights, and everything passes through them. Of Qwen2.5-VL
the visual part (8 %) stays as well, because its errors would be in every row that instructions on a picture share, and the embedding, which
is looked up and not multiplied.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import nn
from tqdm import tqdm

from sd_scripts.library.loading.weights import Finish

logger = logging.getLogger(__name__)

_BLOCKS = ("transformer_blocks", "model.language_model.layers", "noise_refiner", "context_refiner", "layers")
"""Lists of blocks, by their names in the networks that have them: Qwen-Image, Qwen2.5-VL, the refiners of Z-Image, Z-Image and Qwen3."""


def blocks_of(network: nn.Module) -> list[str]:
    """Names of the blocks whose linear layers are quantised."""
    lists = {name: module for name, module in network.named_modules() if name in _BLOCKS and isinstance(module, nn.ModuleList)}
    assert lists, f"{type(network).__name__} has no blocks that are known here"
    return [f"{name}.{number}" for name, module in lists.items() for number in range(len(module))]


@dataclass
class Report:
    """What quantising a network has done to its layers so far."""

    kind: str
    """qint8: whole numbers with a scale for each row of a weight. qfloat8: float8_e4m3fn with such scales."""
    label: str
    errors: dict[str, float] = field(default_factory=dict)
    """Relative error of each layer's weight, |quantised - weight| / |weight|, by its name in the network."""

    @torch.no_grad()
    def quantize(self, name: str, block: nn.Module) -> None:
        """Puts the linear layers of a block, called name, into 8 bits; they are frozen."""
        # Imported with the first use: it takes seconds.
        from optimum import quanto

        quanto.quantize(block, weights={"qint8": quanto.qint8, "qfloat8": quanto.qfloat8}[self.kind])
        for path, layer in block.named_modules():
            if isinstance(layer, quanto.QLinear):
                weight = layer.weight.float()
                self.errors[f"{name}.{path}"] = float((layer.qweight.dequantize().float() - weight).norm() / weight.norm())
        quanto.freeze(block)
        block.eval().requires_grad_(False)

    def log(self) -> None:
        """One line on the whole network, and one for each layer at level debug."""
        worst = max(self.errors, key=lambda name: self.errors[name])
        for name, error in self.errors.items():
            logger.debug("%s: %s of %s has a relative error of %.5f", self.kind, name, self.label, error)
        logger.info(
            "%s: %d layers of %s are held in 8 bits; relative error of their weights %.4f on average, at most %.4f (%s)",
            self.kind,
            len(self.errors),
            self.label,
            sum(self.errors.values()) / len(self.errors),
            self.errors[worst],
            worst,
        )


def quantize_network(network: nn.Module, kind: str) -> Report:
    """Quantises a network that is loaded, block by block, and logs the errors."""
    report = Report(kind, type(network).__name__)
    for name in tqdm(blocks_of(network), desc=f"quantising {report.label}", unit="block", leave=False, delay=1):
        report.quantize(name, network.get_submodule(name))
    report.log()
    return report


class Chosen(Protocol):
    """Options that say what is held in 8 bits."""

    transformer_quantization: Literal["none", "qint8", "qfloat8"]
    text_encoder_quantization: Literal["none", "qint8", "qfloat8"]


def chosen(options: Chosen, without: Collection[str]) -> dict[str, str]:
    """Kind of quantisation of each network that is quantised, but not of those named in `without`."""
    wanted = {"backbone": options.transformer_quantization, "te1": options.text_encoder_quantization}
    return {name: kind for name, kind in wanted.items() if kind != "none" and name not in without}


@contextmanager
def while_reading(networks: Mapping[str, nn.Module], kinds: Mapping[str, str]) -> Iterator[dict[str, tuple[list[str], Finish]]]:
    """What makes these networks smaller block by block while they are read within the block (see common.read_networks); logs afterwards.

    networks have no weights yet. kinds: the kind of each that is quantised.
    """
    reports = {name: Report(kind, type(networks[name]).__name__) for name, kind in kinds.items()}
    yield {name: (blocks_of(networks[name]), report.quantize) for name, report in reports.items()}
    for report in reports.values():
        report.log()


def quantize_chosen(networks: Mapping[str, nn.Module], kinds: Mapping[str, str]) -> None:
    """Quantises networks that are read already, each to the kind named for it."""
    for name, kind in kinds.items():
        quantize_network(networks[name], kind)


def is_quantized(network: nn.Module) -> bool:
    """Whether some layer of a network is held in 8 bits."""
    return any(type(layer).__module__.startswith("optimum.quanto") for layer in network.modules())
