"""What is kept of a step whose loss or gradient is not a finite number: a report of its samples, and copies of their images."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from sd_scripts.library.core.protocols import Batch
from sd_scripts.schema.files import write_atomically, written_aside

MOST_IMAGES = 64
"""Copied by each process."""


@dataclass(frozen=True)
class ShownMicroBatch:
    """One micro-batch that was trained on, with the loss of each sample (B,), and the times (B,) in [0, 1] where they are known."""

    batch: Batch
    loss: Tensor
    times: Tensor | None

    @classmethod
    def of(cls, batch: Batch, loss: Tensor, seen: Sequence[Tensor]) -> ShownMicroBatch:
        """seen: the times that the network was called with. Conditions and references, which may be large, are let go."""
        kept = replace(batch, conditions=[], towards=[], references=[])
        return cls(kept, loss.detach(), times_among(seen, len(batch.numbers)))


def times_among(seen: Sequence[Tensor], count: int) -> Tensor | None:
    """The times (count,) of a batch's samples among those that a network was called with; None where it was called with none."""
    return next((t.detach() for t in seen if len(t) == count), None)


def write_report(folder: Path, shown: Sequence[ShownMicroBatch], process: int, facts: Mapping[str, object]) -> Path | None:
    """Writes the samples of one process into `folder`, and what holds for the whole step; the folder, or None where nothing can be written.

    report.json is that of the first process, report-<process>.json that of another. Numbers that are not finite are texts in it.
    """
    samples: list[dict[str, object]] = []
    # A disk that is full or gone must not hide why training ended.
    with suppress(OSError):
        for one in shown:
            for row, number in enumerate(one.batch.numbers.tolist()):
                x0 = one.batch.x0[row].float()
                # torch's minimum and maximum are nan where one value is; the finite ones are told as well.
                finite = x0[x0.isfinite()]
                samples.append(
                    {
                        "number": number,
                        "file": one.batch.names[row],
                        "image": _copied(folder, Path(one.batch.names[row]), number) if len(samples) < MOST_IMAGES else None,
                        "caption": one.batch.captions[row] if one.batch.captions else None,
                        "loss": float(one.loss[row]),
                        "time": None if one.times is None else float(one.times[row]),
                        "weight": float(one.batch.weights[row]),
                        "x0": {
                            "mean": float(x0.mean()),
                            "std": float(x0.std(correction=0)),
                            "min": float(finite.min()) if len(finite) else math.nan,
                            "max": float(finite.max()) if len(finite) else math.nan,
                            "not_finite": x0.numel() - len(finite),
                        },
                    }
                )
        report = folder / ("report.json" if process == 0 else f"report-{process}.json")
        write_atomically(report, json.dumps(_plain({**facts, "process": process, "samples": samples}), indent=1, ensure_ascii=False))
        return folder
    return None


def _copied(folder: Path, image: Path, number: int) -> str | None:
    """The name of the copy of an image; None where there is no such file."""
    if not image.is_file():
        return None
    name = f"{number:08d}-{image.name}"
    with written_aside(folder / name) as aside:
        shutil.copyfile(image, aside)
    return name


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value
