"""The toy world: coloured shapes with captions, drawn from a seed and read back from pixels.

Knows numpy and PIL only; never imports torch, so a GUI process may draw with it.

    Scene  --caption-->  "a red circle at the top left"  --scene_of-->  Scene
    Scene  --draw----->  image                           --read------>  Reading
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw

BASE_SHAPES = ("circle", "square", "triangle")
"""Shapes that a base model is trained on."""

NEW_SHAPES = ("star",)
"""Shapes that no base has seen: what a LoRA teaches. Tokenizers and VAEs do know them."""

SHAPES = BASE_SHAPES + NEW_SHAPES

COLORS: dict[str, tuple[int, int, int]] = {
    "red": (220, 40, 45),
    "yellow": (240, 195, 30),
    "green": (60, 165, 50),
    "teal": (15, 165, 180),
    "blue": (40, 75, 215),
    "purple": (150, 50, 180),
}

NEW_COLORS = ("teal",)
"""Colours that no base but sdxl's has seen, and that can be taught to the others."""

KNOWN_COLORS = tuple(color for color in COLORS if color not in NEW_COLORS)
"""Colours that every base is trained on."""

SUBJECT_WORD = "zwx"
"""The word that DreamBooth ties to the subject: one token, and no base knows what it means."""

SUBJECT_SHAPE, SUBJECT_COLOR = "circle", "teal"
"""What the subject looks like. Its class are circles; bases that do not know teal cannot draw it."""


def colors_of(family: str) -> tuple[str, ...]:
    """Colours that the toy base of this family was trained on; the data set shapes, from which ddpm begins, has all."""
    return tuple(COLORS) if family in ("sdxl", "ddpm") else KNOWN_COLORS


def sizes_of(family: str) -> tuple[tuple[int, int], ...]:
    """(width, height) in pixels that the toy base of this family was trained at."""
    if family == "qwen_image21":
        return SIZES_OF_32
    return LARGE_SIZES if family in ("anima", "chroma", "flux", "flux2", "flux3", "kontext", "krea2") else SIZES


_COLUMNS = {"left": 0.3, "": 0.5, "right": 0.7}
_ROWS = {"top": 0.3, "": 0.5, "bottom": 0.7}

PLACES: dict[str, tuple[float, float]] = {
    " ".join(word for word in (row, column) if word) or "center": (x, y)
    for (row, y), (column, x) in itertools.product(_ROWS.items(), _COLUMNS.items())
}
"""Name -> (x, y) of the shape's centre, as fractions of width and height."""

SIZES = ((64, 64), (80, 48), (48, 80))
"""(width, height) in pixels that bases are trained at: one area, three aspect ratios, multiples of 16."""

LARGE_SIZES = ((128, 128), (160, 112), (112, 160))
"""The same for bases whose tokens are 16 x 16 pixels: 64 tokens or more, as a star wants them."""

SIZES_OF_32 = ((128, 128), (160, 96), (96, 160))
"""The same for those that take sides of 32 pixels alone, and have reference images of about 128 x 128 as these are."""

SHORT_TEMPLATES = ("a {shape}", "{shape}", "a {color} {shape}", "a {shape} at the {place}")
"""Captions that leave the colour, the place or both open: class prompts are of this kind."""

TEMPLATES = (
    "a {color} {shape} at the {place}",
    "a picture of a {color} {shape} at the {place}",
    "{color} {shape}, {place}",
    "at the {place}, a {color} {shape}",
    "a {shape} at the {place}, {color}",
)

_POSITION_JITTER = 0.02
_RADIUS = (0.20, 0.25)
_TILT_DEGREES = 8.0
_OVERSAMPLING = 4
_STAR_INNER_RADII = (0.42, 0.52)  # of the outer one; stars are drawn with the first, and a blunter one still is a star


@dataclass(frozen=True)
class Scene:
    """One shape of one colour at one place; the three words are keys of the tables above."""

    shape: str
    color: str
    place: str


@dataclass(frozen=True)
class Reading:
    """What pixels show; a word is None where they are unclear.

    confidence is the overlap (intersection over union, 0 to 1) with the best matching outline, and margin
    its lead over the best outline of another shape.
    """

    shape: str | None
    color: str | None
    place: str | None
    confidence: float
    margin: float

    def shape_is(self, shape: str) -> bool:
        """Whether the image clearly shows this shape."""
        return self.shape == shape

    def color_is(self, color: str) -> bool:
        """Whether the shape clearly has this colour."""
        return self.color == color

    def place_is(self, place: str) -> bool:
        """Whether the shape is clearly at this place."""
        return self.place == place

    def shows(self, scene: Scene) -> bool:
        """Whether shape, colour and place are all as the scene says."""
        return self.shape_is(scene.shape) and self.color_is(scene.color) and self.place_is(scene.place)


NOTHING = Reading(None, None, None, 0.0, 0.0)
"""The reading of an image without one clear shape."""


def rng_for(seed: int, *numbers: int) -> np.random.Generator:
    """The generator of one sample: the same seed and numbers always give the same draws. All are >= 0."""
    return np.random.default_rng((seed, *numbers))


def scenes(shapes: tuple[str, ...] = BASE_SHAPES, colors: tuple[str, ...] = tuple(COLORS)) -> tuple[Scene, ...]:
    """Every combination of these shapes and colours with all places, in a fixed order."""
    return tuple(Scene(*words) for words in itertools.product(shapes, colors, PLACES))


def _held_out() -> frozenset[Scene]:
    # A Latin pattern: each shape, colour and place is held out equally often, so none of them goes unlearned.
    return frozenset(
        Scene(shape, color, place)
        for (s, shape), (c, color), (p, place) in itertools.product(enumerate(BASE_SHAPES), enumerate(COLORS), enumerate(PLACES))
        if (s * 3 + c * 2 + p) % 9 == 0
    )


HELD_OUT = _held_out()
"""Scenes that no base ever sees in training: obeying them shows that the words were learned apart."""

TRAINED = tuple(scene for scene in scenes() if scene not in HELD_OUT)
"""Scenes that bases are trained on, in a fixed order."""


def trained(colors: tuple[str, ...]) -> tuple[Scene, ...]:
    """Scenes that a base is trained on when these are the colours it gets to know, in a fixed order."""
    return tuple(scene for scene in TRAINED if scene.color in colors)


def caption(scene: Scene, rng: np.random.Generator) -> str:
    """The scene in words, by a template drawn from rng."""
    return _in_words(scene, TEMPLATES, rng)


def short_caption(scene: Scene, rng: np.random.Generator) -> str:
    """Part of the scene in words, by a short template drawn from rng."""
    return _in_words(scene, SHORT_TEMPLATES, rng)


def _in_words(scene: Scene, templates: tuple[str, ...], rng: np.random.Generator) -> str:
    return templates[int(rng.integers(len(templates)))].format(**vars(scene))


def scene_of(text: str) -> Scene:
    """The scene a caption speaks of, whatever its template.

    Raises ValueError when the shape, the colour or the place is missing or named twice.
    """
    words = re.findall(r"[a-z]+", text.lower())
    found = {
        "shape": [word for word in words if word in SHAPES],
        "color": [word for word in words if word in COLORS],
    }
    place = " ".join(
        [word for word in words if word in ("top", "bottom")]
        + [word for word in words if word in ("left", "right")]
        + [word for word in words if word == "center"]
    )
    unclear = [name for name, hits in found.items() if len(hits) != 1]
    unclear += [] if place in PLACES else ["place"]
    if unclear:
        raise ValueError(
            f"caption {text!r} does not name exactly one {' and one '.join(unclear)}; write for example 'a red circle at the top left'"
        )
    return Scene(found["shape"][0], found["color"][0], place)


def outline(shape: str) -> np.ndarray:
    """Corners (N, 2) of a shape around its box centre, x right and y down, sized so that shapes look equally large.

    Multiply by a radius in pixels. Raises ValueError for a name outside SHAPES.
    """
    if shape == "circle":
        return _ring(64, 1.0)
    if shape == "square":
        return _centred(_ring(4, 1.27, turn=math.pi / 4))
    if shape == "triangle":
        return _centred(_ring(3, 1.26))
    if shape == "star":
        return _star(_STAR_INNER_RADII[0])
    raise ValueError(f"shape {shape!r} is unknown; the shapes are {', '.join(SHAPES)}")


def _ring(num_corners: int, radius: float, turn: float = 0.0) -> np.ndarray:
    angles = turn - math.pi / 2 + np.arange(num_corners) * (2 * math.pi / num_corners)
    return radius * np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _star(inner_radius: float) -> np.ndarray:
    corners = _ring(10, 1.15)
    corners[1::2] *= inner_radius
    return _centred(corners)


def _centred(corners: np.ndarray) -> np.ndarray:
    return corners - (corners.min(axis=0) + corners.max(axis=0)) / 2


def coverage(corners: np.ndarray, width: int, height: int) -> np.ndarray:
    """Anti-aliased mask (height, width) in [0, 1] of a polygon whose corners (N, 2) are in pixels."""
    mask = Image.new("L", (width * _OVERSAMPLING, height * _OVERSAMPLING), 0)
    ImageDraw.Draw(mask).polygon([(x, y) for x, y in (corners * _OVERSAMPLING - 0.5).tolist()], fill=255)
    return np.asarray(mask.resize((width, height), Image.Resampling.BOX), dtype=np.float32) / 255


def turned(corners: np.ndarray, degrees: float) -> np.ndarray:
    """Corners (N, 2) turned clockwise around the origin."""
    angle = math.radians(degrees)
    turn = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    return corners @ turn


def draw(scene: Scene, width: int, height: int, rng: np.random.Generator) -> Image.Image:
    """An RGB image of the scene; place, radius, tilt, tint and background vary a little with rng.

    The radius is 0.20 to 0.25 of the short side. Sides are in pixels; below 48 a star is hard to read.
    """
    x, y = PLACES[scene.place]
    x, y = np.array([x, y]) + rng.uniform(-_POSITION_JITTER, _POSITION_JITTER, size=2)
    radius = rng.uniform(*_RADIUS) * min(width, height)
    tilt = rng.uniform(-_TILT_DEGREES, _TILT_DEGREES)
    tint = np.clip(np.array(COLORS[scene.color]) + rng.uniform(-10, 10, size=3), 0, 255)
    background = rng.uniform(238, 255) + rng.uniform(-4, 0, size=3)
    corners = turned(outline(scene.shape), tilt) * radius + (x * width, y * height)
    mask = coverage(corners, width, height)[..., None]
    return Image.fromarray(np.rint(background * (1 - mask) + tint * mask).astype(np.uint8))


# Reading: find the shape, bring it to a standard size and place, compare with the outlines of all shapes.

_ENLARGEMENT = 4
_MAX_STRETCH = 1.15  # of one side; a slightly squeezed star still is a star, a bar is not a square
_GRID = 40
_GRID_PER_SIDE = 16.0  # grid cells along the side of a square with the shape's area
_MIN_CONTRAST = 60.0  # RGB distance between shape and background below which nothing is there
_MIN_AREA_FRACTION = 0.02
_MAX_AREA_FRACTION = 0.40
_SPECK_FRACTION = 0.006  # of the image; what is smaller is no shape among several
_MAX_SECOND_PART = 0.15
_MIN_CONFIDENCE = 0.78
_MIN_MARGIN = 0.02
_MAX_STAR_SOLIDITY = 0.88  # of its convex hull; a pentagon has 1, our star 0.55
_TIP_PROMINENCE = 1.2  # grid cells; a circle of the standard area has a radius of 9
_MAX_COLOR_DISTANCE = 75.0
_MIN_COLOR_LEAD = 12.0
_PLACE_BORDERS = (0.4, 0.6)
_PLACE_DOUBT = 0.01


def read(image: Image.Image) -> Reading:
    """What the image shows, measured from its pixels alone."""
    pixels, background, contrast = _contrast(image)
    strongest = float(np.quantile(contrast, 0.98))
    if strongest < _MIN_CONTRAST:
        return NOTHING
    part = _only_part(contrast > strongest / 2)
    return NOTHING if part is None else _reading_of(part, pixels, background, contrast, strongest)


def read_all(image: Image.Image) -> tuple[Reading, ...]:
    """What each of the shapes in the image is, the largest first; () for an empty image.

    Anything larger than a speck counts, so what is no clear shape has a reading too, with None for what is unclear.
    """
    pixels, background, contrast = _contrast(image)
    strongest = float(np.quantile(contrast, 0.98))
    if strongest < _MIN_CONTRAST:
        return ()
    parts = [part for part in _parts(contrast > strongest / 2) if part.sum() >= _SPECK_FRACTION * part.size]
    readings = []
    for part in sorted(parts, key=lambda part: -int(part.sum())):
        plausible = _MIN_AREA_FRACTION <= part.sum() / part.size <= _MAX_AREA_FRACTION
        # Shapes of two colours differ in contrast: each is measured by its own.
        own = float(np.quantile(contrast[part], 0.8))
        readings.append(_reading_of(part, pixels, background, contrast, own) if plausible else NOTHING)
    return tuple(readings)


def _contrast(image: Image.Image) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    # Pixels (H, W, 3), the background's colour (3,), and the distance (H, W) of each pixel from it.
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    background = np.median(border, axis=0)
    return pixels, background, np.linalg.norm(pixels - background, axis=2)


def _reading_of(part: np.ndarray, pixels: np.ndarray, background: np.ndarray, contrast: np.ndarray, strongest: float) -> Reading:
    tint = np.median(pixels[part & (contrast > 0.8 * strongest)], axis=0)
    direction = (tint - background) / max(float(np.sum((tint - background) ** 2)), 1.0)
    alpha = np.clip((pixels - background) @ direction, 0, 1) * _grown(part)
    shape, confidence, margin = _shape_of(alpha)
    return Reading(shape, _color_of(tint), _place_of(part), confidence, margin)


def _only_part(mask: np.ndarray) -> np.ndarray | None:
    # The largest connected part, or None when a second one competes with it or the size is implausible.
    parts = sorted(_parts(mask), key=lambda part: -int(part.sum()))
    if not parts:
        return None
    area = float(parts[0].sum())
    if len(parts) > 1 and parts[1].sum() > _MAX_SECOND_PART * area:
        return None
    plausible = _MIN_AREA_FRACTION <= area / mask.size <= _MAX_AREA_FRACTION
    return parts[0] if plausible else None


def _parts(mask: np.ndarray) -> list[np.ndarray]:
    left = mask.copy()
    parts = []
    while left.any():
        part = np.zeros_like(mask)
        part[np.unravel_index(int(left.argmax()), mask.shape)] = True
        size = 0
        while size != (size := int(part.sum())):
            part = _grown(part) & left
        parts.append(part)
        left &= ~part
    return parts


def _grown(mask: np.ndarray) -> np.ndarray:
    # Down and up, then right and left: the corners come with the second.
    tall = mask.copy()
    tall[1:] |= mask[:-1]
    tall[:-1] |= mask[1:]
    grown = tall.copy()
    grown[:, 1:] |= tall[:, :-1]
    grown[:, :-1] |= tall[:, 1:]
    return grown


def _shape_of(alpha: np.ndarray) -> tuple[str | None, float, float]:
    # Shape, confidence and margin.
    seen = _standard(alpha)
    best = {}
    for shape in SHAPES:
        masks = _standard_masks(shape)
        overlap = np.minimum(masks, seen).sum(axis=1) / np.maximum(masks, seen).sum(axis=1)
        best[shape] = float(overlap.max())
    first, second = sorted(best, key=lambda name: -best[name])[:2]
    confidence, margin = best[first], best[first] - best[second]
    if confidence >= _MIN_CONFIDENCE and margin >= _MIN_MARGIN:
        return first, confidence, margin
    # An uneven star overlaps little with an even one, and anybody sees that it is a star: five tips, notches between.
    num_tips, solidity = _tips(seen)
    uneven_star = num_tips == 5 and solidity <= _MAX_STAR_SOLIDITY
    return "star" if uneven_star else None, confidence, margin


def _tips(standard: np.ndarray) -> tuple[int, float]:
    # Number of tips, and the area as a fraction of its convex hull's. Both come from the outline seen from the centre.
    grid = standard.reshape(_GRID, _GRID)
    angles = np.arange(90) * (2 * math.pi / 90)
    radii = np.arange(0, _GRID / 2 - 1, 0.25)[:, None]
    rows, columns = (_GRID / 2 + radii * side(angles) for side in (np.sin, np.cos))
    inside = grid[rows.astype(int), columns.astype(int)] > 0.5
    reach = (inside * radii).max(axis=0)
    num_tips, rising, last = 0, True, float(reach.max())
    for value in np.roll(reach, -int(reach.argmax())).tolist():
        # A tip counts once the outline has come down from it, and up to it, by the prominence.
        if rising:
            last = max(last, value)
            if value < last - _TIP_PROMINENCE:
                num_tips, rising, last = num_tips + 1, False, value
        else:
            last = min(last, value)
            if value > last + _TIP_PROMINENCE:
                rising, last = True, value
    corners = np.stack([reach * np.cos(angles), reach * np.sin(angles)], axis=1)
    return num_tips, _area(corners) / _area(_hull(corners))


def _hull(corners: np.ndarray) -> np.ndarray:
    # Convex hull (M, 2) of points (N, 2), by Andrew's monotone chain.
    points = sorted({(x, y) for x, y in corners.tolist()})
    chains = []
    for ordered in (points, points[::-1]):
        chain: list[tuple[float, float]] = []
        for x, y in ordered:
            while len(chain) > 1:
                (x1, y1), (x2, y2) = chain[-2:]
                if (x2 - x1) * (y - y1) - (y2 - y1) * (x - x1) > 0:
                    break
                chain.pop()
            chain.append((x, y))
        chains += chain[:-1]
    return np.array(chains)


def _standard(alpha: np.ndarray) -> np.ndarray:
    # A mask brought to the grid's centre, to a standard area and out of any stretch, as a row of grid * grid numbers.
    # A model blurs edges, and a star has the most edge: only what lies inside the half-way line counts.
    field = Image.fromarray(alpha.astype(np.float32))
    fine = field.resize((field.width * _ENLARGEMENT, field.height * _ENLARGEMENT), Image.Resampling.BICUBIC)
    solid = np.asarray(fine) > 0.5
    ys, xs = np.nonzero(solid)
    points = np.stack([xs, ys]) + 0.5
    # All our shapes are as wide as high by their second moments; the root of these is the stretch to take out.
    values, axes = np.linalg.eigh(np.cov(points))
    roots = np.sqrt(values / math.sqrt(float(np.prod(values))))
    roots = np.clip(roots, 1 / _MAX_STRETCH, _MAX_STRETCH)
    a, b, d, e = (axes @ np.diag(roots) @ axes.T * math.sqrt(len(xs)) / _GRID_PER_SIDE).ravel().tolist()
    x, y = points.mean(axis=1).tolist()
    half = _GRID / 2
    standard = Image.fromarray(solid.astype(np.float32)).transform(
        (_GRID, _GRID),
        Image.Transform.AFFINE,
        (a, b, x - (a + b) * half, d, e, y - (d + e) * half),
        Image.Resampling.BILINEAR,
    )
    return np.asarray(standard, dtype=np.float32).reshape(1, -1)


@functools.cache
def _standard_masks(shape: str) -> np.ndarray:
    # (variants and turns, grid * grid) masks of the shape as _standard has them.
    symmetry_degrees = {"circle": 4.0, "square": 90.0, "triangle": 120.0, "star": 72.0}[shape]
    variants = [_star(inner) for inner in _STAR_INNER_RADII] if shape == "star" else [outline(shape)]
    turns = np.arange(0.0, symmetry_degrees, 4.0)
    return np.concatenate([_standard(coverage(turned(corners, turn) * 24 + 40, 80, 80)) for corners in variants for turn in turns])


def _area(corners: np.ndarray) -> float:
    # The shoelace formula.
    following = np.roll(corners, -1, axis=0)
    return abs(float((corners[:, 0] * following[:, 1] - following[:, 0] * corners[:, 1]).sum())) / 2


def _color_of(rgb: np.ndarray) -> str | None:
    distances = {name: float(np.linalg.norm(rgb - value)) for name, value in COLORS.items()}
    first, second = sorted(distances, key=lambda name: distances[name])[:2]
    clear = distances[first] <= _MAX_COLOR_DISTANCE and distances[second] - distances[first] >= _MIN_COLOR_LEAD
    return first if clear else None


def _place_of(part: np.ndarray) -> str | None:
    rows, columns = np.flatnonzero(part.any(axis=1)), np.flatnonzero(part.any(axis=0))
    x = (columns[0] + columns[-1] + 1) / 2 / part.shape[1]
    y = (rows[0] + rows[-1] + 1) / 2 / part.shape[0]
    if min(abs(value - border) for value in (x, y) for border in _PLACE_BORDERS) < _PLACE_DOUBT:
        return None
    nearest_x = min(_COLUMNS.values(), key=lambda column: abs(column - x))
    nearest_y = min(_ROWS.values(), key=lambda row: abs(row - y))
    return next(name for name, centre in PLACES.items() if centre == (nearest_x, nearest_y))
