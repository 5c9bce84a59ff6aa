"""Hold frozen networks in 8 or 4 bits: the linear layers of their blocks, one block at a time, with the error of each.

Layers around the blocks keep their precision: they are 0.2 % of a transformer's weights, and everything passes through them. So do the
convolutions of a U-Net, inside of its blocks too. Of a text encoder that sees, the visual part (8 %) stays as well, because its errors
would be in every row that instructions on an image share, and embeddings, which are looked up and not multiplied.

qint8 and qfloat8 are those of optimum-quanto, fp8 and nf4 are our own (packed.py).
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from sd_scripts.dataset.progress import Bar
from sd_scripts.library.core import blocks
from sd_scripts.library.loading.weights import Finish
from sd_scripts.schema.model import BaseModelOptions, Quantization

from . import packed

logger = logging.getLogger(__name__)

_BLOCKS = ("model.language_model.layers", "language_model.layers", "layers", "encoder.block")
"""Lists of blocks, by their names in transformers' text encoders."""


def blocks_of(network: nn.Module) -> list[str]:
    """Names of the blocks whose linear layers are quantised."""
    if found := blocks.blocks_of(network):
        return list(found)
    lists = {name: module for name, module in network.named_modules() if name in _BLOCKS and isinstance(module, nn.ModuleList)}
    assert lists, f"{type(network).__name__} has no blocks that are known here"
    return [f"{name}.{number}" for name, module in lists.items() for number in range(len(module))]


@dataclass
class QuantizationReport:
    """What quantising a network has done to its layers so far."""

    kind: str
    """qint8: whole numbers with a scale for each row of a weight. qfloat8: float8_e4m3fn with such scales. fp8, nf4: see packed.py."""
    label: str
    errors: dict[str, float] = field(default_factory=dict)
    """Relative error of each layer's weight, |quantised - weight| / |weight|, by its name in the network."""

    @torch.no_grad()
    def quantize(self, name: str, block: nn.Module) -> None:
        """Puts the linear layers of a block, called name, into few bits; they are frozen."""
        if self.kind in ("fp8", "nf4"):
            errors = packed.pack_layers(block, self.kind)
        else:
            errors = self._by_quanto(block)
        self.errors |= {f"{name}.{path}": error for path, error in errors.items()}
        block.eval().requires_grad_(False)

    def _by_quanto(self, block: nn.Module) -> dict[str, float]:
        # Imported with the first use: it takes seconds.
        from optimum import quanto

        linear = [path for path, layer in block.named_modules() if type(layer) is nn.Linear and _fits(layer, self.kind)]
        if not linear:
            return {}
        quanto.quantize(block, weights={"qint8": quanto.qint8, "qfloat8": quanto.qfloat8}[self.kind], include=linear)
        errors = {}
        for path in linear:
            layer = block.get_submodule(path)
            weight = layer.weight.float()
            errors[path] = float((layer.qweight.dequantize().float() - weight).norm() / weight.norm())
        quanto.freeze(block)
        return errors

    def log(self) -> None:
        """One line on the whole network, and one for each layer at level debug."""
        worst = max(self.errors, key=lambda name: self.errors[name])
        for name, error in self.errors.items():
            logger.debug("%s: %s of %s has a relative error of %.5f", self.kind, name, self.label, error)
        logger.info(
            "%s: %d layers of %s are held in %d bits; relative error of their weights %.4f on average, at most %.4f (%s)",
            self.kind,
            len(self.errors),
            self.label,
            4 if self.kind == "nf4" else 8,
            sum(self.errors.values()) / len(self.errors),
            self.errors[worst],
            worst,
        )


def _fits(layer: nn.Linear, kind: str) -> bool:
    """Whether a layer may be held so: torch's product of bf16 and int8 on a CPU crashes the process at other widths, which only very small
    networks have."""
    return kind != "qint8" or layer.in_features % 16 == 0


def quantize_network(network: nn.Module, kind: str) -> QuantizationReport:
    """Quantises a network that is loaded, block by block, and logs the errors."""
    report = QuantizationReport(kind, type(network).__name__)
    for name in Bar(blocks_of(network), desc=f"quantising {report.label}", unit="block", leave=False, delay=1):
        report.quantize(name, network.get_submodule(name))
    report.log()
    return report


def chosen(options: BaseModelOptions, encoder: str | None, without: Collection[str]) -> dict[str, Quantization]:
    """Kind of quantisation of each network that is quantised, but not of those named in `without`. encoder: the text encoder that
    text_encoder_quantization is about, if there is that option."""
    wanted: dict[str, Quantization] = {"backbone": options.transformer_quantization}
    if encoder is not None:
        wanted[encoder] = options.text_encoder_quantization  # type: ignore[attr-defined]
    return {name: kind for name, kind in wanted.items() if kind != "none" and name not in without}


@contextmanager
def while_reading(networks: Mapping[str, nn.Module], kinds: Mapping[str, str]) -> Iterator[dict[str, tuple[list[str], Finish]]]:
    """What makes these networks smaller block by block while they are read within the block (see common.read_networks); logs afterwards.

    networks have no weights yet. kinds: the kind of each that is quantised.
    """
    reports = {name: QuantizationReport(kind, type(networks[name]).__name__) for name, kind in kinds.items()}
    yield {name: (blocks_of(networks[name]), report.quantize) for name, report in reports.items()}
    for report in reports.values():
        report.log()


def quantize_chosen(networks: Mapping[str, nn.Module], kinds: Mapping[str, str]) -> None:
    """Quantises networks that are read already, each to the kind named for it."""
    for name, kind in kinds.items():
        quantize_network(networks[name], kind)


def is_quantized(network: nn.Module) -> bool:
    """Whether some layer of a network is held in few bits."""
    return any(isinstance(layer, packed.PackedLinear) or type(layer).__module__.startswith("optimum.quanto") for layer in network.modules())
