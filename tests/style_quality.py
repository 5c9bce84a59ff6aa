"""How good transfers between the built-in styles are, by other means than training's own: what a person would ask of each image.

Each test image is there in every style, so the perfect transfer is known, and every number can be had for it too.
Shapes: N images, C latent channels, h w latent sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn import functional as F

from sd_scripts.families.lgt.evaluation import correlation, edges
from sd_scripts.families.lgt.model import Lgt
from sd_scripts.families.lgt.transfer import Settings, begin, edges_of, generate
from sd_scripts.families.lgt.transport import directions, sliced_wasserstein
from sd_scripts.library.core.protocols import Parts
from sd_scripts.library.core.rng import rng_for
from sd_scripts.toy import worlds
from sd_scripts.toy.autoencoder import to_images, to_pixels

PATCH, NUM_DIRECTIONS = 3, 128
"""Sides of the patches whose distribution is compared, in latent pixels, and along how many directions."""
READ = ("shape", "place", "color")
"""What the exact reader of the toy world finds in an image."""
BACKGROUND_LIMIT = 60.0
"""Distance in RGB from the background from which a pixel is ink."""


def opened(folder: Path, most: int | None = None) -> list[Image.Image]:
    """The first PNG files of a folder by name."""
    images = []
    for path in sorted(folder.glob("*.png"))[:most]:
        with Image.open(path) as image:
            images.append(image.convert("RGB"))
    return images


def filled(image: Image.Image) -> Image.Image:
    """The image with everything that its ink encloses painted with the ink: an outline as the area that it is the outline of."""
    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
    background = np.median(np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]), axis=0)
    contrast = np.linalg.norm(pixels - background, axis=2)
    ink = contrast > max(BACKGROUND_LIMIT, float(np.quantile(contrast, 0.98)) / 2)
    if not ink.any():
        return image
    # Everything that can be reached from outside a border of one pixel is not enclosed.
    canvas = Image.fromarray(np.uint8(np.pad(ink, 1) * 255)).copy()
    ImageDraw.floodfill(canvas, (0, 0), 128)
    enclosed = np.asarray(canvas)[1:-1, 1:-1] != 128
    color = np.median(pixels[ink], axis=0)
    return Image.fromarray(np.uint8(np.where(enclosed[..., None], color, background)))


class Classifier:
    """Names the style of an image; trained on real images and on what the VAE makes of them."""

    def __init__(self, real: Mapping[str, Sequence[Image.Image]], num_steps: int = 150) -> None:
        self.styles = sorted(real)
        data = torch.cat([self._small(real[style]) for style in self.styles])
        wanted = torch.cat([torch.full((len(real[style]),), label) for label, style in enumerate(self.styles)])
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self._network = nn.Sequential(
                nn.Conv2d(3, 16, 5, stride=2),
                nn.SiLU(),
                nn.Conv2d(16, 32, 3, stride=2),
                nn.SiLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(32, len(self.styles)),
            )
            optimizer = torch.optim.Adam(self._network.parameters(), lr=1e-2)
            for _ in range(num_steps):
                rows = torch.randint(len(data), (48,))
                loss = F.cross_entropy(self._network(data[rows]), wanted[rows])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()

    @staticmethod
    def _small(images: Sequence[Image.Image]) -> Tensor:
        return F.avg_pool2d(to_pixels(list(images)), 2)

    @torch.no_grad()
    def right(self, images: Sequence[Image.Image], style: str) -> float:
        """Share of the images that are of this style."""
        return (self._network(self._small(images)).argmax(dim=1) == self.styles.index(style)).float().mean().item()


@dataclass(frozen=True)
class Quality:
    """What N transfers from one style to another are worth; shares are of the images."""

    structure: float
    """Mean correlation of edges with the source's."""
    style: float
    """Share that the classifier takes for the wanted style."""
    left: float
    """Distance to the wanted style over that of the untouched sources."""
    pixels: float
    """Root mean square difference to the same image as the wanted style draws it, 0 to 255."""


@dataclass(frozen=True)
class ShapesQuality(Quality):
    """The same with what the exact reader of the toy world finds."""

    shape: float
    """Share in which it finds the source's shape."""
    place: float
    color: float
    """The same for the colour; means something only where both styles show it."""


class Ruler:
    """Measures against real images of each style (train/) and their scenes drawn in every style (test/)."""

    def __init__(self, encode: Callable[[list[Image.Image]], Tensor], decode: Callable[[Tensor], list[Image.Image]], data: Path) -> None:
        """encode and decode are the halves of the VAE: images of one size to latents (N, C, h, w), and back."""
        self.encode, self.decode, self.data = torch.no_grad()(encode), torch.no_grad()(decode), data
        self.styles = tuple(sorted(path.name for path in (data / "train").iterdir()))
        real = {style: opened(data / "train" / style, 64) for style in self.styles}
        self._latents = {style: encode(images) for style, images in real.items()}
        self.classifier = Classifier({style: [*images, *decode(self._latents[style])] for style, images in real.items()})

    def tests(self, style: str, scenes_as_in: str, most: int | None = None) -> list[Image.Image]:
        """Test images of a style, of the scenes that the first of another style show."""
        wanted = [path.name.partition("_")[2] for path in sorted((self.data / "test" / scenes_as_in).glob("*.png"))[:most]]
        found = {path.name.partition("_")[2]: path for path in (self.data / "test" / style).glob("*.png")}
        images = []
        for name in wanted:
            with Image.open(found[name]) as image:
                images.append(image.convert("RGB"))
        return images

    def distance(self, latents: Tensor, style: str) -> float:
        """Sliced Wasserstein distance of their patches to those of real images of the style."""
        along = directions(latents.shape[1] * PATCH**2, NUM_DIRECTIONS, rng_for(0, 0, "quality"))
        return float(sliced_wasserstein([latents], [[self._latents[style]]], [along], PATCH))

    def quality(self, target: str, before: Sequence[Image.Image], after: Sequence[Image.Image], perfect: Sequence[Image.Image]) -> Quality:
        """What the images `after` are worth as transfers of the images `before`."""
        maps = [list(edges(to_pixels(list(images)))) for images in (before, after)]
        difference = (to_pixels(list(after)) - to_pixels(list(perfect))) * 127.5
        return Quality(
            fmean(correlation(one, two) for one, two in zip(*maps, strict=True)),
            self.classifier.right(after, target),
            self.distance(self.encode(list(after)), target) / self.distance(self.encode(list(before)), target),
            float(difference.square().mean(dim=(1, 2, 3)).sqrt().mean()),
        )

    def quality_of_shapes(
        self, source: str, target: str, before: Sequence[Image.Image], after: Sequence[Image.Image], perfect: Sequence[Image.Image]
    ) -> ShapesQuality:
        """The same of images of the toy world."""
        sides = ((source, before), (target, after))
        seen = [[worlds.read(filled(image) if style == "line" else image) for image in images] for style, images in sides]
        same = {name: fmean(getattr(one, name) == getattr(two, name) for one, two in zip(*seen, strict=True)) for name in READ}
        return ShapesQuality(**asdict(self.quality(target, before, after, perfect)), **same)


def of_model(family: Lgt, parts: Parts, data: Path) -> Ruler:
    """A ruler with the model's VAE."""
    return Ruler(
        lambda images: family.encode_images(parts, to_pixels(images)),
        lambda latents: to_images(torch.cat([family.decode(parts, some) for some in latents.split(16)])),
        data,
    )


@torch.no_grad()
def transferred(family: Lgt, parts: Parts, ruler: Ruler, settings: Settings, count: int | None) -> dict[tuple[str, str], list[Image.Image]]:
    """(source, target) -> the first test images of the source style in the target style, its own included."""
    found = {}
    for source in ruler.styles:
        images = ruler.tests(source, source, count)
        latents = ruler.encode(images)
        seeds = list(range(len(images)))
        state, edges_told = begin(family, parts, latents, [source] * len(images), seeds, settings), edges_of(family, parts, latents)
        for target in ruler.styles:
            moved = generate(family, parts, state, [target] * len(images), seeds, settings, edges=edges_told)
            found[source, target] = ruler.decode(moved)
    return found


def table(qualities: Mapping[tuple[str, str], Quality]) -> str:
    """A line for each pair, and their mean."""
    names = list(asdict(next(iter(qualities.values()))))
    lines = [f"{'':16}" + "".join(f"{name:>10}" for name in names)]
    rows = {f"{source} to {target}": one for (source, target), one in qualities.items()}
    for title, one in rows.items():
        lines.append(f"{title:16}" + "".join(f"{getattr(one, name):10.3f}" for name in names))
    lines.append(f"{'mean':16}" + "".join(f"{fmean(getattr(one, name) for one in rows.values()):10.3f}" for name in names))
    return "\n".join(lines)


def sheet(ruler: Ruler, found: Mapping[tuple[str, str], Sequence[Image.Image]], count: int) -> Image.Image:
    """A row for each of the first `count` test images of each style: itself, and in every style."""
    rows = [
        images
        for source in ruler.styles
        for images in zip(ruler.tests(source, source, count), *(found[source, target][:count] for target in ruler.styles), strict=True)
    ]
    side, gap = rows[0][0].width, 2
    whole = Image.new("RGB", (len(rows[0]) * (side + gap) - gap, len(rows) * (side + gap) - gap), "white")
    for row, images in enumerate(rows):
        for column, image in enumerate(images):
            whole.paste(image, (column * (side + gap), row * (side + gap)))
    return whole
