"""How much memory of a device a run will take, before it starts: each part of it while it caches, trains and draws previews.

Weights, optimizer and passes are measured on the meta device (see `weighing`), with the model's own networks and the run's own options;
what only moves or packs weights is arithmetic on top of that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from sd_scripts.schema.network import NetworkOptions
from sd_scripts.schema.runs import RunOptions

from ..families.pictures import TILE
from ..protocols import ModelFamily, Parts
from ..swapping import spread
from ..trained import dtypes_of_run, trained_encoders
from .accounting import rounded
from .structure import Structure, has_training_adapter, structure_of
from .values import GIB, WORKSPACE, Bucket, Forecast, Phase, Questions, phase
from .weighing import Scales, Training

_BYTES = {"qint8": 1.0, "qfloat8": 1.0, "fp8": 1.0, "nf4": 0.5625}
"""Of a weight that is held in fewer bits, scales of nf4's blocks of 64 included."""
_SCALED_ROWS = ("qint8", "qfloat8")
_MADE_ANEW = {"qint8": 2.0, "qfloat8": 2.0, "fp8": 1.0, "nf4": 5.0}
"""Bytes, in those of the network's precision, that a weight takes while it is made anew from few bits; nf4 goes through float32."""


class Forecaster:
    """Forecasts of one run under different options; what was measured once is not measured again."""

    def __init__(
        self,
        family: ModelFamily,
        questions: Questions,
        resolution: tuple[int, int],
        say: Callable[[str], None] = lambda text: None,
        made: Callable[[RunOptions, dict[str, torch.dtype]], Parts] | None = None,
    ) -> None:
        """resolution: the one that the sizes in questions belong to; options with another one scale them. say is told what is being
        measured. made: what gives the structure of a model that its run makes."""
        self._family, self._questions, self._resolution, self._say, self._made = family, questions, resolution, say, made
        self._scales: dict[str, Scales] = {}
        self._found: dict[tuple[str, ...], Any] = {}
        self.published = ""

    def __call__(self, options: RunOptions) -> Forecast:
        """The forecast of a run with these options. Raises OptionError for a model that cannot be read."""
        training = self._training(options)
        phases = [self._caching(options), training, self._previews(options)]
        notes = [*_about_home(training), *self._notes(options)]
        if not training.optimizer_known:
            notes.append(f"{options.optimizer.optimizer_type} cannot be measured without numbers, and its state is counted as AdamW's")
        return Forecast(tuple(one for one in phases if one is not None), self.published, tuple(notes))

    def _notes(self, options: RunOptions) -> list[str]:
        found = []
        if options.distributed.distributed_strategy == "fsdp2":
            found.append("fsdp2 shares the network out; this counts it whole, as one process has it")
        if getattr(options.model, "training_adapter", None) is not None and not has_training_adapter(options.model):
            found.append("the training adapter is not on this disk and not counted")
        if options.compile.compile:
            found.append("compiled code may take a little more or less than this")
        if options.optimizer.optimizer_type == "PagedAdamW8bit":
            found.append("the optimizer's state is paged and counted as main memory")
        return found

    # Measured.

    def _weigh(self, options: RunOptions) -> tuple[RunOptions, str, Scales]:
        """What of these options is measured, a key of its model, and the scales for it."""
        memory = options.memory.model_copy(
            update={
                "blocks_to_swap": 0, "gradient_checkpointing_cpu_offload": False, "oom_ladder": False, "attention_backend": "auto",
                "cuda_allow_tf32": False, "cuda_cudnn_benchmark": False, "vae_tiling": False,
            }
        )  # fmt: skip
        model = options.model.model_copy(update={"transformer_quantization": "none"} if _quantization(options) != "none" else {})
        measured = options.model_copy(update={"memory": memory, "compile": type(options.compile)(), "model": model})
        fused = options.memory.attention_backend != "math"
        key = json.dumps([model.model_dump(mode="json"), dtypes_key(measured), fused])
        if key not in self._scales:
            self._scales[key] = Scales(self._family, self._structure(measured), self._questions, fused)
        return measured, key, self._scales[key]

    def _structure(self, options: RunOptions) -> Callable[[], Any]:
        dtypes = dtypes_of_run(options)

        def make() -> Any:
            if self._made is not None:
                return self._made(options, dtypes)
            found: Structure = structure_of(self._family, options.model, dtypes)
            self.published = found.published
            return found.parts

        return make

    def _once(self, key: tuple[str, ...], saying: str, measure: Callable[[], Any]) -> Any:
        if key not in self._found:
            self._say(saying)
            self._found[key] = measure()
        return self._found[key]

    # Phases.

    def _caching(self, options: RunOptions) -> Phase | None:
        data = options.dataset
        if "cache_latents" not in type(data).model_fields or not (data.cache_latents or data.cache_text_encoder_outputs):
            return None
        _, key, scales = self._weigh(options)
        bucket = self._bucket(options)
        sizes = (bucket.size, *bucket.controls)
        largest = max(sizes, key=lambda size: size[0] * size[1])
        batch = str(data.vae_batch_size)
        encoding = self._once(
            ("encode", key, batch, str(largest)), "the VAE while it encodes", lambda: scales.encoding(largest, data.vae_batch_size)
        )
        captions = data.text_encoder_batch_size
        reading = self._once(("read", key, str(captions)), "the text encoders", lambda: scales.reading(captions))
        parts = {"VAE": scales.vae, "text encoders": _encoders(options, scales), "activations": max(encoding, reading), "cuBLAS": WORKSPACE}
        return phase("caching", f"{_named(largest)} in batches of {batch}, captions in batches of {captions}", parts)

    def _training(self, options: RunOptions) -> Phase:
        measured, key, scales = self._weigh(options)
        data, bucket = options.dataset, self._bucket(options)
        batch = data.train_batch_size
        accumulates = options.training.gradient_accumulation_steps > 1
        asked = [one.model_dump(mode="json") for one in (measured.memory, measured.network, measured.optimizer)]
        more = (str(batch), str(accumulates), measured.training.mixed_precision, json.dumps(asked))
        about = f"{_named(bucket.size)}, batch {batch}"
        one: Training = self._once(("train", key, *more), f"a training step of {about}", lambda: scales.training(measured, bucket))
        swapped = _Swapped.of(one, options.memory.blocks_to_swap)
        quantization = _quantization(options)
        packed, made_anew = _packed(one, quantization)
        frozen = one.frozen - packed
        share = 0 if one.frozen == 0 else packed / max(1, sum(block.frozen for block in one.blocks))
        home = int(swapped.frozen * (1 - share)) + swapped.trained
        slots = int(swapped.slots * (1 - share))
        # Gradients and optimizer of weights that are at home are there too.
        away = swapped.trained / one.trained if one.trained else 0.0
        gradients = min(int(one.gradients * (1 - away)), one.activations)
        activations = one.activations - min(one.gradients, one.activations) - self._offloaded(options, one)
        parts = {
            "base model": frozen - min(home, frozen) if one.frozen else 0,
            "swap slots": slots,
            "adapter" if isinstance(options.network, NetworkOptions) else "trained weights": int(one.trained * (1 - away)),
            "optimizer": int(one.optimizer * (1 - away)),
            "gradients": gradients,
            "moving average": 4 * one.num_trained if options.training.use_ema else 0,
            "activations": max(activations, one.optimizer_step - gradients, 0),
            "weights made anew": made_anew,
            "cuBLAS": WORKSPACE,
        }
        if "cache_latents" in type(data).model_fields:
            parts |= self._uncached(options, key, scales, parts["activations"])
        at_home = home + int((one.gradients + one.optimizer) * away)
        known = {"num_blocks": len(one.blocks), "at_home": at_home, "tables": one.tables, "optimizer_known": one.optimizer_known}
        return replace(phase("training", about, parts), **known)

    def _uncached(self, options: RunOptions, key: str, scales: Scales, activations: int) -> dict[str, int]:
        """Parts of training that caches would spare."""
        data, trained = options.dataset, trained_encoders(options, scales.parts)
        found: dict[str, int] = {}
        if not data.cache_latents:
            batch, size = data.train_batch_size, self._bucket(options).size
            encoding = self._once(("encode", key, str(batch), str(size)), "the VAE while it encodes", lambda: scales.encoding(size, batch))
            found |= {"VAE": scales.vae, "activations": max(activations, encoding)}
        there = [name for name in scales.encoders if name in trained or not data.cache_text_encoder_outputs]
        return found | {"text encoders": _encoders(options, scales, there)}

    def _offloaded(self, options: RunOptions, one: Training) -> int:
        """Bytes that recomputed blocks keep in main memory: what each begins with, apart from the two at work."""
        if not options.memory.gradient_checkpointing_cpu_offload:
            return 0
        count = len(one.blocks)
        chosen = spread(max(1, round(options.memory.gradient_checkpointing_share * count)), count)
        entries = sorted(one.blocks[index].entry for index in chosen)
        return sum(entries[:-2])

    def _previews(self, options: RunOptions) -> Phase | None:
        if not self._questions.previews:
            return None
        _, key, scales = self._weigh(options)
        asked, batch, cfg_scale = max(self._questions.previews, key=lambda one: one[0][0] * one[0][1] * one[1])
        size = self._scaled(asked, options) if options.samples.sample_size is None else asked
        width, height = size
        steps, decoding = self._once(
            ("draw", key, str((size, batch, cfg_scale))), f"a preview of {_named(size)}", lambda: scales.drawing(size, batch, cfg_scale)
        )
        if options.memory.vae_tiling:
            tile = (min(width, TILE), min(height, TILE))
            decoding = self._once(("draw", key, str((tile, batch, 1.0))), "a tile of a preview", lambda: scales.drawing(tile, batch, 1.0))[
                1
            ]
            # Rows of tiles and the picture that they become, three float32 a pixel each.
            decoding += 2 * 3 * 4 * batch * width * height
        stays = {name: size for name, size in self._training(options).parts.items() if name not in ("activations", "gradients")}
        vae = {"VAE": scales.vae}
        # Texts are known, and the VAE comes for as long as it decodes.
        decoded = {**stays, **vae, "activations": decoding}
        drawn = {**stays, "activations": steps}
        parts = max(drawn, decoded, key=lambda one: sum(one.values()))
        return phase("previews", f"{_named(size)}, {batch} at once" + (", decoded in tiles" if options.memory.vae_tiling else ""), parts)

    def _bucket(self, options: RunOptions) -> Bucket:
        """The largest bucket."""
        bucket = self._questions.buckets[0]
        return Bucket(self._scaled(bucket.size, options), tuple(self._scaled(size, options) for size in bucket.controls))

    def _scaled(self, size: tuple[int, int], options: RunOptions) -> tuple[int, int]:
        """A size of the data at the resolution of the options."""
        now, then = options.dataset.resolution, self._resolution
        if tuple(now) == tuple(then):
            return size
        factor = math.sqrt(now[0] * now[1] / (then[0] * then[1]))
        width, height = (max(64, round(side * factor / 64) * 64) for side in size)
        return width, height


def _about_home(training: Phase) -> list[str]:
    """What to know about main memory where swapped blocks and tables take it."""
    # The modulation's layers may be held in fewer bits there, too.
    taken = {"swapped blocks take": training.at_home, "the modulation and its tables take up to": training.tables}
    there, size = psutil.virtual_memory().total, sum(taken.values())
    little = f", more than the {there / GIB:.0f} GiB of this machine" if size > there else ""
    said = [f"{what} {one / GIB:.1f} GiB of main memory" for what, one in taken.items() if one]
    return [" and ".join(said) + little] if said else []


def dtypes_key(options: RunOptions) -> list[str]:
    """The precision of each network, for comparing."""
    return [str(dtype) for dtype in dtypes_of_run(options).values()]


@dataclass(frozen=True)
class _Swapped:
    """Bytes of blocks that are in main memory, and of the slots for them on the device."""

    frozen: int
    trained: int
    slots: int

    @classmethod
    def of(cls, one: Training, number: int) -> _Swapped:
        chosen = [one.blocks[index] for index in spread(min(number, len(one.blocks)), len(one.blocks))]
        largest = max((block.frozen + block.trained for block in chosen), default=0)
        return cls(sum(block.frozen for block in chosen), sum(block.trained for block in chosen), min(2, len(chosen)) * largest)


def _quantization(options: RunOptions) -> str:
    return str(getattr(options.model, "transformer_quantization", "none"))


def _packed(one: Training, quantization: str) -> tuple[int, int]:
    """Bytes that holding the blocks' linear layers in fewer bits spares, and that one layer takes while it is made anew."""
    if quantization == "none":
        return 0, 0
    layers = [layer for block in one.blocks for layer in block.linear]
    scales = one.itemsize if quantization in _SCALED_ROWS else 0
    now = sum(rounded(one.itemsize * rows * columns) for rows, columns in layers)
    then = sum(rounded(int(_BYTES[quantization] * rows * columns)) + rounded(scales * rows) for rows, columns in layers)
    largest = max((rows * columns for rows, columns in layers), default=0)
    return now - then, int(_MADE_ANEW[quantization] * one.itemsize * largest)


def _encoders(options: RunOptions, scales: Scales, names: list[str] | None = None) -> int:
    """Bytes of text encoders, the large one in 8 bits where the options say so."""
    kind = getattr(options.model, "text_encoder_quantization", "none")
    large = "te3" if "te3" in scales.encoders else "te1"
    chosen = scales.encoders if names is None else names
    return sum(scales.packed_encoder(name) if kind != "none" and name == large else scales.encoders[name] for name in chosen)


def _named(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"
