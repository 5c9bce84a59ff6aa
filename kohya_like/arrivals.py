"""What arrives for a data set, as groups of files that stay together: an image, its caption, its mask, and what it is an edit of.

An upload is made flat, so folders of edit pairs (`control/a.png` and `target/a.png`, or `before` and `after`) and of masks become names
beside the image, as training reads them: `a.png`, `a_control.png`, `a-masklabel.png`. Knows names, not what is in the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from sd_scripts.dataset.pairs import CONTROL_FOLDERS, MASK_FOLDERS, MASK_LABEL, NUMBERED_FOLDER, TARGET_FOLDERS

CAPTIONS = (".txt", ".caption")
CONTROL = "_control"
EXTRA = re.compile(rf"(.+?)({CONTROL}(?:_\d{{1,4}})?|_mask|{MASK_LABEL})")
"""The name of an image, and what follows it in the name of one that belongs to it."""
_AFTER = ("after", "edited", "output")
_BEFORE = ("before", "original", "input", "source")
_EDITED, _UNEDITED = (re.compile(rf"(.+)[ _-](?:{'|'.join(words)})", re.IGNORECASE) for words in (_AFTER, _BEFORE))


@dataclass
class Group:
    """Files of one name that belong together: an image, or several, and captions.

    ready: what follows the name (`.png`, `.txt`, `_control.png`) -> (stripped file, its SHA-256).
    """

    shown: str
    stem: str
    place: str = ""
    """The zip, if any, and the folder in it."""
    folder: str = ""
    """The folder `<repeats>_<class>` that it keeps, or ""."""
    is_reg: bool = False
    """That folder lies in one of regularisation images."""
    ready: dict[str, tuple[Path, str]] = field(default_factory=dict)

    @property
    def images(self) -> list[str]:
        """The endings that are images, controls and masks among them."""
        return [ending for ending in self.ready if ending not in CAPTIONS]

    @property
    def is_pair(self) -> bool:
        return any(ending.startswith(CONTROL) for ending in self.ready)

    @property
    def extras(self) -> set[str]:
        """What stands between the name and the ending of its images."""
        return {ending.rpartition(".")[0] for ending in self.images}

    def take(self, other: Group, extra: str) -> None:
        """Takes what belongs to this one's image; of captions those that it has none of, as training does."""
        for ending, ready in other.ready.items():
            self.ready.setdefault(ending if ending in CAPTIONS else f"{extra}{ending}", ready)


def joined(groups: Iterable[Group]) -> tuple[list[Group], list[Group]]:
    """The groups that a data set takes, and those in folders of controls or masks whose image is missing."""
    found = list(groups)
    found, alone = _by_folders(found)
    return _by_words(_by_marks(found)), alone


def _extra(folder: str) -> str | None:
    """What the files of a folder are to the targets beside it: "" for the targets themselves, None for anything else."""
    name = folder.casefold()
    if name in (*TARGET_FOLDERS, *_AFTER):
        return ""
    if name in (*CONTROL_FOLDERS, *_BEFORE):
        return CONTROL
    if name in MASK_FOLDERS:
        return MASK_LABEL  # training takes it for one also while masks are not read
    match = NUMBERED_FOLDER.match(name)
    return f"{CONTROL}_{match[2]}" if match else None


def _by_folders(groups: list[Group]) -> tuple[list[Group], list[Group]]:
    """Puts what lies in folders of controls and masks to the targets beside them."""
    found: dict[str, dict[str, dict[str, Group]]] = {}
    for group in groups:
        above, _, folder = group.place.rpartition("/")
        extra = _extra(folder)
        if extra is not None:
            found.setdefault(above, {}).setdefault(extra, {})[group.stem.casefold()] = group
    gone: set[int] = set()
    alone = []
    for members in found.values():
        targets = {stem: group for stem, group in members.pop("", {}).items() if group.images}
        for extra, others in members.items():
            if targets.keys().isdisjoint(others):
                continue  # folders of these names, and nothing in them that belongs together
            for stem, group in others.items():
                gone.add(id(group))
                if stem in targets:
                    targets[stem].take(group, extra)
                else:
                    alone.append(group)
    return [group for group in groups if id(group) not in gone], alone


def _by_marks(groups: list[Group]) -> list[Group]:
    """Puts `a_control_1.png` and `a_mask.png` to `a.png`; one with a caption of its own is an image as others."""
    known = {(group.place, group.stem): group for group in groups}
    left = []
    for group in groups:
        match = EXTRA.fullmatch(group.stem)
        base = known.get((group.place, match[1])) if match and len(group.images) == len(group.ready) else None
        if match and base is not None and base.images:
            base.take(group, match[2])
        else:
            left.append(group)
    return left


def _by_words(groups: list[Group]) -> list[Group]:
    """Puts `a_before.png` to `a_after.png`, which is called `a` then, unless another image is."""
    known = {(group.place, group.stem): group for group in groups}
    edited = {(group.place, match[1]): group for group in groups if group.images and (match := _EDITED.fullmatch(group.stem))}
    gone: set[int] = set()
    for group in groups:
        match = _UNEDITED.fullmatch(group.stem)
        if match is None or not group.images or (group.place, match[1]) not in edited:
            continue
        bare = known.get((group.place, match[1]))
        if bare is not None and bare.images:
            continue
        target = edited[group.place, match[1]]
        target.stem = match[1]
        for other in (bare, group):
            if other is not None and id(other) not in gone:
                target.take(other, CONTROL)
                gone.add(id(other))
    return [group for group in groups if id(group) not in gone]
