"""What a run was trained on, image by image, so that a later start can say what has changed since."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .plan import Plan

FILE = "images.json"
"""Its name in a run folder."""
Contents = Mapping[str, list[str]]
_SHOWN = 3


def contents_of(plan: Plan) -> dict[str, list[str]]:
    """Short hashes of each image with its mask and control images, of its caption, and of its weights, by subset and name."""
    return {
        f"{image.subset}/{image.name}": [
            _short([image.identity or image.num_bytes, image.mask_identity, [control.identity for control in image.controls]]),
            _short(image.caption),
            _short(image.weights),
        ]
        for image in plan.images
    }


def _short(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=6).hexdigest()


def changes(old: object, new: Contents) -> str:
    """What changed between two data sets, in words: counts and the first names."""
    if not isinstance(old, dict) or not new:
        return "images, captions or their settings have changed (which ones is not known)"
    both = [name for name in new if name in old]
    found = {
        "changed": [name for name in both if new[name][:1] != old[name][:1]],
        "with another caption": [name for name in both if new[name][1:2] != old[name][1:2]],
        "with other weights": [name for name in both if new[name][2:] != old[name][2:]],
        "new": [name for name in new if name not in old],
        "gone": [name for name in old if name not in new],
    }
    told = [_counted(names, what) for what, names in found.items() if names]
    return ", ".join(told) or "the settings of the data set have changed, such as repeats or subsets"


def _counted(names: list[str], what: str) -> str:
    shown = ", ".join(name.partition("/")[2] for name in names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{len(names)} image{'s' * (len(names) > 1)} {what} ({shown}{more})"
