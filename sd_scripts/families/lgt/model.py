"""Style transfer in the latents of a VAE: how a style is told to the network, how it denoises, and images drawn from noise.

Shapes: B samples, C latent channels, h w latent sides, S styles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from sd_scripts.dataset.plan import Plan
from sd_scripts.families.common.made import MadeFamily
from sd_scripts.families.common.tiny import made_once
from sd_scripts.library.core.protocols import (
    EDGES,
    Beginning,
    Condition,
    DeviceMap,
    Dtypes,
    Kind,
    Objective,
    OnStep,
    Parts,
    Preview,
    Samples,
    Version,
    dtype_of,
)
from sd_scripts.library.core.protocols import Path as DiffusionPath
from sd_scripts.library.core.rng import rng_for
from sd_scripts.library.loading.common import config_of
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.errors import OptionError, Problem

from . import edges, loading
from .energy import Energy
from .options import Lgt as LgtRun
from .options import LgtModelOptions, LgtObjectiveOptions

if TYPE_CHECKING:
    from .evaluation import Data, Sources

STYLE = "style"
"""Entry of a condition with the weights (S + 1,) of the rows of the table of styles; the last row is the average of all styles."""
AVERAGE = "average"
"""What people write for no style in particular, where a data set has no style of this name."""


class Lgt(MadeFamily):
    """The family of models that were trained on folders of styles; see protocols.NewFamily. A prompt is a style's name, or a mixture."""

    name: ClassVar[str] = "lgt"
    grid: ClassVar[int] = LgtModelOptions.grid
    file_names: ClassVar[tuple[str, ...]] = (loading.STYLES,)

    def files(self, options: LgtModelOptions, captions: Collection[str]) -> dict[str, str]:
        """The names of the styles, in the order of their rows."""
        return {loading.STYLES: loading.styles_text(captions)}

    def build(
        self, options: LgtModelOptions, beginning: Beginning, device: torch.device, dtype: Dtypes, without: Collection[str] = ()
    ) -> Parts:
        """A model with random weights, frozen and in eval mode; see protocols.NewFamily."""
        return loading.build(options, beginning, device, dtype, without)

    def check_sizes(self, parts: Parts, sizes: Collection[tuple[int, int]]) -> None:
        """Raises OptionError when the U-Net cannot halve images (width, height) of all these sizes as often as it does."""
        loading.check_sizes(sizes, len(parts.backbone.config.block_out_channels), config_of(parts.vae))

    def check_captions(self, parts: Parts, captions: Collection[str]) -> None:
        """Raises OptionError unless these, the styles of a data set, are those of the model."""
        loading.check_styles(parts, captions)

    def sources(self, options: LgtRun, plan: Plan, cache_folder: Path) -> Sources:
        """The images that evaluations transfer; see protocols.EvaluatingFamily."""
        from .evaluation import sources_of

        return sources_of(options.samples, options.dataset, plan, cache_folder)

    def evaluation(
        self,
        parts: Parts,
        options: LgtRun,
        plan: Plan,
        sources: Sources,
        data: Data,
        run: RunDirectory,
        saves: bool,
        agreed: Callable[[list[int]], list[int]],
        progress: Callable[[], None],
    ) -> Samples:
        """Images of every style in every other style, and what is measured of them; see protocols.EvaluatingFamily."""
        from .evaluation import Evaluation

        shown, seed, tiled = options.samples, options.training.seed, options.memory.vae_tiling
        return Evaluation(self, parts, shown, options.dataset, plan, sources.items, data, run, seed, saves, agreed, progress, tiled)

    def load(self, options: LgtModelOptions, device: DeviceMap, dtype: Dtypes, without: Collection[str] = ()) -> Parts:
        """Loads all parts of a saved model on `device`; see protocols.ModelFamily."""
        return loading.load(options, device, dtype, without)

    def version(self, parts: Parts) -> Version:
        """See ModelFamily."""
        return loading.VERSION

    @made_once
    def tiny(self) -> Parts:
        """A model in the latents of the built-in VAE with two levels and random (seeded) weights, float32, on the CPU, in eval mode.

        Its last layer is not zero, so that its velocity depends on everything that it is told.
        """
        options = LgtModelOptions(
            vae="toy", base_channels=16, channel_multipliers=(1, 2), layers_per_block=1, attention_levels=(1,), attention_head_dim=8
        )
        beginning = Beginning(0, ((64, 64),), self.files(options, ("flat", "line", "night")))
        parts = self.build(options, beginning, torch.device("cpu"), torch.float32)
        last = parts.backbone.conv_out
        last.weight.copy_(torch.randn(last.weight.shape, generator=rng_for(0, 0, "tiny")) * math.sqrt(1 / last.weight[0].numel()))
        return parts

    def objective(
        self,
        options: LgtObjectiveOptions,
        path: DiffusionPath,
        kind: Kind,
        scheduler_config: Mapping[str, Any] = MappingProxyType({}),
        colours: Tensor | None = None,
    ) -> Objective:
        """The energy of transferred latents; see protocols.ModelFamily."""
        assert kind == "velocity", f"the energy is of networks that predict a velocity, not {kind}"
        return Energy(path, options)

    def texts_like(self, parts: Parts, caption: str, batch: int, num_controls: int) -> list[Condition]:
        """The style that the caption names; see protocols.ModelFamily."""
        return self.encode_prompts(parts, [caption] * batch)

    def read_like(self, parts: Parts, name: str, caption: str, batch: int) -> Tensor:
        """Never asked for: styles are rows of a table, and there is no text encoder."""
        raise AssertionError(name)

    def encode_prompts(self, parts: Parts, captions: Sequence[str], encoders: Collection[str] | None = None) -> list[Condition]:
        """The weights of the table's rows for each name of a style, or mixture of several; see style_weights."""
        return [{STYLE: style_weights(parts, caption)} for caption in captions]

    def denoise(self, parts: Parts, x_t: Tensor, t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The velocity, noise - x0, at canonical times t (B,); same shape as x_t, float32, or float64 if x_t is.

        Sides are multiples of 2 ** (levels - 1).
        """
        parts.bring(parts.backbone)
        dtype = dtype_of(parts.backbone)
        weights = torch.stack([condition[STYLE] for condition in conditions]).to(x_t.device, dtype)
        clock = parts.path.model_times(t).to(x_t.device)
        known = self._with_edges(parts, x_t, conditions).to(dtype)
        velocity: Tensor = parts.backbone(known, clock, class_labels=weights, return_dict=False)[0]
        return velocity.to(torch.promote_types(x_t.dtype, torch.float32))

    def takes_edges(self, parts: Parts) -> bool:
        """Whether the network is told where the edges of an image are."""
        return bool(parts.backbone.config.in_channels > parts.backbone.config.out_channels)

    def edge_map(self, parts: Parts, latents: Tensor) -> Tensor:
        """Where the edges of what latents (B, C, h, w) show are, as the network is told of them."""
        scale = loading.edge_scale(parts.backbone)
        return edges.edge_map(latents) if scale == 1 else edges.fine_edge_map(parts.backbone.sketch(latents), scale)

    def _with_edges(self, parts: Parts, x_t: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """The network's input: x_t, with the maps of edges as further channels in models with edge conditioning; zeros are none."""
        if not self.takes_edges(parts):
            return x_t
        none = x_t.new_zeros(parts.backbone.config.in_channels - x_t.shape[1], *x_t.shape[-2:])
        return torch.cat([x_t, torch.stack([condition.get(EDGES, none).to(x_t) for condition in conditions])], dim=1)

    def save(self, parts: Parts, path: Path, save_model_as: str, dtype: torch.dtype | None, metadata: Mapping[str, str]) -> None:
        """Writes everything that transfer needs, in dtype or as it is: `safetensors` is one file, `diffusers` a folder."""
        loading.save(parts, path, save_model_as, dtype, metadata)

    @torch.no_grad()
    def render(self, parts: Parts, requests: Sequence[Preview], on_step: OnStep | None = None) -> Tensor:
        """Images (B, 3, H, W) in [-1, 1], float32, of requests of equal settings, drawn from noise of their seeds in the style that each
        prompt names."""
        from .transfer import render

        return render(self, parts, requests, on_step)


def style_weights(parts: Parts, text: str, option: str = "style") -> Tensor:
    """(S + 1,) float32 weights of the rows of the table of styles: one row for a name, the last for the empty text or `average`.

    Several with weights are mixed, such as `monet 0.7, ukiyo-e 0.3`; a name alone has weight 1, and the weights are divided by their sum.
    Raises OptionError, with the names there are, for a name that is none, and for weights that cannot be mixed.
    """
    names: tuple[str, ...] = parts.settings["styles"]
    rows = {AVERAGE: len(names), "": len(names)} | {name: row for row, name in enumerate(names)}
    found = torch.zeros(len(names) + 1)
    pieces = [text.strip()] if text.strip() in rows else [piece.strip() for piece in text.split(",")]
    for piece in pieces:
        name, weight = _piece(piece, rows)
        if name not in rows or (not name and len(pieces) > 1):
            raise OptionError(
                Problem(option, f"{option}: the model {parts.source} knows no style {name!r}; there are {', '.join((*names, AVERAGE))}")
            )
        if not (math.isfinite(weight) and weight >= 0):
            raise OptionError(Problem(option, f"{option}: {piece!r} has the weight {weight:g}; weights are numbers from 0 on"))
        found[rows[name]] += weight
    if not found.sum() > 0:
        raise OptionError(Problem(option, f"{option}: the weights of {text!r} are all 0; give one style a weight above 0"))
    return found / found.sum()


def _piece(piece: str, rows: Mapping[str, int]) -> tuple[str, float]:
    """Name and weight in a piece of a mixture; a name may itself end in a number."""
    if piece in rows:
        return piece, 1.0
    name, _, number = piece.rpartition(" ")
    try:
        return (name.strip(), float(number)) if name.strip() else (piece, 1.0)
    except ValueError:
        return piece, 1.0


FAMILY = Lgt()
