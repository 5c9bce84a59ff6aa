"""How much memory of a device a run will take, before it starts: each part of it while it caches, trains and draws previews.

Weights, optimizer and passes are measured on the meta device (see `weighing`), with the model's own networks and the run's own options;
what only moves or packs weights is arithmetic on top of that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from sd_scripts.families import FACTS
from sd_scripts.families.common.images import TILE
from sd_scripts.library.core.protocols import ModelFamily, Parts
from sd_scripts.library.memory.swapping import spread
from sd_scripts.library.render.renderer import at_once
from sd_scripts.library.train.editing import control_size
from sd_scripts.library.train.trained import dtypes_of_run, is_read_straight, trained_encoders
from sd_scripts.schema.model import ModelOptions
from sd_scripts.schema.runs import RunOptions

from .accounting import rounded
from .structure import has_training_adapter, structure_of
from .values import GIB, PROCESS, WORKSPACE, Bucket, Forecast, Phase, Questions, about_host, phase
from .weighing import BlockWeight, Scales, Training

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
        processes: int = 1,
    ) -> None:
        """resolution: the one that the sizes in questions belong to; options with another one scale them. say is told what is being
        measured. made: what gives the structure of a model that its run makes. processes: of the run on this machine."""
        self._family, self._questions, self._resolution, self._say, self._made = family, questions, resolution, say, made
        self._processes = processes
        self._scales: dict[str, Scales] = {}
        self._found: dict[tuple[str, ...], Any] = {}
        self.published = ""

    def __call__(self, options: RunOptions) -> Forecast:
        """The forecast of a run with these options. Raises OptionError for a model that cannot be read."""
        training = self._training(options)
        phases = [self._caching(options), training, self._previews(options)]
        host = self._host(options, training)
        there = psutil.virtual_memory().total
        needed = f"The run needs {host / GIB:.1f} GiB of host RAM."
        notes = [needed, *about_host(host, there, training.at_home, training.tables), *self._notes(options)]
        if not training.optimizer_known:
            notes.append(f"{options.optimizer.optimizer_type} cannot be measured without numbers, and its state is counted as AdamW's.")
        return Forecast(tuple(one for one in phases if one is not None), self.published, tuple(notes), host, there)

    def _host(self, options: RunOptions, training: Phase) -> int:
        """Host RAM of all processes: networks are read there, and what is swapped, cached or encoded beforehand waits there."""
        _, _, scales = self._weigh(options)
        companions = scales.vae + _encoders(options, scales)
        # The one that makes class images is read before.
        straight = is_read_straight(options) and self._made is None and not options.dataset.num_class_images
        # With tables the modulation is there twice for a moment.
        loading = companions + (0 if straight else training.weights)
        while_training = training.at_home + training.tables + training.offloaded + companions
        return self._processes * (PROCESS + max(loading, while_training))

    def _notes(self, options: RunOptions) -> list[str]:
        found = []
        if self._processes > 1:
            found.append(f"Each of {self._processes} processes has this on a card of its own.")
        elif options.distributed.distributed_strategy == "fsdp2":
            found.append("fsdp2 shards the network over several processes, and there is one; set num_gpus.")
        if not self._questions.previews and self._questions.evaluation is None:
            found.append("Previews are not counted: sample_prompts is empty.")
        if getattr(options.model, "training_adapter", None) is not None and not has_training_adapter(options.model):
            found.append("The training adapter is not on this disk and not counted.")
        if options.compile.compile:
            found.append("Compiled code may take a little more or less than this.")
        if options.optimizer.optimizer_type == "PagedAdamW8bit":
            found.append("The optimizer's state is paged and counted as host RAM.")
        return found

    # Measured.

    def _weigh(self, options: RunOptions) -> tuple[RunOptions, str, Scales]:
        """What of these options is measured, a key of its model, and the scales for it."""
        memory = options.memory.model_copy(
            update={
                "blocks_to_swap": 0, "gradient_checkpointing_cpu_offload": False, "oom_fallback": False, "attention_backend": "auto",
                "cuda_allow_tf32": False, "cuda_cudnn_benchmark": False, "vae_tiling": False,
            }
        )  # fmt: skip
        # What is held in few bits, and the size of control images, are arithmetic and a question.
        plain = {"transformer_quantization": "none", "text_encoder_quantization": "none", "control_resolution": None}
        model = options.model.model_copy(update={name: value for name, value in plain.items() if hasattr(options.model, name)})
        measured = options.model_copy(update={"memory": memory, "compile": type(options.compile)(), "model": model})
        fused = options.memory.attention_backend != "math"
        key = json.dumps([model.model_dump(mode="json"), dtypes_key(measured), fused])
        if key not in self._scales:
            self._scales[key] = Scales(self._family, self._structure(measured), self._questions, fused)
        return measured, key, self._scales[key]

    def _structure(self, options: RunOptions) -> Parts:
        dtypes = dtypes_of_run(options)
        if self._made is not None:
            return self._made(options, dtypes)
        found = structure_of(self._family, options.model, dtypes)
        self.published = found.published
        return found.parts

    def _once(self, key: tuple[str, ...], saying: str, measure: Callable[[], Any]) -> Any:
        if key not in self._found:
            self._say(saying)
            self._found[key] = measure()
        return self._found[key]

    # Phases.

    def _caching(self, options: RunOptions) -> Phase | None:
        """The VAE makes all latents and leaves before the text encoders come, each if it is on this card; what is not cached stays."""
        data = options.dataset
        if not (data.cache_latents or data.cache_text_encoder_outputs):
            return None
        _, key, scales = self._weigh(options)
        bucket = self._bucket(options)
        largest = max((bucket.size, *bucket.controls), key=lambda size: size[0] * size[1])
        latents, captions = data.vae_batch_size, data.text_encoder_batch_size
        vae_there, text_there = (name in (None, "cuda", "cuda:0") for name in options.model.encoder_devices)
        vae = {"VAE": scales.vae} if vae_there else {}
        stages: list[dict[str, int]] = []
        if data.cache_latents and vae_there:
            encoding = self._once(
                ("encode", key, str(latents), str(largest)), "the VAE while it encodes", lambda: scales.encoding(largest, latents)
            )
            stages.append({**vae, "activations": encoding})
        if data.cache_text_encoder_outputs and text_there:
            reading = self._once(("read", key, str(captions)), "the text encoders", lambda: scales.reading(captions))
            stages.append({**({} if data.cache_latents else vae), "text encoders": _encoders(options, scales), "activations": reading})
        if not stages:
            return None
        parts = max(stages, key=lambda stage: sum(stage.values())) | {"cuBLAS": WORKSPACE}
        return phase("caching", f"{named(largest)} in batches of {latents}, captions in batches of {captions}", parts)

    def _training(self, options: RunOptions) -> Phase:
        measured, key, scales = self._weigh(options)
        data, bucket = options.dataset, self._bucket(options)
        batch = data.train_batch_size
        accumulates = options.training.gradient_accumulation_steps > 1
        asked = [one.model_dump(mode="json") for one in (measured.memory, measured.network, measured.optimizer)]
        more = (str(batch), str(bucket), str(accumulates), measured.training.mixed_precision, json.dumps(asked))
        about = f"{named(bucket.size)}, batch {batch}"
        one: Training = self._once(("train", key, *more), f"a training step of {about}", lambda: scales.training(measured, bucket))
        swapped = Swapped.of(one.blocks, options.memory.blocks_to_swap)
        quantization = _quantization(options)
        packed, made_anew = packed_blocks(one.blocks, one.itemsize, quantization)
        frozen = one.frozen - packed
        share = 0 if one.frozen == 0 else packed / max(1, sum(block.frozen for block in one.blocks))
        home = int(swapped.frozen * (1 - share)) + swapped.trained
        slots = int(swapped.slots * (1 - share))
        # Gradients and optimizer of weights that are in host RAM are there too.
        away = swapped.trained / one.trained if one.trained else 0.0
        gradients = min(int(one.gradients * (1 - away)), one.activations)
        offloaded = self._offloaded(options, one)
        activations = one.activations - min(one.gradients, one.activations) - offloaded
        base = frozen - min(home, frozen) if one.frozen else 0
        adapts = options.method == "network"
        # An adapter stays whole in every process; what is trained of the network itself is sharded with the rest.
        shares, gathered = self._shared(options, one)
        own = 1 if adapts else shares
        parts = {
            "base model": base // shares,
            "blocks gathered": gathered,
            "swap slots": slots,
            "adapter" if adapts else "trained weights": int(one.trained * (1 - away)) // own,
            "optimizer": int(one.optimizer * (1 - away)) // own,
            "gradients": gradients // own,
            "moving average": 4 * one.num_trained // own if options.training.use_ema else 0,
            "activations": max(activations, one.optimizer_step - gradients, 0),
            "weights made anew": made_anew,
            "cuBLAS": WORKSPACE,
        }
        parts |= self._uncached(options, key, scales, parts["activations"])
        at_home = home + int((one.gradients + one.optimizer) * away)
        known: dict[str, Any] = {
            "num_blocks": len(one.blocks), "at_home": at_home, "tables": one.tables, "optimizer_known": one.optimizer_known,
            "offloaded": offloaded, "weights": frozen + one.tables + (0 if adapts else one.trained),
        }  # fmt: skip
        return replace(phase("training", about, parts), **known)

    def _shared(self, options: RunOptions, one: Training) -> tuple[int, int]:
        """Over how many processes fsdp2 shards the network, and bytes of what each gathers for its computation: the block at work, the
        next one that arrives, and the buffer it arrives in."""
        if options.distributed.distributed_strategy != "fsdp2" or self._processes == 1:
            return 1, 0
        return self._processes, 3 * max((block.frozen + block.trained for block in one.blocks), default=0)

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
        """Bytes that recomputed blocks keep in host RAM: what each begins with, apart from the two at work."""
        if not options.memory.gradient_checkpointing_cpu_offload:
            return 0
        count = len(one.blocks)
        chosen = spread(max(1, round(options.memory.gradient_checkpointing_share * count)), count)
        entries = sorted(one.blocks[index].entry for index in chosen)
        return sum(entries[:-2])

    def _previews(self, options: RunOptions) -> Phase | None:
        found = self._largest_preview(options)
        if found is None:
            return None
        _, key, scales = self._weigh(options)
        size, batch, cfg_scale = found
        width, height = size
        controls = [self._control(size, options)] * max(self._questions.num_controls, self._family.num_controls(scales.parts)[0])
        steps = self._once(
            ("draw", key, str((found, controls))), f"a preview of {named(size)}", lambda: scales.drawing(size, batch, cfg_scale, controls)
        )
        # Evaluations decode one image at a time.
        decoded_at_once = batch if self._questions.evaluation is None else 1
        tiled = options.memory.vae_tiling
        piece = (min(width, TILE), min(height, TILE)) if tiled else size
        decoding = self._once(
            ("decode", key, str((piece, decoded_at_once))), "the VAE while it decodes", lambda: scales.decoding(piece, decoded_at_once)
        )
        # Rows of tiles and the image that they become, three float32 a pixel each.
        decoding += 2 * 3 * 4 * decoded_at_once * width * height if tiled else 0
        stays = {name: size for name, size in self._training(options).parts.items() if name not in ("activations", "gradients")}
        vae = {"VAE": scales.vae}
        # Texts are known, and the VAE comes for as long as it decodes.
        decoded = {**stays, **vae, "activations": decoding}
        # A source goes back and forth between the networks.
        drawn = {**stays, "activations": steps, **({} if self._questions.evaluation is None else vae)}
        parts = max(drawn, decoded, key=lambda one: sum(one.values()))
        return phase("previews", f"{named(size)}, {batch} at once" + (", decoded in tiles" if options.memory.vae_tiling else ""), parts)

    def _largest_preview(self, options: RunOptions) -> tuple[tuple[int, int], int, float] | None:
        """(width, height) of the previews that take most memory, how many are made at once, and their cfg_scale; None without any."""
        if self._questions.evaluation is not None:
            size, styles, cfg_scale = self._questions.evaluation
            return self._scaled(size, options), styles, cfg_scale
        fixed = options.samples.sample_size is not None
        sizes = [(size if fixed else self._scaled(size, options), number, cfg) for size, number, cfg in self._questions.previews]
        kinds = [(size, min(number, at_once(size)), cfg_scale) for size, number, cfg_scale in sizes]
        return max(kinds, key=lambda one: one[0][0] * one[0][1] * one[1], default=None)

    def _bucket(self, options: RunOptions) -> Bucket:
        """The largest bucket."""
        bucket = self._questions.buckets[0]
        size = self._scaled(bucket.size, options)
        # One that is cut as its target is has the target's size; the others have an area of their own.
        return Bucket(size, tuple(size if one == bucket.size else self._control(one, options) for one in bucket.controls))

    def _control(self, size: tuple[int, int], options: RunOptions) -> tuple[int, int]:
        """The size of a control image with the sides of this one."""
        sized = control_size(self._family, options.model)
        return size if sized is None else sized(size)

    def _scaled(self, size: tuple[int, int], options: RunOptions) -> tuple[int, int]:
        """A size of the data at the resolution of the options."""
        now, then = options.dataset.resolution, self._resolution
        if tuple(now) == tuple(then):
            return size
        factor = math.sqrt(now[0] * now[1] / (then[0] * then[1]))
        width, height = (max(64, round(side * factor / 64) * 64) for side in size)
        return width, height


def dtypes_key(options: RunOptions) -> list[str]:
    """The precision of each network, for comparing."""
    return [str(dtype) for dtype in dtypes_of_run(options).values()]


@dataclass(frozen=True)
class Swapped:
    """Bytes of blocks that are in host RAM, and of the slots for them on the device."""

    frozen: int
    trained: int
    slots: int

    @classmethod
    def of(cls, blocks: Sequence[BlockWeight], number: int) -> Swapped:
        """Of this many of a network's blocks."""
        chosen = [blocks[index] for index in spread(min(number, len(blocks)), len(blocks))]
        largest = max((block.frozen + block.trained for block in chosen), default=0)
        return cls(sum(block.frozen for block in chosen), sum(block.trained for block in chosen), min(2, len(chosen)) * largest)


def _quantization(options: RunOptions) -> str:
    return str(getattr(options.model, "transformer_quantization", "none"))


def packed_blocks(blocks: Sequence[BlockWeight], itemsize: int, quantization: str) -> tuple[int, int]:
    """Bytes that holding the blocks' linear layers in fewer bits spares, and that one layer takes while it is made anew. itemsize: bytes of
    a number of the network."""
    if quantization == "none":
        return 0, 0
    layers = [layer for block in blocks for layer in block.linear]
    scales = itemsize if quantization in _SCALED_ROWS else 0
    now = sum(rounded(itemsize * rows * columns) for rows, columns in layers)
    then = sum(rounded(int(_BYTES[quantization] * rows * columns)) + rounded(scales * rows) for rows, columns in layers)
    largest = max((rows * columns for rows, columns in layers), default=0)
    return now - then, int(_MADE_ANEW[quantization] * itemsize * largest)


def _encoders(options: RunOptions, scales: Scales, names: list[str] | None = None) -> int:
    """Bytes of text encoders, the large one in 8 bits where the options say so."""
    return sum(encoder_bytes(options.model, options.family, scales, name) for name in (scales.encoders if names is None else names))


def encoder_bytes(model: ModelOptions, family: str, scales: Scales, name: str) -> int:
    """Bytes of one text encoder, see _encoders."""
    large = FACTS[family].network.quantized_encoder
    packed = name == large and model.text_encoder_quantization != "none"  # type: ignore[attr-defined]
    return scales.packed_encoder(name) if packed else scales.encoders[name]


def named(size: tuple[int, int]) -> str:
    """(width, height) as people write it."""
    return f"{size[0]} x {size[1]}"
