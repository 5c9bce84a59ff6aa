"""Where the control images of edit pairs lie: names of folders, names of files, and which belong to which target.

A data set of pairs is a folder with the folders `target` and `control` in it, `control_1` and `control_2` for further control
images, and `mask` for masks; or control folders that the options name; or `x_control_1.png` beside `x.png`; or a list.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sd_scripts.schema.dataset import DatasetOptions
from sd_scripts.schema.errors import OptionError, Problem
from sd_scripts.schema.files import is_text
from sd_scripts.schema.model import MAX_CONTROLS

from .images import EXTENSIONS

TARGET_FOLDERS = ("target", "targets", "target_images", "images", "training_images")
CONTROL_FOLDERS = ("control", "controls", "control_images", "condition_images")
MASK_FOLDERS = ("mask", "masks")

NUMBERED_FOLDER = re.compile(rf"^({'|'.join(CONTROL_FOLDERS)})_(\d{{1,4}})$")
_EXTRA = re.compile(r"^(.+)_control(?:_(\d{1,4}))?$")
_NUMBERED = re.compile(r"^(.+)_(\d{1,4})$")
_MASK_ENDING = "_mask"
MASK_LABEL, _CONDITION_LABEL = "-masklabel", "-condlabel"
CACHES = ("_controls", "_latent_cache", "_t_e_cache", "_clip_vision_cache")
"""Folders that ai-toolkit makes inside a data set."""


@dataclass(frozen=True)
class PairFolders:
    """The folders of a data set of pairs. mask is None where there is none."""

    target: Path
    controls: tuple[Path, ...]
    mask: Path | None


def control_folder_problems(options: DatasetOptions) -> list[Problem]:
    """What is wrong with the control folders that the options name."""
    folders = options.control_folders
    problems = [
        Problem("control_data_dir", f"control_data_dir: the folder {folder} is not there") for folder in folders if not folder.is_dir()
    ]
    if len(folders) > MAX_CONTROLS:
        problems.append(
            Problem(
                "control_data_dir",
                f"control_data_dir: {len(folders)} folders are named, and a sample has at most {MAX_CONTROLS} control images",
            )
        )
    return problems


def pair_folders(root: Path) -> PairFolders | None:
    """The folders of pairs inside root, or None where there are not both targets and control images.

    Raises OptionError where two folders have names of the same meaning.
    """
    inside = {path.name: path for path in root.iterdir() if path.is_dir()}
    targets = [name for name in TARGET_FOLDERS if name in inside]
    controls = [name for name in CONTROL_FOLDERS if name in inside]
    masks = [name for name in MASK_FOLDERS if name in inside]
    numbered = sorted((int(match[2]), name) for name in inside if (match := NUMBERED_FOLDER.match(name)))
    if not targets or not (controls or numbered):
        return None
    doubled = [name for (number, name), (after, other) in pairwise(numbered) if number == after for name in (name, other)]
    for found in (targets, controls, masks, doubled):
        if len(found) > 1:
            raise OptionError(
                Problem("train_data_dir", f"{root} has the folders {' and '.join(found)}, which mean the same; keep one of them there")
            )
    folders = tuple(inside[name] for name in (*controls, *(name for _, name in numbered)))
    return PairFolders(inside[targets[0]], folders, inside[masks[0]] if masks else None)


def layouts(folder: str) -> str:
    """How pairs may be laid out, as lines for a message."""
    return "\n".join(
        (
            f"  {folder}/target/a.png, its instruction {folder}/target/a.txt, and {folder}/control/a.png, the image before the edit;",
            f"    {folder}/control_1/a.png and {folder}/control_2/a.png for a second and third control image",
            f"  {folder}/a.png, {folder}/a.txt and {folder}/a_control_1.png beside it",
            "  control_data_dir: folders with images of the same names as in train_data_dir",
            "  in_json: a .jsonl with file_name, control_path and caption in each line, or a .csv with path_target, path_control, prompt",
        )
    )


@dataclass(frozen=True)
class Beside:
    """What of a folder's images are targets, and what lies beside them: stem of a target -> file names."""

    targets: tuple[str, ...]
    controls: dict[str, list[str]]
    masks: dict[str, str]
    conditions: tuple[str, ...] = ()
    """OneTrainer's conditions of ControlNets, which nothing here reads."""


def beside(names: Iterable[str], has_caption: Collection[str], with_masks: bool) -> Beside:
    """Tells targets from `x_control_1.png`, and from `x_mask.png` when asked, where there is an `x` too; names are sorted.

    OneTrainer's `x-masklabel.png` is a mask and its `x-condlabel.png` a condition, whether asked or not. has_caption are the stems that
    have a caption of their own, which makes them targets whatever they are called.
    """
    names = tuple(names)
    stems = {os.path.splitext(name)[0] for name in names}
    targets: list[str] = []
    controls: dict[str, list[tuple[int, str]]] = {}
    masks: dict[str, str] = {}
    conditions: list[str] = []
    for name in names:
        stem = os.path.splitext(name)[0]
        match = _EXTRA.match(stem)
        if match and match[1] in stems and stem not in has_caption:
            controls.setdefault(match[1], []).append((int(match[2] or 0), name))
        elif stem.endswith(MASK_LABEL) and stem.removesuffix(MASK_LABEL) in stems:
            masks[stem.removesuffix(MASK_LABEL)] = name
        elif stem.endswith(_CONDITION_LABEL) and stem.removesuffix(_CONDITION_LABEL) in stems:
            conditions.append(name)
        elif with_masks and stem.removesuffix(_MASK_ENDING) in stems - {stem} and stem not in has_caption:
            masks[stem.removesuffix(_MASK_ENDING)] = name
        else:
            targets.append(name)
    return Beside(tuple(targets), {base: [name for _, name in sorted(found)] for base, found in controls.items()}, masks, tuple(conditions))


class ControlFolder:
    """The images and captions of one control folder, listed once, and which of them belong to a target."""

    def __init__(self, folder: Path, caption_endings: Iterable[str]) -> None:
        self.folder = folder
        self._images: dict[str, list[str]] = {}
        self._extras: dict[str, list[tuple[int, str]]] = {}
        self._numbered: dict[str, list[tuple[int, str]]] = {}
        self._captions: dict[str, str] = {}
        self._used: set[str] = set()
        endings = tuple(caption_endings)
        for path, stem, ending in _files(folder):
            if ending.lower() in EXTENSIONS:
                if stem not in self._images:
                    self._note(stem)
                self._images.setdefault(stem, []).append(path)
            elif ending in endings:
                self._captions.setdefault(f"{stem}{ending}", path)

    def _note(self, stem: str) -> None:
        if extra := _EXTRA.match(stem):
            self._extras.setdefault(extra[1], []).append((int(extra[2] or 0), stem))
        elif numbered := _NUMBERED.match(stem):
            self._numbered.setdefault(numbered[1], []).append((int(numbered[2]), stem))

    def find(self, keys: Sequence[str], targets: Collection[str]) -> tuple[list[str], str]:
        """The control images of a target that is known by these keys, first found first, and what is wrong with them ("").

        `x.png` first, then `x_control_1.png` and so on; where there is neither, `x_0.png`, `x_1.png` as in musubi-tuner. Stems of targets
        are not taken for numbered files of another.
        """
        for key in keys:
            extras = [stem for _, stem in sorted(self._extras.get(key, [])) if os.path.basename(stem) not in targets]
            stems = ([key] if key in self._images else []) + extras
            if not stems:
                stems = [stem for _, stem in sorted(self._numbered.get(key, [])) if os.path.basename(stem) not in targets]
            if stems:
                self._used.update(stems)
                for stem in stems:
                    if len(self._images[stem]) > 1:
                        return [], f"has several control images of one name: {', '.join(sorted(self._images[stem]))}; keep one"
                return [self._images[stem][0] for stem in stems], ""
        return [], ""

    def caption(self, keys: Sequence[str], endings: Sequence[str]) -> str | None:
        """Path of the caption file of a target that is known by these keys."""
        return next((self._captions[key + ending] for key in keys for ending in endings if key + ending in self._captions), None)

    def unused(self) -> list[str]:
        """Names of the images that no target has asked for, sorted."""
        return sorted(os.path.basename(path) for stem, paths in self._images.items() if stem not in self._used for path in paths)


def _files(root: Path) -> Iterator[tuple[str, str, str]]:
    """(path, path inside root without ending and with /, ending) of every file that is not hidden, folder by folder."""
    for folder in walk(str(root), True):
        prefix = os.path.relpath(folder, root).replace(os.sep, "/")
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries if not entry.name.startswith(".") and is_text(entry.name) and is_file(entry))
        for name in names:
            stem, ending = os.path.splitext(name)
            yield os.path.join(folder, name), stem if prefix == "." else f"{prefix}/{stem}", ending


def walk(root: str, recursive: bool, without: Iterable[Path] = ()) -> Iterator[str]:
    """The folder and, when asked, those inside it, each once, apart from hidden ones, `without`, and those whose name is not UTF-8."""
    yield root
    if recursive:
        left_out = {os.path.abspath(folder) for folder in without}
        seen = {os.path.realpath(root)}
        for folder, inside, _ in os.walk(root):
            inside[:] = sorted(name for name in inside if not name.startswith(".") and is_text(name))
            if left_out:
                inside[:] = [name for name in inside if os.path.abspath(os.path.join(folder, name)) not in left_out]
            for path in (os.path.join(folder, name) for name in inside):
                # A folder that is linked into itself.
                if (real := os.path.realpath(path)) not in seen:
                    seen.add(real)
                    yield path


def is_file(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a file, or leads to one."""
    try:
        return entry.is_file()
    except OSError:
        # A link to itself.
        return False


def plain(name: str) -> str:
    """A name as it is compared with others: Unicode has two forms of ä, and computers differ in whether A is a."""
    return unicodedata.normalize("NFC", name).casefold()
