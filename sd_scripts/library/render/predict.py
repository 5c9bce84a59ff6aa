"""One loaded model that makes images: its parts on their devices, adapters with strengths, and what is kept from call to call.

`Predictor.predict` gives, bit for bit, what the family's own `preview` gives for the same input, whatever is kept from calls before.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from sd_scripts import families
from sd_scripts.dataset.buckets import area_size
from sd_scripts.library.core.devices import CPU, best_device, device_of, precision_for
from sd_scripts.library.core.protocols import ModelFamily, Parts, Preview, dtype_of
from sd_scripts.library.loading.common import tried
from sd_scripts.library.memory.swapping import BlockSwap
from sd_scripts.schema.errors import OptionError, Problem, refuse
from sd_scripts.schema.generate import samples_of
from sd_scripts.schema.predict import PredictOptions
from sd_scripts.schema.prompts import OPTION, Defaults, off_grid, read_prompts

from .predicting.adapters import Adapters, adapter_file
from .predicting.memory import give_back
from .predicting.thumbnails import Thumbnails
from .remembering import KeptTensors, remembering
from .renderer import Renderer
from .sample import opened_control, request_of
from .wildcards import drawn

log = logging.getLogger(__name__)

KEPT_BYTES = 256 * 2**20
"""Text rows and encoded control images that are kept from call to call, in host RAM; the least used go first."""
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
    """What is asked for; see schema.predict for the meaning of each value."""

    prompt: str
    images: tuple[Image.Image | str | Path, ...] = ()
    """Control images, loaded or as files."""
    negative_prompt: str | None = " "
    """None turns guidance off, as true_cfg_scale = 1 does; an empty text is a negative prompt like any other."""
    steps: int = 40
    true_cfg_scale: float = 4.0
    seed: int | None = None
    size: tuple[int, int] | None = None
    num_images: int = 1
    lora: tuple[str, ...] = ()
    lora_weight: tuple[float, ...] = ()
    sampler: str = "auto"
    guidance: float = Preview.guidance
    scheduler: str = "auto"
    shift: float | None = None
    prompt_list: str = ""
    """Prompts in kohya's form, in place of prompt; see schema.prompts. What their flags leave open is as above."""
    wildcard_dir: str = ""
    """See wildcards.py."""

    @property
    def weights(self) -> tuple[float, ...]:
        """Strength of each file in lora."""
        return self.lora_weight or (1.0,) * len(self.lora)


@dataclass(frozen=True)
class Progress:
    """A step that is done."""

    index: int
    """Number of the image, from 0."""
    step: int
    """From 1."""
    steps: int
    clean: Tensor
    """What the image will be as far as can be told by now, scaled latents (C, h, w)."""


@dataclass(frozen=True)
class MadeImage:
    """A finished image and what made it."""

    image: Image.Image
    preview: Preview


OnStep = Callable[[Progress], None]
"""Called after each step; what it raises ends the prediction."""


class Predictor:
    """A loaded model. Not for several threads at once."""

    def __init__(
        self,
        family: ModelFamily,
        parts: Parts,
        devices: Devices | None = None,
        offload: bool = False,
        blocks_to_swap: int = 0,
        tiled: bool = False,
    ) -> None:
        """Takes over parts that are loaded, wherever they are; with blocks_to_swap the backbone is in host RAM. offload keeps each network
        there while another one works. Raises OptionError for more blocks than there are."""
        self.family, self.parts, self.devices, self._offload = family, parts, devices or Devices(), offload
        self.swap: BlockSwap | None = None
        if blocks_to_swap:
            self.swap = BlockSwap(parts.backbone, self.devices.transformer)
            self.swap.set(blocks_to_swap)
        for name, module in parts.modules().items():
            module.to(CPU if offload else self.devices.of(name))
        self.adapters = Adapters(parts, dtype_of(parts.backbone))
        self.kept = KeptTensors(KEPT_BYTES)
        knowing = remembering(family, self.kept, state=lambda: self.adapters.on_text_encoders)
        self.renderer = Renderer(knowing, parts, tiled, working={name: self.devices.of(name) for name in parts.modules()})
        self.thumbnails = Thumbnails(family, parts)

    @classmethod
    def load(cls, options: PredictOptions) -> Predictor:
        """The model that options name. Raises OptionError for what cannot be read and for devices that are not here."""
        devices = devices_for(options)
        chosen = families.family(options.family)
        loading = options.loading
        together = len(set(devices.names().values())) == 1 and not (loading.offload or loading.blocks_to_swap)
        dtype = precision_for(options.loading.precision, devices.transformer)
        parts = chosen.load(options.loads, devices.transformer if together else CPU, dtype)
        made = cls(chosen, parts, devices, loading.offload, loading.blocks_to_swap, loading.vae_tiling)
        if made.swap is not None:
            log.info("%s", made.swap.summary())
        give_back()
        return made

    @property
    def controls(self) -> tuple[int, int]:
        """Fewest and most control images of a request."""
        return self.family.num_controls(self.parts)

    def predict(self, request: Request, on_step: OnStep | None = None) -> list[Image.Image]:
        """The images, one for each seed. Raises OptionError with every problem of the request."""
        return [made.image for made in self.images(request, on_step)]

    def images(self, request: Request, on_step: OnStep | None = None) -> Iterator[MadeImage]:
        """The images one after the other, as soon as each is finished. Each is made alone, so a seed always gives the same one."""
        yield from self.rendered(self.prepared(request), request.lora, request.weights, on_step)

    def prepared(self, request: Request, others: Sequence[tuple[Sequence[str], Sequence[float]]] = ()) -> list[Preview]:
        """What the family will be asked to render, one for each seed. others: files and strengths of adapters that will be used as well.

        Raises OptionError with every problem: images that cannot be read or are too many, sizes off the grid, adapters that do not fit.
        """
        problems: list[Problem] = []
        controls = tried(problems, lambda: read_images(request.images)) or []
        problems += self._problems(request)
        for files, weights in ((request.lora, request.weights), *others):
            problems += self.adapters.problems(files, weights)
        refuse(problems)
        width, height = request.size or self.default_size(controls)
        first = secrets.randbelow(MAX_SEED) if request.seed is None else request.seed
        plain = Preview(
            prompt=request.prompt,
            negative_prompt=request.negative_prompt or "",
            width=width,
            height=height,
            seed=first,
            steps=request.steps,
            cfg_scale=1.0 if request.negative_prompt is None else request.true_cfg_scale,
            sampler=request.sampler,
            guidance=request.guidance,
            controls=tuple(controls),
            scheduler=request.scheduler,
            shift=request.shift,
        )
        asked = self._listed(plain, request.prompt_list) if request.prompt_list else [plain]
        return [_drawn(replace(one, seed=one.seed + index), request.wildcard_dir) for one in asked for index in range(request.num_images)]

    def _listed(self, plain: Preview, prompt_list: str) -> list[Preview]:
        """The prompts of a list; what their flags leave open is as in `plain`. Raises OptionError with every problem and its line."""
        found = listed(self.family, plain, prompt_list)
        problems: list[Problem] = []
        for one in found:
            problems += self._control_problems(len(one.controls))
        refuse(problems)
        return found

    def rendered(
        self, previews: Sequence[Preview], lora: Sequence[str], weights: Sequence[float], on_step: OnStep | None = None
    ) -> Iterator[MadeImage]:
        """The images of `prepared` with these adapter files on the model. Raises OptionError for a file that does not fit."""
        self.adapters.put_on(lora, weights)
        if self.swap is not None and not self._offload:
            # Beside layers of swapped blocks adapters are made in host RAM; they are small and stay on the device.
            self.parts.backbone.to(self.devices.transformer)
        for index, preview in enumerate(previews):
            told = None if on_step is None else partial(_tell, on_step, index)
            yield MadeImage(self.renderer.render([preview], told)[0], preview)

    def default_size(self, controls: Sequence[Image.Image]) -> tuple[int, int]:
        """(width, height) of an image whose request has no size: the model's own, in the shape of the last control image."""
        width, height = self.family.usual_size(self.parts)
        return area_size(controls[-1].size, width * height) if controls else (width, height)

    def described(self) -> dict[str, object]:
        """What is loaded, and where."""
        version = self.parts.settings.get("model_version", self.family.version(self.parts).modelspec)
        return {
            "model_version": version,
            "family": self.family.name,
            "devices": self.devices.names(),
            "precision": str(dtype_of(self.parts.backbone)).removeprefix("torch."),
            "controls": list(self.controls),
        }

    def free(self) -> None:
        """Lets go of the networks and of everything kept; the predictor cannot be used any more."""
        self.adapters.take_off()
        self.kept.clear()
        if self.swap is not None:
            self.swap.end()
        del self.parts, self.swap, self.adapters, self.renderer, self.thumbnails
        give_back()

    def _control_problems(self, count: int) -> list[Problem]:
        """What is wrong with this number of control images."""
        fewest, most = self.controls
        if fewest <= count <= most:
            return []
        wanted = f"{fewest} to {most} control images" if most > fewest else ("no", "one")[most] + " control image"
        version = self.parts.settings.get("model_version", "")
        said = f"{self.parts.source} is model_version {version}, which takes {wanted}" if version else f"{self.parts.source} takes {wanted}"
        return [Problem("images", f"images: {count} given, but {said}")]

    def _problems(self, request: Request) -> list[Problem]:
        """What is wrong with a request for this model, apart from its files."""
        problems = [] if request.prompt_list else self._control_problems(len(request.images))
        if request.size is not None:
            problems += off_grid(request.size, self.family.grid)
        return problems


def listed(family: ModelFamily, plain: Preview, prompt_list: str) -> list[Preview]:
    """The prompts of a list in kohya's form; what their flags leave open is as in `plain`. Raises OptionError with every problem and its
    line, and for a list without a prompt."""
    samples = samples_of(family.name)
    names: dict[str, Any] = {"sample_prompts": prompt_list, "sample_steps": plain.steps, "sample_cfg_scale": plain.cfg_scale}
    names |= {"sample_negative_prompt": plain.negative_prompt, "sample_sampler": plain.sampler, "sample_guidance_scale": plain.guidance}
    names |= {"sample_scheduler": plain.scheduler, "sample_shift": plain.shift}
    size = plain.width, plain.height
    options = samples.model_construct(**{name: value for name, value in names.items() if name in samples.model_fields}, sample_size=size)
    try:
        found = [request_of(spec) for spec in read_prompts(Defaults(options, size, family.grid, plain.seed))]
    except OptionError as err:
        # Training has another option in its place.
        raise OptionError([Problem("prompt_list", one.message.replace(OPTION, "prompt_list")) for one in err.problems]) from err
    if not found:
        raise OptionError([Problem("prompt_list", "prompt_list: there is no prompt in it; write one a line")])
    return [replace(one, controls=one.controls or plain.controls) for one in found]


def _tell(on_step: Callable[[Progress], None], index: int, step: int, steps: int, clean: Tensor) -> None:
    on_step(Progress(index, step, steps, clean[0].float().cpu()))


def _drawn(preview: Preview, folder: str) -> Preview:
    """With the wildcards of its texts drawn from its seed. Raises OptionError."""
    prompt, negative = (drawn(getattr(preview, name), folder, preview.seed, name) for name in ("prompt", "negative_prompt"))
    return replace(preview, prompt=prompt, negative_prompt=negative)


def check_without_model(request: Request, grid: int, others: Sequence[Sequence[str]] = ()) -> None:
    """What can be told before anything is loaded. Raises OptionError with every file that is not there or cannot be read, and for a size
    off the family's grid. others: further adapter files."""
    problems: list[Problem] = []
    tried(problems, lambda: read_images(request.images))
    for name in dict.fromkeys(file for files in (request.lora, *others) for file in files):
        tried(problems, partial(adapter_file, name))
    for text in (request.prompt, request.negative_prompt or "", request.prompt_list):
        tried(problems, partial(drawn, text, request.wildcard_dir, 0, ""))
    if request.size is not None:
        problems += off_grid(request.size, grid)
    refuse(problems)


def devices_for(options: PredictOptions) -> Devices:
    """Where each network works: as the options say, else on the first GPU, else on the CPU. Raises OptionError for devices not here."""
    model, loading = options.model, options.loading
    problems: list[Problem] = []
    best = best_device()
    transformer = tried(problems, lambda: device_of("transformer_device", loading.transformer_device, best)) or best
    vae = tried(problems, lambda: device_of("vae_device", getattr(model, "vae_device", None), transformer))
    encoder = tried(problems, lambda: device_of("text_encoder_device", getattr(model, "text_encoder_device", None), transformer))
    refuse(problems)
    assert vae is not None and encoder is not None
    return Devices(transformer, vae, encoder)


def read_images(given: Sequence[Image.Image | str | Path]) -> list[Image.Image]:
    """Control images, upright, in RGB. Raises OptionError naming every file that cannot be read."""
    problems: list[Problem] = []
    found = [
        item.convert("RGB") if isinstance(item, Image.Image) else tried(problems, partial(opened_control, str(item), "images"))
        for item in given
    ]
    refuse(problems)
    return [image for image in found if image is not None]
