"""Every kind of file that is read, of each program: what is added tomorrow is unknown, what is damaged is answered with a sentence."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kohya_like import form, importers
from kohya_like.importers import Imported, Opened
from sd_scripts.families import RUNS
from sd_scripts.schema import flat
from sd_scripts.schema.errors import OptionError
from sd_scripts.schema.runs import RunOptions

TOMORROW = "made_up_today"


@dataclass(frozen=True)
class Kind:
    """A kind of file, with a key that is in none of today's."""

    name: str
    key: str
    """How the report calls the key that is added."""
    run: type[RunOptions] | None
    """The form's kind of run, for a file that describes data alone."""
    text: str
    """What is added stands between marks."""

    @property
    def plain(self) -> bytes:
        return re.sub("⟪.*?⟫", "", self.text, flags=re.DOTALL).encode()

    @property
    def added(self) -> bytes:
        return self.text.replace("⟪", "").replace("⟫", "").encode()


def _kinds() -> Iterator[Kind]:
    text = (Path(__file__).parents[1] / "data" / "importer_kinds.txt").read_text(encoding="utf-8")
    for piece in text.split("\n=== ")[1:]:
        head, _, body = piece.partition("\n")
        name, key, *run = head.split()
        yield Kind(name, key, RUNS[run[0], run[1]] if run else None, body.rstrip("\n") + "\n")


KINDS = tuple(_kinds())


def _read(kind: Kind, data: bytes) -> Imported:
    return importers.read(kind.name, data, Opened(kind.run))


def _checked(found: Imported) -> None:
    """It builds with what it misses, the form can show it, and each key has one row with a sentence."""
    named = {sentence.partition(":")[0] for sentence in found.missing}
    given = {option: value for option, value in found.values.items() if value is not None or not found.adds}
    images = {} if found.values.get("dataset_config") else {"train_data_dir": "toy:star"}
    needed = {"pretrained_model_name_or_path": "toy", **images} if found.adds else dict.fromkeys(named, "toy")
    flat.build(found.run, {**needed, **given})
    form.texts(found.run, found.values)
    keys = [row.key for row in found.rows]
    assert len(keys) == len(set(keys)) and all(row.text for row in found.rows)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_key_that_is_added_tomorrow_is_unknown_in_every_kind_of_file(kind: Kind) -> None:
    found = _read(kind, kind.added)
    _checked(found)
    verdicts = {row.key: (row.verdict, row.text) for row in found.rows}
    # In a file of ours it is a mistake, and not another program's later version.
    assert verdicts[kind.key][0] == ("not supported" if kind.name.startswith("ours") else "unknown"), verdicts[kind.key]
    plain = _read(kind, kind.plain)
    _checked(plain)
    assert not [row for row in plain.rows if row.verdict == "unknown"]


_PIECES = [b"\x00", b"\xff", *(piece.encode() for piece in "{ ] : ' \" 1e999 - null [[ &a*a \\ ^ ` $(x ${A % -- =".split()), b"\n", b": "]
_VALUES = (b"true", b"[]", b"{}", b"nan", b"-1", b"'x'", b"[1, [2]]", b"1e400", b"~", b'"\\ud800"', b"10" * 40, b"0", b"''")


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A file with some bytes, a word or a whole line changed, doubled, or gone."""
    for _ in range(rng.randint(1, 2)):
        place = rng.randrange(len(data) or 1)
        kind = rng.randrange(7)
        if kind == 0:
            data = data[:place] + data[place + rng.randint(1, 40) :]
        elif kind == 1:
            data = data[:place] + rng.choice(_PIECES) + data[place:]
        elif kind == 2:
            data = data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]
        elif kind == 3:
            data = data[:place]
        else:
            cuts = data.split(b"\n" if kind < 6 else b" ")
            index = rng.randrange(len(cuts))
            head, sign, _ = cuts[index].partition(b"=" if b"=" in cuts[index] else b":")
            end = b"," if cuts[index].endswith(b",") else b""
            cuts[index] = cuts[index] * 2 if kind == 4 else head + (sign or b"") + rng.choice(_VALUES) + end
            data = (b"\n" if kind < 6 else b" ").join(cuts)
    return data


def _answered(kind: Kind, rng: random.Random, count: int) -> int:
    """How many of so many damaged files of a kind are read; the others are refused in a sentence."""
    read = 0
    for _ in range(count):
        data = damaged(kind.plain, rng)
        try:
            found = _read(kind, data)
        except OptionError as err:
            assert str(err).strip() and "Traceback" not in str(err) and "\x00" not in str(err)
            continue
        read += 1
        try:
            _checked(found)
        except OptionError as err:
            raise AssertionError(f"{kind.name}: {data!r}: {err}; missing {found.missing}") from err
    return read


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_damaged_files_of_every_kind_are_answered_with_sentences(kind: Kind) -> None:
    assert _answered(kind, random.Random(kind.name), 12) >= 0


_PROGRAMS: dict[str, Callable[[str], bool]] = {
    "kohya": lambda name: name in ("page.json", "script.toml", "config.toml", "kohya-data.toml"),
    "lines": lambda name: name.endswith((".sh", ".bat", ".ps1", ".txt")),
    "musubi-tuner": lambda name: name.startswith("musubi") and name.endswith(".toml"),
    "OneTrainer": lambda name: name in ("one.json", "concepts.json", "samples.json"),
    "SimpleTuner": lambda name: name.startswith("simple") or name in ("backends.json", "lycoris.json"),
    "ai-toolkit": lambda name: name.startswith("job"),
    "diffusion-pipe": lambda name: name.startswith("pipe"),
    "families": lambda name: name in ("acrf.toml", "qwen.yaml"),
    "ours": lambda name: name == "ours.toml",
}


@pytest.mark.long
@pytest.mark.parametrize("program", _PROGRAMS)
def test_500_damaged_files_of_each_program_are_answered_with_sentences(program: str) -> None:
    kinds = [kind for kind in KINDS if _PROGRAMS[program](kind.name)]
    seed = random.getrandbits(32)
    rng = random.Random(seed)
    try:
        assert sum(_answered(kind, rng, -(-500 // len(kinds))) for kind in kinds) > 20
    except BaseException as err:
        raise AssertionError(f"drawn by {seed}: {err!r}") from err


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.run], ids=lambda kind: kind.name)
def test_what_describes_data_alone_is_read_or_refused_for_every_kind_of_run(kind: Kind) -> None:
    for run in RUNS.values():
        for text in (kind.plain, kind.plain.replace(b'"linear_dim": 64', b'"linear_dim": 10000')):
            try:
                _checked(importers.read(kind.name, text, Opened(run)))
            except OptionError as err:
                assert run.label in str(err)
