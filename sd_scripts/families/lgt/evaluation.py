"""Evaluation of style transfer during training: images of every style in every other style, one sheet of all, and what is measured.

A folder `inference/epoch_0005/` has `<from>_to_<to>.jpg` for each pair of styles, the same style included; beside them for each source
image `<from>_source.jpg`, which is what training would see of it, and `<from>_vae.jpg`, what the VAE alone makes of that. With several
images of a style the names begin with `<from>_<name of the image>`. `grid.jpg` has a row for each source image: the image, the
VAE's, the transfers. `metrics.csv` has a line for each transfer and for each of four baselines, by which the numbers can be judged: the
untouched source, the VAE's round trip, another source image in its place, and a real image of the wanted style.

Shapes: C latent channels, h w latent sides, H W image sides in pixels.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torch.nn import functional as F

from sd_scripts.dataset.buckets import Size, cut_for, rules_of
from sd_scripts.dataset.config import evaluated_folders, images_below
from sd_scripts.dataset.images import BadImage, read_size
from sd_scripts.dataset.plan import Plan
from sd_scripts.dataset.progress import Bar
from sd_scripts.families.common.images import as_images, evaluating, visiting
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.core.rng import rng_for, seed_for
from sd_scripts.library.data.views import cached_view, see, see_file
from sd_scripts.runs.events import Evaluated, Warned
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import OptionError, Problem, first_line
from sd_scripts.schema.files import folder_aside

from .options import LgtSampleOptions
from .similarity import chosen_positions, self_similarity
from .transfer import Settings, begin, edges_of, generate
from .transport import directions, projected, quantile_distance

if TYPE_CHECKING:
    from .model import Lgt

METRICS = ("swd_target", "swd_source", "swd_ratio", "ssm_source", "structure")
SCALES = (1, 3, 5)
"""Sides, in latent pixels, of the patches that swd is the mean over, whatever a run is trained on: runs are to be compared."""
NUM_DIRECTIONS = 256
NUM_REFERENCES = 64
"""Most training images that stand for a style."""
NUM_PATCHES = 8192
"""Most of their patches that are compared; the rest is left out at random."""
DESCRIPTOR_SIZE, NUM_POSITIONS = 3, 1024
"""Side of what ssm_source compares, in latent pixels, and at how many places at most; the rest is left out at random."""
QUALITY = 92
"""Of the JPEG files."""
MOST_CELL, MOST_GRID = 256, 60_000
"""Longest side of an image in the sheet, and of the sheet, in pixels; a JPEG ends at 65,535."""
LABEL, GAP = 16, 2
"""Height of the line of names in the sheet, and what is left between images, in pixels."""


@dataclass(frozen=True)
class Source:
    """An image that is transferred; exactly one of file and image says where it is."""

    style: str
    stem: str
    size: Size
    """(width, height) at which training would see it."""
    file: str = ""
    image: int = -1
    """Number of an image of the data set."""


@dataclass(frozen=True)
class Sources:
    """Everything that is transferred, by style, and sentences for a person."""

    items: tuple[Source, ...]
    warnings: tuple[str, ...] = ()

    @property
    def sizes(self) -> tuple[Size, ...]:
        return tuple(dict.fromkeys(source.size for source in self.items))

    def lines(self, plan: Plan) -> list[str]:
        """How many images each style has, and how many transfers an evaluation makes."""
        counts = Counter(plan.images[index].caption for index in plan.trained_images())
        told = ", ".join(f"{style} {count}" for style, count in sorted(counts.items()))
        tests, transfers = len(self.items), len(self.items) * len(counts)
        return [f"styles: {told}", f"evaluation: {transfers} transfers, of {tests} {'image' if tests == 1 else 'images'}"]


@dataclass(frozen=True)
class Measures:
    """How an image stands to the style it is to have, and to the source. Only self-similarity and structure need a source of its size."""

    swd_target: float
    """Sliced Wasserstein distance of its latents' patches to those of real images of the wanted style."""
    swd_source: float
    """The same to the style of the source."""
    swd_ratio: float | None
    """swd_target over that of the untouched source; None where that is 0."""
    ssm_source: float | None
    """How much the similarities between places differ from those of the source; 0 is the same content."""
    structure: float | None
    """Correlation of edges with those of the source; 1 is the same edges, about 0 unrelated ones."""


class Data(Protocol):
    """What an evaluation asks of the images that are trained on."""

    @property
    def styles(self) -> tuple[str, ...]: ...

    def latents_of_style(self, style: str, most: int) -> list[Tensor]: ...


def sources_of(options: LgtSampleOptions, dataset: DatasetOptions, plan: Plan, cache_dir: Path) -> Sources:
    """The images that an evaluation transfers. Raises OptionError for a folder that is not there, for styles without a test image and
    for test images that cannot be read."""
    styles = plan.captions()
    count = options.test_images_per_style or None
    if options.test_image_dir is None:
        return Sources(tuple(source for style in styles for source in _of_data_set(plan, style)[:count]))
    folders = evaluated_folders(options.test_image_dir, cache_dir)
    chosen = {style: images_below(folders[style])[:count] if style in folders else [] for style in styles}
    problems = []
    if missing := [style for style, files in chosen.items() if not files]:
        problems.append(
            f"{options.test_image_dir} has no images of {', '.join(missing)}; put some into sub-folders of these names, or leave it out, "
            "and training images are evaluated"
        )
    items = []
    for style, files in chosen.items():
        for file in files:
            try:
                size = cut_for(read_size(file), rules_of(dataset)[0]).bucket
            except BadImage as err:
                problems.append(f"the image {file} {err}; put it right, or take it away")
                continue
            items.append(Source(style, file.stem, size, file=str(file)))
    if problems:
        raise OptionError([Problem("test_image_dir", f"test_image_dir: {text}") for text in problems])
    unknown = [name for name in folders if name not in styles]
    told = f"{options.test_image_dir} has folders that are no trained styles and are not evaluated: {', '.join(unknown)}"
    return Sources(tuple(items), (told,) if unknown else ())


def _of_data_set(plan: Plan, style: str) -> list[Source]:
    """The images of a style in the data set by name, held-out ones first."""
    found = []
    for images in (plan.held_out, plan.trained_images()):
        own = [index for index in images if plan.images[index].caption == style]
        for index in sorted(own, key=lambda index: plan.images[index].name):
            found.append(Source(style, Path(plan.images[index].name).stem, plan.cut(index, 0).bucket, image=index))
    return found


class Evaluation:
    """What a run does when an evaluation is due; see trainer.Samples. One that fails is a warning, never the end of the run."""

    def __init__(
        self,
        family: Lgt,
        parts: Parts,
        options: LgtSampleOptions,
        dataset: DatasetOptions,
        plan: Plan,
        sources: Sequence[Source],
        data: Data,
        run: RunDirectory,
        seed: int,
        saves: bool = True,
        agreed: Callable[[list[int]], list[int]] = list,
        progress: Callable[[], None] = lambda: None,
        tiled: bool = False,
    ) -> None:
        """saves: off in processes that only lend their share of a network to the one that writes. agreed: gives that one's choice to all
        that compute together. progress: called after each source image, for those who wait. tiled: images are decoded in tiles."""
        self._family, self._parts, self._options, self._dataset, self._plan = family, parts, options, dataset, plan
        self._sources, self._data, self._run, self._seed = tuple(sources), data, run, seed
        self._saves, self._agreed, self._progress, self._tiled = saves, agreed, progress, tiled
        self._pixels: dict[int, Tensor] = {}
        """(3, H, W) in [-1, 1] of sources by their number, on the CPU."""

    def folder(self, step: int) -> Path:
        """Where the evaluation after `step` steps goes: named by the epochs that are over, and by the step where none ends with it."""
        epochs = self._plan.epoch_of(step)
        ends = step == 0 or epochs > self._plan.epoch_of(step - 1)
        return self._run.inference / (f"epoch_{epochs:04d}" if ends else f"epoch_{epochs:04d}_step_{step:06d}")

    def render(self, step: int, missing_only: bool = False) -> None:
        """Transfers everything and measures it; the folder appears complete or not at all. missing_only makes it where it is not there."""
        if missing_only and not self._agreed([] if self.folder(step).is_dir() else [0]):
            return
        try:
            # Nothing draws from the global generators; what does one day must not be noticed by training.
            with torch.random.fork_rng(), torch.no_grad(), self._rendering() as parts:
                found = self._computed(parts, [(source, self._seen(number)) for number, source in enumerate(self._sources)], f"step {step}")
            if self._saves:
                self._write(step, found)
        # Anything a solver, a decoder or a full disk can raise: an evaluation never ends the run, and the log says why it is missing.
        except Exception as err:
            self._run.log(Warned(text=f"step {step}: the evaluation could not be made: {first_line(err)}; training goes on"))

    def try_out(self) -> str:
        """Transfers the largest source image in one step, into nowhere; says what it was. Raises what transferring raises."""
        number = max(range(len(self._sources)), key=lambda number: math.prod(self._sources[number].size))
        source = self._sources[number]
        with torch.random.fork_rng(), torch.no_grad(), self._rendering() as parts:
            self._computed(parts, [(source, self._seen(number))], "tried out", fewest=True)
        return f"an evaluation of {source.size[0]} x {source.size[1]}"

    @contextmanager
    def _rendering(self) -> Iterator[Parts]:
        """The parts to render with. All networks stay where they compute, because a source goes back and forth between them."""
        with _gathered(self._parts), visiting(self._parts, self._tiled) as parts, evaluating(parts):
            yield parts

    # Images.

    def _computed(self, parts: Parts, sources: Sequence[tuple[Source, Tensor]], what: str, fewest: bool = False) -> _Found:
        """Transfers of source images, with their pixels, to every style, with latents for measuring. fewest: in one step."""
        options, styles = self._options, self._data.styles
        settings = Settings(
            1 if fewest else options.sample_steps,
            options.sample_sampler,
            options.sample_strength,
            options.sample_start,
            options.sample_cfg_scale,
            options.sample_temperature,
            options.sample_start_noise,
        )
        found = _Found(styles, [source for source, _ in sources])
        bar = Bar(sources, desc=f"evaluate {what}", unit="image", leave=False, disable=not self._saves)
        for source, seen in bar:
            pixels = seen[None]
            latents = self._family.encode_images(parts, pixels)
            names = [f"{source.style}/{source.stem}/{style}" for style in styles]
            seeds = [seed_for(self._seed, 0, f"evaluation/{name}") for name in names]
            # An inversion depends on the source alone; noise is that of each pair.
            starts = 1 if settings.start == "inversion" else len(styles)
            several = latents.expand(starts, -1, -1, -1)
            state = begin(self._family, parts, several, [source.style] * starts, seeds[:starts], settings)
            edges = edges_of(self._family, parts, latents)
            several_edges = None if edges is None else edges.expand(len(styles), -1, -1, -1)
            moved = generate(self._family, parts, state.expand(len(styles), -1, -1, -1), styles, seeds, settings, edges=several_edges)
            round_trip = self._family.decode(parts, latents)
            again = self._family.encode_images(parts, round_trip)
            shown = torch.cat([self._family.decode(parts, one) for one in moved.split(1)])
            found.add(pixels, round_trip.cpu(), shown.cpu(), latents.cpu(), again.cpu(), moved.cpu())
            self._progress()
        return found

    def _seen(self, number: int) -> Tensor:
        """A source as training sees it."""
        source = self._sources[number]
        if number not in self._pixels:
            if source.file:
                self._pixels[number] = see_file(source.file, self._dataset)
            else:
                self._pixels[number] = see(self._plan, self._seed, cached_view(self._plan, self._seed, source.image, 0)).pixels
        return self._pixels[number]

    # Numbers.

    def _measured(self, found: _Found) -> list[dict[str, Any]]:
        """A row for each transfer and each baseline, with what, from, to, stem, file and the metrics."""
        distances = self._distances(found)
        rows = []
        for number, source in enumerate(found.sources):
            other = found.other_than(number)
            for column, style in enumerate(found.styles):
                own = found.styles.index(source.style)
                candidates = {"transfer": (number, 2 + column), "source": (number, 0), "vae_round_trip": (number, 1)}
                candidates |= {} if other is None else {"random_source": (other, 0)}
                real = found.real(style, number)
                candidates |= {} if real is None else {"real_target": (real, 0)}
                untouched = distances[number, 0][column]
                for what, (row, place) in candidates.items():
                    towards = distances[row, place]
                    measures = Measures(
                        towards[column],
                        towards[own],
                        towards[column] / untouched if untouched > 0 else None,
                        *found.content(number, row, place),
                    )
                    file = found.files[number][place] if row == number else ""
                    rows.append({"what": what, "from": source.style, "to": style, "stem": source.stem, "file": file, **asdict(measures)})
        return rows

    def _distances(self, found: _Found) -> dict[tuple[int, int], list[float]]:
        """By (source, place in its row of latents): the distance to each style."""
        places = {(number, place): one for number, row in enumerate(found.latents) for place, one in enumerate(row)}
        together: dict[torch.Size, list[tuple[int, int]]] = {}
        for place, one in places.items():
            together.setdefault(one.shape, []).append(place)
        distances = {place: [0.0] * len(found.styles) for place in places}
        for column, style in enumerate(found.styles):
            latents = self._data.latents_of_style(style, NUM_REFERENCES)
            smallest = min(min(one.shape[-2:]) for one in (*latents, *places.values()))
            scales = [size for size in SCALES if size <= smallest]
            for size in scales:
                along = directions(latents[0].shape[0] * size**2, NUM_DIRECTIONS, rng_for(0, size, "evaluation/directions"))[None]
                wanted = torch.cat([projected(one[None, None], along, size) for one in latents], dim=-1)
                if wanted.shape[-1] > NUM_PATCHES:
                    kept = torch.randperm(wanted.shape[-1], generator=rng_for(0, size, "evaluation/patches"))[:NUM_PATCHES]
                    wanted = wanted[..., kept]
                for group in together.values():
                    moved = torch.cat([projected(places[place][None, None], along, size) for place in group])
                    # The references are sorted once for all.
                    for place, distance in zip(group, quantile_distance(moved, wanted).mean(dim=-1).tolist(), strict=True):
                        distances[place][column] += distance / len(scales)
        return distances

    # Files.

    def _write(self, step: int, found: _Found) -> None:
        """Writes the folder aside, puts it in its place, and logs what is in it."""
        target = self.folder(step)
        # One of a run that was sent back, or killed before its state was saved, may be there.
        with folder_aside(target) as aside:
            summary = self._fill(aside, step, found)
        self._run.log(Evaluated(step=step, epoch=summary["epoch"], folder=f"inference/{target.name}", means=summary["means"]))

    def _fill(self, folder: Path, step: int, found: _Found) -> dict[str, Any]:
        """Writes all files; the content of summary.json."""
        for files, images in zip(found.files, found.images, strict=True):
            for name, image in zip(files, images, strict=True):
                image.save(folder / name, format="JPEG", quality=QUALITY)
        found.grid().save(folder / "grid.jpg", format="JPEG", quality=QUALITY)
        rows = self._measured(found)
        groups: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            groups.setdefault(row["what"], []).append(row)
        (folder / "metrics.csv").write_text(_table(rows), encoding="utf-8", newline="")
        means = {what: _means(group, groups["source"]) for what, group in groups.items()}
        summary = {
            "styles": list(found.styles),
            "step": step,
            "epoch": self._plan.epoch_of(step),
            "pairs": [{name: value for name, value in row.items() if name != "what"} for row in groups["transfer"]],
            "sources": [
                {"style": source.style, "stem": source.stem, "file": files[0], "vae": files[1]}
                for source, files in zip(found.sources, found.files, strict=True)
            ],
            "baselines": {what: values for what, values in means.items() if what != "transfer"},
            "means": means["transfer"],
        }
        (folder / "summary.json").write_text(json.dumps(summary, ensure_ascii=False, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return summary


class _Found:
    """What one evaluation has made so far: for each source a row of the source, the VAE's round trip and a transfer to each style."""

    def __init__(self, styles: Sequence[str], sources: Sequence[Source]) -> None:
        self.styles, self.sources = tuple(styles), tuple(sources)
        self.files = _file_names(self.styles, self.sources)
        self.images: list[list[Image.Image]] = []
        self.latents: list[list[Tensor]] = []
        """(C, h, w) each."""
        self._edges: list[list[Tensor]] = []

    def add(self, pixels: Tensor, round_trip: Tensor, shown: Tensor, latents: Tensor, again: Tensor, moved: Tensor) -> None:
        """The next source: images (1 or S, 3, H, W) in [-1, 1] and latents (1 or S, C, h, w), of S styles."""
        row = torch.cat([pixels, round_trip, shown])
        self.images.append(as_images(row))
        self._edges.append(list(edges(row)))
        self.latents.append(list(torch.cat([latents, again, moved])))

    def other_than(self, number: int) -> int | None:
        """Another source image of the same size, the next one in a circle; None where there is none."""
        count = len(self.sources)
        others = ((number + ahead) % count for ahead in range(1, count))
        return next((other for other in others if self.sources[other].size == self.sources[number].size), None)

    def real(self, style: str, number: int) -> int | None:
        """A source image of this style that is not the one of that number; None where there is none."""
        return next((place for place, source in enumerate(self.sources) if source.style == style and place != number), None)

    def content(self, source: int, row: int, place: int) -> tuple[float | None, float | None]:
        """Self-similarity and structure of an image against a source; None where they have different sizes."""
        found, wanted = self.latents[row][place][None], self.latents[source][0][None]
        if found.shape != wanted.shape:
            return None, None
        # Patches at the border go on as mirror images, for which a side must be longer than half a patch.
        size = DESCRIPTOR_SIZE if min(wanted.shape[-2:]) > DESCRIPTOR_SIZE // 2 else 1
        count = wanted.shape[-2] * wanted.shape[-1]
        positions = chosen_positions(count, NUM_POSITIONS, rng_for(0, count, "evaluation/positions"))[None]
        similarity = float(self_similarity(found, wanted, size, positions))
        return similarity, correlation(self._edges[row][place], self._edges[source][0])

    def grid(self) -> Image.Image:
        """One sheet of everything, with the names of its columns above."""
        rows, columns = len(self.images), 2 + len(self.styles)
        longest = max(max(image.size) for row in self.images for image in row)
        cell = min(longest, MOST_CELL, (MOST_GRID - LABEL) // rows - GAP, MOST_GRID // columns - GAP)
        scaled = [[_within(image, cell) for image in row] for row in self.images]
        widths = [max(row[column].width for row in scaled) for column in range(columns)]
        heights = [max(image.height for image in row) for row in scaled]
        sheet = Image.new("RGB", (sum(widths) + GAP * (columns - 1), LABEL + sum(heights) + GAP * (rows - 1)), "white")
        font = ImageFont.load_default(LABEL - 5)
        left = 0
        for column, title in enumerate(("source", "VAE", *(f"to {style}" for style in self.styles))):
            band = Image.new("RGB", (widths[column], LABEL), "white")
            ImageDraw.Draw(band).text((1, 1), title, fill="black", font=font)
            sheet.paste(band, (left, 0))
            top = LABEL
            for row, height in zip(scaled, heights, strict=True):
                sheet.paste(row[column], (left, top))
                top += height + GAP
            left += widths[column] + GAP
        return sheet


def edges(pixels: Tensor) -> Tensor:
    """Strength of edges (B, H, W) of images (B, 3, H, W) in [-1, 1]: the length of Sobel's gradient of luminance, a little blurred."""
    weights = pixels.new_tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    luminance = (pixels.float() * weights).sum(dim=1, keepdim=True)
    across = pixels.new_tensor([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]]) / 8
    kernels = torch.stack([across, across.T])[:, None]
    gradient = F.conv2d(F.pad(luminance, (1, 1, 1, 1), mode="replicate"), kernels)
    strength = gradient.square().sum(dim=1, keepdim=True).sqrt()
    return F.avg_pool2d(F.pad(strength, (2, 2, 2, 2), mode="replicate"), 5, stride=1)[:, 0]


def correlation(first: Tensor, second: Tensor) -> float:
    """Pearson's, of two maps of one shape; 0 where one of them is flat."""
    one, other = (values.double() - values.double().mean() for values in (first, second))
    lengths = float(one.norm() * other.norm())
    return float((one * other).sum()) / lengths if lengths > 0 else 0.0


def _file_names(styles: Sequence[str], sources: Sequence[Source]) -> list[list[str]]:
    """For each source the names of its row of images; names that would be taken twice get a number."""
    several = len({source.style for source in sources}) < len(sources)
    taken: set[str] = {"grid.jpg"}

    def free(stem: str) -> str:
        number, name = 1, f"{stem}.jpg"
        while name.casefold() in taken:
            number += 1
            name = f"{stem}-{number}.jpg"
        taken.add(name.casefold())
        return name

    rows = []
    for source in sources:
        begin = f"{source.style}_{source.stem}" if several else source.style
        rows.append([free(f"{begin}{end}") for end in ("_source", "_vae", *(f"_to_{style}" for style in styles))])
    return rows


def _within(image: Image.Image, side: int) -> Image.Image:
    """The image, made smaller where its longest side is longer than that."""
    if max(image.size) <= side:
        return image
    scale = side / max(image.size)
    return image.resize((max(1, round(image.width * scale)), max(1, round(image.height * scale))), Image.Resampling.BOX)


def _table(rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    table = csv.DictWriter(text, ["what", "from", "to", "stem", "file", *METRICS], lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _means(rows: Sequence[Mapping[str, Any]], untouched: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Means over what goes to another style, over everything where there is only one; swd_ratio is the ratio of means.

    untouched: the rows of the sources themselves.
    """

    def mean(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
        values = [row[name] for row in [row for row in rows if row["from"] != row["to"]] or rows]
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    means = {name: mean(rows, name) for name in METRICS if name != "swd_ratio"}
    after, before = means["swd_target"], mean(untouched, "swd_target")
    means["swd_ratio"] = after / before if after is not None and before else None
    return means


@contextmanager
def _gathered(parts: Parts) -> Iterator[None]:
    """All networks on the backbone's device within the block; afterwards each is where it was."""
    device = next(parts.backbone.parameters()).device
    away = [(module, next(module.parameters()).device) for module in parts.modules().values()]
    away = [(module, home) for module, home in away if home != device]
    try:
        for module, _ in away:
            module.to(device)
        yield
    finally:
        for module, home in away:
            module.to(home)
        if away and device.type == "cuda":
            torch.cuda.empty_cache()
