"""Write the toy datasets in kohya's folder layout: images, captions beside them, regularisation images.

Edit sets have in each folder target/ with the edited images and their instructions, and control/ with the images to edit. The set of
styles has a folder for each style, in train/ and in test/.
Knows images and files; never imports torch.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import io
import itertools
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

from PIL import Image

from . import drawn_photographs, edits, styles, worlds
from .edits import EditKind
from .worlds import Scene

DATASETS = {
    "star": "24 stars in all colours and places (a shape no base knows) and 60 regularisation images of old shapes",
    "stars": "96 stars in two thirds of the combinations of colours and places, 96 regularisation images: for models of few, large tokens",
    "large_stars": "the same at 128 pixels and more, for models whose tokens are 16 pixels wide",
    "teal": "24 alike, squares and triangles in teal (a colour that the bases sd and flux do not know), 60 in other colours",
    "large_teal": "the same at 128 pixels and more, for models whose tokens are 16 pixels wide",
    "subject": "12 images of one subject, a teal circle called zwx, named by their folder alone, and 40 of its class: DreamBooth",
    "edit_border": "24 pairs of 'add a border', which no base knows; for regularisation 420 of old kinds, 60 that stay",
    "large_edit_border": "the same at 128 pixels and more, for models whose tokens are 16 pixels wide",
    "edits": "64 such pairs of recolouring, moving and removing: what the base qwen_edit was trained on",
    "shapes": "1920 alike, squares and triangles: what the bases were trained on, and enough to begin from nothing",
    "photographs": "120 crops of four photographs in each of five styles, unpaired, and in all of them 6 test crops of a fifth photograph",
    "styles": "120 unpaired images in each of three styles, and in all of them 18 test images of the same scenes, unseen elsewhere",
}
"""Name -> what it holds; `--train_data_dir toy:<name>` selects one."""

_RECIPE_VERSION = 9
_RECORD = "dataset.json"

# Half of the images have twice the sides a base works at, so that resizing into aspect buckets is real.
_SIZES = tuple((width * scale, height * scale) for scale, (width, height) in itertools.product((1, 2), worlds.SIZES))


@dataclass(frozen=True)
class ToyDataset:
    """Where a written dataset lies; reg_data_dir is None when it has no regularisation images, and test_data_dir when none to test on."""

    name: str
    train_data_dir: Path
    reg_data_dir: Path | None
    test_data_dir: Path | None


def write_dataset(name: str, folder: Path) -> ToyDataset:
    """Writes a dataset below folder, or leaves it alone when it is already there and whole; always the same bytes.

    The folder appears complete or not at all. Raises ValueError for an unknown name, and for a folder that
    holds something else.
    """
    if not _is_whole(name, folder):
        files = _files(name)
        # Another process may have written it in the meantime, and read from it already.
        if not _is_whole(name, folder):
            _check_replaceable(folder)
            _replace(folder, files | {_RECORD: _record(name, {path: _digest(content) for path, content in files.items()})})
    reg, test = (folder / part if (folder / part).is_dir() else None for part in ("reg", "test"))
    return ToyDataset(name, folder / "train", reg, test)


def _files(name: str) -> dict[str, bytes]:
    # Relative path -> content.
    if name == "star":
        return _images("train/3_star", _stars(24), 11) | _images("reg/1_shape", _old_scenes(60), 12)
    if name == "stars":
        # Of the 54 combinations 18 stay unseen. A model of 16 tokens an image learned 24 stars by heart and drew a new one in 57 %.
        return _images("train/1_star", [_stars(36)[index % 36] for index in range(96)], 11) | _images("reg/1_shape", _old_scenes(96), 12)
    if name == "large_stars":
        stars = _images("train/1_star", [_stars(36)[index % 36] for index in range(96)], 11, sizes=worlds.LARGE_SIZES)
        return stars | _images("reg/1_shape", _old_scenes(96), 12, sizes=worlds.LARGE_SIZES)
    if name in ("teal", "large_teal"):
        sizes = _SIZES if name == "teal" else worlds.LARGE_SIZES
        teal = _images("train/3_teal", list(worlds.trained(worlds.NEW_COLORS)), 14, sizes=sizes)
        return teal | _images("reg/1_shape", _old_scenes(60, worlds.KNOWN_COLORS), 15, sizes=sizes)
    if name == "subject":
        # As many repeats as make every class image count: kohya pairs the two one to one.
        instance, kind = f"train/4_{worlds.SUBJECT_WORD} {worlds.SUBJECT_SHAPE}", f"reg/1_{worlds.SUBJECT_SHAPE}"
        subject = [scene for scene in worlds.trained((worlds.SUBJECT_COLOR,)) if scene.shape == worlds.SUBJECT_SHAPE]
        alike = [scene for scene in worlds.trained(worlds.KNOWN_COLORS) if scene.shape == worlds.SUBJECT_SHAPE]
        # Class images without captions keep what "circle" means, those with captions what "a red circle at the left" means.
        return _images(instance, (subject * 2)[:12], 16, caption_every=0) | _images(kind, alike, 17, caption_every=2)
    if name in ("edit_border", "large_edit_border"):
        sizes = _SIZES if name == "edit_border" else worlds.LARGE_SIZES
        # With 60 old pairs a LoRA learned them by heart and moved 20 % fewer shapes where they belong; with 240 it lost nothing.
        # Without pairs that stay as they are it drew borders whatever it was told: 32 of 32 with "do nothing".
        # Removing is forgotten first, so half of the old pairs show it.
        others = _pairs("reg/1_old", (*edits.OLD_KINDS, "remove"), 420, 19, sizes) | _pairs("reg/1_keep", ("keep",), 60, 21, sizes)
        return _pairs("train/20_border", ("border",), 24, 18, sizes) | others
    if name == "edits":
        return _pairs("train/1_edit", edits.OLD_KINDS, 64, 20)
    if name == "shapes":
        return _images("train/1_shape", _old_scenes(1920), 13)
    if name == "styles":
        # Every style learns from other scenes, so that nothing pairs them; the test asks for scenes that none has seen.
        held_out = [scene for scene in worlds.scenes() if scene in worlds.HELD_OUT]
        files: dict[str, bytes] = {}
        for number, style in enumerate(styles.STYLES):
            files |= _in_style(f"train/{style}", style, _old_scenes(styles.TRAIN_IMAGES, order=30 + number), 30 + number)
            # Evaluations take the first images of a folder: another scene in each, for them to have something unrelated to compare with.
            files |= _in_style(f"test/{style}", style, held_out, 29, first=4 * number)
        return files
    if name == "photographs":
        files = {}
        for number, style in enumerate(drawn_photographs.STYLES):
            train = [drawn_photographs.TRAINED[index % len(drawn_photographs.TRAINED)] for index in range(drawn_photographs.TRAIN_IMAGES)]
            files |= _crops(f"train/{style}", style, train, 40 + number)
            files |= _crops(f"test/{style}", style, [drawn_photographs.TESTED] * drawn_photographs.TEST_IMAGES, 39, first=number)
        return files
    close = difflib.get_close_matches(name, DATASETS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(f"toy dataset {name!r} is unknown; the datasets are {', '.join(DATASETS)}{hint}")


def _stars(num: int) -> list[Scene]:
    # Colours and places take turns out of step: each is met equally often, and most combinations stay unseen.
    colors, places = list(worlds.COLORS), list(worlds.PLACES)
    return [Scene("star", colors[index % len(colors)], places[(2 * index + index // len(colors)) % len(places)]) for index in range(num)]


def _old_scenes(num: int, colors: tuple[str, ...] = tuple(worlds.COLORS), order: int = 10) -> list[Scene]:
    # The whole world in a drawn order, as often as it takes.
    trained = worlds.trained(colors)
    places = worlds.rng_for(order, num).permutation(len(trained))
    return [trained[places[index % len(trained)]] for index in range(num)]


def _images(
    folder: str, scenes: list[Scene], seed: int, caption_every: int = 1, sizes: tuple[tuple[int, int], ...] = _SIZES
) -> dict[str, bytes]:
    # One image in caption_every has a caption, with 0 none; the folder's name is the prompt of the others, as in kohya's layout.
    files = {}
    for index, scene in enumerate(scenes):
        rng = worlds.rng_for(seed, index)
        stem = f"{folder}/{index:03d}_{scene.color}_{scene.shape}"
        size = sizes[int(rng.integers(len(sizes)))]
        files[f"{stem}.png"] = _png(worlds.draw(scene, *size, rng))
        if caption_every and index % caption_every == 0:
            files[f"{stem}.txt"] = f"{worlds.caption(scene, rng)}\n".encode()
    return files


def _in_style(folder: str, style: str, scenes: list[Scene], seed: int, first: int = 0) -> dict[str, bytes]:
    # One size: the model sees windows of neighbouring latents, and what is in them should not depend on how an image was scaled.
    # first: which of the scenes has the first name; what it looks like does not depend on that.
    return {
        f"{folder}/{(index - first) % len(scenes):03d}_{scene.color}_{scene.shape}.png": _png(
            styles.draw(scene, style, worlds.rng_for(seed, index))
        )
        for index, scene in enumerate(scenes)
    }


def _crops(folder: str, style: str, photographs: list[str], seed: int, first: int = 0) -> dict[str, bytes]:
    # A crop of each of these photographs in a style; first is that of _in_style.
    files = {}
    for index, name in enumerate(photographs):
        rng = worlds.rng_for(seed, index)
        image = drawn_photographs.draw(drawn_photographs.crop(name, rng), style, rng)
        files[f"{folder}/{(index - first) % len(photographs):03d}_{name}-{index}.png"] = _png(image)
    return files


def _pairs(folder: str, kinds: tuple[EditKind, ...], num: int, seed: int, sizes: tuple[tuple[int, int], ...] = _SIZES) -> dict[str, bytes]:
    # The edited image and its instruction in target/, the image to edit under the same name in control/.
    files = {}
    for index in range(num):
        rng = worlds.rng_for(seed, index)
        kind = kinds[index % len(kinds)]
        edit = edits.keep_apart(rng) if kind == "keep" else edits.edit_of(kind, rng)
        control, target = edits.draw(edit, *sizes[int(rng.integers(len(sizes)))], rng)
        stem = f"{index:03d}_{edit.kind}"
        files[f"{folder}/control/{stem}.png"] = _png(control)
        files[f"{folder}/target/{stem}.png"] = _png(target)
        files[f"{folder}/target/{stem}.txt"] = f"{edit.instruction}\n".encode()
    return files


def _png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    # Crops of photographs take half of the time, and no more room, than as small as can be.
    image.save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _record(name: str, digests: dict[str, str]) -> bytes:
    return (json.dumps({"toy_dataset": name, "recipe_version": _RECIPE_VERSION, "files": digests}, indent=2) + "\n").encode()


def _read_record(folder: Path) -> bytes | None:
    try:
        return (folder / _RECORD).read_bytes()
    except FileNotFoundError:
        return None


def _is_whole(name: str, folder: Path) -> bool:
    # By the digests that were written along: drawing a set of 500 pairs anew takes seconds.
    record = _read_record(folder) or b""
    try:
        digests = dict(json.loads(record)["files"])
        return record == _record(name, digests) and all(_digest((folder / path).read_bytes()) == digest for path, digest in digests.items())
    except (OSError, ValueError, LookupError, TypeError):
        # None is there, it is damaged, or of a version that wrote no digests.
        return False


def _check_replaceable(folder: Path) -> None:
    # Only what this module wrote may go, perhaps by an older recipe.
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    # A record that is gone by now was moved away by another process that writes the same.
    ours = _RECORD in names and b'"toy_dataset"' in (_read_record(folder) or b'"toy_dataset"')
    if names and not ours:
        raise ValueError(f"{folder} holds other files; give an empty or new folder for the toy dataset")


def _replace(folder: Path, files: dict[str, bytes]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        for path, content in files.items():
            write_synced(aside / "new" / path, content)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(aside / "old")
        try:
            (aside / "new").rename(folder)
        except OSError:
            # Another process finished the same dataset in between: its bytes are ours.
            if _read_record(folder) != files[_RECORD]:
                raise
    finally:
        shutil.rmtree(aside)


def write_synced(path: Path, content: bytes) -> None:
    """Writes a file and its folders, and returns when the disk has them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
