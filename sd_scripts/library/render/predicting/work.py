"""What the worker does with an order: load the model when it is another one, make the images, write them, and tell every step."""

from __future__ import annotations

import errno
import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from sd_scripts.dataset import table
from sd_scripts.library.memory.oom_advice import is_out_of_memory
from sd_scripts.library.render.predict import Predictor, Progress, Request, check_without_model
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.files import new_image, written_aside

from . import output_images
from .memory import give_back
from .orders import PredictOrder, Variant
from .thumbnails import data_url

log = logging.getLogger(__name__)

Event = dict[str, Any]
"""An event of the protocol in serve.py."""
Emit = Callable[[Event], None]
MEMORY_OPTIONS = (
    "a smaller size, offload, blocks_to_swap, vae_tiling, transformer_quantization = qint8, text_encoder_quantization = qint8, a smaller "
    "control_resolution, or text_encoder_device and vae_device = cpu; --estimate says what each takes"
)
NOT_FINITE = (
    "the values of this image are no finite numbers; a LoRA at too high a strength, a damaged model or too low a precision does that: "
    "lower the strength, leave files out one by one, or set precision = float32"
)


class PredictionCancelled(Exception):
    """Somebody asked for the prediction to end."""


class Workbench:
    """The one loaded model, and orders one after the other. Not for several threads at once."""

    def __init__(self) -> None:
        self._predictor: Predictor | None = None
        self._model: object = None

    def carry_out(self, order: PredictOrder, emit: Emit, cancelled: Callable[[], bool]) -> None:
        """Does what the order asks for and emits its events, the last of which is done, failed or cancelled."""
        job = _Job(order, emit, cancelled)
        try:
            job.check()
            check_without_model(request_of(order), order.options.loads.grid, [variant.lora for variant in order.variants])
            predictor = self._loaded(order, job)
            job.check()
            # What is drawn here trains nothing: PyTorch keeps no books about it, a few percent of the time of a small model.
            with torch.inference_mode():
                job.run(predictor)
        except PredictionCancelled:
            job.tell("cancelled", files=job.files)
        except OptionError as err:
            emit(failed(order.id, err))
        # Whatever a model, a driver or a full disk can raise: the worker lives on, and the person reads what it was.
        except Exception as err:
            log.error("prediction %s failed", order.id, exc_info=err)
            if is_out_of_memory(err):
                self.free()
            emit(failed(order.id, err))

    def load(self, order: PredictOrder) -> None:
        """Loads the model that an order names, if it is not the one at hand. Raises what loading raises."""
        self._loaded(order, _Job(order, emit=lambda _event: None, cancelled=lambda: False))

    def free(self) -> None:
        """Lets go of the model and its memory."""
        if self._predictor is not None:
            self._predictor.free()
        self._predictor = self._model = None
        give_back()

    def holds_memory(self) -> bool:
        """Whether a model is loaded."""
        return self._predictor is not None

    def _loaded(self, order: PredictOrder, job: _Job) -> Predictor:
        """The model of the order; loaded when it is not the one at hand."""
        if self._predictor is None or self._model != order.model:
            self.free()
            job.tell("loading", text=order.options.model.pretrained_model_name_or_path)
            started = time.monotonic()
            self._predictor, self._model = Predictor.load(order.options), order.model
            job.tell("loaded", seconds=round(time.monotonic() - started, 3), **self._predictor.described())
        return self._predictor


@dataclass
class _Job:
    """An order under way."""

    order: PredictOrder
    emit: Emit
    cancelled: Callable[[], bool]
    files: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def tell(self, event: str, **values: Any) -> None:
        self.emit({"event": event, "id": self.order.id, **values})

    def check(self) -> None:
        """Raises Cancelled when somebody asked for the end."""
        if self.cancelled():
            raise PredictionCancelled

    def run(self, predictor: Predictor) -> None:
        """Makes and writes all images."""
        order, variants = self.order, self.order.variants
        asked = predictor.prepared(request_of(order), [(variant.lora, variant.lora_weight) for variant in variants])
        seeds, size = [preview.seed for preview in asked], [asked[0].width, asked[0].height]
        controls = [str(file) for file in request_of(order).images]
        labels, steps, total = [variant.label for variant in variants], asked[0].steps, len(variants) * len(asked)
        self.tell("started", size=size, seeds=seeds, steps=steps, images=total, variants=labels)
        rows: list[list[Image.Image]] = [[] for _ in asked]
        for number, variant in enumerate(variants):
            watch = self._watching(predictor, number, total)
            for index, made in enumerate(predictor.rendered(asked, variant.lora, variant.lora_weight, watch)):
                suffix = f"-{number + 1}" if order.compares else ""
                path = output_images.save(made, order.options.predict.out, predictor.parts.source, variant, controls, suffix)
                self.files.append(str(path))
                rows[index].append(made.image)
                width, height = made.image.size
                self.tell("image", file=str(path), seed=made.preview.seed, variant=number, index=index, width=width, height=height)
        per_variant = [self.files[start : start + len(asked)] for start in range(0, total, len(asked))]
        self.tell(
            "done",
            files=self.files,
            seeds=seeds,
            variants=[_described(variant, files) for variant, files in zip(variants, per_variant, strict=True)],
            grid=self._written_grid(rows, labels, seeds[0]) if order.compares and len({row[0].size for row in rows}) == 1 else None,
            size=size,
            seconds=round(time.monotonic() - self.started, 3),
        )

    def _watching(self, predictor: Predictor, variant: int, total: int) -> Callable[[Progress], None]:
        """What tells each step, and ends the prediction when somebody asked for that."""
        last = time.monotonic()

        def told(progress: Progress) -> None:
            nonlocal last
            self.check()
            step, steps, every = progress.step, progress.steps, self.order.preview_every
            is_finite = bool(progress.clean.isfinite().all())
            # An estimate may be infinite where all is noise; what is no number stays none.
            if not is_finite and (step == steps or progress.clean.isnan().any()):
                raise OptionError(Problem("precision", NOT_FINITE))
            took = time.monotonic() - last
            shown = every > 0 and is_finite and (step % every == 0 or step == steps)
            preview = data_url(predictor.thumbnails.of(progress.clean, took)) if shown else None
            seconds = round(time.monotonic() - self.started, 3)
            done = len(self.files)
            self.tell("step", step=step, steps=steps, variant=variant, done=done, images=total, seconds=seconds, preview=preview)
            last = time.monotonic()

        return told

    def _written_grid(self, rows: list[list[Image.Image]], labels: list[str], seed: int) -> str:
        """Writes the image of all; its path."""
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{seed}-compared"
        with new_image(self.order.options.predict.out, name, "-compared") as path, written_aside(path) as aside:
            table.drawn(rows, labels).save(aside, format="PNG")
        return str(path)


def request_of(order: PredictOrder) -> Request:
    """What the predictor is asked for, without adapters: the variants have them."""
    asked = order.options.predict
    had = {name: getattr(asked, name) for name in ("prompt", "negative_prompt", "steps", "seed", "size", "num_images")}
    # What not every family has.
    own = ("images", "sampler", "scheduler", "shift", "guidance", "prompt_list", "wildcard_dir")
    had |= {name: getattr(asked, name) for name in own if name in type(asked).model_fields}
    return Request(**had, true_cfg_scale=asked.guided_scale)


def failed(id: str | None, err: Exception) -> Event:
    """The event of a request that could not be done."""
    text, advice, problems = "", "", []
    if isinstance(err, OptionError):
        text = str(err)
        problems = err.at_options()
    elif isinstance(err, OSError) and err.errno in (errno.ENOSPC, errno.EDQUOT):
        text = f"the disk is full: {Path(err.filename).parent if err.filename else 'the folder for images'} takes no more"
        advice = "free some space, or choose another folder; images that were finished are kept"
    elif is_out_of_memory(err):
        text, advice = "the device has no memory left; the model was let go", f"what helps: {MEMORY_OPTIONS}"
    else:
        lines = str(err).strip().splitlines() or ["no message"]
        text, advice = f"{type(err).__name__}: {lines[0]}", "the whole error is on the console; please report it"
    return {"event": "failed", "id": id, "text": text, "problems": problems, "advice": advice}


def line(event: Mapping[str, Any]) -> str:
    """The event as a line."""
    return json.dumps(event, ensure_ascii=False, allow_nan=False) + "\n"


def _described(variant: Variant, files: list[str]) -> dict[str, Any]:
    return {"label": variant.label, "lora": list(variant.lora), "lora_weight": list(variant.lora_weight), "files": files}
