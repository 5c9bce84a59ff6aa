"""What tells how good the checkpoints of a grid are: losses of held-out images, from the logs of their runs, and how near to training
images their own images come. Knows numbers, not what to make of them."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from sd_scripts.dataset import triage
from sd_scripts.dataset.images import BadImage
from sd_scripts.runs.events import FileSaved, RunStarted, Validated
from sd_scripts.runs.rundir import RunDirectory
from sd_scripts.toy import worlds

from . import dataset_view
from .data_room.thumbnails import Thumbnails
from .votes import Z

BANDS = 4
"""Parts of the noise levels that losses are told for."""
MOST_TRAINING_IMAGES = 5000
FEWEST = 4
"""Losses below which nothing is said of how certain their mean is."""
Say = Callable[[str], None]
Pairs = Sequence[Sequence[float]]
"""(time, loss) of each held-out sample."""


@dataclass(frozen=True)
class Mean:
    """A mean with the half of its 95 % interval; None where there are too few values to tell."""

    value: float
    half: float | None
    count: int

    def exceeds(self, halves: float) -> bool:
        """Whether it lies more than so many halves of the interval above 0; True where they are not known."""
        return self.half is None or self.value > halves * self.half


@dataclass(frozen=True)
class HeldOut:
    """Held-out losses of one saved file."""

    step: int
    mean: Mean
    bands: tuple[Mean | None, ...]
    """Of the noise levels in [0, 1/BANDS), ...; None for a band without samples."""
    behind: Mean | None
    """How much it lies above the lowest mean, sample by sample: images and noise are the same. None where they cannot be compared."""


@dataclass(frozen=True)
class Nearness:
    """How near to training images the images of a column come."""

    distance: float
    """Median over the images of 1 minus the correlation of the small grey copy with that of the nearest training image."""
    copies: int
    """Images that are nearly the same as a training image."""
    count: int


@dataclass(frozen=True)
class AsAsked:
    """Images of a toy world that show what their prompts name, of those whose prompt names a shape."""

    right: int
    count: int


@dataclass(frozen=True)
class Rating:
    """What models that somebody named say of an image; None where none was asked, or it could not tell. See ratings.py."""

    prompt: float | None
    likeness: float | None
    face: float | None
    has_face: bool = True


@dataclass(frozen=True)
class Rated:
    """What models that somebody named say of the images of a column; see ratings.py."""

    prompt: Mean | None
    """How well they show their prompts."""
    likeness: Mean | None
    """How like training images they are."""
    face: Mean | None
    """How like those of training images their faces are."""
    faceless: int
    """Images in which no face was found."""


def rated(said: Sequence[Rating]) -> Rated | None:
    """Of what is said of each image; None where nothing is."""

    def mean(values: Iterable[float | None]) -> Mean | None:
        there = [value for value in values if value is not None]
        return mean_of(there) if there else None

    prompt, likeness, face = mean(one.prompt for one in said), mean(one.likeness for one in said), mean(one.face for one in said)
    found = Rated(prompt, likeness, face, sum(not one.has_face for one in said))
    return found if found != Rated(None, None, None, 0) else None


def as_asked(prompts: Sequence[str], paths: Sequence[Path]) -> AsAsked | None:
    """What the exact reader of the toy world says of drawn images; None where no prompt names a shape of it. A colour and a place count
    where they are named."""
    right, count = 0, 0
    for prompt, path in zip(prompts, paths, strict=True):
        words = re.findall(r"[a-z]+", prompt.partition(" --")[0].lower())
        shapes, colours = ([word for word in words if word in known] for known in (worlds.SHAPES, worlds.COLORS))
        sides = [word for side in (("top", "bottom"), ("left", "right"), ("center",)) for word in words if word in side]
        if len(shapes) != 1 or len(colours) > 1 or (sides and " ".join(sides) not in worlds.PLACES):
            continue
        try:
            with Image.open(path) as image:
                found = worlds.read(image.convert("RGB"))
        except OSError:
            continue
        count += 1
        right += found.shape_is(shapes[0]) and all(map(found.color_is, colours)) and (not sides or found.place_is(" ".join(sides)))
    return AsAsked(right, count) if count else None


def mean_of(values: Sequence[float]) -> Mean:
    """Their mean, and the half of Student's interval."""
    count = len(values)
    if count < FEWEST:
        return Mean(statistics.fmean(values), None, count)
    return Mean(statistics.fmean(values), student(count - 1) * statistics.stdev(values) / math.sqrt(count), count)


def by_image(values: Sequence[float], images: int) -> Mean:
    """The mean of what so many images, taking turns, show in several samples each; 0: each is of another one.

    Samples of one image lie nearer to each other than those of several, so the interval is that of the images' means; of a single image
    that of its samples, as wide as if they were all alike.
    """
    if not 0 < images < len(values):
        return mean_of(values)
    if images == 1:
        told = mean_of(values)
        return replace(told, half=None if told.half is None else told.half * math.sqrt(told.count))
    means = [statistics.fmean(values[place::images]) for place in range(images)]
    return Mean(statistics.fmean(means), student(images - 1) * statistics.stdev(means) / math.sqrt(images), images)


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's distribution, within 1 %: for 3 degrees of freedom or more the expansion around the normal one
    (Abramowitz and Stegun 1964, 26.7.5), which fewer do not follow."""
    if freedom < 3:
        return (12.706, 4.3027)[freedom - 1]
    powers: tuple[float, ...] = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    )
    return Z + sum(term / float(freedom) ** (place + 1) for place, term in enumerate(powers))


def held_out(run: RunDirectory, files: Collection[str]) -> dict[str, HeldOut]:
    """The losses of those of a run's files that were measured when they were saved, by name."""
    measured: dict[int, Pairs] = {}
    saved: dict[str, int] = {}
    for event in run.history():
        if isinstance(event, RunStarted):
            # A session that goes on from a state does again what came after it.
            measured = {step: pairs for step, pairs in measured.items() if step <= event.start_step}
        elif isinstance(event, Validated) and event.samples:
            measured[event.step] = event.samples
        elif isinstance(event, FileSaved) and event.file in files:
            saved[event.file] = event.step
    return losses_of({file: (step, measured[step]) for file, step in saved.items() if step in measured})


def losses_of(measured: Mapping[str, tuple[int, Pairs]]) -> dict[str, HeldOut]:
    """From (step, losses) of each file to what they say, beside the file of the lowest mean."""
    lowest = min((pairs for _, pairs in measured.values()), key=lambda pairs: statistics.fmean(loss for _, loss in pairs), default=())
    found = {}
    for file, (step, pairs) in measured.items():
        bands = [[loss for time, loss in pairs if min(int(time * BANDS), BANDS - 1) == band] for band in range(BANDS)]
        same = [time for time, _ in pairs] == [time for time, _ in lowest]
        found[file] = HeldOut(
            step,
            mean_of([loss for _, loss in pairs]),
            tuple(mean_of(losses) if losses else None for losses in bands),
            mean_of([loss - low for (_, loss), (_, low) in zip(pairs, lowest, strict=True)]) if same else None,
        )
    return found


def training_images(run: RunDirectory, output_dir: Path, say: Say) -> list[Path]:
    """The images that a run trained on, without regularisation images. Raises OptionError where they cannot be listed any more."""
    for seen in dataset_view.look_at(run.options(), output_dir):
        if isinstance(seen, str):
            say(seen)
        else:
            plan = seen.plan
            trained = (plan.images[index] for index in plan.trained_images())
            return [Path(image.path) for image in trained if not plan.subsets[image.subset].is_reg][:MOST_TRAINING_IMAGES]
    return []


def signs_of(paths: Sequence[Path], kept: Thumbnails, say: Say) -> list[triage.Signs]:
    """What images are compared by; those that cannot be read are left out."""
    found = []
    for number, path in enumerate(paths):
        if number % 20 == 0:
            say(f"Looks at the training images: {number} of {len(paths)}")
        try:
            found.append(kept.signs(path))
        except (BadImage, OSError):
            continue
    return found


def nearness(drawn: Sequence[triage.Signs], trained: Sequence[triage.Signs]) -> Nearness | None:
    """How near some images come to others; None where there are none of either."""
    if not drawn or not trained:
        return None
    nearest = triage.nearest(drawn, trained)
    return Nearness(statistics.median(1 - best for best, _ in nearest), sum(is_copy for _, is_copy in nearest), len(nearest))
