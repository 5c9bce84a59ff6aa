"""Previews during training: the prompts of a run, rendered by the family's own preview function and saved with what made them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import Any

from PIL import Image, PngImagePlugin

from sd_scripts.dataset.images import BadImage, decode
from sd_scripts.dataset.progress import Bar
from sd_scripts.library.core.protocols import Preview
from sd_scripts.runs.events import Previewed, Warned
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.errors import OptionError, Problem, first_line
from sd_scripts.schema.files import written_aside
from sd_scripts.schema.prompts import OPTION, PromptSpec
from sd_scripts.schema.toml_files import read_toml

from .renderer import Renderer, at_once

MAX_SEED = 2**32
"""Seeds that are drawn stay below this, so that they can be typed again."""
OTHERS = 50
"""Numbers of prompts that are not the run's own begin here."""
GAP = 2
"""Pixels between the images of a grid."""


def grid_of(images: Sequence[Image.Image], columns: int | None = None) -> Image.Image:
    """Images row by row, each with the room of the largest; columns: None is the root of their number, rounded down."""
    columns = math.isqrt(len(images)) if columns is None else columns
    rows = -(-len(images) // columns)
    width, height = (max(image.size[side] for image in images) for side in (0, 1))
    grid = Image.new("RGB", (columns * (width + GAP) - GAP, rows * (height + GAP) - GAP), "white")
    for number, image in enumerate(images):
        grid.paste(image, (number % columns * (width + GAP), number // columns * (height + GAP)))
    return grid


def request_of(spec: PromptSpec) -> Preview:
    """The prompt as the family takes it, its control images upright in RGB. Raises OptionError for one that cannot be read."""
    controls = tuple(opened_control(file) for file in spec.controls)
    return Preview(
        spec.prompt,
        spec.negative_prompt,
        spec.width,
        spec.height,
        spec.seed,
        spec.steps,
        spec.cfg_scale,
        spec.sampler,
        spec.guidance,
        controls,
        spec.scheduler,
        spec.shift,
    )


def opened_control(file: str, option: str = OPTION) -> Image.Image:
    """A control image, upright, in RGB. Raises OptionError, naming the file, for one that cannot be read."""
    try:
        return Image.fromarray(decode(Path(file).expanduser()).rgb)
    except BadImage as err:
        raise OptionError(Problem(option, f"{option}: the control image {file} {err}; put it right, or name another one")) from err


def save_image(
    image: Image.Image,
    path: Path,
    request: Preview,
    source: str,
    step: int | None = None,
    controls: Sequence[str] = (),
    adapters: Sequence[Mapping[str, Any]] = (),
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Writes a PNG whose text says what made it, in the line that other tools read (`parameters`) and as JSON (`request`).

    controls: files of the request's control images, of which the names are written down. adapters: name, weight and sha256 of each file
    that is on the model. more: settings that a Preview has no place for, by name.
    """
    settings = {
        "Steps": request.steps,
        "Sampler": request.sampler,
        "CFG scale": request.cfg_scale,
        "Seed": request.seed,
        "Size": f"{request.width}x{request.height}",
        "Model": source,
    }
    if request.scheduler != "auto":
        settings |= {"Schedule type": request.scheduler, **({} if request.shift is None else {"Shift": request.shift})}
    if step is not None:
        settings["Training step"] = step
    if adapters:
        # As other tools write it: the short hash of the file.
        settings["Lora hashes"] = '"' + ", ".join(f"{Path(one['name']).stem}: {one['sha256'][:10]}" for one in adapters) + '"'
    settings |= {name.replace("_", " ").capitalize(): value for name, value in more.items()}
    lines = [request.prompt, *([f"Negative prompt: {request.negative_prompt}"] if request.negative_prompt else [])]
    text = PngImagePlugin.PngInfo()
    text.add_itxt("parameters", "\n".join([*lines, ", ".join(f"{key}: {value}" for key, value in settings.items())]))
    named: dict[str, Any] = {"controls": [Path(file).name for file in controls], **more}
    if adapters:
        named["adapters"] = list(adapters)
    text.add_itxt("request", json.dumps({**vars(request), **named, "source": source, "step": step}, ensure_ascii=False))
    with written_aside(path) as aside:
        image.save(aside, format="PNG", pnginfo=text)


@dataclass
class Previews:
    """The prompts of a run and where their images go. An image that cannot be rendered is a warning, never the end of the run."""

    renderer: Renderer
    prompts: Sequence[PromptSpec]
    run: RunDirectory
    name: str
    """Name of the saved files, without folder and ending."""
    saves: bool = True
    """Off in processes that only lend their share of a sharded network to the one that saves."""
    agreed: Callable[[list[int]], list[int]] = list
    """Gives the first process's choice of prompts to all that render together."""
    progress: Callable[[], None] = lambda: None
    """Called after each batch of images, for those who wait."""
    read: Callable[[str], Sequence[PromptSpec]] | None = None
    """The prompts in a text, which raises OptionError; None where they stay those of the start."""
    same_text: Callable[[str], str] = str
    """Gives the first process's text to all that render together."""

    def __post_init__(self) -> None:
        self._written = self._in_config()
        self._others: dict[PromptSpec, int] = {}

    def path(self, step: int, index: int) -> Path:
        return self.run.samples / f"{self.name}-{step:06d}-{index:02d}.png"

    def render(self, step: int, missing_only: bool = False) -> None:
        """Renders all prompts for a step, those of equal size and settings together; missing_only leaves out images that exist."""
        text = self.same_text(self._in_config())
        if text != self._written:
            self.prompts, self._written = self._read(step, text, self.prompts), text
        chosen = list(range(len(self.prompts)))
        if missing_only:
            chosen = self.agreed([index for index in chosen if not self.path(step, index).exists()])
        self._render(step, {index: self.prompts[index] for index in chosen})

    def render_other(self, step: int, prompts: str) -> None:
        """Renders other prompts for a step; each has a number of its own, so that it is found again at a later step."""
        specs = self._read(step, self.same_text(prompts), ())
        self._render(step, {self._others.setdefault(spec, OTHERS + len(self._others)): spec for spec in specs})

    def _in_config(self) -> str:
        """The prompts as config.toml has them now, where somebody may have changed them; those of the start where it cannot be read."""
        try:
            return str(read_toml(self.run.config).get(OPTION, ""))
        except OptionError:
            return getattr(self, "_written", "")

    def _read(self, step: int, text: str, otherwise: Sequence[PromptSpec]) -> Sequence[PromptSpec]:
        try:
            return otherwise if self.read is None else self.read(text)
        except OptionError as err:
            self.run.log(Warned(text=f"step {step}: the changed prompts were not taken: {err}; training goes on"))
            return otherwise

    def _render(self, step: int, specs: Mapping[int, PromptSpec]) -> None:
        wanted = [(index, request) for index, spec in specs.items() if (request := self._request(step, index, spec)) is not None]
        if not wanted:
            return
        with Bar(total=len(wanted), desc=f"sample step {step}", unit="image", leave=False, disable=not self.saves) as bar:
            for batch in _batches(wanted):
                self._render_batch(step, batch, specs)
                bar.update(len(batch))
                self.progress()

    def try_out(self) -> str:
        """Renders the batch of previews with most pixels in one step, into nowhere; says what it was. Raises what rendering raises."""
        wanted = list(enumerate(request_of(spec) for spec in self.prompts))
        batch = max(_batches(wanted), key=lambda batch: len(batch) * batch[0][1].width * batch[0][1].height)
        self.renderer.render([replace(request, steps=1) for _, request in batch])
        self.progress()
        first = batch[0][1]
        return f"{len(batch)} preview{'s' if len(batch) > 1 else ''} of {first.width} x {first.height}"

    def _request(self, step: int, index: int, spec: PromptSpec) -> Preview | None:
        """The request of a prompt; None, after a warning, when one of its control images cannot be read any more."""
        try:
            return request_of(spec)
        except OptionError as err:
            self.run.log(Warned(text=f"step {step}: preview {index} could not be rendered: {err}; training goes on"))
            return None

    def _render_batch(self, step: int, batch: list[tuple[int, Preview]], specs: Mapping[int, PromptSpec]) -> None:
        try:
            images = self.renderer.render([request for _, request in batch])
            for (index, request), image in zip(batch, images, strict=True) if self.saves else ():
                save_image(image, self.path(step, index), request, self.renderer.parts.source, step, specs[index].controls)
                self.run.log(
                    Previewed(
                        step=step,
                        index=index,
                        file=f"samples/{self.path(step, index).name}",
                        prompt=request.prompt,
                        seed=request.seed,
                    )
                )
        # Anything a sampler, a decoder or a full disk can raise: a preview never ends the run, and the log says why it is missing.
        except Exception as err:
            numbers = ", ".join(str(index) for index, _ in batch)
            self.run.log(Warned(text=f"step {step}: preview {numbers} could not be rendered: {first_line(err)}; training goes on"))


def _batches(wanted: list[tuple[int, Preview]]) -> Iterator[list[tuple[int, Preview]]]:
    def alike(item: tuple[int, Preview]) -> tuple[object, ...]:
        request = item[1]
        controls = tuple(image.size for image in request.controls)
        asked = (request.width, request.height, request.steps, request.cfg_scale, request.guidance)
        return (*asked, request.sampler, request.scheduler, str(request.shift), controls)

    for _, group in groupby(sorted(wanted, key=lambda item: (alike(item), item[0])), key=alike):
        items = list(group)
        together = at_once((items[0][1].width, items[0][1].height))
        for start in range(0, len(items), together):
            yield items[start : start + together]
