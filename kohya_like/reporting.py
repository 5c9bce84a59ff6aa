"""A run as one HTML file to be shared: settings, curve, previews, and what it was trained with, in a language of the page. It has no
script, asks nobody for anything, and no path of this computer stands in it."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from PIL import Image

from sd_scripts.runs.resume import meta_of
from sd_scripts.schema import flat
from sd_scripts.schema.labels import label

from . import desk, monitor
from .catalogues import words
from .comparing import OF_EVERY_RUN, reached
from .hiding import Hidden
from .supervisor import Job

SIDE = 384
LOSSLESS_SIDE = 256
MOST_STEPS, MOST_PROMPTS = 6, 12
WIDTH, HEIGHT, LEFT, TOP, BOTTOM = 760, 260, 76, 14, 28
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_STYLE = """
:root { color-scheme: light dark; --soft: #5b6676; --line: #d6dbe3; --loss: #0f766e; --held: #b45309; }
@media (prefers-color-scheme: dark) { :root { --soft: #a7b2c3; --line: #2c3648; --loss: #4fd1c1; --held: #f5b042; } }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 0 auto; padding: 20px 16px; overflow-wrap: anywhere; }
h1 { font-size: 22px; margin: 0; } h2 { font-size: 16px; margin: 28px 0 8px; }
.soft, th { color: var(--soft); } .notes { white-space: pre-wrap; }
table { border-collapse: collapse; width: 100%; } th, td { text-align: left; padding: 5px 10px 5px 0; }
th, td { vertical-align: top; border-bottom: 1px solid var(--line); } th { font-weight: 400; width: 38%; } code { font-size: 12px; }
svg { width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 12px; } .grid { stroke: var(--line); }
@media (max-width: 600px) { svg text { font-size: 22px; } }
.raw, .smooth { fill: none; stroke: var(--loss); stroke-width: 2; } .raw { stroke-width: 1; opacity: .4; } .held { fill: var(--held); }
.images { overflow-x: auto; } .images td, .images th { width: auto; border: 0; padding: 4px; }
img { display: block; width: 150px; border-radius: 6px; } img.tiny { image-rendering: pixelated; }
"""


_LOSSES = {"loss": "Loss", "lowest held-out loss": "Lowest held-out loss"}
_TIMES = {"trained seconds": "Training time", "paused seconds": "In pauses"}
_RECEIPTS = {"fingerprint": "Fingerprint of the settings", "dataset_hash": "Images and captions", "git": "Revision", "seed": "Seed"}


def page(job: Job, language: str = "en") -> bytes:
    """The report of a run, whatever state it is in, in a language of the page."""
    return _Report(job, language).page()


class _Report:
    """What a report is made of. Settings, warnings and the sentences of a run are as they were written."""

    def __init__(self, job: Job, language: str) -> None:
        self.job, self.hidden, self.progress = job, Hidden(job), monitor.Progress()
        self.progress.fold(job.run.events()[0])
        self.words = words(language)
        self.language = {"zh": "zh-Hans"}.get(language, language) if self.words else "en"

    def say(self, text: str, *values: object) -> str:
        """A text of the report in its language; {1}, {2} ... stand for values."""
        return re.sub(r"\{(\d)\}", lambda hole: str(values[int(hole[1]) - 1]), self.words.get(text, text))

    def page(self) -> bytes:
        job, said = self.job, desk.read(self.job.path)
        name = said.called or job.name
        about = [*([job.name] if said.called else []), self.say("Waiting" if job.state == "queued" else job.state.capitalize()), *said.tags]
        parts = [
            f"<h1>{_text(name)}</h1>",
            f'<p class="soft">{_text(", ".join(about))}</p>',
            f'<p class="notes">{_text(self.hidden.out_of(said.notes))}</p>' if said.notes else "",
            self.section("What it reached", _table(self.figures())),
            self.section("Loss", self.curve()),
            self.section("Previews", self.previews()),
            *self.settings(),
            self.section("Warnings", _table((self.hidden.out_of(text), f"{count} x") for text, count in self.progress.warnings.items())),
            self.section("Receipts", _table(self.receipts())),
        ]
        head = (
            '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><title>{_text(name)}</title><style>{_STYLE}</style>'
        )
        text = f'<!doctype html><html lang="{self.language}">{head}{"".join(parts)}</html>\n'
        return text.encode("utf-8", "replace")

    def section(self, title: str, inside: str) -> str:
        return f"<h2>{_text(self.say(title))}</h2>{inside}" if inside else ""

    def figures(self) -> list[tuple[str, str]]:
        told = reached(self.job, self.progress)
        known = {key: value for key, value in told.items() if value is not None}
        steps = self.say("{1} of {2}", told["steps"], told["of steps"]) if told["of steps"] else str(told["steps"])
        rows = [(self.say("Steps"), steps)]
        rows += [(self.say(text), f"{known[key]:.5g}") for key, text in _LOSSES.items() if key in known]
        rows += [(self.say(text), str(timedelta(seconds=round(known[key])))) for key, text in _TIMES.items() if key in known]
        rows += [(self.say("Time of a step"), f"{told['seconds per step']:.3g} s")] if told["seconds per step"] else []
        return rows + ([(self.say("Peak memory"), f"{told['peak GiB']:.3g} GiB")] if told["peak GiB"] else [])

    def curve(self) -> str:
        """The loss over the steps, drawn; empty before there is any."""
        points = self.progress.curve.points
        if not points:
            return ""
        values = sorted(
            [*(point.loss for point in points), *(point.smooth for point in points), *(loss for _, loss in self.progress.validation)]
        )
        # The wildest of them must not flatten all others.
        low, high = values[0], values[min(len(values) - 1, int(0.995 * len(values)))]
        high = high if high > low else low + (abs(low) or 1.0) * 0.1
        first, last = points[0].step, max(points[-1].step, points[0].step + 1)

        def place(step: int, value: float) -> str:
            across = LEFT + (WIDTH - LEFT - 8) * (min(max(step, first), last) - first) / (last - first)
            down = (HEIGHT - BOTTOM) - (HEIGHT - BOTTOM - TOP) * (min(max(value, low), high) - low) / (high - low)
            return f"{across:.1f},{down:.1f}"

        def line(kind: str, found: Sequence[float]) -> str:
            places = " ".join(place(point.step, value) for point, value in zip(points, found, strict=True))
            return f'<polyline class="{kind}" points="{places}"/>'

        marks = [low + (high - low) * share / 4 for share in range(5)]
        heights = [place(first, value).split(",")[1] for value in marks]
        grid = "".join(f'<line class="grid" x1="{LEFT}" x2="{WIDTH}" y1="{at}" y2="{at}"/>' for at in heights)
        labels = "".join(
            f'<text x="0" y="{at}" dominant-baseline="middle">{value:.3g}</text>' for at, value in zip(heights, marks, strict=True)
        )
        held = "".join(
            '<circle class="held" r="4" cx="{}" cy="{}"/>'.format(*place(step, loss).split(",")) for step, loss in self.progress.validation
        )
        begin, end = (_text(self.say("step {1}", step)) for step in (first, last))
        ends = f'<text x="{LEFT}" y="{HEIGHT - 6}">{begin}</text><text x="{WIDTH}" y="{HEIGHT - 6}" text-anchor="end">{end}</text>'
        drawn = line("raw", [point.loss for point in points]) + line("smooth", [point.smooth for point in points]) + held
        about = self.say("thin: as logged; thick: smoothed; dots: held-out loss" if held else "thin: as logged; thick: smoothed")
        drawing = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_text(self.say("Loss"))}">{grid}{labels}{ends}{drawn}</svg>'
        return f'{drawing}<p class="soft">{_text(about)}</p>'

    def previews(self) -> str:
        """The prompts below one another, some steps beside one another, the first and the last among them."""
        steps = sorted({step for step, _ in self.progress.samples})
        count = min(MOST_STEPS, len(steps))
        chosen = sorted({steps[round(place * (len(steps) - 1) / max(1, count - 1))] for place in range(count)})
        # A prompt may be another one from some step on.
        prompts = sorted({(index, event.prompt) for (step, index), event in self.progress.samples.items() if step in chosen})[:MOST_PROMPTS]
        rows = []
        for index, prompt in prompts:
            cells = []
            for step in chosen:
                event = self.progress.samples.get((step, index))
                drawn = event is not None and event.prompt == prompt
                image = _image(self.job.run.samples / Path(event.file).name, self.say("step {1}", step)) if event and drawn else ""
                cells.append(f"<td>{image}</td>")
            rows.append(f'<tr><th colspan="{len(chosen)}">{_text(self.hidden.out_of(prompt))}</th></tr><tr>{"".join(cells)}</tr>')
        head = "".join(f'<th scope="col">{_text(self.say("step {1}", step))}</th>' for step in chosen)
        return f'<div class="images"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>' if rows else ""

    def settings(self) -> Iterator[str]:
        """What differs from the defaults, and folded away, everything."""
        options = self.hidden.options
        if options is None:
            gone = self.say("They cannot be read any more.")
            yield self.section("Settings", f"<p>{_text(gone)}</p>")
            return
        known, family = flat.fields(type(options)), options.family

        def rows(values: Mapping[str, Any]) -> list[tuple[str, str]]:
            shown = {name: value for name, value in values.items() if name not in OF_EVERY_RUN}
            return [
                (f"{self.say(label(name, family) or name)} ({name})", self.hidden.of_option(name, value, known[name]))
                for name, value in shown.items()
            ]

        kind, rest = (self.say("Model family and training mode"), options.label), self.say("All settings")
        yield self.section("Settings that are not the defaults", _table([kind, *rows(flat.changed(options))]))
        yield f"<details><summary>{_text(rest)}</summary>{_table(rows(flat.flatten(options)))}</details>"

    def receipts(self) -> Iterator[tuple[str, str]]:
        """With what it was trained: enough to do it again, and to know the files again."""
        meta = meta_of(self.job.run)
        if self.progress.started and self.progress.started.time:
            yield self.say("Started"), datetime.fromtimestamp(self.progress.started.time).astimezone().strftime("%Y-%m-%d %H:%M %z")
        for name, text in _RECEIPTS.items():
            if meta.get(name) is not None:
                yield self.say(text), self.hidden.out_of(str(meta[name]))
        for name, text in (("versions", "Version of {1}"), ("model_files", "Hash of {1}")):
            given = meta.get(name)
            for each, value in given.items() if isinstance(given, dict) else ():
                told = self.hidden.out_of(value if isinstance(value, str) else json.dumps(value))
                yield self.say(text, self.hidden.out_of(str(each))), told
        devices = meta.get("devices")
        for device in devices if isinstance(devices, list) else ():
            yield "GPU", self.hidden.out_of(str(device.get("name", "")) if isinstance(device, dict) else "")
        for event in self.progress.saved:
            file = self.job.path / event.file
            if event.what != "state" and file.is_file():
                step = self.say("step {1}", event.step)
                yield f"{Path(event.file).name}, {step}", self.say("{1} bytes", f"{file.stat().st_size:,}")


def _text(text: object) -> str:
    return html.escape(str(text))


def _table(rows: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> str:
    lines = "".join(f'<tr><th scope="row">{_text(name)}</th><td>{_text(value)}</td></tr>' for name, value in rows)
    return f"<table>{lines}</table>" if lines else ""


def _image(file: Path, words: str) -> str:
    """An image inside the page; empty where it is not there any more, or cannot be read."""
    try:
        with Image.open(file) as image:
            small = image.convert("RGB")
    except (OSError, Image.DecompressionBombError):
        return ""
    tiny = max(small.size) < LOSSLESS_SIDE
    small.thumbnail((SIDE, SIDE))
    stream = io.BytesIO()
    small.save(stream, format="WEBP", **({"lossless": True} if tiny else {"quality": 85}))
    data = base64.b64encode(stream.getvalue()).decode()
    return f'<img class="{"tiny" if tiny else ""}" alt="{_text(words)}" src="data:image/webp;base64,{data}">'
