"""Names of a model's layers in the worlds of kohya, diffusers and ComfyUI: what all families share.

Inside this package a layer is called `<module>.<layer>`: module is backbone, te1, te2 or te3, layer is the path of the module in the
diffusers or transformers class, for example `backbone.mid_block.attentions.0.proj_in`. Other tools name the layers of the backbone after
the original single-file layout, where one matrix may be several layers of diffusers (see `Target`).
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.loading.common import Config
from sd_scripts.library.loading.layouts import Stored

from .architectures import Architecture


@dataclass(frozen=True)
class Target:
    """What a name in a file stands for: one layer, or the rows of several in this order.

    shares: rows of each layer, in proportion. swapped: the two halves of the rows stand in the other order in the original layout.
    """

    layers: tuple[str, ...]
    shares: tuple[int, ...] = (1,)
    swapped: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether this is one layer, row for row."""
        return len(self.layers) == 1 and not self.swapped

    def sizes(self, rows: int) -> list[int]:
        """How many of the rows belong to each layer. Raises ValueError when they do not divide."""
        unit, rest = divmod(rows, sum(self.shares))
        if rest:
            raise ValueError(f"{rows} rows do not divide into {self.shares}")
        return [unit * share for share in self.shares]


class Names(Protocol):
    """What writing and reading files need to know about the layer names of one model."""

    architecture: Architecture
    layers: tuple[str, ...]
    """Every layer that can carry an adapter, in the order of the model."""
    idle: frozenset[str]
    """Layers whose output nothing reads. An adapter there does nothing and would be left without gradient."""

    def to_kohya(self, name: str) -> str:
        """`lora_unet_...`, `lora_te1_...`; for a layer of a fused target the name of the whole target."""
        ...

    def to_lycoris(self, name: str) -> str:
        """The layer's own name, `lycoris_transformer_blocks_0_attn_to_q`, where kohya's stands for more than this layer."""
        ...

    def to_diffusers(self, name: str) -> str:
        """`unet.<path>`, `transformer.<path>`, `text_encoder.<path>`, `text_encoder_2.<path>`."""
        ...

    def to_comfyui(self, name: str) -> str:
        """`diffusion_model.<original path>`, `text_encoders.<clip>.transformer.<path>`; for a fused layer the whole target."""
        ...

    def from_kohya(self, stem: str) -> Target | None:
        """What a kohya or LyCORIS name without its ending stands for, or None for one that this model does not have."""
        ...

    def from_diffusers(self, stem: str) -> Target | None: ...
    def from_comfyui(self, stem: str) -> Target | None: ...
    def find(self, stem: str) -> Target | None:
        """What a name of any trainer stands for."""
        ...

    def fused(self, name: str) -> Target | None:
        """The target of the original layout that a layer is part of, when that is more than the layer itself."""
        ...

    def together(self, name: str) -> tuple[str, ...]:
        """The layers, this one included, that one adapter of some file may stand for."""
        ...

    def block(self, name: str) -> int | None:
        """Number of the block of the backbone that a layer stands in; None outside of all blocks."""
        ...

    @property
    def num_blocks(self) -> int: ...


def text_encoder_name(layer: str) -> str:
    """The path that every other tool uses: transformers 5 dropped the `text_model.` level of one CLIP class, files keep it; T5 has none."""
    return f"text_model.{layer}" if layer.startswith("encoder.layers.") else layer


def adaptable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Linear and convolution layers of a model by path, the plain ones, whether or not they carry an adapter."""
    found: dict[str, nn.Module] = {}
    carriers: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            carriers.append(f"{name}.")
            found[name] = module.get_base_layer()
        elif carriers and name.startswith(carriers[-1]):
            continue
        elif isinstance(module, nn.Linear | nn.Conv2d):
            found[name] = module
    return found


def layers_of(parts: Parts) -> dict[str, nn.Module]:
    """The plain linear and convolution layers of backbone and text encoders, by `<module>.<layer>`."""
    return layers_in({"backbone": parts.backbone, **parts.text_encoders})


def layers_in(networks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The plain linear and convolution layers of networks by name, by `<module>.<layer>`."""
    return {f"{module}.{layer}": base for module, network in networks.items() for layer, base in adaptable_layers(network).items()}


def flat(path: str) -> str:
    """A path as kohya writes it."""
    return path.replace(".", "_")


class LayerNames(ABC):
    """The maps of one model, both ways; the way back is a look-up among the layers that the model really has."""

    def __init__(self, architecture: Architecture, config: Config, layers: Iterable[str]) -> None:
        """config is the backbone's; layers are names `<module>.<layer>`, of which those that may carry an adapter are taken."""
        self.architecture = architecture
        self.layers = tuple(name for name in layers if architecture.carries_adapters(name.partition(".")[0]))
        self.idle: frozenset[str] = frozenset()
        self._prefixes = prefixes = architecture.prefixes
        self._original: dict[str, str] = {}
        self._fused: dict[str, Target] = {}
        self._paths: dict[str, dict[str, Target]] = {module: {} for module in ("backbone", *prefixes.kohya)}
        self._place_backbone(self._stored(config))
        for name in self.layers:
            module, _, layer = name.partition(".")
            self._paths[module].setdefault(flat(layer), Target((name,)))
            if module != "backbone":
                self._paths[module][flat(text_encoder_name(layer))] = Target((name,))

    def _stored(self, config: Config) -> Callable[[str], Stored]:
        """The place of a backbone's tensor in the layout that kohya's and ComfyUI's names are from: the original one."""
        return self.architecture.spec.parts["backbone"].layout(config)

    def _place_backbone(self, stored: Callable[[str], Stored]) -> None:
        """Groups the backbone's layers by the matrix of the original layout that they are."""
        for path, target in matrices(stored, self.layers).items():
            self._original |= dict.fromkeys(target.layers, path)
            self._paths["backbone"][flat(path)] = target
            if not target.is_plain:
                self._fused |= dict.fromkeys(target.layers, target)

    def to_kohya(self, name: str) -> str:
        """See Names."""
        return _first(self._prefixes.kohya, name) + flat(self._kohya_path(name))

    def to_lycoris(self, name: str) -> str:
        """See Names."""
        module, _, layer = name.partition(".")
        return f"lycoris_{flat(layer)}" if module == "backbone" else self.to_kohya(name)

    def to_diffusers(self, name: str) -> str:
        """See Names."""
        module, _, layer = name.partition(".")
        return _first(self._prefixes.diffusers, name) + (layer if module == "backbone" else text_encoder_name(layer))

    def to_comfyui(self, name: str) -> str:
        """See Names."""
        return _first(self._prefixes.comfyui, name) + self.original_path(name)

    def original_path(self, name: str) -> str:
        """The path of a layer in the original layout; text encoders keep that of transformers."""
        return self._original[name] if name in self._original else text_encoder_name(name.partition(".")[2])

    def published_path(self, name: str) -> str:
        """The path of a layer in the published files; of a layer that is part of a matrix there, that of the matrix."""
        return self.original_path(name)

    def _kohya_path(self, name: str) -> str:
        return self.original_path(name)

    def from_kohya(self, stem: str) -> Target | None:
        """See Names."""
        return self._look_up(stem, self._prefixes.kohya)

    def from_diffusers(self, stem: str) -> Target | None:
        """See Names."""
        return self._look_up(stem, self._prefixes.diffusers)

    def from_comfyui(self, stem: str) -> Target | None:
        """See Names."""
        return self._look_up(stem, self._prefixes.comfyui)

    def find(self, stem: str) -> Target | None:
        """See Names. Also takes names without any prefix, as the first trainers wrote them."""
        found = self.from_kohya(stem) or self.from_diffusers(stem) or self.from_comfyui(stem)
        return found or self._paths["backbone"].get(flat(stem))

    def _look_up(self, stem: str, prefixes: Mapping[str, tuple[str, ...]]) -> Target | None:
        for module, starts in prefixes.items():
            paths = self._paths.get(module, {})
            for start in starts:
                if stem.startswith(start) and (target := paths.get(flat(stem[len(start) :]))) is not None:
                    return target
        return None

    def fused(self, name: str) -> Target | None:
        """See Names."""
        return self._fused.get(name)

    def together(self, name: str) -> tuple[str, ...]:
        """See Names."""
        target = self.fused(name)
        return (name,) if target is None else target.layers

    @abstractmethod
    def block(self, name: str) -> int | None:
        """See Names."""

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Number of blocks of the backbone."""


def matrices(stored: Callable[[str], Stored], layers: Iterable[str]) -> dict[str, Target]:
    """What each matrix of a layout is, by its path there: layers of the backbone among those named `<module>.<layer>`.

    stored gives the place of a backbone's tensor in that layout.
    """
    found: dict[str, list[tuple[str, Stored]]] = {}
    for name in layers:
        module, _, layer = name.partition(".")
        if module == "backbone":
            place = stored(f"{layer}.weight")
            found.setdefault(place.name.removesuffix(".weight"), []).append((name, place))
    targets = {}
    for path, members in found.items():
        members.sort(key=lambda member: member[1].rows)
        rows = [max(1, place.rows[1] - place.rows[0]) for _, place in members]
        # In lowest terms, so that they hold for a smaller model of the same form too.
        shares = tuple(count // math.gcd(*rows) for count in rows)
        targets[path] = Target(tuple(name for name, _ in members), shares, members[0][1].form == "swapped")
    return targets


def _first(prefixes: Mapping[str, tuple[str, ...]], name: str) -> str:
    return prefixes[name.partition(".")[0]][0]


_REST = re.compile(r"\.((?:lora|hada|lokr|oft)_[A-Za-z0-9_]+(?:\.weight)?)$")


def split_rest(key: str) -> tuple[str, str]:
    """`backbone.conv_in.lora_A.weight` -> (`backbone.conv_in`, `lora_A.weight`)."""
    match = _REST.search(key)
    if match is None:
        raise KeyError(key)
    return key[: match.start()], match[1]
