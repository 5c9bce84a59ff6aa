"""One loaded model that makes pictures: its parts on their devices, adapters with strengths, and what is kept from call to call.

`Predictor.predict` gives, bit for bit, what the family's own `preview` gives for the same input, whatever is kept from calls before.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from sd_scripts.dataset.buckets import area_size
from sd_scripts.families.common.pictures import as_pictures, evaluating, place
from sd_scripts.families.qwen_edit.model import QwenEdit
from sd_scripts.families.qwen_edit.predict_options import QwenImagePredict
from sd_scripts.families.qwen_edit.sampling import noise, schedule
from sd_scripts.library.core.devices import device_of, precision_for
from sd_scripts.library.core.protocols import Condition, Parts, Preview
from sd_scripts.library.loading.common import tried
from sd_scripts.schema.errors import OptionError, Problem

from .predicting.adapters import Adapters, adapter_file
from .predicting.kept import Kept
from .predicting.memory import give_back
from .predicting.thumbnails import Thumbnails
from .sample import opened_control

CPU = torch.device("cpu")
KEPT_BYTES = 256 * 2**20
"""Text rows and encoded control pictures that are kept from call to call, in main memory; the least used go first."""
MAX_SEED = 2**32


@dataclass(frozen=True)
class Devices:
    """Where each network works."""

    transformer: torch.device = CPU
    vae: torch.device = CPU
    text_encoder: torch.device = CPU

    def of(self, part: str) -> torch.device:
        """The device of a network by its name in Parts.modules()."""
        return {"backbone": self.transformer, "vae": self.vae}.get(part, self.text_encoder)

    def names(self) -> dict[str, str]:
        """As people write them."""
        return {"transformer": str(self.transformer), "vae": str(self.vae), "text_encoder": str(self.text_encoder)}


@dataclass(frozen=True)
class Request:
    """What is asked for; see families.qwen_edit.predict_options for the meaning of each value."""

    prompt: str
    images: tuple[Image.Image | str | Path, ...] = ()
    """Control pictures, loaded or as files."""
    negative_prompt: str | None = " "
    """None turns guidance off, as true_cfg_scale = 1 does; an empty text is a negative prompt like any other."""
    steps: int = 40
    true_cfg_scale: float = 4.0
    seed: int | None = None
    size: tuple[int, int] | None = None
    num_images: int = 1
    lora: tuple[str, ...] = ()
    lora_weight: tuple[float, ...] = ()

    @property
    def weights(self) -> tuple[float, ...]:
        """Strength of each file in lora."""
        return self.lora_weight or (1.0,) * len(self.lora)


@dataclass(frozen=True)
class Progress:
    """A step that is done."""

    index: int
    """Number of the picture, from 0."""
    step: int
    """From 1."""
    steps: int
    clean: Tensor
    """What the picture will be as far as can be told by now, scaled latents (C, h, w)."""


@dataclass(frozen=True)
class Made:
    """A finished picture and what made it."""

    image: Image.Image
    preview: Preview


OnStep = Callable[[Progress], None]
"""Called after each step; what it raises ends the prediction."""


class Predictor:
    """A loaded model. Not for several threads at once."""

    def __init__(self, family: QwenEdit, parts: Parts, devices: Devices | None = None, offload: bool = False) -> None:
        """Takes over parts that are loaded, wherever they are. offload keeps each network in main memory while another one works."""
        self.family, self.parts, self.devices, self.offload = family, parts, devices or Devices(), offload
        for name, module in parts.modules().items():
            module.to(CPU if offload else self.devices.of(name))
        self.adapters = Adapters(parts, place(parts.backbone)[1])
        self.kept = Kept(KEPT_BYTES)
        self.thumbnails = Thumbnails(family, parts)

    @classmethod
    def load(cls, options: QwenImagePredict) -> Predictor:
        """The model that options name. Raises OptionError for what cannot be read and for devices that are not here."""
        devices = devices_for(options)
        chosen = QwenEdit()
        together = len(set(devices.names().values())) == 1 and not options.loading.offload
        dtype = precision_for(options.loading.precision, devices.transformer)
        parts = chosen.load(options.model, devices.transformer if together else CPU, dtype)
        made = cls(chosen, parts, devices, options.loading.offload)
        give_back()
        return made

    @property
    def controls(self) -> tuple[int, int]:
        """Fewest and most control pictures of a request."""
        return self.family.num_controls(self.parts)

    def predict(self, request: Request, on_step: OnStep | None = None) -> list[Image.Image]:
        """The pictures, one for each seed. Raises OptionError with every problem of the request."""
        return [made.image for made in self.pictures(request, on_step)]

    def pictures(self, request: Request, on_step: OnStep | None = None) -> Iterator[Made]:
        """The pictures one after the other, as soon as each is finished. Each is made alone, so a seed always gives the same one."""
        yield from self.rendered(self.prepared(request), request.lora, request.weights, on_step)

    def prepared(self, request: Request, others: Sequence[tuple[Sequence[str], Sequence[float]]] = ()) -> list[Preview]:
        """What the family will be asked to render, one for each seed. others: files and strengths of adapters that will be used as well.

        Raises OptionError with every problem: pictures that cannot be read or are too many, sizes off the grid, adapters that do not fit.
        """
        problems: list[Problem] = []
        controls = tried(problems, lambda: read_pictures(request.images)) or []
        problems += self._problems(request)
        for files, weights in ((request.lora, request.weights), *others):
            problems += self.adapters.problems(files, weights)
        if problems:
            raise OptionError(list(dict.fromkeys(problems)))
        width, height = request.size or self.default_size(controls)
        first = secrets.randbelow(MAX_SEED) if request.seed is None else request.seed
        guided = request.negative_prompt is not None
        return [
            Preview(
                prompt=request.prompt,
                negative_prompt=request.negative_prompt or "",
                width=width,
                height=height,
                seed=first + index,
                steps=request.steps,
                cfg_scale=request.true_cfg_scale if guided else 1.0,
                controls=tuple(controls),
            )
            for index in range(request.num_images)
        ]

    def rendered(
        self, previews: Sequence[Preview], lora: Sequence[str], weights: Sequence[float], on_step: OnStep | None = None
    ) -> Iterator[Made]:
        """The pictures of `prepared` with these adapter files on the model. Raises OptionError for a file that does not fit."""
        self.adapters.put_on(lora, weights)
        for index, preview in enumerate(previews):
            yield Made(self._picture(preview, index, on_step), preview)

    def default_size(self, controls: Sequence[Image.Image]) -> tuple[int, int]:
        """(width, height) of a picture whose request has no size: the model's own area in the shape of the last control picture."""
        return area_size(controls[-1].size if controls else (1, 1), self.parts.settings["area"])

    def described(self) -> dict[str, object]:
        """What is loaded, and where."""
        return {
            "model_version": self.parts.settings["model_version"],
            "devices": self.devices.names(),
            "precision": str(place(self.parts.backbone)[1]).removeprefix("torch."),
            "controls": list(self.controls),
        }

    def free(self) -> None:
        """Lets go of the networks and of everything kept; the predictor cannot be used any more."""
        self.adapters.take_off()
        self.kept.clear()
        del self.parts, self.adapters, self.thumbnails
        give_back()

    def _problems(self, request: Request) -> list[Problem]:
        """What is wrong with a request for this model, apart from its files."""
        problems = []
        fewest, most = self.controls
        count, version = len(request.images), self.parts.settings["model_version"]
        if not fewest <= count <= most:
            wanted = f"{fewest} to {most} control pictures" if most > fewest else ("no", "one")[most] + " control picture"
            problems.append(
                Problem("images", f"images: {count} given, but {self.parts.source} is model_version {version}, which takes {wanted}")
            )
        if request.size is not None:
            problems += size_problems(request.size, self.family.grid)
        return problems

    @torch.no_grad()
    def _picture(self, preview: Preview, index: int, on_step: OnStep | None) -> Image.Image:
        with evaluating(self.parts):
            pixels = [self.family.control_pixels(self.parts, control) for control in preview.controls]
            latents = self._control_latents(preview, pixels)
            captions = [preview.prompt, *([preview.negative_prompt] if preview.cfg_scale > 1 else [])]
            rows = self._text_rows(preview, pixels, captions)
            conditions = [{"text": text, **latents} for text in rows]
            watch = self._watching(preview, index, on_step) if on_step is not None else None
            with self._working("backbone"):
                found = self.family.draw(self.parts, [preview], conditions[:1], conditions[1:] or None, watch)
            with self._working("vae"):
                return as_pictures(self.family.decode(self.parts, found))[0]

    def _control_latents(self, preview: Preview, pixels: Sequence[Tensor]) -> Condition:
        """control_0, control_1, ...: the encoded control pictures."""
        found: Condition = {}
        for number, (control, tensor) in enumerate(zip(preview.controls, pixels, strict=True)):

            def encoded(tensor: Tensor = tensor) -> Tensor:
                with self._working("vae"):
                    return self.family.encode_pictures(self.parts, tensor[None])[0].cpu()

            found[f"control_{number}"] = self.kept.get(("latents", fingerprint(control)), encoded)
        return found

    def _text_rows(self, preview: Preview, pixels: Sequence[Tensor], captions: Sequence[str]) -> list[Tensor]:
        """Text rows (L, D) of each caption on the control pictures."""
        pictures = tuple(fingerprint(control) for control in preview.controls)
        keys = [("text", self.adapters.on_text_encoders, pictures, caption) for caption in captions]
        missing = [caption for key, caption in dict(zip(keys, captions)).items() if key not in self.kept]
        fresh: dict[str, Tensor] = {}
        if missing:
            with self._working("te1"):
                fresh = {caption: rows.cpu() for caption, rows in zip(missing, self._encoded(pixels, missing), strict=True)}
        return [self.kept.get(key, lambda caption=caption: fresh[caption]) for key, caption in zip(keys, captions)]

    def _encoded(self, pixels: Sequence[Tensor], captions: Sequence[str]) -> list[Tensor]:
        """Text rows (L, D) of captions; those on control pictures share one pass over the pictures."""
        if not pixels:
            return [condition["text"] for condition in self.family.encode_prompts(self.parts, captions)]
        prefix, suffixes = self.family.encode_instructions(self.parts, pixels, captions)
        return [torch.cat([prefix, suffix]) for suffix in suffixes]

    def _watching(self, preview: Preview, index: int, on_step: OnStep) -> Callable[[int, int, Tensor], None]:
        """The family's step function that tells on_step, with the clean picture as the last two steps see it."""
        height, width = preview.height // 8, preview.width // 8
        sigmas = schedule(preview.sampler, self.parts.scheduler_config, preview.steps, height * width // 4, CPU).sigmas.tolist()
        before = noise([preview.seed], height, width)[0]

        def watch(step: int, steps: int, latents: Tensor) -> None:
            nonlocal before
            now = latents[0].detach().float().cpu()
            # x_t moves along v = noise - x0 by the change of sigma, so x0 = x_t - sigma v.
            fell = sigmas[step - 1] - sigmas[step]
            clean = now + (now - before) * (sigmas[step] / fell) if fell > 0 else now
            before = now
            on_step(Progress(index, step, steps, clean))

        return watch

    @contextmanager
    def _working(self, name: str) -> Iterator[None]:
        """The network is on its device within the block; with offload it goes back to main memory afterwards."""
        module, device = self.parts.modules()[name], self.devices.of(name)
        if not self.offload or device == CPU:
            yield
            return
        module.to(device)
        try:
            yield
        finally:
            module.to(CPU)
            if device.type == "cuda":
                torch.cuda.empty_cache()


def check_without_model(request: Request, others: Sequence[Sequence[str]] = ()) -> None:
    """What can be told before anything is loaded. Raises OptionError with every file that is not there or cannot be read, and for a size
    off the grid. others: further adapter files."""
    problems: list[Problem] = []
    tried(problems, lambda: read_pictures(request.images))
    for name in dict.fromkeys(file for files in (request.lora, *others) for file in files):
        tried(problems, lambda name=name: adapter_file(name))
    if request.size is not None:
        problems += size_problems(request.size, QwenEdit.grid)
    if problems:
        raise OptionError(problems)


def devices_for(options: QwenImagePredict) -> Devices:
    """Where each network works: as the options say, else on the first GPU, else on the CPU. Raises OptionError for devices not here."""
    model, loading = options.model, options.loading
    problems: list[Problem] = []
    best = torch.device("cuda", 0) if torch.cuda.is_available() else CPU
    transformer = tried(problems, lambda: device_of("transformer_device", loading.transformer_device, best)) or best
    vae = tried(problems, lambda: device_of("vae_device", model.vae_device, transformer))
    encoder = tried(problems, lambda: device_of("text_encoder_device", model.text_encoder_device, transformer))
    if problems:
        raise OptionError(problems)
    assert vae is not None and encoder is not None
    return Devices(transformer, vae, encoder)


def read_pictures(given: Sequence[Image.Image | str | Path]) -> list[Image.Image]:
    """Control pictures, upright, in RGB. Raises OptionError naming every file that cannot be read."""
    problems: list[Problem] = []
    found = [
        item.convert("RGB") if isinstance(item, Image.Image) else tried(problems, lambda item=item: opened_control(str(item), "images"))
        for item in given
    ]
    if problems:
        raise OptionError(problems)
    return [image for image in found if image is not None]


def size_problems(size: tuple[int, int], grid: int) -> list[Problem]:
    """What is wrong with the size of a picture."""
    if not any(side % grid for side in size):
        return []
    nearest = ",".join(str(max(grid, round(side / grid) * grid)) for side in size)
    return [
        Problem("size", f"size: {size[0]}x{size[1]} is off the model's grid; both sides are multiples of {grid}. The nearest is {nearest}")
    ]


def fingerprint(image: Image.Image) -> str:
    """Says whether two RGB pictures are the same."""
    return hashlib.sha256(repr(image.size).encode() + image.tobytes()).hexdigest()
