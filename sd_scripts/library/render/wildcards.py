"""Words of a prompt that are drawn anew for each image: {a|b} is one of its parts, __name__ a line of the file name.txt in a folder.

What is drawn follows from the image's seed, so that the same seed gives the same words.
"""

from __future__ import annotations

import random
import re
from functools import partial
from pathlib import Path

from sd_scripts.dataset.captions import choose_wildcards
from sd_scripts.dataset.draws import random_for
from sd_scripts.schema.errors import OptionError, Problem

OPTION = "wildcard_dir"
_NAME = re.compile(r"__([\w][\w./-]*?)__")
_PARTS = re.compile(r"\{[^{}]*\|[^{}]*\}")
_DEEPEST = 10
"""Files that name files that name files ..."""


def drawn(text: str, folder: str, seed: int, stream: str) -> str:
    """The text with every wildcard drawn. folder: of the files; "" leaves __name__ as it is. stream keeps the texts of an image apart.

    Raises OptionError for a file that is not there, is empty, or names itself.
    """
    rng = random_for(seed, 0, f"wildcards/{stream}")
    for _ in range(_DEEPEST):
        if not folder or not _NAME.search(text):
            # Once, because {{a|b}} becomes {a|b}.
            return choose_wildcards(text, rng) if _PARTS.search(text) else text
        text = _NAME.sub(partial(_line, Path(folder).expanduser(), rng), text)
    why = f"the files name one another in a circle, at {text[:80]!r}"
    raise OptionError(Problem(OPTION, f"{OPTION}: {why}; let one of them have plain lines"))


def _line(folder: Path, rng: random.Random, match: re.Match[str]) -> str:
    """One line of the file that a wildcard names; comments and empty lines are none."""
    file = folder / f"{match[1]}.txt"
    if not file.resolve().is_relative_to(folder.resolve()):
        raise OptionError(Problem(OPTION, f"{OPTION}: {match[0]} leads out of {folder}; name a file inside of it"))
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as err:
        why = err.strerror if isinstance(err, OSError) else "it is no text in UTF-8"
        raise OptionError(Problem(OPTION, f"{OPTION}: {match[0]} needs the file {file}, which cannot be read: {why}")) from err
    known = [line for line in lines if line and not line.startswith("#")]
    if not known:
        raise OptionError(Problem(OPTION, f"{OPTION}: {file} has no line to draw; write one choice a line"))
    return rng.choice(known)
